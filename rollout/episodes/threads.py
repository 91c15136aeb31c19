"""Call functions that may or may not be async. This needs only the standard library."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable


async def call(function: Callable, *args, **kwargs):
    """Call a function, and return its value. A function that is not async runs in a thread."""
    if is_async(function):
        return await function(*args, **kwargs)
    value = await in_thread(function, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def is_async(function: Callable) -> bool:
    return any(inspect.iscoroutinefunction(f) for f in (function, function.__call__))


async def in_thread(function: Callable, *args, **kwargs):
    """Call a function in a thread of its own.

    The number of threads has no limit: a call that never returns must not keep others waiting. If
    this is cancelled, the thread continues, and its value is lost.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    context = contextvars.copy_context()

    def finish(value, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def run() -> None:
        value = None
        failure = None
        try:
            value = context.run(function, *args, **kwargs)
        except StopIteration as error:  # a future cannot raise it
            failure = RuntimeError(f"{function.__qualname__} raised StopIteration")
            failure.__cause__ = error
        except BaseException as error:
            failure = error
        loop.call_soon_threadsafe(finish, value, failure)

    threading.Thread(target=run, daemon=True).start()
    return await done
