"""train_dpo.py as its users run it: layouts, reference, cache, resuming, and mistakes."""

import json
import math
import shutil
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.batching.order import global_batch
from examples.arithmetic import make_tokenizer
from tests.preferences.assets import (
    BATCH_SIZE,
    NUM_ROWS,
    command,
    make_assets,
    settings_with_unknown_token,
)
from tests.support.launch import checkpoints, kill_all, metrics, run, start, wait_for
from tests.support.models import make_model

pytestmark = pytest.mark.slow

COMPARED = (
    "train/loss",
    "train/grad_norm",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "train/router_aux_loss",
)
MEGATRON = "model_engine=megatron"
LORA = "model.lora.rank=4"
KTO = "algorithm.loss=kto"
THREE_STEPS = "trainer.total_steps=3"
# The routers' loss is a mean over micro-batches, so there is only one.
MOE = [
    "engine.router_aux_loss_coef=0.1",
    "data.max_tokens_per_micro_batch=4096",
    "model.path=MOE",
]
# The routers' auxiliary loss depends on the number of micro-batches.
DENSE_REFERENCE = [*MOE, "engine.router_aux_loss_coef=0", "reference.path=OWN"]
# name -> (number of ranks, settings). Each is compared with the one of its group with one rank.
LAYOUTS = {
    "dpo": {
        "1 rank": (1, []),
        "2 ranks, padded": (2, ["engine.use_remove_padding=false"]),
        "context parallel": (2, ["engine.context_parallel_size=2"]),
        "dynamic context parallel": (
            2,
            ["engine.context_parallel_size=auto", "data.max_tokens_per_micro_batch=60"],
        ),
        "large micro-batches, cached": (
            2,
            ["reference.cache=true", "data.max_tokens_per_micro_batch=1024"],
        ),
        "Megatron TP": (2, [MEGATRON, "engine.tensor_model_parallel_size=2"]),
        "Megatron CP": (2, [MEGATRON, "engine.context_parallel_size=2"]),
    },
    "lora": {
        "1 rank": (1, [LORA]),
        "a model of its own": (1, [LORA, "reference.path=OWN"]),
        "2 ranks, cached": (2, [LORA, "reference.cache=true"]),
        "Megatron TP": (2, [LORA, MEGATRON, "engine.tensor_model_parallel_size=2"]),
    },
    "mixture of experts": {
        "1 rank": (1, MOE),
        "padded, cached": (1, [*MOE, "reference.cache=true", "engine.use_remove_padding=false"]),
        "Megatron": (1, [*MOE, MEGATRON]),
    },
    "dense reference": {
        "1 rank": (1, DENSE_REFERENCE),
        "Megatron EP, cached": (
            2,
            [
                *DENSE_REFERENCE,
                MEGATRON,
                "engine.expert_model_parallel_size=2",
                "reference.cache=true",
            ],
        ),
    },
    "kto": {
        "1 rank": (1, [KTO, THREE_STEPS]),
        "dynamic context parallel": (
            2,
            [
                KTO,
                THREE_STEPS,
                "engine.context_parallel_size=auto",
                "data.max_tokens_per_micro_batch=32",
            ],
        ),
    },
}
PAIRS_TO_COMPARE = [
    (group, name) for group, layouts in LAYOUTS.items() for name in layouts if name != "1 rank"
]


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("assets")
    make_assets(directory)
    make_model(directory / "moe", "qwen3_moe", vocab_size=len(make_tokenizer()))
    make_tokenizer().save_pretrained(directory / "moe")
    return directory


@pytest.fixture(scope="module")
def run_layout(assets, tmp_path_factory):
    """Return a function that runs a layout once, and returns its metrics."""
    done: dict[tuple[str, str], list[dict]] = {}

    def result(group: str, name: str) -> list[dict]:
        if (group, name) not in done:
            num_ranks, settings = LAYOUTS[group][name]
            out = tmp_path_factory.mktemp("out")
            rows = [f"data.val_files={assets}/val.jsonl"]
            if group == "kto":
                rows = [f"data.{key}_files={assets}/labels.jsonl" for key in ("train", "val")]
            paths = {"path=MOE": f"path={assets}/moe", "path=OWN": f"path={assets}/model"}
            for name_in_settings, path in paths.items():
                settings = [setting.replace(name_in_settings, path) for setting in settings]
            run(command(num_ranks, assets, out, *rows, *settings))
            done[group, name] = metrics(out)
        return done[group, name]

    return result


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group, name", PAIRS_TO_COMPARE)
def test_losses_and_gradients_do_not_depend_on_the_layout(run_layout, group, name):
    expected = run_layout(group, "1 rank")
    actual = run_layout(group, name)
    assert len(actual) == len(expected) == (4 if group == "kto" else 7)
    for line, other in zip(actual, expected, strict=True):
        for key in COMPARED:
            if key in other:
                assert line[key] == pytest.approx(other[key], rel=2e-5, abs=2e-5), key
    for key in ("val/loss", "val/rewards/accuracies", "val/rewards/margins"):
        assert actual[-1][key] == pytest.approx(expected[-1][key], rel=2e-5, abs=2e-5), key


@pytest.mark.parametrize("group", [group for group in LAYOUTS if group != "dense reference"])
def test_training_separates_the_answers(run_layout, group):
    lines = run_layout(group, "1 rank")
    assert lines[1]["rewards/chosen"] == 0, "at first, the model is its reference"
    assert lines[1]["rewards/rejected"] == 0
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    assert ("train/router_aux_loss" in lines[1]) == (group == "mixture of experts")
    if group != "kto":
        assert lines[1]["train/loss"] == pytest.approx(math.log(2))
        assert lines[0]["val/loss"] == pytest.approx(math.log(2))
        assert lines[-1]["rewards/accuracies"] > 0.5


def test_the_second_step_is_that_of_a_written_out_dpo_in_fp64(assets, run_layout):
    """The gradient of the first step, AdamW, and the loss of the second, with transformers."""
    model = AutoModelForCausalLM.from_pretrained(assets / "model", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    rows = [json.loads(line) for line in (assets / "train.jsonl").read_text().splitlines()]

    def log_prob(row: dict, side: str) -> torch.Tensor:
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tokenize=False, add_generation_prompt=True
        )
        answer = row[side][0]["content"] + "<|im_end|>"
        num_prompt = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor(tokenizer(prompt + answer)["input_ids"])
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        return log_probs.gather(-1, ids[1:, None])[num_prompt - 1 :].sum()

    def batch(step: int) -> list[dict]:
        return [rows[i] for i in global_batch(NUM_ROWS, BATCH_SIZE, 0, step)]

    def loss_of(step: int, reference: list[tuple[float, float]]) -> torch.Tensor:
        losses = []
        for row, (chosen, rejected) in zip(batch(step), reference, strict=True):
            chosen_ratio = log_prob(row, "chosen") - chosen
            rejected_ratio = log_prob(row, "rejected") - rejected
            z = 0.1 * (chosen_ratio - rejected_ratio)
            losses.append(-torch.log(1 / (1 + torch.exp(-z))))
        return torch.stack(losses).mean()

    @torch.no_grad()
    def reference_of(step: int) -> list[tuple[float, float]]:
        return [
            (log_prob(row, "chosen").item(), log_prob(row, "rejected").item())
            for row in batch(step)
        ]

    first_reference = reference_of(0)
    second_reference = reference_of(1)
    loss_of(0, first_reference).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    lines = run_layout("dpo", "1 rank")
    assert lines[1]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    lr = lines[1]["train/lr"]
    torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8).step()
    assert lines[2]["train/loss"] == pytest.approx(loss_of(1, second_reference).item(), rel=1e-5)


# -- the reference ---------------------------------------------------------------------------------


def test_a_cache_is_found_until_the_reference_changes(assets, tmp_path):
    settings = ["reference.cache=true", "trainer.total_steps=1"]
    cache = f"data.cache_dir={tmp_path}/cache"

    def train(name: str, *more: str) -> tuple[bool, dict]:
        done = run(command(1, assets, tmp_path / name, *settings, cache, *more))
        return "computing the log-probabilities" in done.stdout, metrics(tmp_path / name)[-1]

    is_computed, first = train("first")
    assert is_computed
    (folder,) = (tmp_path / "cache").glob("*-reference")
    is_computed, again = train("again")
    assert not is_computed
    assert again["train/loss"] == first["train/loss"]

    other = tmp_path / "other"
    make_other_model(assets / "model", other)
    is_computed, with_other = train("other_run", f"reference.path={other}")
    assert is_computed, "the weights of the reference are part of the cache's name"
    assert with_other["train/loss"] != first["train/loss"]
    is_computed, uncached = train("uncached", f"reference.path={other}", "reference.cache=false")
    assert not is_computed
    assert uncached["train/loss"] == pytest.approx(with_other["train/loss"], rel=1e-6)
    is_computed, _ = train("rows", f"data.train_files={assets}/val.jsonl")
    assert is_computed, "and so are the rows"
    damaged = np.load(folder / "ref_log_probs.npy")
    np.save(folder / "ref_log_probs.npy", damaged + 1)
    is_computed, computed_again = train("damaged")
    assert is_computed, "a file that differs from its checksum is computed again"
    assert computed_again["train/loss"] == first["train/loss"]


def make_other_model(model: Path, other: Path) -> None:
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})


# -- resuming --------------------------------------------------------------------------------------


def curve(out: Path) -> list[tuple]:
    lines = [line for line in metrics(out) if line["step"]]
    return [itemgetter(*COMPARED[:-1])(line) for line in lines]


def test_kill_and_resume_repeats_every_step_to_the_last_bit(assets, tmp_path):
    settings = ["trainer.save_freq=2", "trainer.total_steps=8", "trainer.max_checkpoints=-1"]
    undisturbed = tmp_path / "undisturbed"
    run(command(2, assets, undisturbed, *settings))
    killed = tmp_path / "killed"
    process = start(command(2, assets, killed, *settings), tmp_path / "log")
    wait_for((killed / "checkpoints" / "step_00000004").exists, process)
    kill_all(process)
    changed = run(command(1, assets, killed, *settings, "algorithm.loss=ipo"), returncode=2)
    assert "algorithm.loss=dpo, now it is ipo: set it back" in changed.stderr
    make_other_model(assets / "model", tmp_path / "other")
    reference = f"reference.path={tmp_path}/other"
    changed = run(command(1, assets, killed, *settings, reference), returncode=2)
    assert "was written with the reference=" in changed.stderr
    done = run(command(2, assets, killed, *settings, "trainer.report=true"))
    assert "resuming from" in done.stdout
    assert curve(killed) == curve(undisturbed)
    assert checkpoints(killed) == checkpoints(undisturbed)
    for file in sorted((undisturbed / "hf").iterdir()):
        assert (killed / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
    assert (killed / "report.png").stat().st_size > 10_000


# -- before training -------------------------------------------------------------------------------


def test_a_dry_run_shows_pairs_and_counts_the_reference(assets, tmp_path):
    settings = ["dry_run=true", "data.val_size=4"]
    printed = run(command(2, assets, tmp_path, *settings)).stdout
    for part in (
        "train: 40 rows with ",
        "val: 4 rows with ",
        "row 1, chosen: ",
        "row 1, rejected: ",
        "\nsteps: 6\n",
        "memory of one rank for the reference [GiB]",
    ):
        assert printed.count(part) == 1, part
    without = run(command(2, assets, tmp_path, *settings, "reference.cache=true")).stdout
    assert "for the reference" not in without
    assert "for the reference" not in run(command(1, assets, tmp_path, *settings, LORA)).stdout
    assert not (tmp_path / "metrics.jsonl").exists()


def without_weights(assets: Path) -> Path:
    """Return a directory with the description of a model, and no weights."""
    directory = assets / "no_weights"
    directory.mkdir(exist_ok=True)
    shutil.copy(assets / "model" / "config.json", directory)
    return directory


MISTAKES = {
    "a column that no row has": (
        ["data.tools_key=tols"],
        "data.tools_key=tols names no column of data.train_files",
    ),
    "a token without an embedding": (
        settings_with_unknown_token,
        "data.train_files has rows with the token <new>",
    ),
    "a pair that does not fit": (
        ["data.max_tokens_per_micro_batch=50"],
        "tokens, more than data.max_tokens_per_micro_batch=50: raise it",
    ),
    "padding that does not fit": (
        ["data.max_tokens_per_micro_batch=60", "engine.use_remove_padding=false"],
        "a pair, padded to equal lengths, has",
    ),
    "labels for a loss of pairs": (
        lambda assets: [f"data.train_files={assets}/labels.jsonl"],
        "44 of 44 rows of data.train_files are answers with a label, and algorithm.loss=dpo",
    ),
    "an answer to another prompt that does not fit": (
        lambda assets: [
            KTO,
            f"data.train_files={assets}/labels.jsonl",
            "data.max_tokens_per_micro_batch=52",
        ],
        "the longest prompt with the longest answer (algorithm.loss=kto combines them) has",
    ),
    "a reference that is not read": (
        ["algorithm.loss=simpo", "reference.path=/nowhere"],
        "reference.path=/nowhere does nothing with algorithm.loss=simpo",
    ),
    "a cache for KTO": ([KTO, "reference.cache=true"], "reference.cache=true does not work with"),
    "KTO without other rows": ([KTO, "data.train_batch_size=1"], "compares answers with answers"),
    "no such reference": (["reference.path=/nowhere"], "reference.path=/nowhere"),
    "a reference that lacks weights": (
        lambda assets: [f"reference.path={without_weights(assets)}"],
        "error: reference.path=",
    ),
    "images": (["model.images=true"], "model.images=true does not work with train_dpo.py"),
    "multi-token prediction": (
        ["model.mtp.enable=true", "model.mtp.enable_train=true"],
        "model.mtp.enable_train=true does not work",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(assets, tmp_path, mistake):
    overrides, message = MISTAKES[mistake]
    if callable(overrides):
        overrides = overrides(assets)
    done = run(command(1, assets, tmp_path / "out", *overrides), returncode=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert message in line
