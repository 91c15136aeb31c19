"""Responses that vLLM is asked to generate in parts, with a vLLM that has no model."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from config import InputError
from rollout.responses import Responses
from rollout.vllm.continuing import SEED_RANGE, ContinuingRollout, RandomStreams
from tests.rollout.scripted_vllm import ScriptedRecorder, ScriptedRollout, whole_response
from tests.support.samples import configure

pytestmark = pytest.mark.usefixtures("process_group")

MAX_TOKENS = 9
PROMPTS = [[5], [6] * 4, [7, 7], [8] * 3, [9]]
SEEDS = [3, 2**61 + 3, 12, 77, 21]
WHOLE = [whole_response(*pair, MAX_TOKENS) for pair in zip(PROMPTS, SEEDS)]


def make_sampling(top_k: int = -1):
    return configure(f"rollout.max_tokens={MAX_TOKENS}", f"rollout.top_k={top_k}").rollout


def stop_after(num_steps: int):
    """Return the function that ends a call of generate() after a number of steps."""
    calls = itertools.count()
    return lambda ended: next(calls) == num_steps


def test_the_responses_of_these_tests_end_for_both_reasons():
    assert {reason for _, reason in WHOLE} == {"stop", "length"}
    assert len({len(tokens) for tokens, _ in WHOLE}) > 2


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("top_k", [-1, 2])
def test_responses_in_parts_are_those_that_are_not_interrupted(is_closed, top_k):
    rollout = ScriptedRollout(is_closed)
    continuing = ContinuingRollout(rollout)
    engine = rollout.llm.llm_engine
    tokens = [[] for _ in PROMPTS]
    log_probs = [[] for _ in PROMPTS]
    reasons = {}
    for num_steps in (2, 4, 100):
        running = [i for i in range(len(PROMPTS)) if i not in reasons]
        steps_before = engine.num_steps
        responses, ended = continuing.generate(
            [PROMPTS[i] + tokens[i] for i in running],
            [SEEDS[i] for i in running],
            [len(tokens[i]) for i in running],
            make_sampling(top_k),
            stop_after(num_steps),
        )
        assert continuing.num_steps == engine.num_steps - steps_before <= num_steps
        assert not engine.requests, "those that have not ended were aborted"
        assert not engine.in_flight, "vLLM would still compute while memory is freed"
        assert rollout.closed_batch_share == (0.75 if is_closed else 0)
        assert (responses.candidates is None) == (top_k < 0)
        for row, i in enumerate(running):
            length = responses.lengths[row]
            tokens[i] += responses.tokens[row, :length].tolist()
            log_probs[i] += responses.log_probs[row, :length].tolist()
        reasons |= {running[row]: reason for row, reason in ended.items()}
    assert [(tokens[i], reasons[i]) for i in range(len(PROMPTS))] == WHOLE
    for prompt, response, values in zip(PROMPTS, tokens, log_probs):
        assert values == [-(len(prompt) + i) / 1024 for i in range(len(response))]


def test_enough_is_decided_by_the_responses_that_have_ended():
    """vLLM stops after the step in which the second one ends."""
    rollout = ScriptedRollout()
    lengths = sorted(len(tokens) for tokens, _ in WHOLE)
    _, reasons = ContinuingRollout(rollout).generate(
        PROMPTS, SEEDS, [0] * 5, make_sampling(), lambda ended: len(ended) >= 2
    )
    assert rollout.llm.llm_engine.num_steps == lengths[1]
    ended = [i for i, (tokens, _) in enumerate(WHOLE) if len(tokens) <= lengths[1]]
    assert reasons == {i: WHOLE[i][1] for i in ended}


def test_a_response_has_the_experts_of_its_prompt_and_all_its_tokens():
    rollout = ScriptedRollout()
    rollout.recorder = ScriptedRecorder()
    responses, _ = ContinuingRollout(rollout).generate(
        PROMPTS[:2], SEEDS[:2], [0, 2], make_sampling(), stop_after(2)
    )
    assert responses.lengths.tolist() == [2, 2]
    assert responses.routes[:, 0, 0].tolist() == [*range(1 + 2), *range(4 + 2)]


def test_vllm_changes_no_random_numbers_of_the_trainer():
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    rollout = ScriptedRollout()
    ContinuingRollout(rollout).generate(
        PROMPTS, SEEDS, [0] * 5, make_sampling(), lambda ended: False
    )
    rollout.generate(PROMPTS, SEEDS, make_sampling())
    assert states == (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("is_closed", [False, True])
def test_whole_responses_are_packed_with_their_prompts(is_closed):
    rollout = ScriptedRollout(is_closed)
    batch, truncated = rollout.generate(PROMPTS, SEEDS, make_sampling())
    assert truncated.tolist() == [reason == "length" for _, reason in WHOLE]
    sequences = [ids.tolist() for ids in batch.input_ids.split(batch.lengths)]
    assert sequences == [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, WHOLE)]
    assert rollout.drafts.counts[0] == rollout.llm.llm_engine.num_steps, "those of the last call"
    assert rollout.closed_batch_share == (0.75 if is_closed else 0)


def test_a_batch_with_stop_strings_is_left_to_vllms_own_scheduler():
    rollout = ScriptedRollout(is_closed=True)
    responses = Responses(2, 1, 0)
    params = []
    for stop in ("[]", "[x]"):
        sampling = configure(f"rollout.stop={stop}").rollout
        params.append(rollout.sampling_params(sampling, 1))
    assert rollout.begin_batch(responses, params[:1])
    assert not rollout.begin_batch(responses, params)


class V1Sampler(nn.Module):
    def forward(self, logits, sampling_metadata):
        return logits


class Worker:
    """A worker with vLLM's V1 model runner, whose batch has these requests."""

    use_v2_model_runner = False

    def __init__(self, req_ids: list[str]):
        self.model_runner = self
        self.input_batch = self
        self.req_ids = req_ids
        self.sampler = V1Sampler()


class Generators:
    def __init__(self, seeds: dict[int, int]):
        self.generators = {i: torch.Generator().manual_seed(seed) for i, seed in seeds.items()}


def start_streams(worker: Worker, device: str = "cpu") -> RandomStreams:
    rollout = ScriptedRollout()
    rollout.device = torch.device(device)
    rollout.llm.collective_rpc = lambda function: [function(worker)]
    return RandomStreams(rollout)


def next_numbers(worker: Worker, metadata: Generators) -> list[int]:
    """Return the number that each request draws next, as vLLM's V1 model runner draws it."""
    worker.sampler(torch.zeros(1), sampling_metadata=metadata)
    generators = metadata.generators.values()
    return [int(torch.randint(0, SEED_RANGE, (1,), generator=g)) for g in generators]


def numbers_of(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(0, SEED_RANGE, (1,), generator=generator)) for _ in range(5)]


def test_a_request_skips_the_random_numbers_of_its_earlier_tokens_once():
    """The batch has the requests in an order of its own, and one of them without a seed."""
    worker = Worker(["1-b", "2-c", "0-a"])
    streams = start_streams(worker)
    metadata = Generators({0: 11, 2: 12})
    streams.skip(["0-a", "1-b", "3-d"], [3, 0, 2])
    assert next_numbers(worker, metadata) == [numbers_of(11)[0], numbers_of(12)[3]]
    assert next_numbers(worker, metadata) == [numbers_of(11)[1], numbers_of(12)[4]]
    # The last request was aborted before its first token. Another one has the same id.
    streams.forget()
    worker.req_ids = ["3-d"]
    assert next_numbers(worker, Generators({0: 13})) == numbers_of(13)[:1]


def test_the_v1_model_runner_continues_responses_only_on_a_cpu():
    with pytest.raises(InputError, match="V1 model runner on cuda: set VLLM_USE_V2_MODEL_RUNNER=1"):
        start_streams(Worker([]), "cuda")
