"""The tokens that end a response: those that a run teaches, and those at which vLLM stops."""

from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig

from common.end_tokens import read_end_ids
from data.chat.endings import read_ending
from data.chat.tokenizer import ChatTokenizer
from data.dataset import TokenDataset
from engines.parallel.device import on_rank0
from job.run import Run


def new_end_ids(run: Run) -> list[int]:
    """Return the end tokens that fine-tuning teaches and that the files of model.path do not name.

    Rank 0 prints them. Checkpoints and exports will name them. All ranks call this together.
    """
    return on_rank0(find_new_end_ids, run.config, run.chat_tokenizer(), run.train, run.resume_from)


def find_new_end_ids(
    config: DictConfig, chat: ChatTokenizer, train: TokenDataset, resume_from: Path | None
) -> list[int]:
    """Do the same as new_end_ids(), on rank 0.

    Args:
        resume_from: the checkpoint that the run continues from. Its end tokens are kept, since the
            run may have learned them from other data.
    """
    path = Path(config.model.path)
    named_ids = read_end_ids(path)
    ids = train.trained_ends(read_ending(chat).ids - named_ids)
    teacher = "the rows teach" if ids else "the run that is resumed has taught"
    if resume_from:
        ids |= read_end_ids(resume_from / "hf") - named_ids
    if not ids:
        return []
    tokens = ", ".join(f"{chat.decode([token])} ({token})" for token in sorted(ids))
    line = (
        f"{teacher} the model to end a turn with {tokens}, which generation_config.json and "
        f"config.json of model.path={path} do not name: "
    )
    pronoun = "it" if len(ids) == 1 else "them"
    if config.model.lora.rank:
        line += (
            f"merged exports will name {pronoun} in generation_config.json. To use the adapter "
            f"alone, add {pronoun} to eos_token_id there"
        )
    else:
        line += f"exports will name {pronoun} in generation_config.json"
    print(line, flush=True)
    return sorted(ids)


def warn_of_end_token(config: DictConfig, chat: ChatTokenizer) -> None:
    """Warn on rank 0 if the token that ends a turn in the chat template does not end a response."""
    from rollout.vllm.sampling import find_stop_token_ids, sampling_groups

    token = read_ending(chat).token
    stop_ids = find_stop_token_ids(Path(config.model.path))
    if token is None or token in stop_ids or dist.get_rank() > 0:
        return
    text = chat.decode([token])
    for group, sampling in sampling_groups(config).items():
        if any(stop in text or text in stop for stop in sampling.stop):
            continue
        named = ", ".join(f"{chat.decode([stop_id])} ({stop_id})" for stop_id in stop_ids)
        print(
            f"warning: the chat template ends a turn with {text} ({token}), but a response ends "
            f"only with {named}: add {token} to eos_token_id in generation_config.json of "
            f"model.path={config.model.path}, or set {group}.stop=['{text}']",
            flush=True,
        )
        return
