"""The client with which an episode calls the model that is being trained, over HTTP.

    async def solve(row, llm):
        messages = [{"role": "user", "content": row["question"]}]
        reply = await llm.chat(messages)
        return float(row["answer"] in reply.content)

Everything here needs only the standard library, because episodes also run in other Python
environments (rollout.episode_python). Other clients work as well: `llm.base_url` is the URL of an
API like OpenAI's, and `llm.api_key` identifies the episode.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from rollout.episodes.posting import HTTPError, post

LIMIT = "episode_limit"  # the type of the error of an episode that has reached a limit


class EpisodeLimit(Exception):
    """The episode has reached a limit, so the model gives no further replies.

    If your function does not catch it, the episode ends as truncated, and rollout.limit_score
    decides how it is trained. If it does, the episode gets the reward that your function returns.

    Attributes:
        code: max_turns or max_episode_tokens, the key of `rollout` that sets the limit, or
            max_model_len if the prompt alone is as long as a training sequence may be.
    """

    type = LIMIT

    def __init__(self, code: str, message: str = ""):
        super().__init__(message or code)
        self.code = code


class LLMError(Exception):
    """The server has rejected a request. The message is the server's, in one line.

    Attributes:
        status: the HTTP status, such as 400.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a reply.

    Attributes:
        id: the id to give as `tool_call_id` in the message with the tool's result.
        name: the name of the tool.
        arguments: the arguments by name; empty if raw_arguments is not a JSON object.
        raw_arguments: the arguments as the model wrote them, usually a JSON object.
    """

    id: str
    name: str
    arguments: dict
    raw_arguments: str


@dataclass(frozen=True)
class Reply:
    """The model's turn in a conversation.

    Attributes:
        message: the turn as a message. Append it to your messages to continue the conversation.
        content: the text, without reasoning and tool calls; "" if there is none.
        reasoning: the reasoning that rollout.reasoning_parser has found, or None.
        tool_calls: the calls of tools, in order.
        finish_reason: stop, length or tool_calls.
        token_ids: the sampled tokens of this turn, which are trained.
    """

    message: dict
    content: str
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: str
    token_ids: list[int]


@dataclass(frozen=True)
class Generation:
    """Tokens that continue a prompt of tokens.

    Attributes:
        token_ids: the sampled tokens, which are trained.
        log_probs: the log-probability of each; empty unless you ask for logprobs.
        finish_reason: stop or length.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


class LLM:
    """The model that is being trained, as one episode sees it.

    Its methods may run concurrently. A conversation that begins with the messages of an earlier
    turn continues that turn's tokens; any other conversation begins a new branch of the episode.

    Attributes:
        base_url: the URL of an API like OpenAI's, which ends with /v1.
        api_key: the key of this API. It belongs to this episode alone.
    """

    def __init__(self, base_url: str, api_key: str):
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self.base_url = f"{self._root}/v1"
        self.api_key = api_key

    async def chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        max_tokens: int | None = None,
        stop: str | list[str] | None = None,
        **fields,
    ) -> Reply:
        """Return the model's next turn in a conversation.

        Args:
            messages: the conversation, as for OpenAI's chat completions.
            tools: schemas of the tools that the model may call:
                {"type": "function", "function": {"name", "description", "parameters"}}.
            max_tokens: the longest turn, at most rollout.max_tokens, which is the default.
            stop: strings that end the turn, besides rollout.stop.
            fields: further fields of the request, such as chat_template_kwargs or tool_choice.
                Sampling parameters such as the temperature come from the section `rollout`; other
                values are an error.

        Raises:
            EpisodeLimit: the episode has reached rollout.max_turns or rollout.max_episode_tokens.
            LLMError: the server has rejected the request.
        """
        optional = {"tools": tools, "max_tokens": max_tokens, "stop": stop}
        chosen = {name: value for name, value in optional.items() if value is not None}
        request = {"messages": messages, **chosen, **fields}
        answer = await self._post("/v1/chat/completions", request)
        choice = answer["choices"][0]
        message = choice["message"]
        return Reply(
            message=message,
            content=message.get("content") or "",
            reasoning=message.get("reasoning") or message.get("reasoning_content"),
            tool_calls=[read_tool_call(call) for call in message.get("tool_calls") or []],
            finish_reason=choice["finish_reason"],
            token_ids=choice["token_ids"],
        )

    async def generate(self, token_ids: list[int], **sampling_params) -> Generation:
        """Return the tokens with which the model continues a prompt.

        Args:
            token_ids: the tokens of the prompt. If they begin with all tokens of an earlier turn
                and its prompt, they continue it.
            sampling_params: parameters of vLLM's SamplingParams: max_tokens, stop, or logprobs=1.

        Raises:
            EpisodeLimit: the episode has reached rollout.max_turns or rollout.max_episode_tokens.
            LLMError: the server has rejected the request.
        """
        request = {"token_ids": token_ids, "sampling_params": sampling_params}
        answer = await self._post("/inference/v1/generate", request)
        choice = answer["choices"][0]
        log_probs = choice.get("logprobs") or {}
        return Generation(
            token_ids=choice["token_ids"],
            log_probs=[entry["logprob"] for entry in log_probs.get("content") or []],
            finish_reason=choice["finish_reason"],
        )

    async def reward(self, value: float) -> None:
        """Give a reward for the model's last turn.

        The score of the episode includes the sum of these rewards, in addition to what your
        function returns.

        Raises:
            LLMError: there is no turn yet.
        """
        await self._post("/v1/rewards", {"reward": float(value)})

    async def _post(self, path: str, request: dict) -> dict:
        try:
            return await post(self._root + path, request, self.api_key)
        except HTTPError as error:
            raise read_error(error) from None


def read_tool_call(call: dict) -> ToolCall:
    """Return a tool call, given as in a message in OpenAI's format."""
    function = call["function"]
    raw_arguments = function.get("arguments") or ""
    try:
        arguments = json.loads(raw_arguments)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {}
    return ToolCall(call.get("id", ""), function["name"], arguments, raw_arguments)


def read_error(error: HTTPError) -> Exception:
    """Return the exception for an HTTP error, whose body has the form of OpenAI's errors."""
    try:
        details = json.loads(error.body)["error"]
        message = details["message"]
    except (ValueError, TypeError, KeyError):
        details = {}
        message = error.body.decode(errors="replace")
    message = " ".join(str(message).split()) or f"HTTP status {error.status}"
    if details.get("type") == LIMIT:
        return EpisodeLimit(details["code"], message)
    return LLMError(message, error.status)
