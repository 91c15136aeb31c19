"""What turns and tools cost: tokens/s of episodes, compared with the same tokens in one turn.

    python benchmarks/episodes_gpu.py 0.5B [--episodes 256] [--turns 3] [--tokens 256] \\
        [--tool-seconds 0 2] [--trl] [key=value ...]

Takes a shape of benchmarks/shapes.py with random weights. All turns have --tokens tokens, since
such a model hardly ever ends one. After each turn but the last, an episode waits for its tool: a
log-normal time (median a quarter of a second, sigma 1) of at most --tool-seconds, the same in
every run. Prints a Markdown table: seconds, tokens per second, this speed relative to a single
turn, and the share of the time in which vLLM had nothing to do.

--trl plays the same episodes with TRL's GRPOTrainer first, in a process of its own, whose end frees
the GPU: see benchmarks/trl_episodes.py. Neither side sends weights or trains while it is timed;
our time includes the rewards, TRL's does not. TRL plays four episodes of each prompt. This adds the
rows "TRL" and the last column.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from benchmarks.harness import (
    MODELS,
    ROOT,
    add_settings,
    make_parser,
    model_settings,
    print_header,
    print_row,
    run_quietly,
)
from benchmarks.shapes import SHAPES, make_model
from config import load
from data.prompts import Prompt, PromptDataset
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rollout.drawing import Request
from rollout.episodes.drawing import EpisodeSampler
from rollout.episodes.runner import EpisodeRunner
from rollout.grading.grader import check_failures
from rollout.vllm.engine import Rollout

TOOL_MEDIAN = 0.25  # seconds
WARM_UP = 0.0  # longest time of a tool in episodes that are not counted
GROUP = 4  # episodes of a prompt, for TRL
AGENT = """
import asyncio

async def play(row, llm):
    ids = row["prompt_ids"]
    for seconds in row["tool_seconds"]:
        reply = await llm.generate(ids)
        await asyncio.sleep(seconds)
        ids = ids + reply.token_ids + row["result_ids"]
    return 0.0
"""


def draw_tool_seconds(num_episodes: int, num_turns: int, longest_tool: float) -> list[list[float]]:
    """Return the time that each episode waits for its tool after each turn."""
    draws = np.random.default_rng(0).normal(size=(num_episodes, num_turns))
    seconds = np.minimum(TOOL_MEDIAN * np.exp(draws), longest_tool)
    seconds[:, -1] = 0  # nobody waits after the last turn
    return seconds.tolist()


class Rows(PromptDataset):
    """One row for each episode, in no file."""

    def __init__(self, num_episodes: int, num_turns: int, longest_tool: float):
        self.prompts = []
        all_seconds = draw_tool_seconds(num_episodes, num_turns, longest_tool)
        for i, tool_seconds in enumerate(all_seconds):
            prompt_ids = list(range(10, 30 + i % 20))
            row = {
                "prompt_ids": prompt_ids,
                "result_ids": list(range(40, 56)),
                "tool_seconds": tool_seconds,
            }
            self.prompts.append(Prompt(prompt_ids, "", row))
        self.drawn_lengths = np.full(num_episodes, np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


@dataclass(frozen=True)
class Measured:
    """One way to generate the tokens."""

    seconds: float
    num_tokens: int
    idle_share: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def single_turn(rollout: Rollout, sampling: DictConfig, arguments: argparse.Namespace) -> Measured:
    """Generate all tokens of an episode in one response."""
    prompts = [list(range(10, 30 + i % 20)) for i in range(arguments.episodes)]
    whole = OmegaConf.merge(sampling, {"max_tokens": arguments.turns * arguments.tokens})
    start = time.perf_counter()
    batch, _ = rollout.generate(prompts, range(len(prompts)), whole)
    return Measured(time.perf_counter() - start, int(batch.fields["loss_mask"].sum()))


def episodes(
    sampler: EpisodeSampler,
    sampling: DictConfig,
    arguments: argparse.Namespace,
    longest_tool: float,
) -> Measured:
    """Play episodes whose tools take at most `longest_tool` seconds."""
    rows = Rows(arguments.episodes, arguments.turns, longest_tool)
    request = Request(rows, range(arguments.episodes), sampling, seed=(0,))
    start = time.perf_counter()
    samples = sampler.draw(request, Profiler())
    seconds = time.perf_counter() - start
    check_failures(samples.failures, samples.num_drawn, max_failure_rate=0.0)
    return Measured(
        seconds, int(samples.response_lengths.sum()), samples.metrics["episodes/vllm_idle"]
    )


def play_with_trl(arguments: argparse.Namespace, model: str, folder: Path) -> list[Measured]:
    """Play the episodes of each of --tool-seconds with TRL.

    folder: for the files that the two processes exchange.
    """
    work = folder / "work.json"
    out = folder / "trl.json"
    cases = [
        draw_tool_seconds(arguments.episodes, arguments.turns, longest_tool)
        for longest_tool in (WARM_UP, *arguments.tool_seconds)
    ]
    work.write_text(json.dumps({"tokens": arguments.tokens, "group": GROUP, "cases": cases}))
    command = [sys.executable, ROOT / "benchmarks/trl_episodes.py", "--model", model]
    command += ["--work", work, "--out", out]
    run_quietly(command, VLLM_CPU_KVCACHE_SPACE="1")  # GiB, if there is no GPU
    _, *measured = json.loads(out.read_text())["cases"]
    return [Measured(**case) for case in measured]


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    add_settings(parser)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of each turn")
    parser.add_argument(
        "--tool-seconds", type=float, nargs="+", default=[0, 2], help="longest time of a tool"
    )
    parser.add_argument("--trl", action="store_true", help="play the episodes with TRL too")
    arguments = parser.parse_intermixed_args()
    if arguments.trl and importlib.util.find_spec("trl") is None:
        parser.error("--trl needs trl: install it, or leave --trl out")
    if arguments.trl and arguments.episodes % GROUP:
        parser.error(
            f"--episodes {arguments.episodes} is not a multiple of {GROUP}, as --trl needs it: "
            "change --episodes"
        )
    return arguments


def make_config(arguments: argparse.Namespace, agent: Path) -> DictConfig:
    model = make_model(arguments.shape, arguments.models)
    make_tokenizer().save_pretrained(model)
    num_tokens = arguments.turns * (arguments.tokens + 16) + 64
    return load(
        "ppo.yaml",
        [
            *model_settings(model),
            f"rollout.max_tokens={arguments.turns * arguments.tokens}",
            f"rollout.max_episode_tokens={num_tokens}",
            f"rollout.max_num_seqs={arguments.episodes}",
            f"rollout.max_concurrent_episodes={arguments.episodes}",
            f"rollout.episode={agent}:play",
            f"output_dir={agent.parent / 'run'}",
            "data.max_prompt_length=64",
            *arguments.settings,
        ],
    )


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent.py"
        agent.write_text(AGENT)
        config = make_config(arguments, agent)
        peers = []
        if arguments.trl:
            peers = play_with_trl(arguments, config.model.path, Path(folder))
        whole, cases = measure(arguments, config)
    print_table(arguments, whole, cases, peers)


def measure(arguments: argparse.Namespace, config: DictConfig) -> tuple[Measured, list[Measured]]:
    """Return the measurements of a single turn, and of episodes for each of --tool-seconds.

    Both are played once before, to warm up.
    """
    this_device: torch.device = device.init()
    runner = EpisodeRunner(config)
    rollout = Rollout(config, this_device)
    engine = FSDPEngine(config, this_device, total_steps=1, optimize=False)
    rollout.wake("weights")
    rollout.update_weights(engine.export_weights())
    engine.offload("parameters")
    rollout.wake("kv_cache")
    host_group = dist.new_group(backend="gloo")
    sampler = EpisodeSampler.start(config, rollout, runner, make_tokenizer(), host_group)

    sampling = OmegaConf.merge(config.rollout, {"n": 1, "stop": []})
    turn = OmegaConf.merge(sampling, {"max_tokens": arguments.tokens})
    single_turn(rollout, sampling, arguments)  # warms up
    whole = single_turn(rollout, sampling, arguments)
    episodes(sampler, turn, arguments, WARM_UP)
    cases = [
        episodes(sampler, turn, arguments, longest_tool) for longest_tool in arguments.tool_seconds
    ]
    sampler.close()
    rollout.shutdown()
    device.shutdown()
    return whole, cases


def print_table(
    arguments: argparse.Namespace, whole: Measured, cases: list[Measured], peers: list[Measured]
) -> None:
    """Print a row for each measurement. peers: those of TRL, if it has played too."""

    def print_measured(name: str, measured: Measured, times_trl: str = "") -> None:
        share = measured.tokens_per_second / whole.tokens_per_second
        print_row(
            arguments.shape,
            name,
            f"{measured.seconds:.2f}",
            f"{measured.tokens_per_second:,.0f}",
            f"{share:.2f}",
            f"{measured.idle_share:.2f}",
            times_trl,
        )

    print_header(
        "shape",
        "",
        "seconds",
        "tokens/s",
        "share of a single turn",
        "vLLM idle",
        "times TRL's tokens/s",
    )
    print_measured("a single turn", whole)
    for i, (longest_tool, own) in enumerate(zip(arguments.tool_seconds, cases)):
        name = f"{arguments.turns} turns, tools of at most {longest_tool:g} s"
        if not peers:
            print_measured(name, own)
            continue
        ratio = own.tokens_per_second / peers[i].tokens_per_second
        print_measured(name, own, f"{ratio:.2f}")
        print_measured(f"TRL, {name}", peers[i])


if __name__ == "__main__":
    main()
