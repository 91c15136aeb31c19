"""Answers to other prompts, from which KTO's baseline is estimated.

KTO compares the reward of an answer with the divergence of the policy from the reference
(Ethayarajh et al. 2024). The divergence is estimated on mismatched pairs: the prompt of each row
with the answer of another row of the batch. Both models compute their log-probabilities before the
update, in evaluation mode, and the mean over the whole batch, over all ranks, is one number. So
the baseline depends neither on the number of ranks nor on micro-batches. (The paper and TRL take
the mean over the current micro-batch instead, of one device or of all devices.)
"""

import torch
from torch import Tensor

from data.batching.batch import Batch, make_cu_seqlens
from engines.base import Engine
from preferences.reference import Reference


def mismatched(batch: Batch, max_length: int) -> Batch:
    """Return each prompt of a batch with the answer of the previous row that has the same label.

    If the previous row has no answer with this label, its other answer is taken. The first row's
    previous row is the last one. A prompt ends before the first token that is trained on.

    Args:
        batch: with the fields of PreferenceDataset.batch().
        max_length: longer sequences are cut on the right.
    """
    sequences = batch.split([1] * len(batch))
    answer_ids = [int(sequence.fields["answer"][0]) for sequence in sequences]
    index_of = {answer: index for index, answer in enumerate(answer_ids)}
    num_rows = max(answer_ids) // 2 + 1
    ids = []
    masks = []
    for answer, sequence in zip(answer_ids, sequences):
        previous_row = (answer // 2 - 1) % num_rows
        same_side = 2 * previous_row + answer % 2
        other_side = 2 * previous_row + 1 - answer % 2
        other = sequences[index_of.get(same_side, index_of.get(other_side))]
        prompt = sequence.input_ids[: prompt_length(sequence)]
        start = prompt_length(other)
        ids.append(torch.cat([prompt, other.input_ids[start:]])[:max_length])
        mask = torch.cat([torch.zeros(len(prompt)), other.fields["loss_mask"][start:]])
        masks.append(mask[:max_length])
    lengths = torch.tensor([len(part) for part in ids])
    return Batch(torch.cat(ids), make_cu_seqlens(lengths), {"loss_mask": torch.cat(masks)})


def prompt_length(sequence: Batch) -> int:
    """Return the number of tokens before the first trained one."""
    return int(sequence.fields["loss_mask"].argmax())


def estimate_kl(
    engine: Engine, reference: Reference, batch: Batch, max_length: int
) -> tuple[Tensor, float]:
    """Return the baseline, at least 0, on the engine's device, and the mean before it is clamped.

    Called by all ranks, with the whole batch.
    """
    batch = mismatched(batch, max_length)
    plan = engine.plan(batch.lengths)
    share = batch.select(plan.sequences)
    log_ratios = engine.log_probs(share, plan.micro_batches)[0].cpu()
    log_ratios -= reference.log_probs(share, plan.micro_batches)
    lengths = share.cu_seqlens.diff()
    is_counted = torch.repeat_interleave(plan.reported_by(engine.dp_rank), lengths)
    is_counted &= share.fields["loss_mask"] > 0
    total = engine.sum_over_dp(torch.where(is_counted, log_ratios, 0).sum())
    mean = total / len(batch)
    return mean.clamp(min=0), mean.item()
