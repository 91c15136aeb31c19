"""Runs whose stages msprobe dumps: each stage of a PPO step, or an update on several layouts.

    torchrun --nproc-per-node N tests/profiling/profiling_worker.py ENGINE MODEL FOLDER TASK
        [key=value ...]
    torchrun --nproc-per-node N tests/profiling/profiling_worker.py layouts MODELS FOLDER

Writes FOLDER/profile as a run does (for layouts FOLDER/{name}/profile and metrics.jsonl).
train_ppo.py does the same, with vLLM around it.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from config import load
from engines.heads import Head
from engines.parallel import device
from job import setup as job
from tests.engines.megatron_worker import new_layout, value_loss
from tests.support.guarded import unguarded
from tests.support.training import SETTINGS, divide, make_batch, make_loss

STAGES = [
    "actor_compute_log_prob",
    "ref_compute_log_prob",
    "compute_values",
    "critic_update",
    "actor_update",
]
TP2 = "engine.tensor_model_parallel_size=2"
PP2 = "engine.pipeline_model_parallel_size=2"
VPP2 = "engine.virtual_pipeline_model_parallel_size=2"
CP2 = "engine.context_parallel_size=2"
NO_SP = "engine.sequence_parallel=false"
ONE_MICRO_BATCH = "data.max_tokens_per_micro_batch=1000"
TOTAL_STEPS = 2


@dataclass(frozen=True)
class Layout:
    """An engine, the name of its model's folder, and further settings."""

    engine: str
    model: str = "model"
    settings: list[str] = field(default_factory=list)


# By number of ranks. Tensor parallelism has sequence parallelism, which pads, unless NO_SP is set.
LAYOUTS = {
    1: {
        "fsdp": Layout("fsdp"),
        "fsdp_whole": Layout("fsdp", settings=[ONE_MICRO_BATCH]),
    },
    2: {
        "tp": Layout("megatron", settings=[TP2, NO_SP]),
        "sp": Layout("megatron", settings=[TP2]),
        "vpp": Layout("megatron", settings=[PP2, VPP2]),
        "recompute": Layout("megatron", settings=[TP2, NO_SP, "engine.recompute=full"]),
        "dp": Layout("fsdp"),
        "cp": Layout("megatron", settings=[CP2]),
        "sp_early": Layout("megatron", "early", [TP2]),
        "vpp_early": Layout("megatron", "early", [PP2, VPP2]),
        "vpp_late": Layout("megatron", "late", [PP2, VPP2]),
        "dp_early": Layout("fsdp", "early"),
        "cp_early": Layout("megatron", "early", [CP2]),
        "head": Layout("megatron", "head", [PP2]),
    },
    4: {
        "tp_pp": Layout("megatron", settings=[TP2, PP2, NO_SP]),
        "tp_pp_late": Layout("megatron", "late", [TP2, PP2]),
    },
}


def configure(kind: str, model: Path | str, folder: Path, task: str, *overrides: str):
    return load(
        "sft.yaml",
        [
            f"model_engine={kind}",
            f"model.path={model}",
            f"output_dir={folder}",
            *SETTINGS,
            "data.max_tokens_per_micro_batch=64",
            "trainer.profile_interval=[2,2]",
            "profiler.tool=msprobe",
            "profiler.ranks=all",
            f"profiler.msprobe.task={task}",
            *overrides,
        ],
    )


def engine_class(kind: str):
    if kind == "megatron":
        from engines.megatron.engine import MegatronEngine as Engine
    else:
        from engines.fsdp.engine import FSDPEngine as Engine
    return Engine


def build_engines(kind: str, config, this_device: torch.device):
    """Return an actor and a critic."""
    Engine = engine_class(kind)
    with unguarded():  # the engines' own tests have the guard
        actor = Engine(config, this_device, TOTAL_STEPS)
        critic = Engine(config, this_device, TOTAL_STEPS, head=Head.VALUES)
    return actor, critic


def share_of(batch, engine):
    """Return the sequences of a batch that this rank works on."""
    return batch.select(divide(batch.lengths, engine.dp_size, False)[engine.dp_rank])


def dump_stages(kind: str, model: str, folder: Path, task: str, *overrides: str) -> None:
    """Run two steps, and dump every stage of the second."""
    this_device = device.init()
    config = configure(kind, model, folder, task, *overrides)
    profiler = job.start_profiler(config, this_device, TOTAL_STEPS, STAGES)
    actor, critic = build_engines(kind, config, this_device)
    for step in (1, 2):
        profiler.begin_step(step)
        batch = make_batch(step)
        share = share_of(batch, actor)
        num_tokens = len(batch.input_ids)
        plain = actor.log_probs(share)
        with profiler.stage("actor_compute_log_prob", actor):
            dumped = actor.log_probs(share)
        for without_dump, with_dump in zip(plain, dumped, strict=True):
            assert torch.equal(without_dump, with_dump), "a dump changes the results"
        # An adapter's base is computed with the actor's own modules, under another name.
        with profiler.stage("ref_compute_log_prob", actor):
            actor.log_probs(share)
        with profiler.stage("compute_values", critic):
            critic.values(share)
        with profiler.stage("critic_update", critic):
            critic.train_batch(share, value_loss(num_tokens), step)
        with profiler.stage("actor_update", actor):
            actor.train_batch(share, make_loss(num_tokens), step)
        metrics = profiler.end_step()
    if dist.get_rank() == 0:
        print(metrics, flush=True)
    profiler.close()
    device.shutdown()


def dump_layouts(models: Path, folder: Path) -> None:
    """Dump the same update on each layout for this number of ranks."""
    this_device = device.init()
    for name, layout in LAYOUTS[dist.get_world_size()].items():
        new_layout()
        settings = ["data.max_tokens_per_micro_batch=96", *layout.settings]
        model = models / layout.model
        config = configure(layout.engine, model, folder / name, "statistics", *settings)
        profiler = job.start_profiler(config, this_device, TOTAL_STEPS, STAGES)
        actor, critic = build_engines(layout.engine, config, this_device)
        batch = make_batch(2)
        share = share_of(batch, actor)
        profiler.begin_step(2)
        with profiler.stage("compute_values", critic):
            critic.values(share)
        with profiler.stage("actor_update", actor):
            results = actor.train_batch(share, make_loss(len(batch.input_ids)), 1)
        profiler.close()
        if dist.get_rank() == 0:
            metrics = {f"actor/{key}": value for key, value in results.items()}
            line = json.dumps({"step": 2, **metrics})
            (folder / name / "metrics.jsonl").write_text(line + "\n")
        del actor, critic
    device.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "layouts":
        dump_layouts(*map(Path, sys.argv[2:]))
    else:
        dump_stages(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
