"""A run's metrics: metrics.jsonl always, and console, tensorboard, wandb as trainer.logger says. Rank 0 alone writes."""

import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

import disk
from config import InputError
from engines.device import on_rank0

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
        self.enabled, out = rank == 0, Path(config.output_dir)
        self.path = out / "metrics.jsonl"
        on_rank0(supersede, self.path, step, group=dist.group.WORLD)
        if not self.enabled:
            return
        self.loggers = list(config.trainer.logger)
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
        """Record the metrics of `step` (from 1; 0 is before training). Called by all ranks; raises InputError on all of them
        if the disk is full."""
        on_rank0(self._log, step, metrics, group=dist.group.WORLD)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}     # JSON has no NaN
        self._append({"step": step, **finite})
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
        """A line of its own for what came behind the last step's: the time of its checkpoint. Called by all ranks."""
        if metrics:
            on_rank0(self._append, {"step": step, **metrics}, group=dist.group.WORLD)

    def _append(self, line: dict) -> None:
        with disk.writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def say(self, text: str) -> None:
        """One line for people, above the progress bar."""
        if self.enabled:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if not self.enabled:
            return
        self.bar.close()
        if "tensorboard" in self.loggers:
            self.tensorboard.close()
        if "wandb" in self.loggers:
            self.wandb.finish()


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
        print(f"{path}: lines that could not be read ({len(lines['broken'])}) are in {path.stem}.broken.jsonl now", flush=True)


def run_id(out: Path) -> str:
    """One wandb run for an output directory, whatever the number of restarts."""
    path = out / "wandb_id"
    if not path.exists():
        path.write_text(os.urandom(8).hex())
    return path.read_text()
