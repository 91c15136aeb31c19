"""What every engine has in common: plans and sums over ranks, FLOPs of images, files of exports."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig

from data.batching.batch import Batch, make_cu_seqlens
from data.batching.plan import Plan
from engines.base import Engine
from engines.heads import LogProbHead, ValueHead
from tests.engines.test_microbatch import FakeGroup
from tests.support.models import make_model
from tests.support.ranks import group_beside_rank0, on_ranks

CPU = torch.device("cpu")
LENGTHS = [2, 1, 3]


class PlainEngine(Engine):
    """An engine without a model."""

    _flops = (100, 0, 0)

    def __init__(self, context_parallel_size: int | str):
        engine = {"context_parallel_size": context_parallel_size, "use_remove_padding": True}
        data = {"max_tokens_per_micro_batch": 10}
        self.config = OmegaConf.create({"engine": engine, "data": data, "model": {"path": "m"}})
        self.device = CPU
        self.compute_dtype = torch.bfloat16
        self.head = LogProbHead(1.0, 7, False, 97)

    def padding_multiple(self, group_size: int) -> int:
        return 1


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
    """Return the sum over the data-parallel ranks, of which rank 0 is the only one of its group."""
    engine = PlainEngine(2)
    engine.dp_group = group_beside_rank0()
    return engine.sum_over_dp(torch.tensor(float(10 ** dist.get_rank()))).item()


def test_amounts_are_summed_over_data_parallel_ranks_alone(tmp_path):
    assert on_ranks(3, tmp_path, sums_on_rank) == [1, 110, 110]


def plan_of_rank(rank: int, lengths: list[int], **options) -> Plan:
    """Return the plan of one of two data-parallel ranks."""
    engine = PlainEngine(1)
    engine.dp_rank = rank
    engine.dp_size = 2
    engine.dp_group = dist.group.WORLD
    return engine.plan(lengths, **options)


@pytest.mark.usefixtures("process_group")
def test_ranks_share_the_work_for_images_too():
    """The first sequence's image takes as long as the three other sequences."""
    image_flops = [2000.0, 0.0, 0.0, 0.0]
    shares = [plan_of_rank(rank, [10] * 4, image_flops=image_flops).sequences for rank in (0, 1)]
    assert sorted(map(sorted, shares)) == [[0], [1, 2, 3]]


@pytest.mark.usefixtures("process_group")
def test_attention_counts_more_than_its_flops_when_ranks_share_the_work(monkeypatch):
    """The longest sequence has fewer FLOPs than the four others, but takes longer."""
    monkeypatch.setattr(PlainEngine, "_flops", (100, 0, 20), raising=False)
    lengths = [7, 5, 3, 2, 1]
    shares = [plan_of_rank(rank, lengths).sequences for rank in (0, 1)]
    assert sorted(map(sorted, shares)) == [[0], [1, 2, 3, 4]]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("least_shared, counts", [(700, [2, 2, 2]), (900, [1, 1, 1])])
def test_a_sequence_is_shared_if_the_plan_says_that_it_pays(least_shared, counts):
    """Alone, the first sequence takes 800 ms on a rank; two ranks take 500 ms for all of them."""
    engine = PlainEngine("auto")
    engine.hf_config = AutoConfig.for_model("qwen2")
    engine.config.engine.context_parallel_costs = [1e-9, 0, least_shared, 0]  # 1 FLOP per ms
    engine.dp_rank = 0
    engine.dp_size = 2
    engine.dp_group = dist.group.WORLD
    assert engine.plan([8, 1, 1]).count.tolist() == counts


@pytest.mark.usefixtures("process_group")
def test_pairs_stay_in_one_micro_batch():
    lengths = [3, 5, 4, 4, 6, 2, 1, 1]
    seen = []
    num_micro_batches = []
    for rank in (0, 1):
        plan = plan_of_rank(rank, lengths, group_size=2)
        num_micro_batches.append(len(plan.micro_batches))
        for _, members in plan.micro_batches:
            numbers = sorted(plan.sequences[i] for i in members)
            assert numbers[::2] == [number - 1 for number in numbers[1::2]]
            assert all(number % 2 == 0 for number in numbers[::2])
            assert sum(lengths[number] for number in numbers) <= 10
            seen += numbers
    assert sorted(seen) == [*range(8)]
    assert sorted(num_micro_batches) == [1, 2], "two pairs of 8 tokens, and one of 8 with one of 2"


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


# -- exports ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = make_model(tmp_path_factory.mktemp("models") / "llama", "llama")
    GenerationConfig(eos_token_id=[2]).save_pretrained(path)
    return path


def test_an_export_names_the_end_tokens_of_the_run(model, tmp_path):
    engine = PlainEngine(1)
    engine.config.model.path = str(model)
    engine.new_end_ids = [7]
    engine.save_config(tmp_path)
    assert not engine.is_classifier
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [2, 7]


def test_the_export_of_a_value_head_is_a_classifier_with_its_padding(model, tmp_path):
    engine = PlainEngine(1)
    engine.config.model.path = str(model)
    engine.head = ValueHead()
    engine.padding_id = 5
    engine.save_config(tmp_path)
    assert engine.is_classifier
    written = AutoConfig.from_pretrained(tmp_path)
    assert written.architectures == ["LlamaForSequenceClassification"]
    assert written.pad_token_id == 5
    assert written.dtype == torch.bfloat16


def test_weights_that_the_engine_does_not_use_are_read_from_the_files(model):
    engine = PlainEngine(1)
    engine.config.model.path = str(model)
    in_files = load_file(model / "model.safetensors")
    engine.names = {name: name for name in in_files}
    assert not engine.has_unused_weights
    assert [*engine.unused_weights()] == []
    engine.names["lm_head.weight"] = None
    assert engine.has_unused_weights
    ((name, tensor),) = engine.unused_weights()
    assert name == "lm_head.weight"
    assert torch.equal(tensor, in_files[name])
