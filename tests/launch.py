"""Start a script on several ranks, as a user does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def launch(num_ranks: int, script: str, *arguments, returncode: int = 0,
           timeout: float = 400) -> subprocess.CompletedProcess:
    """Run a script (a path from the repository root) under torchrun; fail with the end of what it said unless it exits
    with returncode within timeout [s]."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", script,
               *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()                      # not kill: torchrun takes its ranks along only when asked to end
        out, err = process.communicate()
        err += f"\n{script} was stopped after {timeout} s"
    assert process.returncode == returncode, (
        f"{script} on {num_ranks} ranks: exit code {process.returncode}, not {returncode}\n"
        f"{out[-2000:]}\n{err[-20000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)
