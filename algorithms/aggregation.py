"""From per-token losses to one number: weights that make any aggregate a plain sum."""

from torch import Tensor

from algorithms.packed import sum_by_sequence

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def loss_weights(mask: Tensor, sequence: Tensor, num_sequences: int, mode: str) -> Tensor:
    """[T] fp32: weights such that sum(loss * weights) is the aggregate. mask [T] fp32, sequence [T] int64.

    token-mean           mask / masked tokens                                       (Yu 2025)
    seq-mean-token-sum   mask / sequences with a masked token
    seq-mean-token-mean  mask / its sequence's masked tokens / sequences with one   (Shao 2024)

    Hand in the whole global mini-batch, of all data-parallel ranks, and then select each micro-batch's share of the
    weights: the shares' sums add up to the aggregate, whatever the micro-batches. Weights worked out from a
    micro-batch would not. An empty mask has weights of 0.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation {mode!r} is none of {', '.join(AGGREGATIONS)}")
    if mode == "token-mean":
        return mask / mask.sum().clamp(min=1)
    counts = sum_by_sequence(mask, sequence, num_sequences)
    weights = mask / (counts > 0).sum().clamp(min=1)
    return weights if mode == "seq-mean-token-sum" else weights / counts.clamp(min=1)[sequence]
