"""Configuration: layered YAML, then key=value pairs, checked before anything heavy is imported.

    python -m config schema     writes configs/schema/*.json, which editors use to check YAML files

The YAML files in configs/ are the only list of keys. A key has the type of its default;
configs/rules.py adds choices, bounds and nulls. configs/names.yaml maps the key names of other
projects to ours.
"""

import ctypes
import os
import pickle
import re
import signal
import sys
import time
import weakref
from collections.abc import Callable
from functools import cache, partial

from configs import packages

try:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as error:
    packages.exit_without(error)

from configs import paths
from configs.arguments import read_layers
from configs.checks import key_problems, value_problems
from configs.environment import is_first_of_node, rank_problems, read_number
from configs.files import CONFIGS, InputError, engine_files, flatten, read_defaults
from configs.help import help_text, is_help
from configs.names import readers
from configs.rules import REQUIRED

# Called here, because whatever imports transformers imports this file first.
packages.quiet_torchao()

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
SECONDS_TO_PRINT = 2.0  # how long other ranks wait while the first of their node prints
# The errors that run() has printed.
reported_errors: list[Exception] = []


# -- loading ---------------------------------------------------------------------------------------


def load(defaults: str, arguments: list[str]) -> DictConfig:
    """Merge the defaults with the YAML files of `arguments`, then with its key=value pairs.

    Pairs win over files, and later ones over earlier ones. The defaults are configs/{defaults} and
    configs/model_engine/{model_engine}.yaml. In paths, ~ and environment variables ($NAME or
    ${NAME}) are expanded.

    Returns a read-only, fully resolved DictConfig. Raises InputError with every mistake: unknown
    keys (the message suggests a similar one, if any), wrong types, values that break their rules,
    missing values, and unreadable files. Values are checked once all keys are known.
    """
    try:
        base = read_defaults(CONFIGS / defaults)
        layers, problems = read_layers(arguments, default_keys(defaults, base.model_engine))
        engine = choose_engine([base, *layers])
        known_keys = default_keys(defaults, engine)
        problems += key_problems(layers, known_keys)
        raise_all(problems)
        config = copy_of_defaults(defaults, engine)
        config.merge_with(*layers)
        values = flatten(config)
        if paths.has_interpolation(values):
            raise_all(paths.expand_braced(config, values))
            OmegaConf.resolve(config)
            values = flatten(config)
    except OmegaConfBaseException as error:
        raise InputError(omegaconf_problem(error)) from None
    problems = paths.expand(config, values)
    raise_all(problems + value_problems(values | left_open(layers), known_keys))
    OmegaConf.set_readonly(config, True)
    return config


def raise_all(problems: list[str]) -> None:
    """Raise one InputError with all problems, each of them once, if there are any."""
    if problems:
        raise InputError(*dict.fromkeys(problems))


def omegaconf_problem(error: OmegaConfBaseException) -> str:
    """Return OmegaConf's description of a problem, with the key and without details."""
    description = str(error).splitlines()[0]
    return f"{error.full_key}: {description}" if error.full_key else description


def left_open(layers: list[DictConfig]) -> dict[str, str]:
    """Return the keys whose last value is ???, which OmegaConf replaces by the default."""
    last_values = {}
    for layer in layers:
        last_values |= flatten(layer)
    return {key: value for key, value in last_values.items() if value == REQUIRED}


def engine_defaults(model_engine: str) -> DictConfig:
    """Return the defaults of an engine."""
    engines = {path.stem: path for path in engine_files()}
    if model_engine not in engines:
        raise InputError(f"model_engine={model_engine} must be one of {', '.join(engines)}")
    return read_defaults(engines[model_engine])


@cache
def merged_defaults(defaults: str, model_engine: str) -> DictConfig:
    """Return a script's defaults, merged with an engine's. Do not change the result."""
    return OmegaConf.merge(read_defaults(CONFIGS / defaults), engine_defaults(model_engine))


@cache
def pickled_defaults(defaults: str, model_engine: str) -> bytes:
    """Return merged_defaults(), pickled."""
    return pickle.dumps(merged_defaults(defaults, model_engine))


def copy_of_defaults(defaults: str, model_engine: str) -> DictConfig:
    """Return a copy of merged_defaults(). To unpickle it is faster than a deep copy."""
    return pickle.loads(pickled_defaults(defaults, model_engine))


@cache
def default_keys(defaults: str, model_engine: str) -> dict:
    """Return the keys of merged_defaults(), flattened. Do not change the result."""
    return flatten(merged_defaults(defaults, model_engine))


def choose_engine(layers: list[DictConfig]) -> str:
    """Return the model_engine of the last layer that sets it."""
    engines = [layer.model_engine for layer in layers if "model_engine" in layer]
    return engines[-1]


def defaults(group: str) -> DictConfig:
    """Return the defaults of a group of keys in configs/ppo.yaml. Do not change the result."""
    return OmegaConf.select(read_defaults(CONFIGS / "ppo.yaml"), group)


# -- secrets ---------------------------------------------------------------------------------------


def without_secrets(config: DictConfig) -> DictConfig:
    """Return a copy that is safe to print and to save: secrets from the environment are hidden.

    This works whether an interpolation or the shell has inserted them.
    """
    shown = OmegaConf.create(OmegaConf.to_container(config))
    for key, value in flatten(shown).items():
        is_secret = key not in readers() and SECRET.search(key) is not None
        hide = partial(hide_secrets, is_secret=is_secret)
        hidden = paths.apply(hide, value)
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

    --help prints the docstring `doc` and all keys; --help GROUP... prints groups of keys.

    Each mistake in an InputError is printed in one line per node, and the exit code is 2. A missing
    package is reported in the same way.
    """
    arguments = sys.argv[1:]
    try:
        if any(is_help(argument) for argument in arguments):
            print(help_text(defaults, doc, arguments))
            return
        raise_all(rank_problems())
        main(load(defaults, arguments))
    except InputError as error:
        report(error)
        sys.exit(2)
    except ModuleNotFoundError as error:
        packages.exit_without(error)
    except KeyboardInterrupt:  # before job.signals.Agreement handles Ctrl-C
        os._exit(130)


def report(error: InputError) -> None:
    """Print an error once per node, since a file may be missing on only one of them.

    Each of its problems is one line.
    """
    reported_errors.append(error)
    if not is_first_of_node():
        # torchrun stops the other ranks when one has ended, maybe before the first has printed.
        time.sleep(SECONDS_TO_PRINT)
        return
    # tqdm.write() does not print into the line of a progress bar.
    from tqdm import tqdm

    rank = read_number("RANK", 0)
    on_rank = f" on rank {rank}" if rank else ""
    for problem in error.problems:
        text = hide_secrets(" ".join(problem.split()))
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
    from configs.usage import exit_with_usage

    if sys.argv[1:] != ["schema"]:
        exit_with_usage(__doc__, sys.argv[1:])
    write_schemas()
