"""model.freeze: parameters that are not trained. They have no gradients and no optimizer state."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from omegaconf import DictConfig
from torch import nn

from config import InputError
from configs.environment import is_rank0
from engines.heads import Head
from engines.model.model_files import is_only_described
from engines.model.names import described_names, model_names, stacked

# A part of a regular expression: an escaped character, a set of characters, or a dot that stands
# for exactly one character.
ESCAPE_SET_OR_DOT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\.(?![*+?{])", re.DOTALL)


def apply(
    config: DictConfig,
    hf: nn.Module,
    head: Head = Head.LOG_PROBS,
    engine_parameter_of: Callable[[str], str] = str,
    reports: bool = False,
) -> set[str]:
    """Set requires_grad of a model's parameters according to model.freeze.

    A value head is always trained.

    Args:
        hf: the model on the meta device.
        engine_parameter_of: maps the name of a tensor in the files to a key for the engine's
            parameter that holds it. One parameter may hold several tensors.
        reports: whether rank 0 prints what is frozen, and warns of patterns that match more than
            they seem to say.

    Returns:
        The names of the frozen tensors, as in the files.

    Raises:
        InputError: if a pattern matches nothing, if nothing is left to train, or if only a part of
            a parameter matches. A critic's patterns may match nothing, since it may be a different
            model from the policy.
    """
    patterns = list(config.model.freeze)
    if not patterns:
        return set()
    rank = config.model.lora.rank
    if rank:
        raise InputError(
            f"model.freeze={patterns} does nothing with model.lora.rank={rank}, which trains only "
            "adapters: leave it out"
        )
    names, subject = names_in_files(config, hf)
    names_of_parameter = file_names_of_parameters(hf, names)
    if head is Head.VALUES:
        del names_of_parameter[hf.get_output_embeddings().weight]
    if not is_critic(config, head):
        check_patterns(patterns, names, names_of_parameter, subject, head)

    trainable_names = [name for file_names in names_of_parameter.values() for name in file_names]
    frozen = {name for pattern in patterns for name in matching_names(pattern, trainable_names)}
    names_of_engine_parameter = defaultdict(list)
    for parameter, file_names in names_of_parameter.items():
        parameter.requires_grad_(file_names[0] not in frozen)
        names_of_engine_parameter[engine_parameter_of(file_names[0])] += file_names
    check_whole_parameters(config, frozen, list(names_of_engine_parameter.values()))
    check_something_is_trained(config, hf)
    if reports and is_rank0():
        report(config, head, hf, [name for name in trainable_names if name in frozen])
        for pattern in patterns:
            warn_of_wide_pattern(pattern, trainable_names)
    return frozen


def is_critic(config: DictConfig, head: Head) -> bool:
    """Return whether the model is a critic. A trained reward model has a value head, too."""
    return head is Head.VALUES and "critic" in config


def names_in_files(config: DictConfig, hf: nn.Module) -> tuple[dict[str, str | None], str]:
    """Return {name in the files: name in the model}, and a phrase for the names in errors.

    Without files, the names are those that transformers would write.
    """
    path = Path(config.model.path)
    if is_only_described(config):
        subject = f"parameter of the model that config.json in model.path={path} describes"
        return described_names(hf), subject
    return model_names(hf, path), f"name in the files of model.path={path}"


def file_names_of_parameters(
    hf: nn.Module, names: dict[str, str | None]
) -> dict[nn.Parameter, list[str]]:
    """Return, for each parameter, the names of its tensors in the files.

    A tied or stacked parameter has several names.

    Args:
        names: name in the files -> name in the model.
    """
    file_names = {name: file_name for file_name, name in names.items()}
    stacks = stacked(hf)
    names_of_parameter = defaultdict(list)
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        if name in file_names:
            own_names = [file_names[name]]
        elif name in stacks:
            own_names = [part.name for part in stacks[name]]
        else:
            own_names = [name]
        names_of_parameter[parameter] += own_names
    return names_of_parameter


def check_patterns(
    patterns: list[str],
    names: Iterable[str],
    names_of_parameter: dict[nn.Parameter, list[str]],
    subject: str,
    head: Head,
) -> None:
    """Raise InputError for a pattern that matches no parameter of the model.

    Args:
        names: the names of all weights in the files.
        subject: what these names are, for error messages.
    """
    in_model = {name for file_names in names_of_parameter.values() for name in file_names}
    known = {*names, *in_model}
    for pattern in patterns:
        matches = matching_names(pattern, known)
        if head is Head.VALUES and matches and not matches & in_model:
            raise InputError(
                f"model.freeze: {pattern!r} matches only weights that this run does not freeze, "
                f"such as {min(matches)}: the score head of a reward model is always trained. "
                "Leave the pattern out"
            )
        check_matches(pattern, matches, in_model, known, subject)


def matching_names(pattern: str, names: Iterable[str]) -> set[str]:
    """Return the names that a pattern of model.freeze matches."""
    try:
        return {name for name in names if re.search(pattern, name)}
    except re.error as error:
        raise InputError(
            f"model.freeze: {pattern!r} is not a regular expression: {error}"
        ) from None


def check_matches(
    pattern: str, matches: set[str], in_model: set[str], known: set[str], subject: str
) -> None:
    """Raise InputError for a pattern that matches no parameter of the model.

    Args:
        in_model: the names of the model's parameters, as in the files.
        known: in_model and the names of all other weights in the files, which this run ignores.
        subject: what these names are.
    """
    if not matches:
        without_numbers = {re.sub(r"\d+", "0", name) for name in known}
        nearest = get_close_matches(pattern, without_numbers & known, n=3, cutoff=0)
        raise InputError(
            f"model.freeze: {pattern!r} matches no {subject}; the nearest are {', '.join(nearest)}"
        )
    if not matches & in_model:
        raise InputError(
            f"model.freeze: {pattern!r} matches only weights that this run does not use, such as "
            f"{min(matches)}: leave the pattern out, or train these weights with model.images or "
            "model.mtp.enable_train"
        )


def check_whole_parameters(
    config: DictConfig, frozen: set[str], parameters: list[list[str]]
) -> None:
    """Raise InputError if only a part of one of the engine's parameters is frozen.

    Args:
        parameters: per engine parameter, the names of its tensors in the files.
    """
    for names in parameters:
        frozen_part = frozen.intersection(names)
        trained_part = {*names} - frozen
        if frozen_part and trained_part:
            raise InputError(
                f"model.freeze={list(config.model.freeze)} matches {min(frozen_part)} but not "
                f"{min(trained_part)}. model_engine={config.model_engine} holds them in one "
                "parameter: freeze both or neither"
            )


def check_something_is_trained(config: DictConfig, hf: nn.Module) -> None:
    """Raise InputError if model.freeze leaves a loss without parameters to train."""
    patterns = list(config.model.freeze)
    trained = [name for name, parameter in hf.named_parameters() if parameter.requires_grad]
    if config.model.mtp.detach_encoder and not any("mtp_layers" in name for name in trained):
        raise InputError(
            f"model.freeze={patterns} and model.mtp.detach_encoder=true leave nothing to train for "
            "the loss of the MTP layers: set model.mtp.enable_train=false"
        )
    if not trained:
        raise InputError(f"model.freeze={patterns} leaves nothing to train")


# -- the report ------------------------------------------------------------------------------------


def report(config: DictConfig, head: Head, hf: nn.Module, frozen: Sequence[str]) -> None:
    """Print how many parameters are frozen.

    Args:
        frozen: the names of the frozen tensors in the files, in the order of the model.
    """
    parameters = list(hf.parameters())
    frozen_parameters = [parameter for parameter in parameters if not parameter.requires_grad]
    num_elements = sum(parameter.numel() for parameter in parameters)
    num_frozen_elements = sum(parameter.numel() for parameter in frozen_parameters)
    of_critic = " of the critic" if is_critic(config, head) else ""
    span = ""
    if frozen:
        span = f": {frozen[0]}" if len(frozen) == 1 else f": {frozen[0]} to {frozen[-1]}"
    print(
        f"model.freeze={list(config.model.freeze)} freezes {len(frozen_parameters)} of "
        f"{len(parameters)} parameters{of_critic} ({num_frozen_elements:,} of {num_elements:,} "
        f"elements){span}",
        flush=True,
    )


def warn_of_wide_pattern(pattern: str, names: Sequence[str]) -> None:
    """Print a warning if a pattern matches more names than it seems to say.

    For example, 'layers.1.' matches layers 10 to 19, since a dot stands for any character, and
    so does 'layers.1', which may end within a number.
    """
    matches = matching_names(pattern, names)
    literal = with_literal_dots(pattern)
    literal_matches = matching_names(literal, names)
    additional = [name for name in names if name in matches - literal_matches]
    # A pattern that matches nothing with literal dots has its dots on purpose.
    if additional and literal_matches:
        print(
            f"warning: model.freeze: {pattern!r} also matches {additional[0]}, because a dot "
            f"stands for any character: write {literal!r} to match only dots",
            flush=True,
        )
    cut = [name for name in names if name in literal_matches and ends_in_number(literal, name)]
    if cut and len(cut) < len(literal_matches):
        print(
            f"warning: model.freeze: {pattern!r} also matches {cut[0]}, because it ends within the "
            r"number: end the pattern with '\.' to match only the whole number",
            flush=True,
        )


def with_literal_dots(pattern: str) -> str:
    """Return a regular expression in which every dot that stands for one character is escaped."""

    def escape_dot(part: re.Match) -> str:
        return r"\." if part[0] == "." else part[0]

    return ESCAPE_SET_OR_DOT.sub(escape_dot, pattern)


def ends_in_number(pattern: str, name: str) -> bool:
    """Return whether a pattern's match in a name ends between two digits."""
    end = re.search(pattern, name).end()
    return name[max(end - 1, 0) : end].isdigit() and name[end : end + 1].isdigit()
