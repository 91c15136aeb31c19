"""A slow network between two nodes changes the times of a run, and nothing else."""

import os
from pathlib import Path

import pytest

from tests.soak.runs import differences, make_assets, results_of, sft
from tests.support.launch import metrics
from tests.support.nodes import Nodes, Slow

NUM_STEPS = 4
SECONDS = 300
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces"),
]


def train(assets: Path, folder: Path, slow: Slow | None) -> Nodes:
    """Train on two nodes, with one rank each, and return the nodes, which are gone then."""
    folder.mkdir()
    limits = [f"trainer.total_steps={NUM_STEPS}", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    nodes = Nodes(slow)
    try:
        ranks = []
        for node in range(2):
            log = folder / f"node{node}"
            ranks.append(nodes.torchrun(node, log, "c10d", *sft(assets, folder / "out"), *limits))
        codes = [rank.wait(SECONDS) for rank in ranks]
    finally:
        nodes.close()
    assert codes == [0, 0], (folder / "node0").read_text()
    return nodes


def seconds_of_steps(out: Path) -> list[float]:
    return sorted(line["timing/step"] for line in metrics(out) if line["step"] > 0)


def test_delays_and_lost_packets_change_times_and_no_number(tmp_path):
    make_assets(tmp_path)
    train(tmp_path, tmp_path / "cable", None)
    nodes = train(tmp_path, tmp_path / "slow", Slow(delay=0.02, share_lost=0.01))
    assert nodes.num_packets > 1000
    assert nodes.num_lost > 0
    fast = seconds_of_steps(tmp_path / "cable" / "out")
    slow = seconds_of_steps(tmp_path / "slow" / "out")
    assert slow[0] > fast[NUM_STEPS // 2] + 0.2, "a step waits for more than five messages"
    assert (
        differences(tmp_path / "slow" / "out", results_of(tmp_path / "cable" / "out"), set()) == []
    )
