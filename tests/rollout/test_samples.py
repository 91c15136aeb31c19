"""Samples: selecting, joining, dividing into mini-batches, and writing them to files."""

import json
import shutil

import pytest
import torch

from config import InputError
from rl.models import mini_batch_prompts
from rollout.records import append_failures, write_samples
from rollout.samples import concat
from tests.support.samples import (
    configure,
    failure,
    make_samples,
)


def test_select_takes_everything_along():
    samples = make_samples(
        [1, 4, 2], [1, 2, 3], [5, 5, 9], baseline=[7.0, 8.0, 9.0], failures=[failure(0)]
    )
    assert (len(samples), samples.response_lengths.tolist()) == (3, [1, 4, 2])
    kept = samples.select(torch.tensor([False, True, True]))
    assert kept.batch.input_ids.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert kept.batch.cu_seqlens.tolist() == [0, 6, 10]
    assert kept.response_lengths.tolist() == [4, 2]
    assert kept.group.tolist() == [5, 9]
    assert kept.scores.tolist() == [2, 3]
    assert kept.truncated.tolist() == [True, False]
    assert kept.texts == ["response 1", "response 2"]
    assert [p.text for p in kept.prompts] == [
        "prompt 5",
        "prompt 9",
    ]
    assert kept.baseline.tolist() == [8, 9]
    assert kept.failures == [failure(0)]
    nothing = samples.select(torch.zeros(3, dtype=torch.bool))
    assert len(nothing) == 0
    assert nothing.batch.cu_seqlens.tolist() == [0]
    assert nothing.failures == [failure(0)]


def test_concat_puts_draws_behind_each_other():
    first = make_samples([1, 2], [1, 2], [0, 0], failures=[failure(0)])
    second = make_samples([3], [3], [1], failures=[failure(1)])
    both = concat([first, second.select(torch.tensor([False])), second])
    assert both.response_lengths.tolist() == [1, 2, 3]
    assert both.group.tolist() == [0, 0, 1]
    assert both.baseline is None
    assert both.texts == ["response 0", "response 1", "response 0"]
    assert len(both.prompts) == 3
    assert both.failures == [failure(0), failure(1), failure(1)]
    assert both.batch.fields["loss_mask"].tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1]


def test_a_baseline_belongs_to_its_prompt_and_groups_without_one_go():
    samples = make_samples([1, 1, 1, 1, 1], [1, 2, 3, 4, 5], [0, 0, 1, 2, 2])
    greedy = make_samples([1, 1], [20, 10], [2, 0])
    known = samples.with_baseline(greedy)
    assert known.group.tolist() == [0, 0, 2, 2]
    assert known.scores.tolist() == [1, 2, 4, 5]
    assert known.baseline.tolist() == [10, 10, 20, 20]
    assert len(samples.with_baseline(greedy.select(torch.tensor([False, False])))) == 0


def test_mini_batches_hold_whole_groups_whatever_their_numbers_and_sizes():
    samples = make_samples([1] * 7, range(7), [3, 3, 4, 8, 8, 8, 11])
    assert samples.mini_batches(2).tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert samples.mini_batches(3).tolist() == [0, 0, 0, 1, 1, 1, 1], (
        "no last one of a single prompt, which would get a whole step"
    )
    config = configure("data.train_batch_size=4")
    assert samples.mini_batches(mini_batch_prompts(config)).tolist() == [0] * 7
    config = configure("data.train_batch_size=4", "algorithm.ppo_mini_batch_size=1")
    assert samples.mini_batches(mini_batch_prompts(config)).tolist() == [0, 0, 1, 2, 2, 2, 3]


def test_samples_are_written_with_their_failures(tmp_path):
    samples = make_samples([4, 2], [0.5, 1], [0, 6], failures=[failure(3)])
    write_samples(samples, tmp_path / "new" / "step_1.jsonl")
    lines = [
        json.loads(line) for line in (tmp_path / "new" / "step_1.jsonl").read_text().splitlines()
    ]
    assert lines == [
        {
            "group": 0,
            "prompt": "prompt 0",
            "response": "response 0",
            "score": 0.5,
            "length": 4,
            "truncated": True,
            "row": {},
        },
        {
            "group": 6,
            "prompt": "prompt 6",
            "response": "response 1",
            "score": 1.0,
            "length": 2,
            "truncated": False,
            "row": {},
        },
        {"response": "text", "row": {"number": 3}, "failure": "raised", "trace": "trace 3"},
    ]


def test_a_full_disk_is_told_with_the_file_and_its_bytes(tmp_path):
    samples = make_samples([4, 2], [0.5, 1], [0, 6], failures=[failure(3)])
    write_samples(samples, tmp_path / "whole.jsonl")
    num_bytes = (tmp_path / "whole.jsonl").stat().st_size
    for write, needs in (
        (lambda path: write_samples(samples, path), f"{num_bytes} bytes"),
        (lambda path: append_failures(samples, path, 1), "more than 0 bytes"),
    ):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "step_1.jsonl").symlink_to("/dev/full")
        with pytest.raises(
            InputError,
            match=rf"the disk is full: {tmp_path}/full/step_1.jsonl needs {needs}, .* are free",
        ):
            write(tmp_path / "full" / "step_1.jsonl")
        shutil.rmtree(tmp_path / "full")
