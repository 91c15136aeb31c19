"""Training and evaluation in every layout, against a plain loop around transformers."""

import math
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from engines import optimizer
from engines.fsdp.engine import FSDPEngine
from engines.model.hf import build_on_meta, read_hf_config
from tests.engines.fsdp.cases import (
    AUTO,
    AUX,
    BF16,
    COMPILED,
    CP2,
    CP4,
    FREEZE,
    FREEZE_SETTING,
    MASTER,
    OFFLOAD,
    ONCE,
    PADDED,
    RECOMPUTE,
    ZERO2,
    answers_of,
    build,
    make_config,
    on_ranks,
    register,
    token_cap,
    train,
    worker_case,
)
from tests.engines.fsdp.model_files import rewrite_weights
from tests.support.cases import case_params, needs
from tests.support.guarded import guarded_once
from tests.support.models import make_model
from tests.support.plain import (
    FEW,
    LOSS_BOUND,
    MORE,
    NORM_BOUND,
    WEIGHT_BOUND,
    PlainTraining,
    check_answers,
    column,
    learning_rate,
    plain_answers,
    plain_training,
    worst,
)
from tests.support.training import (
    CLIP,
    LONGEST,
    TOTAL_STEPS,
    digest,
    divide,
    gather,
    make_batch,
    share_of,
)

# torch's Muon orthogonalizes in bfloat16, in which a rounding error of a gradient now and then
# flips a bit. Adam makes a whole step of a rounding error in a gradient that is next to nothing, as
# some in experts are.
MUON_FACTOR = 50
EXPERTS_FACTOR = 5


@dataclass
class Case:
    """Train a model for `steps` steps.

    engine: settings of the engine, separated by spaces. cap: tokens of a micro-batch.
    uneven: see divide(). lora: with the adapter beside the model. freeze: without what FREEZE
    matches.
    """

    family: str
    engine: str = ""
    steps: int = FEW
    cap: int = 60
    uneven: bool = False
    optimizer: str = "adamw"
    lora: bool = False
    freeze: bool = False

    @property
    def is_rounded(self) -> bool:
        return "bfloat16" in self.engine

    @property
    def has_router_loss(self) -> bool:
        return AUX in self.engine or self.family == "qwen3_moe_balanced"

    @property
    def arrangement(self) -> frozenset[str]:
        """What decides which tokens a layer sees, and how layers are divided."""
        return frozenset(self.engine.split()) - {AUX, OFFLOAD, ZERO2, RECOMPUTE}

    @property
    def cp(self) -> int | None:
        """Context-parallel ranks; None: chosen per batch."""
        settings = dict(setting.split("=") for setting in self.engine.split())
        cp = settings.get("context_parallel_size", "1")
        return None if cp == "auto" else int(cp)

    @property
    def bound_factor(self) -> int:
        if self.optimizer == "muon":
            return MUON_FACTOR
        return EXPERTS_FACTOR if self.family == "qwen3_moe" else 1

    def plain_training(self, folder: Path) -> PlainTraining:
        """Train the same model in a plain loop."""
        freeze = FREEZE if self.freeze else ()
        num_steps = max(self.steps, MORE)
        has_muon = self.optimizer == "muon"
        return plain_training(folder / self.family, has_muon, self.lora, freeze, num_steps)


ALONE = {
    "plain qwen2_tied": Case("qwen2_tied", steps=MORE),
    "plain qwen3": Case("qwen3", steps=MORE),
    "plain llama": Case("llama", steps=TOTAL_STEPS),
    "again qwen3": Case("qwen3"),
    "one micro-batch": Case("llama", cap=1000),
    "padded": Case("qwen2_tied", PADDED),
    "recompute": Case("llama", RECOMPUTE),
    "offload": Case("qwen3", OFFLOAD),
    "sliding window": Case("sliding"),
    "padded sliding window": Case("sliding", PADDED),
    "compiled": Case("llama", COMPILED, steps=4),
    "fp32 master": Case("qwen3", MASTER),
    "pure bf16": Case("qwen3", BF16),
    "muon": Case("llama", optimizer="muon"),
    "frozen": Case("llama", RECOMPUTE, freeze=True),
    "experts": Case("qwen3_moe"),
    "experts bf16": Case("qwen3_moe", MASTER),
    "experts aux padded recompute": Case("qwen3_moe", f"{AUX} {PADDED} {RECOMPUTE}", steps=1),
    "experts aux of config.json": Case("qwen3_moe_balanced", steps=1),
    "lora": Case("qwen2_tied", steps=MORE, lora=True),
    "lora recompute": Case("llama", RECOMPUTE, lora=True),
    "lora bf16": Case("qwen3", MASTER, lora=True),
}
TWO_RANKS = {
    "plain qwen2_tied": Case("qwen2_tied", steps=MORE),
    "plain qwen3": Case("qwen3", steps=MORE),
    "plain llama": Case("llama", steps=MORE),
    "again qwen3": Case("qwen3"),
    "one micro-batch": Case("qwen3", cap=1000),
    "padded": Case("llama", PADDED),
    "recompute": Case("qwen2_tied", RECOMPUTE),
    "offload": Case("qwen2_tied", OFFLOAD),
    "zero2": Case("qwen3", ZERO2),
    "zero2 once": Case("llama", f"{ZERO2} {ONCE}"),
    "recompute once": Case("qwen2_tied", f"{RECOMPUTE} {ONCE}"),
    "cp2": Case("qwen3", CP2),
    "uneven": Case("llama", uneven=True),
    "uneven padded": Case("qwen3", PADDED, uneven=True),
    "fp32 master": Case("llama", MASTER),
    "pure bf16": Case("llama", BF16),
    "muon offload": Case("qwen2_tied", OFFLOAD, optimizer="muon"),
    "frozen recompute": Case("llama", RECOMPUTE, freeze=True),
    "frozen muon": Case("llama", ZERO2, optimizer="muon", freeze=True),
    "experts cp2 recompute": Case("qwen3_moe", f"{CP2} {RECOMPUTE}"),
    "experts aux uneven": Case("qwen3_moe", AUX, steps=1, uneven=True),
    "lora padded": Case("qwen2_tied", PADDED, lora=True),
    "lora offload": Case("qwen3", OFFLOAD, lora=True),
    "lora replicated": Case("qwen3", "fsdp_size=1", lora=True),
    "lora cp2": Case("llama", CP2, lora=True),
    "auto": Case("qwen3", AUTO, cap=24),
    "auto padded": Case("qwen2_tied", f"{AUTO} {PADDED}", cap=24),
    "auto without heads for two": Case("three_heads", f"{AUTO} {RECOMPUTE}", cap=24),
    "cp2 padded": Case("llama", f"{CP2} {PADDED}"),
    "auto lora": Case("llama", AUTO, cap=24, lora=True),
    "auto experts aux": Case("qwen3_moe", f"{AUTO} {AUX}", 1, cap=24),
    "apertus": Case("apertus"),
    "lfm2 padded": Case("lfm2", PADDED),
    "lfm2": Case("lfm2"),
}
FOUR_RANKS = {
    "plain qwen2_tied": Case("qwen2_tied"),
    "plain llama": Case("llama", steps=MORE),
    "uneven": Case("qwen2_tied", uneven=True),
    "hybrid": Case("qwen3", "fsdp_size=2"),
    "hybrid cp2": Case("llama", f"fsdp_size=2 {CP2}"),
    "cp4": Case("llama", CP4, MORE, cap=90),
    "cp2 dp2": Case("qwen2_tied", CP2),
    "again cp2 dp2": Case("qwen2_tied", CP2),
    "sliding window cp2": Case("sliding", CP2),
    "uneven cp2 dp2": Case("qwen3", f"{CP2} {RECOMPUTE}", cap=90, uneven=True),
    "fp32 master cp2": Case("qwen2_tied", f"{MASTER} {CP2}"),
    "muon hybrid": Case("llama", "fsdp_size=2", optimizer="muon"),
    "experts aux cp2 dp2": Case("qwen3_moe", f"{AUX} {CP2}", steps=1),
    "auto": Case("llama", AUTO, cap=12),
    "auto hybrid": Case("qwen2_tied", f"{AUTO} fsdp_size=2", cap=24),
    "auto padded": Case("qwen3", f"{AUTO} {PADDED} {RECOMPUTE}", cap=16),
    "auto sliding window": Case("sliding", AUTO, cap=16),
    "auto without heads for two": Case("three_heads", AUTO, cap=12),
    "again auto": Case("llama", AUTO, cap=12),
    "auto bf16": Case("qwen2_tied", f"{MASTER} {AUTO}", cap=16),
    "lora hybrid cp2": Case("qwen3", f"fsdp_size=2 {CP2} {RECOMPUTE}", lora=True),
}
# A CPU compiles these for minutes, so only tests/on_cuda.py runs them: layers are compiled on CUDA.
ON_CUDA = {
    "experts aux compiled": Case("qwen3_moe", f"{AUX} {COMPILED}", steps=1),
    "lora compiled": Case("llama", COMPILED, steps=4, lora=True),
}
CASES = {
    **{(1, name): case for name, case in ALONE.items()},
    **{(2, name): case for name, case in TWO_RANKS.items()},
    **{(4, name): case for name, case in FOUR_RANKS.items()},
}
EXACT = [key for key, case in CASES.items() if not case.is_rounded and not case.has_router_loss]
ROUNDED = [key for key, case in CASES.items() if case.is_rounded]
FROZEN = [key for key, case in CASES.items() if case.freeze]
BALANCED = [key for key, case in CASES.items() if case.has_router_loss]
DYNAMIC = [key for key, case in CASES.items() if case.cp is None]


def run_case(folder: Path, device: torch.device, key: tuple[int, str], case: Case) -> dict:
    """Train and evaluate; rank 0 writes weights and answers to "{ranks} {name}.safetensors"."""
    num_ranks, name = key
    try:
        return train_and_evaluate(folder, device, f"{num_ranks} {name}", case)
    except Exception:
        if num_ranks > 1:  # the other ranks would wait for this one
            raise
        return {"error": traceback.format_exc()}


def train_and_evaluate(folder: Path, device: torch.device, title: str, case: Case) -> dict:
    settings = [*token_cap(case.cap), f"optim.name={case.optimizer}"]
    if case.freeze:
        settings.append(FREEZE_SETTING)
    with guarded_once(case.family, case.arrangement):
        engine = build(folder / case.family, device, case.engine, settings, case.lora)
    calls = count_calls(engine)
    result = {
        **micro_batches_of_first_step(engine, case),
        "steps": train(engine, range(case.steps), case.uneven),
        "attention_calls": len(calls),
        "stored_dtypes": sorted({str(p.dtype) for p in engine.hf.parameters()}),
        "trained": [name for name, p in engine.hf.named_parameters() if p.requires_grad],
        "states": sum(len(each.state) for each in engine.optimizers),
    }
    weights = dict(engine.export_weights())
    answers = answers_of(engine, case.uneven)
    if torch.distributed.get_rank() == 0:
        save_file({"asked": answers, **weights}, folder / f"{title}.safetensors")
    return result | {"digests": gather(digest(weights))}


def micro_batches_of_first_step(engine: FSDPEngine, case: Case) -> dict:
    """Return the micro-batches of all ranks as numbers of sequences, and the sizes of groups."""
    sequences, micro_batches = share_of(engine, make_batch(0).lengths, case.uneven)
    mine = []
    for _, members in micro_batches:
        mine.append([sequences[i] for i in members])
    by_dp_rank = dict(gather((engine.dp_rank, mine)))
    parts = set()
    for plan in by_dp_rank.values():
        parts |= {tuple(part) for part in plan if part}
    sizes = set()
    for plan in gather(micro_batches):
        sizes |= {size for size, members in plan if members}
    return {"micro-batches of the first step": [*parts], "sizes of groups": sorted(sizes)}


def count_calls(engine: FSDPEngine) -> list:
    """Return a list that grows with each call of the first layer's attention or convolution."""
    calls = []
    first_layer = engine.hf.base_model.layers[0]
    next(first_layer.children()).register_forward_hook(lambda *_: calls.append(None))
    return calls


for key, case in [*CASES.items(), *(((1, name), case) for name, case in ON_CUDA.items())]:
    register(partial(run_case, key=key, case=case), key[1], [key[0]])


def result_of(results, world, name) -> dict:
    result = results(world)[name]
    assert "error" not in result, result["error"]
    return result


# -- against the plain loop ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world, name", case_params(EXACT))
def test_training_equals_a_plain_loop(results, folder, world, name):
    case = CASES[world, name]
    result = result_of(results, world, name)
    plain = case.plain_training(folder)
    steps = result["steps"]
    factor = case.bound_factor
    assert len(steps) == case.steps
    assert worst(column(steps, "loss"), plain.losses[: case.steps]) < LOSS_BOUND * factor
    assert worst(column(steps, "grad_norm"), plain.norms[: case.steps]) < NORM_BOUND * factor
    rates = [learning_rate(step) for step in range(case.steps)]
    assert column(steps, "lr") == pytest.approx(rates, rel=1e-12)
    assert set(column(steps, "skipped")) == {0.0}
    assert len(set(result["digests"])) == 1, "ranks export different weights"
    if case.steps in plain.weights:
        expected = plain.weights[case.steps]
        exported = load_file(folder / f"{world} {name}.safetensors")
        assert set(exported) - {"asked"} == set(expected)
        errors = [(exported[n] - weight).abs().max().item() for n, weight in expected.items()]
        assert max(errors) < WEIGHT_BOUND * factor


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3", "llama", "sliding"])
def test_the_plain_loop_could_tell(folder, family):
    """The comparison above could fail: losses fall, steps are clipped, and weights move."""
    plain = plain_training(folder / family)
    same_batch = (MORE - 1) % 4
    assert plain.losses[-1] < 0.9 * plain.losses[same_batch]
    assert min(plain.norms) > CLIP
    before = load_file(folder / family / "model.safetensors")
    for after in plain.weights.values():
        moved = [(weight - before[name]).abs().max().item() for name, weight in after.items()]
        assert min(moved) > 100 * WEIGHT_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("world, name", case_params(EXACT))
def test_log_probs_equal_transformers(results, folder, world, name):
    case = CASES[world, name]
    result_of(results, world, name)
    weights = load_file(folder / f"{world} {name}.safetensors")
    answers = weights.pop("asked")
    expected = plain_answers(folder / case.family, weights)
    check_answers(answers, expected, case.cp, case.uneven)
    if case.steps == TOTAL_STEPS:
        assert expected[2].sum() > 10, "too few greedy tokens to tell"


@pytest.mark.slow
@pytest.mark.parametrize("world, name", case_params(ROUNDED))
def test_bfloat16_is_near(results, folder, world, name):
    case = CASES[world, name]
    result = result_of(results, world, name)
    has_master = "param_dtype" not in case.engine
    losses = plain_training(folder / case.family, lora=case.lora).losses[: case.steps]
    error = worst(column(result["steps"], "loss"), losses)
    assert 10 * LOSS_BOUND < error < (0.01 if has_master else 0.05)

    dtypes = []
    if case.lora or not has_master:
        dtypes.append("torch.bfloat16")
    if has_master:
        dtypes.append("torch.float32")
    assert result["stored_dtypes"] == dtypes
    exported = load_file(folder / f"{world} {name}.safetensors")
    del exported["asked"]
    assert {x.dtype for x in exported.values()} == {torch.bfloat16}


# -- layouts ---------------------------------------------------------------------------------------

REPEATED = [
    (1, "again qwen3", "plain qwen3"),
    (2, "again qwen3", "plain qwen3"),
    (4, "again cp2 dp2", "cp2 dp2"),
    (4, "again auto", "auto"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, again, once",
    [pytest.param(*case, marks=needs((case[0], case[1]), (case[0], case[2]))) for case in REPEATED],
)
def test_same_layout_same_bits(results, world, again, once):
    steps = results(world)[again]["steps"]
    assert steps == results(world)[once]["steps"][: len(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("world, name", case_params(DYNAMIC))
def test_long_sequences_are_shared_and_short_ones_are_not(results, world, name):
    """Where a rank has room for less than the longest sequence."""
    case = CASES[world, name]
    sizes = result_of(results, world, name)["sizes of groups"]
    needed = 1 << math.ceil(math.log2(LONGEST / case.cap))
    assert max(sizes) >= needed
    assert 1 in sizes or case.cap < LONGEST / 2


def calls_per_step(result) -> float:
    return result["attention_calls"] / len(result["steps"])


@pytest.mark.slow
@needs((2, "recompute"), (2, "plain qwen2_tied"))
def test_recomputation_happens(results):
    plain = results(2)["plain qwen2_tied"]
    assert calls_per_step(results(2)["recompute"]) == 2 * calls_per_step(plain)


@pytest.mark.slow
@needs((1, "one micro-batch"), (1, "plain llama"))
def test_micro_batches_happen(results):
    assert calls_per_step(results(1)["one micro-batch"]) == 1
    assert calls_per_step(results(1)["plain llama"]) >= 2


@worker_case(2, 4)
def first_ratio(folder: Path, device: torch.device) -> float:
    """Return how far log-probabilities in the first update are from those computed before it."""
    engine = build(folder / "qwen3", device, AUTO, token_cap(24))
    batch = make_batch(0)
    sequences, micro_batches = share_of(engine, batch.lengths)
    share = batch.select(sequences)
    share.fields["before"] = engine.log_probs(share, micro_batches)[0].cpu()
    distances = []

    def loss_fn(log_probs, entropy, fields):
        if len(log_probs):
            distances.append((log_probs - fields["before"]).abs().max().item())
        else:
            distances.append(0.0)
        return log_probs.sum(), {}

    engine.train_batch(share, loss_fn, 0, micro_batches)
    return max(gather(max(distances)))


@pytest.mark.slow
@on_ranks("first_ratio", 2, 4)
def test_the_first_ratio_is_1_where_ranks_share_some_sequences(results, world):
    assert results(world)["first_ratio"] == 0


# -- steps that are skipped, and what is not decayed -----------------------------------------------


@worker_case(1, 2)
def non_finite(folder: Path, device: torch.device) -> dict:
    """Take steps 0 1 2 3, with a NaN in step 2 of rank 0; and 0 1 3."""
    engine = build(folder / "qwen3", device)
    before = train(engine, range(2))
    state = digest(engine.state())
    batch = make_batch(2)
    share = batch.select(divide(batch.lengths, engine.dp_size, False)[engine.dp_rank])
    # In every micro-batch of this rank alone.
    poison = torch.nan if torch.distributed.get_rank() == 0 else 1.0
    poisoned = engine.train_batch(share, lambda log_probs, *_: (log_probs.sum() * poison, {}), 2)
    untouched = gather(digest(engine.state()) == state)
    return {
        "poisoned": poisoned,
        "untouched": untouched,
        "with_nan": before + train(engine, [3]),
        "without": train(build(folder / "qwen3", device), [0, 1, 3]),
    }


@pytest.mark.slow
@on_ranks("non_finite", 1, 2)
def test_non_finite_gradient_is_skipped(results, world):
    result = results(world)["non_finite"]
    assert result["poisoned"]["skipped"] == 1.0
    assert not math.isfinite(result["poisoned"]["grad_norm"])
    assert result["untouched"] == [True] * world
    assert result["with_nan"] == result["without"]
    assert result["without"][2]["skipped"] == 0.0


def test_norms_and_biases_are_not_decayed(folder):
    """Without a gradient AdamW's step is weight decay alone."""
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen2_tied", dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    settings = make_config(folder, "optim.lr=0.1", "optim.weight_decay=0.5")
    (adamw,) = optimizer.build(model, model.model.layers, settings)
    adamw.step()
    kept = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert kept == {name for name in before if "norm" in name or name.endswith("bias")}
    assert len(kept) == 3 * 5 + 1
    for name, parameter in model.named_parameters():
        if name not in kept:
            decayed = before[name] * (1 - 0.1 * 0.5)
            torch.testing.assert_close(parameter.detach(), decayed)


def test_a_token_called_padding_is_learned_like_others(folder, tmp_path):
    """Packed sequences hold it as a word; transformers would never update its row."""
    make_model(tmp_path, "qwen3", pad_token_id=5)
    hf_config = read_hf_config(tmp_path)
    theirs = AutoModelForCausalLM.from_config(hf_config)
    ours: nn.Module = build_on_meta(hf_config, torch.float32)
    assert theirs.get_input_embeddings().padding_idx == 5
    assert ours.get_input_embeddings().padding_idx is None


@pytest.mark.slow
def test_rows_of_zeros_are_learned_as_in_transformers(tmp_path):
    """All but the padding token's, which transformers does not learn either."""
    model = make_model(tmp_path, "llama")
    zeros = [5, 7, 50]  # 5 is the padding token

    def with_zeros(name, weight):
        if name == "model.embed_tokens.weight":
            weight[zeros] = 0
        return name, weight

    rewrite_weights(model, with_zeros)
    expected = plain_training(model).weights[FEW]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine = build(model, torch.device("cpu"))
        train(engine, range(FEW))
        learned = dict(engine.export_weights())
    finally:
        dist.destroy_process_group()
    rows = learned["model.embed_tokens.weight"][zeros]
    assert rows[0].norm() == 0
    assert rows[1:].norm(dim=1).min() > 1e-3
    torch.testing.assert_close(rows, expected["model.embed_tokens.weight"][zeros])
