"""The cases of rollout_worker.py about graded samples, and about what they teach."""

import pickle
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from algorithms.advantages import ADVANTAGES
from data.batching.batch import Batch
from data.prompts import Prompt, PromptDataset
from engines.fsdp.engine import FSDPEngine
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rl.estimation import set_advantages
from rollout.drawing import Request, Sampler
from rollout.grading.grader import Grader, check_failures
from rollout.samples import Samples
from rollout.sharing import Share, divide
from rollout.vllm.engine import Rollout
from tests.rollout.launches import error_of, make_prompts, written
from tests.support.training import gather

FIRST_GROUP = 10
KL_IN_REWARD = "use_kl_in_reward=true"
# These need rewards of 0 or more, with named parts, or of steps.
NEED_OTHER_REWARDS = ("max_rl", "gdpo", "grpo_steps")
OWN_SETTINGS = {"max_at_k": ["adv_kwargs.k=2"]}
# Name -> settings of `algorithm`; the last one has functions of a user.
LEARNED = {
    "plain": [],
    **{
        name: [f"adv_estimator={name}", KL_IN_REWARD, *OWN_SETTINGS.get(name, [])]
        for name in ADVANTAGES
        if name not in NEED_OTHER_REWARDS
    },
    "discounted": [
        "adv_estimator=reinforce_plus_plus",
        "gamma=0.9",
        "loss_agg_mode=seq-mean-token-mean",
    ],
    "rejecting": [
        "rollout_rs=geometric",
        "rollout_rs_threshold=1.01",
        "rollout_rs_threshold_lower=0.99",
    ],
    "of a user": [
        "adv_estimator=FOLDER/functions.py:surprising",
        "loss_agg_mode=FOLDER/functions.py:later",
        KL_IN_REWARD,
    ],
}


class FixedPrompts(PromptDataset):
    """Five prompts that are in no file."""

    def __init__(self):
        self.prompts = [
            Prompt(ids, f"prompt {i}", {"bad": i == 3}) for i, ids in enumerate(make_prompts(5))
        ]
        self.drawn_lengths = np.full(5, np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


@dataclass
class Drawing:
    """What a draw needs besides its rows."""

    rollout: Rollout
    engine: FSDPEngine
    dataset: FixedPrompts
    tokenizer: object
    host_group: dist.ProcessGroup

    def draw(
        self, grader: Grader, rows, num_samples: int, max_failure_rate: float = 0.5
    ) -> Samples:
        changes = {"n": num_samples, "stop": []}
        sampling = OmegaConf.merge(self.engine.config.rollout, changes)
        sampler = Sampler(
            self.rollout, grader, self.tokenizer, self.host_group, max_failure_rate, True
        )
        request = Request(self.dataset, rows, sampling, seed=(7, 1), first_group=FIRST_GROUP)
        samples = sampler.draw(request, Profiler())
        check_failures(samples.failures, samples.num_drawn, max_failure_rate)
        return samples


def run(folder: Path, rollout: Rollout, engine: FSDPEngine) -> dict:
    """Draw samples of 5 prompts, with a reward that often raises for one of them.

    Then draw some with a reward that grades groups, and let the first samples teach.
    """
    host_group = dist.new_group(backend="gloo")
    drawing = Drawing(rollout, engine, FixedPrompts(), make_tokenizer(), host_group)
    draw = drawing.draw
    num_local = record_num_prompts(rollout)
    results = {}
    with make_grader(folder, engine, "score") as grader:
        with counted_bytes() as num_bytes:
            samples = draw(grader, range(5), 4)
        results["all"] = gather(written_samples(samples))
        results["lengths"] = gather(drawing.dataset.drawn_lengths.tolist())
        # The last prompt keeps its length, which is much larger.
        drawing.dataset.drawn_lengths[:4] = [1, 1, 3, 1]
        results["by length"] = written_samples(draw(grader, range(5), 4))
        results["num_local"] = gather(num_local)
        results["bytes"] = gather(num_bytes)
        results["two"] = written_samples(draw(grader, [4, 2], 4))
        results["one"] = written_samples(draw(grader, [1], 1))
        with make_grader(folder, engine, "rank") as group_grader:
            results["groups"] = gather(written_samples(draw(group_grader, [0, 4, 2], 4)))
        # Exactly as many failures as are allowed, early on the rank that has them all.
        rate = len(samples.failures) / samples.num_drawn
        results["bad first"] = written_samples(draw(grader, [3, 0, 1, 2, 4], 4, rate))
        too_strict = partial(draw, grader, range(5), 4, max_failure_rate=0.01)
        results["too many failures"] = gather(error_of(too_strict))
    results["learned"] = {
        name: learned(samples, engine, folder, *settings) for name, settings in LEARNED.items()
    }
    return results


def record_num_prompts(rollout: Rollout) -> list[int]:
    """Return a list that gets the number of prompts of each call of rollout.generate()."""
    original = rollout.generate
    num_prompts = []

    def record(prompts, *arguments):
        num_prompts.append(len(prompts))
        return original(prompts, *arguments)

    rollout.generate = record
    return num_prompts


def make_grader(folder: Path, engine: FSDPEngine, function: str) -> closing:
    """Return a context manager with a grader that uses a function of FOLDER/reward.py."""
    reward = {"function": f"{folder}/reward.py:{function}", "num_workers": 1, "timeout": 60.0}
    changes = {"reward": reward, "output_dir": str(folder)}
    return closing(Grader(OmegaConf.merge(engine.config, changes)))


def written_samples(samples: Samples) -> dict:
    """Return the samples of all ranks, in order, as JSON takes them."""
    prompts = [prompt.text for prompt in samples.prompts]
    of_ranks = gather((samples.batch, samples.texts, prompts, samples.held))
    batches, texts, prompts, held = zip(*of_ranks)
    order = torch.cat(held).argsort()
    all_texts = sum(texts, [])
    all_prompts = sum(prompts, [])
    return {
        **written(Batch.concat(batches).select(order), samples.truncated),
        "group": samples.group.tolist(),
        "scores": samples.scores.tolist(),
        "sizes": [samples.lengths.tolist(), samples.response_lengths.tolist()],
        "parts": {name: values.tolist() for name, values in samples.parts.items()},
        "held": [len(indices) for indices in held],
        "metrics": samples.metrics,
        "texts": [all_texts[i] for i in order],
        "prompts": [all_prompts[i] for i in order],
        "failures": [[f.kind, f.row, f.response] for f in samples.failures],
    }


@contextmanager
def counted_bytes():
    """Yield {name of a collective: bytes that this rank passes to it}.

    Without the collectives of vLLM's tensor parallelism, which use torch.distributed on some CPUs.
    """
    from vllm.distributed import get_tp_group

    place_of_value = {"all_reduce": 0, "all_to_all_single": 1, "all_gather_object": 1}
    originals = {name: getattr(dist, name) for name in place_of_value}
    num_bytes = {}

    def counting(name, place):
        def call(*arguments, **options):
            value = arguments[place]
            if options.get("group") is not get_tp_group().device_group:
                is_tensor = isinstance(value, torch.Tensor)
                size = value.nbytes if is_tensor else len(pickle.dumps(value))
                num_bytes[name] = num_bytes.get(name, 0) + size
            return originals[name](*arguments, **options)

        return call

    for name, place in place_of_value.items():
        setattr(dist, name, counting(name, place))
    try:
        yield num_bytes
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def learned(samples: Samples, engine: FSDPEngine, folder: Path, *settings: str) -> dict:
    """Compute advantages and weights of two mini-batches.

    Log-probabilities and values are functions of the token's id.
    """
    overrides = [setting.replace("FOLDER", str(folder)) for setting in settings]
    algorithm = OmegaConf.from_dotlist(overrides)
    config = OmegaConf.merge(engine.config, {"algorithm": algorithm})
    # The samples' own metrics are times.
    samples = replace(samples, baseline=samples.scores.flip(0), metrics={})
    with counted_bytes() as moved:
        share = divide(samples, samples.mini_batches(3), engine)
    fields = share.batch.fields
    ids = share.batch.input_ids
    for name, factor in (("old_log_probs", 37), ("ref_log_probs", 53), ("values", 29)):
        fields[name] = -(ids * factor % 101 + 1) / 50 * fields["loss_mask"]
    difference = (ids % 5 - 2) / 20 * fields["loss_mask"]
    fields["rollout_log_probs"] = fields["old_log_probs"] + difference
    with counted_bytes() as reduced:
        metrics = set_advantages(config, samples, share, 0.1)
    results = ("advantages", "returns", "loss_weight", "token_weight")
    return {
        "fields": {name: values_in_order(share, fields[name]) for name in results},
        "metrics": metrics,
        "counts": [len(part) for part, _ in share.parts],
        "bytes": gather((moved, reduced, len(ids))),
    }


def values_in_order(share: Share, values: torch.Tensor) -> list[float]:
    """Return the values per token of all ranks' shares, in the order of the responses."""
    by_response = [part.tolist() for part in values.split(share.batch.lengths)]
    values_of = {}
    for places, parts in gather((share.indices.tolist(), by_response)):
        values_of.update(zip(places, parts))
    in_order = []
    for place in sorted(values_of):
        in_order += values_of[place]
    return in_order


def make_share(engine: FSDPEngine, batch: Batch) -> Share:
    """Return this rank's share of a batch that only rank 0 holds."""
    zeros = torch.zeros(len(batch), dtype=torch.int64)
    rank = dist.get_rank()
    samples = Samples(
        batch=batch.select(range(len(batch)) if rank == 0 else []),
        texts=[],
        prompts=[],
        owner=zeros,
        rank=rank,
        lengths=batch.cu_seqlens.diff(),
        response_lengths=zeros,
        group=zeros,
        scores=zeros,
        truncated=zeros,
        failures=[],
        num_drawn=len(batch),
    )
    return divide(samples, zeros, engine)
