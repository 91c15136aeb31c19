"""The scheduler for closed batches ends requests as vLLM's own scheduler does.

No model draws the tokens: they are given. test_rollout.py compares the two schedulers with a model,
and where memory is short.
"""

from collections import deque
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from rollout.responses import Responses
from tests.support.models import make_model


@pytest.fixture(scope="module")
def batches():
    from tests.rollout import closed_batches  # imports vLLM, which takes seconds

    return closed_batches


@pytest.fixture(scope="module")
def vllm_config(batches, tmp_path_factory):
    model = tmp_path_factory.mktemp("scheduler") / "model"
    make_model(model, "qwen2_tied")
    return batches.make_vllm_config(model)


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_requests_end_as_in_vllms_own_scheduler(batches, vllm_config, num_in_flight):
    expected_tokens, expected_reasons = batches.run_vllms(vllm_config, num_in_flight)
    assert len(expected_tokens["ends at max_model_len"]) == batches.MAX_MODEL_LEN - 11
    assert set(expected_reasons.values()) == {"stop", "length"}
    responses = Responses(len(batches.REQUESTS), batches.MAX_MODEL_LEN, 0)
    scheduler = batches.begin(vllm_config, responses)
    max_tokens = scheduler.max_num_scheduled_tokens
    steps = batches.Steps(scheduler, num_in_flight)
    for name in batches.REQUESTS:
        steps.add(name)
    while scheduler.has_unfinished_requests():
        steps.step()
    for name, tokens in expected_tokens.items():
        taken, log_probs, _ = scheduler.take(name)
        assert taken.tolist() == tokens, name
        np.testing.assert_allclose(log_probs, -np.array(tokens) / 100, rtol=1e-6, err_msg=name)
    assert steps.reasons == expected_reasons
    assert scheduler.max_num_scheduled_tokens == max_tokens, "lowered only within a step"
    assert scheduler.max_num_running_reqs == batches.MAX_REQUESTS
    assert scheduler.end() == 1, "every step was a step of the scheduler for closed batches"


@pytest.mark.parametrize("num_steps_before", [3, 4])
def test_a_request_waits_until_its_lost_steps_cost_as_much_as_its_admission(
    batches, vllm_config, num_steps_before
):
    """It costs each of two running requests one step. Before it arrives, no request waits."""
    scheduler = batches.begin(vllm_config, Responses(3, batches.MAX_MODEL_LEN, 0))
    steps = batches.Steps(scheduler, 1)
    steps.add("ends at max_model_len")
    steps.add("just below max_model_len")
    for _ in range(num_steps_before):
        steps.step()
    steps.add("one token")
    num_admissions = []
    for _ in range(3):
        steps.step()
        num_admissions.append(scheduler.num_admissions)
    assert num_admissions == [1, 2, 2]


def test_a_request_gets_the_row_of_one_that_was_taken(batches, vllm_config):
    """As in episodes, where a turn's request arrives while others run, with one row for each."""
    expected_tokens, _ = batches.run_vllms(vllm_config, 2)
    scheduler = batches.begin(vllm_config, Responses(2, batches.MAX_MODEL_LEN, 0))
    steps = batches.Steps(scheduler, 2)
    waiting = deque(batches.REQUESTS)
    steps.add(waiting.popleft())
    steps.add(waiting.popleft())
    taken = {}
    while scheduler.has_unfinished_requests():
        for name in steps.step():
            taken[name], _, _ = scheduler.take(name)
            if waiting:
                steps.add(waiting.popleft())
    assert {name: tokens.tolist() for name, tokens in taken.items()} == expected_tokens


@pytest.mark.parametrize(
    "feature, value, is_begun",
    [
        ("lora_config", SimpleNamespace(max_loras=1), True),
        ("lora_config", SimpleNamespace(max_loras=2), False),
        ("num_spec_tokens", 1, False),
        ("use_pp", True, False),
        ("connector", "a connector", False),
        ("requests", {"early": "a request"}, False),
    ],
)
def test_batches_that_are_left_to_vllms_own_scheduler(
    batches, vllm_config, feature, value, is_begun
):
    scheduler = batches.make_scheduler(batches.ClosedBatchScheduler, vllm_config)
    setattr(scheduler, feature, value)
    responses = Responses(2, batches.MAX_MODEL_LEN, 0)
    assert scheduler.begin(responses) == is_begun
    assert (scheduler.responses is responses) == is_begun


def test_requests_that_are_preempted_draw_the_same_tokens(batches, vllm_config, monkeypatch):
    """Requests arrive in any order, and memory is short even in the step after an admission."""
    expected_tokens, _ = batches.run_vllms(vllm_config, 2)
    random = Random(0)
    num_vllm_steps = 0
    for _ in range(12):
        monkeypatch.setattr(batches, "NUM_BLOCKS", random.choice([6, 7, 8, 9]))
        names = random.sample(list(batches.REQUESTS), len(batches.REQUESTS))
        responses = Responses(len(names), batches.MAX_MODEL_LEN, 0)
        scheduler = batches.begin(vllm_config, responses)
        steps = batches.Steps(scheduler, 2)
        waiting = deque(names)
        while waiting or scheduler.has_unfinished_requests():
            if waiting and random.random() < 0.5:
                steps.add(waiting.popleft())
            if scheduler.has_unfinished_requests():
                steps.step()
        assert {name: scheduler.take(name)[0].tolist() for name in names} == expected_tokens
        num_vllm_steps += scheduler.num_vllm_steps
    assert num_vllm_steps > 0
