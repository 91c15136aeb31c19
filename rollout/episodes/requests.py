"""Read the fields of HTTP requests, and reject those that would change how tokens are sampled.

Tokens are trained under the distribution that the configuration describes, so they have to be
sampled from it. A field that is neither read here nor known to be harmless is an error, so that
nothing that a client asks for is silently ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from config import InputError
from data.messages import check_message, without_none

# Fields that say something about a request, but do not change its tokens.
HARMLESS = {
    "audio",
    "cache_salt",
    "metadata",
    "model",
    "priority",
    "prompt_cache_key",
    "request_id",
    "return_token_ids",
    "routed_experts_prompt_start",
    "safety_identifier",
    "service_tier",
    "session_id",
    "store",
    "stream_options",
    "user",
}
# Fields that would change how tokens are sampled, with the values that change nothing.
NEUTRAL: dict[str, tuple] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True, False),
    "echo": (False,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "stop_token_ids": ([],),
    "stream": (False,),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
MAX_TOKENS = ("max_completion_tokens", "max_tokens")
CHAT_FIELDS = {
    *("messages", "tools", "tool_choice", "chat_template_kwargs", "logprobs", "stop"),
    *SAMPLING,
    *MAX_TOKENS,
}
GENERATE_FIELDS = {"token_ids", "sampling_params"}
GENERATION_FIELDS = {"max_tokens", "logprobs", "stop", "stop_token_ids", *SAMPLING}
# What to do instead, for fields whose name does not suggest it.
ADVICE = {
    "n": "send n requests: each is a turn of the episode",
    "stream": "set stream=false: the answer comes in one piece",
    "seed": "leave it out: every request has a seed of its own, from trainer.seed",
    "reasoning_effort": 'set chat_template_kwargs={"reasoning_effort": ...}, if the template '
    "reads it",
    "functions": 'write them as "tools"',
    "parallel_tool_calls": "leave it out: the model decides how many tools it calls",
    "top_logprobs": "leave it out: only the sampled tokens have log-probabilities",
}


class RequestError(Exception):
    """A request that is rejected.

    Attributes:
        status: the status of the HTTP answer.
        kind, code: the type and the code of the error in OpenAI's format.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code


@dataclass
class Sampling:
    """How a draw samples.

    Attributes:
        section: the section of the configuration that these values come from.
        max_tokens: of one turn.
        stop: texts that end a turn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    stop: list[str] = field(default_factory=list)
    section: str = "rollout"

    def check(self, fields: dict) -> None:
        """Raise RequestError if a request asks for other sampling."""
        for name in SAMPLING:
            value = fields.get(name)
            own = getattr(self, name)
            if value is None or same_sampling(name, value, own):
                continue
            has_no_effect = self.temperature == 0 and name != "temperature"
            if has_no_effect:
                continue
            raise RequestError(
                f"{name}={value!r} differs from {self.section}.{name}={own!r}: tokens are trained "
                f"under the distribution that they are sampled from. Leave {name} out, or set "
                f"{self.section}.{name}={value!r}"
            )


def same_sampling(name: str, value, own: float) -> bool:
    """Return whether two values of a field mean the same."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "top_k":
        return max(value, 0) == max(own, 0)
    return math.isclose(value, own)


@dataclass(frozen=True)
class ChatRequest:
    """A request for a reply to messages.

    Attributes:
        tools: the tools that the template prints, or None.
        may_call: whether the reply is searched for tool calls.
        max_tokens: the maximum that the client requests, or None.
        stop: the draw's stop strings and the client's.
    """

    messages: list[dict]
    tools: list[dict] | None
    may_call: bool
    template_kwargs: dict
    max_tokens: int | None
    stop: list[str]
    has_logprobs: bool


@dataclass(frozen=True)
class GenerateRequest:
    """A request for tokens that continue other tokens. The fields are as in ChatRequest."""

    token_ids: list[int]
    max_tokens: int | None
    stop: list[str]
    has_logprobs: bool


def read_chat_request(body: dict, sampling: Sampling) -> ChatRequest:
    """Read a request to /v1/chat/completions.

    Raises:
        RequestError: a field is wrong, or not supported.
    """
    check_fields(body, CHAT_FIELDS)
    sampling.check(body)
    tools = read_tools(body.get("tools"))
    tool_choice = read_tool_choice(body.get("tool_choice"))
    template_kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(template_kwargs, dict):
        raise RequestError(f"chat_template_kwargs must be an object, not {template_kwargs!r:.60}")
    return ChatRequest(
        messages=read_messages(body.get("messages")),
        tools=tools,
        may_call=bool(tools) and tool_choice == "auto",
        template_kwargs=without_none(template_kwargs),
        max_tokens=read_max_tokens(body),
        stop=read_stop(body.get("stop"), sampling.stop),
        has_logprobs=bool(body.get("logprobs")),
    )


def read_generate_request(
    body: dict, sampling: Sampling, vocabulary_size: int, end_ids: set[int]
) -> GenerateRequest:
    """Read a request to /inference/v1/generate.

    Args:
        end_ids: the tokens that end turns.

    Raises:
        RequestError: a field is wrong, or not supported.
    """
    check_fields(body, GENERATE_FIELDS)
    fields = body.get("sampling_params") or {}
    if not isinstance(fields, dict):
        raise RequestError(f"sampling_params must be an object, not {fields!r:.60}")
    check_fields(fields, GENERATION_FIELDS)
    sampling.check(fields)
    check_stop_tokens(fields.get("stop_token_ids"), end_ids)
    token_ids = body.get("token_ids")
    is_list = isinstance(token_ids, list) and token_ids
    if not is_list or not all(is_token(i, vocabulary_size) for i in token_ids):
        raise RequestError(
            f"token_ids must be a list of integers from 0 to {vocabulary_size - 1}, not "
            f"{token_ids!r:.60}"
        )
    has_logprobs = fields.get("logprobs") is not None and fields["logprobs"] is not False
    return GenerateRequest(
        token_ids=token_ids,
        max_tokens=read_max_tokens(fields),
        stop=read_stop(fields.get("stop"), sampling.stop),
        has_logprobs=has_logprobs,
    )


def check_stop_tokens(token_ids, end_ids: set[int]) -> None:
    """Raise RequestError for a token that does not end turns anyway.

    Clients that tokenize by themselves, such as the one of verifiers, send the tokens with which
    turns end in their chat template.
    """
    if token_ids is None:
        return
    if not isinstance(token_ids, list) or not all(i in end_ids for i in token_ids):
        raise RequestError(
            f"stop_token_ids={token_ids!r:.60} is not supported: turns end with the tokens "
            f"{sorted(end_ids)}"
        )


def is_token(value, vocabulary_size: int) -> bool:
    return type(value) is int and 0 <= value < vocabulary_size


def check_fields(body: dict, known: set[str]) -> None:
    """Raise RequestError for a field that is not read and might change the tokens."""
    for name, value in body.items():
        if value is None or name in known or name in HARMLESS:
            continue
        if name in NEUTRAL and value in NEUTRAL[name]:
            continue
        advice = ADVICE.get(name, "leave it out: tokens are sampled as the configuration says")
        raise RequestError(f"{name}={value!r:.60} is not supported: {advice}")


def read_messages(messages) -> list[dict]:
    """Check the messages of a request, and return them without None values."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f'"messages" must be a list of messages, not {messages!r:.60}')
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        try:
            check_message(message, name)
        except InputError as error:
            raise RequestError(str(error)) from error
        check_parts(message.get("content"), name)
    return without_none(messages)


def check_parts(content, name: str) -> None:
    """Raise RequestError if a part of a message is not a text."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
        if not is_text:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f'"{name}.content[{index}]" is of the type {kind!r}: messages of episodes may '
                "contain only texts"
            )


def read_tools(tools) -> list[dict] | None:
    """Check the tools of a request, and return them without None values."""
    if not isinstance(tools, list | None):
        raise RequestError(f'"tools" must be a list, not {tools!r:.60}')
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'"tools[{index}]" must be {{"type": "function", "function": {{"name": ...}}}}, '
                f"not {tool!r:.60}"
            )
    return without_none(tools) or None


def read_tool_choice(choice) -> str:
    """Return "auto" or "none"."""
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"tool_choice={choice!r:.60} is not supported: it would force tokens that the model "
            "does not sample. Set it to auto or none"
        )
    return choice or "auto"


def read_max_tokens(fields: dict) -> int | None:
    """Return the smallest number of tokens that a request asks for, or None."""
    values = [fields[name] for name in MAX_TOKENS if fields.get(name) is not None]
    for value in values:
        if type(value) is not int or value < 1:
            raise RequestError(f"max_tokens={value!r:.60} must be a positive integer")
    return min(values, default=None)


def read_stop(stop, own: list[str]) -> list[str]:
    """Return the draw's stop strings and those of a request."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"stop={stop!r:.60} must be a text or a list of texts")
    return [*own, *(s for s in stops if s not in own)]


def read_reward(body: dict) -> float:
    """Return the number in a request to /v1/rewards."""
    reward = body.get("reward")
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if not is_number or not math.isfinite(reward):
        raise RequestError(f"reward={reward!r:.60} must be a finite number")
    return float(reward)
