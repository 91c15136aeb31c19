"""The batch and the settings with which tests/rl/test_verl_functions.py compares verl and us."""

from dataclasses import dataclass, field

import torch

MAX_TOKENS = 9
WEIGHTS = {"correct": 1.0, "short": 0.5}
# Tokens (x: sampled), and the parts of the reward.
BATCH = (
    ("xxxxx", 1.0, 0.3),
    ("xx", 0.0, 0.9),
    ("xxx..xxxx", 0.0, -0.4),
    ("xxxx", 1.0, 0.2),
    ("xxxxxx", 0.0, 0.1),
    ("xxx", 1.0, 0.8),
    ("x..x.xxx", 0.5, 0.6),
    ("xxxxxxxxx", 0.0, -0.7),
)
TEXTS = [text for text, _, _ in BATCH]
PARTS = {
    "correct": [correct for _, correct, _ in BATCH],
    "short": [short for _, _, short in BATCH],
}
SCORES = [correct + WEIGHTS["short"] * short for _, correct, short in BATCH]
# The prompt of each response.
UNEQUAL = [0, 0, 0, 1, 1, 1, 1, 1]
EQUAL = [0, 0, 0, 0, 1, 1, 1, 1]
ONE_ALONE = [0, 0, 0, 0, 0, 0, 0, 1]
# Rewards of turns: the response, the position of their last token, the reward.
TURNS = ((2, 2, 0.5), (6, 0, -0.3), (6, 3, 0.2))
# The score of the greedy response to each prompt.
BASELINES = {0: 0.45, 1: -0.2}


@dataclass
class EstimatorCase:
    """The settings with which verl and we estimate the same.

    theirs           the name of verl's estimator
    ours             settings below `algorithm`
    options          verl's settings below `algorithm`
    group            the prompt of each response
    kl               verl's name and the coefficient of the KL penalty in the rewards
    turns            rewards before the end of a response: the response, the position, the reward
    factor           our advantages divided by verl's
    reads            the fields that our estimator reads
    compares_returns whether the returns mean the same. verl's of whole responses are advantages
    """

    theirs: str
    ours: dict
    options: dict = field(default_factory=dict)
    group: list[int] = field(default_factory=lambda: UNEQUAL)
    kl: tuple[str, float] | None = None
    turns: tuple[tuple[int, int, float], ...] = ()
    factor: float = 1.0
    reads: tuple[str, ...] = ()
    compares_returns: bool = False


ESTIMATORS = {
    "GRPO": EstimatorCase("grpo", dict(adv_estimator="grpo")),
    "GRPO, vectorized": EstimatorCase("grpo_vectorized", dict(adv_estimator="grpo")),
    "Dr. GRPO": EstimatorCase(
        "grpo", dict(adv_estimator="dr_grpo"), dict(norm_adv_by_std_in_grpo=False)
    ),
    "RLOO": EstimatorCase("rloo", dict(adv_estimator="rloo")),
    "RLOO, vectorized": EstimatorCase("rloo_vectorized", dict(adv_estimator="rloo")),
    "OPO": EstimatorCase("opo", dict(adv_estimator="opo")),
    # verl whitens over all tokens, and gdpo over responses, as in the paper. Whitening a second
    # time, over tokens, makes up for it.
    "GDPO": EstimatorCase(
        "gdpo",
        dict(adv_estimator="gdpo", whiten_advantages="true"),
        dict(gdpo_reward_keys=list(WEIGHTS), gdpo_reward_weights=list(WEIGHTS.values())),
    ),
    # With groups of k, a response raises the maximum only if it is the best one. verl leaves out
    # the factor k.
    "pass@k": EstimatorCase(
        "grpo_passk",
        {"adv_estimator": "max_at_k", "adv_kwargs.k": 4},
        dict(norm_adv_by_std_in_grpo=False),
        group=EQUAL,
        factor=4.0,
    ),
    "REINFORCE++": EstimatorCase(
        "reinforce_plus_plus",
        dict(adv_estimator="reinforce_plus_plus", gamma=0.9),
        dict(gamma=0.9),
        compares_returns=True,
    ),
    "REINFORCE++-baseline": EstimatorCase(
        "reinforce_plus_plus_baseline", dict(adv_estimator="reinforce_plus_plus_baseline")
    ),
    "ReMax": EstimatorCase("remax", dict(adv_estimator="remax"), compares_returns=True),
    "GAE": EstimatorCase(
        "gae",
        dict(adv_estimator="gae", gamma=0.9, lam=0.8),
        dict(gamma=0.9, lam=0.8),
        reads=("values",),
        compares_returns=True,
    ),
    "GAE of turns": EstimatorCase(
        "gae",
        dict(adv_estimator="gae", gamma=0.9, lam=0.8),
        dict(gamma=0.9, lam=0.8),
        turns=TURNS,
        reads=("values",),
        compares_returns=True,
    ),
    "REINFORCE++ of turns": EstimatorCase(
        "reinforce_plus_plus",
        dict(adv_estimator="reinforce_plus_plus", gamma=0.9),
        dict(gamma=0.9),
        turns=TURNS,
        compares_returns=True,
    ),
    "ReMax of turns": EstimatorCase(
        "remax", dict(adv_estimator="remax"), turns=TURNS, compares_returns=True
    ),
    "GAE with a penalty": EstimatorCase(
        "gae",
        dict(adv_estimator="gae", lam=0.8, use_kl_in_reward="true", kl_penalty="k2"),
        dict(lam=0.8),
        kl=("mse", 0.1),
        reads=("values", "old_log_probs", "ref_log_probs"),
        compares_returns=True,
    ),
    "RLOO with a penalty": EstimatorCase(
        "rloo",
        dict(adv_estimator="rloo", use_kl_in_reward="true", kl_penalty="k1"),
        kl=("kl", 0.1),
        reads=("old_log_probs", "ref_log_probs"),
    ),
}
# verl's estimators for which a response without others is its own advantage. Here it is 0.
WITHOUT_OTHERS = {"grpo": "grpo", "rloo": "rloo", "opo": "opo"}


@dataclass
class LossCase:
    """The settings with which verl's losses and ours are the same.

    loss_mode      the name of verl's loss
    theirs         settings below `actor_rollout_ref.actor`
    ours           settings below `algorithm`
    correction     verl's settings below `algorithm.rollout_correction`
    counts_rejected  whether verl's mean over responses includes those that are rejected. Ours
                   does not
    has_old_log_probs   False if the policy is compared with vLLM's probabilities alone
    """

    loss_mode: str
    theirs: dict
    ours: dict
    correction: dict = field(default_factory=dict)
    counts_rejected: bool = False
    has_old_log_probs: bool = True


def with_bounds(low: float, high: float, **theirs) -> dict:
    return dict(clip_ratio_low=low, clip_ratio_high=high, **theirs)


def of_mode(loss_mode: str, low: float, high: float, **ours) -> dict:
    return dict(loss_mode=loss_mode, clip_ratio_low=low, clip_ratio_high=high, **ours)


# verl's bounds of rejections apply to the inverse ratio, vLLM's probability by the trainer's.
BOUNDS = "0.8_1.6"
INVERSE_BOUNDS = dict(rollout_rs_threshold_lower=1 / 1.6, rollout_rs_threshold=1 / 0.8)
BY_SEQUENCE = dict(loss_agg_mode="seq-mean-token-mean")
LOSSES = {
    "PPO": LossCase("vanilla", with_bounds(0.2, 0.28), of_mode("ppo", 0.2, 0.28)),
    "PPO with dual clip": LossCase(
        "vanilla", dict(clip_ratio_c=1.3), dict(loss_mode="ppo", clip_ratio_c=1.3)
    ),
    "GRPO": LossCase("vanilla", BY_SEQUENCE, dict(loss_mode="ppo", **BY_SEQUENCE)),
    "a mean of sums": LossCase(
        "vanilla",
        dict(loss_agg_mode="seq-mean-token-sum"),
        dict(loss_mode="ppo", loss_agg_mode="seq-mean-token-sum"),
    ),
    "Dr. GRPO": LossCase(
        "vanilla",
        dict(loss_agg_mode="seq-mean-token-sum-norm"),
        dict(loss_mode="ppo", loss_agg_mode="seq-mean-token-sum-norm"),
    ),
    # verl has no dual clip here.
    "GSPO": LossCase(
        "gspo",
        with_bounds(0.03, 0.04, **BY_SEQUENCE),
        of_mode("gspo", 0.03, 0.04, clip_ratio_c=0, **BY_SEQUENCE),
    ),
    "CISPO": LossCase("cispo", with_bounds(0.2, 0.1), of_mode("cispo", 0.2, 0.1)),
    # verl always takes the mean over responses.
    "GMPO": LossCase("geo_mean", with_bounds(0.1, 0.15), of_mode("gmpo", 0.1, 0.15, **BY_SEQUENCE)),
    # As above.
    "SAPO": LossCase(
        "sapo",
        dict(tau_pos=0.8, tau_neg=1.3),
        dict(loss_mode="sapo", loss_kwargs="{tau_positive: 0.8, tau_negative: 1.3}", **BY_SEQUENCE),
    ),
    # verl's bound on the ratio is clip_ratio_c.
    "DPPO, total variation": LossCase(
        "dppo_tv",
        with_bounds(0.1, 0.05, clip_ratio_c=1.2),
        of_mode("dppo_tv", 0.1, 0.05, loss_kwargs="{max_ratio: 1.2}"),
    ),
    "DPPO, KL": LossCase(
        "dppo_kl",
        with_bounds(0.02, 0.01, clip_ratio_c=1.2),
        of_mode("dppo_kl", 0.02, 0.01, loss_kwargs="{max_ratio: 1.2}"),
    ),
    "KL loss": LossCase(
        "vanilla",
        dict(use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=0.3, **BY_SEQUENCE),
        dict(loss_mode="ppo", use_kl_loss="true", kl_loss_coef=0.3, **BY_SEQUENCE),
    ),
    "entropy bonus": LossCase(
        "vanilla",
        dict(entropy_coeff=0.2, **BY_SEQUENCE),
        dict(loss_mode="ppo", entropy_coeff=0.2, **BY_SEQUENCE),
    ),
    "importance sampling of tokens": LossCase(
        "vanilla",
        {},
        dict(loss_mode="ppo", rollout_is="token", rollout_is_threshold=1.2),
        dict(rollout_is="token", rollout_is_threshold=1.2),
    ),
    "importance sampling of sequences": LossCase(
        "vanilla",
        {},
        dict(loss_mode="ppo", rollout_is="sequence", rollout_is_threshold=1.2),
        dict(rollout_is="sequence", rollout_is_threshold=1.2),
    ),
    "IcePop": LossCase(
        "vanilla",
        {},
        dict(
            loss_mode="ppo",
            rollout_is="icepop",
            rollout_is_threshold_lower=0.8,
            rollout_is_threshold=1.2,
        ),
        dict(rollout_is="token", rollout_is_threshold="0.8_1.2"),
    ),
    # verl takes the geometric mean of the tokens' weights, so they are equal if a sequence has one.
    "GMPO with importance sampling": LossCase(
        "geo_mean",
        with_bounds(0.1, 0.15),
        of_mode("gmpo", 0.1, 0.15, rollout_is="sequence", rollout_is_threshold=1.2, **BY_SEQUENCE),
        dict(rollout_is="sequence", rollout_is_threshold=1.2),
    ),
    "rejected tokens": LossCase(
        "vanilla",
        {},
        dict(loss_mode="ppo", rollout_rs="token", **INVERSE_BOUNDS),
        dict(rollout_rs="token_k1", rollout_rs_threshold=BOUNDS),
    ),
    "rejected sequences": LossCase(
        "vanilla",
        BY_SEQUENCE,
        dict(loss_mode="ppo", rollout_rs="sequence", **INVERSE_BOUNDS, **BY_SEQUENCE),
        dict(rollout_rs="seq_sum_k1", rollout_rs_threshold=BOUNDS),
        counts_rejected=True,
    ),
    "rejected by the geometric mean": LossCase(
        "vanilla",
        dict(loss_agg_mode="seq-mean-token-sum-norm"),
        dict(
            loss_mode="ppo",
            loss_agg_mode="seq-mean-token-sum-norm",
            rollout_rs="geometric",
            rollout_rs_threshold_lower=0.9,
            rollout_rs_threshold=1 / 0.92,
        ),
        dict(rollout_rs="seq_mean_k1", rollout_rs_threshold=f"0.92_{1 / 0.9}"),
        counts_rejected=True,
    ),
    # The ratio of a sequence is that of the remaining tokens.
    "GSPO with rejected tokens": LossCase(
        "gspo",
        with_bounds(0.03, 0.04),
        of_mode("gspo", 0.03, 0.04, clip_ratio_c=0, rollout_rs="token", **INVERSE_BOUNDS),
        dict(rollout_rs="token_k1", rollout_rs_threshold=BOUNDS),
    ),
    # The weight of a sequence is that of all its tokens.
    "rejection and importance sampling": LossCase(
        "vanilla",
        {},
        dict(
            loss_mode="ppo",
            rollout_is="sequence",
            rollout_is_threshold=1.2,
            rollout_rs="token",
            **INVERSE_BOUNDS,
        ),
        dict(
            rollout_is="sequence",
            rollout_is_threshold=1.2,
            rollout_rs="token_k1",
            rollout_rs_threshold=BOUNDS,
        ),
    ),
    # A single update per rollout. verl's loss has another value, log_probs times the weights.
    "bypass mode": LossCase(
        "bypass_mode",
        {},
        dict(loss_mode="ppo", rollout_is="token", rollout_is_threshold=1.2),
        dict(loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.2),
        has_old_log_probs=False,
    ),
}
# verl's name -> ours.
KL_NAMES = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
KL_CONTROLS = {
    "fixed": dict(type="fixed", kl_coef=0.2),
    "adaptive": dict(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=50),
}
KL_OF_STEPS = [0.3, 0.11, 0.095, 0.02, 0.0]
OVERLONG = dict(buffer=5, penalty=0.7)
TOP_K = {"all tokens": 11, "four tokens and the rest": 4}
# What verl offers and we do not, or not in this form. docs/from_verl.md has what is not supported.
NOT_SUPPORTED = "not supported"
OMITTED = {
    "policy losses": dict.fromkeys(("gpg", "clip_cov", "kl_cov", "dro"), NOT_SUPPORTED),
    "estimators": dict.fromkeys(
        ("gpg", "optimal_token_baseline", "tir_optimal_token_baseline"), NOT_SUPPORTED
    ),
    "aggregations": {"token-sum": NOT_SUPPORTED},
    "KL estimates": {"full": "verl raises NotImplementedError"},
    "KL controls": {},
    "rejections": dict.fromkeys(
        (
            *("token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3"),
            *("seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
        ),
        NOT_SUPPORTED,
    ),
    "distillation": dict.fromkeys(
        KL_NAMES, "estimates from the sampled tokens: here, of a reference and not of a teacher"
    ),
}
# What verl does not have.
OURS_ALONE = {
    "policy losses": set(),
    "estimators": {"grpo_steps", "max_rl", "lite_ppo"},
    "aggregations": set(),
    "KL estimates": set(),
}


def make_tokens() -> dict[str, list[float]]:
    """Return random numbers of the sampled tokens."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = "".join(TEXTS).count("x")

    def normal() -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator)

    def near(log_probs: torch.Tensor, distance: float) -> torch.Tensor:
        return (log_probs + distance * normal()).clamp(max=-0.02)

    rollout_log_probs = -0.05 - 2.5 * torch.rand(num_tokens, generator=generator)
    old_log_probs = near(rollout_log_probs, 0.2)
    log_probs = near(old_log_probs, 0.3)
    # A ratio beyond the bound of dual clip, in a response that is worse than the others.
    old_log_probs[8] = -2.5
    log_probs[8] = -0.7
    ref_log_probs = near(log_probs, 0.5)
    # Both bounds of k3.
    log_probs[20] = -4.5
    ref_log_probs[20] = -0.5
    ref_log_probs[30] = -14.0
    values = normal()
    tokens = {
        "rollout_log_probs": rollout_log_probs,
        "old_log_probs": old_log_probs,
        "log_probs": log_probs,
        "ref_log_probs": ref_log_probs,
        "entropy": normal().abs(),
        "values": values,
        "new_values": values + 0.3 * normal(),
        "returns": normal(),
    }
    return {name: numbers.tolist() for name, numbers in tokens.items()}


TOKENS = make_tokens()


def make_logits(seed: int) -> torch.Tensor:
    return 2 * torch.randn(6, TOP_K["all tokens"], generator=torch.Generator().manual_seed(seed))
