"""What stands behind a Hugging Face model's last hidden state: log-probabilities of words, or values of states."""

import torch
from torch import Tensor, nn

from engines.logprobs import linear_log_probs


class PackedCausalLM(nn.Module):
    """The Hugging Face model with its last matrix product replaced by linear_log_probs; the root that FSDP shards."""

    dtypes, num_differentiable = (torch.float32, torch.float32, torch.bool), 2

    def __init__(self, hf: nn.Module, chunk_size: int, compiled: bool, temperature: float):
        super().__init__()
        self.hf, self.chunk_size, self.compiled, self.temperature = hf, chunk_size, compiled, temperature

    def forward(self, input_ids: Tensor, position_ids: Tensor, place: Tensor, targets: Tensor, **attention):
        """input_ids, position_ids [rows, length]; at each of the k flat positions `place` [k], the log-probability of the
        next token `targets` [k], the entropy, and whether it is the likeliest, each [k]."""
        hidden = self.hf.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **attention)[0]
        return linear_log_probs(hidden.flatten(0, 1).index_select(0, place), self.hf.get_output_embeddings().weight,
                                targets, self.temperature, self.chunk_size, self.compiled)


class PackedValueModel(nn.Module):
    """The Hugging Face model with an output matrix of one row: a value of every state."""

    dtypes, num_differentiable = (torch.float32,), 1

    def __init__(self, hf: nn.Module):
        super().__init__()
        self.hf = hf

    def forward(self, input_ids: Tensor, position_ids: Tensor, place: Tensor, targets: Tensor, **attention):
        """As PackedCausalLM; returns ([k] fp32,), the value of the state that each place ends, before its next token."""
        hidden = self.hf.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **attention)[0]
        hidden = hidden.flatten(0, 1).index_select(0, place)
        return (nn.functional.linear(hidden, self.hf.get_output_embeddings().weight)[:, 0].float(),)
