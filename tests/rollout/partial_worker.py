"""Train with responses that continue under other weights, and write down what each step has used.

    torchrun --nproc-per-node N tests/rollout/partial_worker.py FOLDER TP KIND

KIND is responses or episodes. Reads the model in FOLDER/tied; writes FOLDER/partial.pt: a list with
an entry per step.
"""

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from data.batching.order import global_batch
from engines.parallel import device
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rl.roles import Roles
from rollout.episodes.runner import EpisodeRunner
from rollout.grading.grader import Grader
from rollout.partial.groups import OpenGroup, OpenResponse
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
SETTINGS_OF_EPISODES = [
    "rollout.max_episode_tokens=400",
    "rollout.max_tokens=300",
    "rollout.episode_workers=1",
    "data.max_tokens_per_micro_batch=800",
]


class PromptsOfEpisodes(FixedPrompts):
    """The same prompts, as rows for the agent: one has a slow tool, another a single long turn."""

    def __init__(self):
        super().__init__()
        prompts = []
        for i, prompt in enumerate(self.prompts):
            row = {"ids": prompt.input_ids, "turns": 3, "max_tokens": 40, "seconds": 0.0}
            if i == 2:
                row["seconds"] = 1.0
            if i == 4:
                row |= {"turns": 1, "max_tokens": 300}
            prompts.append(replace(prompt, row=row))
        self.prompts = prompts


def main(folder: Path, tp: int, kind: str) -> None:
    this_device = device.init()
    if kind == "episodes":
        dataset = PromptsOfEpisodes()
        settings = [*SETTINGS, *SETTINGS_OF_EPISODES]
        settings.append(f"rollout.episode={folder}/partial_agent.py:play")
        start_grader = EpisodeRunner
    else:
        dataset = FixedPrompts()
        settings = [*SETTINGS, f"reward.function={folder}/partial_reward.py:score"]
        start_grader = Grader
    config = make_config(folder, Launch(dist.get_world_size(), "tied", tp), *settings)
    dataset.image_store = None
    steps = []
    with closing(start_grader(config)) as grader:
        roles = Roles(config, this_device, make_tokenizer(), grader, Profiler(), NUM_STEPS)
        roles.start_rollout()
        for step in range(NUM_STEPS):
            steps.append(run_step(roles, dataset, step))
    # What continues has more tokens now than at the end of its step.
    for step in steps:
        step["open"] = sum(gather([turn.as_dict() for turn in step["open"]]), [])
    if dist.get_rank() == 0:
        torch.save(steps, folder / "partial.pt")
    dist.barrier()
    roles.close()
    device.shutdown()


def run_step(roles: Roles, dataset: FixedPrompts, step: int) -> dict:
    """Do what train_ppo.py does in a step. step: from 0.

    Returns the weights before the update, the responses of all ranks, the turns of this rank that
    continue, metrics, and the times of the episodes' clock.
    """
    times = [time_of_episodes(roles)]
    weights = {name: weight.clone() for name, weight in roles.actor.export_weights()}
    roles.wake()
    samples, _ = roles.collect(dataset, rows_of_batch, 0, step + 1)
    times.append(time_of_episodes(roles))
    roles.sleep()
    share = roles.divide(samples)
    roles.compute_log_probs(share, step)
    metrics = roles.compute_advantages(samples, share, kl_coef=0.0)
    metrics |= roles.update_actor(share, step)
    times.append(time_of_episodes(roles))
    groups = roles.partial.open.groups if roles.rollout.tp_rank == 0 else []
    return {
        "weights": weights,
        "responses": sum(gather(trained_responses(samples, share)), []),
        "open": sum(map(open_turns, groups), []),
        "metrics": metrics,
        "times": times,
    }


def time_of_episodes(roles: Roles) -> float | None:
    """Return the time that limits of episodes are measured in; None for responses."""
    is_for_episodes = isinstance(roles.grader, EpisodeRunner)
    return roles.grader.clock() if is_for_episodes else None


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


@dataclass(frozen=True)
class OpenTurn:
    """A response, or a turn of an episode, that was not complete at the end of a step."""

    prompt: list[int]
    response: OpenResponse

    def as_dict(self) -> dict:
        return {
            "prompt": self.prompt,
            "seed": self.response.seed,
            "tokens": self.response.tokens.tolist(),
            "versions": self.response.versions.tolist(),
        }


def open_turns(group: OpenGroup) -> list[OpenTurn]:
    """Return what a group has begun to draw: its responses, or the open turns of its episodes."""
    turns = []
    for member in group.responses:
        if isinstance(member, OpenResponse):
            turns.append(OpenTurn(make_prompts(NUM_ROWS)[group.row], member))
        else:
            for turn in member.playing.episode.open_turns:
                turns.append(OpenTurn(list(turn.branch.token_ids), turn.response))
    return turns


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
