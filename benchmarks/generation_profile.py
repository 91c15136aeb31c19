"""How long generation takes, and where the time goes, with vLLM as train_ppo.py runs it.

    python benchmarks/generation_profile.py 0.5B [--responses 1024] [--tokens 256 512] \\
        [--kernels 12] [key=value ...]

Takes a shape of benchmarks/shapes.py with random weights. All responses have --tokens tokens, since
such a model with a vocabulary of 152k tokens hardly ever ends one. Prints:

* a Markdown table with seconds, and microseconds per token: with vLLM's own scheduler, with
  rollout/vllm/scheduler.py, with the latter without log-probabilities, and for responses whose
  lengths are log-normal (sigma 1) with the same sum;
* how many responses differ between the two schedulers;
* the milliseconds of a step in each part of the host's work. `wait` is the time in which the host
  waits for the device: where it is not 0, the device is the limit;
* with --kernels, the kernels that take most of the device's time.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from benchmarks.harness import (
    MODELS,
    add_settings,
    make_parser,
    model_settings,
    print_header,
    print_row,
)
from benchmarks.shapes import SHAPES, make_model
from config import load
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rollout.responses import Responses
from rollout.vllm.engine import Rollout

LONGEST = 6  # times the mean, of log-normal lengths
KERNEL_TOKENS = 64  # per response, for --kernels
OWN = "rollout/vllm/scheduler.py"
VLLM = "vLLM's scheduler"


@dataclass
class Generation:
    """One call of the generator: its seconds and its responses."""

    seconds: float
    responses: Responses


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    limits: list[int]
    uses_own_scheduler: bool = True
    has_log_probs: bool = True


class Generator:
    """vLLM with the weights of an engine, awake, and the prompts that it answers."""

    def __init__(self, config: DictConfig, this_device: torch.device, num_responses: int):
        self.config = config
        self.rollout = Rollout(config, this_device)
        self.own_scheduler = self.rollout.scheduler
        self.prompts = [list(range(10, 30 + i % 20)) for i in range(num_responses)]

    def load_weights(self, this_device: torch.device) -> None:
        rollout = self.rollout
        engine = FSDPEngine(self.config, this_device, total_steps=1, optimize=False)
        rollout.wake("weights")
        has_adapter = rollout.adapter is not None
        with engine.without_adapters() if has_adapter else nullcontext():
            rollout.update_weights(engine.export_weights())
        if has_adapter:
            rollout.update_adapter(engine.export_adapter())
        engine.offload("parameters")
        rollout.wake("kv_cache")

    def generate(
        self, limits: Sequence[int], uses_own_scheduler: bool = True, has_log_probs: bool = True
    ) -> Generation:
        """Generate a response of limits[i] tokens to each prompt."""
        sampling = OmegaConf.merge(self.config.rollout, {"stop": []})
        params = []
        for seed, limit in enumerate(limits):
            limited = OmegaConf.merge(sampling, {"max_tokens": limit})
            params.append(self.rollout.sampling_params(limited, seed))
        self.rollout.scheduler = self.own_scheduler if uses_own_scheduler else None
        if has_log_probs:
            return self._fill(limits, params)
        for request_params in params:
            request_params.logprobs = None
        scheduler_class = type(self.own_scheduler)
        self.own_scheduler.__class__ = without_log_probs(scheduler_class)
        try:
            return self._fill(limits, params)
        finally:
            self.own_scheduler.__class__ = scheduler_class

    def _fill(self, limits: Sequence[int], params: list) -> Generation:
        responses = Responses(len(self.prompts), max(limits), 0)
        start = time.perf_counter()
        self.rollout.fill(responses, self.prompts, params)
        return Generation(time.perf_counter() - start, responses)


def without_log_probs(scheduler_class: type) -> type:
    """Return a scheduler for batches that vLLM samples without log-probabilities."""

    class WithoutLogProbs(scheduler_class):
        def update_from_output(self, scheduler_output, model_output):
            tokens = np.array(model_output.sampled_token_ids).reshape(-1, 1)
            model_output.logprobs = tokens, np.zeros_like(tokens, np.float32)
            return super().update_from_output(scheduler_output, model_output)

    return WithoutLogProbs


def log_normal_lengths(count: int, mean: int, longest: int) -> list[int]:
    """Return log-normal lengths (sigma 1) from 1 to `longest` with this mean."""
    draws = np.exp(np.random.default_rng(0).normal(size=count))
    # Cut lengths above the longest and scale up the rest, until the mean is right.
    for _ in range(20):
        draws = np.clip(draws * mean / draws.mean(), 1, longest)
    return draws.round().astype(int).tolist()


# ---- the table ----


def cases_of(num_responses: int, num_tokens: int, longest: int) -> list[Case]:
    equal = [num_tokens] * num_responses
    log_normal = log_normal_lengths(num_responses, num_tokens, longest)
    return [
        Case(VLLM, equal, uses_own_scheduler=False),
        Case(OWN, equal),
        Case("the same, no log-probabilities", equal, has_log_probs=False),
        Case("the same, log-normal lengths", log_normal),
    ]


def print_table(generator: Generator, arguments: argparse.Namespace, longest: int) -> None:
    num_responses = len(generator.prompts)
    print_header("shape", "responses x tokens", "", "s", "microseconds per token")
    for num_tokens in arguments.tokens:
        responses_of = {}
        for case in cases_of(num_responses, num_tokens, longest):
            runs = [
                generator.generate(case.limits, case.uses_own_scheduler, case.has_log_probs)
                for _ in range(arguments.repeat)
            ]
            seconds = median(run.seconds for run in runs)
            responses = runs[0].responses
            responses_of[case.name] = responses
            total = responses.lengths.sum()
            print_row(
                arguments.shape,
                f"{num_responses} x {total / num_responses:.0f}",
                case.name,
                f"{seconds:.2f}",
                f"{seconds / total * 1e6:.1f}",
            )
        num_different = count_different(responses_of[VLLM], responses_of[OWN])
        print(f"{num_different} of {num_responses} responses differ between the two schedulers")


def count_different(first: Responses, second: Responses) -> int:
    different_tokens = first.tokens != second.tokens
    different_log_probs = first.log_probs != second.log_probs
    return (different_tokens | different_log_probs).any(1).sum()


# ---- where the time goes ----


def timed(function: Callable, seconds: list[float]) -> Callable:
    """Return the function, which appends how long every call takes."""

    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


def print_host_work(generator: Generator, num_tokens: int) -> None:
    """Print the milliseconds of a step in each part of the host's work."""
    llm_engine = generator.rollout.llm.llm_engine
    core = llm_engine.engine_core.engine_core
    executor = core.model_executor
    scheduler = generator.own_scheduler
    methods: list[tuple[Any, str]] = [
        (scheduler, "schedule"),
        (executor, "execute_model"),
        (executor, "sample_tokens"),
        (scheduler, "update_from_output"),
        (core, "step_fn"),
        (llm_engine, "step"),
    ]
    calls = {}
    for owner, name in methods:
        calls[name] = []
        setattr(owner, name, timed(getattr(owner, name), calls[name]))
    total = generator.generate([num_tokens] * len(generator.prompts)).seconds

    sums = {name: sum(seconds) for name, seconds in calls.items()}
    step_fn = sums.pop("step_fn")
    step = sums.pop("step")
    within_step_fn = sum(sums.values())
    parts = {
        **sums,
        "engine": step - step_fn,
        "around": total - step,
        "wait": step_fn - within_step_fn,
    }
    num_steps = len(calls["schedule"])
    texts = [f"{name} {seconds / num_steps * 1e3:.2f}" for name, seconds in parts.items()]
    print(f"milliseconds of a step, of {total / num_steps * 1e3:.2f}: {', '.join(texts)}")


def print_kernels(generator: Generator, num_kernels: int) -> None:
    """Print the kernels that take most of the device's time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generator.generate([KERNEL_TOKENS] * len(generator.prompts))
    kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels) / 1e3
    print(f"kernels, milliseconds of {KERNEL_TOKENS} steps, of {total:.0f}:")
    for kernel in kernels[:num_kernels]:
        milliseconds = kernel.self_device_time_total / 1e3
        print(f"{milliseconds:8.1f} {kernel.count:6d}  {kernel.key[:90]}")


# ---- the command ----


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    add_settings(parser)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256], help="of each response")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--kernels", type=int, default=0, help="print this many")
    return parser.parse_intermixed_args()


def load_config(arguments: argparse.Namespace, longest: int) -> DictConfig:
    settings = [
        *model_settings(make_model(arguments.shape, arguments.models)),
        "data.max_prompt_length=64",
        "engine.param_dtype=bfloat16",
        f"rollout.max_tokens={longest}",
        f"validation.max_tokens={longest}",
        f"rollout.max_num_seqs={arguments.responses}",
        *arguments.settings,
    ]
    return load("ppo.yaml", settings)


def main() -> None:
    arguments = parse_arguments()
    this_device = device.init()
    longest = LONGEST * max(arguments.tokens)
    config = load_config(arguments, longest)
    start = time.perf_counter()
    generator = Generator(config, this_device, arguments.responses)
    print(f"vLLM started in {time.perf_counter() - start:.0f} s", flush=True)
    generator.load_weights(this_device)
    generator.generate([4] * arguments.responses)  # compiles what is compiled at first use
    print_table(generator, arguments, longest)
    print_host_work(generator, arguments.tokens[0])
    if arguments.kernels:
        print_kernels(generator, arguments.kernels)
    generator.rollout.shutdown()


if __name__ == "__main__":
    main()
