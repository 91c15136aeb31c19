"""An interpreter that has imported torch, transformers and vLLM, and forks for every command.

    python -m tests.support.forked serve MODULE ...    reads requests from standard input
    python tests/support/forked.py rank SCRIPT ...     a rank that torchrun starts

Importing these packages takes longer than most test runs. The server imports them once, and forks
for every request. A request is a line of words with tabs between them:

* `run FOLDER`: runs the command in the folder's `request.json`. Its output goes to `stdout` and
  `stderr` in the folder, and its process's number to `command`. Its exit code goes to `code`, last,
  after every process that it started has ended.
* `serve PIPE MODULE ...`: the fork imports these modules, too, and reads requests from the pipe.

The repository's own modules are imported again by each command. Three things differ from a fresh
interpreter: strings hash alike in all ranks and runs, more submodules of other packages may be
imported, and the interpreter is not torn down at the end.
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
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

ROOT = str(Path(__file__).resolve().parents[2])
FIRST_SERVER = os.getpid()  # in forks, too
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def serve(requests: Iterable[str], modules: list[str], environment_before: dict[str, str]) -> None:
    """Import these modules, then fork for every request.

    environment_before: the variables of the environment before the first import
    """
    import_all(modules)
    # Some packages set variables of the environment when they are imported.
    set_by_imports = {
        name: value for name, value in os.environ.items() if environment_before.get(name) != value
    }
    sys.stdout.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the watchers
    for line in requests:
        action, *words = line.rstrip("\n").split("\t")
        if os.fork() > 0:
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            if action == "run":
                watch(Path(words[0]), set_by_imports)
            else:
                serve_pipe(words[0], words[1:], environment_before)
        finally:
            os._exit(0)
    os._exit(0)


def serve_pipe(pipe: str, modules: list[str], environment_before: dict[str, str]) -> None:
    """Serve requests from a pipe. If the imports fail, end the first server as well."""
    try:
        with open(pipe) as requests:
            serve(requests, modules, environment_before)
    except BaseException:
        os.kill(FIRST_SERVER, signal.SIGTERM)
        raise


def import_all(modules: list[str]) -> None:
    """Import these modules, and leave the interpreter in a state for its forks."""
    gc.disable()  # imports make no garbage
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    replace_kernels_once()
    forget_own_modules()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    other_paths = [path for path in sys.path if path not in ("", ROOT)]
    sys.path[:] = ["", *other_paths]  # run() replaces the first entry by the script's folder
    replace_exit_functions()
    gc.freeze()
    # vLLM unfreezes everything when it shuts down. A command would look through all objects of the
    # server again, and so copy the memory that it shares with it.
    gc.unfreeze = lambda: None


def replace_kernels_once() -> None:
    """Let vLLM for CPUs replace its Triton kernels now, instead of in every fork.

    It looks for references to them in all imported modules, which takes half a second.
    """
    if "vllm.platforms" not in sys.modules:
        return
    platform = sys.modules["vllm.platforms"].current_platform
    if hasattr(platform, "register_triton_kernel_overrides"):  # vLLM 0.25 has none
        platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = lambda: None


def forget_own_modules() -> None:
    """Remove the repository's modules from sys.modules, so that every command imports them."""
    for name, module in list(sys.modules.items()):
        if name != "__main__" and is_own(module):
            del sys.modules[name]


def is_own(module) -> bool:
    """Return whether a module belongs to this repository and not to a package in its .venv.

    Reads the module's own dictionary, because torch.ops has every attribute.
    """
    attributes = vars(module)
    paths = list(attributes.get("__path__", ()))  # a package without __init__.py has only a path
    location = attributes.get("__file__") or next(iter(paths), "")
    in_repository = location.startswith(ROOT + os.sep)
    in_environment = location.startswith(sys.prefix + os.sep)
    return in_repository and not in_environment


def replace_exit_functions() -> None:
    """Keep only the exit functions a forked command needs.

    The others belong to the end of the server's interpreter and would report leaks.
    """
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    atexit.register(weakref.finalize._exitfunc)
    atexit.register(logging.shutdown)


def watch(folder: Path, set_by_imports: dict[str, str]) -> None:
    """Fork for the command in `folder` and write down its exit code."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    write_number(folder / "watcher", os.getpid())
    pid = os.fork()
    if pid > 0:
        write_number(folder / "command", pid)
    if pid == 0:
        request = json.loads((folder / "request.json").read_text())
        environment = {**set_by_imports, **request["env"]}
        run_request(folder, request["command"], request["cwd"], environment)
    _, status = os.waitpid(pid, 0)
    with suppress(ChildProcessError):
        while True:  # wait for orphans too, as a reader of the command's pipe would
            os.wait()
    write_number(folder / "code", os.waitstatus_to_exitcode(status))


def write_number(file: Path, number: int) -> None:
    """Write a file that is never seen half written."""
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(str(number))
    unfinished.rename(file)


def run_request(folder: Path, command: list[str], cwd: str, env: dict[str, str]) -> None:
    """Turn this process into `python *command`, and exit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "MOUNTS_OF" in env:
        enter_namespaces(env.pop("MOUNTS_OF"))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    python_path = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = filter(None, python_path)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0)
    os.dup2(os.open(folder / "stdout", os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_APPEND), 2)
    os._exit(exit_code_of(run, command))


def enter_namespaces(process: str) -> None:
    """See the mounted disks of the process with this number."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "mnt"):
        path = f"/proc/{process}/ns/{kind}"
        if os.readlink(path) == os.readlink(f"/proc/self/ns/{kind}"):
            continue
        if libc.setns(os.open(path, os.O_RDONLY), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def exit_code_of(work: Callable, *arguments) -> int:
    """Call `work`, then do what an interpreter does before it ends; return the exit code."""
    code = 0
    try:
        work(*arguments)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def run(command: list[str]) -> None:
    """Run `python *command` in this interpreter."""
    if command[:2] == ["-m", "torch.distributed.run"]:
        run_torchrun(command[2:])
    elif command[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def run_torchrun(arguments: list[str]) -> None:
    """Run torchrun so that its ranks are forks of this interpreter too."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.run import get_args_parser, main

    dynamic_rendezvous.get_method_name = name_of_caller
    parsed = get_args_parser().parse_args(arguments)
    num_script_words = len(parsed.training_script_args) + 1
    options = arguments[: len(arguments) - num_script_words]
    this_file = os.path.abspath(__file__)
    script = [parsed.training_script, *parsed.training_script_args]
    main([*options, "--run-path", "--start-method=fork", this_file, "rank", *script])


def name_of_caller(depth: int = 2) -> str:
    """Return the name of a calling function, with which torchrun labels its records.

    torchrun's own function looks through all imported modules and their files, which would take
    it the better part of a second here.
    """
    return sys._getframe(depth).f_code.co_name


def rank(command: list[str]) -> None:
    """Run a script as one of torchrun's ranks.

    Undoes what torchrun has changed in its own process, and writes without a buffer.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    sys.stdout.reconfigure(write_through=True)
    code = exit_code_of(run, command)
    if code != 0:
        sys.exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        os.register_at_fork(after_in_child=np.random.seed)
        serve(sys.stdin, sys.argv[2:], dict(os.environ))
    else:
        rank(sys.argv[2:])
