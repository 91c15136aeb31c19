"""A Python that has imported what runs import, and that forks for every command: importing torch, transformers and vLLM takes
longer than most runs of the tests.

    python -m tests.forked serve MODULE ...     of each line on standard input, a folder, runs the command in its request.json
    python tests/forked.py rank SCRIPT ...      what torchrun's ranks run, forks as well

A command's standard output and error, process number and exit code are files in its folder; the code comes last.
"""

import atexit
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

import config

ROOT = str(Path(__file__).resolve().parents[1])


def serve(*modules: str) -> None:
    for name in modules:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    sys.path[:] = ["", *(path for path in sys.path if path not in ("", ROOT))]       # first comes the folder of a script
    gc.freeze()
    atexit._clear()         # what libraries do at the interpreter's own end, and no command's
    for work in (config._leave_process_group, multiprocessing.util._exit_function):
        atexit.register(work)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)               # nobody waits for those who wait
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            watch(Path(line.rstrip("\n")))
    os._exit(0)


def watch(folder: Path) -> None:
    """Fork for the command; write down how it ended."""
    pid = os.fork()
    if pid == 0:
        become(folder, **json.loads((folder / "request.json").read_text()))
    (folder / "pid").write_text(str(pid))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    (folder / "code.tmp").write_text(str(code))
    (folder / "code.tmp").rename(folder / "code")
    os._exit(0)


def become(folder: Path, command: list[str], cwd: str, env: dict[str, str]) -> None:
    """What `python *command` would be. Does not return."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os._exit(ended(run, command))


def ended(work, *arguments) -> int:
    """The exit code of work(*arguments), behind all that the interpreter does at its end."""
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
        options = others[1:len(others) - len(given.training_script_args) - 1]
        main([*options, "--run-path", "--start-method=fork", os.path.abspath(__file__), "rank", given.training_script,
              *given.training_script_args])
    elif first == "-m":
        sys.modules.pop(others[0], None)
        sys.path[0], sys.argv = os.getcwd(), others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(first)), command
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        sys.stdout.reconfigure(write_through=True)              # as torchrun has it
        config.PARENT = sys.modules["engines.device"].PARENT = os.getppid()             # which an import read before the fork
        if code := ended(run, sys.argv[2:]):
            sys.exit(code)
