"""Samples: selecting, joining, dividing into mini-batches, and writing them to files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config import InputError
from data.prompts import Prompt
from rl.models import mini_batch_prompts
from rollout.grading.grader import Failure
from rollout.records import MAX_WRITTEN, append_failures, examples, write_samples
from rollout.samples import Samples, concat
from tests.support.ranks import on_ranks
from tests.support.samples import (
    Episode,
    configure,
    failure,
    make_episodes,
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


def test_episodes_stay_together_in_select_and_apart_in_concat():
    samples = make_episodes(
        [Episode(3, 1, ["..x.", ".x"]), Episode(3, 2, [".xx"]), Episode(7, 4, ["..x", ".x.", "x"])]
    )
    # First branches come before second ones within a group.
    assert samples.scores.tolist() == [1, 2, 1, 4, 4, 4]
    assert samples.episode.tolist() == [0, 5, 0, 10, 10, 10]
    kept = samples.select(samples.scores != 2)
    assert kept.episode.tolist() == [0, 0, 10, 10, 10], "numbers may have gaps"
    assert kept.episodes.index.tolist() == [0, 0, 1, 1, 1]
    assert kept.episodes.first.tolist() == [0, 2]

    episodes = concat([kept, samples]).episodes
    assert len(episodes) == 2 + 3, "equal numbers of different draws are different episodes"
    assert episodes.choose(torch.cat([kept.scores, samples.scores])).tolist() == [1, 4, 1, 2, 4]
    assert episodes.total(torch.ones(11)).tolist() == [2, 3, 2, 1, 3]
    assert episodes.repeat(torch.arange(5)).tolist() == [0, 0, 1, 1, 1, 2, 3, 2, 4, 4, 4]


def test_episodes_of_many_draws_are_told_apart():
    draws = [make_episodes([Episode(g, g, ["x", ".x"])] * (g + 1)) for g in range(4)]
    samples = concat(draws)
    assert samples.episodes.choose(samples.scores).tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]


def test_responses_and_episodes_of_two_draws_are_told_apart():
    """Without numbers, each sequence of a draw is an episode of its own."""
    responses = make_samples([1, 2], [1, 2], [0, 0])
    episodes = make_episodes([Episode(1, 3, ["..x", ".x"])])
    assert concat([responses, responses]).episode is None
    assert concat([responses, episodes]).episodes.index.tolist() == [0, 1, 2, 2]
    assert concat([episodes, responses]).episodes.index.tolist() == [0, 0, 1, 2]


def test_the_branches_of_an_episode_are_in_one_mini_batch():
    samples = make_episodes([Episode(g, g, ["..x", ".x", "x"][: 1 + g % 3]) for g in range(5)])
    assert samples.group.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 4]
    assert samples.mini_batches(2).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_parts_go_along_and_may_be_missing_in_a_draw_without_rewards():
    samples = make_samples([1, 1, 1], [3, 5, 7], [0, 0, 1])
    parts = {"good": torch.tensor([1.0, 2, 3]), "short": torch.tensor([2.0, 3, 4])}
    samples = replace(samples, parts=parts)
    kept = samples.select(torch.tensor([True, False, True]))
    assert {name: x.tolist() for name, x in kept.parts.items()} == {"good": [1, 3], "short": [2, 4]}
    nothing = make_samples([], [], [], failures=[failure(0)])
    both = concat([nothing, samples, kept])
    assert both.parts["good"].tolist() == [1, 2, 3, 1, 3]
    assert both.parts["short"].tolist() == [2, 3, 4, 2, 4]
    assert both.scores.tolist() == [3, 5, 7, 3, 7]
    assert both.num_drawn == 7
    assert both.owner.tolist() == [0] * 5


def test_a_baseline_belongs_to_its_prompt_and_groups_without_one_go():
    samples = make_samples([1, 1, 1, 1, 1], [1, 2, 3, 4, 5], [0, 0, 1, 2, 2])
    greedy = make_samples([1, 1], [20, 10], [2, 0])
    known = samples.with_baseline(greedy)
    assert known.group.tolist() == [0, 0, 2, 2]
    assert known.scores.tolist() == [1, 2, 4, 5]
    assert known.baseline.tolist() == [10, 10, 20, 20]
    assert len(samples.with_baseline(greedy.select(torch.tensor([False, False])))) == 0
    with_failures = replace(samples, failures=[failure(0)])
    both = with_failures.with_baseline(replace(greedy, failures=[failure(1)], num_drawn=3))
    assert both.failures == [failure(0), failure(1)]
    assert both.num_drawn == 5 + 3


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


LONG_TEXT = "a" * MAX_WRITTEN + "z" * MAX_WRITTEN
CUT_TEXT = "a" * (MAX_WRITTEN // 2) + " ... " + "z" * (MAX_WRITTEN // 2)


def held_by_two_ranks() -> Samples:
    """Return the samples of this rank: it holds every other response."""
    rows = [
        {"answer": 7, "cases": [LONG_TEXT], "note": "a" * MAX_WRITTEN},
        {"answer": None},
        {},
    ]
    prompts = [
        Prompt([1, 2], "the chat", rows[0], question="the question"),
        Prompt([1, 2], LONG_TEXT, rows[1]),
        Prompt([1, 2], "plain", rows[2]),
    ]
    group = [4, 4, 9, 9, 5]
    samples = make_samples([1, 4, 2, 1, 1], [0.5, 1, 2, 3, 4], group)
    rank = dist.get_rank()
    samples = replace(samples, owner=torch.tensor([0, 0, 1, 1, 0]), rank=rank)
    held = samples.held.tolist()
    prompt_of_group = dict(zip([4, 9, 5], prompts))
    return replace(
        samples,
        batch=samples.batch.select(held),
        texts=[LONG_TEXT if i == 2 else f"response {i}" for i in held],
        prompts=[prompt_of_group[group[i]] for i in held],
        parts={"good": torch.arange(5) * 0.5},
    )


def write_on_two_ranks(path: Path) -> tuple[list[dict], list[dict]]:
    samples = held_by_two_ranks()
    write_samples(samples, path)
    return examples(samples, 2), examples(samples, 10)


def test_the_age_of_a_response_is_that_of_its_first_token(tmp_path):
    """Later tokens were drawn by newer weights; those of the prompt have no age."""
    samples = make_samples([3, 1, 0], [1, 2, 3], [0, 0, 1])
    age = torch.tensor([0.0, 0, 2, 1, 0, 0, 0, 1, 0, 0])
    samples.batch.fields["age"] = age
    write_samples(samples, tmp_path / "rollouts" / "step_1.jsonl")
    lines = (tmp_path / "rollouts" / "step_1.jsonl").read_text().splitlines()
    assert [json.loads(line)["age"] for line in lines] == [2, 1, 0]


def test_samples_of_all_ranks_are_written_in_order_and_long_values_cut(tmp_path):
    path = tmp_path / "samples" / "step_1.jsonl"
    tables = on_ranks(2, tmp_path, write_on_two_ranks, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["group"] for line in lines] == [4, 4, 9, 9, 5]
    assert [line["score"] for line in lines] == [0.5, 1, 2, 3, 4]
    assert [line["parts"] for line in lines] == [{"good": i * 0.5} for i in range(5)]
    assert [line["length"] for line in lines] == [1, 4, 2, 1, 1]
    assert [line["truncated"] for line in lines] == [False, True, False, False, False]
    texts = ["response 0", "response 1", LONG_TEXT, "response 3", "response 4"]
    assert [line["response"] for line in lines] == texts
    assert [line["prompt"] for line in lines] == ["the chat"] * 2 + [LONG_TEXT] * 2 + ["plain"]
    cases = json.dumps([LONG_TEXT])
    half = MAX_WRITTEN // 2
    row = {"answer": 7, "note": "a" * MAX_WRITTEN, "cases": f"{cases[:half]} ... {cases[-half:]}"}
    assert [line["row"] for line in lines] == [row, row, {"answer": None}, {"answer": None}, {}]

    first, other = tables
    assert other == ([], []), "rank 0 has the tables"
    two, all_three = first
    assert two == [
        {"question": "the question", "response": "response 0", "answer": "7", "score": 0.5},
        {"question": CUT_TEXT, "response": CUT_TEXT, "score": 2.0},
    ]
    assert all_three == [*two, {"question": "plain", "response": "response 4", "score": 4.0}]


def test_failures_are_appended_with_their_step(tmp_path):
    path = tmp_path / "failures.jsonl"
    append_failures(make_samples([1], [1], [0]), path, 1)
    assert not path.exists(), "without a failure there is no file"
    append_failures(make_samples([1], [1], [0], failures=[failure(3), failure(4)]), path, 2)
    append_failures(make_samples([1], [1], [0], failures=[failure(5)]), path, 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["trace"]) for line in lines] == [
        (2, "trace 3"),
        (2, "trace 4"),
        (3, "trace 5"),
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


def test_a_line_has_all_that_is_known_of_a_sequence_and_its_details_before_its_row(tmp_path):
    """Of an episode with parts, ages and messages at its last sequence."""
    samples = make_episodes([Episode(3, 1.5, ["..xx", ".x"], is_truncated=True)])
    samples.batch.fields["age"] = torch.tensor([0.0, 0, 2, 1, 0, 1])
    samples = replace(
        samples,
        parts={"right": torch.tensor([1.0, 1.0]), "short": torch.tensor([0.5, 0.5])},
        details=[{}, {"messages": ["hello"]}],
    )
    write_samples(samples, tmp_path / "step_1.jsonl")
    first, last = map(json.loads, (tmp_path / "step_1.jsonl").read_text().splitlines())
    of_both = {"group": 3, "episode": 0, "prompt": "prompt 3", "score": 1.5, "truncated": True}
    of_both |= {"parts": {"right": 1.0, "short": 0.5}, "row": {}}
    assert first == of_both | {"response": "..xx", "length": 2, "age": 2}
    assert last == of_both | {"response": ".x", "length": 1, "age": 1, "messages": ["hello"]}
    names = ["group", "episode", "prompt", "response", "score", "parts", "length", "truncated"]
    assert [*last] == [*names, "age", "messages", "row"]


def test_draws_are_joined_with_their_owners_baselines_and_rows():
    first = make_samples([1, 2], [1, 2], [0, 0], baseline=[5.0, 6.0])
    second = make_samples([3], [3], [1], baseline=[7.0])
    first = replace(first, rows=torch.tensor([4, 4]), details=[{"a": 1}, {}], rank=1)
    second = replace(second, rows=torch.tensor([9]), details=[{"b": 2}], rank=1)
    first = replace(first, owner=torch.tensor([1, 1]))
    both = concat([first, replace(second, owner=torch.tensor([1]))])
    assert both.owner.tolist() == [1, 1, 1]
    assert both.held.tolist() == [0, 1, 2]
    assert both.baseline.tolist() == [5, 6, 7]
    assert both.rows.tolist() == [4, 4, 9]
    assert both.details == [{"a": 1}, {}, {"b": 2}]
    assert both.lengths.tolist() == [3, 4, 5]
    assert both.truncated.tolist() == [False, False, False]
    assert [prompt.text for prompt in both.prompts] == ["prompt 0", "prompt 0", "prompt 1"]
    kept = both.select(torch.tensor([True, False, True]))
    assert kept.rows.tolist() == [4, 9]
    assert kept.details == [{"a": 1}, {"b": 2}]


def test_numbers_of_episodes_are_those_of_their_sequences():
    """The second episode is longer in its second sequence, and the first in its first one."""
    episodes = make_episodes([Episode(0, 1, ["..xxx", ".x"]), Episode(0, 2, ["..x", ".xxxxx"])])
    index = episodes.episodes
    assert index.largest(episodes.lengths).tolist() == [5, 6]
    assert index.largest(-episodes.lengths).tolist() == [-2, -3]
    assert index.total(episodes.response_lengths).tolist() == [4, 6]
    alone = replace(episodes, episode=None).episodes
    assert alone.largest(episodes.lengths).tolist() == episodes.lengths.tolist()


def test_a_failure_is_written_with_its_kind_and_after_all_responses(tmp_path):
    late = Failure("timeout", "waited", {"number": 1}, "slow text")
    samples = make_samples([1], [1], [0], failures=[late, failure(3)])
    append_failures(samples, tmp_path / "failures.jsonl", 8)
    lines = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "step": 8,
        "response": "slow text",
        "row": {"number": 1},
        "failure": "timeout",
        "trace": "waited",
    }
    write_samples(samples, tmp_path / "step_8.jsonl")
    written = [json.loads(line) for line in (tmp_path / "step_8.jsonl").read_text().splitlines()]
    assert [line.get("failure") for line in written] == [None, "timeout", "raised"]
