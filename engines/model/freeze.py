"""model.freeze: parameters that are not trained. They have no gradients and no optimizer state."""

import re
from collections import defaultdict
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from omegaconf import DictConfig
from torch import nn

from config import InputError
from engines.heads import Head
from engines.model.weights import model_names, stacked


def apply(
    config: DictConfig,
    hf: nn.Module,
    head: Head = Head.LOG_PROBS,
    holder: Callable[[str], str] = str,
) -> set[str]:
    """Let the parameters that model.freeze matches need no gradient. Returns their names in the files of model.path.

    hf: the model on the meta device; a value head is always trained. holder: a name in the files -> a name for the
    engine's parameter that holds this tensor, perhaps with others. Raises InputError for a pattern that matches no parameter
    (unless the model has a value head: it may be another model), and for patterns that match all parameters, or only a part of one.
    """
    path, patterns, rank = config.model.path, list(config.model.freeze), config.model.lora.rank
    if not patterns:
        return set()
    if rank:
        raise InputError(
            f"model.freeze={patterns} does nothing with model.lora.rank={rank}, whose adapters alone are trained: "
            "leave it out"
        )
    names, parts, held, together = (
        model_names(hf, Path(path)),
        stacked(hf),
        defaultdict(list),
        defaultdict(list),
    )
    file_names = {name: file_name for file_name, name in names.items()}
    for name, p in hf.named_parameters(remove_duplicate=False):
        held[p] += (
            [file_names[name]]
            if name in file_names
            else [part for part, _ in parts.get(name, [(name, None)])]
        )
    built = {name for own in held.values() for name in own}
    known = {*names, *built}
    for pattern in patterns:
        try:
            found = {name for name in known if re.search(pattern, name)}
        except re.error as error:
            raise InputError(
                f"model.freeze: {pattern!r} is no regular expression: {error}"
            ) from None
        if found and not found & built and head is not Head.VALUES:
            raise InputError(
                f"model.freeze: {pattern!r} matches only weights that this run leaves alone, such as {min(found)}: "
                "leave it out, or train them with model.images or model.mtp.enable_train"
            )
        if not found and head is not Head.VALUES:
            near = get_close_matches(
                pattern, {re.sub(r"\d+", "0", name) for name in known} & known, 3, 0
            )
            raise InputError(
                f"model.freeze: {pattern!r} matches no name in the files of model.path={path}; the nearest are "
                f"{', '.join(near)}"
            )
    if head is Head.VALUES:
        del held[hf.get_output_embeddings().weight]
    frozen = {
        name
        for own in held.values()
        for name in own
        if any(re.search(pattern, name) for pattern in patterns)
    }
    for p, own in held.items():
        p.requires_grad_(own[0] not in frozen)
        together[holder(own[0])] += own
    for own in together.values():
        if 0 < len(frozen.intersection(own)) < len(own):
            raise InputError(
                f"model.freeze={patterns} matches {min(frozen.intersection(own))} but not {min({*own} - frozen)}, "
                f"which model_engine={config.model_engine} holds in the same parameter: freeze both, or neither"
            )
    if config.model.mtp.detach_encoder and not any(
        p.requires_grad for name, p in hf.named_parameters() if "mtp_layers" in name
    ):
        raise InputError(
            f"model.freeze={patterns} and model.mtp.detach_encoder=true leave the loss of the MTP layers nothing to "
            "train: set model.mtp.enable_train=false"
        )
    if not any(p.requires_grad for p in hf.parameters()):
        raise InputError(f"model.freeze={patterns} leaves nothing to train")
    return frozen
