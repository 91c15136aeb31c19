"""What is computed with the reference before training: KTO's baseline, and a cache of all rows."""

from pathlib import Path

import numpy as np
import pytest
import torch

from config import load
from data.batching.batch import Batch
from data.preference_dataset import PreferenceDataset, tokenize_preferences
from examples.arithmetic import make_rows, make_tokenizer
from preferences.cache import FILE, cache_folder, cache_reference
from preferences.mismatched import estimate_kl, mismatched
from preferences.reference import Reference
from tests.engines.fsdp.cases import build
from tests.preferences.assets import make_pair, write_rows
from tests.support.models import make_model

pytestmark = pytest.mark.usefixtures("process_group")

MAX_LENGTH = 30  # cuts some answers
BATCH_SIZE = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two models, and two files of pairs."""
    folder = tmp_path_factory.mktemp("reference")
    vocab_size = len(make_tokenizer())
    make_model(folder / "model", "qwen3", vocab_size=vocab_size, num_hidden_layers=1)
    make_model(folder / "other", "llama", vocab_size=vocab_size, num_hidden_layers=1)
    rows, _ = make_rows()
    write_rows(folder / "train.jsonl", [make_pair(*x) for x in enumerate(rows[:5])])
    write_rows(folder / "val.jsonl", [make_pair(*x) for x in enumerate(rows[5:8])])
    return folder


@pytest.fixture(scope="module")
def engines(folder, process_group) -> dict:
    cap = ["data.max_tokens_per_micro_batch=400"]
    device = torch.device("cpu")
    return {name: build(folder / name, device, more=cap) for name in ("model", "other")}


def load_rows(folder: Path, name: str) -> PreferenceDataset:
    file = folder / f"{name}.jsonl"
    config = load("dpo.yaml", [f"model.path={folder}/model", f"data.train_files={file}"])
    cache = folder / "tokens"
    path = tokenize_preferences(str(file), make_tokenizer(), config.data, cache, folder / "model")
    return PreferenceDataset.load(path)


def log_probs_one_by_one(engine, batch: Batch) -> torch.Tensor:
    sequences = batch.split([1] * len(batch))
    return torch.cat([engine.log_probs(sequence)[0] for sequence in sequences])


@pytest.mark.parametrize("policy, reference", [("model", "other"), ("other", "model")])
def test_the_baseline_of_kto_is_the_mean_divergence_but_at_least_0(
    folder, engines, policy, reference
):
    batch = load_rows(folder, "train").batch(range(5))
    pairs = mismatched(batch, MAX_LENGTH)
    assert pairs.cu_seqlens.diff().max() == MAX_LENGTH
    log_ratios = log_probs_one_by_one(engines[policy], pairs)
    log_ratios -= log_probs_one_by_one(engines[reference], pairs)
    expected = (log_ratios * pairs.fields["loss_mask"]).sum().item() / len(pairs)
    frozen = Reference(engines[reference], without_adapters=False)
    baseline, mean = estimate_kl(engines[policy], frozen, batch, MAX_LENGTH)
    assert abs(expected) > 0.01
    assert mean == pytest.approx(expected, rel=1e-4)
    assert baseline.item() == pytest.approx(max(0.0, expected), rel=1e-4)


def test_adapters_are_disabled_in_the_passes_of_a_reference(folder, engines):
    """Without reference.path, the reference is the trained model without its adapters."""
    batch = load_rows(folder, "train").batch(range(5))
    adapters = ["model.lora.rank=2", "data.max_tokens_per_micro_batch=400"]
    adapted = build(folder / "model", torch.device("cpu"), more=adapters)
    for name, parameter in adapted.hf.named_parameters():
        if ".lora_B" in name:
            parameter.detach().fill_(0.1)
    base_log_probs = engines["model"].log_probs(batch)[0]
    reference = Reference(adapted, without_adapters=True)
    micro_batches = adapted.plan(batch.lengths).micro_batches
    torch.testing.assert_close(reference.log_probs(batch, micro_batches), base_log_probs)
    assert (adapted.log_probs(batch)[0] - base_log_probs).abs().max() > 0.01


def test_the_log_probabilities_of_a_reference_are_computed_once(folder, engines, tmp_path, capsys):
    """Only those that are missing; and those that are damaged again."""
    pairs = [f"model.path={folder}/model", f"data.train_files={folder}/train.jsonl"]
    settings = [f"reference.path={folder}/other", f"data.train_batch_size={BATCH_SIZE}"]
    config = load("dpo.yaml", [*pairs, *settings])
    num_built = 0

    def make_reference() -> Reference:
        nonlocal num_built
        num_built += 1
        return Reference(engines["other"], without_adapters=False)

    def cache(*names: str) -> list[str]:
        """Cache the rows of these files; return the lines that are printed."""
        datasets = [load_rows(folder, name) for name in names]
        cache_reference(config, datasets, tmp_path, make_reference)
        for dataset in datasets:
            batch = dataset.batch(range(len(dataset)))
            expected = log_probs_one_by_one(engines["other"], batch)
            torch.testing.assert_close(batch.fields["ref_log_probs"], expected)
        printed = capsys.readouterr().out.splitlines()
        return [line for line in printed if not line.startswith("data: ")]

    start = "reference: computing the log-probabilities of "
    train_folder = cache_folder(config, load_rows(folder, "train"), tmp_path)
    assert cache("train") == [f"{start}5 rows once, for {train_folder}"]
    assert num_built == 1
    assert cache("train") == []
    assert num_built == 1
    (line,) = cache("train", "val")
    assert line.startswith(f"{start}3 rows once")
    assert num_built == 2
    assert sorted(tmp_path.iterdir()) == sorted(tmp_path.glob("*-reference")), "no other files"

    np.save(train_folder / FILE, np.zeros(3, np.float32))
    assert cache("train", "val") == [f"{start}5 rows once, for {train_folder}"]
    assert num_built == 3
