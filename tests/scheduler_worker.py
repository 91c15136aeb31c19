"""Batches generated with rollout/scheduler.py and with vLLM's own scheduler, compared to the last bit.

    torchrun --nproc-per-node N tests/scheduler_worker.py MODEL RESULT.json [KEY=VALUE...]

The model's files name the tokens that end a response. Each case is written down as its numbers of differences, of
preemptions, and of steps; test_rollout.py judges them.
"""

import functools
import json
import random
import sys
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
import vllm
from omegaconf import OmegaConf

from config import load
from engines import device
from engines.fsdp.engine import FSDPEngine
from rollout.vllm import Rollout, request_seed

BLOCK, GROUP = 32, 4                # tokens of a block of the KV cache; responses to a prompt
MAX_PROMPT, MAX_TOKENS = 3 * BLOCK, 4 * BLOCK
SETTINGS = ["data.train_files=unused", "engine.compute_dtype=float32", "optim.weight_decay=0", "rollout.max_num_seqs=24",
            f"data.max_prompt_length={MAX_PROMPT}", f"rollout.max_tokens={MAX_TOKENS}", f"validation.max_tokens={MAX_TOKENS}",
            f"data.max_tokens_per_micro_batch={MAX_PROMPT + MAX_TOKENS}", "rollout.top_k=6"]
SAMPLING = {"sampled": {"top_k": -1}, "greedy": {"temperature": 0.0, "top_k": -1}, "top_p": {"top_p": 0.7, "top_k": -1},
            "min_p": {"min_p": 0.05, "top_k": -1, "temperature": 0.8}, "top_k": {}, "short": {"max_tokens": 1, "top_k": -1},
            "whole_blocks": {"max_tokens": BLOCK, "top_k": -1}}


def main(model: str, result: Path, *more: str) -> None:
    this_device = device.init()
    # Small blocks, so that responses have several.
    vllm.LLM = functools.partial(vllm.LLM, block_size=BLOCK)
    config = load("ppo.yaml", [f"model.path={model}", *SETTINGS, *more])
    engine, results = FSDPEngine(config, this_device, 1), {}
    rollout = Rollout(config, this_device)
    for number, (name, sampling) in enumerate(SAMPLING.items()):
        push(rollout, engine)
        results[name] = compare(rollout, config, sampling, number)
    core = rollout.llm.llm_engine.engine_core.engine_core
    results["blocks"] = core.scheduler.cache_config.num_gpu_blocks
    # As on an accelerator: the next step is scheduled before the last one's tokens are known.
    core.batch_queue_size, core.batch_queue, core.step_fn = 2, deque(maxlen=2), core.step_with_batch_queue
    for number, (name, sampling) in enumerate(SAMPLING.items()):
        push(rollout, engine)
        results[f"{name}, queued"] = compare(rollout, config, sampling, number)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(results))
    dist.barrier()
    rollout.shutdown()
    device.shutdown()


def push(rollout: Rollout, engine: FSDPEngine) -> None:
    """A round: sleep, other weights, wake."""
    rollout.sleep()
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.01)
    rollout.wake("weights")
    rollout.update_weights(engine.export_weights())
    rollout.wake("kv_cache")


def compare(rollout: Rollout, config, sampling: dict, number: int, count: int = 12) -> dict:
    rng, sampling = random.Random(number), OmegaConf.merge(config.rollout, sampling)
    prompts = [[rng.randrange(15, 250) for _ in range(rng.choice((1, 7, BLOCK, MAX_PROMPT - 1, MAX_PROMPT)))] for _ in range(count)]
    prompts = [prompt for prompt in prompts for _ in range(GROUP)]
    seeds = [request_seed(number, i) for i in range(len(prompts))]
    scheduler, answers, said = rollout.scheduler, [], {}
    for own in (True, False):
        rollout.llm.reset_prefix_cache()
        rollout.scheduler = scheduler if own else None
        answers.append(rollout.generate(prompts, seeds, sampling))
        if own:
            said = {"steps": scheduler.num_steps, "preempting": scheduler.num_preempting, "in arrays": rollout.in_arrays}
    rollout.scheduler = scheduler
    (batch, truncated), (expected, expected_truncated) = answers
    same = torch.equal(batch.cu_seqlens, expected.cu_seqlens)
    differ = -1 if not same else sum(int((x != y).sum()) for x, y in [
        (batch.input_ids, expected.input_ids), *((batch.fields[k], expected.fields[k]) for k in expected.fields),
        (truncated, expected_truncated)])
    return said | {"differ": differ, "fields": sorted(batch.fields), "tokens": int(batch.fields["loss_mask"].sum()),
                   "truncated": int(truncated.sum()), "requests left": len(scheduler.requests)}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
