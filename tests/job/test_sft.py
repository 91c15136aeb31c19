"""train_sft.py as its users run it: real processes, real signals."""

import json
import os
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.batching.order import global_batch
from examples.arithmetic import make_rows, make_tokenizer
from tests.support.launch import (
    LIMIT,
    ROOT,
    checkpoints,
    imported,
    kill_all,
    metrics,
    run,
    start,
    wait_for,
)
from tests.support.models import make_model
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
    """A model directory, 84 training and 30 validation rows, and a token cache that all runs share."""
    directory = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    make_model(directory / "model", "qwen3", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(directory / "model")
    train, val = make_rows()
    for name, part in (("train", train[:84]), ("val", val[:30])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    return directory


def arguments(assets, out, *more):
    """20 steps in 2 epochs of 10, 4 rows left over in each."""
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_tokens_per_micro_batch=64",
        "optim.lr=3e-3",
        "trainer.total_epochs=2",
        *more,
    ]


def curve(out):
    return [
        (m["step"], m["train/loss"], m["train/grad_norm"], m["train/lr"])
        for m in metrics(out)
        if m["step"]
    ]


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
            ),
        ]
    )
    return out


def test_a_run_leaves_what_it_promises(uninterrupted, assets):
    lines = metrics(uninterrupted)
    assert [m["step"] for m in lines] == list(range(21))
    assert {"val/loss", "val/exact_match"} <= lines[0].keys() & lines[10].keys() & lines[20].keys()
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
    assert all(needed <= m.keys() for m in lines[1:])
    assert "perf/mfu" not in lines[1], "the peak of a CPU is not known"
    assert (
        lines[20]["train/loss"] < 0.8 * lines[1]["train/loss"]
        and lines[20]["val/loss"] < 0.8 * lines[0]["val/loss"]
    )
    records = [
        json.loads(line.strip("\0"))
        for file in (uninterrupted / "heartbeat").iterdir()
        for line in file.read_text().splitlines()
    ]
    assert [(r["rank"], r["stage"], r["step"]) for r in records] == [
        (0, "save", 20),
        (1, "save", 20),
    ]
    progress = json.loads((uninterrupted / "checkpoints/step_00000020/trainer.json").read_text())
    assert progress["run"]["model.freeze"] == []  # which a resume compares
    assert checkpoints(uninterrupted) == ["latest", "step_00000015", "step_00000020"]
    assert (uninterrupted / "checkpoints" / "latest").read_text() == "step_00000020\n"
    assert (uninterrupted / "report.png").stat().st_size > 10_000
    assert list((uninterrupted / "tensorboard").iterdir())
    assert "seed: 0" in (uninterrupted / "config.yaml").read_text()
    AutoModelForCausalLM.from_pretrained(uninterrupted / "hf")
    assert AutoTokenizer.from_pretrained(uninterrupted / "hf").chat_template


def test_kill_and_resume_repeats_every_step_to_the_last_bit(assets, uninterrupted, tmp_path):
    """Killed behind the checkpoint of step 10, where the second epoch begins, and in the middle of writing step 15."""
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
    seen = curve(tmp_path)[-1][0]
    assert 10 <= seen < 20
    process = start(command, tmp_path / "log2")
    wait_for((tmp_path / "checkpoints" / "step_00000015.tmp").exists, process)
    kill_all(process)
    assert "step_00000010" in checkpoints(tmp_path)
    assert (
        "resuming from" in (tmp_path / "log2").read_text()
        and "step 10 of 20" in (tmp_path / "log2").read_text()
    )
    done = run(command)
    assert "step 20 of 20" not in done.stdout and curve(tmp_path) == curve(uninterrupted)
    assert [m["val/loss"] for m in metrics(tmp_path) if "val/loss" in m] == [
        m["val/loss"] for m in metrics(uninterrupted) if "val/loss" in m
    ]
    assert checkpoints(tmp_path) == ["latest", "step_00000015", "step_00000020"]
    assert (tmp_path / "metrics.superseded.jsonl").exists(), (
        "lines of steps that ran twice are kept aside"
    )
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (uninterrupted / "hf" / file).read_bytes()


def test_checkpoints_by_time_a_second_run_and_ctrl_c(assets, tmp_path):
    command = [
        *PYTHON,
        *arguments(assets, tmp_path, "trainer.total_epochs=10000", "trainer.save_minutes=0.02"),
    ]
    process = start(command, tmp_path / "log")
    wait_for((tmp_path / "checkpoints" / "latest").exists, process)
    refused = run(command, returncode=2)
    assert (
        f"is in use by process {process.pid} on" in refused.stderr
        and refused.stderr.count("error:") == 1
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT) == 0
    said, last = (tmp_path / "log").read_text(), curve(tmp_path)[-1][0]
    assert "checkpoints: every 0.02 minutes, when asked to stop, and after the last step" in said
    assert said.count("SIGINT: a checkpoint will be saved") == 1 and "Traceback" not in said
    assert (
        f"stopped by a signal after step {last}" in said
        and checkpoints(tmp_path)[-1] == f"step_{last:08d}"
    )


def test_slurm_ranks_stop_on_a_signal_to_one_of_them_and_one_process_goes_on(
    assets, uninterrupted, tmp_path
):
    """The two share long sequences."""
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
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
    }
    ranks = [
        start(command, tmp_path / f"log{i}", SLURM_PROCID=str(i), SLURM_LOCALID=str(i), **slurm)
        for i in range(2)
    ]
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(curve(tmp_path)) >= 3, ranks[0])
    ranks[1].send_signal(signal.SIGUSR1)
    assert [r.wait(LIMIT) for r in ranks] == [0, 0], (tmp_path / "log0").read_text()
    stopped = curve(tmp_path)[-1][0]
    assert 3 <= stopped < 20 and checkpoints(tmp_path) == ["latest", f"step_{stopped:08d}"]
    assert not (tmp_path / "hf").exists()
    first, second = metrics(tmp_path)[:2]
    assert first["val/loss"] == pytest.approx(metrics(uninterrupted)[0]["val/loss"], rel=1e-6)
    assert min(second["perf/cp_1"], second["perf/cp_2"]) > 0
    done = run([*PYTHON, *arguments(assets, tmp_path)])
    assert f"step {stopped} of 20" in done.stdout
    # One rank adds in another order than two: equal to fp32 rounding, which Adam carries along.
    for one, two in zip(curve(tmp_path), curve(uninterrupted), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


def test_sigterm_saves_and_a_second_run_of_a_finished_one_changes_nothing(assets, tmp_path):
    command = [*PYTHON, *arguments(assets, tmp_path, "trainer.max_checkpoints=-1")]
    process = start(command, tmp_path / "log")
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(curve(tmp_path)) >= 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    assert "the same command continues" in (tmp_path / "log").read_text()
    run(command)
    before = curve(tmp_path), checkpoints(tmp_path)
    assert len(before[0]) == 20
    assert "step 20 of 20" in run(command).stdout
    assert (curve(tmp_path), checkpoints(tmp_path)) == before


def test_exact_match_is_what_greedy_decoding_of_the_export_gives(assets, tmp_path):
    """Half-way through learning 24 rows by heart some are right: count them by decoding, token by token."""
    rows = [json.loads(line) for line in (assets / "train.jsonl").read_text().splitlines()[:24]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
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
    tokenizer, right = AutoTokenizer.from_pretrained(tmp_path / "hf"), 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        reply = model.generate(
            **prompt, do_sample=False, max_new_tokens=40, eos_token_id=tokenizer.eos_token_id
        )[0, prompt["input_ids"].shape[1] :]
        right += tokenizer.decode(reply) == row["messages"][1]["content"] + "<|im_end|>"
    assert metrics(tmp_path)[-1]["val/exact_match"] == right / len(rows)
    assert 0 < right < len(rows), "a share of 0 or 1 would show little"


def test_dry_run_prints_the_plan_and_trains_nothing(assets, tmp_path):
    model = shutil.copytree(assets / "model", tmp_path / "short")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    done = run([*TORCHRUN, *arguments(assets, tmp_path, "dry_run=true", f"model.path={model}")])
    for part in (
        "lr: 0.003",
        "2 ranks on cpu = 2 data-parallel",
        "rows 84",
        "steps: 20",
        "optimizer ",
        "activations ",
        "device total",
        "tokens, more than the model's max_position_embeddings=16: lower data.max_length",
    ):
        assert done.stdout.count(part) == 1, part
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "metrics.jsonl").exists()


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
        "output_dir=/dev/null/out cannot be written",
    ),
    "a row that no group of ranks can hold": (
        ["engine.context_parallel_size=auto", "data.max_tokens_per_micro_batch=30"],
        "tokens, more than data.max_tokens_per_micro_batch=30 for each of 1 ranks: raise it",
    ),
    "a word instead of a number of ranks": (
        ["engine.context_parallel_size=all"],
        "must be auto, or at least 1",
    ),
    "a layout that does not divide": (
        ["engine.context_parallel_size=2"],
        "does not divide the 1 ranks",
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
    "a chat template that is not there": (
        ["data.chat_template=/nowhere"],
        "data.chat_template=/nowhere: No such file",
    ),
    "a cache that cannot be written": (
        ["data.cache_dir=/dev/null/x"],
        "data.cache_dir=/dev/null/x cannot be written",
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
FIRST, LAST = "an unknown key", "no such checkpoint"  # in the order in which they are found


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(assets, tmp_path, what):
    more, message = MISTAKES[what]
    done = run(
        [
            *PYTHON,
            *arguments(assets, tmp_path / "out", *(more(tmp_path) if callable(more) else more)),
        ],
        returncode=2,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and message in lines[0] and "Traceback" not in done.stderr


@pytest.mark.parametrize("what", [FIRST, LAST])
def test_a_mistake_is_found_before_what_is_slow_to_import(assets, tmp_path, what):
    modules = imported(
        run(
            [*PYTHON, *arguments(assets, tmp_path / "out", *MISTAKES[what][0])],
            returncode=2,
            PYTHONPROFILEIMPORTTIME="1",
        ).stderr
    )
    assert "omegaconf" in modules and not modules & {"vllm", "megatron", "msprobe"}
    assert ("torch" in modules) == (what == LAST)


def test_with_two_ranks_only_rank_0_speaks(assets, tmp_path):
    done = run(
        [*TORCHRUN, *arguments(assets, tmp_path, broken_file(tmp_path, "{}\n"))], returncode=1
    )
    assert (
        done.stderr.count("error: ") == 1 and 'broken.jsonl:1: "messages" is missing' in done.stderr
    )


def test_a_checkpoint_is_not_continued_with_other_data_nor_overwritten(assets, uninterrupted):
    kept = ("metrics.jsonl", "config.yaml", "hf/model.safetensors")
    before = checkpoints(uninterrupted), [(uninterrupted / name).read_bytes() for name in kept]
    done = run(
        [*PYTHON, *arguments(assets, uninterrupted, "data.train_batch_size=4")], returncode=2
    )
    assert "was written with data.train_batch_size=8, now it is 4" in done.stderr
    done = run(
        [*PYTHON, *arguments(assets, uninterrupted, "data.train_on=last", "data.max_length=64")],
        returncode=2,
    )
    assert (
        "was written with data.train_files=" in done.stderr
        and "(a hash of data, tokenizer and their options)" in done.stderr
    )
    run([*PYTHON, *arguments(assets, uninterrupted, "dry_run=true")])
    done = run([*PYTHON, *arguments(assets, uninterrupted, "trainer.resume=never")], returncode=2)
    assert "trainer.resume=never, but" in done.stderr
    assert (
        checkpoints(uninterrupted),
        [(uninterrupted / name).read_bytes() for name in kept],
    ) == before


def test_a_run_goes_on_with_another_batch_size_seed_and_data_when_told_to(
    assets, uninterrupted, tmp_path
):
    """In another directory than the repository's, with paths relative to it."""
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
    # 30 rows are 7 batches of 4: the steps go on from 20 with batch 21 of the new order, the last of its third epoch.
    assert [(m["step"], m["train/epoch"]) for m in metrics(tmp_path)] == [
        (k, k / 7) for k in range(21, 29)
    ]
    rows = [json.loads(line) for line in (assets / "val.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(uninterrupted / "hf", dtype=torch.float32)
    tokenizer, loss, tokens = AutoTokenizer.from_pretrained(uninterrupted / "hf"), 0.0, 0
    for row in global_batch(30, 4, seed=1, step=20):
        question, answer = rows[row]["messages"]
        prompt = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_dict=False
        )
        reply = tokenizer(answer["content"] + "<|im_end|>")["input_ids"]
        logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        loss += torch.nn.functional.cross_entropy(
            logits, torch.tensor(reply), reduction="sum"
        ).item()
        tokens += len(reply)
    assert metrics(tmp_path)[0]["train/loss"] == pytest.approx(loss / tokens, rel=1e-5)
    # What it saves is its own: nothing is left to override.
    assert "step 28 of 28" in run(command, cwd=assets).stdout


def test_a_run_goes_on_with_ranks_that_share_the_long_rows_alone(assets, uninterrupted, tmp_path):
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
    lines, same = metrics(tmp_path), metrics(uninterrupted)[16:]
    assert [m["step"] for m in lines] == [16, 17, 18, 19, 20]
    for a, b in zip(lines, same, strict=True):
        keys = [key for key in b if key.startswith(("train/", "val/"))]
        assert {key: a[key] for key in keys} == pytest.approx(
            {key: b[key] for key in keys}, rel=1e-4
        )
        assert 0.5 < a["perf/plan_efficiency"] <= 1
    assert (
        all(sum(m[f"perf/cp_{size}"] for m in lines) > 0 for size in (1, 2))
        and "val/exact_match" in lines[-1]
    )


def test_a_run_goes_on_from_the_older_checkpoint_when_the_newest_is_damaged(
    assets, uninterrupted, tmp_path
):
    """To the last bit, past a copy that is no checkpoint and a broken line of metrics, and says so."""
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
    said = f"{out}/checkpoints/step_00000020 is damaged: weights/__1_0.distcp is not as it was written; "
    planned = run([*command, "dry_run=true"])
    assert (
        planned.stdout.count(f"{said}the run would go on from {out}/checkpoints/step_00000015\n")
        == 1
    )
    assert (
        f"continuing from {out}/checkpoints/step_00000015" in planned.stdout
        and planned.stdout.count("checkpoint: ") == 1
    )
    assert "step_00000020" in checkpoints(out)
    done = run(command)
    assert (
        done.stdout.count(
            f"{said}it is step_00000020.damaged now, and the run goes on from {out}/checkpoints/"
        )
        == 1
    )
    assert "step 15 of 20" in done.stdout and curve(out) == curve(uninterrupted)
    assert (
        f"{out}/metrics.jsonl: lines that could not be read (1) are in metrics.broken.jsonl now"
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
    checkpoint, mark = tmp_path / "step_00000020", tmp_path / "mark"
    shutil.copytree(uninterrupted / "checkpoints" / "step_00000020", checkpoint)
    set_trap(trap, checkpoint, mark)
    attempts = [[*PYTHON, *arguments(assets, tmp_path / "out", f"trainer.resume={checkpoint}")]]
    if trap == ".metadata":  # an export reads tensors alone of the rest
        attempts.append(
            [sys.executable, "-m", "engines.checkpoint", "export", checkpoint, tmp_path / "hf"]
        )
    for attempt in attempts:
        done = run(attempt, returncode=2)
        assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
        assert "a pickle in it calls posix.system" in done.stderr and not mark.exists()
        assert (
            "is not verified: it has no checksums, since an earlier version wrote it" in done.stdout
        )
    metadata = dcp.FileSystemReader(checkpoint / "weights").read_metadata().state_dict_metadata
    careless = {k: 0 for k, v in metadata.items() if isinstance(v, BytesStorageMetadata)}
    dcp.load(careless, checkpoint_id=checkpoint / "weights", no_dist=True)
    assert mark.exists(), "a trap that does not work shows nothing"


# What does not fit: free space before it starts [bytes], more arguments, files of a run to begin with, what is told.
PAGE = 4096
FULL = {
    "the third checkpoint": (
        4_500_000,
        ["trainer.save_freq=2", "trainer.max_checkpoints=-1"],
        None,
        "step_00000006.tmp/weights needs",
    ),
    "the third checkpoint in the background": (
        4_500_000,
        ["trainer.save_freq=2", "trainer.max_checkpoints=-1", "trainer.async_save=true"],
        None,
        "step_00000006.tmp/weights needs",
    ),
    "the first checkpoint": (
        400_000,
        ["trainer.save_freq=2"],
        None,
        "step_00000002.tmp/weights needs",
    ),
    "metrics": (
        4 * PAGE,
        ["trainer.save_freq=100", "trainer.save_minutes=0"],
        None,
        "DISK/out/metrics.jsonl needs more than",
    ),
    "the export": (40 * PAGE, [], "uninterrupted", "DISK/out/hf.tmp needs"),
    "the cache": (6 * PAGE, ["data.cache_dir=DISK/cache"], None, "DISK/cache/"),
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_one_line(assets, uninterrupted, tmp_path, what):
    """On a small disk of its own, which root mounts, and others in a name space of their own. Nothing that was complete is
    lost: what is on the disk, copied to a larger one, goes on."""
    free, more, begun, message = FULL[what]
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    if begun:
        shutil.copytree(
            uninterrupted,
            tmp_path / "begun",
            ignore=shutil.ignore_patterns("tensorboard", "report*"),
        )
        shutil.rmtree(tmp_path / "begun" / "hf")
    script = """set -e; mount -t tmpfs -o size=32m tmpfs $DISK
        if [ -d $BEGUN ]; then cp -r $BEGUN $DISK/out; fi
        head -c $(($(df --output=avail -B1 $DISK | tail -1) - FREE)) /dev/zero > $DISK/filler
        set +e; "$@"; code=$?
        rm $DISK/filler; cp -r $DISK $KEPT; exit $code""".replace("FREE", str(free))
    two_ranks = "third" in what
    command = [*(TORCHRUN if two_ranks else PYTHON), *arguments(assets, disk / "out", *more)]
    done = run(
        [
            "unshare",
            "--mount",
            *["--map-root-user"] * (os.geteuid() != 0),
            "bash",
            "-c",
            script,
            "bash",
            *(part.replace("DISK", str(disk)) for part in command),
        ],
        returncode=1 if two_ranks else 2,
        DISK=str(disk),
        KEPT=str(kept),
        BEGUN=str(tmp_path / "begun"),
    )
    [told] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        "the disk is full: " in told
        and message.replace("DISK", str(disk)) in told
        and " are free" in told
    )
    assert done.stderr.count("Traceback") == two_ranks, "torchrun's own"
    assert not list(kept.rglob("*.tmp")), "what was not finished takes no room"
    if two_ranks:
        assert checkpoints(kept / "out") == ["latest", "step_00000002", "step_00000004"]
        again = run([*PYTHON, *arguments(assets, kept / "out", "dry_run=true")])
        assert (
            f"continuing from {kept}/out/checkpoints/step_00000004" in again.stdout
            and "damaged" not in again.stdout
        )


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
    assert [m["train/skipped"] for m in metrics(tmp_path)][-1] == 2, (
        "the step that is one too many is not recorded"
    )
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "hf").exists()


def test_a_run_that_skips_every_step_is_an_error_however_short_it_is(assets, tmp_path):
    shutil.copytree(assets / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"] *= (
        1e25  # log-probabilities are finite, and the squares of gradients are not
    )
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
    assert (
        "the gradient was not finite in 2 of 2 updates" in done.stderr
        and not (tmp_path / "out" / "hf").exists()
    )
