"""How a batch is divided over ranks where context parallelism follows it. What engines make of it is in tests/engines/fsdp and
test_megatron.py."""

import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from config import InputError
from data.batching.groups import schedule
from data.batching.plan import Plan, duration


def seven_b(length: int) -> float:
    """FLOPs of a sequence, with attention."""
    return 6 * 7.6e9 * length + 6 * 28 * 3584 * length**2


BATCHES = st.tuples(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.integers(1, 13),
    st.integers(60, 200).map(lambda n: 4 * n),
    st.sampled_from(
        [lambda size: 1, lambda size: 2 * size if size > 1 else 1, lambda size: 4 * size]
    ),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(BATCHES)
def test_every_pass_has_every_rank_and_every_sequence_is_in_one(drawn):
    """Under the cap, in groups that begin at multiples of their size. So ranks enter the same collectives in the same order: each
    pass is of one group for each rank, of which all members know the same."""
    lengths, num_ranks, max_tokens, multiple, padded, passes_multiple, by_length = drawn
    lengths = [min(n, max_tokens << num_ranks.bit_length() - 1) for n in lengths]
    costs = [float(n * n if by_length else 1) for n in lengths]
    passes = schedule(lengths, costs, num_ranks, max_tokens, multiple, padded, passes_multiple)
    assert len(passes) % passes_multiple == 0
    for groups in passes:
        ranks = [rank for group in groups for rank in range(group.first, group.first + group.size)]
        assert ranks == list(range(num_ranks))
        for group in groups:
            assert group.size & (group.size - 1) == 0 and group.first % group.size == 0
            room = multiple(group.size)
            tokens = [-(-lengths[i] // room) * room for i in group.sequences]
            taken = len(tokens) * max(tokens, default=0) if padded else sum(tokens)
            assert taken <= group.size * max_tokens
            assert group.sequences or group.size == 1, "ranks would share nothing"
    assert sorted(i for groups in passes for group in groups for i in group.sequences) == list(
        range(len(lengths))
    )
    assert passes == schedule(
        lengths, costs, num_ranks, max_tokens, multiple, padded, passes_multiple
    )

    plans = [Plan.of(passes, rank, lengths, costs) for rank in range(num_ranks)]
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    for step in zip(*(plan.micro_batches for plan in plans)):
        rank = 0
        while rank < num_ranks:  # the members of a group have the same micro-batch
            size, _ = step[rank]
            members = [
                [plans[r].sequences[i] for i in step[r][1]] for r in range(rank, rank + size)
            ]
            assert all(
                step[r][0] == size and each == members[0]
                for r, each in zip(range(rank, rank + size), members)
            )
            rank += size
    for rank, plan in enumerate(plans):
        assert sorted(i for _, part in plan.micro_batches for i in part) == list(
            range(len(plan.sequences))
        )
        first, count = plan.first.tolist(), plan.count.tolist()
        assert plan.sequences == [
            i for i in range(len(lengths)) if first[i] <= rank < first[i] + count[i]
        ]
        assert {*plan.metrics} == {*plans[0].metrics} and 0 < plan.metrics[
            "perf/plan_efficiency"
        ] < 1 + 1e-9
    assert sum(plan.speaks(rank).sum().item() for rank, plan in enumerate(plans)) == len(lengths)
    assert sum(amount for name, amount in plans[0].metrics.items() if "/cp_" in name) == sum(
        lengths
    )


def test_sequences_that_are_as_long_as_others_are_not_shared():
    passes = schedule([100] * 8, [1.0] * 8, 4, 200, lambda size: 1)
    assert [[(group.size, len(group.sequences)) for group in groups] for groups in passes] == [
        [(1, 2)] * 4
    ]


def test_a_long_sequence_is_shared_and_short_ones_are_not():
    lengths = [3000, *[500] * 10]
    passes = schedule(lengths, [float(n) for n in lengths], 4, 2000, lambda size: 1)
    sizes = {i: group.size for groups in passes for group in groups for i in group.sequences}
    assert sizes[0] > 1 and [*sizes.values()].count(1) >= 8


def test_others_do_not_wait_for_a_sequence_that_fits_one_rank():
    """Alone on a rank it would take five times as long as the rest of the batch takes on the others."""
    lengths = [2000, *[100] * 12]
    passes = schedule(lengths, [float(n) for n in lengths], 4, 2000, lambda size: 1)
    sizes = {i: group.size for groups in passes for group in groups for i in group.sequences}
    assert sizes[0] > 1 and duration(passes, lengths) < 0.5 * 2000


def test_the_time_of_ranks_is_used():
    """On a long tail of lengths that no fixed size serves, for one rank and many."""
    for num_ranks in (1, 2, 8, 64):
        lengths = np.random.default_rng(0).lognormal(np.log(6000), 1.3, 8 * num_ranks)
        lengths = lengths.clip(1024, 32768 * num_ranks).astype(int).tolist()
        costs = [seven_b(n) for n in lengths]
        plan = Plan.of(
            schedule(lengths, costs, num_ranks, 32768, lambda size: 1), 0, lengths, costs
        )
        assert plan.metrics["perf/plan_efficiency"] > 0.93, num_ranks


def test_plans_that_need_twice_as_many_passes_as_tokens_say_are_soon_found():
    """Where no two sequences fit into a micro-batch."""
    start = time.process_time()
    passes = schedule([520] * 2048, [1.0] * 2048, 8, 1000, lambda size: 1)
    assert len(passes) == 256 and time.process_time() - start < 3


def test_no_group_can_hold_a_sequence():
    with pytest.raises(
        InputError,
        match="a sequence of 500 tokens is longer than .*micro_batch=100 for each of 4 ranks",
    ):
        schedule([3, 500], [1.0, 2.0], 6, 100, lambda size: 1)
