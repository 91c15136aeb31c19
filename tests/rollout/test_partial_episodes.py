"""Groups of episodes that continue: which episodes they have, when they end, how they are saved.

vLLM draws their tokens in test_partial_reference.py.
"""

import os
import time

import numpy as np
import pytest
import torch.distributed as dist

from config import InputError
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rollout.episodes.drawing import EpisodeSampler
from rollout.episodes.jobs import EndedEpisode
from rollout.episodes.stepping import EpisodeLoop
from rollout.grading.clock import StoppableClock
from rollout.partial.drawing import StepCounts
from rollout.partial.episodes import PartialEpisodes, SavedGroup, read_episodes
from rollout.partial.groups import Counters, OpenGroups, to_bytes
from rollout.partial.ledger import Ledger
from tests.rollout.one_turn_director import OneTurnDirector, Runner
from tests.rollout.seeded_rollout import SeededRollout
from tests.rollout.test_drawing import HandmadePrompts
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


# -- draws -----------------------------------------------------------------------------------------


@pytest.fixture
def drawing():
    """Episodes of one replica of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    clock = StoppableClock(StoppableClock.make_file())
    clock.stop()
    config = configure("rollout.n=2", "data.train_batch_size=2", f"trainer.seed={SEED}")
    director = OneTurnDirector(clock)
    rollout = SeededRollout()
    sampler = EpisodeSampler(rollout, Runner(clock), director, make_tokenizer(), None, None, 0.0)
    yield PartialEpisodes(
        sampler=sampler,
        ledger=Ledger(1, oversample=1.5, limit=None),
        dataset=HandmadePrompts(),
        rows_of_batch=lambda batch: [(2 * batch) % 4, (2 * batch) % 4 + 1],
        config=config,
        open=OpenGroups(max_staleness=1, finishes_old=True),
    )
    os.close(clock.file)
    dist.destroy_process_group()


def is_stopped(clock: StoppableClock) -> bool:
    before = clock()
    time.sleep(0.001)
    return clock() == before


def test_a_long_episode_is_trained_with_the_age_of_its_tokens(drawing):
    """Three groups begin, of rows 0, 1 and 2. The one of row 1 continues in the second draw."""
    director = drawing.sampler.director
    request, samples = drawing.draw(2, 0, 40, Profiler())
    assert director.added == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert is_stopped(director.clock)
    assert director.is_running, "while vLLM draws"
    assert request.rows == [0, 2]
    assert samples.scores.tolist() == [0, 0, 2, 2]
    assert samples.group.tolist() == [40, 40, 41, 41]
    assert samples.batch.fields["age"].sum() == 0
    # Row 2 ends after three steps, which the loop learns in the fourth one.
    assert drawing.counts == StepCounts(slots=4 * 6, tokens=2 * (2 + 3 + 4), graded=4)
    assert [*drawing.loop.playing] == [2, 3], "the others are forgotten"
    assert drawing.end_step(0)["partial/idle_slots"] == 1 - 18 / 24
    assert director.given_up == []

    request, samples = drawing.draw(2, 1, 42, Profiler())
    assert request.rows == [1, 3]
    assert samples.scores.tolist() == [1, 1, 3, 3]
    assert samples.response_lengths.tolist() == [9, 9, 2, 2]
    first, second, third, _ = samples.batch.fields["age"].split(samples.batch.lengths)
    assert first.tolist() == second.tolist() == [0] + [1] * 4 + [0] * 5
    assert third.tolist() == [0] * 3
    assert [*drawing.loop.playing] == [8, 9]


def test_an_interruption_changes_no_token_of_an_episode(drawing):
    """Its seed is that of the run, the batch, the row and the number among the row's episodes."""
    drawing.draw(2, 0, 40, Profiler())
    _, samples = drawing.draw(2, 1, 42, Profiler())
    # In the second draw of the step, row 1 has five tokens left, and rows 3 and 0 are new.
    assert drawing.counts.tokens == 2 * (2 + 3 + 4) + 2 * (5 + 2 + 2)
    first, second, *_ = samples.batch.input_ids.split(samples.batch.lengths)
    director = OneTurnDirector(drawing.sampler.runner.clock)
    whole = EpisodeLoop(
        SeededRollout(),
        drawing.config.rollout,
        lambda seconds: director.receive(director.cast, seconds),
        director.send,
    )
    for number in range(2):
        whole.add(number, (SEED, 0, 1, number))
        director.add(director.cast, number, {"number": 1})
    whole.run(lambda: whole.num_ended == 2)
    for ids, playing in zip((first, second), whole.playing.values(), strict=True):
        assert ids.tolist() == playing.episode.branches[0].token_ids


def test_the_director_gives_up_all_episodes_of_a_group(drawing):
    drawing.open.finishes_old = False
    drawing.draw(2, 0, 40, Profiler())
    drawing.open.max_staleness = 0
    assert drawing.end_step(0)["partial/stale_drops"] == 1
    assert drawing.sampler.director.given_up == [2, 3]
    assert drawing.loop.playing == {}
    assert drawing.ledger.replica_of == {}
