"""Which groups begin, continue and are trained with rollout.partial; and how they are saved.

The schedules here draw one token per response and step, as vLLM does, but of made-up lengths.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from omegaconf import OmegaConf

from config import InputError
from rollout.partial.drawing import PartialSampler, StepCounts, deal
from rollout.partial.groups import (
    Counters,
    OpenGroup,
    OpenGroups,
    OpenResponse,
    from_bytes,
    to_bytes,
)
from rollout.partial.ledger import Ledger, divide_evenly
from rollout.partial.responses import check_can_continue
from tests.support.ranks import on_ranks


def complete_group(number: int, version: int) -> OpenGroup:
    """Return a group with one complete response of one token, drawn by weights of a version."""
    response = OpenResponse(seed=number)
    response.append(np.array([7]), np.array([-1.0]), None, version)
    response.is_complete = True
    return OpenGroup(number, number, [response])


@pytest.mark.parametrize(
    "finishes_old, trained, kept", [(True, [1, 2, 4], [3]), (False, [1], [2, 3, 4])]
)
def test_a_step_trains_on_all_groups_that_are_due(finishes_old, trained, kept):
    """The oldest ones, even if there are more of them than it needs, in order of their numbers."""
    groups = OpenGroups(max_staleness=2, finishes_old=finishes_old)
    versions = {1: 3, 2: 3, 3: 4, 4: 3}
    groups.groups = [complete_group(*pair) for pair in reversed(versions.items())]
    assert [group.number for group in groups.take_trained(1, version=5)] == trained
    assert sorted(group.number for group in groups.groups) == kept


@dataclass
class Schedule:
    """A run whose responses have lengths of their own.

    Attributes:
        lengths: length of response i of group g: lengths[(g * n + i) % len(lengths)].
        batch_size: the groups that a step trains on.
        oldest: for each trained group, the age of its oldest token.
    """

    lengths: list[int]
    num_replicas: int
    batch_size: int
    num_steps: int
    n: int
    oversample: float
    max_staleness: int
    finishes_old: bool
    trained: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    oldest: dict[int, int] = field(default_factory=dict)
    most_open: int = 0

    def run(self) -> None:
        oversample = self.oversample if self.max_staleness else 1.0
        ledger = Ledger(self.num_replicas, oversample, self.num_steps * self.batch_size)
        replicas = [
            OpenGroups(self.max_staleness, self.finishes_old) for _ in range(self.num_replicas)
        ]
        for version in range(self.num_steps):
            quotas = ledger.begin(self.batch_size)
            for number, replica in quotas.begun.items():
                responses = [OpenResponse(seed=i) for i in range(self.n)]
                replicas[replica].groups.append(OpenGroup(number, number, responses))
            self.most_open = max(self.most_open, *ledger.count_open())
            trained = []
            for replica, num_complete in zip(replicas, quotas.num_complete):
                self.generate(replica, num_complete, version)
                trained += replica.take_trained(num_complete, version)
            for group in trained:
                self.oldest[group.number] = group.age(version)
            assert len(trained) == self.batch_size
            self.trained += sorted(group.number for group in trained)
            ledger.end(group.number for group in trained)
            stale = [g.number for replica in replicas for g in replica.take_stale(version)]
            self.dropped += stale
            ledger.drop(stale)
            open_numbers = {g.number for replica in replicas for g in replica.groups}
            assert open_numbers == ledger.replica_of.keys()
        assert not open_numbers, "begun in vain"

    def generate(self, replica: OpenGroups, num_complete: int, version: int) -> None:
        pairs = replica.running()
        is_enough = replica.make_is_enough(num_complete, version)
        ended: set[int] = set()
        while len(ended) < len(pairs) and not is_enough(ended):
            for i, (group, response) in enumerate(pairs):
                if i not in ended:
                    token = np.ones(1, np.int32)
                    response.append(token, token.astype(np.float32), None, version)
                    place = group.number * self.n + group.responses.index(response)
                    if len(response) == self.lengths[place % len(self.lengths)]:
                        response.is_complete = True
                        ended.add(i)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    num_replicas=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    num_steps=st.integers(1, 6),
    n=st.integers(1, 3),
    oversample=st.floats(1.0, 2.0),
    max_staleness=st.integers(0, 3),
    finishes_old=st.booleans(),
)
def test_no_group_is_lost_or_trained_twice_or_too_old(**arguments):
    """Every step trains on a whole batch, and the run ends with nothing begun in vain."""
    schedule = Schedule(**arguments)
    schedule.run()
    trained = sorted(schedule.trained)
    num_groups = schedule.num_steps * schedule.batch_size
    assert len(trained) == num_groups
    assert sorted([*trained, *schedule.dropped]) == list(range(num_groups + len(schedule.dropped)))
    assert max(schedule.oldest.values()) <= schedule.max_staleness
    if schedule.finishes_old or schedule.max_staleness == 0:
        assert not schedule.dropped
    share = math.ceil(schedule.batch_size / schedule.num_replicas)
    assert schedule.most_open <= math.ceil(schedule.oversample * share)


def make_schedule(**changes) -> Schedule:
    """A run of three steps of two groups each; group 1 is much longer than the others."""
    arguments = {
        "lengths": [3, 50, 4, 5, 6, 7, 8, 9],
        "num_replicas": 1,
        "batch_size": 2,
        "num_steps": 3,
        "n": 1,
        "oversample": 1.5,
        "max_staleness": 1,
        "finishes_old": True,
    }
    return Schedule(**arguments | changes)


def test_the_longest_group_continues_and_is_finished_before_it_is_too_old():
    schedule = make_schedule()
    schedule.run()
    assert schedule.trained == [0, 2, 1, 3, 4, 5]
    assert schedule.oldest == {0: 0, 2: 0, 1: 1, 3: 0, 4: 1, 5: 0}


def test_with_drop_a_group_that_is_too_old_is_replaced():
    schedule = make_schedule(finishes_old=False)
    schedule.run()
    assert schedule.dropped == [1]
    assert sorted(schedule.trained) == [0, 2, 3, 4, 5, 6]


def test_without_staleness_nothing_continues():
    schedule = make_schedule(max_staleness=0)
    schedule.run()
    assert schedule.trained == [0, 1, 2, 3, 4, 5]
    assert set(schedule.oldest.values()) == {0}


def test_a_limit_of_two_steps_leaves_the_longest_group_more_time():
    schedule = make_schedule(max_staleness=2)
    schedule.run()
    assert schedule.oldest[1] == 2
    assert schedule.trained[-2:] == [1, 5]


@pytest.mark.parametrize("total, parts", [(0, 3), (7, 3), (8, 4), (2, 5)])
def test_totals_are_divided_evenly(total, parts):
    shares = divide_evenly(total, parts)
    assert sum(shares) == total
    assert shares == sorted(shares, reverse=True)
    assert max(shares) - min(shares) <= 1


def test_a_draw_with_filtered_groups_begins_what_it_needs():
    """Without a limit; the second draw of a step needs one more group."""
    ledger = Ledger(num_replicas=2, oversample=1.5, limit=None)
    first = ledger.begin(4)
    assert first.num_complete == [2, 2]
    assert first.begun == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    ledger.end([0, 1, 2, 3])
    second = ledger.begin(1)
    assert second.num_complete == [1, 0]
    assert second.begun == {6: 0}


def test_the_rest_of_a_run_trains_on_a_limited_number_of_groups():
    """Whatever earlier steps have drawn, for example with filter_groups."""
    ledger = Ledger(num_replicas=1, oversample=1.5, limit=None)
    ledger.begin(4)
    ledger.end([0, 1, 2, 3])
    ledger.begin(4)
    ledger.drop([5])
    ledger.end([4, 6, 7])
    assert (ledger.next_group, list(ledger.replica_of)) == (10, [8, 9])
    ledger.limit_to(4)
    assert ledger.begin(4).num_complete == [4]
    assert list(ledger.replica_of) == [8, 9, 10, 11]
    ledger.end([8, 9, 10, 11])
    assert ledger.begin(4).num_complete == [0]


def make_groups(num_candidates: int) -> list[OpenGroup]:
    """Two groups: with tokens of two versions, and with none."""
    first = OpenResponse(seed=2**61 + 3)
    for version, size in ((4, 2), (5, 3)):
        tokens = np.arange(size, dtype=np.int32)
        candidates = np.full((size, num_candidates), version, np.int32) if num_candidates else None
        first.append(tokens, tokens.astype(np.float32) - 1.25, candidates, version)
    first.is_complete = True
    first.is_truncated = True
    whole = OpenResponse(seed=2, is_complete=True)
    return [
        OpenGroup(7, 70, [first, OpenResponse(seed=5)]),
        OpenGroup(9, 3, [OpenResponse(seed=1), whole]),
    ]


@pytest.mark.parametrize("num_candidates", [0, 3])
def test_groups_are_saved_and_loaded(num_candidates):
    groups = make_groups(num_candidates)
    content = to_bytes(groups, Counters(12, 1))
    counters, saved = from_bytes(content)
    assert counters == Counters(next_group=12, num_dropped=1)
    assert to_bytes(saved, counters) == content
    for loaded, original in zip(saved, groups, strict=True):
        assert (loaded.number, loaded.row) == (original.number, original.row)
        for one, other in zip(loaded.responses, original.responses, strict=True):
            assert one.seed == other.seed
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.log_probs.tolist() == other.log_probs.tolist()
            assert one.versions.tolist() == other.versions.tolist()
            assert one.candidates.tolist() == other.candidates.tolist()
            assert one.is_complete == other.is_complete
            assert one.is_truncated == other.is_truncated
    # A response that was loaded can go on.
    response = saved[1].responses[0]
    token = np.ones(1, np.int32)
    candidates = np.ones((1, num_candidates), np.int32) if num_candidates else None
    response.append(token, token.astype(np.float32), candidates, 6)
    assert response.versions.tolist() == [6]


@pytest.mark.parametrize(
    "num_candidates, changes, wrong",
    [
        (0, {}, None),
        (3, {}, None),
        (0, {"max_tokens": 5}, None),
        (0, {"max_tokens": 4}, "rollout.max_tokens=4, but the checkpoint .* already have 5 tokens"),
        (0, {"top_k": 3}, "rollout.top_k=3, but the checkpoint .* drawn with another"),
        (3, {"top_k": 4}, "rollout.top_k=4, but the checkpoint .* drawn with another"),
    ],
)
def test_loaded_responses_have_to_fit_the_settings(num_candidates, changes, wrong):
    """The longest response has five tokens and is complete."""
    columns = num_candidates + 1 if num_candidates else 0
    _, groups = from_bytes(to_bytes(make_groups(columns), Counters(12, 1)))
    sampling = OmegaConf.create({"max_tokens": 9, "top_k": num_candidates, **changes})
    outcome = pytest.raises(InputError, match=wrong) if wrong else nullcontext()
    with outcome:
        check_can_continue(groups, sampling, sampling.top_k)


def test_a_loaded_response_needs_room_for_another_token():
    groups = make_groups(0)
    groups[0].responses[0].is_complete = False
    with pytest.raises(InputError, match="rollout.max_tokens=5"):
        check_can_continue(groups, OmegaConf.create({"max_tokens": 5, "top_k": -1}), 0)


def test_no_group_at_all_is_saved_and_loaded():
    assert from_bytes(to_bytes([], Counters(3, 0))) == (Counters(3, 0), [])


def test_groups_are_dealt_to_another_number_of_replicas():
    groups = [OpenGroup(number, number, []) for number in (5, 2, 9, 7)]
    first, second, third = deal([groups[:3], groups[3:]], 3)
    assert [group.number for group in first] == [2, 9]
    assert [group.number for group in second] == [5]
    assert [group.number for group in third] == [7]


def test_the_age_of_a_group_is_that_of_its_oldest_token():
    with_tokens, without = make_groups(0)
    assert with_tokens.oldest_version == 4
    assert with_tokens.age(6) == 2
    assert without.oldest_version is None
    assert without.age(6) == 0


def end_step_on_rank(tp_size: int) -> tuple[dict[str, float], Ledger, list[int], StepCounts]:
    """End a step in which replica r has groups 3r, of an age of 0, 3r + 1 of 1, and 3r + 2 of 2."""
    replica, tp_rank = divmod(dist.get_rank(), tp_size)
    num_replicas = dist.get_world_size() // tp_size
    replica_of = {number: number // 3 for number in range(3 * num_replicas)}
    ledger = Ledger(num_replicas, 2.0, limit=None, replica_of=replica_of)
    open_groups = OpenGroups(max_staleness=2, finishes_old=False)
    for age in range(3):
        response = OpenResponse(seed=0)
        response.append(np.array([1]), np.array([-1.0]), None, version=5 - age)
        open_groups.groups.append(OpenGroup(3 * replica + age, 0, [response]))
    rollout = SimpleNamespace(tp_rank=tp_rank, tp_size=tp_size, replica=replica)
    sampler = PartialSampler(
        sampler=SimpleNamespace(rollout=rollout, host_group=None),
        ledger=ledger,
        dataset=None,
        rows_of_batch=None,
        config=None,
        open=open_groups,
        counts=StepCounts(slots=8, tokens=6),
    )
    metrics = sampler.end_step(5)
    return metrics, ledger, [group.number for group in open_groups.groups], sampler.counts


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_rank_forgets_the_groups_that_a_replica_drops_once(tmp_path, tp_size):
    """The ranks of a replica have the same groups."""
    num_replicas = 2
    ranks = on_ranks(num_replicas * tp_size, tmp_path, end_step_on_rank, tp_size)
    for rank, (metrics, ledger, own, counts) in enumerate(ranks):
        first = 3 * (rank // tp_size)
        assert own == [first, first + 1]
        assert ledger.replica_of == {0: 0, 1: 0, 3: 1, 4: 1}
        assert ledger.num_dropped == 2
        assert counts == StepCounts(), "the next step counts anew"
        assert metrics == {
            "partial/carried_groups": 4.0,
            "partial/stale_drops": 2.0,
            "partial/idle_slots": 0.25,
        }


def test_a_step_that_drew_nothing_has_no_idle_slots(tmp_path):
    """All groups of its only rank were complete already."""
    metrics, *_ = on_ranks(1, tmp_path, end_step_without_work)
    assert metrics["partial/idle_slots"] == 0
    assert metrics["partial/stale_drops"] == 0
    assert metrics["partial/carried_groups"] == 0


def end_step_without_work() -> dict[str, float]:
    sampler = PartialSampler(
        sampler=SimpleNamespace(rollout=SimpleNamespace(tp_rank=0), host_group=None),
        ledger=Ledger(1, 1.0, limit=None),
        dataset=None,
        rows_of_batch=None,
        config=None,
        open=OpenGroups(max_staleness=2, finishes_old=False),
    )
    return sampler.end_step(5)


def test_groups_that_a_draw_needs_begin_before_any_in_advance():
    """Two groups are left to begin. Replicas complete two and one, and may begin four and two."""
    ledger = Ledger(2, oversample=2.0, limit=3, next_group=1, replica_of={0: 0})
    quotas = ledger.begin(3)
    assert quotas.begun == {1: 0, 2: 1}
    assert quotas.num_complete == [2, 1]


def test_a_replica_completes_what_it_has_and_a_dropped_group_is_replaced():
    ledger = Ledger(num_replicas=2, oversample=2.0, limit=3)
    quotas = ledger.begin(4)
    assert quotas.begun == {0: 0, 1: 1, 2: 0}
    assert quotas.num_complete == [2, 1], "the second replica has a single group"
    ledger.end([0, 1])
    ledger.drop([2])
    assert ledger.begin(4).begun == {3: 0}


def test_a_group_that_is_due_must_be_complete_although_enough_others_are():
    groups = OpenGroups(max_staleness=1, finishes_old=True)
    old = complete_group(5, version=2)
    old.responses[0].is_complete = False
    groups.groups = [complete_group(1, version=3), old]
    is_enough = groups.make_is_enough(1, version=3)
    assert not is_enough(set())
    assert is_enough({0})
    young = groups.make_is_enough(1, version=2)
    assert young(set()), "it has another step"


def test_responses_that_end_in_the_same_step_all_count():
    """A group is complete when all of its responses are."""
    groups = OpenGroups(max_staleness=1, finishes_old=True)
    first = OpenGroup(4, 0, [OpenResponse(seed=0), OpenResponse(seed=1)])
    second = OpenGroup(6, 0, [OpenResponse(seed=2), OpenResponse(seed=3)])
    groups.groups = [first, second]
    is_enough = groups.make_is_enough(2, version=3)
    assert not is_enough({0, 2})
    assert not is_enough({0, 1, 2})
    assert is_enough({0, 1, 2, 3})
    assert groups.make_is_enough(2, version=3)({0, 1, 2, 3})


@pytest.mark.parametrize("max_staleness, stale", [(0, [1, 2, 3]), (1, [2, 3]), (2, [3])])
def test_groups_are_too_old_for_the_next_step_by_one_step_more(max_staleness, stale):
    """Groups of an age of 0, 1 and 2 in a step of version 5; a group without tokens has no age."""
    groups = OpenGroups(max_staleness, finishes_old=False)
    groups.groups = [complete_group(number, version=6 - number) for number in (3, 1, 2)]
    groups.groups.append(OpenGroup(4, 4, [OpenResponse(seed=0)]))
    assert sorted(group.number for group in groups.take_stale(5)) == stale
    assert [group.number for group in groups.groups if group.number in stale] == []
    assert 4 in [group.number for group in groups.groups]
