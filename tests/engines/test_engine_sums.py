"""What every engine has in common: sums over ranks, shares of a batch, and FLOPs of images."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from data.batching.batch import Batch, make_cu_seqlens
from engines.base import Engine
from tests.engines.test_microbatch import FakeGroup
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")
LENGTHS = [2, 1, 3]


class PlainEngine(Engine):
    """An engine without a model."""

    def __init__(self, context_parallel_size: int | str):
        engine = {"context_parallel_size": context_parallel_size, "use_remove_padding": True}
        self.config = OmegaConf.create({"engine": engine})
        self.device = CPU


# So that the methods of Engine can be called without an engine that computes.
PlainEngine.__abstractmethods__ = frozenset()


def make_batch() -> Batch:
    return Batch(torch.arange(sum(LENGTHS)), make_cu_seqlens(torch.tensor(LENGTHS)))


@pytest.mark.parametrize("rank, size, reported", [(0, "auto", [0, 1, 2]), (1, "auto", [0, 1])])
def test_one_rank_of_a_group_reports_the_sequences_that_the_group_shares(rank, size, reported):
    engine = PlainEngine(size)
    engine.cp_groups = {1: FakeGroup(0, 1), 2: FakeGroup(rank, 2)}
    share = engine.reported_sequences(make_batch(), [(1, [0]), (2, [2]), (1, [1])])
    lengths = [LENGTHS[number] for number in reported]
    assert sorted(share.lengths) == sorted(lengths)


def test_with_groups_of_a_fixed_size_every_rank_reports():
    engine = PlainEngine(2)
    engine.cp_groups = {2: FakeGroup(1, 2)}
    assert engine.reported_sequences(make_batch(), [(2, [2, 0])]).lengths == [3, 2]


def sums_on_rank() -> float:
    """Return the sum over the data-parallel ranks: this one, if both share sequences."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    engine = PlainEngine(2)
    engine.dp_group = groups[dist.get_rank()]
    return engine.sum_over_dp(torch.tensor(float(10 ** dist.get_rank()))).item()


def test_amounts_are_summed_over_data_parallel_ranks_alone(tmp_path):
    assert on_ranks(2, tmp_path, sums_on_rank) == [1, 10]


def test_padding_is_used_only_within_the_block():
    engine = PlainEngine(1)
    packed = engine.config
    with pytest.raises(RuntimeError), engine.padded():
        assert not engine.config.engine.use_remove_padding
        raise RuntimeError
    assert engine.config is packed
    assert packed.engine.use_remove_padding


def test_adapters_are_used_again_after_an_error(monkeypatch):
    used = []
    monkeypatch.setattr(PlainEngine, "_use_adapters", lambda engine, use: used.append(use))
    with pytest.raises(RuntimeError), PlainEngine(1).without_adapters():
        assert used == [False]
        raise RuntimeError
    assert used == [False, True]


def test_flops_of_images_are_those_of_each_sequences_own_tokens():
    engine = PlainEngine(1)
    assert engine.image_flops(make_batch()) == [0.0, 0.0, 0.0]
    types = torch.tensor([[0, 1, 0, 2, 0, 1]])
    engine.processor = SimpleNamespace(token_types=lambda rows: types)
    engine._image_flops = 10
    assert engine.image_flops(make_batch()) == [10.0, 0.0, 20.0]
