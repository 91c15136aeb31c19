"""Configuration: layered YAML, then key=value pairs, checked before anything heavy is imported.

    python -m config schema     writes configs/schema/*.json, which editors use to check YAML files

The YAML files in configs/ are the only list of keys. A key has the type of its default;
configs/rules.py adds choices, bounds and nulls. configs/names.yaml maps the key names of other
projects to ours.
"""

import ctypes
import os
import re
import signal
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.files import (
    CONFIGS,
    InputError,
    engine_files,
    flatten,
    is_free,
    read,
    read_defaults,
    read_pair,
)
from configs.names import reader_note, readers, suggest
from configs.rules import REQUIRED, problem_with

PARENT = os.getppid()  # torchrun, unless it is killed during the imports below
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Names of keys and environment variables whose values must not be shown.
SECRET = re.compile(
    r"(^|[_.])(api_?keys?|keys?|tokens?|secrets?|passwd|credentials?|auth|pat|pass|passphrase)$"
    r"|_pwd$|password",
    re.IGNORECASE,
)
# Shorter values of environment variables are not hidden: they could occur in any text.
MIN_SECRET_LENGTH = 6
USAGE = "arguments are YAML files and key=value pairs"
# The errors that run() has printed.
reported_errors: list[Exception] = []


# -- loading ---------------------------------------------------------------------------------------


def load(defaults: str, arguments: list[str]) -> DictConfig:
    """Merge the defaults with the YAML files and key=value pairs of `arguments`; later ones win.

    The defaults are configs/{defaults} and configs/model_engine/{model_engine}.yaml.

    Returns a read-only, fully resolved DictConfig. Raises InputError for the first mistake: an
    unknown key (the message suggests a similar one, if any), a wrong type, a value that breaks its
    rule, a missing value, or an unreadable file.
    """
    try:
        base = read_defaults(CONFIGS / defaults)
        default_engine = engine_defaults(base.model_engine)
        check_argument_style(arguments, flatten(base) | flatten(default_engine))
        files = [read(Path(argument)) for argument in arguments if "=" not in argument]
        pairs = [read_pair(argument) for argument in arguments if "=" in argument]
        model_engine = choose_engine([base, *files, *pairs])
        known = OmegaConf.merge(base, engine_defaults(model_engine))
        known_keys = flatten(known)
        for layer in (*files, *pairs):
            check_keys(flatten(layer), known_keys)
        config = OmegaConf.merge(known, *files, *pairs)
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise InputError(str(error)) from None
    check_values(flatten(config), known_keys)
    OmegaConf.set_readonly(config, True)
    return config


def engine_defaults(model_engine: str) -> DictConfig:
    """Return the defaults of an engine."""
    engines = {path.stem: path for path in engine_files()}
    if model_engine not in engines:
        raise InputError(f"model_engine={model_engine} must be one of {', '.join(engines)}")
    return read_defaults(engines[model_engine])


def choose_engine(layers: list[DictConfig]) -> str:
    """Return the model_engine of the last layer that sets it."""
    engines = [layer.model_engine for layer in layers if "model_engine" in layer]
    return engines[-1]


def defaults(group: str) -> DictConfig:
    """Return the defaults of a group of keys in configs/ppo.yaml."""
    return OmegaConf.select(read(CONFIGS / "ppo.yaml"), group)


# -- checks ----------------------------------------------------------------------------------------


def check_argument_style(arguments: list[str], known: dict) -> None:
    """Raise InputError for arguments in the style of argparse or Hydra.

    These are --key value, --key=value, +key=value, ++key=value and ~key.
    """
    for argument, following in pairwise([*arguments, ""]):
        if not argument.startswith(("-", "+", "~")):
            continue
        key, equals, value = argument.lstrip("-+~").partition("=")
        is_flag = argument.startswith("-") and not equals
        if is_flag and not re.search(r"^-|=|\.ya?ml$", following):
            value = following
        target = key if key in known else suggest(key, known)
        advice = target or "--help lists the keys"
        if target in readers():
            advice = f"write {target}={value or '...'}{reader_note(target, known)}"
        raise InputError(f"{argument}: {advice}; {USAGE}")


def check_keys(layer: dict, known: dict) -> None:
    """Raise InputError for a key of a layer that does not exist, or that is a group."""
    for key, value in layer.items():
        check_is_group(key, value, known)
        if key in known or is_free(key, known):
            continue
        members = [name for name in known if name.startswith(f"{key}.")]
        if members:
            raise InputError(f"{key} is a group of keys, not a value; did you mean {members[0]}?")
        if key in readers():
            raise InputError(f"unknown key {key}; only {readers()[key]} reads it")
        target = suggest(key, known)
        advice = target or "--help lists the keys"
        if target in readers():
            advice = f"the nearest is {target}{reader_note(target, known)}"
        raise InputError(f"unknown key {key}; {advice}")


def check_is_group(key: str, value, known: dict) -> None:
    """Raise InputError for a group where a value belongs, or a value where a group belongs."""
    is_group = isinstance(value, dict)
    is_free_group = known.get(key) == {}
    if is_group and key in known and not is_free_group:
        raise InputError(f"{key} is a value, not a group of keys")
    if is_free_group and not is_group:
        raise InputError(f"{key} is a group of keys, not a value: write {key}.NAME=...")


def check_values(values: dict, known: dict) -> None:
    """Raise InputError for a value that is missing, has the wrong type or breaks its rule.

    Args:
        values: the merged configuration, flattened.
        known: the defaults, flattened.
    """
    for key, value in values.items():
        if value == REQUIRED or is_free(key, known):
            continue
        problem = problem_with(key, value, known[key])
        if problem:
            raise InputError(f"{key}={value!r} {problem}")
    for key, value in values.items():
        if value == REQUIRED:
            raise InputError(f"{key} is missing: pass {key}=... or set it in a YAML file")


# -- secrets ---------------------------------------------------------------------------------------


def without_secrets(config: DictConfig) -> DictConfig:
    """Return a copy that is safe to print and to save: secrets from the environment are hidden.

    This works whether an interpolation or the shell has inserted them.
    """
    shown = OmegaConf.create(OmegaConf.to_container(config))
    for key, value in flatten(shown).items():
        if not isinstance(value, str):
            continue
        is_secret = key not in readers() and SECRET.search(key) is not None
        hidden = hide_secrets(value, is_secret)
        if hidden != value:
            OmegaConf.update(shown, key, hidden)
    return shown


def hide_secrets(text: str, is_secret: bool = False) -> str:
    """Return the text with ${oc.env:NAME} in place of the values of secret-looking variables.

    Args:
        is_secret: whether the text itself is a secret. If so, the values of all variables are
            replaced.
    """
    longest_first = sorted(os.environ.items(), key=lambda item: -len(item[1]))
    for name, value in longest_first:
        if len(value) >= MIN_SECRET_LENGTH and (is_secret or SECRET.search(name)):
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text


# -- running a script ------------------------------------------------------------------------------


def run(main: Callable[[DictConfig], None], defaults: str, doc: str) -> None:
    """Run a script: call main(config) with the configuration from sys.argv.

    An InputError is printed as one line per node, and the exit code is 2.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        files = [CONFIGS / defaults, *engine_files()]
        print(doc, *(path.read_text() for path in files), sep="\n")
        return
    try:
        main(load(defaults, sys.argv[1:]))
    except InputError as error:
        report(error)
        sys.exit(2)
    except KeyboardInterrupt:  # before job.signals.Agreement handles Ctrl-C
        os._exit(130)


def report(error: InputError) -> None:
    """Print an error once per node, since a file may be missing on only one of them."""
    reported_errors.append(error)
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    if local_rank != 0:
        return
    # tqdm.write() does not print into the line of a progress bar.
    from tqdm import tqdm

    on_rank = f" on rank {rank}" if rank else ""
    text = hide_secrets(" ".join(str(error).split()))
    tqdm.write(f"error{on_rank}: {text}", file=sys.stderr)


def leave_process_group() -> None:
    """Leave the process group after an InputError, which all ranks raise.

    Otherwise a thread of gloo could abort the process while it ends, with an exit code other
    than 2.
    """
    dist = sys.modules.get("torch.distributed")
    if reported_errors and dist and dist.is_initialized():
        dist.destroy_process_group()


# Finalizers run when Python exits, the newest first, so vLLM's run before this one.
weakref.finalize(InputError, leave_process_group)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl() took effect
        sys.exit(f"process {parent}, which started this one, has ended")


if __name__ == "__main__":
    from configs.json_schema import write_schemas

    if sys.argv[1:] != ["schema"]:
        sys.exit(__doc__)
    write_schemas()
