"""Play episodes with a class that follows TRL's interface (GRPOTrainer's environment_factory).

    class Game:
        def reset(self, **row) -> str | None:
            "Begin an episode. The text is appended to the last user message."

        def guess(self, number: int) -> str:
            "A public method is a tool. Its schema comes from its type hints and docstring."

        def get_reward(self) -> float:
            "Return a number or named parts when the model has stopped calling tools."

All methods may be async; other methods run in threads. An object plays one episode at a time, and
is reused: reset() begins the next episode.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable

from configs.errors import InputError
from rollout.episodes.client import LLM, ToolCall
from rollout.episodes.schemas import SchemaError, tool_schema
from rollout.episodes.threads import call, is_async

OWN_METHODS = ("reset", "get_reward")


class EnvironmentPlayer:
    """Plays episodes with objects of the user's class."""

    def __init__(self, environment: type):
        self.environment = environment
        # Inspect the class: inspecting an object would evaluate its properties.
        methods = dict(inspect.getmembers(environment, inspect.isfunction))
        if "reset" not in methods:
            raise InputError(
                "it is a class without the method reset(self, **row), which begins an episode"
            )
        needed = required_arguments(environment)
        if needed:
            raise InputError(
                f"its __init__ needs the argument {', '.join(needed)}, but is called without any: "
                "give it a default, or read it from the row in reset()"
            )
        self.tools = {
            name: method
            for name, method in methods.items()
            if name not in OWN_METHODS and not name.startswith("_")
        }
        try:
            self.schemas = [tool_schema(method) for method in self.tools.values()]
        except SchemaError as error:
            raise InputError(str(error)) from error
        self.has_reward = "get_reward" in methods
        self.reset_columns = column_names(methods["reset"])
        self.notice = f"its tools are {', '.join(self.tools) or 'none'}"
        self.at_default: list[str] = []
        self._idle = []

    async def play(self, request: dict, llm: LLM, counts: Counter):
        """Play an episode until the model calls no tool, and return its reward.

        Args:
            counts: its "tool_errors" counts the calls whose result is an error.
        """
        environment = self._idle.pop() if self._idle else await call(self.environment)
        row = request["row"]
        if self.reset_columns is not None:
            row = {name: row[name] for name in self.reset_columns if name in row}
        observation = await call(environment.reset, **row)
        messages = append_observation(request["messages"], observation)
        fields = {}
        if request["template_kwargs"]:
            fields["chat_template_kwargs"] = request["template_kwargs"]
        while True:
            reply = await llm.chat(messages, tools=self.schemas or None, **fields)
            messages.append(reply.message)
            if not reply.tool_calls:
                break
            messages += await self._call_tools(environment, reply.tool_calls, counts)
        reward = await self._reward(environment)
        self._idle.append(environment)  # not reused after an exception: its state is unknown
        return reward

    async def _call_tools(self, environment, calls: list[ToolCall], counts: Counter) -> list[dict]:
        """Return the messages with the results of tool calls, in their order.

        Async methods run concurrently, and other methods one after another. If a call fails, its
        result is the error message.
        """
        lock = asyncio.Lock()

        async def result_of(tool_call: ToolCall) -> str | list:
            try:
                return await self._call_tool(environment, tool_call, lock)
            except Exception as error:
                counts["tool_errors"] += 1
                return f"error: {error}"

        results = await asyncio.gather(*[result_of(tool_call) for tool_call in calls])
        return [
            {"role": "tool", "tool_call_id": c.id, "name": c.name, "content": result}
            for c, result in zip(calls, results, strict=True)
        ]

    async def _call_tool(self, environment, tool_call: ToolCall, lock: asyncio.Lock) -> str | list:
        """Return the result of a tool: a text, or a list of content parts, such as images."""
        if tool_call.name not in self.tools:
            raise ValueError(f"Tool {tool_call.name} not found.")
        if not is_object(tool_call.raw_arguments):
            raise ValueError(f"the arguments are not a JSON object: {tool_call.raw_arguments}")
        method = getattr(environment, tool_call.name)
        if is_async(method):
            result = await method(**tool_call.arguments)
        else:
            async with lock:
                result = await call(method, **tool_call.arguments)
        return result if isinstance(result, list) else str(result)

    async def _reward(self, environment):
        """Return get_reward(), or the attribute `reward` of a class that has no such method."""
        if self.has_reward:
            return await call(environment.get_reward)
        if not hasattr(environment, "reward"):
            name = self.environment.__name__
            raise AttributeError(f"{name} has neither get_reward() nor the attribute reward")
        return environment.reward


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object, or empty."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False


def required_arguments(environment: type) -> list[str]:
    """Return the arguments that a class needs to make an object."""
    parameters = inspect.signature(environment).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def column_names(reset: Callable) -> list[str] | None:
    """Return the columns of the row that reset() takes; None for all of them."""
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def append_observation(messages: list[dict], observation: str | list | None) -> list[dict]:
    """Return the messages with an observation at the end of the last user message.

    Args:
        observation: a text, or a list of content parts, such as images.
    """
    if observation is None:
        return list(messages)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return [*messages, {"role": "user", "content": observation}]
    message = messages[users[-1]]
    content = message.get("content") or ""
    if isinstance(content, str) and isinstance(observation, list):
        content = [{"type": "text", "text": content}]
    if isinstance(content, list) and isinstance(observation, str):
        observation = [{"type": "text", "text": observation}]
    extended = {**message, "content": content + observation}
    return [*messages[: users[-1]], extended, *messages[users[-1] + 1 :]]
