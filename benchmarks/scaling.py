"""How speed and memory scale over the GPUs of one host: one table for SFT, experts and GRPO.

    python benchmarks/scaling.py 4 [--parts sft experts grpo] [--minutes 9] [--out scaling.json]
    python benchmarks/scaling.py 2 --tiny --models /tmp/models --assets /tmp/assets    # on a CPU

Runs sft_h200.py and ppo_h200.py on 1, 2, 4, ... GPUs in the layouts that docs/benchmarks.md
compares. Runs that need fewer GPUs than the host has share it: each gets GPUs of its own. After
--minutes no further run starts, and those that were left out are named. With --out, results
are kept in a file, and a second call measures only what is missing.

"share of one GPU's" is the speed relative to the first row of the same model, which has one GPU. If
a GPU has less than 100 GiB, SFT of 7B recomputes activations, unless its row says that it does not.
GRPO of 0.5B sums gradients over ranks once per step.
Megatron keeps fp32 master weights; FSDP2 keeps weights and optimizer state in bf16.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import MODELS, ROOT, make_parser, print_header, print_row, python_command

GIB = 2**30
BF16 = "engine.param_dtype=bfloat16"
FP32 = "engine.compute_dtype=float32"
ZERO_2 = "engine.reshard_after_forward=false"
SUMMED_ONCE = "engine.sync_each_micro_batch=false"
CHECKPOINTING = "engine.activation_checkpointing=true"
ROUTER_LOSS = "engine.router_aux_loss_coef=0.001"
PARTS = ("sft", "experts", "grpo")
SMALL_GPU_GIB = 100
TOKENS_PER_GPU = 4  # micro-batches of SFT in a step


@dataclass(frozen=True)
class Trial:
    """A row of the table.

    Attributes:
        part: of PARTS.
        shape: of benchmarks/shapes.py.
        layout: what the row is called.
        num_gpus: that it needs.
        arguments: of sft_h200.py or ppo_h200.py.
    """

    part: str
    shape: str
    layout: str
    num_gpus: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.part} {self.shape} {self.layout} on {self.num_gpus}"

    @property
    def script(self) -> Path:
        name = "ppo_h200.py" if self.part == "grpo" else "sft_h200.py"
        return ROOT / "benchmarks" / name


# ---- what is measured ----


def sizes_up_to(num_gpus: int) -> list[int]:
    """Return 1, 2, 4, ... up to the number of GPUs."""
    return [1 << exponent for exponent in range(num_gpus.bit_length())]


def fsdp(shape: str, part: str, layout: str, num_gpus: int, *settings: str) -> Trial:
    options = ("--micro-batches", str(TOKENS_PER_GPU), "--steps", "3")
    return Trial(part, shape, layout, num_gpus, (BF16, *settings, *options))


def megatron(shape: str, part: str, sizes: dict[str, int], num_gpus: int, *settings: str) -> Trial:
    """Return a trial of the Megatron engine. sizes: of its parallel groups, by "TP", "PP", ..."""
    keys = {
        "TP": "tensor_model_parallel_size",
        "PP": "pipeline_model_parallel_size",
        "VPP": "virtual_pipeline_model_parallel_size",
        "EP": "expert_model_parallel_size",
    }
    sharing = sizes.get("TP", 1) * sizes.get("PP", 1)
    replicas = num_gpus // sharing
    names = [f"{name} {size}" for name, size in sizes.items()]
    layout = f"Megatron {', '.join([*names, f'DP {replicas}'])}"
    arguments = (
        "model_engine=megatron",
        *(f"engine.{keys[name]}={size}" for name, size in sizes.items()),
        *settings,
        # Every GPU has the same work in all layouts.
        *("--micro-batches", str(TOKENS_PER_GPU * sharing), "--steps", "3"),
    )
    return Trial(part, shape, layout, num_gpus, arguments)


def sft_trials(num_gpus: int, shape: str, recompute: bool) -> list[Trial]:
    tokens = "data.max_tokens_per_micro_batch=8192"
    shared = (tokens, CHECKPOINTING) if recompute else (tokens,)
    trials = [fsdp(shape, "sft", "FSDP2", 1, *shared)]
    for size in sizes_up_to(num_gpus)[1:]:
        trials.append(fsdp(shape, "sft", "FSDP2 ZeRO-2", size, *shared, ZERO_2))
    if num_gpus == 1:
        return trials
    once = "FSDP2 ZeRO-2, gradients summed once per step"
    trials.append(fsdp(shape, "sft", once, num_gpus, *shared, ZERO_2, SUMMED_ONCE))
    trials.append(fsdp(shape, "sft", "FSDP2 ZeRO-3", num_gpus, *shared))
    if recompute:
        layout = "FSDP2 ZeRO-2, no recomputation"
        trials.append(fsdp(shape, "sft", layout, num_gpus, tokens, ZERO_2))
    half = num_gpus // 2
    bf16_sums = "engine.override_ddp_config.grad_reduce_in_fp32=false"
    # 28 layers divide into four stages, but not into eight.
    for sizes in ({"TP": 2}, {"TP": half, "PP": 2}, {"PP": min(num_gpus, 4)}):
        if sizes.get("TP") != 1:
            trials.append(megatron(shape, "sft", sizes, num_gpus, tokens, bf16_sums))
    overlapped = "engine.overlap_grad_reduce=true"
    trials.append(megatron(shape, "sft", {}, num_gpus, tokens, bf16_sums, overlapped))
    if num_gpus == 2:
        trials.append(fsdp(shape, "sft", "FSDP2 HSDP 2 x 1", 2, *shared, "engine.fsdp_size=1"))
    if num_gpus >= 4:
        size = f"engine.fsdp_size={half}"
        trials.append(fsdp(shape, "sft", f"FSDP2 HSDP 2 x {half}", num_gpus, *shared, size))
        trials.append(megatron(shape, "sft", {"PP": 2, "VPP": 2}, num_gpus, tokens, bf16_sums))
    return trials


def experts_trials(num_gpus: int, shape: str) -> list[Trial]:
    settings = ("data.max_tokens_per_micro_batch=8192", ROUTER_LOSS)
    trials = [fsdp(shape, "experts", "FSDP2", 1, *settings)]
    if num_gpus > 1:
        trials.append(fsdp(shape, "experts", "FSDP2 ZeRO-2", num_gpus, *settings, ZERO_2))
        trials.append(megatron(shape, "experts", {"EP": num_gpus}, num_gpus, *settings))
    return trials


def grpo_trials(num_gpus: int, prompts: dict[str, int], recompute: bool) -> list[Trial]:
    """Return trials in which every GPU has the same work.

    prompts: of every GPU in a step, by shape.
    """
    trials = []
    for shape, prompts_per_gpu in prompts.items():
        settings = [CHECKPOINTING] if recompute and shape == "7B" else []
        if shape != "7B":
            settings.append(SUMMED_ONCE)  # FSDP's work around small layers is slower than they are.
        for size in sizes_up_to(num_gpus):
            trials.append(grpo(shape, f"vLLM DP {size}", size, prompts_per_gpu, *settings))
        if num_gpus > 1:
            layout = f"vLLM TP 2, DP {num_gpus // 2}"
            tp2 = "rollout.tensor_parallel_size=2"
            trials.append(grpo(shape, layout, num_gpus, prompts_per_gpu, tp2, *settings))
    return trials


def grpo(shape: str, layout: str, num_gpus: int, prompts_per_gpu: int, *settings: str) -> Trial:
    tokens = "data.max_tokens_per_micro_batch=8192"
    zero_2 = () if num_gpus == 1 else (ZERO_2,)
    prompts = str(prompts_per_gpu * num_gpus)
    options = ("--prompts", prompts, "--ranks", str(num_gpus), "--steps", "3")
    return Trial("grpo", shape, layout, num_gpus, (BF16, tokens, *zero_2, *settings, *options))


def make_trials(arguments: argparse.Namespace) -> list[Trial]:
    trials = tiny_trials(arguments) if arguments.tiny else trials_of_host(arguments)
    return [trial for trial in trials if re.search(arguments.only, trial.name)]


def trials_of_host(arguments: argparse.Namespace) -> list[Trial]:
    num_gpus = arguments.num_gpus
    is_small = smallest_memory_gib() < SMALL_GPU_GIB
    trials = {
        "sft": sft_trials(num_gpus, "7B", is_small),
        "experts": experts_trials(num_gpus, "8B-A1B"),
        "grpo": grpo_trials(num_gpus, {"0.5B": 256, "7B": 64}, is_small),
    }
    return [trial for part in arguments.parts for trial in trials[part]]


def tiny_trials(arguments: argparse.Namespace) -> list[Trial]:
    """Return the trials of the same layouts with a tiny model, in fp32, for processes on a CPU."""
    num_ranks = arguments.num_gpus
    small = ("data.max_tokens_per_micro_batch=4096", "--micro-batches", "1", "--steps", "1")
    few = ("--n", "2", "--tokens", "4", "--steps", "1")
    cache = "rollout.kv_cache_gib=0.05"
    trials = []
    if "sft" in arguments.parts:
        trials += sft_trials(num_ranks, "tiny", recompute=True)
    if "grpo" in arguments.parts:
        trials += grpo_trials(num_ranks, {"tiny": 4}, recompute=False)
    tiny = []
    for trial in trials:
        replaced = [word for word in trial.arguments if word != BF16]
        extra = (FP32, *few, cache) if trial.part == "grpo" else (FP32, *small)
        words = (*replaced, *extra)
        tiny.append(Trial(trial.part, trial.shape, trial.layout, trial.num_gpus, words))
    return tiny


def smallest_memory_gib() -> float:
    """Return the memory of the GPU that has least of it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return min(float(line) for line in lines) / 1024


# ---- running ----


class GPUs:
    """The numbers of the GPUs that no run uses. A run waits until there are enough of them."""

    def __init__(self, num_gpus: int):
        numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = numbers.split(",") if numbers else [str(number) for number in range(num_gpus)]
        self._free = visible[:num_gpus]
        self._changed = threading.Condition()

    def take(self, count: int) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            taken = self._free[:count]
            self._free = self._free[count:]
            return taken

    def give_back(self, taken: list[str]) -> None:
        with self._changed:
            self._free = sorted([*self._free, *taken])
            self._changed.notify_all()


@dataclass
class Bench:
    """What all trials share.

    Attributes:
        models: the folder of the models.
        assets: a folder for prompts, outputs and logs.
        out: the file that keeps the numbers.
        deadline: after this time.monotonic(), no trial starts.
    """

    models: Path
    assets: Path
    out: Path
    deadline: float

    def run(self, trial: Trial, gpus: list[str]) -> dict | str:
        """Return the numbers of a trial, or the error in its log if it failed."""
        folder = self.assets / trial.name.replace(" ", "_").replace(",", "")
        folder.mkdir(parents=True, exist_ok=True)
        numbers = folder / "numbers.json"
        assets = ["--assets", str(folder)] if trial.part == "grpo" else []
        # ppo_h200.py starts its ranks itself.
        num_processes = 1 if trial.part == "grpo" else trial.num_gpus
        command = [
            *python_command(num_processes),
            *(str(trial.script), trial.shape, *trial.arguments, *assets),
            *("--models", str(self.models), "--json", str(numbers)),
        ]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        # Megatron's collectives start before the products that hide them only with one queue.
        queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if "Megatron" in trial.layout else {}
        with open(folder / "log.txt", "w") as log:
            code = subprocess.call(
                command,
                env={"OMP_NUM_THREADS": "4", **os.environ, **visible, **queues},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if code:
            return f"exit code {code}: {last_error(folder / 'log.txt')}"
        return json.loads(numbers.read_text())


def last_error(log: Path) -> str:
    """Return the last line that names an error, but not torchrun's own summary of failed ranks."""
    errors = [
        line
        for line in log.read_text().splitlines()
        if "error" in line.lower() and "torch/distributed" not in line and "elastic" not in line
    ]
    return errors[-1].strip() if errors else f"see {log}"


def run_all(bench: Bench, trials: list[Trial], num_gpus: int, done: dict[str, dict]) -> list[str]:
    """Run the trials that are not done, and add their numbers; return what went wrong."""
    gpus = GPUs(num_gpus)
    problems = []
    writing = threading.Lock()

    def run(trial: Trial, taken: list[str]) -> None:
        start = time.monotonic()
        try:
            numbers = bench.run(trial, taken)
        finally:
            gpus.give_back(taken)
        print(f"{trial.name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if isinstance(numbers, str):
            problems.append(f"{trial.name}: {numbers}")
            return
        with writing:
            done[trial.name] = numbers
            bench.out.write_text(json.dumps(done, indent=1))

    left = [trial for trial in trials if trial.name not in done]
    # Part by part. In each, runs on few GPUs go side by side before those that need the whole host.
    left.sort(key=lambda trial: (PARTS.index(trial.part), trial.num_gpus))
    with ThreadPoolExecutor(num_gpus) as pool:
        running = []
        for trial in left:
            taken = gpus.take(trial.num_gpus)
            if time.monotonic() > bench.deadline:
                problems.append(f"{trial.name}: not run, no time was left")
                gpus.give_back(taken)
                continue
            running.append(pool.submit(run, trial, taken))
        for each in running:
            each.result()
    return problems


# ---- the table ----


def tokens_per_second(trial: Trial, numbers: dict) -> float:
    """Return the tokens per second and GPU."""
    if trial.part == "grpo":
        return numbers["perf/tokens_per_second"]
    return numbers["tokens_per_second"]


def print_table(trials: list[Trial], done: dict[str, dict]) -> None:
    """Print a row for each trial that was run."""
    print_header(
        "model", "layout", "GPUs", "tokens/s per GPU", "share of one GPU's", "MFU", "s per step",
        "peak GiB (estimated)", "replicas idle",
    )  # fmt: skip
    one_gpu = {}
    for trial in trials:
        if trial.name not in done:
            continue
        numbers = done[trial.name]
        speed = tokens_per_second(trial, numbers)
        kind = (trial.part, trial.shape)
        if trial.num_gpus == 1:
            one_gpu[kind] = speed
        share = f"{speed / one_gpu[kind]:.1%}" if kind in one_gpu else ""
        is_grpo = trial.part == "grpo"
        print_row(
            f"{trial.shape}, {'GRPO' if is_grpo else 'SFT'}",
            trial.layout,
            trial.num_gpus,
            f"{speed:,.0f}",
            share,
            "" if is_grpo else f"{numbers['mfu']:.1%}",
            f"{numbers['timing/step' if is_grpo else 'step']:.2f}",
            memory_of(trial, numbers),
            f"{numbers.get('perf/rollout_idle', 0):.0%}" if is_grpo else "",
        )


def memory_of(trial: Trial, numbers: dict) -> str:
    if trial.part == "grpo":
        names = ("perf/memory_awake_gib", "perf/memory_training_gib")
        known = [numbers[name] for name in names if name in numbers]  # on a GPU
        return f"{max(known):.1f}" if known else ""
    return f"{numbers['peak_gib']:.1f} ({numbers['estimated_gib']:.1f})"


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("num_gpus", type=int)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="run only those whose name matches"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="until no further run starts")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--assets", type=Path, default=Path("/tmp/rankwise-scaling"))
    parser.add_argument("--out", type=Path, help="keep the numbers in this file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in fp32, on a CPU")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.assets.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    out = arguments.out or arguments.assets / "scaling.json"
    done = json.loads(out.read_text()) if arguments.out and out.exists() else {}
    bench = Bench(arguments.models, arguments.assets, out, deadline)
    trials = make_trials(arguments)
    if not trials:
        sys.exit(f"error: --only={arguments.only} matches no run of these parts")
    problems = run_all(bench, trials, arguments.num_gpus, done)
    print_table(trials, done)
    for problem in problems:
        print(f"not measured: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
