"""The scripts in examples/."""

import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from examples import arithmetic, calculator, colours, reasoning
from rollout.episodes.parsing import guess_tool_parser
from tests.support.launch import run


def count_right(output: str) -> int:
    """Return the number of right replies that `ask` has printed."""
    return int(re.search(r"^(\d+) of \d+ replies are right", output, re.MULTILINE)[1])


def test_right_replies_are_counted_even_if_they_are_not_shown(tmp_path: Path, monkeypatch, capsys):
    """The only colour's name is the reply of a model with random weights to the first picture."""
    monkeypatch.setattr(colours, "NUM_TRAIN", 1)
    monkeypatch.setattr(colours, "NUM_VAL", 3)
    monkeypatch.setattr(colours, "COLOURS", {"red": (220, 40, 40)})
    colours.build(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    question = colours.make_rows(tmp_path / "images")["val"][0]["messages"][:1]
    image_part = question[0]["content"][0]
    image_part["image"] = str(tmp_path / image_part["image"])
    reply = colours.reply_to(model, processor, question)
    monkeypatch.setattr(colours, "COLOURS", {reply: (220, 40, 40)})
    capsys.readouterr()

    counts = {}
    for num_shown in (0, 3):
        colours.ask(tmp_path / "model", num_shown)
        output = capsys.readouterr().out
        assert output.count(" square: ") == num_shown
        counts[num_shown] = count_right(output)
    assert counts[0] >= 1
    assert counts[0] == counts[3]


STEP = re.compile(r"(\d+)([-+*])(\d+)([-+]1)?=(\d+)")


def check_columns(problem: str, steps: list[str], result: int) -> None:
    """Each step is right by itself, and the steps work on all digits, units first."""
    first, sign, second = re.fullmatch(r"(\d+)([-+*])(\d+)", problem).groups()
    values = []
    for step in steps:
        a, step_sign, b, carried, value = STEP.fullmatch(step).groups()
        assert step_sign == sign
        assert eval(f"{a}{sign}{b}{carried or ''}") == int(value)
        assert (carried or sign)[0] == sign
        values.append(int(value))
    if sign == "*":
        assert values[0] + 10 * values[1] == result
        return
    width = max(len(first), len(second))
    assert len(steps) == width
    digits = sum(value % 10 * 10**place for place, value in enumerate(values))
    carry_out = 10**width if values[-1] > 9 and sign == "+" else 0
    assert digits + carry_out == result
    for place, step in enumerate(steps):
        a, _, b, _, _ = STEP.fullmatch(step).groups()
        assert int(a) % 10 == int(first) // 10**place % 10
        assert int(b) == int(second) // 10**place % 10


@pytest.fixture(scope="module")
def arithmetic_rows():
    return arithmetic.make_rows()


def test_answers_and_columns_are_right_and_held_out_problems_stay_so(arithmetic_rows):
    train, val = arithmetic_rows
    assert (len(train), len(val)) == (arithmetic.NUM_TRAIN, arithmetic.NUM_VAL)
    problems = {"train": set(), "val": set()}
    num_worked = 0
    for name, rows in (("train", train[:2000]), ("val", val)):
        for row in rows:
            question, reply = (message["content"] for message in row["messages"])
            problem = re.split(r" (?=\d)", question)[-1]
            result = int(eval(problem))
            assert row["answer"] == str(result)
            assert result >= 0
            *steps, last = reply.split(", ")
            assert last == row["answer"]
            asks_for_steps = question.startswith(("Work out ", "Step by step: "))
            assert steps or not asks_for_steps
            if steps:
                check_columns(problem, steps, result)
            num_worked += bool(steps) and not asks_for_steps
            problems[name].add(problem)
    assert len(problems["val"]) == arithmetic.NUM_VAL
    assert not problems["val"] & problems["train"]
    assert 0.15 < num_worked / (2500 / 2) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "mimo"])
def test_the_demo_model_ends_and_pads_as_its_tokenizer(kind):
    tokenizer = arithmetic.make_tokenizer()
    model = arithmetic.make_model(tokenizer, kind)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id


def test_rows_are_byte_identical(tmp_path, arithmetic_rows):
    """The same data as ever: the documentation quotes numbers of runs on it."""
    always_worked, _ = arithmetic.make_rows(always_worked=True)
    assert all(", " in row["messages"][1]["content"] for row in always_worked)
    train, val = arithmetic_rows
    digests = []
    for rows in (train, val, always_worked):
        arithmetic.write_rows(tmp_path / "rows.jsonl", rows)
        text = (tmp_path / "rows.jsonl").read_text()
        assert [json.loads(line) for line in text.splitlines()] == rows
        assert text.endswith("\n")
        digests.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    assert digests == ["46733d559ecbfdda", "f62e3253a7f2304c", "c50554cad7ba642e"]


def check_square(pixels: np.ndarray, colour: str) -> None:
    """Check that a picture shows a square of a shade of this colour on grey."""
    assert pixels.shape == (colours.IMAGE_SIZE, colours.IMAGE_SIZE, 3)
    is_grey = (np.ptp(pixels, axis=2) == 0) & (pixels[..., 0] >= 110) & (pixels[..., 0] < 150)
    shade = pixels[~is_grey]
    assert len(shade) == colours.SQUARE_SIZE**2
    assert np.abs(shade - colours.COLOURS[colour]).max() <= 20


def test_pictures_are_byte_identical_and_show_their_colours(tmp_path, monkeypatch):
    monkeypatch.setattr(colours, "NUM_TRAIN", 6)
    monkeypatch.setattr(colours, "NUM_VAL", 2)
    rows = colours.make_rows(tmp_path / "images")
    assert [len(rows[name]) for name in ("train", "val", "words")] == [6, 2, 6]
    digest = hashlib.sha256(json.dumps(rows).encode())
    for row in [*rows["val"], *rows["train"]]:
        question, answer = row["messages"]
        image_part, text_part = question["content"]
        assert text_part["text"] == colours.QUESTION
        assert answer["content"] == row["answer"]
        pixels = np.asarray(Image.open(tmp_path / image_part["image"])).astype(int)
        check_square(pixels, row["answer"])
        digest.update(pixels.tobytes())
    assert digest.hexdigest()[:16] == "b9ff855b52e4d86c"


@pytest.mark.parametrize("colour", colours.COLOURS)
def test_no_shade_of_a_colour_wraps_around(colour):
    """Shades of white and black reach both ends of a pixel's values."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        check_square(np.asarray(colours.draw(colour, rng)).astype(int), colour)


def test_pairs_prefer_the_columns(docs_folder):
    """Each worked answer is beside its own number, and no validation problem is trained on."""
    questions = {}
    for name in ("train", "val"):
        lines = (docs_folder / "pairs" / f"{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for row in rows:
            chosen = row["chosen"][0]["content"]
            assert chosen.rpartition(", ")[2] == row["rejected"][0]["content"] != chosen
        questions[name] = {row["prompt"][0]["content"].split()[-1] for row in rows}
    assert not questions["train"] & questions["val"]


def test_all_problems_of_a_built_directory_of_worked_answers_are_worked(docs_folder):
    shares = {}
    for name in ("worked/train", "worked/val", "val"):
        rows = [json.loads(line) for line in open(docs_folder / f"{name}.jsonl")]
        is_worked = [", " in row["messages"][1]["content"] for row in rows]
        shares[name] = sum(is_worked) / len(rows)
    assert shares["worked/train"] == shares["worked/val"] == 1
    assert shares["val"] < 1


def test_the_models_of_the_examples(docs_folder, tmp_path):
    """Their sizes, and the tokens that the templates and the engines rely on."""
    config = AutoConfig.from_pretrained(docs_folder / "model")
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [getattr(config, name) for name in sizes] == [256, 2, 8, 2]
    assert config.eos_token_id == arithmetic.make_tokenizer().eos_token_id
    assert not config.tie_word_embeddings
    mimo = json.loads((docs_folder / "mimo" / "config.json").read_text())
    assert mimo["num_nextn_predict_layers"] == 1
    tokenizer = colours.make_image_tokenizer()
    vision = colours.make_config(tokenizer)
    assert vision.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert vision.vision_end_token_id == tokenizer.convert_tokens_to_ids("<|vision_end|>")
    assert vision.vision_config.image_size == colours.IMAGE_SIZE
    assert vision.text_config.vocab_size == len(tokenizer)
    assert vision.text_config.eos_token_id == tokenizer.eos_token_id
    assert not vision.tie_word_embeddings
    sections = vision.text_config.rope_parameters["mrope_section"]
    assert sum(sections) == vision.text_config.head_dim // 2
    with torch.device("meta"):
        vision_model = AutoModelForImageTextToText.from_config(vision)
    assert vision_model.num_parameters() == 617408


def test_replies_are_shown_in_32_characters():
    assert arithmetic.shortened("7+8=15, 85") == "7+8=15, 85"
    assert arithmetic.shortened("a" * 32) == "a" * 32
    assert arithmetic.shortened("a" * 33) == "a" * 29 + "..."
    assert arithmetic.shortened("a\nb") == r"a\nb"
    assert arithmetic.shortened("\n" * 20) == r"\n" * 14 + "\\..."


@pytest.mark.parametrize(
    "response, expected, found",
    [
        ("6 + 1 = 7\n#### 7", "7", "7"),
        ("#### 7\n#### 8", "7", "8"),
        ("the sum is 1,234.5 in all", "3", "1234.5"),
        ("first 3, then -4", "3", "-4"),
        ("#### about 12 of 15", "3", "15"),
        ("no number", "3", None),
        (" a text \n", "word", "a text"),
        ("why\n####  a b", "word", "a b"),
        ("  ", "word", None),
    ],
)
def test_the_answer_at_the_end_of_a_response(response, expected, found):
    assert reasoning.find_answer(response, expected) == found


@pytest.mark.parametrize(
    "response, is_right",
    [
        ("6 + 1 = 7\n#### 7", True),
        ("#### 7\n", True),
        ("#### 6\n#### 7", False),
        ("#### 7\nso it is 7", False),
        ("it is #### 7", False),
        ("####", False),
        ("7", False),
    ],
)
def test_the_format_of_a_worked_solution(response, is_right):
    assert reasoning.ends_in_marked_answer(response) == is_right


def test_rows_of_reasoning_keep_the_worked_solution_and_the_rest_of_the_metadata():
    entry = {"question": " 1+1? ", "answer": 2, "metadata": {"answer_cot": "#### 2", "level": 3}}
    row = reasoning.make_row(entry, "sums")
    assert row == {
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "#### 2"},
        ],
        "with_hint": "1+1?\nHint: the answer is 2.",
        "answer": "2",
        "task": "sums",
        "metadata": '{"level": 3}',
    }
    del entry["metadata"]["answer_cot"]
    assert reasoning.make_row(entry, "sums")["messages"][1]["content"] == "2"


def test_settings_of_reasoning_tasks():
    settings = reasoning.parse_settings(["task=sums", "n=20", "negative=false"])
    assert settings == {"task": "sums", "n": 20, "negative": False}
    with pytest.raises(ValueError, match="'20' is not of the form key=value"):
        reasoning.parse_settings(["task=sums", "20"])
    with pytest.raises(ValueError, match="task=NAME is missing"):
        reasoning.parse_settings(["n=20"])


@pytest.mark.parametrize(
    "expression, result",
    [
        ("347*829", "287663"),
        ("287663+5512", "293175"),
        ("10-25", "-15"),
        ("347*829+5512", "error"),
        ("-3*2", "error"),
        ("__import__('os')", "error"),
        ("", "error"),
    ],
)
def test_the_calculator_takes_two_numbers_at_a_time(expression, result):
    assert calculator.calculate(expression) == result


def check_trace(messages: list[dict], answer: int) -> int:
    """Check that calls compute the answer from earlier results; return their number."""
    *calls, last = messages[1:]
    if not calls:
        assert last == calculator.GIVE_UP
        return 0
    assert last == {"role": "assistant", "content": str(answer)}
    numbers = messages[0]["content"]
    for request, result in zip(calls[::2], calls[1::2], strict=True):
        (call,) = request["tool_calls"]
        expression = call["function"]["arguments"]["expression"]
        assert set(re.findall(r"\d+", expression)) <= set(re.findall(r"\d+", numbers))
        assert result == {"role": "tool", "content": str(eval(expression))}
        numbers += " " + result["content"]
    assert calls[-1]["content"] == str(answer)
    return len(calls) // 2


def test_traces_of_the_calculator_are_right_and_held_out_problems_stay_so():
    rows = calculator.make_rows()
    sizes = [len(rows[name]) for name in ("traces", "train", "val")]
    assert sizes == [calculator.NUM_TRACES, calculator.NUM_TRAIN, calculator.NUM_VAL]
    questions = [row["messages"][0]["content"] for row in rows["traces"]]
    num_calls = []
    for row, question in zip(rows["traces"], questions):
        assert row["tools"] == [calculator.CALCULATOR]
        answer = eval(question.removeprefix("What is "))
        num_calls.append(check_trace(row["messages"], answer))
    for row in rows["train"] + rows["val"]:
        assert row["answer"] == str(eval(row["prompt"].removeprefix("What is ")))
        questions.append(row["prompt"])
    assert len(set(questions)) == len(questions)
    shares = [num_calls.count(n) / len(num_calls) for n in range(3)]
    assert shares == pytest.approx([4 / 6, 1 / 6, 1 / 6], abs=0.02)
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest[:16] == "2974751f219020b5"


def test_conversations_with_the_calculator_are_short_and_in_the_format_of_hermes():
    """A reader of tokens and a reader of texts see the same conversation."""
    tokenizer = calculator.make_tool_tokenizer()
    assert guess_tool_parser(tokenizer.chat_template) == "hermes"
    steps = ["347*829", "287663+5512"]
    question = {"role": "user", "content": "What is 347*829+5512"}
    messages = [question, *calculator.make_trace(steps)]
    tools = [calculator.CALCULATOR]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    calls = re.findall("<tool_call>(.*?)</tool_call>", text)
    expected = [{"name": "calculate", "arguments": {"expression": step}} for step in steps]
    assert [json.loads(call) for call in calls] == expected
    assert json.loads(re.search("<tools>(.*?)</tools>", text)[1]) == calculator.CALCULATOR
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) == 88


@pytest.mark.slow
def test_the_demo_with_tools_in_short(tmp_path: Path, monkeypatch):
    """The model always calls the calculator, since it has seen nothing else, but copies badly."""
    monkeypatch.setattr(calculator, "SHARE_CALLS", 1.0)
    monkeypatch.setattr(calculator, "NUM_TRACES", 320)
    monkeypatch.setattr(calculator, "NUM_VAL", 4)
    calculator.build(tmp_path / "data")
    settings = [f"data.cache_dir={tmp_path}/cache", "trainer.log_freq=1"]
    run(
        [
            *(sys.executable, "train_sft.py", "configs/demo/tools_sft.yaml", *settings),
            f"output_dir={tmp_path}/sft",
            f"model.path={tmp_path}/data/model",
            f"data.train_files={tmp_path}/data/traces.jsonl",
            "trainer.total_steps=30",
        ]
    )
    run(
        [
            *(sys.executable, "train_ppo.py", "configs/demo/tools.yaml", *settings),
            f"output_dir={tmp_path}/tools",
            f"model.path={tmp_path}/sft/hf",
            f"data.train_files={tmp_path}/data/train.jsonl",
            f"data.val_files={tmp_path}/data/val.jsonl",
            *("data.train_batch_size=2", "rollout.n=2", "trainer.total_steps=1"),
        ]
    )
    validations = calculator.read_validations(tmp_path / "tools")
    assert sorted(validations) == [0, 1]
    for episodes in validations.values():
        assert len(episodes) == 4
        for episode in episodes:
            check_episode(episode)
    shown = run([sys.executable, "examples/calculator.py", "show", tmp_path / "tools", "--n", "1"])
    assert shown.stdout.count("calculate(") >= 2
    assert shown.stdout.count(" of 4 replies are right (") == 2


def check_episode(episode: dict) -> None:
    """Check the prompt, that each call has its result, and that the score is the last reply's."""
    assert episode["prompt"].startswith("<|im_start|>system\n<tools>")
    calls = 0
    for message, following in zip(episode["messages"], episode["messages"][1:]):
        for call in message.get("tool_calls") or []:
            calls += 1
            expression = json.loads(call["function"]["arguments"])["expression"]
            assert following["content"] == calculator.calculate(expression)
    assert calls
    last = episode["messages"][-1]
    is_right = not last.get("tool_calls") and last["content"] == episode["row"]["answer"]
    assert episode["score"] == is_right
