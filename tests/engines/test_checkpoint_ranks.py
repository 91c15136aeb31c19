"""Checkpoints of two ranks, which are forks of this process."""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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


def random_numbers_of_rank(model: Path, directory: Path) -> list[float]:
    """Return random numbers from before and after this rank's generator is restored."""
    checkpointer = Checkpointer(directory, max_checkpoints=3, asynchronous=False)
    engine = StubEngine(model)
    torch.manual_seed(dist.get_rank())
    saved = save(checkpointer, 1, engine)
    numbers = [torch.rand(1).item()]
    torch.manual_seed(7)
    checkpointer.load(saved, engine)
    return [*numbers, torch.rand(1).item()]


def test_each_rank_goes_on_with_its_own_random_numbers(tmp_path):
    """With those of another rank, dropout would be the same on both."""
    model = make_model(tmp_path / "model", "qwen2_tied")
    ranks = on_ranks(2, tmp_path, random_numbers_of_rank, model, tmp_path / "checkpoints")
    for before, after in ranks:
        assert after == before
    assert ranks[0] != ranks[1]


class BackgroundEngine(StubEngine):
    """Writes at once, but reports the end only when a test says so."""

    def write(self, states: dict, directory: Path, group: dist.ProcessGroup | None) -> Future:
        super().write(states, directory, group)
        self.writing = Future()
        return self.writing


@dataclass
class Communication:
    """What ranks have exchanged so far: collectives by group, and the number of groups created."""

    in_default_group: int
    in_own_group: int
    num_groups: int

    @staticmethod
    def of(checkpointer: Checkpointer) -> "Communication":
        return Communication(
            dist.group.WORLD._get_sequence_number_for_group(),
            checkpointer.group._get_sequence_number_for_group(),
            dist.distributed_c10d._world.group_count,
        )


def communication_of_a_save(model: Path, directory: Path) -> tuple[Communication, Communication]:
    """Return the communication before and after the part of a save in the background."""
    checkpointer = Checkpointer(directory, max_checkpoints=3, asynchronous=True)
    engine = BackgroundEngine(model)
    save(checkpointer, 1, engine)
    before = Communication.of(checkpointer)
    engine.writing.set_result(None)
    checkpointer.wait()
    return before, Communication.of(checkpointer)


def test_a_save_in_the_background_has_a_group_of_its_own(tmp_path):
    """Training uses other groups at the same time, so ranks would mix up the two."""
    model = make_model(tmp_path / "model", "qwen2_tied")
    directory = tmp_path / "checkpoints"
    for before, after in on_ranks(2, tmp_path, communication_of_a_save, model, directory):
        assert after.in_default_group == before.in_default_group
        assert after.num_groups == before.num_groups
        assert after.in_own_group > before.in_own_group
