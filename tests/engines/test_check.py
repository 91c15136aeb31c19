"""The checks of engines.check, one at a time, on a tiny model; and what the command refuses."""

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from config import InputError, load
from data.batching.batch import Batch
from engines.check import (
    Reference,
    check_engine_and_export,
    check_reload,
    check_transformers,
    main,
)
from tests.support.models import make_model
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2_tied")


def settings_of(model: Path, *pairs: str) -> DictConfig:
    needed = [f"model.path={model}", "data.train_files=none", "engine.compute_dtype=float32"]
    return load("sft.yaml", [*needed, *pairs])


def rewrite(directory: Path, **weights: torch.Tensor) -> None:
    """Replace or add weights in a directory's file."""
    file = directory / "model.safetensors"
    save_file(load_file(file) | weights, file, metadata={"format": "pt"})


def plain_log_probs(model: Path, batch: Batch) -> torch.Tensor:
    """Compute log-probabilities [T] one sequence at a time; 0 for first tokens."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    log_probs = []
    for ids in batch.input_ids.split(batch.lengths):
        with torch.no_grad():
            logits = reference(ids[None]).logits[0]
        log_probs.append(torch.zeros(1))
        log_probs.append(-torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none"))
    return torch.cat(log_probs)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, message",
    [
        ("model.lora.rank=2", "does not support adapters: leave out model.lora"),
        ("model.images=true", "does not support images: leave out model.images"),
        ("engine.float8=rowwise", "leave out engine.float8"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is_built(model, setting, message):
    with pytest.raises(InputError, match=message):
        main(settings_of(model, setting))


# -- on several ranks ------------------------------------------------------------------------------


def check_on_rank(model: Path, export: Path) -> tuple[int, float]:
    """Return the number of the reference's tokens, and the largest difference from transformers."""
    config = settings_of(model)
    reference = check_engine_and_export(config, CPU, export)
    check_reload(config, CPU, export, reference)
    difference = reference.log_probs - plain_log_probs(model, reference.batch)
    return len(reference.log_probs), difference.abs().max().item()


def test_ranks_gather_an_export_that_the_first_one_writes(model, tmp_path, capfd):
    """Only the first one reports. This comes before tests that have a group of their own."""
    export = tmp_path / "export"
    export.mkdir()
    (export / "left.safetensors").write_text("of a check that was killed")
    first, second = on_ranks(2, tmp_path, check_on_rank, model, export)
    assert first == second
    assert first[1] < 1e-4
    exported = load_file(export / "model.safetensors")
    original = load_file(model / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    printed = capfd.readouterr().out
    for line in ("guard ", "export ", "reload "):
        assert printed.count(line + " ") == 1
    assert not (export / "left.safetensors").exists()


# -- on one rank -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
def test_a_good_model_passes_and_its_numbers_are_the_reference(model, tmp_path, capsys):
    config = settings_of(model)
    reference = check_engine_and_export(config, CPU, tmp_path / "export")
    assert reference.log_probs == pytest.approx(plain_log_probs(model, reference.batch), abs=1e-4)
    assert reference.log_probs.device.type == "cpu"
    assert len(reference.batch) == 2
    check_reload(config, CPU, tmp_path / "export", reference)
    check_transformers(config, CPU, reference)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["guard", "ok"],
        ["export", "ok"],
        ["reload", "ok"],
        ["transformers", "ok"],
    ]
    assert "the outputs of packed sequences and of one sequence at a time differ by" in lines[0]


@pytest.mark.usefixtures("process_group")
def test_an_output_matrix_in_the_files_of_a_tied_model_is_no_difference(model, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(directory, **{"lm_head.weight": embedding.clone()})
    check_engine_and_export(settings_of(directory), CPU, tmp_path / "export")


@pytest.mark.usefixtures("process_group")
def test_weights_that_the_engine_rounds_are_not_those_of_the_model(model, tmp_path):
    config = settings_of(model, "engine.param_dtype=bfloat16")
    num_tensors = len(load_file(model / "model.safetensors"))
    message = f"^export: {num_tensors} tensors are not as in model.path: model.* different values$"
    with pytest.raises(InputError, match=message):
        check_engine_and_export(config, CPU, tmp_path / "export")


@pytest.mark.usefixtures("process_group")
def test_an_export_with_other_weights_is_found_when_it_is_loaded(model, tmp_path):
    export = tmp_path / "export"
    reference = check_engine_and_export(settings_of(model), CPU, export)
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(export, **{name: load_file(export / "model.safetensors")[name] * 1.01})
    message = "^reload: the engine's log-probabilities before and after the export differ by"
    with pytest.raises(InputError, match=message):
        check_reload(settings_of(model), CPU, export, reference)


@pytest.fixture
def shifted_reference(model) -> Reference:
    """What transformers computes, plus 0.1 at every token."""
    lengths = [7, 4]
    ids = torch.randint(97, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.tensor([0, 7, 11]))
    return Reference(batch, plain_log_probs(model, batch) + 0.1, bound=1e-6)


def test_transformers_may_differ_by_its_kernels_rounding_in_the_compute_dtype(
    model, shifted_reference, process_group, capsys
):
    with pytest.raises(InputError, match="^transformers: .* differ by 0.1 nats .at most 0.001 "):
        check_transformers(settings_of(model), CPU, shifted_reference)
    in_bfloat16 = settings_of(model, "engine.compute_dtype=bfloat16")
    check_transformers(in_bfloat16, CPU, shifted_reference)
    assert "differ by 0.1 nats (at most 0.2 allowed)" in capsys.readouterr().out
