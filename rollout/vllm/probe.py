"""Check that vLLM and the trainer compute the same log-probabilities, including adapters.

The check compares the log-probabilities of a few fixed tokens. It detects adapters that are not
applied, or that are applied twice.
"""

import torch
from omegaconf import DictConfig
from torch import Tensor

from data.batching.batch import Batch
from engines.base import Engine
from engines.model.hf import read_hf_config
from rollout.vllm.engine import Rollout

NUM_SEQUENCES = 4
LENGTH = 9  # shorter than a block of the KV cache, so the prefix cache stores none of the sequences
# By compute dtype, the largest root mean square difference in nats that rounding can explain. In
# bfloat16, random tokens need a larger bound than a model's responses, since the distributions
# after them are flat.
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.25}
# The more a model is trained, the further apart are the log-probabilities of random tokens, and
# rounding errors grow with them: runs that learned well reached a third of the standard deviation.
# Unrelated log-probabilities would differ by 1.4 times their standard deviation. Smaller errors
# show in rollout_corr/log_prob_gap, which is measured on responses.
MAX_RELATIVE_GAP = {"float32": 1e-3, "bfloat16": 0.7}
NUM_SIGMAS = 6  # about one false alarm in 1e7 syncs


class Probe:
    """Records the trainer's log-probabilities, and later compares them with vLLM's.

    This takes two calls, because the trainer's parameters are offloaded before vLLM can generate.
    """

    def __init__(self, config: DictConfig):
        vocab_size = read_hf_config(config.model.path).get_text_config().vocab_size
        length = min(LENGTH, config.data.max_prompt_length + config.rollout.max_tokens)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (NUM_SEQUENCES * length,), generator=generator)
        self.batch = Batch(ids, torch.arange(0, len(ids) + 1, length))
        self.batch.fields["loss_mask"] = (self.batch.position_ids > 0).float()
        self.temperature = config.rollout.temperature
        self.dtype = config.engine.compute_dtype
        self.trainer_log_probs: Tensor | None = None
        self.base_log_probs: Tensor | None = None  # without adapters; these never change

    def record_trainer(self, engine: Engine) -> None:
        """Record the trainer's log-probabilities. The first call also records the frozen base's.

        Called by all ranks together.
        """
        self.trainer_log_probs = self._log_probs(engine)
        if self.base_log_probs is None:
            with engine.without_adapters():
                self.base_log_probs = self._log_probs(engine)

    def _log_probs(self, engine: Engine) -> Tensor:
        is_compared = self.batch.fields["loss_mask"] > 0
        return engine.log_probs(self.batch)[0].cpu()[is_compared].double()

    def check_vllm(self, rollout: Rollout) -> None:
        """Raise RuntimeError unless vLLM's log-probabilities equal the trainer's up to rounding."""
        self.compare(rollout.log_probs(self.batch, self.temperature))

    def compare(self, vllm_log_probs: Tensor) -> None:
        """Raise RuntimeError if these differ too much from the trainer's recorded ones.

        The adapters change the log-probabilities by a vector. If vLLM does not apply the adapters,
        its error is minus this vector. If it applies them twice, its error is about this vector.
        The error in all other directions shows how large rounding errors are.

        Args:
            vllm_log_probs: [compared tokens], of the tokens of `batch` whose loss_mask is 1.
        """
        error = vllm_log_probs.double() - self.trainer_log_probs
        change = self.trainer_log_probs - self.base_log_probs
        change_size = change.norm()
        gap = error.square().mean().sqrt()
        error_along = error @ change / change_size if change_size > 0 else torch.zeros(())
        squares_across = (error.square().sum() - error_along.square()).clamp(min=0)
        rounding = (squares_across / (len(error) - 1)).sqrt()
        is_adapter_wrong = error_along.abs() > change_size / 2 + NUM_SIGMAS * rounding
        max_relative_gap = MAX_RELATIVE_GAP[self.dtype]
        max_gap = max(MAX_GAP[self.dtype], max_relative_gap * self.trainer_log_probs.std())
        # `not <=`, so that a gap of NaN is an error, too.
        if not gap <= max_gap or is_adapter_wrong:
            applied_share = 1 + error_along / change_size
            raise RuntimeError(
                "vLLM's log-probabilities differ from the trainer's: by "
                f"{gap:.3g} nats (root mean square), and they contain the effect of the adapters "
                f"{applied_share:.2f} times (1: right, 0: not applied, 2: applied twice)"
            )
