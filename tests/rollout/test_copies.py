"""Recording which copies a loader of weights would make."""

import torch
from torch import nn

from rollout.vllm.copies import CopyRecorder
from rollout.vllm.cpu import free_shared_memory


def test_copies_are_recorded_and_not_made():
    """A loader that fuses two matrices, transposes a third, and fills a bias with zeros."""
    fused = nn.Parameter(torch.ones(4, 3))
    transposed = nn.Parameter(torch.ones(2, 5))
    bias = nn.Parameter(torch.ones(4))
    shapes = {"q": (2, 3), "k": (2, 3), "out": (5, 2), "unused": (1,)}
    recorder = CopyRecorder(shapes, torch.float32)
    assert {name: tuple(weight.shape) for name, weight in recorder.weights.items()} == shapes
    with recorder, torch.no_grad():
        fused[:2].copy_(recorder.weights["q"])
        fused[2:].copy_(recorder.weights["k"])
        transposed.copy_(recorder.weights["out"].T[:2])
        bias.copy_(torch.zeros(4))
    assert fused.eq(1).all()
    assert transposed.eq(1).all()
    assert bias.eq(0).all(), "other copies are made"
    assert recorder.copies.keys() == {"q", "k", "out"}
    (copy,) = recorder.copies["k"]
    assert copy.destination.data_ptr() == fused[2:].data_ptr()
    assert copy.destination.shape == (2, 3)
    (copy,) = recorder.copies["out"]
    assert copy.source.stride() == (1, 2)
    assert not copy.destination.requires_grad


def test_shared_memory_of_one_rank_is_unlinked(tmp_path):
    """Its name has the ranks of the replica and the rank in it; others stay."""
    shared_memory = type(tmp_path)("/dev/shm")
    names = ["[902-903]-cpushm_1", "[902-903]-cpushm_0", "[902-904]-cpushm_1", "[0-1]-cpushm_1"]
    files = [shared_memory / f"{tmp_path.name}-tp:0-{name}" for name in names]
    for file in files:
        file.touch()
    try:
        free_shared_memory(903, tp_size=2)
        assert [file.exists() for file in files] == [False, True, True, True]
    finally:
        for file in files:
            file.unlink(missing_ok=True)
