"""Run the cases of test_adapters.py for one launch with one vLLM, and write down numbers.

    torchrun --nproc-per-node N tests/rollout/adapters_worker.py FOLDER NAME

Reads the model in FOLDER/{family}; writes FOLDER/{NAME}.json.
"""

import functools
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import vllm
from omegaconf import OmegaConf

from config import load
from engines.parallel import device
from profiling import Profiler
from rl.roles import Roles
from rollout.vllm.sampling import request_seed
from tests.rollout.launches import error_of, make_prompts
from tests.support.training import gather

NUM_UPDATES = 2
NUM_PROMPTS = 12
MAX_PROMPT = 64
# Tokens of a block of the KV cache. Prompts have several blocks, which must not outlive the weights
# that they were computed with.
BLOCK = 32
SETTINGS = [
    "data.train_files=unused",
    "engine.compute_dtype=float32",
    "engine.log_prob_chunk_size=29",
    "optim.lr=0.02",
    "optim.weight_decay=0",
    f"data.max_prompt_length={MAX_PROMPT}",
    "rollout.max_tokens=24",
    "validation.max_tokens=24",
    "rollout.kv_cache_gib=0.05",
    "data.max_tokens_per_micro_batch=400",
    "rollout.temperature=0.7",
    "model.lora.rank=4",
    "model.lora.alpha=12",
]


@dataclass
class Launch:
    ranks: int
    family: str
    settings: str


# Parts of vLLM's fused layers have no adapter then.
HOLES = "model.lora.exclude_modules=[k_proj,up_proj]"
LAUNCHES = {
    "merged": Launch(1, "tied", "model.lora.merge=true"),
    "swapped": Launch(1, "gemma3 with images", f"rollout.share_base=never {HOLES}"),
    "shared": Launch(1, "mistral3 with images", "rollout.share_base=always"),
    "shared_replicated": Launch(2, "qwen3", "engine.fsdp_size=1"),
    "merged_tp2": Launch(2, "qwen3", "model.lora.merge=true rollout.tensor_parallel_size=2"),
    "swapped_tp2": Launch(2, "qwen3", f"rollout.tensor_parallel_size=2 {HOLES}"),
}


def main(folder: Path, name: str) -> None:
    this_device = device.init()
    case = LAUNCHES[name]
    results = {}
    vllm.LLM = functools.partial(vllm.LLM, block_size=BLOCK)
    model = f"model.path={folder / case.family}"
    config = load("ppo.yaml", [model, *SETTINGS, *case.settings.split()])
    torch.manual_seed(dist.get_rank())
    roles = Roles(config, this_device, None, None, Profiler(), NUM_UPDATES)
    roles.start_rollout()
    base_updates = record_calls(roles.rollout, "update_weights")
    results["updates"] = [update(roles, config, step) for step in range(NUM_UPDATES + 1)]
    results["base updates"] = len(base_updates)
    results["protocol"] = protocol(roles)
    traps = TRAPS[name.partition("_")[0]]
    results["traps"] = {
        trap.__name__: gather(error_of(functools.partial(trap, roles))) for trap in traps
    }
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(results))
    dist.barrier()
    roles.close()
    device.shutdown()


def record_calls(rollout, name: str) -> list:
    """Return a list that gets an entry whenever the method of this name is called."""
    method = getattr(rollout, name)
    calls = []

    def record(*arguments):
        calls.append(None)
        return method(*arguments)

    setattr(rollout, name, record)
    return calls


def update(roles: Roles, config, step: int) -> dict:
    """Run a round: adapters change, by an optimizer step or to random numbers; vLLM generates."""
    actor = roles.actor
    rollout = roles.rollout
    if step > 0 and step % 2 == 0:
        scatter(roles)
    roles.wake()
    requests = (
        make_prompts(NUM_PROMPTS, MAX_PROMPT),
        [request_seed(step, i) for i in range(NUM_PROMPTS)],
        OmegaConf.merge(config.rollout, {"stop": []}),
    )
    batch, _ = rollout.generate(*requests)
    closed_batch_share = rollout.closed_batch_share
    rollout.llm.reset_prefix_cache()
    with replaced(rollout, scheduler=None):
        vllm_batch, _ = rollout.generate(*requests)
    fields_equal = [
        torch.equal(values, vllm_batch.fields[name]) for name, values in batch.fields.items()
    ]
    log_probs = actor.log_probs(batch)[0]
    with actor.without_adapters():
        base_log_probs = actor.log_probs(batch)[0]
    is_response = batch.fields["loss_mask"] > 0
    gaps = (log_probs.cpu() - batch.fields["rollout_log_probs"])[is_response].abs()
    effects = (log_probs - base_log_probs).cpu()[is_response].abs()
    roles.sleep()
    if step % 2 == 0:
        local = range(actor.dp_rank, NUM_PROMPTS, actor.dp_size)
        actor.train_batch(batch.select(local), imitation_loss, step)
    return {
        "gap": gather(gaps.max().item()),
        "closed": closed_batch_share,
        "equals vLLM's scheduler": torch.equal(batch.input_ids, vllm_batch.input_ids)
        and all(fields_equal),
        "effect": effects.max().item(),
    }


def imitation_loss(log_probs, entropy, fields):
    return -(log_probs * fields["loss_mask"]).sum() / 100, {}


def scatter(roles: Roles, seed: int = 0, factor: float = 1.0) -> None:
    """Fill every adapter with random numbers, the same on all ranks; B times `factor`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in roles.actor.hf.named_parameters():
        if ".lora_" not in name:
            continue
        full = torch.randn(parameter.shape, generator=generator) * 0.1
        if "lora_B" in name:
            full *= factor
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.shape != full.shape:
            full = full.chunk(dist.get_world_size())[dist.get_rank()]
        with torch.no_grad():
            local.copy_(full)


def protocol(roles: Roles) -> list:
    """Return the errors of calls that come too early. Everything sleeps at first."""
    rollout = roles.rollout
    actor = roles.actor

    def generate():
        sampling = OmegaConf.merge(actor.config.rollout, {"stop": []})
        rollout.generate(make_prompts(2), [0, 1], sampling)

    def update_adapter():
        rollout.update_adapter(actor.export_adapter())

    steps = [("generate asleep", generate)]
    if rollout.adapter:
        steps.append(("adapter asleep", update_adapter))
    steps += [
        ("wake weights", functools.partial(rollout.wake, "weights")),
        ("generate before the adapter", generate),
        ("cache before the adapter", functools.partial(rollout.wake, "kv_cache")),
        ("all", roles.wake),
        ("generate", generate),
        ("sleep", roles.sleep),
    ]
    return [(name, gather(error_of(step))) for name, step in steps]


# -- negative controls: the probe has to stop all of them except tiny() and views() ---------------


def push_base(roles: Roles, weights) -> None:
    """Send these weights as the base, and everything else as usual."""
    roles.rollout.sleep()
    roles.rollout.wake("weights")
    roles.rollout.update_weights(weights)
    roles.wake()


def push_adapter(roles: Roles) -> None:
    roles.rollout.sleep()
    roles.wake()


def merged_base(roles: Roles) -> None:
    push_base(roles, roles.actor.export_weights())


def other_base(roles: Roles) -> None:
    weights = ((name, x + 0.05 * (x.ndim == 1)) for name, x in plain_weights(roles))
    push_base(roles, weights)


def applied_twice(roles: Roles) -> None:
    with replaced(roles.rollout.adapter, scale=2 * roles.rollout.adapter.scale):
        push_adapter(roles)


def not_applied(roles: Roles) -> None:
    with replaced(roles.rollout, lora_request=None):
        push_adapter(roles)


def tiny_not_applied(roles: Roles) -> None:
    """The adapters change log-probabilities by a few ten-thousandths."""
    scatter(roles, factor=1e-4)
    not_applied(roles)


def tiny(roles: Roles) -> None:
    push_adapter(roles)


def views(roles: Roles) -> None:
    """The matrices begin inside a larger storage, as collectives may return them."""
    exported = []
    for name, matrix in roles.actor.export_adapter():
        storage = torch.cat([matrix.new_zeros(3), matrix.flatten()])
        exported.append((name, storage[3:].view_as(matrix)))
    with replaced(roles.actor, export_adapter=lambda: iter(exported)):
        push_adapter(roles)


def not_merged(roles: Roles) -> None:
    with replaced(roles.actor, export_weights=lambda **_: plain_weights(roles)):
        push_adapter(roles)


def plain_weights(roles: Roles):
    """Yield the base's weights without the adapters."""
    with roles.actor.without_adapters():
        yield from type(roles.actor).export_weights(roles.actor)


@contextmanager
def replaced(owner, **attributes):
    """Within this block, attributes of `owner` have these values."""
    originals = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


SWAPPED_TRAPS = (views, applied_twice, not_applied, tiny_not_applied, tiny)
TRAPS = {
    "merged": (not_merged, tiny),
    "shared": (*SWAPPED_TRAPS, merged_base),
    "swapped": (*SWAPPED_TRAPS, merged_base, other_base),
}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
