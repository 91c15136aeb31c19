"""Train with responses that continue under other weights, and write down what each step has used.

    torchrun --nproc-per-node N tests/rollout/partial_worker.py FOLDER TP

Reads the model in FOLDER/tied; writes FOLDER/partial.pt: a list with an entry per step.
"""

import sys
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from data.batching.order import global_batch
from engines.parallel import device
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rl.roles import Roles
from rollout.grading.grader import Grader
from rollout.samples import Samples
from rollout.sharing import Share
from tests.rollout.launches import Launch, make_config, make_prompts
from tests.rollout.sample_cases import FixedPrompts
from tests.support.training import gather

NUM_STEPS = 5
NUM_ROWS = 5  # of FixedPrompts
BATCH_SIZE = 3
GROUP_SIZE = 2
SEED = 11
MAX_STALENESS = 2
MAX_WEIGHT = 1.5
FIELDS = ("loss_mask", "rollout_log_probs", "age")
SETTINGS = [
    "rollout.partial.enable=true",
    "rollout.partial.oversample=1.7",
    f"rollout.partial.max_staleness={MAX_STALENESS}",
    f"rollout.n={GROUP_SIZE}",
    "data.max_prompt_length=12",
    "rollout.max_tokens=200",
    "algorithm.rollout_is=token",
    f"algorithm.rollout_is_threshold={MAX_WEIGHT}",
    f"data.train_batch_size={BATCH_SIZE}",
    f"trainer.seed={SEED}",
    "data.val_files=null",
    "validation.top_k=-1",
    "optim.lr=0.005",
    "reward.num_workers=1",
    "reward.max_failure_rate=0",
]


def main(folder: Path, tp: int) -> None:
    this_device = device.init()
    settings = [*SETTINGS, f"reward.function={folder}/partial_reward.py:score"]
    config = make_config(folder, Launch(dist.get_world_size(), "tied", tp), *settings)
    dataset = FixedPrompts()
    dataset.image_store = None
    steps = []
    with closing(Grader(config)) as grader:
        roles = Roles(config, this_device, make_tokenizer(), grader, Profiler(), NUM_STEPS)
        roles.start_rollout()
        for step in range(NUM_STEPS):
            steps.append(run_step(roles, dataset, step))
    if dist.get_rank() == 0:
        torch.save(steps, folder / "partial.pt")
    dist.barrier()
    roles.close()
    device.shutdown()


def run_step(roles: Roles, dataset: FixedPrompts, step: int) -> dict:
    """Do what train_ppo.py does in a step. step: from 0.

    Returns the weights before the update, the responses and the groups that continue, of all ranks,
    and metrics.
    """
    weights = {name: weight.clone() for name, weight in roles.actor.export_weights()}
    roles.wake()
    samples, _ = roles.collect(dataset, rows_of_batch, 0, step + 1)
    roles.sleep()
    share = roles.divide(samples)
    roles.compute_log_probs(share, step)
    metrics = roles.compute_advantages(samples, share, kl_coef=0.0)
    metrics |= roles.update_actor(share, step)
    groups = roles.partial.open.groups if roles.rollout.tp_rank == 0 else []
    return {
        "weights": weights,
        "responses": sum(gather(trained_responses(samples, share)), []),
        "open": sum(gather([open_group(group) for group in groups]), []),
        "metrics": metrics,
    }


def trained_responses(samples: Samples, share: Share) -> list[dict]:
    """Return the responses that this rank trains on."""
    lengths = share.batch.lengths
    columns = {name: share.batch.fields[name].split(lengths) for name in FIELDS}
    columns["input_ids"] = share.batch.input_ids.split(lengths)
    columns["score"] = samples.scores[share.indices]
    columns["group"] = samples.group[share.indices]
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row)) for row in rows]


def rows_of_batch(batch: int):
    return global_batch(NUM_ROWS, BATCH_SIZE, SEED, batch)


def open_group(group) -> dict:
    """Return the responses of a group that continues."""
    return {
        "prompt": make_prompts(NUM_ROWS)[group.row],
        "seeds": [response.seed for response in group.responses],
        "tokens": [response.tokens.tolist() for response in group.responses],
        "versions": [response.versions.tolist() for response in group.responses],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
