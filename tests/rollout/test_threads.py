"""Calling functions that may or may not be async, in threads of their own."""

import asyncio
import contextvars
import threading

import pytest

from rollout.episodes.threads import call, in_thread, is_async

SECONDS = 60  # a call that never returns is an error
NAME = contextvars.ContextVar("NAME", default="none")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


def add(a, b):
    return a + b


async def add_later(a, b):
    await asyncio.sleep(0)
    return a + b


def add_indirectly(a, b):
    return add_later(a, b)


class Adder:
    async def __call__(self, a, b):
        return a + b


@pytest.mark.parametrize(
    "function, is_coroutine",
    [(add, False), (add_later, True), (add_indirectly, False), (Adder(), True)],
)
def test_a_call_returns_the_value_of_a_function_of_either_kind(function, is_coroutine):
    assert is_async(function) == is_coroutine
    assert run(call(function, 2, b=3)) == 5


def test_a_function_that_is_not_async_runs_in_another_thread_with_the_context_of_its_caller():
    def where():
        return threading.current_thread(), NAME.get()

    async def call_with_name():
        NAME.set("caller")
        return await call(where)

    thread, name = run(call_with_name())
    assert thread is not threading.current_thread()
    assert thread.daemon, "it must not keep the process alive"
    assert name == "caller"


def test_an_error_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        run(call(lambda: 1 / 0))
    with pytest.raises(RuntimeError, match="next raised StopIteration") as raised:
        run(call(next, iter([])))
    assert isinstance(raised.value.__cause__, StopIteration)


def test_the_value_of_a_call_that_was_cancelled_is_lost():
    begun = threading.Event()
    may_end = threading.Event()

    def wait():
        begun.set()
        assert may_end.wait(SECONDS)

    async def cancel() -> list[dict]:
        errors = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        task = asyncio.create_task(in_thread(wait))
        await asyncio.to_thread(begun.wait, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_end.set()
        while threading.active_count() > num_threads + 1:  # that of to_thread() stays
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # the thread's last action reaches the loop
        return errors

    num_threads = threading.active_count()
    assert run(cancel()) == []
