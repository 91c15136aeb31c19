"""train_rm.py as its users run it: layouts, exports, adapters, resuming, and mistakes."""

import json
import math
import sys
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from data.batching.order import global_batch
from examples.arithmetic import make_tokenizer
from tests.preferences.assets import (
    BATCH_SIZE,
    NUM_ROWS,
    settings_with_unknown_token,
)
from tests.reward_models.assets import (
    chats_of,
    command,
    make_reward_assets,
    scores_of_transformers,
)
from tests.support.launch import ROOT, checkpoints, kill_all, metrics, run, start, wait_for
from tests.support.models import make_model

pytestmark = pytest.mark.slow

COMPARED = (
    "train/loss",
    "train/grad_norm",
    "train/mean_reward",
    "train/accuracy",
    "train/margin",
    "train/mean_absolute_error",
    "rewards/chosen",
    "rewards/rejected",
)
MEGATRON = "model_engine=megatron"
LORA = "model.lora.rank=4"
START = ["model.path=ASSETS/classifier", "algorithm.center_rewards_coefficient=0.05"]
MARGINS = ["data.train_files=ASSETS/margins.jsonl"]
SCORES = [
    "algorithm.loss=regression",
    "data.train_files=ASSETS/scores.jsonl",
    "data.val_files=ASSETS/scores.jsonl",
]
PIPELINE = "engine.pipeline_model_parallel_size=2"
# name -> (number of ranks, settings). Each is compared with the one of its group with one rank.
LAYOUTS = {
    "pairs": {
        "1 rank": (1, START),
        "2 ranks, padded": (2, [*START, "engine.use_remove_padding=false"]),
        "large micro-batches": (2, [*START, "data.max_tokens_per_micro_batch=1024"]),
        "context parallel": (2, [*START, "engine.context_parallel_size=2"]),
        "dynamic context parallel": (
            2,
            [
                *START,
                "engine.context_parallel_size=auto",
                "data.max_tokens_per_micro_batch=64",
            ],
        ),
        "Megatron TP": (2, [*START, MEGATRON, "engine.tensor_model_parallel_size=2"]),
        "Megatron PP": (2, [*START, MEGATRON, PIPELINE]),
        "Megatron CP": (2, [*START, MEGATRON, "engine.context_parallel_size=2"]),
    },
    "margins": {
        "1 rank": (1, [*START, *MARGINS]),
        "2 ranks": (2, [*START, *MARGINS]),
    },
    "lora": {
        "1 rank": (1, [*START, LORA]),
        "2 ranks": (2, [*START, LORA]),
        "Megatron TP": (2, [*START, LORA, MEGATRON, "engine.tensor_model_parallel_size=2"]),
    },
    "a new head": {
        "1 rank": (1, []),
        "Megatron": (1, [MEGATRON]),
    },
    "scores": {
        "1 rank": (1, ["model.path=ASSETS/classifier", *SCORES]),
        "2 ranks": (2, ["model.path=ASSETS/classifier", *SCORES]),
    },
    "mixture of experts": {
        "1 rank": (1, ["model.path=ASSETS/moe"]),
        "2 ranks": (2, ["model.path=ASSETS/moe"]),
    },
}
PAIRS_TO_COMPARE = [
    (group, name) for group, layouts in LAYOUTS.items() for name in layouts if name != "1 rank"
]
EXPORTED = [
    ("pairs", "1 rank"),
    ("pairs", "2 ranks, padded"),
    ("pairs", "Megatron PP"),
    ("a new head", "1 rank"),
    ("a new head", "Megatron"),
    ("mixture of experts", "2 ranks"),
]


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("assets")
    make_reward_assets(directory)
    make_model(directory / "moe", "qwen3_moe", vocab_size=len(make_tokenizer()))
    make_tokenizer().save_pretrained(directory / "moe")
    return directory


@pytest.fixture(scope="module")
def run_layout(assets, tmp_path_factory):
    """Return a function that runs a layout once, and returns its directory."""
    done: dict[tuple[str, str], Path] = {}

    def result(group: str, name: str) -> Path:
        if (group, name) not in done:
            num_ranks, settings = LAYOUTS[group][name]
            out = tmp_path_factory.mktemp("out")
            val = "data.val_files=ASSETS/val.jsonl"
            run(command(num_ranks, assets, out, val, "trainer.save_freq=6", *settings))
            done[group, name] = out
        return done[group, name]

    return result


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group, name", PAIRS_TO_COMPARE)
def test_losses_and_gradients_do_not_depend_on_the_layout(run_layout, group, name):
    expected = metrics(run_layout(group, "1 rank"))
    actual = metrics(run_layout(group, name))
    assert len(actual) == len(expected) == 7
    for line, other in zip(actual, expected, strict=True):
        for key in COMPARED:
            if key in other:
                assert line[key] == pytest.approx(other[key], rel=2e-5, abs=2e-5), key
    is_dynamic = name == "dynamic context parallel"
    for line in actual:
        assert ("perf/plan_efficiency" in line) == (is_dynamic and line["step"] > 0)
    for key in expected[-1]:
        if key.startswith("val/"):
            assert actual[-1][key] == pytest.approx(expected[-1][key], rel=2e-5, abs=2e-5), key


@pytest.mark.parametrize("group", LAYOUTS)
def test_training_lowers_the_loss(run_layout, group):
    lines = metrics(run_layout(group, "1 rank"))
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    if group == "a new head":
        assert lines[0]["val/loss"] == pytest.approx(math.log(2)), "a new head is zero"
        assert lines[0]["val/mean_reward"] == 0
    if group == "scores":
        assert "train/mean_absolute_error" in lines[1] and "train/accuracy" not in lines[1]
    else:
        chosen_minus_rejected = lines[-1]["rewards/chosen"] - lines[-1]["rewards/rejected"]
        assert lines[-1]["train/margin"] == pytest.approx(chosen_minus_rejected, abs=1e-6)


@pytest.mark.parametrize("group, file", [("pairs", "train.jsonl"), ("margins", "margins.jsonl")])
def test_the_second_step_is_that_of_a_written_out_loss_in_fp64(assets, run_layout, group, file):
    """The gradient of the first step, AdamW, and the loss of the second, with transformers."""
    path = assets / "classifier"
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [json.loads(line) for line in (assets / file).read_text().splitlines()]

    def score(row: dict, side: str) -> torch.Tensor:
        text = tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return model(torch.tensor([ids])).logits[0, 0]

    def loss_of(step: int) -> torch.Tensor:
        losses = []
        for i in global_batch(NUM_ROWS, BATCH_SIZE, 0, step):
            chosen = score(rows[i], "chosen")
            rejected = score(rows[i], "rejected")
            z = chosen - rejected - rows[i].get("margin", 0.0)
            losses.append(torch.log(1 + torch.exp(-z)) + 0.05 * (chosen + rejected) ** 2)
        return torch.stack(losses).mean()

    first = loss_of(0)
    first.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    lines = metrics(run_layout(group, "1 rank"))
    assert lines[1]["train/loss"] == pytest.approx(first.item(), rel=1e-5)
    assert lines[1]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    lr = lines[1]["train/lr"]
    torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8).step()
    assert lines[2]["train/loss"] == pytest.approx(loss_of(1).item(), rel=1e-5)


# -- exports ---------------------------------------------------------------------------------------


def rows_of(assets: Path) -> list[dict]:
    return [json.loads(line) for line in (assets / "val.jsonl").read_text().splitlines()]


def check_scores(assets: Path, out: Path, model) -> None:
    """Check that a model scores the validation rows as the last validation of the run did."""
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    rows = rows_of(assets)
    chosen = scores_of_transformers(model, tokenizer, chats_of(rows, "chosen"))
    rejected = scores_of_transformers(model, tokenizer, chats_of(rows, "rejected"))
    line = metrics(out)[-1]
    assert chosen.mean().item() == pytest.approx(line["val/rewards/chosen"], abs=1e-5)
    assert rejected.mean().item() == pytest.approx(line["val/rewards/rejected"], abs=1e-5)
    assert (chosen > rejected).float().mean().item() == pytest.approx(line["val/accuracy"])
    assert chosen.std() > 0.005, "the scores of different answers differ"


@pytest.mark.parametrize("group, name", EXPORTED)
def test_transformers_loads_the_export_and_computes_the_same_scores(
    assets, run_layout, group, name
):
    out = run_layout(group, name)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        out / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1
    check_scores(assets, out, model)


def test_the_error_of_scores_is_that_of_the_export(assets, run_layout):
    """A validation has 5 batches of 8 rows, and one of 4."""
    out = run_layout("scores", "2 ranks")
    model = AutoModelForSequenceClassification.from_pretrained(out / "hf", dtype=torch.float32)
    rows = [json.loads(line) for line in (assets / "scores.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    scores = scores_of_transformers(model, tokenizer, [row["messages"] for row in rows])
    errors = scores - torch.tensor([row["score"] for row in rows])
    line = metrics(out)[-1]
    assert line["val/mean_absolute_error"] == pytest.approx(errors.abs().mean().item(), abs=1e-5)
    assert line["val/mean_reward"] == pytest.approx(scores.mean().item(), abs=1e-5)


@pytest.mark.parametrize("group, name", [("pairs", "1 rank"), ("pairs", "Megatron PP")])
def test_a_checkpoint_exports_the_same_files(run_layout, tmp_path, group, name):
    out = run_layout(group, name)
    run([sys.executable, "-m", "engines.checkpoint", "export", out, tmp_path / "again"])
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "again" / file).read_bytes() == (out / "hf" / file).read_bytes()
    again = load_file(tmp_path / "again/model.safetensors")
    weights = load_file(out / "hf/model.safetensors")
    assert again.keys() == weights.keys()
    for weight, tensor in weights.items():
        assert torch.equal(again[weight], tensor), weight


@pytest.mark.parametrize("name", ["1 rank", "Megatron TP"])
def test_peft_loads_the_adapter_and_the_head(assets, run_layout, tmp_path, name):
    out = run_layout("lora", name)
    base = AutoModelForSequenceClassification.from_pretrained(
        assets / "model", num_labels=1, dtype=torch.float32
    )
    base.config.pad_token_id = make_tokenizer().pad_token_id
    model = PeftModel.from_pretrained(base, out / "hf").eval()
    check_scores(assets, out, model)
    before = load_file(assets / "classifier/model.safetensors")["score.weight"]
    trained = load_file(out / "hf/adapter_model.safetensors")["base_model.model.score.weight"]
    assert not torch.equal(trained, before), "the head is trained as a whole"

    merged = tmp_path / "merged"
    run([sys.executable, "-m", "engines.checkpoint", "export", out, merged, "--merge"])
    model, info = AutoModelForSequenceClassification.from_pretrained(
        merged, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    check_scores(assets, out, model)


def test_vllm_loads_the_export_and_computes_the_same_scores(assets, run_layout, tmp_path):
    path = run_layout("pairs", "1 rank") / "hf"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    chats = chats_of(rows_of(assets), "chosen")
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    (tmp_path / "ids").write_text(json.dumps(ids))
    worker = "tests/reward_models/pooling_worker.py"
    run([sys.executable, worker, path, tmp_path / "scores", tmp_path / "ids"], PYTHONPATH=str(ROOT))
    scores = torch.tensor(json.loads((tmp_path / "scores").read_text()))[:, 0]
    expected = scores_of_transformers(model, tokenizer, chats)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def test_padding_is_never_a_token_with_which_rows_end(assets, tmp_path):
    """A tokenizer whose padding token is its end token, and rows of plain text that end with it."""
    model = tmp_path / "model"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.pad_token = tokenizer.eos_token
    make_model(model, "qwen3", vocab_size=len(tokenizer), pad_token_id=None)
    tokenizer.save_pretrained(model)
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.path={model}", f"data.train_files={tmp_path}/rows.jsonl"]
    out = tmp_path / "out"
    done = run(command(1, assets, out, *settings, "trainer.total_steps=1"))
    assert "the export gets no pad_token_id" in done.stdout
    loaded = AutoModelForSequenceClassification.from_pretrained(out / "hf", dtype=torch.float32)
    assert loaded.config.pad_token_id is None
    with pytest.raises(ValueError, match="no padding token"):
        loaded(torch.zeros(2, 3, dtype=torch.int64))


# -- resuming --------------------------------------------------------------------------------------


def curve(out: Path) -> list[tuple]:
    names = itemgetter("train/loss", "train/grad_norm", "rewards/chosen", "train/accuracy")
    return [names(line) for line in metrics(out) if line["step"]]


@pytest.mark.parametrize(
    "engine", [[], [LORA], [MEGATRON, PIPELINE]], ids=["FSDP2", "LoRA", "Megatron"]
)
def test_kill_and_resume_repeats_every_step_to_the_last_bit(assets, tmp_path, engine):
    settings = ["trainer.save_freq=2", "trainer.total_steps=8", "trainer.max_checkpoints=-1"]
    settings += [*START, *engine]
    undisturbed = tmp_path / "undisturbed"
    run(command(2, assets, undisturbed, *settings))
    killed = tmp_path / "killed"
    process = start(command(2, assets, killed, *settings), tmp_path / "log")
    wait_for((killed / "checkpoints" / "step_00000004").exists, process)
    kill_all(process)
    done = run(command(2, assets, killed, *settings))
    assert "resuming from" in done.stdout
    assert curve(killed) == curve(undisturbed)
    assert checkpoints(killed) == checkpoints(undisturbed)
    for file in sorted((undisturbed / "hf").iterdir()):
        assert (killed / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


# -- before training -------------------------------------------------------------------------------


LOSS = """
def mine(chosen_scores, rejected_scores, **_):
    return rejected_scores - chosen_scores
"""


def test_a_run_does_not_resume_with_another_loss(assets, run_layout, tmp_path):
    (tmp_path / "loss.py").write_text(LOSS)
    out = run_layout("pairs", "1 rank")
    loss = f"algorithm.loss={tmp_path}/loss.py:mine"
    done = run(command(1, assets, out, *START, loss), returncode=2)
    assert "was written with algorithm.loss=bradley_terry, now it is" in done.stderr


def test_a_token_without_an_embedding_is_one_line(assets, tmp_path):
    settings = settings_with_unknown_token(assets)
    done = run(command(1, assets, tmp_path, *settings), returncode=2)
    assert "error: data.train_files has rows with the token <new>" in done.stderr


def test_a_dry_run_shows_pairs_and_the_memory(assets, tmp_path):
    settings = ["dry_run=true", "data.val_size=4"]
    printed = run(command(2, assets, tmp_path, *settings)).stdout
    for part in (
        "train: 40 rows with ",
        "row 1, chosen: ",
        "row 1, rejected: ",
        "\nsteps: 6\n",
        "memory of one rank for the trained reward model [GiB]",
    ):
        assert printed.count(part) == 1, part
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def two_labels(assets, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("two_labels")
    AutoModelForSequenceClassification.from_pretrained(
        assets / "model", num_labels=2
    ).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


MISTAKES = {
    "a column that no row has": (
        ["data.tools_key=tols"],
        "data.tools_key=tols names no column of data.train_files",
    ),
    "a pair that does not fit": (
        ["data.max_tokens_per_micro_batch=50"],
        "a pair, with a token for each score, has",
    ),
    "scores for a loss of pairs": (
        ["data.train_files=ASSETS/scores.jsonl"],
        "44 of 44 rows of data.train_files are answers with a score, and algorithm.loss=bradley",
    ),
    "pairs for a loss of scores": (
        ["algorithm.loss=regression"],
        "44 of 44 rows of data.train_files are pairs, and algorithm.loss=regression",
    ),
    "centering of scores": (
        [*SCORES, "algorithm.center_rewards_coefficient=0.1"],
        "algorithm.center_rewards_coefficient=0.1 does nothing with algorithm.loss=regression",
    ),
    "images": (["model.images=true"], "model.images=true does not work with train_rm.py"),
    "multi-token prediction": (["model.mtp.enable=true"], "model.mtp.enable=true does not work"),
    "two labels": (["model.path=TWO_LABELS"], "is a classifier with 2 labels"),
    "two labels with Megatron": (
        ["model.path=TWO_LABELS", MEGATRON],
        "is a classifier with 2 labels",
    ),
    "a family without a classifier": (
        ["model.path=ASSETS/apertus"],
        "transformers has no AutoModelForSequenceClassification for model_type=apertus",
    ),
    "a pattern that freezes nothing": (
        ["model.freeze=[visual]"],
        "model.freeze: 'visual' matches no name in the files of",
    ),
    "a frozen score head": (
        ["model.path=ASSETS/classifier", "model.freeze=[score]"],
        "model.freeze: 'score' matches only weights that this run does not freeze, such as score.w",
    ),
    "an adapter of a reward model": (
        [LORA, "model.lora.adapter_path=ADAPTER"],
        "modules_to_save=['score'] in adapter_config.json is not supported",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(assets, two_labels, run_layout, tmp_path, mistake):
    overrides, message = MISTAKES[mistake]
    if "ASSETS/apertus" in str(overrides):
        make_model(assets / "apertus", "apertus", vocab_size=len(make_tokenizer()))
        make_tokenizer().save_pretrained(assets / "apertus")
    paths = {"TWO_LABELS": str(two_labels)}
    if "ADAPTER" in str(overrides):
        paths["ADAPTER"] = str(run_layout("lora", "1 rank") / "hf")
    for name, path in paths.items():
        overrides = [override.replace(name, path) for override in overrides]
    done = run(command(1, assets, tmp_path / "out", *overrides), returncode=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert message in line


def test_the_script_is_short():
    assert len((ROOT / "train_rm.py").read_text().splitlines()) < 200
