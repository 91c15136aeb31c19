"""A check that vLLM and the trainer compute the same log-probabilities, adapters included.

It compares the log-probabilities of a few fixed tokens. It detects adapters that are not applied or
are applied twice.
"""

import torch
from omegaconf import DictConfig
from torch import Tensor

from data.batching.batch import Batch
from engines.base import Engine
from engines.model.hf import read_hf_config
from rollout.vllm.engine import Rollout

NUM_SEQUENCES = 4
LENGTH = 9  # shorter than a block of the KV cache, so that the prefix cache stores none
# The largest root mean square difference that rounding may cause, in nats, by compute dtype. After
# random tokens, distributions are flat, and in bfloat16 logits differ more than after a model's own
# responses.
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.25}
NUM_SIGMAS = 6  # so a false alarm is expected once in 1e7 syncs


class Probe:
    """Records the trainer's log-probabilities, and later compares vLLM's with them.

    The trainer's parameters have left the device by the time vLLM can answer.
    """

    def __init__(self, config: DictConfig):
        vocab_size = read_hf_config(config.model.path).get_text_config().vocab_size
        length = min(LENGTH, config.data.max_prompt_length + config.rollout.max_tokens)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (NUM_SEQUENCES * length,), generator=generator)
        self.batch = Batch(ids, torch.arange(0, len(ids) + 1, length))
        self.batch.fields["loss_mask"] = (self.batch.position_ids > 0).float()
        self.temperature = config.rollout.temperature
        self.max_gap = MAX_GAP[config.engine.compute_dtype]
        self.trainer_log_probs: Tensor | None = None
        self.base_log_probs: Tensor | None = None  # without adapters; these never change

    def record_trainer(self, engine: Engine) -> None:
        """Record the trainer's log-probabilities and, at the first call, its frozen base's.

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
        """Raise RuntimeError unless vLLM's log-probabilities are the trainer's up to rounding.

        The change of the log-probabilities by the adapters is a vector. The component of vLLM's
        error along this vector is -1 times the vector if adapters are not applied, and about +1
        times the vector if they are applied twice. All other components of the error come from
        rounding, and show how large rounding errors are.
        """
        vllm_log_probs = rollout.log_probs(self.batch, self.temperature).double()
        error = vllm_log_probs - self.trainer_log_probs
        change = self.trainer_log_probs - self.base_log_probs
        change_size = change.norm()
        gap = error.square().mean().sqrt()
        error_along = error @ change / change_size if change_size > 0 else torch.zeros(())
        squares_across = (error.square().sum() - error_along.square()).clamp(min=0)
        rounding = (squares_across / (len(error) - 1)).sqrt()
        is_adapter_wrong = error_along.abs() > change_size / 2 + NUM_SIGMAS * rounding
        # `not <=`, so that a gap of NaN is an error, too.
        if not gap <= self.max_gap or is_adapter_wrong:
            applied_share = 1 + error_along / change_size
            raise RuntimeError(
                f"vLLM does not compute what the trainer does: log-probabilities are {gap:.3g} "
                f"nats apart (root mean square) and contain {applied_share:.2f} of the adapters' "
                "effect (1: right, 0: not applied, 2: applied twice)"
            )
