"""What one vLLM generates with a drafter, or without one, in rounds of other weights; test_speculation.py compares.

torchrun --nproc-per-node N tests/rollout/speculation_worker.py MODEL RESULT.json [KEY=VALUE...]
"""

import functools
import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import vllm
from omegaconf import OmegaConf
from vllm.v1.sample.rejection_sampler import RejectionSampler

from config import load
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rollout.vllm import speculation
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import request_seed

COUNT, MAX_PROMPT, MAX_TOKENS, BLOCK = 24, 48, 40, 32
SETTINGS = [
    "data.train_files=unused",
    "engine.compute_dtype=float32",
    f"data.max_prompt_length={MAX_PROMPT}",
    f"rollout.max_tokens={MAX_TOKENS}",
    f"validation.max_tokens={MAX_TOKENS}",
    "rollout.top_k=8",
    "data.max_tokens_per_micro_batch=2000",
    "rollout.max_num_seqs=256",
]
ALL_WORDS = {"top_k": -1}
SAMPLING = {
    "sampled": ALL_WORDS,
    "cool": {**ALL_WORDS, "temperature": 0.5},
    "greedy": {"temperature": 0.0},
    "top_k": {},
    "top_p": {**ALL_WORDS, "top_p": 0.7},
    "short": {"temperature": 0.0, "max_tokens": 2},
}
ROUNDS = {"as it is": 1.0, "without MTP": 0.0, "with MTP again": 1.0}  # the size of the MTP layers
PROMPT, NUM_DRAWS, DRAWN = (
    [7, 5, 9, 7],
    2000,
    3,
)  # NUM_DRAWS responses of DRAWN tokens to one prompt


def main(model: str, result: Path, *more: str) -> None:
    this_device, results = device.init(), {}
    vllm.LLM = functools.partial(
        vllm.LLM, block_size=BLOCK
    )  # small ones, so that responses have several
    config = load("ppo.yaml", [f"model.path={model}", *SETTINGS, *more])
    engine, rollout = FSDPEngine(config, this_device, 1), Rollout(config, this_device)
    preempted = count_preemptions(rollout)
    for name, size in ROUNDS.items():
        push(rollout, engine, size)
        results[name] = {
            sampling: generate(rollout, engine, config, changes)
            for sampling, changes in SAMPLING.items()
        }
        engine.offload()  # FSDP has gathered some parameters
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(1.1)
    results["preempted"] = len(preempted)
    if rollout.drafter == "mtp" and dist.get_world_size() == 1:
        results["drawn"] = draw(rollout, config)
        RejectionSampler.forward = without_a_check
        results["drawn without a check"] = draw(rollout, config)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(results))
    dist.barrier()
    rollout.shutdown()
    device.shutdown()


def push(rollout: Rollout, engine: FSDPEngine, size: float) -> None:
    rollout.sleep()
    rollout.wake("weights")
    rollout.update_weights(
        (name, x * size if ".mtp_layers." in name else x) for name, x in engine.export_weights()
    )
    rollout.wake("kv_cache")


def count_preemptions(rollout: Rollout) -> list:
    """Filled with one entry for each of vLLM's own."""
    scheduler, calls = rollout.llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *given, **more: calls.append(1) or preempt(*given, **more)
    return calls


def generate(rollout: Rollout, engine: FSDPEngine, config, changes: dict) -> dict:
    rng = random.Random(0)
    prompts = [
        [rng.randrange(2, 12) for _ in range(rng.randint(4, MAX_PROMPT))] for _ in range(COUNT)
    ]
    sampling = OmegaConf.merge(config.rollout, changes)
    batch, truncated = rollout.generate(
        prompts, [request_seed(0, i) for i in range(COUNT)], sampling
    )
    said = {
        "input_ids": batch.input_ids.tolist(),
        "lengths": batch.lengths,
        "truncated": truncated.tolist(),
        **{name: x.tolist() for name, x in batch.fields.items()},
    }
    if sampling.temperature == 1 and sampling.top_p == 1:
        said["gap"] = (
            (engine.log_probs(batch)[0] - batch.fields["rollout_log_probs"]).abs().max().item()
        )
    return said | (speculation.draft_metrics(rollout.drafts.counts) if rollout.drafter else {})


def draw(rollout: Rollout, config) -> list[list[int]]:
    sampling = OmegaConf.merge(config.rollout, {**ALL_WORDS, "max_tokens": DRAWN})
    batch, _ = rollout.generate(
        [PROMPT] * NUM_DRAWS, [request_seed(1, i) for i in range(NUM_DRAWS)], sampling
    )
    return [ids[len(PROMPT) :].tolist() for ids in batch.input_ids.split(batch.lengths)]


def without_a_check(self, metadata, draft_probs, logits, sampling):
    """As a sampler that takes the first draft of every request for what the model drew."""
    drawn, place = speculation.sample_and_verify(self, metadata, draft_probs, logits, sampling), 0
    for row, number in enumerate(metadata.num_draft_tokens):
        if number:
            drawn.sampled_token_ids[row, 0] = metadata.draft_token_ids[place]
        place += number
    return drawn


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
