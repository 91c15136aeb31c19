"""The repository's own promises: configuration keys that are commented and read, imports that go one way."""

import ast
import re
import subprocess

import pytest
from omegaconf import OmegaConf

from tests.support.launch import ROOT

PRODUCT_ROOMS = ("algorithms", "common", "data", "engines", "job", "profiling", "rl", "rollout")
SCRIPTS = sorted(ROOT.glob("train_*.py"))
PRODUCT = sorted(
    [*ROOT.glob("*.py"), *(p for room in PRODUCT_ROOMS for p in (ROOT / room).rglob("*.py"))]
)

CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.yaml") if p.name != "names.yaml")


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_the_product_is_what_is_checked_here():
    assert len(SCRIPTS) == 2 and len(PRODUCT) > 40
    assert {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in PRODUCT} > ROOMS.keys()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_key_has_a_comment(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        is_key = re.match(r"\s*[\w.]+:\s*\S", line) and not line.lstrip().startswith("#")
        assert not is_key or re.search(r"\s#\s*\S", line), (
            f"{path}:{number} says nothing of its key"
        )


@pytest.mark.parametrize(
    "path", [p for p in CONFIGS if "demo" not in p.parts], ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_key_is_read_by_the_code(path):
    code = "\n".join(p.read_text() for p in PRODUCT if p.name != "config.py")
    for key in leaves(OmegaConf.to_container(OmegaConf.load(path))):
        name = key.rpartition(".")[2]
        # config.optim.lr, optim.lr, engine["param_dtype"]; model_engine itself is read in config.py
        read = re.search(rf"\.{name}\b|[\"']{name}[\"']", code) or name == "model_engine"
        dtype = name.endswith("_dtype") and 'engine[f"{k}_dtype"]' in code
        assert read or dtype, f"{key} is in {path.name} and nothing reads it"


def test_shipped_configurations_load():
    from config import load

    for path in CONFIGS:
        if "demo" in path.parts:
            script = re.search(r"schema/(\w+)\.json", path.read_text())[1]
            load(f"{script}.yaml", [str(path)])


def test_slurm_scripts_wait_for_what_the_trainers_say():
    for script in SCRIPTS:
        batch = ROOT / f"examples/slurm/{script.stem.removeprefix('train_')}.sbatch"
        subprocess.run(["bash", "-n", batch], check=True)
        assert (
            re.search('grep "(.*)"', batch.read_text())[1] in script.read_text()
            and script.name in batch.read_text()
        )


# A module imports from its own room and from those behind it: scripts, rollout, engines, data, and what stands alone.
ROOMS = {
    "algorithms": 0,
    "profiling": 0,
    "config": 0,
    "common": 1,
    "data": 2,
    "engines": 3,
    "rewards": 3,
    "rollout": 4,
    "job": 5,
    "rl": 5,
}
SCRIPT = 6


def imports(path):
    """The modules of this repository that a file imports, anywhere in it, as paths."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for module in modules:
            place = ROOT / module.replace(".", "/")
            found |= {p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()}
    return found - {path}


def test_imports_go_one_way_and_in_no_circle():
    graph = {path: imports(path) for path in PRODUCT}

    def room(path):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        return name, ROOMS.get(name, SCRIPT)

    for path, others in graph.items():
        for other in others:
            (name, level), (other_name, other_level) = room(path), room(other)
            assert other_name == name or other_level < level or level == other_level == SCRIPT, (
                f"{path} imports {other}"
            )
    assert not any(
        other.parent.name == "megatron" for other in graph[ROOT / "engines/fsdp/engine.py"]
    )
    assert not any(
        other.parent.name == "fsdp"
        for path in (ROOT / "engines/megatron").glob("*.py")
        for other in graph[path]
    )
    # Ends when every module that is left imports another that is left.
    left = dict(graph)
    while free := [path for path in left if not left[path] & left.keys()]:
        for path in free:
            del left[path]
    assert not left, f"in a circle: {sorted(str(path.relative_to(ROOT)) for path in left)}"
