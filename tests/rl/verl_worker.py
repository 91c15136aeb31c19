"""Compute losses and advantages with verl, for comparison:

    PYTHONPATH=.venv/verl python tests/rl/verl_worker.py SETTINGS

SETTINGS is a JSON file:

    batch   the fields of Batch. The numbers of tokens are those of sampled tokens, in order
    cases   name -> {"kind": one of KINDS, and what its function reads}

Prints a JSON object: "names", what verl offers, kind of function -> names, and "results", the name
of a case -> name -> numbers. Everything is computed in float64.
"""

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoTokenizer
from verl import DataProto
from verl.trainer.distillation import losses as distillation
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import tensordict_utils
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    DistillationConfig,
    DistillationLossConfig,
    PolicyLossConfig,
)
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.utils.losses import ppo_loss, value_loss

Numbers = dict[str, float | list[float]]


@dataclass
class Batch:
    """Responses of different lengths, padded at the end.

    texts      of each response: one character per token, x if the policy sampled it, otherwise .
    scores     of each response
    baselines  the score of the greedy response to its prompt
    parts      name -> the part of each score
    tokens     name -> the number of each sampled token
    """

    texts: list[str]
    scores: list[float]
    baselines: list[float]
    parts: dict[str, list[float]]
    tokens: dict[str, list[float]]

    def __post_init__(self):
        longest = max(map(len, self.texts))
        padded_texts = "".join(text.ljust(longest) for text in self.texts)
        is_sampled = [float(character == "x") for character in padded_texts]
        self.mask = torch.tensor(is_sampled, dtype=torch.float64).view(-1, longest)
        self.lengths = torch.tensor([len(text) for text in self.texts])
        # 1 on all tokens of responses, sampled or not.
        self.attention_mask = (torch.arange(longest) < self.lengths[:, None]).long()

    def padded(self, name: str) -> Tensor:
        """Return the numbers of the tokens, [n, longest], 0 where nothing was sampled."""
        numbers = torch.tensor(self.tokens[name], dtype=torch.float64)
        return torch.zeros_like(self.mask).masked_scatter(self.mask > 0, numbers)

    def sampled(self, padded: Tensor) -> list[float]:
        """Return the numbers of the sampled tokens."""
        return padded[self.mask > 0].tolist()

    def rewards(self, turns: Iterable[tuple[int, int, float]] = ()) -> Tensor:
        """Return the rewards of the tokens: a response's last token has what remains of its score.

        turns: the response and the position of a token, and its reward.
        """
        rewards = torch.zeros_like(self.mask)
        for response, position, reward in turns:
            rewards[response, position] = reward
        remaining = torch.tensor(self.scores, dtype=torch.float64) - rewards.sum(1)
        return rewards.scatter(1, self.lengths[:, None] - 1, remaining[:, None])


def model_output(padded: Tensor, batch: Batch) -> Tensor:
    """Return the numbers as a model does that reads packed sequences with prompts of one token.

    The number of a token is at the place of the token before it. The last one has no successor.
    """
    end = padded.new_zeros(1)
    sequences = [torch.cat([row[:length], end]) for row, length in zip(padded, batch.lengths)]
    return torch.cat(sequences)


def model_input(batch: Batch, **fields: Tensor) -> TensorDict:
    """Return a mini-batch as verl's workers pass it to their losses."""
    n = len(batch.texts)
    prompts = torch.ones(n, 1, dtype=torch.int64)
    response_mask = fields.setdefault("response_mask", batch.mask)
    fields |= {
        "prompts": prompts,
        "responses": batch.attention_mask,
        "attention_mask": torch.cat([prompts, batch.attention_mask], 1),
    }
    data = TensorDict(fields, batch_size=[n])
    num_tokens = response_mask.sum().item()
    tensordict_utils.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=num_tokens, global_batch_size=n
    )
    return data


def advantages_of(case: dict, batch: Batch) -> Numbers:
    """Compute the advantages and returns of an estimator.

    estimator  its name
    group      the prompt of each response
    options    verl's settings below `algorithm`
    kl         None, or the name and the coefficient of the KL penalty in the rewards
    turns      as in Batch.rewards()
    """
    rewards = batch.rewards(case["turns"])
    if case["kl"] is not None:
        name, coefficient = case["kl"]
        divergence = core_algos.kl_penalty(
            batch.padded("old_log_probs"), batch.padded("ref_log_probs"), name
        )
        rewards = rewards - coefficient * divergence * batch.mask
    options = case["options"]
    arguments = {
        "token_level_rewards": rewards,
        "response_mask": batch.mask,
        "index": np.array(case["group"]),
        "config": OmegaConf.create(options),
        "reward_baselines": torch.tensor(batch.baselines, dtype=torch.float64),
        "values": batch.padded("values"),
        "non_tensor_batch": batch.parts,
        "batch": model_input(batch),
        "lam": options["lam"],
        "gamma": options["gamma"],
        "norm_adv_by_std_in_grpo": options["norm_adv_by_std_in_grpo"],
    }
    estimator = core_algos.get_adv_estimator_fn(case["estimator"])
    advantages, returns = estimator(**accepted(estimator, arguments))
    return {"advantages": batch.sampled(advantages), "returns": batch.sampled(returns)}


def accepted(function: Callable, arguments: dict) -> dict:
    """Return the arguments that a function names."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def policy_loss_of(case: dict, batch: Batch) -> Numbers:
    """Compute the loss of the actor and its derivatives, with the advantages of Dr. GRPO.

    group        the prompt of each response
    actor        verl's settings below `actor_rollout_ref.actor`
    policy_loss  those below `actor_rollout_ref.actor.policy_loss`
    correction   those below `algorithm.rollout_correction`
    """
    correction = case["correction"]
    old_log_probs = batch.padded("old_log_probs")
    rollout_log_probs = batch.padded("rollout_log_probs")
    is_bypass = case["policy_loss"]["loss_mode"] == "bypass_mode"
    if is_bypass:
        old_log_probs = rollout_log_probs
    weights, mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        old_log_probs, rollout_log_probs, batch.mask, **({} if is_bypass else correction)
    )
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        batch.rewards(), mask, np.array(case["group"]), norm_adv_by_std_in_grpo=False
    )
    data = model_input(
        batch,
        response_mask=mask,
        old_log_probs=old_log_probs,
        ref_log_prob=batch.padded("ref_log_probs"),
        advantages=advantages,
    )
    if weights is not None:
        data["rollout_is_weights"] = weights.batch["rollout_is_weights"]
    policy_loss = PolicyLossConfig(**case["policy_loss"], rollout_correction=correction)
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=policy_loss, **case["actor"]
    )
    log_probs = batch.padded("log_probs").requires_grad_()
    entropy = batch.padded("entropy").requires_grad_()
    output = {
        "log_probs": model_output(log_probs, batch),
        "entropy": model_output(entropy, batch),
    }
    loss, loss_metrics = ppo_loss(config, output, data)
    loss.backward()
    if is_bypass:
        metrics = {name: metric.aggregate() for name, metric in loss_metrics.items()}
    prefix = "rollout_corr/"
    return {
        "loss": loss.item(),
        "log_probs_gradient": batch.sampled(log_probs.grad),
        "entropy_gradient": batch.sampled(entropy.grad),
        "mask": batch.sampled(mask),
        **{name.removeprefix(prefix): value for name, value in metrics.items()},
    }


def value_loss_of(case: dict, batch: Batch) -> Numbers:
    """Compute the loss of the critic, its derivatives, and the share of clipped tokens."""
    values = batch.padded("new_values").requires_grad_()
    data = model_input(batch, values=batch.padded("values"), returns=batch.padded("returns"))
    config = CriticConfig(strategy="fsdp", use_dynamic_bsz=True, **case["critic"])
    loss, metrics = value_loss(config, {"values": model_output(values, batch)}, data)
    loss.backward()
    return {
        "loss": loss.item(),
        "gradient": batch.sampled(values.grad),
        "clipped": metrics["critic/vf_clipfrac"],
    }


def kl_of(case: dict, batch: Batch) -> Numbers:
    """Compute an estimate of the KL divergence, and the derivative at each token."""
    log_probs = batch.padded("log_probs").requires_grad_()
    divergence = core_algos.kl_penalty(log_probs, batch.padded("ref_log_probs"), case["name"])
    (gradient,) = torch.autograd.grad(divergence.sum(), log_probs)
    return {"divergence": batch.sampled(divergence), "gradient": batch.sampled(gradient)}


def kl_coefficients_of(case: dict, batch: Batch) -> Numbers:
    """Compute the coefficients of the KL penalty after steps with the given divergences."""
    controller = core_algos.get_kl_controller(OmegaConf.create(case["control"]))
    coefficients = []
    for divergence in case["divergences"]:
        controller.update(divergence, case["num_responses"])
        coefficients.append(float(controller.value))
    return {"coefficients": coefficients}


def overlong_scores_of(case: dict, batch: Batch) -> Numbers:
    """Compute the scores with DAPO's penalty for responses close to the longest one.

    tokenizer  directory of a tokenizer
    buffer     verl's settings below `overlong_buffer_cfg`
    """
    score_of_text = dict(zip(batch.texts, batch.scores))
    manager = DAPORewardManager(
        AutoTokenizer.from_pretrained(case["tokenizer"]),
        num_examine=0,
        compute_score=lambda ground_truth, **_: score_of_text[ground_truth],
        max_resp_len=batch.mask.shape[1],
        overlong_buffer_cfg=OmegaConf.create(case["buffer"]),
    )
    data = DataProto.from_dict(
        {**model_input(batch).select("prompts", "responses", "attention_mask")},
        non_tensors={
            "reward_model": np.array([{"ground_truth": text} for text in batch.texts]),
            "data_source": np.array(["source"] * len(batch.texts)),
        },
    )
    return {"scores": manager(data).sum(1).tolist()}


def distillation_of(case: dict, batch: Batch) -> Numbers:
    """Compute KL(teacher || student) over the teacher's top_k tokens, and its derivatives.

    student, teacher  logits, [T, V]
    adds_rest         whether to add the term of all other tokens together, which verl leaves out
    """
    logits = torch.tensor(case["student"], dtype=torch.float64).requires_grad_()
    teacher_logits = torch.tensor(case["teacher"], dtype=torch.float64)
    top_k = case["top_k"]
    log_probs, token_ids = teacher_logits.log_softmax(-1).topk(top_k)
    loss_config = DistillationLossConfig(
        loss_mode="forward_kl_topk", topk=top_k, use_policy_gradient=False, log_prob_min_clamp=None
    )
    outputs = compute_forward_kl_topk(
        logits[None],
        torch.nested.as_nested_tensor([log_probs], layout=torch.jagged),
        torch.nested.as_nested_tensor([token_ids], layout=torch.jagged),
        DistillationConfig(distillation_loss=loss_config),
        data_format="thd",
    )
    divergence = outputs["distillation_losses"][0]
    if case["adds_rest"]:
        p = 1 - outputs["student_mass"][0]
        q = 1 - outputs["teacher_mass"][0]
        divergence = divergence + q * (q.log() - p.log())
    (gradient,) = torch.autograd.grad(divergence.sum(), logits)
    return {"divergence": divergence.tolist(), "gradient": gradient.flatten().tolist()}


KINDS = {
    "advantages": advantages_of,
    "policy loss": policy_loss_of,
    "value loss": value_loss_of,
    "KL": kl_of,
    "KL coefficients": kl_coefficients_of,
    "overlong scores": overlong_scores_of,
    "distillation": distillation_of,
}


def compared_texts(function: Callable) -> list[str]:
    """Return the texts that the code of a function compares something with."""
    tree = ast.parse(inspect.getsource(function))
    comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    constants = [
        node.value
        for comparison in comparisons
        for node in ast.walk(comparison)
        if isinstance(node, ast.Constant)
    ]
    return sorted({value for value in constants if isinstance(value, str)})


def offered_names() -> dict[str, list[str]]:
    """Return the names of verl's functions: from its registries, or from its code where it has
    none."""
    return {
        "policy losses": list(core_algos.POLICY_LOSS_REGISTRY),
        "estimators": list(core_algos.ADV_ESTIMATOR_REGISTRY),
        "aggregations": compared_texts(core_algos.agg_loss),
        "KL estimates": compared_texts(core_algos.kl_penalty_forward),
        "KL controls": compared_texts(core_algos.get_kl_controller),
        "rejections": sorted(rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS),
        "distillation": list(distillation.DISTILLATION_LOSS_REGISTRY),
    }


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    batch = Batch(**settings["batch"])
    results = {}
    for name, case in settings["cases"].items():
        results[name] = KINDS[case["kind"]](case, batch)
    print(json.dumps({"names": offered_names(), "results": results}))


if __name__ == "__main__":
    main()
