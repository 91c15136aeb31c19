"""Rows and files that are nearly right: they are read as meant, or an error says what to do."""

import json

import pytest

from config import InputError
from data.files import find_files, parse_row
from data.messages import check_message
from data.rows import read_tools, training_messages
from data.shapes import read_shape
from tests.data.test_dataset import chat, make, options, tokenizer_dir, write  # noqa: F401

SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    "text", ['{"a": 1, "b": 2, "a": 3}', '{"messages": [{"role": "user", "a": 1, "a": 1}]}']
)
def test_a_repeated_key_is_an_error(text):
    with pytest.raises(InputError, match='the key "a" occurs twice in one object'):
        parse_row(text)
    assert parse_row('{"a": [{"b": 1}, {"b": 2}]}') == {"a": [{"b": 1}, {"b": 2}]}


@pytest.mark.parametrize(
    "column, value", [("messages", chat("q", "a")["messages"]), ("conversations", SHAREGPT)]
)
def test_a_chat_as_json_text_is_read(column, value):
    row, _ = read_shape({column: json.dumps(value)}, options(), with_response=True)
    messages = training_messages(row, True, options())
    assert messages == chat("q", "a")["messages"]


@pytest.mark.parametrize("text", ["[1, 2]", "[not json", '[{"a": 1}]', "plain"])
def test_other_texts_stay_texts(text):
    row, _ = read_shape({"prompt": text, "response": text}, options(), with_response=True)
    assert row["prompt"] == text


def test_tools_may_be_an_empty_cell():
    assert read_tools({"tools": " "}, options()) is None
    assert read_tools({"tools": "[]"}, options()) == []
    with pytest.raises(InputError, match="must be a list of JSON schemas, .* not 'none'"):
        read_tools({"tools": "none"}, options())


def test_the_old_function_call_is_named():
    message = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
    with pytest.raises(InputError, match=r"OpenAI's old format: write it as \"tool_calls\""):
        check_message(message, "messages[1]")


def test_a_file_of_blank_lines_is_named_as_such(make, tmp_path):  # noqa: F811
    with pytest.raises(InputError, match="no row is left: all lines of the files are blank"):
        make(write(tmp_path / "blank.jsonl", ["", "  "]))


def test_a_data_set_on_the_hub_has_to_be_saved():
    with pytest.raises(InputError, match=r"load_dataset\('openai/gsm8k'\).save_to_disk"):
        find_files("openai/gsm8k")
    with pytest.raises(InputError, match="no such file or directory$"):
        find_files("data/train.jsonl")
