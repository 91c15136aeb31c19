"""The loop of train_sft.py, with an engine that computes nothing but records what it is given."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import train_sft
from data.batching.batch import Batch, make_cu_seqlens
from data.batching.order import global_batch
from data.batching.plan import Plan
from job.order import make_order
from tests.job.test_run import make_run
from tests.support import loops

SECONDS_PER_LOOK = 2.0  # by which the clock advances whenever it is read
NUM_RANKS = 4
SEED = 3


class Dataset:
    """Rows of 2 and 3 tokens in turn, each of which is the row's number; the first is no answer."""

    def __init__(self, num_rows: int):
        self.lengths = torch.tensor([2 + row % 2 for row in range(num_rows)])

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows) -> Batch:
        rows = torch.tensor([*rows])
        lengths = self.lengths[rows]
        ids = rows.repeat_interleave(lengths)
        cu_seqlens = make_cu_seqlens(lengths)
        mask = torch.ones(len(ids))
        mask[cu_seqlens[:-1]] = 0
        return Batch(ids, cu_seqlens, {"loss_mask": mask, "answer_mask": mask})


class Engine:
    """Rank 0 of two data-parallel ranks, which gets all sequences in reverse order.

    Each token's log-probability is the negative half of its row's number. Rows 1 and 3 are not what
    greedy decoding returns.

    steps: the step, the ids of the share, the micro-batches and the loss of each train_batch()
    first: the rank that reports each sequence of a batch
    """

    dp_rank = 0

    def __init__(self):
        self.steps = []
        self.first = torch.zeros(2, dtype=torch.int64)

    def image_flops(self, batch):
        return [10.0] * len(batch)

    def plan(self, lengths, image_flops=None):
        order = [*range(len(lengths))][::-1]
        metrics = {"perf/images": sum(image_flops or [])}
        return Plan(order, f"of {lengths}", self.first[: len(lengths)], self.first + 1, metrics)

    def train_batch(self, share, loss_fn, step, micro_batches):
        log_probs = torch.full((len(share.input_ids),), -0.5, requires_grad=True)
        loss, amounts = loss_fn(log_probs, torch.full_like(log_probs, 2.0), share.fields)
        self.steps.append((step, share.input_ids.tolist(), micro_batches))
        return {
            "loss": loss.item(),
            "entropy": amounts["entropy"].item(),
            "router/load": 7.0,
            "skipped": float(step == 0),
        }

    def flops(self, lengths, num_predicted):
        return 1000.0 * sum(lengths) + num_predicted

    def log_probs(self, batch, micro_batches):
        rows = batch.input_ids
        return -0.5 * rows, None, (rows != 1) & (rows != 3)

    def sum_over_dp(self, totals):
        return totals


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def finished(own_signals, one_rank, tmp_path, monkeypatch):
    """A run of three steps, which saves after the second, and its engine, after the loop."""
    pairs = ["data.val_files=v", "trainer.val_before_train=true", "data.train_batch_size=2"]
    run = make_run(tmp_path, *pairs, f"trainer.seed={SEED}", total_steps=3)
    run.world_size = NUM_RANKS
    run.train = Dataset(10)
    run.order = make_order(run.config, run.train, total_steps=3)
    run.val = Dataset(5)
    run.progress = train_sft.SftProgress(identity={})
    run.agreement.save_freq = 2
    run.agreement.begin(total_steps=10)
    run.tokenizer = "tokenizer"
    saved = []
    run.checkpointer = SimpleNamespace(save=lambda *values: saved.append(values), saved=saved)
    run.tracker = SimpleNamespace(lines=[])
    run.tracker.log = lambda step, line: run.tracker.lines.append({"step": step, **line})
    run.profiler.on_stage = run.heartbeat.enter
    clock = iter(range(1000))
    now = SimpleNamespace(perf_counter=lambda: SECONDS_PER_LOOK * next(clock))
    monkeypatch.setattr(train_sft, "time", now)
    monkeypatch.setattr("engines.parallel.device.peak_flops", lambda device: 100.0)
    engine = Engine()
    train_sft.train(run, engine)
    return run, engine


class Trainer(loops.Trainer):
    """The engine of the checks that all loops of fine-tuning share."""

    def image_flops(self, batch):
        return [0.0] * len(batch)

    def plan(self, lengths, image_flops):
        half = range(len(lengths) // 2)  # other ranks train on the rest
        return SimpleNamespace(sequences=half, micro_batches=None, metrics={})

    def train_batch(self, share, loss_fn, step, micro_batches):
        return super().train_batch(share, step)


@pytest.fixture
def loop(own_signals, one_rank, tmp_path, monkeypatch) -> loops.Loop:
    progress = train_sft.SftProgress(identity={})
    loop = loops.make_loop(train_sft, "sft.yaml", progress, tmp_path, monkeypatch)
    loop.trainer = Trainer()
    monkeypatch.setattr(train_sft, "validate", loops.Trainer.validate)
    return loop


def test_each_step_trains_on_its_rows_in_the_order_of_the_plan(finished):
    run, engine = finished
    for step, (number, ids, micro_batches) in enumerate(engine.steps):
        rows = list(global_batch(10, 2, SEED, step))
        lengths = run.train.lengths[rows].tolist()
        assert number == step
        assert ids == run.train.batch(rows[::-1]).input_ids.tolist()
        assert micro_batches == f"of {lengths}"
    assert len(engine.steps) == 3


def test_metrics_of_a_step_are_those_of_the_whole_batch(finished):
    run, _ = finished
    assert [line["step"] for line in run.tracker.lines] == [0, 1, 2, 3]
    for step, line in enumerate(run.tracker.lines[1:], 1):
        rows = list(global_batch(10, 2, SEED, step - 1))
        num_tokens = run.train.lengths[rows].sum().item()
        assert line["train/loss"] == pytest.approx(0.5), "the mean over trained tokens"
        assert line["train/entropy"] == pytest.approx(2)
        assert line["router/load"] == 7
        assert line["train/skipped"] == 1, "one so far"
        assert line["train/epoch"] == step / 5
        assert line["perf/images"] == 20
        assert line["perf/tokens_per_second"] == num_tokens / SECONDS_PER_LOOK / NUM_RANKS
        flops = 1000 * num_tokens + (num_tokens - 2) + 20
        assert line["perf/mfu"] == pytest.approx(flops / SECONDS_PER_LOOK / NUM_RANKS / 100)
        assert line["timing/step"] == 2 * SECONDS_PER_LOOK
        assert {"timing/data", "timing/train_batch", "perf/memory_peak_gib"} < line.keys()


def test_a_checkpoint_is_saved_when_it_is_due_with_the_progress_after_the_step(finished):
    run, engine = finished
    ((step, saved_engine, progress, tokenizer),) = run.checkpointer.saved
    assert (step, saved_engine, tokenizer) == (2, engine, "tokenizer")
    assert progress["step"] == 2
    assert progress["skipped"] == 1


def test_stages_are_reported_with_their_step(finished):
    run, _ = finished
    stages = [("data", 1), ("train_batch", 1), ("data", 2), ("train_batch", 2), ("save", 2)]
    stages += [("data", 3), ("train_batch", 3), ("validate", 3)]
    assert run.heartbeat.entered == [("validate", None), *stages]


def test_each_stage_has_its_engine(loop):
    stages = {"data": False, "train_batch": True, "validate": True, "save": False}
    loops.check_each_stage_has_its_engine(loop, stages)


def test_metrics_count_the_tokens_of_all_ranks(loop):
    num_sequences = 4  # the first token of each is not predicted
    loops.check_metrics(loop, lambda num_tokens: num_tokens - num_sequences)


@pytest.mark.parametrize("check", loops.CHECKS, ids=lambda check: check.__name__)
def test_the_loop_does_what_all_loops_do(loop, check):
    check(loop)


def test_validation_covers_every_row_before_and_after_training(finished):
    run, _ = finished
    first, *steps, last = run.tracker.lines
    # Rows 0 to 4 have 1, 2, 1, 2 and 1 trained tokens.
    loss = 0.5 * (0 * 1 + 1 * 2 + 2 * 1 + 3 * 2 + 4 * 1) / 7
    for line in (first, last):
        assert line["val/loss"] == pytest.approx(loss)
        assert line["val/exact_match"] == pytest.approx(3 / 5)
    assert not any("val/loss" in line for line in steps)


@pytest.mark.parametrize("first, rows, num_exact", [([0, 1], [0, 2, 4], 3), ([1, 0], [1, 3], 0)])
def test_a_row_of_several_ranks_is_validated_once(one_rank, first, rows, num_exact):
    """The other rows of each batch are reported by rank 1."""
    engine = Engine()
    engine.first = torch.tensor(first)
    metrics = train_sft.validate(engine, Dataset(5), 2)
    lengths = [1 + row % 2 for row in rows]
    loss = 0.5 * sum(row * length for row, length in zip(rows, lengths)) / sum(lengths)
    expected = {"val/loss": loss, "val/exact_match": num_exact / len(rows)}
    assert metrics == pytest.approx(expected)


def test_losses_and_entropies_of_micro_batches_add_up_to_means_over_trained_tokens():
    loss_fn = train_sft.sft_loss(4)
    log_probs = torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0])
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    losses = []
    entropies = []
    for part in (slice(0, 4), slice(4, 5)):
        loss, amounts = loss_fn(log_probs[part], -3 * log_probs[part], {"loss_mask": mask[part]})
        losses.append(loss)
        entropies.append(amounts["entropy"])
    assert sum(losses) == (2 + 4 + 8 + 16) / 4
    assert sum(entropies) == 3 * (2 + 4 + 8 + 16) / 4


class Conversations(Dataset):
    """Rows of three tokens: a prompt, the whole first answer, and the whole last one."""

    def __init__(self, num_rows: int):
        self.lengths = torch.full((num_rows,), 3)

    def batch(self, rows) -> Batch:
        num_rows = len(rows)
        ids = torch.zeros(3 * num_rows, dtype=torch.int64)
        loss_mask = torch.tensor([0.0, 1.0, 1.0]).repeat(num_rows)
        answer_mask = torch.tensor([0.0, 0.0, 1.0]).repeat(num_rows)
        fields = {"loss_mask": loss_mask, "answer_mask": answer_mask}
        return Batch(ids, make_cu_seqlens(self.lengths[[*rows]]), fields)


@pytest.mark.parametrize("is_greedy, expected", [([1, 0, 1], 1.0), ([1, 1, 0], 0.0)])
def test_the_last_answer_decides_whether_a_row_matches(one_rank, is_greedy, expected):
    engine = Engine()
    greedy_tokens = torch.tensor(is_greedy, dtype=torch.bool).repeat(2)
    engine.log_probs = lambda batch, micro_batches: (-torch.ones(6), None, greedy_tokens)
    metrics = train_sft.validate(engine, Conversations(2), 2)
    assert metrics == {"val/loss": 1.0, "val/exact_match": expected}
