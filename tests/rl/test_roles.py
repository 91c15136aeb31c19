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
    """An engine that trains nothing and reports the learning rate of each step."""

    def __init__(self, config, device, total_steps, **_):
        self.config = config
        self.total_steps = total_steps

    def offload(self, *parts):
        """Do nothing: this engine holds no tensors."""

    def train_batch(self, batch, loss_fn, step, micro_batches):
        rate = schedule.learning_rate(self.config.optim, step, self.total_steps)
        return {"lr": rate, "skipped": 0}


@pytest.fixture
def make_roles(monkeypatch):
    """Return a function that builds Roles with recording engines from settings."""
    monkeypatch.setattr(roles_module, "engine_class", lambda name: RecordingEngine)
    monkeypatch.setattr(dist, "new_group", lambda backend: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)

    def make(total_steps, *settings):
        config = load("ppo.yaml", ["model.path=unused", "data.train_files=unused", *settings])
        device = torch.device("cpu")
        return Roles(config, device, None, None, Profiler(), total_steps)

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
