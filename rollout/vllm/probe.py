"""A few fixed tokens, of which vLLM and the trainer must say the same, with adapters: neither without them nor with them
applied twice."""

import torch
from omegaconf import DictConfig
from torch import Tensor

from data.batching.packing import Batch
from engines.base import Engine
from engines.model.hf import read_hf_config
from rollout.vllm.engine import Rollout

NUM_SEQUENCES, LENGTH = (
    4,
    9,
)  # shorter than a block of the KV cache, so that nothing is kept of them
# Nats, of the root mean square: what rounding may make of it. Random words have flat distributions, whose bf16 logits differ by
# more than a model's own responses do.
BOUND = {"float32": 1e-3, "bfloat16": 0.25}
NUM_SIGMAS = 6  # by chance once in 1e7 syncs


class Probe:
    """Asked of the trainer while its parameters are on the device, and judged when vLLM can answer."""

    def __init__(self, config: DictConfig):
        vocab_size = read_hf_config(config.model.path).get_text_config().vocab_size
        length = min(LENGTH, config.data.max_prompt_length + config.rollout.max_tokens)
        ids = torch.randint(
            vocab_size, (NUM_SEQUENCES * length,), generator=torch.Generator().manual_seed(0)
        )
        self.batch = Batch(ids, torch.arange(0, len(ids) + 1, length))
        self.batch.fields["loss_mask"] = (self.batch.position_ids > 0).float()
        self.temperature, self.bound = (
            config.rollout.temperature,
            BOUND[config.engine.compute_dtype],
        )
        self.base: Tensor | None = None

    def ask(self, engine: Engine) -> None:
        """Note what the trainer says now, and once what its frozen base does. All ranks take part."""

        def log_probs():
            return (
                engine.log_probs(self.batch)[0].cpu()[self.batch.fields["loss_mask"] > 0].double()
            )

        self.adapted = log_probs()
        if self.base is None:
            with engine.without_adapters():
                self.base = log_probs()

    def judge(self, rollout: Rollout) -> None:
        """Raise RuntimeError unless vLLM's log-probabilities are the trainer's, but for rounding.

        What adapters change is a direction. Along it vLLM's answer is off by -1 of the change if adapters are not applied, and by
        about +1 if they are applied twice. What it is off by in all other directions is rounding, and says how large that is.
        """
        off = rollout.log_probs(self.batch, self.temperature).double() - self.adapted
        change = self.adapted - self.base
        size, gap = change.norm(), off.square().mean().sqrt()
        along = off @ change / size if size > 0 else torch.zeros(())
        rounding = ((off.square().sum() - along.square()).clamp(min=0) / (len(off) - 1)).sqrt()
        if not gap <= self.bound or along.abs() > size / 2 + NUM_SIGMAS * rounding:
            share = 1 + along / size
            raise RuntimeError(
                f"vLLM does not compute what the trainer does: log-probabilities are {gap:.3g} apart, and of what "
                f"adapters change, {share:.2f} is seen in them (1: right, 0: nothing, 2: they are applied twice)"
            )
