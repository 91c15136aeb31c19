"""What vLLM is asked for when turns of episodes begin, and when they continue in another draw.

And what the loop records of the messages that arrive, and of the tokens that vLLM draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from config import load
from rollout.episodes.jobs import EndedEpisode, Limit
from rollout.episodes.stepping import EpisodeLoop, Inbox, Playing, TurnRequest, turn_seed
from rollout.grading.results import Reward
from rollout.responses import Responses
from rollout.vllm.sampling import RequestSampling
from tests.rollout.outputs import output_of
from tests.support.ranks import on_ranks

SEED = (3, 1, 4)


@dataclass
class RecordingRollout:
    """A vLLM that only records its requests, as (prompt, sampling, seed), and which it loses."""

    vocab_size: int = 100
    requests: list[tuple[list[int], RequestSampling, int]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    recorder: None = None

    def __post_init__(self):
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(abort_request=self.aborted.extend))

    def sampling_params(self, sampling: RequestSampling, seed: int):
        return sampling, seed

    def enqueue(self, prompts, params) -> list[str]:
        first = len(self.requests)
        self.requests += [(prompt, *param) for prompt, param in zip(prompts, params, strict=True)]
        return [f"{number}-random" for number in range(first, len(self.requests))]


def make_loop(top_k: int = 5) -> EpisodeLoop:
    """Return a loop whose answers to the gateway are in loop.answered."""
    pairs = ["model.path=m", "data.train_files=t", "rollout.max_tokens=50"]
    sampling = load("ppo.yaml", [*pairs, f"rollout.top_k={top_k}"]).rollout
    answered: list[dict] = []
    loop = EpisodeLoop(RecordingRollout(), sampling, lambda seconds: [], answered.append)
    loop.answered = answered
    return loop


def make_drawing_loop(num_rows: int = 4) -> EpisodeLoop:
    """Return a loop in the middle of a draw with weights of version 3, with vLLM's scheduler."""
    loop = make_loop(top_k=-1)
    loop.version = 3
    loop.num_tokens = 0
    loop.responses = Responses(num_rows, 50, 0)
    loop.is_closed_batch = False
    return loop


def ask(key: str, number: int, prompt_ids: Sequence[int] = (1, 2)) -> dict:
    """Return the gateway's message with a request."""
    request = {"prompt_ids": [*prompt_ids], "max_tokens": 10, "stop": []}
    return {"id": number, "episode": key, **request}


def test_a_turn_samples_as_configured_with_the_limits_of_its_request():
    loop = make_loop()
    playing = loop.add(0, SEED)
    message = {"id": 7, "prompt_ids": [1, 2], "max_tokens": 10, "stop": ["x"]}
    request = TurnRequest.read(playing, message)
    loop.begin_turns([request])
    ((prompt, sampling, seed),) = loop.rollout.requests
    assert prompt == [1, 2]
    assert (sampling.max_tokens, sampling.stop, sampling.top_k) == (10, ["x"], 5)
    assert seed == turn_seed(SEED, [1, 2], 0)
    assert loop.running == {"0": request}


def test_a_turn_continues_after_its_tokens_and_up_to_the_same_limit():
    loop = make_loop()
    playing = loop.add(0, SEED)
    message = {"id": 7, "prompt_ids": [1, 2], "max_tokens": 10, "stop": []}
    request = TurnRequest.read(playing, message)
    loop.begin_turns([request])
    request.turn.response.append(np.array([8, 9, 8]), np.zeros(3), None, version=0)
    loop.running.clear()
    loop.begin_turns([request])
    first, second = loop.rollout.requests
    prompt, sampling, seed = second
    assert prompt == [1, 2, 8, 9, 8]
    assert sampling.max_tokens == 7
    assert seed == first[2], "its random numbers go on"
    assert playing.episode.num_turns == 1


def test_requests_with_the_same_prompt_have_seeds_of_their_own():
    loop = make_loop()
    messages = [
        {"id": number, "prompt_ids": [1], "max_tokens": 5, "stop": []} for number in range(2)
    ]
    for number in range(2):
        playing = loop.add(number, (3, 1, number))
        loop.begin_turns([TurnRequest.read(playing, message) for message in messages])
    seeds = [seed for _, _, seed in loop.rollout.requests]
    assert len({*seeds}) == 4


def test_tool_errors_are_those_of_replies_and_of_tools():
    """The gateway reports malformed calls turn by turn, and a worker the tools that have raised."""
    loop = make_loop()
    playing = loop.add(0, SEED)
    for num_calls, num_errors in ((2, 1), (0, 3)):
        report = {"messages": [], "tool_calls": num_calls, "tool_errors": num_errors}
        loop.handle_episode(playing, report)
    loop.end([EndedEpisode(0, None, tool_errors=10)])
    assert (playing.num_tool_calls, playing.num_tool_errors) == (2, 14)


def test_the_tokens_of_all_turns_are_counted():
    loop = make_loop()
    loop.version = 0
    loop.num_tokens = 0
    playing = loop.add(0, SEED)
    for number, num_tokens in enumerate((3, 2, 4)):
        message = {"id": number, "prompt_ids": [number], "max_tokens": 10, "stop": []}
        request = TurnRequest.read(playing, message)
        loop.begin_turns([request])
        loop.append(request, np.arange(num_tokens), np.zeros(num_tokens), None)
    assert loop.num_tokens == 9


# -- messages --------------------------------------------------------------------------------------


def begin(loop: EpisodeLoop, *keys: str) -> list[Playing]:
    """Begin an episode with each key, numbered from 0."""
    playing = [loop.add(number, (3, 1, number)) for number in range(len(keys))]
    loop.handle([{"attempt": key, "index": number} for number, key in enumerate(keys)])
    return playing


def numbers_of(requests) -> list[int]:
    return [request.number for request in requests]


def test_requests_go_to_vllm_in_order_as_far_as_there_is_room():
    """Those of unknown keys are forgotten: their episode is over."""
    loop = make_drawing_loop(num_rows=3)
    begin(loop, "a", "b")
    loop.handle([ask("a", 1), ask("unknown", 2), ask("b", 3)])
    assert numbers_of(loop.running.values()) == [1, 3]
    loop.handle([ask("b", 4), ask("a", 5), ask("b", 6)])
    assert numbers_of(loop.running.values()) == [1, 3, 4]
    assert numbers_of(loop.waiting) == [5, 6]
    del loop.running["1"]
    loop.handle([])
    assert numbers_of(loop.running.values()) == [1, 4, 5]
    assert numbers_of(loop.waiting) == [6]


def test_an_aborted_request_leaves_the_other_requests_alone():
    loop = make_drawing_loop(num_rows=2)
    first, second = begin(loop, "a", "b")
    loop.handle([ask("a", 1), ask("b", 2), ask("a", 3), ask("b", 4)])
    loop.handle([{"episode": "a", "abort": 2}])
    assert loop.rollout.aborted == [], "the request is not this episode's"
    loop.handle([{"episode": "b", "abort": 2}])
    assert loop.rollout.aborted == ["1"]
    assert numbers_of(loop.running.values()) == [1, 3]
    assert numbers_of(loop.waiting) == [4]
    assert second.episode.branches == []
    assert second.episode.open_turns == []
    assert len(first.episode.open_turns) == 2
    loop.handle([{"episode": "b", "abort": 4}])
    assert loop.waiting == []
    assert loop.rollout.aborted == ["1"], "vLLM never had the second one"


def test_an_episode_that_ends_loses_its_requests_and_its_key():
    loop = make_drawing_loop()
    first, second = begin(loop, "a", "b")
    loop.handle([ask("a", 1), ask("b", 2)])
    result = Reward(2.0, {})
    loop.handle([{"ended": [EndedEpisode(1, result, 0)], "is_over": False}, ask("b", 3)])
    assert (second.is_over, second.result) == (True, result)
    assert (first.is_over, first.result) == (False, None)
    assert loop.num_ended == 1
    assert not loop.is_over
    assert numbers_of(loop.running.values()) == [1]
    assert loop.rollout.aborted == ["1"]
    loop.handle([{"ended": [EndedEpisode(0, Limit("max_turns", None), 0)], "is_over": True}])
    assert loop.is_over
    assert loop.num_ended == 2
    assert loop.of_key == {}


def test_the_end_of_an_episode_that_was_given_up_is_only_counted():
    loop = make_drawing_loop()
    begin(loop, "a")
    loop.handle([ask("a", 1)])
    loop.remove(0)
    assert loop.rollout.aborted == ["0"]
    assert (loop.playing, loop.of_key, loop.running) == ({}, {}, {})
    loop.handle([{"ended": [EndedEpisode(0, None, 0)], "is_over": True}])
    assert loop.num_ended == 1
    loop.handle([{"attempt": "again", "index": 0}])
    assert loop.of_key == {}


def test_another_attempt_begins_from_nothing():
    loop = make_drawing_loop()
    (playing,) = begin(loop, "a")
    loop.handle([ask("a", 1)])
    report = {"messages": [{"role": "user"}], "tool_calls": 2, "tool_errors": 1}
    loop.handle([{"episode": "a", **report}, {"episode": "a", "limit": "max_turns"}])
    assert playing.limit == "max_turns"
    assert playing.messages == report["messages"]
    assert (playing.num_tool_calls, playing.num_tool_errors) == (2, 1)
    loop.handle([{"attempt": "b", "index": 0}, ask("a", 2), ask("b", 3)])
    assert playing.seed == (3, 1, 0)
    assert (playing.limit, playing.messages, playing.num_tool_calls) == (None, [], 0)
    assert loop.rollout.aborted == ["0"]
    assert numbers_of(loop.running.values()) == [3]
    assert loop.of_key == {"b": playing}
    first, second = loop.rollout.requests
    assert first == second, "with the same prompt, both attempts draw the same"


def receive_on_rank(num_messages: int) -> list[list[dict]]:
    """Receive messages on the first of two ranks; return what this rank sees."""
    rank = dist.get_rank()
    seconds = []

    def receive(wait: float) -> list[dict]:
        seconds.append(wait)
        return [{"rank": rank, "number": number} for number in range(num_messages)]

    inbox = Inbox(SimpleNamespace(tp_rank=rank), receive, dist.group.WORLD)
    messages = [inbox(0.25), inbox(0.0)]
    assert seconds == ([0.25, 0.0] if rank == 0 else [])
    return messages


def test_all_ranks_of_a_replica_see_the_messages_of_the_first_one(tmp_path):
    expected = [[{"rank": 0, "number": 0}, {"rank": 0, "number": 1}]] * 2
    assert on_ranks(2, tmp_path, receive_on_rank, 2) == [expected, expected]


def test_a_replica_of_one_rank_needs_no_group():
    inbox = Inbox(SimpleNamespace(tp_rank=0), lambda seconds: [{"seconds": seconds}], None)
    assert inbox(0.5) == [{"seconds": 0.5}]


# -- turns -----------------------------------------------------------------------------------------


def test_what_vllm_draws_belongs_to_its_turn():
    """Also in several steps; outputs of requests that were dropped are ignored."""
    loop = make_drawing_loop()
    first, second = begin(loop, "a", "b")
    loop.handle([ask("a", 1, [1]), ask("b", 2, [2])])
    assert loop.finish([output_of("1", [20], None), output_of("0", [10, 11], None)]) == 0
    assert loop.answered == []
    outputs = [output_of("9", [90], "stop"), output_of("0", [12], "length")]
    assert loop.finish(outputs) == 1
    assert loop.finish([output_of("1", [21], "stop")]) == 1
    assert loop.running == {}
    assert loop.num_tokens == 5
    assert [(answer["id"], answer["token_ids"]) for answer in loop.answered] == [
        (1, [10, 11, 12]),
        (2, [20, 21]),
    ]
    assert [answer["finish_reason"] for answer in loop.answered] == ["length", "stop"]
    assert loop.answered[0]["log_probs"] == pytest.approx([-1.0, -1.1, -1.2])
    assert loop.answered[1]["log_probs"] == pytest.approx([-2.0, -2.1])
    (branch,) = first.episode.branches
    assert branch.token_ids == [1, 10, 11, 12]
    assert branch.versions == [3, 3, 3]
    assert first.is_truncated
    assert not second.is_truncated
    loop.handle([{"episode": "b", "reward": 0.5}])
    assert second.episode.branches[0].rewards == [0, 0, 0.5]


def test_suspended_turns_continue_in_the_order_in_which_they_arrived():
    """They keep their tokens. Some of them were waiting, and one has continued before."""
    loop = make_drawing_loop(num_rows=2)
    begin(loop, "a", "b", "c")
    loop.handle([ask("b", 4), ask("c", 7)])
    loop.handle([ask("a", 9)])
    loop.finish([output_of("1", [70], None)])
    loop.suspend()
    assert sorted(loop.rollout.aborted) == ["0", "1"]
    assert loop.running == {}
    loop.waiting.append(TurnRequest.read(loop.playing[0], ask("a", 5)))
    loop.suspend()
    assert numbers_of(loop.waiting) == [4, 5, 7, 9]
    loop.version = 4
    loop.responses = Responses(4, 50, 0)
    loop.handle([])
    assert [prompt for prompt, *_ in loop.rollout.requests[2:]] == [
        [1, 2],
        [1, 2],
        [1, 2, 70],
        [1, 2],
    ]
    loop.finish([output_of("4", [71], "stop")])
    (branch,) = loop.playing[2].episode.branches
    assert branch.token_ids == [1, 2, 70, 71]
    assert branch.versions == [3, 4]


def test_details_of_a_branch_name_its_rewards_and_the_conversation_once():
    """The conversation is written with the last branch."""
    loop = make_drawing_loop()
    (playing,) = begin(loop, "a")
    messages = [{"role": "user", "content": "hello"}]
    for number, prompt_ids in enumerate(([1], [2])):
        loop.handle([ask("a", number, prompt_ids)])
        loop.finish([output_of(str(number), [10], "stop")])
        loop.handle([{"episode": "a", "reward": 1.0 + number}])
    loop.handle([{"episode": "a", "limit": "max_turns"}])
    report = {"messages": messages, "tool_calls": 0, "tool_errors": 0}
    loop.handle([{"episode": "a", **report}])
    common = {"num_branches": 2, "turns": 2, "limit": "max_turns"}
    assert playing.details(0) == {"branch": 0, "turn_rewards": [1.0], **common}
    assert playing.details(1) == {
        "branch": 1,
        "turn_rewards": [2.0],
        "messages": messages,
        **common,
    }
    assert playing.is_truncated, "the limit has ended it"
