"""Responses that continue under other weights, against a plain model: tokens, weights, gradient.

Judges the launches of partial_worker.py.
"""

import functools
from itertools import pairwise

import pytest
import torch
from vllm.platforms import current_platform

from rollout.vllm.continuing import SEED_RANGE
from tests.rollout.launches import ROLLOUT_BOUND
from tests.rollout.partial_worker import BATCH_SIZE, GROUP_SIZE, MAX_STALENESS, MAX_WEIGHT
from tests.support.launch import launch
from tests.support.plain import NORM_BOUND, plain_model

pytestmark = pytest.mark.slow

REWARD = """
def score(response):
    return float(len(response) % 5)
"""


# The agent adds two tokens after each turn.
AGENT = """
import asyncio

async def play(row, llm):
    ids = row["ids"]
    for turn in range(row["turns"]):
        reply = await llm.generate(ids, max_tokens=row["max_tokens"])
        ids = ids + reply.token_ids + [20, 21]
        await asyncio.sleep(row["seconds"])
    return float(len(ids) % 5)
"""


@pytest.fixture(scope="module", autouse=True)
def vllm_kernels():
    current_platform.import_kernels()


LAUNCHES = {
    "one rank": (1, 1, "responses"),
    "tp": (2, 2, "responses"),
    "replicas": (2, 1, "responses"),
    "episodes": (1, 1, "episodes"),
    "episodes, tp": (2, 2, "episodes"),
}


@pytest.fixture(scope="module", params=LAUNCHES.values(), ids=LAUNCHES)
def steps(request, rollout_folder) -> list[dict]:
    num_ranks, tp, kind = request.param
    (rollout_folder / "partial_reward.py").write_text(REWARD)
    (rollout_folder / "partial_agent.py").write_text(AGENT)
    launch(num_ranks, "tests/rollout/partial_worker.py", rollout_folder, tp, kind)
    return torch.load(rollout_folder / "partial.pt")


@pytest.fixture
def model_of(steps, rollout_folder):
    """Return a function that returns the plain model after a number of steps."""

    @functools.cache
    def model(version: int):
        model = plain_model(rollout_folder / "tied")
        model.load_state_dict(steps[version]["weights"], strict=False)
        # The engine learns the padding token's row, which is not zero (see keep_zero_padding_row).
        model.get_input_embeddings().padding_idx = None
        return model.eval()

    return model


def log_probs(model, ids) -> torch.Tensor:
    """Return the log-probability of each token, and 0 for the first one."""
    log_p = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.nn.functional.pad(log_p.gather(-1, ids[1:, None])[:, 0], (1, 0))


@torch.no_grad()
def test_tokens_keep_the_log_probs_of_the_weights_that_drew_them(steps, model_of):
    ages = set()
    for version, step in enumerate(steps):
        for response in step["responses"]:
            is_response = response["loss_mask"] > 0
            age = response["age"]
            current = log_probs(model_of(version), response["input_ids"])
            for a in age[is_response].unique().int().tolist():
                ages.add(a)
                expected = log_probs(model_of(version - a), response["input_ids"])
                tokens = is_response & (age == a)
                drawn = response["rollout_log_probs"][tokens]
                assert (expected[tokens] - drawn).abs().max() < ROLLOUT_BOUND
                if a:
                    assert (current[tokens] - drawn).abs().max() > 10 * ROLLOUT_BOUND
            # A response continues with newer weights only.
            assert (age[is_response].diff() <= 0).all()
    assert ages == set(range(MAX_STALENESS + 1))


@torch.no_grad()
def test_tokens_are_drawn_with_the_next_random_number_of_their_response(steps, model_of):
    """Whichever weights draw them."""
    num_mixed = 0
    for step in steps:
        for response in step["open"]:
            num_mixed += len(set(response["versions"])) > 1
            assert redraw(model_of, **response) == response["tokens"]
    assert num_mixed > 0


def redraw(model_of, prompt, seed: int, tokens: list[int], versions: list[int]) -> list[int]:
    """Draw each token of a response anew after the earlier ones, as vLLM does on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for i, version in enumerate(versions):
        number = torch.randint(0, SEED_RANGE, (1,), generator=generator)
        ids = torch.tensor([[*prompt, *tokens[:i]]])
        logits = model_of(version)(ids, use_cache=False).logits[:, -1]
        # vLLM-private: the noise that belongs to a random number.
        drawn.append(int(torch.ops._C.fused_gumbel_argmax(logits, number)))
    return drawn


def test_the_update_is_that_of_a_plain_model(steps, model_of):
    """The loss and the gradient's norm of each step, with advantages and weights made by hand."""
    num_truncated = 0
    for version, step in enumerate(steps):
        model = model_of(version)
        responses = step["responses"]
        assert len(responses) == BATCH_SIZE * GROUP_SIZE
        num_tokens = sum(response["loss_mask"].sum() for response in responses)
        loss = 0.0
        for response, advantage in zip(responses, advantages(responses)):
            mask = response["loss_mask"]
            current = log_probs(model, response["input_ids"])
            weight = (current.detach() - response["rollout_log_probs"]).exp().clamp(max=MAX_WEIGHT)
            num_truncated += int((mask * (weight == MAX_WEIGHT)).sum())
            # Before the update, PPO's ratio is 1. Its gradient is that of the log-probability.
            ratio = (current - current.detach()).exp()
            loss = loss - (ratio * advantage * weight * mask).sum() / num_tokens
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        metrics = step["metrics"]
        assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=NORM_BOUND)
        assert norm > 0.01
    assert num_truncated > 0


@pytest.mark.parametrize("steps", [LAUNCHES["episodes"]], ids=["episodes"], indirect=True)
def test_the_time_of_episodes_passes_only_while_vllm_generates(steps):
    """Otherwise episodes would time out while the trainer trains."""
    for step, next_step in pairwise(steps):
        before, after_drawing, after_training = step["times"]
        assert after_drawing - before > 1e-3
        assert after_training == after_drawing
        assert next_step["times"][0] == after_training


def advantages(responses: list[dict]) -> list[torch.Tensor]:
    """Return GRPO's advantage of each response of a step. Its group is complete."""
    groups: dict[int, list] = {}
    for response in responses:
        groups.setdefault(int(response["group"]), []).append(response["score"])
    results = []
    for response in responses:
        scores = torch.stack(groups[int(response["group"])])
        assert len(scores) == GROUP_SIZE
        results.append((response["score"] - scores.mean()) / (scores.std() + 1e-6))
    return results
