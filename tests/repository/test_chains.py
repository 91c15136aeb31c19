"""examples/chains.py: sums of many numbers."""

import json
from statistics import mean, median

import pytest

from examples import chains
from examples.chains import Options
from rollout.grading.scores import read_score, with_steps


def test_every_line_of_a_reply_is_right_and_continues_the_last_one():
    for row in chains.make_rows(Options(n=200, n_val=50)):
        question, reply = (message["content"] for message in row["messages"])
        problem = question.removeprefix("What is ").removesuffix("?")
        *steps, last = row["lines"]
        assert reply == "\n".join(row["lines"])
        assert last == f"#### {eval(problem)}"
        results = []
        for step in steps:
            operation, _, result = step.partition(" = ")
            assert result == str(eval(operation))
            results.append(result)
        starts = [step.split(" ")[0] for step in steps]
        assert starts[1:] == results[:-1]


def test_lengths_are_log_normal_with_a_longest_one():
    rows = chains.make_rows(Options(n=2000, n_val=0, median=6, sigma=1, longest=60))
    num_steps = [row["messages"][1]["content"].count("=") for row in rows]
    assert median(num_steps) == pytest.approx(6, abs=1)
    assert max(num_steps) == 60
    assert mean(num_steps) > 8


@pytest.mark.parametrize(
    "response, expected",
    [
        ("1 + 2 = 3\n3 - 4 = -1\n#### -1", 1.0),
        ("1 + 2 = 3\n3 - 4 = -1\n#### -1\nand more", 3 / 4),
        ("1 + 2 = 3\n3 - 4 = 1\n#### -1", 1 / 3),
        ("1 + 2 = 3", 1 / 3),
        ("#### -1", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_is_the_share_of_lines_before_the_first_error(response, expected):
    row = {"lines": ["1 + 2 = 3", "3 - 4 = -1", "#### -1"]}
    assert chains.score(response, row) == expected


@pytest.mark.parametrize(
    "response, ends, num_right",
    [
        ("1 + 2 = 3\n3 - 4 = -1\n#### -1", [9, 20, 28], 3),
        ("\n 1 + 2 = 3\n3 - 4 = -1\n#### -1\n", [11, 22, 30], 3),
        ("1 + 2 = 3\n3 - 4 = 1\n#### -1", [9, 19, 27], 1),
        ("1 + 2 = 3\n\n\n3 - 4 = -1", [9, 10, 11, 22], 1),
        ("1 + 2 = 3", [9], 1),
        ("no", [2], 0),
        (" \n", [], 0),
        ("", [], 0),
    ],
)
def test_each_right_line_is_rewarded_where_it_ends(response, ends, num_right):
    row = {"lines": ["1 + 2 = 3", "3 - 4 = -1", "#### -1"]}
    outcome, steps = chains.score_lines(response, row)
    assert [end for end, _ in steps] == ends
    assert [reward > 0 for _, reward in steps] == [i < num_right for i in range(len(ends))]
    for (end, _), line in zip(steps[:num_right], row["lines"]):
        assert response[:end].endswith(line)
    graded = with_steps(read_score(outcome, {}), steps, response, "score_lines")
    assert graded["score"] == pytest.approx(chains.score(response, row))


def test_right_and_wrong_lines_of_a_problem_have_different_rewards():
    """Otherwise grpo_steps, which subtracts the mean over all steps, would learn nothing."""
    row = {"lines": ["1 + 2 = 3", "#### 3"]}
    responses = ["1 + 2 = 3\n#### 3", "1 + 2 = 3\n#### 4"]
    rewards = [reward for text in responses for _, reward in chains.score_lines(text, row)[1]]
    assert rewards == [0.5, 0.5, 0.5, 0.0]


def test_build_writes_different_problems_to_both_files(tmp_path, capsys):
    chains.build(tmp_path, chains.read_options(["n=30", "n_val=10", "median=2"]))
    files = [tmp_path / "train.jsonl", tmp_path / "val.jsonl"]
    questions = []
    for file in files:
        for line in file.read_text().splitlines():
            questions.append(json.loads(line)["messages"][0]["content"])
    assert len(set(questions)) == 40
    assert f"{files[0]}: 30 problems" in capsys.readouterr().out


def test_settings_are_read_as_the_numbers_that_they_are():
    settings = ["n=3", "n_val=1", "median=2.5", "sigma=0.4", "longest=9"]
    expected = Options(n=3, n_val=1, median=2.5, sigma=0.4, longest=9)
    assert chains.read_options(settings) == expected
    assert chains.read_options([]) == Options()
    with pytest.raises(ValueError, match="2.5"):
        chains.read_options(["longest=2.5"])


def test_an_unknown_setting_is_rejected():
    with pytest.raises(ValueError, match="'size=3' is not of the form key=value with n, n_val"):
        chains.read_options(["size=3"])
