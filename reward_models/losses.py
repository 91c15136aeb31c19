"""The loss of a step, on the scores of its conversations."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from algorithms.packed import sum_by_sequence
from algorithms.reward_losses import REWARD_LOSSES
from common import plugins
from config import InputError
from data.batching.batch import Batch

KEY = "algorithm.loss"
CENTER = "algorithm.center_rewards_coefficient"


@dataclass(frozen=True, kw_only=True)
class PairInputs:
    """The inputs that a loss of pairs may read: [n] fp32, see algorithms/reward_losses.py."""

    chosen_scores: Tensor
    rejected_scores: Tensor
    margins: Tensor


@dataclass(frozen=True, kw_only=True)
class AnswerInputs:
    """The inputs that a loss of single answers may read: [n] fp32."""

    scores: Tensor
    targets: Tensor


def names_of(inputs: type) -> set[str]:
    return {field.name for field in dataclasses.fields(inputs)}


PAIR_NAMES = names_of(PairInputs)
ANSWER_NAMES = names_of(AnswerInputs)
NAMES = {"pairs": PAIR_NAMES, "single answers": ANSWER_NAMES}


@dataclass(frozen=True)
class RewardLoss:
    """The function that algorithm.loss names, and what it reads.

    Attributes:
        name: the value of algorithm.loss.
        function: the function, with its own parameters bound.
        reads: the names of the inputs that it reads.
        center: algorithm.center_rewards_coefficient.
    """

    name: str
    function: Callable
    reads: frozenset[str]
    center: float

    @classmethod
    def of(cls, config: DictConfig) -> "RewardLoss":
        """Find the function. Raises InputError if its parameters do not fit these inputs."""
        algorithm = config.algorithm
        name = algorithm.loss
        reads = plugins.parameters(plugins.find(KEY, name, REWARD_LOSSES))
        vocabulary = NAMES[plugins.inputs_of_one_kind(KEY, name, reads, NAMES)]
        function = plugins.find(
            KEY,
            name,
            REWARD_LOSSES,
            vocabulary,
            "algorithm.loss_kwargs",
            algorithm.loss_kwargs,
        )
        center = algorithm.center_rewards_coefficient
        if center and vocabulary is ANSWER_NAMES:
            raise InputError(
                f"{CENTER}={center} does nothing with {KEY}={name}, which learns from single "
                "answers: leave it out"
            )
        return cls(name, function, frozenset(reads & vocabulary), center)

    @property
    def takes_pairs(self) -> bool:
        return bool(self.reads & PAIR_NAMES)

    def of_batch(self, counts: "Counts") -> Callable:
        """Return the loss function of a batch, for Engine.train_batch() with a value head.

        It returns the contribution of one micro-batch. The contributions add up to the mean over
        the whole batch, and so do the metrics.

        Args:
            counts: the rows and conversations of the whole batch, over all ranks.
        """

        def loss_fn(values: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            scored = Scored.of(values, fields, counts.num_rows)
            parts = self._of_pairs(scored) if self.takes_pairs else self._of_answers(scored)
            is_counted = scored.is_present.any(1)
            sums = {name: torch.where(is_counted, part, 0).sum() for name, part in parts.items()}
            amounts = {name: amount / counts.num_rows for name, amount in sums.items()}
            loss = amounts.pop("loss")
            amounts = {name: amount.detach() for name, amount in amounts.items()}
            total = torch.where(scored.is_present, scored.scores.detach(), 0).sum()
            amounts["mean_reward"] = total / counts.num_conversations
            return loss, amounts

        return loss_fn

    def _of_pairs(self, scored: "Scored") -> dict[str, Tensor]:
        """Return the loss and the metrics of each pair, [n] each."""
        chosen, rejected = scored.scores.unbind(1)
        inputs = PairInputs(
            chosen_scores=chosen, rejected_scores=rejected, margins=scored.targets[:, 0]
        )
        losses = self._call(inputs, "pair")
        if self.center:
            losses = losses + self.center * (chosen + rejected) ** 2
        return {
            "loss": losses,
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
        }

    def _of_answers(self, scored: "Scored") -> dict[str, Tensor]:
        """Return the loss and the error of each row's only answer, [n] each."""
        scores = scored.scores[:, 0]
        targets = scored.targets[:, 0]
        losses = self._call(AnswerInputs(scores=scores, targets=targets), "answer")
        return {"loss": losses, "mean_absolute_error": (scores - targets).abs()}

    def _call(self, inputs: PairInputs | AnswerInputs, unit: str) -> Tensor:
        """Call the function, and check that it returns one loss per pair or answer."""
        arguments = {name: getattr(inputs, name) for name in names_of(type(inputs))}
        losses: Any = self.function(**arguments)
        shape = next(iter(arguments.values())).shape
        if not isinstance(losses, Tensor) or losses.shape != shape:
            actual = list(losses.shape) if isinstance(losses, Tensor) else losses
            raise InputError(
                f"{KEY}={self.name} must return one loss per {unit}, shape {list(shape)}, not "
                f"{actual}"
            )
        return losses


# -- the conversations of a batch ------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """The rows and the conversations of a whole batch, over all ranks."""

    num_rows: int
    num_conversations: int

    @classmethod
    def of(cls, batch: Batch) -> "Counts":
        """Count the rows and conversations of a batch with the field `answer`."""
        return cls(int(batch.fields["answer"].max()) // 2 + 1, len(batch))


@dataclass(frozen=True)
class Scored:
    """The scores of a micro-batch and their targets; [n, 2] for the n rows of its batch.

    Column 0 is for chosen or single answers, and column 1 for rejected ones. Entries for answers
    that are not in the micro-batch are 0.

    scores      fp32, with gradient
    targets     fp32: the margin of a pair, or the score of a row
    is_present  bool
    """

    scores: Tensor
    targets: Tensor
    is_present: Tensor

    @classmethod
    def of(cls, values: Tensor, fields: dict[str, Tensor], num_rows: int) -> "Scored":
        """Pick the values, [T], of the tokens with fields["loss_mask"]: one per conversation."""
        mask = fields["loss_mask"]

        def pick(x: Tensor) -> Tensor:
            inside = torch.where(mask > 0, x, 0)
            return sum_by_sequence(inside, fields["answer"], 2 * num_rows).view(num_rows, 2)

        return cls(pick(values), pick(fields["target"].to(values.dtype)), pick(mask) > 0)
