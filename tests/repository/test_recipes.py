"""The recipes of examples/recipes, and benchmarks/recipes.py, which runs and draws them."""

import json

import pytest
from PIL import Image

from benchmarks import recipes
from benchmarks.recipes import RECIPES, Run
from config import load

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
RESULTS = sorted((RECIPES / "results").glob("*.json"))


def configuration(run: Run):
    """Return the configuration that the command of a run loads."""
    command = run.command([])
    script = next(i for i, word in enumerate(command) if word.startswith("train_"))
    defaults = command[script].removeprefix("train_").removesuffix(".py") + ".yaml"
    return load(defaults, command[script + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_a_valid_configuration(name):
    config = configuration(Run(name, seed=3))
    assert config.trainer.seed == 3
    assert config.output_dir.endswith(f"runs/recipes/{name}/seed_3")


def test_the_recipe_of_grpo_starts_from_the_sft_run_of_its_seed():
    sft = configuration(Run("gsm_sft", seed=2))
    assert configuration(Run("gsm_grpo", seed=2)).model.path == f"{sft.output_dir}/hf"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("sums_")])
def test_the_recipes_of_sums_differ_only_in_what_they_vary(name):
    base = configuration(Run("sums_grpo", seed=0))
    varied = configuration(Run(name, seed=0))
    for section in ("data", "rollout", "reward", "validation"):
        assert varied[section] == base[section]
    assert (varied == base) == (name == "sums_grpo")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_can_be_drawn(path, tmp_path, monkeypatch):
    runs = [Run(**entry) for entry in json.loads(path.read_text())]
    assert {run.seed for run in runs} == {0, 1, 2}
    picture = tmp_path / "curve.png"
    arguments = ["recipes", "draw", str(path), "--metric", "val/exact_match", "--out", str(picture)]
    monkeypatch.setattr("sys.argv", arguments)
    recipes.main()
    with Image.open(picture) as image:
        assert image.width > 300


def test_the_page_has_the_results_of_every_seed():
    page = (RECIPES / "README.md").read_text()
    for path in RESULTS:
        for run in (Run(**entry) for entry in json.loads(path.read_text())):
            last = run.metrics[-1]
            cells = (run.seed, f"{last['val/loss']:.4f}", f"{last['val/exact_match']:.3f}")
            row = " | ".join(map(str, cells))
            assert f"| {row} |" in page


def test_a_running_mean_is_over_the_latest_steps():
    assert recipes.smooth([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]
