"""What the processes of rewards and episodes do before they call the user's code."""

import os
import subprocess
import sys

import pytest

from tests.support.launch import ROOT

MIB = 2**20
PROGRAM = """
import resource, sys
from rollout.grading.program import limit_memory
hard, num_bytes = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
limit_memory(num_bytes)
print(*resource.getrlimit(resource.RLIMIT_DATA))
print(open("/proc/self/oom_score_adj").read())
"""


@pytest.mark.parametrize(
    "hard, num_bytes, expected",
    [
        (-1, 500 * MIB, 500 * MIB),
        (800 * MIB, 500 * MIB, 500 * MIB),
        (500 * MIB, 800 * MIB, 500 * MIB),
    ],
)
def test_memory_is_limited_also_below_a_limit_of_the_machine(hard, num_bytes, expected):
    """A process cannot raise the hard limit that ulimit or a job scheduler has set."""
    command = [sys.executable, "-c", PROGRAM, str(hard), str(num_bytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The kernel kills this process first when memory runs out.
    assert done.stdout.split() == [str(expected), str(expected), "1000"]


HIDING = """
import os, sys
import common.imports, configs.errors
from rollout.episodes.worker import ROOT, hide_project
hide_project()
sys.path.insert(sys.path.index(ROOT), os.getcwd())
import common, configs
assert common.own and configs.own
assert sys.path[-1] == ROOT and sys.path.count(ROOT) == 1
assert os.environ["PYTHONPATH"] == os.pathsep.join(["/others", ROOT])
"""


def test_modules_of_the_user_take_precedence_in_an_episode_worker_and_its_processes(tmp_path):
    for name in ("common", "configs"):
        (tmp_path / f"{name}.py").write_text("own = True\n")
    python_path = os.pathsep.join([str(ROOT), "/others"])
    environment = os.environ | {"PYTHONPATH": python_path}
    command = [sys.executable, "-P", "-c", HIDING]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.stderr
