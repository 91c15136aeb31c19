"""The random numbers of adapter dropout: which passes and ranks draw the same."""

import torch

from config import load
from engines.dropout import DropoutSeeds


def make_seeds(*pairs: str) -> DropoutSeeds:
    needed = ["model.path=m", "data.train_files=t", "model.lora.rank=4", "model.lora.dropout=0.1"]
    return DropoutSeeds(load("sft.yaml", [*needed, *pairs]))


def draw(seeds: DropoutSeeds, step: int, *ranks: int) -> float:
    with seeds.seeded(step, *ranks):
        return torch.rand(()).item()


def test_every_batch_of_a_run_draws_its_own_numbers_and_a_resumed_run_the_same():
    seeds = make_seeds()
    steps = [0, 0, 0, 1, 1, 2]
    drawn = [draw(seeds, step) for step in steps]
    assert len({*drawn}) == len(drawn)
    resumed = make_seeds()
    assert [draw(resumed, step) for step in steps[3:]] == drawn[3:]


def test_ranks_and_seeds_draw_different_numbers():
    drawn = [draw(make_seeds(), 0, *ranks) for ranks in ((0,), (1,), (0, 1), (1, 0))]
    drawn.append(draw(make_seeds("trainer.seed=5"), 0, 0))
    assert len({*drawn}) == len(drawn)


def test_the_users_generator_goes_on_as_if_there_were_no_dropout():
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    first = torch.rand(()).item()
    draw(make_seeds(), 0)
    assert [first, torch.rand(()).item()] == expected


def test_without_dropout_no_seed_is_set():
    for pair in ("model.lora.dropout=0", "model.lora.rank=0"):
        torch.manual_seed(3)
        expected = torch.rand(()).item()
        torch.manual_seed(3)
        assert draw(make_seeds(pair), 0) == expected
