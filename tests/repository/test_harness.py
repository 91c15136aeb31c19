"""The helpers that the scripts in benchmarks/ share."""

import sys

import pytest

from benchmarks.harness import (
    flops_of_lengths,
    median_and_range,
    medians,
    print_header,
    print_row,
    python_command,
    read_lines,
    read_metrics,
    run_quietly,
    write_lines,
)


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
