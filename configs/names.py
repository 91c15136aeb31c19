"""Suggest a key in place of an unknown one: a misspelled key, or another project's name for it."""

import difflib
from collections.abc import Iterator
from functools import cache

from omegaconf import OmegaConf

from configs.files import CONFIGS, SCRIPTS, engine_files, flatten, read_defaults

# Meaningless without the name of their group, so never suggested by themselves.
PLAIN_NAMES = ("enable", "name", "path", "type")
# The minimum similarity of a suggestion (difflib's ratio). The last name of a key is shorter than
# the whole key, so it must be more similar.
KEY_SIMILARITY = 0.85
NAME_SIMILARITY = 0.9


@cache
def readers() -> dict[str, str]:
    """Return the script or the engine that reads each key.

    {"rollout.n": "train_ppo.py", "engine.fsdp_size": "model_engine=fsdp", ...}
    """
    files = {CONFIGS / f"{script}.yaml": f"train_{script}.py" for script in SCRIPTS}
    files |= {path: f"model_engine={path.stem}" for path in engine_files()}
    return {key: reader for path, reader in files.items() for key in flatten(read_defaults(path))}


def reader_note(key: str, known: dict) -> str:
    """Return " (a key of ...)" for a key that this script does not read, otherwise ""."""
    return "" if key in known else f" (a key of {readers()[key]})"


def suggest(key: str, known: dict) -> str:
    """Return a suggestion for an unknown key: an existing key, a sentence, or "" if nothing fits.

    Args:
        known: the keys of this script and engine.
    """
    key = key.replace("-", "_")
    return find_suggestion(key, known) or find_suggestion(key.lower(), known)


def find_suggestion(key: str, known: dict) -> str:
    """Do the same as suggest(), for one spelling of the key."""
    names = read_names()
    last_name = key.rpartition(".")[2]
    for part in parts_of(key):
        is_whole_name = key == part or key.endswith(f".{part}")
        is_sentence = " " in names.get(part, "")
        if part in names and (is_whole_name or is_sentence):
            return names[part]
    ending = find_by_ending(key, known)
    if ending:
        return ending
    similar_keys = difflib.get_close_matches(key, known, n=1, cutoff=KEY_SIMILARITY)
    if similar_keys:
        return similar_keys[0]
    by_name = keys_by_name(known)
    if last_name in by_name and "." in key:
        return by_name[last_name]
    groups = [names[part] for part in parts_of(key) if part in names]
    if groups:
        return groups[0]
    by_name = names | by_name
    similar_names = difflib.get_close_matches(last_name, by_name, n=1, cutoff=NAME_SIMILARITY)
    return by_name[similar_names[0]] if similar_names else ""


@cache
def read_names() -> dict[str, str]:
    """Return configs/names.yaml: names of other projects -> a key or a sentence."""
    return OmegaConf.to_container(OmegaConf.load(CONFIGS / "names.yaml"))


def find_by_ending(key: str, known: dict) -> str:
    """Return the known key that ends like `key`, in at least two names; "" if there is none.

    For actor.optim.lr: optim.lr. For lora.rank: model.lora.rank.
    """
    names = key.split(".")
    for start in range(len(names) - 1):
        ending = ".".join(names[start:])
        if ending in known:
            return ending
    endings = [name for name in known if len(names) > 1 and name.endswith(f".{key}")]
    return endings[0] if len(endings) == 1 else ""


def parts_of(key: str) -> Iterator[str]:
    """Yield every run of consecutive names in a dotted key: the longest first, from right to left.

    For a.b.c: a.b.c, b.c, a.b, c, b, a.
    """
    names = key.split(".")
    for length in range(len(names), 0, -1):
        for start in range(len(names) - length, -1, -1):
            yield ".".join(names[start : start + length])


def keys_by_name(known: dict) -> dict[str, str]:
    """Return keys by the last part of their names.

    If several keys share a name, return this script's key, or else the one in the first file.
    """
    by_name = {}
    for key in reversed([*known, *readers()]):
        name = key.rpartition(".")[2]
        if name not in PLAIN_NAMES:
            by_name[name] = key
    return by_name
