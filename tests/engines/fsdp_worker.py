"""The cases of test_fsdp.py for one number of ranks: it writes down numbers, which test_fsdp.py judges.

    torchrun --nproc-per-node N tests/engines/fsdp_worker.py FOLDER [NAME ...]        all cases and functions, or these

Reads models from FOLDER/{family}; writes FOLDER/{N}.json, and FOLDER/{N} {case}.safetensors with the final weights and
what log_probs answered. 4 ranks write checkpoints that all launches read.
"""

import io
import json
import os
import resource
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from config import InputError, load
from data.batching.packing import Batch
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_hf
from engines.fsdp import attention
from engines.fsdp.attention import Packing
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.recurrence import Bounds
from engines.heads import Head
from engines.model import guard
from engines.model.model_files import fingerprint
from engines.optimizer import ShardedMuon
from engines.parallel import device, offload
from job import progress as job
from tests.support.foreign import FOREIGN
from tests.support.models import MULTIMODAL
from tests.support.plain import FEW, TEN
from tests.support.training import (
    SETTINGS,
    TOTAL_STEPS,
    digest,
    divide,
    flip_bit,
    gather,
    make_batch,
    make_loss,
    make_tokenizer,
    share_of,
)
from tests.support.traps import without_checksums


@dataclass
class Case:
    """Train `steps` steps of a model with these engine settings and optimizer; uneven: see divide(). lora: with adapters, which
    begin as those of FOLDER/{family}_adapter. freeze: without what FREEZE means."""

    family: str
    engine: str = ""
    steps: int = FEW
    cap: int = 60
    uneven: bool = False
    optimizer: str = "adamw"
    lora: bool = False
    freeze: bool = False


LORA = "rank=4", "alpha=6"
# At the bottom a whole layer, above it and outside of layers some of several parameters.
FREEZE = ("embed_tokens", "layers[.]0[.]", "layers[.]1[.]self_attn", "^model[.]norm")
CP2, CP4, PADDED = "context_parallel_size=2", "context_parallel_size=4", "use_remove_padding=false"
AUTO = "context_parallel_size=auto"
RECOMPUTE, OFFLOAD, ZERO2 = (
    "activation_checkpointing=true",
    "cpu_offload=true",
    "reshard_after_forward=false",
)
MASTER, BF16 = "compute_dtype=bfloat16", "compute_dtype=bfloat16 param_dtype=bfloat16"
AUX, COMPILED = "router_aux_loss_coef=0.3", "torch_compile=always"
CASES = {
    1: {
        **{
            f"plain {family}": Case(family, steps=TOTAL_STEPS)
            for family in ("qwen2_tied", "qwen3", "llama")
        },
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
        "lora": Case("qwen2_tied", steps=TEN, lora=True),
        "lora recompute": Case("llama", RECOMPUTE, TEN, lora=True),
        "lora bf16": Case("qwen3", MASTER, TEN, lora=True),
    },
    2: {
        **{
            f"plain {family}": Case(family, steps=TEN)
            for family in ("qwen2_tied", "qwen3", "llama")
        },
        "again qwen3": Case("qwen3"),
        "one micro-batch": Case("qwen3", cap=1000),
        "padded": Case("llama", PADDED),
        "recompute": Case("qwen2_tied", RECOMPUTE),
        "offload": Case("qwen2_tied", OFFLOAD),
        "zero2": Case("qwen3", ZERO2),
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
        "lora padded": Case("qwen2_tied", PADDED, TEN, lora=True),
        "lora offload": Case("qwen3", OFFLOAD, TEN, lora=True),
        "lora replicated": Case("qwen3", "fsdp_size=1", TEN, lora=True),
        "lora cp2": Case("llama", CP2, TEN, lora=True),
        "auto": Case("qwen3", AUTO, cap=24),
        "auto padded": Case("qwen2_tied", f"{AUTO} {PADDED}", cap=24),
        "auto without heads for two": Case("three_heads", f"{AUTO} {RECOMPUTE}", cap=24),
        "cp2 padded": Case("llama", f"{CP2} {PADDED}"),
        "auto lora": Case("llama", AUTO, TEN, 24, lora=True),
        "auto experts aux": Case("qwen3_moe", f"{AUTO} {AUX}", 1, cap=24),
        "apertus": Case("apertus"),
        "lfm2 padded": Case("lfm2", PADDED),
        "lfm2": Case("lfm2"),
    },
    4: {
        "plain qwen2_tied": Case("qwen2_tied"),
        "plain llama": Case("llama", steps=TOTAL_STEPS),
        "uneven": Case("qwen2_tied", uneven=True),
        "hybrid": Case("qwen3", "fsdp_size=2"),
        "hybrid cp2": Case("llama", f"fsdp_size=2 {CP2}"),
        "cp4": Case("llama", CP4, TEN, cap=90),
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
        "lora hybrid cp2": Case("qwen3", f"fsdp_size=2 {CP2} {RECOMPUTE}", TEN, lora=True),
    },
}
# Those that a CPU compiles for minutes run when they are named: by tests/on_cuda.py, since CUDA is where layers are compiled.
ON_CUDA = {
    "experts aux compiled": Case("qwen3_moe", f"{AUX} {COMPILED}", steps=1),
    "lora compiled": Case("llama", COMPILED, steps=4, lora=True),
}
BROKEN = ("no_files", "missing_weight", "wrong_shape")
FORMS = {"packed": "", "padded": PADDED}


def main(folder: Path, *names: str) -> None:
    def chosen(name: str) -> bool:
        return not names or name in names

    this_device, world, results = device.init(), dist.get_world_size(), {}
    torch.manual_seed(
        dist.get_rank()
    )  # so that a rank which resumes with another's generator is seen
    for name, case in (CASES[world] | (ON_CUDA if names else {})).items():
        if not chosen(name):
            continue
        try:
            results[name] = run(folder, this_device, f"{world} {name}", case)
        except Exception:
            if world > 1:  # the other ranks would wait for this one
                raise
            results[name] = {"error": traceback.format_exc()}
    for work in (
        refused,
        muon_steps,
        muon_resume,
        *((non_finite, rotate, publish) if world < 4 else ()),
        *((harmed, full, images, frozen) if world == 2 else ()),
        *((foreign, guarded, renamed) if world < 4 else ()),
        *((grouped,) if world == 1 else (first_ratio,)),
        adapters,
    ):
        if chosen(work.__name__):
            results[work.__name__] = work(folder, this_device)
    for family in ("qwen2_tied", "llama", "lora") if not names else ():
        results[f"checkpoint {family}"] = checkpoint(
            folder, this_device, family, asynchronous=family == "llama"
        )
    if dist.get_rank() == 0:
        (folder / f"{world}.json").write_text(json.dumps(results))
    device.shutdown()


def run(folder: Path, this_device: torch.device, title: str, case: Case) -> dict:
    engine = build(
        folder / case.family,
        this_device,
        case.engine,
        case.cap,
        case.optimizer,
        case.lora,
        [f"model.freeze={[*FREEZE]}"] if case.freeze else [],
    )
    calls = count_calls(engine)
    mine, micro_batches = share_of(engine, make_batch(0).lengths, case.uneven)
    plans = dict(gather((engine.dp_rank, [[mine[i] for i in part] for _, part in micro_batches])))
    result = {
        "steps": train(engine, range(case.steps), case.uneven),
        "attention_calls": len(calls),
        "stored_dtypes": sorted({str(p.dtype) for p in engine.hf.parameters()}),
        "trained": [name for name, p in engine.hf.named_parameters() if p.requires_grad],
        "states": sum(len(each.state) for each in engine.optimizers),
        "micro-batches of the first step": [
            *{tuple(part) for plan in plans.values() for part in plan if part}
        ],
        "sizes of groups": sorted(
            {size for plan in gather(micro_batches) for size, part in plan if part}
        ),
    }
    weights, asked = dict(engine.export_weights()), ask(engine, case.uneven)
    if dist.get_rank() == 0:
        save_file({"asked": asked, **weights}, folder / f"{title}.safetensors")
    return result | {"digests": gather(digest(weights))}


def build(
    model: Path,
    this_device: torch.device,
    settings: str = "",
    cap: int = 60,
    optimizer: str = "adamw",
    lora: bool = False,
    more: Sequence[str] = (),
    head: Head = Head.LOG_PROBS,
) -> FSDPEngine:
    adapter = (
        [f"model.lora.{key}" for key in (f"adapter_path={model}_adapter", *LORA)] if lora else []
    )
    return FSDPEngine(
        load(
            "sft.yaml",
            [
                f"model.path={model}",
                f"data.max_tokens_per_micro_batch={cap}",
                *SETTINGS,
                *adapter,
                f"optim.name={optimizer}",
                *(f"engine.{s}" for s in settings.split()),
                *more,
            ],
        ),
        this_device,
        TOTAL_STEPS,
        head=head,
    )


def train(engine: FSDPEngine, steps, uneven: bool = False) -> list[dict[str, float]]:
    results = []
    for step in steps:
        batch = make_batch(step)
        mine, micro_batches = share_of(engine, batch.lengths, uneven)
        results.append(
            engine.train_batch(
                batch.select(mine), make_loss(len(batch.input_ids)), step, micro_batches
            )
        )
    return results


def ask(engine: FSDPEngine, uneven: bool = False) -> torch.Tensor:
    """[ranks, 3, T]: log_probs, entropy, greedy of batch 0, of each rank where it has an answer, NaN elsewhere."""
    batch = Batch(make_batch(0).input_ids, make_batch(0).cu_seqlens)  # no mask: about every token
    mine, micro_batches = share_of(engine, batch.lengths, uneven)
    where = Batch(torch.arange(len(batch.input_ids)), batch.cu_seqlens).select(mine).input_ids
    answers = torch.full((3, len(batch.input_ids)), torch.nan)
    answers[:, where] = torch.stack(
        [x.float() for x in engine.log_probs(batch.select(mine), micro_batches)]
    ).cpu()
    return torch.stack(gather(answers))


def first_ratio(folder: Path, this_device: torch.device) -> float:
    """How far the log-probabilities of a batch are, in the first update on it, from those asked for before."""
    engine, batch = build(folder / "qwen3", this_device, AUTO, cap=24), make_batch(0)
    mine, micro_batches = share_of(engine, batch.lengths)
    batch, found = batch.select(mine), []
    batch.fields["before"] = engine.log_probs(batch, micro_batches)[0].cpu()

    def loss_fn(log_probs, entropy, fields):
        found.append((log_probs - fields["before"]).abs().max().item() if len(log_probs) else 0.0)
        return log_probs.sum(), {}

    engine.train_batch(batch, loss_fn, 0, micro_batches)
    return max(gather(max(found)))


def count_calls(engine: FSDPEngine) -> list:
    """A list that grows with every forward pass through the attention, or the convolution, of the first layer."""
    calls, layer = [], engine.hf.base_model.layers[0]
    next(layer.children()).register_forward_hook(lambda *_: calls.append(None))
    return calls


def non_finite(folder: Path, this_device: torch.device) -> dict:
    """Steps 0 1 2 3, with a NaN in step 2 of rank 0, and 0 1 3."""
    engine = build(folder / "qwen3", this_device)
    before = train(engine, range(2))
    state = digest(engine.state())
    share = make_batch(2).select(
        divide(make_batch(2).lengths, engine.dp_size, False)[engine.dp_rank]
    )
    poison = torch.nan if dist.get_rank() == 0 else 1.0  # in every micro-batch of this rank alone
    poisoned = engine.train_batch(share, lambda log_probs, *_: (log_probs.sum() * poison, {}), 2)
    untouched = gather(digest(engine.state()) == state)
    return {
        "poisoned": poisoned,
        "untouched": untouched,
        "with_nan": before + train(engine, [3]),
        "without": train(build(folder / "qwen3", this_device), [0, 1, 3]),
    }


def muon_steps(folder: Path, this_device: torch.device) -> dict[str, float]:
    """The largest difference between matrices divided over ranks and whole ones, after three steps with equal gradients."""
    world, worst, sizes = (
        dist.get_world_size(),
        {},
        [(32, 32), (7, 96), (48, 5), (1, 8), (33, 16)],
    )  # some rows left over
    for name, shape in {
        "shard": (world,),
        **({"replicate and shard": (2, 2)} if world == 4 else {}),
    }.items():
        mesh = init_device_mesh(this_device.type, shape)
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        g = torch.Generator().manual_seed(0)
        whole = [torch.nn.Parameter(torch.randn(size, generator=g)) for size in sizes]
        parts = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, placements)) for p in whole]
        settings = dict(lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        optimizers = torch.optim.Muon(whole, **settings), ShardedMuon(parts, **settings)
        for _ in range(3):
            for p, part in zip(whole, parts):
                p.grad = torch.randn(p.shape, generator=g)
                part.grad = distribute_tensor(p.grad, mesh, placements)
            for optimizer in optimizers:
                optimizer.step()
        worst[name] = max(
            (p - part.full_tensor()).abs().max().item() for p, part in zip(whole, parts)
        )
    return worst


def host_memory(engine: FSDPEngine) -> tuple[list[int], int]:
    """Where an engine's host memory lies once everything is there, and the bytes that are left in the tensors."""
    engine.offload("parameters", "optimizer")
    tensors = engine._host_memory.storages(engine.tensors_of("parameters", "optimizer"))
    return [part.result().data_ptr() for part in engine._host_memory.parts], sum(
        x.nbytes() for x in tensors
    )


def muon_resume(folder: Path, this_device: torch.device) -> dict:
    """Two steps and two more on 4 ranks without interruption; two more from the checkpoint on any number of ranks."""
    checkpointer, result = Checkpointer(folder / "checkpoints_muon", 2, asynchronous=False), {}
    if dist.get_world_size() == 4:
        offload.PART_BYTES, offload.MIN_BYTES = 2**14, 64
        engine = build(folder / "qwen3", this_device, optimizer="muon")
        result["host memory"] = [host_memory(engine)]
        train(engine, range(2))
        checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
        result["host memory"].append(host_memory(engine))
        result["uninterrupted"] = train(engine, range(2, 4))
        result["host memory"].append(host_memory(engine))
        result["weights"] = digest(dict(engine.export_weights()))
    engine = build(folder / "qwen3", this_device, optimizer="muon")
    checkpointer.load(folder / "checkpoints_muon" / "step_00000002", engine)
    result["resumed"] = train(engine, range(2, 4))
    states = [x.to_local() if isinstance(x, DTensor) else x for x in engine.tensors_of("optimizer")]
    return result | {
        "resumed_weights": digest(dict(engine.export_weights())),
        "state_bytes": gather(sum(x.nbytes for x in states if x.ndim)),
    }


def refused(folder: Path, this_device: torch.device) -> dict[str, list[str] | None]:
    """What each rank is told about models that cannot be loaded; None where a model was loaded after all."""
    told = {}
    for name in BROKEN:
        try:
            build(folder / name, this_device)
            told[name] = None
        except InputError as error:
            told[name] = gather(str(error))
    return told


def foreign(folder: Path, this_device: torch.device) -> dict:
    """What the families export before they are trained, answer, and train; on two ranks those whose attention has sinks."""
    results, alone = {}, dist.get_world_size() == 1
    for family in [*FOREIGN, *MULTIMODAL] if alone else ["gpt_oss"]:
        for form, settings in FORMS.items() if alone else [("cp2", CP2)]:
            try:
                engine = build(folder / family, this_device, f"{settings} torch_compile=never")
                weights, asked = dict(engine.export_weights()), ask(engine)
                if dist.get_rank() == 0:
                    save_file({"asked": asked, **weights}, folder / f"{family} {form}.safetensors")
                results[f"{family} {form}"] = train(engine, [0])[0]
            except Exception:
                results[f"{family} {form}"] = {"error": traceback.format_exc()}
    return results


def images(folder: Path, this_device: torch.device) -> None:
    """Trains the text models of checkpoints with a vision tower, and adapters of one; what the engine exports, and what it answers
    then."""
    for family, lora in (*((family, False) for family in MULTIMODAL), ("gemma3 with images", True)):
        name = f"{family}{' lora' * lora}"
        more = [f"model.lora.{key}" for key in LORA] if lora else []
        engine, checkpointer = (
            build(folder / family, this_device, more=more),
            Checkpointer(folder / f"steps {name}", 2, False),
        )
        train(engine, range(3))
        progress = {
            "export_dtype": "float32",
            "run": {"frozen weights": fingerprint(folder / family)},
        }
        checkpointer.save(
            3, engine, {**progress, "lora": job.adapter(engine.config)}, make_tokenizer()
        )
        export_hf(engine, make_tokenizer(), folder / f"hf {name}")
        asked = ask(engine)
        if dist.get_rank() == 0:
            save_file({"asked": asked}, folder / f"images {name}.safetensors")


def grouped(folder: Path, this_device: torch.device) -> dict:
    """What bf16 makes of products of all experts at once and of a loop over experts, for the same tokens and choices: the relative
    differences of a layer's outputs and of each expert's gradient; how many experts the loop leaves alone, and the sum of what the
    others' gradients are there; and which of the two an engine takes."""
    engine = build(folder / "qwen3_moe", this_device, f"{BF16} torch_compile=never")
    default = engine.hf.config._experts_implementation
    layer = next(module for name, module in engine.hf.named_modules() if name.endswith(".experts"))
    generator, outputs, gradients = torch.Generator().manual_seed(0), {}, {}
    hidden = torch.randn(40, engine.hf_config.hidden_size, generator=generator).to(
        this_device, torch.bfloat16
    )
    chosen = torch.tensor([[0, 1, 3], [1, 3, 5], [3, 5, 0], [1, 5, 0]], device=this_device).repeat(
        10, 1
    )
    weights = torch.rand(chosen.shape, generator=generator).to(this_device, torch.bfloat16)
    for kind in ("grouped_mm", "eager"):
        engine.hf.config._experts_implementation = kind
        outputs[kind] = layer(hidden, chosen, weights)
        outputs[kind].float().square().sum().backward()
        gradients[kind] = [expert.float() for p in layer.parameters() for expert in p.grad]
        engine.model.zero_grad()
    distance = lambda at_once, looped: (
        (at_once - looped).float().norm() / looped.float().norm()
    ).item()
    pairs = list(zip(*gradients.values()))
    left = [at_once for at_once, looped in pairs if not looped.any()]
    return {
        "default": default,
        "number": len(left),
        "left alone": sum(x.abs().sum().item() for x in left),
        "output": distance(*outputs.values()),
        "gradient": max(distance(*pair) for pair in pairs if pair[1].any()),
    }


def guarded(folder: Path, this_device: torch.device) -> dict:
    """What each rank is told of a model that computes packed sequences wrongly, and of one whose attention forgets where they
    begin; what the guard leaves behind; what it says of a model that does not read earlier tokens."""
    layouts, told = {"": "", "bf16": BF16, "critic": ""}, {}

    def tell(model: str, **more: str) -> None:
        for name, settings in (layouts | more).items():
            try:
                head = Head.VALUES if name == "critic" else Head.LOG_PROBS
                build(folder / model, this_device, settings, head=head)
                told[f"{model} {name}"] = None
            except InputError as error:
                told[f"{model} {name}"] = gather(str(error))

    def forgetful(q, k, v, packing, *others):
        return by_sequence(q, k, v, Packing(packing.cu_seqlens, [0, len(q)], len(q)), *others)

    by_sequence, Bounds.by_sequence = (
        Bounds.by_sequence,
        lambda self, forward, *args, **more: forward(*args, **more),
    )
    tell("lfm2")
    Bounds.by_sequence = by_sequence
    by_sequence, attention.by_sequence = attention.by_sequence, forgetful
    tell("llama", **({"cp2": CP2} if dist.get_world_size() == 2 else {}))
    attention.by_sequence = by_sequence
    layouts.clear()
    tell("both ways", packed="")

    engine = build(folder / "llama", this_device, RECOMPUTE, lora=True)
    before = traces(engine)
    told["found"] = guard.check_isolation(engine)
    told["same"] = gather(before == traces(engine))
    with redirect_stdout(io.StringIO()) as said:
        build(folder / "deaf", this_device)
    return told | {"deaf": gather(said.getvalue())}


def traces(engine: FSDPEngine) -> dict:
    modules = list(engine.model.modules())
    return {
        "random": digest({"state": torch.get_rng_state()}),
        "weights": digest(engine.state()),
        "training": engine.model.training,
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules),
        "gradients": sum(p.grad is not None for p in engine.model.parameters()),
        "step": (engine.dropout_seeds._step, engine.dropout_seeds._batch_of_step),
        "attention": engine.hf.config._attn_implementation,
        "config": engine.config,
    }


def renamed(folder: Path, this_device: torch.device) -> dict:
    """A model whose weights transformers renames at load: what is exported and kept in a checkpoint, and what comes back."""
    engine = build(folder / "renamed", this_device, PADDED)
    before, state = ask(engine), engine.state()
    kept = {name: x.clone() for name, x in state["model"].items()}
    train(engine, [0])
    engine.load_state({**engine.state(), "model": kept})
    after, weights = ask(engine), dict(engine.export_weights())
    if dist.get_rank() == 0:
        save_file({"asked": before}, folder / f"{dist.get_world_size()} renamed.safetensors")
    return {
        "exported": sorted(weights),
        "kept": sorted(kept),
        "same": torch.equal(before.nan_to_num(), after.nan_to_num()),
    }


def checkpoint(folder: Path, this_device: torch.device, family: str, asynchronous: bool) -> dict:
    """5 steps and 5 more on 4 ranks without interruption; 5 more from the checkpoint on any number of ranks."""
    directory, result, lora = folder / f"checkpoints_{family}", {}, family == "lora"
    model = folder / ("qwen3" if lora else family)
    checkpointer = Checkpointer(directory, 2, asynchronous)
    if dist.get_world_size() == 4:
        engine, tokenizer = build(model, this_device, CP2, lora=lora), make_tokenizer()
        more = (
            {"lora": job.adapter(engine.config), "run": {"frozen weights": fingerprint(model)}}
            if lora
            else {}
        )
        train(engine, range(5))
        listings, stop, whole = set(), threading.Event(), directory / "step_00000005"
        (
            watcher := threading.Thread(target=watch, args=(whole, listings, stop), daemon=True)
        ).start()
        checkpointer.save(5, engine, {"step": 5, "export_dtype": "float32"}, tokenizer)
        result["random"] = gather(torch.rand(1).item())
        result["uninterrupted"] = train(
            engine, range(5, 10)
        )  # while an asynchronous save is still writing
        checkpointer.wait()
        stop.set()
        watcher.join()
        result["published"] = [sorted(listing) for listing in listings]
        checkpointer.save(10, engine, {"step": 10, "export_dtype": "float32", **more}, tokenizer)
        checkpointer.wait()
        export_hf(engine, tokenizer, folder / f"hf_{family}")
        asked = ask(engine)
        if dist.get_rank() == 0:
            save_file({"asked": asked}, folder / f"4 checkpoint {family}.safetensors")
    engine = build(model, this_device, CP2 if dist.get_world_size() == 4 else "", lora=lora)
    result["progress"] = checkpointer.load(directory / "step_00000005", engine)
    result["random_again"] = gather(torch.rand(1).item())
    result["resumed"] = train(engine, range(5, 10))
    return result


def adapters(folder: Path, this_device: torch.device) -> dict:
    """What the frozen model says and exports before and after training; what an adapter that can learn nothing does."""
    engine, result = build(folder / "llama", this_device, RECOMPUTE, lora=True), {}
    with engine.without_adapters():
        before, frozen = ask(engine), digest(dict(engine.export_weights()))
    train(engine, range(3))
    with engine.without_adapters():
        result["same"] = [
            torch.equal(before.nan_to_num(), ask(engine).nan_to_num()),
            frozen == digest(dict(engine.export_weights())),
        ]
    if dist.get_rank() == 0:
        save_file({"asked": before}, folder / f"{dist.get_world_size()} adapters.safetensors")
    result["states"] = sum(len(o.state) for o in engine.optimizers)
    result["dropout"] = []
    for seed in (0, 0, 1):
        dropping = build(
            folder / "llama",
            this_device,
            RECOMPUTE,
            lora=True,
            more=("model.lora.dropout=0.3", "optim.lr=0.0", f"trainer.seed={seed}"),
        )
        result["dropout"].append([train(dropping, [0])[0]["loss"] for _ in range(2)])
    result["dropout by rank"] = gather(log_probs_in_training(dropping, make_batch(0), step=1))
    result["told"] = []
    for first_is_called in (False, True):
        adapted_layer = next(m for m in engine.hf.modules() if hasattr(m, "lora_A"))
        adapted_layer._disable_adapters = not first_is_called
        engine.adapter_guard.is_active = True
        try:
            train(engine, [3])
        except RuntimeError as error:
            result["told"].append(str(error))
        for name, p in engine.hf.named_parameters():
            if ".lora_" in name:
                p.detach().zero_()  # neither A nor B has a gradient then
        engine.model.zero_grad()
    return result


def log_probs_in_training(engine: FSDPEngine, batch: Batch, step: int) -> list[float]:
    """Train on a batch that all data-parallel ranks have, and return its log-probabilities here."""
    log_probs = []

    def loss_fn(outputs, *_):
        log_probs.extend(outputs.tolist())
        return outputs.sum(), {}

    engine.train_batch(batch, loss_fn, step)
    return log_probs


def frozen(folder: Path, this_device: torch.device) -> dict:
    """Two steps and two more without interruption, and from a checkpoint."""
    checkpointer, freeze = (
        Checkpointer(folder / "checkpoints_frozen", 2, asynchronous=False),
        [f"model.freeze={[*FREEZE]}"],
    )
    engine, again = (build(folder / "llama", this_device, more=freeze) for _ in range(2))
    train(engine, range(2))
    checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
    checkpointer.load(checkpointer.latest(), again)
    return {"uninterrupted": train(engine, range(2, 4)), "resumed": train(again, range(2, 4))}


def watch(directory: Path, listings: set, stop: threading.Event) -> None:
    """Note every different listing of a directory (names and sizes) from the moment it exists, and the last one."""
    going = True
    while going:
        going = not stop.wait(0.0005)
        if directory.exists():
            listings.add(
                frozenset(
                    (str(p.relative_to(directory)), p.stat().st_size)
                    for p in directory.rglob("*")
                    if p.is_file()
                )
            )


def rotate(folder: Path, this_device: torch.device) -> dict:
    """Checkpoints 1 and 2 by one process, 3 by another that finds them, and a directory that a kill left behind."""
    directory, steps = folder / "rotation", [1, 2] if dist.get_world_size() == 2 else [3]
    engine, checkpointer = (
        build(folder / "qwen3", this_device),
        Checkpointer(directory, 2, asynchronous=False),
    )
    if steps == [3]:
        (directory / "step_00000009.tmp").mkdir()
        for name in ("step_00000009.bak", "step_00000009.damaged", "step_9"):
            (directory / name).mkdir()
    found, deleted, synced, fsync = str(checkpointer.latest()), [], set(), os.fsync

    def note(descriptor):
        synced.add(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), directory))
        fsync(descriptor)

    sys.addaudithook(
        lambda event, arguments: (
            deleted.append(Path(arguments[0]).name) if event == "shutil.rmtree" else None
        )
    )
    os.fsync = note
    for step in steps:
        checkpointer.save(step, engine, {"step": step}, make_tokenizer())
    os.fsync = fsync
    return {
        "found": found,
        "left": sorted(p.name for p in directory.iterdir()),
        "deleted": list(deleted),
        "synced": sorted(synced),
        "latest": [checkpointer.latest().name, (directory / "latest").read_text().strip()],
    }


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


HARMS = {
    "a bit of rank 0's part": lambda path: flip_bit(path / "weights" / "__0_0.distcp"),
    "a bit of rank 3's part": lambda path: flip_bit(path / "weights" / "__3_0.distcp"),
    "a bit of .metadata": lambda path: flip_bit(path / "weights" / ".metadata"),
    "a bit of the tokenizer": lambda path: flip_bit(path / "hf" / "tokenizer.json"),
    "the step": lambda path: rewrite(path / "trainer.json", '"step": 10', '"step": 11'),
    "a checksum": lambda path: rewrite(
        path / "trainer.json", '"weights/__1_0.distcp": "', '"weights/__1_0.distcp": "0'
    ),
    "a part that is missing": lambda path: (path / "weights" / "__2_0.distcp").unlink(),
    "a part that is cut off": lambda path: os.truncate(path / "weights" / "__1_0.distcp", 10_000),
    "a zero more": lambda path: (path / "weights" / "__1_0.distcp").open("ab").write(b"\0"),
    "an empty part more": lambda path: (path / "weights" / "__4_0.distcp").touch(),
    "an empty trainer.json": lambda path: os.truncate(path / "trainer.json", 0),
    "no trainer.json": lambda path: (path / "trainer.json").unlink(),
    "a file in its place": lambda path: (shutil.rmtree(path), path.touch()),
}


def harmed(folder: Path, this_device: torch.device) -> dict:
    """Which checkpoint two ranks find where the newest one, of four ranks and saved in the background, is damaged."""
    results = {}
    for name, harm in {
        "nothing": lambda path: None,
        "no checksums": without_checksums,
        **HARMS,
    }.items():
        directory = folder / "harmed" / name
        if dist.get_rank() == 0:
            shutil.copytree(folder / "checkpoints_llama", directory)
            harm(directory / "step_00000010")
        dist.barrier()
        here, elsewhere = (
            Checkpointer(directory, 2, False),
            Checkpointer(folder / "empty", 2, False),
        )
        result = {
            "dry": here.find("auto", dry_run=True).name,
            "untouched": sorted(p.name for p in directory.iterdir()),
        }
        dist.barrier()
        try:
            result["named"] = elsewhere.find(str(directory / "step_00000010")) and "found"
        except InputError as error:
            result["named"] = str(error)
        result |= {
            "found": here.find("auto").name,
            "left": sorted(p.name for p in directory.iterdir()),
        }
        results[name] = result | {
            "latest": (directory / "latest").read_text(),
            "agreed": len(set(gather(str(result)))) == 1,
        }
    if dist.get_rank() == 0:
        flip_bit(directory / "step_00000005" / "hf" / "config.json")
    dist.barrier()
    try:
        here.find("auto")
    except InputError as error:
        results["both"] = gather(str(error))
    return results


def full(folder: Path, this_device: torch.device) -> dict:
    """A save for which rank 1 has no room: no file of it may grow beyond a limit that the tensors alone exceed."""
    engine, results = build(folder / "qwen3", this_device), {}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for asynchronous in (False, True):
        checkpointer = Checkpointer(folder / f"full_{asynchronous}", 2, asynchronous)
        checkpointer.save(1, engine, {"step": 1}, make_tokenizer())
        checkpointer.wait()
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
            checkpointer.wait()
        except InputError as error:
            results[str(asynchronous)] = {"told": gather(str(error))}
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        results[str(asynchronous)]["left"] = sorted(
            p.name for p in checkpointer.directory.iterdir()
        )
        checkpointer.save(3, engine, {"step": 3}, make_tokenizer())
        results[str(asynchronous)]["found"] = (checkpointer.wait(), checkpointer.find("auto").name)[
            1
        ]
    return results


class SlowDisk(Checkpointer):
    def _publish(self, *arguments) -> None:
        time.sleep(0.5)
        super()._publish(*arguments)


def publish(folder: Path, this_device: torch.device) -> dict:
    """wait() after an asynchronous save whose renaming is slow, and after one whose renaming is impossible."""
    directory = folder / f"publishing_{dist.get_world_size()}"
    engine, checkpointer = (
        build(folder / "qwen3", this_device),
        SlowDisk(directory, -1, asynchronous=True),
    )
    checkpointer.save(1, engine, {"step": 1}, make_tokenizer())
    checkpointer.wait()
    result = {"there_after_wait": gather((directory / "step_00000001").is_dir())}
    time.sleep(1)  # whatever the answer, nothing of step 1 may run into what follows
    if dist.get_world_size() == 1:
        (directory / "step_00000002").write_text("in the way")
        checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
        try:
            checkpointer.wait()
        except Exception as error:
            result["raised"] = str(error)
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
