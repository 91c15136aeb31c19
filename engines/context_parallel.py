"""Rules of context parallelism for both engines: group sizes, and limits on lengths and batches.

`engine.context_parallel_size` is either the number of ranks that share every sequence, or "auto".
With "auto", the plan of each batch chooses a group size for every micro-batch (dynamic context
parallelism).
"""

from typing import NamedTuple

from omegaconf import DictConfig

from config import InputError


def has_dynamic_cp(engine: DictConfig) -> bool:
    """Return whether group sizes are chosen per batch."""
    return engine.context_parallel_size == "auto"


def shares_sequences(engine: DictConfig) -> bool:
    """Return whether several ranks may work on one sequence."""
    return engine.context_parallel_size != 1


def fixed_cp_size(engine: DictConfig) -> int:
    """Return how many ranks share every sequence; 1 if group sizes are chosen per batch."""
    if has_dynamic_cp(engine):
        return 1
    return engine.context_parallel_size


class SequenceLimit(NamedTuple):
    """The longest sequence that a layout can train on.

    num_tokens  the limit
    reason      the configuration keys that set it, for error messages
    """

    num_tokens: int
    reason: str


def sequence_limit(config: DictConfig, world_size: int) -> SequenceLimit:
    """Return the length that no sequence may exceed, and the keys that limit it."""
    engine = config.engine
    max_tokens = config.data.max_tokens_per_micro_batch
    reason = f"data.max_tokens_per_micro_batch={max_tokens}"
    if not has_dynamic_cp(engine):
        return SequenceLimit(max_tokens, reason)

    tensor_parallel_size = engine.get("tensor_model_parallel_size", 1)
    pipeline_parallel_size = engine.get("pipeline_model_parallel_size", 1)
    num_ranks = world_size // (tensor_parallel_size * pipeline_parallel_size)
    largest_group = 1 << max(0, num_ranks.bit_length() - 1)
    return SequenceLimit(max_tokens * largest_group, f"{reason} on each of {largest_group} ranks")


def check_batch_size(config: DictConfig, num_dp_ranks: int) -> None:
    """Raise InputError if a step has fewer sequences than data-parallel ranks.

    With dynamic context parallelism there is no such limit, since ranks can share sequences.
    """
    if has_dynamic_cp(config.engine):
        return
    num_sequences = config.data.train_batch_size
    reason = f"data.train_batch_size={num_sequences}"
    if "rollout" in config:
        num_sequences *= config.rollout.n
        reason = f"{reason} x rollout.n={config.rollout.n}"
    if num_sequences < num_dp_ranks:
        raise InputError(
            f"{reason} is less than the {num_dp_ranks} data-parallel ranks: "
            "raise it, or use fewer ranks"
        )


def check_micro_batch_cap(config: DictConfig, multiple: int) -> None:
    """Raise InputError if padding a sequence as long as the token cap would exceed the cap.

    multiple: this layout pads every sequence to a multiple of this number of tokens.
    """
    max_tokens = config.data.max_tokens_per_micro_batch
    if max_tokens % multiple:
        raise InputError(
            f"data.max_tokens_per_micro_batch={max_tokens} must be a multiple of {multiple}: "
            "this layout pads the length of every sequence to such a multiple"
        )
