"""How long a row may be, whose answers stay in one micro-batch."""

import json

import pytest

from config import InputError, load
from data.preference_dataset import PreferenceDataset, tokenize_preferences
from data.tokenization import plain_options
from examples.arithmetic import make_tokenizer
from preferences.losses import PreferenceLoss
from preferences.settings import check_lengths, check_rows

PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "10000"},
    {"prompt": "1+1+1=", "chosen": "3", "rejected": "400"},
]
LABELS = [
    {"prompt": "1+1=", "completion": "10000", "label": False},
    {"prompt": "1+1+1=", "completion": "3", "label": True},
]


def configure(*pairs: str):
    return load("dpo.yaml", ["model.path=m", "data.train_files=t", *pairs])


def make_dataset(folder, rows: list[dict], config) -> PreferenceDataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = plain_options(config.data)
    path = tokenize_preferences(str(file), make_tokenizer(), options, folder / "cache", folder)
    return PreferenceDataset.load(path)


@pytest.mark.parametrize(
    "rows, settings, longest",
    [
        (PAIRS, [], lambda lengths, parts: int(lengths.sum(1).max())),
        (
            PAIRS,
            ["engine.use_remove_padding=false"],
            lambda lengths, parts: 2 * int(lengths.max()),
        ),
        (LABELS, ["algorithm.loss=kto"], lambda lengths, parts: sum(parts)),
    ],
    ids=["packed pairs", "padded pairs", "kto"],
)
def test_the_longest_row_fits_exactly(tmp_path, rows, settings, longest):
    """KTO also reads the longest prompt with the longest answer, which are in different rows."""
    config = configure(*settings)
    dataset = make_dataset(tmp_path, rows, config)
    parts = dataset.longest_parts()
    assert sum(parts) > int(dataset.answer_lengths.max())
    num_tokens = longest(dataset.answer_lengths, parts)
    for limit in (num_tokens, num_tokens - 1):
        config = configure(*settings, f"data.max_tokens_per_micro_batch={limit}")
        loss = PreferenceLoss.of(config)
        if limit == num_tokens:
            check_lengths(config, loss, dataset, world_size=1)
            continue
        with pytest.raises(InputError, match=f"has {num_tokens} tokens, more than data.max_tokens"):
            check_lengths(config, loss, dataset, world_size=1)


def test_the_longest_prompt_and_answer_are_of_different_rows(tmp_path):
    """An answer begins with the first token that is learned."""
    dataset = make_dataset(tmp_path, LABELS, configure("algorithm.loss=kto"))
    bounds = dataset.cu_seqlens.tolist()
    masks = [dataset.loss_mask[start:end] for start, end in zip(bounds, bounds[1:])]
    prompt_lengths = [mask.tolist().index(1) for mask in masks]
    longest_prompt = max(prompt_lengths)
    longest_answer = max(len(mask) - length for mask, length in zip(masks, prompt_lengths))
    assert prompt_lengths.index(longest_prompt) == 1
    assert dataset.longest_parts() == (longest_prompt, longest_answer)


def test_an_answer_to_another_prompt_is_cut_to_the_length_of_a_row(tmp_path):
    dataset = make_dataset(tmp_path, LABELS, configure("algorithm.loss=kto"))
    limit = sum(dataset.longest_parts()) - 1
    keys = ("data.max_length", "data.max_tokens_per_micro_batch")
    config = configure("algorithm.loss=kto", *(f"{key}={limit}" for key in keys))
    check_lengths(config, PreferenceLoss.of(config), dataset, world_size=1)


@pytest.mark.parametrize("rows, is_refused", [(LABELS, False), (LABELS[:1], True)])
def test_kto_needs_a_second_row_to_compare_with(tmp_path, rows, is_refused):
    config = configure("algorithm.loss=kto")
    datasets = {"data.val_files": make_dataset(tmp_path, rows, config)}
    loss = PreferenceLoss.of(config)
    if not is_refused:
        check_rows(config, loss, datasets)
        return
    with pytest.raises(InputError, match="data.val_files has one row, and algorithm.loss=kto"):
        check_rows(config, loss, datasets)
