"""The cache of the reference's log-probabilities: what its name depends on, and what it spares."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig

from common import disk
from config import InputError, load
from data.batching.plan import Plan
from data.preference_dataset import PreferenceDataset, tokenize_preferences
from examples.arithmetic import make_tokenizer
from preferences.cache import (
    Writer,
    attach_cached,
    cache_folder,
    is_intact,
    log_probs_of_rows,
    write_cache,
)
from preferences.losses import PreferenceLoss
from preferences.reference import model_stages, role_configs
from tests.preferences.assets import make_pair, write_rows
from tests.support.models import make_model
from tests.support.planned import PlannedEngine
from tests.support.ranks import on_ranks

QUESTION = {"role": "user", "content": "What is 1+1"}
ROWS = [
    {"messages": [QUESTION, {"role": "assistant", "content": str(number)}]} for number in range(4)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    tokenizer = make_tokenizer()
    for name, family in (("model", "qwen3"), ("other", "llama")):
        make_model(folder / name, family, vocab_size=len(tokenizer))
    pairs = [make_pair(number + 1, row) for number, row in enumerate(ROWS)]
    write_rows(folder / "rows.jsonl", pairs)
    write_rows(folder / "fewer.jsonl", pairs[:-1])
    return folder


def name_of(folder: Path, rows: str, *settings: str) -> str:
    """Return the name of the folder for a file of rows."""
    config = configure(folder, rows, *settings)
    tokens = tokens_of(folder, rows, *settings)
    return cache_folder(config, PreferenceDataset.load(tokens), folder).name


def configure(folder: Path, rows: str, *settings: str) -> DictConfig:
    model = f"model.path={folder}/model"
    return load("dpo.yaml", [model, f"data.train_files={folder}/{rows}", *settings])


def tokens_of(folder: Path, rows: str, *settings: str) -> Path:
    """Return the folder of the tokenized rows of a file."""
    data = configure(folder, rows, *settings).data
    tokenizer = make_tokenizer()
    return tokenize_preferences(
        data.train_files, tokenizer, data, folder / "tokens", folder / "model"
    )


@pytest.mark.parametrize(
    "rows, settings",
    [
        ("fewer.jsonl", []),
        ("rows.jsonl", ["reference.path={folder}/other"]),
        ("rows.jsonl", ["model.path={folder}/other"]),
        ("rows.jsonl", ["model_engine=megatron"]),
        ("rows.jsonl", ["engine.compute_dtype=float32"]),
        ("rows.jsonl", ["engine.param_dtype=bfloat16"]),
        ("rows.jsonl", ["engine.float8=rowwise"]),
        ("rows.jsonl", ["engine.float8_exclude=[o_proj]"]),
        ("rows.jsonl", ["data.system_prompt=Add"]),
    ],
    ids=[
        "rows",
        "reference",
        "model",
        "engine",
        "precision",
        "precision of weights",
        "8 bits",
        "without 8 bits",
        "prompt",
    ],
)
def test_what_changes_the_log_probabilities_changes_the_name(folder, rows, settings):
    changed = [setting.format(folder=folder) for setting in settings]
    assert name_of(folder, rows, *changed) != name_of(folder, "rows.jsonl")


def test_nothing_else_changes_the_name(folder):
    settings = ["optim.lr=1", "data.train_batch_size=2", "algorithm.beta=0.3", "trainer.seed=5"]
    settings.append(f"reference.path={folder}/model")
    assert name_of(folder, "rows.jsonl", *settings) == name_of(folder, "rows.jsonl")


@pytest.mark.parametrize(
    "settings, expected",
    [
        ([], ["ref_compute_log_prob", "train_batch"]),
        (["reference.cache=true"], ["train_batch"]),
        (["algorithm.loss=simpo"], ["train_batch"]),
        (["algorithm.loss=kto"], ["compute_kl", "ref_compute_log_prob", "train_batch"]),
    ],
    ids=["reference", "cached", "no reference", "KL"],
)
def test_a_cached_reference_computes_in_no_stage_of_a_step(settings, expected):
    config = load("dpo.yaml", ["model.path=m", "data.train_files=t", *settings])
    loss = PreferenceLoss.of(config)
    assert model_stages(config, loss, has_validation=False) == expected
    assert model_stages(config, loss, has_validation=True) == [*expected, "validate"]
    has_engine = "ref_compute_log_prob" in expected
    assert ("reference" in role_configs(config, loss)) == has_engine


class SharingEngine:
    """Two data-parallel ranks that both work on sequence 0; rank 1 also has sequences 1 to 3."""

    def __init__(self):
        self.dp_rank = dist.get_rank()

    def plan(self, lengths) -> Plan:
        sequences = [0] if self.dp_rank == 0 else [3, 0, 2, 1]
        return Plan(sequences, [], torch.tensor([0, 1, 1, 1]), torch.tensor([2, 1, 1, 1]))

    def sum_over_dp(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values


def log_probs_on_rank(dataset: PreferenceDataset) -> list[float]:
    def negative_ids(share, micro_batches):
        return -share.input_ids.float()

    reference = SimpleNamespace(engine=SharingEngine(), log_probs=negative_ids)
    return log_probs_of_rows(reference, dataset, range(2)).tolist()


def test_a_sequence_that_ranks_share_counts_once(folder, tmp_path):
    tokens = tokens_of(folder, "rows.jsonl")
    dataset = PreferenceDataset.load(tokens)
    expected = (-dataset.batch(range(2)).input_ids.float()).tolist()
    assert on_ranks(2, tmp_path, log_probs_on_rank, dataset) == [expected, expected]


def test_a_cache_that_does_not_fit_on_the_disk_is_refused_before_it_is_computed(tmp_path):
    """A number has four bytes."""
    writer = Writer(tmp_path / "cache", disk.free(tmp_path) // 3)
    with pytest.raises(InputError, match="the disk is full: .* MiB are free; make room"):
        writer.open()
    writer.close()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("failing_batch", [0, 1, None])
def test_a_cache_is_complete_or_not_there(folder, tmp_path, process_group, failing_batch):
    dataset = PreferenceDataset.load(tokens_of(folder, "rows.jsonl"))
    num_computed = 0

    def negative_ids(share, micro_batches):
        nonlocal num_computed
        if num_computed == failing_batch:
            raise MemoryError
        num_computed += 1
        return -share.input_ids.float()

    reference = SimpleNamespace(engine=PlannedEngine(), log_probs=negative_ids)
    cache = tmp_path / "cache"
    if failing_batch is not None:
        with pytest.raises(MemoryError):
            write_cache(reference, dataset, cache, batch_size=1)
        assert not [*tmp_path.iterdir()]
        return
    write_cache(reference, dataset, cache, batch_size=1)
    assert [*tmp_path.iterdir()] == [cache]
    assert is_intact(cache)
    attach_cached(dataset, cache)
    whole = dataset.batch(range(len(dataset)))
    assert torch.equal(whole.fields["ref_log_probs"], -whole.input_ids.float())
