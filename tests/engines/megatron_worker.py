"""The cases of test_megatron.py for one number of ranks: it writes down numbers, which test_megatron.py judges.

    torchrun --nproc-per-node N tests/engines/megatron_worker.py FOLDER [NAME ...]       NAME: of a case or a function; default: all

Reads models from FOLDER/{family}; writes FOLDER/{N}.json, and FOLDER/{N} {case}.safetensors with the final weights and
what was answered. 1 rank runs the FSDP2 engine, which the others are compared with; checkpoints pass from launch to
launch in the order 2, 4, 1.
"""

import gc
import json
import logging
import os
import resource
import shutil
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.enums import AttnMaskType
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file

from config import InputError, load
from data.batching.batch import Batch
from data.batching.plan import MicroBatches
from engines.base import Engine
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_hf
from engines.checkpoint.storage import Writer
from engines.fsdp.engine import FSDPEngine
from engines.heads import Head
from engines.megatron import checkpoint_files as checkpoint, layout, mapping
from engines.megatron.adapters import Adapter
from engines.megatron.engine import MegatronEngine
from engines.megatron.torch_layers import Packing, TorchAttention
from engines.megatron.without_cuda import cuda_is_cpu
from engines.model import guard, lora
from engines.model.model_files import fingerprint
from engines.parallel import collectives as groups, device, offload as host
from engines.parallel.varlen import Zigzag
from job.progress import adapter
from rollout.vllm.engine import Rollout
from tests.support.training import (
    SETTINGS,
    digest,
    divide,
    flip_bit as flip,
    gather,
    make_batch,
    make_loss,
    make_tokenizer,
    share_of as shared,
)
from tests.support.traps import TRAPS, set_trap

TOTAL_STEPS, FEW, SAVED_AT, CAP = 10, 5, 3, 96  # batches repeat every four steps


@dataclass
class Case:
    """Train `steps` steps of a model with these engine settings; uneven: see fsdp_worker.divide()."""

    family: str
    engine: str = ""
    steps: int = FEW
    critic: bool = False
    uneven: bool = False

    @property
    def head(self) -> Head:
        return Head.VALUES if self.critic else Head.LOG_PROBS

    @property
    def moe(self) -> bool:
        return self.family.startswith(("qwen3_moe", "mixtral"))

    @property
    def plain(self) -> bool:
        """Whether a loop around transformers is what this is compared with, and not the FSDP2 engine."""
        return (
            self.moe
            or self.family in ("mistral", "llama_yarn", "qwen3_windows")
            or "model.freeze" in self.engine
        )

    @property
    def lora(self) -> bool:
        return LORA in self.engine

    @property
    def aux(self) -> bool:
        """With the routers' auxiliary loss: as the setting or, of qwen3_moe_raw, as config.json says."""
        return AUX in self.engine or self.family == "qwen3_moe_raw"


TP2, PP2, CP2, VPP2 = (
    f"{name}_parallel_size=2"
    for name in ("tensor_model", "pipeline_model", "context", "virtual_pipeline_model")
)
NO_SP, PADDED, REPLICATED = (
    "sequence_parallel=false",
    "use_remove_padding=false",
    "use_distributed_optimizer=false",
)
OVERLAP, BUCKETS = "overlap_grad_reduce=true", "override_ddp_config.bucket_size=1000"
EP2, AUX = "expert_model_parallel_size=2", "router_aux_loss_coef=0.3"
# Of the sequences some are longer than one rank's part, or (with four ranks) two ranks', and others are not.
AUTO, SHORT, SHORTEST = (
    "context_parallel_size=auto",
    *(f"data.max_tokens_per_micro_batch={cap}" for cap in (24, 12)),
)
BF16_GRADIENTS = "override_ddp_config.grad_reduce_in_fp32=false"
FULL, SELECTIVE, BF16 = "recompute=full", "recompute=selective", "compute_dtype=bfloat16"
# An epsilon that Adam notices: it makes no whole step of a rounding error in a gradient that is next to nothing.
EPS = "optim.eps=1e-5"
LORA = f"model.lora.rank=4 model.lora.alpha=8 {EPS}"
# Embedding and output matrix, which may be one, the first of four layers, and in all layers matrices whose biases are trained.
FREEZE = f"model.freeze=['embed_tokens|lm_head','layers[.]0[.]','[qkv]_proj.weight'] {EPS}"
LAST = f"model.freeze=['lm_head','layers[.][23][.]','model[.]norm'] {EPS}"  # all of the second of two stages
EXPERTS = f"model.freeze=['embed|head|norm|attn|mlp.gate','layers[.][01][.]'] {EPS}"  # all but experts of layers 2 and 3
SOME, ATTENTION = (
    f"model.lora.target_modules=[{names}]"
    for names in ("q_proj,v_proj,up_proj,down_proj", "q_proj,k_proj,v_proj,o_proj")
)
CASES = {
    1: {
        "one": Case("qwen3"),
        "one padded": Case("llama", PADDED),
        "one replicated": Case("qwen2_tied", REPLICATED),
        "bf16": Case("qwen3", BF16),
        "lora one": Case("qwen3", LORA, TOTAL_STEPS),
        "lora bf16": Case("qwen3", f"{LORA} {BF16}"),
        "lora tied full": Case("qwen2_tied", f"{LORA} {FULL}", TOTAL_STEPS),
        "moe": Case("qwen3_moe", AUX),
        "moe padded": Case("qwen3_moe_raw", f"{AUX} {PADDED}"),
        "mistral": Case("mistral"),
        "mixtral padded": Case("mixtral", PADDED),
    },
    2: {
        "tp2": Case("qwen2_tied", TP2, TOTAL_STEPS),
        "tp2 no sp": Case("qwen3", f"{TP2} {NO_SP}"),
        "tp2 padded": Case("llama", f"{TP2} {PADDED}"),
        "tp2 selective": Case("llama", f"{TP2} {SELECTIVE}"),
        "tp2 full": Case("qwen3", f"{TP2} {FULL}"),
        "pp2": Case("llama", PP2),
        "pp2 tied": Case("qwen2_tied", PP2, TOTAL_STEPS),
        "pp2 full": Case("qwen3", f"{PP2} {FULL}"),
        "pp2 padded": Case("qwen2_tied", f"{PP2} {PADDED}"),
        "pp2 vpp2": Case("qwen3", f"{PP2} {VPP2}", TOTAL_STEPS),
        "cp2": Case("llama", CP2, TOTAL_STEPS),
        "cp2 padded": Case("qwen3", f"{CP2} {PADDED}"),
        "dp2": Case("qwen3", "", TOTAL_STEPS),
        "dp2 replicated": Case("qwen3", REPLICATED),
        "dp2 uneven": Case("llama", uneven=True),
        "dp2 overlap": Case("qwen2_tied", f"{OVERLAP} {BUCKETS}"),
        "dp2 replicated overlap": Case("llama", f"{REPLICATED} {OVERLAP} {BUCKETS}"),
        "bf16 tp2": Case("qwen3", f"{BF16} {TP2}"),
        "bf16 dp2": Case("qwen3", BF16),
        "bf16 dp2 replicated": Case("qwen3", f"{BF16} {REPLICATED}"),
        "bf16 cp2": Case("qwen3", f"{BF16} {CP2}"),
        "critic tp2": Case("qwen2_tied", TP2, critic=True),
        "critic pp2": Case("qwen2_tied", PP2, critic=True),
        "critic cp2": Case("qwen3", CP2, critic=True),
        "lora tp2": Case("qwen2_tied", f"{LORA} {TP2}", TOTAL_STEPS),
        "lora tp2 no sp": Case("qwen3", f"{LORA} {TP2} {NO_SP}", TOTAL_STEPS),
        "lora tp2 some": Case("llama", f"{LORA} {SOME} {TP2} {PADDED}", TOTAL_STEPS),
        "lora pp2 tied full": Case("qwen2_tied", f"{LORA} {PP2} {FULL}", TOTAL_STEPS),
        "lora pp2 vpp2": Case("mistral", f"{LORA} {PP2} {VPP2}", TOTAL_STEPS),
        "lora cp2": Case("qwen3", f"{LORA} {CP2}", TOTAL_STEPS),
        "lora dp2": Case("llama", f"{LORA} {SOME} {OVERLAP} {BUCKETS}", TOTAL_STEPS),
        "lora yarn tp2": Case("llama_yarn", f"{LORA} {TP2}", TOTAL_STEPS),
        "lora dp2 replicated": Case("qwen3", f"{LORA} {REPLICATED}", TOTAL_STEPS),
        "lora bf16 tp2": Case("qwen3", f"{LORA} {BF16} {TP2}"),
        "lora bf16 dtype dp2": Case("qwen3", f"{LORA} model.lora.dtype=bfloat16 {BF16}"),
        "lora critic tp2": Case("qwen2_tied", f"{LORA} {TP2}", TOTAL_STEPS, critic=True),
        "lora critic bf16 pp2": Case("qwen2_tied", f"{LORA} {PP2} {BF16}", critic=True),
        "lora moe tp2": Case("qwen3_moe", f"{LORA} {ATTENTION} {TP2} {AUX}", TOTAL_STEPS),
        "frozen tp2 full": Case("qwen2_tied", f"{FREEZE} {TP2} {FULL} {REPLICATED}"),
        "frozen pp2 tied": Case("qwen2_tied", f"{FREEZE} {PP2} {FULL}"),
        "frozen dp2": Case("qwen2_tied", f"{FREEZE} {OVERLAP} {BUCKETS}"),
        "frozen critic pp2": Case("llama", f"model.freeze=[.] {EPS} {PP2}", critic=True),
        "frozen moe ep2": Case("qwen3_moe", f"{EXPERTS} {EP2} {AUX}"),
        "moe dp2": Case("qwen3_moe"),
        "moe tp2": Case("qwen3_moe", f"{TP2} {AUX}"),
        "moe ep2": Case("qwen3_moe", f"{EP2} {AUX}"),
        "moe ep2 uneven": Case("qwen3_moe_raw", f"{EP2} {AUX} {REPLICATED}", uneven=True),
        "moe tp2 ep2 padded": Case("qwen3_moe", f"{TP2} {EP2} {AUX} {PADDED}"),
        "moe cp2 ep2": Case("qwen3_moe_raw", f"{CP2} {EP2}"),
        "moe pp2 full": Case("qwen3_moe", f"{PP2} {FULL} {AUX}"),
        "moe bf16 ep2": Case("qwen3_moe", f"{EP2} {AUX} {BF16}"),
        "critic moe ep2": Case("qwen3_moe", EP2, critic=True),
        "mistral cp2": Case("mistral", CP2),
        "mistral padded": Case("mistral", f"{PP2} {PADDED}"),
        "mistral pp2 vpp2": Case("mistral", f"{PP2} {VPP2}"),
        "yarn tp2": Case("llama_yarn", f"{TP2} {EPS}"),
        "yarn tp2 no sp padded": Case("llama_yarn", f"{TP2} {NO_SP} {PADDED} {EPS}"),
        "yarn pp2 full": Case("llama_yarn", f"{PP2} {FULL} {EPS}"),
        "windows tp2": Case("qwen3_windows", f"{TP2} {EPS}"),
        "windows cp2 padded": Case("qwen3_windows", f"{CP2} {PADDED} {EPS}"),
        "mixtral tp2 ep2": Case("mixtral", f"{TP2} {EP2} {AUX}"),
        "mixtral pp2": Case("mixtral", f"{PP2} {AUX}"),
        "auto": Case("qwen3", f"{AUTO} {SHORT}", TOTAL_STEPS),
        "auto padded full": Case("llama", f"{AUTO} {SHORT} {PADDED} {FULL}"),
        "auto critic": Case("qwen2_tied", f"{AUTO} {SHORT} {REPLICATED}", critic=True),
        "auto lora": Case("qwen3", f"{LORA} {AUTO} {SHORT}", TOTAL_STEPS),
        "auto moe ep2": Case("qwen3_moe", f"{AUTO} {SHORT} {EP2}"),
        "auto windows padded": Case("qwen3_windows", f"{AUTO} {SHORT} {PADDED} {EPS}"),
    },
    4: {
        "lora tp2 pp2 full": Case("qwen3", f"{LORA} {TP2} {PP2} {FULL}", TOTAL_STEPS),
        "tp2 pp2": Case("qwen3", f"{TP2} {PP2}", TOTAL_STEPS),
        "tp4": Case("llama", "tensor_model_parallel_size=4"),
        "tp2 cp2": Case("qwen2_tied", f"{TP2} {CP2}", TOTAL_STEPS),
        "pp2 cp2": Case("llama", f"{PP2} {CP2}"),
        "pp2 vpp2 dp2": Case("qwen2_tied", f"{PP2} {VPP2}", uneven=True),
        "critic tp2 pp2": Case("llama", f"{TP2} {PP2}", critic=True),
        "moe ep2 dp4": Case("qwen3_moe", f"{EP2} {AUX}"),
        "moe tp2 ep4": Case("qwen3_moe", f"{TP2} {AUX} {REPLICATED} expert_model_parallel_size=4"),
        "moe tp2 pp2 ep2": Case("qwen3_moe_raw", f"{TP2} {PP2} {EP2} {AUX}"),
        **dict.fromkeys(
            ("auto", "auto again"), Case("llama", f"{AUTO} {SHORT} {OVERLAP} {BUCKETS}")
        ),
        "auto padded": Case("qwen2_tied", f"{AUTO} {SHORTEST} {PADDED} {REPLICATED}"),
        "auto tp2 full": Case("qwen3", f"{AUTO} {SHORT} {TP2} {FULL}"),
        "auto pp2": Case("qwen2_tied", f"{AUTO} {SHORT} {PP2}"),
        "auto pp2 vpp2": Case("qwen3", f"{AUTO} {SHORT} {PP2} {VPP2}"),
        "auto moe tp2 ep4": Case("qwen3_moe", f"{AUTO} {SHORT} {TP2} expert_model_parallel_size=4"),
    },
}
# From one layout to the next, each in the launch of its ranks: family, (ranks, settings) that save, and that resume.
RESUMES = {
    "tp2 to one": ("qwen2_tied", (2, TP2), (1, "")),
    "pp2 to tp2 pp2": ("mistral", (2, PP2), (4, f"{TP2} {PP2}")),
    "tp2 to pp2 vpp2": ("qwen2_tied", (2, TP2), (2, f"{PP2} {VPP2}")),
    "tp2 pp2 to one": ("llama_yarn", (4, f"{TP2} {PP2}"), (1, "")),
    "lora bf16 tp2 to pp2 vpp2": (
        "qwen2_tied",
        (2, f"{LORA} {BF16} {TP2}"),
        (2, f"{LORA} {BF16} {PP2} {VPP2}"),
    ),
    "lora pp2 dp2 to one": ("qwen3", (4, f"{LORA} {PP2}"), (1, LORA)),
    "moe ep2 to tp2": ("qwen3_moe", (2, EP2), (2, TP2)),
    "moe tp2 ep2 to one": ("mixtral", (2, f"{TP2} {EP2}"), (1, "")),
    "moe pp2 to ep2 replicated": (
        "qwen3_moe",
        (2, f"{PP2} {REPLICATED}"),
        (2, f"{EP2} {REPLICATED}"),
    ),
    # Buckets that are padded: the tied matrix has one of its own, and so have layers where reduction overlaps.
    "pp2 dp2 to one": ("qwen2_tied", (4, PP2), (1, "")),
    "bf16 pp2 vpp2 dp2": ("qwen2_tied", (4, f"{BF16} {PP2} {VPP2}"), (4, f"{BF16} {PP2} {VPP2}")),
    "buckets dp4 to tp2": ("qwen3", (4, f"{OVERLAP} {BUCKETS}"), (4, TP2)),
    "moe buckets ep2 to one": ("qwen3_moe", (4, f"{EP2} {OVERLAP} {BUCKETS}"), (1, "")),
    "dp2 to replicated tp2": ("qwen3", (2, ""), (2, f"{TP2} {REPLICATED}")),
    "replicated pp2 to dp2": ("qwen2_tied", (2, f"{PP2} {REPLICATED}"), (2, "")),
    "bf16 dp2 to replicated": ("qwen3", (2, BF16), (2, f"{BF16} {REPLICATED}")),
    "frozen moe pp2 to ep2": (
        "qwen3_moe",
        (2, f"{EXPERTS} {PP2}"),
        (2, f"{EXPERTS} {EP2}"),
    ),  # all of the first stage is frozen
    "frozen pp2": ("llama", (2, f"{LAST} {PP2}"), (2, f"{LAST} {PP2}")),
    "cp2 to auto": ("llama", (2, CP2), (2, f"{AUTO} {SHORT}")),
    "auto to cp2": ("qwen3", (4, f"{AUTO} {SHORT}"), (4, CP2)),
    "bf16 replicated tp2 to dp2": ("qwen3", (2, f"{BF16} {TP2} {REPLICATED}"), (2, BF16)),
}


def main(folder: Path, *names: str) -> None:
    def chosen(name: str) -> bool:
        return not names or name in names

    this_device, world, rank, results = device.init(), dist.get_world_size(), dist.get_rank(), {}
    gc.freeze()  # all that imports made, which each new_layout() would look through
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.compiler.set_stance(
        "eager_on_recompile"
    )  # on CUDA: else every length of a micro-batch would take seconds
    if world == 1:
        for family, critic in {
            (c.family, c.critic)
            for cases in CASES.values()
            for c in cases.values()
            if not (c.plain or c.lora)
        }:
            name = f"reference {family}" + " critic" * critic
            case = Case(family, "torch_compile=never", FEW if critic else TOTAL_STEPS, critic)
            results[name] = run(folder, this_device, f"1 {name}", case, FSDPEngine)
    for name, case in CASES[world].items():
        if chosen(name):
            results[name] = run(folder, this_device, f"{world} {name}", case, MegatronEngine)
    if world == 2 and chosen("guarded"):
        results["guarded"] = guarded(folder, this_device)
    guard.check_isolation = lambda engine: None  # which has passed all of these models, in the cases above
    for name, (family, saves, resumes) in RESUMES.items():
        if not chosen(name):
            continue
        if saves[0] == world:
            results[f"save {name}"] = save(folder, this_device, name, family, saves[1])
        if resumes[0] == world:
            results[f"resume {name}"] = resume(folder, this_device, name, family, resumes[1])
    results["attention"] = attention(this_device)
    for work in (
        adapters,
        dropout_masks,
        bridges,
        roles,
        background,
        trapped,
        collectives,
        non_finite,
        offload,
        refused,
        rollout,
    ):
        if world == 2 and chosen(work.__name__):
            results[work.__name__] = work(folder, this_device)
    if rank == 0:
        (folder / f"{world}.json").write_text(json.dumps(results))
    device.shutdown()


def build(
    kind: type[Engine], model: Path, this_device: torch.device, settings: str = "", **arguments
) -> Engine:
    """A new engine on a layout of its own. Only one lives at a time."""
    new_layout()
    name = "fsdp" if kind is FSDPEngine else "megatron"
    config = load(
        "sft.yaml",
        [
            f"model_engine={name}",
            f"model.path={model}",
            f"data.max_tokens_per_micro_batch={CAP}",
            *SETTINGS,
            *keys(settings),
        ],
    )
    return kind(config, this_device, TOTAL_STEPS, **arguments)


def keys(settings: str) -> list[str]:
    return [
        s if s.startswith(("model.", "optim.", "data.")) else f"engine.{s}"
        for s in settings.split()
    ]


def guarded(folder: Path, this_device: torch.device) -> dict[str, list[str] | None]:
    """What each rank is told, by layout, of attention that forgets where sequences begin."""
    forward, told = TorchAttention.forward, {}

    def forgetful(self, *tensors, packed_seq_params, **others):
        zigzag = packed_seq_params.zigzag
        whole = Zigzag([0, zigzag.bounds[-1]], zigzag.group, zigzag.device)
        return forward(
            self, *tensors, packed_seq_params=replace(packed_seq_params, zigzag=whole), **others
        )

    TorchAttention.forward = forgetful
    layouts = {
        "": "",
        "tensor": TP2,
        "pipeline": PP2,
        "virtual": f"{PP2} {VPP2}",
        "context": CP2,
        "critic": "",
    }
    for name, settings in layouts.items():
        try:
            head = Head.VALUES if name == "critic" else Head.LOG_PROBS
            build(MegatronEngine, folder / "qwen3", this_device, settings, head=head)
            told[name] = None
        except InputError as error:
            told[name] = [None] * dist.get_world_size()
            dist.all_gather_object(told[name], str(error))
    TorchAttention.forward = forward
    return told


def attention(this_device: torch.device) -> list[float]:
    """Relative errors of packed attention, in a sliding window and without, and of its gradients by query, key and value,
    context-parallel over all ranks, in the dtype that the device has a packed kernel for; against fp32, each sequence alone."""
    world, lengths, heads = dist.get_world_size(), [296, 8, 1040, 512], (14, 2, 2)
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
                    f"engine.context_parallel_size={world}",
                ],
            ).engine
        )
        torch.manual_seed(0)
        *inputs, gradient = (
            torch.randn(sum(lengths), 1, n, 64).to(this_device, dtype) for n in (*heads, heads[0])
        )
        packing = Packing.from_lengths(lengths, mpu.get_context_parallel_group(), this_device)
        first = (
            torch.tensor([0, *lengths])
            .cumsum(0)[:-1]
            .repeat_interleave(torch.tensor(lengths) // world)
        )
        mine, errors = packing.positions + first.to(this_device), []
        for window in (None, (99, 0)):
            here, alone = (
                [f(x.detach()).requires_grad_() for x in inputs]
                for f in (lambda x: x[mine], torch.Tensor.float)
            )
            layer = TorchAttention(
                SimpleNamespace(window_size=window, window_attn_skip_freq=None),
                1,
                AttnMaskType.causal,
                "self",
                pg_collection=SimpleNamespace(cp=mpu.get_context_parallel_group()),
            )
            out = layer(*here, packed_seq_params=packing).view_as(gradient[mine])
            out.backward(gradient[mine])
            masks = [
                torch.ones(n, n, dtype=torch.bool, device=this_device)
                .tril()
                .triu(-window[0] if window else -n)
                for n in lengths
            ]
            want = torch.cat(
                [
                    F.scaled_dot_product_attention(
                        *(x.permute(1, 2, 0, 3) for x in sequence), attn_mask=mask, enable_gqa=True
                    ).permute(2, 0, 1, 3)
                    for mask, *sequence in zip(masks, *(x.split(lengths) for x in alone))
                ]
            )
            want.backward(gradient.float())
            errors += [(out, want[mine]), *((x.grad, y.grad[mine]) for x, y in zip(here, alone))]
        return [max(gather(((x - y).norm() / y.norm()).item())) for x, y in errors]


def new_layout() -> None:
    gc.collect()
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
        # Megatron only forgets its groups; gloo's threads, some for each, would be thousands after thirty layouts.
        for group in [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
            dist.destroy_process_group(group)
        groups._groups_of.cache_clear()


def run(
    folder: Path, this_device: torch.device, title: str, case: Case, kind: type[Engine]
) -> dict:
    print(title, flush=True)
    engine, passes = (
        build(kind, folder / case.family, this_device, case.engine, head=case.head),
        [],
    )
    attentions = [
        module
        for model in engine.modules()
        for module in model.modules()
        if isinstance(module, TorchAttention)
    ]
    hooks = [module.register_forward_hook(lambda *_: passes.append(1)) for module in attentions]
    result = {"steps": train(engine, range(case.steps), case), "flops": engine.flops([3, 5], 4)}
    for hook in hooks:
        hook.remove()
    if kind is MegatronEngine:
        result["bytes"] = gather(count_bytes(engine))
        plans = [share_of(engine, step, case)[1] for step in range(case.steps)]
        planned = sum(map(len, plans))
        result["sizes of groups"] = sorted(
            {size for plans in gather(plans) for plan in plans for size, part in plan if part}
        )
        result["attention passes"] = gather(len(passes) / len(attentions) / planned)
    if case.moe:
        result["micro_batches"] = [micro_batches(engine, step, case) for step in range(case.steps)]
    weights = dict(engine.export_weights())
    asked = ask(engine, case)
    if case.lora:
        learned = dict(engine.export_adapter())
        with engine.without_adapters():
            base = {"asked": ask(engine, case), **dict(engine.export_weights())}
        result["adapter digests"] = gather([digest(learned), list(learned)])
        if dist.get_rank() == 0:
            for name, tensors in {"adapter": learned, "base": base}.items():
                save_file(
                    {n: x.contiguous() for n, x in tensors.items()},
                    folder / f"{title} {name}.safetensors",
                )
    if dist.get_rank() == 0:
        save_file(
            {"asked": asked, **{n: w.contiguous() for n, w in weights.items()}},
            folder / f"{title}.safetensors",
        )
    return result | {"digests": gather(digest(weights)), "names": gather(list(weights))}


def train(engine: Engine, steps, case: Case) -> list[dict[str, float]]:
    results = []
    for step in steps:
        share, planned, num_tokens = share_of(engine, step, case)
        loss_fn = value_loss(num_tokens) if case.critic else make_loss(num_tokens)
        results.append(engine.train_batch(share, loss_fn, step, planned))
    return results


def share_of(engine: Engine, step: int, case: Case) -> tuple[Batch, MicroBatches, int]:
    """This data-parallel rank's part of a step's batch, how it goes through it, and the number of tokens of all ranks."""
    batch = make_batch(step)
    mine, planned = shared(engine, batch.lengths, case.uneven)
    return batch.select(mine), planned, len(batch.input_ids)


def count_bytes(engine: MegatronEngine) -> list[int]:
    """This rank's pipeline stage, and its bytes of parameters, of gradients and of the optimizer."""

    def size(tensors):
        return sum(x.numel() * x.element_size() for x in tensors)

    parameters = [p for model in engine.models for p in model.parameters()]
    optimizers = engine.optimizer.chained_optimizers
    state = [
        x for o in optimizers for s in o.state.values() for name, x in s.items() if name != "step"
    ]
    if optimizers[0].config.bf16:  # else these are the parameters themselves
        state += [x for o in optimizers for x in o.get_parameters()]
    return [
        engine.pp_group.rank(),
        size(parameters),
        size(p.main_grad for p in parameters if p.requires_grad),
        size(state),
    ]


def micro_batches(engine: MegatronEngine, step: int, case: Case) -> list[list[int]]:
    """The sequences of each, of all data-parallel ranks: what a router's auxiliary loss depends on."""
    mine, planned = shared(engine, make_batch(step).lengths, case.uneven)
    plans = gather([[mine[i] for i in part] for _, part in planned])
    return sorted({tuple(part) for plan in plans for part in plan})


def value_loss(num_tokens: int):
    def loss_fn(values, fields):
        error = (values - fields["weight"]) * fields["loss_mask"]
        return (error**2).sum() / num_tokens, {"entropy": (values.detach() + 1).sum() / num_tokens}

    return loss_fn


def ask(engine: Engine, case: Case) -> torch.Tensor:
    """[ranks, 3, T]: log_probs, entropy, greedy (a critic: values, 0, 0) of batch 0, NaN where a rank has no answer."""
    batch = Batch(make_batch(0).input_ids, make_batch(0).cu_seqlens)  # no mask: about every token
    mine, planned = shared(engine, batch.lengths, case.uneven)
    where = Batch(torch.arange(len(batch.input_ids)), batch.cu_seqlens).select(mine).input_ids
    answers = torch.full((3, len(batch.input_ids)), torch.nan)
    if case.critic:
        answers[:, where] = engine.values(batch.select(mine), planned).cpu().expand(3, -1)
    else:
        answers[:, where] = torch.stack(
            [x.float().cpu() for x in engine.log_probs(batch.select(mine), planned)]
        )
    return torch.stack(gather(answers))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save(folder: Path, this_device: torch.device, name: str, family: str, settings: str) -> dict:
    """A checkpoint after SAVED_AT steps, and the steps after it without interruption."""
    engine, case = (
        build(MegatronEngine, folder / family, this_device, settings),
        Case(family, settings),
    )
    train(engine, range(SAVED_AT), case)
    checkpointer = Checkpointer(folder / "checkpoints" / name, 2, asynchronous=False)
    progress = {"step": SAVED_AT, "export_dtype": "float32"}
    if case.lora:
        progress |= {
            "lora": adapter(engine.config),
            "run": {"frozen weights": fingerprint(folder / family)},
        }
    checkpointer.save(SAVED_AT, engine, progress, make_tokenizer())
    random = gather(torch.rand(1).item())
    result = {"random": random, "steps": train(engine, range(SAVED_AT, 2 * SAVED_AT), case)}
    export_hf(engine, make_tokenizer(), folder / "hf" / name)
    return result


def resume(folder: Path, this_device: torch.device, name: str, family: str, settings: str) -> dict:
    engine, case = build(MegatronEngine, folder / family, this_device, settings), Case(family)
    checkpointer = Checkpointer(folder / "checkpoints" / name, 2, asynchronous=False)
    progress = checkpointer.load(checkpointer.find("auto"), engine)
    weights = dict(engine.export_weights())
    weights |= dict(engine.export_adapter())
    if dist.get_rank() == 0:
        save_file(
            {n: w.contiguous() for n, w in weights.items()}, folder / f"resumed {name}.safetensors"
        )
    return {
        "progress": progress,
        "random": gather(torch.rand(1).item()),
        "steps": train(engine, range(SAVED_AT, 2 * SAVED_AT), case),
    }


def roles(folder: Path, this_device: torch.device) -> dict:
    """An actor before its first step (the critic warms up), a critic and a reference in one process; actor and critic are saved
    in one checkpoint, which is read on the same layout."""

    def engines():
        actor = build(MegatronEngine, folder / "qwen2_tied", this_device, TP2)
        critic = MegatronEngine(actor.config, this_device, TOTAL_STEPS, head=Head.VALUES)
        return (
            actor,
            critic,
            MegatronEngine(actor.config, this_device, TOTAL_STEPS, optimize=False, temperature=2.0),
        )

    def digests(actor, critic):
        return gather([digest(dict(engine.export_weights())) for engine in (actor, critic)])

    case, (actor, critic, reference) = Case("qwen2_tied"), engines()
    train(critic, range(2), Case("qwen2_tied", critic=True))
    asked = ask(reference, case)[0]
    checkpointer = Checkpointer(folder / "checkpoints" / "roles", 1, asynchronous=False)
    checkpointer.save(2, actor, {"step": 2}, make_tokenizer(), critic=critic)
    result = {
        "saved": digests(actor, critic),
        "asked": asked.nan_to_num().tolist(),
        "bare": gather(reference.optimizer is None and reference.stages is reference.models),
    }
    result["steps"] = [train(actor, [2], case), train(critic, [2], Case("qwen2_tied", critic=True))]
    actor, critic, reference = engines()
    checkpointer.load(checkpointer.latest(), actor, critic=critic)
    result["loaded"] = digests(actor, critic)
    result["resumed"] = [
        train(actor, [2], case),
        train(critic, [2], Case("qwen2_tied", critic=True)),
    ]
    return result


# -- what else two ranks show ------------------------------------------------------------------------------------------


def adapters(folder: Path, this_device: torch.device) -> dict:
    """What is told of gradients that recomputation has lost; a run that goes on from an adapter's files; dropout."""

    def engine(settings: str, family: str = "qwen2_tied") -> MegatronEngine:
        return build(MegatronEngine, folder / family, this_device, f"{LORA} {settings}")

    def learn(settings: str, steps: int = 3) -> dict:
        learner = engine(settings)
        taught = train(learner, range(steps), Case("qwen2_tied"))
        whole = {
            n: p
            for n, p in learner.models[0].named_parameters()
            if p.requires_grad and not p.tensor_model_parallel
        }
        return {
            "steps": taught,
            "whole": gather(digest(whole)),
            "asked": ask(learner, Case("qwen2_tied"))[0].nan_to_num().tolist(),
        }

    lost, result = {}, {}
    for settings in ("", PP2, f"{PP2} {VPP2}"):
        broken = engine(f"{settings} {FULL}")
        for model in broken.models:
            if model.pre_process:
                model.embedding._forward_hooks.clear()
        try:
            train(broken, [0], Case("qwen2_tied"))
        except RuntimeError as error:
            lost[settings] = gather(str(error))

    first = engine(TP2)
    train(first, range(2), Case("qwen2_tied"))
    exported, files = dict(first.export_adapter()), folder / "adapter"
    if dist.get_rank() == 0:
        files.mkdir()
        lora.write(exported.items(), first.config.model.lora, "a base", files)
    dist.barrier()
    second = engine(f"{PP2} model.lora.adapter_path={files}")
    result["taken over"] = gather([digest(dict(second.export_adapter())), digest(exported)])

    for settings in (TP2, f"{TP2} {NO_SP}", f"{TP2} {NO_SP} {FULL}", f"{TP2} {FULL}"):
        result[settings] = learn(f"{settings} model.lora.dropout=0.5")
    result["again"] = learn(f"{TP2} model.lora.dropout=0.5")
    return result | {"lost": lost}


def dropout_masks(folder: Path, this_device: torch.device) -> dict[str, list[list[str]]]:
    """Digests of the dropout masks of one step, by layout: a list per rank, one mask for each call of an adapter.

    Data-parallel ranks train on the same batch, so that their masks have the same shapes.
    """
    batch = make_batch(0)
    results = {}
    for settings in ("", CP2, PP2):
        with_dropout = f"{LORA} {settings} model.lora.dropout=0.5"
        engine = build(MegatronEngine, folder / "qwen2_tied", this_device, with_dropout)
        masks = []
        dropped = Adapter.dropped

        def dropped_and_noted(adapter: Adapter, x: torch.Tensor) -> torch.Tensor:
            result = dropped(adapter, x)
            masks.append(digest({"mask": (result == 0).float()}))
            return result

        Adapter.dropped = dropped_and_noted
        engine.train_batch(batch, make_loss(len(batch.input_ids)), 0)
        Adapter.dropped = dropped
        results[settings] = gather(masks)
    return results


def bridges(folder: Path, this_device: torch.device) -> list[dict]:
    """By case: whether what a rank reads, and what it exports, is the same by both mappings, and how many numbers a rank has of
    the model, and has read."""
    read, results = [], []

    class Slice:
        def __init__(self, inner):
            self.inner, self.get_shape = inner, inner.get_shape

        def __getitem__(self, index) -> torch.Tensor:
            part = self.inner[index]
            read.append(part.numel())
            return part

    class File(ExitStack):
        def __init__(self, *arguments, **others):
            super().__init__()
            self.inner = self.enter_context(safe_open(*arguments, **others))
            self.keys = self.inner.keys

        def get_slice(self, name: str) -> Slice:
            return Slice(self.inner.get_slice(name))

    def weights_of(case: Case, kind: str) -> tuple:
        engine = build(
            MegatronEngine,
            folder / case.family,
            this_device,
            f"{case.engine} bridge={kind}",
            head=case.head,
            optimize=False,
        )
        held = {
            f"{i} {name}": p
            for i, model in enumerate(engine.models)
            for name, p in model.named_parameters()
        }
        exported = dict(engine.export_weights())
        return digest(held), digest(exported), list(exported), sum(p.numel() for p in held.values())

    mapping.safe_open = File
    for case in (
        Case("qwen2_tied", TP2),
        Case("qwen2_tied", TP2, critic=True),
        Case("qwen2_tied", PP2),
        Case("qwen2_tied", f"{PP2} {VPP2}", critic=True),
        Case("qwen3", TP2),
        Case("llama", f"{PP2} {VPP2}"),
        Case("llama", f"{TP2} {NO_SP}"),
        Case("llama", PP2, critic=True),
    ):
        read.clear()
        *by_own, size = weights_of(case, "own")
        num_read = sum(read)
        *by_mbridge, _ = weights_of(case, "mbridge")
        results.append(
            {
                "equal": gather(by_own == by_mbridge),
                "sizes": gather([size, num_read]),
                "critic": case.critic,
                "case": f"{case.family} {case.engine}",
            }
        )
    mapping.safe_open = safe_open
    return results


def background(folder: Path, this_device: torch.device) -> dict:
    """A save to a disk that waits until training has gone on, and one in the foreground; both are read again."""
    engine, case, checkpointers = (
        build(MegatronEngine, folder / "qwen3_moe", this_device, EP2),
        Case("qwen3_moe"),
        {},
    )
    disk = threading.Event()

    class SlowDisk(Writer):
        def write_data(self, *arguments):
            disk.wait(60)
            return super().write_data(*arguments)

    train(engine, range(2), case)
    for kind in ("foreground", "background"):
        checkpointers[kind] = Checkpointer(
            folder / "checkpoints" / kind, 2, asynchronous=kind == "background"
        )
    checkpointers["foreground"].save(2, engine, {"step": 2}, make_tokenizer())
    saved, checkpoint.Writer = digest(dict(engine.export_weights())), SlowDisk
    checkpointers["background"].save(2, engine, {"step": 2}, make_tokenizer())
    steps = train(engine, range(2, 5), case)
    result = {
        "steps": steps,
        "meanwhile": [
            str(checkpointers["background"].latest()),
            sorted(p.name for p in (folder / "checkpoints/background").iterdir()),
        ],
    }
    disk.set()
    checkpointers["background"].wait()
    checkpoint.Writer = Writer
    for kind, checkpointer in checkpointers.items():
        engine = build(MegatronEngine, folder / "qwen3_moe", this_device, EP2)
        checkpointer.load(checkpointer.latest(), engine)
        result[kind] = {"restored": gather(digest(dict(engine.export_weights())) == saved)}
        result[kind]["steps"] = train(engine, range(2, 5), case)
    return result


def trapped(folder: Path, this_device: torch.device) -> dict:
    """What is told of checkpoints that run a command, and whether it ran; of one with a flipped bit, and of one for which
    the disk of rank 1 has no room."""
    results, original = {}, folder / "checkpoints" / "tp2 to one"
    engine = build(MegatronEngine, folder / "qwen2_tied", this_device, TP2)
    for name in (*TRAPS, "a bit"):
        directory, mark = folder / "traps" / name, folder / "traps" / f"{name} ran"
        checkpoint = directory / f"step_{SAVED_AT:08d}"
        if dist.get_rank() == 0:
            shutil.copytree(original, directory)
            set_trap(name, checkpoint, mark) if name in TRAPS else flip(
                checkpoint / "weights" / "__1_0.distcp"
            )
        dist.barrier()
        checkpointer = Checkpointer(directory, 2, asynchronous=False)
        try:
            checkpointer.load(checkpointer.find("auto"), engine)
        except InputError as error:
            results[name] = gather(str(error))
        results[f"{name} ran"] = mark.exists()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for asynchronous in (False, True):
        checkpointer = Checkpointer(folder / "traps" / f"full_{asynchronous}", 2, asynchronous)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
            checkpointer.wait()
        except InputError as error:
            results[f"full_{asynchronous}"] = gather(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        results[f"full_{asynchronous} left"] = os.listdir(checkpointer.directory)
    return results


def collectives(folder: Path, this_device: torch.device) -> dict[str, list[str]]:
    """The collectives of one step, in the order in which torch ran them, by setting."""
    found = {}
    for settings in ("", REPLICATED, f"{REPLICATED} {OVERLAP} {BUCKETS}"):
        engine = build(MegatronEngine, folder / "qwen3", this_device, settings)
        with torch.profiler.profile() as profile:
            train(engine, [0], Case("qwen3"))
        found[settings] = [
            event.name for event in profile.events() if event.name.startswith("c10d::")
        ]
    return found


def non_finite(folder: Path, this_device: torch.device) -> dict:
    """Steps 0 1 2 3, with a NaN in step 2 of rank 0, and 0 1 3."""
    results = {}
    for settings in ("", REPLICATED, BF16):
        engine, case = build(MegatronEngine, folder / "qwen3", this_device, settings), Case("qwen3")
        before = train(engine, range(2), case)
        weights = digest(dict(engine.export_weights()))
        share = make_batch(2).select(
            divide(make_batch(2).lengths, engine.dp_size, False)[engine.dp_rank]
        )
        poison = (
            torch.nan if dist.get_rank() == 0 else 1.0
        )  # in every micro-batch of this rank alone
        poisoned = engine.train_batch(
            share, lambda log_probs, *_: (log_probs.sum() * poison, {}), 2
        )
        untouched = gather(digest(dict(engine.export_weights())) == weights)
        results[settings] = {
            "poisoned": poisoned,
            "untouched": untouched,
            "with_nan": before + train(engine, [3], case),
        }
        engine = build(MegatronEngine, folder / "qwen3", this_device, settings)
        results[settings]["without"] = train(engine, [0, 1, 3], case)
    return results


def offload(folder: Path, this_device: torch.device) -> dict:
    """Export and train with everything offloaded in between; and how much host memory was taken before the first step and
    in the end, and the bytes that are left where tensors were."""
    results = {}
    host.PART_BYTES, host.MIN_BYTES = 2**14, 64
    for settings in ("", REPLICATED, f"{BF16} {BF16_GRADIENTS}", f"{LORA} {REPLICATED}"):
        engine, case = build(MegatronEngine, folder / "qwen3", this_device, settings), Case("qwen3")
        engine.offload("optimizer")
        engine.offload("parameters", "optimizer")
        parts = [len(engine._host_memory.parts)]
        steps = train(engine, range(2), case)
        engine.offload("parameters", "optimizer")
        everything = [*engine.tensors_of("parameters", "optimizer"), *engine.gradient_buffers()]
        bytes_left = sum(storage.nbytes() for storage in engine._host_memory.storages(everything))
        left = sum(
            x.grad is not None
            for o in engine.optimizer.chained_optimizers
            for x in o.get_parameters()
        )
        names = list(dict(engine.export_weights()))
        engine.offload("parameters", "optimizer")
        ask(engine, case)
        engine.offload("optimizer")
        results[settings] = {
            "steps": steps + train(engine, range(2, 4), case),
            "num_names": len(names),
            "gradients left": left,
            "bytes left": gather(bytes_left),
            "host memory": gather(parts + [len(engine._host_memory.parts)]),
        }
    return results


def rollout(folder: Path, this_device: torch.device) -> dict:
    """Rounds of vLLM's generating and an update of a mixture of experts: how far apart their log-probabilities are (the
    largest of both ranks), and how far the update moved them. vLLM has no attention on CPUs for heads of less than 32."""
    model = folder / "qwen3_moe"
    config = load(
        "ppo.yaml",
        [
            "model_engine=megatron",
            f"model.path={model}",
            "data.train_files=unused",
            "optim.lr=0.02",
            "optim.weight_decay=0",
            "engine.compute_dtype=float32",
            f"engine.{EP2}",
            "rollout.kv_cache_gib=0.05",
            "data.max_prompt_length=16",
            "rollout.max_tokens=24",
            "validation.max_tokens=24",
        ],
    )
    sampling = OmegaConf.merge(config.rollout, {"stop": []})
    new_layout()
    engine, vllm = MegatronEngine(config, this_device, TOTAL_STEPS), Rollout(config, this_device)
    prompts, same, rounds = [list(range(3, 9 + i)) for i in range(6)], make_batch(0), []
    for step in range(3):
        before = engine.log_probs(same)[0]
        vllm.wake("weights")
        vllm.update_weights(engine.export_weights())
        vllm.wake("kv_cache")
        batch, _ = vllm.generate(prompts, [6 * vllm.replica + i for i in range(6)], sampling)
        gap = (engine.log_probs(batch)[0] - batch.fields["rollout_log_probs"]).abs().max().item()
        vllm.sleep()
        engine.train_batch(batch, lambda log_probs, *_: (-log_probs.sum() / 100, {}), step)
        rounds.append(
            {
                "gap": max(gather(gap)),
                "moved": (engine.log_probs(same)[0] - before).abs().max().item(),
            }
        )
    vllm.shutdown()  # which ends the process group, so this is the last work
    return {"rounds": rounds}


def refused(folder: Path, this_device: torch.device) -> dict:
    told = {}
    for name in ("no_files", "missing_weight", "wrong_shape"):
        try:
            build(MegatronEngine, folder / name, this_device, TP2)
        except InputError as error:
            told[name] = gather(str(error))
    return told


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
