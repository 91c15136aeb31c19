"""A Python that has imported torch, transformers and vLLM, and that forks for every command: importing them takes longer than most
runs of the tests.

    python -m tests.support.forked serve MODULE ...     of each line on standard input, a folder, runs the command in its request.json
    python tests/support/forked.py rank SCRIPT ...      what torchrun's ranks run, forks as well

The repository's own modules are imported anew. What differs from a Python of its own: strings have the same hashes in all ranks and
runs, other packages' submodules may have been imported by others, and the interpreter is not taken down at the end.
A command's standard output and error and its exit code are files in its folder. The code comes last, when all that the command has
started has ended, too.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

ROOT = str(Path(__file__).resolve().parents[2])
PR_SET_CHILD_SUBREAPER = 36


def serve(*modules: str) -> None:
    before = {**os.environ}
    for name in modules:
        importlib.import_module(name)
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    for name, module in list(sys.modules.items()):
        if name != "__main__" and is_own(vars(module)):
            del sys.modules[name]
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    sys.path[:] = [
        "",
        *(path for path in sys.path if path not in ("", ROOT)),
    ]  # first comes the folder of a script
    atexit._clear()  # some of it is for the interpreter's own end, and speaks of leaks
    for work in (multiprocessing.util._exit_function, weakref.finalize._exitfunc, logging.shutdown):
        atexit.register(work)
    os.register_at_fork(after_in_child=np.random.seed)
    gc.freeze()
    sys.stdout.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                watch(Path(line.rstrip("\n")), added)
            finally:
                os._exit(0)
    os._exit(0)


def is_own(module: dict) -> bool:
    """Whether these are the names of a module of the repository; a package of folders has a path alone."""
    where = module.get("__file__") or next(iter(module.get("__path__", ())), "")
    return where.startswith(ROOT + os.sep) and not where.startswith(sys.prefix + os.sep)


def watch(folder: Path, added: dict[str, str]) -> None:
    """Fork for the command; write down how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    write(folder / "watcher", os.getpid())
    pid = os.fork()
    if pid == 0:
        request = json.loads((folder / "request.json").read_text())
        become(folder, request["command"], request["cwd"], {**added, **request["env"]})
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(ChildProcessError):
        while True:  # for what is left behind, as a reader of a pipe would
            os.wait()
    write(folder / "code", code)


def write(file: Path, number: int) -> None:
    file.with_suffix(".tmp").write_text(str(number))
    file.with_suffix(".tmp").rename(file)


def become(folder: Path, command: list[str], cwd: str, env: dict[str, str]) -> None:
    """What `python *command` would be. Does not return."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), number)
    os._exit(ended(run, command))


def ended(work, *arguments) -> int:
    """The exit code of work(*arguments), behind the end of its threads and what was registered for the end."""
    code = 0
    try:
        work(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def run(command: list[str]) -> None:
    first, *others = command
    if command[:2] == ["-m", "torch.distributed.run"]:
        from torch.distributed.run import get_args_parser, main

        given = get_args_parser().parse_args(others[1:])
        options = others[1 : len(others) - len(given.training_script_args) - 1]
        main(
            [
                *options,
                "--run-path",
                "--start-method=fork",
                os.path.abspath(__file__),
                "rank",
                given.training_script,
                *given.training_script_args,
            ]
        )
    elif first == "-m":
        sys.path[0], sys.argv = os.getcwd(), others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(first)), command
        runpy.run_path(first, run_name="__main__")


def rank(command: list[str]) -> None:
    """What torchrun has done to its own process is undone; its ranks write without a buffer."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    sys.stdout.reconfigure(write_through=True)
    if code := ended(run, command):
        sys.exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        rank(sys.argv[2:])
