"""Record the experts that vLLM chooses, and compare them with the trainer's own choices.

    torchrun --nproc-per-node N tests/rollout/routes_worker.py FOLDER FAMILY SETTING ...

Reads the model in FOLDER/FAMILY; writes FOLDER/routes.json with an entry per case. In fp32, both
make the same choices, so that every mismatch is an expert of another token, layer or request.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from config import load
from data.batching.batch import Batch
from engines.fsdp.engine import FSDPEngine
from engines.model.routes import FIELD, no_route
from engines.parallel import device
from rollout.vllm.continuing import ContinuingRollout
from rollout.vllm.engine import Rollout

MAX_TOKENS = 40
NUM_PROMPTS = 10
NUM_LONG_PROMPTS = 6
LONG_PROMPT = 300
SETTINGS = [
    "data.train_files=unused",
    "engine.compute_dtype=float32",
    f"data.max_prompt_length={LONG_PROMPT}",
    f"rollout.max_tokens={MAX_TOKENS}",
    f"validation.max_tokens={MAX_TOKENS}",
    "data.max_tokens_per_micro_batch=1024",
    "rollout.routing_replay=true",
]


def main(folder: Path, family: str, *settings: str) -> None:
    this_device = device.init()
    config = load("ppo.yaml", [f"model.path={folder / family}", *SETTINGS, *settings])
    engine = FSDPEngine(config, this_device, 1)
    rollout = Rollout(config, this_device)
    wake(rollout, engine)
    cases = Cases(config, engine, rollout)
    results = {
        "closed": cases.closed(),
        "cached": cases.cached(),
        "log_probs": cases.log_probs(),
    }
    if rollout.drafter is None:
        results["open"] = cases.open()
        results["continued"] = cases.continued()
    else:
        results["accepted"] = cases.num_accepted
    rollout.sleep()
    results["asleep"] = rollout.recorder.slot_routes.slots is None
    wake(rollout, engine)
    results["woken"] = cases.closed()
    results["kept"] = len(rollout.recorder.kept)
    if dist.get_rank() == 0:
        (folder / "routes.json").write_text(json.dumps(results))
    rollout.shutdown()


def wake(rollout: Rollout, engine: FSDPEngine) -> None:
    rollout.wake("weights")
    rollout.update_weights(engine.export_weights())
    rollout.wake("kv_cache")


class Cases:
    """The ways in which vLLM generates."""

    def __init__(self, config, engine: FSDPEngine, rollout: Rollout):
        self.config = config
        self.engine = engine
        self.rollout = rollout
        self.num_accepted = 0
        generator = torch.Generator().manual_seed(rollout.replica)
        lengths = torch.randint(1, 30, (NUM_PROMPTS,), generator=generator).tolist()
        lengths += NUM_LONG_PROMPTS * [LONG_PROMPT]
        vocab_size = rollout.vocab_size
        self.prompts = [
            torch.randint(3, vocab_size, (length,), generator=generator).tolist()
            for length in lengths
        ]

    def closed(self) -> dict:
        """Generate with the scheduler for closed batches, unless there is a drafter."""
        return self.judge(self.generate(self.prompts))

    def open(self) -> dict:
        """Generate with vLLM's own scheduler."""
        scheduler = self.rollout.scheduler
        self.rollout.scheduler = None
        result = self.closed()
        self.rollout.scheduler = scheduler
        return result

    def cached(self) -> dict:
        """Continue earlier prompts, whose blocks are in the prefix cache."""
        return self.judge(self.generate([prompt + [7, 5] for prompt in self.prompts]))

    def log_probs(self) -> dict:
        """Generate after another use of vLLM."""
        batch = self.generate(self.prompts[:2])
        self.rollout.log_probs(batch.select([0]), 1.0)
        return self.judge(self.generate(self.prompts[:3]))

    def continued(self) -> dict:
        """Interrupt responses again and again, and continue them, as rollout.partial does."""
        continuing = ContinuingRollout(self.rollout)
        n = len(self.prompts)
        tokens: list[list[int]] = [[] for _ in range(n)]
        routes = [None] * n
        running = list(range(n))
        num_parts = 0
        while running:
            steps = iter(range(9))
            prompts = [self.prompts[i] + tokens[i] for i in running]
            responses, reasons = continuing.generate(
                prompts,
                [100 + i for i in running],
                [len(tokens[i]) for i in running],
                self.config.rollout,
                lambda ended: next(steps, None) is None,
            )
            num_parts += 1
            start = 0
            for row, i in enumerate(running):
                new = responses.tokens[row, : responses.lengths[row]].tolist()
                tokens[i] += new
                end = start + len(prompts[row]) + len(new)
                routes[i] = responses.routes[start:end]
                start = end
            running = [i for row, i in enumerate(running) if row not in reasons]
        sequences = [torch.tensor(p + t) for p, t in zip(self.prompts, tokens)]
        lengths = torch.tensor([0, *map(len, sequences)])
        joined = torch.cat([torch.from_numpy(x) for x in routes])
        batch = Batch(torch.cat(sequences), lengths.cumsum(0), {FIELD: joined})
        return self.judge(batch) | {"parts": num_parts}

    def generate(self, prompts: list[list[int]]) -> Batch:
        seeds = [100 + i for i in range(len(prompts))]
        batch, _ = self.rollout.generate(prompts, seeds, self.config.rollout)
        if self.rollout.drafter:
            self.num_accepted += int(self.rollout.drafts.counts[3])
        return batch

    def judge(self, batch: Batch) -> dict:
        """Compare the experts with those that the trainer chooses for the same tokens."""
        routes = batch.fields[FIELD]
        is_missing = (routes == no_route(routes.dtype)).all(2).all(1)
        last = batch.cu_seqlens[1:] - 1
        self.engine._replay.mismatch.reset()
        self.engine.log_probs(Batch(batch.input_ids, batch.cu_seqlens, {FIELD: routes}))
        num_mismatches, num_choices = self.engine._replay.mismatch.counts.tolist()
        return {
            "missing": is_missing.nonzero()[:, 0].tolist(),
            "last": last.tolist(),
            "mismatches": num_mismatches,
            "choices": num_choices,
            "expected_choices": (len(batch.input_ids) - len(batch)) * routes.shape[1],
            "dtype": str(routes.dtype),
            "closed_batch": self.rollout.closed_batch_share,
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
