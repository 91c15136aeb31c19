"""The seconds of a GRPO step by stage: Qwen2.5 shapes with random weights, train_ppo.py's own loop and vLLM.

    python benchmarks/ppo_h200.py 7B engine.param_dtype=bfloat16 [--prompts 256] [--n 4] [--tokens 512] [--steps 3]
    python benchmarks/ppo_h200.py 0.5B --ranks 2 rollout.tensor_parallel_size=2
    python benchmarks/ppo_h200.py 0.5B --prompts 8 --n 2 --tokens 32 --steps 20 --cycles     memory asleep, step by step
    python benchmarks/ppo_h200.py 0.5B engine.param_dtype=bfloat16 --trl 32      then TRL: same work, micro-batches of 32 rows
    python benchmarks/ppo_h200.py 0.5B-MTP model_engine=megatron model.mtp.enable=true model.mtp.enable_train=true \
        model.mtp.enable_rollout=true --timeline memory.png      speculative decoding with a layer that is trained
    python benchmarks/ppo_h200.py 7B-VL engine.param_dtype=bfloat16 --prompts 64 --tokens 256      an image in each prompt

Arguments: a shape, then key=value pairs of configs/ppo.yaml. Random words from a vocabulary of 152k hardly ever end a
response, so all have --tokens tokens. With a shape of Qwen2.5-VL, for which vLLM needs torchvision, each prompt has an image of its
own. --timeline FILE.png draws the memory in use on the GPU over the last step. Prints lines of a Markdown table on rank 0; the
first step warms up and is left out.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STAGES = (
    "offload",
    "wake",
    "update_weights",
    "rollout_generate",
    "reward",
    "sleep",
    "actor_compute_log_prob",
    "advantages",
    "actor_update",
)  # in their order; offload and wake come in turn


def share_of_digits(prompt: str, response: str, row: dict) -> float:
    """A reward that differs between responses."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def make_assets(directory: Path, num_prompts: int, size: tuple[int, int] | None = None) -> Path:
    """Tokenizer and prompts, with an image of that size (height, width) each if it is given; made once. Returns the prompts."""
    from examples.arithmetic import make_rows, make_tokenizer

    if not (directory / "tokenizer").exists():
        make_tokenizer().save_pretrained(directory / "tokenizer")
    pictures = directory / f"pictures_{size[0]}x{size[1]}" if size else None
    prompts = directory / f"prompts_{num_prompts}{f'_{pictures.name}' if size else ''}.jsonl"
    if not prompts.exists():
        rows = [
            {"prompt": row["messages"][:1]} for row in make_rows()[0][:num_prompts]
        ]  # TRL's form, and ours too
        if size:
            rows = [
                row | {"images": [draw(pictures / f"{i}.png", i, size)]}
                for i, row in enumerate(rows)
            ]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prompts


def draw(path: Path, seed: int, size: tuple[int, int]) -> str:
    """Colours that flow into each other, as a file. Returns its name as rows have it."""
    import numpy as np
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    colours = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(colours).resize(size[::-1], Image.Resampling.BICUBIC).save(path)
    return f"{path.parent.name}/{path.name}"


def make_policy(shape: str, models: Path, tokenizer: Path) -> Path:
    """A model of random weights with the tokenizer beside it."""
    from benchmarks.shapes import make_model

    path = make_model(shape, models)
    with FileLock(f"{path}.lock"):
        if not (path / "tokenizer.json").exists():
            shutil.copytree(tokenizer, path, dirs_exist_ok=True)
    return path


class Timeline:
    """The memory in use on the first GPU, by any process, sampled while steps run. Needs nvidia-ml-py."""

    def __init__(self):
        import pynvml

        pynvml.nvmlInit()
        self.used = lambda: (
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
        )
        self.seconds, self.gib, self.ends = (
            [],
            [],
            [0.0],
        )  # ends: of steps, where the number of lines grew

    def sample(self, num_lines: int) -> None:
        self.seconds.append(time.monotonic())
        self.gib.append(self.used() / 2**30)
        if num_lines >= len(self.ends):
            self.ends.append(self.seconds[-1])

    def draw(self, path: Path, steps: list[dict]) -> None:
        """The last step."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        start, end = self.ends[len(steps)], self.ends[len(steps) + 1]
        here = [
            (second - start, gib)
            for second, gib in zip(self.seconds, self.gib)
            if start <= second <= end
        ]
        figure, axes = pyplot.subplots(figsize=(9, 3), layout="constrained")
        axes.plot(*zip(*here), color="black")
        at = 0.0
        for i, stage in enumerate(STAGES):
            seconds = steps[-1].get(f"timing/{stage}", 0.0)
            axes.axvspan(
                at,
                at + seconds,
                color=f"C{i}",
                alpha=0.3,
                label=f"{stage} {seconds:.2f} s" if seconds > 0.02 else None,
            )
            at += seconds
        axes.set(
            xlabel="seconds of a step",
            ylabel="GiB in use on the GPU",
            ylim=0,
            xlim=(0, end - start),
        )
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, dpi=80)
        print(
            f"GiB in use over the last step: {min(gib for _, gib in here):.1f} to {max(gib for _, gib in here):.1f}, see {path}"
        )


def run_trl(arguments, seconds: float) -> None:
    """The same steps by TRL with vLLM in its process, all in bf16, against our `seconds` per step."""
    out = arguments.assets / "trl.json"
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={arguments.ranks}",
    ]
    subprocess.run(
        [
            sys.executable,
            *(launcher if arguments.ranks > 1 else ()),
            ROOT / "benchmarks/trl_grpo.py",
            "--vllm",
            "--dtype",
            "bfloat16",
            "--model",
            arguments.models / arguments.shape,
            "--data",
            arguments.assets / f"prompts_{arguments.prompts}.jsonl",
            "--reward",
            f"{__file__}:share_of_digits",
            "--steps",
            str(arguments.steps + 1),
            "--prompts",
            str(arguments.prompts),
            "--samples",
            str(arguments.n),
            "--max-tokens",
            str(arguments.tokens),
            "--max-length",
            str(64 + arguments.tokens),
            "--micro-batch-size",
            str(arguments.trl),
            "--out",
            out,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    steps = json.loads(out.read_text())["steps"][1:]
    middle = {name: median(s[name] for s in steps) for name in steps[0]}
    print(
        f"| TRL {arguments.shape} | {arguments.ranks} | micro-batches of {arguments.trl} rows | {middle['step']:.2f} | generate "
        f"{middle['generate']:.2f} | update {middle['update']:.2f} | length {middle['length']:.0f} | "
        f"{middle['step'] / seconds:.2f} times our step |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", help="of benchmarks/shapes.py")
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--assets", type=Path, default=Path("/tmp/rankwise-ppo"))
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--assets-only",
        action="store_true",
        help="tokenizer, prompts and their cache, for another machine",
    )
    parser.add_argument(
        "--trl",
        type=int,
        metavar="ROWS",
        help="in a micro-batch of TRL's GRPOTrainer, which has to be installed",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE.png", help="the GPU's memory over the last step"
    )
    parser.add_argument(
        "--cycles", action="store_true", help="print the memory asleep after every step"
    )
    arguments = parser.parse_intermixed_args()

    from benchmarks.shapes import IMAGE
    from config import load

    try:
        timeline = Timeline() if arguments.timeline else None
    except Exception as error:
        parser.error(f"--timeline needs an NVIDIA GPU and nvidia-ml-py: {error}")
    size = IMAGE.get(arguments.shape)
    if size and arguments.trl:
        parser.error("--trl is for shapes of text")
    longest = 64 + (size[0] * size[1] // 28**2 if size else 0)
    out, settings = (
        arguments.assets / "run",
        [
            f"data.train_files={make_assets(arguments.assets, arguments.prompts, size)}",
            f"model.images={str(bool(size)).lower()}",
            f"output_dir={arguments.assets}/run",
            f"model.path={arguments.models / arguments.shape}",
            f"data.cache_dir={arguments.assets}/cache",
            f"data.train_batch_size={arguments.prompts}",
            f"data.max_prompt_length={longest}",
            f"rollout.n={arguments.n}",
            f"rollout.max_tokens={arguments.tokens}",
            f"validation.max_tokens={arguments.tokens}",
            "rollout.max_num_seqs=1024",
            f"reward.function={ROOT}/benchmarks/ppo_h200.py:share_of_digits",
            "trainer.rollout_freq=-1",
            "trainer.total_steps=1000",
            *arguments.settings,
        ],
    )
    config = load("ppo.yaml", settings)
    make_policy(arguments.shape, arguments.models, arguments.assets / "tokenizer")
    shutil.rmtree(out, ignore_errors=True)
    if arguments.assets_only:
        settings.append("dry_run=true")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={arguments.ranks}",
    ]
    run = subprocess.Popen([*launcher, ROOT / "train_ppo.py", *settings])
    lines = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while run.poll() is None and len(lines) <= arguments.steps:
            time.sleep(0.02 if timeline else 0.5)
            lines = (
                (out / "metrics.jsonl").read_text().splitlines()
                if (out / "metrics.jsonl").exists()
                else []
            )
            if timeline:
                timeline.sample(len(lines))
    finally:  # ended here, not by the script: writing a checkpoint of such a model would take longer than all steps
        if run.poll() is None:
            ranks = psutil.Process(run.pid).children(recursive=True)
            for process in (
                run,
                *ranks,
            ):  # torchrun first: it would report the others' end at length
                process.kill()
        run.wait()
    if len(lines) <= arguments.steps:
        sys.exit(run.returncode)
    steps = [json.loads(line) for line in lines[1 : arguments.steps + 1]]
    middle = {
        name: median(s.get(name, 0.0) for s in steps)
        for name in {name for s in steps for name in s}
    }
    what = f"{arguments.shape} | {arguments.ranks} x TP {config.rollout.tensor_parallel_size} | {' '.join(arguments.settings)}"
    print(
        f"| shape | GPUs | settings | step s | {' | '.join(STAGES)} | GiB awake | GiB asleep | log p gap |"
    )
    print(
        f"| {what} | {middle['timing/step']:.2f} | "
        + " | ".join(f"{middle.get(f'timing/{stage}', 0):.3f}" for stage in STAGES)
        + " | "
        + " | ".join(
            f"{middle.get(f'perf/memory_{s}_gib', float('nan')):.1f}" for s in ("awake", "asleep")
        )
        + f" | {middle['rollout_corr/log_prob_gap']:.4f} |",
        flush=True,
    )
    accepted = {key: value for key, value in middle.items() if key.startswith("mtp/")}
    if accepted:
        print(" ".join(f"{key} {value:.3f}" for key, value in sorted(accepted.items())), flush=True)
    if timeline:
        timeline.draw(arguments.timeline, steps)
    if arguments.trl:
        run_trl(arguments, middle["timing/step"])
    if arguments.cycles and "perf/memory_asleep_gib" in middle:
        print("GiB asleep by step:", " ".join(f"{s['perf/memory_asleep_gib']:.2f}" for s in steps))


if __name__ == "__main__":
    main()
