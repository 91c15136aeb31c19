"""The cases of rollout_worker.py about critics, and about checkpoints of actor and critic."""

from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf

from data.batching.batch import Batch
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_hf
from engines.fsdp.engine import FSDPEngine
from engines.heads import Head
from examples.arithmetic import make_tokenizer
from rl.updates import compute
from tests.rollout.launches import LAUNCHES, SMALL_MICRO_BATCHES, make_config
from tests.rollout.sample_cases import make_share, values_in_order
from tests.support.guarded import guarded_once, unguarded
from tests.support.training import digest, gather

CRITIC_STEPS = 40
END_TOKEN = 251
CPU = torch.device("cpu")


def run(folder: Path, name: str) -> dict:
    """Train a critic from the policy's files on returns between -2 and 2, export it, and resume."""
    config = make_config(folder, LAUNCHES[name], SMALL_MICRO_BATCHES, "optim.lr=3e-3")
    batch = make_returns()
    critic = build_critic(config, config.model.path)
    first_values = compute_values(critic, batch)
    metrics = train(critic, batch, value_error, range(CRITIC_STEPS))
    result = {
        "first": first_values,
        "losses": [step_metrics["loss"] for step_metrics in metrics],
        "last": compute_values(critic, batch),
        "another end": compute_values(critic, with_other_ends(batch)),
    }
    exported = folder / f"{name}_critic"
    export_hf(critic, make_tokenizer(), exported)
    result["read again"] = compute_values(build_critic(config, exported), batch)

    actor = build_actor(config)
    checkpointer = Checkpointer(folder / f"{name}_checkpoints", 1, False)
    train(actor, batch, imitation, range(2))
    progress = {"step": 2, "kl_coef": 0.25}
    checkpointer.save(2, actor, progress, make_tokenizer(), critic=critic)
    saved = [digest(actor.state()), digest(critic.state())]
    result["continued"] = continue_training(actor, critic, batch)
    actor = build_actor(config)
    critic = build_critic(config, config.model.path)
    result["progress"] = checkpointer.load(checkpointer.latest(), actor, critic=critic)
    restored = [digest(actor.state()), digest(critic.state())]
    result["restored"] = gather(restored == saved)
    result["continued again"] = continue_training(actor, critic, batch)
    return result


def build_actor(config) -> FSDPEngine:
    with unguarded():  # rollout_worker.py has checked the same model
        return FSDPEngine(config, CPU, 10)


def build_critic(config, path) -> FSDPEngine:
    critic_config = OmegaConf.merge(config, {"model": {"path": str(path)}})
    with guarded_once("critic"):
        return FSDPEngine(critic_config, CPU, CRITIC_STEPS, head=Head.VALUES)


def train(engine: FSDPEngine, batch: Batch, loss_fn, steps) -> list[dict]:
    """Return the metrics of each step."""
    return [engine.train_batch(make_share(engine, batch).batch, loss_fn, step) for step in steps]


def continue_training(actor: FSDPEngine, critic: FSDPEngine, batch: Batch) -> list[dict]:
    actor_metrics = train(actor, batch, imitation, range(2, 4))
    return actor_metrics + train(critic, batch, value_error, range(2))


def compute_values(critic: FSDPEngine, batch: Batch) -> list[float]:
    share = make_share(critic, batch)
    return values_in_order(share, compute(critic.values, share))


def make_returns() -> Batch:
    """Return 10 sequences with random returns. The second half of each counts, but none of one."""
    generator = torch.Generator().manual_seed(0)
    random_integers = partial(torch.randint, generator=generator)
    lengths = random_integers(2, 30, (10,))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = random_integers(3, 250, (int(lengths.sum()),))
    half = (lengths // 2).repeat_interleave(lengths)
    returns = torch.rand(len(ids), generator=generator) * 4 - 2
    batch = Batch(ids, cu_seqlens, {"returns": returns})
    batch.fields["loss_mask"] = (batch.position_ids >= half.clamp(min=1)).float()
    batch.fields["loss_mask"][cu_seqlens[4] : cu_seqlens[5]] = 0
    return batch


def with_other_ends(batch: Batch) -> Batch:
    """Return the batch with another last token in each sequence."""
    last_tokens = batch.cu_seqlens[1:] - 1
    ids = batch.input_ids.index_fill(0, last_tokens, END_TOKEN)
    return Batch(ids, batch.cu_seqlens, batch.fields)


def value_error(values, fields):
    return ((values - fields["returns"]).square() * fields["loss_mask"]).sum() / 100, {}


def imitation(log_probs, entropy, fields):
    return -log_probs.sum() / 100, {}
