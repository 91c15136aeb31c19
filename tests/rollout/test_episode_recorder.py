"""The tokens of episodes: which branch a turn continues, and what a batch of branches holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rollout.episodes.recorder import Episode, pack


def sample(episode: Episode, prompt_ids: list[int], token_ids: list[int], is_cut=False) -> None:
    """Play a turn in which the model samples these tokens; token t has log-probability -t/8."""
    turn = episode.begin(prompt_ids, seed=0)
    ids = np.array(token_ids)
    turn.response.append(ids, -ids / 8, None, version=0)
    episode.end(turn, is_cut)


def branches(episode: Episode) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of every branch, and which of them were sampled."""
    return [(branch.token_ids, [*map(int, branch.is_sampled)]) for branch in episode.branches]


def test_a_prompt_that_begins_with_all_tokens_continues_their_branch():
    episode = Episode()
    sample(episode, [1, 2], [3, 4])
    sample(episode, [1, 2, 3, 4, 5, 6], [7])
    assert branches(episode) == [([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1])]
    assert episode.num_turns == 2
    assert episode.num_sampled == 3


def test_an_edited_history_begins_a_branch():
    episode = Episode()
    sample(episode, [1, 2], [3, 4])
    sample(episode, [1, 2, 3, 9, 5], [7])
    assert branches(episode) == [
        ([1, 2, 3, 4], [0, 0, 1, 1]),
        ([1, 2, 3, 9, 5, 7], [0, 0, 0, 0, 0, 1]),
    ]


def test_the_longest_branch_is_continued():
    episode = Episode()
    sample(episode, [1], [2])
    sample(episode, [1, 9], [3])
    sample(episode, [1, 2, 4], [5])
    sample(episode, [1, 9, 3, 6], [7])
    assert branches(episode) == [
        ([1, 2, 4, 5], [0, 1, 0, 1]),
        ([1, 9, 3, 6, 7], [0, 0, 1, 0, 1]),
    ]


def test_of_two_branches_that_fit_the_longer_one_is_continued():
    episode = Episode()
    sample(episode, [1], [2])
    sample(episode, [1], [2, 3])
    sample(episode, [1, 2, 3, 4], [5])
    assert branches(episode) == [([1, 2], [0, 1]), ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])]


def test_the_same_prompt_again_begins_a_branch():
    episode = Episode()
    sample(episode, [1, 2], [3])
    sample(episode, [1, 2], [4])
    assert branches(episode) == [([1, 2, 3], [0, 0, 1]), ([1, 2, 4], [0, 0, 1])]


def test_turns_at_the_same_time_have_branches_of_their_own():
    episode = Episode()
    first = episode.begin([1, 2], seed=0)
    second = episode.begin([1, 2], seed=1)
    for turn, token in ((second, 5), (first, 4)):
        turn.response.append(np.array([token]), np.array([-1.0]), None, version=0)
        episode.end(turn, is_cut=False)
    assert branches(episode) == [([1, 2, 4], [0, 0, 1]), ([1, 2, 5], [0, 0, 1])]


def test_prompts_are_counted_one_by_one():
    episode = Episode()
    counts = [episode.count(prompt) for prompt in ([1], [1, 2], [1], [1])]
    assert counts == [0, 0, 1, 2]


def test_an_aborted_turn_leaves_nothing_to_train():
    episode = Episode()
    sample(episode, [1], [2])
    episode.drop(episode.begin([1, 2, 3], seed=0))
    episode.drop(episode.begin([8, 9], seed=0))
    assert branches(episode) == [([1, 2], [0, 1])]
    sample(episode, [1, 2, 3], [4])
    assert branches(episode) == [([1, 2, 3, 4], [0, 1, 0, 1])]


def test_an_aborted_turn_leaves_the_numbers_of_its_branch_in_their_places():
    """The next turn has a shorter prompt."""
    episode = Episode()
    sample(episode, [1], [2])
    episode.drop(episode.begin([1, 2, 3, 4, 5], seed=0))
    sample(episode, [1, 2, 6], [7])
    batch = pack(episode.branches, num_candidates=0)
    assert batch.input_ids.tolist() == [1, 2, 6, 7]
    assert batch.fields["rollout_log_probs"].tolist() == [0, -2 / 8, 0, -7 / 8]
    assert batch.fields["loss_mask"].tolist() == [0, 1, 0, 1]
    assert batch.fields["turn_rewards"].tolist() == [0] * 4


def test_the_last_turn_says_whether_the_episode_was_cut_off():
    episode = Episode()
    sample(episode, [1], [2], is_cut=True)
    assert episode.is_truncated
    sample(episode, [1, 2, 3], [4])
    assert not episode.is_truncated


def test_the_oldest_token_may_be_in_a_turn_that_has_not_ended():
    episode = Episode()
    assert episode.oldest_version is None
    first = episode.begin([1], seed=0)
    assert episode.oldest_version is None
    first.response.append(np.array([2]), np.array([-1.0]), None, version=3)
    first.response.append(np.array([2]), np.array([-1.0]), None, version=4)
    assert episode.oldest_version == 3
    second = episode.begin([1], seed=1)
    second.response.append(np.array([5]), np.array([-1.0]), None, version=4)
    episode.end(second, is_cut=False)
    assert episode.oldest_version == 3
    assert episode.open_turns == [first]
    episode.drop(first)
    assert episode.oldest_version == 4
    assert episode.open_turns == []


def test_a_reward_is_at_the_last_token_of_the_last_turn():
    episode = Episode()
    with pytest.raises(ValueError, match="before the first turn"):
        episode.reward(1.0)
    sample(episode, [1], [2, 3])
    episode.reward(0.5)
    sample(episode, [1, 2, 3, 4], [5])
    episode.reward(2.0)
    episode.reward(0.25)
    assert episode.branches[0].rewards == [0, 0, 0.5, 0, 2.25]
    assert episode.reward_sum == 2.75


def test_a_reward_given_while_the_next_turn_runs_is_at_a_sampled_token():
    episode = Episode()
    sample(episode, [1], [2, 3])
    aborted = episode.begin([1, 2, 3, 4, 5], seed=0)
    episode.reward(0.5)
    episode.drop(aborted)
    episode.reward(0.25)
    sample(episode, [1, 2, 3, 6], [7])
    assert episode.branches[0].token_ids == [1, 2, 3, 6, 7]
    assert episode.branches[0].rewards == [0, 0, 0.75, 0, 0]


def test_branches_are_packed_end_to_end():
    episode = Episode()
    sample(episode, [1], [2, 3])
    episode.reward(0.5)
    sample(episode, [1, 2, 3, 4], [5])
    sample(episode, [7, 8], [9])
    batch = pack(episode.branches, num_candidates=0)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    fields = {name: values.tolist() for name, values in batch.fields.items()}
    assert fields == {
        "loss_mask": [0, 1, 1, 0, 1, 0, 0, 1],
        "rollout_log_probs": [0, -2 / 8, -3 / 8, 0, -5 / 8, 0, 0, -9 / 8],
        "turn_rewards": [0, 0, 0.5, 0, 0, 0, 0, 0],
    }


def test_every_sampled_token_has_the_age_of_its_weights():
    """The second branch begins with the weights that end the first one."""
    episode = Episode()
    for prompt_ids, versions in (([1], [3, 3]), ([1, 3, 3, 9], [4, 6]), ([8, 8], [6, 7])):
        turn = episode.begin(prompt_ids, seed=0)
        for version in versions:
            turn.response.append(np.array([version]), np.array([-1.0]), None, version)
        episode.end(turn, is_cut=False)
    assert episode.oldest_version == 3
    fields = pack(episode.branches, num_candidates=0, version=8).fields
    assert fields["age"].tolist() == [0, 5, 5, 0, 4, 2, 0, 0, 2, 1]
    assert "age" not in pack(episode.branches, num_candidates=0).fields


def test_the_experts_of_earlier_turns_stay():
    """vLLM reads all tokens again, and has never read the last one of a turn. 255: no experts."""
    episode = Episode()
    for number, (prompt_ids, token) in enumerate((([1], 2), ([1, 2, 3], 4))):
        turn = episode.begin(prompt_ids, seed=0)
        turn.response.append(np.array([token]), np.array([-1.0]), None, version=0)
        routes = np.full((len(prompt_ids) + 1, 1, 1), 10 * (number + 1), np.uint8)
        routes[-1] = 255
        turn.response.read(routes)
        episode.end(turn, is_cut=False)
    (branch,) = episode.branches
    assert branch.routes.flatten().tolist() == [10, 20, 20, 255]


def test_candidates_stand_at_sampled_tokens():
    episode = Episode()
    turn = episode.begin([1, 2], seed=0)
    candidates = np.array([[3, 3, 4], [5, 6, 5]])
    log_probs = np.log([0.75, 0.4])
    turn.response.append(candidates[:, 0], log_probs, candidates, version=0)
    episode.end(turn, is_cut=False)
    sample_with_candidates = pack(episode.branches, num_candidates=2).fields["candidate_ids"]
    none = [-1, -1, -1]
    assert sample_with_candidates.tolist() == [none, none, [3, 3, 4], [5, 6, 5]]


def test_no_branches_are_an_empty_batch():
    batch = pack([], num_candidates=0)
    assert len(batch) == 0
    assert batch.input_ids.dtype == torch.int64


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=3)),
        min_size=1,
        max_size=12,
    )
)
def test_every_sampled_token_is_trained_once(turns):
    """Turns continue an earlier state, or begin at an earlier place; tokens repeat a lot."""
    episode = Episode()
    histories = [[0]]
    num_sampled = 0
    for choice, token_ids in turns:
        prompt = histories[choice % len(histories)] + [1]
        sample(episode, prompt, token_ids)
        histories.append(prompt + token_ids)
        num_sampled += len(token_ids)
        last = max(episode.branches, key=lambda b: b.token_ids == prompt + token_ids)
        assert last.token_ids == prompt + token_ids
    batch = pack(episode.branches, num_candidates=0)
    assert batch.fields["loss_mask"].sum() == num_sampled == episode.num_sampled
