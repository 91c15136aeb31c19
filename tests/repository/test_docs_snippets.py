"""The Python snippets and rows of data in README.md and docs/."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from config import InputError, load
from data import dataset, preference_dataset, prompts
from data.batching.mixture import Mixture
from data.batching.sampler import INPUTS, UserSampler
from data.chat.encoding import encode_together
from data.chat.tokenizer import ChatTokenizer
from data.dataset import TokenDataset
from data.prompts import PromptDataset
from data.tokenization import plain_options
from job.order import check_order_settings, make_order, sampler_reads, share_lines
from rollout.grading.grader import Grader
from tests import families
from tests.repository.pages import PAGES, SNIPPETS, blocks
from tests.support.launch import ROOT

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


def run_snippet(name: str, folder: Path, docs_folder: Path) -> list[list[dict]]:
    """Run a snippet that writes chats.jsonl; return the chats."""
    subprocess.run([sys.executable, docs_folder / name], cwd=folder, check=True)
    lines = (folder / "chats.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row.keys() == {"messages"} for row in rows)
    return [row["messages"] for row in rows]


def test_the_quickstart_makes_chats_of_your_own(docs_folder, tmp_path):
    chats = run_snippet("my_chats.py", tmp_path, docs_folder)
    assert len(chats) == 3
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"]
        assert all(message["content"] for message in chat)


def test_the_quickstart_reads_a_data_set_of_the_hub(docs_folder, tmp_path):
    """A directory with the name of the data set stands for it; datasets prefers it to the hub."""
    (name,) = re.findall(r'load_dataset\("([^"]+)"', dict(SNIPPETS)["from_hub.py"])
    chat = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
    row = {"prompt": "2+3", "messages": chat, "category": "sums"}
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "train.jsonl").write_text(json.dumps(row) + "\n")
    assert run_snippet("from_hub.py", tmp_path, docs_folder) == [chat]


def test_the_first_line_of_a_snippet_names_its_file():
    assert len(SNIPPETS) >= len(REWARDS)
    for _, code in SNIPPETS:
        assert re.fullmatch(r"# \w+\.py", code.splitlines()[0])


def test_the_page_about_your_own_loop_shows_the_example():
    example = (ROOT / "examples" / "loop.py").read_text()
    excerpt, loss, two_players = blocks(PAGES["docs/your_own_loop.md"], "py")
    assert textwrap.indent(excerpt, " " * 8) in example
    assert loss.splitlines()[0] in example
    self_play = (ROOT / "examples" / "self_play.py").read_text()
    assert textwrap.indent(two_players, " " * 4) in self_play


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
    if "chosen" in row:
        options = plain_options(load("dpo.yaml", PATHS).data)
        (tokens,) = encode_together([preference_dataset.tokenize_row(row, chat, options)])
        assert 0 < tokens["chosen_tokens"] < len(tokens["input_ids"])
        return
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


def order_of_the_page(docs_folder, defaults: str, *settings: str):
    """Return the order that settings of docs/order.md make of the rows of docs_folder."""
    config = load(
        defaults,
        [
            f"model.path={docs_folder}/model",
            f"data.train_files=[{docs_folder}/train.jsonl,{docs_folder}/val.jsonl]",
            "data.train_batch_size=8",
            *settings,
        ],
    )
    check_order_settings(config)
    tokenizer = AutoTokenizer.from_pretrained(docs_folder / "model")
    arguments = [config.data.train_files, tokenizer, config.data, docs_folder / "cache"]
    if defaults == "ppo.yaml":
        data = PromptDataset.load(prompts.tokenize_prompts(*arguments, docs_folder / "model"))
    else:
        with_rows = sampler_reads(config, "rows")
        folder = dataset.tokenize(*arguments, docs_folder / "model", with_rows=with_rows)
        data = TokenDataset.load(folder)
    return make_order(config, data, total_steps=20)


def test_the_pages_curriculum_begins_with_short_answers(docs_folder, monkeypatch):
    monkeypatch.chdir(docs_folder)
    order = order_of_the_page(
        docs_folder,
        "sft.yaml",
        "data.sampler=curriculum.py:curriculum",
        "data.sampler_kwargs.warm_up=0.3",
    )
    rows = [json.loads(line) for line in (docs_folder / "train.jsonl").open()]
    rows += [json.loads(line) for line in (docs_folder / "val.jsonl").open()]
    digits = [len(row["answer"]) for row in rows]
    first = sorted(digits[row] for row in order.rows_of_batch(0))
    assert first == sorted(digits)[:8]
    batches = [order.rows_of_batch(k).tolist() for k in range(20)]
    early = [digits[row] for row in batches[0] + batches[1]]
    assert max(early) < max(digits)
    later = {row for batch in batches[6:] for row in batch}
    assert len(later) > len(rows) / 2
    assert all(len(set(batch)) == 8 for batch in batches)


@pytest.mark.parametrize("defaults", ["sft.yaml", "ppo.yaml"])
def test_the_pages_weights_change_during_the_run(docs_folder, monkeypatch, defaults):
    """The first file has 84 rows, the second 8."""
    monkeypatch.chdir(docs_folder)
    order = order_of_the_page(
        docs_folder,
        defaults,
        "data.sampler=annealed.py:annealed",
        "data.sampler_kwargs.end=0.2",
    )
    num_first = [int((order.rows_of_batch(k) < 84).sum()) for k in range(20)]
    assert num_first[0] == 7
    assert num_first[-1] == 2
    assert num_first == sorted(num_first, reverse=True)


def test_the_pages_lines_about_weights_are_those_of_a_run():
    """With a batch of 256 and 80 steps."""
    mixture = Mixture([18_560, 2_080], [3, 1], 256, seed=0)
    lines = share_lines(mixture, ["chats.jsonl", "code.jsonl"], 80 * 256)
    assert "\n".join(lines) in PAGES["docs/order.md"]
    counts = [int((mixture.rows_of_batch(k) < 18_560).sum()) for k in range(5)]
    assert counts == [192] * 5


def test_the_pages_errors_are_those_of_a_sampler():
    inputs = {"batch_size": 8, "num_rows": 84}
    results = {0: [1] * 7, 7: [1] * 7 + [84]}
    sampler = UserSampler("my.py:name", lambda batch_index, **_: results[batch_index], inputs)
    for batch_index in results:
        with pytest.raises(InputError) as caught:
            sampler.rows_of_batch(batch_index)
        assert f"error: {caught.value}\n" in PAGES["docs/order.md"]


def test_the_page_lists_every_input_of_a_sampler():
    table = re.findall(r"^\| `(\w+)` \|", PAGES["docs/order.md"], re.MULTILINE)
    assert sorted(table) == sorted(INPUTS)
