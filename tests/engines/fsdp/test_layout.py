"""How an engine lays out rows, and what it does about the padding token's row."""

import pytest
import torch
from torch import nn

from data.batching.batch import Batch
from engines.fsdp.engine import FSDPEngine
from engines.megatron import layout
from engines.model import guard
from engines.model.hf import keep_zero_padding_row
from tests.engines.fsdp.cases import AUTO, PADDED, make_config
from tests.support.training import make_batch

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "family, settings, multiples",
    [
        ("llama", [AUTO], [1, 1, 1]),  # ranks divide its four heads
        ("llama", [AUTO, PADDED], [1, 4, 8]),
        ("three_heads", [AUTO], [1, 4, 8]),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_rows_are_padded_to_the_chunks_of_the_ranks_that_share_them(
    folder, family, settings, multiples
):
    pairs = [f"model.path={folder / family}", *(f"engine.{setting}" for setting in settings)]
    engine = FSDPEngine(make_config(folder, *pairs), CPU, 1)
    assert [engine.padding_multiple(size) for size in (1, 2, 4)] == multiples


@pytest.mark.parametrize(
    "num_cp_ranks, tp, multiple", [(1, 1, 1), (2, 1, 4), (4, 2, 16), (1, 2, 2)]
)
def test_rows_of_megatron_are_divided_by_tensor_parallel_ranks_too(
    folder, num_cp_ranks, tp, multiple
):
    pairs = ["model_engine=megatron", f"engine.tensor_model_parallel_size={tp}"]
    engine = make_config(folder, *pairs, "engine.sequence_parallel=true").engine
    assert layout.padding_multiple(engine, num_cp_ranks) == multiple
    whole = make_config(folder, *pairs, "engine.sequence_parallel=false").engine
    assert layout.padding_multiple(whole, num_cp_ranks) == multiple // tp


@pytest.mark.usefixtures("process_group")
def test_a_group_of_ranks_is_no_larger_than_the_largest(folder):
    """The check for packed sequences asks for as many ranks as one day may share them."""
    engine = FSDPEngine(make_config(folder), CPU, 1)
    whole = make_batch(0)
    batch = Batch(whole.input_ids, whole.cu_seqlens)  # no mask: all tokens count
    together = guard.outputs_together(engine, batch, size=4)
    expected = guard.outputs_one_by_one(engine, batch)
    torch.testing.assert_close(together, expected, rtol=0, atol=0.1)


@pytest.mark.usefixtures("process_group")
def test_the_decoder_keeps_no_cache_of_keys_and_values(folder):
    engine = FSDPEngine(make_config(folder), CPU, 1)
    caches = []

    def record(module, inputs, output):
        caches.append(output.past_key_values)

    handle = engine.hf.get_decoder().register_forward_hook(record)
    engine.log_probs(make_batch(0))
    handle.remove()
    assert caches
    assert not any(caches)


@pytest.mark.parametrize("padding_row", [None, 0, 2])
def test_only_a_zero_row_of_the_padding_token_is_kept(padding_row):
    embedding = nn.Embedding(5, 3)
    nn.init.zeros_(embedding.weight[2])
    nn.init.zeros_(embedding.weight[3])
    is_zero = embedding.weight.detach().abs().sum(1) == 0
    keep_zero_padding_row(embedding, padding_row, is_zero)
    embedding(torch.tensor([[0, 1, 2], [3, 2, 4]])).sum().backward()
    expected = torch.tensor([1.0, 1, 2, 1, 1])
    if padding_row == 2:
        expected[2] = 0
    assert embedding.weight.grad.tolist() == expected[:, None].expand(5, 3).tolist()
