"""examples/tools.py: problems and traces for a pretrained model that calls a calculator."""

import json
import random
import re
from pathlib import Path

import pytest

from examples import calculator, tools
from examples.arithmetic import make_model
from tests.support.recipes import run_both_recipes

SIZES = {"val": 20, "train": 30, "traces": 300, "val_traces": 10}


def question_of(row: dict) -> str:
    return row.get("prompt") or row["messages"][0]["content"]


def test_answers_are_right_and_no_problem_occurs_twice():
    rows = tools.make_rows(SIZES)
    assert {name: len(rows[name]) for name in rows} == SIZES
    questions = [question_of(row) for name in rows for row in rows[name]]
    assert len(set(questions)) == len(questions)
    for row in rows["train"] + rows["val"]:
        assert row["answer"] == str(eval(row["prompt"].removeprefix("What is ")))


def test_no_file_has_a_product_of_another_one():
    """Among so many rows, some products would occur in both files by chance."""
    rows = tools.make_rows({"train": 3000, "val": 3000})
    products = {}
    for name, problems in rows.items():
        products[name] = {re.search(r"\d+\*\d+", question_of(row))[0] for row in problems}
        assert len(products[name]) == len(problems)
    assert not products["train"] & products["val"]


def test_half_of_the_traces_call_the_calculator_step_by_step():
    num_calling = 0
    for row in tools.make_rows(SIZES)["traces"]:
        question, *replies, last = row["messages"]
        problem = question["content"].removeprefix("What is ")
        assert last == {"role": "assistant", "content": str(eval(problem))}
        num_operations = len(re.findall(r"[-+*]", problem))
        assert len(replies) in (0, 2 * num_operations)
        num_calling += len(replies) > 0
        for request, result in zip(replies[::2], replies[1::2]):
            (call,) = request["tool_calls"]
            expression = call["function"]["arguments"]["expression"]
            assert result["content"] == str(eval(expression))
    assert num_calling / SIZES["traces"] == pytest.approx(0.5, abs=0.1)


def test_build_writes_its_files_and_the_template_of_the_calculator(tmp_path, monkeypatch, capsys):
    sizes = {"val": 4, "train": 3, "traces": 2, "val_traces": 1}
    monkeypatch.setattr(tools, "NUM_ROWS", sizes)
    folder = tmp_path / "new" / "tools"
    tools.build(folder)
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}/{name}.jsonl: {size} problems" for name, size in sizes.items()
    ]
    for name, rows in tools.make_rows(sizes).items():
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows
        assert all(("messages" in row) == name.endswith("traces") for row in rows)
    assert (folder / "chat_template.jinja").read_text() == calculator.CHAT_TEMPLATE


def test_later_steps_of_a_problem_begin_with_the_result_before():
    steps = ["347*829", "287663+512", "288175-2907"]
    assert tools.problem_text(steps) == "347*829+512-2907"
    assert tools.problem_text(steps[:1]) == "347*829"
    rng = random.Random(1)
    numbers = []
    for _ in range(200):
        first, *later = tools.make_steps(rng)
        numbers.append(len(later))
        result = str(eval(first))
        for step in later:
            assert step.startswith(result)
            assert step.removeprefix(result)[0] in "+-"
            result = str(eval(step))
    assert set(numbers) == {1, 2, 3}


@pytest.mark.slow
def test_both_recipes_run_with_a_small_model(tmp_path: Path, monkeypatch):
    """The model always calls the calculator, since it has seen nothing else, but copies badly."""
    monkeypatch.setattr(tools, "SHARE_CALLS", 1.0)
    monkeypatch.setattr(tools, "NUM_ROWS", {"val": 4, "train": 8, "traces": 320, "val_traces": 4})
    tools.build(tmp_path)
    tokenizer = calculator.make_tool_tokenizer()
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    template = f"data.chat_template={tmp_path}/chat_template.jinja"
    grpo = run_both_recipes("tools", tmp_path, [template])
    episodes = calculator.read_validations(grpo)[1]
    assert len(episodes) == 4
    called = [json.dumps(episode["messages"]) for episode in episodes]
    assert all('"name": "calculate"' in text for text in called)
