"""Run the cases of test_rollout.py and its neighbours for one launch, and write down numbers.

    torchrun --nproc-per-node N tests/rollout/rollout_worker.py FOLDER NAME

Reads the model in FOLDER/{family} and the reward in FOLDER/reward.py; writes FOLDER/{NAME}.json.
One vLLM serves all cases of a launch.
"""

import hashlib
import json
import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from data.batching.batch import Batch
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from examples.arithmetic import make_tokenizer
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import request_seed
from tests.rollout import critic_cases, sample_cases
from tests.rollout.launches import (
    CUT_TEMPERATURE,
    CUTS,
    GREEDY_CUTS,
    LAUNCHES,
    LONG_PROMPT,
    MAX_TOKENS,
    NUM_UPDATES,
    SMALL_MICRO_BATCHES,
    WITH_CRITIC,
    Launch,
    error_of,
    make_config,
    make_prompts,
    responses,
    written,
)
from tests.support.guarded import guarded_once
from tests.support.training import gather


def main(folder: Path, name: str) -> None:
    this_device = device.init()
    case = LAUNCHES[name]
    results = {}
    config = make_config(folder, case)
    for seed_generator in (torch.manual_seed, np.random.seed, random.seed):
        seed_generator(dist.get_rank() + 1)
    if case.ranks == 1:
        too_long = make_config(folder, case, "data.max_prompt_length=500")
        results["too long"] = error_of(lambda: Rollout(too_long, this_device))
    with guarded_once(case.family):
        engine = FSDPEngine(config, this_device, NUM_UPDATES)
    before = random_state()
    rollout = Rollout(config, this_device)
    results["random state after Rollout()"] = gather(random_state() == before)
    results["protocol"] = protocol(rollout, engine)
    before = random_state()
    results["plain"] = written(*generate(rollout, config))
    results["random state after generate()"] = gather(random_state() == before)
    results["seeds"] = seeds(rollout, engine)
    results["long_prompts"] = long_prompts(rollout, engine)
    results["greedy"] = greedy(rollout, engine)
    results["samples"] = sample_cases.run(folder, rollout, engine)
    if case.ranks == 1:
        results |= cuts(rollout, config)
        results["kept tokens"] = kept_tokens(rollout, engine, config)
        results["stop strings"] = stop_strings(rollout, config)
    results["updates"] = {
        str(temperature): updates(folder, case, rollout, temperature) for temperature in (1.0, 0.6)
    }
    results["cached prompt"] = cached_prompt(rollout, engine)
    if case.tp == 1:
        results["rounded"] = rounded(folder, case, rollout)
    if name in WITH_CRITIC:
        results["critic"] = critic_cases.run(folder, name)
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(results))
    dist.barrier()
    rollout.shutdown()
    device.shutdown()


def generate(
    rollout: Rollout, config, count: int = 12, seed: int = 0, **sampling
) -> tuple[Batch, torch.Tensor]:
    """Generate responses to `count` fixed prompts."""
    request_seeds = [request_seed(seed, i) for i in range(count)]
    merged = OmegaConf.merge(config.rollout, {"stop": []}, sampling)
    return rollout.generate(make_prompts(count), request_seeds, merged)


def push(rollout: Rollout, engine: FSDPEngine) -> None:
    """Send the engine's weights to vLLM."""
    rollout.sleep()
    rollout.wake("weights")
    rollout.update_weights(engine.export_weights())
    rollout.wake("kv_cache")


def random_state() -> str:
    """Return a hash of the states of all global random generators."""
    numpy_state = [str(part) for part in np.random.get_state()]
    state = (random.getstate(), numpy_state, torch.get_rng_state().tolist())
    return hashlib.sha256(repr(state).encode()).hexdigest()


def max_gap(engine: FSDPEngine, batch: Batch) -> float:
    """Return the largest |trainer's log-probability - vLLM's| over all ranks."""
    difference = engine.log_probs(batch)[0] - batch.fields["rollout_log_probs"]
    return max(gather(difference.abs().max().item()))


# -- generating -----------------------------------------------------------------------------------


def protocol(rollout: Rollout, engine: FSDPEngine) -> list:
    """Return the error of each call on each rank, or None, beginning when vLLM has just started."""

    def update():
        rollout.update_weights(engine.export_weights())

    def broken_update():
        rollout.update_weights(broken_export(engine))

    generate_one = partial(generate, rollout, engine.config, count=1)
    wake_weights = partial(rollout.wake, "weights")
    wake_cache = partial(rollout.wake, "kv_cache")
    steps = [
        ("generate at first", generate_one),
        ("cache at first", wake_cache),
        ("update at first", update),
        ("wake", wake_weights),
        ("generate before update", generate_one),
        ("cache before update", wake_cache),
        ("update", update),
        ("generate without cache", generate_one),
        ("cache", wake_cache),
        ("generate", generate_one),
        ("sleep", rollout.sleep),
        ("generate asleep", generate_one),
        ("update asleep", update),
        ("wake again", wake_weights),
        ("generate with old weights", generate_one),
        ("cache with old weights", wake_cache),
        ("an unknown part", partial(rollout.wake, "all")),
        ("update again", update),
        ("cache again", wake_cache),
        ("generate again", generate_one),
        ("broken update", broken_update),
        ("generate after broken update", generate_one),
        ("update once more", update),
        ("generate once more", generate_one),
    ]
    return [(name, gather(error_of(step))) for name, step in steps]


def broken_export(engine: FSDPEngine):
    """Yield one weight, and raise an error after the collectives that other ranks wait for."""
    weights = engine.export_weights()
    yield next(weights)
    for _ in weights:
        pass
    raise RuntimeError("broken export")


def seeds(rollout: Rollout, engine: FSDPEngine) -> dict:
    """Generate responses to 12 prompts in several orders and batches, and sort them by prompt."""
    prompts = make_prompts(12)
    prompt_seeds = [request_seed(0, i) for i in range(12)]
    sampling = OmegaConf.merge(engine.config.rollout, {"stop": []})

    def run(indices, first_prompts=()):
        """Return {index of a prompt: its response}; first_prompts come first in the batch."""
        num_first = len(first_prompts)
        batch, _ = rollout.generate(
            [*first_prompts, *(prompts[i] for i in indices)],
            [*range(num_first), *(prompt_seeds[i] for i in indices)],
            sampling,
        )
        return dict(zip(indices, responses(batch)[num_first:]))

    runs = {
        "in order": run(range(12)),
        "backwards": run(range(11, -1, -1)),
        "after others": run(range(12), make_prompts(20, length=7)),
    }
    alone = {i: run([i])[i] for i in (0, 3, 7, 11)}
    same_prompt_seeds = [*prompt_seeds[:8], prompt_seeds[0]]
    batch, _ = rollout.generate([prompts[3]] * 9, same_prompt_seeds, sampling)
    in_order = {}
    for name, response_of in runs.items():
        in_order[name] = [response_of[i] for i in range(12)]
    return {"runs": in_order, "alone": alone, "one prompt": responses(batch)}


def long_prompts(rollout: Rollout, engine: FSDPEngine) -> dict:
    """Generate with more prompt tokens than one forward pass takes."""
    prompts = make_prompts(30, LONG_PROMPT)
    sampling = OmegaConf.merge(engine.config.rollout, {"stop": [], "max_tokens": 6})
    batch, _ = rollout.generate(prompts, range(30), sampling)
    last, _ = rollout.generate(prompts[-1:], [29], sampling)
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "gap": max_gap(engine, batch),
        "last": responses(batch)[-1],
        "last alone": responses(last)[0],
    }


def greedy(rollout: Rollout, engine: FSDPEngine) -> dict:
    """Generate greedily before and after vLLM has slept and got the same weights again."""
    options = {"temperature": 0.0, "max_tokens": 2 * MAX_TOKENS}
    before, _ = generate(rollout, engine.config, **options)
    push(rollout, engine)
    after, _ = generate(rollout, engine.config, **options)
    is_likeliest = engine.log_probs(before)[2][before.fields["loss_mask"] > 0]
    return {
        "responses": [responses(before), responses(after)],
        "likeliest": gather(is_likeliest.float().mean().item()),
    }


def cuts(rollout: Rollout, config) -> dict:
    """Generate with each of the parameters that cut distributions."""
    cut = {
        name: written(*generate(rollout, config, **{"temperature": CUT_TEMPERATURE, name: value}))
        for name, value in CUTS.items()
    }
    greedy_cuts = {
        name: written(*generate(rollout, config, **{name: value}))
        for name, value in GREEDY_CUTS.items()
    }
    return {"cuts": cut, "greedy cuts": greedy_cuts}


def kept_tokens(rollout: Rollout, engine: FSDPEngine, config) -> dict:
    """Compute log-probabilities of cut distributions, with and without knowing the kept tokens."""
    batch, truncated = generate(rollout, config, top_k=12, top_p=0.8, min_p=0.05)
    blind_fields = {"loss_mask": batch.fields["loss_mask"]}
    blind_batch = Batch(batch.input_ids, batch.cu_seqlens, blind_fields)
    return {
        **written(batch, truncated),
        "engine": engine.log_probs(batch)[0].tolist(),
        "blind": engine.log_probs(blind_batch)[0].tolist(),
    }


def stop_strings(rollout: Rollout, config) -> list[dict]:
    """Generate with a stop string of one token, and of two, from the middle of plain responses."""
    tokenizer = make_tokenizer()
    plain, _ = generate(rollout, config)
    results = []
    for length in (1, 2):
        stop = next(middle_strings(tokenizer, responses(plain), length))
        stopped = written(*generate(rollout, config, stop=[stop]))
        results.append({"stop": stop, "stopped": stopped})
    return results


def middle_strings(tokenizer, all_responses: list[list[int]], length: int):
    """Yield the printable strings of `length` tokens in responses, without their first and last."""
    for response in all_responses:
        texts = [tokenizer.decode([token]) for token in response[1:-1]]
        for start in range(len(texts) - length + 1):
            text = "".join(texts[start : start + length])
            if text.isascii() and text.isprintable():
                yield text


# -- training -------------------------------------------------------------------------------------


def updates(folder: Path, case: Launch, rollout: Rollout, temperature: float) -> dict:
    """Alternate generating and training.

    Returns for each round how far vLLM is from the trainer, and how far the trainer has moved.
    """
    config = make_config(folder, case, SMALL_MICRO_BATCHES, f"rollout.temperature={temperature}")
    with guarded_once(case.family):
        engine = FSDPEngine(config, rollout.device, NUM_UPDATES, temperature=temperature)
    result = {"gaps": [], "ratios": []}
    fixed_batch = None
    fixed_log_probs = []
    for step in range(NUM_UPDATES + 1):
        push(rollout, engine)
        batch, truncated = generate(rollout, config, seed=10 * step + rollout.replica)
        local = batch.select(range(rollout.tp_rank, len(batch), case.tp))
        if step == 0:
            fixed_batch = local
            log_probs, entropy, _ = engine.log_probs(batch)
            result["drawn"] = written(batch, truncated)
            result["log_probs"] = log_probs.tolist()
            result["entropy"] = entropy.tolist()
        result["gaps"].append(max_gap(engine, local))
        fixed_log_probs.append(engine.log_probs(fixed_batch)[0])
        if step < NUM_UPDATES:
            result["ratios"].append(compare_ratios(engine, local, step))
    result["moved"] = [
        (new - old).abs().max().item() for old, new in zip(fixed_log_probs, fixed_log_probs[1:])
    ]
    return result


def cached_prompt(rollout: Rollout, engine: FSDPEngine) -> list[float]:
    """Return how far vLLM is from the trainer before and after it gets the trainer's weights.

    Both responses are to one prompt, which is so long that vLLM caches its first blocks.
    """
    prompt = make_prompts(31, LONG_PROMPT)[30]  # long_prompts() has not cached this one
    sampling = OmegaConf.merge(engine.config.rollout, {"stop": [], "max_tokens": 6})
    before, _ = rollout.generate([prompt], [0], sampling)
    push(rollout, engine)
    after, _ = rollout.generate([prompt], [0], sampling)
    return [max_gap(engine, batch) for batch in (before, after)]


def compare_ratios(engine: FSDPEngine, batch: Batch, step: int) -> dict:
    """Train on a batch, and compare the loss's log-probabilities with those from just before."""
    batch.fields["old_log_probs"] = engine.log_probs(batch)[0]
    sign = torch.tensor([(-1.0) ** i for i in range(len(batch))])
    sign = sign.repeat_interleave(batch.cu_seqlens.diff())
    batch.fields["advantages"] = sign * batch.fields["loss_mask"] / len(batch)
    num_unequal = []  # for each micro-batch

    def loss_fn(log_probs, entropy, fields):
        num_unequal.append(int((log_probs != fields["old_log_probs"]).sum()))
        return -(log_probs * fields["advantages"]).sum(), {}

    engine.train_batch(batch, loss_fn, step)
    return {
        "unequal": gather(sum(num_unequal)),
        "micro_batches": len(num_unequal),
        "tokens": int((batch.fields["old_log_probs"] != 0).sum()),
    }


def rounded(folder: Path, case: Launch, rollout: Rollout) -> dict:
    """compare_ratios() of an engine that computes in bf16 and recomputes layers in backward."""
    config = make_config(
        folder,
        case,
        SMALL_MICRO_BATCHES,
        "engine.compute_dtype=bfloat16",
        "engine.activation_checkpointing=true",
    )
    engine = FSDPEngine(config, rollout.device, NUM_UPDATES)
    batch, _ = generate(rollout, config)
    return compare_ratios(engine, batch, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
