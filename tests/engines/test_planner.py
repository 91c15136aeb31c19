"""How a batch is cut into micro-batches on one rank: padding, caps and groups of sequences."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig

from config import load
from engines.planning import Planner, round_up

pytestmark = pytest.mark.usefixtures("process_group")


def make_config(cap: int, *pairs: str) -> DictConfig:
    settings = ["model.path=m", "data.train_files=t", f"data.max_tokens_per_micro_batch={cap}"]
    return load("sft.yaml", [*settings, *pairs])


def make_planner(
    config: DictConfig, multiple: int = 1, micro_batches_multiple: int = 1, dp_size: int = 1
) -> Planner:
    return Planner(
        config,
        0,
        dp_size,
        dist.group.WORLD,
        torch.device("cpu"),
        lambda size: multiple * size,
        micro_batches_multiple,
    )


PADDED = "engine.use_remove_padding=false"


def test_numbers_are_rounded_up_to_multiples():
    assert [round_up(number, 4) for number in (0, 1, 4, 5)] == [0, 4, 4, 8]


@pytest.mark.parametrize(
    "pairs, multiple, lengths, num_micro_batches",
    [
        ((), 1, [5, 5, 5], 1),
        ((), 8, [5, 5, 5], 2),  # 8 tokens each
        ((), 1, [10, 3, 3], 1),
        ((PADDED,), 1, [10, 3, 3], 2),  # three rows of 10 tokens would be 30
        ((PADDED,), 4, [5, 5, 5], 2),  # three rows of 8 tokens
    ],
)
def test_padding_counts_toward_the_cap(pairs, multiple, lengths, num_micro_batches):
    planner = make_planner(make_config(16, *pairs), multiple)
    micro_batches = planner.divide_share(lengths)
    assert len(micro_batches) == num_micro_batches
    members = [number for _, numbers in micro_batches for number in numbers]
    assert sorted(members) == [*range(len(lengths))]
    for size, numbers in micro_batches:
        assert size == 1
        padded = [round_up(lengths[number], multiple) for number in numbers]
        num_tokens = len(padded) * max(padded) if pairs else sum(padded)
        assert num_tokens <= 16


@pytest.mark.parametrize("multiple, expected", [(1, 1), (2, 2), (3, 3)])
def test_pipelines_get_the_multiple_of_micro_batches_that_they_need(multiple, expected):
    planner = make_planner(make_config(100), micro_batches_multiple=multiple)
    micro_batches = planner.divide_share([5, 6, 7])
    assert len(micro_batches) == expected
    assert all(numbers for _, numbers in micro_batches)


@pytest.mark.parametrize("pairs", [(), (PADDED,)], ids=["packed", "padded"])
def test_pairs_are_padded_like_their_longer_answer(pairs):
    """Packed, two pairs have 24 tokens, which is the cap; as rows of 9 tokens, they have 36."""
    lengths = [3, 9, 9, 3]
    plan = make_planner(make_config(24, *pairs)).plan_groups(lengths, [1.0] * 4, 2)
    in_batch = []
    for _, members in plan.micro_batches:
        in_batch.append(sorted(plan.sequences[number] for number in members))
    assert sorted(in_batch) == ([[0, 1], [2, 3]] if pairs else [[0, 1, 2, 3]])


def test_padding_of_each_answer_counts_for_a_pair():
    """Answers of 5 and 9 tokens are padded to 8 and 16, so a micro-batch of 32 has one pair."""
    plan = make_planner(make_config(32), multiple=8).plan_groups([5, 9, 9, 5], [1.0] * 4, 2)
    assert len(plan.micro_batches) == 2


def test_the_costs_of_sequences_divide_them_over_ranks_that_may_share_some():
    """The first sequence takes as long as the three others, which are as long as it is."""
    shares = []
    for rank in (0, 1):
        config = make_config(16, "engine.context_parallel_size=auto")
        planner = replace(make_planner(config, dp_size=2), dp_rank=rank)
        shares.append(sorted(planner.plan([5] * 4, [30.0, 10.0, 10.0, 10.0]).sequences))
    assert sorted(shares) == [[0], [1, 2, 3]]


def test_groups_of_ranks_that_share_pairs_are_powers_of_two():
    """Of three ranks, two can share a sequence, whose length is then padded for two."""
    sizes = []

    def padding_multiple(size: int) -> int:
        sizes.append(size)
        return 2 * size

    config = make_config(16, "engine.context_parallel_size=auto")
    world = dist.group.WORLD
    planner = Planner(config, 0, 3, world, torch.device("cpu"), padding_multiple, 1)
    plan = planner.plan_groups([3, 5, 7, 2, 4, 4], [1.0] * 6, 2)
    assert sizes[0] == 2
    assert 3 not in sizes
    assert plan.micro_batches
