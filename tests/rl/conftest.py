"""A fixture of the tests of roles."""

import pytest
import torch
import torch.distributed as dist

from config import load
from profiling import Profiler
from rl import roles as roles_module
from rl.roles import Roles
from tests.rl.recording import RecordingEngine


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
