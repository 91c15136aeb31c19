"""Rows and files as other projects write them: nothing in them is lost or misread in silence."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from config import InputError
from data.chat.conversation import without_loss_keys
from data.chat.encoding import encode as encode_row, encode_together, is_learned
from data.chat.tokenizer import ChatTokenizer
from data.columns import check_column_keys, report_lines, unused_row_lines, uses_of_file
from data.dataset import tokenize_row
from data.files import find_files, parse_row, read_rows
from data.messages import check_message
from data.prompts import encode_prompt, tokenize_row as tokenize_prompt
from data.rows import system_column, template_inputs, training_messages
from data.shapes import read_shape
from tests.data.chat_templates import MISTRAL, QWEN2, make_tokenizer
from tests.data.test_chat import ADD, call, options, say, trained

# A template that prints a content of any type, like Llama's for the results of tools.
PRINTS_ALL = """
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
ENDS = ["<|im_end|>"]


def text(value, **fields):
    return {"type": "text", "text": value} | fields


def encoded(row, template=QWEN2, **changes):
    """Return the EncodedRow of a row, or raise its InputError."""
    tokenizer = make_tokenizer(template)
    chat = ChatTokenizer(tokenizer, tokenizer.convert_tokens_to_ids(ENDS))
    (result,) = encode_together([encode_row(row, chat, options(**changes))])
    if isinstance(result, InputError):
        raise result
    return result


# -- parts of messages -----------------------------------------------------------------------------

ANTHROPIC_CALL = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}
ANTHROPIC_RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "20 degrees"}
THOUGHT = {"type": "thinking", "thinking": "Two and three are five."}


@pytest.mark.parametrize("template", [QWEN2, MISTRAL, PRINTS_ALL])
@pytest.mark.parametrize(
    "messages",
    [
        say("2+3", {"role": "assistant", "content": [THOUGHT, text("5")]}),
        say("Weather?", {"role": "assistant", "content": [text("Wait."), ANTHROPIC_CALL]}),
        say([ANTHROPIC_RESULT], [text("20 degrees")]),
    ],
)
def test_parts_of_other_types_are_neither_left_out_nor_printed_as_code(template, messages):
    with pytest.raises(InputError, match="a part of message ., .* tool calls as its key"):
        encoded({"messages": messages}, template)


def test_texts_in_parts_are_printed_as_texts_beside_other_forms():
    row = {"messages": say([text("one"), text("two")], "three")}
    ids = encoded(row, PRINTS_ALL).input_ids
    assert "one\ntwo" in make_tokenizer(PRINTS_ALL).decode(ids)
    assert encoded({"messages": say([], "three")}).input_ids


def test_code_that_a_message_quotes_is_no_sign_of_a_wrong_form():
    quoting = [
        {"role": "user", "content": "Call it with {'a': 1} or [{'type': 'text', 'text': 'x'}]"},
        {"role": "assistant", "tool_calls": [call("add", a=1)]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    assert trained(QWEN2, {"messages": quoting}, ends=ENDS)[0] == f"{ADD}<|im_end|>"


@pytest.mark.parametrize("key", ["train", "weight", "loss_mask", "train_detail"])
def test_a_part_that_is_excluded_from_the_loss_is_an_error(key):
    row = {"messages": say("q", [text("not this ", **{key: 0}), text("but this")])}
    with pytest.raises(InputError, match=rf"message 1.content\[0\].{key}.* split the message"):
        encoded(row)
    assert encoded(row, ignored_fields=[key])


def test_fields_of_parts_are_reported():
    cited = [text("answer", citations=[{"cited_text": "the source"}], cache_control={"type": "x"})]
    row = {"messages": say("q", cited)}
    with pytest.raises(InputError, match="leaves out citations of message 1"):
        encoded(row)
    losses = encoded(row, ignored_fields=["citations"]).losses
    assert [(loss.kind, loss.field) for loss in losses] == [("unread", "cache_control")]


def encoded_prompt(row, **changes):
    """Return the EncodedPrompt of a row, or raise its InputError."""
    chat = ChatTokenizer(make_tokenizer(QWEN2))
    (result,) = encode_together([encode_prompt(row, chat, options(**changes))])
    if isinstance(result, InputError):
        raise result
    return result


def test_fields_of_parts_of_a_prompt_are_reported_too():
    """An error, or a prompt that is dropped. But the reply, which no prompt includes, may cite."""
    cited = [text("answer", citations=[{"cited_text": "the source"}])]
    row = {"messages": say("q", cited, "more")}
    with pytest.raises(InputError, match="leaves out citations of message 1"):
        encoded_prompt(row)
    assert encoded_prompt(row, lost_fields="drop").is_dropped
    losses = encoded_prompt(row, lost_fields="ignore").losses
    assert [(loss.kind, loss.field) for loss in losses] == [("lost", "citations")]
    assert not encoded_prompt({"messages": say("q", cited)}).losses


def test_an_error_names_all_fields_that_could_be_ignored():
    row = {"messages": say({"role": "user", "content": "q", "country": "US", "ip": "a b"}, "a")}
    with pytest.raises(InputError, match=r"ignored_fields=\[country,ip\] if"):
        encoded(row)


# -- calls of tools --------------------------------------------------------------------------------


def agent(function):
    return say(
        "q",
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "done"},
    )


@pytest.mark.parametrize(
    "function, error",
    [
        ({"arguments": {"a": 1}}, "has no function name"),
        ({"name": "add", "parameters": {"a": 1}}, 'no "arguments", only parameters'),
        ({"name": "add", "arguments": '{"a":'}, "arguments of tool calls must be an object"),
        ({"name": "add", "arguments": '"{}"'}, "arguments of tool calls must be an object"),
        ({"name": "add", "arguments": "[1, 2]"}, "arguments of tool calls must be an object"),
        ({"name": "add", "arguments": "null"}, "arguments of tool calls must be an object"),
        (
            {"name": "add", "arguments": '{"a": 1, "a": 2}'},
            r'"messages\[1\].tool_calls\[0\].arguments": the key "a" occurs twice',
        ),
    ],
)
def test_calls_that_no_template_prints_as_meant(function, error):
    with pytest.raises(InputError, match=error):
        encoded({"messages": agent(function)})


def test_a_call_without_arguments_has_none():
    answers = trained(QWEN2, {"messages": agent({"name": "add"}), "x": None}, ends=ENDS)
    assert '{"name": "add", "arguments": {}}' in answers[0]


def test_null_is_a_value_in_arguments_and_schemas_of_json():
    tool = {"name": "add", "parameters": {"properties": {"a": {"default": None}}}, "strict": None}
    tools = [tool, {"type": "function", "function": tool}]
    row = {"messages": agent({"name": "add", "arguments": {"a": None}}), "tools": tools}
    inputs = template_inputs(parse_row(json.dumps(row)), (), options())
    bare, wrapped = inputs.tools
    assert bare == {"name": "add", "parameters": tool["parameters"]}
    assert wrapped == {"type": "function", "function": bare}, "null is no value elsewhere"
    messages = training_messages(parse_row(json.dumps(row)), True, options())
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}
    padded = training_messages(row, True, options())  # as a row of a Parquet file
    assert padded[1]["tool_calls"][0]["function"]["arguments"] == {}


# -- columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, error",
    [
        ({"instruction": "i", "output": 5}, '"output" must be a text'),
        ({"instruction": "i", "input": 23, "output": "o"}, '"input" must be a text'),
        ({"instruction": "i", "output": "o", "history": [{"q": "a"}]}, "list of pairs of texts"),
        ({"instruction": "i", "output": "o", "history": "q"}, "list of pairs of texts"),
        (
            {"conversations": [{"from": "human", "value": "v", "role": "user", "content": "c"}]},
            'both "value" and "content"',
        ),
        ({"prompt": "p", "response": 5}, '"response" must be a text, not 5'),
        # No column is proposed whose contents are unknown, and none without the question.
        ({"system": "s", "chat": "USER: q ASSISTANT: a"}, "the row has system, chat: name the"),
        ({"chosen": [{"role": "assistant", "content": "a"}], "x": {}}, "chosen, x: name the"),
        ({"x": [{"role": "system", "content": "s"}, *say("q")]}, "has x: name the column"),
        (
            {"input": [{"role": "user", "content": "q"}], "output": "a"},
            "set data.prompt_key=input data.response_key=output",
        ),
        ({"chosen": say("q", "a"), "rejected": say("q", "b")}, "set data.messages_key=chosen"),
    ],
)
def test_rows_that_are_not_read_as_something_else(row, error):
    with pytest.raises(InputError, match=error):
        training_messages(read_shape(row, options(), True)[0], True, options())


@pytest.mark.parametrize(
    "row, system",
    [
        ({"messages": say("q", "a")}, "Be brief"),
        ({"prompt": "q", "response": "a"}, "Be brief"),
        ({"messages": [{"role": "system", "content": "s"}, *say("q", "a")]}, "s"),
        ({"messages": say("q", "a"), "system": "column"}, "column"),
        ({"messages": say("q", "a"), "system": " "}, "Be brief"),
    ],
)
def test_a_system_prompt_is_for_rows_without_a_system_message(row, system):
    messages = training_messages(row, True, options(system_prompt="Be brief"))
    assert without_loss_keys(messages[0]) == {"role": "system", "content": system}
    assert is_learned(messages[0]) == ("prompt" not in row)
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]


def test_a_developer_message_is_a_system_message_of_the_row():
    row = {"messages": [{"role": "developer", "content": "d"}, *say("q", "a")]}
    messages = training_messages(row, True, options(system_prompt="Be brief"))
    assert [message["role"] for message in messages] == ["developer", "user", "assistant"]
    with pytest.raises(InputError, match="system"):
        training_messages({**row, "system": "column"}, True, options())


def test_a_system_prompt_needs_a_chat_template():
    row = {"prompt": "q", "response": "a"}
    assert training_messages(row, False, options()) is None
    with pytest.raises(InputError, match="data.system_prompt needs a chat template"):
        training_messages(row, False, options(system_prompt="Be brief"))


def test_a_system_column_may_be_a_list_of_texts():
    assert system_column({"system": [text("Be"), text("brief")]}, options()) == "Be\nbrief"
    with pytest.raises(InputError, match='column "system" must be a text'):
        system_column({"system": {"role": "system", "content": "x"}}, options())


def test_thinking_may_be_a_cell_of_a_csv_file():
    inputs = template_inputs({"enable_thinking": "False"}, (), options())
    assert inputs.arguments == {"enable_thinking": False}


def use_of(rows, **changes):
    """Return how the columns of these rows are used, as a cache stores it for a file."""
    tokenizer = make_tokenizer(QWEN2)
    chat = ChatTokenizer(tokenizer, tokenizer.convert_tokens_to_ids(ENDS))
    settings = options(max_length=1000, truncation="error", **changes)
    results = encode_together([tokenize_row(row, chat, settings) for row in rows])
    return uses_of_file([{"values": result["use"], "counts": 1} for result in results])


def lines_of(rows, **changes):
    """Return the report about these rows."""
    return list(report_lines([Path("f")], [use_of(rows, **changes)], is_training=True))


ROWS_WITH_TOOLS = [
    {"messages": say("q", "a"), "functions": [{"name": "f"}], "note": "n", "pictures": None},
    {"messages": say("q", "a")},
]


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"tools_key": "functions"}, None),
        ({"images_key": "pictures", "system_key": None}, None),  # an empty column
        (
            {"tools_key": "tols"},
            "data.tools_key=tols names no column of data.train_files and data.val_files, which "
            "have messages, functions, note: name one of these, or leave out data.tools_key",
        ),
        (
            {"prompt_key": "note"},
            "data.prompt_key=note has no effect: the rows have this column, but they are read from "
            "messages. Leave out data.prompt_key",
        ),
    ],
)
def test_a_key_names_a_column_that_is_read(settings, error):
    """It is enough if one of the files has the column, and if one of its rows has a value."""
    chosen = options(max_length=1000, truncation="error", lost_fields="ignore", **settings)
    tokenizer = make_tokenizer(QWEN2)
    chat = ChatTokenizer(tokenizer, tokenizer.convert_tokens_to_ids(ENDS))
    results = encode_together([tokenize_row(row, chat, chosen) for row in ROWS_WITH_TOOLS])
    uses = [uses_of_file([{"values": result["use"], "counts": 1}]) for result in results]
    datasets = {
        "data.train_files": SimpleNamespace(uses=uses[1:]),
        "data.val_files": SimpleNamespace(uses=uses[:1]),
    }
    if error is None:
        check_column_keys(chosen, datasets)
        return
    with pytest.raises(InputError) as caught:
        check_column_keys(chosen, datasets)
    assert str(caught.value) == error


def test_the_report_counts_empty_answers_and_names_a_key_for_system_prompts():
    empty = {"instruction": "i", "output": "", "system_prompt": "Be brief"}
    masked = say("q", {"role": "assistant", "content": "", "loss_mask": 0}, "r", "a")
    lines = lines_of([empty, {"messages": say("q", "")}, {"messages": masked}])
    assert "f: an empty answer is trained (2 rows): it ends at once" in lines
    assert "f: data.system_key=system_prompt would make this column the system message" in lines


def test_ignored_fields_are_reported_with_those_that_have_no_effect():
    messages = say("q", {"role": "assistant", "content": "a", "secret": "x", "score": 0.5})
    lines = lines_of([{"messages": messages}], ignored_fields=["secret"])
    assert lines[0].endswith("; ignores in messages secret (1 row), score (1 row)")


def test_ignored_fields_are_taken_out_of_parts_and_other_parts_stay():
    parts = [text("one", annotations=[1]), "two"]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]}
    (user, _) = training_messages(row, True, options(ignored_fields=["annotations"]))
    assert user["content"] == [text("one"), "two"]


def test_lines_about_rows_that_are_cut_or_not_used():
    stats = {"dropped_long": 3, "truncated": 1, "dropped_lost_fields": 0, "dropped_no_loss": 2_000}
    lines = list(unused_row_lines(stats, "data.max_length=9", "left"))
    assert lines == [
        "dropped, because they are longer than data.max_length=9: 3 rows",
        "cut to data.max_length=9 (data.truncation=left): 1 row",
        "not used, because no token is trained: 2,000 rows",
    ]
    lost = list(unused_row_lines({"dropped_lost_fields": 1}, "data.max_length=9", "left"))
    assert lost == ["dropped because of data.lost_fields=drop: 1 row"]


def test_files_with_the_same_columns_share_their_lines():
    uses = {}
    for name, column in (("a", "extra"), ("b", "extra"), ("c", "other"), ("d", "extra")):
        row = {"messages": say("q", "a"), column: "x"}
        uses[name] = use_of([row])
    blank = uses_of_file([{"values": "", "counts": 5}])
    paths = [Path(name) for name in (*uses, "e")]
    lines = list(report_lines(paths, [*uses.values(), blank], is_training=True))
    read = "reads messages (role, content); ignores the columns"
    assert lines == [f"a and 2 more files: {read} extra (3 rows)", f"c: {read} other (1 row)"]
    lines = list(report_lines(paths[:1], [uses["a"]], is_training=False))
    assert lines == [
        "a: reads messages (role, content); leaves to the reward function extra (1 row)"
    ]


@pytest.mark.parametrize("history", ["not a list", [["q", "a"], ["q"]], [["q", 1]], {"q": "a"}])
def test_a_history_that_is_no_list_of_pairs(history):
    row = {"instruction": "i", "output": "o", "history": history}
    with pytest.raises(InputError, match='"history" must be a list of pairs of texts'):
        read_shape(row, options(), True)


@pytest.mark.parametrize(
    "column, row",
    [
        ("completion", {"prompt": "q", "completion": 5}),
        ("completion", {"prompt": "q", "completion": {"role": "assistant", "content": "a"}}),
        ("prompt", {"prompt": 5, "completion": [{"role": "assistant", "content": "a"}]}),
    ],
)
def test_a_prompt_or_completion_of_another_type(column, row):
    with pytest.raises(InputError, match=f'"{column}" must be a text or a list of messages, not'):
        read_shape(row, options(), True)


def test_a_row_with_a_prompt_is_not_read_from_conversations():
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert read_shape({"conversations": turns}, options(), True) == (
        {"conversations": turns, "messages": turns},
        "ShareGPT",
    )
    row = {"conversations": turns, "prompt": "p", "response": "r"}
    assert read_shape(row, options(), True) == (row, "")


def test_arguments_of_the_template_must_be_an_object():
    for value, kind in ((["a"], "list"), ("thinking", "str")):
        with pytest.raises(
            InputError, match=f'"chat_template_kwargs" must be an object, not {kind}'
        ):
            template_inputs({"chat_template_kwargs": value}, (), options())


@pytest.mark.parametrize(
    "row, tools, arguments",
    [
        ({}, None, {}),
        ({"tools": "", "chat_template_kwargs": None}, None, {}),
        ({"tools": []}, None, {}),
        ({"tools": ' [{"name": "f"}]'}, [{"name": "f"}], {}),
        ({"enable_thinking": "False"}, None, {"enable_thinking": False}),
        ({"enable_thinking": "true"}, None, {"enable_thinking": True}),
        (
            {
                "enable_thinking": True,
                "chat_template_kwargs": {"enable_thinking": False, "a": None},
            },
            None,
            {"enable_thinking": False},
        ),
        ({"chat_template_kwargs": {"a": 1, "hidden": 2}}, None, {"a": 1}),
    ],
)
def test_inputs_of_the_template(row, tools, arguments):
    inputs = template_inputs(row, ("tokenize",), options(ignored_fields=["hidden"]))
    assert (inputs.tools, inputs.arguments) == (tools, arguments)


def test_tools_that_are_not_a_list():
    with pytest.raises(InputError, match='"tools" is not JSON'):
        template_inputs({"tools": "[{"}, (), options())
    with pytest.raises(InputError, match='"tools" must be a list of JSON schemas'):
        template_inputs({"tools": {"name": "f"}}, (), options())


CHAT = [{"role": "user", "content": "q"}]


def test_only_columns_of_chats_are_read_from_json_and_a_line_says_so():
    row = {"prompt": "Write a chat", "response": json.dumps(CHAT)}
    assert training_messages(read_shape(row, options(), True)[0], True, options())[1:] == [
        {"role": "assistant", "content": json.dumps(CHAT)}
    ]
    completion = {"prompt": "Write a chat", "completion": json.dumps(CHAT)}
    assert read_shape(completion, options(), True)[0]["response"] == json.dumps(CHAT)
    chats = {"prompt": CHAT, "completion": [{"role": "assistant", "content": "a"}]}
    cells = {column: json.dumps(chat) for column, chat in chats.items()}
    messages = [read_shape(row, options(), True)[0]["messages"] for row in (chats, cells)]
    assert messages[0] == messages[1], "the completion of a prompt that is a chat, too"
    lines = lines_of([{"prompt": json.dumps(CHAT), "response": "r"}])
    assert "f: JSON text is read as a chat: prompt (1 row)" in lines
    with pytest.raises(InputError, match="a chat in the notation of Python.* json.dumps"):
        read_shape({"prompt": str(CHAT)}, options(), False)


def test_an_empty_prompt_is_an_error_with_a_template_too():
    chat = ChatTokenizer(make_tokenizer(QWEN2))
    settings = options(max_prompt_length=100, truncation="error", teacher_prompt_key=None)
    unread = {"messages": say("q"), "prompt": " "}
    rows = [{"prompt": " "}, unread]
    empty, other = encode_together([tokenize_prompt(row, chat, settings) for row in rows])
    assert str(empty) == "the prompt is empty"
    assert "q<|im_end|>" in chat.decode(other["input_ids"])


def test_a_message_without_content_is_named_with_its_keys():
    with pytest.raises(InputError, match='content" is missing; the message has role, text$'):
        check_message({"role": "user", "text": "q", "name": None}, "messages[0]")


# -- files -----------------------------------------------------------------------------------------


def rows_of(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    datasets.disable_progress_bars()
    return read_rows(path, tmp_path / f"work_{name}")


@pytest.mark.parametrize(
    "name, content, row",
    [
        ("a.jsonl", '{"prompt": "q"}\n', {"text": '{"prompt": "q"}'}),
        ("a.json", ' [{"prompt": "q"}]', {"text": '{"prompt": "q"}'}),
        ("a.csv", "prompt,response\nq,a\n", {"prompt": "q", "response": "a"}),
    ],
)
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, name, content, row):
    """Excel and some editors begin UTF-8 files with one. It would be part of a column's name."""
    assert [*rows_of(tmp_path, name, "\ufeff" + content)] == [row]


@pytest.mark.parametrize(
    "content, error",
    [
        ("prompt,response\nq,a,more\n", "line 2 has 3 of 2 cells"),
        ("prompt,response\nq, really,a\nq,a\n", "line 2 has 3 of 2 cells"),
        ("prompt,response\nq\n", "line 2 has 1 of 2 cells"),
        ("prompt,response,response\nq,a,b\n", "names the column 'response' twice"),
        ("prompt;response\nq;a\n", "separate cells by commas, not by ';'"),
        ('prompt,response\n"say \\"hi\\" now",a\n', "line 2: ',' expected after '\"'; a quote"),
    ],
)
def test_csv_files_whose_cells_would_move(tmp_path, content, error):
    with pytest.raises(InputError, match=error):
        rows_of(tmp_path, "a.csv", content)


def test_csv_files_of_pandas_and_long_cells(tmp_path):
    long = "word, " * 50_000
    rows = rows_of(tmp_path, "a.csv", f',prompt,response\n0,"{long}","a ""b""\n"\n\n1,q,a\n')
    assert rows[0] == {"column 1": "0", "prompt": long, "response": 'a "b"\n'}
    assert rows["prompt"][1] == "q"


def test_arrays_are_read_from_either_suffix_and_may_not_repeat_keys(tmp_path):
    array = json.dumps([{"prompt": "p", "response": "r"}] * 2, indent=1)
    assert len(rows_of(tmp_path, "a.jsonl", array)) == 2
    with pytest.raises(InputError, match='the key "prompt" occurs twice'):
        rows_of(tmp_path, "a.json", '[{"prompt": "p", "prompt": "q"}]')
    with pytest.raises(InputError, match="the array is empty"):
        rows_of(tmp_path, "b.json", "[]")


@pytest.mark.parametrize("line", ["1" * 5000, "[" * 200_000, '{"a": 1},'])
def test_lines_that_python_cannot_parse_are_errors(line):
    with pytest.raises(InputError, match="the row is not JSON: .* Each line must hold one row"):
        parse_row(line)
    with pytest.raises(InputError, match="^the key"):
        parse_row('{"a": 1, "a": 2}')


def test_files_in_subdirectories_are_mentioned(tmp_path, capsys):
    (tmp_path / "more").mkdir()
    for name in ("a.jsonl", "more/b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert find_files(str(tmp_path)) == [tmp_path / "a.jsonl"]
    assert "not read, such as" in capsys.readouterr().out
    assert find_files(str(tmp_path), reports=False) == [tmp_path / "a.jsonl"]
    assert capsys.readouterr().out == ""


def test_patterns_are_replaced_by_their_files_in_alphabetical_order(tmp_path):
    (tmp_path / "more" / "deep").mkdir(parents=True)
    names = ("b.jsonl", "a.jsonl", "more/c.jsonl", "more/deep/d.jsonl")
    b, a, c, d = (tmp_path / name for name in names)
    for path in (b, a, c, d):
        path.write_text("{}\n")
    assert find_files(f"{tmp_path}/*.jsonl") == [a, b]
    assert find_files(f"{tmp_path}/**/*.jsonl") == [a, b, c, d]
    assert find_files([f"{tmp_path}/more/*.jsonl", str(b)]) == [c, b]
    with pytest.raises(InputError, match="[.]csv: no such file or directory"):
        find_files(f"{tmp_path}/*.csv")
