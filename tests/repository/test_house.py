"""The repository's own promises: every key is commented and read, and imports go one way."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from config import load
from tests.support.launch import ROOT, run
from tests.support.lengthy import LENGTHY
from tests.support.scheduling import LONG_FILES, group_of
from tests.support.tables import entry_of
from tests.support.thorough import THOROUGH

# A module imports from its own room and from rooms of a lower level.
LEVELS = {
    "configs": 0,
    "algorithms": 1,
    "config": 1,
    "profiling": 1,
    "common": 2,
    "data": 3,
    "engines": 4,
    "rewards": 4,
    "rollout": 5,
    "job": 6,
    "preferences": 6,
    "reward_models": 6,
    "rl": 6,
}
SCRIPT_LEVEL = 7
# Programs that lie beside what they run. Nothing imports them, and they may import like scripts.
PROGRAMS = {ROOT / "rollout" / "episodes" / "try.py"}
SCRIPTS = sorted(ROOT.glob("train_*.py"))
CONFIGS = sorted(path for path in ROOT.glob("configs/**/*.yaml") if path.name != "names.yaml")


def product_files() -> list[Path]:
    """Return every Python file of the product: all but tests, benchmarks and examples."""
    files = list(ROOT.glob("*.py"))
    for room in LEVELS:
        files += (ROOT / room).rglob("*.py")
    return sorted(files)


PRODUCT = product_files()


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def leaves(tree: dict, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys that are not groups."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_no_room_is_left_out():
    assert len(SCRIPTS) >= 3
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    rooms = {name.partition("/")[0] for name in tracked.stdout.split() if "/" in name}
    assert rooms - {"tests", "benchmarks", "examples"} <= LEVELS.keys()


def test_only_scripts_config_and_rewards_lie_at_the_root():
    names = {path.name for path in ROOT.glob("*.py")}
    scripts = {path.name for path in SCRIPTS}
    assert names == scripts | {"config.py", "rewards.py"}


@pytest.mark.parametrize("room", sorted(set(LEVELS) - {"config", "rewards", "configs"}))
def test_every_room_says_what_lives_there(room):
    for folder in {path.parent for path in (ROOT / room).rglob("*.py")}:
        source = (folder / "__init__.py").read_text()
        docstring = ast.get_docstring(ast.parse(source))
        assert docstring, f"{relative(folder)}/__init__.py has no docstring"


@pytest.mark.parametrize("path", CONFIGS, ids=relative)
def test_every_key_has_a_comment(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        is_comment = line.lstrip().startswith("#")
        has_value = re.match(r"\s*[\w.]+:\s*\S", line)
        if has_value and not is_comment:
            assert re.search(r"\s#\s*\S", line), f"{path}:{number} does not explain its key"


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in CONFIGS if "demo" not in p.parts], ids=relative)
def test_every_key_is_read_by_the_code(path):
    readers = [p for p in PRODUCT if p.name != "config.py" and p.parent.name != "configs"]
    code = "\n".join(reader.read_text() for reader in readers)
    for key in leaves(OmegaConf.to_container(OmegaConf.load(path))):
        if key == "model_engine":
            continue  # read in config.py
        name = key.rpartition(".")[2]
        pattern = rf"\.{name}\b|[\"']{name}[\"']"
        assert re.search(pattern, code), f"{key} is in {path.name} and nothing reads it"


@pytest.mark.parametrize("path", [p for p in CONFIGS if "demo" in p.parts], ids=relative)
def test_demo_configurations_load(path):
    script = re.search(r"schema/(\w+)\.json", path.read_text())[1]
    load(f"{script}.yaml", [str(path)])


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_slurm_scripts_wait_for_what_the_trainers_print(script):
    batch_script = ROOT / f"examples/slurm/{script.stem.removeprefix('train_')}.sbatch"
    subprocess.run(["bash", "-n", batch_script], check=True)
    text = batch_script.read_text()
    awaited = re.search('grep "(.*)"', text)[1]
    printed = "\n".join(path.read_text() for path in [script, *ROOT.glob("job/*.py")])
    assert awaited in printed
    assert script.name in text


def imports(path: Path) -> set[Path]:
    """Return the files of this repository that a file imports, anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    files = set()
    for module in modules:
        location = ROOT / module.replace(".", "/")
        candidates = (location.with_suffix(".py"), location / "__init__.py")
        files |= {candidate for candidate in candidates if candidate.is_file()}
    return files - {path}


@cache
def all_imports() -> dict[Path, set[Path]]:
    return {path: imports(path) for path in PRODUCT}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_go_one_way():
    for path, imported in all_imports().items():
        assert not imported & PROGRAMS, f"{relative(path)} imports a program"
        is_program = path in PROGRAMS
        level = SCRIPT_LEVEL if is_program else LEVELS.get(room_of(path), SCRIPT_LEVEL)
        for other in imported:
            is_same_room = room_of(other) == room_of(path)
            is_lower = LEVELS.get(room_of(other), SCRIPT_LEVEL) < level
            assert is_same_room or is_lower, f"{relative(path)} imports {relative(other)}"


def test_the_two_engines_do_not_know_each_other():
    for path, imported in all_imports().items():
        for engine, other_engine in (("fsdp", "megatron"), ("megatron", "fsdp")):
            if path.parent.name == engine:
                names = [relative(p) for p in imported if p.parent.name == other_engine]
                assert not names, f"{relative(path)} imports {names}"


def test_no_modules_import_each_other_in_a_circle():
    remaining = dict(all_imports())
    while True:
        free = [path for path in remaining if not remaining[path] & remaining.keys()]
        if not free:
            break
        for path in free:
            del remaining[path]
    assert not remaining, f"in a circle: {[relative(path) for path in remaining]}"


def arguments_of(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in function.args.args}


def functions_of(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def shared_launches() -> Iterator[tuple[Path, str]]:
    """Yield the session fixtures that launch the cases of all selected tests, and their folders."""
    for conftest in (ROOT / "tests").rglob("conftest.py"):
        for function in functions_of(conftest):
            decorators = "".join(map(ast.unparse, function.decorator_list))
            if "session" in decorators and "request" in arguments_of(function):
                yield conftest.parent, function.name


def test_files_that_share_launches_run_in_one_process():
    """Otherwise both processes of `make test` would launch all cases."""
    fixtures = list(shared_launches())
    assert len(fixtures) >= 3
    for folder, fixture in fixtures:
        users = [file for file in folder.rglob("test_*.py") if uses_fixture(file, fixture)]
        groups = {group_of(relative(file)) for file in users}
        assert len(groups) == 1, (fixture, groups)
        assert None not in groups, fixture


def uses_fixture(file: Path, fixture: str) -> bool:
    return any(fixture in arguments_of(function) for function in functions_of(file))


def test_files_that_start_first_exist():
    for file in LONG_FILES:
        assert (ROOT / file).is_file(), file


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("table", [THOROUGH, LENGTHY], ids=["thorough", "lengthy"])
def test_every_entry_of_a_table_of_tests_exists(table):
    patterns = {pattern.partition("::")[0] for pattern in table}
    files = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    printed = run(command).stdout
    entries = {entry_of(line, table) for line in printed.splitlines() if "::" in line} - {None}
    for pattern, cases in table.items():
        found = {case for name, case in entries if name == pattern}
        assert found == set(cases) if cases else found
