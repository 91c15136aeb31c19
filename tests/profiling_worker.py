"""Every stage of a PPO step in which a model of the trainer runs, dumped by msprobe.

    torchrun --nproc-per-node N tests/profiling_worker.py ENGINE MODEL FOLDER TASK [key=value ...]

Writes FOLDER/profile as a run does; train_ppo.py does the same with vLLM around it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import job
from config import load
from engines import device
from tests.fsdp_worker import SETTINGS, divide, make_batch, make_loss
from tests.megatron_worker import value_loss

STAGES = ["actor_compute_log_prob", "ref_compute_log_prob", "compute_values", "critic_update", "actor_update"]


def main(kind: str, model: str, folder: Path, task: str, *more: str) -> None:
    this_device = device.init()
    config = load("sft.yaml", [f"model_engine={kind}", f"model.path={model}", f"output_dir={folder}", *SETTINGS,
                               "data.max_tokens_per_micro_batch=64", "trainer.profile_interval=[2,2]", "profiler.tool=msprobe",
                               "profiler.ranks=all", f"profiler.msprobe.task={task}", *more])
    profiler = job.start_profiler(config, this_device, 2, STAGES)
    if kind == "megatron":
        from engines.megatron.engine import MegatronEngine as Engine
    else:
        from engines.fsdp.engine import FSDPEngine as Engine
    actor, critic = Engine(config, this_device, 2), Engine(config, this_device, 2, critic=True)
    for step in (1, 2):
        profiler.begin_step(step)
        batch = make_batch(step)
        share = batch.select(divide(batch.lengths, actor.dp_size, False)[actor.dp_rank])
        plain = actor.log_probs(share)
        with profiler.stage("actor_compute_log_prob", actor):
            dumped = actor.log_probs(share)
        assert all(torch.equal(a, b) for a, b in zip(plain, dumped, strict=True)), "a dump changes what is answered"
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
