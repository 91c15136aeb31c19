"""The seconds of a GRPO step by stage: Qwen2.5 shapes with random weights, train_ppo.py and vLLM.

    python benchmarks/ppo_h200.py 7B engine.param_dtype=bfloat16 \\
        [--prompts 256] [--n 4] [--tokens 512] [--steps 3]
    python benchmarks/ppo_h200.py 0.5B --ranks 2 rollout.tensor_parallel_size=2

    # the memory in use while vLLM sleeps, step by step
    python benchmarks/ppo_h200.py 0.5B --prompts 8 --n 2 --tokens 32 --steps 20 --cycles

    # then TRL on the same work, with micro-batches of 32 rows
    python benchmarks/ppo_h200.py 0.5B engine.param_dtype=bfloat16 --trl 32

    # speculative decoding with a layer that is trained
    python benchmarks/ppo_h200.py 0.5B-MTP model_engine=megatron model.mtp.enable=true \\
        model.mtp.enable_train=true model.mtp.enable_rollout=true --timeline memory.png

    # with a reward model
    python benchmarks/ppo_h200.py 1.5B-RM --words --assets-only --models /dev/shm/words
    python benchmarks/ppo_h200.py 0.5B --words --models /dev/shm/words \\
        reward.model.path=/dev/shm/words/1.5B-RM

    # an image in each prompt
    python benchmarks/ppo_h200.py 7B-VL engine.param_dtype=bfloat16 --prompts 64 --tokens 256

Arguments: a shape of benchmarks/shapes.py, then key=value pairs of configs/ppo.yaml. A model with
random weights and a vocabulary of 152k tokens hardly ever ends a response, so all responses have
--tokens tokens. With a shape of Qwen2.5-VL, for which vLLM needs torchvision, each prompt has its
own image. --timeline FILE.png draws the memory in use on the GPU over the last step.

Prints lines of a Markdown table: medians of the steps after the first one, which warms up. --json
also writes the medians of all metrics to a file.
"""

import argparse
import json
import shutil
import signal
import string
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
from filelock import FileLock
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import (
    MODELS,
    ROOT,
    add_settings,
    make_parser,
    medians,
    print_row,
    python_command,
    read_metrics,
    torchrun_command,
    write_lines,
)

# In the order in which a step runs them. `offload` and `wake` alternate.
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
)
PROMPT_TOKENS = 64  # at most, without an image
# Of the tokenizer with --words.
SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # as byte-level tokenizers write it
NUM_RESERVED = 300  # for bytes and markers
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_SAMPLES = 0.02  # of the memory, for --timeline


def share_of_digits(prompt: str, response: str, row: dict) -> float:
    """A reward that differs between responses."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


# ---- models and data ----


def make_assets(
    directory: Path,
    num_prompts: int,
    size: tuple[int, int] | None = None,
    vocab_size: int | None = None,
) -> Path:
    """Make a tokenizer and prompts, unless they exist, and return the file of prompts.

    Args:
        size: height and width of the image of each prompt; None for prompts without images.
        vocab_size: make a tokenizer with nearly as many tokens.
    """
    from examples.arithmetic import make_rows, make_tokenizer

    folder = tokenizer_folder(directory, has_words=vocab_size is not None)
    if not folder.exists():
        tokenizer = make_word_tokenizer(vocab_size) if vocab_size else make_tokenizer()
        tokenizer.save_pretrained(folder)
    prompts = prompt_file(directory, num_prompts, size)
    if prompts.exists():
        return prompts
    train_rows = make_rows()[0]
    # This form suits TRL and this repository.
    rows = [{"prompt": row["messages"][:1]} for row in train_rows[:num_prompts]]
    if size:
        for i, row in enumerate(rows):
            row["images"] = [draw_picture(picture_folder(directory, size) / f"{i}.png", i, size)]
    write_lines(prompts, rows)
    return prompts


def tokenizer_folder(assets: Path, has_words: bool) -> Path:
    return assets / ("tokenizer_words" if has_words else "tokenizer")


def make_word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that encodes the text of a response as the tokens that it came from.

    The one of examples/arithmetic.py has 262 tokens, and nearly all tokens of these responses have
    no text in it, so a reward model would have little to read. Most of the tokens of this one are a
    space and three letters.
    """
    from examples.arithmetic import byte_level_tokenizer

    num_merged = vocab_size - NUM_RESERVED
    num_letters = 1
    while sum((num_letters + 1) ** power for power in (1, 2, 3)) <= num_merged:
        num_letters += 1
    letters = string.ascii_letters[:num_letters]
    merges = []
    prefixes = [SPACE]
    for _ in range(3):
        pairs = [(prefix, letter) for prefix in prefixes for letter in letters]
        prefixes = [prefix + letter for prefix, letter in pairs]
        merges += pairs
    return byte_level_tokenizer(merges)


def picture_folder(directory: Path, size: tuple[int, int]) -> Path:
    return directory / f"pictures_{size[0]}x{size[1]}"


def prompt_file(directory: Path, num_prompts: int, size: tuple[int, int] | None = None) -> Path:
    suffix = f"_{picture_folder(directory, size).name}" if size else ""
    return directory / f"prompts_{num_prompts}{suffix}.jsonl"


def draw_picture(path: Path, seed: int, size: tuple[int, int]) -> str:
    """Write an image whose colours blend into each other; return its path as rows name it."""
    import numpy as np
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    height, width = size
    colours = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    image = Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)
    image.save(path)
    return f"{path.parent.name}/{path.name}"


def is_same_file(first: Path, second: Path, name: str) -> bool:
    return (first / name).read_bytes() == (second / name).read_bytes()


def make_policy(shape: str, models: Path, tokenizer: Path) -> Path:
    """Make a model with random weights and add the tokenizer, unless it has one."""
    from benchmarks.shapes import make_model

    path = make_model(shape, models)
    with FileLock(f"{path}.lock"):
        if not (path / "tokenizer.json").exists():
            shutil.copytree(tokenizer, path, dirs_exist_ok=True)
    return path


# ---- memory over a step ----


class Timeline:
    """The memory in use on the first GPU, by all processes, sampled while steps run.

    Needs nvidia-ml-py.

    Attributes:
        seconds, gib: when each sample was taken, and the memory in use.
        step_ends: 0.0, then the time at which each line of metrics.jsonl was written.
    """

    def __init__(self):
        import pynvml

        pynvml.nvmlInit()
        self._pynvml = pynvml
        self.seconds: list[float] = []
        self.gib: list[float] = []
        self.step_ends = [0.0]
        self.used_gib()

    def used_gib(self) -> float:
        gpu = self._pynvml.nvmlDeviceGetHandleByIndex(0)
        return self._pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30

    def sample(self, num_lines: int) -> None:
        """Take a sample. num_lines: the number of lines that metrics.jsonl has now."""
        self.seconds.append(time.monotonic())
        self.gib.append(self.used_gib())
        if num_lines >= len(self.step_ends):
            self.step_ends.append(self.seconds[-1])

    def draw(self, path: Path, num_steps: int, last_step: dict) -> None:
        """Draw the last step. last_step: its metrics."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        start = self.step_ends[num_steps]
        end = self.step_ends[num_steps + 1]
        samples = [
            (seconds - start, gib)
            for seconds, gib in zip(self.seconds, self.gib)
            if start <= seconds <= end
        ]
        seconds, gib = zip(*samples)
        figure, axes = pyplot.subplots(figsize=(9, 3), layout="constrained")
        axes.plot(seconds, gib, color="black")
        shade_stages(axes, last_step)
        axes.set(
            xlabel="seconds of a step",
            ylabel="GiB in use on the GPU",
            ylim=0,
            xlim=(0, end - start),
        )
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, dpi=80)
        print(f"GiB in use over the last step: {min(gib):.1f} to {max(gib):.1f}, see {path}")


def shade_stages(axes, step: dict) -> None:
    """Shade the time of each stage in its colour; short stages get no label."""
    start = 0.0
    for i, stage in enumerate(STAGES):
        seconds = step.get(f"timing/{stage}", 0.0)
        label = f"{stage} {seconds:.2f} s" if seconds > 0.02 else None
        axes.axvspan(start, start + seconds, color=f"C{i}", alpha=0.3, label=label)
        start += seconds


# ---- the run ----


def run_settings(arguments: argparse.Namespace, size: tuple[int, int] | None) -> list[str]:
    """Return the settings of the run. Makes its prompts."""
    from benchmarks.shapes import PIXELS_PER_TOKEN, text_config

    vocab_size = text_config(arguments.shape).vocab_size if arguments.words else None
    prompts = make_assets(arguments.assets, arguments.prompts, size, vocab_size)
    num_image_tokens = size[0] * size[1] // PIXELS_PER_TOKEN if size else 0
    return [
        f"data.train_files={prompts}",
        f"model.images={str(size is not None).lower()}",
        f"output_dir={output_folder(arguments)}",
        f"model.path={arguments.models / arguments.shape}",
        f"data.cache_dir={arguments.assets}/cache",
        f"data.train_batch_size={arguments.prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS + num_image_tokens}",
        f"rollout.n={arguments.n}",
        f"rollout.max_tokens={arguments.tokens}",
        "rollout.max_num_seqs=1024",
        f"reward.function={ROOT}/benchmarks/ppo_h200.py:share_of_digits",
        "trainer.rollout_freq=-1",
        "trainer.total_steps=1000",
        *arguments.settings,
    ]


def output_folder(arguments: argparse.Namespace) -> Path:
    return arguments.assets / "run"


def stop(signal_number: int, frame: FrameType | None) -> None:
    """End as on Ctrl-C, so that the run is killed too."""
    sys.exit(1)


def run_steps(
    arguments: argparse.Namespace, settings: list[str], timeline: Timeline | None
) -> list[dict]:
    """Run train_ppo.py for one step more than --steps; return the metrics of all but the first.

    If the run ends earlier, this process exits with its code.
    """
    shutil.rmtree(output_folder(arguments), ignore_errors=True)
    script = ROOT / "train_ppo.py"
    run = subprocess.Popen([*torchrun_command(arguments.ranks), script, *settings])
    signal.signal(signal.SIGTERM, stop)
    metrics = output_folder(arguments) / "metrics.jsonl"
    num_lines = 0
    try:
        while run.poll() is None and num_lines <= arguments.steps:
            time.sleep(SECONDS_BETWEEN_SAMPLES if timeline else SECONDS_BETWEEN_LOOKS)
            num_lines = metrics.read_text().count("\n") if metrics.exists() else 0
            if timeline:
                timeline.sample(num_lines)
    finally:
        kill(run)
    if num_lines <= arguments.steps:
        sys.exit(run.returncode)
    return read_metrics(metrics)[1 : arguments.steps + 1]


def kill(run: subprocess.Popen) -> None:
    """End torchrun and its ranks.

    They are killed, since a checkpoint of such a model would take longer than all steps.
    """
    if run.poll() is None:
        ranks = psutil.Process(run.pid).children(recursive=True)
        run.kill()  # before its ranks: it would report at length that they ended
        for rank in ranks:
            rank.kill()
    run.wait()


# ---- TRL ----


def run_trl(arguments: argparse.Namespace, own_seconds: float) -> None:
    """Take the same steps with TRL, all in bf16, with vLLM in its process.

    own_seconds: of our step.
    """
    out = arguments.assets / "trl.json"
    options = {
        "--dtype": "bfloat16",
        "--model": arguments.models / arguments.shape,
        "--data": prompt_file(arguments.assets, arguments.prompts),
        "--reward": f"{__file__}:share_of_digits",
        "--steps": arguments.steps + 1,
        "--prompts": arguments.prompts,
        "--samples": arguments.n,
        "--max-tokens": arguments.tokens,
        "--max-length": PROMPT_TOKENS + arguments.tokens,
        "--micro-batch-size": arguments.trl,
        "--out": out,
    }
    words = [str(word) for option in options.items() for word in option]
    script = str(ROOT / "benchmarks/trl_grpo.py")
    command = [*python_command(arguments.ranks), script, "--vllm", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps = json.loads(out.read_text())["steps"]
    middle = medians(steps[1:])
    print_row(
        f"TRL {arguments.shape}",
        arguments.ranks,
        f"micro-batches of {arguments.trl} rows",
        f"{middle['step']:.2f}",
        f"generate {middle['generate']:.2f}",
        f"update {middle['update']:.2f}",
        f"length {middle['length']:.0f}",
        f"{middle['step'] / own_seconds:.2f} times our step",
    )


# ---- the command ----


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", help="of benchmarks/shapes.py")
    add_settings(parser)
    parser.add_argument("--assets", type=Path, default=Path("/tmp/rankwise-ppo"))
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="of each response")
    parser.add_argument("--steps", type=int, default=3, help="after the first one")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--assets-only",
        action="store_true",
        help="make the tokenizer, the prompts and their cache, for another machine",
    )
    parser.add_argument(
        "--words",
        action="store_true",
        help="a tokenizer with text for nearly all tokens, for models that have none yet",
    )
    parser.add_argument(
        "--trl",
        type=int,
        metavar="ROWS",
        help="time TRL's GRPOTrainer too, with micro-batches of this size; needs trl",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE.png", help="draw the GPU's memory over the last step"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians to this file")
    parser.add_argument(
        "--cycles", action="store_true", help="print the memory asleep after every step"
    )
    arguments = parser.parse_intermixed_args()
    if arguments.shape.endswith("-RM") and not arguments.assets_only:
        parser.error("a reward model has no responses: add --assets-only to make its files")
    if arguments.shape.endswith("-VL") and arguments.trl:
        parser.error("--trl does not work with a shape of Qwen2.5-VL: choose one without images")
    return arguments


def start_timeline() -> Timeline:
    try:
        return Timeline()
    except Exception as error:
        print(f"error: --timeline needs an NVIDIA GPU and nvidia-ml-py: {error}", file=sys.stderr)
        sys.exit(2)


def print_result(
    arguments: argparse.Namespace, config: DictConfig, middle: dict[str, float]
) -> None:
    """Print the table. middle: the median of each metric."""
    stages = " | ".join(STAGES)
    memory = "GiB awake | GiB asleep | GiB training"
    print(f"| shape | GPUs | settings | step s | {stages} | {memory} | log p gap |")
    unknown = float("nan")
    print_row(
        arguments.shape,
        f"{arguments.ranks} x TP {config.rollout.tensor_parallel_size}",
        " ".join(arguments.settings),
        f"{middle['timing/step']:.2f}",
        *(f"{middle.get(f'timing/{stage}', 0):.3f}" for stage in STAGES),
        f"{middle.get('perf/memory_awake_gib', unknown):.1f}",
        f"{middle.get('perf/memory_asleep_gib', unknown):.1f}",
        f"{middle.get('perf/memory_training_gib', unknown):.1f}",
        f"{middle['rollout_corr/log_prob_gap']:.4f}",
    )
    own_columns = {"timing/step", *(f"timing/{stage}" for stage in STAGES)}
    other_stages = [
        f"{name} {seconds:.3f}"
        for name, seconds in sorted(middle.items())
        if name.startswith("timing/") and name not in own_columns
    ]
    if other_stages:
        print(" ".join(other_stages), flush=True)
    drafts = [f"{name} {middle[name]:.3f}" for name in sorted(middle) if name.startswith("mtp/")]
    if drafts:
        print(" ".join(drafts), flush=True)


def main() -> None:
    arguments = parse_arguments()
    # Imported here: train_ppo.py imports this file for the reward.
    from benchmarks.shapes import IMAGE, REWARD_MODELS
    from config import load

    timeline = start_timeline() if arguments.timeline else None
    settings = run_settings(arguments, IMAGE.get(arguments.shape))
    config = load("ppo.yaml", settings)
    tokenizer = tokenizer_folder(arguments.assets, arguments.words)
    model = make_policy(arguments.shape, arguments.models, tokenizer)
    if arguments.words and not is_same_file(tokenizer, model, "tokenizer.json"):
        sys.exit(f"error: {model} has another tokenizer: choose another folder with --models")
    if arguments.shape in REWARD_MODELS:
        return
    if arguments.assets_only:
        settings.append("dry_run=true")
    steps = run_steps(arguments, settings, timeline)
    middle = medians(steps)
    print_result(arguments, config, middle)
    if arguments.json:
        arguments.json.write_text(json.dumps(middle))
    if timeline:
        timeline.draw(arguments.timeline, len(steps), steps[-1])
    if arguments.trl:
        run_trl(arguments, middle["timing/step"])
    if arguments.cycles and "perf/memory_asleep_gib" in middle:
        asleep = [f"{step['perf/memory_asleep_gib']:.2f}" for step in steps]
        print("GiB asleep by step:", " ".join(asleep))


if __name__ == "__main__":
    main()
