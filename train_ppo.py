"""PPO, GRPO and their relatives: every rank trains its share of the model and generates with vLLM in the same process.

    torchrun --nproc-per-node 8 train_ppo.py my.yaml rollout.tensor_parallel_size=2        one node
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train_ppo.py my.yaml
    sbatch examples/slurm/ppo.sbatch my.yaml                                               slurm, srun starts the ranks
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 train_ppo.py configs/demo/ppo.yaml       a laptop's CPU

Arguments are YAML files and key=value pairs, later ones win; configs/ppo.yaml lists every key. Rewards: rewards.py, or
reward.function=my_file.py:name. SIGTERM or SIGUSR1 saves a checkpoint and exits 0; the same command goes on from there.
(torchrun does not hand on SIGUSR1 and kills after 30 s: give it --signals-to-handle SIGTERM,SIGUSR1
--shutdown-timeout 600.) Mistakes are one line a node and exit code 2.

A step: vLLM wakes with the new weights -> prompts -> responses -> sleep -> rewards -> log-probabilities and values ->
advantages -> critic, actor. Every rank holds the whole step's tokens in host memory and works out the same advantages from them;
only forward and backward are divided. So nothing that is learned depends on the number of ranks.
"""

import time
from pathlib import Path

from config import InputError, run


def main(config):
    # Imported here, so that --help and a mistake in the configuration answer at once; transformers takes its time.
    import ppo
    from rewards import find
    ppo.check(config)
    find(config.reward.function)

    import torch.distributed as dist
    from omegaconf import OmegaConf

    import job
    import tracking
    from engines import device
    from engines.build import engine_class
    from engines.checkpoint import Checkpointer, export_hf
    from profiling import Profiler
    from profiling.report import write_report
    from rollout.grading import Grader
    from rollout.samples import draw_samples
    from rollout.vllm import Rollout, check as check_rollout, used_gib

    stop, this_device = job.StopSignal(), device.init()
    rank, out, trainer, algorithm = dist.get_rank(), Path(config.output_dir), config.trainer, config.algorithm
    job.bind_cpus(config, this_device)
    config = job.with_local_model(config)
    check = engine_class(config.model_engine).check
    shapes = {role: check(settings, dist.get_world_size()) for role, settings in ppo.roles(config).items()}
    for role, shape in shapes.items():
        if shape.vocab_size != shapes["actor"].vocab_size:
            raise InputError(f"{role}.path={config[role].path} has another vocabulary than model.path={config.model.path}")
    check_rollout(config, dist.get_world_size())
    tracking.check(config)
    tokenizer = job.load_tokenizer(config)
    train, val = (load_prompts(config, files, tokenizer) for files in (config.data.train_files, config.data.val_files))
    steps_per_epoch, total_steps = job.count_steps(config, train)
    device.on_rank0(job.check_output, out)
    profiler = job.start_profiler(config, this_device, total_steps, ppo.model_stages(config, this_device.type))
    if config.dry_run:
        device.on_rank0(print_plan, config, this_device, train, val, total_steps)
        return device.shutdown()

    checkpointer = Checkpointer(out / "checkpoints", trainer.max_checkpoints, trainer.async_save)
    progress = {"step": 0, "batch": 0, "skipped": 0, "failures": 0, "kl_coef": algorithm.kl_ctrl.kl_coef,
                "run": identity(config, shapes["actor"], train), "export_dtype": config.engine.compute_dtype}
    resume_from = device.on_rank0(job.find_resume, config, checkpointer.latest(), progress)
    actor, critic, reference = build_engines(config, this_device, total_steps)
    others = {"critic": critic} if critic else {}
    if resume_from:
        progress = checkpointer.load(resume_from, actor, **others) | {"export_dtype": config.engine.compute_dtype}
        if algorithm.kl_ctrl.type == "fixed":
            progress["kl_coef"] = algorithm.kl_ctrl.kl_coef
    # What waits in host memory while somebody else needs the device. It comes back by itself when its engine is used.
    waiting = [part for part in ("parameters", "optimizer") if config.offload[part]]
    for engine in (actor, *others.values()):
        engine.offload(*waiting)        # a resume has filled them
    vllm = Rollout(config, this_device)
    grader = Grader(config.reward.function, config.reward.num_workers, config.reward.timeout)
    step = progress["step"]
    if rank == 0:
        OmegaConf.save(config, out / "config.yaml")
    tracker, host_group = tracking.Tracker(config, rank, step, total_steps), dist.new_group(backend="gloo")
    tracker.say(f"{'resuming from ' + str(resume_from) if resume_from else 'starting'}: step {step} of {total_steps}, "
                f"{steps_per_epoch} an epoch, {len(train)} prompts, {actor.dp_size} data-parallel ranks and "
                f"{vllm.num_replicas} of vLLM on {this_device.type}")

    def wake():
        if vllm.weights_valid:                                  # it has validated since the last update
            return
        with profiler.stage("offload"):
            actor.offload(*(part for part in waiting if part == "optimizer"))
            for engine in others.values():
                engine.offload(*waiting)
        with profiler.stage("wake"):
            vllm.wake("weights")
        with profiler.stage("update_weights"):
            vllm.update_weights(actor.export_weights())
        with profiler.stage("offload"):
            actor.offload(*waiting)
        with profiler.stage("wake"):
            vllm.wake("kv_cache")

    def draw(dataset, rows, sampling, *seed, first_group=0, clock=profiler):
        return draw_samples(vllm, grader, dataset, rows, sampling, (trainer.seed, *seed), tokenizer, clock, host_group,
                            config.reward.max_failure_rate, first_group)

    def validate():
        wake()
        with profiler.stage("validate"):
            samples = draw(val, range(len(val)), config.validation, -1, clock=Profiler())
        tracker.say(samples.table(4))
        log_failures(samples)
        return ppo.validation_metrics(samples, config.reward.function, config.validation.n)

    def log_failures(samples):
        if rank == 0:
            samples.append_failures(out / "failures.jsonl", step)

    if step == 0 < total_steps and val and trainer.val_before_train:
        tracker.log(0, validate() | profiler.end_step())
    while step < total_steps and not stop.requested:
        start = time.perf_counter()
        profiler.begin_step(step + 1)
        wake()
        samples, progress["batch"] = ppo.collect(config, draw, train, progress["batch"])
        with profiler.stage("sleep"):
            metrics = vllm.sleep()
        batch, minis = samples.batch, ppo.mini_batches(config, samples)
        if ppo.needs_old_log_probs(config, len(minis), step):
            with profiler.stage("actor_compute_log_prob", actor):
                batch.fields["old_log_probs"] = ppo.log_probs(actor, batch, minis)
        if reference:
            with profiler.stage("ref_compute_log_prob", reference):
                batch.fields["ref_log_probs"] = ppo.log_probs(reference, batch, minis)
                reference.offload(*["parameters"] * config.offload.reference)
        if critic:
            with profiler.stage("compute_values", critic):
                batch.fields["values"] = ppo.ask(critic, critic.values, batch, minis)
        with profiler.stage("advantages"):
            metrics |= ppo.set_advantages(config, samples, minis, progress["kl_coef"])
        if critic:
            with profiler.stage("critic_update", critic):
                metrics |= ppo.update(critic, batch, minis, ppo.critic_loss(config), step, algorithm.ppo_epochs, "critic")
                critic.offload(*waiting)
        if not critic or step >= config.critic.warmup_steps:
            with profiler.stage("actor_update", actor):
                loss_fn = ppo.actor_loss(config, len(samples))
                metrics |= ppo.update(actor, batch, minis, loss_fn, step, algorithm.ppo_epochs, "actor")
        metrics |= {"perf/memory_training_gib": used} if (used := used_gib(this_device)) else device.memory()
        step += 1
        skipped = metrics.get("actor/skipped", 0) + metrics.get("critic/skipped", 0)
        progress |= {"step": step, "skipped": progress["skipped"] + int(skipped),
                     "failures": progress["failures"] + len(samples.failures),
                     "kl_coef": ppo.next_kl_coef(config, progress["kl_coef"], metrics, len(samples))}
        stop.agree(this_device)
        last = step == total_steps
        if progress["skipped"] > trainer.max_skipped_steps:
            raise InputError(f"the gradient was not finite in {progress['skipped']} updates, more than "
                             f"trainer.max_skipped_steps={trainer.max_skipped_steps}: lower optim.lr or look at the rewards")
        if rank == 0 and trainer.rollout_freq > 0 and step % trainer.rollout_freq == 0:
            samples.write(out / "rollouts" / f"step_{step}.jsonl")
        log_failures(samples)
        seconds = time.perf_counter() - start
        # Not when asked to stop: the time that is left is for the checkpoint.
        if val and not stop.requested and (last or trainer.test_freq > 0 and step % trainer.test_freq == 0):
            metrics |= validate()
        tracker.log(step, metrics | profiler.end_step() | {
            "train/epoch": progress["batch"] / steps_per_epoch, "train/skipped": progress["skipped"],
            "reward/failures": progress["failures"], "timing/step": time.perf_counter() - start,
            "perf/tokens_per_second": len(batch.input_ids) / seconds / dist.get_world_size()})
        # Behind the step's line: a run that is killed in between would go on without it.
        if last or stop.requested or trainer.save_freq > 0 and step % trainer.save_freq == 0:
            if vllm.awake:                  # a checkpoint takes what waits in host memory back to the device
                vllm.sleep()
            with profiler.stage("save"):
                checkpointer.save(step, actor, progress, tokenizer, **others)

    profiler.close()
    checkpointer.wait()
    tracker.log_rest(step, profiler.end_step())
    grader.close()
    if step < total_steps:
        tracker.say(f"stopped by a signal after step {step}; the same command goes on from there")
    else:
        export_hf(actor, tokenizer, out / "hf")
        tracker.say(f"model: {out / 'hf'}")
    tracker.close()
    if rank == 0:
        print(f"curves: {write_report(out)}", flush=True)
    dist.barrier()
    vllm.shutdown()
    device.shutdown()


def build_engines(config, this_device, total_steps: int):
    """(actor, critic or None, reference or None); each waits in host memory while the next is loaded."""
    import ppo
    from engines.build import engine_class
    waits = {role: config.offload.reference if role == "reference" else config.offload.parameters for role in ppo.roles(config)}
    engines = {}
    for role, settings in ppo.roles(config).items():
        engines[role] = engine_class(config.model_engine)(
            settings, this_device, total_steps, optimize=role != "reference", critic=role == "critic",
            temperature=config.rollout.temperature)
        engines[role].offload(*["parameters"] * waits[role])
    return engines["actor"], engines.get("critic"), engines.get("reference")


def load_prompts(config, files, tokenizer):
    """The prompts of files (None: None). Rank 0 tokenizes what is not in the cache, the others read it."""
    from data.prompts import PromptDataset, tokenize_prompts
    from engines.device import on_rank0
    if files is None:
        return None
    cache = Path(config.data.cache_dir or Path.home() / ".cache" / "rankwise")
    return PromptDataset.load(on_rank0(tokenize_prompts, files, tokenizer, config.data, cache, config.model.path))


def identity(config, hf_config, train) -> dict:
    """What must not change between a checkpoint and its resume."""
    return {"model_engine": config.model_engine, "data.train_batch_size": config.data.train_batch_size,
            "trainer.seed": config.trainer.seed, "rollout.n": config.rollout.n, "optim.name": config.optim.name,
            "algorithm.adv_estimator": config.algorithm.adv_estimator,
            "the hash of data, tokenizer and their options": train.name,
            "the model": f"{hf_config.model_type} of {hf_config.num_hidden_layers} layers of {hf_config.hidden_size}"}


def print_plan(config, this_device, train, val, total_steps: int) -> None:
    import torch.distributed as dist
    from omegaconf import OmegaConf

    import job
    import ppo
    print(OmegaConf.to_yaml(config))
    world, tp = dist.get_world_size(), config.rollout.tensor_parallel_size
    print(f"layout: {world} ranks on {this_device.type} = {job.layout(config, world)} to train, {world // tp} vLLM x {tp} "
          "tensor-parallel to generate")
    for name, dataset in (("train", train), ("val", val)):
        if dataset:
            print(f"{name}: {', '.join(f'{k} {v:,}' for k, v in dataset.stats.items())}")
    print(f"steps: {total_steps}")
    for role, settings in ppo.roles(config).items():
        job.print_memory(settings, world, this_device.type, role)
    print(f"vLLM while awake: {config.rollout.gpu_memory_utilization:.0%} of the device" if this_device.type != "cpu" else
          f"vLLM's KV cache: {config.rollout.kv_cache_gib or 1.0} GiB")


if __name__ == "__main__":
    run(main, "ppo.yaml", __doc__)
