"""Train with TRL on preferences, for comparison:  python tests/preferences/trl_worker.py SETTINGS

SETTINGS is a JSON file: model, the paths of pairs and labels, the numbers of steps and rows of a
batch, and the learning rate. Prints a JSON object: the name of a loss -> the logs of each step.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

KEPT = (
    "loss",
    "grad_norm",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "kl",
    "log_odds_ratio",
)


def read(path: str) -> Dataset:
    return Dataset.from_list([json.loads(line) for line in Path(path).read_text().splitlines()])


def logs_of(trainer_class, config_class, settings: dict, rows: Dataset, **options) -> list[dict]:
    """Train, and return the kept logs of each step."""
    with tempfile.TemporaryDirectory() as scratch:
        config = config_class(
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
            **options,
        )
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
            args=config,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        )
        trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return [kept(line) for line in steps]


def kept(line: dict) -> dict:
    return {name: line[name] for name in KEPT if name in line}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    pairs = read(settings["pairs"])
    labels = read(settings["labels"])
    logs = {}
    for name, loss_type in (("dpo", "sigmoid"), ("ipo", "ipo")):
        logs[name] = logs_of(DPOTrainer, DPOConfig, settings, pairs, loss_type=[loss_type])
    logs["kto"] = logs_of(
        KTOTrainer, KTOConfig, settings, labels, desirable_weight=settings["desirable_weight"]
    )
    logs["simpo"] = logs_of(
        CPOTrainer,
        CPOConfig,
        settings,
        pairs,
        loss_type="simpo",
        cpo_alpha=0.0,
        beta=2.0,
        simpo_gamma=1.0,
    )
    logs["orpo"] = logs_of(ORPOTrainer, ORPOConfig, settings, pairs)
    print(json.dumps(logs))


if __name__ == "__main__":
    main()
