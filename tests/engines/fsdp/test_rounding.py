"""Weights in bfloat16 that are too large for an update to change them."""

import pytest
import torch

from engines.fsdp.engine import FSDPEngine
from engines.fsdp.rounding import count_movable, movable_share
from tests.engines.fsdp.cases import build, make_config

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
BF16 = ["engine.param_dtype=bfloat16", "engine.compute_dtype=bfloat16"]
ADAPTERS = ["model.lora.rank=4", "model.lora.dtype=bfloat16"]


def test_weights_move_if_the_next_bfloat16_number_is_near():
    # Between 1 and 2, bfloat16 has steps of 2 ** -7, and just below 1 of 2 ** -8.
    weights = torch.tensor([0.0, 1.0, 1.5, -1.5], dtype=torch.bfloat16)
    assert count_movable(weights, 2.0**-10) == 1
    assert count_movable(weights, 1.1 * 2.0**-9) == 2
    assert count_movable(weights, 1.1 * 2.0**-8) == 4
    assert count_movable(weights.float(), 2.0**-10) == 4


def test_the_share_is_what_an_optimizer_moves():
    torch.manual_seed(0)
    values = torch.randn(10_000) * 0.02
    moved = torch.zeros(10_000, dtype=torch.bool)
    for sign in (1.0, -1.0):
        parameter = torch.nn.Parameter(values.bfloat16())
        parameter.grad = torch.full_like(parameter, sign)
        torch.optim.AdamW([parameter], lr=1e-5, weight_decay=0.0, fused=True).step()
        moved |= parameter.detach() != values.bfloat16()
    share = movable_share([torch.nn.Parameter(values.bfloat16())], 1e-5, CPU)
    assert 0.05 < share < 0.5
    assert share == pytest.approx(moved.float().mean().item(), rel=0.01)


@pytest.mark.parametrize(
    "settings, message",
    [
        ([*BF16, "optim.rounding=nearest"], "engine.param_dtype"),
        ([*ADAPTERS, "optim.rounding=nearest"], "model.lora.dtype"),
        (BF16, None),
        (ADAPTERS, None),
        (["model.lora.rank=4"], None),
        ([], None),
    ],
)
def test_rounding_to_the_nearest_reports_the_share(folder, capfd, settings, message):
    build(folder / "qwen3", CPU, more=settings)
    printed = [line for line in capfd.readouterr().out.splitlines() if "rounding" in line]
    assert len(printed) == (1 if message else 0)
    if message:
        assert printed[0].startswith(f"{message}=bfloat16: an update of optim.lr=")


@pytest.mark.parametrize(
    "settings, is_reported",
    [
        ([*BF16, "model.lora.rank=4"], True),
        ([*BF16, *ADAPTERS], False),
        (BF16, False),
        (["model.lora.rank=4"], False),
    ],
)
def test_a_dtype_that_adapters_do_not_have_is_reported(folder, capsys, settings, is_reported):
    FSDPEngine.check(make_config(folder, *settings), 1)
    message = "engine.param_dtype=bfloat16 does not apply with model.lora: the adapters have"
    assert (message in capsys.readouterr().out) == is_reported
