"""The functions that the configuration names, and the inputs that each of them may read.

Five keys of `algorithm` each name a function: a built-in one, or one in the user's own file
(docs/forking.md). The fields of the input classes below are the available inputs: a function
declares the ones that it reads as parameters, and takes the rest as **_.

Declaring an input also requests it. With `values`, an advantage estimator or a policy loss requests
a critic; with `ref_log_probs`, a reference model. In an estimator, `baseline` requests greedy
responses, and `old_log_probs` the pass that computes them. Inputs that no function declares are not
computed, and setting a configuration key that no function reads is an error (rl/requirements.py).

Shapes: T is the number of tokens that this rank trains on, n the number of responses of the step.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from algorithms.advantages import ADVANTAGES
from algorithms.aggregation import AGGREGATIONS
from algorithms.kl import KL_ESTIMATORS
from algorithms.packed import Total
from algorithms.policy_losses import POLICY_LOSSES
from common import plugins
from config import InputError


def per_token(**options) -> Any:
    """Declare an input that covers only the tokens of this rank, not all responses of the step."""
    return dataclasses.field(metadata={"per_token": True}, **options)


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The inputs that an advantage estimator may read.

    rewards            [T] fp32: the outcome, on the last sampled token of each response
    mask               [T] fp32: 1 on the tokens that the model sampled
    sequence           [T] int64: the response of each token, in 0..n-1
    group              [n] int64: the prompt of each response
    values             [T] fp32: the critic's values before the update
    baseline           [n] fp32: the score of the greedy response to the same prompt
    old_log_probs      [T] fp32: the actor's, before the update
    ref_log_probs      [T] fp32: the reference model's
    rollout_log_probs  [T] fp32: vLLM's
    outcome            [n] fp32: the score, minus the configured penalties
    lengths            [n] int64: the number of tokens of each response
    step_rewards       [T] fp32: with reward.step_rewards, each step's reward, at its last token
    step_ends          [T] fp32: 1 at the last token of each step
    sum_by_response    function: x [T] -> [n] float64, the sums of x over the tokens of each
                       response, on all ranks
    parts              name -> [n] fp32: the named parts of the scores
    part_weights       name -> float: reward.weights, where a part that it does not name has the
                       weight 0, or 1 if reward.weights is empty
    num_sequences      n
    total              function: x [T] -> the sum of x over the response tokens of all ranks, a
                       float64 scalar
    gamma, lam         algorithm.gamma and algorithm.lam

    An estimator that reads per-token inputs ([T], or total) returns advantages and returns per
    token, [T] each. Any other estimator returns them per response, [n] each.

    If episodes have several sequences (rollout/samples.py), an estimator that reads per-token
    inputs sees each sequence as a response, with the outcome of its episode. If turns have rewards,
    these are in `rewards` at the last token of their turn, and the last token of a sequence has the
    rest of the outcome. For any other estimator, each of the n responses is a whole episode.
    """

    rewards: Tensor = per_token()
    mask: Tensor = per_token()
    sequence: Tensor = per_token()
    group: Tensor
    values: Tensor | None = per_token(default=None)
    baseline: Tensor | None = None
    old_log_probs: Tensor | None = per_token(default=None)
    ref_log_probs: Tensor | None = per_token(default=None)
    rollout_log_probs: Tensor | None = per_token(default=None)
    outcome: Tensor
    lengths: Tensor
    parts: Mapping[str, Tensor] | None = None
    part_weights: Mapping[str, float] | None = None
    num_sequences: int
    total: Total = per_token()
    step_rewards: Tensor | None = per_token(default=None)
    step_ends: Tensor | None = per_token(default=None)
    sum_by_response: Callable[[Tensor], Tensor] | None = per_token(default=None)
    gamma: float
    lam: float


@dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """The inputs that a policy loss may read, for one micro-batch.

    log_probs, entropy  [T] fp32, with gradient
    old_log_probs       [T] fp32: the log-probabilities before the update. If this is the only
                        update of the step, they are log_probs without a gradient
    advantages, returns [T] fp32
    mask                [T] fp32: 1 on the response tokens that were not rejected
    sequence            [T] int64: the response of each token, in 0..num_sequences-1; for episodes,
                        the sequence
    num_sequences       number of responses, or sequences, of this rank
    clip_low, clip_high, dual_clip   algorithm.clip_ratio_low, clip_ratio_high and clip_ratio_c
    values              [T] fp32: the critic's values before the update
    ref_log_probs       [T] fp32: the reference model's
    rollout_log_probs   [T] fp32: vLLM's
    group               [T] int64: the prompt of the token's response
    scores              [T] fp32: the score of the token's response
    """

    log_probs: Tensor
    entropy: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence: Tensor
    num_sequences: int
    clip_low: float
    clip_high: float
    dual_clip: float
    returns: Tensor | None = None
    values: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    group: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class AggregationInputs:
    """The inputs that an aggregation of the losses may read, for one mini-batch.

    lengths     [n] fp32: number of tokens of each response, or episode, that are not rejected; 0
                for those outside the mini-batch
    max_tokens  rollout.max_tokens, or rollout.max_episode_tokens if it is set
    """

    lengths: Tensor
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class DivergenceInputs:
    """The inputs of an estimator of the divergence from the reference: [T] fp32 each."""

    log_probs: Tensor
    ref_log_probs: Tensor


Inputs = AdvantageInputs | PolicyLossInputs | AggregationInputs | DivergenceInputs


@dataclass(frozen=True)
class FunctionKey:
    """A key of `algorithm` that names a function.

    built_in    the built-in functions, by name
    inputs      the class whose fields are the inputs that a function may read
    kwargs_key  the key of `algorithm` that holds the function's own parameters; None if it has none
    """

    built_in: Mapping[str, Callable]
    inputs: type
    kwargs_key: str | None = None

    @property
    def vocabulary(self) -> list[str]:
        """The names of the available inputs."""
        return [field.name for field in dataclasses.fields(self.inputs)]


FUNCTIONS = {
    "adv_estimator": FunctionKey(ADVANTAGES, AdvantageInputs, "adv_kwargs"),
    "loss_mode": FunctionKey(POLICY_LOSSES, PolicyLossInputs, "loss_kwargs"),
    "loss_agg_mode": FunctionKey(AGGREGATIONS, AggregationInputs),
    "kl_penalty": FunctionKey(KL_ESTIMATORS, DivergenceInputs),
    "kl_loss_type": FunctionKey(KL_ESTIMATORS, DivergenceInputs),
}


def find_function(config: DictConfig, key: str) -> Callable:
    """Return the function that algorithm.{key} names, with its own parameters bound.

    Raises InputError if the function does not exist, or if it cannot be called with its inputs.
    """
    function_key = FUNCTIONS[key]
    name = config.algorithm[key]
    if function_key.kwargs_key is None:
        return plugins.find(
            f"algorithm.{key}", name, function_key.built_in, function_key.vocabulary
        )
    return plugins.find(
        f"algorithm.{key}",
        name,
        function_key.built_in,
        function_key.vocabulary,
        f"algorithm.{function_key.kwargs_key}",
        config.algorithm[function_key.kwargs_key],
    )


def inputs_read(config: DictConfig, *keys: str) -> set[str]:
    """Return the names of the inputs that the configured functions of these keys read."""
    names: set[str] = set()
    for key in keys:
        names |= plugins.parameters(find_function(config, key))
    return names


def built_in_readers(key: str, input_name: str) -> list[str]:
    """Return the built-in functions for algorithm.{key} that read an input, by name."""
    return [
        name
        for name, function in FUNCTIONS[key].built_in.items()
        if input_name in plugins.parameters(function)
    ]


def reads_tokens(config: DictConfig) -> set[str]:
    """Return the per-token inputs that the estimator reads; none if it works on responses."""
    fields = dataclasses.fields(AdvantageInputs)
    token_inputs = {field.name for field in fields if field.metadata.get("per_token")}
    return inputs_read(config, "adv_estimator") & token_inputs


def call(function: Callable, inputs: Inputs) -> Any:
    """Call a function with all inputs that are not None, by name."""
    fields = dataclasses.fields(inputs)
    arguments = {field.name: getattr(inputs, field.name) for field in fields}
    return function(**{name: value for name, value in arguments.items() if value is not None})


def call_estimator(config: DictConfig, inputs: AdvantageInputs) -> Any:
    """Call the advantage estimator.

    Raises InputError for inputs that a built-in estimator does not accept. An error in a user's own
    function keeps its traceback.
    """
    key = "adv_estimator"
    function = find_function(config, key)
    if config.algorithm[key] not in FUNCTIONS[key].built_in:
        return call(function, inputs)
    try:
        return call(function, inputs)
    except ValueError as error:
        raise InputError(str(error)) from None


def check_shapes(
    config: DictConfig, key: str, like: Tensor, *results: Any, unit: str = "token"
) -> None:
    """Raise InputError unless the function of algorithm.{key} returned tensors shaped as `like`.

    Without this check, broadcasting could hide the mistake.

    results: the tensors that it returned. unit: "token" or "response", for the error message.
    """
    for result in results:
        if isinstance(result, Tensor) and result.shape == like.shape:
            continue
        actual = list(result.shape) if isinstance(result, Tensor) else result
        raise InputError(
            f"algorithm.{key}={config.algorithm[key]} must return one number per {unit}, shape "
            f"{list(like.shape)}, not {actual}"
        )


def check_pair(config: DictConfig, key: str, result: Any, second: type, expected: str) -> None:
    """Raise InputError unless the function of algorithm.{key} returned a pair.

    second: the type of the second value. expected: a description of both, for the error message.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[1], second):
        raise InputError(f"algorithm.{key}={config.algorithm[key]} must return a pair: {expected}")
