"""Tool calls and reasoning in sampled texts, found by the parsers of vLLM."""

import json
import sys

import pytest

from config import InputError
from rollout.episodes.parsing import HARMONY, ReplyParser, guess_tool_parser, written_ids
from tests.data.chat_templates import (
    APERTUS,
    CHATML,
    GLM,
    LLAMA3,
    MISTRAL,
    QWEN2,
    QWEN3,
    make_tokenizer,
)
from tests.support.launch import run

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
# Tokens that parsers look up in the vocabulary.
CONTROL = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
]
QWEN_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>"
)
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
# parser: a call of add(a=1, b=2), and one that is malformed.
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, \n</tool_call>',
    ),
    "llama3_json": (
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '{"name": "add", "parameters": {"a": 1,',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1,',
    ),
    "qwen3_coder": (QWEN_CALL, "<tool_call>\n<function add>\n</tool_call>"),
    "glm45": (GLM_CALL, "<tool_call>\n<arg_key>a</arg_key>\n</tool_call>"),
    "deepseek_v3": (DEEPSEEK_CALL, "<｜tool▁calls▁begin｜>add(1, 2)<｜tool▁calls▁end｜>"),
    "pythonic": ("[add(a=1, b=2)]", "[add(a=1, b=]"),
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(CHATML, control=CONTROL)


def parse(tokenizer, parser: ReplyParser, text: str, tools=(TOOL,)):
    return parser.parse(text, tokenizer.encode(text), 5, list(tools) or None, {})


class FailingParser(ReplyParser):
    """A parser that cannot read any text, as those of vLLM cannot read some."""

    def split(self, *arguments):
        raise KeyError("arguments")


@pytest.mark.slow
def test_a_reply_that_a_parser_cannot_read_stays_text_and_is_counted(tokenizer):
    parser = FailingParser(tokenizer, "hermes", None, is_checked=True)
    reply = parse(tokenizer, parser, "<tool_call>")
    assert reply.message == {"role": "assistant", "content": "<tool_call>"}
    assert (reply.num_tool_calls, reply.num_tool_errors) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_calls(tokenizer, name):
    """A call is found; a malformed one stays text and is counted."""
    parser = ReplyParser(tokenizer, name, None, is_checked=True)
    good, malformed = CALLS[name]
    reply = parse(tokenizer, parser, good)
    (call,) = reply.message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert (reply.num_tool_calls, reply.num_tool_errors) == (1, 0)
    assert parse(tokenizer, parser, good) == reply, "identifiers must not be random"

    reply = parse(tokenizer, parser, malformed)
    assert "tool_calls" not in reply.message
    assert reply.message["content"] == malformed
    assert (reply.num_tool_calls, reply.num_tool_errors) == (0, 1)

    reply = parse(tokenizer, parser, "the answer is 3")
    assert reply.message == {"role": "assistant", "content": "the answer is 3"}
    assert (reply.num_tool_calls, reply.num_tool_errors) == (0, 0)

    reply = parse(tokenizer, parser, good, tools=())
    assert reply.message == {"role": "assistant", "content": good}


@pytest.mark.slow
def test_a_malformed_call_prints_nothing():
    """vLLM would log a traceback, whether or not something has imported it before."""
    code = """
import vllm.logger
from rollout.episodes.parsing import ReplyParser
from tests.rollout.test_episode_parsing import CALLS, CHATML, CONTROL, make_tokenizer, parse
tokenizer = make_tokenizer(CHATML, control=CONTROL)
for name, (_, malformed) in CALLS.items():
    parser = ReplyParser(tokenizer, name, None, is_checked=True)
    assert parse(tokenizer, parser, malformed).num_tool_errors == 1
"""
    done = run([sys.executable, "-c", code])
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "text, expected",
    [
        ('[TOOL_CALLS] [{"id": "a1"}, {"id": "b2"}] and more', ["a1", "b2"]),
        ('x [TOOL_CALLS][{"id": "a1"}, {"id": 2}]', []),
        ('[TOOL_CALLS] [{"id": "a1"}, {"name": "add"}]', []),
        ("[TOOL_CALLS] [3]", []),
        ('[TOOL_CALLS] [{"id": "a1"}', []),
        ('[{"id": "a1"}]', []),
    ],
)
def test_written_identifiers_are_texts_and_all_calls_have_one(text, expected):
    assert written_ids(text) == expected


@pytest.mark.slow
def test_identifiers_that_mistral_writes_are_kept(tokenizer):
    parser = ReplyParser(tokenizer, "mistral", None, is_checked=False)
    call = '{"name": "add", "arguments": {"id": "x"}, "id": "ID"}'
    text = f"[TOOL_CALLS] [{call.replace('ID', 'a12345678')}, {call.replace('ID', 'b12345678')}]"
    calls = parse(tokenizer, parser, text).message["tool_calls"]
    assert [call["id"] for call in calls] == ["a12345678", "b12345678"]
    text = '[TOOL_CALLS] [{"name": "add", "arguments": {"id": "x"}}]'
    (call,) = parse(tokenizer, parser, text).message["tool_calls"]
    assert len(call["id"]) == 9


THOUGHT = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
HARMONY_REPLIES = [
    (THOUGHT + HARMONY_CALL + '{"a": 1}<|call|>', "", "I think.", ["add"], 0),
    (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', "", None, ["add"], 0),
    (THOUGHT + HARMONY_CALL.replace("add", "sub") + '{"a": 1}', "", "I think.", ["sub"], 1),
    (THOUGHT + HARMONY_CALL + '{"a": ', HARMONY_CALL + '{"a": ', "I think.", [], 1),
    (HARMONY_CALL + "[1]", HARMONY_CALL + "[1]", None, [], 1),
    ("<|channel|>analysis to=python code<|message|>1", None, None, [], 1),
    (THOUGHT + "<|channel|>final<|message|>It is 3<|return|>", "It is 3", "I think.", [], 0),
    ("<|channel|>commentary<|message|>So<|end|><|start|>assistant", "So", None, [], 0),
    ("<|channel|>analysis<|message|>I thi", "", "I thi", [], 0),
    ("It is 3", "It is 3", None, [], 0),
]


@pytest.mark.parametrize("text, content, reasoning, calls, num_errors", HARMONY_REPLIES)
def test_replies_of_gpt_oss(tokenizer, text, content, reasoning, calls, num_errors):
    """They are read without vLLM's parser, which needs a download."""
    parser = ReplyParser(tokenizer, "openai", None, is_checked=True)
    reply = parse(tokenizer, parser, text)
    message = reply.message
    assert message["content"] == (text if content is None else content)
    assert message.get("reasoning") == reasoning
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == calls
    assert (reply.num_tool_calls, reply.num_tool_errors) == (len(calls), num_errors)
    assert parse(tokenizer, parser, text) == reply, "identifiers must not be random"


def test_calls_of_gpt_oss_without_tools_stay_text(tokenizer):
    parser = ReplyParser(tokenizer, "openai", None, is_checked=True)
    call = HARMONY_CALL + '{"a": 1}'
    reply = parse(tokenizer, parser, THOUGHT + call, tools=())
    assert reply.message["content"] == call
    assert reply.message["reasoning"] == "I think."
    assert (reply.num_tool_calls, reply.num_tool_errors) == (0, 0)


def test_gpt_oss_has_no_other_parser_of_reasoning(tokenizer):
    with pytest.raises(InputError, match=r"rollout\.reasoning_parser=qwen3: .* Leave"):
        ReplyParser(tokenizer, "openai", "qwen3", is_checked=True)


@pytest.mark.slow
def test_calls_that_cannot_be_executed(tokenizer):
    parser = ReplyParser(tokenizer, "hermes", None, is_checked=False)
    text = '<tool_call>{"name": "NAME", "arguments": ARGUMENTS}</tool_call>'
    for name, arguments, num_errors in (("add", "{}", 0), ("sub", "{}", 1), ("add", "[1]", 1)):
        call = text.replace("NAME", name).replace("ARGUMENTS", arguments)
        reply = parse(tokenizer, parser, call)
        assert (reply.num_tool_calls, reply.num_tool_errors) == (1, num_errors)
    twice = text.replace("NAME", "add").replace("ARGUMENTS", '{"a": 1}') * 2
    identifiers = [call["id"] for call in parse(tokenizer, parser, twice).message["tool_calls"]]
    assert len(set(identifiers)) == 2


@pytest.mark.slow
def test_reasoning(tokenizer):
    parser = ReplyParser(tokenizer, "hermes", "deepseek_r1", is_checked=True)
    reply = parse(tokenizer, parser, "<think>so it is</think>three", tools=())
    assert reply.message["reasoning"] == "so it is"
    assert reply.message["content"] == "three"
    call = CALLS["hermes"][0]
    reply = parse(tokenizer, parser, f"<think>so it is</think>{call}")
    assert reply.message["reasoning"] == "so it is"
    assert reply.num_tool_calls == 1


@pytest.mark.slow
@pytest.mark.parametrize("names", [("hermis", None), (None, "deepseek")])
def test_unknown_parsers(tokenizer, names):
    with pytest.raises(InputError, match=r"rollout\.tool_parser=.*Set them to names"):
        ReplyParser(tokenizer, *names, is_checked=True)


@pytest.mark.slow
def test_malformed_tool(tokenizer):
    parser = ReplyParser(tokenizer, "hermes", None, is_checked=False)
    with pytest.raises(InputError, match="tools.0.type"):
        parser.chat_request([TOOL | {"type": "custom"}])


def test_no_parser(tokenizer):
    parser = ReplyParser(tokenizer, None, None, is_checked=False)
    text = CALLS["hermes"][0]
    assert parse(tokenizer, parser, text).message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "tool_parser, reasoning_parser, with_tools, without",
    [
        (None, None, False, False),
        ("hermes", None, True, False),
        (None, "qwen3", True, True),
        (HARMONY, None, True, True),
    ],
)
def test_replies_are_parsed_for_offered_tools_and_for_reasoning(
    tokenizer, tool_parser, reasoning_parser, with_tools, without
):
    parser = ReplyParser(tokenizer, tool_parser, reasoning_parser, is_checked=False)
    assert parser.is_needed([TOOL]) == with_tools
    assert parser.is_needed([]) == parser.is_needed(None) == without


def call_of(name: str, arguments: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_that_nobody_can_make_are_errors(tokenizer):
    """Of several calls, each counts; a call that stayed text counts, too."""
    parser = ReplyParser(tokenizer, "hermes", None, is_checked=False)
    good = call_of("add", '{"a": 1}')
    bad = [call_of("mul", "{}"), call_of("add", "[1]"), call_of("add", '{"a": ')]
    assert parser.count_errors({"tool_calls": [good, *bad, good]}, [TOOL]) == 3
    assert parser.count_errors({"content": "<tool_call> add"}, [TOOL]) == 1
    assert parser.count_errors({"content": "the answer is 3"}, [TOOL]) == 0
    assert parser.count_errors({"content": "<tool_call> add"}, None) == 0
    without_calls = ReplyParser(tokenizer, None, "qwen3", is_checked=False)
    assert without_calls.count_errors({"content": "<tool_call> add"}, [TOOL]) == 0


GUESSES = [
    (CHATML, None),
    (QWEN2, "hermes"),
    (QWEN3, "hermes"),
    (MISTRAL, "mistral"),
    (LLAMA3, None),
    (LLAMA3 + '{"name": function name, "parameters": dictionary}', "llama3_json"),
    (LLAMA3 + "[func_name1(params_name1=params_value1)]", "pythonic"),
    (APERTUS, None),
    (GLM + "<arg_key>", "glm45"),
    ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3_coder"),
    ("<|start|>assistant<|channel|>final<|message|>", "openai"),
    ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>```json", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>", "deepseek_v31"),
]


@pytest.mark.parametrize("template, parser", GUESSES)
def test_guess(template, parser):
    assert guess_tool_parser(template) == parser


@pytest.mark.slow
def test_all_guesses_exist(tokenizer):
    """vLLM has a parser of each name that may be guessed."""
    from vllm.tool_parsers import ToolParserManager

    from rollout.episodes.parsing import TOOL_FORMATS

    names = set(ToolParserManager.lazy_parsers)
    assert {tool_format.parser for tool_format in TOOL_FORMATS} <= names
