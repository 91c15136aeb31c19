"""Play the episodes of docs/episodes.md with other packages' clients, and write them down.

There is one vLLM and one gateway. As each client has its own interpreter, it has its own workers.

    torchrun --nproc-per-node 1 tests/repository/clients_worker.py FOLDER

Reads the model in FOLDER/model, and FOLDER/clients.json: name -> {"settings", "row"}. Writes
FOLDER/episodes.json: name -> the episodes of this row. test_docs_clients.py judges them.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from config import load
from data.chat.tokenizer import load_tokenizer
from data.prompts import Prompt, PromptDataset
from engines.model.lengths import longest_sequence
from engines.parallel import device
from profiling import Profiler
from rollout.drawing import Request
from rollout.episodes.director import Director
from rollout.episodes.drawing import EpisodeSampler, gateway_settings
from rollout.episodes.runner import EpisodeRunner
from rollout.episodes.server import GatewayServer
from rollout.samples import Samples
from rollout.vllm.engine import Rollout

NUM_EPISODES = 2
MAX_FAILURE_RATE = 1.0
SETTINGS = [
    "data.train_files=unused",
    "data.max_prompt_length=100",
    "engine.compute_dtype=float32",
    "rollout.kv_cache_gib=0.05",
    "rollout.max_tokens=12",
    "rollout.max_episode_tokens=2000",
    "rollout.episode_workers=1",  # each imports its client, which takes seconds
    # The model has learned its replies in seconds: it is not as sure as it could be.
    "rollout.temperature=0.1",
    f"reward.max_failure_rate={MAX_FAILURE_RATE}",
]


class OneRow(PromptDataset):
    """A row that is in no file."""

    def __init__(self, row: dict):
        self.prompts = [Prompt([], row["prompt"], row)]
        self.drawn_lengths = np.full(1, np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def main(folder: Path) -> None:
    this_device = device.init()
    clients = json.loads((folder / "clients.json").read_text())
    paths = [f"model.path={folder / 'model'}", f"output_dir={folder / 'out'}"]
    configs = {}
    for name, client in clients.items():
        configs[name] = load("ppo.yaml", [*paths, *SETTINGS, *client["settings"]])
    first = next(iter(configs.values()))
    rollout = start_vllm(first, this_device)
    tokenizer = load_tokenizer(first)
    server = GatewayServer(gateway_settings(first, rollout, tokenizer))
    host_group = dist.new_group(backend="gloo")
    episodes = {}
    for name, client in clients.items():
        config = configs[name]
        runner = EpisodeRunner(config)
        max_turns = config.rollout.max_turns
        limits = {"max_turns": max_turns, "max_episode_tokens": longest_sequence(config)[0]}
        director = Director(server, runner, limits)
        groups = (host_group, None)
        sampler = EpisodeSampler(rollout, runner, director, tokenizer, *groups, MAX_FAILURE_RATE)
        sampling = OmegaConf.merge(config.rollout, {"n": NUM_EPISODES})
        request = Request(OneRow(client["row"]), range(1), sampling, (7, 1))
        episodes[name] = written(sampler.draw(request, Profiler()), tokenizer)
        runner.close()
    (folder / "episodes.json").write_text(json.dumps(episodes))
    server.close()
    rollout.shutdown()
    device.shutdown()


def start_vllm(config: DictConfig, this_device) -> Rollout:
    rollout = Rollout(config, this_device)
    rollout.wake("weights")
    rollout.update_weights(load_file(Path(config.model.path, "model.safetensors")).items())
    rollout.wake("kv_cache")
    return rollout


def written(samples: Samples, tokenizer) -> dict:
    """Return all sequences, and the failures."""
    sequences = []
    batch = samples.batch
    masks = batch.fields["loss_mask"].bool().split(batch.lengths)
    for i, (ids, mask) in enumerate(zip(batch.input_ids.split(batch.lengths), masks)):
        sequences.append(
            {
                "score": float(samples.scores[i]),
                "trained": tokenizer.decode(ids[mask], skip_special_tokens=False),
                "text": tokenizer.decode(ids, skip_special_tokens=False),
                "limit": samples.details[i]["limit"],
                "branches": samples.details[i]["num_branches"],
            }
        )
    return {"sequences": sequences, "failures": [failure.trace for failure in samples.failures]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
