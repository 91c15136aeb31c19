"""What vLLM is asked for when turns of episodes begin, and when they continue in another draw."""

from dataclasses import dataclass, field

import numpy as np

from config import load
from rollout.episodes.jobs import EndedEpisode
from rollout.episodes.stepping import EpisodeLoop, TurnRequest, turn_seed
from rollout.vllm.sampling import RequestSampling

SEED = (3, 1, 4)


@dataclass
class RecordingRollout:
    """A vLLM that only records its requests, as (prompt, sampling, seed)."""

    vocab_size: int = 100
    requests: list[tuple[list[int], RequestSampling, int]] = field(default_factory=list)

    def sampling_params(self, sampling: RequestSampling, seed: int):
        return sampling, seed

    def enqueue(self, prompts, params) -> list[str]:
        self.requests += [(prompt, *param) for prompt, param in zip(prompts, params, strict=True)]
        return [f"{number}-random" for number in range(len(prompts))]


def make_loop() -> EpisodeLoop:
    pairs = ["model.path=m", "data.train_files=t", "rollout.max_tokens=50", "rollout.top_k=5"]
    sampling = load("ppo.yaml", pairs).rollout
    return EpisodeLoop(RecordingRollout(), sampling, lambda seconds: [], lambda message: None)


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
