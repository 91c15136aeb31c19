"""Supervised fine-tuning: every rank builds its share of the model and runs this loop.

    python train_sft.py model.path=DIR data.train_files=train.jsonl                        one process, CPU or GPU
    torchrun --nproc-per-node 8 train_sft.py my.yaml optim.lr=2e-5                         one node
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train_sft.py my.yaml
    sbatch examples/slurm/sft.sbatch my.yaml                                               slurm, srun starts the ranks
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 train_sft.py configs/demo/sft.yaml       a laptop's CPU

Arguments are YAML files and key=value pairs, later ones win; configs/sft.yaml lists every key. SIGTERM, SIGUSR1 or Ctrl-C saves
a checkpoint and exits 0; the same command goes on from there. (torchrun does not forward SIGUSR1, and kills after
30 s: give it --signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 600.) A mistake is one line per node and exit code 2.
"""

import time
from pathlib import Path

from config import InputError, run


def main(config):
    # Imported here, so that --help and a mistake in the configuration answer at once.
    import torch.distributed as dist

    from data.batching.packing import global_batch
    from engines.build import engine_class
    from engines.checkpoint.checkpointer import Checkpointer
    from engines.checkpoint.export import export_hf
    from engines.parallel import device
    from job import setup as job, tracking

    agreed = job.Agreement(config.trainer.save_freq, config.trainer.save_minutes)
    this_device = device.init(config.trainer.timeout_minutes)
    rank, out, trainer = dist.get_rank(), Path(config.output_dir), config.trainer
    job.check_directories(config)
    heartbeat = job.start_heartbeat(config)
    job.bind_cpus(config, this_device)
    config = job.with_local_model(config)
    hf_config = engine_class(config.model_engine).check(config, dist.get_world_size())
    tracking.check(config)
    job.tell_of_mtp(config, hf_config)
    tokenizer = job.load_tokenizer(config)
    reader = job.load_reader(config, tokenizer)
    train, val = (
        load_data(config, files, tokenizer, reader)
        for files in (config.data.train_files, config.data.val_files)
    )
    job.warn_of_length(
        hf_config, max(int(dataset.lengths.max()) for dataset in (train, val) if dataset)
    )
    steps_per_epoch, total_steps = job.count_steps(config, train)
    profiler = job.start_profiler(
        config, this_device, total_steps, ["train_batch", *["validate"] * bool(val)]
    )
    checkpointer = Checkpointer(out / "checkpoints", trainer.max_checkpoints, trainer.async_save)
    progress = {
        "step": 0,
        "skipped": 0,
        "run": job.identity(config, hf_config, train),
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
            {None: config},
            this_device,
            {"train": train, "val": val},
            total_steps,
            resume_from,
        )
        return device.shutdown()

    engine = engine_class(config.model_engine)(config, this_device, total_steps)
    if resume_from:
        progress = checkpointer.load(resume_from, engine) | {
            key: progress[key] for key in ("run", "export_dtype", "lora")
        }
    step = progress["step"]
    device.on_rank0(job.write_config, config)
    tracker = tracking.Tracker(config, rank, step, total_steps)
    tracker.say(
        f"{'resuming from ' + str(resume_from) if resume_from else 'starting'}: step {step} of {total_steps}, "
        f"{steps_per_epoch} per epoch, {len(train)} rows, {engine.dp_size} data-parallel ranks on {this_device.type}"
    )
    tracker.say(agreed.begin(total_steps))
    profiler.on_stage = heartbeat.enter
    device.set_timeouts(
        trainer.timeout_minutes + 1
    )  # after the heartbeat's limit, which has more to say
    if step == 0 and val and trainer.val_before_train:
        with profiler.stage("validate", engine):
            metrics = validate(engine, val, config.data.train_batch_size)
        tracker.log(0, metrics | profiler.end_step())

    peak = device.peak_flops(this_device)
    while step < total_steps and not agreed.stop:
        start = time.perf_counter()
        profiler.begin_step(step + 1)
        with profiler.stage("data"):
            rows = global_batch(len(train), config.data.train_batch_size, trainer.seed, step)
            batch = train.batch(rows)
            num_trained = int(batch.fields["loss_mask"].sum())
            of_images = engine.image_flops(batch)
            plan = engine.plan(batch.lengths, of_images)
        with profiler.stage("train_batch", engine):
            results = engine.train_batch(
                batch.select(plan.sequences), sft_loss(num_trained), step, plan.micro_batches
            )
        seconds = time.perf_counter() - start
        step += 1
        progress |= {"step": step, "skipped": progress["skipped"] + int(results["skipped"])}
        metrics = {k if "/" in k else f"train/{k}": v for k, v in results.items()} | {
            "train/epoch": step / steps_per_epoch,
            "train/skipped": progress["skipped"],
            "perf/tokens_per_second": len(batch.input_ids) / seconds / dist.get_world_size(),
            **plan.metrics,
            **device.memory(),
        }
        if peak:
            flops = engine.flops(batch.lengths, num_trained) + sum(of_images)
            metrics["perf/mfu"] = flops / seconds / dist.get_world_size() / peak
        agreed.after(step, this_device)
        last = step == total_steps
        job.check_skipped(trainer, progress["skipped"], step, last)
        # Not when asked to stop: the time that is left is for the checkpoint.
        if (
            val
            and not agreed.stop
            and (last or trainer.test_freq > 0 and step % trainer.test_freq == 0)
        ):
            with profiler.stage("validate", engine):
                metrics |= validate(engine, val, config.data.train_batch_size)
        tracker.log(
            step, metrics | profiler.end_step() | {"timing/step": time.perf_counter() - start}
        )
        # Behind the step's line: a run that is killed in between would go on without it.
        if agreed.save:
            with profiler.stage("save"):
                checkpointer.save(step, engine, progress, tokenizer)

    heartbeat.close()
    profiler.close()
    checkpointer.wait()
    tracker.log_rest(step, profiler.end_step())
    if step < total_steps:
        tracker.say(f"stopped by a signal after step {step}; the same command goes on from there")
    else:
        export_hf(engine, tokenizer, out / "hf")
        tracker.say(f"{'adapter' if config.model.lora.rank else 'model'}: {out / 'hf'}")
    tracker.close()
    device.shutdown()


def sft_loss(num_tokens):
    """Mean negative log-likelihood over the num_tokens trained tokens of the whole batch, as a sum of parts."""

    def loss_fn(log_probs, entropy, fields):
        mask = fields["loss_mask"]
        return -(log_probs * mask).sum() / num_tokens, {
            "entropy": (entropy.detach() * mask).sum() / num_tokens
        }

    return loss_fn


def validate(engine, val, batch_size: int) -> dict[str, float]:
    """Over every row of val: the mean negative log-likelihood of trained tokens, and the share of rows whose last answer
    greedy decoding would reproduce whole. (It does exactly when each of its tokens is the likeliest one behind the true
    ones, so one forward pass tells, without decoding.)"""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    totals = torch.zeros(
        4, dtype=torch.float64
    )  # negative log-likelihood, tokens, exact rows, rows
    for start in tqdm(
        range(0, len(val), batch_size),
        desc="validate",
        leave=False,
        disable=dist.get_rank() != 0 or None,
    ):
        rows = range(start, min(start + batch_size, len(val)))
        plan = engine.plan(val.lengths[rows].tolist())
        batch = val.batch([rows[i] for i in plan.sequences])
        log_probs, _, greedy = (x.cpu() for x in engine.log_probs(batch, plan.micro_batches))
        mask, wrong = batch.fields["loss_mask"], (batch.fields["answer_mask"] > 0) & ~greedy
        row_of_token = torch.repeat_interleave(torch.arange(len(batch)), batch.cu_seqlens.diff())
        wrong_rows = torch.zeros(len(batch)).index_add_(0, row_of_token, wrong.float()) > 0
        counted = plan.speaks(engine.dp_rank)  # a row that ranks share counts once
        mask = mask * counted[row_of_token]
        totals += torch.tensor(
            [
                -(log_probs.double() * mask).sum(),
                mask.sum(),
                (counted & ~wrong_rows).sum(),
                counted.sum(),
            ]
        )
    loss, tokens, exact, num_rows = engine.sum_over_dp(totals).tolist()
    return {"val/loss": loss / tokens, "val/exact_match": exact / num_rows}


def load_data(config, files, tokenizer, reader):
    """The tokenized rows of files (None: None). Rank 0 tokenizes what is not in the cache, the others read it."""
    import torch.distributed as dist

    from data.dataset import TokenDataset, tokenize
    from engines.context_parallel import sequence_limit
    from engines.parallel.device import on_rank0
    from job import setup as job

    if files is None:
        return None
    dataset = TokenDataset.load(
        on_rank0(
            tokenize,
            files,
            tokenizer,
            config.data,
            job.cache_directory(config),
            config.model.path,
            reader,
        ),
        reader,
    )
    longest, (most, said) = (
        int(dataset.lengths.max()),
        sequence_limit(config, dist.get_world_size()),
    )
    if longest > most:
        raise InputError(
            f"a row of {files} has {longest} tokens, more than {said}: raise it, or lower data.max_length with "
            "data.truncation=left, right or drop"
        )
    return dataset


if __name__ == "__main__":
    run(main, "sft.yaml", __doc__)
