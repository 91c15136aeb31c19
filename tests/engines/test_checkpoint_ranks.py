"""Checkpoints of two ranks, which are forks of this process."""

from pathlib import Path

import pytest

from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.storage import read_manifest
from engines.parallel.device import on_rank0, set_timeouts
from tests.engines.stub_engine import StubEngine, save
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.training import flip_bit

MINUTES = 0.2  # that ranks wait for one another


def find_beside_damage(model: Path, directory: Path, number: int) -> tuple[str, list[str]]:
    """Save two checkpoints, damage a file of the second one, and return which is found.

    Args:
        number: of the file, in the order in which ranks divide the files among them.

    Returns:
        The name of the checkpoint that is found, and the names of all checkpoints after that.
    """
    set_timeouts(MINUTES)
    checkpointer = Checkpointer(directory, max_checkpoints=3, asynchronous=False)
    set_timeouts(MINUTES)
    engine = StubEngine(model)
    save(checkpointer, 1, engine)
    newest = save(checkpointer, 2, engine)
    damaged = newest / sorted(read_manifest(newest).checksums)[number]
    group = checkpointer.group
    on_rank0(flip_bit, damaged, group=group)
    found = checkpointer.find("auto")
    names = on_rank0(lambda: sorted(path.name for path in directory.glob("step_*")), group=group)
    return found.name, names


@pytest.mark.parametrize("number", [0, 1])
def test_damage_that_one_rank_finds_is_known_to_all(tmp_path, number):
    """Two ranks verify every second file each."""
    model = make_model(tmp_path / "model", "qwen2_tied")
    expected = ("step_00000001", ["step_00000001", "step_00000002.damaged"])
    found = on_ranks(2, tmp_path, find_beside_damage, model, tmp_path / "checkpoints", number)
    assert found == [expected, expected]
