"""The tables of docs/what_fits.md are those that benchmarks/what_fits.py prints."""

import pytest

from benchmarks.known_models import write_config
from benchmarks.what_fits import (
    MEMORY,
    METHODS,
    NUM_GPUS,
    TABLE,
    Model,
    find_model,
    ladder,
    print_tables,
)
from engines.build import engine_class
from engines.memory import GIB
from job.hardware import Hardware
from job.memory_plan import FULL
from tests.repository.pages import PAGES

PAGE = PAGES["docs/what_fits.md"]


@pytest.fixture
def models(tmp_path) -> dict[str, Model]:
    return {name: Model(write_config(name, tmp_path)) for name in TABLE}


@pytest.mark.slow
def test_the_page_has_the_tables_that_are_printed(models, capsys):
    print_tables(models)
    printed = capsys.readouterr().out
    assert PAGE.endswith(f"\n{printed.strip()}\n")


@pytest.mark.slow
@pytest.mark.parametrize("title", METHODS)
def test_a_row_of_the_page_is_what_is_computed(models, title, capsys):
    """The same for one model."""
    name = "Qwen/Qwen3-1.7B"
    print_tables({name: models[name]}, titles=[title])
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 3 * len(NUM_GPUS)
    assert set(lines) <= set(section.splitlines())


def test_a_model_that_does_not_exist_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        find_model(str(tmp_path / "nowhere"), tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert "contains no config.json" in line
    assert "or name one of Qwen/Qwen3-0.6B, " in line


@pytest.mark.slow
@pytest.mark.parametrize("title", METHODS)
@pytest.mark.parametrize("num_gpus", NUM_GPUS)
def test_a_cell_has_the_first_settings_that_fit(models, title, num_gpus):
    """A cell's estimate is the engine's own, and no milder settings fit."""
    method = METHODS[title]
    model = models["Qwen/Qwen3-4B"]
    hardware = Hardware(num_gpus, "cuda", int(MEMORY[48] * GIB))
    fit = model.find_fit(method, hardware)
    config = model.configure(method, fit.step.settings)
    (estimate,) = engine_class("fsdp").estimate_memory(config, num_gpus, "cuda")
    asleep = fit.device_bytes - estimate.device_total
    assert asleep == pytest.approx(6 * GIB if method.has_rollout else 0)
    assert fit.device_bytes <= FULL * hardware.device_bytes
    of_trainer = [setting for setting in fit.step.settings if not setting.startswith("rollout.")]
    for step in ladder(method):
        if list(step.settings) == of_trainer:
            break
        _, milder = model.train(method, num_gpus, step)
        assert milder.device_total + asleep > FULL * hardware.device_bytes
