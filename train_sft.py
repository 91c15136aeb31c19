"""Supervised fine-tuning: every rank builds its share of the model and runs this loop.

    python train_sft.py model.path=DIR data.train_files=train.jsonl     one process, CPU or GPU
    torchrun --nproc-per-node 8 train_sft.py my.yaml optim.lr=2e-5      one node
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 train_sft.py my.yaml                 two nodes
    sbatch examples/slurm/sft.sbatch my.yaml                            Slurm: srun starts the ranks
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 \\
        train_sft.py configs/demo/sft.yaml                              a laptop's CPU

Arguments are YAML files and key=value pairs. Pairs win over files, and later ones over earlier
ones. configs/sft.yaml lists every key.
SIGTERM, SIGUSR1 or Ctrl-C saves a checkpoint and exits with code 0; the same command continues from
there. (torchrun does not forward SIGUSR1, and kills its ranks after 30 s: give it
--signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 600.) A mistake in the configuration or the
data prints one line per node and exits with code 2.
"""

import time
from dataclasses import dataclass

from common.counting import count_of
from config import InputError, run as run_script
from job.progress import Progress, adapter, identify, identify_tokens


@dataclass(kw_only=True)
class SftProgress(Progress):
    """Progress of an SFT run.

    Attributes:
        skipped: number of updates skipped because a gradient was not finite.
    """

    skipped: int = 0


def main(config):
    # Imported only here, so that --help and configuration errors appear at once.
    from engines.build import engine_class
    from engines.checkpoint.export import export_hf
    from engines.parallel import device
    from job.distillation import build_teachers, role_configs
    from job.end_tokens import new_end_ids
    from job.plan import print_plan

    run = set_up(config)
    end_ids = new_end_ids(run)
    if config.dry_run:
        device.on_rank0(print_plan, run, role_configs(run.config))
        return device.shutdown()
    engine = engine_class(config.model_engine)(run.config, run.device, run.total_steps)
    engine.new_end_ids = end_ids
    teachers = build_teachers(run.config, engine, run.total_steps)
    if run.resume_from:
        run.progress.take_counters(run.checkpointer.load(run.resume_from, engine))
    num_rows = count_of(len(run.train), "row")
    num_ranks = count_of(engine.dp_size, "data-parallel rank")
    run.start(f"{num_rows}, {num_ranks} on {run.device.type}")
    train(run, engine, teachers)
    run.end_loop()
    if run.is_complete:
        export_hf(engine, run.tokenizer, run.output_dir / "hf", run.base_name)
    run.close()
    device.shutdown()


def set_up(config):
    """Return a job.run.Run with everything but the model.

    The user's mistakes are reported here, before any weights are loaded; cheap checks come first.
    """
    from data.columns import check_column_keys
    from data.dataset import OPTIONS
    from data.selection import training_rows, validation_rows
    from job.distillation import check_distillation, check_models, role_configs
    from job.models import check_token_ids, report_unused_mtp, warn_of_length
    from job.order import sampler_reads
    from job.run import Run

    check_distillation(config)
    run = Run.begin(config)
    config = run.config
    hf_config = check_models(config, run.world_size)
    report_unused_mtp(config, hf_config)
    run.load_tokenizer()
    with_rows = sampler_reads(config, "rows")
    run.train = load_data(run, training_rows(config.data), with_rows)
    run.val = load_data(run, validation_rows(config.data))
    datasets = run.datasets()
    check_column_keys(config.data, datasets)
    check_token_ids(config, hf_config, run.tokenizer, datasets)
    longest = max(int(dataset.lengths.max()) for dataset in datasets.values())
    warn_of_length(hf_config, longest)
    run.count_steps()
    run.choose_order()
    roles = role_configs(config)
    run.plan_memory(roles)
    stages = {"teacher_compute": len(roles) > 1, "train_batch": True, "validate": bool(run.val)}
    run.start_profiler([stage for stage, computes in stages.items() if computes])
    progress = SftProgress(
        identity=identify(config, hf_config, run.train) | run.order.identity,
        tokenization=identify_tokens(config, OPTIONS),
        export_dtype=config.engine.compute_dtype,
        lora=adapter(config, run.base_name),
    )
    run.find_checkpoint(progress)
    return run


def train(run, engine, teachers=None) -> None:
    """Train until the last step, or until a rank is asked to stop.

    teachers: the engines.teaching.Teachers whose distributions the model learns; None: no teacher.
    """
    from engines.parallel import device
    from job.metrics import throughput, with_prefix
    from job.setup import check_skipped

    trainer = run.config.trainer
    progress = run.progress
    profiler = run.profiler
    batch_size = run.config.data.train_batch_size
    if progress.step == 0 and run.val and trainer.val_before_train:
        with profiler.stage("validate", engine):
            metrics = validate(engine, run.val, batch_size)
        run.tracker.log(0, metrics | profiler.end_step())

    while run.should_continue:
        start = time.perf_counter()
        profiler.begin_step(progress.step + 1)
        with profiler.stage("data"):
            rows = run.order.rows_of_batch(progress.step)
            batch = run.train.batch(rows)
            num_trained_tokens = int(batch.fields["loss_mask"].sum())
            image_flops = engine.image_flops(batch)
            plan = engine.plan(batch.lengths, image_flops)
        share = batch.select(plan.sequences)
        results = train_batch(run, engine, teachers, share, plan.micro_batches, num_trained_tokens)
        seconds = time.perf_counter() - start
        progress.step += 1
        progress.skipped += int(results["skipped"])
        flops = engine.flops(batch.lengths, num_trained_tokens) + sum(image_flops)
        metrics = {
            **with_prefix("train", results),
            "train/epoch": progress.step / run.steps_per_epoch,
            "train/skipped": progress.skipped,
            **throughput(run, len(batch.input_ids) / seconds, flops / seconds),
            **plan.metrics,
            **device.memory(),
        }
        run.agreement.update(progress.step, run.device)
        check_skipped(trainer, progress.skipped, progress.step, run.is_complete)
        if run.is_validation_due:
            with profiler.stage("validate", engine):
                metrics |= validate(engine, run.val, batch_size)
        metrics |= profiler.end_step()
        metrics["timing/step"] = time.perf_counter() - start
        run.tracker.log(progress.step, metrics)
        # Log first: a run killed between saving and logging would resume without these metrics.
        if run.agreement.save:
            with profiler.stage("save"):
                run.checkpointer.save(progress.step, engine, progress.to_json(), run.tokenizer)


def train_batch(
    run, engine, teachers, share, micro_batches, num_trained_tokens
) -> dict[str, float]:
    """Take one optimizer step, and return the results of Engine.train_batch().

    Args:
        teachers: as in train().
        share: this rank's part of the batch, divided into micro_batches.
        num_trained_tokens: in the whole batch, over all ranks.
    """
    from job.distillation import distillation_loss

    step = run.progress.step
    if not teachers:
        with run.profiler.stage("train_batch", engine):
            return engine.train_batch(share, sft_loss(num_trained_tokens), step, micro_batches)
    with run.profiler.stage("teacher_compute", teachers.engine):
        share.fields |= teachers.compute([(share, micro_batches)])
    loss_fn = distillation_loss(run.config, num_trained_tokens)
    with run.profiler.stage("train_batch", engine), teachers.teaching(engine):
        return engine.train_batch(share, loss_fn, step, micro_batches)


def sft_loss(num_tokens: int):
    """Return the loss function: the mean negative log-likelihood of the trained tokens.

    It returns the contribution of one micro-batch; the contributions add up to the mean.

    Args:
        num_tokens: number of trained tokens in the whole batch, over all ranks.
    """

    def loss_fn(log_probs, entropy, fields):
        mask = fields["loss_mask"]
        mean_entropy = (entropy.detach() * mask).sum() / num_tokens
        return -(log_probs * mask).sum() / num_tokens, {"entropy": mean_entropy}

    return loss_fn


def validate(engine, val, batch_size: int) -> dict[str, float]:
    """Return the loss and the share of exact matches over every row of `val`.

    The loss is the mean negative log-likelihood of the trained tokens. A row matches exactly if
    greedy decoding would reproduce its last answer. This holds if every token of the answer is the
    most likely one after the true tokens before it, so one forward pass is enough.
    """
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    # Sums: negative log-likelihood, trained tokens, exact matches, rows.
    totals = torch.zeros(4, dtype=torch.float64)
    starts = range(0, len(val), batch_size)
    # Only rank 0 shows a bar, and only if standard error is a terminal (tqdm's None).
    hides_bar = None if dist.get_rank() == 0 else True
    for start in tqdm(starts, desc="validate", leave=False, disable=hides_bar):
        rows = range(start, min(start + batch_size, len(val)))
        plan = engine.plan(val.lengths[rows].tolist())
        batch = val.batch([rows[i] for i in plan.sequences])
        log_probs, _, is_greedy = engine.log_probs(batch, plan.micro_batches)
        log_probs = log_probs.cpu()
        is_wrong = (batch.fields["answer_mask"] > 0) & ~is_greedy.cpu()
        row_of_token = torch.repeat_interleave(torch.arange(len(batch)), batch.cu_seqlens.diff())
        num_wrong = torch.zeros(len(batch)).index_add_(0, row_of_token, is_wrong.float())
        is_exact = num_wrong == 0
        # A row that several ranks share counts once.
        is_counted = plan.reported_by(engine.dp_rank)
        mask = batch.fields["loss_mask"] * is_counted[row_of_token]
        nll = -(log_probs.double() * mask).sum()
        num_exact = (is_counted & is_exact).sum()
        totals += torch.tensor([nll, mask.sum(), num_exact, is_counted.sum()])
    nll, num_tokens, num_exact, num_rows = engine.sum_over_dp(totals).tolist()
    return {"val/loss": nll / num_tokens, "val/exact_match": num_exact / num_rows}


def load_data(run, selection, with_rows: bool = False):
    """Return the tokenized rows of a data.selection.Selection, or None if it is None.

    Args:
        with_rows: whether the complete rows are needed, too.
    """
    from data.dataset import TokenDataset, tokenize
    from engines.context_parallel import sequence_limit

    if selection is None:
        return None
    dataset = TokenDataset.load(run.tokens_of(tokenize, selection, with_rows), run.processor)
    longest = int(dataset.lengths.max())
    limit, setting = sequence_limit(run.config, run.world_size)
    if longest > limit:
        raise InputError(
            f"a row of {selection.files} has {longest} tokens, more than {setting}: raise it, or "
            "lower data.max_length with data.truncation=left, right or drop"
        )
    return dataset


if __name__ == "__main__":
    run_script(main, "sft.yaml", __doc__)
