"""The loop of train_ppo.py, with roles that compute nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_ppo
from config import load
from job.run import Run
from profiling import Profiler
from tests.support.samples import make_samples

NUM_RANKS = 4
SECONDS_PER_LOOK = 2.0  # by which the clock advances whenever it is read


class Heartbeat:
    """Records the stages that it is told of."""

    def __init__(self):
        self.stages = []

    def enter(self, stage, step=None):
        self.stages.append((stage, step))


class Agreement:
    """Never stops, and saves after the last step."""

    stop = False

    def __init__(self, last_step):
        self.last_step = last_step
        self.save = False

    def begin(self, total_steps):
        """Nothing to do: there are no signals."""

    def describe(self):
        return "checkpoints: after the last step"

    def update(self, step, device):
        self.save = step == self.last_step


class Roles:
    """Draws the same samples in every step, of which the first step's actor is still waiting."""

    host_group = None

    def __init__(self, profiler):
        self.profiler = profiler
        self.samples = make_samples([1, 2, 3], [1, 0, 2], [0, 0, 1])
        self.saved = []

    def wake(self):
        with self.profiler.stage("wake"):
            pass

    def collect(self, dataset, batch_index, step):
        with self.profiler.stage("rollout_generate"):
            return self.samples, batch_index + 2

    def sleep(self):
        return {}

    def divide(self, samples):
        return SimpleNamespace(num_mini_batches=3)

    def compute_log_probs(self, share, step):
        """Nothing to fill."""

    def compute_values(self, share):
        """Nothing to fill."""

    def compute_advantages(self, samples, share, kl_coef):
        return {}

    def update_critic(self, share, step):
        return {"critic/skipped": 1}

    def update_actor(self, share, step):
        return {} if step == 0 else {"actor/skipped": 0}

    def memory(self):
        return {}

    def save(self, checkpointer, step, progress):
        self.saved.append(progress)


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A run of two steps and its roles, after the loop."""
    pairs = ["model.path=m", "data.train_files=t", f"output_dir={tmp_path}"]
    config = load("ppo.yaml", [*pairs, "algorithm.ppo_epochs=2", "trainer.rollout_freq=-1"])
    run = Run(
        config=config,
        named_config=config,
        device=torch.device("cpu"),
        rank=0,
        world_size=NUM_RANKS,
        output_dir=Path(tmp_path),
        heartbeat=Heartbeat(),
        agreement=Agreement(last_step=2),
    )
    run.steps_per_epoch = 4
    run.total_steps = 2
    run.train = [0]
    run.val = None
    run.profiler = Profiler()
    run.progress = train_ppo.PpoProgress(identity={}, kl_coef=0.5)
    run.resume_from = None
    run.checkpointer = None
    run.start("1 prompt")
    run.tracker = SimpleNamespace(
        lines=[],
        log=lambda step, line: run.tracker.lines.append(line),
        report_failures=lambda step, samples: None,
    )
    roles = Roles(run.profiler)
    clock = iter(range(1000))
    now = SimpleNamespace(perf_counter=lambda: SECONDS_PER_LOOK * next(clock))
    monkeypatch.setattr(train_ppo, "time", now)
    train_ppo.train(run, roles)
    return run, roles


def test_the_heartbeat_hears_of_every_stage(finished):
    run, _ = finished
    names = ["wake", "rollout_generate"]
    assert run.heartbeat.stages == [(name, step) for step in (1, 2) for name in names]


def test_tokens_per_second_are_those_of_one_device(finished):
    run, roles = finished
    num_tokens = roles.samples.lengths.sum().item()
    for line in run.tracker.lines:
        assert line["perf/tokens_per_second"] == num_tokens / SECONDS_PER_LOOK / NUM_RANKS


def test_progress_counts_batches_and_the_updates_of_each_model(finished):
    run, roles = finished
    (progress,) = roles.saved
    assert progress["step"] == 2
    assert progress["batch"] == 4
    assert progress["kl_coef"] == 0.5
    updates_per_step = 3 * 2
    assert progress["critic_updates"] == 2 * updates_per_step
    assert progress["critic_skipped"] == 2
    assert progress["actor_updates"] == updates_per_step, "it waits in the first step"
    assert progress["actor_skipped"] == 0
    assert [line["train/epoch"] for line in run.tracker.lines] == [0.5, 1.0]
