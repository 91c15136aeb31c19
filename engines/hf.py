"""What a Hugging Face model is: its configuration, its modules without memory, its number of multiplications."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from config import InputError


def read_hf_config(path: str):
    if not (Path(path) / "config.json").is_file():
        raise InputError(f"model.path={path} holds no config.json: give a directory in Hugging Face format")
    try:
        return AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError) as error:
        raise InputError(f"model.path={path}: {error}") from None


def build_on_meta(hf_config, dtype: torch.dtype, critic: bool = False, attention: str = "sdpa") -> nn.Module:
    """The model without memory for its weights; a critic's output matrix has one row."""
    if critic:
        hf_config = copy.deepcopy(hf_config)
        hf_config.tie_word_embeddings = False
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    # Batches have no padding: the padding token is a word like the others, and is learned.
    hf.get_input_embeddings().padding_idx = None
    if hf.get_output_embeddings().bias is not None:
        raise InputError("a bias on the output matrix is not supported")
    if critic:
        width = hf.get_output_embeddings().in_features
        hf.set_output_embeddings(nn.Linear(width, 1, bias=False, dtype=dtype, device="meta"))
    return hf


def keep_zero_rows(embedding: nn.Module, zero: Tensor, layout: Callable[[Tensor], Tensor] = lambda mask: mask) -> None:
    """Send no gradient through an embedding to rows that were zero at start, as transformers has it for a padding token. The
    norm of a zero vector multiplies a gradient by 1 / sqrt(eps), 1,000 in RMSNorm: one such token would be a step's gradient.

    zero [V] bool; layout: [batch, length] as the module is asked -> as it answers, without the last dimension
    """
    if zero.any():
        embedding.register_forward_hook(
            lambda _, inputs, output: torch.where(layout(zero[inputs[0]])[..., None], output.detach(), output))


def stages_of_layers(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each pipeline stage has: alike or, where that cannot be, one more in the first ones."""
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def count_flops(hf: nn.Module, hf_config) -> tuple[int, int, int, int]:
    """Multiplications of a forward pass: (in the layers per token, of experts only those that it goes to; in the output matrix
    per token whose log-probability is asked for; in causal attention per squared length: heads * dim * layers; in adapters per
    token)."""
    head = hf.get_output_embeddings().weight.numel()
    outside = {hf.get_input_embeddings().weight, hf.get_output_embeddings().weight}      # one, if they are tied
    adapters = sum(p.numel() for name, p in hf.named_parameters() if ".lora_" in name)
    matrices = sum(p.numel() for p in hf.parameters() if p.ndim > 1) - sum(p.numel() for p in outside) - adapters
    experts = sum(p.numel() for name, p in hf.named_parameters() if ".experts." in name)
    if experts:
        matrices -= experts * (hf_config.num_experts - hf_config.num_experts_per_tok) // hf_config.num_experts
    return matrices, head, hf_config.num_attention_heads * head_dim(hf_config) * hf_config.num_hidden_layers, adapters


def head_dim(hf_config) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
