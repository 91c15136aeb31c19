"""A run's metrics: metrics.jsonl always, and console, tensorboard, wandb as trainer.logger says. Rank 0 alone writes."""

import importlib.util
import json
import math
import os
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from config import InputError

CONSOLE = {"train/loss": "loss {:.4f}", "critic/score/mean": "score {:.3f}", "response_length/mean": "length {:.1f}",
           "val/loss": "val loss {:.4f}", "val/exact_match": "exact match {:.1%}", "actor/entropy": "entropy {:.3f}",
           "actor/ppo_kl": "kl {:.1e}", "train/grad_norm": "grad norm {:.3f}", "actor/grad_norm": "grad norm {:.3f}",
           "train/lr": "lr {:.2e}", "perf/tokens_per_second": "{:,.0f} tokens/s", "perf/mfu": "MFU {:.1%}",
           "timing/step": "{:.2f} s"}


def check(config: DictConfig) -> None:
    """Raise InputError for a logger whose package is not installed."""
    if "wandb" in config.trainer.logger and importlib.util.find_spec("wandb") is None:
        raise InputError("trainer.logger names wandb, which is not installed: pip install wandb")


class Tracker:
    def __init__(self, config: DictConfig, rank: int, step: int, total_steps: int):
        """step: the last step that counts; lines of later ones, from before a resume, are moved to
        metrics.superseded.jsonl."""
        self.enabled = rank == 0
        if not self.enabled:
            return
        out, self.loggers = Path(config.output_dir), list(config.trainer.logger)
        self.file = open_metrics(out, step)
        self.log_freq = config.trainer.log_freq
        # In a log file every refresh stays for good.
        self.bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True,
                        mininterval=0.5 if sys.stderr.isatty() else 30)
        if "tensorboard" in self.loggers:
            from torch.utils.tensorboard import SummaryWriter
            self.tensorboard = SummaryWriter(out / "tensorboard", purge_step=step + 1)
        if "wandb" in self.loggers:
            import wandb
            self.wandb = wandb.init(project=config.trainer.project_name, name=config.trainer.experiment_name,
                                    dir=out, id=run_id(out), resume="allow", config=OmegaConf.to_container(config))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of `step` (from 1; 0 is before training)."""
        if not self.enabled:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}     # JSON has no NaN
        self.file.write(json.dumps({"step": step, **finite}) + "\n")
        self.file.flush()
        shown = [text.format(metrics[name]) for name, text in CONSOLE.items() if name in metrics]
        shown += [f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("val/") and name not in CONSOLE]
        validated = any(name.startswith("val/") for name in metrics)
        if "console" in self.loggers and (step % self.log_freq == 0 or validated):
            self.say(f"step {step:>6}  " + "  ".join(shown))
        if "tensorboard" in self.loggers:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
        if "wandb" in self.loggers:
            self.wandb.log(metrics, step=step)
        self.bar.set_postfix_str("  ".join(shown[:1]), refresh=False)
        self.bar.update(step - self.bar.n)

    def log_rest(self, step: int, metrics: dict[str, float]) -> None:
        """A line of its own for what came behind the last step's: the time of its checkpoint."""
        if self.enabled and metrics:
            self.file.write(json.dumps({"step": step, **metrics}) + "\n")

    def say(self, text: str) -> None:
        """One line for people, above the progress bar."""
        if self.enabled:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if not self.enabled:
            return
        self.bar.close()
        self.file.close()
        if "tensorboard" in self.loggers:
            self.tensorboard.close()
        if "wandb" in self.loggers:
            self.wandb.finish()


def open_metrics(out: Path, step: int):
    """metrics.jsonl, open for appending behind `step`."""
    supersede(out / "metrics.jsonl", step)
    return open(out / "metrics.jsonl", "a")


def supersede(path: Path, step: int) -> None:
    """Move the lines of steps behind this one, which will be done again, to {name}.superseded.jsonl."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept, superseded = [], []
    for line in lines:
        (kept if line.endswith("\n") and json.loads(line)["step"] <= step else superseded).append(line)
    if superseded:
        with open(path.with_suffix(".superseded.jsonl"), "a") as file:
            file.writelines(superseded)
        path.with_suffix(".tmp").write_text("".join(kept))
        os.replace(path.with_suffix(".tmp"), path)


def run_id(out: Path) -> str:
    """One wandb run for an output directory, whatever the number of restarts."""
    path = out / "wandb_id"
    if not path.exists():
        path.write_text(os.urandom(8).hex())
    return path.read_text()
