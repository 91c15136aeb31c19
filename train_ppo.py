"""PPO, GRPO and their relatives: every rank trains its share of the model and generates with vLLM.

On one node, on two nodes, with Slurm (srun starts the ranks), and on a laptop's CPU:

    torchrun --nproc-per-node 8 train_ppo.py my.yaml rollout.tensor_parallel_size=2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        train_ppo.py my.yaml
    sbatch examples/slurm/ppo.sbatch my.yaml
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 train_ppo.py configs/demo/ppo.yaml

Arguments are YAML files and key=value pairs. Pairs win over files, and later ones over earlier
ones. configs/ppo.yaml lists every key.
Rewards are functions in rewards.py, or your own: reward.function=my_file.py:name.

SIGTERM, SIGUSR1 or Ctrl-C saves a checkpoint after the current step and exits with code 0; the same
command then continues from there. (torchrun does not forward SIGUSR1, and kills its ranks after
30 s: give it --signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 600.) A mistake in the
configuration is reported in one line per node, with exit code 2.

In each step, vLLM wakes up with the new weights and generates responses, which are graded; then it
goes to sleep, and a reward model, if there is one, scores them. Each rank receives the tokens that
it trains on, computes their log-probabilities, values and advantages, and updates critic and actor.
Every rank knows the score and the length of every response. Mini-batches, advantages and
denominators are computed from these, so the result of training does not depend on the number of
ranks.
"""

import time
from dataclasses import dataclass

from common.counting import count_of
from config import InputError, run as run_script
from job.progress import Progress, adapter, identify, identify_tokens


@dataclass(kw_only=True)
class PpoProgress(Progress):
    """Progress of a PPO run.

    Attributes:
        batch: number of prompt batches that have been used.
        failures: number of responses that could not be graded.
        kl_coef: the weight of the KL penalty, which an adaptive controller changes.
        actor_updates, critic_updates: optimizer steps, including the skipped ones.
        actor_skipped, critic_skipped: updates skipped because a gradient was not finite.
    """

    batch: int = 0
    failures: int = 0
    kl_coef: float = 0.0
    actor_updates: int = 0
    actor_skipped: int = 0
    critic_updates: int = 0
    critic_skipped: int = 0

    def count_updates(self, metrics: dict[str, float], num_updates: int) -> None:
        """Count the optimizer steps of the models that were updated in a step."""
        if "actor/skipped" in metrics:
            self.actor_updates += num_updates
            self.actor_skipped += int(metrics["actor/skipped"])
        if "critic/skipped" in metrics:
            self.critic_updates += num_updates
            self.critic_skipped += int(metrics["critic/skipped"])


def main(config):
    # Imported only here, so that --help and configuration errors appear at once.
    from engines.parallel import device
    from job import tracking
    from job.plan import print_plan
    from rl.models import role_configs

    grader = start_grader(config)
    run = set_up(config, grader)
    config = run.config
    if config.dry_run:
        device.on_rank0(print_plan, run, role_configs(config))
        if not config.rollout.episode:
            device.on_rank0(grade_one, config, grader, run.train)
        return device.shutdown()

    roles = build_roles(run, grader)
    if run.resume_from and config.algorithm.kl_ctrl.type == "fixed":
        run.progress.kl_coef = config.algorithm.kl_ctrl.kl_coef
    last_step = run.progress.step if run.resume_from else -1
    if not run.only_validates:
        device.on_rank0(tracking.supersede, run.output_dir / "failures.jsonl", last_step)
    num_prompts = count_of(len(run.train), "prompt")
    num_ranks = count_of(roles.actor.dp_size, "data-parallel rank")
    num_replicas = count_of(roles.rollout.num_replicas, "replica")
    run.start(f"{num_prompts}, {num_ranks} and {num_replicas} of vLLM on {run.device.type}")
    if run.only_validates:
        run.tracker.log(run.progress.step, validate(run, roles) | run.profiler.end_step())
    else:
        train(run, roles)
    finish(run, roles, grader)


def build_roles(run, grader):
    """Build the engines and vLLM, and load the checkpoint that the run resumes from, if any."""
    from rl.roles import Roles

    roles = Roles(run.config, run.device, run.tokenizer, grader, run.profiler, run.total_steps)
    if run.resume_from:
        run.progress.take_counters(roles.load(run.checkpointer, run.resume_from))
    roles.start_rollout()
    return roles


def finish(run, roles, grader) -> None:
    """Wait for the last checkpoint, export the model of a complete run, and end all processes."""
    import torch.distributed as dist

    from engines.parallel import device

    run.end_loop()
    grader.close()
    if run.is_complete and not run.only_validates:
        roles.export(run.output_dir / "hf", run.base_name)
    run.close()
    dist.barrier()
    roles.close()
    device.shutdown()


def start_grader(config):
    """Check the PPO settings, which is quick, and start the processes that grade or play episodes.

    Returns a Grader, or an EpisodeRunner with rollout.episode. Raises InputError for settings that
    contradict each other, and for a function that cannot be found or does not fit the settings.
    """
    from rl.functions import inputs_read
    from rl.settings import check_settings
    from rollout.episodes.runner import EpisodeRunner
    from rollout.grading.grader import Grader

    check_settings(config)
    if config.rollout.episode:
        return EpisodeRunner(config)
    grader = Grader(config)
    if grader.takes_groups and "baseline" in inputs_read(config, "adv_estimator"):
        raise InputError(
            f"reward.function={config.reward.function} grades the responses of a group together, "
            f"but algorithm.adv_estimator={config.algorithm.adv_estimator} needs a greedy response "
            "graded by itself: change one of the two"
        )
    return grader


def set_up(config, grader):
    """Return a job.run.Run with everything but the models.

    The user's mistakes are reported here, before any weights are loaded; cheap checks come first.
    """
    from data.columns import check_column_keys
    from data.prompts import OPTIONS, validation_options
    from data.selection import training_rows, validation_rows
    from engines.parallel.device import on_rank0
    from job.end_tokens import warn_of_end_token
    from job.models import check_token_ids, report_unused_mtp
    from job.run import Run
    from rl import models
    from rl.teacher import check_rows
    from rollout.partial.resume import check_open_groups
    from rollout.vllm.settings import check_rollout, check_vllm_model

    run = Run.begin(config)
    config = run.config
    hf_config = models.check_models(config, run.world_size)
    check_rollout(config, run.world_size)
    report_unused_mtp(config, hf_config)
    run.load_tokenizer()
    warn_of_end_token(config, run.chat_tokenizer())
    run.train = load_prompts(run, training_rows(config.data), config.data)
    run.val = load_prompts(run, validation_rows(config.data), validation_options(config.data))
    check_column_keys(config.data, run.datasets())
    check_token_ids(config, hf_config, run.tokenizer, run.datasets())
    on_rank0(check_rows, config, run.train)
    models.check_conversations(config, run.datasets())
    check_first_rows(run, grader)
    run.count_steps()
    run.choose_order()
    if 0 < run.total_steps <= config.critic.warmup_steps:
        raise InputError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves no step for the actor, "
            f"because the run has {run.total_steps} steps: lower it"
        )
    run.plan_memory(models.role_configs(config))
    check_vllm_model(config)
    run.start_profiler(models.hooked_stages(config, run.hardware.device_type))
    progress = PpoProgress(
        identity=identify_run(run, hf_config),
        tokenization=identify_tokens(config, OPTIONS),
        export_dtype=config.engine.compute_dtype,
        lora=adapter(config, run.base_name),
        kl_coef=config.algorithm.kl_ctrl.kl_coef,
    )
    run.find_checkpoint(progress)
    on_rank0(check_open_groups, config, run.resume_from, hf_config.get_text_config().vocab_size)
    return run


def identify_run(run, hf_config) -> dict:
    """Return the settings that must not change when a run resumes."""
    from engines.parallel.device import on_rank0
    from job.resume import IDENTITY_OF_REFERENCE
    from rl import models

    config = run.config
    identity = identify(config, hf_config, run.train) | run.order.identity
    identity |= {
        "rollout.n": config.rollout.n,
        "rollout.partial.enable": config.rollout.partial.enable,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        "critic": models.uses_critic(config),
    }
    reference = on_rank0(models.reference_fingerprint, config)
    if reference:
        identity[IDENTITY_OF_REFERENCE] = reference
    return identity


def check_first_rows(run, grader) -> None:
    """Let the grader check the rows of each data set, and print its notices on rank 0.

    It gets the first row, and the columns that have a value in any row.
    """
    from data.columns import filled_columns

    datasets = [prompts for prompts in (run.train, run.val) if prompts]
    notices = {grader.check(prompts[0].row, filled_columns(prompts)) for prompts in datasets}
    for notice in notices:
        if notice and run.rank == 0:
            print(notice, flush=True)


def train(run, roles) -> None:
    """Train until the last step, or until a rank is asked to stop."""
    from rl.estimation import next_kl_coef

    config = run.config
    progress = run.progress
    profiler = run.profiler
    validate_first(run, roles)
    while run.should_continue:
        start = time.perf_counter()
        profiler.begin_step(progress.step + 1)
        roles.wake()
        samples, progress.batch = roles.collect(
            run.train, run.order.rows_of_batch, progress.batch, progress.step + 1
        )
        metrics = roles.sleep()
        samples = roles.score(samples)
        share = roles.divide(samples)
        roles.compute_log_probs(share, progress.step)
        roles.compute_values(share)
        metrics |= roles.compute_advantages(samples, share, progress.kl_coef)
        metrics |= roles.update_critic(share, progress.step)
        metrics |= roles.update_actor(share, progress.step)
        metrics |= roles.memory()
        progress.kl_coef = next_kl_coef(config, progress.kl_coef, metrics, len(samples.episodes))
        num_updates = share.num_mini_batches * config.algorithm.ppo_epochs
        end_step(run, roles, samples, metrics, num_updates, start)


def validate_first(run, roles) -> None:
    """Validate the model that a new run starts from, unless trainer.val_before_train=false."""
    is_new = run.progress.step == 0 and run.total_steps > 0
    if is_new and run.val and run.config.trainer.val_before_train:
        run.tracker.log(0, validate(run, roles) | run.profiler.end_step())


def end_step(run, roles, samples, metrics, num_updates, start) -> None:
    """Count a step, report what happened in it, and validate and save if that is due.

    Responses that could not be graded are shown, responses and metrics are written.

    Args:
        metrics: the metrics of the step so far.
        num_updates: the optimizer steps of each model that was updated.
        start: when the step began, by time.perf_counter().
    """
    from job.setup import check_skipped
    from rollout.records import write_samples

    trainer = run.config.trainer
    progress = run.progress
    progress.step += 1
    run.tracker.report_failures(progress.step, samples)
    progress.count_updates(metrics, num_updates)
    progress.failures += len(samples.failures)
    run.agreement.update(progress.step, run.device)
    is_last = run.is_complete
    check_skipped(trainer, progress.actor_skipped, progress.actor_updates, is_last)
    check_skipped(trainer, progress.critic_skipped, progress.critic_updates, is_last)
    if run.is_due(trainer.rollout_freq):
        file = run.output_dir / "rollouts" / f"step_{progress.step}.jsonl"
        write_samples(samples, file, roles.host_group)
    seconds = time.perf_counter() - start
    if run.is_validation_due:
        metrics |= validate(run, roles)
    metrics |= run.profiler.end_step()
    tokens_per_second = samples.lengths.sum().item() / seconds
    metrics |= {
        "train/epoch": progress.batch / run.steps_per_epoch,
        "train/skipped": progress.actor_skipped + progress.critic_skipped,
        "reward/failures": progress.failures,
        "timing/step": time.perf_counter() - start,
        "perf/tokens_per_second": tokens_per_second / run.world_size,
    }
    run.tracker.log(progress.step, metrics)
    # Log first: a run killed between saving and logging would resume without these metrics.
    if run.agreement.save:
        roles.save(run.checkpointer, progress.step, progress.to_json())


def validate(run, roles) -> dict[str, float]:
    """Generate responses to all prompts of run.val, show some of them, and return metrics.

    Unless trainer.rollout_freq=-1, all responses are written to validation/step_{N}.jsonl.
    """
    from rl.validation import PASSING_SCORE, validation_metrics
    from rollout.records import examples, write_samples

    step = run.progress.step
    samples = roles.validate(run.val, step)
    run.tracker.report_failures(step, samples)
    run.tracker.log_samples(step, examples(samples, 16, roles.host_group))
    if run.config.trainer.rollout_freq > 0:
        file = run.output_dir / "validation" / f"step_{step}.jsonl"
        write_samples(samples, file, roles.host_group)
    if run.config.validation.n > 1:
        scores = samples.episodes.choose(samples.scores)
        run.tracker.report_passing_scores(scores.tolist(), PASSING_SCORE)
    function = run.config.rollout.episode or run.config.reward.function
    return validation_metrics(samples, function, run.config.validation.n)


def load_prompts(run, selection, data):
    """Return the prompts of a data.selection.Selection, or None if it is None.

    data: the section `data` of the configuration.
    """
    from data.prompts import PromptDataset, tokenize_prompts

    if selection is None:
        return None
    return PromptDataset.load(run.tokens_of(tokenize_prompts, selection, data=data), run.processor)


def grade_one(config, grader, train) -> None:
    """Grade the true answer to the first prompt as if it were a response, and print the reward.

    If the row has no answer, grade an empty response. Raises InputError if grading fails.
    """
    from rollout.grading.grader import Failure

    prompt = train[0]
    response = str(prompt.row.get("answer", ""))
    num_responses = config.rollout.n if grader.takes_groups else 1
    items = [(prompt.text, response, prompt.row)] * num_responses
    result = grader.grade(items, [0] * num_responses)[0]
    shown = f"the response {response[:60]!r} to the first prompt"
    function = config.reward.function
    if isinstance(result, Failure):
        raise InputError(f"reward.function={function} cannot grade {shown}: {result.summary}")
    parts = "".join(f", {name} {value:g}" for name, value in result.parts.items())
    print(f"reward: {function} gives {result.score:g}{parts} for {shown}")


if __name__ == "__main__":
    run_script(main, "ppo.yaml", __doc__)
