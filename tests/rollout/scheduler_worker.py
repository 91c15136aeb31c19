"""Batches generated with rollout/vllm/scheduler.py and with vLLM's own scheduler, compared to the last bit.

    torchrun --nproc-per-node N tests/rollout/scheduler_worker.py MODEL RESULT.json ROUNDS [KEY=VALUE...]

The model's files name the tokens that end a response. What each round of sleep, new weights and generation gave is written
down, and how many Python functions were called for each token; test_rollout.py judges it.
"""

import functools
import json
import math
import random
import re
import sys
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import vllm
from omegaconf import OmegaConf

from config import load
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import request_seed

COUNT, GROUP = 12, 4
BLOCK = 32  # tokens of a block of the KV cache
MAX_PROMPT, MAX_TOKENS = 3 * BLOCK, 4 * BLOCK
SETTINGS = [
    "data.train_files=unused",
    "engine.compute_dtype=float32",
    "optim.weight_decay=0",
    "rollout.max_num_seqs=24",
    f"data.max_prompt_length={MAX_PROMPT}",
    f"rollout.max_tokens={MAX_TOKENS}",
    f"validation.max_tokens={MAX_TOKENS}",
    f"data.max_tokens_per_micro_batch={MAX_PROMPT + MAX_TOKENS}",
    "rollout.top_k=6",
]
SAMPLING = {
    "sampled": {"top_k": -1},
    "greedy": {"temperature": 0.0, "top_k": -1},
    "top_p": {"top_p": 0.7, "top_k": -1},
    "min_p": {"min_p": 0.05, "top_k": -1, "temperature": 0.8},
    "top_k": {},
    "short": {"max_tokens": 1, "top_k": -1},
    "whole_blocks": {"max_tokens": BLOCK, "top_k": -1},
}
HOST = re.compile(r"/vllm/v1/(core|engine|request|outputs)|/rollout/")


def main(model: str, result: Path, num_rounds: int, *more: str) -> None:
    this_device, results = device.init(), {}
    vllm.LLM = functools.partial(
        vllm.LLM, block_size=BLOCK
    )  # small ones, so that responses have several
    config = load("ppo.yaml", [f"model.path={model}", *SETTINGS, *more])
    engine, rollout = FSDPEngine(config, this_device, 1), Rollout(config, this_device)
    core = rollout.llm.llm_engine.engine_core.engine_core
    for number in range(num_rounds):
        push(rollout, engine)
        name = list(SAMPLING)[number % len(SAMPLING)]
        results[f"{number} {name}"] = compare(rollout, config, SAMPLING[name], number)
        if number + 1 == len(SAMPLING):
            # From now on as on an accelerator, where a step is scheduled before the last one's tokens are known.
            core.batch_queue_size, core.batch_queue, core.step_fn = (
                2,
                deque(maxlen=2),
                core.step_with_batch_queue,
            )
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


def compare(rollout: Rollout, config, sampling: dict, number: int) -> dict:
    """One batch, drawn by Rollout.generate() and by LLM.generate(), where a request with a seed and n=GROUP draws from the seeds
    that follow it (unless it is greedy)."""
    rng, sampling = random.Random(number), OmegaConf.merge(config.rollout, sampling)
    prompts = [
        [
            rng.randrange(15, 250)
            for _ in range(rng.choice((1, 7, BLOCK, MAX_PROMPT - 1, MAX_PROMPT)))
        ]
        for _ in range(COUNT)
    ]
    n = 1 if sampling.temperature == 0 else GROUP
    prompts *= GROUP // n
    params = [rollout.sampling_params(sampling, request_seed(number, i)) for i in range(len(prompts))]
    rollout.llm.reset_prefix_cache()
    with calls(number == 1) as own_calls:
        batch, truncated = rollout.generate(
            [prompt for prompt in prompts for _ in range(n)],
            [p.seed + k for p in params for k in range(n)],
            sampling,
        )
    rollout.llm.reset_prefix_cache()
    for p in params:
        p.n = n
    with calls(number == 1) as vllm_calls:
        answers = rollout.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
    expected, num_tokens = (
        [response for answer in answers for response in answer.outputs],
        int(batch.fields["loss_mask"].sum()),
    )
    differ = []
    for i, (response, mask, *mine) in enumerate(
        zip(
            expected,
            *(
                x.split(batch.lengths)
                for x in (
                    batch.fields["loss_mask"],
                    batch.input_ids,
                    *(
                        batch.fields[k]
                        for k in ("rollout_log_probs", "kept_words")
                        if k in batch.fields
                    ),
                )
            ),
        )
    ):
        mine, width = (
            [x[mask > 0].tolist() for x in mine],
            len(response.logprobs.logprobs) // len(response.token_ids),
        )
        log_probs = response.logprobs.logprobs
        words = [
            -1 if log_p == -math.inf else word
            for word, log_p in zip(response.logprobs.token_ids, log_probs)
        ]
        theirs = [
            list(response.token_ids),
            log_probs[::width],
            [words[j : j + width] for j in range(0, len(words), width)],
        ]
        if mine != theirs[: len(mine)] or (response.finish_reason == "length") != truncated[i]:
            differ.append(i)
    scheduler = rollout.scheduler
    return {
        "differ": differ,
        "responses": len(expected),
        "tokens": num_tokens,
        "truncated": int(truncated.sum()),
        "steps": scheduler.num_steps,
        "preempting": scheduler.num_vllm_steps,
        "own steps": rollout.closed_batch_share,
        "fields": sorted(batch.fields),
        "requests left": len(scheduler.requests),
        "calls per token": [own_calls[0] / num_tokens, vllm_calls[0] / num_tokens],
    }


@contextmanager
def calls(enabled: bool):
    """Counts the Python functions of the scheduler, the engine and the rollout that are called, not those of the model."""
    count = [0]

    def look(frame, event, _):
        count[0] += event == "call" and bool(HOST.search(frame.f_code.co_filename))

    sys.setprofile(look if enabled else None)
    try:
        yield count
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
