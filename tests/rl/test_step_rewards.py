"""Rewards of steps (reward.step_rewards): estimators against written-out formulas, and runs."""

import json
import statistics
import sys
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from config import InputError
from data.batching.plan import Plan
from examples.arithmetic import make_rows, make_tokenizer
from rl.collecting import informative_responses
from rl.estimation import set_advantages
from rl.settings import check_settings
from rollout.sharing import Share
from tests.support.launch import metrics, run
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.samples import advantages, configure, make_samples, whole

STEPS = "reward.step_rewards=true"
OWN_FUNCTION = "reward.function=my.py:f"
LENGTHS = [5, 3, 4, 2, 6, 1, 3]
GROUPS = [0, 0, 0, 1, 1, 1, 2]
# For each response: position -> the reward of the step that ends there. Rewards of 0 are steps too.
PLACED = [{1: 1.0, 4: 0.0}, {0: 0.5}, {}, {1: -1.0}, {0: 2.0, 2: 0.0, 3: 0.5}, {0: 0.0}, {1: 1.0}]
# The scores that the function returns beside the steps; those of group 1 are the same.
OWN_SCORES = [1.0, 0.0, 0.25, 0.7, 0.7, 0.7, 3.0]


def scores() -> list[float]:
    return [own + sum(placed.values()) for own, placed in zip(OWN_SCORES, PLACED)]


def make_step_samples():
    """Return samples of the responses above, whose prompts have two tokens."""
    samples = make_samples(LENGTHS, scores(), GROUPS)
    rewards = torch.zeros(len(samples.batch.input_ids))
    ends = torch.zeros_like(rewards)
    for start, placed in zip(samples.batch.cu_seqlens.tolist(), PLACED):
        for position, reward in placed.items():
            rewards[start + 2 + position] = reward
            ends[start + 2 + position] = 1
    samples.batch.fields |= {"turn_rewards": rewards, "step_ends": ends}
    return samples


def normalized(value: float, values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    return (value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6)


def expected_advantages() -> list[list[float]]:
    """Return the advantages of grpo_steps, response by response, in float64 loops."""
    expected = []
    for i, length in enumerate(LENGTHS):
        members = [j for j, group in enumerate(GROUPS) if group == GROUPS[i]]
        of_group = [reward for j in members for reward in PLACED[j].values()]
        of_score = normalized(OWN_SCORES[i], [OWN_SCORES[j] for j in members])
        of_steps = {t: normalized(reward, of_group) for t, reward in PLACED[i].items()}
        later = [of_steps.get(t, 0.0) for t in range(length)]
        expected.append([of_score + x for x in [*accumulate(later[::-1])][::-1]])
    return expected


def split_by_response(samples, values) -> list[list[float]]:
    return [x[2:].tolist() for x in values.split(samples.batch.lengths)]


def flat(values):
    return [x for row in values for x in row]


def test_grpo_steps_is_that_of_the_formula():
    samples = make_step_samples()
    fields, _ = advantages(samples, "algorithm.adv_estimator=grpo_steps", STEPS)
    result = split_by_response(samples, fields["advantages"])
    assert flat(result) == pytest.approx(flat(expected_advantages()), abs=1e-6)
    assert not fields["advantages"][samples.batch.fields["loss_mask"] == 0].any()


def advantages_of_rank() -> list[tuple[int, list[float]]]:
    """Return (response, advantages of its tokens) for every second response."""
    samples = make_step_samples()
    own = torch.arange(dist.get_rank(), len(samples), 2)
    count = len(own)
    plan = Plan(
        list(range(count)), [(1, list(range(count)))], torch.zeros(count), torch.ones(count)
    )
    is_reporter = torch.ones(count, dtype=torch.bool)
    mini_batches = torch.zeros(len(samples), dtype=torch.int64)
    share = Share(samples.batch.select(own), own, mini_batches, [plan], is_reporter)
    config = configure("algorithm.adv_estimator=grpo_steps", STEPS)
    set_advantages(config, samples, share, 0.0)
    parts = share.batch.fields["advantages"].split(share.batch.lengths)
    return [(i, part[2:].tolist()) for i, part in zip(own.tolist(), parts)]


def test_grpo_steps_is_the_same_on_two_ranks(tmp_path):
    results = dict(flat(on_ranks(2, tmp_path, advantages_of_rank)))
    values = flat(results[i] for i in range(len(LENGTHS)))
    assert values == pytest.approx(flat(expected_advantages()), abs=1e-6)


# Scores of three groups of two responses, their steps by position, and which groups teach anything.
JUDGED_SCORES = [1.0, 1.0, 1.0, 0.0, 0.3, 0.3]
JUDGED_STEPS = [
    {0: 1.0, 1: -1.0},
    {0: -1.0, 1: 1.0},
    {1: 2.0},  # beside the steps, the scores are -1 and 0: both parts cancel
    {1: 0.0},
    {0: 0.1},
    {0: 0.1},
]
JUDGED = [True, True, False, False, False, False]


def make_judged_samples():
    samples = make_samples([2] * 6, JUDGED_SCORES, [0, 0, 1, 1, 2, 2])
    rewards = torch.zeros(len(samples.batch.input_ids))
    ends = torch.zeros_like(rewards)
    for start, placed in zip(samples.batch.cu_seqlens.tolist(), JUDGED_STEPS):
        for position, reward in placed.items():
            rewards[start + 2 + position] = reward
            ends[start + 2 + position] = 1
    samples.batch.fields |= {"turn_rewards": rewards, "step_ends": ends}
    return samples


def test_grpo_steps_judges_a_group_by_its_advantages():
    config = configure("algorithm.adv_estimator=grpo_steps", STEPS)
    samples = make_judged_samples()
    assert informative_responses(config, samples).tolist() == JUDGED
    by_score = informative_responses(configure(STEPS), samples)
    assert by_score.tolist() == [False, False, True, True, False, False], "the score misjudges two"
    fields, metrics = advantages(samples, "algorithm.adv_estimator=grpo_steps", STEPS)
    of_response = split_by_response(samples, fields["advantages"])
    assert [max(map(abs, values)) > 1e-5 for values in of_response] == JUDGED
    assert metrics["reward/informative_groups"] == pytest.approx(1 / 3)


def judged_on_rank(owner: list[int]) -> list[bool]:
    """Return which responses are informative. owner: the rank that holds each of them."""
    samples = make_judged_samples()
    own = [i for i, rank in enumerate(owner) if rank == dist.get_rank()]
    held_here = replace(
        samples, owner=torch.tensor(owner), rank=dist.get_rank(), batch=samples.batch.select(own)
    )
    config = configure("algorithm.adv_estimator=grpo_steps", STEPS)
    return informative_responses(config, held_here).tolist()


@pytest.mark.parametrize("owner", [[0, 1, 0, 1, 0, 1], [0] * 6])
def test_all_ranks_judge_the_groups_of_grpo_steps_alike(tmp_path, owner):
    assert on_ranks(2, tmp_path, judged_on_rank, owner) == [JUDGED, JUDGED]


@pytest.mark.parametrize("scale", [1e-3, 1, 1e5])
@pytest.mark.parametrize("own_scores", [[0.12345] * 3, [0.1, 0.1, 0.4]])
def test_equal_scores_beside_the_steps_teach_nothing(own_scores, scale):
    """They would, if grpo() magnified the rounding errors of the fp32 scores."""
    of_steps = [0.2, 0.7, 1 / 3]
    sums = [scale * (own + step) for own, step in zip(own_scores, of_steps)]
    samples = make_samples([2, 2, 2], sums, [0, 0, 0])
    rewards = torch.zeros(len(samples.batch.input_ids))
    ends = torch.zeros_like(rewards)
    for start, reward in zip(samples.batch.cu_seqlens.tolist(), of_steps):
        rewards[start + 2] = scale * reward
        ends[start + 2] = 1
    samples.batch.fields |= {"turn_rewards": rewards, "step_ends": ends}
    fields, _ = advantages(samples, "algorithm.adv_estimator=grpo_steps", STEPS)
    scaled = [scale * own for own in own_scores]
    for own, (first, last) in zip(scaled, split_by_response(samples, fields["advantages"])):
        assert last == pytest.approx(normalized(own, scaled), rel=1e-3, abs=1e-6)
        assert abs(first - last) > 0.1


def test_gae_has_each_reward_at_its_token():
    """With values of 0, gamma and lambda of 1, the returns are rewards to go."""
    samples = make_step_samples()
    values = [0.0] * sum(LENGTHS)
    fields, _ = advantages(samples, "algorithm.adv_estimator=gae", STEPS, values=values)
    expected = []
    for length, placed, own in zip(LENGTHS, PLACED, OWN_SCORES):
        rewards = [placed.get(t, 0.0) + own * (t == length - 1) for t in range(length)]
        expected.append([*accumulate(rewards[::-1])][::-1])
    result = split_by_response(samples, fields["returns"])
    assert flat(result) == pytest.approx(flat(expected), abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_estimators_of_responses_see_the_sum(name):
    samples = make_step_samples()
    setting = f"algorithm.adv_estimator={name}"
    fields, metrics = advantages(samples, setting, STEPS)
    without, _ = advantages(make_samples(LENGTHS, scores(), GROUPS), setting)
    assert fields["advantages"].tolist() == without["advantages"].tolist()
    assert metrics["score/mean"] == pytest.approx(statistics.fmean(scores()))


MISTAKES = {
    "an estimator without steps": (
        ["algorithm.adv_estimator=grpo_steps"],
        "algorithm.adv_estimator=grpo_steps needs reward.step_rewards=true",
    ),
    "a built-in function": (
        [STEPS],
        "reward.step_rewards=true does not work with reward.function=exact_match",
    ),
    "an estimator of parts": (
        [STEPS, OWN_FUNCTION, "algorithm.adv_estimator=gdpo"],
        "reward.step_rewards=true does not work with algorithm.adv_estimator=gdpo",
    ),
    "episodes": (
        [STEPS, OWN_FUNCTION, "rollout.episode=a.py:b", "rollout.max_episode_tokens=4096"],
        "does nothing with rollout.episode=a.py:b",
    ),
    "distillation alone": (
        [
            STEPS,
            OWN_FUNCTION,
            "algorithm.distill.teacher=there",
            "algorithm.distill.only=true",
        ],
        "reward.step_rewards=True does nothing with algorithm.distill.only=true",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name):
    settings, message = MISTAKES[name]
    with pytest.raises(InputError) as error:
        check_settings(configure(*settings))
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["gae", "grpo", "grpo_steps", "remax", "reinforce_plus_plus"])
def test_these_settings_are_right(name):
    check_settings(configure(STEPS, OWN_FUNCTION, f"algorithm.adv_estimator={name}"))


def test_samples_that_are_left_out_take_their_steps_along():
    samples = make_step_samples()
    keep = torch.tensor([True, False, True, True, False, True, True])
    kept = samples.select(keep)
    config = configure("algorithm.adv_estimator=grpo_steps", STEPS)
    set_advantages(config, kept, whole(replace(kept)), 0.0)
    assert kept.batch.fields["step_ends"].sum() == sum(
        len(placed) for placed, is_kept in zip(PLACED, keep.tolist()) if is_kept
    )


# -- runs ------------------------------------------------------------------------------------------

FUNCTION = '''
def letters(response):
    """Reward each character that is an a, and the response for its length."""
    steps = [(i + 1, float(c == "a")) for i, c in enumerate(response)]
    return {"length": len(response) / 100}, steps


def beyond(response):
    return 0.0, [(len(response) + 1, 1.0)]
'''


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    shape = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    make_model(folder / "model", "qwen3", num_hidden_layers=1, head_dim=32, **shape)
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps({"messages": row["messages"][:1]}) for row in make_rows()[0][:64]]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "steps.py").write_text(FUNCTION)
    return folder


def arguments(assets, out, function, *more):
    return [
        sys.executable,
        "train_ppo.py",
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"data.cache_dir={assets}/cache",
        f"output_dir={out}",
        "trainer.report=false",
        f"reward.function={assets}/steps.py:{function}",
        "reward.num_workers=1",
        STEPS,
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=400",
        "rollout.n=4",
        "rollout.max_tokens=8",
        "rollout.kv_cache_gib=0.05",
        "trainer.total_steps=2",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["rollout.partial.enable=true", "algorithm.rollout_is=token"]]
)
def test_a_run_with_steps(assets, tmp_path, more):
    """A score is the sum of its parts and its steps; special tokens are no characters."""
    run(arguments(assets, tmp_path, "letters", "algorithm.adv_estimator=grpo_steps", *more))
    assert [line["actor/grad_norm"] > 0 for line in metrics(tmp_path)] == [True, True]
    for step in (1, 2):
        for text in (tmp_path / "rollouts" / f"step_{step}.jsonl").read_text().splitlines():
            line = json.loads(text)
            score = len(line["response"]) / 100 + line["response"].count("a")
            assert line["score"] == pytest.approx(score)


@pytest.mark.slow
def test_a_step_beyond_the_response_ends_the_run_and_names_the_function(assets, tmp_path):
    done = run(arguments(assets, tmp_path, "beyond"), returncode=2)
    line = [line for line in done.stderr.splitlines() if line.startswith("error")][0]
    assert "steps.py:beyond returned a step that ends after" in line
    assert "characters of a response that has" in line
