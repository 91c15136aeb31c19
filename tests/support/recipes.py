"""Run the two recipes of a task, SFT and then GRPO, with a small model."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.launch import run


def run_both_recipes(
    task: str, folder: Path, settings: Sequence[str] = (), grpo_settings: Sequence[str] = ()
) -> Path:
    """Train on what the task's build command has written, and return the folder of GRPO.

    Args:
        task: the beginning of the recipes' names, such as "tools".
        folder: holds model/ and the files of rows; receives the runs.
        settings: settings of both recipes.
        grpo_settings: further settings of GRPO.
    """
    shared = [f"data.cache_dir={folder}/cache", "engine.compute_dtype=float32", *settings]
    run(
        [
            *(sys.executable, "train_sft.py", f"examples/recipes/{task}_sft.yaml", *shared),
            f"output_dir={folder}/sft",
            "trainer.report=false",
            f"model.path={folder}/model",
            f"data.train_files={folder}/traces.jsonl",
            f"data.val_files={folder}/val_traces.jsonl",
            *("optim.lr=2e-3", "trainer.total_steps=40"),
        ]
    )
    run(
        [
            *(sys.executable, "train_ppo.py", f"examples/recipes/{task}_grpo.yaml", *shared),
            f"output_dir={folder}/grpo",
            "trainer.report=false",
            f"model.path={folder}/sft/hf",
            f"data.train_files={folder}/train.jsonl",
            f"data.val_files={folder}/val.jsonl",
            *("data.train_batch_size=2", "rollout.n=2", "trainer.total_steps=1"),
            *("rollout.kv_cache_gib=0.25", *grpo_settings),
        ]
    )
    return folder / "grpo"
