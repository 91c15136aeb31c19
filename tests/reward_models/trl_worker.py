"""Train reward models with TRL, for comparison:  python tests/reward_models/trl_worker.py SETTINGS

SETTINGS is a JSON file: model, the runs (name -> path of the pairs, and the coefficient of
centering), the numbers of steps and rows of a batch, and the learning rate. Prints a JSON object:
the name of a run -> the logs of each step.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

KEPT = ("loss", "grad_norm", "accuracy", "margin", "mean_reward")


def logs_of(settings: dict, pairs: str, center: float | None) -> list[dict]:
    """Train, and return the kept logs of each step."""
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    model = AutoModelForSequenceClassification.from_pretrained(
        settings["model"], num_labels=1, dtype=torch.float32
    )
    with tempfile.TemporaryDirectory() as scratch:
        config = RewardConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=settings["num_steps"],
            per_device_train_batch_size=settings["batch_size"],
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.01,
            max_grad_norm=1.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            center_rewards_coefficient=center,
        )
        trainer = RewardTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        )
        trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return [kept(line) for line in steps]


def kept(line: dict) -> dict:
    return {name: line[name] for name in KEPT}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    logs = {}
    for name, (pairs, center) in settings["runs"].items():
        logs[name] = logs_of(settings, pairs, center)
    print(json.dumps(logs))


if __name__ == "__main__":
    main()
