"""Means over the rows that are validated, whose batches have different numbers of answers."""

import pytest

from preferences.losses import AnswerCounts
from preferences.validation import Totals, divide_rows

# For each batch, the rewards of its chosen and of its rejected answers.
PAIRS = [([1.0, 2.0], [0.5, -1.0]), ([4.0], [3.0])]
# Rows with a label have one answer.
SINGLE = [([1.0, 2.0, -1.0], [0.5]), ([], [3.0, 1.0]), ([4.0], [])]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("batches, takes_pairs", [(PAIRS, True), (SINGLE, False)])
def test_every_answer_counts_once(batches, takes_pairs):
    totals = Totals()
    losses = []
    for number, (chosen, rejected) in enumerate(batches):
        num_rows = len(chosen) if takes_pairs else len(chosen) + len(rejected)
        counts = AnswerCounts(num_rows, len(chosen), len(rejected))
        num_losses = counts.num_losses(takes_pairs)
        losses += [number + 1.0] * num_losses
        means = {
            "loss": number + 1.0,
            "rewards/accuracies": 1.0 if number else 0.0,
        }
        if chosen:
            means["rewards/chosen"] = mean(chosen)
        if rejected:
            means["rewards/rejected"] = mean(rejected)
        totals.add(means, counts, num_losses)
    all_chosen = [reward for chosen, _ in batches for reward in chosen]
    all_rejected = [reward for _, rejected in batches for reward in rejected]
    assert totals.metrics() == pytest.approx(
        {
            "val/loss": mean(losses),
            "val/rewards/accuracies": mean([float(loss > 1) for loss in losses]),
            "val/rewards/margins": mean(all_chosen) - mean(all_rejected),
        }
    )


def test_answers_of_one_kind_have_no_margin():
    totals = Totals()
    means = {"loss": 0.5, "rewards/accuracies": 1.0, "rewards/chosen": 2.0}
    totals.add(means, AnswerCounts(num_rows=3, num_chosen=3, num_rejected=0), num_losses=3)
    assert totals.metrics() == {"val/loss": 0.5, "val/rewards/accuracies": 1.0}


@pytest.mark.parametrize(
    "num_rows, sizes", [(1, [1]), (4, [4]), (8, [4, 4]), (9, [4, 5]), (10, [4, 4, 2])]
)
def test_no_row_is_compared_with_itself_alone(num_rows, sizes):
    parts = divide_rows(num_rows, 4)
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in part] == list(range(num_rows))
