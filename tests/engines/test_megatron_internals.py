"""The Megatron engine inside: attention, collectives, failed steps, offloading, mappings."""

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.enums import AttnMaskType
from safetensors import safe_open
from torch import Tensor

from config import InputError, load
from engines.megatron import layout, mapping
from engines.megatron.engine import MegatronEngine
from engines.megatron.torch_layers import Packing, TorchAttention
from engines.megatron.without_cuda import cuda_is_cpu
from engines.parallel import offload as host_memory
from engines.parallel.varlen import Zigzag
from tests.engines.megatron_checks import BOUND
from tests.engines.megatron_worker import (
    BF16,
    BF16_GRADIENTS,
    BUCKETS,
    CASES,
    CP2,
    LORA,
    NO_SP,
    OVERLAP,
    PP2,
    REPLICATED,
    TP2,
    VPP2,
    Case,
    build,
    evaluate,
    new_layout,
    step_share,
    train,
    work,
)
from tests.support.cases import needs
from tests.support.training import digest, gather

pytestmark = pytest.mark.slow

# -- attention -------------------------------------------------------------------------------------


@work(1, 2, 4)
def attention(_: Path, this_device: torch.device) -> list[float]:
    """Return relative errors of packed attention and its gradients by query, key and value.

    In a sliding window and without, context-parallel over all ranks, in the dtype for which the
    device has a packed kernel; against fp32, each sequence alone.
    """
    num_ranks = dist.get_world_size()
    lengths = [296, 8, 1040, 512]
    num_heads = (14, 2, 2)
    dtype = torch.bfloat16 if this_device.type == "cuda" else torch.float32
    new_layout()
    with cuda_is_cpu(), torch.random.fork_rng():
        layout.initialize(
            load(
                "sft.yaml",
                [
                    "model_engine=megatron",
                    "model.path=unused",
                    "data.train_files=unused",
                    f"engine.context_parallel_size={num_ranks}",
                ],
            ).engine
        )
        torch.manual_seed(0)
        *inputs, gradient = (
            torch.randn(sum(lengths), 1, heads, 64).to(this_device, dtype)
            for heads in (*num_heads, num_heads[0])
        )
        packing = Packing.from_lengths(lengths, mpu.get_context_parallel_group(), this_device)
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        start_of_token = starts.repeat_interleave(torch.tensor(lengths) // num_ranks)
        own_tokens = packing.positions + start_of_token.to(this_device)
        errors = []
        for window in (None, (99, 0)):
            own_inputs = [x[own_tokens].detach().requires_grad_() for x in inputs]
            output = packed_attention(own_inputs, packing, window)
            output = output.view_as(gradient[own_tokens])
            output.backward(gradient[own_tokens])
            whole_inputs = [x.float().detach().requires_grad_() for x in inputs]
            expected = separate_attention(whole_inputs, lengths, window)
            expected.backward(gradient.float())
            errors.append(relative_error(output, expected[own_tokens]))
            for own, whole in zip(own_inputs, whole_inputs):
                errors.append(relative_error(own.grad, whole.grad[own_tokens]))
        return [max(gather(error)) for error in errors]


def packed_attention(
    inputs: list[Tensor], packing: Packing, window: tuple[int, int] | None
) -> Tensor:
    """Compute the engine's attention on packed sequences."""
    layer = TorchAttention(
        SimpleNamespace(window_size=window, window_attn_skip_freq=None),
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=SimpleNamespace(cp=mpu.get_context_parallel_group()),
    )
    return layer(*inputs, packed_seq_params=packing)


def separate_attention(
    inputs: list[Tensor], lengths: list[int], window: tuple[int, int] | None
) -> Tensor:
    """Compute torch's attention on each sequence alone."""
    outputs = []
    for length, *sequence in zip(lengths, *(x.split(lengths) for x in inputs)):
        query, key, value = (x.permute(1, 2, 0, 3) for x in sequence)
        num_earlier = window[0] if window else length
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = mask.tril().triu(-num_earlier)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True
        )
        outputs.append(attended.permute(2, 0, 1, 3))
    return torch.cat(outputs)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    return ((measured - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(n, marks=needs((n, "attention"))) for n in (1, 2, 4)]
)
def test_packed_attention_equals_each_sequence_alone(megatron_results, num_ranks):
    assert max(megatron_results[num_ranks]["attention"]) < BOUND


# -- the guard -------------------------------------------------------------------------------------

LEAKING_LAYOUTS = {
    "data": "",
    "tensor": TP2,
    "pipeline": PP2,
    "virtual": f"{PP2} {VPP2}",
    "context": CP2,
    "critic": "",
}


@CASES.case(2)
def leaks(folder: Path, this_device: torch.device) -> dict[str, list[str] | None]:
    """Build engines whose attention forgets where sequences begin; return each rank's error."""
    forward = TorchAttention.forward

    def forgetful(self, *tensors, packed_seq_params, **kwargs):
        zigzag = packed_seq_params.zigzag
        one_sequence = Zigzag([0, zigzag.offsets[-1]], zigzag.group, zigzag.device)
        packing = replace(packed_seq_params, zigzag=one_sequence)
        return forward(self, *tensors, packed_seq_params=packing, **kwargs)

    errors = {}
    TorchAttention.forward = forgetful
    for name, settings in LEAKING_LAYOUTS.items():
        head = Case("qwen3", critic=name == "critic").head
        errors[name] = None
        try:
            build(MegatronEngine, folder / "qwen3", this_device, settings, head=head)
        except InputError as error:
            errors[name] = gather(str(error))
    TorchAttention.forward = forward
    return errors


@needs((2, "leaks"))
@pytest.mark.parametrize("name", LEAKING_LAYOUTS)
def test_sequences_that_leak_into_others_are_found(megatron_results, name):
    errors = megatron_results[2]["leaks"][name]
    assert errors is not None
    assert len(errors) == 2
    help = "engine.use_remove_padding=false"
    if name == "context":
        help = "engine.context_parallel_size=1"
    for error in errors:
        assert "sequence at a time differ by" in error
        assert "first in layer 0 of 0 to 3, but rounding" in error
        assert f"set {help}" in error


# -- collectives -----------------------------------------------------------------------------------

OVERLAPPED = f"{REPLICATED} {OVERLAP} {BUCKETS}"


@work(2)
def collectives(folder: Path, this_device: torch.device) -> dict[str, list[str]]:
    """Return the collectives of one step, in the order in which torch ran them, by settings."""
    results = {}
    for settings in ("", REPLICATED, OVERLAPPED):
        engine = build(MegatronEngine, folder / "qwen3", this_device, settings)
        with torch.profiler.profile() as profile:
            train(engine, [0], Case("qwen3"))
        names = [event.name for event in profile.events()]
        results[settings] = [name for name in names if name.startswith("c10d::")]
    return results


@needs((2, "collectives"))
def test_collectives_are_those_of_the_setting(megatron_results):
    """The distributed optimizer scatters gradients and gathers parameters; otherwise all-reduce."""
    results = megatron_results[2]["collectives"]
    sharded = results[""]
    assert sharded.count("c10d::reduce_scatter_tensor_coalesced_") == 1
    assert sharded.count("c10d::allgather_into_tensor_coalesced_") == 1
    assert "c10d::allreduce_coalesced_" not in sharded
    replicated = results[REPLICATED]
    assert replicated.count("c10d::allreduce_coalesced_") == 1
    assert not any("reduce_scatter" in name or "allgather" in name for name in replicated)
    assert results[OVERLAPPED].count("c10d::allreduce_coalesced_") > 5


# -- gradients that are not finite -----------------------------------------------------------------


@work(2)
def non_finite(folder: Path, this_device: torch.device) -> dict:
    """Train steps 0 1 2 3, with a NaN in step 2 of rank 0, and steps 0 1 3."""
    results = {}
    case = Case("qwen3")
    for settings in ("", REPLICATED, BF16):
        engine = build(MegatronEngine, folder / "qwen3", this_device, settings)
        before = train(engine, range(2), case)
        weights = digest(dict(engine.export_weights()))
        # The NaN is in every micro-batch of rank 0, and of no other.
        poison = torch.nan if dist.get_rank() == 0 else 1.0
        share = step_share(engine, 2, case)
        poisoned = engine.train_batch(
            share.batch, lambda log_probs, *_: (log_probs.sum() * poison, {}), 2
        )
        untouched = gather(digest(dict(engine.export_weights())) == weights)
        with_nan = before + train(engine, [3], case)
        engine = build(MegatronEngine, folder / "qwen3", this_device, settings)
        results[settings] = {
            "poisoned": poisoned,
            "untouched": untouched,
            "with_nan": with_nan,
            "without": train(engine, [0, 1, 3], case),
        }
    return results


@needs((2, "non_finite"))
@pytest.mark.parametrize("settings", ["", REPLICATED, BF16])
def test_non_finite_gradient_is_skipped(megatron_results, settings):
    result = megatron_results[2]["non_finite"][settings]
    assert result["poisoned"]["skipped"] == 1.0
    assert not math.isfinite(result["poisoned"]["grad_norm"])
    assert result["untouched"] == [True, True]
    assert result["with_nan"] == result["without"]
    assert result["without"][2]["skipped"] == 0.0


# -- offloading ------------------------------------------------------------------------------------

LORA_REPLICATED = f"{LORA} {REPLICATED}"


@work(2)
def offload(folder: Path, this_device: torch.device) -> dict:
    """Export and train with everything offloaded in between.

    Also returns how much host memory was taken before the first step and at the end, and the bytes
    that stay on the device.
    """
    host_memory.PART_BYTES = 2**14
    host_memory.MIN_BYTES = 64
    results = {}
    case = Case("qwen3")
    for settings in ("", REPLICATED, f"{BF16} {BF16_GRADIENTS}", LORA_REPLICATED):
        engine = build(MegatronEngine, folder / "qwen3", this_device, settings)
        memory = engine.host_memory
        engine.offload("optimizer")
        engine.offload("parameters", "optimizer")
        num_parts_before = len(memory.parts)
        steps = train(engine, range(2), case)
        engine.offload("parameters", "optimizer")
        everything = engine.tensors_of("parameters", "optimizer") + engine.gradient_buffers()
        bytes_left = sum(storage.nbytes() for storage in memory.storages(everything))
        gradients_left = 0
        for optimizer in engine.optimizer.chained_optimizers:
            gradients_left += sum(x.grad is not None for x in optimizer.get_parameters())
        names = list(dict(engine.export_weights()))
        engine.offload("parameters", "optimizer")
        evaluate(engine, case)
        engine.offload("optimizer")
        results[settings] = {
            "steps": steps + train(engine, [2], case),
            "num_names": len(names),
            "gradients left": gradients_left,
            "bytes left": gather(bytes_left),
            "host memory": gather([num_parts_before, len(memory.parts)]),
        }
    return results


@pytest.mark.parametrize(
    "settings, same",
    [
        pytest.param("", "dp2", marks=needs((2, "dp2"))),
        pytest.param(REPLICATED, "dp2 replicated", marks=needs((2, "dp2 replicated"))),
        pytest.param(
            LORA_REPLICATED, "lora dp2 replicated", marks=needs((2, "lora dp2 replicated"))
        ),
    ],
)
@needs((2, "offload"))
def test_offload_comes_back_by_itself(megatron_results, settings, same):
    """DDP's buffers hold parameters and gradients, and the optimizer has views of them.

    A weight sync works without the buffer of parameters. Before the first step, as much host memory
    was taken as is needed later.
    """
    result = megatron_results[2]["offload"][settings]
    without_offload = megatron_results[2][same]
    assert max(result["bytes left"]) < 1000
    for before, after in result["host memory"]:
        assert before == after
        assert after > 2
    assert result["steps"] == without_offload["steps"][:3]
    assert result["num_names"] == len(without_offload["names"][0])


@needs((2, "offload"))
def test_offload_frees_gradients(megatron_results):
    """Also where they are copies in fp32."""
    for settings, result in megatron_results[2]["offload"].items():
        assert result["gradients left"] == 0, settings


# -- mappings --------------------------------------------------------------------------------------

BRIDGE_CASES = (
    Case("qwen2_tied", TP2),
    Case("qwen2_tied", TP2, critic=True),
    Case("qwen2_tied", PP2),
    Case("qwen2_tied", f"{PP2} {VPP2}", critic=True),
    Case("qwen3", TP2),
    Case("llama", f"{PP2} {VPP2}"),
    Case("llama", f"{TP2} {NO_SP}"),
    Case("llama", PP2, critic=True),
)


class CountingFile(ExitStack):
    """A safetensors file that counts the numbers read from it, in CountingFile.num_read."""

    num_read = 0

    def __init__(self, *arguments, **kwargs):
        super().__init__()
        self.file = self.enter_context(safe_open(*arguments, **kwargs))
        self.keys = self.file.keys

    def get_slice(self, name: str) -> "CountingSlice":
        return CountingSlice(self.file.get_slice(name))


class CountingSlice:
    def __init__(self, inner):
        self.inner = inner
        self.get_shape = inner.get_shape

    def __getitem__(self, index) -> Tensor:
        part = self.inner[index]
        CountingFile.num_read += part.numel()
        return part


@dataclass
class LoadedWeights:
    """What an engine holds and exports after loading.

    held, exported: digests
    num_held: numbers on this rank
    """

    held: str
    exported: str
    names: list[str]
    num_held: int


def load_weights(folder: Path, this_device: torch.device, case: Case, bridge: str) -> LoadedWeights:
    engine = build(
        MegatronEngine,
        folder / case.family,
        this_device,
        f"{case.settings} bridge={bridge}",
        head=case.head,
        optimize=False,
    )
    held = {}
    for number, model in enumerate(engine.models):
        for name, parameter in model.named_parameters():
            held[f"{number} {name}"] = parameter
    exported = dict(engine.export_weights())
    num_held = sum(parameter.numel() for parameter in held.values())
    return LoadedWeights(digest(held), digest(exported), list(exported), num_held)


@work(2)
def bridges(folder: Path, this_device: torch.device) -> list[dict]:
    """Load models by our own mapping and by mbridge's, and compare, on each rank."""
    results = []
    mapping.safe_open = CountingFile
    for case in BRIDGE_CASES:
        CountingFile.num_read = 0
        own = load_weights(folder, this_device, case, "own")
        num_read = CountingFile.num_read
        theirs = load_weights(folder, this_device, case, "mbridge")
        is_equal = (own.held, own.exported, own.names) == (
            theirs.held,
            theirs.exported,
            theirs.names,
        )
        results.append(
            {"is equal": gather(is_equal), "held and read": gather([own.num_held, num_read])}
        )
    mapping.safe_open = safe_open
    return results


@needs((2, "bridges"))
@pytest.mark.parametrize("number", range(len(BRIDGE_CASES)))
def test_mappings_are_equal_to_the_bit(megatron_results, number):
    """By our mapping a rank reads what it holds and nothing else.

    It does not read the padding of the vocabulary, which is one row of 32, nor the value head,
    which begins at zero.
    """
    result = megatron_results[2]["bridges"][number]
    assert result["is equal"] == [True, True]
    for num_held, num_read in result["held and read"]:
        assert 0 <= num_held - num_read <= 3 * 32


# -- broken models ---------------------------------------------------------------------------------


@work(2)
def broken_models(folder: Path, this_device: torch.device) -> dict[str, list[str]]:
    """Build engines for broken models; return each rank's error."""
    errors = {}
    for name in ("no_files", "missing_weight", "wrong_shape"):
        try:
            build(MegatronEngine, folder / name, this_device, TP2)
        except InputError as error:
            errors[name] = gather(str(error))
    return errors


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_files", "lacks model.safetensors"),
        ("missing_weight", "lacks 1 weights of LlamaForCausalLM, such as model.norm.weight"),
        ("wrong_shape", "lm_head.weight has shape [96, 32] in the file, but should have [97, 32]"),
    ],
)
@needs((2, "broken_models"))
def test_broken_models_are_rejected(megatron_results, name, message):
    errors = megatron_results[2]["broken_models"][name]
    assert len(errors) == 2
    for error in errors:
        assert message in error
