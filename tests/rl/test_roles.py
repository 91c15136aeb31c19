"""The stages of a step, with engines that only record their calls."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from config import load
from engines import schedule
from profiling import Profiler
from rl import roles as roles_module
from rl.roles import Roles


class RecordingEngine:
    """An engine that trains nothing and reports the learning rate of each step.

    on_device: the parts that would be in the device's memory
    """

    def __init__(self, config, device, total_steps, **_):
        self.config = config
        self.total_steps = total_steps
        self.on_device = {"parameters", "optimizer"}

    def offload(self, *parts):
        self.on_device -= set(parts)

    def onload(self):
        self.on_device = {"parameters", "optimizer"}

    def train_batch(self, batch, loss_fn, step, micro_batches):
        rate = schedule.learning_rate(self.config.optim, step, self.total_steps)
        return {"lr": rate, "skipped": 0}


class RecordingRollout:
    """A vLLM that generates nothing. It records what engines hold on the device when it wakes.

    held: the part of vLLM that wakes up -> role -> the parts that its engine holds
    """

    is_current = False
    has_base = True
    adapter = None

    def __init__(self, engines):
        self.engines = engines
        self.held = {}

    def wake(self, part):
        self.held[part] = {role: set(engine.on_device) for role, engine in self.engines.items()}


@pytest.fixture
def make_roles(monkeypatch):
    """Return a function that builds Roles with recording engines from settings."""
    monkeypatch.setattr(roles_module, "engine_class", lambda name: RecordingEngine)
    monkeypatch.setattr(dist, "new_group", lambda backend: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)

    def make(total_steps, *settings, device="cpu"):
        config = load("ppo.yaml", ["model.path=unused", "data.train_files=unused", *settings])
        return Roles(config, torch.device(device), None, None, Profiler(), total_steps)

    return make


def test_the_actors_schedule_begins_after_the_critics_warm_up(make_roles):
    num_steps = 6
    num_warmup_steps = 2
    roles = make_roles(
        num_steps,
        "algorithm.adv_estimator=gae",
        f"critic.warmup_steps={num_warmup_steps}",
        "critic.lr=2.0",
        "optim.lr=1.0",
        "optim.lr_scheduler_type=cosine",
    )
    part = (None, SimpleNamespace(micro_batches=None))
    share = SimpleNamespace(parts=[part], batch=[])

    actor_metrics = [roles.update_actor(share, step) for step in range(num_steps)]
    critic_metrics = [roles.update_critic(share, step) for step in range(num_steps)]

    optim = roles.actor.config.optim
    num_actor_steps = num_steps - num_warmup_steps
    expected = [schedule.learning_rate(optim, k, num_actor_steps) for k in range(num_actor_steps)]
    assert actor_metrics[:num_warmup_steps] == [{}] * num_warmup_steps
    assert [m["actor/lr"] for m in actor_metrics[num_warmup_steps:]] == expected
    assert expected[0] == 1.0
    critic_optim = roles.critic.config.optim
    expected = [schedule.learning_rate(critic_optim, k, num_steps) for k in range(num_steps)]
    assert [m["critic/lr"] for m in critic_metrics] == expected


def test_trained_engines_leave_the_device_before_vllm_wakes(make_roles):
    """vLLM's weights need the critic's memory. The actor keeps its parameters until they are sent.

    Before this, a checkpoint was saved, which moves everything to the device.
    """
    roles = make_roles(6, "algorithm.adv_estimator=gae", device="cuda")
    assert roles.offloaded == ["parameters", "optimizer"]
    engines = {"actor": roles.actor, "critic": roles.critic}
    roles.rollout = RecordingRollout(engines)
    for engine in engines.values():
        engine.onload()

    roles.wake()

    assert roles.rollout.held["weights"] == {"actor": {"parameters"}, "critic": set()}
    assert roles.rollout.held["kv_cache"] == {"actor": set(), "critic": set()}
