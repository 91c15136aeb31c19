"""Generate with one vLLM, with a drafter or without, in rounds of different weights.

    torchrun --nproc-per-node N tests/rollout/speculation_worker.py MODEL RESULT.json [KEY=VALUE...]

test_speculation.py compares the results.
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

from config import load
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import request_seed
from rollout.vllm.speculation import draft_metrics, sample_and_verify

NUM_PROMPTS = 24
MAX_PROMPT = 48
MAX_TOKENS = 40
BLOCK = 32  # tokens of a block of the KV cache: few, so that responses have several blocks
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
ALL_TOKENS = {"top_k": -1}
SAMPLING = {
    "sampled": ALL_TOKENS,
    "cool": {**ALL_TOKENS, "temperature": 0.5},
    "greedy": {"temperature": 0.0},
    "top_k": {},
    "top_p": {**ALL_TOKENS, "top_p": 0.7},
    "short": {"temperature": 0.0, "max_tokens": 2},
}
LATER_SAMPLING = ("sampled", "greedy")  # in later rounds, which differ in weights alone
# Round -> a factor of the MTP layers' weights.
ROUNDS = {"as it is": 1.0, "without MTP": 0.0, "with MTP again": 1.0}
# For statistics: NUM_DRAWS responses of DRAWN_TOKENS tokens to one prompt.
PROMPT = [7, 5, 9, 7]
NUM_DRAWS = 2000
DRAWN_TOKENS = 3


def main(model: str, result: Path, *settings: str) -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler  # tests import this module

    this_device = device.init()
    results = {}
    vllm.LLM = functools.partial(vllm.LLM, block_size=BLOCK)
    config = load("ppo.yaml", [f"model.path={model}", *SETTINGS, *settings])
    engine = FSDPEngine(config, this_device, 1)
    rollout = Rollout(config, this_device)
    preemptions = record_preemptions(rollout)
    for name, factor in ROUNDS.items():
        push(rollout, engine, factor)
        samplings = LATER_SAMPLING if results else SAMPLING
        results[name] = {
            sampling: generate(rollout, engine, config, SAMPLING[sampling])
            for sampling in samplings
        }
        engine.offload()  # FSDP has gathered some parameters
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(1.1)
    results["preempted"] = len(preemptions)
    if rollout.drafter == "mtp" and dist.get_world_size() == 1:
        results["drawn"] = draw(rollout, config)
        RejectionSampler.forward = sample_without_verifying
        results["drawn without verifying"] = draw(rollout, config)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(results))
    dist.barrier()
    rollout.shutdown()
    device.shutdown()


def push(rollout: Rollout, engine: FSDPEngine, factor: float) -> None:
    """Send the engine's weights to vLLM, with those of the MTP layers times `factor`."""
    rollout.sleep()
    rollout.wake("weights")
    rollout.update_weights(
        (name, weight * factor if ".mtp_layers." in name else weight)
        for name, weight in engine.export_weights()
    )
    rollout.wake("kv_cache")


def record_preemptions(rollout: Rollout) -> list:
    """Return a list that gets an entry whenever vLLM preempts a request."""
    scheduler = rollout.llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    preemptions = []

    def record(*arguments, **options):
        preemptions.append(None)
        return preempt(*arguments, **options)

    scheduler._preempt_request = record
    return preemptions


def generate(rollout: Rollout, engine: FSDPEngine, config, changes: dict) -> dict:
    rng = random.Random(0)
    prompts = []
    for _ in range(NUM_PROMPTS):
        length = rng.randint(4, MAX_PROMPT)
        prompts.append([rng.randrange(2, 12) for _ in range(length)])
    sampling = OmegaConf.merge(config.rollout, changes)
    seeds = [request_seed(0, i) for i in range(NUM_PROMPTS)]
    batch, truncated = rollout.generate(prompts, seeds, sampling)
    result = {
        "input_ids": batch.input_ids.tolist(),
        "lengths": batch.lengths,
        "truncated": truncated.tolist(),
        **{name: values.tolist() for name, values in batch.fields.items()},
    }
    if sampling.temperature == 1 and sampling.top_p == 1:
        gaps = engine.log_probs(batch)[0] - batch.fields["rollout_log_probs"]
        result["gap"] = gaps.abs().max().item()
    if rollout.drafter:
        result |= draft_metrics(rollout.drafts.counts)
    return result


def draw(rollout: Rollout, config) -> list[list[int]]:
    """Return NUM_DRAWS responses to PROMPT."""
    sampling = OmegaConf.merge(config.rollout, {**ALL_TOKENS, "max_tokens": DRAWN_TOKENS})
    seeds = [request_seed(1, i) for i in range(NUM_DRAWS)]
    batch, _ = rollout.generate([PROMPT] * NUM_DRAWS, seeds, sampling)
    return [ids[len(PROMPT) :].tolist() for ids in batch.input_ids.split(batch.lengths)]


def sample_without_verifying(self, metadata, draft_probs, logits, sampling):
    """Sample as if the first draft of every request were the token that the model drew."""
    drawn = sample_and_verify(self, metadata, draft_probs, logits, sampling)
    place = 0
    for row, num_drafts in enumerate(metadata.num_draft_tokens):
        if num_drafts:
            drawn.sampled_token_ids[row, 0] = metadata.draft_token_ids[place]
        place += num_drafts
    return drawn


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
