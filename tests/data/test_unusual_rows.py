"""Rows and files that are nearly right: they are read as meant, or an error says what to do."""

import json
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from config import InputError
from data.chat.plain_text import encode_pair
from data.chat.tokenizer import ChatTokenizer
from data.files import find_files, parse_row
from data.messages import check_message
from data.rows import read_tools, template_inputs, training_messages
from data.shapes import read_shape
from data.tokenization import default_processes
from tests.data.chat_templates import make_tokenizer
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


@pytest.mark.parametrize(
    "column, argument, value", [(True, False, False), ("true", None, True), (None, True, True)]
)
def test_an_argument_of_the_template_wins_over_the_column_of_its_name(column, argument, value):
    arguments = {"enable_thinking": argument, "tone": "kind"}
    row = {"enable_thinking": column, "chat_template_kwargs": arguments}
    inputs = template_inputs(row | {"tools": [{"a": None}]}, set(), options())
    assert inputs.arguments == {"enable_thinking": value, "tone": "kind"}
    assert inputs.tools == [{}]
    without = template_inputs(row, set(), options(ignored_fields=["tone", "enable_thinking"]))
    assert without.arguments == {}


def test_likely_columns_are_proposed_however_they_are_written():
    with pytest.raises(InputError) as caught:
        training_messages({"id": 1, " Question": "q", "ANSWER ": "a"}, True, options())
    settings = "set data.prompt_key= Question data.response_key=ANSWER "
    assert str(caught.value).endswith(settings)


def test_many_rows_that_are_too_long_are_shortened_in_the_error(make, tmp_path):  # noqa: F811
    path = write(tmp_path / "a.jsonl", [chat("q", "a " * 50)] * 9)
    with pytest.raises(InputError, match=r"^9 of 9 rows are longer .*, \.\.\.; raise it"):
        make(path, max_length=40)


@pytest.mark.parametrize("num_rows, num_cpus, number", [(1999, 4, 1), (2000, 4, 4), (2000, 99, 8)])
def test_many_rows_are_tokenized_in_several_processes(monkeypatch, num_rows, num_cpus, number):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(num_cpus))
    assert default_processes(num_rows) == number


def test_a_tokenizer_without_offsets_is_an_error():
    with pytest.raises(InputError, match="^SimpleNamespace returns no character offsets: use a"):
        ChatTokenizer(SimpleNamespace(is_fast=False))


@pytest.mark.parametrize("adds_eos", [False, True])
def test_a_response_without_a_template_ends_with_one_eos_token(adds_eos):
    tokenizer = make_tokenizer(None)
    eos = tokenizer.eos_token_id
    if adds_eos:
        ending = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", eos)])
        tokenizer.backend_tokenizer.post_processor = ending
    ids, mask = encode_pair("2+3?", "5", None, ChatTokenizer(tokenizer))
    assert ids.count(eos) == 1
    assert (ids[-1], mask[-1]) == (eos, 1)
    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert tokenizer.decode(trained) == "5</s>"
    assert encode_pair("", "", None, ChatTokenizer(tokenizer)) == ([eos], [1])
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="the tokenizer has no eos token"):
        encode_pair("2+3?", "5", None, ChatTokenizer(tokenizer))


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
