"""Find tool calls and reasoning in sampled texts, with the parsers of vLLM.

Replies of gpt-oss are read by harmony.py instead.

vLLM is imported when the first reply has to be parsed, since that takes long. A parser that the
user names is imported at start, so that a wrong name is reported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from config import InputError
from rollout.episodes.harmony import read_harmony

NONE = "none"
HARMONY = "openai"
MISTRAL_CALLS = "[TOOL_CALLS]"
# Mistral's templates accept identifiers of calls that have nine letters and digits.
ID_LENGTH = 9


class ToolFormat(NamedTuple):
    """How models write tool calls.

    Attributes:
        parser: the name of vLLM's parser.
        template_marks: texts that all occur in the chat templates of these models.
        call: a regular expression that finds a call, well-formed or not, in a reply.
    """

    parser: str
    template_marks: tuple[str, ...]
    call: str


DEEPSEEK_CALL = "<｜tool▁calls?▁begin｜>"
# In the order in which they are tried: the first one whose marks are in the template is chosen.
TOOL_FORMATS = (
    ToolFormat(HARMONY, ("<|channel|>", "<|message|>"), r"<\|message\|>"),
    ToolFormat("kimi_k2", ("<|tool_calls_section_begin|>",), r"<\|tool_call_begin\|>"),
    ToolFormat("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_CALL),
    ToolFormat("deepseek_v31", ("<｜tool▁calls▁begin｜>",), DEEPSEEK_CALL),
    ToolFormat("minimax_m2", ("<minimax:tool_call>",), "<minimax:tool_call>"),
    ToolFormat("seed_oss", ("<seed:tool_call>",), "<seed:tool_call>"),
    ToolFormat("glm45", ("<arg_key>",), "<tool_call>"),
    ToolFormat("qwen3_coder", ("<function=", "<parameter="), "<tool_call>|<function="),
    ToolFormat("gemma4", ("<|tool_call>call:",), r"<\|tool_call>"),
    ToolFormat("functiongemma", ("<start_function_call>",), "<start_function_call>"),
    ToolFormat("lfm2", ("<|tool_call_start|>",), r"<\|tool_call_start\|>"),
    ToolFormat("apertus", ("<|tools_prefix|>",), r"<\|tools_prefix\|>"),
    ToolFormat("olmo3", ("<function_calls>",), "<function_calls>"),
    ToolFormat("hermes", ("<tool_call>",), "<tool_call>"),
    ToolFormat("jamba", ("<tool_calls>",), "<tool_calls>"),
    ToolFormat("mistral", (MISTRAL_CALLS,), re.escape(MISTRAL_CALLS)),
    ToolFormat("granite", ("<|tool_call|>",), r"<\|tool_call\|>"),
    ToolFormat("llama4_pythonic", ("<|python_start|>",), r"^\s*(<\|python_start\|>|\[\w+\()"),
    ToolFormat("pythonic", ("[func_name1(",), r"^\s*\[\w+\("),
    ToolFormat("llama3_json", ("<|start_header_id|>", "parameters"), r"^\s*(<\|python_tag|\{)"),
)


def guess_tool_parser(template: str) -> str | None:
    """Return the name of the parser for the calls that a chat template writes, or None."""
    for tool_format in TOOL_FORMATS:
        if all(mark in template for mark in tool_format.template_marks):
            return tool_format.parser
    return None


def call_pattern(parser: str | None) -> str | None:
    """Return the regular expression that finds a parser's calls; None if we know none."""
    return next((known.call for known in TOOL_FORMATS if known.parser == parser), None)


@dataclass(frozen=True)
class Reply:
    """A parsed reply.

    Attributes:
        message: the reply in OpenAI's format.
        num_tool_calls: calls in it.
        num_tool_errors: calls that could not be read, or that name a tool which was not offered.
    """

    message: dict
    num_tool_calls: int = 0
    num_tool_errors: int = 0


class ReplyParser:
    """Parses replies with the parsers of these names (None: without one).

    Raises:
        InputError: vLLM has no parser with this name.
    """

    def __init__(
        self, tokenizer, tool_parser: str | None, reasoning_parser: str | None, is_checked: bool
    ):
        self.tokenizer = tokenizer
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.is_harmony = tool_parser == HARMONY
        self.call_pattern = call_pattern(tool_parser)
        if self.is_harmony and reasoning_parser is not None:
            raise InputError(
                f"rollout.reasoning_parser={reasoning_parser}: rollout.tool_parser={HARMONY} reads "
                "the reasoning as well. Leave rollout.reasoning_parser out"
            )
        if is_checked and not self.is_harmony:
            self.parser_class(tokenizer)

    @cached_property
    def parser_class(self) -> type:
        """vLLM's class for this pair of parsers. Importing it takes seconds."""
        from vllm.parser import ParserManager

        # Otherwise a traceback is printed for each malformed call.
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        try:
            return ParserManager.get_parser(
                tool_parser_name=self.tool_parser,
                reasoning_parser_name=self.reasoning_parser,
                enable_auto_tools=self.tool_parser is not None,
                is_harmony=False,
            )
        except (TypeError, KeyError) as error:
            cause = error.__cause__ or error
            raise InputError(
                f"rollout.tool_parser={self.tool_parser} or rollout.reasoning_parser="
                f"{self.reasoning_parser}: {cause}. Set them to names of vLLM's parsers, or to none"
            ) from error

    def is_needed(self, tools: list | None) -> bool:
        """Return whether replies are parsed. `tools`: those that may be called, or None."""
        has_calls = bool(tools) and self.tool_parser is not None
        return has_calls or self.is_harmony or self.reasoning_parser is not None

    def chat_request(self, tools: list | None):
        """Return vLLM's form of a request with these tools, which its parsers read.

        Raises:
            InputError: a tool is not in OpenAI's format.
        """
        from pydantic import ValidationError
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        # The parsers do not read the messages.
        fields: dict = {"messages": [{"role": "user", "content": ""}]}
        if tools:
            fields |= {"tools": tools, "tool_choice": "auto"}
        try:
            return ChatCompletionRequest(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise InputError(f"{place}: {first['msg']}") from error

    def parse(
        self, text: str, reply_ids: list[int], num_prompt_ids: int, tools: list | None, kwargs: dict
    ) -> Reply:
        """Parse a reply.

        Args:
            text: the reply without its end token or stop string.
            reply_ids: all sampled tokens.
            num_prompt_ids: the length of the prompt, from which identifiers of calls are made.
            tools: the tools that may be called, or None.
            kwargs: the arguments of the chat template.
        """
        if not self.is_needed(tools):
            return Reply({"role": "assistant", "content": text})
        try:
            reasoning, content, calls = self.split(text, reply_ids, tools, kwargs)
        except Exception:  # a parser may raise any error for malformed text
            return Reply({"role": "assistant", "content": text}, num_tool_errors=1)
        message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning"] = reasoning
        if calls and tools:
            message["tool_calls"] = [
                as_tool_call(call, call_id(call, text, reply_ids, num_prompt_ids, index))
                for index, call in enumerate(calls)
            ]
        elif content is None:
            message["content"] = ""
        num_calls = len(message.get("tool_calls", ()))
        return Reply(message, num_calls, self.count_errors(message, tools))

    def split(
        self, text: str, reply_ids: list[int], tools: list | None, kwargs: dict
    ) -> tuple[str | None, str | None, list | None]:
        """Return the reasoning, the content and the calls of a reply. See parse()."""
        if self.is_harmony:
            return read_harmony(text, has_tools=bool(tools))
        request = self.chat_request(tools)

        def make_parser():
            # Parsers have a state, so each parses one text.
            return self.parser_class(self.tokenizer, request.tools, chat_template_kwargs=kwargs)

        reasoning, content, calls = make_parser().parse(
            text, request, enable_auto_tools=bool(tools), model_output_token_ids=reply_ids
        )
        if tools and not calls and self.has_call_marks(text):
            # Some parsers remove malformed calls.
            _, content = make_parser().extract_reasoning(text, request)
        return reasoning, content, calls

    def has_call_marks(self, text: str) -> bool:
        """Return whether a text contains the beginning of a call."""
        return self.call_pattern is not None and bool(re.search(self.call_pattern, text))

    def count_errors(self, message: dict, tools: list | None) -> int:
        """Count the calls that cannot be executed, and those that stayed text."""
        if not tools:
            return 0
        calls = message.get("tool_calls", ())
        if not calls:
            return int(self.has_call_marks(message["content"]))
        names = {tool["function"]["name"] for tool in tools}
        return sum(not is_executable(call["function"], names) for call in calls)


def is_executable(function: dict, names: set[str]) -> bool:
    """Return whether a call names an offered tool, and its arguments are a JSON object."""
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return False
    return function["name"] in names and isinstance(arguments, dict)


def as_tool_call(call, identifier: str) -> dict:
    """Return one of vLLM's calls in OpenAI's format."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": identifier, "type": "function", "function": function}


def call_id(call, text: str, reply_ids: list[int], num_prompt_ids: int, index: int) -> str:
    """Return the identifier that the model has written for a call, or else a new one.

    A new one depends only on the sampled tokens. Templates may print it in later prompts, which a
    random one would change whenever a run is repeated.
    """
    if call.id and call.id in text:
        return call.id
    written = written_ids(text)
    if index < len(written):
        return written[index]
    digest = hashlib.sha256(repr((reply_ids, num_prompt_ids, index)).encode())
    return digest.hexdigest()[:ID_LENGTH]


def written_ids(text: str) -> list[str]:
    """Return the identifiers in a list of calls as Mistral's models write it; vLLM drops them.

    A tool's result must repeat the identifier in the sampled tokens, or it would answer no call.
    """
    _, _, written = text.partition(MISTRAL_CALLS)
    try:
        calls, _ = json.JSONDecoder().raw_decode(written.lstrip())
        identifiers = [call["id"] for call in calls]
    except (ValueError, TypeError, KeyError):
        return []
    return identifiers if all(isinstance(i, str) for i in identifiers) else []
