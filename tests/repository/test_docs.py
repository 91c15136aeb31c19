"""README.md and docs/: settings, keys, links and paths exist, and no code escapes the tests."""

import re
import shlex
from functools import cache

import pytest
from omegaconf import DictConfig, OmegaConf

from config import InputError, load
from preferences.settings import check_settings as check_preferences
from rl.settings import check_settings
from tests.repository.pages import (
    BLOCK,
    PAGES,
    PROGRAMS,
    block_containing,
    blocks,
    inline_code,
    without_blocks,
)
from tests.repository.test_house import PRODUCT
from tests.support.launch import ROOT

# "python" is a file of the user's, and "py" an excerpt of one of ours.
LANGUAGES = {"bash", "sh", "console", "python", "py", "json", "text", "diff"}
DEFAULTS = ("sft.yaml", "dpo.yaml", "rm.yaml", "ppo.yaml")
# A setting or key of the pages has to exist for one of these: (defaults, engine).
KINDS = [(defaults, engine) for defaults in DEFAULTS for engine in ("fsdp", "megatron")]
PATHS = ["model.path=m", "data.train_files=t.jsonl"]
# Paths that git does not track.
GENERATED = {"configs/schema"}
TOP_LEVEL = {"output_dir", "dry_run", "model_engine"}


def key_groups() -> list[str]:
    """Return the groups of keys, such as data and optim."""
    names = {"engine"}
    for defaults in DEFAULTS:
        names |= OmegaConf.load(ROOT / "configs" / defaults).keys()
    return sorted(names - TOP_LEVEL)


SETTING = r"(?:[a-z_]+(?:\.[a-z0-9_]+)+|model_engine|output_dir|dry_run)=\S+"
KEY = rf"(?:{'|'.join(key_groups())})(?:\.[a-z0-9_]+)+"


def our_part(page: str) -> str:
    """Return a page without the first column of tables that translate from another project."""
    if not page.startswith("docs/from_"):
        return PAGES[page]
    return re.sub(r"^\|[^|]*\|", "|", PAGES[page], flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_settings_load_and_keys_exist(page):
    for code in inline_code(our_part(page)):
        if code.split(maxsplit=1)[0] in PROGRAMS:
            continue
        settings = re.findall(SETTING, code)
        is_only_settings = shlex.join(settings) == shlex.join(code.split())
        if settings and is_only_settings:
            assert any(can_load(*kind, settings) for kind in KINDS), code
        elif re.fullmatch(KEY, code):
            assert any(has_key(*kind, code) for kind in KINDS), code


def can_load(defaults: str, engine: str, settings: list[str]) -> bool:
    """Return whether settings load and, for PPO and DPO, do not contradict each other."""
    names_users_function = re.search(r"my\.py:name|_kwargs\.", " ".join(settings))
    try:
        config = load(defaults, [*PATHS, f"model_engine={engine}", *settings])
        if defaults == "ppo.yaml" and not names_users_function:
            check_settings(config)
        if defaults == "dpo.yaml" and not names_users_function:
            check_preferences(config)
    except InputError:
        return False
    return True


@cache
def default_config(defaults: str, engine: str) -> DictConfig:
    return load(defaults, [*PATHS, f"model_engine={engine}"])


def has_key(defaults: str, engine: str, key: str) -> bool:
    missing = object()
    config = default_config(defaults, engine)
    return OmegaConf.select(config, key, default=missing) is not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_known_language(page):
    assert {language for language, _ in BLOCK.findall(PAGES[page])} <= LANGUAGES
    assert "```" not in without_blocks(PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_no_code_hides_from_the_tests(page):
    """Commands are in bash or console blocks, not indented or in text blocks."""
    indented = re.search(r"^    \S", without_blocks(PAGES[page]), re.MULTILINE)
    assert not indented, "an indented block"
    for block in blocks(PAGES[page], "text"):
        for line in block.splitlines():
            assert not line.startswith(tuple(f"{program} " for program in PROGRAMS)), line


def anchors(text: str) -> list[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", PAGES[page]):
        path = ROOT / page
        if target:
            path = (path.parent / target).resolve()
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), f"{target}#{anchor}"


def product_rooms() -> set[str]:
    return {path.relative_to(ROOT).parts[0] for path in PRODUCT if path.parent != ROOT}


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    """Of rooms whose names also begin metrics and files of a run, only Python files are tested."""
    any_file = r"(?:algorithms|benchmarks|configs|engines|examples|tests)/[\w/.]*\w"
    python_file = rf"(?:{'|'.join(product_rooms())})/[\w/]*\.py"
    for path in re.findall(rf"(?<![\w/.])(?:{any_file}|{python_file})", PAGES[page]):
        if path not in GENERATED:
            assert (ROOT / path).exists(), path


def tree_paths(tree: str) -> set[str]:
    """Return the paths in the tree; an indented line lies in the room above it."""
    paths = set()
    room = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            paths.add(room + name)
        else:
            room = name
            paths.add(name)
    return paths


def test_the_tree_names_every_room():
    tree = block_containing("README.md", "text", "train_sft.py ")
    assert len(tree.splitlines()) <= 30
    named = tree_paths(tree)
    for name in named:
        assert (ROOT / name).exists(), name
    rooms = {f"{path.parent.relative_to(ROOT)}/" for path in PRODUCT if path.parent != ROOT}
    assert rooms <= named


def test_the_readme_stays_short():
    assert len(PAGES["README.md"].splitlines()) <= 180
