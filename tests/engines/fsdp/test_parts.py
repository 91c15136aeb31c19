"""Parts of the FSDP engine that need no engine: attention of padded rows, sizes, and transforms."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from config import InputError
from engines.adamw import Storage
from engines.fsdp.attention import Packing, packed_attention
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.rounding import report_lost_updates
from engines.fsdp.state import ModelState, future_optimizer_sizes, optimizer_tensors
from engines.fsdp.transforms import build_model, prepare_layers, uses_compile
from engines.heads import Head
from engines.optimizer import adamw, muon
from tests.engines.fsdp.cases import make_config
from tests.engines.test_microbatch import FakeGroup

CPU = torch.device("cpu")


# -- attention of padded rows ----------------------------------------------------------------------


def written_out(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor, softcap, sinks) -> Tensor:
    """Return [b, n, heads, dim] of inputs [b, heads, n, dim]; two heads share each key."""
    k = k.repeat_interleave(2, 1)
    v = v.repeat_interleave(2, 1)
    scores = q @ k.transpose(-1, -2) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_padded_rows_have_soft_caps_and_sinks(has_mask, softcap, sinks):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    is_seen = torch.ones(5, 5, dtype=torch.bool).tril()
    mask = None
    if has_mask:
        is_seen = is_seen & (torch.arange(5) >= torch.tensor([[[[0]]], [[[2]]]]))
        is_seen[1, 0, :2, 0] = True  # padding sees something, too
        mask = is_seen
    module = nn.Module()
    module.num_key_value_groups = 2
    module.is_causal = True
    options = {"scaling": 0.3, "dropout": 0.0, "softcap": softcap, "s_aux": sinks}
    attended, _ = AttentionInterface()["padded"](module, q, k, v, mask, **options)
    expected = written_out(q, k, v, is_seen, softcap, sinks)
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)


# -- attention of packed sequences -----------------------------------------------------------------


def attend_packed(attention_mask: Tensor | None = None, **options) -> Tensor:
    """Attend within a sequence of 3 tokens and one of 2."""
    if "packing" not in options:
        options["packing"] = Packing.of([3, 2], FakeGroup(0, 1), CPU, zigzag=False)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 5, 4, generator=generator) for _ in range(3)]
    return packed_attention(None, *inputs, attention_mask, **options)[0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dropout": 0.1, "position_bias": 1}, "the model needs dropout in its attention"),
        ({"position_bias": torch.ones(1)}, "the model needs position_bias in its attention"),
        ({"is_causal": False}, "the model needs is_causal=False in its attention"),
        ({"packing": None}, "do not pass the sequence boundaries on to their attention"),
        (
            {"attention_mask": torch.empty(1, 1, 2, 8, device="meta")},
            "only a mask limits its attention to a window of 8 tokens",
        ),
        (
            {"attention_mask": torch.empty(1, 1, 2, 0, device="meta"), "sliding_window": 4},
            "only some of transformers' attention implementations apply its window of 4 tokens",
        ),
    ],
)
def test_attention_that_a_packed_kernel_would_compute_wrongly_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        attend_packed(**options)


def test_what_does_not_change_attention_may_be_passed():
    expected = attend_packed()
    mask = torch.empty(1, 1, 1, 1, device="meta")
    harmless = {"dropout": 0.0, "is_causal": True, "use_cache": True, "position_bias": None}
    assert torch.equal(attend_packed(mask, **harmless), expected)
    window = torch.empty(1, 1, 2, 2, device="meta")
    within_window = attend_packed(window, sliding_window=2)
    is_changed = (within_window != expected).flatten(2).any(-1)
    assert is_changed.tolist() == [[False, False, True, False, False]]


# -- optimizers ------------------------------------------------------------------------------------


def test_host_memory_is_planned_for_moments_that_do_not_exist_yet():
    matrix, norm = (nn.Parameter(torch.zeros(shape)) for shape in ((8, 300), (16,)))
    elsewhere = nn.Parameter(torch.zeros(4, 4, device="meta"))
    common = dict(lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    in_8_bits = Storage(torch.uint8, stochastic=True, seed=0, compiled=False)
    plain = Storage(None, stochastic=True, seed=0, compiled=False)
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [norm], "weight_decay": 0.0}]

    def sizes(*optimizers) -> list[int]:
        return [*future_optimizer_sizes(optimizers, "cpu")]

    # Codes, and a scale for each of two blocks of a row; moments of norms have 32 bits.
    small = adamw(groups, storage=in_8_bits, **common)
    assert sizes(small) == [8 * 300 + 8 * 2 * 4] * 2 + [16 * 4] * 2
    assert sizes(*muon(groups, storage=plain, **common)) == [8 * 300 * 4] + [16 * 4] * 2
    own = torch.optim.SGD([matrix, elsewhere], lr=0.1)
    assert sizes(own) == [8 * 300 * 4] * 2

    matrix.grad = torch.ones_like(matrix)
    norm.grad = torch.ones_like(norm)
    small.step()
    assert sizes(small) == []
    held = [tensor.nbytes for tensor in optimizer_tensors([small]) if tensor.ndim]
    assert sorted(held) == sorted([8 * 300, 8 * 2 * 4, 16 * 4] * 2)


@pytest.mark.parametrize(
    "settings, trained, frozen",
    [
        ([], torch.float32, None),
        (["engine.param_dtype=bfloat16"], torch.bfloat16, None),
        (["engine.param_dtype=bfloat16", "engine.compute_dtype=float32"], torch.bfloat16, None),
        (["model.lora.rank=4"], torch.float32, torch.bfloat16),
        (
            ["model.lora.rank=4", "model.lora.dtype=bfloat16", "engine.compute_dtype=float32"],
            torch.bfloat16,
            torch.float32,
        ),
    ],
)
def test_trained_and_frozen_weights_are_stored_in_their_own_dtypes(
    folder, settings, trained, frozen
):
    config = make_config(folder, "engine.compute_dtype=bfloat16", *settings)
    hf, _ = build_model(config, Head.LOG_PROBS)
    dtypes = {True: set(), False: set()}
    for parameter in hf.parameters():
        dtypes[parameter.requires_grad].add(parameter.dtype)
    assert dtypes[True] == {trained}
    assert dtypes[False] == ({frozen} if frozen else set())


OWN = "def own(params, lr, **_): ...\n"


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "settings, dtype, key, remedy",
    [
        (["optim.rounding=nearest"], "bfloat16", "engine.param_dtype", "optim.rounding=stochastic"),
        (["optim.name={file}:own"], "bfloat16", "engine.param_dtype", "engine.param_dtype=float32"),
        (
            ["optim.rounding=nearest", "model.lora.rank=4"],
            "bfloat16",
            "model.lora.dtype",
            "optim.rounding=stochastic",
        ),
        ([], "bfloat16", None, None),
        (["optim.rounding=nearest"], "float32", None, None),
    ],
)
def test_updates_that_rounding_loses_are_reported_with_a_remedy(
    folder, tmp_path, capsys, settings, dtype, key, remedy
):
    (tmp_path / "own.py").write_text(OWN)
    pairs = [pair.format(file=tmp_path / "own.py") for pair in settings]
    config = make_config(folder, "optim.lr=1e-3", *pairs)
    model = nn.Linear(1, 4, dtype=getattr(torch, dtype))
    frozen = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [0.01], [1.0], [2.0]]))
        model.bias.fill_(1.0)
    report_lost_updates(nn.ModuleList([model, frozen]), config, CPU)
    printed = capsys.readouterr().out
    if key is None:
        assert printed == ""
        return
    assert printed.startswith(
        f"{key}=bfloat16: an update of optim.lr=0.001 can change 25.0% of the weights; "
    )
    assert printed.endswith(f"set {remedy}\n")


# -- how layers run --------------------------------------------------------------------------------


def test_layers_are_checkpointed_and_compiled_as_configured(folder, monkeypatch):
    compiled = []

    def note(function, dynamic: bool):
        assert dynamic
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", note)
    for settings, is_checkpointed, is_compiled in (
        (["activation_checkpointing=true", "torch_compile=never"], True, False),
        (["activation_checkpointing=false", "torch_compile=always"], False, True),
        (["activation_checkpointing=false", "torch_compile=auto"], False, False),
    ):
        compiled.clear()
        config = make_config(folder, *(f"engine.{setting}" for setting in settings))
        hf, _ = build_model(config, Head.LOG_PROBS)
        prepare_layers(hf, config, "cpu")
        assert hf.is_gradient_checkpointing == is_checkpointed
        assert len(compiled) == (hf.config.num_hidden_layers if is_compiled else 0)


def test_floats_are_constants_of_compiled_layers(folder, monkeypatch):
    inputs_of_graphs = []

    def record(graph, example_inputs):
        inputs_of_graphs.append(example_inputs)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    lora = ["model.lora.rank=4", "model.lora.alpha=6", "engine.use_remove_padding=false"]
    config = make_config(folder, "engine.torch_compile=always", *lora)
    hf, _ = build_model(config, Head.LOG_PROBS)
    with torch._dynamo.config.patch(specialize_float=False):
        prepare_layers(hf, config, "cpu")
        hf.to_empty(device="cpu")(torch.zeros(1, 8, dtype=torch.long))
    assert inputs_of_graphs
    # A float that is an input is a tensor with a type of its own.
    tensors = [x for inputs in inputs_of_graphs for x in inputs if isinstance(x, Tensor)]
    assert not [x for x in tensors if x.dtype is torch.float64]


@pytest.mark.usefixtures("process_group")
def test_an_engine_prepares_the_layers_of_its_model(folder):
    engine = FSDPEngine(make_config(folder, "engine.activation_checkpointing=true"), CPU, 1)
    assert engine.hf.is_gradient_checkpointing


def test_auto_compiles_on_gpus_alone(folder):
    auto, always, never = (
        make_config(folder, f"engine.torch_compile={value}").engine
        for value in ("auto", "always", "never")
    )
    assert [uses_compile(auto, device) for device in ("cuda", "npu", "cpu")] == [True, False, False]
    assert uses_compile(always, "cpu")
    assert not uses_compile(never, "cuda")


@pytest.mark.parametrize(
    "rank, head, expected",
    [
        (4, Head.VALUES, {"q_proj", "lm_head"}),
        (4, Head.LOG_PROBS, {"q_proj"}),
        (0, Head.VALUES, set()),
    ],
)
def test_a_value_head_is_trained_and_saved_with_adapters(folder, rank, head, expected):
    targets = ["model.lora.target_modules=[q_proj]"] if rank else []
    config = make_config(folder, f"model.lora.rank={rank}", *targets)
    hf, layers = build_model(config, head)
    hf.to_empty(device="cpu")
    names = [name for name, _ in ModelState(hf, layers, config, CPU).adapter()]
    assert {name.split(".lora_")[0].removesuffix(".weight").split(".")[-1] for name in names} == (
        expected
    )
    if rank:
        trained = [name for name, p in hf.named_parameters() if p.requires_grad]
        assert len(trained) == len(names)
