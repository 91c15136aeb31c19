"""What a worker does with an episode, in this process. test_episode_workers.py starts workers."""

import asyncio
import os
import sys
import time
from collections import Counter

import pytest

from configs.errors import InputError
from rollout.episodes.client import LLM, EpisodeLimit, LLMError
from rollout.episodes.environments import EnvironmentPlayer, append_observation
from rollout.episodes.worker import ROOT, FunctionPlayer, OutputFile, Player, limit_code, timeout
from rollout.grading.notes import Note
from tests.rollout import unplayable
from tests.rollout.scripted_server import script, scripted_server

SECONDS = 30  # longer than any test takes

# -- functions -------------------------------------------------------------------------------------

AGENT = """
import asyncio, sys, time
from rollout.episodes.client import EpisodeLimit
from rollout.grading.notes import Note

async def solve(row, llm):
    behave = row.get("behave")
    if behave == "raise":
        raise ValueError("no answer")
    if behave == "leave":
        sys.exit(3)
    if behave == "hang":
        await asyncio.sleep(600)
    if behave == "poll":
        end = time.monotonic() + 3
        while time.monotonic() < end:
            await asyncio.sleep(0)
    if behave == "limit":
        raise EpisodeLimit("max_turns")
    return row["value"]

async def look_at_notes(row, llm):
    calls = [Note.read(row["notes"]).call]
    for _ in range(3):
        await asyncio.sleep(0)
        calls.append(Note.read(row["notes"]).call)
    raise_later = asyncio.get_running_loop().create_future()
    raise_later.set_exception(ValueError())
    try:
        await raise_later
    except ValueError:
        calls.append(Note.read(row["notes"]).call)
    return {str(i): call for i, call in enumerate(calls)}
"""


@pytest.fixture
def notes():
    file = os.memfd_create("notes")
    yield file
    os.close(file)


@pytest.fixture
def make(tmp_path, monkeypatch, notes):
    """Return a function that makes a player of a function in AGENT."""
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    # As in a worker, whose modules are found last; and this process keeps its output.
    monkeypatch.setattr(sys, "path", [*sys.path, ROOT])
    monkeypatch.setattr(OutputFile, "redirect", lambda self: None)

    def make(name: str, seconds=float(SECONDS), clock=time.monotonic, **weights) -> Player:
        settings = {
            "episode": f"{file}:{name}",
            "timeout": seconds,
            "weights": weights,
            "output": str(tmp_path / "output.txt"),
        }
        return Player(settings, notes, clock)

    return make


def request(number: int = 1, **row) -> dict:
    """Return a request to play an episode that does not call the model."""
    return {"number": number, "row": row, "base_url": "http://127.0.0.1:9/v1", "api_key": "key"}


def answer_of(player: Player, request: dict) -> dict:
    response = asyncio.run(asyncio.wait_for(player.respond(request), SECONDS))
    (answer,) = response["answers"]
    return answer


def test_an_answer_has_the_score_or_the_reason_why_there_is_none(make):
    player = make("solve", a=2.0)
    assert not player.is_environment
    parts = {"a": 1.5, "b": 7.0}
    answer = answer_of(player, request(value=parts))
    assert answer == {"score": 3.0, "parts": parts, "tool_errors": 0}
    assert answer_of(player, request(value={"b": 7.0}))["kind"] == "missing part"
    assert answer_of(player, request(behave="limit")) == {"limit": "max_turns", "tool_errors": 0}
    raised = answer_of(player, request(behave="raise"))
    assert raised["kind"] == "raised"
    assert raised["trace"].endswith("ValueError: no answer\n")
    left = answer_of(player, request(behave="leave"))
    assert left["kind"] == "raised"
    assert left["trace"].endswith("SystemExit: 3\n")


def test_an_episode_that_is_late_is_told_where_it_waited(make):
    """The clock of draws does not matter to episodes that end with their draw."""
    player = make("solve", seconds=0.05, clock=lambda: 0.0)
    answer = answer_of(player, request(behave="hang"))
    assert answer["kind"] == "timed out"
    assert answer["trace"].endswith("took more than 0.05 s")
    assert "await asyncio.sleep(600)" in answer["trace"]
    assert answer_of(player, request(behave="poll", value=1.0))["kind"] == "timed out"
    assert answer_of(player, request(value=1.0))["score"] == 1.0


def test_a_note_names_the_episode_whose_code_runs(make, notes):
    """Also after another episode has run, and while nobody's code runs."""
    player = make("look_at_notes")
    between = []

    async def play_two():
        numbers = (3, 8)
        episodes = [player.respond(request(number, notes=notes)) for number in numbers]
        playing = asyncio.gather(*episodes)
        while not playing.done():
            await asyncio.sleep(0)
            between.append(Note.read(notes).call)
        return await playing

    for number, response in zip((3, 8), asyncio.run(play_two()), strict=True):
        (answer,) = response["answers"]
        assert [*answer["parts"].values()] == [number] * 5
    assert set(between) == {0}


def test_a_function_is_told_what_it_must_take():
    def with_defaults(row, llm=None, hint="", *, size=3):
        pass

    def with_anything(hint="", **columns):
        pass

    player = FunctionPlayer(with_defaults)
    assert player.at_default == ["hint", "size"]
    assert player.notice == "hint, size keeps its default"
    assert FunctionPlayer(with_anything).at_default == ["hint"]
    assert FunctionPlayer(lambda *llms, llm: 0).notice == ""
    with pytest.raises(InputError, match="no parameter llm"):
        FunctionPlayer(lambda row, *llms: 0)
    with pytest.raises(InputError, match="its parameter rows is unknown"):
        FunctionPlayer(lambda rows, llm: 0)


# -- time ------------------------------------------------------------------------------------------


class InstantLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers take no time: its clock jumps to the next one."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self):
        # asyncio-private: no method is called when the loop is about to wait.
        times = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if times and not self._ready:
            self.now = max(self.now, min(times))
        super()._run_once()


def run_instantly(coroutine):
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(coroutine)


STOPPED = 1.0
STARTED = 50.0


def time_of_draws() -> float:
    """Return the time of a clock that is stopped from one moment to another."""
    now = asyncio.get_running_loop().time()
    return now - max(0.0, min(now, STARTED) - STOPPED)


async def time_of_cancelling(seconds: float) -> float:
    """Return when a body that waits too long is cancelled."""
    try:
        async with timeout(seconds, time_of_draws) as limit:
            await asyncio.sleep(1000)
    except TimeoutError:
        assert limit.expired()
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seconds, expected", [(0.5, 0.5), (2.0, STARTED + 1.0), (9.0, 58.0)])
def test_time_while_the_clock_is_stopped_does_not_count(seconds, expected):
    """Nor is an episode cancelled much too late, after it was stopped."""
    assert run_instantly(time_of_cancelling(seconds)) == pytest.approx(expected, abs=0.011)


def test_the_clock_of_draws_counts_for_episodes_that_continue(make):
    """The episode waits, while the clock stops after one of its two seconds."""
    player = make("solve", seconds=2.0, clock=time_of_draws)

    async def play():
        response = await player.respond(request(behave="hang") | {"is_stoppable": True})
        return response, asyncio.get_running_loop().time()

    response, now = run_instantly(play())
    assert response["answers"][0]["kind"] == "timed out"
    assert now == pytest.approx(STARTED + 1.0, abs=0.011)


def test_nothing_is_left_of_a_time_limit_after_its_body():
    errors = []

    async def wait_after_it():
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        async with timeout(5.0, asyncio.get_running_loop().time):
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)

    run_instantly(wait_after_it())
    assert errors == []


# -- limits ----------------------------------------------------------------------------------------


class ErrorOfOpenAI(Exception):
    """An error with the fields that OpenAI's client gives it."""

    type = "episode_limit"
    code = "max_turns"


def raised_from(cause: Exception) -> Exception:
    error = RuntimeError("the agent has failed")
    error.__cause__ = cause
    return error


def raised_while(context: Exception) -> Exception:
    error = RuntimeError("a bug while the error was handled")
    error.__context__ = context
    return error


REACHED = EpisodeLimit("max_episode_tokens", "no tokens are left")
QUOTED = ValueError("status 400: after 3 turns (episode_limit: max_turns)")


@pytest.mark.parametrize(
    "error, code",
    [
        (REACHED, "max_episode_tokens"),
        (ErrorOfOpenAI(), "max_turns"),
        (raised_from(raised_from(REACHED)), "max_episode_tokens"),
        (QUOTED, "max_turns"),
        (raised_from(QUOTED), "max_turns"),
        (ExceptionGroup("tasks", [QUOTED, REACHED]), "max_turns"),
        (raised_from(ExceptionGroup("tasks", [REACHED])), "max_episode_tokens"),
        (ExceptionGroup("tasks", [REACHED, KeyError("a bug")]), None),
        (ExceptionGroup("tasks", [KeyError("a bug"), REACHED]), None),
        (raised_while(REACHED), None),
        (LLMError("the server is gone", 502), None),
        (KeyError("episode_limit"), None),
    ],
)
def test_an_exception_reports_a_limit_only_if_the_limit_has_caused_it(error, code):
    assert limit_code(error) == code


# -- classes ---------------------------------------------------------------------------------------


class Tools:
    """Tools of all kinds."""

    num_objects = 0

    def __init__(self):
        type(self).num_objects += 1
        self.num_running = 0
        self.reward = -5.0

    def reset(self, start: float, **row):
        self.start = start

    async def wait(self, seconds: float) -> float:
        """Wait.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return seconds

    def count(self) -> int:
        """Count the calls of this method that run at the same time."""
        self.num_running += 1
        time.sleep(0.02)
        num_running = self.num_running
        self.num_running -= 1
        return num_running

    def parts(self) -> list:
        """Return content parts."""
        return [{"type": "text", "text": "a part"}]

    def fail(self):
        """Fail."""
        raise KeyError("why")

    def _hidden(self):
        """Not a tool."""

    async def get_reward(self):
        if self.start < 0:
            raise ValueError("no reward")
        return self.start


class WithoutColumns:
    def reset(self):
        self.reward = 1.5


def play(player: EnvironmentPlayer, *turns: dict, row=None, **template_kwargs):
    """Play an episode whose model replies these turns.

    Returns the reward, the counts, and the bodies of the requests.
    """
    messages = [{"role": "user", "content": script(*turns)}]
    request = {
        "row": row or {"start": 2.0},
        "messages": [*messages],
        "template_kwargs": template_kwargs,
    }
    counts = Counter(tool_errors=0)

    async def play_with(server) -> float:
        llm = LLM(server.url, server.new_key(0))
        return await asyncio.wait_for(player.play(request, llm, counts), SECONDS)

    with scripted_server() as server:
        reward = asyncio.run(play_with(server))
    assert request["messages"] == messages, "the episode may be repeated"
    return reward, counts["tool_errors"], [request.body for request in server.requests]


CALLS = {
    ("wait", '{"seconds": 0.05}'): "0.05",
    ("count", ""): "1",
    ("fail", "{}"): "error: 'why'",
    ("count", "{}"): "1",
    ("parts", "{}"): [{"type": "text", "text": "a part"}],
    ("wait", '{"seconds": 0}'): "0",
    ("_hidden", "{}"): "error: Tool _hidden not found.",
    ("count", "[1"): "error: the arguments are not a JSON object: [1",
}


def test_the_model_gets_the_results_of_its_calls_in_their_order():
    """Whenever they end, and the errors, too. Methods that are not async run one by one."""
    turns = ({"tool_calls": [*CALLS]}, {"tool_calls": [["wait", "[]"]]}, {"content": "done"})
    player = EnvironmentPlayer(Tools)
    reward, num_errors, (first, second, third) = play(player, *turns, style="short")
    assert reward == 2.0, "that of get_reward(), not the attribute"
    assert num_errors == 4
    (user,) = first["messages"]
    begin, assistant, *results = second["messages"]
    assert begin == user
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == [c[0] for c in CALLS]
    assert results == [
        {"role": "tool", "tool_call_id": f"call_{i}", "name": name, "content": content}
        for i, ((name, _), content) in enumerate(CALLS.items())
    ]
    assert third["messages"][: len(second["messages"])] == second["messages"]
    assert [message["role"] for message in third["messages"][-2:]] == ["assistant", "tool"]
    for body in (first, second, third):
        names = [tool["function"]["name"] for tool in body["tools"]]
        assert names == ["count", "fail", "parts", "wait"]
        assert body["chat_template_kwargs"] == {"style": "short"}


def test_an_object_plays_again_unless_its_episode_has_failed():
    class Counted(Tools):
        num_objects = 0

    player = EnvironmentPlayer(Counted)
    for start in (1.0, 3.0):
        assert play(player, {"content": "done"}, row={"start": start, "more": 0})[0] == start
    assert Counted.num_objects == 1
    with pytest.raises(ValueError, match="no reward"):
        play(player, {"content": "done"}, row={"start": -1.0})
    assert play(player, {"content": "done"})[0] == 2.0
    assert Counted.num_objects == 2
    rejected = {"status": 400, "error": {"type": "invalid", "message": "too\n hot"}}
    with pytest.raises(LLMError, match="^too hot$"):
        play(player, rejected)
    assert play(player, {"content": "done"})[0] == 2.0
    assert Counted.num_objects == 3


def test_a_class_without_tools_and_columns():
    player = EnvironmentPlayer(WithoutColumns)
    assert player.notice == "its tools are none"
    reward, _, (body,) = play(player, {"content": "done"})
    assert reward == 1.5
    assert body.keys() == {"messages"}


def test_an_episode_that_is_cancelled_during_a_tool_has_no_tool_error():
    """Its time is over."""

    class Slow(Tools):
        is_waiting = False

        async def wait(self, seconds: float):
            """Wait.

            Args:
                seconds: How long.
            """
            type(self).is_waiting = True
            await asyncio.sleep(seconds)

    counts = Counter(tool_errors=0)
    content = script({"tool_calls": [["wait", '{"seconds": 600}']]})
    messages = [{"role": "user", "content": content}]
    request = {"row": {"start": 0.0}, "messages": messages, "template_kwargs": {}}

    async def play_and_cancel(llm: LLM) -> None:
        playing = asyncio.create_task(EnvironmentPlayer(Slow).play(request, llm, counts))
        while not Slow.is_waiting:
            await asyncio.sleep(0.005)
        playing.cancel()
        await playing

    with scripted_server() as server:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(play_and_cancel(LLM(server.url, server.new_key(0))))
        assert len(server.requests) == 1
    assert counts == {"tool_errors": 0}


SYSTEM = {"role": "system", "content": "s"}
ASSISTANT = {"role": "assistant", "content": "a"}
PART = {"type": "text", "text": "seen"}


def user(content) -> dict:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "messages, observation, expected",
    [
        ([user("1"), ASSISTANT, user("2"), ASSISTANT], "!", [user("1"), ASSISTANT, user("2!")]),
        ([SYSTEM, ASSISTANT], "!", [SYSTEM, ASSISTANT, user("!")]),
        ([user("1")], None, [user("1")]),
        ([user("1")], [PART], [user([{"type": "text", "text": "1"}, PART])]),
        ([user([PART])], "!", [user([PART, {"type": "text", "text": "!"}])]),
        ([user([PART])], [PART], [user([PART, PART])]),
        ([user(None)], "!", [user("!")]),
    ],
)
def test_an_observation_ends_the_last_message_of_the_user(messages, observation, expected):
    """Messages after it stay."""
    before = [dict(message) for message in messages]
    extended = append_observation(messages, observation)
    assert extended[: len(expected)] == expected
    assert extended[len(expected) :] == messages[len(expected) :]
    assert messages == before
    assert extended is not messages


@pytest.mark.parametrize(
    "environment, message",
    [
        (unplayable.NoReset, r"a class without the method reset\(self"),
        (unplayable.NeedsSize, "its __init__ needs the argument size,"),
        (unplayable.NoHint, "the parameter where of the tool act has no type hint"),
    ],
)
def test_a_class_that_cannot_play_is_an_error(environment, message):
    with pytest.raises(InputError, match=message):
        EnvironmentPlayer(environment)
