"""Steps whose episodes continue in later steps, with a vLLM that has no model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from config import InputError
from data.prompts import Prompt, PromptDataset
from engines.model.routes import FIELD as ROUTES
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rollout.episodes.drawing import EpisodeSampler
from rollout.episodes.jobs import EndedEpisode
from rollout.episodes.stepping import turn_seed
from rollout.grading.grader import Reward
from rollout.partial.episodes import PartialEpisodes, read_episodes
from rollout.partial.groups import Counters, OpenGroup, OpenGroups, OpenResponse, to_bytes
from rollout.partial.ledger import Ledger
from rollout.samples import Samples
from tests.rollout.scripted_vllm import ScriptedRecorder, ScriptedRollout, whole_response
from tests.support.samples import configure

pytestmark = pytest.mark.usefixtures("process_group")

BATCH_SIZE = 3
GROUP_SIZE = 2
NUM_STEPS = 4
NUM_ROWS = 2 * NUM_STEPS
MAX_TOKENS = 8  # of a turn
SEED = 11


class HandmadePrompts(PromptDataset):
    """Prompts that are in no file."""

    def __init__(self):
        self.prompts = [Prompt([3 + r], f"{r}", {"number": r}) for r in range(NUM_ROWS)]
        self.drawn_lengths = np.full(NUM_ROWS, np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def rows_of_batch(batch: int) -> list[int]:
    """Return the rows of a batch, of which one is there twice."""
    return [2 * batch, 2 * batch + 1, 2 * batch]


@dataclass
class Agent:
    """An episode of 1 to 3 turns. It reads a token of its own after each."""

    number: int
    row: int
    turns_left: int
    ids: list[int]

    @classmethod
    def of(cls, number: int, row: int) -> Agent:
        return cls(number, row, 1 + row % 3, [3 + row])

    def read(self, tokens: list[int]) -> None:
        """Take a turn. The episode ends with the last one."""
        self.turns_left -= 1
        self.ids = self.ids + tokens
        if self.turns_left:
            self.ids = [*self.ids, 40 + self.turns_left]


def play_by_hand(row: int, number: int) -> tuple[list[int], bool]:
    """Return the tokens of an episode, and whether its last turn is cut off.

    number: among those of its row.
    """
    agent = Agent.of(0, row)
    while agent.turns_left:
        seed = turn_seed((SEED, row // 2, row, number), agent.ids, 0)
        tokens, reason = whole_response(agent.ids, seed, MAX_TOKENS)
        agent.read(tokens)
    return agent.ids, reason == "length"


@dataclass
class HandmadeDirector:
    """Plays the episodes itself: it is director, gateway, server and worker in one."""

    agents: dict[int, Agent] = field(default_factory=dict)
    messages: list[dict] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    agent_of_request: dict[int, Agent] = field(default_factory=dict)

    @property
    def server(self) -> HandmadeDirector:
        return self

    def open(self, sampling) -> str:
        assert sampling.max_tokens == MAX_TOKENS
        return "the cast"

    def add(self, cast: str, number: int, row: dict) -> None:
        agent = Agent.of(number, row["number"])
        self.messages.append({"attempt": f"key {number}", "index": number})
        self.request(agent)

    def request(self, agent: Agent) -> None:
        request = {"prompt_ids": agent.ids, "max_tokens": MAX_TOKENS, "stop": []}
        name = len(self.agent_of_request)
        self.agent_of_request[name] = agent
        self.messages.append({"id": name, "episode": f"key {agent.number}", **request})

    def send(self, answer: dict) -> None:
        agent = self.agent_of_request[answer["id"]]
        agent.read(answer["token_ids"])
        if agent.turns_left:
            self.request(agent)
            return
        ended = EndedEpisode(agent.number, Reward(agent.row + 0.5, {}), tool_errors=0)
        self.messages.append({"ended": [ended], "is_over": False})

    def receive(self, cast: str, seconds: float) -> list[dict]:
        assert cast == "the cast"
        messages = self.messages
        self.messages = []
        return messages

    def give_up(self, cast: str, number: int) -> None:
        self.given_up.append(number)


class RecordingStreams:
    """Random numbers of requests, of which some are skipped."""

    def __init__(self):
        self.num_skipped = {}
        self.all_skipped = []

    def skip(self, request_ids: list[str], num_drawn: list[int]) -> None:
        self.num_skipped |= dict(zip(request_ids, num_drawn, strict=True))
        self.all_skipped += num_drawn

    def forget(self) -> None:
        self.num_skipped.clear()


class Clock:
    """Records when it runs."""

    def __init__(self):
        self.calls = []

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")


def make_sampler(is_closed: bool, max_staleness: int = 2, finishes_old: bool = True):
    config = configure(
        "rollout.episode=agent.py:play",
        f"rollout.n={GROUP_SIZE}",
        f"rollout.max_tokens={MAX_TOKENS}",
        f"data.train_batch_size={BATCH_SIZE}",
        f"trainer.seed={SEED}",
    )
    rollout = ScriptedRollout(is_closed)
    rollout.recorder = ScriptedRecorder()
    runner = SimpleNamespace(clock=Clock(), parts=None, check_parts=lambda items, results: results)
    tokenizer = make_tokenizer()
    sampler = EpisodeSampler(rollout, runner, HandmadeDirector(), tokenizer, None, None, 0.0)
    return PartialEpisodes(
        sampler=sampler,
        ledger=Ledger(1, 2.0, NUM_STEPS * BATCH_SIZE),
        dataset=HandmadePrompts(),
        rows_of_batch=rows_of_batch,
        config=config,
        open=OpenGroups(max_staleness, finishes_old),
    )


def run_step(sampler: PartialEpisodes, version: int) -> tuple[Samples, dict[str, float]]:
    """Run a step; check what vLLM has done in it, and what the step trains on."""
    engine = sampler.sampler.rollout.llm.llm_engine
    engine.version = version
    num_steps = engine.num_steps
    num_tokens = engine.num_tokens
    num_running = len(sampler.open.running())
    num_groups = sampler.ledger.next_group
    request, samples = sampler.draw(BATCH_SIZE, version, 0, Profiler())
    assert not engine.requests
    assert not engine.in_flight
    assert sampler.counts.tokens == engine.num_tokens - num_tokens
    num_running += GROUP_SIZE * (sampler.ledger.next_group - num_groups)
    assert sampler.counts.slots == num_running * (engine.num_steps - num_steps)
    assert samples.num_drawn == GROUP_SIZE * BATCH_SIZE
    assert samples.scores.tolist() == [
        request.rows[group] + 0.5 for group in samples.group.tolist()
    ]
    return samples, sampler.end_step(version)


def check_sequences(samples: Samples, version: int) -> list[tuple[int, int]]:
    """Check the tokens of a step; return row and number of each of its episodes."""
    trained = []
    for i, prompt in enumerate(samples.prompts):
        sequence = samples.batch.select([i])
        ids = sequence.input_ids.tolist()
        row = prompt.row["number"]
        numbers = [n for n in range(2 * GROUP_SIZE) if play_by_hand(row, n)[0] == ids]
        assert numbers, "these tokens belong to no episode of this row"
        trained.append((row, numbers[0]))
        assert bool(samples.truncated[i]) == play_by_hand(row, numbers[0])[1]
        is_sampled = sequence.fields["loss_mask"] > 0
        places = is_sampled.nonzero().flatten()
        # The vLLM of these tests tells in a log-probability which weights have drawn a token.
        drawn_by = -sequence.fields["rollout_log_probs"][is_sampled] - places / 1024
        age = sequence.fields["age"]
        assert age[is_sampled].tolist() == (version - drawn_by).tolist()
        assert not age[~is_sampled].any()
        assert sequence.fields[ROUTES][:, 0, 0].tolist() == [*range(len(ids))]
    return trained


EVERY_EPISODE = sorted(
    (2 * batch + place, number)
    for batch in range(NUM_STEPS)
    for place, num_groups in enumerate((2, 1))
    for number in range(num_groups * GROUP_SIZE)
)


@pytest.mark.parametrize("is_closed", [False, True])
def test_every_episode_is_trained_once_with_all_its_tokens(is_closed):
    """However often its turns were interrupted."""
    sampler = make_sampler(is_closed)
    sampler.loop.streams = RecordingStreams()
    trained = []
    ages = set()
    for version in range(NUM_STEPS):
        samples, metrics = run_step(sampler, version)
        trained += check_sequences(samples, version)
        ages |= {*samples.batch.fields["age"].tolist()}
        open_numbers = [e.number for group in sampler.open.groups for e in group.responses]
        assert sorted(sampler.loop.playing) == sorted(open_numbers), "others are forgotten"
        assert sampler.loop.of_key.keys() <= {f"key {number}" for number in open_numbers}
        assert sampler.sampler.rollout.closed_batch_share == (0.75 if is_closed else 0)
        assert not sampler.loop.streams.num_skipped, "aborted requests are forgotten"
        assert metrics["partial/carried_groups"] == len(sampler.open.groups)
        assert metrics["partial/idle_slots"] < 1
    assert sorted(trained) == EVERY_EPISODE
    assert len(ages) > 1
    assert sampler.sampler.runner.clock.calls == ["start", "stop"] * NUM_STEPS
    assert not sampler.sampler.director.given_up
    check_skipped_numbers(sampler)


def check_skipped_numbers(sampler: PartialEpisodes) -> None:
    """Check that each request skips the random numbers of the tokens that its turn has."""
    first_prompts = {}
    num_drawn = []
    for prompt, params in sampler.sampler.rollout.llm.enqueued:
        first_prompt = first_prompts.setdefault(params.seed, prompt)
        num_drawn.append(len(prompt) - len(first_prompt))
    assert sampler.loop.streams.all_skipped == num_drawn
    assert max(num_drawn) > 0


def test_episodes_that_are_too_old_are_given_up():
    """Their turns leave vLLM, and other groups take their places."""
    sampler = make_sampler(True, max_staleness=0, finishes_old=False)
    director = sampler.sampler.director
    num_dropped = 0
    for version in range(2):
        begun = {group.number for group in sampler.open.groups}
        samples, metrics = run_step(sampler, version)
        check_sequences(samples, version)
        assert set(samples.batch.fields["age"].tolist()) == {0}
        num_dropped += metrics["partial/stale_drops"]
        assert not begun & {group.number for group in sampler.open.groups}
        open_numbers = [e.number for group in sampler.open.groups for e in group.responses]
        assert sorted(sampler.loop.playing) == sorted(open_numbers)
        waiting = {request.playing.key for request in sampler.loop.waiting}
        assert waiting <= {f"key {number}" for number in open_numbers}
    assert num_dropped > 0
    assert len(director.given_up) == num_dropped * GROUP_SIZE
    assert {number // GROUP_SIZE for number in director.given_up}.isdisjoint(open_numbers)


def test_episodes_of_a_checkpoint_begin_again_with_the_same_seeds():
    sampler = make_sampler(True)
    trained = []
    for version in range(2):
        trained += check_sequences(run_step(sampler, version)[0], version)
    ((name, content),) = sampler.state().items()
    assert name == "open_responses_00000.safetensors"
    assert sampler.open.groups
    resumed = make_sampler(False)
    resumed.load_state([content])
    assert resumed.ledger == sampler.ledger
    for one, other in zip(resumed.open.groups, sampler.open.groups, strict=True):
        assert (one.number, one.row) == (other.number, other.row)
        numbers = [episode.number for episode in one.responses]
        assert numbers == [episode.number for episode in other.responses]
    for version in range(2, NUM_STEPS):
        trained += check_sequences(run_step(resumed, version)[0], version)
    assert sorted(trained) == EVERY_EPISODE


def test_a_checkpoint_without_open_episodes_is_loaded():
    sampler = make_sampler(True)
    content = sampler.to_bytes(Counters(9, 2))
    assert read_episodes(content, "agent.py:play") == (Counters(9, 2), [])


def test_a_checkpoint_of_responses_does_not_fit_episodes():
    content = to_bytes([OpenGroup(0, 0, [OpenResponse(seed=1)])], Counters(1, 0))
    with pytest.raises(
        InputError, match="rollout.episode=agent.py:play, .* set rollout.episode=null"
    ):
        make_sampler(True).load_state([content])


def test_the_episodes_of_these_tests_differ():
    episodes = [play_by_hand(*pair) for pair in EVERY_EPISODE]
    assert all(a != b for a, b in itertools.combinations(episodes, 2))
