"""The cases of test_adapters.py for one launch with one vLLM: it writes down numbers, which test_adapters.py judges.

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
from tests.rollout.rollout_worker import make_prompts, told
from tests.support.training import gather

NUM_UPDATES, COUNT, MAX_PROMPT = 5, 12, 64
BLOCK = 32  # tokens of a block of the KV cache; prompts have several, which must not outlive their weights
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
    more: str


HOLES = (
    "model.lora.exclude_modules=[k_proj,up_proj]"  # parts of vLLM's fused layers without adapter
)
LAUNCHES = {
    "merged": Launch(1, "tied", "model.lora.merge=true"),
    "swapped": Launch(1, "gemma3 with images", f"rollout.share_base=never {HOLES}"),
    "shared": Launch(1, "mistral3 with images", "rollout.share_base=always"),
    "shared_replicated": Launch(2, "qwen3", "engine.fsdp_size=1"),
    "merged_tp2": Launch(2, "qwen3", "model.lora.merge=true rollout.tensor_parallel_size=2"),
    "swapped_tp2": Launch(2, "qwen3", f"rollout.tensor_parallel_size=2 {HOLES}"),
}


def main(folder: Path, name: str) -> None:
    this_device, launch, results = device.init(), LAUNCHES[name], {}
    vllm.LLM = functools.partial(vllm.LLM, block_size=BLOCK)
    config = load(
        "ppo.yaml", [f"model.path={folder / launch.family}", *SETTINGS, *launch.more.split()]
    )
    torch.manual_seed(dist.get_rank())
    roles = Roles(config, this_device, None, None, Profiler(), NUM_UPDATES)
    roles.start_rollout()
    rollout = roles.rollout
    results["base updates"] = count_calls(rollout, "update_weights")
    results["updates"] = [update(roles, config, step) for step in range(NUM_UPDATES + 1)]
    results["base updates"] = results["base updates"]()
    results["protocol"] = protocol(roles)
    results["traps"] = {
        trap.__name__: gather(told(lambda: trap(roles))) for trap in TRAPS[name.partition("_")[0]]
    }
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(results))
    dist.barrier()
    roles.close()
    device.shutdown()


def count_calls(rollout, name: str):
    calls, method = [], getattr(rollout, name)
    setattr(rollout, name, lambda *arguments: calls.append(0) or method(*arguments))
    return lambda: len(calls)


def update(roles: Roles, config, step: int) -> dict:
    """A round: adapters move, by an optimizer step or to random numbers, and vLLM generates with them."""
    actor, rollout = roles.actor, roles.rollout
    if step > 0 and step % 2 == 0:
        scatter(roles)
    roles.wake()
    question = (
        make_prompts(COUNT, MAX_PROMPT),
        [request_seed(step, i) for i in range(COUNT)],
        OmegaConf.merge(config.rollout, {"stop": []}),
    )
    batch, _ = rollout.generate(*question)
    closed = rollout.closed_batch_share
    rollout.llm.reset_prefix_cache()
    with replaced(rollout, scheduler=None):
        vllms = rollout.generate(*question)[0]
    own = actor.log_probs(batch)[0]
    with actor.without_adapters():
        base = actor.log_probs(batch)[0]
    asked = batch.fields["loss_mask"] > 0
    roles.sleep()

    def loss_fn(log_probs, entropy, fields):
        return -(log_probs * fields["loss_mask"]).sum() / 100, {}

    if step % 2 == 0:
        actor.train_batch(batch.select(range(actor.dp_rank, COUNT, actor.dp_size)), loss_fn, step)
    return {
        "gap": gather((own.cpu() - batch.fields["rollout_log_probs"])[asked].abs().max().item()),
        "closed": closed,
        "as vLLM's": all(
            torch.equal(x, y)
            for x, y in (
                (batch.input_ids, vllms.input_ids),
                *((batch.fields[k], vllms.fields[k]) for k in batch.fields),
            )
        ),
        "effect": (own - base).cpu()[asked].abs().max().item(),
    }


def scatter(roles: Roles, seed: int = 0, factor: float = 1.0) -> None:
    """Random numbers in every adapter, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in roles.actor.hf.named_parameters():
        if ".lora_" in name:
            full = (
                torch.randn(parameter.shape, generator=generator)
                * 0.1
                * (factor if "lora_B" in name else 1)
            )
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            rows = full.chunk(dist.get_world_size())
            with torch.no_grad():
                local.copy_(full if local.shape == full.shape else rows[dist.get_rank()])


def protocol(roles: Roles) -> list:
    """What each call does that comes too early; all are asleep before."""
    rollout, actor = roles.rollout, roles.actor
    generate = lambda: rollout.generate(
        make_prompts(2), [0, 1], OmegaConf.merge(actor.config.rollout, {"stop": []})
    )
    steps = [("generate asleep", generate)]
    if rollout.adapter:
        steps += [("adapter asleep", lambda: rollout.update_adapter(actor.export_adapter()))]
    steps += [
        ("wake weights", lambda: rollout.wake("weights")),
        ("generate before the adapter", generate),
        ("cache before the adapter", lambda: rollout.wake("kv_cache")),
        ("all", roles.wake),
        ("generate", generate),
        ("sleep", roles.sleep),
    ]
    return [(what, gather(told(action))) for what, action in steps]


# -- negative controls: all but tiny() and views() have to stop at the probe ----------------------------------------------------


def fresh_base(roles: Roles, weights) -> None:
    """Send a base of one's own choice, and all else as ever."""
    roles.rollout.sleep()
    roles.rollout.wake("weights")
    roles.rollout.update_weights(weights)
    roles.wake()


def merged_base(roles: Roles) -> None:
    fresh_base(roles, roles.actor.export_weights())


def other_base(roles: Roles) -> None:
    fresh_base(roles, ((name, x + 0.05 * (x.ndim == 1)) for name, x in plain_weights(roles)))


def applied_twice(roles: Roles) -> None:
    with replaced(roles.rollout.adapter, scale=2 * roles.rollout.adapter.scale):
        fresh_adapter(roles)


def not_applied(roles: Roles) -> None:
    with replaced(roles.rollout, lora_request=None):
        fresh_adapter(roles)


def tiny_not_applied(roles: Roles) -> None:
    """Of adapters that change log-probabilities by a few ten-thousandths."""
    scatter(roles, factor=1e-4)
    not_applied(roles)


def tiny(roles: Roles) -> None:
    fresh_adapter(roles)


def views(roles: Roles) -> None:
    """Matrices that begin inside a larger storage, as collectives may return them."""
    exported = [
        (name, torch.cat([x.new_zeros(3), x.flatten()])[3:].view_as(x))
        for name, x in roles.actor.export_adapter()
    ]
    with replaced(roles.actor, export_adapter=lambda: iter(exported)):
        fresh_adapter(roles)


def not_merged(roles: Roles) -> None:
    with replaced(roles.actor, export_weights=lambda **_: plain_weights(roles)):
        fresh_adapter(roles)


def plain_weights(roles: Roles):
    with roles.actor.without_adapters():
        yield from type(roles.actor).export_weights(roles.actor)


def fresh_adapter(roles: Roles) -> None:
    roles.rollout.sleep()
    roles.wake()


@contextmanager
def replaced(whose, **attributes):
    before = {name: getattr(whose, name) for name in attributes}
    for name, value in attributes.items():
        setattr(whose, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(whose, name, value)


SWAPPED_TRAPS = (views, applied_twice, not_applied, tiny_not_applied, tiny)
TRAPS = {
    "merged": (not_merged, tiny),
    "shared": (*SWAPPED_TRAPS, merged_base),
    "swapped": (*SWAPPED_TRAPS, merged_base, other_base),
}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
