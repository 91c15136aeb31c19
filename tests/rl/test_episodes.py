"""Credit for episodes of several turns: against formulas in float64 loops, episode by episode."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, permutations
from operator import itemgetter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from data.batching.order import global_batch
from rl.collecting import BatchSource, collect, penalized_scores
from rl.estimation import set_advantages
from rl.losses import ActorLoss
from rl.validation import validation_metrics
from rollout.records import examples, write_samples
from tests.algorithms.test_algorithms import BY_FORMULA, Estimate, policy_loss_by_formula
from tests.support.ranks import on_ranks
from tests.support.samples import (
    Episode,
    advantages,
    configure,
    failure,
    make_episodes,
    sequences_of,
    whole,
)

# 1 to 4 branches, gaps between sampled tokens, and unsampled tokens at the end.
EPISODES = [
    Episode(0, 1.0, ["..xx.xx."]),
    Episode(0, 0.0, ["..xxx", "...x.", ".xx..x"], is_truncated=True),
    Episode(0, 3.0, [".x.x.x.x", "..x"]),
    Episode(2, 2.0, ["..x", "..xx", ".x...", "...xx.x"]),
    Episode(2, -1.0, [".xxxxx"]),
    Episode(5, 0.5, ["..x..", "..xx"]),
    Episode(5, 4.0, ["...xxxx..x.."]),
    Episode(9, 6.0, [".x.xx."]),
]
WITH_TURN_REWARDS = [
    replace(EPISODES[0], turn_rewards={(0, 3): 0.75}),
    replace(EPISODES[1], turn_rewards={(0, 4): -0.5, (1, 3): 1.0, (2, 2): 0.25}),
    *EPISODES[2:6],
    replace(EPISODES[6], turn_rewards={(0, 6): 2.0, (0, 9): -3.0}),
    EPISODES[7],
]
BASELINE = {0: 0.25, 2: 4.0, 5: -1.0, 9: 2.0}
# These estimators read tokens, and each branch is a sequence for them.
OF_TOKENS = ("gae", "reinforce_plus_plus", "remax")
# These need rewards of other kinds, or parameters (test_estimation.py).
WITH_CONDITIONS = ("max_rl", "max_at_k", "gdpo", "grpo_steps")
ESTIMATORS = [name for name in BY_FORMULA if name not in WITH_CONDITIONS]
OF_EPISODES = [name for name in ESTIMATORS if name not in OF_TOKENS]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
MAX_TOKENS = 50
CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}
CLIP_SETTINGS = ["algorithm.clip_ratio_high=0.3", "algorithm.clip_ratio_c=3"]


def sampled_places(samples, episodes):
    """Return (episode, branch) -> the places of its sampled tokens in the packed batch."""
    places = {}
    for start, (e, b) in zip(samples.batch.cu_seqlens.tolist(), sequences_of(episodes)):
        text = episodes[e].branches[b]
        places[e, b] = [start + t for t, token in enumerate(text) if token == "x"]
    return places


def random_values(samples, seed, scale=1.0):
    """Return a random number for each sampled token, in order."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = int(samples.batch.fields["loss_mask"].sum())
    return (scale * torch.randn(num_tokens, generator=generator)).tolist()


def units_of(name, episodes):
    """Return what an estimator sees as a response, as lists of pairs (episode, branch)."""
    pairs = sorted(sequences_of(episodes))
    if name in OF_TOKENS:
        return [[pair] for pair in pairs]
    return [list(unit) for _, unit in groupby(pairs, key=itemgetter(0))]


def rewards_of_branch(episode, branch):
    """Return the reward of each token: the last one gets what turns have not received."""
    text = episode.branches[branch]
    rewards = [episode.turn_rewards.get((branch, t), 0.0) for t in range(len(text))]
    rewards[text.rindex("x")] += episode.score - sum(episode.turn_rewards.values())
    return [reward for token, reward in zip(text, rewards) if token == "x"]


def estimate_by_formula(name, samples, episodes, values):
    """Return place -> advantage and place -> return of each sampled token."""
    places = sampled_places(samples, episodes)
    value_at = dict(zip(sorted(sum(places.values(), [])), values))
    units = units_of(name, episodes)
    places_of_units = [list(chain(*map(places.get, unit))) for unit in units]
    values_of_units = [list(map(value_at.get, row)) for row in places_of_units]
    rewards = []
    for unit, places_of_unit in zip(units, places_of_units):
        e, b = unit[0]
        if name in OF_TOKENS:
            rewards.append(rewards_of_branch(episodes[e], b))
        else:
            rewards.append([0.0] * (len(places_of_unit) - 1) + [episodes[e].score])
    groups = [episodes[unit[0][0]].group for unit in units]
    results = BY_FORMULA[name](
        Estimate(
            rewards,
            groups,
            values_of_units,
            [BASELINE[group] for group in groups],
            gamma=0.9,
            lam=0.8,
        )
    )
    order = list(chain(*places_of_units))
    advantages_of_units, returns_of_units = results
    return dict(zip(order, chain(*advantages_of_units))), dict(zip(order, chain(*returns_of_units)))


def weights_by_formula(mode, samples, episodes, mini_batch_of_group):
    """Return place -> weight in the loss of each sampled token."""
    places = sampled_places(samples, episodes)
    weights = {}
    for (e, _), places_of_branch in places.items():
        mini_batch = mini_batch_of_group[episodes[e].group]
        inside = [x for x in episodes if mini_batch_of_group[x.group] == mini_batch]
        weight = {
            "token-mean": 1 / sum(x.num_sampled for x in inside),
            "seq-mean-token-sum": 1 / len(inside),
            "seq-mean-token-sum-norm": 1 / len(inside) / MAX_TOKENS,
            "seq-mean-token-mean": 1 / len(inside) / episodes[e].num_sampled,
        }[mode]
        weights |= dict.fromkeys(places_of_branch, weight)
    return weights


def check_step(name, mode, loss_mode, episodes):
    """Compare a step in two mini-batches, from the scores to the loss and its gradient."""
    samples = make_episodes(episodes, BASELINE)
    values = random_values(samples, 0)
    old = random_values(samples, 1)
    f, _ = advantages(
        samples,
        f"algorithm.adv_estimator={name}",
        f"algorithm.loss_agg_mode={mode}",
        f"rollout.max_tokens={MAX_TOKENS}",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.8",
        minis=samples.mini_batches(2).tolist(),
        values=values,
        old_log_probs=old,
    )
    expected_advantages, expected_returns = estimate_by_formula(name, samples, episodes, values)
    places = sorted(expected_advantages)
    assert f["loss_mask"].nonzero()[:, 0].tolist() == places
    for got, expected in (("advantages", expected_advantages), ("returns", expected_returns)):
        assert f[got][places].tolist() == pytest.approx([expected[t] for t in places], abs=1e-5)
        assert f[got].count_nonzero() == f[got][places].count_nonzero()

    config = configure(f"algorithm.loss_mode={loss_mode}", *CLIP_SETTINGS)
    log_probs = f["old_log_probs"].clone()
    log_probs[places] += torch.tensor(random_values(samples, 2, scale=0.3))
    log_probs.requires_grad_()
    loss, _ = ActorLoss(config, len(samples))(log_probs, torch.zeros_like(log_probs), f)
    loss.backward()

    weights = weights_by_formula(mode, samples, episodes, {0: 0, 2: 0, 5: 1, 9: 1})
    leaf = log_probs.detach().double().requires_grad_()
    dense_advantages = torch.zeros(len(leaf), dtype=torch.float64)
    dense_advantages[places] = torch.tensor(
        [expected_advantages[t] for t in places], dtype=torch.float64
    )
    by_token = policy_loss_by_formula(
        loss_mode,
        leaf,
        f["old_log_probs"].double(),
        dense_advantages,
        sampled_places(samples, episodes).values(),
        CLIPS,
    )
    expected_loss = sum(weights[t] * by_token[t][0] for t in places)
    expected_loss.backward()
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-6)
    assert log_probs.grad.tolist() == pytest.approx(leaf.grad.tolist(), abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_with_episodes_is_that_of_the_formula(name, mode):
    check_step(name, mode, "ppo", EPISODES)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_with_turn_rewards_is_that_of_the_formula(name):
    """Estimators of episodes see the score alone, whichever turns received parts of it."""
    check_step(name, "token-mean", "ppo", WITH_TURN_REWARDS)


def test_the_ratio_of_gspo_is_of_one_branch():
    check_step("grpo", "seq-mean-token-mean", "gspo", EPISODES)


def test_turn_rewards_are_at_the_last_token_of_their_turn():
    """With values of 0, gamma and lambda of 1, the returns are rewards to go.

    Of the score of 5, turns have received 2 and 1, and 2 remain for the end of each branch.
    """
    episode = Episode(0, 5, ["..xx.xx.", "..x"], {(0, 3): 2.0, (1, 2): 1.0})
    samples = make_episodes([episode])
    f, metrics = advantages(samples, "algorithm.adv_estimator=gae", values=[0.0] * 5)
    assert f["returns"].tolist() == [0, 0, 4, 4, 0, 2, 2, 0, 0, 0, 3]
    assert metrics["critic/rewards/mean"] == metrics["score/mean"] == 5


def test_the_parts_of_an_episode_count_once():
    """One branch more changes the advantages of no other episode."""
    weights = ["algorithm.adv_estimator=gdpo", "reward.weights={whole: 0.5, half: 1.0}"]
    results = []
    for branches in (["..xx", "..xx"], ["..xxxx"]):
        episodes = [Episode(0, 1, branches), Episode(0, 4, ["..xx"]), Episode(0, 2, ["..x"])]
        samples = make_episodes(episodes)
        parts = {"whole": samples.scores, "half": samples.scores / 2}
        f, _ = advantages(replace(samples, parts=parts), *weights)
        places = sampled_places(samples, episodes)
        results.append([f["advantages"][places[e, 0][0]].item() for e in range(3)])
    assert results[0] == results[1]
    # The mean is 7/3. Both parts are normalized to the same numbers.
    std = math.sqrt(7 / 3)
    expected = [-4 / 3 / std, 5 / 3 / std, -1 / 3 / std]
    assert results[0] == pytest.approx(expected, abs=1e-4)


def split_step(name, mode, episodes):
    """Return the advantages and the weights of the sampled tokens, episode by episode."""
    samples = make_episodes(episodes, BASELINE)
    f, _ = advantages(samples, f"algorithm.adv_estimator={name}", f"algorithm.loss_agg_mode={mode}")
    places = sampled_places(samples, episodes)
    results = []
    for e, episode in enumerate(episodes):
        rows = [places[e, b] for b in range(len(episode.branches))]
        of_episode = sum(rows, [])
        results += [f["advantages"][of_episode].tolist(), f["loss_weight"][of_episode].tolist()]
    return results


BRANCH = st.tuples(st.text("x.", max_size=5), st.integers(0, 2)).map(
    lambda drawn: "." + drawn[0] + "x" + "." * drawn[1]
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(BRANCH, min_size=1, max_size=4),
    st.floats(-10, 10, width=32),
    st.integers(0, len(EPISODES)),
    st.sampled_from([*OF_EPISODES, "remax"]),
    st.sampled_from(MODES),
)
def test_splitting_an_episode_changes_no_advantage_and_no_weight(
    branches, score, position, name, mode
):
    """To the last bit, in its own tokens and in those of the other episodes."""
    split = Episode(2, score, branches)
    in_one_branch = replace(split, branches=["." + "x" * split.num_sampled])
    results = []
    for episode in (split, in_one_branch):
        episodes = EPISODES[:position] + [episode] + EPISODES[position:]
        results.append(split_step(name, mode, episodes))
    assert results[0] == results[1]


def fields_of_share(rank, num_ranks):
    """Return every field that a rank gets, by sequence."""
    samples = make_episodes(WITH_TURN_REWARDS)
    fields = samples.batch.fields
    mask = fields["loss_mask"]
    for seed, name in enumerate(["values", "old_log_probs", "ref_log_probs"]):
        values = torch.tensor(random_values(samples, seed))
        fields[name] = torch.zeros_like(mask).masked_scatter(mask > 0, values)
    of_one_rank = whole(samples, samples.mini_batches(2).tolist())
    indices = torch.arange(len(samples))[rank::num_ranks]
    batch = samples.batch.select(indices)
    share = replace(
        of_one_rank, batch=batch, indices=indices, is_reporter=torch.ones_like(indices).bool()
    )
    config = configure("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true")
    metrics = set_advantages(config, samples, share, 0.1)
    names = ("advantages", "returns", "loss_weight", "token_weight")
    by_sequence = {}
    for name in names:
        for i, values in zip(indices.tolist(), batch.fields[name].split(batch.lengths)):
            by_sequence[name, i] = values.tolist()
    return by_sequence, metrics


def on_this_rank():
    return fields_of_share(dist.get_rank(), dist.get_world_size())


def test_branches_of_an_episode_may_be_on_different_ranks(tmp_path):
    (first, metrics), (second, second_metrics) = on_ranks(2, tmp_path, on_this_rank)
    expected, expected_metrics = fields_of_share(0, 1)
    assert first | second == expected
    assert metrics == second_metrics == expected_metrics


def test_metrics_count_an_episode_once():
    _, metrics = advantages(make_episodes(EPISODES, failures=[failure(0)]))
    lengths = [episode.num_sampled for episode in EPISODES]
    assert lengths == [4, 7, 5, 7, 5, 3, 5, 3]
    expected = {
        "score/mean": 15.5 / 8,
        "score/max": 6,
        "score/min": -1,
        "critic/score/mean": 15.5 / 8,
        "critic/rewards/mean": 15.5 / 8,
        "response_length/mean": 39 / 8,
        "response_length/max": 7,
        "response_length/min": 3,
        "response_length/clip_ratio": 1 / 8,
        "prompt_length/mean": (4 + 2 + 4 + 2 + 1 + 4 + 7 + 3) / 8,
        "reward/informative_groups": 7 / 8,
        "reward/failure_rate": 1 / 9,
        "episodes/branches/mean": 15 / 8,
        "episodes/branches/max": 4,
        "episodes/branched": 4 / 8,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_without_episodes_there_are_no_metrics_of_branches():
    samples = replace(make_episodes(EPISODES), episode=None)
    _, metrics = advantages(samples)
    assert not [name for name in metrics if name.startswith("episodes/")]
    assert metrics["response_length/mean"] == pytest.approx(39 / 15)


def test_the_divergence_of_all_branches_comes_off_the_outcome():
    """Each token diverges by 1, except for those of the first episode."""
    episodes = [Episode(0, 1, ["..x.x"]), Episode(0, 3, ["..x.", ".xx"])]
    samples = make_episodes(episodes)
    old = [-1.0, -1.0, -1.0, -1.0, -1.0]
    reference = [-1.0, -1.0, -2.0, -2.0, -2.0]
    f, metrics = advantages(
        samples,
        "algorithm.adv_estimator=dr_grpo",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=k1",
        kl_coef=0.5,
        old_log_probs=old,
        ref_log_probs=reference,
    )
    on_tokens = f["returns"][f["loss_mask"] > 0].tolist()
    assert on_tokens == [1, 1, 1.5, 1.5, 1.5]
    assert metrics["actor/reward_kl"] == pytest.approx(3 / 5)


def test_rejected_tokens_leave_the_length_of_their_episode():
    """Rejection judges each branch; an episode of which nothing is left is not counted."""
    episodes = [Episode(0, 1, ["..x", ".x.x"]), Episode(0, 3, [".xx"]), Episode(0, 0, ["..x."])]
    samples = make_episodes(episodes)
    f, _ = advantages(
        samples,
        "algorithm.rollout_rs=geometric",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
        # First branches of the three episodes, then the second one of the first episode.
        old_log_probs=[-9.0, -1.0, -1.0, -9.0, -1.0, -1.0],
    )
    assert f["loss_weight"][f["loss_mask"] > 0].tolist() == [0, 0.25, 0.25, 0, 0.25, 0.25]


def test_results_of_tools_count_in_the_penalty_if_they_count_in_the_limit():
    episodes = [Episode(0, 1, ["..x....x"]), Episode(0, 1, ["..xxx", ".x"]), Episode(0, 1, [".x"])]
    samples = make_episodes(episodes)
    buffer = "reward.overlong_buffer=4"
    config = configure("rollout.max_episode_tokens=9", "rollout.max_tokens=4", buffer)
    assert penalized_scores(config, samples).tolist() == [0.25, 1, 1, 1]
    config = configure("rollout.max_tokens=9", buffer)
    assert penalized_scores(config, samples).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("branches", [*permutations(["..x", ".x.....x", "..xx"])])
def test_the_longest_sequence_of_an_episode_counts_in_the_penalty_wherever_it_is(branches):
    samples = make_episodes([Episode(0, 1, branches), Episode(0, 1, ["..x"])])
    config = configure(
        "rollout.max_episode_tokens=9", "rollout.max_tokens=4", "reward.overlong_buffer=4"
    )
    scores = samples.episodes.choose(penalized_scores(config, samples))
    assert sorted(scores.tolist()) == [0.25, 1]


def test_the_penalty_for_length_is_on_all_turns_together():
    episodes = [Episode(0, 1, ["..xxx", ".xxx.xx"]), Episode(0, 1, [".xxxxx", "."])]
    samples = make_episodes(episodes)
    config = configure("rollout.max_tokens=9", "reward.overlong_buffer=4")
    # Sequences are: the first branches of both episodes, then the second ones.
    assert penalized_scores(config, samples).tolist() == [0.25, 1, 0.25, 1]
    more = ["rollout.max_tokens=4", "rollout.max_episode_tokens=9", "reward.overlong_buffer=4"]
    # The second episode samples 5 tokens, but its longest sequence has 6.
    assert penalized_scores(configure(*more), samples).tolist() == [0.25, 0.75, 0.25, 0.75]
    norm = "algorithm.loss_agg_mode=seq-mean-token-sum-norm"
    f, _ = advantages(samples, "algorithm.adv_estimator=dr_grpo", norm, *more)
    assert f["loss_weight"][f["loss_mask"] > 0].tolist() == pytest.approx([1 / 2 / 9] * 13)


def collect_episodes(episodes_of_group, *more):
    """Collect two groups per batch, of two episodes with two parts each; groups do not fail."""

    def respond(request):
        episodes = [
            replace(episode, group=request.first_group + position)
            for position, row in enumerate(request.rows)
            for episode in episodes_of_group(int(row), request.sampling)
        ]
        samples = make_episodes(episodes)
        return replace(samples, parts={"whole": samples.scores, "half": samples.scores / 2})

    config = configure("data.train_batch_size=2", "rollout.n=2", *more)
    source = BatchSource(config, respond, range(4), partial(global_batch, 4, 2, 0), 0)
    return collect(config, source)


def test_uninformative_groups_are_left_out_with_all_branches():
    """Groups of odd rows have one score, however many branches an episode has."""

    def episodes_of_group(row, sampling):
        if row % 2:
            return [Episode(0, 1.0, ["..x", ".x."]), Episode(0, 1.0, ["..x."])]
        return [Episode(0, 2.0, ["..x", ".x.", ".xx"]), Episode(0, 5.0, ["..x."])]

    samples = collect_episodes(episodes_of_group, "algorithm.filter_groups.enable=true")
    assert len(samples) == 8
    assert len(samples.episodes) == 4
    assert samples.episodes.choose(samples.scores).sort().values.tolist() == [2, 2, 5, 5]
    assert samples.episodes.total(torch.ones(8)).sort().values.tolist() == [1, 1, 3, 3]
    assert samples.metrics["score/mean"] == (1 + 1 + 2 + 5) / 4
    assert samples.metrics["reward/half/mean"] == (1 + 1 + 2 + 5) / 8
    assert samples.metrics["reward/informative_groups"] == 0.5


def test_the_greedy_episode_of_remax_may_have_branches():
    """Its score less the penalty for length is the baseline of its group."""

    def episodes_of_group(row, sampling):
        if sampling.temperature == 0:
            return [Episode(0, 10.0 + row, ["..xxx", ".xxx.xx"])]
        return [Episode(0, 1.0, ["..x", ".x."]), Episode(0, 2.0, ["..x."])]

    samples = collect_episodes(
        episodes_of_group,
        "algorithm.adv_estimator=remax",
        "rollout.max_tokens=9",
        "reward.overlong_buffer=4",
    )
    rows = global_batch(4, 2, 0, 0).tolist()
    assert samples.group.tolist() == [0] * 3 + [1] * 3
    assert samples.baseline.tolist() == [9.25 + rows[0]] * 3 + [9.25 + rows[1]] * 3
    assert samples.num_drawn == 2 * 2 + 2


def test_validation_counts_an_episode_once():
    """The group 5 is not complete: one of its episodes could not be graded."""
    episodes = [
        Episode(0, 1.0, ["..xx", ".x", "..x"], is_truncated=True),
        Episode(0, 0.0, ["..x"]),
        Episode(3, 0.0, ["..x", ".x"]),
        Episode(3, 0.0, ["..x"]),
        Episode(5, 1.0, ["..x", ".x"]),
    ]
    samples = make_episodes(episodes, failures=[failure(0)])
    samples = replace(samples, parts={"half": samples.scores / 2})
    assert validation_metrics(samples, "score", 2) == pytest.approx(
        {
            "val/score": 2 / 5,
            "val/score/half": 1 / 5,
            "val/score/mean@2": 2 / 5,
            "val/score/pass@2": 1 / 2,
            "val/response_length": 10 / 5,
            "val/truncated": 1 / 5,
            "val/failures": 1,
        }
    )


def test_files_tell_the_sequences_of_an_episode(tmp_path):
    episodes = [Episode(0, 1.0, ["..xx", ".x"]), Episode(0, 2.0, ["..x"]), Episode(4, 3.0, [".x"])]
    samples = make_episodes(episodes)
    write_samples(samples, tmp_path / "step_1.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "step_1.jsonl").read_text().splitlines()]
    assert [line["response"] for line in lines] == ["..xx", "..x", ".x", ".x"]
    assert [line["episode"] for line in lines] == samples.episode.tolist() == [0, 5, 0, 10]
    assert [line["length"] for line in lines] == [2, 1, 1, 1]
    assert [row["score"] for row in examples(samples, 10)] == [1, 3], "one of each prompt"
