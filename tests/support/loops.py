"""The loops of train_dpo.py and train_rm.py, with an engine that computes nothing."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from data.batching.batch import Batch, make_cu_seqlens
from data.batching.order import global_batch
from tests.job.test_run import STEPS_PER_EPOCH, make_run

NUM_RANKS = 4
NUM_ROWS = 6
ROWS_PER_STEP = 2
FLOPS_PER_TOKEN = 1000
PEAK = 100.0  # FLOPs per second of one device
SECONDS_PER_LOOK = 2.0  # by which the clock advances whenever it is read


class Dataset:
    """Rows of two sequences: of 2 and 3 tokens, of 3 and 4 tokens, and so on."""

    def __len__(self) -> int:
        return NUM_ROWS

    def batch(self, rows) -> Batch:
        lengths = torch.tensor([2 + row + number for row in rows for number in (0, 1)])
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
        return float(FLOPS_PER_TOKEN * sum(lengths) + num_predicted)


def rows_of_step(step: int):
    return global_batch(NUM_ROWS, ROWS_PER_STEP, 0, step)


def run_loop(
    script: ModuleType, defaults: str, progress, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict]:
    """Run three steps of a script's loop, and return their metrics.

    Args:
        defaults: the script's file in configs/.
        progress: its empty progress.
    """
    batch_size = f"data.train_batch_size={ROWS_PER_STEP}"
    run = make_run(directory, batch_size, total_steps=3, script=defaults)
    run.world_size = NUM_RANKS
    run.train = Dataset()
    run.val = None
    run.order = SimpleNamespace(rows_of_batch=rows_of_step)
    run.progress = progress
    run.agreement.begin(total_steps=10)
    lines = []
    run.tracker = SimpleNamespace(log=lambda step, line: lines.append({"step": step, **line}))
    clock = iter(range(1000))
    now = SimpleNamespace(perf_counter=lambda: SECONDS_PER_LOOK * next(clock))
    monkeypatch.setattr(script, "time", now)
    monkeypatch.setattr("engines.parallel.device.peak_flops", lambda device: PEAK)
    script.train(run, Trainer())
    return lines


def check_metrics(lines: list[dict], num_predicted_of) -> None:
    """Check that the metrics of each step are those of the whole batch.

    Args:
        num_predicted_of: the number of tokens of a batch -> how many of them the head computes.
    """
    assert [line["step"] for line in lines] == [1, 2, 3]
    for step, line in enumerate(lines, 1):
        num_tokens = len(Dataset().batch(rows_of_step(step - 1)).input_ids)
        flops = FLOPS_PER_TOKEN * num_tokens + num_predicted_of(num_tokens)
        assert line["train/loss"] == 1
        assert line["train/skipped"] == 1, "one so far"
        assert line["train/epoch"] == step / STEPS_PER_EPOCH
        assert line["perf/tokens_per_second"] == num_tokens / SECONDS_PER_LOOK / NUM_RANKS
        assert line["perf/mfu"] == pytest.approx(flops / SECONDS_PER_LOOK / NUM_RANKS / PEAK)
