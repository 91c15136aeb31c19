"""Every stage of a PPO step in which a model of the trainer runs, dumped by msprobe; or an update on several layouts.

    torchrun --nproc-per-node N tests/profiling/profiling_worker.py ENGINE MODEL FOLDER TASK [key=value ...]
    torchrun --nproc-per-node N tests/profiling/profiling_worker.py layouts MODELS FOLDER

Writes FOLDER/profile as a run does (of layouts FOLDER/{name}/profile and metrics.jsonl); train_ppo.py does the same with vLLM
around it.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from config import load
from engines.parallel import device
from job import setup as job
from tests.engines.megatron_worker import new_layout, value_loss
from tests.support.training import SETTINGS, divide, make_batch, make_loss

STAGES = [
    "actor_compute_log_prob",
    "ref_compute_log_prob",
    "compute_values",
    "critic_update",
    "actor_update",
]
TP2, PP2 = "engine.tensor_model_parallel_size=2", "engine.pipeline_model_parallel_size=2"
NO_SP, WHOLE = "engine.sequence_parallel=false", "data.max_tokens_per_micro_batch=1000"
# By number of ranks: name -> engine, model, settings. Sequence parallelism pads sequences, which may make other micro-batches.
LAYOUTS = {
    1: {"fsdp": ("fsdp", "model", []), "fsdp_whole": ("fsdp", "model", [WHOLE])},
    2: {
        "tp": ("megatron", "model", [TP2, NO_SP]),
        "sp": ("megatron", "model", [TP2]),
        "sp_whole": ("megatron", "model", [TP2, WHOLE]),
        "tp_whole": ("megatron", "model", [TP2, NO_SP, WHOLE]),
        "vpp": ("megatron", "model", [PP2, "engine.virtual_pipeline_model_parallel_size=2"]),
        "recompute": ("megatron", "model", [TP2, NO_SP, "engine.recompute=full"]),
        "dp": ("fsdp", "model", []),
        "head": ("megatron", "head", [PP2]),
    },
    4: {
        "tp_pp": ("megatron", "model", [TP2, PP2, NO_SP]),
        "defect": ("megatron", "late", [TP2, PP2, WHOLE]),
    },
}


def configure(kind: str, model: str, folder: Path, task: str, *more: str):
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
            *more,
        ],
    )


def engine_class(kind: str):
    if kind == "megatron":
        from engines.megatron.engine import MegatronEngine as Engine
    else:
        from engines.fsdp.engine import FSDPEngine as Engine
    return Engine


def main(kind: str, model: str, folder: Path, task: str, *more: str) -> None:
    this_device = device.init()
    config, Engine = configure(kind, model, folder, task, *more), engine_class(kind)
    profiler = job.start_profiler(config, this_device, 2, STAGES)
    actor, critic = Engine(config, this_device, 2), Engine(config, this_device, 2, critic=True)
    for step in (1, 2):
        profiler.begin_step(step)
        batch = make_batch(step)
        share = batch.select(divide(batch.lengths, actor.dp_size, False)[actor.dp_rank])
        plain = actor.log_probs(share)
        with profiler.stage("actor_compute_log_prob", actor):
            dumped = actor.log_probs(share)
        assert all(torch.equal(a, b) for a, b in zip(plain, dumped, strict=True)), (
            "a dump changes what is answered"
        )
        # As an adapter's base is asked: the actor's own modules under another name.
        with profiler.stage("ref_compute_log_prob", actor):
            actor.log_probs(share)
        with profiler.stage("compute_values", critic):
            critic.values(share)
        with profiler.stage("critic_update", critic):
            critic.train_batch(share, value_loss(len(batch.input_ids)), step)
        with profiler.stage("actor_update", actor):
            actor.train_batch(share, make_loss(len(batch.input_ids)), step)
        metrics = profiler.end_step()
    if dist.get_rank() == 0:
        print(metrics, flush=True)
    profiler.close()
    device.shutdown()


def layouts(models: Path, folder: Path) -> None:
    this_device = device.init()
    for name, (kind, model, more) in LAYOUTS[dist.get_world_size()].items():
        new_layout()
        config = configure(
            kind,
            models / model,
            folder / name,
            "tensor",
            "data.max_tokens_per_micro_batch=96",
            *more,
        )
        profiler = job.start_profiler(config, this_device, 2, STAGES)
        actor, critic = (
            engine_class(kind)(config, this_device, 2),
            engine_class(kind)(config, this_device, 2, critic=True),
        )
        batch = make_batch(2)
        share = batch.select(divide(batch.lengths, actor.dp_size, False)[actor.dp_rank])
        profiler.begin_step(2)
        with profiler.stage("compute_values", critic):
            critic.values(share)
        with profiler.stage("actor_update", actor):
            results = actor.train_batch(share, make_loss(len(batch.input_ids)), 1)
        profiler.close()
        if dist.get_rank() == 0:
            (folder / name / "metrics.jsonl").write_text(
                json.dumps({"step": 2, **{f"actor/{k}": v for k, v in results.items()}}) + "\n"
            )
        del actor, critic
    device.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "layouts":
        layouts(*map(Path, sys.argv[2:]))
    else:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
