"""Recorded conversations equal training data under the chat templates of ten families of models.

The replies are texts as these models write them. vLLM's parsers read them, the gateway's session
continues or branches, and the recorder keeps the tokens. The training data path then renders the
same messages: it has to give the same tokens, and the same mask.
"""

import itertools
import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from config import InputError, load
from data.chat.encoding import encode_together
from data.chat.tokenizer import ChatTokenizer
from data.dataset import tokenize_row
from rollout.episodes.parsing import ReplyParser, guess_tool_parser
from rollout.episodes.recorder import Branch, Episode
from rollout.episodes.rendering import Renderer, Session
from rollout.episodes.requests import read_messages
from tests.data.chat_templates import make_tokenizer, read_template

pytestmark = pytest.mark.slow

TRL = find_spec("trl")
if TRL is None:
    pytest.skip("TRL is in requirements-cpu.txt only", allow_module_level=True)
TRL_TEMPLATES = Path(TRL.origin).parent / "chat_templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers, which may be negative or have decimal places.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
GLM_CALL = (
    "\n<think>I think.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"
    "\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>"
)
GPT_OSS_CALL = (
    "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
)
# Without the reasoning, since an answer follows.
GPT_OSS_WRITTEN_CALL = (
    ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>'
)
GPT_OSS_ANSWER = (
    "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>"
    "It is three.<|return|>"
)


@dataclass(frozen=True)
class Family:
    """A chat template, and how its models write.

    Attributes:
        template: the template.
        control: its tokens.
        ends: the tokens that end a turn.
        call, answer: a reply that calls add(a=1, b=2), and one that answers, with their end tokens.
        tool_parser: the parser that is guessed.
        reasoning_parser: the one that a user of the model sets.
        branches: the turns after which a new branch begins.
        arguments: of the template.
        written_call: how the template writes the call of an earlier turn, where this differs.
        calls_are_text: whether the template knows no tool calls but those in the content.
    """

    template: str
    control: tuple[str, ...]
    ends: tuple[str, ...]
    call: str
    answer: str
    tool_parser: str | None
    reasoning_parser: str | None = None
    branches: tuple[int, ...] = ()
    arguments: dict = field(default_factory=dict)
    written_call: str | None = None
    calls_are_text: bool = False


def trl(name: str) -> str:
    """Return a published template, which TRL's package contains."""
    return (TRL_TEMPLATES / f"{name}.jinja").read_text()


QWEN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FAMILIES = {
    "Qwen2.5": Family(
        trl("qwen2_5"),
        QWEN,
        ("<|im_end|>",),
        f"{HERMES_CALL}<|im_end|>",
        "It is three.<|im_end|>",
        "hermes",
    ),
    "Qwen3": Family(
        trl("qwen3"),
        QWEN,
        ("<|im_end|>",),
        f"<think>\nI think.\n</think>\n\n{HERMES_CALL}<|im_end|>",
        "<think>\nI think.\n</think>\n\nIt is three.<|im_end|>",
        "hermes",
        "qwen3",
        branches=(2, 4),
    ),
    "Hermes": Family(
        read_template("hermes"),
        QWEN[:2],
        ("<|im_end|>",),
        f"{HERMES_CALL}<|im_end|>",
        "It is three.<|im_end|>",
        "hermes",
    ),
    "Llama 3.1": Family(
        trl("llama3_1"),
        ("<|python_tag|>",),
        ("<|eot_id|>",),
        '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>',
        "It is three.<|eot_id|>",
        "llama3_json",
    ),
    "Mistral": Family(
        read_template("mistral_calls"),
        ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ("</s>",),
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "call00001"}]</s>',
        "It is three.</s>",
        "mistral",
        branches=(2, 4),
    ),
    "GLM-4.5": Family(
        trl("glm4moe"),
        (*QWEN, "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>")
        + ("<arg_value>", "</arg_value>"),
        ("<|user|>", "<|observation|>"),
        GLM_CALL,
        "\n<think>I think.</think>\nIt is three.<|user|>",
        "glm45",
        "glm45",
        branches=(2, 4),
    ),
    "gpt-oss": Family(
        trl("gptoss"),
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
        + ("<|call|>", "<|return|>"),
        ("<|return|>", "<|call|>"),
        GPT_OSS_CALL,
        GPT_OSS_ANSWER,
        "openai",
        branches=(2, 4),
        written_call=GPT_OSS_WRITTEN_CALL,
    ),
    "DeepSeek V3": Family(
        read_template("deepseek"),
        (
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜end▁of▁sentence｜>",
        ),
        ("<｜end▁of▁sentence｜>",),
        f"{DEEPSEEK_CALL}<｜end▁of▁sentence｜>",
        "It is three.<｜end▁of▁sentence｜>",
        "deepseek_v3",
    ),
    "SmolLM3": Family(
        read_template("smollm3"),
        QWEN,
        ("<|im_end|>",),
        f"<think>\nI think.\n</think>\n{HERMES_CALL}<|im_end|>",
        "<think>\nI think.\n</think>\nIt is three.<|im_end|>",
        "hermes",
        arguments={"xml_tools": [TOOL]},
        calls_are_text=True,
    ),
    "Gemma 3": Family(
        read_template("gemma3_tools"),
        ("<start_of_turn>", "<end_of_turn>"),
        ("<end_of_turn>",),
        "[add(a=1, b=2)]<end_of_turn>",
        "It is three.<end_of_turn>",
        "pythonic",
    ),
}


@dataclass
class Recorded:
    """A recorded conversation.

    Attributes:
        messages: all messages, the last one of which is a reply.
        branches: the recorded tokens.
        turns: (index of the message, branch) of each reply.
    """

    messages: list[dict]
    branches: list[Branch]
    turns: list[tuple[int, Branch]]


def play(family: Family, chat: ChatTokenizer) -> Recorded:
    """Record five turns: a call, an answer, a call, an answer, and an answer."""
    renderer = Renderer(chat, None, family.arguments)
    inputs = renderer.inputs([TOOL], {})
    parser = ReplyParser(chat.tokenizer, family.tool_parser, family.reasoning_parser, True)
    session = Session(renderer)
    episode = Episode()
    turns = []
    messages = [{"role": "user", "content": "hello there"}]
    for number, is_call in enumerate([True, False, True, False, False]):
        prompt = session.prompt(messages, inputs)
        text = family.call if is_call else family.answer
        ids = chat.tokenize(text).ids
        turn = episode.begin(prompt.ids, seed=0)
        turn.response.append(np.array(ids), np.zeros(len(ids)), None, version=0)
        episode.end(turn, is_cut=False)
        without_end = chat.decode(ids[:-1])
        reply = parser.parse(without_end, ids, len(prompt.ids), [TOOL], inputs.arguments)
        assert (reply.num_tool_calls, reply.num_tool_errors) == (int(is_call), 0)
        session.record(messages, prompt, reply.message, ids)
        turns.append((len(messages), turn.branch))
        following = following_message(reply.message, number)
        messages = read_messages([*messages, reply.message, following])
    return Recorded(messages[:-1], episode.branches, turns)


def following_message(reply: dict, number: int) -> dict:
    """Return the result of a reply's call, or another question."""
    if "tool_calls" not in reply:
        assert "three" in reply["content"]
        return {"role": "user", "content": f"question {number}"}
    (call,) = reply["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    return {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": f"3 {number}"}


def row_of(family: Family, recorded: Recorded, branch: Branch) -> dict:
    """Return the messages of a branch as a row for fine-tuning on the turns of this branch."""
    messages = list(recorded.messages)
    for index, other in recorded.turns:
        if other is branch:
            end = index + 1
        else:
            messages[index] = messages[index] | {"loss_mask": 0}
    return {
        "messages": messages[:end],
        "tools": [TOOL],
        "chat_template_kwargs": family.arguments,
    }


def with_calls_as_text(row: dict, call: str) -> dict:
    """Return a row with the model's text in place of tool calls."""
    messages = []
    for message in row["messages"]:
        if "tool_calls" in message:
            message = {"role": "assistant", "content": call}
        messages.append(message)
    return {"messages": messages, "chat_template_kwargs": row["chat_template_kwargs"]}


def encode(row: dict, chat: ChatTokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens and the loss mask of a row, as fine-tuning encodes it."""
    options = load("sft.yaml", ["model.path=unused", "data.train_files=unused"]).data
    (encoded,) = encode_together([tokenize_row(row, chat, options)])
    if isinstance(encoded, InputError):
        raise encoded
    return encoded["input_ids"], encoded["loss_mask"]


def runs(ids: list[int], mask: list[int], chat: ChatTokenizer) -> list[tuple[bool, str]]:
    """Return the texts that are learned and those that are not, in order."""
    texts = []
    groups = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    for is_learned, group in groups:
        token_ids = [token_id for token_id, _ in group]
        texts.append((is_learned, chat.decode(token_ids)))
    return texts


def chat_of(family: Family) -> ChatTokenizer:
    tokenizer = make_tokenizer(family.template, control=family.control)
    return ChatTokenizer(tokenizer, tokenizer.convert_tokens_to_ids(list(family.ends)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_recorded_conversation_equals_training_data(name):
    family = FAMILIES[name]
    assert guess_tool_parser(family.template) == family.tool_parser
    chat = chat_of(family)
    recorded = play(family, chat)
    branches = [branch for _, branch in recorded.turns]
    pairs = itertools.pairwise(branches)
    begins = [turn for turn, (one, other) in enumerate(pairs, start=1) if one is not other]
    assert tuple(begins) == family.branches
    for branch in recorded.branches:
        row = row_of(family, recorded, branch)
        if family.calls_are_text:
            with pytest.raises(InputError, match="leaves out tool_calls of message 1"):
                encode(row, chat)
            row = with_calls_as_text(row, family.call.removesuffix(family.ends[0]))
        ids, mask = encode(row, chat)
        length = len(branch.token_ids)
        if family.written_call is None:
            assert ids[:length] == branch.token_ids
            assert mask[:length] == branch.is_sampled
            assert not any(mask[length:])
        expected = [
            (is_learned, text.replace(family.call, family.written_call or family.call))
            for is_learned, text in runs(branch.token_ids, branch.is_sampled, chat)
        ]
        assert runs(ids, mask, chat)[: len(expected)] == expected
