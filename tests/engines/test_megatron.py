"""The Megatron engine on 1, 2 and 4 ranks against the FSDP2 engine on one, in fp32, and what it refuses; mixtures of
experts, which FSDP2 has none of, against a plain loop around transformers.

All layouts of one world size share one launch of megatron_worker.py. Bounds: 1e-5 of the largest value.
"""

import json
import math
import re
from functools import cache

import peft
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from config import InputError, load
from engines import schedule
from engines.checkpoint.export import export_checkpoint
from engines.fsdp.engine import FSDPEngine
from engines.megatron.distributed_optimizer import ddp_config
from engines.megatron.engine import MegatronEngine
from engines.megatron.mapping import Mapping
from engines.memory import checkpoint_bytes, estimate_megatron
from engines.model import lora
from engines.model.flops import count_flops
from engines.model.hf import build_on_meta, read_hf_config
from job.progress import Progress
from job.resume import find_resume
from tests.engines.megatron_worker import (
    AUTO,
    AUX,
    BF16,
    BUCKETS,
    CASES,
    CP2,
    EP2,
    FEW,
    FULL,
    LORA,
    NO_SP,
    OVERLAP,
    PP2,
    REPLICATED,
    RESUMES,
    SAVED_AT,
    SELECTIVE,
    TOTAL_STEPS,
    TP2,
    VPP2,
    Case,
    keys,
    value_loss,
)
from tests.support.launch import LONG_LIMIT, export, launch
from tests.support.models import make_model
from tests.support.plain import check_answers, column, plain_answers, tensor_bytes, worst
from tests.support.training import (
    BETAS,
    CLIP,
    SETTINGS,
    WEIGHT_DECAY,
    kept_logits,
    make_batch,
    make_loss,
)
from tests.support.traps import TRAPS

BOUND, ROUNDED_BOUND = 1e-5, 0.02
WHOLE = [[list(range(len(make_batch(0))))]]  # a step of one micro-batch
# Adam makes a whole step of a rounding error in a gradient that is next to nothing, as some in experts are.
EXPERTS_BOUND = 1e-4
FAMILIES = ("qwen2_tied", "qwen3", "llama")
ALL = [(world, name) for world in CASES for name in CASES[world]]
EXACT = [
    (world, name)
    for world, name in ALL
    if BF16 not in CASES[world][name].engine and not CASES[world][name].lora
]
LORA_EXACT, LORA_ROUNDED = (
    [
        (world, name)
        for world, name in ALL
        if (BF16 in CASES[world][name].engine) is rounded and CASES[world][name].lora
    ]
    for rounded in (False, True)
)
DENSE, PLAIN = (
    [(world, name) for world, name in EXACT if CASES[world][name].plain is plain]
    for plain in (False, True)
)
POLICIES = [(world, name) for world, name in DENSE if not CASES[world][name].critic]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    for family in FAMILIES:
        make_model(folder / family, family, num_hidden_layers=4)
    for family in ("mistral", "llama_yarn", "qwen3_windows", "mixtral"):
        make_model(folder / family, family)
    make_model(folder / "qwen3_moe", "qwen3_moe", num_hidden_layers=4)
    make_model(
        folder / "qwen3_moe_raw",
        "qwen3_moe",
        num_hidden_layers=4,
        norm_topk_prob=False,
        output_router_logits=True,
        router_aux_loss_coef=0.4,
    )  # of 3 choices in 4 layers, which is 0.3 of Megatron's sum
    for name in ("no_files", "missing_weight", "wrong_shape"):
        make_model(folder / name, "llama", num_hidden_layers=4)
        file = folder / name / "model.safetensors"
        weights = load_file(file)
        if name == "missing_weight":
            del weights["model.norm.weight"]
        if name == "wrong_shape":
            weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()
        file.unlink() if name == "no_files" else save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def launches(folder):
    """What each launch wrote down; 4 ranks and 1 read checkpoints of those before them."""
    for num_ranks in (2, 4, 1):
        launch(
            num_ranks, "tests/engines/megatron_worker.py", folder, timeout=LONG_LIMIT, fresh=True
        )
    return {
        num_ranks: json.loads((folder / f"{num_ranks}.json").read_text()) for num_ranks in (1, 2, 4)
    }


def reference(launches, case):
    return launches[1][f"reference {case.family}" + " critic" * case.critic]


# -- the same results as FSDP2 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world, name", DENSE)
def test_training_equals_fsdp(launches, folder, world, name):
    case, result = CASES[world][name], launches[world][name]
    want = reference(launches, case)
    steps = want["steps"][: case.steps]
    for key in ("loss", "entropy", "grad_norm", "lr"):
        assert worst(column(result["steps"], key), column(steps, key)) < BOUND, key
    assert set(column(result["steps"], "skipped")) == {0.0} and result["flops"] == want["flops"]

    if len(steps) == len(want["steps"]):
        title = f"1 reference {case.family}" + " critic" * case.critic
        got, weights = (load_file(folder / f"{t}.safetensors") for t in (f"{world} {name}", title))
        assert got.keys() == weights.keys()
        for key in weights.keys() - {"asked"}:
            assert distance(got[key], weights[key]) < BOUND, key


def distance(got, want):
    """Of two tensors, relative to the norm of the second."""
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_could_tell(launches, folder, family):
    """What the comparison rests on: the loss falls, steps are clipped, weights move much further than the bound."""
    steps = launches[1][f"reference {family}"]["steps"]
    assert (
        steps[-1]["loss"] < 0.95 * steps[(TOTAL_STEPS - 1) % 4]["loss"]
        and min(column(steps, "grad_norm")) > 0.5
    )
    after = load_file(folder / f"1 reference {family}.safetensors")
    before = load_file(folder / family / "model.safetensors")
    assert min(distance(after[n], w) for n, w in before.items()) > 100 * BOUND


@pytest.mark.parametrize("world, name", ALL)
def test_export_is_complete_and_the_same_on_all_ranks(launches, folder, world, name):
    case, result = CASES[world][name], launches[world][name]
    assert len(set(result["digests"])) == 1 and all(
        names == result["names"][0] for names in result["names"]
    )
    files = load_file(folder / case.family / "model.safetensors")
    exported = load_file(folder / f"{world} {name}.safetensors")
    del exported["asked"]
    shapes = {n: w.shape for n, w in files.items()} | (
        {"lm_head.weight": torch.Size([1, 32])} if case.critic else {}
    )
    assert {n: w.shape for n, w in exported.items()} == shapes and len(result["names"][0]) == len(
        shapes
    )
    assert {w.dtype for w in exported.values()} == {
        torch.bfloat16 if BF16 in case.engine else torch.float32
    }


@pytest.mark.parametrize("world, name", POLICIES)
def test_every_rank_gets_log_probs(launches, folder, world, name):
    """Of its own share, as transformers computes them from the exported weights."""
    case, weights = CASES[world][name], load_file(folder / f"{world} {name}.safetensors")
    asked = weights.pop("asked")
    check_answers_by_dp_rank(asked, plain_answers(folder / case.family, weights), case, world)


def check_answers_by_dp_rank(asked, want, case, world):
    sizes = dict(pair.split("=") for pair in case.engine.split())
    inner = None
    if AUTO not in case.engine:
        inner = math.prod(
            int(sizes.get(f"{kind}_parallel_size", 1)) for kind in ("tensor_model", "context")
        )
    outer = int(sizes.get("pipeline_model_parallel_size", 1))
    for stage in asked.chunk(outer):  # ranks: tensor, context, data, pipeline, the first fastest
        check_answers(stage, want, inner, case.uneven)


@pytest.mark.parametrize("world, name", [(w, n) for w, n in DENSE if CASES[w][n].critic])
def test_every_rank_gets_values(launches, folder, world, name):
    case = CASES[world][name]
    want = load_file(folder / f"1 reference {case.family} critic.safetensors")["asked"][0, 0]
    asked = load_file(folder / f"{world} {name}.safetensors")["asked"][:, 0]
    assert not asked.isnan().all(0).any() and (
        asked.isnan().any() == (AUTO in case.engine)
    )  # NaN: another rank's
    assert (asked - want).nan_to_num().abs().max() < 1e-4 and (want != 0).sum() > 100


@pytest.mark.parametrize(
    "world, name",
    [
        (w, n)
        for w, n in ALL
        if BF16 in CASES[w][n].engine and not (CASES[w][n].moe or CASES[w][n].lora)
    ],
)
def test_bfloat16_is_near(launches, world, name):
    """bf16 weights with fp32 masters: off by rounding, and not by more after some steps."""
    steps, want = launches[world][name]["steps"], launches[1]["reference qwen3"]["steps"]
    assert len(steps) == FEW
    assert 10 * BOUND < worst(column(steps, "loss"), column(want[:FEW], "loss")) < ROUNDED_BOUND
    assert worst(column(steps, "grad_norm"), column(want[:FEW], "grad_norm")) < 5 * ROUNDED_BOUND


@pytest.mark.parametrize(
    "world, name", [(world, name) for world, name in ALL if AUTO in CASES[world][name].engine]
)
def test_groups_of_ranks_are_of_the_size_that_sequences_need(launches, world, name):
    """Of one rank where that is enough, and of all there are beside model parallelism for the longest."""
    ranks = world // (1 + (TP2 in CASES[world][name].engine or PP2 in CASES[world][name].engine))
    assert launches[world][name]["sizes of groups"] == [size for size in (1, 2, 4) if size <= ranks]


def test_the_same_bits_again(launches):
    first, again = (launches[4][name] for name in ("auto", "auto again"))
    assert first == again


@pytest.mark.parametrize("world", CASES)
def test_packed_attention_equals_each_sequence_alone(launches, world):
    assert max(launches[world]["attention"]) < BOUND


def test_sequences_that_leak_into_others_are_found(launches):
    told = launches[2]["guarded"]
    assert told.keys() == {"", "tensor", "pipeline", "virtual", "context", "critic"}
    for name, said in told.items():
        help = (
            "engine.context_parallel_size=1"
            if name == "context"
            else "engine.use_remove_padding=false"
        )
        assert said is not None and len(said) == 2, name
        assert all(
            "one at a time differ, first in layer 0 of 0 to 3: by" in line
            and f"set {help}" in line
            for line in said
        ), said


# -- mixtures of experts -----------------------------------------------------------------------------------------------


def plain_training(directory, case, micro_batches):
    """(loss, gradient norm and auxiliary loss of each step; final weights; answers to batch 0 (asked), [T]) of a loop around
    transformers. The auxiliary loss: of each layer's choices in each micro-batch, transformers' divided by the number of
    choices of a token, weighted by the micro-batch's tokens."""
    config = load(
        "sft.yaml", ["model_engine=megatron", "model.path=unused", *SETTINGS, *keys(case.engine)]
    )
    model, optim = (
        AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        ),
        config.optim,
    )
    shape, coefficient, experts = (
        model.config,
        0.3 if case.aux else 0.0,
        {"output_router_logits": True} if case.moe else {},
    )
    for name, p in model.named_parameters():
        p.requires_grad_(not any(re.search(pattern, name) for pattern in config.model.freeze))
    if case.lora:
        put_adapters(model, config)
    if case.critic:
        model.lm_head = torch.nn.Linear(shape.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(model.lm_head.weight)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {
            "params": [
                p for n, p in named.items() if ("norm" in n or n.endswith("bias")) is spared
            ],
            "weight_decay": 0.0 if spared else WEIGHT_DECAY,
        }
        for spared in (False, True)
    ]
    optimizer, steps = torch.optim.AdamW(groups, betas=BETAS, eps=optim.eps, foreach=False), []

    def answer(sequence):
        """log-probabilities (a critic: values) and entropies behind a first 0, each [n], and the layers' router logits"""
        out = model(sequence.input_ids[None], use_cache=False, **experts)
        logits, targets = (
            (out.logits[0, :-1], None)
            if case.critic
            else kept_logits(out.logits[0, :-1], sequence, slice(1, None))
        )
        log_p = logits.log_softmax(-1)
        answers = (
            [logits[:, 0]]
            if case.critic
            else [log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
        )
        return [F.pad(x, (1, 0)) for x in answers], out.router_logits if case.moe else ()

    for step, parts in enumerate(micro_batches):
        batch, result = make_batch(step), dict.fromkeys(("loss", "entropy", "router_aux_loss"), 0.0)
        num_tokens = len(batch.input_ids)
        loss_fn = value_loss(num_tokens) if case.critic else make_loss(num_tokens)
        for part in (part for part in parts if part):
            loss, aux_loss, router_logits = 0.0, 0.0, []
            for i in part:
                sequence = batch.select([i])
                answers, logits = answer(sequence)
                mask = (sequence.fields["loss_mask"] * (sequence.position_ids > 0)).bool()
                term, extra = loss_fn(*(x * mask for x in answers), sequence.fields)
                loss, result["entropy"] = loss + term, result["entropy"] + extra["entropy"].item()
                router_logits.append(logits)
            for layer in map(torch.cat, zip(*router_logits)):  # none without experts
                aux_loss += (
                    load_balancing_loss_func((layer,), shape.num_experts, shape.num_experts_per_tok)
                    / shape.num_experts_per_tok
                    * len(layer)
                    / num_tokens
                )
            (loss + coefficient * aux_loss).backward()
            result["loss"] += loss.item()
            result["router_aux_loss"] += (
                float(torch.as_tensor(aux_loss).detach()) / shape.num_hidden_layers
            )
        result["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(optim, step, TOTAL_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(result)
    batch = make_batch(0)
    with torch.no_grad():
        asked = torch.cat([answer(batch.select([i]))[0][0] for i in range(len(batch))])
    in_files = Mapping(shape).hf_parameters(model)
    return (
        steps,
        {
            name.replace(".default", ""): x.detach()
            for name, x in in_files
            if x.requires_grad or not case.lora
        },
        asked,
    )


def put_adapters(model, config):
    """PEFT's, which begin as the engine's do."""
    settings = OmegaConf.to_container(config.model.lora)
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=settings["rank"],
            lora_alpha=settings["alpha"],
            target_modules=settings["target_modules"],
        ),
        model,
    )
    for name, p in model.named_parameters():
        p.requires_grad_(".lora_" in name)
        if p.requires_grad:
            p.data.copy_(lora.initial(name.replace(".default", ""), p.shape, config.trainer.seed))


@pytest.mark.parametrize(
    "world, name",
    [(world, name) for world, name in ALL if "model.freeze" in CASES[world][name].engine],
)
def test_frozen_parameters_stay_to_the_bit(launches, folder, world, name):
    """With weight decay, and without optimizer state; all others move."""
    case, after = CASES[world][name], load_file(folder / f"{world} {name}.safetensors")
    before = load_file(folder / case.family / "model.safetensors")
    patterns = config(folder, *keys(case.engine)).model.freeze
    frozen = {n for n in before if any(re.search(pattern, n) for pattern in patterns)}
    if case.critic:
        before["lm_head.weight"] = torch.zeros(1, 32)
        frozen.remove("lm_head.weight")
    assert {n for n, x in before.items() if torch.equal(x, after[n])} == frozen and len(frozen) > 10
    if TP2 not in case.engine:  # which has norms twice
        trained = sum(x.numel() for n, x in before.items() if n not in frozen)
        assert sum(optimizer for *_, optimizer in launches[world][name]["bytes"]) == 8 * trained


@pytest.mark.parametrize("world, name", PLAIN)
def test_training_equals_a_plain_loop(launches, folder, world, name):
    case, result = CASES[world][name], launches[world][name]
    steps, weights, asked = plain_training(
        folder / case.family, case, result.get("micro_batches", WHOLE * case.steps)
    )
    for key in ("loss", "entropy", "grad_norm", *(["router_aux_loss"] if case.aux else [])):
        assert worst(column(result["steps"], key), column(steps, key)) < BOUND, key
    assert ("router_aux_loss" in result["steps"][0]) is case.aux
    got = load_file(folder / f"{world} {name}.safetensors")
    answers = got.pop("asked")[:, 0]
    assert got.keys() == weights.keys()
    bound = EXPERTS_BOUND if case.moe else BOUND
    assert max(distance(got[n], weights[n]) for n in weights) < bound
    assert all((a - asked)[~a.isnan()].abs().max() < bound for a in answers if not a.isnan().all())
    assert sum((~a.isnan()).sum() for a in answers) >= len(asked) and asked.std() > 0.03


# -- adapters ----------------------------------------------------------------------------------------------------------


@cache
def plain_lora(directory, engine, critic, micro_batches):
    case = Case(directory.name, engine, critic=critic)
    return plain_training(directory, case, json.loads(micro_batches) or WHOLE * TOTAL_STEPS)


def lora_reference(folder, case, result):
    settings = " ".join(
        s
        for s in case.engine.split()
        if s.startswith(("model.", "optim.")) and "dtype" not in s or s == AUX
    )
    return plain_lora(
        folder / case.family, settings, case.critic, json.dumps(result.get("micro_batches", []))
    )


@pytest.mark.parametrize("world, name", LORA_EXACT)
def test_training_of_adapters_equals_peft(launches, folder, world, name):
    """What is learned, and that nothing else is: without its adapters the model is the frozen one, to the bit."""
    case, result, title = CASES[world][name], launches[world][name], f"{world} {name}"
    steps, weights, asked = lora_reference(folder, case, result)
    for key in ("loss", "entropy", "grad_norm"):
        assert worst(column(result["steps"], key), column(steps, key)) < BOUND, key
    adapter, merged, base = (
        load_file(folder / f"{title}{kind}.safetensors") for kind in (" adapter", "", " base")
    )
    head = {"lm_head.weight": merged["lm_head.weight"]} if case.critic else {}
    got = adapter | head
    assert (
        got.keys() == weights.keys()
        and max((got[n] - weights[n]).abs().max() for n in weights) < BOUND
    )
    assert min(x.abs().max() for n, x in adapter.items() if "lora_B" in n) > 100 * BOUND, (
        "what the comparison rests on"
    )
    shape = read_hf_config(folder / case.family)
    layers, head_size, attention = (
        x / 6 for x in count_flops(build_on_meta(shape, torch.float32, case.head), shape)
    )
    learned = sum(x.numel() for x in adapter.values())
    assert result["flops"] == 4 * (8 * layers + 4 * head_size) + 6 * (8 * learned + 34 * attention)
    assert (
        len(set(map(str, result["adapter digests"]))) == 1
        and set(result["adapter digests"][0][1]) == adapter.keys()
    )

    files = load_file(folder / case.family / "model.safetensors") | head
    assert base.keys() == files.keys() | {"asked"} == merged.keys() and all(
        torch.equal(base[n], files[n]) for n in files
    )
    for n in files:
        a, b = (
            adapter.get(n.replace(".weight", f".lora_{kind}.weight"), torch.zeros(1, 1))
            for kind in "AB"
        )
        assert (merged[n] - files[n] - 2 * b @ a).abs().max() < 1e-6, n
    for answers in merged["asked"][:, 0]:
        assert (answers - asked).nan_to_num().abs().max() < 1e-4  # NaN: another rank's
    if not (case.moe or case.critic):
        check_answers_by_dp_rank(
            base["asked"], plain_answers(folder / case.family, files), case, world
        )


@pytest.mark.parametrize("world, name", LORA_ROUNDED)
def test_bfloat16_adapters_are_near(launches, folder, world, name):
    case, result = CASES[world][name], launches[world][name]
    steps = lora_reference(folder, case, result)[0][: len(result["steps"])]
    assert (
        10 * BOUND < worst(column(result["steps"], "loss"), column(steps, "loss")) < ROUNDED_BOUND
    )
    assert (
        worst(column(result["steps"], "grad_norm"), column(steps, "grad_norm")) < 5 * ROUNDED_BOUND
    )
    dtype = torch.bfloat16 if "lora.dtype=bfloat16" in case.engine else torch.float32
    adapter = load_file(folder / f"{world} {name} adapter.safetensors")
    assert {x.dtype for x in adapter.values()} == {dtype}


def test_adapters_that_get_no_gradient_are_told(launches):
    """Where the embedding's output needs no gradient, recomputation of the first stage loses its adapters'."""
    lost = launches[2]["adapters"]["lost"]
    assert lost.keys() == {"", PP2, f"{PP2} {VPP2}"}
    assert all(
        "the gradient of every adapter is exactly 0" in text
        for texts in lost.values()
        for text in texts
    )


def test_an_adapter_goes_on_from_files(launches):
    (first, second), others = (
        launches[2]["adapters"]["taken over"][0],
        launches[2]["adapters"]["taken over"][1:],
    )
    assert first == second and others == [[first, second]]


def test_dropout_of_adapters(launches):
    """It changes training, but is the same when a layer is recomputed, and when a run is repeated; with tensor parallelism what is
    whole on every rank stays so; without gradient there is none."""
    result = launches[2]["adapters"]
    one, without = result[TP2]["steps"], launches[2]["lora tp2"]["steps"][:3]
    assert one[0]["loss"] == without[0]["loss"], "B is 0"
    assert all(abs(a["grad_norm"] / b["grad_norm"] - 1) > 0.01 for a, b in zip(one, without))
    assert result["again"] == result[TP2]
    for settings in (TP2, f"{TP2} {NO_SP}"):
        assert column(result[f"{settings} {FULL}"]["steps"], "grad_norm") == pytest.approx(
            column(result[settings]["steps"], "grad_norm"), rel=BOUND
        )
        assert len(set(result[settings]["whole"])) == 1


@pytest.mark.parametrize("settings", ["", CP2, PP2])
def test_ranks_drop_different_units(launches, settings):
    """Data-parallel, context-parallel and pipeline-parallel ranks draw masks of their own."""
    first, second = launches[2]["dropout_masks"][settings]
    assert len(first) == len(second) > 10
    assert len(set(first)) == len(first), "every call draws a mask of its own"
    assert not set(first) & set(second)


def test_auxiliary_loss_makes_a_difference(launches):
    """What the comparison rests on: of the gradient, and of which expert a token goes to."""
    without, with_it = launches[2]["moe dp2"]["steps"], launches[2]["moe ep2"]["steps"]
    assert without[0]["loss"] == pytest.approx(with_it[0]["loss"], rel=BOUND)
    assert abs(without[0]["grad_norm"] / with_it[0]["grad_norm"] - 1) > 0.1
    assert (
        min(column(with_it, "router_aux_loss")) > 1.01
        and with_it[-1]["router_aux_loss"] < with_it[3]["router_aux_loss"]
    )


def test_bfloat16_experts_are_near(launches):
    steps, want = (launches[2][name]["steps"] for name in ("moe bf16 ep2", "moe ep2"))
    for key, bound in (
        ("loss", ROUNDED_BOUND),
        ("router_aux_loss", ROUNDED_BOUND),
        ("grad_norm", 5 * ROUNDED_BOUND),
    ):
        assert 10 * BOUND < worst(column(steps, key), column(want, key)) < bound


def test_vllm_has_the_trainers_experts(launches):
    rounds = launches[2]["rollout"]["rounds"]
    assert (
        len(rounds) == 3
        and max(column(rounds, "gap")) < 1e-4
        and min(column(rounds, "moved")) > 0.1
    )


# -- gradients, memory, checkpoints ------------------------------------------------------------------------------------


def test_collectives_are_those_of_the_setting(launches):
    """Gradients are reduce-scattered and parameters gathered with the distributed optimizer, all-reduced without it."""
    found = launches[2]["collectives"]
    sharded, replicated = found[""], found[REPLICATED]
    assert (
        sharded.count("c10d::reduce_scatter_tensor_coalesced_") == 1
        and "c10d::allreduce_coalesced_" not in sharded
    )
    assert sharded.count("c10d::allgather_into_tensor_coalesced_") == 1
    assert replicated.count("c10d::allreduce_coalesced_") == 1
    assert not any("reduce_scatter" in name or "allgather" in name for name in replicated)
    assert found[f"{REPLICATED} {OVERLAP} {BUCKETS}"].count("c10d::allreduce_coalesced_") > 5


@pytest.mark.parametrize("settings", ["", REPLICATED, BF16])
def test_non_finite_gradient_is_skipped(launches, settings):
    result = launches[2]["non_finite"][settings]
    assert result["poisoned"]["skipped"] == 1.0 and not math.isfinite(
        result["poisoned"]["grad_norm"]
    )
    assert result["untouched"] == [True, True]
    assert result["with_nan"] == result["without"] and result["without"][2]["skipped"] == 0.0


@pytest.mark.parametrize(
    "settings, same",
    [("", "dp2"), (REPLICATED, "dp2 replicated"), (f"{LORA} {REPLICATED}", "lora dp2 replicated")],
)
def test_offload_comes_back_by_itself(launches, settings, same):
    """With DDP's buffers, which hold parameters and gradients, and the optimizer's views of them; a weight sync works without
    DDP's parameter buffer. As much host memory was taken before the first step as is needed later."""
    result = launches[2]["offload"][settings]
    assert max(result["bytes left"]) < 1000 and all(
        before == after > 2 for before, after in result["host memory"]
    )
    assert result["steps"] == launches[2][same]["steps"][:4]
    assert result["num_names"] == len(launches[2][same]["names"][0])
    assert {result["gradients left"] for result in launches[2]["offload"].values()} == {0}, (
        "also where they are copies in fp32"
    )


@pytest.mark.parametrize("name", RESUMES)
def test_resume_on_another_layout(launches, folder, tmp_path, name):
    """With optimizer state: every step is as without interruption."""
    family, (saved_on, settings), (resumed_on, _) = RESUMES[name]
    saved, resumed = launches[saved_on][f"save {name}"], launches[resumed_on][f"resume {name}"]
    assert resumed["progress"].items() >= {"step": SAVED_AT, "export_dtype": "float32"}.items()
    assert len(resumed["steps"]) == SAVED_AT
    shared = min(saved_on, resumed_on)
    assert resumed["random"][:shared] == saved["random"][:shared]
    metadata = FileSystemReader(
        folder / "checkpoints" / name / f"step_{SAVED_AT:08d}" / "weights"
    ).read_metadata()
    dtype = "bfloat16" if BF16 in settings else "float32"
    size = checkpoint_bytes(
        config(
            folder,
            f"model.path={folder / family}",
            f"engine.compute_dtype={dtype}",
            *keys(settings),
        )
    )
    assert size == pytest.approx(tensor_bytes(metadata), rel=0.01), "what a dry run tells"
    bound = ROUNDED_BOUND if BF16 in settings else BOUND
    for key in ("loss", "grad_norm", "lr"):
        assert worst(column(resumed["steps"], key), column(saved["steps"], key)) < bound, key
        if BF16 not in settings and not Case(family, settings).plain and LORA not in settings:
            whole = launches[1][f"reference {family}"]["steps"][SAVED_AT : 2 * SAVED_AT]
            assert worst(column(saved["steps"], key), column(whole, key)) < bound, key
    if "model.freeze" in settings:  # where checkpoints have other names
        export_checkpoint(folder / "checkpoints" / name / f"step_{SAVED_AT:08d}", tmp_path / "hf")
        got, want = (
            load_file(file)
            for file in (tmp_path / "hf/model.safetensors", folder / f"resumed {name}.safetensors")
        )
        assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in got)


def test_background_save_is_of_its_moment_and_appears_complete(launches):
    """As the one in the foreground: three steps of training, which the disk waits for, do not show."""
    result = launches[2]["background"]
    assert result["meanwhile"] == ["None", ["step_00000002.tmp"]], (
        "all that a kill would leave behind"
    )
    for kind in ("foreground", "background"):
        assert (
            result[kind]["restored"] == [True, True] and result[kind]["steps"] == result["steps"]
        ), kind


@pytest.mark.parametrize("trap", TRAPS)
def test_a_checkpoint_that_runs_commands_is_not_loaded(launches, folder, trap):
    told = launches[2]["trapped"][trap]
    assert len(told) == 2 and told[0] == told[1] and "a pickle in it calls posix.system" in told[0]
    assert launches[2]["trapped"][f"{trap} ran"] is False
    if trap == ".metadata":
        checkpoint, mark = (
            folder / "traps" / trap / f"step_{SAVED_AT:08d}",
            folder / "traps" / f"{trap} ran",
        )
        assert (
            "calls posix.system" in export(checkpoint, folder / "traps" / "hf", returncode=2)
            and not mark.exists()
        )
        assert not list((folder / "traps").glob("hf*"))
        FileSystemReader(checkpoint / "weights").read_metadata()
        assert mark.exists(), "a trap that does not work shows nothing"


def test_damage_and_a_full_disk_are_told(launches):
    result = launches[2]["trapped"]
    assert all("weights/__1_0.distcp is not as it was written" in text for text in result["a bit"])
    for kind in ("full_False", "full_True"):
        first, second = result[kind]
        assert (
            first == second
            and f"{kind}/step_00000002.tmp/weights needs" in first
            and result[f"{kind} left"] == []
        )


@pytest.mark.parametrize("world, name", ALL)
def test_estimate_of_memory_is_what_there_is(launches, folder, world, name):
    """Parameters, gradients and optimizer of every rank of every pipeline stage (the last: of their mean)."""
    case, found = CASES[world][name], launches[world][name]["bytes"]
    settings = config(
        folder,
        f"model.path={folder / case.family}",
        "engine.compute_dtype=float32",
        *keys(case.engine),
    )
    stages = estimate_megatron(settings, world, "cpu", "critic" if case.critic else "actor")
    assert len(stages) == len({stage for stage, *_ in found})
    for stage, estimated in enumerate(stages):
        ranks = [sizes for at, *sizes in found if at == stage]
        for parameters, gradients, _ in ranks:
            assert (parameters, gradients) == (estimated["parameters"], estimated["gradients"])
        assert sum(optimizer for *_, optimizer in ranks) / len(ranks) == pytest.approx(
            estimated["optimizer"], rel=1e-12
        )


def test_estimate_of_activations(folder):
    """By what they are divided, and how many micro-batches wait on which stage."""

    def of(world, *settings, family="llama", key="activations"):
        pairs = [
            f"model.path={folder / family}",
            "data.max_tokens_per_micro_batch=8192",
            *(f"engine.{s}" for s in settings),
        ]
        return [stage[key] for stage in estimate_megatron(config(folder, *pairs), world, "cuda")]

    hidden, one = 8192 * 32 * 2, of(1)[0]  # bf16; 4 layers of 32, 48 inside
    in_layer = 8192 * 2 * (4 * 32 + 3 * (32 + 16) + 3 * 48)
    assert one == pytest.approx(4 * in_layer + hidden)
    assert of(1, "recompute=selective") == [one] and of(1, "recompute=full")[0] == pytest.approx(
        in_layer + 5 * hidden
    )
    assert of(2) == [one] and of(2, TP2)[0] == pytest.approx(2 * in_layer + hidden)
    gathered = (
        4 * 4096 * 2 * 1.5 * (16 + 16)
    )  # keys and values of 2.5 tokens for each of a rank's own
    assert of(2, CP2)[0] == pytest.approx(one / 2 + gathered)
    assert of(2, TP2, NO_SP)[0] == pytest.approx(2 * in_layer + 8192 * 2 * 8 * 32 + hidden)
    assert of(2, PP2) == pytest.approx([4 * in_layer, 2 * in_layer + hidden])
    assert of(2, PP2, VPP2) == pytest.approx([5 * in_layer, 3 * in_layer + hidden])
    experts = [of(n, *s, family="qwen3_moe")[0] for n, s in ((1, ()), (2, (EP2,)), (2, (TP2, EP2)))]
    assert experts[0] == experts[1] > experts[2] > experts[0] / 2
    assert (
        of(2, key="optimizer")[0]
        == of(1, key="optimizer")[0] / 2
        == of(2, REPLICATED, key="optimizer")[0] / 2
    )


@pytest.mark.parametrize("world, name", ALL)
def test_forward_runs_again_in_backward_where_activations_are_recomputed(launches, world, name):
    recomputed = any(setting in CASES[world][name].engine for setting in (FULL, SELECTIVE))
    assert set(launches[world][name]["attention passes"]) == {2.0 if recomputed else 1.0}


def test_mappings_are_equal_to_the_bit(launches):
    """Ours and mbridge's; by ours a rank reads what it has, and only that: not the padding of the vocabulary, which is one row of
    32, nor the value head, which begins at zero."""
    for result in launches[2]["bridges"]:
        assert result["equal"] == [True, True], result
        for size, num_read in result["sizes"]:
            assert 0 <= size - num_read <= 3 * 32, result


def test_roles_share_a_process_and_a_checkpoint(launches, folder):
    result = launches[2]["roles"]
    assert result["bare"] == [True, True], "a reference has neither DDP nor an optimizer"
    assert result["saved"] == result["loaded"] and result["saved"][0] == result["saved"][1]
    assert len(set(result["saved"][0])) == 2 and result["steps"] == result["resumed"]
    # The reference is the model as it was, its logits halved.
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen2_tied", dtype=torch.float32)
    batch, log_probs = make_batch(0), torch.tensor(result["asked"][0])
    start, end = batch.cu_seqlens[1:3].tolist()
    with torch.no_grad():
        want = (model(batch.input_ids[None, start:end]).logits[0, :-1] / 2).log_softmax(-1)
    want = want.gather(-1, batch.input_ids[start + 1 : end, None])[:, 0]
    assert (log_probs[start + 1 : end] - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", [name for name in RESUMES if LORA in RESUMES[name][1][1]])
def test_adapters_of_a_checkpoint(launches, folder, tmp_path, name):
    """It holds them alone. Exported they are to the bit what a resumed engine has, in files that peft loads, or merged."""
    want, family = load_file(folder / f"resumed {name}.safetensors"), folder / RESUMES[name][0]
    checkpoint = folder / "checkpoints" / name / f"step_{SAVED_AT:08d}"
    export_checkpoint(checkpoint, tmp_path / "adapter")
    export_checkpoint(checkpoint, tmp_path / "merged", merge=True)
    got, merged = (
        load_file(tmp_path / name)
        for name in ("adapter/adapter_model.safetensors", "merged/model.safetensors")
    )
    got = {n.removeprefix("base_model.model."): x for n, x in got.items()}
    assert got.keys() == {n for n in want if ".lora_" in n}
    assert all(torch.equal(got[n], want[n]) and x.any() for n, x in got.items())

    def loaded(directory):
        model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(model, directory).merge_and_unload().state_dict()

    by_peft, later = (
        loaded(tmp_path / "adapter"),
        loaded(folder / "hf" / name),
    )  # later: of an engine
    assert all((by_peft[n] - x).abs().max() < 1e-6 for n, x in merged.items())
    assert all(
        (x - want[n]).abs().max() < (1e-6 if want[n].dtype is torch.float32 else 0.01)
        for n, x in merged.items()
    )
    assert any((later[n] - x).abs().max() > 1e-3 for n, x in merged.items())


@pytest.mark.parametrize("name", [name for name in RESUMES if LORA not in RESUMES[name][1][1]])
def test_exported_directory_loads(launches, folder, name):
    directory = folder / "hf" / name
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    family = AutoModelForCausalLM.from_pretrained(folder / RESUMES[name][0])
    assert type(model) is type(family) and model.config.architectures == [type(family).__name__]
    assert model.config.rope_parameters == family.config.rope_parameters


@pytest.mark.parametrize("name", ["tp2 to one", "tp2 pp2 to one", "moe tp2 ep2 to one"])
def test_offline_export(launches, folder, tmp_path, name):
    """A checkpoint as a model directory: the bits that a resumed engine exports."""
    checkpoint = folder / "checkpoints" / name / f"step_{SAVED_AT:08d}"
    export(checkpoint, tmp_path / "hf")
    want, got = (
        load_file(folder / f"resumed {name}.safetensors"),
        load_file(tmp_path / "hf" / "model.safetensors"),
    )
    assert want.keys() == got.keys() and all(torch.equal(want[n], got[n]) for n in want)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.vocab_size == 97


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_files", "lacks model.safetensors"),
        ("missing_weight", "lacks 1 weights of LlamaForCausalLM, such as model.norm.weight"),
        ("wrong_shape", "lm_head.weight has shape [96, 32] in the file, [97, 32] by config.json"),
    ],
)
def test_broken_models(launches, name, message):
    told = launches[2]["refused"].get(name)
    assert told is not None and len(told) == 2 and all(message in t for t in told)


# -- refusals ----------------------------------------------------------------------------------------------------------


MOE = "model.path=FOLDER/qwen3_moe"


def config(folder, *pairs):
    return load(
        "sft.yaml",
        [
            "model_engine=megatron",
            f"model.path={folder / 'llama'}",
            "data.train_files=unused",
            *(pair.replace("FOLDER", str(folder)) for pair in pairs),
        ],
    )


@pytest.mark.parametrize(
    "world, pairs, message",
    [
        (
            3,
            ["engine.tensor_model_parallel_size=2"],
            "x context .1. parallel ranks do not divide the 3 ranks",
        ),
        (
            3,
            ["engine.tensor_model_parallel_size=3"],
            "does not divide the model's 4 attention heads",
        ),
        (
            8,
            ["engine.tensor_model_parallel_size=8"],
            "does not divide the model's 4 attention heads",
        ),
        (
            8,
            ["engine.pipeline_model_parallel_size=8"],
            "virtual pipeline .1. stages are more than the model's 4 layers",
        ),
        (
            4,
            [
                "engine.pipeline_model_parallel_size=2",
                "engine.virtual_pipeline_model_parallel_size=4",
            ],
            "pipeline .2. x virtual pipeline .4. stages are more than",
        ),
        (
            1,
            ["engine.virtual_pipeline_model_parallel_size=2"],
            "needs engine.pipeline_model_parallel_size > 1",
        ),
        (
            2,
            ["engine.context_parallel_size=2", "data.max_tokens_per_micro_batch=1022"],
            "must be a multiple of 4",
        ),
        (
            4,
            [
                "engine.tensor_model_parallel_size=2",
                "engine.context_parallel_size=2",
                "data.max_tokens_per_micro_batch=1020",
            ],
            "must be a multiple of 8",
        ),
        (
            4,
            [
                "engine.tensor_model_parallel_size=2",
                "engine.context_parallel_size=auto",
                "data.max_tokens_per_micro_batch=1023",
            ],
            "must be a multiple of 4",
        ),
        (
            2,
            [MOE, "engine.context_parallel_size=auto", "engine.router_aux_loss_coef=0.1"],
            "context_parallel_size=auto is not supported with routers' auxiliary loss .0.1. by model_engine=megatron",
        ),
        (
            2,
            [f"{MOE}_raw", "engine.context_parallel_size=auto"],
            "auxiliary loss .0.4. by .* or engine.router_aux_loss_coef=0",
        ),
        (
            2,
            ["engine.expert_model_parallel_size=2"],
            "expert_model_parallel_size=2 needs a mixture of experts",
        ),
        (
            1,
            ["engine.router_aux_loss_coef=0.1"],
            "router_aux_loss_coef=0.1 needs a mixture of experts",
        ),
        (
            3,
            [MOE, "engine.expert_model_parallel_size=3"],
            "parallel_size=3 does not divide the model's 8 experts",
        ),
        (2, [MOE, "engine.expert_model_parallel_size=4"], "and the 2 ranks of a pipeline stage"),
        (
            4,
            [MOE, "engine.expert_model_parallel_size=4", "engine.pipeline_model_parallel_size=2"],
            "and the 2 ranks",
        ),
        (
            2,
            [MOE, "engine.tensor_model_parallel_size=2", "engine.sequence_parallel=false"],
            "mixture of experts with engine.tensor_model_parallel_size > 1 needs engine.sequence_parallel=true",
        ),
        (
            4,
            ["data.train_batch_size=3"],
            "train_batch_size=3 is less than the 4 data-parallel ranks",
        ),
        (
            4,
            ["model.lora.rank=4", "engine.tensor_model_parallel_size=4"],
            "parallel_size=4 needs as many key-value heads",
        ),
        (
            1,
            ["model.lora.rank=4", MOE],
            "would adapt experts and routers too, which is not supported: give",
        ),
        (
            1,
            ["model.lora.rank=4", MOE, "model.lora.target_modules=[q_proj,gate]"],
            "names model.layers.0.mlp.gate: adapters belong",
        ),
        (
            1,
            ["model.lora.rank=4", MOE, "model.lora.target_modules=[gate_proj,up_proj]"],
            "model.layers.0.mlp.experts",
        ),
        (
            2,
            [
                "model.lora.rank=4",
                "engine.pipeline_model_parallel_size=2",
                r"model.lora.target_modules='.*\.[01]\..*_proj'",
            ],
            "leaves the pipeline stage of layers 2 to 3 without adapters",
        ),
        (
            2,
            [
                "model.lora.rank=4",
                "engine.pipeline_model_parallel_size=2",
                r"model.lora.target_modules='.*\.[012]\..*_proj'",
                "model.path=FOLDER/mistral",
            ],
            "leaves the pipeline stage of layers 3 to 4 without adapters",
        ),
        (
            1,
            ["optim.lr_scheduler_type=constant", "optim.min_lr_ratio=0.1"],
            "no effect with a constant schedule",
        ),
        (1, ["optim.name=muon"], "optim.name=muon needs model_engine=fsdp"),
        (1, ["model.path=/nowhere"], "holds no config.json"),
        (
            1,
            ["model.path=FOLDER/mistral", "engine.bridge=mbridge"],
            "engine.bridge=mbridge has no mistral models, only llama, qwen2, ",
        ),
        (
            1,
            ["model.path=FOLDER/qwen3_windows", "engine.bridge=mbridge"],
            "attention_bias=True .* with engine.bridge=mbridge",
        ),
        (
            1,
            ["engine.override_ddp_config.use_distributed_optimizer=false"],
            "contradicts engine.use_distributed_optimizer=True",
        ),
        (
            1,
            [
                "engine.use_distributed_optimizer=false",
                "engine.override_ddp_config={use_distributed_optimizer: true}",
            ],
            "contradicts engine.use_distributed_optimizer=False",
        ),
        (1, ["engine.override_ddp_config.bucket=1"], "bucket is not supported"),
        (1, ["engine.override_ddp_config.bucket_size=many"], "must be of type int"),
        (
            1,
            ["engine.override_ddp_config.bucket_size=7"],
            "has no effect without engine.overlap_grad_reduce=true",
        ),
        (
            1,
            [
                "engine.override_ddp_config.pad_buckets_for_high_nccl_busbw=true",
                "engine.use_distributed_optimizer=false",
            ],
            "busbw has no effect without engine.use_distributed_optimizer=true",
        ),
        (
            1,
            ["engine.override_ddp_config.overlap_param_gather=true"],
            "overlap_param_gather is not supported",
        ),
        (
            1,
            ["engine.override_ddp_config.fsdp_double_buffer=true"],
            "fsdp_double_buffer is not supported, only grad_reduce_in_fp32,",
        ),
    ],
)
def test_layouts_that_cannot_work(folder, world, pairs, message):
    with pytest.raises(InputError, match=message):
        MegatronEngine.check(config(folder, *pairs), world)


@pytest.mark.parametrize(
    "family, patterns, message",
    [
        (
            "llama",
            "[visual]",
            "'visual' matches no name in the files of .*; the nearest are .*weight",
        ),
        (
            "llama",
            "[q_proj, v_proj]",
            "matches .*0.self_attn.q_proj.weight but not .*0.self_attn.k_proj.weight",
        ),
        (
            "mixtral",
            "[w1]",
            "matches .*0.block_sparse_moe.experts.0.w1.weight but not .*0.block_sparse_moe.experts.0.w3.weight",
        ),
        (
            "qwen3_moe",
            "['experts.[0-5].']",
            "matches .*0.mlp.experts.0.gate_proj.weight but not .*0.mlp.experts.6.gate_proj.weight",
        ),
        ("qwen2_tied", "[lm_head]", "matches lm_head.weight but not model.embed_tokens.weight"),
    ],
)
def test_what_cannot_be_frozen(folder, family, patterns, message):
    with pytest.raises(InputError, match=message):
        MegatronEngine.check(
            config(folder, f"model.path={folder / family}", f"model.freeze={patterns}"), 1
        )


def test_resume_in_another_dtype_is_refused(folder, tmp_path):
    written = {"run": {"model_engine": "megatron"}, "export_dtype": "float32"}
    (tmp_path / "trainer.json").write_text(json.dumps(written))
    same = Progress(identity=written["run"], export_dtype="float32")
    assert find_resume(config(folder), tmp_path, same, 1) == tmp_path
    other = Progress(identity=written["run"], export_dtype="bfloat16")
    with pytest.raises(
        InputError, match="with engine.compute_dtype=float32, now it is bfloat16: set it back"
    ):
        find_resume(config(folder), tmp_path, other, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="granite"), "has no granite models"),
        (
            dict(model_type="mixtral", router_jitter_noise=0.1),
            "router_jitter_noise=0.1 in config.json is not supported",
        ),
        (
            dict(
                rope_parameters=dict(
                    rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5
                )
            ),
            "partial_rotary_factor=0.5 in config.json is not supported",
        ),
        (dict(model_type="qwen2_moe", num_experts=4), "has no qwen2_moe models"),
        (
            dict(model_type="qwen3_moe", mlp_only_layers=[0]),
            "mlp_only_layers=.0. in config.json is not supported",
        ),
        (
            dict(model_type="qwen3_moe", decoder_sparse_step=2),
            "decoder_sparse_step=2 in config.json is not supported",
        ),
        (
            dict(model_type="mixtral", num_experts_per_tok=1),
            "one expert per token .num_experts_per_tok. of weight 1",
        ),
        (
            dict(model_type="mistral", sliding_window=0),
            "sliding_window=0 in config.json leaves nothing to attend to",
        ),
        (
            dict(
                model_type="qwen3",
                head_dim=16,
                use_sliding_window=False,
                layer_types=["sliding_attention"] + 2 * ["full_attention"],
            ),
            "layer_types in config.json has sliding_attention, but there is no window",
        ),
        (dict(attention_dropout=0.1), "attention_dropout=0.1 in config.json is not supported"),
        (dict(hidden_act="gelu"), "hidden_act=gelu in config.json is not supported"),
        (
            dict(
                rope_parameters=dict(
                    rope_type="linear", rope_theta=10000.0, factor=2.0, partial_rotary_factor=0.5
                )
            ),
            "partial_rotary_factor=0.5 in config.json is not supported",
        ),
        (
            dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)),
            "has no rope type 'dynamic'",
        ),
    ],
)
def test_models_without_a_faithful_translation(folder, tmp_path, changes, message):
    make_model(tmp_path, "qwen2_tied", **changes)
    with pytest.raises(InputError, match=message):
        MegatronEngine.check(config(folder, f"model.path={tmp_path}"), 1)


def test_files_that_config_json_does_not_fit(folder, tmp_path):
    model, file = make_model(tmp_path, "qwen2_tied"), tmp_path / "model.safetensors"

    def check(kind=MegatronEngine, name="megatron"):
        kind.check(config(folder, f"model.path={model}", f"model_engine={name}"), 1)

    weights = load_file(file)
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, file, {"format": "pt"})
    check()
    check(FSDPEngine, "fsdp")
    head[-1, -1] += 1
    save_file(weights | {"lm_head.weight": head}, file, {"format": "pt"})
    for kind, name in ((MegatronEngine, "megatron"), (FSDPEngine, "fsdp")):
        with pytest.raises(
            InputError,
            match="have different values, but config.json ties them: set tie_word_embeddings to false",
        ):
            check(kind, name)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="model.safetensors is damaged or incomplete"):
        check()
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"head_dim": 7}))
    with pytest.raises(InputError, match="RoPE requires an even rotary dimension"):
        check()


def test_precedence_of_ddp_settings(folder):
    def of(*pairs):
        return ddp_config(config(folder, *(f"engine.{p}" for p in pairs)).engine)

    assert (
        of().grad_reduce_in_fp32 and of().use_distributed_optimizer and not of().overlap_grad_reduce
    )
    assert not of("use_distributed_optimizer=false").use_distributed_optimizer
    assert of("overlap_grad_reduce=true").overlap_grad_reduce
    assert not of(
        "overlap_grad_reduce=true", "override_ddp_config.overlap_grad_reduce=false"
    ).overlap_grad_reduce
    assert not of("override_ddp_config.grad_reduce_in_fp32=false").grad_reduce_in_fp32
    assert of("overlap_grad_reduce=true", "override_ddp_config.bucket_size=7").bucket_size == 7
