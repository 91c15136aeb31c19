"""What a run tells: metrics.jsonl always; console, tensorboard and wandb as trainer.logger says. Rank 0 alone writes."""

import importlib.util
import json
import math
import os
import shutil
import sys
import unicodedata
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from common import disk
from config import InputError, without_secrets
from engines.parallel.device import on_rank0
from profiling.report import write_report

CONSOLE = {
    "train/loss": "loss {:.4f}",
    "critic/score/mean": "score {:.3f}",
    "reward/informative_groups": "informative {:.0%}",
    "response_length/mean": "length {:.1f}",
    "val/loss": "val loss {:.4f}",
    "val/exact_match": "exact match {:.1%}",
    "actor/entropy": "entropy {:.3f}",
    "actor/ppo_kl": "kl {:.1e}",
    "train/grad_norm": "grad norm {:.3f}",
    "actor/grad_norm": "grad norm {:.3f}",
    "train/lr": "lr {:.2e}",
    "perf/tokens_per_second": "{:,.0f} tokens/s",
    "perf/mfu": "MFU {:.1%}",
    "timing/step": "{:.2f} s",
}
CONSOLE_ROWS = 4  # samples that the console shows
EQUAL_STEPS = 5  # steps in a row with one reward alone, after which the console names them
GAPS = {
    "float32": 1e-3,
    "bfloat16": 0.1,
}  # nats: more than rounding makes of the mean rollout_corr/log_prob_gap


def check_loggers(config: DictConfig) -> None:
    """Raise InputError for a logger whose package is not installed."""
    if "wandb" in config.trainer.logger and importlib.util.find_spec("wandb") is None:
        raise InputError("trainer.logger names wandb, which is not installed: pip install wandb")


class Tracker:
    def __init__(self, config: DictConfig, rank: int, step: int, total_steps: int):
        """step: the last step that counts, 0: none; lines of later ones, from before a resume, are moved to
        metrics.superseded.jsonl."""
        self.enabled, out = rank == 0, Path(config.output_dir)
        self.path = out / "metrics.jsonl"
        last = step or -1  # a run that begins anew begins with step 0
        on_rank0(supersede, self.path, last, group=dist.group.WORLD)
        if not self.enabled:
            return
        self.out, self.equal_rewards = (
            out,
            (None, 0),
        )  # the only reward of the last step, and for how many steps it has been
        self.loggers, self.rollout_freq = (
            list(config.trainer.logger),
            config.trainer.get("rollout_freq", -1),
        )
        self.log_freq = config.trainer.log_freq
        rollout = config.get(
            "rollout"
        )  # where words are cut off, vLLM's probabilities are of others than the trainer's
        alike = rollout and (rollout.top_k > 0 or rollout.top_p == 1 and rollout.min_p == 0)
        self.most_gap = GAPS[config.engine.compute_dtype] if alike else math.inf
        self.silent = (
            "reward/informative_groups" if OmegaConf.select(config, "rollout.n") == 1 else None
        )  # groups of one
        # In a log file every refresh stays.
        self.bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )
        if "tensorboard" in self.loggers:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(out / "tensorboard", purge_step=last + 1)
        if "wandb" in self.loggers:
            import wandb

            self.wandb = wandb
            wandb.init(
                project=config.trainer.project_name,
                name=config.trainer.experiment_name,
                dir=out,
                id=run_id(out),
                resume="allow",
                config=OmegaConf.to_container(without_secrets(config)),
            )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of `step` (from 1; 0 is before training). Called by all ranks; raises InputError on all of them
        if the disk is full."""
        on_rank0(self._log, step, metrics, group=dist.group.WORLD)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        finite = {
            name: value if math.isfinite(value) else None for name, value in metrics.items()
        }  # JSON has no NaN
        self._append({"step": step, **finite})
        shown = [
            text.format(metrics[name])
            for name, text in CONSOLE.items()
            if name in metrics and name != self.silent
        ]
        shown += [
            f"{name} {value:.3f}"
            for name, value in metrics.items()
            if name.startswith("val/") and name not in CONSOLE
        ]
        validated = any(name.startswith("val/") for name in metrics)
        if "console" in self.loggers and (step % self.log_freq == 0 or validated):
            self.say(f"step {step:>6}  " + "  ".join(shown))
        if "tensorboard" in self.loggers:
            with disk.writing(self.out / "tensorboard"):
                for name, value in metrics.items():
                    self.tensorboard.add_scalar(name, value, step)
        if "wandb" in self.loggers:
            self.wandb.log(metrics, step=step)
        self._name_equal_rewards(step, metrics)
        self._name_gap(metrics)
        self.bar.set_postfix_str("  ".join(shown[:1]), refresh=False)
        self.bar.update(step - self.bar.n)

    def log_rest(self, step: int, metrics: dict[str, float]) -> None:
        """A line of its own for what came after the last step's line: the time of its checkpoint. Called by all ranks."""
        if metrics:
            on_rank0(self._append, {"step": step, **metrics}, group=dist.group.WORLD)

    def _append(self, line: dict) -> None:
        with disk.writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def log_samples(self, step: int, examples: list[dict]) -> None:
        """Show what a validation's responses look like: a few on the console, all as a table in tensorboard and wandb.
        examples: one dict per response, such as Samples.examples() gives, of texts and numbers."""
        if not self.enabled or not examples:
            return
        if "console" in self.loggers:
            self.say(table(examples[:CONSOLE_ROWS], shutil.get_terminal_size((120, 24)).columns))
        columns = list(dict.fromkeys(name for row in examples for name in row))
        cells = [[row.get(name, "") for name in columns] for row in examples]
        if "tensorboard" in self.loggers:
            lines = [
                columns,
                ["---"] * len(columns),
                *([markdown(str(cell)) for cell in row] for row in cells),
            ]
            self.tensorboard.add_text(
                "val/samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), step
            )
        if "wandb" in self.loggers:
            self.wandb.log(
                {"val/samples": self.wandb.Table(columns=columns, data=cells)}, step=step
            )

    def say(self, text: str) -> None:
        """Lines for people, above the progress bar."""
        if self.enabled:
            encoding = (
                sys.stdout.encoding or "utf-8"
            )  # a terminal that cannot show a character must not end a run
            self.bar.write(text.encode(encoding, "replace").decode(encoding), file=sys.stdout)
            sys.stdout.flush()

    def _name_equal_rewards(self, step: int, metrics: dict[str, float]) -> None:
        """Say so when the rewards of the last steps are all the same number, once until they differ again."""
        low, high = (
            metrics.get("critic/rewards/min", 0.0),
            metrics.get("critic/rewards/max", 1.0),
        )  # SFT has none
        reward, count = self.equal_rewards
        self.equal_rewards = (low, count + 1 if low == reward else 1) if low == high else (None, 0)
        if self.equal_rewards[1] == EQUAL_STEPS:
            written = step - step % self.rollout_freq if self.rollout_freq > 0 else 0
            look = (
                f"look at {self.out}/rollouts/step_{written}.jsonl"
                if written
                else "set trainer.rollout_freq=1 to see them"
            )
            self.say(
                f"warning: all rewards of the last {EQUAL_STEPS} steps are {low:g}: nothing is learned from them; {look}"
            )

    def _name_gap(self, metrics: dict[str, float]) -> None:
        """Say once that vLLM does not compute what the trainer does."""
        gap = metrics.get("rollout_corr/log_prob_gap", 0.0)
        if gap > self.most_gap:
            self.say(
                f"warning: vLLM's log-probabilities are {gap:.2g} nats from the trainer's on average, where rounding may make "
                f"{self.most_gap:g}: it computes this model otherwise; algorithm.rollout_is=token corrects for it"
            )
            self.most_gap = math.inf

    def close(self) -> None:
        """End all logs, with the picture of the run (profiling.report) in them."""
        if not self.enabled:
            return
        self.bar.close()
        with disk.writing(self.out / "report.png"):
            picture = write_report(self.out)
        print(f"curves: {picture}", flush=True)
        if "tensorboard" in self.loggers:
            from matplotlib.image import imread

            with disk.writing(self.out / "tensorboard"):
                self.tensorboard.add_image("report", imread(picture), self.bar.n, dataformats="HWC")
                self.tensorboard.close()
        if "wandb" in self.loggers:
            self.wandb.log({"report": self.wandb.Image(str(picture))})
            self.wandb.finish()


def table(rows: list[dict], width: int) -> str:
    """Rows of texts and numbers as lines of at most `width` columns of a terminal, under the names of the fields. A text that
    is too long loses its middle."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [
        [
            f"{x:.2f}" if isinstance(x, float) else printable(str(x))
            for x in (row.get(name, "") for name in names)
        ]
        for row in rows
    ]
    widths, free = {}, width - 2 * len(names)
    wanted = {k: max(columns_of(line[k]) for line in (names, *shown)) for k in range(len(names))}
    for left, k in zip(
        range(len(names), 0, -1), sorted(wanted, key=wanted.get)
    ):  # narrow ones first, then equal shares
        widths[k] = min(wanted[k], max(free // left, 8))
        free -= widths[k]
    return "\n".join(
        "".join("  " + fit(cell, widths[k]) for k, cell in enumerate(line)).rstrip()
        for line in (names, *shown)
    )


def fit(text: str, width: int) -> str:
    """The text, without its middle where it has to be, on exactly `width` columns of a terminal."""
    short, kept = text, width
    while columns_of(short) > width:
        kept -= 1
        short = f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
    return short + " " * (width - columns_of(short))


def columns_of(text: str) -> int:
    """Columns of a terminal that a text takes: two for a Chinese character."""
    return sum(
        2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text
    )


def printable(text: str) -> str:
    """The text in one line: \\n for a new line, and so on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def markdown(text: str) -> str:
    """Text for a cell of a Markdown table in which no character has a meaning."""
    return "".join(
        c if c.isalnum() or c == " " else "<br>" if c == "\n" else f"&#{ord(c)};" for c in text
    )


def supersede(path: Path, step: int) -> None:
    """Move the lines behind `step`, which will be written again, to *.superseded.jsonl, and what is no such line to
    *.broken.jsonl."""
    lines = {"kept": [], "superseded": [], "broken": []}
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            kept = line.endswith(b"\n") and json.loads(line)["step"] <= step
            lines["kept" if kept else "superseded"].append(line)
        except (ValueError, TypeError, KeyError):
            lines["broken"].append(line)
    moved = [name for name in ("superseded", "broken") if lines[name]]
    for name in moved:
        with disk.writing(path), open(path.with_suffix(f".{name}.jsonl"), "ab") as file:
            file.writelines(lines[name])
    if moved:
        with disk.writing(path):
            path.with_suffix(".tmp").write_bytes(b"".join(lines["kept"]))
        os.replace(path.with_suffix(".tmp"), path)
    if lines["broken"]:
        print(
            f"{path}: lines that could not be read ({len(lines['broken'])}) are in {path.stem}.broken.jsonl now",
            flush=True,
        )


def run_id(out: Path) -> str:
    """One wandb run per output directory, however often it is restarted."""
    path = out / "wandb_id"
    if not path.exists():
        path.write_text(os.urandom(8).hex())
    return path.read_text()
