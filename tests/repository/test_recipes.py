"""The recipes of examples/recipes, and benchmarks/recipes.py, which runs and draws them."""

import json
import time
from argparse import Namespace
from pathlib import Path
from statistics import median

import pytest
from omegaconf import OmegaConf
from PIL import Image

from benchmarks import recipes
from benchmarks.recipe_curves import RunCurves, draw, read_curves, smooth
from benchmarks.recipes import RECIPES, Run
from config import load

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
# The scores in the page's table; the other recipes have val/score.
SCORES = {
    "gsm_sft": "val/exact_match",
    "chains_sft": "val/exact_match",
    "gsm_grpo": "val/score_and_format/correct",
    "gsm_dpo": "val/rewards/accuracies",
    "gsm_rm": "val/accuracy",
    "tools_sft": "val/exact_match",
    "tools_grpo": "val/solve",
    "game_sft": "val/loss",
    "game_grpo": "val/play",
    "gsm_distill_sft": "val/exact_match",
    "gsm_ipo": "val/rewards/accuracies",
    "gsm_kto": "val/rewards/margins",
    "gsm_simpo": "val/rewards/margins",
    "gsm_orpo": "val/rewards/margins",
    "gsm_reward_model": "val/score_and_format/correct",
    "sums_gdpo": "val/score_and_bare_number/correct",
    "chains_steps": "val/score_lines",
    "self_play": "game/against_frozen",
}
# Recipes on sums whose data, rewards or models differ from those of sums_grpo, too.
OTHER_TASKS = {
    "sums_experts",
    "sums_hint",
    "sums_gdpo",
    "sums_pass_at_k",
    "sums_replay",
    "sums_self",
    "sums_teachers",
}
# Where a recipe gets a model that another recipe exports, and which one.
EXPORTS = {
    "gsm_rm": {"model.path": "gsm_sft"},
    "gsm_kto": {"model.path": "gsm_sft"},
    "gsm_orpo": {},
    "gsm_distill_sft": {"distill.teacher": "gsm_sft"},
    "chains_steps": {"model.path": "chains_sft"},
    "tools_grpo": {"model.path": "tools_sft"},
    "game_grpo": {"model.path": "game_sft"},
    "sums_dapo": {},
    "sums_distill": {"algorithm.distill.teacher": "sums_grpo"},
    "sums_teachers": {
        "algorithm.distill.teachers.chain_sum": "sums_grpo",
        "algorithm.distill.teachers.gsm_symbolic": "gsm_sft",
    },
    "gsm_reward_model": {"model.path": "gsm_sft", "reward.model.path": "gsm_rm"},
}
RESULTS = sorted((RECIPES / "results").glob("*.json"))


def configuration(run: Run):
    """Return the configuration that the command of a run loads."""
    command = run.command([])
    kind = run.script.removeprefix("train_").removesuffix(".py")
    defaults = f"{kind}.yaml" if run.script.startswith("train_") else "ppo.yaml"
    return load(defaults, command[command.index(run.script) + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_a_valid_configuration(name):
    config = configuration(Run(name, seed=3))
    assert config.trainer.seed == 3
    assert config.output_dir.endswith(f"runs/recipes/{name}/seed_3")


@pytest.mark.parametrize("name", NAMES)
def test_the_header_of_a_recipe_has_its_command(name):
    run = Run(name, seed=0)
    files = [f"examples/recipes/{path.name}" for path in run.files]
    text = (RECIPES / f"{name}.yaml").read_text()
    page = (RECIPES / "README.md").read_text()
    command = f"torchrun --nproc-per-node 1 {run.script} {' '.join(files)}"
    assert command in text or command in page


@pytest.mark.parametrize("name", EXPORTS)
def test_a_recipe_reads_the_exports_of_its_own_seed(name):
    run = Run(name, seed=2)
    exports = run.exports()
    assert {key: needed.recipe for key, needed in exports.items()} == EXPORTS[name]
    config = configuration(run)
    for key, needed in exports.items():
        assert OmegaConf.select(config, key) == f"{needed.folder}/hf"
        assert needed.folder.name == "seed_2"


def test_a_recipe_without_other_recipes_starts_from_the_pretrained_model():
    assert configuration(Run("sums_grpo", seed=2)).model.path == "runs/smollm2"
    assert configuration(Run("gsm_orpo", seed=2)).model.path == "runs/smollm2"


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if name.startswith("sums_") and name not in OTHER_TASKS],
)
def test_the_recipes_of_sums_differ_only_in_what_they_vary(name):
    base = configuration(Run("sums_grpo", seed=0))
    varied = configuration(Run(name, seed=0))
    for section in ("data", "reward", "validation"):
        assert varied[section] == base[section]
    for key in base.rollout.keys() - {"partial"}:
        assert varied.rollout[key] == base.rollout[key]
    assert (varied == base) == (name == "sums_grpo")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_can_be_drawn(path, tmp_path, monkeypatch):
    picture = tmp_path / "curve.png"
    has_scores = not path.stem.endswith(("sft", "dpo", "rm"))
    metric = "score/mean" if has_scores else "train/loss"
    arguments = ["recipes", "draw", str(path), "--metric", metric, "--out", str(picture)]
    monkeypatch.setattr("sys.argv", arguments)
    recipes.main()
    with Image.open(picture) as image:
        assert image.width > 300


def test_every_metric_has_a_panel(tmp_path):
    runs = read_curves([RECIPES / "results" / "precision.json"])
    metrics = ["score/mean", "val/exact_match"]
    figure = draw(runs, Namespace(metric=metrics, window=1, seconds=False))
    assert [axes.get_ylabel() for axes in figure.axes] == metrics
    scores, matches = figure.axes
    labels = [line.get_label() for line in scores.get_lines()]
    assert labels == ["sums_grpo, fp32, 3 seeds", "sums_grpo, bf16, 3 seeds"]
    assert len(matches.get_lines()) == 4


def test_a_picture_over_seconds_is_wider(tmp_path, monkeypatch):
    path = str(RECIPES / "results" / "sums_grpo_trl.json")
    widths = []
    for options in ([], ["--seconds"]):
        picture = str(tmp_path / f"{len(options)}.png")
        words = ["recipes", "draw", path, "--metric", "score/mean", *options, "--out", picture]
        monkeypatch.setattr("sys.argv", words)
        recipes.main()
        with Image.open(picture) as image:
            widths.append(image.width)
    assert widths[1] > widths[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_results_of_every_recipe(name):
    (line,) = [line for line in page_lines() if line.startswith(f"| `{name}` |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == measured_cells(name)


def values_of(run: Run, metric: str) -> list[float]:
    return [line[metric] for line in run.metrics if metric in line]


def measured_cells(name: str) -> list[str]:
    """Return what the page's table says of a recipe, computed from its runs.

    Runs that failed do not count, unless all have failed.
    """
    runs = [Run(**entry) for entry in json.loads(results(name).read_text())]
    runs = [run for run in runs if run.exit_code == 0] or runs
    runs.sort(key=lambda run: run.seed)
    scores = [values_of(run, SCORES.get(name, "val/score")) for run in runs]
    seconds = [line["timing/step"] for line in runs[0].metrics if line["step"] > 0]
    return [
        ", ".join(f"{values[0]:.3f}" for values in scores),
        ", ".join(f"{values[-1]:.3f}" for values in scores) + remark(runs),
        f"{median(seconds):.2f}",
        f"{max(run.seconds for run in runs):.0f}",
    ]


def remark(runs: list[Run]) -> str:
    """Return what the table says of a single run, whose last score may be of an earlier step."""
    if len(runs) > 1:
        return ""
    (run,) = runs
    if run.exit_code == 0:
        return " (one seed)"
    last_validation = max(line["step"] for line in run.metrics if "val/score" in line)
    return f" (one seed, step {last_validation})"


def test_the_loop_of_ones_own_trains_as_train_ppo_does():
    """Both ran on one H200. Not only the first digits are equal."""
    (loop,) = read_curves([results("sums_loop")])
    (grpo,) = read_curves([results("sums_grpo_h200")])
    for metric in ("score/mean", "val/score", "actor/grad_norm", "actor/entropy"):
        expected = [line[metric] for line in grpo.metrics if metric in line]
        assert len(expected) >= 7
        assert [line[metric] for line in loop.metrics if metric in line] == expected


@pytest.mark.parametrize(
    "name, rows",
    [
        ("sums_grpo", [f"rankwise, seed {seed}" for seed in range(3)]),
        ("sums_grpo_trl", ["TRL, seed 0"]),
    ],
)
def test_the_page_has_the_scores_of_every_run(name, rows):
    page = (RECIPES / "README.md").read_text()
    runs = read_curves([results(name)])
    for row, run in zip(rows, runs, strict=True):
        scores = [line["score/mean"] for line in run.metrics if "score/mean" in line]
        first = sum(scores[:10]) / 10
        last = sum(scores[-10:]) / 10
        assert f"| {row} | {first:.3f} | {last:.3f} |" in page


@pytest.mark.parametrize(
    "name, row", [("sums_grpo_trl", "TRL 1.16"), ("sums_grpo_alone", "rankwise")]
)
def test_the_page_has_the_seconds_of_a_step(name, row):
    (run,) = read_curves([results(name)])
    seconds = [line["timing/step"] for line in run.metrics if line["step"] > 0]
    (line,) = [line for line in page_lines() if line.startswith(f"| {row} |")]
    assert f"| {median(seconds):.2f} |" in line


def page_lines() -> list[str]:
    return (RECIPES / "README.md").read_text().splitlines()


def results(name: str) -> Path:
    return RECIPES / "results" / f"{name}.json"


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_recipe_waits_for_the_sft_run_that_it_starts_from(tmp_path, monkeypatch, num_slots):
    events = []

    def execute(run, settings, gpu, deadline):
        events.append(f"{run.name} begins")
        time.sleep(0.2)
        events.append(f"{run.name} ends")
        run.exit_code = 0

    monkeypatch.setattr(recipes, "execute", execute)
    options = {"seeds": [3], "gpus": [0], "jobs_per_gpu": num_slots, "time_limit": 60.0}
    arguments = Namespace(names=["gsm_grpo", "gsm_sft"], out=tmp_path / "results.json", **options)
    recipes.run_all(arguments)
    runs = ("gsm_sft/seed_3", "gsm_grpo/seed_3")
    assert events == [f"{run} {event}" for run in runs for event in ("begins", "ends")]
    assert [run["exit_code"] for run in json.loads(arguments.out.read_text())] == [0, 0]


def test_a_recipe_whose_model_was_not_trained_is_not_started(tmp_path, monkeypatch, capsys):
    started = []

    def execute(run, settings, gpu, deadline):
        started.append(run.name)
        run.exit_code = int(run.name == "gsm_sft/seed_3")

    monkeypatch.setattr(recipes, "execute", execute)
    options = {"seeds": [3, 4], "gpus": [0], "jobs_per_gpu": 2, "time_limit": 60.0}
    names = ["gsm_reward_model", "gsm_rm", "sums_grpo", "gsm_sft"]
    arguments = Namespace(names=names, out=tmp_path / "results.json", **options)
    runs = recipes.run_all(arguments)
    failed = {run.name for run in runs if run.exit_code}
    assert failed == {"gsm_sft/seed_3", "gsm_rm/seed_3", "gsm_reward_model/seed_3"}
    succeeded = {run.name for run in runs} - failed
    assert sorted(started) == sorted(["gsm_sft/seed_3", *succeeded])
    assert len(json.loads(arguments.out.read_text())) == len(names) * 2
    assert "gsm_rm/seed_3 is not started: gsm_sft/seed_3 failed" in capsys.readouterr().out


def test_an_unknown_recipe_is_an_error_before_any_run(tmp_path, monkeypatch, capsys):
    command = ["recipes", "run", "--out", str(tmp_path / "results.json"), "sums_grpo", "sums_gpro"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(recipes, "execute", lambda *_: pytest.fail("a run has started"))
    with pytest.raises(SystemExit, match="2"):
        recipes.main()
    assert "sums_gpro is not a recipe" in capsys.readouterr().err


def test_the_seconds_of_a_run_add_up():
    run = RunCurves(
        "a", [{"step": 0}, {"step": 1, "timing/step": 2.0}, {"step": 2, "timing/step": 3.0}]
    )
    assert run.seconds() == {0: 0.0, 1: 2.0, 2: 5.0}


def test_a_running_mean_is_over_the_latest_steps():
    assert smooth([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]


def test_results_keep_the_seconds_of_all_stages_and_every_metric_of_validations():
    line = {"step": 3, "timing/wake": 1.0, "val/score": 0.5, "score/mean": 0.25, "perf/mfu": 0.1}
    assert recipes.kept(line) == {name: line[name] for name in line if name != "perf/mfu"}


def test_a_run_shows_the_first_and_the_last_validation():
    validations = [{"val/solve": 0.25}, {"score/mean": 0.5}, {"val/solve": 0.75}]
    run = Run("tools_grpo", seed=0, metrics=[{"step": i} | m for i, m in enumerate(validations)])
    assert recipes.first_and_last(run, "val/score") == "0.250 -> 0.750"
    assert recipes.first_and_last(run, "score/mean") == "0.500 -> 0.500"
    assert recipes.first_and_last(run, "val/loss") == "-"
