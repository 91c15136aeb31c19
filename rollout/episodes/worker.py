"""The program of an episode worker. It plays episodes for rollout/episodes/runner.py.

It plays many episodes at once, in one event loop. It needs only the standard library, because it
may run in another Python environment (rollout.episode_python).
"""

import asyncio
import contextlib
import inspect
import os
import re
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path

from common.imports import import_from_module, import_function, path_of
from configs.errors import InputError
from rollout.episodes.client import LIMIT, LLM
from rollout.episodes.environments import EnvironmentPlayer
from rollout.episodes.threads import call
from rollout.grading.clock import StoppableClock
from rollout.grading.notes import write_note
from rollout.grading.program import OutputFile, limit_memory, serve_async, start
from rollout.grading.scores import read_score

ROOT = str(Path(__file__).parents[2])
NO_CALL = 0
# The shortest wait before the clock is read again. If the clock is stopped right before the end of
# an episode's time, shorter waits would keep the event loop busy.
MIN_WAIT_SECONDS = 0.01
# The end of the gateway's message about a limit.
QUOTED_LIMIT = re.compile(rf"\({LIMIT}: (\w+)\)")


def main(clock: int, lifeline: int, notes: int) -> None:
    """Play episodes until standard input ends.

    The first request contains the settings, which EpisodeRunner describes.
    """
    for file in (clock, notes):
        os.set_inheritable(file, False)
    channel = start(lifeline)
    settings = channel.read()
    limit_memory(int(settings["memory_gib"] * 2**30))
    hide_project()
    try:
        player = Player(settings, notes, StoppableClock(clock))
    except InputError as error:
        channel.reply(settings["token"], error=str(error))
        return
    channel.reply(
        settings["token"],
        is_environment=player.is_environment,
        notice=player.notice,
        at_default=player.at_default,
    )
    asyncio.run(serve_async(channel, player.respond))


def hide_project() -> None:
    """Make the user's modules take precedence over ours of the same name, such as `data`."""
    sys.path.remove(ROOT)
    sys.path.append(ROOT)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("common", "configs"):
            del sys.modules[name]
    python_path = os.environ["PYTHONPATH"].split(os.pathsep)
    python_path.remove(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join([*python_path, ROOT])


class Player:
    """The user's function or class, which plays episodes.

    Attributes:
        is_environment: whether it is a class; then each episode uses an object of this class.
        notice: a line about how it is called, or "".
        at_default: the function's parameters that keep their defaults.
    """

    def __init__(self, settings: dict, notes: int, clock: StoppableClock):
        self.settings = settings
        self.notes = notes
        self.clock = clock
        self.output = OutputFile(settings["output"])
        self.name = f"rollout.episode={settings['episode']}"
        function = find(self.name, settings["episode"])
        self.is_environment = inspect.isclass(function)
        try:
            player_type = EnvironmentPlayer if self.is_environment else FunctionPlayer
            player = player_type(function)
        except ValueError as error:  # inspect cannot read functions that are written in C
            raise InputError(f"{self.name}: {error}") from error
        self.play = player.play
        self.notice = f"{self.name}: {player.notice}" if player.notice else ""
        self.at_default = player.at_default

    async def respond(self, request: dict) -> dict:
        """Return the answer to a request, with the number of tools that raised an error."""
        counts = Counter(tool_errors=0)
        answer = await self.answer(request, counts)
        return {"answers": [answer | counts]}

    async def answer(self, request: dict, counts: Counter) -> dict:
        """Play an episode.

        Returns:
            {"score", "parts"}; {"limit": code} if an exception about a limit has left the user's
            function; or {"kind", "trace"} for a failure.
        """
        seconds = self.settings["timeout"]
        llm = LLM(request["base_url"], request["api_key"])
        note = partial(self.note, request["number"])
        try:
            clock = self.clock if request.get("is_stoppable") else time.monotonic
            async with timeout(seconds, clock) as limit:
                self.output.redirect()
                episode = self.play(request, llm, counts)
                value = await watch(episode, note, partial(self.note, NO_CALL))
        except BaseException as error:  # sys.exit() in the function must not end the worker
            if limit_code(error):
                return {"limit": limit_code(error)}
            if limit.expired():
                trace = place_of(error) + f"took more than {seconds:g} s"
                return {"kind": "timed out", "trace": trace}
            return {"kind": "raised", "trace": traceback.format_exc()}
        return read_score(value, self.settings["weights"])

    def note(self, number: int) -> None:
        """Note which call's code runs now, in case it blocks or ends this process."""
        write_note(self.notes, number)


@contextlib.asynccontextmanager
async def timeout(seconds: float, clock: Callable[[], float]) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the body after these seconds, as the clock counts them."""
    loop = asyncio.get_running_loop()
    end = clock() + seconds

    def expire_or_wait() -> None:
        nonlocal timer
        seconds_left = end - clock()
        if seconds_left <= 0:
            limit.reschedule(loop.time())
        else:
            timer = loop.call_later(max(seconds_left, MIN_WAIT_SECONDS), expire_or_wait)

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, expire_or_wait)
        try:
            yield limit
        finally:
            timer.cancel()


class FunctionPlayer:
    """A function that plays an episode: `async def solve(row, llm)`.

    It gets the arguments that it has parameters for. A function that is not async runs in a thread.
    """

    def __init__(self, function: Callable):
        parameters = inspect.signature(function).parameters.values()
        self.function = function
        self.takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.names = {p.name for p in parameters}
        optional = [p.name for p in parameters if p.default is not p.empty]
        self.at_default = [name for name in optional if name not in ("row", "llm")]
        self.notice = ""
        if self.at_default:
            self.notice = f"{', '.join(self.at_default)} keeps its default"
        required = [p for p in parameters if is_required(p)]
        unknown = [
            p.name for p in required if p.name not in ("row", "llm") or p.kind == p.POSITIONAL_ONLY
        ]
        if unknown:
            raise InputError(
                f"its parameter {', '.join(unknown)} is unknown: an episode takes row and llm, as "
                "in `async def solve(row, llm)`; read other values from the row"
            )
        if not self.takes_all and "llm" not in self.names:
            raise InputError(
                "it has no parameter llm, so it cannot call the model: write it as "
                "`async def solve(row, llm)`"
            )

    async def play(self, request: dict, llm: LLM, counts: Counter):
        arguments = {"row": request["row"], "llm": llm}
        if not self.takes_all:
            arguments = {name: arguments[name] for name in self.names & arguments.keys()}
        return await call(self.function, **arguments)


def is_required(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and not is_variadic


def find(setting: str, name: str) -> Callable:
    """Import path/to/file.py:name, or package.module:name from the working directory or sys.path.

    The modules beside the file take precedence over ours.
    """
    is_file = ".py:" in name or name.endswith(".py") or ":" not in name
    directory = str(path_of(name).parent) if is_file else os.getcwd()
    sys.path.insert(sys.path.index(ROOT), directory)
    if is_file:
        return import_function(setting, name, known=())
    return import_from_module(setting, name)


@types.coroutine
def watch(coroutine: Coroutine, enter: Callable, leave: Callable):
    """Await a coroutine, and call enter() and leave() before and after each of its steps."""
    step = partial(coroutine.send, None)
    while True:
        enter()
        try:
            awaited = step()
        except StopIteration as stop:
            return stop.value
        finally:
            leave()
        try:
            value = yield awaited
            step = partial(coroutine.send, value)
        except BaseException as error:
            # Without this frame, which would come last in the traceback.
            step = partial(coroutine.throw, error.with_traceback(None))


def limit_code(error: BaseException | None) -> str | None:
    """Return the code of the limit that an exception reports, or None.

    Such an exception is one of these:

    * an EpisodeLimit, or an exception of OpenAI's client with the fields of the server's error;
    * an exception that was raised from one of these, as agent frameworks do;
    * an exception whose message quotes the text of one, which is all that verifiers keeps;
    * a group of only such exceptions, as asyncio.TaskGroup raises.
    """
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            codes = [limit_code(part) for part in error.exceptions]
            return codes[0] if all(codes) else None
        if getattr(error, "type", None) == LIMIT:
            return error.code
        quoted = QUOTED_LIMIT.search(str(error))
        if quoted:
            return quoted[1]
        error = error.__cause__
    return None


def place_of(error: BaseException) -> str:
    """Return the traceback of the code that was cancelled, without the error itself."""
    cancelled = error.__cause__ or error
    return "".join(traceback.format_tb(cancelled.__traceback__))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
