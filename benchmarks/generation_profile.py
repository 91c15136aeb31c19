"""The time of generation, and where it goes: vLLM as train_ppo.py runs it.

    python benchmarks/generation_profile.py 0.5B [--responses 1024] [--tokens 256 512] [--kernels 12] [key=value ...]

A shape of benchmarks/sft_h200.py with random weights, whose responses all have --tokens tokens: random words from a vocabulary
of 152k hardly ever end one. Prints a Markdown table: seconds and microseconds per token with rollout/vllm/scheduler.py, with vLLM's
own scheduler, without log-probabilities, and for responses whose lengths are log-normal (sigma 1) with the same sum; how many
responses differ between the two schedulers; and milliseconds of a step in each part of the host's work. `wait` is the time
for which the host waits for the device: where it is not 0, the device is the limit. --kernels: those that take the device
longest.
"""

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from omegaconf import OmegaConf

from benchmarks.shapes import SHAPES, make_model
from config import load
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rollout.responses import Responses
from rollout.vllm.engine import Rollout


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--kernels", type=int, default=0)
    arguments = parser.parse_intermixed_args()
    this_device, longest = device.init(), 6 * max(arguments.tokens)
    config = load(
        "ppo.yaml",
        [
            f"model.path={make_model(arguments.shape, arguments.models)}",
            "data.train_files=none",
            "data.max_prompt_length=64",
            "engine.param_dtype=bfloat16",
            f"rollout.max_tokens={longest}",
            f"validation.max_tokens={longest}",
            f"rollout.max_num_seqs={arguments.responses}",
            *arguments.settings,
        ],
    )
    start = time.perf_counter()
    rollout = Rollout(config, this_device)
    print(f"vLLM started in {time.perf_counter() - start:.0f} s", flush=True)
    engine = FSDPEngine(config, this_device, total_steps=1, optimize=False)
    rollout.wake("weights")
    with engine.without_adapters() if rollout.adapter else nullcontext():
        rollout.update_weights(engine.export_weights())
    if rollout.adapter:
        rollout.update_adapter(engine.export_adapter())
    engine.offload("parameters")
    rollout.wake("kv_cache")
    prompts = [list(range(10, 30 + i % 20)) for i in range(arguments.responses)]
    own, core = rollout.scheduler, rollout.llm.llm_engine.engine_core.engine_core

    def generate(
        limits: list[int], scheduler=own, log_probs: bool = True
    ) -> tuple[float, Responses]:
        sampling = OmegaConf.merge(config.rollout, {"stop": []})
        params = [
            rollout.sampling_params(OmegaConf.merge(sampling, {"max_tokens": limit}), seed)
            for seed, limit in enumerate(limits)
        ]
        if not log_probs:
            for p in params:
                p.logprobs = None
            scheduler.__class__ = without_log_probs(type(scheduler))
        rollout.scheduler, responses = scheduler, Responses(len(prompts), max(limits), 0)
        start = time.perf_counter()
        rollout.fill(responses, prompts, params)
        seconds = time.perf_counter() - start
        if not log_probs:
            scheduler.__class__ = type(scheduler).__base__
        return seconds, responses

    generate([4] * len(prompts))  # compiles what is compiled at first use
    print("| shape | responses x tokens | | s | microseconds per token |\n|---|---|---|---|---|")
    for tokens in arguments.tokens:
        equal, unequal = [tokens] * len(prompts), log_normal_lengths(len(prompts), tokens, longest)
        kept = {}
        for name, limits, options in (
            ("vLLM's scheduler", equal, {"scheduler": None}),
            ("rollout/vllm/scheduler.py", equal, {}),
            ("the same, no log-probabilities", equal, {"log_probs": False}),
            ("the same, log-normal lengths", unequal, {}),
        ):
            runs = [generate(limits, **options) for _ in range(arguments.repeat)]
            seconds, kept[name] = median(seconds for seconds, _ in runs), runs[0][1]
            num_tokens = kept[name].lengths.sum()
            print(
                f"| {arguments.shape} | {len(prompts)} x {num_tokens / len(prompts):.0f} | {name} | {seconds:.2f} | "
                f"{seconds / num_tokens * 1e6:.1f} |",
                flush=True,
            )
        first, second = list(kept.values())[:2]
        differ = (
            ((first.tokens != second.tokens) | (first.log_probs != second.log_probs)).any(1).sum()
        )
        print(f"{differ} of {len(prompts)} responses differ between the two schedulers")
    seconds = {}
    for thing, name in (
        (own, "schedule"),
        (core.model_executor, "execute_model"),
        (core.model_executor, "sample_tokens"),
        (own, "update_from_output"),
        (core, "step_fn"),
        (rollout.llm.llm_engine, "step"),
    ):
        setattr(thing, name, timed(getattr(thing, name), seconds.setdefault(name, [])))
    total, _ = generate([arguments.tokens[0]] * len(prompts))
    sums = {name: sum(times) for name, times in seconds.items()}
    steps = len(seconds["schedule"])
    sums["engine"], sums["around"] = (
        sums.pop("step") - sums["step_fn"],
        total - sum(seconds["step"]),
    )
    sums["wait"] = sums.pop("step_fn") - sum(
        sums[name] for name in ("schedule", "execute_model", "sample_tokens", "update_from_output")
    )
    print(
        f"milliseconds of a step, of {total / steps * 1e3:.2f}: "
        + ", ".join(f"{name} {value / steps * 1e3:.2f}" for name, value in sums.items())
    )
    if arguments.kernels:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            generate([64] * len(prompts))
        kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
        print(
            f"kernels, milliseconds of 64 steps, of {sum(kernel.self_device_time_total for kernel in kernels) / 1e3:.0f}:"
        )
        for kernel in kernels[: arguments.kernels]:
            print(
                f"{kernel.self_device_time_total / 1e3:8.1f} {kernel.count:6d}  {kernel.key[:90]}"
            )
    rollout.shutdown()


def log_normal_lengths(n: int, mean: int, longest: int) -> list[int]:
    """n lengths whose mean is `mean`."""
    draws = np.exp(np.random.default_rng(0).normal(size=n))
    for _ in range(20):  # those that are too long give what they have to the others
        draws = np.clip(draws * mean / draws.mean(), 1, longest)
    return draws.round().astype(int).tolist()


def without_log_probs(scheduler: type) -> type:
    """A scheduler for batches that vLLM draws without log-probabilities."""

    class WithoutLogProbs(scheduler):
        def update_from_output(self, scheduler_output, model_output):
            tokens = np.array(model_output.sampled_token_ids).reshape(-1, 1)
            model_output.logprobs = tokens, np.zeros_like(tokens, np.float32)
            return super().update_from_output(scheduler_output, model_output)

    return WithoutLogProbs


def timed(function, seconds: list[float]):
    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


if __name__ == "__main__":
    main()
