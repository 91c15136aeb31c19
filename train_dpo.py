"""Preference training: DPO, IPO, SimPO, ORPO and KTO, on pairs of answers or on labelled ones.

    python train_dpo.py model.path=DIR data.train_files=pairs.jsonl     one process, CPU or GPU
    torchrun --nproc-per-node 8 train_dpo.py my.yaml optim.lr=5e-7      one node
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 train_dpo.py my.yaml                 two nodes
    sbatch examples/slurm/dpo.sbatch my.yaml                            Slurm: srun starts the ranks
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 \\
        train_dpo.py configs/demo/dpo.yaml                              a laptop's CPU

Arguments are YAML files and key=value pairs. Pairs win over files, and later ones over earlier
ones. configs/dpo.yaml lists every key. The losses are in algorithms/preference_losses.py, or your
own: algorithm.loss=my_file.py:name. docs/preferences.md describes rows, losses and the reference.

Checkpoints, signals, exit codes and the files of a run are the same as in train_sft.py.
"""

import time
from dataclasses import dataclass

from common.counting import count_of
from config import run as run_script
from job.progress import Progress, adapter, identify, identify_tokens


@dataclass(kw_only=True)
class DpoProgress(Progress):
    """Progress of a run of preference training.

    Attributes:
        skipped: number of updates skipped because a gradient was not finite.
    """

    skipped: int = 0


def main(config):
    # Imported only here, so that --help and configuration errors appear at once.
    from engines.checkpoint.export import export_hf
    from engines.parallel import device
    from job.end_tokens import new_end_ids
    from job.plan import print_plan
    from job.setup import cache_directory
    from preferences.reference import role_configs
    from preferences.settings import check_settings
    from preferences.trainer import PreferenceTrainer

    loss = check_settings(config)
    run = set_up(config, loss)
    end_ids = new_end_ids(run)
    if config.dry_run:
        device.on_rank0(print_plan, run, role_configs(run.config, loss))
        return device.shutdown()
    trainer = PreferenceTrainer.build(
        run.config,
        loss,
        run.device,
        run.total_steps,
        [*run.datasets().values()],
        cache_directory(run.config),
    )
    trainer.stage = run.profiler.stage
    engine = trainer.engine
    engine.new_end_ids = end_ids
    if run.resume_from:
        run.progress.take_counters(run.checkpointer.load(run.resume_from, engine))
    num_rows = count_of(len(run.train), "row")
    num_ranks = count_of(engine.dp_size, "data-parallel rank")
    run.start(f"{num_rows}, {num_ranks} on {run.device.type}")
    train(run, trainer)
    run.end_loop()
    if run.is_complete:
        export_hf(engine, run.tokenizer, run.output_dir / "hf", run.base_name)
    run.close()
    device.shutdown()


def set_up(config, loss):
    """Return a job.run.Run with everything but the models.

    The user's mistakes are reported here, before any weights are loaded; cheap checks come first.
    """
    from data.columns import check_column_keys
    from data.preference_dataset import OPTIONS, PreferenceDataset, tokenize_preferences
    from data.selection import training_rows, validation_rows
    from engines.parallel.device import on_rank0
    from job.models import check_token_ids, report_unused_mtp, warn_of_length
    from job.order import sampler_reads
    from job.run import Run
    from preferences.reference import check_models, identify_loss, model_stages, role_configs
    from preferences.settings import check_lengths, check_rows

    run = Run.begin(config)
    config = run.config
    hf_config = check_models(config, loss, run.world_size)
    report_unused_mtp(config, hf_config)
    run.load_tokenizer()

    def load_rows(selection, with_rows=False):
        path = run.tokens_of(tokenize_preferences, selection, with_rows)
        return PreferenceDataset.load(path)

    run.train = load_rows(training_rows(config.data), sampler_reads(config, "rows"))
    selection = validation_rows(config.data)
    run.val = load_rows(selection) if selection else None
    datasets = run.datasets()
    check_column_keys(config.data, datasets)
    check_rows(config, loss, datasets)
    check_token_ids(config, hf_config, run.tokenizer, datasets)
    for dataset in datasets.values():
        check_lengths(config, loss, dataset, run.world_size)
    warn_of_length(hf_config, max(int(d.answer_lengths.max()) for d in datasets.values()))
    run.count_steps()
    run.choose_order()
    run.plan_memory(role_configs(config, loss))
    run.start_profiler(model_stages(config, loss, has_validation=run.val is not None))
    progress = DpoProgress(
        identity=identify(config, hf_config, run.train)
        | run.order.identity
        | on_rank0(identify_loss, config, loss),
        tokenization=identify_tokens(config, OPTIONS),
        export_dtype=config.engine.compute_dtype,
        lora=adapter(config, run.base_name),
    )
    run.find_checkpoint(progress)
    return run


def train(run, trainer) -> None:
    """Train until the last step, or until a rank is asked to stop."""
    from engines.parallel import device
    from job.metrics import throughput, with_prefix
    from job.setup import check_skipped
    from preferences.validation import validate

    settings = run.config.trainer
    engine = trainer.engine
    progress = run.progress
    profiler = run.profiler
    batch_size = run.config.data.train_batch_size
    if progress.step == 0 and run.val and settings.val_before_train:
        with profiler.stage("validate", engine):
            metrics = validate(trainer, run.val, batch_size)
        run.tracker.log(0, metrics | profiler.end_step())

    while run.should_continue:
        start = time.perf_counter()
        profiler.begin_step(progress.step + 1)
        with profiler.stage("data"):
            batch = run.train.batch(run.order.rows_of_batch(progress.step))
            num_answer_tokens = int(batch.fields["loss_mask"].sum())
        results = trainer.train_batch(batch, progress.step)
        seconds = time.perf_counter() - start
        progress.step += 1
        progress.skipped += int(results["skipped"])
        flops = engine.flops(batch.lengths, num_answer_tokens)
        metrics = {
            **with_prefix("train", results),
            "train/epoch": progress.step / run.steps_per_epoch,
            "train/skipped": progress.skipped,
            **throughput(run, len(batch.input_ids) / seconds, flops / seconds),
            **device.memory(),
        }
        run.agreement.update(progress.step, run.device)
        check_skipped(settings, progress.skipped, progress.step, run.is_complete)
        if run.is_validation_due:
            with profiler.stage("validate", engine):
                metrics |= validate(trainer, run.val, batch_size)
        metrics |= profiler.end_step()
        metrics["timing/step"] = time.perf_counter() - start
        run.tracker.log(progress.step, metrics)
        # Log first: a run killed between saving and logging would resume without these metrics.
        if run.agreement.save:
            with profiler.stage("save"):
                run.checkpointer.save(progress.step, engine, progress.to_json(), run.tokenizer)


if __name__ == "__main__":
    run_script(main, "dpo.yaml", __doc__)
