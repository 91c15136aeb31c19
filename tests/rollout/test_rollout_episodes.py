"""Episodes that vLLM and worker processes play together. Judges episodes_worker.py."""

import json

import pytest

from tests.rollout.episode_plans import EPISODE_LAUNCHES, GROUP_SIZE, PLANS
from tests.support.launch import launch

pytestmark = pytest.mark.slow

AGENT = """
import asyncio
from pathlib import Path

async def play(row, llm):
    Path(__file__).with_name("key").write_text(llm.api_key)
    ids = row["prompt_ids"]
    for turn in range(row["num_turns"]):
        # The episodes of a group wait for different times, so that requests arrive in any order.
        await asyncio.sleep(0.01 * (row["number"] % 3))
        reply = await llm.generate(ids)
        if turn in row["rewards"]:
            await llm.reward(0.5)
        if turn in row["edits"]:
            ids = row["prompt_ids"] + row["between"]
        elif turn + 1 not in row["repeats"]:
            ids = ids + reply.token_ids + row["between"]
    if row["fails"]:
        await llm.generate(ids, temperature=0.25)
    return float(row["number"])
"""


@pytest.fixture(scope="module")
def drawn(rollout_folder):
    """The results of the launches, by name."""
    (rollout_folder / "agent.py").write_text(AGENT)
    results = {}
    for name, case in EPISODE_LAUNCHES.items():
        launch(case.ranks, "tests/rollout/episodes_worker.py", rollout_folder, name)
        results[name] = json.loads((rollout_folder / f"{name}.json").read_text())
    return results


def by_episode(draw: dict) -> dict[int, list[dict]]:
    """Return the sequences of each episode."""
    episodes: dict[int, list[dict]] = {}
    for sequence in draw["sequences"]:
        episodes.setdefault(sequence["episode"], []).append(sequence)
    return episodes


def test_tokens_and_log_probabilities_are_those_of_episodes_played_by_hand(drawn):
    episodes = by_episode(drawn["episodes"]["episodes"])
    by_hand = drawn["episodes"]["by hand"]
    assert len(by_hand) == 50
    for number, branches in enumerate(by_hand):
        if PLANS[number // GROUP_SIZE].fails:
            assert number not in episodes
            continue
        assert len(episodes[number]) == len(branches)
        for sequence, branch in zip(episodes[number], branches):
            assert {name: sequence[name] for name in branch} == branch


def test_every_plan_has_the_branches_that_it_means_to_have(drawn):
    episodes = by_episode(drawn["episodes"]["episodes"])
    num_branches = [len(episodes[i * GROUP_SIZE]) for i in range(len(PLANS) - 1)]
    assert num_branches == [1, 1, 1, 1, 2, 2, 2, 1, 2]


def test_scores_are_the_rewards_of_the_function_and_of_turns(drawn):
    for number, sequences in by_episode(drawn["episodes"]["episodes"]).items():
        plan = PLANS[number // GROUP_SIZE]
        is_limited = plan.num_turns > 4
        score = -1.0 if is_limited else plan.number + 0.5 * len(plan.rewards)
        assert {sequence["score"] for sequence in sequences} == {score}
        assert {sequence["group"] for sequence in sequences} == {plan.number}
        turn_rewards = sum(sum(sequence["turn_rewards"]) for sequence in sequences)
        assert turn_rewards == 0.5 * len(plan.rewards)
        if is_limited:
            assert all(sequence["truncated"] for sequence in sequences)


def test_turn_rewards_stand_at_the_last_token_of_their_turn(drawn):
    plan = 2
    (sequence,) = by_episode(drawn["episodes"]["episodes"])[plan * GROUP_SIZE]
    mask = sequence["loss_mask"] + [0.0]
    ends = [t for t in range(len(mask) - 1) if mask[t] and not mask[t + 1]]
    assert len(ends) == 3
    rewarded = [t for t, reward in enumerate(sequence["turn_rewards"]) if reward]
    assert rewarded == [ends[0], ends[2]]


def test_an_episode_that_raises_is_a_failure(drawn):
    """The gateway rejects another temperature than the one of the section of the draw."""
    draw = drawn["episodes"]["episodes"]
    assert len(draw["failures"]) == GROUP_SIZE
    for kind, number, trace in draw["failures"]:
        assert (kind, number) == ("raised", 9)
        assert "temperature=0.25 differs from validation.temperature=1.0" in trace
    assert draw["num_drawn"] == 50


def test_the_gateway_forgets_the_episodes_of_a_draw(drawn):
    """Otherwise its memory would grow with every step."""
    assert drawn["episodes"]["status of an old key"] == 401


def test_metrics_count_turns_and_limits(drawn):
    metrics = drawn["episodes"]["episodes"]["metrics"]
    assert metrics["episodes/turns/max"] == 4
    turns = [min(plan.num_turns, 4) for plan in PLANS]
    assert metrics["episodes/turns/mean"] == pytest.approx(sum(turns) / len(turns))
    assert metrics["episodes/limited"] == pytest.approx(0.1)
    assert metrics["episodes/left_out"] == 0


@pytest.mark.parametrize("name", EPISODE_LAUNCHES)
def test_a_rerun_is_the_same_to_the_last_bit(drawn, name):
    assert drawn[name]["again"]["sequences"] == drawn[name]["episodes"]["sequences"]


def test_two_replicas_draw_the_same_to_the_last_bit(drawn):
    assert (
        drawn["episodes_dp2"]["episodes"]["sequences"] == drawn["episodes"]["episodes"]["sequences"]
    )


def test_tensor_parallel_ranks_draw_the_same_tokens(drawn):
    one = drawn["episodes"]["episodes"]["sequences"]
    two = drawn["episodes_tp2"]["episodes"]["sequences"]
    exact = ("input_ids", "loss_mask", "turn_rewards", "episode", "group", "score", "truncated")
    for sequence, other in zip(one, two, strict=True):
        assert {name: sequence[name] for name in exact} == {name: other[name] for name in exact}
        assert other["rollout_log_probs"] == pytest.approx(sequence["rollout_log_probs"], abs=1e-4)
