"""The common part of both engines' memory estimates: the terms, and how they add up.

The engines estimate the terms from shapes alone, in engines/fsdp/sharded_memory.py and
engines/megatron/stage_memory.py. Parameters, gradients and optimizer state are counted exactly.
Activations are an approximation, as if every layer were Llama-like.
"""

from dataclasses import dataclass, replace

from omegaconf import DictConfig

GIB = 2**30

LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered_weights": "gathered weights",
    "rounded_weights": "weights in FP8",
    "unreduced_gradients": "unreduced gradients",
    "activations": "activations",
    "image_activations": "activations of images",
    "chunk_logits": "logits of a chunk",
    "output_matrix_gradient": "gradient of the output matrix",
    "teacher_matrix": "output matrix of the teacher",
    "device_total": "device total",
    "offloaded": "offloaded to host memory",
    "teacher_outputs": "teacher outputs, host",
}
ONLY_IN_TRAINING = (
    "gradients",
    "optimizer",
    "unreduced_gradients",
    "output_matrix_gradient",
    "teacher_matrix",
    "teacher_outputs",
)
NOT_ON_DEVICE = ("device_total", "offloaded", "teacher_outputs")
MAY_BE_ON_HOST = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Estimate:
    """Bytes that one rank needs, by purpose. None: the engine or the role has no such term.

    parameters              this rank's part
    gradients               of the parameters that are trained
    optimizer               the optimizer's state
    activations             tensors that the forward pass keeps for the backward pass
    chunk_logits            logits of one chunk of tokens in the head, and their gradient
    output_matrix_gradient  the head's fp32 sum over chunks
    teacher_matrix          the output matrices of teachers, whole, in distillation without top_k
    gathered_weights        FSDP: weights that other ranks store, in the compute dtype
    rounded_weights         FSDP: weights in FP8, with engine.float8_cache_weights
    unreduced_gradients     FSDP: gradients before they are reduced, and the copy that is reduced
    image_activations       activations of the vision tower
    teacher_outputs         in host memory: a teacher's outputs for the tokens of a step
    offloaded               parameters and optimizer state that are in host memory when not in use
    is_on_host              parameters, gradients and optimizer are in host memory (cpu_offload)
    has_unknown_optimizer   the optimizer is the user's own; it is counted as if it were Adam
    is_after_backward       the peak is at the end of the backward pass, without activations
    """

    parameters: float
    gradients: float | None
    optimizer: float | None
    activations: float
    chunk_logits: float
    output_matrix_gradient: float | None
    teacher_matrix: float | None = None
    teacher_outputs: float | None = None
    gathered_weights: float | None = None
    rounded_weights: float | None = None
    unreduced_gradients: float | None = None
    image_activations: float | None = None
    offloaded: float | None = None
    is_on_host: bool = False
    has_unknown_optimizer: bool = False
    is_after_backward: bool = False

    @property
    def device_total(self) -> float:
        """The bytes of all terms that are on the device."""
        total = 0
        for name in LABELS:
            is_on_device = not (self.is_on_host and name in MAY_BE_ON_HOST)
            is_term = name not in NOT_ON_DEVICE
            if is_term and is_on_device:
                total += getattr(self, name) or 0
        return total

    def rows(self) -> dict[str, float]:
        """Return label -> bytes for all terms that exist, in printing order."""
        rows = {}
        for name, label in LABELS.items():
            if name == "optimizer" and self.has_unknown_optimizer:
                label += ", if like Adam"
            if self.is_on_host and name in MAY_BE_ON_HOST:
                label += ", host"
            num_bytes = getattr(self, name)
            if num_bytes is not None:
                rows[label] = num_bytes
        return rows

    def for_role(self, config: DictConfig, device_type: str, is_trained: bool) -> "Estimate":
        """Return the estimate for a role: without the terms it lacks, and with its offloaded bytes.

        is_trained: whether the role has gradients and an optimizer.
        """
        estimate = self
        if not is_trained:
            estimate = replace(self, **dict.fromkeys(ONLY_IN_TRAINING))
        offload = config.get("offload", {}) if device_type != "cpu" else {}
        parts = []
        for part in ("parameters", "optimizer"):
            key = part if is_trained else "reference"
            if offload.get(key):
                parts.append(part)
        if not parts:
            return estimate
        if estimate.is_on_host:  # these parts never occupy the device
            return replace(estimate, offloaded=0)
        waiting = sum(getattr(estimate, part) or 0 for part in parts)
        return replace(estimate, offloaded=waiting)
