"""The plan that a dry run prints."""

from types import SimpleNamespace

import torch

from common import disk
from config import load
from engines.build import engine_class
from engines.heads import Head
from job.plan import print_plan
from tests.support.models import make_model


def test_each_role_is_estimated_for_its_own_model(tmp_path, capsys):
    """The critic has twice as many layers as the actor."""
    roles = {}
    for role, num_layers in (("actor", 2), ("critic", 4)):
        make_model(tmp_path / role, "qwen3", num_hidden_layers=num_layers)
        needed = [f"model.path={tmp_path / role}", "data.train_files=t", f"output_dir={tmp_path}"]
        roles[role] = load("sft.yaml", needed)
    run = SimpleNamespace(
        world_size=1,
        device=torch.device("cpu"),
        train=None,
        val=None,
        total_steps=8,
        resume_from=None,
    )
    print_plan(run, roles)
    printed = capsys.readouterr().out
    engine = engine_class("fsdp")
    actor_bytes = engine.checkpoint_bytes(roles["actor"], Head.LOG_PROBS)
    critic_bytes = engine.checkpoint_bytes(roles["critic"], Head.VALUES)
    assert f"checkpoint of the actor: {disk.format_bytes(actor_bytes)};" in printed
    assert f"checkpoint of the critic: {disk.format_bytes(critic_bytes)};" in printed
