"""Draw episodes with vLLM, and write them down: test_rollout_episodes.py judges them.

    torchrun --nproc-per-node N tests/rollout/episodes_worker.py FOLDER NAME

Reads the model in FOLDER/qwen3 and the agent in FOLDER/agent.py; writes FOLDER/{NAME}.json. On one
rank it also plays every episode by hand: one turn after another, with Rollout.generate().
"""

import json
import sys
from pathlib import Path

import httpx
import numpy as np
import torch.distributed as dist
from omegaconf import OmegaConf

from data.prompts import Prompt, PromptDataset
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rollout.drawing import Request
from rollout.episodes.drawing import EpisodeSampler
from rollout.episodes.runner import EpisodeRunner
from rollout.episodes.stepping import turn_seed
from rollout.samples import Samples
from rollout.vllm.engine import Rollout
from tests.rollout.episode_plans import EPISODE_LAUNCHES, GROUP_SIZE, MAX_TOKENS, PLANS, Plan
from tests.rollout.launches import responses
from tests.support.training import gather

SEED = (7, 1)
SETTINGS = [
    "data.train_files=unused",
    "engine.compute_dtype=float32",
    "data.max_prompt_length=40",
    "data.max_tokens_per_micro_batch=4096",
    f"rollout.max_tokens={MAX_TOKENS}",
    "rollout.max_episode_tokens=200",
    "rollout.max_turns=4",
    "rollout.limit_score=-1.0",
    "rollout.kv_cache_gib=0.05",
    "rollout.episode_workers=2",
    "reward.max_failure_rate=1.0",
]


class PlannedRows(PromptDataset):
    """The plans as rows that are in no file."""

    def __init__(self):
        self.prompts = [Prompt(plan.prompt_ids, "", plan.row()) for plan in PLANS]
        self.drawn_lengths = np.full(len(PLANS), np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def main(folder: Path, name: str) -> None:
    from config import load

    this_device = device.init()
    case = EPISODE_LAUNCHES[name]
    config = load(
        "ppo.yaml",
        [
            f"model.path={folder / 'qwen3'}",
            f"rollout.episode={folder / 'agent.py'}:play",
            f"output_dir={folder / name}",
            f"rollout.tensor_parallel_size={case.tp}",
            *SETTINGS,
        ],
    )
    runner = EpisodeRunner(config)
    engine = FSDPEngine(config, this_device, total_steps=1)
    rollout = Rollout(config, this_device)
    rollout.wake("weights")
    rollout.update_weights(engine.export_weights())
    rollout.wake("kv_cache")
    host_group = dist.new_group(backend="gloo")
    sampler = EpisodeSampler.start(config, rollout, runner, make_tokenizer(), host_group)
    sampling = OmegaConf.merge(config.rollout, {"n": GROUP_SIZE})
    rows = range(len(PLANS))
    request = Request(PlannedRows(), rows, sampling, SEED, section="validation")
    draws = [written(sampler.draw(request, Profiler())) for _ in range(2)]
    results = {"episodes": draws[0], "again": draws[1]}
    if sampler.director:
        base_url = sampler.director.server.base_url
        results["status of an old key"] = status_of(base_url, folder / "key")
    if case.ranks == 1:
        results["by hand"] = [
            play_by_hand(rollout, sampling, plan, (*SEED, row, number))
            for row, plan in enumerate(PLANS)
            for number in range(GROUP_SIZE)
        ]
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(results))
    dist.barrier()
    sampler.close()
    rollout.shutdown()
    device.shutdown()


def status_of(base_url: str, key_file: Path) -> int:
    """Return the HTTP status of a request with the API key of an episode that has ended."""
    headers = {"Authorization": f"Bearer {key_file.read_text()}"}
    return httpx.get(f"{base_url}/models", headers=headers).status_code


def written(samples: Samples) -> dict:
    """Return all sequences of all ranks in order, what is known of each, and the failures."""
    batch = samples.batch
    own = []
    tokens = batch.input_ids.split(batch.lengths)
    fields = {name: values.split(batch.lengths) for name, values in batch.fields.items()}
    for position, i in enumerate(samples.held.tolist()):
        sequence = {name: values[position].tolist() for name, values in fields.items()}
        own.append((i, {"input_ids": tokens[position].tolist(), **sequence}))
    all_sequences = sorted(sum(gather(own), []), key=lambda pair: pair[0])
    sequences = [sequence for _, sequence in all_sequences]
    for i, sequence in enumerate(sequences):
        sequence["episode"] = int(samples.episode[i])
        sequence["group"] = int(samples.group[i])
        sequence["score"] = float(samples.scores[i])
        sequence["truncated"] = bool(samples.truncated[i])
        assert samples.lengths[i] == len(sequence["input_ids"])
        assert samples.response_lengths[i] == sum(sequence["loss_mask"])
    return {
        "sequences": sequences,
        "failures": [(f.kind, f.row["number"], f.trace) for f in samples.failures],
        "num_drawn": samples.num_drawn,
        "metrics": {k: v for k, v in samples.metrics.items() if k.startswith("episodes/")},
    }


def play_by_hand(rollout: Rollout, sampling, plan: Plan, seed: tuple[int, ...]) -> list[dict]:
    """Return the branches of an episode, played with one request at a time."""
    branches: list[dict] = []
    prompt_ids = list(plan.prompt_ids)
    for turn in range(min(plan.num_turns, sampling.max_turns)):
        repetition = plan.repetition(turn)
        batch, _ = rollout.generate(
            [prompt_ids], [turn_seed(seed, prompt_ids, repetition)], sampling
        )
        (sampled,) = responses(batch)
        log_probs = batch.fields["rollout_log_probs"][len(prompt_ids) :].tolist()
        if turn == 0 or plan.begins_branch(turn):
            branches.append({"input_ids": [], "loss_mask": [], "rollout_log_probs": []})
        branch = branches[-1]
        num_read = len(prompt_ids) - len(branch["input_ids"])
        branch["input_ids"] = prompt_ids + sampled
        branch["loss_mask"] += [0.0] * num_read + [1.0] * len(sampled)
        branch["rollout_log_probs"] += [0.0] * num_read + log_probs
        prompt_ids = plan.next_prompt(turn, prompt_ids, sampled)
    return branches


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
