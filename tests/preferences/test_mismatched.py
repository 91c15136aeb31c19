"""The answers to other prompts from which KTO's baseline is estimated."""

import torch

from data.batching.batch import Batch, make_cu_seqlens
from preferences.mismatched import mismatched

# (answer, tokens of the prompt, tokens of the answer). Rows 0 and 1 have one answer, row 2 has two.
ROWS = [(0, [10, 11], [1, 2, 3]), (3, [20], [4]), (4, [30, 31, 32], [5, 6]), (5, [30, 31, 32], [7])]


def make_batch() -> Batch:
    ids = [torch.tensor(prompt + answer) for _, prompt, answer in ROWS]
    masks = []
    answers = []
    for number, prompt, answer in ROWS:
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
