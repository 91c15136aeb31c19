"""The functions that the configuration names, and the inputs that each of them may read.

Each of five keys of `algorithm` names a function: a built-in one, or one in the user's own file
(docs/forking.md). The fields of the input classes below are the vocabulary: a function names the
fields that it reads as parameters, and takes the rest as **_.

Naming an input also requests it: `values` in an advantage estimator or a policy loss asks for a
critic, `ref_log_probs` for a reference model, `baseline` in an estimator for greedy responses, and
`old_log_probs` in an estimator for the pass that computes them. What no function names is not
computed, and a configuration key that no function reads is an error (rl/settings.py).

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
    """Declare an input that covers only the tokens of one rank, not all responses of the step."""
    return dataclasses.field(metadata={"per_token": True}, **options)


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an advantage estimator may read.

    rewards            [T] fp32: the outcome, on the last token of each response
    mask               [T] fp32: 1 on the tokens that the model sampled
    sequence           [T] int64: the response of each token, in 0..n-1
    group              [n] int64: the prompt of each response
    values             [T] fp32: the critic's values before the update
    baseline           [n] fp32: the score of the greedy response to the same prompt
    old_log_probs      [T] fp32: the actor's, before the update
    ref_log_probs      [T] fp32: the reference model's
    rollout_log_probs  [T] fp32: vLLM's
    outcome            [n] fp32: the score, minus the penalties that are configured
    lengths            [n] int64: response tokens
    num_sequences      n
    total              x [T] -> scalar float64: the sum over the response tokens of all ranks
    gamma, lam         algorithm.gamma and algorithm.lam

    An estimator that names an input of the tokens ([T], or total) returns advantages and returns
    of the tokens, [T] each; any other returns those of the responses, [n] each.
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
    num_sequences: int
    total: Total = per_token()
    gamma: float
    lam: float


@dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """What a policy loss may read, for one micro-batch.

    log_probs, entropy  [T] fp32, with gradient
    old_log_probs       [T] fp32: those before the update, or log_probs itself (without gradient)
                        where this is the only update
    advantages, returns [T] fp32
    mask                [T] fp32: 1 on the response tokens that were not rejected
    sequence            [T] int64: the response of each token, in 0..num_sequences-1
    num_sequences       responses of this rank
    clip_low, clip_high, dual_clip   algorithm.clip_ratio_low, _high and _c
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
    """What an aggregation of the losses may read, for one mini-batch.

    lengths     [n] fp32: the tokens of each response that count; 0 outside the mini-batch
    max_tokens  rollout.max_tokens
    """

    lengths: Tensor
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class DivergenceInputs:
    """What an estimate of the divergence from the reference may read: both [T] fp32."""

    log_probs: Tensor
    ref_log_probs: Tensor


Inputs = AdvantageInputs | PolicyLossInputs | AggregationInputs | DivergenceInputs


@dataclass(frozen=True)
class FunctionKey:
    """A key of `algorithm` that names a function.

    built_in    the functions that can be named without a file
    inputs      the class whose fields a function may name as parameters
    kwargs_key  the key of `algorithm` that holds a function's own parameters, if it may have any
    """

    built_in: Mapping[str, Callable]
    inputs: type
    kwargs_key: str | None = None

    @property
    def vocabulary(self) -> list[str]:
        """The names of the inputs."""
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

    Raises InputError if there is no such function, or if it cannot be called with its inputs.
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
    """Return the parameters that the configured functions of these keys name."""
    names: set[str] = set()
    for key in keys:
        names |= plugins.parameters(find_function(config, key))
    return names


def built_in_readers(key: str, input_name: str) -> list[str]:
    """Return the names of the built-in functions of algorithm.{key} that read an input."""
    return [
        name
        for name, function in FUNCTIONS[key].built_in.items()
        if input_name in plugins.parameters(function)
    ]


def reads_tokens(config: DictConfig) -> set[str]:
    """Return the inputs per token that the estimator names; if any, it works on tokens."""
    fields = dataclasses.fields(AdvantageInputs)
    token_inputs = {field.name for field in fields if field.metadata.get("per_token")}
    return inputs_read(config, "adv_estimator") & token_inputs


def call(function: Callable, inputs: Inputs) -> Any:
    """Call a function with all inputs that exist (are not None), by name."""
    fields = dataclasses.fields(inputs)
    arguments = {field.name: getattr(inputs, field.name) for field in fields}
    return function(**{name: value for name, value in arguments.items() if value is not None})


def check_shapes(
    config: DictConfig, key: str, like: Tensor, *results: Any, unit: str = "token"
) -> None:
    """Raise InputError unless the function of algorithm.{key} returned tensors shaped as `like`.

    results: its tensors. unit: "token" or "response", for the message. A broadcast would hide the
    mistake.
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

    second: the type of its second part. expected: what the two parts are, for the message.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[1], second):
        raise InputError(
            f"algorithm.{key}={config.algorithm[key]} must return two things, {expected}"
        )
