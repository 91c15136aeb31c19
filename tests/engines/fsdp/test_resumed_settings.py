"""A run that resumes with other settings of the optimizer."""

import copy

import pytest
import torch

from engines.fsdp.engine import FSDPEngine
from tests.engines.fsdp.cases import build, train

pytestmark = pytest.mark.usefixtures("process_group")

OWN_OPTIMIZER = """
import torch

class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1

def counting(params, lr, *, mu=0.5, **_):
    optimizer = Counting(params, lr=lr, momentum=mu)
    for group in optimizer.param_groups:
        group.update(mu=mu, count=0)
    return optimizer
"""
SETTINGS = {
    "adamw": (["optim.betas=[0.5,0.6]", "optim.eps=1e-5"], {"betas": (0.5, 0.6), "eps": 1e-5}),
    "muon": (
        ["optim.kwargs.momentum=0.3", "optim.kwargs.ns_steps=2"],
        {"momentum": 0.3, "ns_steps": 2},
    ),
}


def make_engine(folder, *settings: str) -> FSDPEngine:
    return build(folder / "qwen3", torch.device("cpu"), more=list(settings))


def first_group(engine: FSDPEngine) -> dict:
    return engine.optimizers[0].param_groups[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_configuration_wins_over_the_checkpoint(folder, name):
    changes, expected = SETTINGS[name]
    saved = make_engine(folder, f"optim.name={name}")
    train(saved, range(2))
    state = copy.deepcopy(saved.state())

    settings = [f"optim.name={name}", "optim.weight_decay=0.3", *changes]
    resumed = make_engine(folder, *settings)
    resumed.load_state(state)
    assert expected.items() <= first_group(resumed).items()
    assert first_group(resumed)["weight_decay"] == 0.3
    # The optimizer's state is loaded, so the next step differs from that of a new optimizer.
    continued = train(resumed, range(2, 4))
    assert continued != train(make_engine(folder, *settings), range(2, 4))

    unchanged = make_engine(folder, f"optim.name={name}")
    unchanged.load_state(state)
    assert train(unchanged, range(2, 4)) != continued


def test_the_configuration_wins_in_every_optimizer_of_an_engine(folder):
    """With Muon, AdamW updates what is not a hidden matrix."""
    saved = make_engine(folder, "optim.name=muon")
    train(saved, range(1))
    resumed = make_engine(folder, "optim.name=muon", "optim.weight_decay=0.3")
    resumed.load_state(saved.state())
    muon, adamw = resumed.optimizers
    assert muon.param_groups[0]["weight_decay"] == 0.3
    assert adamw.param_groups[0]["weight_decay"] == 0.3
    assert adamw.param_groups[1]["weight_decay"] == 0, "of norms"


def test_state_that_an_own_optimizer_keeps_in_its_groups_is_loaded(folder, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_OPTIMIZER)
    saved = make_engine(folder, f"optim.name={file}:counting")
    train(saved, range(2))
    settings = [f"optim.name={file}:counting", "optim.kwargs.mu=0.9"]
    resumed = make_engine(folder, *settings)
    resumed.load_state(saved.state())
    assert first_group(resumed)["count"] == 2
    assert first_group(resumed)["mu"] == 0.9
