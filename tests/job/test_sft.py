"""train_sft.py as its users run it: real processes, real signals."""

import json
import shutil
import signal
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.batching.order import global_batch
from examples.arithmetic import make_rows, make_tokenizer
from rollout.vllm.sampling import find_stop_token_ids
from tests.support.launch import (
    LIMIT,
    ROOT,
    checkpoints,
    export,
    imported,
    kill_all,
    metrics,
    run,
    start,
    wait_for,
)
from tests.support.models import make_model
from tests.support.ports import unused_port
from tests.support.small_disk import small_disk
from tests.support.training import flip_bit
from tests.support.traps import set_trap

pytestmark = pytest.mark.slow

PYTHON = [sys.executable, "train_sft.py"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "train_sft.py",
]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A model directory and 84 training and 30 validation rows. All runs share its token cache."""
    directory = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    make_model(directory / "model", "qwen3", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(directory / "model")
    train, val = make_rows()
    write_rows(directory / "train.jsonl", train[:84])
    write_rows(directory / "val.jsonl", val[:30])
    return directory


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def arguments(assets, out, *overrides):
    """Train for 20 steps: 2 epochs of 10 steps each, with 4 rows left over."""
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        "trainer.report=false",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_tokens_per_micro_batch=64",
        "optim.lr=3e-3",
        "trainer.total_epochs=2",
        *overrides,
    ]


def curve(out):
    """Return step, loss, gradient norm and learning rate of each training step."""
    return [
        (line["step"], line["train/loss"], line["train/grad_norm"], line["train/lr"])
        for line in metrics(out)
        if line["step"]
    ]


def has_steps(out, num_steps):
    return (out / "metrics.jsonl").exists() and len(curve(out)) >= num_steps


def error_lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


@pytest.fixture(scope="module")
def uninterrupted(assets, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    run(
        [
            *TORCHRUN,
            *arguments(
                assets,
                out,
                "trainer.save_freq=5",
                f"data.val_files={assets}/val.jsonl",
                "trainer.test_freq=10",
                "trainer.logger=[console,tensorboard]",
                "trainer.report=true",
            ),
        ]
    )
    return out


def test_a_run_writes_all_its_metrics(uninterrupted):
    lines = metrics(uninterrupted)
    assert [line["step"] for line in lines] == list(range(21))
    for step in (0, 10, 20):
        assert {"val/loss", "val/exact_match"} <= lines[step].keys()
    needed = {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "perf/tokens_per_second",
        "perf/memory_peak_gib",
        "timing/step",
        "timing/data",
        "timing/train_batch",
    }
    for line in lines[1:]:
        assert needed <= line.keys()
    assert "perf/mfu" not in lines[1], "the peak FLOPs of a CPU are unknown"
    assert lines[20]["train/loss"] < 0.8 * lines[1]["train/loss"]
    assert lines[20]["val/loss"] < 0.8 * lines[0]["val/loss"]


def test_a_run_writes_all_its_files(uninterrupted):
    records = []
    for file in (uninterrupted / "heartbeat").iterdir():
        records += [json.loads(line.strip("\0")) for line in file.read_text().splitlines()]
    last_stages = [(record["rank"], record["stage"], record["step"]) for record in records]
    assert last_stages == [(0, "save", 20), (1, "save", 20)]
    progress = json.loads((uninterrupted / "checkpoints/step_00000020/trainer.json").read_text())
    assert progress["run"]["model.freeze"] == []  # compared when a run resumes
    assert checkpoints(uninterrupted) == ["latest", "step_00000015", "step_00000020"]
    assert (uninterrupted / "checkpoints" / "latest").read_text() == "step_00000020\n"
    assert (uninterrupted / "report.png").stat().st_size > 10_000
    assert list((uninterrupted / "tensorboard").iterdir())
    assert "seed: 0" in (uninterrupted / "config.yaml").read_text()
    AutoModelForCausalLM.from_pretrained(uninterrupted / "hf")
    tokenizer = AutoTokenizer.from_pretrained(uninterrupted / "hf")
    assert tokenizer.chat_template
    # The model's files name token 1; rows teach the end token of the template.
    for directory in ("hf", "checkpoints/step_00000020/hf"):
        assert find_stop_token_ids(uninterrupted / directory) == [1, tokenizer.eos_token_id]


def validation_losses(out):
    return [line["val/loss"] for line in metrics(out) if "val/loss" in line]


def test_kill_and_resume_repeats_every_step_to_the_last_bit(assets, uninterrupted, tmp_path):
    """Kill it after the checkpoint of step 10, the end of epoch 1, then while it writes step 15."""
    command = [
        *TORCHRUN,
        *arguments(
            assets,
            tmp_path,
            "trainer.save_freq=5",
            f"data.val_files={assets}/val.jsonl",
            "trainer.test_freq=10",
        ),
    ]
    process = start(command, tmp_path / "log1")
    wait_for((tmp_path / "checkpoints" / "step_00000010").exists, process)
    kill_all(process)
    last_step = curve(tmp_path)[-1][0]
    assert 10 <= last_step < 20
    process = start(command, tmp_path / "log2")
    wait_for((tmp_path / "checkpoints" / "step_00000015.tmp").exists, process)
    kill_all(process)
    assert "step_00000010" in checkpoints(tmp_path)
    log = (tmp_path / "log2").read_text()
    assert "resuming from" in log
    assert "step 10 of 20" in log
    done = run(command)
    assert "step 20 of 20" not in done.stdout
    assert curve(tmp_path) == curve(uninterrupted)
    assert validation_losses(tmp_path) == validation_losses(uninterrupted)
    assert checkpoints(tmp_path) == ["latest", "step_00000015", "step_00000020"]
    assert (tmp_path / "metrics.superseded.jsonl").exists(), (
        "the first lines of steps that ran twice are moved there"
    )
    for file in sorted((uninterrupted / "hf").iterdir()):
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


def test_checkpoints_by_time_a_second_run_and_ctrl_c(assets, tmp_path):
    command = [
        *PYTHON,
        *arguments(assets, tmp_path, "trainer.total_epochs=10000", "trainer.save_minutes=0.02"),
    ]
    process = start(command, tmp_path / "log")
    wait_for((tmp_path / "checkpoints" / "latest").exists, process)
    second_run = run(command, returncode=2)
    assert f"is in use by process {process.pid} on" in second_run.stderr
    assert second_run.stderr.count("error:") == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT) == 0
    log = (tmp_path / "log").read_text()
    last_step = curve(tmp_path)[-1][0]
    assert "checkpoints: every 0.02 minutes, when asked to stop, and after the last step" in log
    assert log.count("SIGINT: a checkpoint will be saved") == 1
    assert "Traceback" not in log
    assert f"stopped by a signal after step {last_step}" in log
    assert checkpoints(tmp_path)[-1] == f"step_{last_step:08d}"


def test_slurm_ranks_stop_on_a_signal_to_one_of_them_and_one_process_goes_on(
    assets, uninterrupted, tmp_path
):
    """Two ranks, started as srun does, share long sequences; one process then resumes the run."""
    command = [
        "examples/slurm/rank.sh",
        *PYTHON,
        *arguments(
            assets,
            tmp_path,
            "trainer.async_save=true",
            "engine.context_parallel_size=auto",
            "data.max_tokens_per_micro_batch=32",
            f"data.val_files={assets}/val.jsonl",
            "trainer.test_freq=10",
        ),
    ]
    slurm = {
        "SLURM_NTASKS": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": unused_port(),
    }
    ranks = [
        start(command, tmp_path / f"log{i}", SLURM_PROCID=str(i), SLURM_LOCALID=str(i), **slurm)
        for i in range(2)
    ]
    wait_for(lambda: has_steps(tmp_path, 3), ranks[0])
    ranks[1].send_signal(signal.SIGUSR1)
    assert [rank.wait(LIMIT) for rank in ranks] == [0, 0], (tmp_path / "log0").read_text()
    last_step = curve(tmp_path)[-1][0]
    assert 3 <= last_step < 20
    assert checkpoints(tmp_path) == ["latest", f"step_{last_step:08d}"]
    assert not (tmp_path / "hf").exists()
    first, second = metrics(tmp_path)[:2]
    assert first["val/loss"] == pytest.approx(metrics(uninterrupted)[0]["val/loss"], rel=1e-6)
    assert min(second["perf/cp_1"], second["perf/cp_2"]) > 0
    done = run([*PYTHON, *arguments(assets, tmp_path)])
    assert f"step {last_step} of 20" in done.stdout
    # One rank adds in a different order from two, so results differ by fp32 rounding, which Adam
    # carries along.
    for step, expected in zip(curve(tmp_path), curve(uninterrupted), strict=True):
        assert step == pytest.approx(expected, rel=1e-5)


def test_sigterm_saves_and_rerunning_a_finished_run_changes_nothing(assets, tmp_path):
    command = [*PYTHON, *arguments(assets, tmp_path, "trainer.max_checkpoints=-1")]
    process = start(command, tmp_path / "log")
    wait_for(lambda: has_steps(tmp_path, 2), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    assert "the same command continues" in (tmp_path / "log").read_text()
    run(command)
    curve_before = curve(tmp_path)
    checkpoints_before = checkpoints(tmp_path)
    assert len(curve_before) == 20
    assert "step 20 of 20" in run(command).stdout
    assert curve(tmp_path) == curve_before
    assert checkpoints(tmp_path) == checkpoints_before


def test_exact_match_agrees_with_greedy_decoding_of_the_export(assets, tmp_path):
    """Halfway through memorizing 24 rows, some are right: count them by decoding token by token."""
    rows = read_rows(assets / "train.jsonl")[:24]
    write_rows(tmp_path / "rows.jsonl", rows)
    run(
        [
            *PYTHON,
            *arguments(
                assets,
                tmp_path,
                f"data.train_files={tmp_path}/rows.jsonl",
                "data.train_batch_size=24",
                f"data.val_files={tmp_path}/rows.jsonl",
                "trainer.total_steps=40",
                "optim.lr=1e-2",
                "data.max_tokens_per_micro_batch=1024",
                "trainer.logger=[]",
            ),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    num_right = 0
    for row in rows:
        question, answer = row["messages"]
        prompt = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        sequences = model.generate(
            **prompt, do_sample=False, max_new_tokens=40, eos_token_id=tokenizer.eos_token_id
        )
        prompt_length = prompt["input_ids"].shape[1]
        reply = tokenizer.decode(sequences[0, prompt_length:])
        num_right += reply == answer["content"] + "<|im_end|>"
    assert metrics(tmp_path)[-1]["val/exact_match"] == num_right / len(rows)
    assert 0 < num_right < len(rows), "a share of 0 or 1 would show little"


def test_dry_run_prints_the_plan_and_trains_nothing(assets, tmp_path):
    model = shutil.copytree(assets / "model", tmp_path / "short")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    settings = ["dry_run=true", f"model.path={model}"]
    settings += ["data.val_size=10", "data.train_max_samples=70"]
    done = run([*TORCHRUN, *arguments(assets, tmp_path, *settings)])
    for part in (
        "lr: 0.003",
        "2 ranks on cpu = 2 data-parallel",
        "train: 70 rows with ",
        "val: 10 rows with ",
        "steps: 16",
        "optimizer ",
        "activations ",
        "device total",
        "tokens, more than the model's max_position_embeddings=16: lower data.max_length",
    ):
        assert done.stdout.count(part) == 1, part
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "metrics.jsonl").exists()


def put_on_hub(model, cache, name, weights):
    """Copy a model into a cache of the hub, with or without its weights."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text("0123")
    ignored = [] if weights else ["*.safetensors"]
    shutil.copytree(model, snapshot, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*ignored))


def test_a_model_of_the_hub_keeps_its_name(assets, tmp_path):
    """A dry run needs no weights. An adapter's files name the model as the user did."""
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    settings = ["model.path=org/tiny", "model.lora.rank=2", "trainer.total_steps=1"]
    command = [*PYTHON, *arguments(assets, tmp_path / "out", *settings)]
    put_on_hub(assets / "model", tmp_path / "hub", "org/tiny", weights=False)
    planned = run([*command, "dry_run=true"], **hub)
    assert "  path: org/tiny\n" in planned.stdout and "device total" in planned.stdout
    assert "so this plan follows from config.json and cannot check the files" in planned.stdout
    missing = run(command, returncode=2, **hub)
    assert missing.stderr.count("error: ") == 1 and "model.safetensors" in missing.stderr

    put_on_hub(assets / "model", tmp_path / "hub", "org/tiny", weights=True)
    run(command, **hub)
    config = OmegaConf.load(tmp_path / "out" / "config.yaml")
    assert config.model.path == "org/tiny"
    export(tmp_path / "out", tmp_path / "exported")
    for adapter in (tmp_path / "out" / "hf", tmp_path / "exported"):
        written = json.loads((adapter / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == "org/tiny"
    export(tmp_path / "out" / "checkpoints" / "latest", tmp_path / "merged", "--merge")
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def broken_file(tmp_path, text):
    (tmp_path / "broken.jsonl").write_text(text)
    return f"data.train_files={tmp_path}/broken.jsonl"


GOOD = '{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}\n'
MISTAKES = {
    "an unknown key": (
        ["optim.learning_rate=1"],
        "unknown key optim.learning_rate; the nearest is optim.lr",
    ),
    "no model": (["model.path=/nowhere"], "model.path=/nowhere"),
    "no data file": (["data.train_files=/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
    "a malformed row": (
        lambda tmp: [broken_file(tmp, GOOD + GOOD + '{"messages": 1}\n')],
        "broken.jsonl:3: ",
    ),
    "an empty data set": (lambda tmp: [broken_file(tmp, "")], "broken.jsonl: the file is empty"),
    "a directory that cannot be written": (
        ["output_dir=/dev/null/out"],
        "output_dir=/dev/null/out cannot be written: Not a directory; set output_dir to a",
    ),
    "a row that no group of ranks can hold": (
        ["engine.context_parallel_size=auto", "data.max_tokens_per_micro_batch=30"],
        "tokens, more than data.max_tokens_per_micro_batch=30 on each of 1 ranks: raise it",
    ),
    "a word instead of a number of ranks": (
        ["engine.context_parallel_size=all"],
        "must be auto, or at least 1",
    ),
    "a layout that does not divide": (
        ["engine.context_parallel_size=2"],
        "does not divide the number of ranks, 1",
    ),
    "a row longer than the cap": (
        ["data.max_tokens_per_micro_batch=20"],
        "more than data.max_tokens_per_micro_batch=20",
    ),
    "a row longer than max_length": (
        ["data.max_length=20"],
        "rows are longer than data.max_length=20",
    ),
    "a batch larger than the data": (["data.train_batch_size=85"], "more than the 84 rows"),
    "a missing chat template": (
        ["data.chat_template=/nowhere"],
        "data.chat_template=/nowhere: No such file",
    ),
    "a cache that cannot be written": (
        ["data.cache_dir=/dev/null/x"],
        "data.cache_dir=/dev/null/x cannot be written: Not a directory; set data.cache_dir to a",
    ),
    "no such checkpoint": (
        ["trainer.resume=/nowhere"],
        "trainer.resume=/nowhere is neither auto, never, nor a",
    ),
    "a schedule with a key that has no effect": (
        ["optim.lr_scheduler_type=constant", "optim.min_lr_ratio=0.1"],
        "no effect",
    ),
}
# In the order in which the script checks for them.
FIRST_CHECKED = "an unknown key"
LAST_CHECKED = "no such checkpoint"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(assets, tmp_path, mistake):
    overrides, message = MISTAKES[mistake]
    if callable(overrides):
        overrides = overrides(tmp_path)
    done = run([*PYTHON, *arguments(assets, tmp_path / "out", *overrides)], returncode=2)
    [line] = error_lines(done)
    assert message in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mistake", [FIRST_CHECKED, LAST_CHECKED])
def test_a_mistake_is_reported_before_slow_imports(assets, tmp_path, mistake):
    overrides, _ = MISTAKES[mistake]
    done = run(
        [*PYTHON, *arguments(assets, tmp_path / "out", *overrides)],
        returncode=2,
        PYTHONPROFILEIMPORTTIME="1",
    )
    modules = imported(done.stderr)
    assert "omegaconf" in modules
    assert not modules & {"vllm", "megatron", "msprobe"}
    assert ("torch" in modules) == (mistake == LAST_CHECKED)


def test_of_two_ranks_only_rank_0_reports_an_error(assets, tmp_path):
    done = run(
        [*TORCHRUN, *arguments(assets, tmp_path, broken_file(tmp_path, "{}\n"))], returncode=1
    )
    assert done.stderr.count("error: ") == 1
    assert 'broken.jsonl:1: "messages" is missing' in done.stderr


def test_a_checkpoint_is_not_continued_with_other_data_nor_overwritten(assets, uninterrupted):
    files = [uninterrupted / name for name in ("metrics.jsonl", "config.yaml")]
    files.append(uninterrupted / "hf" / "model.safetensors")
    checkpoints_before = checkpoints(uninterrupted)
    contents_before = [file.read_bytes() for file in files]
    done = run(
        [*PYTHON, *arguments(assets, uninterrupted, "data.train_batch_size=4")], returncode=2
    )
    assert "was written with data.train_batch_size=8, now it is 4" in done.stderr
    done = run(
        [*PYTHON, *arguments(assets, uninterrupted, "data.train_on=last", "data.max_length=64")],
        returncode=2,
    )
    assert (
        "was written with data.max_length=4096, now it is 64, and data.train_on=all, now it is "
        "last: set it back, name data.train_files in trainer.resume_override, or" in done.stderr
    )
    run([*PYTHON, *arguments(assets, uninterrupted, "dry_run=true")])
    done = run([*PYTHON, *arguments(assets, uninterrupted, "trainer.resume=never")], returncode=2)
    assert "trainer.resume=never, but" in done.stderr
    assert checkpoints(uninterrupted) == checkpoints_before
    assert [file.read_bytes() for file in files] == contents_before


def test_a_run_continues_with_another_batch_size_seed_and_data_if_overridden(
    assets, uninterrupted, tmp_path
):
    """Run it outside the repository's directory, with paths relative to that directory."""
    changed = [
        "model.path=model",
        "data.train_files=val.jsonl",
        "data.train_batch_size=4",
        "trainer.seed=1",
        "trainer.total_epochs=4",
    ]
    command = [sys.executable, ROOT / "train_sft.py", *arguments(assets, tmp_path, *changed)]
    done = run(
        [
            *command,
            f"trainer.resume={uninterrupted}/checkpoints/step_00000020",
            "trainer.resume_override=[data.train_batch_size,trainer.seed,data.train_files]",
        ],
        cwd=assets,
    )
    assert done.stdout.count("as trainer.resume_override allows") == 3
    # 30 rows are 7 batches of 4. After step 20 comes batch 21 of the new order, the last batch of
    # its third epoch.
    epochs = [(line["step"], line["train/epoch"]) for line in metrics(tmp_path)]
    assert epochs == [(step, step / 7) for step in range(21, 29)]
    first_loss = metrics(tmp_path)[0]["train/loss"]
    rows = read_rows(assets / "val.jsonl")
    batch = [rows[index] for index in global_batch(30, 4, seed=1, step=20)]
    assert first_loss == pytest.approx(mean_loss(uninterrupted / "hf", batch), rel=1e-5)
    # Its own checkpoint has the new values, so there is nothing left to override.
    assert "step 28 of 28" in run(command, cwd=assets).stdout


def mean_loss(model_path, rows):
    """Return the mean loss over the reply tokens of these rows, computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    loss = 0.0
    num_tokens = 0
    for row in rows:
        question, answer = row["messages"]
        prompt = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_dict=False
        )
        reply = tokenizer(answer["content"] + "<|im_end|>")["input_ids"]
        logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        loss += torch.nn.functional.cross_entropy(
            logits, torch.tensor(reply), reduction="sum"
        ).item()
        num_tokens += len(reply)
    return loss / num_tokens


def test_a_run_continues_with_ranks_that_share_only_long_rows(assets, uninterrupted, tmp_path):
    """Rows have 22 to 55 tokens, and a rank has room for 30."""
    run(
        [
            *TORCHRUN,
            *arguments(
                assets,
                tmp_path,
                f"trainer.resume={uninterrupted}/checkpoints/step_00000015",
                "engine.context_parallel_size=auto",
                "data.max_tokens_per_micro_batch=30",
                f"data.val_files={assets}/val.jsonl",
            ),
        ]
    )
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [16, 17, 18, 19, 20]
    for line, expected_line in zip(lines, metrics(uninterrupted)[16:], strict=True):
        compared = [key for key in expected_line if key.startswith(("train/", "val/"))]
        expected = {key: expected_line[key] for key in compared}
        assert {key: line[key] for key in compared} == pytest.approx(expected, rel=1e-4)
        assert 0.5 < line["perf/plan_efficiency"] < 1 + 1e-9
    for group_size in (1, 2):
        assert sum(line[f"perf/cp_{group_size}"] for line in lines) > 0
    assert "val/exact_match" in lines[-1]


def test_a_run_continues_from_an_older_checkpoint_when_the_newest_is_damaged(
    assets, uninterrupted, tmp_path
):
    """It reports the damage, repeats every step to the last bit, and ignores a backup copy.

    A broken line of metrics.jsonl is moved to metrics.broken.jsonl.
    """
    out = tmp_path / "out"
    shutil.copytree(uninterrupted, out)
    flip_bit(out / "checkpoints" / "step_00000020" / "weights" / "__1_0.distcp")
    shutil.copytree(
        out / "checkpoints" / "step_00000015", out / "checkpoints" / "step_00000030.bak"
    )
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "metrics.jsonl").write_bytes(
        b"".join([*lines[:3], b'{"step": 3, "train\xff\n', *lines[3:]])
    )
    command = [
        *TORCHRUN,
        *arguments(
            assets,
            out,
            "trainer.save_freq=5",
            f"data.val_files={assets}/val.jsonl",
            "trainer.test_freq=10",
        ),
    ]
    damage = (
        f"{out}/checkpoints/step_00000020 is damaged: weights/__1_0.distcp has changed since "
        "it was written; "
    )
    planned = f"{damage}the run would resume from {out}/checkpoints/step_00000015\n"
    renamed = f"{damage}renamed to step_00000020.damaged, resuming from {out}/"
    dry_run = run([*command, "dry_run=true"])
    assert dry_run.stdout.count(planned) == 1
    assert f"continuing from {out}/checkpoints/step_00000015" in dry_run.stdout
    assert dry_run.stdout.count("checkpoint: ") == 1
    assert "step_00000020" in checkpoints(out)
    done = run(command)
    assert done.stdout.count(renamed) == 1
    assert "step 15 of 20" in done.stdout
    assert curve(out) == curve(uninterrupted)
    assert (
        f"{out}/metrics.jsonl: moved lines that could not be read (1) to metrics.broken.jsonl"
        in done.stdout
    )
    assert (out / "metrics.broken.jsonl").read_bytes() == b'{"step": 3, "train\xff\n'
    assert checkpoints(out) == [
        "latest",
        "step_00000015",
        "step_00000020",
        "step_00000020.damaged",
        "step_00000030.bak",
    ]
    assert (out / "hf" / "model.safetensors").read_bytes() == (
        uninterrupted / "hf" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("trap", [".metadata", "part"])
def test_a_checkpoint_cannot_run_commands(assets, uninterrupted, tmp_path, trap):
    checkpoint = tmp_path / "step_00000020"
    mark = tmp_path / "mark"
    shutil.copytree(uninterrupted / "checkpoints" / "step_00000020", checkpoint)
    set_trap(trap, checkpoint, mark)
    attempts = [[*PYTHON, *arguments(assets, tmp_path / "out", f"trainer.resume={checkpoint}")]]
    if trap == ".metadata":  # of the other files, an export reads only tensors
        attempts.append(
            [sys.executable, "-m", "engines.checkpoint", "export", checkpoint, tmp_path / "hf"]
        )
    for attempt in attempts:
        done = run(attempt, returncode=2)
        assert done.stderr.count("error: ") == 1
        assert "Traceback" not in done.stderr
        assert "a pickle in it contains code, which calls posix.system" in done.stderr
        assert not mark.exists()
        assert "cannot be verified: an earlier version wrote it without checksums" in done.stdout
    # PyTorch's own loader springs the trap: otherwise the test would prove nothing.
    metadata = dcp.FileSystemReader(checkpoint / "weights").read_metadata().state_dict_metadata
    pickled = {key: 0 for key, value in metadata.items() if isinstance(value, BytesStorageMetadata)}
    dcp.load(pickled, checkpoint_id=checkpoint / "weights", no_dist=True)
    assert mark.exists()


@dataclass(frozen=True)
class FullDisk:
    """A run on a disk with too little room.

    Attributes:
        free_bytes: free space when the run starts.
        message: part of the error message. DISK stands for the directory of the disk.
        overrides: arguments besides the usual ones.
        continues: whether the disk has the files of a run to continue.
        num_ranks: 1 or 2.
    """

    free_bytes: int
    message: str
    overrides: tuple[str, ...] = ()
    continues: bool = False
    num_ranks: int = 1


PAGE = 4096
SAVE_AND_KEEP_ALL = ("trainer.save_freq=2", "trainer.max_checkpoints=-1")
FULL_DISKS = {
    "the third checkpoint": FullDisk(
        4_500_000, "step_00000006.tmp/weights needs", SAVE_AND_KEEP_ALL, num_ranks=2
    ),
    "the third checkpoint in the background": FullDisk(
        4_500_000,
        "step_00000006.tmp/weights needs",
        (*SAVE_AND_KEEP_ALL, "trainer.async_save=true"),
        num_ranks=2,
    ),
    "the first checkpoint": FullDisk(
        400_000, "step_00000002.tmp/weights needs", ("trainer.save_freq=2",)
    ),
    "metrics": FullDisk(
        4 * PAGE,
        "DISK/out/metrics.jsonl needs more than",
        ("trainer.save_freq=100", "trainer.save_minutes=0"),
    ),
    "the export": FullDisk(40 * PAGE, "DISK/out/hf.tmp needs", continues=True),
    "the cache": FullDisk(6 * PAGE, "DISK/cache/", ("data.cache_dir=DISK/cache",)),
}
# It prints a traceback with each of them. The second one is of torchrun in a fork.
ERRORS_OF_TORCHRUN = ("errors.ChildFailedError:", "spawn.ProcessExitedException:")


@pytest.mark.parametrize("case", FULL_DISKS)
def test_a_full_disk_is_one_line(assets, uninterrupted, tmp_path, case):
    """Nothing that was complete is lost: copied to a larger disk, the run can continue."""
    full = FULL_DISKS[case]
    disk = tmp_path / "disk"
    kept = tmp_path / "kept"
    begun = tmp_path / "begun"
    disk.mkdir()
    if full.continues:
        ignored = shutil.ignore_patterns("tensorboard", "report*")
        shutil.copytree(uninterrupted, begun, ignore=ignored)
        shutil.rmtree(begun / "hf")
    has_two_ranks = full.num_ranks == 2
    launcher = TORCHRUN if has_two_ranks else PYTHON
    overrides = [override.replace("DISK", str(disk)) for override in full.overrides]
    with small_disk(disk, kept, begun, full.free_bytes) as keeper:
        done = run(
            [*launcher, *arguments(assets, disk / "out", *overrides)],
            returncode=1 if has_two_ranks else 2,
            mounts_of=keeper,
        )
    [line] = error_lines(done)
    assert "the disk is full: " in line
    assert full.message.replace("DISK", str(disk)) in line
    assert " are free" in line
    num_errors_of_torchrun = sum(done.stderr.count(error) for error in ERRORS_OF_TORCHRUN)
    assert done.stderr.count("Traceback") == num_errors_of_torchrun
    assert not list(kept.rglob("*.tmp")), "unfinished files are removed"
    if has_two_ranks:
        assert checkpoints(kept / "out") == ["latest", "step_00000002", "step_00000004"]
        again = run([*PYTHON, *arguments(assets, kept / "out", "dry_run=true")])
        assert f"continuing from {kept}/out/checkpoints/step_00000004" in again.stdout
        assert "damaged" not in again.stdout


def test_gradients_that_stay_infinite_stop_the_run(assets, tmp_path):
    done = run(
        [
            *PYTHON,
            *arguments(
                assets,
                tmp_path,
                "optim.lr=1e30",
                "optim.clip_grad=0",
                "trainer.max_skipped_steps=2",
                "optim.lr_scheduler_type=constant",
                "optim.lr_warmup_steps_ratio=0",
            ),
        ],
        returncode=2,
    )
    assert "the gradient was not finite in 3 of 4 updates" in done.stderr
    assert metrics(tmp_path)[-1]["train/skipped"] == 2, "the third one is not recorded"
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "hf").exists()


def test_a_run_that_skips_every_step_is_an_error_however_short_it_is(assets, tmp_path):
    shutil.copytree(assets / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    # Log-probabilities remain finite, but the squares of the gradients do not.
    weights["model.norm.weight"] *= 1e25
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    done = run(
        [
            *PYTHON,
            *arguments(
                assets, tmp_path / "out", f"model.path={tmp_path}/model", "trainer.total_steps=2"
            ),
        ],
        returncode=2,
    )
    assert "the gradient was not finite in 2 of 2 updates" in done.stderr
    assert not (tmp_path / "out" / "hf").exists()


SAMPLER = """
from functools import cache
import numpy as np

@cache
def longest_first(rows):
    return np.argsort([-len(row["answer"]) for row in rows], kind="stable")

def opening(rows, batch_index, batch_size, total_steps, seed, **_):
    num_open = max(batch_size, len(rows) * (batch_index + 1) // total_steps)
    generator = np.random.default_rng([seed, batch_index])
    return longest_first(rows)[generator.integers(num_open, size=batch_size)]
"""


def test_a_samplers_run_continues_exactly_and_does_not_depend_on_the_ranks(assets, tmp_path):
    (tmp_path / "mine.py").write_text(SAMPLER)
    settings = [
        f"data.sampler={tmp_path}/mine.py:opening",
        "trainer.total_steps=6",
        "trainer.save_freq=3",
        "trainer.max_checkpoints=-1",
    ]
    straight = tmp_path / "straight"
    run([*PYTHON, *arguments(assets, straight, *settings)])
    resumed = tmp_path / "resumed"
    resume = f"trainer.resume={straight}/checkpoints/step_00000003"
    run([*PYTHON, *arguments(assets, resumed, *settings, resume)])
    assert curve(resumed) == curve(straight)[3:]
    weights = [(out / "hf" / "model.safetensors").read_bytes() for out in (straight, resumed)]
    assert weights[0] == weights[1]

    two_ranks = tmp_path / "two"
    run([*TORCHRUN, *arguments(assets, two_ranks, *settings)])
    losses = [loss for _, loss, *_ in curve(straight)]
    assert [loss for _, loss, *_ in curve(two_ranks)] == pytest.approx(losses, rel=1e-4)
    answers = [row["answer"] for row in read_rows(assets / "train.jsonl")]
    longest = sorted(range(84), key=lambda row: -len(answers[row]))[:14]
    assert losses[0] == pytest.approx(first_loss_of(assets, longest), rel=1e-5)

    (tmp_path / "mine.py").write_text(SAMPLER + "# changed\n")
    done = run([*PYTHON, *arguments(assets, straight, *settings)], returncode=2)
    assert "was written with data.sampler=mine.py:opening (file " in done.stderr
    assert "name it in trainer.resume_override" in done.stderr


def first_loss_of(assets, admitted):
    """Return the loss of the untrained model on the first batch that SAMPLER draws."""
    rows = read_rows(assets / "train.jsonl")
    drawn = np.random.default_rng([0, 0]).integers(len(admitted), size=8)
    return mean_loss(assets / "model", [rows[admitted[i]] for i in drawn])
