"""The teacher of on-policy distillation: its checks, and its part in a step.

The policy generates. A frozen teacher computes its own next-token distributions for the tokens of
these responses. The actor's loss contains the divergence between both distributions at each token
(engines/divergence.py), weighted like the policy loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from omegaconf import DictConfig, OmegaConf

from config import InputError, defaults
from engines.base import Engine
from engines.divergence import Divergence, TeacherHead
from engines.teacher import Distillation, HiddenHead, TopKHead
from rl import updates
from rollout.sharing import Share

# These keys shape the policy loss, which algorithm.distill.only leaves out.
KEYS_OF_POLICY_LOSS = (
    "algorithm.adv_estimator",
    "algorithm.adv_kwargs",
    "algorithm.whiten_advantages",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.loss_mode",
    "algorithm.loss_kwargs",
    "algorithm.clip_ratio_low",
    "algorithm.clip_ratio_high",
    "algorithm.clip_ratio_c",
    "algorithm.use_kl_in_reward",
    "algorithm.rollout_is",
    "algorithm.filter_groups.enable",
    "reward.overlong_buffer",
)
NO_REWARD = "none"


def uses_teacher(config: DictConfig) -> bool:
    """Return whether the loss contains the divergence from a teacher."""
    return config.algorithm.distill.teacher is not None


def teacher_config(config: DictConfig) -> DictConfig:
    """Return the teacher's configuration: a model without adapters, MTP layers or freezing."""
    model = {
        "path": config.algorithm.distill.teacher,
        "freeze": [],
        "lora": defaults("model.lora"),
        "mtp": defaults("model.mtp"),
    }
    algorithm = {"distill": {"teacher": None}}  # It has no teacher itself.
    return OmegaConf.merge(config, {"model": model, "algorithm": algorithm})


def check_distillation(config: DictConfig) -> None:
    """Raise InputError for settings that have no effect with, or without, a teacher."""
    if not config.algorithm.distill.only:
        if config.reward.function == NO_REWARD and not config.rollout.episode:
            raise InputError(
                "reward.function=none gives every response 0, so the policy loss teaches nothing: "
                "set algorithm.distill.teacher and algorithm.distill.only=true to learn from a "
                "teacher alone, or choose a reward"
            )
        return
    for key in KEYS_OF_POLICY_LOSS:
        value = OmegaConf.select(config, key)
        if value != defaults(key):
            raise InputError(
                f"{key}={value} does nothing with algorithm.distill.only=true, which "
                "leaves out the policy loss: leave out one of the two"
            )


def check_teacher(config: DictConfig, num_tokens: int, num_teacher_tokens: int) -> None:
    """Raise InputError for a teacher that does not share the policy's vocabulary.

    Both models may have further rows in their embeddings, which pad the vocabulary.

    Args:
        num_tokens, num_teacher_tokens: the rows in the embedding of each model.
    """
    distill = config.algorithm.distill
    name = f"algorithm.distill.teacher={distill.teacher}"
    num_common = min(num_tokens, num_teacher_tokens)
    if distill.top_k > num_common:
        raise InputError(
            f"algorithm.distill.top_k={distill.top_k} is more than the {num_common} tokens of the "
            "vocabulary: lower it, or set algorithm.distill.top_k=0 for all tokens"
        )
    policy_vocabulary = vocabulary(config.model.path)
    teacher_vocabulary = vocabulary(distill.teacher)
    if teacher_vocabulary is None or policy_vocabulary is None:
        if num_tokens != num_teacher_tokens:
            raise InputError(
                f"{name} has no tokenizer and {num_teacher_tokens} tokens, but "
                f"model.path={config.model.path} has {num_tokens}: choose models with the same "
                "vocabulary"
            )
        return
    for token_id in sorted(policy_vocabulary.keys() & teacher_vocabulary.keys()):
        if policy_vocabulary[token_id] != teacher_vocabulary[token_id]:
            raise InputError(
                f"{name} has another vocabulary than model.path={config.model.path}: token "
                f"{token_id} is {teacher_vocabulary[token_id]!r} there and "
                f"{policy_vocabulary[token_id]!r} here. Choose models with the same vocabulary"
            )
    largest = max(policy_vocabulary)
    if largest >= num_teacher_tokens:
        raise InputError(
            f"{name} has an embedding of {num_teacher_tokens} tokens and lacks the token "
            f"{policy_vocabulary[largest]!r} ({largest}) of model.path={config.model.path}: choose "
            "models with the same vocabulary"
        )


def vocabulary(path: str) -> dict[int, str] | None:
    """Return token id -> token of the tokenizer in a directory; None if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return None
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


class Teacher:
    """The frozen engine of the teacher, and what it has computed for the current step.

    engine     computes the teacher's outputs
    offloaded  the parts that are moved to host memory while the teacher is not used
    matrix     its output matrix [V, h] on the device, from compute() to the end of the update; None
               with top_k
    """

    def __init__(
        self, config: DictConfig, engine: Engine, num_tokens: int, offloaded: list[str]
    ) -> None:
        """num_tokens: the rows in the embedding of the policy."""
        self.settings = config.algorithm.distill
        self.engine = engine
        self.num_tokens = num_tokens
        self.offloaded = offloaded
        self.matrix: torch.Tensor | None = None

    def compute(self, share: Share) -> None:
        """Fill the fields of the share that engines/teacher.py lists.

        Only the last pipeline stage gets them.
        """
        fields = share.batch.fields
        if self.settings.top_k:
            head = TopKHead(
                self.engine.head,
                self.settings.top_k,
                self.num_tokens,
                self.settings.temperature,
            )
            outputs = updates.token_outputs(self.engine, head, share.without_routes)
            fields |= dict(zip(("teacher_ids", "teacher_log_probs"), outputs))
        else:
            outputs = updates.token_outputs(self.engine, HiddenHead(), share.without_routes)
            if outputs:
                fields["teacher_hidden"] = outputs[0]
                fields["teacher_number"] = torch.zeros(len(outputs[0]), dtype=torch.int64)
            self.matrix = self.engine.output_matrix()
        self.engine.offload(*self.offloaded)

    @contextmanager
    def teaching(self, student: Engine) -> Iterator[None]:
        """Within this block, the student's loss gets the divergence from the teacher."""
        teachers = []
        if self.matrix is not None:
            transform = self.engine.head.settings.transform
            transform = transform._replace(temperature=self.settings.temperature)
            teachers.append(TeacherHead(self.matrix, transform))
        student.head.distillation = Distillation(
            Divergence(self.settings.mode), self.settings.temperature, teachers
        )
        try:
            yield
        finally:
            student.head.distillation = None
            self.matrix = None
