"""Training of reward models: Bradley-Terry on pairs of answers, or regression on scores.

    python train_rm.py model.path=DIR data.train_files=pairs.jsonl      one process, CPU or GPU
    torchrun --nproc-per-node 8 train_rm.py my.yaml optim.lr=5e-6       one node
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 train_rm.py my.yaml                  two nodes
    sbatch examples/slurm/rm.sbatch my.yaml                             Slurm: srun starts the ranks
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 \\
        train_rm.py configs/demo/rm.yaml                                a laptop's CPU

Arguments are YAML files and key=value pairs. Pairs win over files, and later ones over earlier
ones. configs/rm.yaml lists every key. The losses are in algorithms/reward_losses.py, or your own:
algorithm.loss=my_file.py:name. docs/reward_models.md describes rows and losses, and how
train_ppo.py uses the result. The export is a sequence classifier with one label
(AutoModelForSequenceClassification of transformers).

Checkpoints, signals, exit codes and the files of a run are the same as in train_sft.py.
"""

import time
from dataclasses import dataclass

from common.counting import count_of
from config import run as run_script
from job.progress import Progress, adapter, identify, identify_tokens


@dataclass(kw_only=True)
class RewardProgress(Progress):
    """Progress of the training of a reward model.

    Attributes:
        skipped: number of updates skipped because a gradient was not finite.
        is_classifier: exports of the checkpoint are sequence classifiers.
    """

    skipped: int = 0
    is_classifier: bool = True


def main(config):
    # Imported only here, so that --help and configuration errors appear at once.
    from engines.build import engine_class
    from engines.checkpoint.export import export_hf
    from engines.heads import Head
    from engines.parallel import device
    from job.plan import print_plan
    from reward_models.settings import ROLE, check_settings, choose_padding
    from reward_models.trainer import RewardTrainer

    loss = check_settings(config)
    run = set_up(config, loss)
    padding_id = choose_padding(run.config, run.tokenizer, [*run.datasets().values()])
    if config.dry_run:
        device.on_rank0(print_plan, run, {ROLE: run.config})
        return device.shutdown()
    build = engine_class(run.config.model_engine)
    engine = build(run.config, run.device, run.total_steps, head=Head.VALUES)
    engine.padding_id = padding_id
    if run.resume_from:
        run.progress.take_counters(run.checkpointer.load(run.resume_from, engine))
    num_rows = count_of(len(run.train), "row")
    num_ranks = count_of(engine.dp_size, "data-parallel rank")
    run.start(f"{num_rows}, {num_ranks} on {run.device.type}")
    train(run, RewardTrainer(engine, loss))
    run.end_loop()
    if run.is_complete:
        export_hf(engine, run.tokenizer, run.output_dir / "hf", run.base_name)
    run.close()
    device.shutdown()


def set_up(config, loss):
    """Return a job.run.Run with everything but the model.

    The user's mistakes are reported here, before any weights are loaded; cheap checks come first.
    """
    from data.columns import check_column_keys
    from data.reward_dataset import RewardDataset, tokenize_rewards
    from data.selection import training_rows, validation_rows
    from job.models import check_token_ids, report_unused_mtp, warn_of_length
    from job.order import sampler_reads
    from job.run import Run
    from reward_models.settings import ROLE, check_lengths, check_model, check_rows

    run = Run.begin(config)
    config = run.config
    hf_config = check_model(config, run.world_size)
    report_unused_mtp(config, hf_config)
    run.load_tokenizer()

    def load_rows(selection, with_rows=False):
        path = run.tokens_of(tokenize_rewards, selection, with_rows)
        return RewardDataset.load(path)

    run.train = load_rows(training_rows(config.data), sampler_reads(config, "rows"))
    selection = validation_rows(config.data)
    run.val = load_rows(selection) if selection else None
    datasets = run.datasets()
    check_column_keys(config.data, datasets)
    check_rows(loss, datasets)
    check_token_ids(config, hf_config, run.tokenizer, datasets)
    for dataset in datasets.values():
        check_lengths(config, loss, dataset, run.world_size)
    warn_of_length(hf_config, max(int(d.answer_lengths.max()) for d in datasets.values()))
    run.count_steps()
    run.choose_order()
    run.plan_memory({ROLE: config})
    run.start_profiler(["train_batch", "validate"] if run.val else ["train_batch"])
    run.find_checkpoint(new_progress(run, hf_config, loss))
    return run


def new_progress(run, hf_config, loss) -> RewardProgress:
    """Return the progress before the first step, with the settings that a resumed run must have."""
    from data.reward_dataset import OPTIONS

    config = run.config
    settings = identify(config, hf_config, run.train)
    return RewardProgress(
        identity=settings | run.order.identity | {"algorithm.loss": loss.name},
        tokenization=identify_tokens(config, OPTIONS),
        export_dtype=config.engine.compute_dtype,
        lora=adapter(config, run.base_name),
    )


def train(run, trainer) -> None:
    """Train until the last step, or until a rank is asked to stop."""
    from engines.parallel import device
    from job.metrics import throughput, with_prefix
    from job.setup import check_skipped

    settings = run.config.trainer
    engine = trainer.engine
    progress = run.progress
    profiler = run.profiler
    batch_size = run.config.data.train_batch_size
    if progress.step == 0 and run.val and settings.val_before_train:
        with profiler.stage("validate", engine):
            metrics = trainer.validate(run.val, batch_size)
        run.tracker.log(0, metrics | profiler.end_step())

    while run.should_continue:
        start = time.perf_counter()
        profiler.begin_step(progress.step + 1)
        with profiler.stage("data"):
            batch = run.train.batch(run.order.rows_of_batch(progress.step))
        with profiler.stage("train_batch", engine):
            results = trainer.train_batch(batch, progress.step)
        seconds = time.perf_counter() - start
        progress.step += 1
        progress.skipped += int(results["skipped"])
        flops = engine.flops(batch.lengths, len(batch))
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
                metrics |= trainer.validate(run.val, batch_size)
        metrics |= profiler.end_step()
        metrics["timing/step"] = time.perf_counter() - start
        run.tracker.log(progress.step, metrics)
        # Log first: a run killed between saving and logging would resume without these metrics.
        if run.agreement.save:
            with profiler.stage("save"):
                run.checkpointer.save(progress.step, engine, progress.to_json(), run.tokenizer)


if __name__ == "__main__":
    run_script(main, "rm.yaml", __doc__)
