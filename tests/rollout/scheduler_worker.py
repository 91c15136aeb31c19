"""Compare batches generated with rollout/vllm/scheduler.py and with vLLM's own scheduler.

    torchrun --nproc-per-node N tests/rollout/scheduler_worker.py MODEL RESULT.json ROUNDS [K=V...]

The model's files name the tokens that end a response. Writes down which responses differ in each
round of sleep, new weights and generation, and how many Python functions were called per token.
"""

import functools
import json
import math
import random
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import vllm
from omegaconf import OmegaConf

from config import load
from data.batching.batch import Batch
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import request_seed
from tests.rollout.launches import schedule_asynchronously

NUM_PROMPTS = 12
GROUP_SIZE = 4
BLOCK = 32  # tokens of a block of the KV cache: few, so that responses have several blocks
MAX_PROMPT = 3 * BLOCK
MAX_TOKENS = 2 * BLOCK
PROMPT_LENGTHS = (1, 7, BLOCK, MAX_PROMPT - 1, MAX_PROMPT)
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
    "top_k": {},
    "top_p": {"top_p": 0.7, "top_k": -1},
    "min_p": {"min_p": 0.05, "top_k": -1, "temperature": 0.8},
    "short": {"max_tokens": 1, "top_k": -1},
    "whole_blocks": {"max_tokens": BLOCK, "top_k": -1},
}
# Files whose functions are counted: scheduler, engine and rollout, but not the model.
HOST_FILES = re.compile(r"/vllm/v1/(core|engine|request|outputs)|/rollout/")


def main(model: str, result: Path, num_rounds: int, *settings: str) -> None:
    this_device = device.init()
    results = {}
    vllm.LLM = functools.partial(vllm.LLM, block_size=BLOCK)
    config = load("ppo.yaml", [f"model.path={model}", *SETTINGS, *settings])
    engine = FSDPEngine(config, this_device, 1)
    rollout = Rollout(config, this_device)
    for number in range(num_rounds):
        push(rollout, engine)
        name = list(SAMPLING)[number % len(SAMPLING)]
        results[f"{number} {name}"] = compare(rollout, config, SAMPLING[name], number)
        if number + 1 == num_rounds // 2:
            schedule_asynchronously(rollout)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(results))
    dist.barrier()
    rollout.shutdown()
    device.shutdown()


def push(rollout: Rollout, engine: FSDPEngine) -> None:
    """Sleep, get other weights, and wake."""
    rollout.sleep()
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.01)
    rollout.wake("weights")
    rollout.update_weights(engine.export_weights())
    rollout.wake("kv_cache")


def compare(rollout: Rollout, config, changes: dict, number: int) -> dict:
    """Generate a batch with Rollout.generate() and with LLM.generate(), and compare them.

    In vLLM, a request with a seed and n=GROUP_SIZE draws from the seeds that follow it, too, unless
    it is greedy.
    """
    sampling = OmegaConf.merge(config.rollout, changes)
    group_size = 1 if sampling.temperature == 0 else GROUP_SIZE
    prompts = make_prompts(number) * (GROUP_SIZE // group_size)
    params = [
        rollout.sampling_params(sampling, request_seed(number, i)) for i in range(len(prompts))
    ]
    counts_calls = number == 1
    rollout.llm.reset_prefix_cache()
    with python_calls(counts_calls) as calls:
        batch, truncated = rollout.generate(
            [prompt for prompt in prompts for _ in range(group_size)],
            [p.seed + k for p in params for k in range(group_size)],
            sampling,
        )
    rollout.llm.reset_prefix_cache()
    for p in params:
        p.n = group_size
    with python_calls(counts_calls) as vllm_calls:
        answers = rollout.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
    expected = [response for answer in answers for response in answer.outputs]
    differing = []
    for i, (response, columns) in enumerate(zip(expected, response_columns(batch))):
        vllm_columns = columns_of(response)
        is_truncated = response.finish_reason == "length"
        if columns != vllm_columns[: len(columns)] or is_truncated != truncated[i]:
            differing.append(i)
    scheduler = rollout.scheduler
    num_tokens = int(batch.fields["loss_mask"].sum())
    return {
        "differ": differing,
        "responses": len(expected),
        "tokens": num_tokens,
        "truncated": int(truncated.sum()),
        "steps": scheduler.num_steps,
        "steps of vLLM": scheduler.num_vllm_steps,
        "admissions": scheduler.num_admissions,
        "closed batch share": rollout.closed_batch_share,
        "fields": sorted(batch.fields),
        "requests left": len(scheduler.requests),
        "calls per token": [calls[0] / num_tokens, vllm_calls[0] / num_tokens],
    }


def make_prompts(number: int) -> list[list[int]]:
    rng = random.Random(number)
    prompts = []
    for _ in range(NUM_PROMPTS):
        length = rng.choice(PROMPT_LENGTHS)
        prompts.append([rng.randrange(15, 250) for _ in range(length)])
    return prompts


def response_columns(batch: Batch) -> list[list[list]]:
    """Return (tokens, log-probabilities, kept tokens if there are any) of each response."""
    names = [name for name in ("rollout_log_probs", "candidate_ids") if name in batch.fields]
    columns = [batch.input_ids, *(batch.fields[name] for name in names)]
    split_columns = [column.split(batch.lengths) for column in columns]
    masks = batch.fields["loss_mask"].split(batch.lengths)
    responses = []
    for mask, *values in zip(masks, *split_columns):
        responses.append([column[mask > 0].tolist() for column in values])
    return responses


def columns_of(response) -> list[list]:
    """Return the same of a response by LLM.generate()."""
    log_probs = response.logprobs.logprobs
    width = len(log_probs) // len(response.token_ids)
    kept = [
        -1 if log_prob == -math.inf else token
        for token, log_prob in zip(response.logprobs.token_ids, log_probs)
    ]
    kept_by_token = [kept[start : start + width] for start in range(0, len(kept), width)]
    return [list(response.token_ids), log_probs[::width], kept_by_token]


@contextmanager
def python_calls(enabled: bool):
    """Yield a list whose only element counts the calls of functions in HOST_FILES."""
    count = [0]
    is_host_file: dict[str, bool] = {}

    def on_event(frame, event, _):
        if event != "call":
            return
        file = frame.f_code.co_filename
        if file not in is_host_file:
            is_host_file[file] = bool(HOST_FILES.search(file))
        count[0] += is_host_file[file]

    sys.setprofile(on_event if enabled else None)
    try:
        yield count
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
