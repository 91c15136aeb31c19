"""How a batch is divided over ranks where context parallelism is chosen per batch.

What the engines make of it is in tests/engines/fsdp and tests/engines/test_megatron.py.
"""

import itertools
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from config import InputError
from data.batching.groups import PassRules, schedule
from data.batching.plan import Group, PassCosts, Plan, total_time


def seven_b(length: int) -> float:
    """Return the FLOPs of a sequence in a model of 7B parameters, with attention."""
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


@settings(max_examples=100, deadline=None)
@given(BATCHES)
def test_every_pass_has_every_rank_and_every_sequence_is_in_one(drawn):
    check_passes(*drawn)


def multiple_of_zigzag(size: int) -> int:
    return 2 * size if size > 1 else 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("by_length", [False, True])
def test_passes_of_a_few_batches(padded, by_length):
    """As the test above, in a fraction of the time."""
    for num_ranks in (1, 3, 8):
        generator = random.Random(num_ranks)
        lengths = [generator.randint(1, 400) for _ in range(30)]
        check_passes(lengths, num_ranks, 800, multiple_of_zigzag, padded, 2, by_length)


def check_passes(lengths, num_ranks, max_tokens, multiple, padded, passes_multiple, by_length):
    """Every sequence is in one pass, under the cap, in a group at a multiple of its size.

    So ranks enter the same collectives in the same order: in each pass every rank is in one group,
    and the members of a group agree on it.
    """
    lengths = [min(n, max_tokens << num_ranks.bit_length() - 1) for n in lengths]
    costs = [float(n * n if by_length else 1) for n in lengths]
    rules = PassRules(padded, passes_multiple)
    arguments = (lengths, costs, num_ranks, max_tokens, multiple, rules)
    passes = schedule(*arguments)
    assert len(passes) % passes_multiple == 0
    for groups in passes:
        assert list(itertools.chain(*map(ranks_of, groups))) == list(range(num_ranks))
        for group in groups:
            check_group(group, lengths, max_tokens, multiple(group.size), padded)
    sequences = [i for groups in passes for group in groups for i in group.sequences]
    assert sorted(sequences) == list(range(len(lengths)))
    assert passes == schedule(*arguments)

    plans = [Plan.of(passes, rank, lengths, costs) for rank in range(num_ranks)]
    check_that_members_agree(plans)
    for rank, plan in enumerate(plans):
        check_plan(plan, rank)
        assert plan.metrics.keys() == plans[0].metrics.keys()
    num_reported = [plan.reported_by(rank).sum().item() for rank, plan in enumerate(plans)]
    assert sum(num_reported) == len(lengths)
    metrics = plans[0].metrics
    assert sum(metrics[name] for name in metrics if "/cp_" in name) == sum(lengths)


def ranks_of(group):
    return range(group.first, group.first + group.size)


def check_group(group, lengths, max_tokens, multiple, padded):
    """A group's size is a power of two, its sequences fit, and several ranks share something."""
    assert group.size & (group.size - 1) == 0
    assert group.first % group.size == 0
    num_tokens = [-(-lengths[i] // multiple) * multiple for i in group.sequences]
    taken = len(num_tokens) * max(num_tokens, default=0) if padded else sum(num_tokens)
    assert taken <= group.size * max_tokens
    assert group.sequences or group.size == 1, "ranks would share nothing"


def check_that_members_agree(plans):
    """In each pass the members of a group have the same micro-batch."""
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    for micro_batches in zip(*(plan.micro_batches for plan in plans)):
        rank = 0
        while rank < len(plans):
            size, _ = micro_batches[rank]
            first_member = sequences_of(plans[rank], micro_batches[rank])
            for member in range(rank, rank + size):
                assert micro_batches[member][0] == size
                assert sequences_of(plans[member], micro_batches[member]) == first_member
            rank += size


def sequences_of(plan, micro_batch):
    _, indices = micro_batch
    return [plan.sequences[i] for i in indices]


def check_plan(plan, rank):
    """A rank works on every sequence of its share once, and on all sequences that name it."""
    indices = sorted(i for _, micro_batch in plan.micro_batches for i in micro_batch)
    assert indices == list(range(len(plan.sequences)))
    first = plan.first.tolist()
    count = plan.count.tolist()
    names_rank = [first[i] <= rank < first[i] + count[i] for i in range(len(first))]
    assert plan.sequences == [i for i, is_named in enumerate(names_rank) if is_named]
    assert 0 < plan.metrics["perf/plan_efficiency"] < 1 + 1e-9


def sizes_of_groups(passes):
    """Return the size of the group that each sequence is in."""
    return {i: group.size for groups in passes for group in groups for i in group.sequences}


def test_sequences_that_are_as_long_as_others_are_not_shared():
    passes = schedule([100] * 8, [1.0] * 8, 4, 200, lambda size: 1)
    (groups,) = passes
    assert [(group.size, len(group.sequences)) for group in groups] == [(1, 2)] * 4


def test_a_long_sequence_is_shared_and_short_ones_are_not():
    lengths = [3000, *[500] * 10]
    passes = schedule(lengths, [float(n) for n in lengths], 4, 2000, lambda size: 1)
    sizes = sizes_of_groups(passes)
    assert sizes[0] > 1
    assert [*sizes.values()].count(1) >= 8


def test_a_group_begins_at_a_multiple_of_its_size_though_others_take_longer():
    passes = schedule([150, 90], [2.2, 1.2], 3, 100, lambda size: 1)
    assert passes == [[Group(0, 2, [0]), Group(2, 1, [1])]]


def test_others_do_not_wait_for_a_sequence_that_fits_one_rank():
    """Alone on a rank it would take five times as long as the others take for the rest."""
    lengths = [2000, *[100] * 12]
    passes = schedule(lengths, [float(n) for n in lengths], 4, 2000, lambda size: 1)
    assert sizes_of_groups(passes)[0] > 1
    assert total_time(passes, lengths) < 0.5 * 2000


def test_the_time_of_ranks_is_used():
    """For a long tail of lengths, which no fixed group size serves, on one rank and on many."""
    for num_ranks in (1, 2, 8, 64):
        lengths = np.random.default_rng(0).lognormal(np.log(6000), 1.3, 8 * num_ranks)
        lengths = lengths.clip(1024, 32768 * num_ranks).astype(int).tolist()
        costs = [seven_b(n) for n in lengths]
        passes = schedule(lengths, costs, num_ranks, 32768, lambda size: 1)
        plan = Plan.of(passes, 0, lengths, costs)
        assert plan.metrics["perf/plan_efficiency"] > 0.93, num_ranks


def test_a_group_that_was_too_full_takes_a_sequence_that_fills_it_exactly():
    """The third sequence finds the first group too full; the fourth needs the rest of it."""
    passes = schedule([70, 60, 40, 30], [1.0] * 4, 1, 100, lambda size: 1)
    assert sorted(group.sequences for groups in passes for group in groups) == [[0, 3], [1, 2]]


def test_a_long_tail_is_planned_as_before():
    """A change of any sequence's group or pass shows here. Two ranks share the longest one."""
    lengths = [900, 350, 300, 280, 210, 160, 120, 90, 60, 40, 30, 20]
    passes = schedule(lengths, [float(n) for n in lengths], 3, 480, lambda size: size)
    described = []
    for groups in passes:
        described.append([(group.first, group.size, group.sequences) for group in groups])
    assert described == [
        [(0, 2, [0]), (2, 1, [2, 7, 10])],
        [(0, 1, [3, 6, 11]), (1, 1, [1, 8]), (2, 1, [4, 5, 9])],
    ]
    plan = Plan.of(passes, 1, lengths, [float(n) for n in lengths])
    assert plan.first.dtype == torch.int64
    assert plan.count.dtype == torch.int64


def test_the_efficiency_is_the_share_of_all_ranks_time_in_which_they_work():
    """One rank works for 6 of 6 seconds, the other for 2."""
    groups = [Group(0, 1, [0]), Group(1, 1, [1])]
    plan = Plan.of([groups], 0, [60, 20], [6.0, 2.0])
    assert plan.metrics["perf/plan_efficiency"] == pytest.approx(8 / 12)


def test_a_plan_of_pairs_names_the_ranks_of_both_sequences():
    """Pair 0 is on rank 0, pair 1 on ranks 1 and 2: sequences 0, 1 and 2, 3."""
    groups = [Group(0, 1, [0]), Group(1, 2, [1])]
    plan = Plan.of([groups], 2, [60, 20], [6.0, 2.0]).expanded(2)
    assert plan.sequences == [2, 3]
    assert plan.micro_batches == [(2, [0, 1])]
    assert plan.first.tolist() == [0, 0, 1, 1]
    assert plan.count.tolist() == [1, 1, 2, 2]
    assert plan.reported_by(1).tolist() == [True, True]
    assert plan.reported_by(2).tolist() == [False, False]
    # The metrics are those of the groups: rank 0 works for 6 seconds, and the two others for 1.
    efficiency = pytest.approx(8 / 18)
    assert plan.metrics == {"perf/cp_1": 60, "perf/cp_2": 20, "perf/plan_efficiency": efficiency}


def test_sequences_of_a_group_stay_neighbours_in_a_share_and_in_its_micro_batches():
    """Of four groups of three sequences, rank 0 has the groups 0 and 2 together, and then 3."""
    passes = [[Group(0, 1, [0, 2]), Group(1, 1, [1])], [Group(0, 2, [3])]]
    plan = Plan.of(passes, 0, [10] * 4, [1.0] * 4).expanded(3)
    assert plan.sequences == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert plan.micro_batches == [(1, [0, 1, 2, 3, 4, 5]), (2, [6, 7, 8])]
    assert plan.first.tolist() == [0] * 3 + [1] * 3 + [0] * 6
    assert plan.count.tolist() == [1] * 9 + [2] * 3


def test_groups_that_take_similar_times_are_in_the_same_pass():
    lengths = [100, 90, 60, 50]
    rules = PassRules(costs=PassCosts(slowdown=0.1))
    passes = schedule(lengths, [float(n) for n in lengths], 2, 100, lambda size: 1, rules)
    assert total_time(passes, lengths) == 160
    assert total_time(passes, lengths, PassCosts(slowdown=0.5)) == 160, "no group has two ranks"
    (shared,) = schedule([180], [180.0], 2, 100, lambda size: 1)
    assert total_time([shared], [180]) == 90
    assert total_time([shared], [180], PassCosts(slowdown=0.5)) == 135
    by_four = [Group(0, 4, [0])]
    assert total_time([by_four], [180], PassCosts(slowdown=0.5)) == 90, "two doublings cost twice"


def test_a_pass_takes_as_long_as_it_takes_to_start():
    alone = [Group(0, 1, [0]), Group(1, 1, [1])]
    shared = [Group(0, 2, [2])]
    costs = [30.0, 20.0, 80.0]
    assert total_time([alone, shared], costs, PassCosts(least_alone=29, least_shared=39)) == 70
    assert total_time([alone, shared], costs, PassCosts(least_alone=35)) == 35 + 40
    assert total_time([alone, shared], costs, PassCosts(least_shared=50)) == 30 + 50
    assert total_time([alone, shared], costs, PassCosts(least_shared=50, slowdown=0.5)) == 30 + 60


@pytest.mark.parametrize(
    "pass_costs, largest",
    [
        (PassCosts(), 4),
        (PassCosts(least_shared=1900), 2),
        (PassCosts(least_shared=2100), 1),
        (PassCosts(slowdown=0.5), 4),
        (PassCosts(slowdown=3.0), 1),
    ],
)
def test_a_sequence_is_shared_if_it_pays(pass_costs, largest):
    """It takes 2,000 on one rank. The others take 1,200 in total, and wait if it is not shared."""
    lengths = [2000, *[100] * 12]
    costs = [float(n) for n in lengths]
    passes = schedule(lengths, costs, 4, 2000, lambda size: 1, PassRules(costs=pass_costs))
    assert max(sizes_of_groups(passes).values()) == largest


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_all_sequences_are_shared_if_nothing_else_keeps_ranks_busy(num_ranks):
    """A rank that is left alone with the longest sequence would keep the others waiting."""
    lengths = [1000, *[300] * num_ranks]
    costs = [float(n) for n in lengths]
    passes = schedule(lengths, costs, num_ranks, 2000, lambda size: 1)
    shared_by_all = [[Group(0, num_ranks, [*range(len(lengths))])]]
    slowdown = PassCosts(slowdown=0.05)
    assert total_time(passes, costs, slowdown) <= total_time(shared_by_all, costs, slowdown)


def test_groups_that_share_are_in_as_few_passes_as_possible():
    """Two sequences need two ranks each, and four others need one.

    By their times alone, each pass would have one group that shares.
    """
    lengths = [150, 150, 100, 100, 100, 100]
    costs = [120.0, 40.0, 50.0, 50.0, 50.0, 50.0]
    rules = PassRules(costs=PassCosts(least_alone=40, least_shared=60))
    passes = schedule(lengths, costs, 4, 100, lambda size: 1, rules)
    first, second = passes
    assert [(group.first, group.size) for group in first] == [(0, 2), (2, 2)]
    assert [(group.first, group.size) for group in second] == [(0, 1), (1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("passes_multiple, num_passes", [(1, 2), (2, 2), (3, 3)])
def test_there_are_no_more_passes_than_their_multiple_requires(passes_multiple, num_passes):
    costs = [1.0] * 8
    passes = schedule([50] * 8, costs, 2, 100, lambda size: 1, PassRules(multiple=passes_multiple))
    assert len(passes) == num_passes


def test_a_batch_that_needs_twice_the_passes_of_its_token_count_is_planned_fast():
    """Where no two sequences fit into a micro-batch."""
    start = time.process_time()
    passes = schedule([520] * 2048, [1.0] * 2048, 8, 1000, lambda size: 1)
    assert len(passes) == 256
    assert time.process_time() - start < 3


def test_no_group_can_hold_a_sequence():
    with pytest.raises(
        InputError,
        match="a sequence of 500 tokens is longer than .*micro_batch=100 on each of 4 ranks",
    ):
        schedule([3, 500], [1.0, 2.0], 6, 100, lambda size: 1)
