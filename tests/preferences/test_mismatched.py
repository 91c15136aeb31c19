"""The answers to other prompts from which KTO's baseline is estimated."""

from pathlib import Path

import pytest
import torch

from data.batching.batch import Batch, make_cu_seqlens
from preferences.mismatched import estimate_kl, mismatched
from preferences.reference import Reference
from tests.engines.fsdp.cases import AUTO, build
from tests.support.guarded import unguarded
from tests.support.models import make_model
from tests.support.ranks import on_ranks

# (answer, tokens of the prompt, tokens of the answer). Rows 0 and 1 have one answer, row 2 has two.
ROWS = [(0, [10, 11], [1, 2, 3]), (3, [20], [4]), (4, [30, 31, 32], [5, 6]), (5, [30, 31, 32], [7])]


# One with a long prompt, which gets the chosen answer of row 2.
LONG_ROW = (6, [*range(40, 49)], [8, 9])


def make_batch(rows=ROWS) -> Batch:
    ids = [torch.tensor(prompt + answer) for _, prompt, answer in rows]
    masks = []
    answers = []
    for number, prompt, answer in rows:
        masks.append(torch.tensor([0.0] * len(prompt) + [1.0] * len(answer)))
        answers.append(torch.full((len(prompt) + len(answer),), number))
    lengths = torch.tensor([len(part) for part in ids])
    fields = {"loss_mask": torch.cat(masks), "answer": torch.cat(answers)}
    return Batch(torch.cat(ids), make_cu_seqlens(lengths), fields)


def parts(batch: Batch) -> list[tuple[list[int], list[float]]]:
    return [
        (part.input_ids.tolist(), part.fields["loss_mask"].tolist())
        for part in batch.split([1] * len(batch))
    ]


def test_each_prompt_gets_the_answer_of_the_previous_row_with_the_same_label():
    assert parts(mismatched(make_batch(), max_length=100)) == [
        # Row 0 follows row 2, whose chosen answer is 5, 6.
        ([10, 11, 5, 6], [0, 0, 1, 1]),
        # Row 0 has no rejected answer.
        ([20, 1, 2, 3], [0, 1, 1, 1]),
        # Row 1 has no chosen answer.
        ([30, 31, 32, 4], [0, 0, 0, 1]),
        ([30, 31, 32, 4], [0, 0, 0, 1]),
    ]


def test_long_ones_are_cut_on_the_right():
    cut = parts(mismatched(make_batch(), max_length=3))
    assert cut[1] == ([20, 1, 2], [0, 1, 1])
    assert cut[3] == ([30, 31, 32], [0, 0, 0])


def estimate_on_rank(models: Path, max_tokens: int) -> list[float]:
    """Return KTO's baseline and the mean from which it is made. All ranks have the whole batch."""
    settings = [f"data.max_tokens_per_micro_batch={max_tokens}"]
    with unguarded():
        policy = build(models / "policy", torch.device("cpu"), AUTO, settings)
        frozen = build(models / "frozen", torch.device("cpu"), AUTO, settings)
    reference = Reference(frozen, without_adapters=False)
    baseline, mean = estimate_kl(policy, reference, make_batch([*ROWS, LONG_ROW]), max_length=100)
    return [baseline.item(), mean]


def test_the_baseline_is_the_mean_over_the_sequences_of_all_ranks(tmp_path):
    """Each counts once. The long one is too long for a rank, so that both ranks work on it."""
    make_model(tmp_path / "policy", "llama", num_hidden_layers=1)
    make_model(tmp_path / "frozen", "qwen3", num_hidden_layers=1)
    ((baseline, mean),) = on_ranks(1, tmp_path, estimate_on_rank, tmp_path, 16)
    assert baseline == mean > 0.01
    for estimate in on_ranks(2, tmp_path, estimate_on_rank, tmp_path, 8):
        assert estimate == pytest.approx([baseline, mean], rel=1e-4)
