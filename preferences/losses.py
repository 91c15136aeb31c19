"""The loss of a step, on the sums of log-probabilities over each answer."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from algorithms.packed import sum_by_sequence
from algorithms.preference_losses import PREFERENCE_LOSSES
from common import plugins
from config import InputError
from data.batching.batch import Batch
from engines.base import LossFn

KEY = "algorithm.loss"
OWN_KEYS = ("beta", "label_smoothing")  # keys of `algorithm` that are parameters of the loss
KTO_WEIGHTS = ("desirable_weight", "undesirable_weight")


@dataclass(frozen=True, kw_only=True)
class PairInputs:
    """The inputs that a loss of pairs may read: [n] fp32, see algorithms/preference_losses.py.

    The first four have gradients. Naming a log-ratio requests the reference model.
    """

    chosen_log_probs: Tensor
    rejected_log_probs: Tensor
    chosen_log_ratios: Tensor | None
    rejected_log_ratios: Tensor | None
    chosen_lengths: Tensor
    rejected_lengths: Tensor


@dataclass(frozen=True, kw_only=True)
class AnswerInputs:
    """The inputs that a loss of single answers may read: [n] fp32, except for is_chosen and kl.

    log_probs and log_ratios have gradients. Naming log_ratios requests the reference model. Naming
    kl requests it too, and passes of both models over answers to other prompts.
    """

    log_probs: Tensor
    log_ratios: Tensor | None
    lengths: Tensor
    is_chosen: Tensor
    kl: Tensor | None


Inputs = PairInputs | AnswerInputs


def names_of(inputs: type) -> set[str]:
    return {field.name for field in dataclasses.fields(inputs)}


PAIR_NAMES = names_of(PairInputs)
ANSWER_NAMES = names_of(AnswerInputs)
NAMES = {"pairs": PAIR_NAMES, "single answers": ANSWER_NAMES}
READS_REFERENCE = {"chosen_log_ratios", "rejected_log_ratios", "log_ratios", "kl"}


@dataclass(frozen=True)
class PreferenceLoss:
    """The function that algorithm.loss names, and what it reads.

    Attributes:
        name: the value of algorithm.loss.
        function: the function, with its own parameters bound.
        reads: the names of the inputs that it reads.
        sft_coef: algorithm.sft_coef.
    """

    name: str
    function: Callable
    reads: frozenset[str]
    sft_coef: float

    @classmethod
    def of(cls, config: DictConfig) -> "PreferenceLoss":
        """Find the function. Raises InputError if its parameters do not fit these inputs."""
        algorithm = config.algorithm
        name = algorithm.loss
        raw = plugins.find(KEY, name, PREFERENCE_LOSSES)
        reads = plugins.parameters(raw)
        vocabulary = NAMES[plugins.inputs_of_one_kind(KEY, name, reads, NAMES)]
        kwargs = own_parameters(algorithm, name, reads)
        if name == "kto":
            check_kto_weights(kwargs)
        function = plugins.find(
            KEY, name, PREFERENCE_LOSSES, vocabulary, "algorithm.loss_kwargs", kwargs
        )
        return cls(name, function, frozenset(reads & vocabulary), algorithm.sft_coef)

    @property
    def takes_pairs(self) -> bool:
        return bool(self.reads & PAIR_NAMES)

    @property
    def needs_reference(self) -> bool:
        return bool(self.reads & READS_REFERENCE)

    @property
    def needs_kl(self) -> bool:
        return "kl" in self.reads

    def of_batch(self, counts: "AnswerCounts", kl: Tensor | None = None) -> LossFn:
        """Return the loss function of a batch, for Engine.train_batch().

        It returns the contribution of one micro-batch. The contributions add up to the mean over
        the whole batch, and so do the metrics.

        Args:
            counts: the answers of the whole batch, over all ranks.
            kl: see AnswerInputs.
        """

        def loss_fn(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]):
            answers = Answers.of(log_probs, fields, counts.num_rows)
            if self.takes_pairs:
                losses, rewards, is_right = self._of_pairs(answers)
                is_counted = answers.is_present.all(1)
            else:
                losses, rewards, is_right = self._of_answers(answers, kl)
                is_counted = answers.is_present
            num_losses = counts.num_losses(self.takes_pairs)
            loss = torch.where(is_counted, losses, 0).sum() / num_losses
            amounts = reward_metrics(answers, rewards.detach(), counts)
            amounts["rewards/accuracies"] = torch.where(is_counted, is_right, 0).sum() / num_losses
            if self.sft_coef and counts.num_chosen:
                amounts["sft_loss"] = sft_loss(answers, counts)
                loss = loss + self.sft_coef * amounts["sft_loss"]
            return loss, amounts

        return loss_fn

    def _of_pairs(self, answers: "Answers") -> tuple[Tensor, Tensor, Tensor]:
        """Return losses [n], rewards [n, 2], and whether the chosen reward is larger [n] fp32."""
        ratios = answers.log_ratios
        inputs = PairInputs(
            chosen_log_probs=answers.log_probs[:, 0],
            rejected_log_probs=answers.log_probs[:, 1],
            chosen_log_ratios=None if ratios is None else ratios[:, 0],
            rejected_log_ratios=None if ratios is None else ratios[:, 1],
            chosen_lengths=answers.lengths[:, 0],
            rejected_lengths=answers.lengths[:, 1],
        )
        result = self._call(inputs, ("losses", "chosen rewards", "rejected rewards"))
        self._check_shapes(inputs.chosen_lengths, *result)
        losses, chosen, rejected = result
        return losses, torch.stack([chosen, rejected], 1), (chosen > rejected).float()

    def _of_answers(self, answers: "Answers", kl: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses, rewards, and whether rewards are on the right side of the baseline.

        All are [n, 2]. A chosen answer's reward should be above the baseline, a rejected one's not.
        """
        shape = answers.log_probs.shape
        column = torch.arange(2, device=answers.log_probs.device)
        is_chosen = (column == 0).expand(shape)
        ratios = answers.log_ratios
        inputs = AnswerInputs(
            log_probs=answers.log_probs.flatten(),
            log_ratios=None if ratios is None else ratios.flatten(),
            lengths=answers.lengths.flatten(),
            is_chosen=is_chosen.flatten(),
            kl=kl,
        )
        losses, rewards, baseline = self._call(inputs, ("losses", "rewards", "baseline"))
        self._check_shapes(inputs.log_probs, losses, rewards)
        is_right = (rewards > baseline) == inputs.is_chosen
        return losses.view(shape), rewards.view(shape), is_right.float().view(shape)

    def _call(self, inputs: Inputs, returned: tuple[str, ...]) -> tuple:
        """Call the function with the inputs that it reads, and check the number of results."""
        values = {name: getattr(inputs, name) for name in names_of(type(inputs))}
        arguments = {name: value for name, value in values.items() if value is not None}
        result = self.function(**arguments)
        if not isinstance(result, tuple) or len(result) != len(returned):
            raise InputError(f"{KEY}={self.name} must return {', '.join(returned)}")
        return result

    def _check_shapes(self, like: Tensor, *results: Any) -> None:
        for result in results:
            if not isinstance(result, Tensor) or result.dim() != 1 or len(result) != len(like):
                unit = "pair" if self.takes_pairs else "answer"
                actual = list(result.shape) if isinstance(result, Tensor) else result
                raise InputError(
                    f"{KEY}={self.name} must return one loss and reward per {unit}, shape "
                    f"[{len(like)}], not {actual}"
                )


def own_parameters(algorithm: DictConfig, name: str, reads: set[str]) -> dict[str, Any]:
    """Return the values of a loss's own parameters: algorithm.loss_kwargs and the keys OWN_KEYS.

    Raises InputError for a key that is set although the loss does not have this parameter.
    """
    kwargs = OmegaConf.to_container(algorithm.loss_kwargs)
    for key in OWN_KEYS:
        value = algorithm[key]
        if key in kwargs:
            raise InputError(f"algorithm.loss_kwargs.{key}: set algorithm.{key} instead")
        if value is None:
            continue
        if key not in reads:
            raise InputError(
                f"algorithm.{key}={value} does nothing with {KEY}={name}, which has no parameter "
                f"{key}: leave it out"
            )
        kwargs[key] = value
    return kwargs


def check_kto_weights(kwargs: dict[str, Any]) -> None:
    """Raise InputError if a weight of kto is negative, or if both are 0."""
    weights = {name: kwargs.get(name, 1.0) for name in KTO_WEIGHTS}
    for name, weight in weights.items():
        is_number = isinstance(weight, (int, float))  # plugins.find() reports other types
        if is_number and weight < 0:
            raise InputError(
                f"algorithm.loss_kwargs.{name}={weight} must be at least 0: a negative weight "
                "would teach the opposite of the labels"
            )
    if all(weight == 0 for weight in weights.values()):
        settings = " and ".join(f"algorithm.loss_kwargs.{name}=0" for name in weights)
        raise InputError(f"{settings} teach nothing: set at least one of them above 0")


# -- the answers of a batch ------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerCounts:
    """The answers of a whole batch, over all ranks: rows, and answers of each kind."""

    num_rows: int
    num_chosen: int
    num_rejected: int

    @classmethod
    def of(cls, batch: Batch) -> "AnswerCounts":
        """Count the answers of a batch with the field `answer`."""
        answers = batch.fields["answer"][batch.cu_seqlens[:-1]]
        num_rejected = int((answers % 2).sum())
        num_rows = int(answers.max()) // 2 + 1
        return cls(num_rows, len(answers) - num_rejected, num_rejected)

    def num_losses(self, takes_pairs: bool) -> int:
        """Return the number of pairs, or of answers: the denominator of the loss."""
        return self.num_rows if takes_pairs else self.num_chosen + self.num_rejected


@dataclass(frozen=True)
class Answers:
    """Sums over the tokens of each answer of a micro-batch; all [n, 2] for the n rows of its batch.

    Column 0 is for chosen answers, and column 1 for rejected ones. Answers that are not in the
    micro-batch have harmless values without a gradient, since the loss function reads them too.

    log_probs   fp32, sums of log-probabilities; -1 for missing answers
    log_ratios  fp32, sums of differences to the reference; 0 for missing answers; None: there is no
                reference
    lengths     fp32, numbers of tokens; 1 for missing answers
    is_present  bool
    """

    log_probs: Tensor
    log_ratios: Tensor | None
    lengths: Tensor
    is_present: Tensor

    @classmethod
    def of(cls, log_probs: Tensor, fields: dict[str, Tensor], num_rows: int) -> "Answers":
        """Sum log-probabilities [T] over the tokens with fields["loss_mask"].

        Args:
            fields: loss_mask, answer (2 * row, plus 1 for a rejected answer), and ref_log_probs if
                there is a reference, [T] each.
            num_rows: the number of rows of the whole batch.
        """
        mask = fields["loss_mask"]

        def sum_by_answer(x: Tensor) -> Tensor:
            inside = torch.where(mask > 0, x, 0)
            return sum_by_sequence(inside, fields["answer"], 2 * num_rows).view(num_rows, 2)

        lengths = sum_by_answer(mask)
        is_present = lengths > 0
        log_ratios = None
        if "ref_log_probs" in fields:
            # Summing differences loses fewer digits than the difference of two large sums.
            log_ratios = sum_by_answer(log_probs - fields["ref_log_probs"])
        return cls(
            torch.where(is_present, sum_by_answer(log_probs), -1.0),
            log_ratios,
            lengths.clamp(min=1),
            is_present,
        )


def sft_loss(answers: Answers, counts: AnswerCounts) -> Tensor:
    """Return a micro-batch's part of the mean negative log-likelihood of the chosen answers.

    The mean is over the tokens of each answer, and then over answers. There must be some.
    """
    nll = -answers.log_probs[:, 0] / answers.lengths[:, 0]
    return torch.where(answers.is_present[:, 0], nll, 0).sum() / counts.num_chosen


def reward_metrics(answers: Answers, rewards: Tensor, counts: AnswerCounts) -> dict[str, Tensor]:
    """Return the contribution of a micro-batch to the means of rewards and log-probabilities.

    A batch of answers with labels may have answers of one kind only. The other kind then has no
    means, and there is no margin between the two.

    Args:
        rewards: [n, 2], as in Answers.
    """
    chosen, rejected = torch.where(answers.is_present, rewards, 0).sum(0)
    log_probs = torch.where(answers.is_present, answers.log_probs.detach(), 0).sum(0)
    amounts = {}
    if counts.num_chosen:
        amounts["rewards/chosen"] = chosen / counts.num_chosen
        amounts["logps/chosen"] = log_probs[0] / counts.num_chosen
    if counts.num_rejected:
        amounts["rewards/rejected"] = rejected / counts.num_rejected
        amounts["logps/rejected"] = log_probs[1] / counts.num_rejected
    if counts.num_chosen and counts.num_rejected:
        amounts["rewards/margins"] = amounts["rewards/chosen"] - amounts["rewards/rejected"]
    return amounts
