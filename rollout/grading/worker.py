"""The program of a reward worker. It calls one reward function for rollout/grading/process.py."""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Mapping, Set

from configs.errors import InputError
from data.chat.losses import is_empty
from rewards import REWARDS, find
from rollout.grading.program import OutputFile, limit_memory, serve, serve_async, start
from rollout.grading.scores import is_with_steps, read_score, score_parts, with_steps
from rollout.grading.signature import Signature


def main(lifeline: int) -> None:
    """Answer requests until standard input ends.

    The first request contains the settings: the section `reward`, and what Grader adds to it.
    """
    channel = start(lifeline)
    settings = channel.read()
    limit_memory(int(settings["memory_gib"] * 2**30))
    try:
        reward = RewardFunction(settings)
    except InputError as error:
        channel.reply(settings["token"], error=str(error))
        return
    takes_groups = reward.signature.convention.takes_groups
    channel.reply(settings["token"], takes_groups=takes_groups, is_async=reward.is_async)
    if reward.is_async:
        asyncio.run(serve_async(channel, reward.respond_async))
    else:
        serve(channel, reward.respond)


class RewardFunction:
    """The user's function, called with the arguments that it has parameters for.

    Its return values become answers, one for each response of a call: {"score", "parts"}, with
    reward.step_rewards also "steps", or {"kind", "trace"} for a failure.
    """

    def __init__(self, settings: dict):
        self.settings = settings
        self.name = f"reward.function={settings['function']}"
        self.output = OutputFile(settings["output"])
        self.function = find(settings["function"])
        if inspect.isclass(self.function):
            raise InputError(f"{self.name} is a class: use a function, or an instance of the class")
        try:
            self.signature = Signature(
                self.function, settings["kwargs"], settings["conversation_keys"]
            )
        except ValueError as error:  # inspect cannot read functions that are written in C
            raise InputError(f"{self.name}: {error}") from error
        callables = (self.function, self.function.__call__)
        self.is_async = any(inspect.iscoroutinefunction(f) for f in callables)

    def respond(self, request: dict) -> dict:
        """Return the answer to a request, as a dictionary."""
        if request["check"]:
            return self.check(request)
        return {"answers": self.grade(request)}

    async def respond_async(self, request: dict) -> dict:
        """As respond(), for an async function."""
        if request["check"]:
            return self.check(request)
        return {"answers": await self.grade_async(request)}

    def check(self, request: dict) -> dict:
        """Check that a row has everything the function needs. Calls the function if it is built in.

        Returns:
            {"error": message}, or {"notice": a notice for the user, or ""}.
        """
        is_built_in = self.function in REWARDS.values()
        columns = {*filled_names(request["rows"][0]), *request["columns"]}
        try:
            arguments = self.arguments(request)
            notice = self.signature.notice(arguments, columns)
            if is_built_in:
                self.function(**arguments)
        except (KeyError, ValueError) as error:
            return {"error": f"{self.name}: {error.args[0]}"}
        return {"notice": f"{self.name}: {notice}" if notice else ""}

    def grade(self, request: dict) -> list[dict]:
        """Call the function, and return one answer for each response."""
        try:
            self.output.redirect()
            value = self.function(**self.arguments(request))
        except BaseException:  # sys.exit() in the function must not end the worker
            return failures(request, "raised", traceback.format_exc())
        return self.answers(value, request)

    async def grade_async(self, request: dict) -> list[dict]:
        """As grade(), for an async function, which is cancelled after reward.timeout."""
        seconds = self.settings["timeout"]
        try:
            async with asyncio.timeout(seconds) as limit:
                self.output.redirect()
                value = await self.function(**self.arguments(request))
        except BaseException:
            if limit.expired():
                return failures(request, "timed out", f"took more than {seconds:g} s")
            return failures(request, "raised", traceback.format_exc())
        return self.answers(value, request)

    def arguments(self, request: dict) -> dict:
        return self.signature.arguments(request["prompts"], request["responses"], request["rows"])

    def answers(self, value, request: dict) -> list[dict]:
        """Turn a return value into one answer per response."""
        responses = request["responses"]
        if not self.signature.convention.takes_groups:
            return [self.answer(value, responses[0])]
        num_responses = len(responses)
        values = as_list(value)
        if len(values) != num_responses:
            trace = f"the function returned {value!r:.200}, not a list of {num_responses}"
            return failures(request, "not a list", trace)
        return [self.answer(value, response) for value, response in zip(values, responses)]

    def answer(self, value, response: str) -> dict:
        """Turn the function's return value for one response into a score, parts and steps."""
        if self.settings["step_rewards"]:
            if not is_with_steps(value):
                trace = (
                    f"{self.name} returned {value!r:.200}, not a pair (score, list of steps), "
                    "which reward.step_rewards=true needs"
                )
                return {"kind": "no steps", "trace": trace}
            score, steps = value
            return with_steps(self.score_of(score), steps, response, self.name)
        if is_with_steps(value):
            trace = (
                f"{self.name} returned {value!r:.200}, a score with the rewards of steps: set "
                "reward.step_rewards=true"
            )
            return {"kind": "not a number", "trace": trace}
        return self.score_of(value)

    def score_of(self, value) -> dict:
        """Turn a number or a dictionary into a score and its parts."""
        weights = self.settings["weights"]
        if self.signature.convention.is_verl and isinstance(value, Mapping) and value:
            return score_parts(value, numeric_parts(value), weights or {"score": 1.0})
        return read_score(value, weights)


def filled_names(row: dict) -> list[str]:
    """Return the columns of a row that have a value. An empty cell of a CSV file has none."""
    return [name for name, value in row.items() if not is_empty(value)]


def as_list(value) -> list:
    """Return the values of a list, tuple, array, tensor or generator; [] for anything else.

    A set has no order that could match the order of the responses.
    """
    if isinstance(value, str | bytes | Mapping | Set):
        return []
    try:
        return list(value)
    except TypeError:
        return []


def numeric_parts(parts: Mapping) -> dict:
    """Remove the texts for people that functions written for verl may return."""
    texts = (str, list, dict, type(None))
    return {name: part for name, part in parts.items() if not isinstance(part, texts)}


def failures(request: dict, kind: str, trace: str) -> list[dict]:
    """Return the same failure for every response of a call."""
    return [{"kind": kind, "trace": trace}] * len(request["responses"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
