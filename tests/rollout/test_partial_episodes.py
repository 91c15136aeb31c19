"""Groups of episodes that continue: which episodes they have, when they end, how they are saved.

vLLM draws their tokens in test_partial_reference.py.
"""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from config import InputError
from rollout.episodes.jobs import EndedEpisode
from rollout.partial.drawing import Draw, StepCounts
from rollout.partial.episodes import PartialEpisodes, SavedGroup, read_episodes
from rollout.partial.groups import Counters, OpenGroups, from_bytes, to_bytes
from tests.rollout.test_episode_stepping import make_loop
from tests.support.samples import configure

SEED = 11
KEY = (SEED, 2, 4)  # the run's seed, the batch and the row
EPISODE = "agent.py:play"


def make_episodes() -> PartialEpisodes:
    """Return what keeps the episodes, on a rank that is not the first of its replica."""
    episodes = PartialEpisodes.__new__(PartialEpisodes)
    episodes.config = configure("rollout.n=2", f"trainer.seed={SEED}", f"rollout.episode={EPISODE}")
    episodes.open = OpenGroups(max_staleness=2, finishes_old=True)
    episodes.counts = StepCounts()
    episodes.cast = None
    episodes.loop = make_loop()
    return episodes


def test_episodes_of_a_group_have_numbers_and_seeds_of_their_own():
    episodes = make_episodes()
    first = episodes.new_group(7, KEY, first_number=0)
    second = episodes.new_group(8, KEY, first_number=2)
    assert (first.number, first.row) == (7, 4)
    for group, numbers in ((first, [14, 15]), (second, [16, 17])):
        assert [episode.number for episode in group.responses] == numbers
        for episode in group.responses:
            assert episodes.loop.playing[episode.number] is episode.playing
    seeds = [episode.playing.seed for group in (first, second) for episode in group.responses]
    assert seeds == [(*KEY, i) for i in range(4)]


def test_a_draw_ends_when_enough_groups_have_ended():
    """All episodes of a group must have ended. The first group did in an earlier draw."""
    episodes = make_episodes()
    episodes.open.groups = [episodes.new_group(number, KEY, 0) for number in range(3)]
    episodes.loop.end([EndedEpisode(0, None, 0), EndedEpisode(1, None, 0)])
    is_enough = episodes.make_is_enough(2, version=3)
    for number in (2, 4, 5):
        assert not is_enough()
        episodes.loop.end([EndedEpisode(number, None, 0)])
    assert is_enough()
    trained = episodes.open.take_trained(2, version=3)
    assert [group.number for group in trained] == [0, 2]


def test_an_episode_is_as_old_as_its_oldest_token():
    episodes = make_episodes()
    group = episodes.new_group(0, KEY, 0)
    assert group.oldest_version is None
    turn = group.responses[1].playing.episode.begin([1, 2], seed=0)
    turn.response.append(np.array([5], np.int32), np.zeros(1, np.float32), None, version=3)
    assert [episode.oldest_version for episode in group.responses] == [None, 3]
    assert group.age(5) == 2


def test_groups_that_are_given_up_are_forgotten():
    episodes = make_episodes()
    groups = [episodes.new_group(number, KEY, 0) for number in range(3)]
    episodes.give_up(groups[:2])
    assert [*episodes.loop.playing] == [4, 5]


def test_saved_groups_begin_again_with_the_same_seeds():
    episodes = make_episodes()
    episodes.open.groups = [
        episodes.new_group(7, (SEED, 2, 4), 0),
        episodes.new_group(9, (SEED, 3, 1), 2),
    ]
    content = episodes.to_bytes(Counters(12, 1))
    loaded = make_episodes()
    counters, saved = loaded.from_bytes(content)
    assert counters == Counters(next_group=12, num_dropped=1)
    assert saved == [SavedGroup(7, 4, 2, 0), SavedGroup(9, 1, 3, 2)]
    loaded.open.groups = [loaded.restored(group) for group in saved]
    for one, other in zip(loaded.open.groups, episodes.open.groups, strict=True):
        assert (one.number, one.row) == (other.number, other.row)
        for episode, original in zip(one.responses, other.responses, strict=True):
            assert episode.number == original.number
            assert episode.playing.seed == original.playing.seed
    assert loaded.to_bytes(counters) == content


def test_no_group_of_episodes_at_all_is_saved_and_loaded():
    episodes = make_episodes()
    content = episodes.to_bytes(Counters(3, 0))
    assert episodes.from_bytes(content) == (Counters(3, 0), [])


def test_a_checkpoint_of_responses_has_no_episodes():
    content = to_bytes([], Counters(3, 0))
    message = f"^rollout.episode={EPISODE}, but the checkpoint has responses of a single turn"
    with pytest.raises(InputError, match=message):
        read_episodes(content, EPISODE)


def test_a_checkpoint_of_episodes_has_no_responses():
    content = make_episodes().to_bytes(Counters(3, 0))
    message = "^rollout.episode=null, but the checkpoint has episodes .* set the rollout.episode"
    with pytest.raises(InputError, match=message):
        from_bytes(content)


# -- on the first rank of a replica ----------------------------------------------------------------


@dataclass
class RecordingDirector:
    """Records what it is told, in order."""

    calls: list[tuple] = field(default_factory=list)

    def add(self, cast, number: int, row: dict) -> None:
        self.calls.append(("add", cast, number, row))

    def give_up(self, cast, number: int) -> None:
        self.calls.append(("give up", cast, number))


def make_first_rank() -> PartialEpisodes:
    """Return what keeps the episodes, with the director that starts them. Row r is {"n": r}."""
    episodes = make_episodes()
    director = RecordingDirector()
    start = partial(director.calls.append, "start")
    stop = partial(director.calls.append, "stop")
    clock = SimpleNamespace(start=start, stop=stop)
    runner = SimpleNamespace(clock=clock)
    episodes.sampler = SimpleNamespace(director=director, runner=runner)
    episodes.cast = "the cast"
    episodes.dataset = [SimpleNamespace(row={"n": number}) for number in range(6)]
    return episodes


def test_the_director_starts_each_episode_with_the_row_of_its_group():
    episodes = make_first_rank()
    episodes.new_group(7, KEY, first_number=0)
    calls = episodes.sampler.director.calls
    assert calls == [("add", "the cast", number, {"n": 4}) for number in (14, 15)]


def test_the_director_gives_up_the_episodes_of_groups_that_are_dropped():
    episodes = make_first_rank()
    groups = [episodes.new_group(number, KEY, 0) for number in range(3)]
    episodes.sampler.director.calls.clear()
    episodes.give_up([groups[2], groups[0]])
    calls = episodes.sampler.director.calls
    assert calls == [("give up", "the cast", number) for number in (4, 5, 0, 1)]
    assert [*episodes.loop.playing] == [2, 3]


@pytest.mark.parametrize("is_first", [True, False])
def test_episodes_have_time_only_while_vllm_draws_and_its_work_is_counted(is_first, monkeypatch):
    """Three of four episodes are running. The loop takes 5 steps, in which it draws 11 tokens."""
    episodes = make_first_rank() if is_first else make_episodes()
    groups = [episodes.new_group(number, KEY, 0) for number in range(2)]
    episodes.open.groups = groups
    episodes.loop.end([EndedEpisode(1, None, 0)])
    episodes.counts = StepCounts(slots=100, tokens=200)
    calls = episodes.sampler.director.calls if is_first else []
    calls.clear()

    def run(is_enough, version):
        calls.append((version, is_enough()))
        episodes.loop.num_steps = 5
        episodes.loop.num_tokens = 11
        episodes.loop.end([EndedEpisode(0, None, 0)])
        calls.append((version, is_enough()))

    monkeypatch.setattr(episodes.loop, "run", run)
    episodes.generate(1, version=3)
    drawn = [(3, False), (3, True)]
    assert calls == (["start", *drawn, "stop"] if is_first else drawn)
    assert episodes.counts == StepCounts(slots=100 + 5 * 3, tokens=200 + 11)


def test_trained_groups_are_shared_in_their_order_and_forgotten():
    episodes = make_first_rank()
    first, second, third = (episodes.new_group(number, KEY, 0) for number in range(3))
    episodes.loop.times = "the times"
    shared = []
    episodes.sampler.share = lambda *values: shared.append(values) or "samples"
    draw = Draw("request", "assignment", [third, first], 6, torch.tensor([0.0, 2.0]))
    assert episodes.grade_and_share(draw) == "samples"
    ((request, assignment, played),) = shared
    assert (request, assignment) == ("request", "assignment")
    expected = [episode.playing for group in (third, first) for episode in group.responses]
    assert all(one is other for one, other in zip(played.playing, expected, strict=True))
    assert (played.times, played.version, played.seconds.tolist()) == ("the times", 6, [0, 2])
    assert [*episodes.loop.playing] == [2, 3], "the other group goes on"
