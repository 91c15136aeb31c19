"""PPO, GRPO and their relatives: every rank trains its share of the model and generates with vLLM in the same process.

    torchrun --nproc-per-node 8 train_ppo.py my.yaml rollout.tensor_parallel_size=2        one node
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train_ppo.py my.yaml
    sbatch examples/slurm/ppo.sbatch my.yaml                                               slurm, srun starts the ranks
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 train_ppo.py configs/demo/ppo.yaml       a laptop's CPU

Arguments are YAML files and key=value pairs, later ones win; configs/ppo.yaml lists every key. Rewards: rewards.py, or
reward.function=my_file.py:name. SIGTERM, SIGUSR1 or Ctrl-C saves a checkpoint and exits 0; the same command goes on from there.
(torchrun does not forward SIGUSR1, and kills after 30 s: give it --signals-to-handle SIGTERM,SIGUSR1
--shutdown-timeout 600.) A mistake is one line per node and exit code 2.

A step: vLLM wakes with the new weights -> prompts -> responses -> rewards -> sleep -> each rank gets the tokens that it trains
on -> log-probabilities and values -> advantages -> critic, actor. Every rank knows the score and the length of every response,
from which mini-batches, advantages and denominators follow. So nothing that is learned depends on the number of ranks.
"""

import time
from pathlib import Path

from config import InputError, run


def main(config):
    # Imported here, so that --help and a mistake in the configuration answer at once; transformers takes its time.
    from rl.functions import inputs_read
    from rl.settings import check_settings
    from rollout.grading.grader import Grader

    check_settings(config)
    grader = Grader(config)
    if grader.takes_groups and "baseline" in inputs_read(config, "adv_estimator"):
        raise InputError(
            f"reward.function={config.reward.function} grades the responses of a group together, but "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} has a greedy response graded alone"
        )

    import torch.distributed as dist

    from engines.checkpoint.checkpointer import Checkpointer
    from engines.parallel import device
    from job import setup as job, tracking
    from rl import models
    from rl.estimation import next_kl_coef
    from rl.roles import Roles
    from rollout.records import write_samples
    from rollout.vllm.settings import check_rollout, check_vllm_model

    agreed = job.Agreement(config.trainer.save_freq, config.trainer.save_minutes)
    this_device = device.init(config.trainer.timeout_minutes)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out, trainer, algorithm = Path(config.output_dir), config.trainer, config.algorithm
    job.check_directories(config)
    heartbeat = job.start_heartbeat(config)
    job.bind_cpus(config, this_device)
    config = job.with_local_model(config)
    hf_config = models.check_models(config, world_size)
    check_rollout(config, world_size)
    tracking.check(config)
    job.tell_of_mtp(config, hf_config)
    tokenizer = job.load_tokenizer(config)
    reader = job.load_reader(config, tokenizer)
    train, val = (
        load_prompts(config, files, tokenizer, reader)
        for files in (config.data.train_files, config.data.val_files)
    )
    for said in {grader.check(prompts[0].row) for prompts in (train, val) if prompts}:
        if said and rank == 0:
            print(said, flush=True)
    steps_per_epoch, total_steps = job.count_steps(config, train)
    if config.critic.warmup_steps >= total_steps > 0:
        raise InputError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves the actor none of the {total_steps} steps"
        )
    check_vllm_model(config)
    profiler = job.start_profiler(
        config, this_device, total_steps, models.hooked_stages(config, this_device.type)
    )
    checkpointer = Checkpointer(out / "checkpoints", trainer.max_checkpoints, trainer.async_save)
    progress = {
        "step": 0,
        "batch": 0,
        "failures": 0,
        "kl_coef": algorithm.kl_ctrl.kl_coef,
        **{f"{role}_{what}": 0 for role in ("actor", "critic") for what in ("updates", "skipped")},
        "run": job.identity(config, hf_config, train)
        | {
            "rollout.n": config.rollout.n,
            "algorithm.adv_estimator": algorithm.adv_estimator,
            "critic": models.uses_critic(config),
        },
        "export_dtype": config.engine.compute_dtype,
        "lora": job.adapter(config),
    }
    resume_from = device.on_rank0(
        job.find_resume,
        config,
        checkpointer.find(trainer.resume, config.dry_run),
        progress,
        total_steps,
    )
    if config.dry_run:
        device.on_rank0(
            job.print_plan,
            models.role_configs(config),
            this_device,
            {"train": train, "val": val},
            total_steps,
            resume_from,
        )
        device.on_rank0(grade_one, config, grader, train)
        return device.shutdown()

    roles = Roles(config, this_device, tokenizer, grader, profiler, total_steps)
    if resume_from:
        progress |= roles.load(checkpointer, resume_from) | {
            key: progress[key] for key in ("run", "export_dtype", "lora")
        }
        if algorithm.kl_ctrl.type == "fixed":
            progress["kl_coef"] = algorithm.kl_ctrl.kl_coef
    roles.start_rollout()
    step = progress["step"]
    device.on_rank0(job.write_config, config)
    device.on_rank0(tracking.supersede, out / "failures.jsonl", step if resume_from else -1)
    tracker = tracking.Tracker(config, rank, step, total_steps)
    tracker.say(
        f"{'resuming from ' + str(resume_from) if resume_from else 'starting'}: step {step} of {total_steps}, "
        f"{steps_per_epoch} per epoch, {len(train)} prompts, {roles.actor.dp_size} data-parallel ranks and "
        f"{roles.rollout.num_replicas} of vLLM on {this_device.type}"
    )
    tracker.say(agreed.begin(total_steps))
    profiler.on_stage = heartbeat.enter
    device.set_timeouts(
        trainer.timeout_minutes + 1
    )  # after the heartbeat's limit, which has more to say
    if step == 0 < total_steps and val and trainer.val_before_train:
        tracker.log(0, validate(config, roles, val, tracker, step) | profiler.end_step())

    while step < total_steps and not agreed.stop:
        start = time.perf_counter()
        profiler.begin_step(step + 1)
        roles.wake()
        samples, progress["batch"] = roles.collect(train, progress["batch"], step + 1)
        metrics = roles.sleep()
        share = roles.divide(samples)
        roles.compute_log_probs(share, step)
        roles.compute_values(share)
        metrics |= roles.compute_advantages(samples, share, progress["kl_coef"])
        metrics |= roles.update_critic(share, step)
        metrics |= roles.update_actor(share, step)
        metrics |= roles.memory()
        step += 1
        for role in (role for role in ("actor", "critic") if f"{role}/skipped" in metrics):
            progress[f"{role}_updates"] += share.num_mini_batches * algorithm.ppo_epochs
            progress[f"{role}_skipped"] += int(metrics[f"{role}/skipped"])
        progress |= {
            "step": step,
            "failures": progress["failures"] + len(samples.failures),
            "kl_coef": next_kl_coef(config, progress["kl_coef"], metrics, len(samples)),
        }
        agreed.after(step, this_device)
        last = step == total_steps
        for role in ("actor", "critic"):
            job.check_skipped(
                trainer, progress[f"{role}_skipped"], progress[f"{role}_updates"], last
            )
        if trainer.rollout_freq > 0 and step % trainer.rollout_freq == 0:
            write_samples(samples, out / "rollouts" / f"step_{step}.jsonl", roles.host_group)
        seconds = time.perf_counter() - start
        # Not when asked to stop: the time that is left is for the checkpoint.
        if (
            val
            and not agreed.stop
            and (last or trainer.test_freq > 0 and step % trainer.test_freq == 0)
        ):
            metrics |= validate(config, roles, val, tracker, step)
        tracker.log(
            step,
            metrics
            | profiler.end_step()
            | {
                "train/epoch": progress["batch"] / steps_per_epoch,
                "train/skipped": progress["actor_skipped"] + progress["critic_skipped"],
                "reward/failures": progress["failures"],
                "timing/step": time.perf_counter() - start,
                "perf/tokens_per_second": samples.lengths.sum().item() / seconds / world_size,
            },
        )
        # After the step's line: a run that is killed in between would go on without it.
        if agreed.save:
            roles.save(checkpointer, step, progress)

    heartbeat.close()
    profiler.close()
    checkpointer.wait()
    tracker.log_rest(step, profiler.end_step())
    grader.close()
    if step < total_steps:
        tracker.say(f"stopped by a signal after step {step}; the same command goes on from there")
    else:
        roles.export(out / "hf")
        tracker.say(f"{'adapter' if config.model.lora.rank else 'model'}: {out / 'hf'}")
    tracker.close()
    dist.barrier()
    roles.close()
    device.shutdown()


def validate(config, roles, val, tracker, step: int) -> dict[str, float]:
    """Metrics of responses to all of val, which are written to a file; some are shown."""
    from rl.validation import validation_metrics
    from rollout.records import examples, write_samples

    samples = roles.validate(val, step)
    tracker.log_samples(step, examples(samples, 16, roles.host_group))
    if config.trainer.rollout_freq > 0:
        write_samples(
            samples, Path(config.output_dir) / "validation" / f"step_{step}.jsonl", roles.host_group
        )
    return validation_metrics(samples, config.reward.function, config.validation.n)


def load_prompts(config, files, tokenizer, reader):
    """The prompts of files (None: None). Rank 0 tokenizes what is not in the cache, the others read it."""
    from data.prompts import PromptDataset, tokenize_prompts
    from engines.parallel.device import on_rank0
    from job import setup as job

    if files is None:
        return None
    return PromptDataset.load(
        on_rank0(
            tokenize_prompts,
            files,
            tokenizer,
            config.data,
            job.cache_directory(config),
            config.model.path,
            reader,
        ),
        reader,
    )


def grade_one(config, grader, train) -> None:
    """Show what the reward makes of the first prompt with its true answer, where the row has one, as the response. Raises
    InputError when it cannot be graded."""
    from rollout.grading.grader import Failure

    prompt, num_calls = train[0], config.rollout.n if grader.takes_groups else 1
    response = str(prompt.row.get("answer", ""))
    result = grader.grade([(prompt.text, response, prompt.row)] * num_calls, [0] * num_calls)[0]
    if isinstance(result, Failure):
        raise InputError(
            f"reward.function={config.reward.function} cannot grade the response {response[:60]!r} to the first "
            f"prompt: {result.summary}"
        )
    parts = "".join(f", {name} {value:g}" for name, value in result.parts.items())
    print(
        f"reward: {config.reward.function} gives {result.score:g}{parts} for the response {response[:60]!r} to the first prompt"
    )


if __name__ == "__main__":
    run(main, "ppo.yaml", __doc__)
