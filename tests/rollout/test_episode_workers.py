"""Episodes in worker processes: rewards, limits, failures that stay with their episode, classes."""

import re
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from config import InputError, load
from rollout.episodes.jobs import Limit
from rollout.episodes.runner import EpisodeRunner, episode_environment
from rollout.grading.grader import Reward
from rollout.grading.notes import Note
from rollout.grading.process import Ending, WorkerProcess
from tests.data.chat_templates import CONTROL, QWEN2, make_tokenizer
from tests.rollout import unplayable
from tests.rollout.episode_gateway import SAMPLING, GatewayProcess, save_tokenizer
from tests.rollout.scripted_server import script, scripted_server

ROOT = Path(__file__).parents[2]
SLACK = 60.0
LIMIT = 1.5


@pytest.fixture
def server():
    with scripted_server() as server:
        yield server


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return a function that makes an EpisodeRunner."""

    def make(episode, *overrides, workers=1, timeout=SLACK, startup_timeout=300.0):
        config = load(
            "ppo.yaml",
            [
                "model.path=unused",
                "data.train_files=unused",
                f"output_dir={tmp_path_factory.mktemp('out')}",
                f"rollout.episode={episode}",
                f"rollout.episode_workers={workers}",
                f"rollout.episode_timeout={timeout}",
                *overrides,
            ],
        )
        return EpisodeRunner(config, startup_timeout)

    return make


def play(runner, server, rows, **options):
    return runner.play(rows, server.url, server.new_key, **options)


# -- functions -------------------------------------------------------------------------------------

FILE = """
import asyncio, os, signal, sys, time
import urllib.request
from pathlib import Path
from rollout.episodes.client import EpisodeLimit, LLMError

async def solve(row, llm):
    behave = row.get("behave")
    if behave == "raise":
        return 1 / row["zero"]
    if behave == "leave":
        sys.exit(3)
    if row.get("started"):
        Path(row["started"]).touch()
    if behave == "hang":
        await asyncio.sleep(600)
    if behave == "stubborn":
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
    if row.get("meet"):         # end the process only when all others are in flight
        while len(list(Path(row["meet"]).iterdir())) < row["size"]:
            Path(row["meet"], str(row["i"])).touch()
            await asyncio.sleep(0.01)
    if behave == "block":
        time.sleep(600)
    if behave == "exit":
        os._exit(3)
    if behave == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behave == "task exits":
        async def leave():
            os._exit(4)
        await asyncio.create_task(leave())
    if behave == "print":
        os.write(1, b"x" * 2**20)
        print("y" * 2**20, flush=True)
    if behave == "forge":
        answers = b'{"answers": [{"score": 99.0, "parts": {}}], "token": "0123456789abcdef"}\\n'
        for descriptor in range(3, 64):
            try:
                if "pipe" in os.readlink(f"/proc/self/fd/{descriptor}"):
                    os.write(descriptor, answers)
            except OSError:
                pass
    if row.get("wait"):
        await asyncio.sleep(row["wait"])
    if "value" in row:
        return eval(row["value"])
    reply = await llm.chat([{"role": "user", "content": row["text"]}])
    return len(reply.content)

async def several_turns(row, llm):
    messages = [{"role": "user", "content": row["script"]}]
    reply = await llm.chat(messages, tools=[{"name": "add"}], max_tokens=7, stop=["x"], seed=3)
    (call,) = reply.tool_calls
    assert (call.id, call.name, call.arguments) == ("call_0", "add", {"a": 1, "b": 2})
    assert (reply.content, reply.finish_reason, reply.token_ids) == ("", "tool_calls", [1, 2, 3])
    result = str(sum(call.arguments.values()))
    messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    await llm.reward(0.25)
    reply = await llm.chat(messages)
    assert reply.reasoning == "so" and not reply.tool_calls
    generation = await llm.generate([1, 2, 3], max_tokens=4, logprobs=1)
    assert generation.token_ids == [2, 3, 4] and generation.log_probs == [-1.0, -1.5, -2.0]
    return {"last": float(reply.content), "of_three": 3}

async def limited(row, llm):
    try:
        await llm.chat([{"role": "user", "content": row["script"]}])
    except EpisodeLimit as limit:
        if row["catch"]:
            return len(limit.code)
        raise
    except LLMError as error:
        assert error.status == 400
        return {"error": len(str(error))}

async def in_a_group(row, llm):
    messages = [{"role": "user", "content": row["script"]}]
    async with asyncio.TaskGroup() as group:
        group.create_task(llm.chat(messages))
        if row["bug"]:
            group.create_task(fail())

async def fail():
    raise ValueError("a bug")

async def with_openai(row, llm):
    from openai import AsyncOpenAI, BadRequestError
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    messages = [{"role": "user", "content": row["script"]}]
    try:
        reply = await client.chat.completions.create(model="policy", messages=messages)
    except BadRequestError as error:
        if row["how"] == "wrap":
            raise RuntimeError("the agent has failed") from error
        if row["how"] == "quote":
            raise RuntimeError(f"the agent says: {error}") from None
        if row["how"] == "bug":
            return 1 / 0
        raise
    return len(reply.choices[0].message.content)

def without_async(llm, row):
    url = f"{llm.base_url}/chat/completions"
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)
    time.sleep(row["seconds"])
    return float(b"hello" in urllib.request.urlopen(request).read())

async def talk(row, llm):
    messages = [{"role": "user", "content": "hello"}]
    for _ in range(row["turns"]):
        reply = await llm.chat(messages)
        messages += [reply.message, {"role": "user", "content": "question"}]
    await llm.reward(0.5)
    generation = await llm.generate(row["token_ids"], max_tokens=4, logprobs=1)
    assert generation.token_ids == reply.token_ids
    return {"content": reply.content == "there", "log_probs": sum(generation.log_probs)}

async def environment(row, llm):
    return {"secret": "JUDGE_KEY" in os.environ, "other": "OTHER_SECRET" in os.environ,
            "loopback": "127.0.0.1" in os.environ["no_proxy"]}

async def allocate(row, llm):
    return len(bytearray(row["num_bytes"]))

async def wrong(rows, llm, answer, times=2):
    return 0

async def no_llm(row):
    return 0

async def positional(row, llm, /):
    return 0

async def with_default(row, llm, hint=None):
    return 0

async def everything(**arguments):
    return len(arguments["row"]) + len(arguments["llm"].api_key)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "agent.py"
    path.write_text(FILE)
    return path


def test_rewards_are_numbers_or_named_parts_in_order(make, file, server):
    with closing(make(f"{file}:solve", workers=2)) as runner:
        rows = [{"text": "a" * i, "wait": (i * 7 % 5) / 50} for i in range(1, 20)]
        assert play(runner, server, rows) == [Reward(float(i), {}) for i in range(1, 20)]
        assert play(runner, server, []) == []
        values = ["{'a': 1, 'b': True}", "'1'", "float('nan')", "None", "{'a': 1}"]
        rows = [{"value": value} for value in values]
        items = [("", "", row) for row in rows]
        results = runner.check_parts(items, play(runner, server, rows))
    assert results[0] == Reward(2.0, {"a": 1.0, "b": 1.0})
    assert runner.parts == ["a", "b"]
    assert [r.kind for r in results[1:]] == ["not a number"] * 3 + ["different parts"]
    assert results[4].row == {"value": "{'a': 1}"}


def test_what_would_not_reach_a_function_is_an_error(make, file):
    with closing(make(f"{file}:with_default")) as runner:
        assert runner.check({"hint": ""}).endswith("agent.py:with_default: hint keeps its default")
        for row, columns in (({"hint": 5}, []), ({}, ["hint"])):
            with pytest.raises(InputError, match="its parameter hint would keep its default"):
                runner.check(row, columns)
    with closing(make(f"{file}:solve", "data.system_prompt=Be brief.")) as runner:
        with pytest.raises(InputError, match="data.system_prompt=Be brief. does nothing with"):
            runner.check({})


def test_weights_apply_to_parts(make, file, server):
    with closing(make(f"{file}:solve", "reward.weights={a: 2}")) as runner:
        results = play(runner, server, [{"value": "{'a': 1, 'b': 5}"}, {"value": "{'b': 5}"}])
    assert results[0] == Reward(2.0, {"a": 1.0, "b": 5.0})
    assert results[1].kind == "missing part"


def test_an_episode_of_several_turns(make, file, server):
    turns = script(
        {"tool_calls": [["add", '{"a": 1, "b": 2}']]}, {"content": "3", "reasoning": "so"}
    )
    with closing(make(f"{file}:several_turns")) as runner:
        (reward,) = play(runner, server, [{"script": turns}])
    assert reward == Reward(6.0, {"last": 3.0, "of_three": 3.0})
    paths = [request.path for request in server.requests]
    chat = "/v1/chat/completions"
    assert paths == [chat, "/v1/rewards", chat, "/inference/v1/generate"]
    first = server.requests[0].body
    assert first.keys() == {"messages", "tools", "max_tokens", "stop", "seed"}
    assert server.requests[1].body == {"reward": 0.25}
    assert server.requests[2].body.keys() == {"messages"}
    expected = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "logprobs": 1}}
    assert server.requests[3].body == expected


@pytest.mark.parametrize("limit_score", [None, -0.5])
def test_a_limit_that_leaves_the_function_is_not_a_failure(make, file, server, limit_score):
    error = {"type": "episode_limit", "code": "max_turns", "message": "after 3 turns"}
    turns = script({"status": 400, "error": error})
    overrides = [] if limit_score is None else [f"rollout.limit_score={limit_score}"]
    with closing(make(f"{file}:limited", *overrides)) as runner:
        rows = [{"script": turns, "catch": False}, {"script": turns, "catch": True}]
        results = play(runner, server, rows)
    assert results == [Limit("max_turns", limit_score), Reward(9.0, {})]


def test_a_limit_that_a_group_of_tasks_reaches_is_not_a_failure(make, file, server):
    error = {"type": "episode_limit", "code": "max_turns", "message": "after 3 turns"}
    turns = script({"status": 400, "error": error})
    with closing(make(f"{file}:in_a_group")) as runner:
        rows = [{"script": turns, "bug": False}, {"script": turns, "bug": True}]
        limit, bug = play(runner, server, rows)
    assert limit == Limit("max_turns", None)
    assert "ValueError: a bug" in bug.trace


def test_the_client_of_openai_plays_and_reaches_limits(make, file, server):
    message = "after 3 turns (episode_limit: max_turns)"
    error = {"type": "episode_limit", "code": "max_turns", "message": message}
    turns = script({"status": 400, "error": error})
    rows = [{"script": turns, "how": how} for how in ("raise", "wrap", "quote", "bug")]
    with closing(make(f"{file}:with_openai")) as runner:
        *limits, bug, reply = play(runner, server, [*rows, {"script": "hello"}])
    assert limits == [Limit("max_turns", None)] * 3
    assert "ZeroDivisionError" in bug.trace
    assert reply == Reward(5.0, {})


def test_an_error_of_the_server_has_its_message_in_one_line(make, file, server):
    error = {"type": "invalid_request_error", "message": "set\n  rollout.top_p"}
    with closing(make(f"{file}:limited")) as runner:
        (reward,) = play(runner, server, [{"script": script({"status": 400, "error": error})}])
    assert reward.parts == {"error": len("set rollout.top_p")}


def test_a_request_after_the_draw_is_rejected(make, file, server):
    with closing(make(f"{file}:solve")) as runner:
        (failure,) = runner.play([{"text": "a"}], server.url, lambda i: "old")
    assert failure.kind == "raised"
    line = (
        FILE.split("\n").index(
            '    reply = await llm.chat([{"role": "user", "content": row["text"]}])'
        )
        + 1
    )
    summary = f"raised: rollout.episodes.client.LLMError: unknown key old ({file}:{line})"
    assert failure.summary == summary


def test_the_gateway_may_be_gone(make, file, server):
    with closing(make(f"{file}:solve")) as runner:
        (failure,) = runner.play([{"text": "a"}], "http://127.0.0.1:9/v1", server.new_key)
    assert failure.kind == "raised"
    assert "ConnectionRefusedError" in failure.trace


@pytest.mark.slow
def test_functions_that_raise_or_hang_fail_alone(make, file, server):
    rows = [{"text": "a"}, {"behave": "raise", "zero": 0}, {"behave": "hang"}, {"behave": "leave"}]
    with closing(make(f"{file}:solve", timeout=LIMIT)) as runner:
        (worker,) = runner.idle
        good, raised, hung, left = play(runner, server, [*rows])
        assert runner.idle == [worker], "no process was killed"
    assert good == Reward(1.0, {})
    assert (raised.kind, raised.row) == ("raised", rows[1])
    assert re.match(r"raised: ZeroDivisionError: .* \(.*agent.py:10\)$", raised.summary)
    assert hung.kind == "timed out"
    assert hung.summary == f"timed out: took more than 1.5 s ({file}:16)", "where it waited"
    assert "SystemExit: 3" in left.trace
    assert [server.attempts(i) for i in range(4)] == [
        ["key-0-0"],
        ["key-1-1"],
        ["key-2-2"],
        ["key-3-3"],
    ]


ENDINGS = {
    "exit": ("died", "ended with exit code 3"),
    "task exits": ("died", "ended with exit code 4"),
    "killed": ("died", "ended by signal SIGKILL (out of memory?)"),
    "forge": ("forged", "wrote to the pipe for answers"),
    "block": ("timed out", "blocked its process for "),
}


@pytest.mark.slow
@pytest.mark.parametrize("behave", ENDINGS)
def test_episodes_beside_one_that_ends_its_worker_are_repeated(
    make, file, server, tmp_path, behave
):
    meet = {"meet": str(tmp_path), "size": 8}
    rows = [{"text": "a" * i, "i": i, "wait": 0.5, **meet} for i in range(8)]
    rows[5]["behave"] = behave
    with closing(make(f"{file}:solve", timeout=LIMIT)) as runner:
        results = play(runner, server, rows)
    failure = results.pop(5)
    kind, trace = ENDINGS[behave]
    assert failure.kind == kind
    assert failure.trace.startswith(trace)
    assert failure.row == rows[5]
    assert results == [Reward(float(i), {}) for i in (0, 1, 2, 3, 4, 6, 7)]
    num_attempts = [len(server.attempts(i)) for i in range(8)]
    if behave in ("exit", "killed"):
        assert num_attempts == [2] * 8, "the episode whose code ran is repeated alone"
    if behave == "block":
        assert num_attempts == [2, 2, 2, 2, 2, 1, 2, 2], "it is not repeated"
    else:
        assert min(num_attempts) == 2
    assert num_attempts[5] <= 4, "halves of eight episodes"
    keys = [request.key for request in server.requests]
    assert len(set(keys)) == len(keys) == 7


def ask_for_culprits(runner: EpisodeRunner, worker: WorkerProcess) -> None:
    """Assert that an episode which has blocked others for long is not repeated."""
    allowed = runner.seconds_per_call
    assert allowed > SLACK, "the worker has time to cancel an episode"
    now = time.monotonic()
    for kind, seconds, expected in (
        ("timed out", 0.6 * allowed, [1]),
        ("timed out", 0.4 * allowed, None),
        ("died", 0.6 * allowed, None),
    ):
        worker.ending = Ending(kind, "the end")
        worker.last_note = Note(2, since=now - seconds)
        culprit = runner.find_culprit([[0], [1], [2]], worker)
        if expected is None:
            assert culprit is None
        else:
            assert culprit[0] == expected
            assert culprit[1].startswith(f"blocked its process for {seconds:.0f} s")
    assert runner.find_culprit([[1]], worker) == ([1], "the end"), "it was alone"


def test_the_episode_whose_code_ran_last_is_repeated_alone(make, file):
    """If none is known, each half is repeated. (A worker's note names a call by its number + 1.)"""
    calls = [[0], [1], [2]]
    settings = ["rollout.max_concurrent_episodes=3"]
    with closing(make(f"{file}:solve", *settings, workers=2)) as runner:
        assert runner.concurrency == 2
        worker = runner.idle[0]
        ask_for_culprits(runner, worker)
        groups = {}
        for number in (2, 0, 9):
            worker.last_note = Note(number)
            groups[number] = runner.regroup(calls, worker)
        worker.last_note = Note(1)
        alone = runner.regroup([[0]], worker)
    assert groups[2] == [[[0], [2]], [[1]]]
    assert groups[0] == groups[9] == [[[0], [1]], [[2]]]
    assert alone == [[[0]]]


@pytest.mark.slow
def test_a_function_that_cannot_be_cancelled_is_killed(make, file, server):
    with closing(make(f"{file}:solve", timeout=LIMIT)) as runner:
        results = play(runner, server, [{"behave": "stubborn"}, {"text": "ab"}])
    assert (results[0].kind, results[0].trace) == ("timed out", "took more than 6.5 s")
    assert results[1] == Reward(2.0, {})


def test_close_ends_episodes_that_are_playing(make, file, server, tmp_path):
    """From another thread, as when the trainer has raised an error."""
    runner = make(f"{file}:solve", "rollout.max_concurrent_episodes=16", workers=2)
    rows = [{"text": "a"}] + [
        {"behave": "hang", "started": str(tmp_path / str(i))} for i in range(32)
    ]
    results = []
    thread = threading.Thread(target=lambda: results.extend(play(runner, server, rows)))
    thread.start()
    while len(list(tmp_path.iterdir())) < 15:
        time.sleep(0.05)
    runner.close()
    thread.join(20)
    assert not thread.is_alive()
    assert results == [Reward(1.0, {})] + [None] * 32
    runner.close()
    assert play(runner, server, rows[:1]) == [Reward(1.0, {})], "afterwards it starts again"
    runner.close()


def test_episodes_may_write_a_lot(make, file, server, capfd):
    with closing(make(f"{file}:solve")) as runner:
        rows = [{"behave": "print", "text": "ab"}, {"text": "abc"}]
        assert play(runner, server, rows) == [Reward(2.0, {}), Reward(3.0, {})]
        output = Path(runner.settings["output"])
    assert output.parts[-2:] == ("reward_output", "rank_0.txt")
    assert output.stat().st_size >= 2 * 2**20
    assert capfd.readouterr() == ("", "")


def test_many_episodes_wait_at_the_same_time(make, file, server):
    with closing(make(f"{file}:solve", "rollout.max_concurrent_episodes=64")) as runner:
        start = time.monotonic()
        results = play(runner, server, [{"value": "1", "wait": 0.2}] * 64)
        assert time.monotonic() - start < 0.5 * 64 * 0.2
    assert results == [Reward(1.0, {})] * 64


@pytest.mark.slow
def test_no_more_episodes_than_max_concurrent_episodes_play_at_once(make, file, server):
    settings = ["rollout.max_concurrent_episodes=3"]
    with closing(make(f"{file}:solve", *settings, workers=2)) as runner:
        assert runner.concurrency == 2
    with closing(make(f"{file}:solve", *settings)) as runner:
        start = time.monotonic()
        play(runner, server, [{"value": "1", "wait": 0.5}] * 6)
        assert time.monotonic() - start > 1.0


def test_no_episodes_begin_after_too_many_failures(make, file, server):
    rows = [{"behave": "raise", "zero": 0}] * 3 + [{"behave": "hang"}] * 20
    with closing(make(f"{file}:solve", "rollout.max_concurrent_episodes=1")) as runner:
        results = play(runner, server, rows, max_failures=2)
    assert [r.kind for r in results[:3]] == ["raised"] * 3
    assert results[3:] == [None] * 20


@pytest.mark.slow
def test_a_function_that_is_not_async_runs_in_threads(make, file, server):
    with closing(make(f"{file}:without_async", timeout=LIMIT)) as runner:
        start = time.monotonic()
        rows = [{"seconds": 0.5}] * 20 + [{"seconds": 600}]
        *results, slow = play(runner, server, rows)
        assert time.monotonic() - start < 8
    assert results == [Reward(1.0, {})] * 20
    assert (slow.kind, slow.summary) == ("timed out", "timed out: took more than 1.5 s")


def test_secrets_reach_an_episode_only_if_reward_env_names_them(make, file, server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setenv("OTHER_SECRET", "secret")
    for overrides, seen in (([], 0.0), (["reward.env=[JUDGE_KEY]"], 1.0)):
        with closing(make(f"{file}:environment", *overrides)) as runner:
            (reward,) = play(runner, server, [{}])
        assert reward.parts == {"secret": seen, "other": 0.0, "loopback": 1.0}
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(InputError, match="reward.env names JUDGE_KEY, which is not set"):
        make(f"{file}:environment", "reward.env=[JUDGE_KEY]")


def test_requests_to_the_gateway_avoid_any_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    environment = episode_environment([])
    assert environment["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert environment["NO_PROXY"] == "127.0.0.1,localhost"


def test_a_worker_has_a_memory_limit(make, file, server):
    with closing(make(f"{file}:allocate", "reward.memory_gib=0.5")) as runner:
        small, large = play(runner, server, [{"num_bytes": 2**20}, {"num_bytes": 2**30}])
    assert small == Reward(2.0**20, {})
    assert "MemoryError" in large.trace


@pytest.mark.slow
def test_episodes_talk_to_the_gateway(make, file, tmp_path):
    tokenizer = make_tokenizer(QWEN2, control=CONTROL)
    gateway = GatewayProcess(save_tokenizer(tmp_path, QWEN2, "<|im_end|>"))
    url = f"http://127.0.0.1:{gateway.first['ready']}/v1"
    reply_ids = tokenizer.encode("there<|im_end|>")
    messages = []

    def new_key(i):
        limits = {"max_turns": 3, "max_episode_tokens": None}
        announcement = {"sampling": SAMPLING, "section": "rollout", **limits}
        gateway.send({"begin": [f"key-{i}"], **announcement})
        return f"key-{i}"

    def answer_all():
        while "ended" not in (message := gateway.receive()):
            messages.append(message)
            if "id" in message:
                gateway.answer(message, reply_ids)

    thread = threading.Thread(target=answer_all)
    thread.start()
    rows = [{"turns": turns, "token_ids": reply_ids} for turns in (1, 2, 3)]
    with closing(make(f"{file}:talk")) as runner:
        results = runner.play(rows, url, new_key)
    gateway.send({"end": [], "number": 0})
    thread.join()
    assert gateway.close() == 0
    log_probs = -0.5 * len(reply_ids)
    reward = Reward(1.0 + log_probs, {"content": 1.0, "log_probs": log_probs})
    assert results == [reward, reward, Limit("max_turns", None)]
    rewards = sorted(m["episode"] for m in messages if m.get("reward") == 0.5)
    assert rewards == ["key-0", "key-1", "key-2"]


# -- finding and checking the function -------------------------------------------------------------

REJECTED = {
    "agent.py:wrong": (
        "agent.py:wrong: its parameter rows, answer is unknown: an episode takes row and llm"
    ),
    "agent.py:no_llm": "it has no parameter llm, so it cannot call the model",
    "agent.py:positional": "its parameter row, llm is unknown",
    "agent.py:solv": "has no function 'solv'; the nearest is agent.py:solve",
    "nowhere.py:f": "nowhere.py: no such file",
    "agent": "must be path/to/file.py:name",
    "not_there.agent:f": "not_there.agent cannot be imported: ModuleNotFoundError",
    "json:load_all": "json has no function 'load_all'; the nearest is json:load",
    "broken.py:f": "broken.py:2 cannot be imported: ZeroDivisionError",
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_function_that_cannot_play_is_an_error_at_once(make, file, monkeypatch, name):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("\n1 / 0\n")
    with pytest.raises(InputError) as raised:
        make(name)
    message = str(raised.value)
    assert message.startswith(f"rollout.episode={name}")
    assert REJECTED[name] in message
    assert "\n" not in message


def test_a_module_of_the_working_directory_and_its_neighbours(make, server, tmp_path, monkeypatch):
    """Modules of the user take precedence over ours, and any parameter may be taken."""
    package = tmp_path / "games"
    package.mkdir()
    (package / "chess.py").write_text("import data, common.moves, rewards\nrewards.MINE\n" + FILE)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/rewards.py").write_text("MINE = 1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    (tmp_path / "data.py").write_text("")
    (tmp_path / "common").mkdir()
    (tmp_path / "common/__init__.py").write_text("")
    (tmp_path / "common/moves.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("games.chess:everything", "games/chess.py:everything"):
        if name.startswith("games/"):
            (package / "data.py").write_text("")
            (tmp_path / "common").rename(package / "common")
        with closing(make(name)) as runner:
            (reward,) = runner.play([{"a": 1}], server.url, lambda i: "12345")
        assert reward == Reward(6.0, {})


def test_another_interpreter_without_packages(make, file, server, tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin/python"
    text = (
        "import sys\n"
        "async def where(row, llm):\n"
        "    reply = await llm.chat([{'role': 'user', 'content': 'abc'}])\n"
        "    packages = {'omegaconf', 'numpy', 'torch'} & set(sys.modules)\n"
        "    try:\n"
        "        import omegaconf\n"
        "    except ImportError:\n"
        "        packages.add('none')\n"
        "    assert packages == {'none'}\n"
        f"    return len(reply.content) + (sys.prefix == {str(venv)!r})\n"
    )
    (tmp_path / "where.py").write_text(text)
    with closing(make(f"{tmp_path}/where.py:where", f"rollout.episode_python={python}")) as runner:
        assert play(runner, server, [{}]) == [Reward(4.0, {})]


def test_an_interpreter_that_cannot_be_used_is_an_error(make, file, tmp_path):
    with pytest.raises(InputError, match="rollout.episode_python=/no/python cannot be run"):
        make(f"{file}:solve", "rollout.episode_python=/no/python")
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3 9\n")
    old.chmod(0o755)
    with pytest.raises(InputError, match="is 3.9: use Python 3.11 or newer"):
        make(f"{file}:solve", f"rollout.episode_python={old}")
    old.write_text("#!/bin/sh\necho no such library >&2; exit 127\n")
    with pytest.raises(InputError, match=f"{old} is no such library: use Python 3.11 or newer"):
        make(f"{file}:solve", f"rollout.episode_python={old}")


def test_the_worker_needs_only_the_standard_library():
    code = (
        "import sys; import rollout.episodes.worker; "
        "names = {m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names); "
        "print(sorted(n for n in names if not n.startswith('_')))"
    )
    command = [sys.executable, "-S", "-c", code]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "['common', 'configs', 'rollout']", out.stderr


# -- classes of TRL's contract ---------------------------------------------------------------------

ENVIRONMENTS = '''
import asyncio, time

class Counter:
    """Counts."""

    def __init__(self):
        self.resets = 0

    def reset(self, start: int, **row) -> str | None:
        self.total = start
        self.resets += 1
        return row.get("hint")

    def add(self, number: int) -> int:
        """Add a number.

        Args:
            number: The number.
        """
        self.total += number
        return self.total

    async def fail(self, why: str = "bad") -> str:
        """Fail.

        Args:
            why: The reason.
        """
        raise ValueError(why)

    def slow(self) -> list:
        """Wait, and return content parts."""
        time.sleep(0.3)
        return [{"type": "text", "text": str(self.total)}]

    def _private(self):
        return 0

    @property
    def broken(self):
        raise RuntimeError

    async def get_reward(self):
        return {"total": self.total, "resets": self.resets}

class Attribute:
    async def reset(self, start, other=None):
        self.reward = start

class Unrewarded:
    def __init__(self):
        self.resets = 0

    def reset(self, start):
        self.start = start
        self.resets += 1

    def get_reward(self):
        if self.start < 0:
            raise ValueError("no reward")
        return {"resets": self.resets}

class Neither:
    def reset(self, **row):
        pass
'''


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "environments.py"
    path.write_text(ENVIRONMENTS)
    return path


def conversation(text, **columns):
    return {"messages": [{"role": "user", "content": text}], "start": 10, **columns}


def test_a_class_plays_until_the_model_calls_no_tool(make, environments, server):
    calls = [
        ["add", '{"number": 5}'],
        ["fail", "{}"],
        ["slow", ""],
        ["add", '{"number": 2}'],
        ["unknown", "{}"],
        ["add", "[5"],
        ["add", '{"count": 2}'],
        ["slow", "{}"],
    ]
    turns = script({"tool_calls": calls}, {"tool_calls": calls[:1]}, {"content": "done"})
    with closing(make(f"{environments}:Counter")) as runner:
        assert runner.notice.endswith("Counter: its tools are add, fail, slow")
        (reward,) = play(runner, server, [conversation(turns, hint="\nBegin.")])
        assert reward == Reward(23.0, {"total": 22.0, "resets": 1.0})
        assert runner.tool_errors == [4]
        (again,) = play(runner, server, [conversation("no tools")])
        assert again == Reward(12.0, {"total": 10.0, "resets": 2.0}), "the object is used again"
    first, second, third, fourth = [request.body for request in server.requests]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add", "fail", "slow"]
    assert first["messages"] == [{"role": "user", "content": f"{turns}\nBegin."}]
    assert fourth["messages"] == [{"role": "user", "content": "no tools"}]
    user, assistant, *results = second["messages"]
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == [c[0] for c in calls]
    assert [result["tool_call_id"] for result in results] == [f"call_{i}" for i in range(8)]
    assert {result["role"] for result in results} == {"tool"}
    unexpected = "error: Counter.add() got an unexpected keyword argument 'count'"
    assert [result["content"] for result in results] == [
        "15",
        "error: bad",
        [{"type": "text", "text": "15"}],
        "17",
        "error: Tool unknown not found.",
        "error: the arguments are not a JSON object: [5",
        unexpected,
        [{"type": "text", "text": "17"}],
    ]
    assert third["messages"][-1]["content"] == "22"


def test_a_row_s_template_arguments_reach_the_model_of_a_class(make, environments, server):
    turns = script({"tool_calls": [["unknown", "{}"]]}, {"content": "done"})
    rows = [
        conversation("a", enable_thinking=False),
        conversation("b", chat_template_kwargs={"style": "short", "unset": None}),
        conversation(turns),
    ]
    with closing(make(f"{environments}:Counter")) as runner:
        play(runner, server, rows)
        assert runner.tool_errors == [0, 0, 1]
    sent = {
        request.body["messages"][0]["content"]: request.body.get("chat_template_kwargs")
        for request in server.requests
    }
    assert sent == {"a": {"enable_thinking": False}, "b": {"style": "short"}, turns: None}


def test_tools_of_rows_that_a_class_does_not_use_are_reported(make, environments):
    with closing(make(f"{environments}:Counter")) as runner:
        row = conversation("q")
        assert runner.check(row).endswith("its tools are add, fail, slow")
        notice = runner.check(row, columns=["messages", "tools"])
        assert notice.endswith("slow; those in the column tools of the rows are not used")


def test_episodes_of_a_class_play_at_the_same_time_with_objects_of_their_own(
    make, environments, server
):
    turns = script({"tool_calls": [["slow", "{}"], ["add", '{"number": 1}']]}, {"content": "done"})
    with closing(make(f"{environments}:Counter")) as runner:
        start = time.monotonic()
        results = play(runner, server, [conversation(turns, start=i) for i in range(32)])
        assert time.monotonic() - start < 0.5 * 32 * 0.3
    assert [result.parts["total"] for result in results] == [i + 1.0 for i in range(32)]


def test_a_reward_may_be_an_attribute_but_not_missing(make, environments, server):
    with closing(make(f"{environments}:Attribute")) as runner:
        assert play(runner, server, [conversation("q")]) == [Reward(10.0, {})]
        assert "tools" not in server.requests[0].body
    with closing(make(f"{environments}:Neither")) as runner:
        (failure,) = play(runner, server, [conversation("q")])
    assert "Neither has neither get_reward() nor the attribute reward" in failure.trace


def test_an_object_whose_reward_failed_is_not_used_again(make, environments, server):
    with closing(make(f"{environments}:Unrewarded")) as runner:
        (failure,) = play(runner, server, [conversation("q", start=-1)])
        assert "no reward" in failure.trace
        assert play(runner, server, [conversation("q")]) == [Reward(1.0, {"resets": 1.0})]
        assert play(runner, server, [conversation("q")]) == [Reward(2.0, {"resets": 2.0})]


def test_a_limit_ends_an_episode_of_a_class(make, environments, server):
    error = {"type": "episode_limit", "code": "max_episode_tokens", "message": "m"}
    turns = script({"tool_calls": [["slow", "{}"]]}, {"status": 400, "error": error})
    with closing(make(f"{environments}:Counter")) as runner:
        assert play(runner, server, [conversation(turns)]) == [Limit("max_episode_tokens", None)]


@pytest.mark.parametrize(
    "name, message",
    [
        ("NoReset", "NoReset: it is a class without the method reset(self, **row)"),
        ("NoHint", "NoHint: the parameter where of the tool act has no type hint"),
        ("NeedsSize", "NeedsSize: its __init__ needs the argument size"),
    ],
)
def test_a_class_that_cannot_play_is_an_error_at_once(make, name, message):
    with pytest.raises(InputError) as raised:
        make(f"{unplayable.__file__}:{name}")
    assert message in str(raised.value)
