"""The preview of rows: decoded tokens, trained ones highlighted, and ignored fields."""

import json
import sys
from types import SimpleNamespace

import pytest
from PIL import Image

from config import InputError
from data import preview
from data.chat.tokenizer import ChatTokenizer
from data.dataset import TokenDataset
from data.lengths import LengthLimit
from data.preview import preview_dataset, row_lines
from data.prompts import PromptDataset, tokenize_prompts
from tests.data.chat_templates import make_tokenizer
from tests.data.test_dataset import chat, make, options, tokenizer_dir, write  # noqa: F401
from tests.support.models import make_image_model


@pytest.fixture
def show(tokenizer_dir, tmp_path, capsys):  # noqa: F811
    """Return a function: show(rows, argument, ...) -> the lines that the command prints."""

    def show(rows, *arguments):
        path = write(tmp_path / "rows.jsonl", rows)
        preview.main([str(path), f"model.path={tokenizer_dir}", *arguments])
        lines = capsys.readouterr().out.splitlines()
        return [line.replace(str(tmp_path), "DIR") for line in lines if line]

    return show


def test_trained_tokens_are_between_brackets(show):
    row = chat("2+3", "5", "sure?", "yes") | {"source": "a book"}
    lines = show([row, chat("only", "two rows"), chat("not", "shown")], "--rows", "2")
    assert lines == [
        "DIR/rows.jsonl:1: 54 tokens, 6 of them trained",
        "  | <|im_start|>user",
        "  | 2+3<|im_end|>",
        "  | <|im_start|>assistant",
        "  | [[5<|im_end|>]]",
        "  | <|im_start|>user",
        "  | sure?<|im_end|>",
        "  | <|im_start|>assistant",
        "  | [[yes<|im_end|>]]",
        "  | ",
        "DIR/rows.jsonl:2: 33 tokens, 9 of them trained",
        "  | <|im_start|>user",
        "  | only<|im_end|>",
        "  | <|im_start|>assistant",
        "  | [[two rows<|im_end|>]]",
        "  | ",
        "in the first 2 rows:",
        "rows.jsonl: reads messages (role, content); ignores the columns source (1 row)",
    ]


def test_options_may_stand_between_settings(show, capsys):
    rows = [chat("a", "b"), chat("c", "d")]
    lines = show(rows, "--rows", "1", "data.max_length=50")
    assert "in the first row:" in lines
    for number in ("0", "-1", "x"):
        with pytest.raises(SystemExit):
            show(rows, "--rows", number)
        assert f"{number} must be a number of rows, at least 1" in capsys.readouterr().err


def test_both_answers_of_a_pair_are_shown(show):
    pair = {"prompt": "2+3", "chosen": "5", "rejected": "6", "score": 1.0}
    label = {"prompt": "2+3", "completion": "6", "label": False}
    same = pair | {"rejected": "5"}
    lines = show([pair, label, same], "--preferences")
    assert lines == [
        "DIR/rows.jsonl:1, chosen: 25 tokens, 2 of them trained",
        "  | <|im_start|>user",
        "  | 2+3<|im_end|>",
        "  | <|im_start|>assistant",
        "  | [[5<|im_end|>]]",
        "  | ",
        "DIR/rows.jsonl:1, rejected: 25 tokens, 2 of them trained",
        "  | <|im_start|>user",
        "  | 2+3<|im_end|>",
        "  | <|im_start|>assistant",
        "  | [[6<|im_end|>]]",
        "  | ",
        "DIR/rows.jsonl:2, rejected: 25 tokens, 2 of them trained",
        "  | <|im_start|>user",
        "  | 2+3<|im_end|>",
        "  | <|im_start|>assistant",
        "  | [[6<|im_end|>]]",
        "  | ",
        "DIR/rows.jsonl:3: not used: the chosen and the rejected answer are the same",
        "in the first 3 rows:",
        "rows.jsonl: reads prompt, chosen, rejected, completion, label; ignores the columns score "
        "(2 rows)",
    ]


def test_rows_that_are_errors_or_too_long_are_shown_as_such(show):
    lost = chat("q", "a")
    lost["messages"][1]["reasoning_content"] = "because of this"
    asked = {"messages": [{"role": "user", "content": "q"}]}
    rows = [lost, chat("q", "a" * 300), asked, ""]
    lines = show(rows, "data.max_length=100", "data.truncation=drop", "--rows", "4")
    assert lines[0].startswith("error: DIR/rows.jsonl:1: the chat template leaves out reasoning")
    assert lines[1:4] == [
        "DIR/rows.jsonl:2: not used: 322 tokens, more than data.max_length=100",
        "DIR/rows.jsonl:3: not used: no token is trained",
        "DIR/rows.jsonl:4: not used: the line is blank",
    ]
    assert "in the first 4 rows:" in lines


def test_without_a_row_that_is_read_no_columns_are_listed(show):
    lines = show([{"question": "2+3", "answer": "5"}])
    assert len(lines) == 1
    assert lines[0].startswith('error: DIR/rows.jsonl:1: "messages" is missing')


def test_a_prompt_ends_with_the_generation_prompt(show):
    lines = show([{"prompt": "2+3", "answer": "5"}], "--prompts")
    assert lines[0] == "DIR/rows.jsonl:1: 22 tokens"
    assert lines[3:5] == ["  | <|im_start|>assistant", "  | "]
    assert "leaves to the reward function answer" in lines[-1]


def test_the_prompt_of_a_teacher_follows_the_policys(show):
    row = {"prompt": "2+3", "hint": "2+3, which is 5"}
    lines = show([row], "--prompts", "data.teacher_prompt_key=hint")
    names = [line for line in lines if line.startswith("DIR")]
    assert names == [
        "DIR/rows.jsonl:1: 22 tokens",
        "DIR/rows.jsonl:1, as the teacher sees it: 34 tokens",
    ]
    assert lines[lines.index(names[1]) + 2] == "  | 2+3, which is 5<|im_end|>"


def test_a_terminal_gets_colours_and_no_control_characters_of_the_text(show, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = show([chat("\x1b[31mred\r\u202e", "5")])
    assert "  | \x1b[32m5<|im_end|>\x1b[0m" in lines
    assert "  | \\x1b[31mred\\r\\u202e<|im_end|>" in lines
    monkeypatch.setenv("NO_COLOR", "1")
    assert "  | [[5<|im_end|>]]" in show([chat("q", "5")])


def test_long_texts_lose_their_middle(show):
    (line,) = (line for line in show([chat("q", "x" * 3000)]) if "xxx" in line)
    assert " ... " in line
    assert len(line) < 2100


def test_a_dry_run_shows_the_first_rows_of_its_data_set(make, tokenizer_dir, tmp_path):  # noqa: F811
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    file = write(tmp_path / "rows.jsonl", [chat("q", "first"), chat("q", "second")])
    chat_tokenizer = ChatTokenizer(tokenizer)
    trained = list(preview_dataset(TokenDataset.load(make(file)), chat_tokenizer, 1))
    assert trained[0] == "row 1: 27 tokens, 6 of them trained"
    assert "  | [[first<|im_end|>]]" in trained
    settings = SimpleNamespace(**vars(options()), max_prompt_length=100, teacher_prompt_key=None)
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "2+3"}])
    cache = tokenize_prompts(str(prompts), tokenizer, settings, tmp_path / "c", tokenizer_dir)
    shown = list(preview_dataset(PromptDataset.load(cache), chat_tokenizer, 3))
    assert shown[0] == "row 1: 22 tokens"
    assert json.dumps(shown).count("[[") == 0
    settings.teacher_prompt_key = "hint"
    prompts = write(tmp_path / "hints.jsonl", [{"prompt": "2+3", "hint": "2+3 is 5"}])
    cache = tokenize_prompts(str(prompts), tokenizer, settings, tmp_path / "c", tokenizer_dir)
    shown = list(preview_dataset(PromptDataset.load(cache), chat_tokenizer, 3))
    assert "row 1, as the teacher sees it: 27 tokens" in shown


@pytest.mark.parametrize("kind", [(), ("--prompts",)])
def test_images_are_counted_in_tokens(show, tmp_path, kind):
    """The model may have the template in its processor, as older ones do."""
    model = make_image_model(tmp_path / "model", "qwen2_5_vl")
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    (model / "processor_config.json").write_text(json.dumps({"chat_template": template}))
    Image.new("RGB", (90, 60)).save(tmp_path / "0.png")
    row = chat("What is <image>?", "black") | {"images": ["0.png"]}
    settings = [f"model.path={model}", "model.images=true", *kind]
    lines = show([row], *settings)
    assert "  | What is <6 image tokens>?<|im_end|>" in lines
    assert "images" in lines[-1]
    setting = "data.max_prompt_length" if kind else "data.max_length"
    lines = show([row], *settings, f"{setting}=20", "data.truncation=right")
    assert lines[0] == f"DIR/rows.jsonl:1: not used: truncation to {setting}=20 would cut an image"


def test_images_that_cannot_be_shown_are_one_line(show, tmp_path):
    row = chat("<image>", "a cat") | {"images": ["0.png"]}
    model = make_image_model(tmp_path / "model", "qwen2_5_vl")
    (line,) = show([row], f"model.path={model}")
    assert line == (
        "error: DIR/rows.jsonl:1: the row has images: set model.images=true, which train_sft.py "
        "and train_ppo.py accept, or remove them"
    )
    with pytest.raises(InputError, match="cannot load a processor from model.path="):
        show([row], "model.images=true")
    for kind, script in (("--preferences", "train_dpo.py"), ("--rewards", "train_rm.py")):
        with pytest.raises(InputError, match=f"model.images=true does not work with {script}"):
            show([row], "model.images=true", kind)


UNUSED_ROWS = [
    ({"error": "it is broken"}, "error: it is broken"),
    ({"is_lost": True, "length": 9}, "a:1: dropped, because the template loses a part of it"),
    ({"is_identical": True}, "a:1: not used: the chosen and the rejected answer are the same"),
    ({}, "a:1: not used: the line is blank"),
    ({"cut": True, "length": 9}, "a:1: not used: truncation to data.max_length=8 would cut an im"),
    ({"length": 9}, "a:1: not used: 9 tokens, more than data.max_length=8"),
    ({"length": 8}, "a:1: not used: no token is trained"),
]


@pytest.mark.parametrize("columns, line", UNUSED_ROWS)
def test_the_reason_is_shown_for_a_row_that_is_not_used(columns, line):
    row = {"input_ids": [], "length": 0, "is_lost": False} | columns
    limit = LengthLimit("max_length", 8, "drop")
    (shown,) = row_lines("a:1", row, ChatTokenizer(make_tokenizer()), limit)
    assert shown.startswith(line)
