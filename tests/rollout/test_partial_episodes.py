"""Episodes that continue in the next step, without episodes: when their clock runs."""

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from config import load
from rollout.episodes.drawing import no_answer, no_messages
from rollout.grading.clock import StoppableClock
from rollout.partial.episodes import PartialEpisodes
from rollout.partial.groups import OpenGroups

PAUSE = 0.02

pytestmark = pytest.mark.usefixtures("process_group")


@dataclass
class IdleRollout:
    """A vLLM that never gets a request, and reads the clock while it could work."""

    clock: StoppableClock
    times: list[float] = field(default_factory=list)
    tp_rank: int = 0
    vocab_size: int = 10

    @property
    def llm(self):
        core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=[]))
        return SimpleNamespace(
            llm_engine=SimpleNamespace(engine_core=core),
            collective_rpc=lambda function: [SimpleNamespace(use_v2_model_runner=True)],
        )

    def begin_batch(self, responses) -> bool:
        self.times.append(self.clock())
        time.sleep(PAUSE)
        self.times.append(self.clock())
        return False

    def end_batch(self, is_closed_batch: bool) -> None:
        pass


def test_the_time_of_episodes_passes_only_while_vllm_generates():
    """Otherwise episodes would time out while the trainer trains."""
    clock = StoppableClock(StoppableClock.make_file())
    rollout = IdleRollout(clock)
    sampler = SimpleNamespace(
        rollout=rollout,
        director=SimpleNamespace(open=lambda sampling: object()),
        runner=SimpleNamespace(clock=clock),
        inbox=lambda cast: no_messages,
        answer=no_answer,
    )
    config = load("ppo.yaml", ["model.path=m", "data.train_files=t"])
    parts = {"ledger": None, "dataset": None, "rows_of_batch": None, "config": config}
    episodes = PartialEpisodes(sampler=sampler, open=OpenGroups(1, True), **parts)
    for _ in range(2):
        episodes.generate(0, version=0)
        begin, end = rollout.times[-2:]
        assert end - begin >= PAUSE
        stopped_at = clock()
        time.sleep(PAUSE)
        assert clock() == stopped_at
