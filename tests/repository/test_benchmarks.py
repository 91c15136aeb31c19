"""Every script in benchmarks/ runs at a tiny size on a CPU, next to TRL where it compares with it.

docs/benchmarks.md describes what the scripts measure.
"""

import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from benchmarks import grpo_vs_trl, ppo_h200, sft_vs_trl
from benchmarks.generation_profile import log_normal_lengths
from benchmarks.long_tails_simulation import Replica, Setting, Work
from config import load
from tests.support.launch import ROOT, run

BENCHMARKS = ROOT / "benchmarks"
FP32 = "engine.compute_dtype=float32"
SMALL_CACHE = "rollout.kv_cache_gib=0.05"
SMALL_PPO = f"{FP32} {SMALL_CACHE} data.max_tokens_per_micro_batch=256 --prompts 2 --n 2 --tokens 4"


@dataclass(frozen=True)
class Smoke:
    """A tiny run of a script.

    Attributes:
        arguments: in which MODELS, ASSETS, MODEL, DATA and PYTHON stand for the folders of models
            and of assets, the demo's model and file of rows, and the interpreter of the tests.
        printed: a regular expression for what it has to print.
    """

    arguments: str
    printed: str


SMOKES = {
    "sft_h200.py": Smoke(
        "tiny-VL data.max_tokens_per_micro_batch=512 --micro-batches 1 --steps 1 --models MODELS",
        r"\| tiny-VL \| 1 \| 512 \|  \| [\d,]+ \| nan% \| \d+\.\d \(\d+\.\d\) \|",
    ),
    "memory_h200.py": Smoke(
        f"tiny {FP32} data.max_tokens_per_micro_batch=4096 --steps 1 --models MODELS",
        r"\| engine.activation_checkpointing=true \| 0\.\d \| -?\d\.\d \| \d\.\d \(0\.\d\) \|",
    ),
    "lora_h200.py": Smoke(
        f"tiny {SMALL_PPO} --steps 1 --assets ASSETS --models MODELS --ways shared",
        r"saves 0\.\d+ GiB(.*\n)*"
        r"\| tiny \| 1 x TP 1 \| .* \| \d+\.\d\d \| (\d+\.\d{3} \| ){9}(nan \| ){3}0\.0\d+ \|\n"
        r"(.*\n)*"
        r"\| shared \| \d+\.\d\d \| (\d+\.\d{3} \| ){8}nan \| nan \| (nan|0\.0) \| 0\.0\d+ \|",
    ),
    "generation_profile.py": Smoke(
        "tiny --responses 2 --tokens 4 --repeat 1 --models MODELS",
        r"\| tiny \| 2 x 4 \| rollout/vllm/scheduler.py \| \d(.*\n)*"
        r"0 of 2 responses differ .*\nmilliseconds of",
    ),
    "episodes_gpu.py": Smoke(
        f"tiny {FP32} {SMALL_CACHE} --episodes 4 --turns 2 --tokens 4 --tool-seconds 2 --trl "
        "--models MODELS",
        r"\| tiny \| a single turn \| \d+\.\d\d \| [\d,]+ \| 1\.00 \| 0\.00 \|  \|\n"
        r"\| tiny \| 2 turns, tools of at most 2 s \| \d+\.\d\d \| [\d,]+ \| \d+\.\d\d \| "
        r"0\.\d\d \| \d+\.\d\d \|\n"
        r"\| tiny \| TRL, 2 turns, tools of at most 2 s \| \d+\.\d\d \| [\d,]+ \| \d+\.\d\d \| "
        r"0\.\d\d \|  \|\n",
    ),
    "long_tails.py": Smoke(
        f"tiny {SMALL_PPO} --longest 12 --steps 1 --oversample 1.5 --max-staleness 1 "
        "--assets ASSETS --models MODELS",
        r"\| equal lengths \| \d+\.\d\d \| 1\.00 \| \d\.\d\d \| 0k \| 4 \|  \|\n"
        r"\| log-normal lengths \| .*\n"
        r"\| oversample=1.5, max_staleness=1 \| .* \| \d+% \|\n",
    ),
    "long_tails_simulation.py": Smoke(
        "--replicas 2 --sigma 1 --oversample 1.5 --max-staleness 1 --groups 8",
        r"\| 2 \| 1 \| \d\.\d\d \(\d+%\) \| \d\.\d\d \(\d+%\) \|",
    ),
    "scaling.py": Smoke(
        "1 --parts sft grpo --tiny --assets ASSETS --models MODELS",
        r"\| tiny, SFT \| FSDP2 \| 1 \| [\d,]+ \| 100.0% \| nan% \| \d+\.\d\d \| .*\n"
        r"\| tiny, GRPO \| vLLM DP 1 \| 1 \| [\d,]+ \| 100.0% \|  \| \d+\.\d\d \| .* 0% \|\n",
    ),
    "resume.py": Smoke(
        f"2 {FP32} --steps 4 --rows 100 --assets ASSETS",
        r"\| undisturbed \| 2 \|( \d\.\d{4} \|){4}\n"
        r"\| killed \| 2, then 1 from step 3 \|( \d\.\d{4} \|){4}\n"
        r"largest difference: \d\.\de-0[5-9]\n",
    ),
    "speculative_h200.py": Smoke(
        f"tiny {FP32} {SMALL_CACHE} --responses 2 --tokens 4 --ways mtp:1 --models MODELS",
        r"\| tiny \| mtp:1 \| 1\.0 \| 2 x 4 equal \| (.*\n)*"
        r"\| tiny \| mtp:1 \| 1\.25 .* \| 2 of 2 \|\n",
    ),
    "routing_replay.py": Smoke(
        "tiny-MoE --updates 2 --prompts 2 --n 2 --tokens 8 rollout.kv_cache_gib=0.05 "
        "--models MODELS",
        r"\| tiny-MoE \| false \| 2 \| (\d\.\d\de-0\d \| ){4} \| \d+\.\d\d \|\n"
        r"\| tiny-MoE \| true \| 2 \| (\d\.\d\de-0\d \| ){4}\d\.\d\d% \| \d+\.\d\d \|\n",
    ),
    "weight_sync_h200.py": Smoke(
        'tiny "" --repeats 1 --models MODELS',
        r"\| tiny \| 1 \| data parallel \| TP 1 \| \d\.\d+ \| \d\.\d+ \| 0\.\d+ \|",
    ),
    "offload_h200.py": Smoke(
        "tiny --rounds 1 --models MODELS",
        r"\| tiny \| \d+\.\d\d \| \d+\.\d\d \| \d+\.\d\d \| \d\.\d{3} \| \d\.\d{3} \| 0\.25 \|",
    ),
    "cp_cost.py": Smoke(
        f"tiny {FP32} --models MODELS --tokens 64 --passes 1 --repeats 1",
        r"\| tiny \| 1 \| 64 \| -?\d+\.\d \| -?\d+\.\d \| -?\d+\.\d\d \|",
    ),
    "dynamic_cp.py": Smoke(
        f"--measure tiny {FP32} --models MODELS --steps 1 --sequences 4 --shortest 8 --median 16 "
        "--longest 64 --cap 64",
        r"\| tiny \| 1 \| 1 \| [\d,]+ \| [\d,]+ \([\d,]+\) \| 1\.00 \| - \|.*\n"
        r"\| tiny \| 1 \| auto \| [\d,]+ \| [\d,]+ \([\d,]+\) \| \d+\.\d\d \| \d+\.\d% \| 0\.\d ",
    ),
    "trl_sft_h200.py": Smoke(
        "tiny --tokens 512 --micro-batches 2 --steps 1 --lora 4 --models MODELS",
        r"\| tiny \| 1 \| 512 \| TRL, peft of rank 4 \| [\d,]+ \| nan% \| \d\.\d \| \d+\.\d{3} \|",
    ),
    "sft_vs_trl.py": Smoke(
        "--pairs 1 --ranks 1 --steps 3 --rows 20 --batch-size 2 --variants default:2 "
        "--trl-python PYTHON",
        r"\| 1 \| default:2 \| [\d,]+ \| [\d,]+ \| \d+\.\d\d \(\d+\.\d\d, \d+\.\d\d\) \| "
        r"\d\.\d{4}, \d\.\d{4}; \d\.\d{4}, \d\.\d{4} \|",
    ),
    "grpo_vs_trl.py": Smoke(
        "--pairs 1 --ranks 1 --steps 1 --prompts 2 --max-tokens 16 --trl-micro-batches 16 "
        "--trl-python PYTHON",
        r"\| 1 \| 16 rows \| \d+\.\d\d / \d+\.\d\d \| [\d,]+ / [\d,]+ \| \d+\.\d\d .*\n\n.*\n.*\n"
        r"\| 1 \| this \| (\d+\.\d\d \| ){6}[\d,]+ \| \d+ \| 0\.\d+ \| \d\.\d+ \|\n"
        r"\| 1 \| TRL, 16 rows \| (-?\d+\.\d\d \| ){6}[\d,]+ \| \d+ \| 0\.\d+ \| \d\.\d+ \|\n",
    ),
    "dpo_gpu.py": Smoke(
        "tiny --pairs 1 --steps 3 --batch-size 4 --micro-batch-size 2 --prompt-length 20 "
        "--answer-length 40 --longest 100 --dtype float32 --models MODELS --trl-python PYTHON",
        r"\| tiny \| rankwise \| \d+\.\d{3} \| [\d,.]+ \| 0\.0 \| (0\.6931, 0\.69)\d\d \|  \|\n"
        r"\| tiny \| TRL \| \d+\.\d{3} \| [\d,.]+ \| 0\.0 \| \1\d\d \| \d+\.\d\d \(",
    ),
    "precision.py": Smoke(
        "MODEL DATA data.train_batch_size=8 --steps 2 --lrs 1e-5 --ways bf16-int8 --out precision",
        r"\| 1e-5 \| fp32 \| \d+\.\d% \| 1\.000 \| 1\.000 \| (\d\.\d)\d{3}, \d\.\d{4} \|\n"
        r"\| 1e-5 \| bf16, .* \| \d+\.\d% \| 0\.9\d\d \| \d\.\d{3} \| \1\d{3}, \d\.\d{4} \|\n",
    ),
    "tokenize_speed.py": Smoke(
        "--rows 20 --pairs 1 --tokenizer MODEL",
        r"\| single-turn \| [\d,]+ \| [\d,]+ \| \d\.\d+ .*\n"
        r"\| five-turn \| [\d,]+ \| [\d,]+ \| \d\.\d+ ",
    ),
    "make_mtp_data.py": Smoke(
        "ASSETS tiny --rows 8 --models MODELS",
        r"models/tiny-MTP-random\n",
    ),
    "what_fits.py": Smoke(
        "Qwen/Qwen3-0.6B --gpus 2 --gib 44.4",
        r"SFT of all weights: \d+\.\d GiB on each GPU\n    the defaults\n"
        r"SFT with LoRA: \d+\.\d GiB on each GPU\n    model.lora.rank=16\n"
        r"GRPO of all weights: \d+\.\d GiB on each GPU, and \d+\.\d GiB of host memory per GPU\n",
    ),
    "host_path.py": Smoke(
        "--tokens 3000 --ranks 1 64 --repeats 1 --estimators gae",
        r"\| 1 \| gae \|.*\n\| 64 \| gae \| (\d+\.\d{3} \| ){4}\d+ \| \d+ \|\n",
    ),
    "profiling_cost.py": Smoke(
        "MODEL DATA data.train_batch_size=8 --tools torch",
        r"only timed: \d+\.\d\d microseconds\n"
        r"tool .*\ntorch +\d+\.\d+ +\d+\.\d+ +\d+\.\d +\d+\.\d\d\n",
    ),
}
# They make the models that others take.
FIRST = ("sft_h200.py", "lora_h200.py")
# Files without a smoke run of their own.
NOT_RUN = {
    "__init__.py": "documentation",
    "harness.py": "shared by all scripts",
    "shapes.py": "the models of the others",
    "recipes.py": "its recipes train for minutes",
    "recipe_curves.py": "the pictures of recipes.py",
    "known_models.py": "the models of what_fits.py",
    "host_path_case.py": "run by host_path.py",
    "long_tails_case.py": "run by long_tails.py",
    "ppo_h200.py": "run by lora_h200.py",
    "make_sft_data.py": "run by sft_vs_trl.py",
    "trl_sft.py": "run by sft_vs_trl.py",
    "make_grpo_data.py": "run by grpo_vs_trl.py",
    "even_words.py": "the reward of grpo_vs_trl.py",
    "trl_grpo.py": "run by grpo_vs_trl.py",
    "trl_dpo.py": "run by dpo_gpu.py",
    "trl_episodes.py": "run by episodes_gpu.py",
    "trl_peer.py": "shared by the scripts that run TRL",
    "same_numbers.py": "the proof for refactorings: it takes minutes",
}
TORCHRUN_OPTIONS = ("--standalone", "--nproc-per-node")


def selected_scripts(items: list[pytest.Item]) -> list[str]:
    """Return the scripts whose tests are selected."""
    tests = [item for item in items if item.path == Path(__file__)]
    names = [test.callspec.params.get("name") for test in tests if hasattr(test, "callspec")]
    return [name for name in SMOKES if name in names]


@pytest.fixture(scope="module")
def outputs(request, tmp_path_factory) -> dict[str, str]:
    """Return what each selected script prints. After the first ones, two run at a time."""
    folder = tmp_path_factory.mktemp("benchmarks")
    run([sys.executable, "examples/arithmetic.py", "build", folder / "demo"])
    values = {
        "MODELS": folder / "models",
        "ASSETS": folder / "assets",
        "MODEL": folder / "demo/model",
        "DATA": folder / "demo/train.jsonl",
        "PYTHON": sys.executable,
    }

    def smoke(name: str) -> str:
        words = shlex.split(SMOKES[name].arguments)
        arguments = [str(values.get(word, word)) for word in words]
        return run([sys.executable, BENCHMARKS / name, *arguments], cwd=folder).stdout

    printed = {name: smoke(name) for name in FIRST}
    others = [name for name in selected_scripts(request.session.items) if name not in FIRST]
    with ThreadPoolExecutor(2) as pool:
        printed.update(zip(others, pool.map(smoke, others)))
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKES)
def test_a_benchmark_runs_from_any_directory_and_prints_its_table(outputs, name):
    assert re.search(SMOKES[name].printed, outputs[name]), outputs[name][-3000:]


@pytest.mark.slow
def test_the_time_that_ranks_use_is_simulated():
    command = [sys.executable, BENCHMARKS / "dynamic_cp.py", "--shapes", "0.5B", "--ranks", "8"]
    percentages = re.findall(r"(\d+\.\d)% \|", run(command).stdout)
    auto, *fixed = [float(percentage) for percentage in percentages]
    assert len(fixed) == 2, "one rank, or two, cannot hold the longest sequence"
    assert auto > fixed[0]


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_simulated_groups_continue_until_they_would_be_too_old(max_staleness):
    work = Work(groups=4, n=2, tokens=100, longest=10_000)
    replica = Replica(0, work, 1.5, Setting(oversample=2.0, max_staleness=max_staleness))
    ages = []
    for _ in range(20):
        replica.step()
        ages += replica.age.tolist()
    assert {*ages} == {*range(1, max_staleness + 1)}


@pytest.mark.slow
def test_a_step_with_images_is_prepared(tmp_path):
    """Prepared up to vLLM's model: it needs torchvision, which a CPU build of torch may lack."""
    options = f"tiny-VL {SMALL_PPO} --assets-only".split()
    folders = ["--assets", tmp_path / "assets", "--models", tmp_path / "models"]
    command = [sys.executable, BENCHMARKS / "ppo_h200.py", *options, *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    expected = (
        "error: vLLM cannot import its Qwen2_5_VLForConditionalGeneration: "
        "No module named 'torchvision'"
    )
    if find_spec("torchvision"):
        expected = "activations of images"
    assert expected in done.stdout + done.stderr, done.stderr[-3000:]
    stats_file = next((tmp_path / "assets/cache").glob("*/stats.json"))
    assert json.loads(stats_file.read_text())["images"] == 2


def test_a_reward_model_reads_what_a_policy_with_random_weights_writes(tmp_path):
    """Also as transformers loads the tokenizer of a directory with a model of Qwen2."""
    ppo_h200.make_word_tokenizer(vocab_size=1024).save_pretrained(tmp_path)
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = tokenizer.convert_ids_to_tokens(range(1024))
    words = [i for i, text in enumerate(texts) if is_word(text)]
    assert len(words) > 500
    response = torch.tensor(words)[torch.randperm(len(words))].tolist()
    assert tokenizer.encode(tokenizer.decode(response)) == response


def is_word(text: str | None) -> bool:
    return text is not None and text.startswith(ppo_h200.SPACE) and len(text) == 4


def test_every_benchmark_is_run_or_has_a_reason():
    files = {path.name for path in BENCHMARKS.glob("*.py")}
    assert files == SMOKES.keys() | NOT_RUN.keys()


# ---- without TRL ----


def test_sft_is_timed_alone_without_trl(monkeypatch, capsys):
    trials = iter([sft_vs_trl.Trial(90.0, [3.0, 2.0]), sft_vs_trl.Trial(110.0, [3.0, 1.0])])
    monkeypatch.setattr(sft_vs_trl, "run_own", lambda bench, ranks: next(trials))
    sft_vs_trl.time_alone(bench=None, all_ranks=[2], num_runs=2)
    printed = capsys.readouterr().out
    assert "TRL is left out" in printed
    assert printed.endswith("| 2 | 100 (90, 110) | 3.0000, 1.0000 |\n")


def test_grpo_is_timed_alone_without_trl(monkeypatch):
    steps = iter([{"step": 1.0}, {"step": 3.0}, {"step": 2.0}])
    monkeypatch.setattr(grpo_vs_trl, "run_own", lambda bench, ranks: next(steps))
    rows = grpo_vs_trl.time_alone(bench=None, all_ranks=[1], num_runs=3)
    assert rows == [grpo_vs_trl.StageRow(1, "this", {"step": 2.0})]


# ---- lengths of responses ----


@pytest.mark.parametrize("longest", [100_000, 600])
def test_lengths_are_log_normal_with_this_mean(longest):
    """A longest length of six times the mean hardly changes their standard deviation, sigma."""
    lengths = log_normal_lengths(2000, 100, longest)
    assert np.mean(lengths) == pytest.approx(100, abs=0.5)
    assert np.log(lengths).std() == pytest.approx(1, abs=0.02)
    assert 1 <= min(lengths) < 10
    assert max(lengths) <= longest


# ---- shell scripts ----


def settings_of(script: str, words: list[str]) -> list[str]:
    """Return the key=value arguments of a script's command, as its configuration takes them."""
    settings = [word for word in words if "=" in word]
    if script == "benchmarks/weight_sync_h200.py":
        return ["model_engine=megatron", *(f"engine.{setting}" for setting in settings)]
    return settings


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
        ("lora_h200.sh", 1),
        ("scaling.sh", 4),
    ],
)
def test_the_commands_of_a_shell_script_fit_the_configuration(name, gpus):
    """They need GPUs, so they are printed instead, and their settings are loaded."""
    printed = run(["bash", BENCHMARKS / name, str(gpus)], PYTHON="echo python3").stdout
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("python3 ")]
    assert len(commands) >= 3
    for command in commands:
        script = next(word for word in command if word.endswith(".py"))
        settings = settings_of(script, command[command.index(script) + 1 :])
        has_rollout = Path(script).name in ("ppo_h200.py", "lora_h200.py")
        kind = "ppo" if has_rollout else "sft"
        load(f"{kind}.yaml", ["model.path=m", "data.train_files=t.jsonl", *settings])
        options = {word for word in command if word.startswith("--")}
        check_options(script, options.difference(TORCHRUN_OPTIONS))


def check_options(script: str, options: set[str]) -> None:
    """Assert that a script defines these options. lora_h200.py passes some on to ppo_h200.py."""
    source = (ROOT / script).read_text()
    if script == "benchmarks/lora_h200.py":
        source += (BENCHMARKS / "ppo_h200.py").read_text()
    unknown = [option for option in sorted(options) if f'"{option}"' not in source]
    assert not unknown, script
