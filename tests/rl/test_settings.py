"""Settings that contradict each other, and the models that the others ask for."""

from types import SimpleNamespace

import pytest

from config import CONFIGS, InputError, defaults
from engines.context_parallel import check_batch_size
from engines.heads import Head
from rl import models
from rl.models import hooked_stages, needs_old_log_probs, path_keys, role_configs
from rl.requirements import parse, read_requirements
from rl.settings import (
    WHITENED,
    check_episodes,
    check_estimator_teaches,
    check_no_negative_rewards,
    check_sampling,
    check_settings,
)
from tests.support.samples import (
    configure,
)

GAE = "algorithm.adv_estimator=gae"
VAL_FILES = "data.val_files=there"
FILTER = "algorithm.filter_groups.enable=true"

PARTIAL = ["rollout.partial.enable=true", "algorithm.rollout_is=token"]
EPISODE = ["rollout.episode=my.py:play", "rollout.max_episode_tokens=2048"]
CONTRADICTIONS = {
    "a mini-batch that does not divide": (
        ["data.train_batch_size=8", "algorithm.ppo_mini_batch_size=3"],
        "algorithm.ppo_mini_batch_size=3 does not divide data.train_batch_size=8",
    ),
    "a mini-batch larger than the batch": (
        ["data.train_batch_size=8", "algorithm.ppo_mini_batch_size=16"],
        "does not divide",
    ),
    "an estimator that is not there": (
        ["algorithm.adv_estimator=ppo"],
        "must be one of gae, grpo,",
    ),
    "a loss that is not there": (
        ["algorithm.loss_mode=grpo"],
        "algorithm.loss_mode=grpo must be one of ppo, gspo, cispo",
    ),
    "an aggregation that is not there": (
        ["algorithm.loss_agg_mode=mean"],
        "must be one of token-mean, seq-mean-token-sum",
    ),
    "a divergence that is not there": (
        ["algorithm.kl_penalty=k4"],
        "algorithm.kl_penalty=k4 must be one of k1, k2, k3, abs",
    ),
    "corrected sampling from an unknown number of words": (
        ["rollout.top_p=0.9", "algorithm.rollout_is=token"],
        "set rollout.top_k (e.g. 64)",
    ),
    "rejected samples from an unknown number of words": (
        ["rollout.min_p=0.1", "algorithm.rollout_rs=sequence"],
        "set rollout.top_k (e.g. 64)",
    ),
    "equal responses of a validation": (
        ["validation.n=4", VAL_FILES],
        "validation.n=4 with validation.temperature=0 generates equal responses",
    ),
    **{
        f"{pair}, which nothing reads": ([pair], f"{pair} does nothing without {needs}")
        for pair, needs in {
            "critic.path=there": GAE,
            "critic.lr=1": GAE,
            "critic.cliprange_value=1": GAE,
            "critic.warmup_steps=3": GAE,
            "algorithm.lam=0.5": GAE,
            "algorithm.gamma=0.5": f"{GAE} or reinforce_plus_plus",
            "algorithm.kl_penalty=k2": "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.kl_coef=1": "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive": "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.horizon=2": "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_loss_coef=1": "algorithm.use_kl_loss=true",
            "algorithm.kl_loss_type=k1": "algorithm.use_kl_loss=true",
            "reference.path=there": "algorithm.use_kl_loss=true or",
            "offload.reference=False": "algorithm.use_kl_loss=true or",
            "algorithm.rollout_is_threshold=3.0": "algorithm.rollout_is",
            "algorithm.rollout_rs_threshold=3.0": "algorithm.rollout_rs",
            "reward.overlong_penalty=2.0": "reward.overlong_buffer",
            "validation.n=4": "data.val_files or data.val_size above 0",
            "validation.max_tokens=9": "data.val_files or data.val_size above 0",
            "validation.top_p=0.5": "data.val_files or data.val_size above 0",
            "trainer.val_only=True": "data.val_files or data.val_size above 0",
            "algorithm.filter_groups.max_num_gen_batches=2": FILTER,
        }.items()
    },
    "a share of tokens for greedy decoding": (
        ["validation.top_p=0.5", VAL_FILES],
        "validation.top_p=0.5 does nothing without validation.temperature above 0",
    ),
    "a bound that cispo has not": (
        ["algorithm.loss_mode=cispo", "algorithm.clip_ratio_c=2.0"],
        "does nothing without",
    ),
    **{
        f"groups of one with {name}": (
            [f"algorithm.adv_estimator={name}", "rollout.n=1"],
            f"algorithm.adv_estimator={name} with rollout.n=1 learns nothing",
        )
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
    },
    "weights that are all 0": (
        ["reward.weights={correct: 0, short: 0.0}"],
        "reward.weights={'correct': 0, 'short': 0.0} gives every response 0",
    ),
    "weights that are all 0, beside a reward model that counts nothing": (
        ["reward.weights.correct=0", "reward.model.path=rm", "reward.model.weight=0"],
        "reward.weights={'correct': 0} gives every response 0",
    ),
    "groups that are too small for max_at_k": (
        ["algorithm.adv_estimator=max_at_k", "algorithm.adv_kwargs.k=5", "rollout.n=4"],
        "algorithm.adv_estimator=max_at_k (k=5) learns nothing from rollout.n=4 responses",
    ),
    "max_at_k of one response": (
        ["algorithm.adv_estimator=max_at_k", "algorithm.adv_kwargs.k=1"],
        "algorithm.adv_kwargs.k=1 must be 2 or more: with 1 it is rloo",
    ),
    "penalties that gdpo does not read": (
        [
            "algorithm.adv_estimator=gdpo",
            "reward.function=my.py:parts",
            "reward.overlong_buffer=4",
            "rollout.max_tokens=10",
        ],
        "reward.overlong_buffer=4 does nothing without",
    ),
    "a negative temperature of sapo": (
        ["algorithm.loss_mode=sapo", "algorithm.loss_kwargs.tau_negative=-1.0"],
        "tau_negative=-1.0 must be above 0",
    ),
    "a clip ratio that sapo does not read": (
        ["algorithm.loss_mode=sapo", "algorithm.clip_ratio_low=0.1"],
        "algorithm.clip_ratio_low=0.1 does nothing without",
    ),
    **{
        f"advantages of {name} that are whitened twice": (
            [f"algorithm.adv_estimator={name}", "algorithm.whiten_advantages=true"],
            f"does nothing with algorithm.adv_estimator={name}, whose advantages are whitened",
        )
        for name in WHITENED
    },
    "gdpo of a reward without parts": (
        ["algorithm.adv_estimator=gdpo"],
        "but reward.function=exact_match returns a number",
    ),
    "max_rl with a divergence in the reward": (
        ["algorithm.adv_estimator=max_rl", "algorithm.use_kl_in_reward=true"],
        "algorithm.use_kl_in_reward=true does not work with algorithm.adv_estimator=max_rl",
    ),
    "max_rl with a penalty for length": (
        ["algorithm.adv_estimator=max_rl", "reward.overlong_buffer=16"],
        "reward.overlong_buffer=16 does not work with algorithm.adv_estimator=max_rl",
    ),
    "max_rl with a reward model": (
        ["algorithm.adv_estimator=max_rl", "reward.model.path=scorer"],
        "reward.model.path=scorer does not work with algorithm.adv_estimator=max_rl",
    ),
    "max_at_k without k": (
        ["algorithm.adv_estimator=max_at_k"],
        "algorithm.adv_estimator=max_at_k needs its parameter k: set algorithm.adv_kwargs.k",
    ),
    "a largest ratio of 0": (
        ["algorithm.loss_mode=dppo_tv", "algorithm.loss_kwargs.max_ratio=0"],
        "algorithm.loss_kwargs.max_ratio=0 must be above 0",
    ),
    "icepop without a ratio between its thresholds": (
        ["algorithm.rollout_is=icepop", "algorithm.rollout_is_threshold=0.4"],
        "algorithm.rollout_is=icepop keeps no token",
    ),
    "a lower threshold without icepop": (
        ["algorithm.rollout_is=token", "algorithm.rollout_is_threshold_lower=0.1"],
        "algorithm.rollout_is_threshold_lower=0.1 does nothing without",
    ),
    "a divergence whose gradient is 0 as a loss": (
        ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k1"],
        "algorithm.kl_loss_type=k1 has no effect as a loss",
    ),
    "dropout of adapters": (
        ["model.lora.rank=4", "model.lora.dropout=0.1"],
        "model.lora.dropout=0.1 does not work with PPO",
    ),
    "groups of one that are filtered": (
        [FILTER, "rollout.n=1", GAE],
        "needs rollout.n of 2 or more",
    ),
    "a buffer longer than a response": (
        ["rollout.max_tokens=10", "reward.overlong_buffer=11"],
        "is more than rollout.max_tokens=10",
    ),
    "responses that continue without a correction": (
        ["rollout.partial.enable=true"],
        "set algorithm.rollout_is=token (or sequence) to correct for them",
    ),
    "a share of groups that begin early, if none continues": (
        [*PARTIAL, "rollout.partial.max_staleness=0", "rollout.partial.oversample=1.5"],
        "does nothing without rollout.partial.max_staleness above 0",
    ),
    "responses that continue and are drafted": (
        [*PARTIAL, "rollout.speculative=ngram"],
        "does not work with rollout.speculative=ngram",
    ),
    **{
        f"a prompt that is cut on the {side}, but not for an episode": (
            [
                "rollout.episode=my.py:play",
                "rollout.max_episode_tokens=2048",
                f"data.truncation={side}",
            ],
            f"data.truncation={side} does nothing with rollout.episode=my.py:play",
        )
        for side in ("left", "right")
    },
    **{
        f"{setting}, which an episode does not read": (
            [*EPISODE, setting],
            f"{setting} does nothing with rollout.episode=my.py:play, which gives the reward",
        )
        for setting in (
            "reward.function=none",
            "reward.kwargs={'a': 'b'}",
            "reward.num_workers=2",
            "reward.timeout=9.0",
            "reward.concurrency=2",
            "reward.skip_special_tokens=False",
        )
    },
    "an episode without a limit": (
        ["rollout.episode=my.py:play", "data.max_prompt_length=50", "rollout.max_tokens=60"],
        "A single turn takes up to 110 tokens",
    ),
    "images for an episode": (
        [*EPISODE, "model.images=true"],
        "rollout.episode=my.py:play does not work with model.images=true yet",
    ),
    "a buffer longer than an episode": (
        [*EPISODE, "reward.overlong_buffer=2049"],
        "is more than rollout.max_episode_tokens=2048",
    ),
    "a negative score for max_rl": (
        [*EPISODE, "algorithm.adv_estimator=max_rl", "rollout.limit_score=-1.0"],
        "rollout.limit_score=-1.0 does not work with algorithm.adv_estimator=max_rl",
    ),
    "responses that continue and are drafted by the model": (
        [*PARTIAL, "model.mtp.enable=true", "model.mtp.enable_rollout=true"],
        "does not work with model.mtp.enable_rollout: drafts",
    ),
    "two equal responses of a validation": (
        ["validation.n=2", VAL_FILES],
        "validation.n=2 with validation.temperature=0 generates equal responses",
    ),
    "responses longer than a micro-batch": (
        [
            "data.max_prompt_length=50",
            "rollout.max_tokens=51",
            "data.max_tokens_per_micro_batch=100",
        ],
        "rollout.max_tokens = 101 is more than",
    ),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictions_are_input_errors(what):
    more, message = CONTRADICTIONS[what]
    with pytest.raises(InputError) as error:
        check_settings(configure(*more))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["data.train_batch_size=8", "algorithm.ppo_mini_batch_size=8"],
        [GAE, "critic.path=there", "critic.warmup_steps=3"],
        [GAE, "rollout.n=1"],
        ["algorithm.adv_estimator=max_at_k", "algorithm.adv_kwargs.k=4", "rollout.n=4"],
        ["algorithm.adv_estimator=gdpo", "reward.function=my.py:parts"],
        ["algorithm.adv_estimator=gdpo", "reward.model.path=there"],
        ["algorithm.adv_estimator=max_rl", "algorithm.use_kl_loss=true"],
        ["algorithm.rollout_is=icepop", "algorithm.rollout_is_threshold_lower=0.1"],
        ["algorithm.adv_estimator=reinforce_plus_plus", "rollout.n=1"],
        *(
            ["algorithm.use_kl_loss=true", f"algorithm.kl_loss_type={k}"]
            for k in ("k2", "k3", "abs")
        ),
        ["reference.path=there", "algorithm.use_kl_loss=true"],
        ["reference.path=there", "algorithm.use_kl_in_reward=true"],
        [FILTER, "rollout.n=2"],
        PARTIAL,
        [*PARTIAL, "rollout.stop=[x]"],
        [*PARTIAL, *EPISODE],
        [*EPISODE, "algorithm.adv_estimator=max_rl", "rollout.limit_score=0.0"],
        [*EPISODE, "reward.overlong_buffer=2048", "data.truncation=drop"],
        ["algorithm.adv_estimator=max_rl", "reward.model.path=there", "reward.model.weight=0"],
        ["algorithm.rollout_is=icepop", "algorithm.rollout_is_threshold=0.5"],
        [
            "algorithm.rollout_is=icepop",
            "algorithm.rollout_is_threshold_lower=0.1",
            "algorithm.rollout_is_threshold=0.2",
        ],
        ["reward.weights={a: 0}", "reward.step_rewards=true", "reward.function=my.py:f"],
        ["rollout.partial.enable=true", "rollout.partial.require_correction=false"],
        ["validation.n=4", "validation.temperature=1", VAL_FILES],
        ["validation.stop=[x]", "data.val_size=0.1"],
        ["rollout.top_k=20", "rollout.top_p=0.9", "algorithm.rollout_is=token"],
        ["rollout.max_tokens=10", "reward.overlong_buffer=10"],
        [
            "data.max_prompt_length=50",
            "rollout.max_tokens=50",
            "data.max_tokens_per_micro_batch=100",
        ],
    ],
)
def test_what_contradicts_nothing_is_accepted(more):
    check_settings(configure(*more))


def test_every_requirement_in_the_comments_can_be_read_and_is_met_by_its_own_words():
    requirements = read_requirements(CONFIGS / "ppo.yaml")
    assert len(requirements) == 59
    conditions = dict(requirements)
    assert [c.form for c in conditions["reference.path"]] == ["equals", "equals", "reads"]
    assert [c.form for c in conditions["validation"]] == ["is set", "above"]
    (condition,) = conditions["critic.lr"]
    assert not condition.holds(configure())
    assert condition.holds(configure(GAE))


@pytest.mark.parametrize("text", ["a critic", "algorithm.use_kl_loss=true and more", "gamma"])
def test_a_requirement_in_another_form_is_an_error(text):
    with pytest.raises(ValueError, match="no condition begins with"):
        parse(text)


def test_a_policy_that_samples_from_fewer_words_is_warned_of_unless_the_trainer_knows_them(capsys):
    check_settings(configure("rollout.min_p=0.1"))
    assert (
        "warning: rollout.min_p=0.1: responses are drawn from fewer tokens"
        in capsys.readouterr().err
    )
    check_settings(configure("rollout.min_p=0.1", "rollout.top_k=50"))
    assert not capsys.readouterr().err


def test_critic_and_reference_begin_with_their_own_model_or_the_policys():
    both = ["algorithm.adv_estimator=gae", "algorithm.use_kl_loss=true"]
    config = configure(
        *both, "critic.path=c", "critic.lr=0.5", "reference.path=r", "model.freeze=[x]", path="p"
    )
    roles = role_configs(config)
    assert [list(role.model.freeze) for role in roles.values()] == [["x"], ["x"], []]
    assert [(name, role.model.path, role.optim.lr) for name, role in roles.items()] == [
        ("actor", "p", config.optim.lr),
        ("critic", "c", 0.5),
        ("reference", "r", config.optim.lr),
    ]
    assert [role.model.path for role in role_configs(configure(*both, path="p")).values()] == [
        "p",
        "p",
        "p",
    ]
    assert list(role_configs(configure(path="p"))) == ["actor"]


@pytest.mark.parametrize(
    "num_minis, more, needed",
    [
        (1, [], False),
        (2, [], True),
        (1, ["algorithm.ppo_epochs=2"], True),
        (1, ["algorithm.use_kl_in_reward=true"], True),
        (1, ["algorithm.rollout_rs=token"], True),
        (1, ["algorithm.use_kl_loss=true", "algorithm.rollout_is=token"], False),
        (1, ["algorithm.adv_estimator=gae"], False),
        (1, ["algorithm.adv_estimator=gae", "critic.warmup_steps=2"], False),
        (1, ["algorithm.adv_estimator=gae", "critic.warmup_steps=3"], True),
    ],
)
def test_old_log_probs_are_asked_for_where_they_are_needed(num_minis, more, needed):
    assert needs_old_log_probs(configure(*more), num_minis, 2) == needed


def test_ranks_divide_responses():
    config = configure("data.train_batch_size=2", "rollout.n=2")
    check_batch_size(config, 4)
    with pytest.raises(
        InputError, match="train_batch_size=2 x rollout.n=2 is less than the 5 data-parallel ranks"
    ):
        check_batch_size(config, 5)


def test_each_model_has_its_own_part_of_the_actors_settings():
    """The critic and the reference have models of their own, and the critic a learning rate."""
    actor = ["model.freeze=[embed]", "model.lora.rank=4", "model.lora.adapter_path=trained"]
    actor += ["model.mtp.enable_train=true", "optim.lr=0.5", "rollout.routing_replay=true"]
    others = ["critic.path=judge", "critic.lr=0.25", "reference.path=base"]
    roles = role_configs(configure(GAE, "algorithm.use_kl_loss=true", *actor, *others))
    assert [*roles] == ["actor", "critic", "reference"]
    critic = roles["critic"]
    reference = roles["reference"]
    assert [role.model.path for role in roles.values()] == ["unused", "judge", "base"]
    assert [role.optim.lr for role in roles.values()] == [0.5, 0.25, 0.5]
    assert [role.rollout.routing_replay for role in roles.values()] == [True, False, False]
    assert critic.model.freeze == ["embed"]
    assert critic.model.lora == roles["actor"].model.lora | {"adapter_path": None}
    assert critic.model.mtp == defaults("model.mtp")
    assert reference.model.freeze == []
    assert reference.model.lora == defaults("model.lora")
    assert reference.model.mtp == defaults("model.mtp")


@pytest.mark.parametrize(
    "setting, message",
    [
        ("critic.path=other", "critic.path=other has a vocabulary of 9 tokens, but model.path=un"),
        ("reference.path=other", "reference.path=other has a vocabulary of 9 tokens"),
        ("algorithm.distill.teacher=other", "the teacher was checked"),
        ("critic.path=same", None),
    ],
)
def test_every_model_has_the_vocabulary_of_the_policy(monkeypatch, setting, message):
    """A teacher may have more padding, which check_teachers() knows."""
    checked = []

    def check(config, world_size, head):
        checked.append((config.model.path, world_size, head))
        return SimpleNamespace(vocab_size=9 if config.model.path == "other" else 8)

    def check_teachers(config, hf_configs):
        if "teacher" in hf_configs:
            raise InputError("the teacher was checked")

    monkeypatch.setattr(models, "engine_class", lambda name: SimpleNamespace(check=check))
    monkeypatch.setattr(models, "check_teachers", check_teachers)
    config = configure(GAE, "algorithm.use_kl_loss=true", setting)
    if message is None:
        assert models.check_models(config, 4).vocab_size == 8
        heads = [Head.LOG_PROBS, Head.VALUES, Head.LOG_PROBS]
        assert checked == [(p, 4, head) for p, head in zip(("unused", "same", "unused"), heads)]
        return
    with pytest.raises(InputError, match=message):
        models.check_models(config, 4)


def test_a_model_of_its_own_is_named_by_its_key():
    own = ["critic.path=judge", "reference.path=base", "algorithm.distill.teacher=wise"]
    assert path_keys(configure(*own)) == {
        "teacher": "algorithm.distill.teacher",
        "reward model": "reward.model.path",
        "critic": "critic.path",
        "reference": "reference.path",
    }
    assert path_keys(configure()) == {"reward model": "reward.model.path"}


@pytest.mark.parametrize(
    "settings, device_type, stages",
    [
        ([], "cpu", ["rollout_generate", "actor_update"]),
        ([], "cuda", ["actor_update"]),
        (["rollout.enforce_eager=true"], "cuda", ["rollout_generate", "actor_update"]),
        (
            [GAE, "data.train_batch_size=8", "algorithm.ppo_mini_batch_size=4"],
            "cuda",
            ["actor_compute_log_prob", "compute_values", "critic_update", "actor_update"],
        ),
        (
            ["algorithm.use_kl_loss=true", "reward.model.path=judge"],
            "cuda",
            ["ref_compute_log_prob", "reward_model_compute", "actor_update"],
        ),
        (["algorithm.distill.teacher=wise"], "cuda", ["teacher_compute", "actor_update"]),
    ],
)
def test_stages_in_which_modules_call_hooks(settings, device_type, stages):
    assert hooked_stages(configure(*settings), device_type) == stages


@pytest.mark.parametrize("rank, is_warned", [("0", True), ("1", False)])
def test_one_rank_warns_of_all_settings_that_cut_off_tokens(monkeypatch, capsys, rank, is_warned):
    monkeypatch.setenv("RANK", rank)
    check_settings(configure("rollout.min_p=0.1", "rollout.top_p=0.9"))
    warning = "warning: rollout.top_p=0.9, rollout.min_p=0.1: responses are drawn"
    assert (warning in capsys.readouterr().err) == is_warned


@pytest.mark.parametrize("world_size, fits", [("2", True), ("1", False), ("3", True)])
def test_ranks_that_share_a_sequence_make_room_for_longer_ones(monkeypatch, world_size, fits):
    """With groups chosen per batch, of up to as many ranks as the largest power of two."""
    monkeypatch.setenv("WORLD_SIZE", world_size)
    lengths = ["data.max_prompt_length=100", "rollout.max_tokens=100"]
    lengths += ["data.max_tokens_per_micro_batch=100", "engine.context_parallel_size=auto"]
    if fits:
        check_settings(configure(*lengths))
        lengths[1] = "rollout.max_tokens=101"
    with pytest.raises(InputError, match=r"max_tokens = 20[01] is more than .* ranks"):
        check_settings(configure(*lengths))


def test_rewards_of_steps_are_none_of_an_episode():
    with pytest.raises(InputError, match="reward.step_rewards=True does nothing with rollout.epi"):
        check_episodes(configure(*EPISODE, "reward.step_rewards=true"))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_groups_of_one_may_learn_from_a_teacher_alone(name):
    """Nothing compares the responses then. The estimator stays the default one."""
    teacher = ["algorithm.distill.teacher=wise", "rollout.n=1"]
    estimator = f"algorithm.adv_estimator={name}"
    check_estimator_teaches(configure(*teacher, "algorithm.distill.only=true", estimator))
    with pytest.raises(InputError, match=f"adv_estimator={name} with rollout.n=1 learns nothing"):
        check_estimator_teaches(configure(*teacher, estimator))


@pytest.mark.parametrize(
    "limits, named",
    [
        (["rollout.max_tokens=10", "rollout.max_episode_tokens=8"], "max_episode_tokens=8"),
        (["rollout.max_tokens=8"], "max_tokens=8"),
    ],
)
def test_a_buffer_is_compared_with_the_limit_that_its_penalty_is_about(limits, named):
    with pytest.raises(InputError, match=f"overlong_buffer=9 is more than rollout.{named}: lower"):
        check_sampling(configure(*limits, "reward.overlong_buffer=9"))
    check_sampling(configure(*limits, "reward.overlong_buffer=8"))


@pytest.mark.parametrize("weight", ["-0.5", "0.5"])
def test_a_reward_model_of_either_weight_may_make_rewards_negative(weight):
    settings = ["algorithm.adv_estimator=max_rl", "reward.model.path=judge"]
    with pytest.raises(InputError, match="reward.model.path=judge does not work with .*max_rl"):
        check_no_negative_rewards(configure(*settings, f"reward.model.weight={weight}"))
