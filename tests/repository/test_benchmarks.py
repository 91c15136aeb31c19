"""Every script in benchmarks/ at a tiny size, on a CPU and without TRL: what they measure is in docs/benchmarks.md."""

import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

from config import load
from tests.support.launch import ROOT, run

BENCHMARKS = ROOT / "benchmarks"
# Script -> (arguments, what it must print). MODELS, ASSETS and the demo's MODEL and DATA stand for directories and files.
SMALL_PPO = [
    "engine.compute_dtype=float32",
    "rollout.kv_cache_gib=0.05",
    "data.max_tokens_per_micro_batch=256",
]
SMOKES = {
    "sft_vs_trl.py": (
        ["--pairs", "1", "--ranks", "1", "--steps", "3", "--rows", "60", "--batch-size", "2"],
        r"TRL is left out\n.*\n.*\n\| 1 \| [\d,]+ \([\d,]+, [\d,]+\) \| \d\.\d+, \d\.\d+ \|",
    ),
    "grpo_vs_trl.py": (
        ["--pairs", "1", "--ranks", "1", "--steps", "1", "--prompts", "2"],
        r"TRL is left out\n\n.*\n.*\n\| 1 \| this \| (\d+\.\d\d \| ){6}[\d,]+ \| \d+ \| 0\.\d+ \| \d\.\d+ \|",
    ),
    "sft_h200.py": (
        [
            "tiny-VL",
            "data.max_tokens_per_micro_batch=512",
            "--micro-batches",
            "1",
            "--steps",
            "1",
            "--models",
            "MODELS",
        ],
        r"\| tiny-VL \| 1 \| 512 \|  \| [\d,]+ \| nan% \| \d+\.\d \(\d+\.\d\) \|",
    ),
    "lora_h200.py": (
        [
            "tiny",
            *SMALL_PPO,
            "--prompts",
            "2",
            "--n",
            "2",
            "--tokens",
            "4",
            "--steps",
            "1",
            "--assets",
            "ASSETS",
            "--models",
            "MODELS",
            "--ways",
            "shared",
        ],
        r"saves 0\.\d+ GiB(.*\n)*"
        r"\| tiny \| 1 x TP 1 \| .* \| \d+\.\d\d \| (\d+\.\d{3} \| ){9}nan \| nan \| 0\.0\d+ \|\n(.*\n)*"
        r"\| shared \| \d+\.\d\d \| (\d+\.\d{3} \| ){8}nan \| nan \| (nan|0\.0) \| 0\.0\d+ \|",
    ),
    "generation_profile.py": (
        "tiny --responses 2 --tokens 4 --repeat 1 --models MODELS".split(),
        r"\| tiny \| 2 x 4 \| rollout/vllm/scheduler.py \| \d(.*\n)*0 of 2 responses differ .*\nmilliseconds of",
    ),
    "speculative_h200.py": (
        [
            "tiny",
            *SMALL_PPO[:2],
            "--responses",
            "2",
            "--tokens",
            "4",
            "--ways",
            "mtp:1",
            "--models",
            "MODELS",
        ],
        r"\| tiny \| mtp:1 \| 1\.0 \| 2 x 4 equal \| (.*\n)*\| tiny \| mtp:1 \| 1\.25 .* \| 2 of 2 \|\n",
    ),
    "weight_sync_h200.py": (
        ["tiny", "", "--repeats", "1", "--models", "MODELS"],
        r"\| tiny \| 1 \| data parallel \| TP 1 \| \d\.\d+ \| \d\.\d+ \| 0\.\d+ \|",
    ),
    "offload_h200.py": (
        ["tiny", "--rounds", "1", "--models", "MODELS"],
        r"\| tiny \| \d+\.\d\d \| \d+\.\d\d \| \d+\.\d\d \| \d\.\d{3} \| \d\.\d{3} \| 0\.25 \|",
    ),
    "dynamic_cp.py": (
        [
            "--measure",
            "tiny",
            SMALL_PPO[0],
            "--models",
            "MODELS",
            "--steps",
            "1",
            "--sequences",
            "4",
            "--shortest",
            "8",
            "--median",
            "16",
            "--longest",
            "64",
            "--cap",
            "64",
        ],
        r"\| tiny \| 1 \| 1 \| [\d,]+ .* \| 1\.00 \|.*\n\| tiny \| 1 \| auto \| [\d,]+ .*\| \d+\.\d% \| 0\.\d ",
    ),
    "tokenize_speed.py": (
        ["--rows", "20", "--pairs", "1", "--tokenizer", "MODEL"],
        r"\| single-turn \| [\d,]+ \| [\d,]+ \| \d\.\d+ .*\n\| five-turn \| [\d,]+ \| [\d,]+ \| \d\.\d+ ",
    ),
    "make_mtp_data.py": (
        ["ASSETS", "tiny", "--rows", "8", "--models", "MODELS"],
        r"models/tiny-MTP-random\n",
    ),
    "host_path.py": (
        ["--tokens", "3000", "--ranks", "1", "64", "--repeats", "1", "--estimators", "gae"],
        r"\| 1 \| gae \|.*\n\| 64 \| gae \| (\d+\.\d{3} \| ){4}\d+ \| \d+ \|\n",
    ),
    "profiling_cost.py": (
        ["MODEL", "DATA", "data.train_batch_size=8", "--tools", "torch"],
        r"only timed: \d+\.\d\d microseconds\ntool .*\ntorch +\d+\.\d+ +\d+\.\d+ +\d+\.\d +\d+\.\d\d\n",
    ),
}
NOT_RUN = {
    "trl_sft.py": "the peer: it needs TRL, in an environment of its own",
    "trl_grpo.py": "the same",
    "trl_sft_h200.py": "the same",
    "ppo_h200.py": "run by lora_h200.py",
    "__init__.py": "documentation",
    "harness.py": "shared by the others",
    "trl_peer.py": "shared by the scripts that run TRL",
    "shapes.py": "the models of the others",
    "even_words.py": "the reward of grpo_vs_trl.py, which runs it",
    "make_sft_data.py": "run by sft_vs_trl.py",
    "make_grpo_data.py": "run by grpo_vs_trl.py",
    "same_numbers.py": "the proof for refactorings: it takes minutes",
}
TORCHRUN = ("--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each script prints; two run at a time."""
    folder = tmp_path_factory.mktemp("benchmarks")
    run([sys.executable, "examples/arithmetic.py", "build", folder / "demo"])
    places = {
        "MODELS": folder / "models",
        "ASSETS": folder / "assets",
        "MODEL": folder / "demo/model",
        "DATA": folder / "demo/train.jsonl",
    }

    def smoke(name):
        arguments = [str(places.get(argument, argument)) for argument in SMOKES[name][0]]
        return run([sys.executable, BENCHMARKS / name, *arguments], cwd=folder).stdout

    first = {
        name: smoke(name) for name in ("sft_h200.py", "lora_h200.py")
    }  # make the models that others take
    with ThreadPoolExecutor(2) as pool:
        return first | dict(
            zip(SMOKES.keys() - first.keys(), pool.map(smoke, SMOKES.keys() - first.keys()))
        )


@pytest.mark.parametrize("name", SMOKES)
def test_a_benchmark_runs_from_any_directory_and_prints_its_table(outputs, name):
    assert re.search(SMOKES[name][1], outputs[name]), outputs[name][-3000:]


def test_time_that_ranks_use_is_simulated():
    printed = run(
        [sys.executable, BENCHMARKS / "dynamic_cp.py", "--shapes", "0.5B", "--ranks", "8"]
    ).stdout
    auto, *fixed = (float(x) for x in re.findall(r"(\d+\.\d)% \|", printed))
    assert len(fixed) == 2 and auto > fixed[0], "a rank alone, or two, cannot hold the longest"


def test_a_step_with_images_is_prepared(tmp_path):
    """Up to what needs vLLM's model, which needs torchvision, which a CPU build of torch may lack."""
    done = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "ppo_h200.py",
            "tiny-VL",
            *SMALL_PPO,
            "--prompts",
            "2",
            "--n",
            "2",
            "--tokens",
            "4",
            "--assets-only",
            "--assets",
            tmp_path / "assets",
            "--models",
            tmp_path / "models",
        ],
        capture_output=True,
        text=True,
    )
    said = (
        "activations of images"
        if find_spec("torchvision")
        else "error: vLLM cannot import its Qwen2_5_VLForConditionalGeneration: No module named 'torchvision'"
    )
    assert said in done.stdout + done.stderr, done.stderr[-3000:]
    stats = json.loads(next((tmp_path / "assets/cache").glob("*/stats.json")).read_text())
    assert stats["images"] == 2


def test_every_benchmark_is_run_or_has_a_reason():
    assert {path.name for path in BENCHMARKS.glob("*.py")} == SMOKES.keys() | NOT_RUN.keys()


@pytest.mark.parametrize(
    "name, gpus",
    [
        ("sft_h200.sh", 1),
        ("sft_h200.sh", 2),
        ("ppo_h200.sh", 1),
        ("ppo_h200.sh", 2),
        ("megatron_h200.sh", 2),
        ("images_h200.sh", 1),
        ("mtp_h200.sh", 1),
        ("experts_h200.sh", 1),
    ],
)
def test_the_commands_of_a_shell_script_fit_the_configuration(name, gpus):
    """They need GPUs, so they are printed instead, and their settings are loaded."""
    printed = run(["bash", BENCHMARKS / name, str(gpus)], PYTHON="echo python3").stdout
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("python3 ")]
    assert len(commands) >= 3
    for command in commands:
        script = next(word for word in command if word.endswith(".py"))
        settings = [word for word in command[command.index(script) + 1 :] if "=" in word]
        if script == "benchmarks/weight_sync_h200.py":
            settings = ["model_engine=megatron", *(f"engine.{setting}" for setting in settings)]
        kind = "ppo" if script == "benchmarks/ppo_h200.py" else "sft"
        load(f"{kind}.yaml", ["model.path=m", "data.train_files=t.jsonl", *settings])
        source = (ROOT / script).read_text()
        assert all(
            f'"{word}"' in source
            for word in command
            if word.startswith("--") and word not in TORCHRUN
        ), command
