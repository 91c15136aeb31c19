"""The Python snippets and rows of data in README.md and docs/."""

import json
import re

import pytest
from transformers import AutoTokenizer

from config import load
from data import dataset, prompts
from data.chat.encoding import encode_together
from data.chat.tokenizer import ChatTokenizer
from rollout.grading.grader import Grader
from tests import families
from tests.repository.pages import PAGES, SNIPPETS, blocks

# Settings -> the scores of a right and a wrong response, which form a group.
REWARDS = {
    "my_rewards.py:ends_with_answer": [1.0, 0.0],
    "verl_rewards.py:compute_score": [1.0, 0.0],
    "trl_rewards.py:reward": [1.0, 0.0],
    "my_parts.py:parts reward.weights.correct=1.0 reward.weights.short=0.2": [1.2, 0.2],
    "my_rank.py:rank": [1.0, 0.5],
    "my_kwargs.py:solved reward.kwargs.ground_truth=reward_model.ground_truth": [1.0, 0.0],
    "my_judge.py:judge reward.concurrency=32 reward.timeout=60.0 reward.env=[API_KEY]": [1.0, 0.0],
}
ROW = {
    "answer": 5,
    "data_source": "d",
    "ground_truth": "5",
    "reward_model": {"ground_truth": "5"},
}
PATHS = ["model.path=model", "data.train_files=train.jsonl"]
# Columns that only rows with a response have.
RESPONSE_COLUMNS = {"response", "completion", "output", "conversations"}


@pytest.mark.parametrize("settings", REWARDS)
def test_a_reward_grades_in_its_process(docs_folder, settings, monkeypatch):
    monkeypatch.chdir(docs_folder)
    monkeypatch.setenv("API_KEY", "secret")
    function, *options = settings.split()
    if options:
        assert any(settings in text for text in PAGES.values()), "no page has these settings"
    grader = Grader(load("ppo.yaml", [*PATHS, f"reward.function={function}", *options]))
    results = grader.grade([("2+3", response, ROW) for response in ("5", "6")], [0, 0])
    grader.close()
    assert [round(result.score, 6) for result in results] == REWARDS[settings]


@pytest.mark.parametrize(
    "source, right, wrong",
    [
        ("openai/gsm8k", "2+3\n#### 5", "#### 6"),
        ("HuggingFaceH4/MATH-500", r"\boxed{5}", r"\boxed{6}"),
    ],
)
def test_a_scorer_is_chosen_by_the_source_of_a_row(docs_folder, monkeypatch, source, right, wrong):
    monkeypatch.chdir(docs_folder)
    grader = Grader(load("ppo.yaml", [*PATHS, "reward.function=verl_scores.py:compute_score"]))
    row = ROW | {"data_source": source}
    results = grader.grade([("2+3", response, row) for response in (right, wrong)], [0, 0])
    (unknown,) = grader.grade([("2+3", right, ROW)], [0])
    grader.close()
    assert [result.score for result in results] == [1.0, 0.0]
    assert "there is no scorer for d" in unknown.summary


def test_the_first_line_of_a_snippet_names_its_file():
    assert len(SNIPPETS) >= len(REWARDS)
    for _, code in SNIPPETS:
        assert re.fullmatch(r"# \w+\.py", code.splitlines()[0])


def rows_of_the_pages() -> list[dict]:
    rows = []
    for text in PAGES.values():
        for block in blocks(text, "json"):
            rows += [json.loads(line) for line in block.splitlines()]
    return rows


def has_response(row: dict) -> bool:
    messages = row.get("messages", [{}])
    return bool(RESPONSE_COLUMNS & row.keys()) or messages[-1].get("role") == "assistant"


def test_there_are_rows():
    assert len(rows_of_the_pages()) > 5


@pytest.mark.parametrize("row", rows_of_the_pages(), ids=json.dumps)
def test_a_row_is_read(docs_folder, row):
    chat = ChatTokenizer(AutoTokenizer.from_pretrained(docs_folder / "model"))
    if has_response(row):
        options = load("sft.yaml", PATHS).data
        (tokens,) = encode_together([dataset.tokenize_row(row, chat, options)])
        assert sum(tokens["loss_mask"]) == len("5") + 1  # and the token that ends the turn
    options = load("ppo.yaml", PATHS).data
    (prompt,) = encode_together([prompts.tokenize_row(row, chat, options)])
    assert json.loads(prompt["record"])["row"] == row


def test_the_table_of_families_is_complete():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", PAGES["docs/models.md"], re.MULTILINE)
    assert rows[2:] == sorted(families.SHAPES)
