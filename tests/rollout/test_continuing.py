"""Responses that stop after some steps, and continue: their tokens, ends and random numbers.

test_partial_reference.py draws them with vLLM.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from config import InputError
from rollout.responses import Responses
from rollout.vllm.continuing import ContinuingRollout, RandomStreams
from tests.rollout.seeded_rollout import SeededRollout
from tests.support.samples import configure

PROMPTS = [[1, 2], [3], [4, 5, 6]]
SEEDS = [10, 11, 12]
MAX_TOKENS = 6


@pytest.fixture(autouse=True)
def one_rank():
    """Only the first rank shows progress."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Drawing:
    """Responses that are drawn in parts. Their tokens so far are in `tokens`."""

    def __init__(self, rollout: SeededRollout, *settings: str):
        self.rollout = rollout
        self.continuing = ContinuingRollout(rollout)
        self.sampling = configure(f"rollout.max_tokens={MAX_TOKENS}", *settings).rollout
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self.running = [0, 1, 2]
        self.reasons: dict[int, str] = {}

    def go_on(self, num_steps: int) -> Responses:
        """Continue the responses that have not ended, for this many steps of vLLM."""
        engine = self.rollout.engine
        last = engine.num_steps + num_steps
        responses, reasons = self.continuing.generate(
            [PROMPTS[i] + self.tokens[i] for i in self.running],
            [SEEDS[i] for i in self.running],
            [len(self.tokens[i]) for i in self.running],
            self.sampling,
            lambda ended: engine.num_steps >= last,
        )
        for row, i in enumerate(self.running):
            self.tokens[i] += responses.tokens[row, : responses.lengths[row]].tolist()
        self.reasons |= {self.running[row]: reason for row, reason in reasons.items()}
        self.running = [i for i in self.running if i not in self.reasons]
        return responses


def drawn_at_once() -> list[list[int]]:
    drawing = Drawing(SeededRollout())
    drawing.go_on(100)
    assert drawing.reasons == dict.fromkeys(range(3), "length")
    assert [len(tokens) for tokens in drawing.tokens] == [MAX_TOKENS] * 3
    return drawing.tokens


@pytest.mark.parametrize("is_closed", [False, True])
def test_interruptions_change_no_token(is_closed):
    """The last response begins later than the others."""
    rollout = SeededRollout(is_closed)
    drawing = Drawing(rollout)
    drawing.running = [0, 1]
    drawing.go_on(2)
    assert drawing.continuing.num_steps == 2
    assert drawing.reasons == {}
    drawing.running = [2, 0, 1]
    responses = drawing.go_on(1)
    assert responses.lengths.tolist() == [1, 1, 1]
    drawing.go_on(0)
    assert drawing.continuing.streams.num_skipped == {}
    drawing.go_on(3)
    assert drawing.reasons == {0: "length", 1: "length"}
    drawing.go_on(100)
    assert drawing.continuing.num_steps == 2
    assert drawing.tokens == drawn_at_once()
    assert drawing.running == []
    assert rollout.engine.requests == {}, "vLLM is left without requests"
    assert rollout.engine.batch_queue == [], "and without steps"
    assert rollout.batches == [is_closed] * 10, "each of the five batches has begun and ended"


def test_new_tokens_have_their_log_probs():
    drawing = Drawing(SeededRollout())
    drawing.go_on(1)
    responses = drawing.go_on(2)
    for row, tokens in enumerate(drawing.tokens):
        expected = np.array(tokens[1:]) / -10
        assert responses.log_probs[row, :2] == pytest.approx(expected)


def test_a_stop_string_may_have_begun_before_an_interruption():
    """It is the text of the first three tokens; the response stops after two."""
    whole = drawn_at_once()
    rollout = SeededRollout()
    stop = rollout.engine.tokenizer.decode(whole[1][:3])
    assert len(stop) == 3
    drawing = Drawing(rollout, f"rollout.stop=[{stop}]")
    drawing.go_on(2)
    drawing.go_on(100)
    assert drawing.reasons == {0: "length", 1: "stop", 2: "length"}
    assert drawing.tokens == [whole[0], whole[1][:3], whole[2]]


def test_the_experts_are_those_of_prompts_and_new_tokens():
    drawing = Drawing(SeededRollout(has_recorder=True))
    drawing.go_on(1)
    responses = drawing.go_on(2)
    lengths = [len(PROMPTS[i]) + 3 for i in range(3)]
    assert len(responses.routes) == sum(lengths)


def test_the_random_state_of_this_process_stays():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    Drawing(SeededRollout()).go_on(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_model_runners_whose_random_numbers_cannot_be_skipped_are_rejected():
    """Those of version 2 need no help: they compute the numbers from a token's position."""
    rollout = SeededRollout()
    rollout.device = torch.device("cuda")
    with pytest.raises(InputError, match="set VLLM_USE_V2_MODEL_RUNNER=1"):
        RandomStreams(rollout)
    rollout.engine.worker.use_v2_model_runner = True
    streams = RandomStreams(rollout)
    streams.skip(["0-random"], [3])
    assert not rollout.engine.runner.sampler._forward_pre_hooks
