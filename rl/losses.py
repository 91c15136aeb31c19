"""The losses of actor and critic, on the fields that rl/estimation.py fills."""

import math

from omegaconf import DictConfig
from torch import Tensor

from algorithms.rollout_correction import correction_weights, moments_by_age, off_policy
from algorithms.value_loss import value_loss
from engines.base import LossFn
from rl.functions import PolicyLossInputs, call, check_pair, check_shapes, find_function

Fields = dict[str, Tensor]
Amounts = dict[str, Tensor]


class ActorLoss:
    """The policy loss, the entropy bonus, and the divergences from the reference and the teacher.

    Pass an instance to Engine.train_batch() as the loss function. It reads the fields that
    estimation.set_advantages() fills. If old_log_probs is missing, this is the only update of the
    step, and its own log-probabilities are the old ones. With a teacher, the engine provides the
    field divergence [T], which is differentiable.
    """

    def __init__(self, config: DictConfig, num_sequences: int):
        """num_sequences: the number of responses of this rank."""
        self.config = config
        self.num_sequences = num_sequences
        self.policy_loss = find_function(config, "loss_mode")
        self.divergence = find_function(config, "kl_loss_type")

    def __call__(
        self, log_probs: Tensor, entropy: Tensor, fields: Fields
    ) -> tuple[Tensor, Amounts]:
        """Return a micro-batch's loss and its contribution to each metric, a sum over ranks."""
        algorithm = self.config.algorithm
        old_log_probs = fields.get("old_log_probs", log_probs.detach())
        loss_weight = fields["loss_weight"]
        token_weight = fields["token_weight"]
        # Rejected tokens are left out of the ratio of their sequence, too.
        mask = (token_weight > 0).float()
        loss = log_probs.new_zeros(())
        amounts = {}
        if not algorithm.distill.only:
            losses, metrics = self.policy_losses(log_probs, entropy, old_log_probs, mask, fields)
            if algorithm.rollout_is != "none":
                losses = losses * self.importance_weights(old_log_probs, fields)
            loss = (losses * loss_weight).sum()
            amounts = {name: (x * token_weight).sum() for name, x in metrics.items()}
            amounts["pg_loss"] = loss
        amounts["entropy"] = (entropy.detach() * token_weight).sum()
        amounts["ppo_kl"] = ((old_log_probs - log_probs) * token_weight).sum()
        if algorithm.entropy_coeff:
            loss = loss - algorithm.entropy_coeff * (entropy * loss_weight).sum()
        if algorithm.use_kl_loss:
            divergence = self.reference_divergence(log_probs, fields["ref_log_probs"])
            amounts["kl_loss"] = (divergence * loss_weight).sum()
            loss = loss + algorithm.kl_loss_coef * amounts["kl_loss"]
        if "divergence" in fields:
            divergence = fields["divergence"]
            amounts |= self.divergence_amounts(divergence.detach() * token_weight, fields)
            loss = loss + algorithm.distill.coef * (divergence * loss_weight).sum()
        if "old_log_probs" not in fields:
            # Otherwise set_advantages() has reported these, including the rejected tokens.
            gaps = off_policy(old_log_probs, fields["rollout_log_probs"], mask)
            if "age" in fields:
                max_age = self.config.rollout.partial.max_staleness
                gaps |= moments_by_age(gaps, fields["age"], mask, max_age)
            amounts |= {
                f"rollout_corr/{name}": (x * token_weight).sum() for name, x in gaps.items()
            }
        return loss, amounts

    def divergence_amounts(self, divergence: Tensor, fields: Fields) -> Amounts:
        """Return the metrics of the weighted divergences [T], also for each of several teachers.

        rl/teacher.py divides each teacher's divergence by its share of the tokens.
        """
        amounts = {"distill/divergence": divergence.sum()}
        for number, name in enumerate(self.config.algorithm.distill.teachers):
            is_taught = fields["teacher_number"] == number
            amounts[f"distill/divergence/{name}"] = (divergence * is_taught).sum()
            amounts[f"distill/share/{name}"] = (fields["token_weight"] * is_taught).sum()
        return amounts

    def policy_losses(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        fields: Fields,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy loss of each token [T], and metrics of each token, [T] each."""
        algorithm = self.config.algorithm
        inputs = PolicyLossInputs(
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=old_log_probs,
            advantages=fields["advantages"],
            mask=mask,
            sequence=fields["sequence"],
            num_sequences=self.num_sequences,
            clip_low=algorithm.clip_ratio_low,
            clip_high=algorithm.clip_ratio_high,
            dual_clip=algorithm.clip_ratio_c,
            returns=fields.get("returns"),
            values=fields.get("values"),
            ref_log_probs=fields.get("ref_log_probs"),
            rollout_log_probs=fields.get("rollout_log_probs"),
            group=fields.get("group"),
            scores=fields.get("scores"),
        )
        result = call(self.policy_loss, inputs)
        check_pair(self.config, "loss_mode", result, dict, "losses and a dictionary of metrics")
        losses, metrics = result
        check_shapes(self.config, "loss_mode", log_probs, losses, *metrics.values())
        return losses, metrics

    def importance_weights(self, old_log_probs: Tensor, fields: Fields) -> Tensor:
        """Return the weights [T] that correct for vLLM's sampling.

        The ratio of a sequence covers all its tokens: rejection removes tokens from the loss, but
        not from the response that vLLM sampled.
        """
        algorithm = self.config.algorithm
        return correction_weights(
            old_log_probs,
            fields["rollout_log_probs"],
            fields["loss_mask"],
            fields["sequence"],
            self.num_sequences,
            level=algorithm.rollout_is,
            threshold=algorithm.rollout_is_threshold,
            lower=algorithm.rollout_is_threshold_lower,
        )

    def reference_divergence(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """Return the estimated divergence from the reference at each token [T]."""
        divergence = self.divergence(log_probs=log_probs, ref_log_probs=ref_log_probs)
        check_shapes(self.config, "kl_loss_type", log_probs, divergence)
        return divergence


def critic_loss(config: DictConfig) -> LossFn:
    """Return the clipped value loss, which reads the fields values, returns and token_weight."""
    clip_range = config.critic.cliprange_value or math.inf

    def loss_fn(values: Tensor, fields: Fields) -> tuple[Tensor, Amounts]:
        losses, clipped = value_loss(values, fields["values"], fields["returns"], clip_range)
        loss = (losses * fields["token_weight"]).sum()
        clipped_share = (clipped * fields["token_weight"]).sum()
        return loss, {"vf_loss": loss, "vf_clipfrac": clipped_share}

    return loss_fn
