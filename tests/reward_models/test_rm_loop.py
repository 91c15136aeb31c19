"""The loop of train_rm.py, with an engine that computes nothing."""

from types import SimpleNamespace

import pytest
import torch

import train_rm
from data.batching.batch import Batch, make_cu_seqlens
from data.batching.order import global_batch
from tests.job.test_run import make_run

NUM_RANKS = 4
PEAK = 100.0  # FLOPs per second of one device
SECONDS_PER_LOOK = 2.0  # by which the clock advances whenever it is read


class Dataset:
    """Rows of two conversations: of 2 and 3 tokens, of 3 and 4 tokens, and so on."""

    def __len__(self) -> int:
        return 6

    def batch(self, rows) -> Batch:
        lengths = torch.tensor([2 + row + answer for row in rows for answer in (0, 1)])
        ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        cu_seqlens = make_cu_seqlens(lengths)
        mask = torch.ones(len(ids))
        mask[cu_seqlens[:-1]] = 0
        return Batch(ids, cu_seqlens, {"loss_mask": mask})


class Trainer:
    """An engine, and what trains with it."""

    def __init__(self):
        self.engine = self

    def train_batch(self, batch, step):
        return {"loss": 1.0, "skipped": float(step == 0)}

    def flops(self, lengths, num_predicted):
        return 1000.0 * sum(lengths) + num_predicted


@pytest.fixture
def lines(own_signals, process_group, tmp_path, monkeypatch) -> list[dict]:
    """The metrics of a run of three steps of two rows."""
    run = make_run(tmp_path, "data.train_batch_size=2", total_steps=3, script="rm.yaml")
    run.world_size = NUM_RANKS
    run.train = Dataset()
    run.val = None
    run.order = SimpleNamespace(rows_of_batch=lambda step: global_batch(6, 2, 0, step))
    run.progress = train_rm.RewardProgress(identity={})
    run.agreement.begin(total_steps=10)
    lines = []
    run.tracker = SimpleNamespace(log=lambda step, line: lines.append({"step": step, **line}))
    clock = iter(range(1000))
    now = SimpleNamespace(perf_counter=lambda: SECONDS_PER_LOOK * next(clock))
    monkeypatch.setattr(train_rm, "time", now)
    monkeypatch.setattr("engines.parallel.device.peak_flops", lambda device: PEAK)
    train_rm.train(run, Trainer())
    return lines


def test_metrics_of_a_step_are_those_of_the_whole_batch(lines):
    """The head computes one score for each conversation."""
    assert [line["step"] for line in lines] == [1, 2, 3]
    for step, line in enumerate(lines, 1):
        batch = Dataset().batch(global_batch(6, 2, 0, step - 1))
        num_tokens = len(batch.input_ids)
        flops = 1000 * num_tokens + 4
        assert line["train/loss"] == 1
        assert line["train/skipped"] == 1, "one so far"
        assert line["train/epoch"] == step / 5
        assert line["perf/tokens_per_second"] == num_tokens / SECONDS_PER_LOOK / NUM_RANKS
        assert line["perf/mfu"] == pytest.approx(flops / SECONDS_PER_LOOK / NUM_RANKS / PEAK)
