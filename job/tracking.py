"""Write the metrics and messages of a run, on rank 0.

metrics.jsonl is always written; trainer.logger adds the console, tensorboard and wandb.
"""

import importlib.util
import inspect
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from common import disk
from config import InputError, without_secrets
from engines.parallel.device import on_rank0
from job.tables import column_names, markdown_table, table
from profiling.report import write_report

# Metrics on the console, in this order.
CONSOLE = {
    "train/loss": "loss {:.4f}",
    "rewards/accuracies": "accuracy {:.1%}",
    "rewards/margins": "margin {:.3f}",
    "score/mean": "score {:.3f}",
    "reward/informative_groups": "informative {:.0%}",
    "episodes/turns/mean": "turns {:.1f}",
    "episodes/tool_calls/mean": "tool calls {:.1f}",
    "response_length/mean": "length {:.1f}",
    "val/loss": "val loss {:.4f}",
    "val/exact_match": "exact match {:.1%}",
    "val/rewards/accuracies": "val accuracy {:.1%}",
    "val/rewards/margins": "val margin {:.3f}",
    "actor/entropy": "entropy {:.3f}",
    "actor/ppo_kl": "ppo kl {:.1e}",
    "actor/kl_loss": "reference kl {:.1e}",
    "actor/reward_kl": "reference kl {:.1e}",
    "train/grad_norm": "grad norm {:.3f}",
    "actor/grad_norm": "grad norm {:.3f}",
    "train/lr": "lr {:.2e}",
    "perf/tokens_per_second": "{:,.0f} tokens/s",
    "perf/mfu": "MFU {:.1%}",
    "timing/step": "{:.2f} s",
}
CONSOLE_ROWS = 4  # samples that the console shows
CONSTANT_STEPS = 5  # steps in a row with equal rewards before the console warns
WANDB_OFFLINE_MODES = ("offline", "dryrun", "disabled")
WANDB_ADVICE = (
    "run `wandb login`, or set the environment variable WANDB_API_KEY, or WANDB_MODE=offline to "
    "write to output_dir only"
)
# compute dtype -> nats that rounding can add to the mean of rollout_corr/log_prob_gap.
ROUNDING_GAPS = {"float32": 1e-3, "bfloat16": 0.1}

# Below this effective sample size, as a fraction of the samples, rollout.partial costs more than it
# saves.
MIN_SAMPLE_SIZE = 0.5


def check_loggers(config: DictConfig) -> None:
    """Raise InputError for a logger that is not installed, or for which the user must log in.

    All ranks call this. Only rank 0, which writes, needs the login.
    """
    if "wandb" not in config.trainer.logger:
        return
    if importlib.util.find_spec("wandb") is None:
        raise InputError("trainer.logger names wandb, which is not installed: pip install wandb")
    on_rank0(check_wandb_login)


def check_wandb_login() -> None:
    """Raise InputError if wandb would write to its server, and has no valid API key for it."""
    import wandb

    try:
        is_offline = wandb.setup().settings.mode in WANDB_OFFLINE_MODES
        is_ready = is_offline or has_wandb_key()
    except (wandb.Error, ValueError) as error:
        raise InputError(f"trainer.logger names wandb, and {error}; {WANDB_ADVICE}") from None
    if not is_ready:
        raise InputError(f"trainer.logger names wandb, which has no API key: {WANDB_ADVICE}")


def has_wandb_key() -> bool:
    """Return whether wandb has an API key, or raise wandb.Error if its server rejects the key.

    wandb looks in its environment variables, its settings and .netrc. It does not ask for a key.
    """
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False)
    return wandb.api.api_key is not None  # earlier releases would ask for a key


class Tracker:
    """Writes metrics.jsonl, the console, tensorboard and wandb. All ranks call its methods."""

    def __init__(self, config: DictConfig, rank: int, step: int, total_steps: int):
        """
        Args:
            step: the step that the run continues from, 0 for a new run. Lines of later steps,
                which will run again, are moved to metrics.superseded.jsonl.
        """
        self.enabled = rank == 0
        self.out = Path(config.output_dir)
        self.path = self.out / "metrics.jsonl"
        last_step = step or -1  # a new run writes step 0 again
        if config.trainer.get("val_only"):
            last_step = math.inf  # no step will run again
        on_rank0(supersede, self.path, last_step, group=dist.group.WORLD)
        if not self.enabled:
            return
        self.logged_steps = logged_steps(self.path)
        self.loggers = list(config.trainer.logger)
        self.draws_report = config.trainer.report
        self.log_freq = config.trainer.log_freq
        self.rollout_freq = config.trainer.get("rollout_freq", -1)
        # The constant reward of the last steps (None: rewards differ), and for how many steps it
        # has been constant.
        self.constant_reward: float | None = None
        self.constant_steps = 0
        self.max_gap = max_log_prob_gap(config)
        self.has_warned_of_old_tokens = False
        self.has_warned_of_passing_scores = False
        # With one response per prompt, no group is informative.
        has_single_responses = OmegaConf.select(config, "rollout.n") == 1
        self.hidden = "reward/informative_groups" if has_single_responses else None
        self.bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            # In a log file, every refresh is a new line.
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )
        self._open_loggers(config, last_step)

    def _open_loggers(self, config: DictConfig, last_step: float) -> None:
        if "tensorboard" in self.loggers:
            from torch.utils.tensorboard import SummaryWriter

            directory = self.out / "tensorboard"
            purge_step = None if last_step == math.inf else last_step + 1
            self.tensorboard = SummaryWriter(directory, purge_step=purge_step)
        if "wandb" in self.loggers:
            import wandb

            self.wandb = wandb
            wandb.init(
                project=config.trainer.project_name,
                name=config.trainer.experiment_name,
                dir=self.out,
                id=run_id(self.out),
                resume="allow",
                config=OmegaConf.to_container(without_secrets(config)),
            )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step. Steps count from 1; step 0 is before training.

        Raises InputError on all ranks if the disk is full.
        """
        on_rank0(self._log, step, metrics, group=dist.group.WORLD)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self._record(step, metrics)
        summary = self._summarize(metrics)
        is_validated = any(name.startswith("val/") for name in metrics)
        if "console" in self.loggers and (step % self.log_freq == 0 or is_validated):
            self.print(f"step {step:>6}  " + "  ".join(summary))
        self._warn_of_constant_rewards(step, metrics)
        self._warn_of_gap(metrics)
        self._warn_of_old_tokens(metrics)
        self.bar.set_postfix_str("  ".join(summary[:1]), refresh=False)
        self.bar.update(step - self.bar.n)

    def _summarize(self, metrics: dict[str, float]) -> list[str]:
        """Return the entries of a step's line on the console."""
        summary = []
        for name, text in CONSOLE.items():
            if name in metrics and name != self.hidden:
                summary.append(text.format(metrics[name]))
        for name, value in metrics.items():
            if name.startswith("val/") and name not in CONSOLE:
                summary.append(f"{name} {value:.3f}")
        return summary

    def log_rest(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics that come after the last step's line, such as the time of its checkpoint.

        Called by all ranks.
        """
        if metrics:
            on_rank0(self._record, step, metrics, group=dist.group.WORLD)

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        """Write metrics of a step to metrics.jsonl, tensorboard and wandb.

        metrics.jsonl has one object per step. If the step has one already, metrics are added to it.
        """
        # JSON has no NaN.
        finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        if step in self.logged_steps:
            add_to_line(self.path, step, finite)
        else:
            with disk.writing(self.path), open(self.path, "a") as file:
                file.write(json.dumps({"step": step, **finite}) + "\n")
            self.logged_steps.add(step)
        if "tensorboard" in self.loggers:
            with disk.writing(self.out / "tensorboard"):
                for name, value in metrics.items():
                    self.tensorboard.add_scalar(name, value, step)
        if "wandb" in self.loggers:
            self.wandb.log(metrics, step=step)

    def log_samples(self, step: int, examples: list[dict]) -> None:
        """Show some responses of a validation.

        The console shows the first few, tensorboard and wandb show a table of all examples.

        Args:
            examples: one dict of texts and numbers per response; see rollout.records.examples().
        """
        if not self.enabled or not examples:
            return
        if "console" in self.loggers:
            width = shutil.get_terminal_size((120, 24)).columns
            self.print(table(examples[:CONSOLE_ROWS], width))
        columns = column_names(examples)
        cells = []
        for row in examples:
            cells.append([row.get(name, "") for name in columns])
        if "tensorboard" in self.loggers:
            self.tensorboard.add_text("val/samples", markdown_table(columns, cells), step)
        if "wandb" in self.loggers:
            samples = self.wandb.Table(columns=columns, data=cells)
            self.wandb.log({"val/samples": samples}, step=step)

    def report_failures(self, step: int, samples) -> None:
        """Report on the console that some responses of a step could not be graded.

        Args:
            samples: rollout.samples.Samples.
        """
        failures = samples.failures
        if failures:
            self.print(
                f"warning: {len(failures)} of {samples.num_drawn} responses of step {step} could "
                f"not be graded and are left out; the first: {failures[0].summary} (all are in "
                f"{self.out}/failures.jsonl)"
            )

    def report_passing_scores(self, scores: Sequence[float], passing_score: float) -> None:
        """Warn once if pass@k may tell nothing: all scores are on one side of its threshold.

        Scores that are all equal are no reason: all responses may be right, or all wrong.

        Args:
            scores: the scores of a validation, on all ranks.
            passing_score: the score from which on a response counts as right.
        """
        if not self.enabled or not len(scores) or self.has_warned_of_passing_scores:
            return
        low = min(scores)
        high = max(scores)
        if low < high and (high < passing_score or low >= passing_score):
            self.print(
                f"warning: pass@k counts a score of {passing_score} or more as right, and all "
                f"scores of this validation are from {low:g} to {high:g}: if other scores are "
                "right, scale the reward"
            )
            self.has_warned_of_passing_scores = True

    def print(self, text: str) -> None:
        """Print text on the console, above the progress bar."""
        if self.enabled:
            # A character that the terminal cannot show must not end a run.
            encoding = sys.stdout.encoding or "utf-8"
            self.bar.write(text.encode(encoding, "replace").decode(encoding), file=sys.stdout)
            sys.stdout.flush()

    def _warn_of_constant_rewards(self, step: int, metrics: dict[str, float]) -> None:
        """Warn if all rewards of the last steps are equal; again only after they have differed."""
        low = metrics.get("critic/rewards/min", 0.0)
        high = metrics.get("critic/rewards/max", 1.0)  # SFT has no rewards: never warn
        if low != high:
            self.constant_reward = None
            self.constant_steps = 0
        elif low == self.constant_reward:
            self.constant_steps += 1
        else:
            self.constant_reward = low
            self.constant_steps = 1
        if self.constant_steps != CONSTANT_STEPS:
            return
        written_step = step - step % self.rollout_freq if self.rollout_freq > 0 else 0
        if written_step:
            advice = f"look at {self.out}/rollouts/step_{written_step}.jsonl"
        else:
            advice = "set trainer.rollout_freq=1 to see the responses"
        self.print(
            f"warning: all rewards of the last {CONSTANT_STEPS} steps are {low:g}: nothing is "
            f"learned from them; {advice}"
        )

    def _warn_of_gap(self, metrics: dict[str, float]) -> None:
        """Warn once if vLLM's log-probabilities are too far from the trainer's."""
        gap = metrics.get("rollout_corr/log_prob_gap", 0.0)
        if gap > self.max_gap:
            self.print(
                f"warning: vLLM's log-probabilities differ from the trainer's by {gap:.2g} nats on "
                f"average, where rounding explains at most {self.max_gap:g}: vLLM computes this "
                "model differently; algorithm.rollout_is=token corrects for that"
            )
            self.max_gap = math.inf

    def _warn_of_old_tokens(self, metrics: dict[str, float]) -> None:
        """Warn once if the correction for tokens of older weights costs half of the samples."""
        age_0_share = metrics.get("partial/age_0/tokens", 1.0)
        sample_size = metrics.get("rollout_corr/effective_sample_size", 1.0)
        if age_0_share < 1 and sample_size < MIN_SAMPLE_SIZE and not self.has_warned_of_old_tokens:
            self.print(
                "warning: because some tokens were generated with older weights, the effective "
                f"sample size is only {sample_size:.0%} (rollout_corr/effective_sample_size): "
                "lower optim.lr, rollout.partial.max_staleness or rollout.partial.oversample"
            )
            self.has_warned_of_old_tokens = True

    def close(self) -> None:
        """Draw the metrics (profiling.report), add the picture to the logs and close them."""
        if not self.enabled:
            return
        self.bar.close()
        if self.draws_report:
            self._draw_report()
        if "tensorboard" in self.loggers:
            with disk.writing(self.out / "tensorboard"):
                self.tensorboard.close()
        if "wandb" in self.loggers:
            self.wandb.finish()

    def _draw_report(self) -> None:
        with disk.writing(self.out / "report.png"):
            picture = write_report(self.out)
        print(f"curves: {picture}", flush=True)
        if "tensorboard" in self.loggers:
            from matplotlib.image import imread

            with disk.writing(self.out / "tensorboard"):
                self.tensorboard.add_image("report", imread(picture), self.bar.n, dataformats="HWC")
        if "wandb" in self.loggers:
            self.wandb.log({"report": self.wandb.Image(str(picture))})


def max_log_prob_gap(config: DictConfig) -> float:
    """Return the largest rollout_corr/log_prob_gap that rounding can explain, in nats.

    It is infinity with FP8, and if vLLM's log-probabilities cover other tokens than the trainer's.
    """
    rollout = config.get("rollout")
    if not rollout:
        return math.inf
    precisions = (rollout.quantization, rollout.kv_cache_dtype, config.engine.get("float8"))
    is_in_fp8 = any(precision not in ("none", "auto", None) for precision in precisions)
    covers_same_tokens = rollout.top_k > 0 or (rollout.top_p == 1 and rollout.min_p == 0)
    is_comparable = covers_same_tokens and not is_in_fp8
    return ROUNDING_GAPS[config.engine.compute_dtype] if is_comparable else math.inf


def logged_steps(path: Path) -> set[int]:
    """Return the steps of the lines in metrics.jsonl."""
    if not path.exists():
        return set()
    return {json.loads(line)["step"] for line in path.read_text().splitlines()}


def add_to_line(path: Path, step: int, metrics: dict) -> None:
    """Add metrics to the line of a step in metrics.jsonl, by replacing the file atomically."""
    lines = []
    for line in path.read_text().splitlines():
        values = json.loads(line)
        if values["step"] == step:
            line = json.dumps(values | metrics)
        lines.append(line + "\n")
    disk.replace(path, "".join(lines))


def supersede(path: Path, step: float) -> None:
    """Keep only the lines up to `step` in a file of JSON lines.

    Later lines, whose steps will run again, are moved to *.superseded.jsonl. Lines that cannot be
    read are moved to *.broken.jsonl.
    """
    lines = {"kept": [], "superseded": [], "broken": []}
    content = path.read_bytes() if path.exists() else b""
    for line in content.splitlines(keepends=True):
        lines[classify_line(line, step)].append(line)
    moved = [name for name in ("superseded", "broken") if lines[name]]
    for name in moved:
        with disk.writing(path), open(path.with_suffix(f".{name}.jsonl"), "ab") as file:
            file.writelines(lines[name])
    if moved:
        temporary = path.with_suffix(".tmp")
        with disk.writing(path):
            temporary.write_bytes(b"".join(lines["kept"]))
        os.replace(temporary, path)
    if lines["broken"]:
        print(
            f"{path}: moved lines that could not be read ({len(lines['broken'])}) to "
            f"{path.stem}.broken.jsonl",
            flush=True,
        )


def classify_line(line: bytes, step: float) -> str:
    """Return "kept", "superseded" or "broken"; see supersede()."""
    try:
        is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError):
        return "broken"
    return "kept" if is_kept else "superseded"


def run_id(out: Path) -> str:
    """Return the wandb run id of an output directory. It stays the same after every restart."""
    path = out / "wandb_id"
    if not path.exists() or not path.read_text():  # a full disk may have left an empty file
        disk.replace(path, os.urandom(8).hex())
    return path.read_text()
