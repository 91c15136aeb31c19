"""Check, before any model is loaded, that the open groups of a checkpoint can continue."""

from pathlib import Path

from omegaconf import DictConfig

from engines.checkpoint.checkpointer import read_files
from rollout.partial.episodes import read_episodes
from rollout.partial.groups import from_bytes
from rollout.partial.responses import check_can_continue, check_routes
from rollout.vllm.sampling import count_candidates


def check_open_groups(config: DictConfig, checkpoint: Path | None, vocab_size: int) -> None:
    """Raise InputError for responses or episodes that do not fit the current settings.

    Args:
        checkpoint: that the run continues from; None: nothing is checked.
    """
    if checkpoint is None or not config.rollout.partial.enable:
        return
    num_candidates = count_candidates(config.rollout, vocab_size)
    for content in read_files(checkpoint):
        if config.rollout.episode:
            read_episodes(content, config.rollout.episode)
        else:
            _, groups = from_bytes(content)
            check_can_continue(groups, config.rollout, num_candidates)
            check_routes(groups, config.rollout)
