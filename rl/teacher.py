"""The teachers of on-policy distillation: their checks, and their part in a step.

The policy generates. A frozen teacher computes its own next-token distributions for the tokens of
these responses. The actor's loss contains the divergence between both distributions at each token
(engines/divergence.py), weighted like the policy loss.

With several teachers, a column of each row names its teacher. With data.teacher_prompt_key, the
teacher sees the same response after another prompt. Such a teacher may be the policy itself.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from config import InputError, defaults
from data.batching.batch import Batch, make_cu_seqlens
from data.prompts import PromptDataset
from engines.context_parallel import has_dynamic_cp
from engines.teacher import NUMBER
from engines.teacher_settings import (
    SELF,
    has_several,
    is_self_taught,
    teacher_paths,
    teacher_roles,
    uses_teacher,
)
from engines.teaching import Teachers, check_top_k, check_vocabulary, move_outputs
from rollout.exchange import sum_over_ranks
from rollout.samples import Samples
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
    "reward.step_rewards",
)
NO_REWARD = "none"


def check_distillation(config: DictConfig) -> None:
    """Raise InputError for settings that have no effect with, or without, a teacher."""
    check_teacher_settings(config)
    if not config.algorithm.distill.only:
        check_has_reward(config)
        return
    for key in KEYS_OF_POLICY_LOSS:
        value = OmegaConf.select(config, key)
        if value != defaults(key):
            raise InputError(
                f"{key}={value} does nothing with algorithm.distill.only=true, which "
                "leaves out the policy loss: leave out one of the two"
            )


def check_has_reward(config: DictConfig) -> None:
    """Raise InputError if the settings make every score 0."""
    reward = config.reward
    has_model = reward.model.path is not None and reward.model.weight != 0
    if has_model:
        return
    counts_no_part = reward.weights and not any(reward.weights.values())
    if counts_no_part and not reward.step_rewards:
        raise InputError(
            f"reward.weights={dict(reward.weights)} gives every response 0, so the policy loss "
            "teaches nothing: give a part another weight"
        )
    if reward.function != NO_REWARD or config.rollout.episode:
        return
    if reward.model.path is None:
        raise InputError(
            "reward.function=none gives every response 0, so the policy loss teaches nothing: "
            "set algorithm.distill.teacher and algorithm.distill.only=true to learn from a "
            "teacher alone, set reward.model.path, or choose a reward"
        )
    raise InputError(
        "reward.model.weight=0 and reward.function=none give every response 0, so the policy "
        "loss teaches nothing: choose another weight, or a reward function"
    )


def check_teacher_settings(config: DictConfig) -> None:
    """Raise InputError for settings of teachers that contradict each other."""
    distill = config.algorithm.distill
    prompt_key = config.data.teacher_prompt_key
    if distill.teacher is not None and has_several(config):
        raise InputError(
            f"algorithm.distill.teacher={distill.teacher} and algorithm.distill.teachers name "
            "teachers twice: leave out one of the two"
        )
    for name, path in distill.teachers.items():
        if path == SELF:
            raise InputError(
                f"algorithm.distill.teachers.{name}={SELF} does not work: the policy can be the "
                f"only teacher (algorithm.distill.teacher={SELF}), but not one of several"
            )
    if is_self_taught(config) and prompt_key is None:
        raise InputError(
            "algorithm.distill.teacher=self teaches nothing without data.teacher_prompt_key: with "
            "the same prompt, the policy and its teacher are the same. Name a column with another "
            "prompt"
        )
    if prompt_key is None:
        return
    setting = f"data.teacher_prompt_key={prompt_key}"
    if config.rollout.episode:
        raise InputError(
            f"{setting} does not work with rollout.episode={config.rollout.episode}, which makes "
            "the prompts itself: leave out one of the two"
        )
    if config.model.images:
        raise InputError(
            f"{setting} does not work with model.images=true yet: leave out one of the two"
        )
    if has_dynamic_cp(config.engine):
        raise InputError(
            f"{setting} does not work with engine.context_parallel_size=auto, which chooses groups "
            "of ranks by the lengths of the policy's sequences: set a number"
        )


def check_teachers(config: DictConfig, hf_configs: dict[str, Any]) -> None:
    """Raise InputError for a teacher that does not share the policy's vocabulary.

    hf_configs: the Hugging Face configurations of the actor and of the teachers, by role.
    """
    if not uses_teacher(config):
        return
    num_tokens = hf_configs["actor"].vocab_size
    check_top_k(config, num_tokens)
    for role, (key, path) in zip(teacher_roles(config), teacher_paths(config).items()):
        num_teacher_tokens = hf_configs[role].vocab_size
        check_top_k(config, min(num_tokens, num_teacher_tokens))
        check_vocabulary(config, f"{key}={path}", path, num_tokens, num_teacher_tokens)


def check_rows(config: DictConfig, dataset: PromptDataset) -> None:
    """Raise InputError if the training rows do not suit the teacher. Called by rank 0 alone.

    Each must name one of several teachers. To a policy that teaches itself, some row must show
    another prompt than to the policy.
    """
    distill = config.algorithm.distill
    if is_self_taught(config):
        check_other_prompts(config, dataset)
    if not has_several(config):
        return
    names = list(map(str, distill.teachers))
    for number, row in enumerate(dataset.rows):
        name = row.get(distill.teacher_key)
        if name is None or str(name) not in names:
            problem = f"names the teacher {name!r}" if name is not None else "names no teacher"
            raise InputError(
                f"data.train_files={config.data.train_files}: row {number + 1} of the selected "
                f"rows {problem} in the column {distill.teacher_key}: it must be one of "
                f"{', '.join(names)}, the keys of algorithm.distill.teachers"
            )


def check_other_prompts(config: DictConfig, dataset: PromptDataset) -> None:
    """Say how many rows show the policy's own prompt to itself as the teacher.

    Such rows teach nothing. Raises InputError if all rows are like this.
    """
    num_rows = len(dataset)
    prompts = (dataset[number] for number in range(num_rows))
    num_same = sum(prompt.teacher_ids == prompt.input_ids for prompt in prompts)
    column = f"data.teacher_prompt_key={config.data.teacher_prompt_key}"
    if num_same == num_rows:
        raise InputError(
            f"algorithm.distill.teacher=self teaches nothing: {column} names the policy's own "
            "prompt in every row. Name a column with another prompt"
        )
    if num_same > 0:
        print(
            f"warning: {column} names the policy's own prompt in {num_same:,} of {num_rows:,} "
            "rows, so the teacher teaches nothing there",
            flush=True,
        )


def number_teachers(config: DictConfig, samples: Samples) -> None:
    """Give the tokens of each response the number of their teacher, if there are several."""
    if not has_several(config):
        return
    distill = config.algorithm.distill
    # YAML and JSON read the name 1 as a number, and CSV as text.
    number_of = {str(name): number for number, name in enumerate(distill.teachers)}
    numbers = [number_of[str(prompt.row[distill.teacher_key])] for prompt in samples.prompts]
    samples.batch.fields[NUMBER] = torch.repeat_interleave(
        torch.tensor(numbers, dtype=torch.int64), samples.batch.cu_seqlens.diff()
    )


def after_teacher_prompts(samples: Samples, group: dist.ProcessGroup | None = None) -> Samples:
    """Return the same responses after the prompts that the teacher sees. Called by all ranks."""
    batch = samples.batch
    sequences = []
    masks = []
    for number, prompt in enumerate(samples.prompts):
        tokens = slice(int(batch.cu_seqlens[number]), int(batch.cu_seqlens[number + 1]))
        mask = batch.fields["loss_mask"][tokens]
        teacher_prompt = torch.tensor(prompt.teacher_ids, dtype=torch.int64)
        # A response is everything from the first sampled token on.
        start = int(mask.nonzero()[0, 0]) if mask.any() else len(mask)
        sequences += [teacher_prompt, batch.input_ids[tokens][start:]]
        masks += [mask.new_zeros(len(teacher_prompt)), mask[start:]]
    own_lengths = torch.tensor([len(x) for x in sequences], dtype=torch.int64).view(-1, 2).sum(1)
    lengths = torch.zeros(len(samples), dtype=torch.int64)
    lengths[samples.held] = own_lengths
    fields = {"loss_mask": torch.cat([*masks, torch.empty(0)])}
    if NUMBER in batch.fields:
        numbers = batch.fields[NUMBER][batch.cu_seqlens[:-1]]
        fields[NUMBER] = torch.repeat_interleave(numbers, own_lengths)
    input_ids = torch.cat([*sequences, torch.empty(0, dtype=torch.int64)])
    return replace(
        samples,
        batch=Batch(input_ids, make_cu_seqlens(own_lengths), fields),
        lengths=sum_over_ranks(lengths, group),
    )


def compute(teachers: Teachers, share: Share) -> None:
    """Fill the fields of the share that engines/teacher.py lists."""
    if share.teacher_batch is None:
        parts = [(batch, plan.micro_batches) for batch, plan in share.without_routes.parts]
        share.batch.fields |= teachers.compute(parts)
        return
    batch = share.teacher_batch
    outputs = teachers.compute([(batch, teachers.engine.divide_share(batch.lengths))])
    is_from = batch.fields["loss_mask"] != 0
    is_to = share.batch.fields["loss_mask"] != 0
    share.batch.fields |= move_outputs(outputs, is_from, is_to)


def teacher_metrics(config: DictConfig, metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics with the mean divergence from each of several teachers.

    metrics: from the losses. distill/divergence/NAME is a sum over the tokens of this teacher,
    weighted as in the mean over all tokens, and distill/share/NAME is the share of its tokens. A
    teacher without tokens has no mean.
    """
    metrics = dict(metrics)
    for name in config.algorithm.distill.teachers:
        key = f"distill/divergence/{name}"
        if key not in metrics:
            continue
        total = metrics.pop(key)
        taught_share = metrics[f"distill/share/{name}"]
        if taught_share:
            metrics[key] = total / taught_share
    return metrics
