"""The helpers that the scripts in benchmarks/ share."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.even_words import even_words
from benchmarks.harness import (
    add_settings,
    flops_of_lengths,
    make_parser,
    median_and_range,
    medians,
    model_settings,
    print_header,
    print_row,
    python_command,
    read_lines,
    read_metrics,
    run_quietly,
    write_lines,
)
from benchmarks.long_tails_simulation import Replica, Setting, Work, decoding_seconds
from config import load


def test_a_step_without_a_metric_counts_as_0():
    """A validation that only every third step has takes no time in the median one."""
    steps = [{"step": 3.0, "validate": 9.0}, {"step": 1.0}, {"step": 2.0}]
    assert medians(steps) == {"step": 2.0, "validate": 0.0}
    assert medians(steps[:2]) == {"step": 2.0, "validate": 4.5}


def test_flops_of_attention_grow_with_the_squares_of_lengths():
    assert flops_of_lengths((100, 10, 1), [3, 4]) == 7 * 110 + 9 + 16


def test_a_median_is_shown_with_the_smallest_and_the_largest_value():
    assert median_and_range([3.0, 1.0, 1200.0], ",.1f") == "3.0 (1.0, 1,200.0)"


def test_a_table_is_markdown(capsys):
    print_header("GPUs", "tokens/s")
    print_row(2, "5", note=" alone")
    assert capsys.readouterr().out == "| GPUs | tokens/s |\n|---|---|\n| 2 | 5 | alone\n"


def test_one_process_needs_no_torchrun():
    assert python_command(1) == [sys.executable]
    command = python_command(2)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[-2:] == ["--nproc-per-node", "2"]
    assert python_command(1, "other") == ["other"]


def test_the_last_line_of_a_killed_run_is_left_out(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [{"step": 1}, {"step": 2}])
    assert read_metrics(file) == read_lines(file) == [{"step": 1}, {"step": 2}]
    file.write_text(file.read_text() + '{"st')
    assert read_metrics(file) == [{"step": 1}, {"step": 2}]


def test_a_command_that_fails_ends_the_script_with_its_last_lines():
    program = "import os; print(os.environ['NAME'])"
    assert run_quietly([sys.executable, "-c", program], NAME="x") == "x\n"
    with pytest.raises(SystemExit, match="(?s)why\n.*exit code 3"):
        run_quietly([sys.executable, "-c", "print('why'); raise SystemExit(3)"])


def test_a_command_that_fails_is_named_with_the_ends_of_both_outputs():
    program = "import sys; print('o' * 3000); print('e' * 5000, file=sys.stderr); sys.exit(4)"
    with pytest.raises(SystemExit) as ended:
        run_quietly([Path(sys.executable), "-c", program])
    output, _, last = str(ended.value).rpartition("\n")
    assert last == f"exit code 4: {sys.executable} -c {program}"
    assert output.count("o") == 2000 - 1, "without the line break at its end"
    assert output.count("e") == 4000 - 1


def test_variables_of_a_command_are_beside_those_of_the_script(monkeypatch):
    monkeypatch.setenv("OUTER", "kept")
    monkeypatch.setenv("INNER", "hidden")
    program = "import os; print(os.environ['OUTER'], os.environ['INNER'])"
    assert run_quietly([sys.executable, "-c", program], INNER="set") == "kept set\n"


def test_settings_may_stand_between_options():
    parser = make_parser("The first line.\n\n    indented as it is")
    parser.add_argument("--gpus", type=int, default=1)
    add_settings(parser)
    arguments = parser.parse_intermixed_args(["a.b=1", "--gpus", "2", "c=3"])
    assert (arguments.settings, arguments.gpus) == (["a.b=1", "c=3"], 2)
    assert parser.parse_intermixed_args([]).settings == []
    shown = parser.format_help()
    assert "The first line.\n\n    indented as it is\n" in shown
    assert "key=value" in shown


def test_a_script_that_makes_its_own_batches_needs_no_file(tmp_path):
    config = load("sft.yaml", model_settings(tmp_path / "model"))
    assert config.model.path == str(tmp_path / "model")
    assert config.data.train_files == "none"


def test_a_median_of_an_even_number_of_steps_lies_between_two_of_them():
    assert medians([{"step": 1.0}, {"step": 4.0}, {"step": 2.0}, {"step": 9.0}]) == {"step": 3.0}
    assert median_and_range([4.0, 1.0], ".2f") == "2.50 (1.00, 4.00)"


def test_a_run_without_a_complete_line_has_no_metrics(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1')
    assert read_metrics(file) == []
    file.write_text("")
    assert read_metrics(file) == []


@pytest.mark.parametrize(
    "response, reward",
    [("w2 w4 w7", 2 / 3), ("w1 w3", 0.0), ("w10", 1.0), ("no words w wx x2", 1.0), ("", 0.0)],
)
def test_the_reward_of_the_grpo_benchmark_counts_even_words(response, reward):
    """A word is a letter and a number; all others do not count."""
    assert even_words("w1", response, {}) == pytest.approx(reward)


@pytest.mark.parametrize("num_steps, num_tokens", [(2, 1 + 2 + 2), (5, 1 + 2 + 5)])
def test_decoding_takes_time_by_steps_and_by_the_tokens_that_are_drawn(num_steps, num_tokens):
    """Responses lack 1, 2 and 6 tokens, and another one none."""
    remaining = np.array([[1, 2], [6, 0]])
    seconds = num_steps * 2e-3 + num_tokens * 4.9e-6
    assert decoding_seconds(remaining, num_steps) == pytest.approx(seconds)


def test_a_simulated_step_trains_on_the_oldest_groups_first():
    """Two of three groups are complete after 4 steps, and a third is older but is not."""
    replica = Replica(0, Work(1, 1, 10, 100), 1.0, Setting(1.5, 2))
    replica.remaining = np.array([[3], [4], [9]])
    replica.age = np.array([0, 1, 2])
    replica.end(4)
    assert replica.remaining.tolist() == [[0], [5]], "the one of age 1 is trained"
    assert replica.age.tolist() == [1, 3]
