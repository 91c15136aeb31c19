"""The teachers of a student: their configurations, checks of their vocabularies, and their passes.

A teacher is a frozen model, or the student itself with another prompt ("self"). If there are
several, each sequence has one of them: the field teacher_number of a batch is its index.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from omegaconf import DictConfig, OmegaConf, read_write
from torch import Tensor, nn

from config import InputError, defaults
from data.batching.batch import Batch
from data.batching.plan import MicroBatches
from engines.base import Engine
from engines.divergence import Divergence, TeacherHead
from engines.model.experts import with_own_experts
from engines.teacher import Distillation, HiddenHead, TopKHead
from engines.teacher_settings import (
    distill_group,
    distill_settings,
    has_several,
    is_self_taught,
)

Parts = Sequence[tuple[Batch, MicroBatches]]


def teacher_config(config: DictConfig, path: str) -> DictConfig:
    """Return the configuration of a teacher: a model without adapters, MTP layers or freezing.

    Its weights may be divided over other numbers of ranks than the student's.
    """
    model = {
        "path": path,
        "freeze": [],
        "lora": defaults("model.lora"),
        "mtp": defaults("model.mtp"),
    }
    changes = {"model": model}
    fsdp_size = distill_settings(config).fsdp_size
    if fsdp_size is not None:
        changes["engine"] = {"fsdp_size": fsdp_size}
    # It has no teacher itself.
    return with_own_experts(OmegaConf.merge(without_teacher(config), changes))


def check_teacher_layout(config: DictConfig, world_size: int) -> None:
    """Raise InputError if the teacher cannot be divided as distill.fsdp_size says."""
    distill = distill_settings(config)
    if distill is None or distill.fsdp_size is None:
        return
    setting = f"{distill_group(config)}.fsdp_size={distill.fsdp_size}"
    if config.model_engine != "fsdp":
        raise InputError(
            f"{setting} does nothing with model_engine={config.model_engine}, where the teacher "
            "has the parallel groups of the student: leave it out"
        )
    if is_self_taught(config):
        raise InputError(f"{setting} does nothing if the teacher is the policy: leave it out")
    if distill.fsdp_size > 0 and world_size % distill.fsdp_size:
        raise InputError(
            f"{setting} does not divide the number of ranks, {world_size}: lower it, or start "
            "other ranks with torchrun --nproc-per-node"
        )


def without_teacher(config: DictConfig) -> DictConfig:
    """Return the configuration of a model of this run that has no teacher."""
    result = OmegaConf.merge(config, {})
    distill = distill_settings(result)
    with read_write(result):
        distill.teacher = None
        if "teachers" in distill:
            distill.teachers = {}
    return result


def check_vocabulary(
    config: DictConfig, name: str, path: str, num_tokens: int, num_teacher_tokens: int
) -> None:
    """Raise InputError for a teacher that does not share the student's vocabulary.

    The embeddings of both models may have further rows, which pad the vocabulary.

    Args:
        name: the setting that names the teacher, as key=value, for messages.
        path: the directory of the teacher.
        num_tokens, num_teacher_tokens: the rows in the embedding of each model.
    """
    student_vocabulary = vocabulary(config.model.path)
    teacher_vocabulary = vocabulary(path)
    if teacher_vocabulary is None or student_vocabulary is None:
        if num_tokens != num_teacher_tokens:
            lacking = name if teacher_vocabulary is None else f"model.path={config.model.path}"
            raise InputError(
                f"{name} has {num_teacher_tokens} tokens and model.path={config.model.path} has "
                f"{num_tokens}, and {lacking} has no tokenizer that explains the difference: "
                "choose models with the same vocabulary"
            )
        return
    for token_id in sorted(student_vocabulary.keys() & teacher_vocabulary.keys()):
        if student_vocabulary[token_id] != teacher_vocabulary[token_id]:
            raise InputError(
                f"{name} has another vocabulary than model.path={config.model.path}: token "
                f"{token_id} is {teacher_vocabulary[token_id]!r} in the teacher and "
                f"{student_vocabulary[token_id]!r} in the student. Choose models with the same "
                "vocabulary"
            )
    largest = max(student_vocabulary)
    if largest >= num_teacher_tokens:
        raise InputError(
            f"{name} has an embedding of {num_teacher_tokens} tokens and lacks the token "
            f"{student_vocabulary[largest]!r} ({largest}) of model.path={config.model.path}: "
            "choose models with the same vocabulary"
        )


def check_top_k(config: DictConfig, num_tokens: int) -> None:
    """Raise InputError if top_k exceeds the number of tokens that student and teacher share."""
    top_k = distill_settings(config).top_k
    key = f"{distill_group(config)}.top_k"
    if top_k > num_tokens:
        raise InputError(
            f"{key}={top_k} is more than the {num_tokens} tokens of the vocabulary: lower it, or "
            f"set {key}=0 for all tokens"
        )


def vocabulary(path: str) -> dict[int, str] | None:
    """Return token id -> token of the tokenizer in a directory; None if there is none.

    Raises:
        InputError: the tokenizers package cannot read its file.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return None
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers package raises this class itself
            raise
        raise InputError(f"cannot read the tokenizer of {path}: {error}") from None
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


class Teachers:
    """The engines of the teachers, and their results for the current step.

    engines    compute the teachers' outputs, in the order of their numbers; for "self", the
               student's engine
    offloaded  the parts that are moved to host memory while a teacher is not used
    num_tokens  the number of tokens that the student and all teachers have
    matrices   the output matrix [V, h] of each teacher, on the device, from compute() to the end of
               the update; empty with top_k
    """

    def __init__(
        self, config: DictConfig, engines: Sequence[Engine], student: Engine, offloaded: list[str]
    ) -> None:
        """
        Args:
            config: the configuration of the run.
            engines: the teachers' engines; none if the student teaches itself.
            student: the student's engine.
            offloaded: see above; ignored if the student teaches itself.
        """
        self.settings = distill_settings(config)
        self.is_self = not engines
        self.engines = list(engines) or [student]
        self.offloaded = [] if self.is_self else offloaded
        self.num_tokens = min(x.head.vocab_size for x in (student, *self.engines))
        self.matrices: list[Tensor] = []
        self.has_several = has_several(config)

    @property
    def engine(self) -> Engine:
        """The engine of the first teacher."""
        return self.engines[0]

    def compute(self, parts: Parts) -> dict[str, Tensor]:
        """Return the fields that engines/teacher.py lists, for all tokens of this rank's batches.

        Only the last pipeline stage gets them; elsewhere the result is empty.

        Args:
            parts: the batches, each with its micro-batches.
        """
        self.matrices = []
        outputs: list[Tensor] = []
        for number, engine in enumerate(self.engines):
            own_parts = parts
            if self.has_several:
                own_parts = [(batch, taught_by(number, batch, plan)) for batch, plan in parts]
            results = token_outputs(engine, self._head(engine), own_parts)
            if self.has_several:
                numbers = torch.cat([batch.fields["teacher_number"] for batch, _ in parts])
                outputs = merge(outputs, results, numbers == number)
            else:
                outputs = list(results)
            if not self.settings.top_k:
                self.matrices.append(engine.output_matrix())
            engine.offload(*self.offloaded)
        names = ("teacher_ids", "teacher_log_probs") if self.settings.top_k else ("teacher_hidden",)
        return dict(zip(names, outputs))

    def _head(self, engine: Engine) -> nn.Module:
        """Return the head that computes a teacher's outputs for the student."""
        settings = self.settings
        if not settings.top_k:
            return HiddenHead()
        return TopKHead(engine.head, settings.top_k, self.num_tokens, settings.temperature)

    @contextmanager
    def teaching(self, student: Engine) -> Iterator[None]:
        """Within this block, the student's loss gets the divergence from its teachers."""
        heads = []
        for engine, matrix in zip(self.engines, self.matrices):
            transform = engine.head.settings.transform
            transform = transform._replace(temperature=self.settings.temperature)
            heads.append(TeacherHead(matrix, transform))
        student.head.distillation = Distillation(
            Divergence(self.settings.mode), self.settings.temperature, self.num_tokens, heads
        )
        try:
            yield
        finally:
            student.head.distillation = None
            self.matrices = []


def token_outputs(engine: Engine, head: nn.Module, parts: Parts) -> tuple[Tensor, ...]:
    """Return the outputs of another head for all tokens of the parts: [T, ...] each, on the host.

    The result is empty except on the last pipeline stage. See Engine.token_outputs().
    """
    results = [engine.token_outputs(batch, head, plan) for batch, plan in parts]
    return tuple(torch.cat(pieces) for pieces in zip(*results))


def taught_by(number: int, batch: Batch, micro_batches: MicroBatches) -> MicroBatches:
    """Return the micro-batches with only the sequences of one teacher.

    Their number does not change, since all ranks compute them together. Some may be empty.
    """
    is_taught = (batch.fields["teacher_number"][batch.cu_seqlens[:-1]] == number).tolist()
    result = []
    for size, members in micro_batches:
        result.append((size, [i for i in members if is_taught[i]]))
    return result


def merge(merged: list[Tensor], outputs: Sequence[Tensor], is_own: Tensor) -> list[Tensor]:
    """Return the outputs of several teachers, merged: [T, ...] each, as wide as the widest.

    Args:
        merged: the merged outputs of the teachers so far; empty at first.
        outputs: the outputs of the next teacher, [T, ...] each.
        is_own: [T] bool, the tokens of the next teacher.
    """
    merged = merged or [torch.zeros_like(x) for x in outputs]
    result = []
    for former, x in zip(merged, outputs):
        num_missing = max(0, x.shape[1] - former.shape[1])
        former = nn.functional.pad(former, (0, num_missing))
        former[is_own, : x.shape[1]] = x[is_own]
        result.append(former)
    return result


def move_outputs(outputs: dict[str, Tensor], is_from: Tensor, is_to: Tensor) -> dict[str, Tensor]:
    """Move outputs to the same responses in other sequences, such as those with another prompt.

    Args:
        outputs: [T, ...] each.
        is_from: [T] bool, the response tokens of the sequences that were computed.
        is_to: [T'] bool, the response tokens of the other sequences; as many as in is_from.

    Returns:
        [T', ...] each, with 0 outside the responses.
    """
    moved = {}
    for name, x in outputs.items():
        moved[name] = x.new_zeros(len(is_to), *x.shape[1:])
        moved[name][is_to] = x[is_from]
    return moved
