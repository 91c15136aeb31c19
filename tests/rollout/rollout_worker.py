"""The cases of test_rollout.py for one launch with one vLLM: it writes down numbers, which test_rollout.py judges.

    torchrun --nproc-per-node N tests/rollout/rollout_worker.py FOLDER NAME

Reads the model in FOLDER/{family} and the reward in FOLDER/reward.py; writes FOLDER/{NAME}.json.
"""

import hashlib
import json
import pickle
import random
import sys
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from algorithms.advantages import ADVANTAGES
from config import InputError, load
from data.batching.batch import Batch
from data.prompts import Prompt, PromptDataset
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_hf
from engines.fsdp.engine import FSDPEngine
from engines.heads import Head
from engines.parallel import device
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rl.estimation import set_advantages
from rl.updates import compute
from rollout.drawing import Request, Sampler
from rollout.grading.grader import Grader, check_failures
from rollout.samples import Samples
from rollout.sharing import Share, divide
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import request_seed
from tests.support.training import digest, gather

NUM_UPDATES, CRITIC_STEPS, LONG_PROMPT, MAX_TOKENS = 5, 40, 330, 24
SETTINGS = [
    "data.train_files=unused",
    "engine.compute_dtype=float32",
    "engine.log_prob_chunk_size=29",
    "optim.lr=0.02",
    "optim.weight_decay=0",
    f"data.max_prompt_length={LONG_PROMPT}",
    f"rollout.max_tokens={MAX_TOKENS}",
    f"validation.max_tokens={2 * MAX_TOKENS}",
    "rollout.kv_cache_gib=0.05",
    "data.max_tokens_per_micro_batch=400",
]
SMALL = "data.max_tokens_per_micro_batch=70"  # several micro-batches


@dataclass
class Launch:
    ranks: int
    family: str
    tp: int = 1
    more: str = ""


# vLLM needs its tokenizer for stop strings alone: whichever of the two has some must be enough.
LAUNCHES = {
    "moe": Launch(1, "moe", more="rollout.stop=[unused]"),
    "tied": Launch(1, "tied", more="validation.stop=[unused]"),
    "tied_unsaid": Launch(1, "tied_unsaid"),
    "moe_dp2": Launch(2, "moe"),
    "tied_tp2": Launch(2, "tied", tp=2),
}
CUT_TEMPERATURE, CUTS = 0.7, {"top_k": 4, "top_p": 0.5, "min_p": 0.3}
ONE_WORD = {"temperature": 0.0, "top_k": 1, "top_p": 1e-6, "min_p": 1.0}

# Name -> settings of `algorithm`; the last one has functions of a user's.
KL_IN_REWARD, REJECTION = "use_kl_in_reward=true", "rollout_rs=geometric"
LEARNED = {
    "plain": [],
    **{name: [f"adv_estimator={name}", KL_IN_REWARD] for name in ADVANTAGES},
    "discounted": [
        "adv_estimator=reinforce_plus_plus",
        "gamma=0.9",
        "loss_agg_mode=seq-mean-token-mean",
    ],
    "rejecting": [REJECTION, "rollout_rs_threshold=1.01", "rollout_rs_threshold_lower=0.99"],
    "of a user": [
        "adv_estimator=FOLDER/functions.py:surprising",
        "loss_agg_mode=FOLDER/functions.py:later",
        KL_IN_REWARD,
    ],
}


def main(folder: Path, name: str) -> None:
    this_device, launch, results = device.init(), LAUNCHES[name], {}
    config = settings(folder, launch)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(dist.get_rank() + 1)
    if launch.ranks == 1:
        results["too long"] = told(
            lambda: Rollout(settings(folder, launch, "data.max_prompt_length=500"), this_device)
        )
    engine = FSDPEngine(config, this_device, NUM_UPDATES)
    before = random_state()
    rollout = Rollout(config, this_device)
    results["random state after Rollout()"] = gather(random_state() == before)
    results["protocol"] = protocol(rollout, engine)
    before = random_state()
    results["plain"] = written(*ask(rollout, config))
    results["random state after generate()"] = gather(random_state() == before)
    for case in (seeds, long_prompts, greedy, samples):
        results[case.__name__] = case(folder, rollout, engine)
    if launch.ranks == 1:
        results["cuts"] = {
            key: written(*ask(rollout, config, **{"temperature": CUT_TEMPERATURE, key: value}))
            for key, value in CUTS.items()
        }
        results["kept words"] = kept_words(rollout, engine, config)
        results["one word"] = {
            key: written(*ask(rollout, config, **{key: value})) for key, value in ONE_WORD.items()
        }
        results["stop strings"] = stop_strings(rollout, config)
    results["updates"] = {str(t): updates(folder, launch, rollout, t) for t in (1.0, 0.6)}
    if launch.tp == 1:
        results["rounded"] = rounded(folder, launch, rollout)
        results["critic"] = critic(folder, name)
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(results))
    dist.barrier()
    rollout.shutdown()
    device.shutdown()


def settings(folder: Path, launch: Launch, *more: str):
    return load(
        "ppo.yaml",
        [
            f"model.path={folder / launch.family}",
            *SETTINGS,
            *launch.more.split(),
            f"rollout.tensor_parallel_size={launch.tp}",
            "validation.top_k=12",
            *more,
        ],
    )


def ask(
    rollout: Rollout, config, count: int = 12, seed: int = 0, **sampling
) -> tuple[Batch, torch.Tensor]:
    return rollout.generate(
        make_prompts(count),
        [request_seed(seed, i) for i in range(count)],
        OmegaConf.merge(config.rollout, {"stop": []}, sampling),
    )


def kept_words(rollout: Rollout, engine: FSDPEngine, config) -> dict:
    """What the engine says of responses that were drawn from a few words each, and what it says without knowing these."""
    batch, truncated = ask(rollout, config, top_k=12, top_p=0.8, min_p=0.05)
    blind = Batch(batch.input_ids, batch.cu_seqlens, {"loss_mask": batch.fields["loss_mask"]})
    return written(batch, truncated) | {
        name: engine.log_probs(b)[0].tolist() for name, b in (("engine", batch), ("blind", blind))
    }


def make_prompts(count: int, length: int | None = None) -> list[list[int]]:
    rng = random.Random(0)
    return [
        [rng.randrange(3, 250) for _ in range(length or rng.randint(1, 12))] for _ in range(count)
    ]


def push(rollout: Rollout, engine: FSDPEngine) -> None:
    rollout.sleep()
    rollout.wake("weights")
    rollout.update_weights(engine.export_weights())
    rollout.wake("kv_cache")


def told(action) -> list[str] | None:
    """The kind and the text of the error that an action ends with; None without one."""
    try:
        action()
    except (RuntimeError, InputError) as error:
        return [type(error).__name__, str(error)]


def random_state() -> str:
    state = (
        random.getstate(),
        [str(x) for x in np.random.get_state()],
        torch.get_rng_state().tolist(),
    )
    return hashlib.sha256(repr(state).encode()).hexdigest()


def written(batch: Batch, truncated: torch.Tensor) -> dict:
    return {
        "input_ids": batch.input_ids.tolist(),
        "lengths": batch.lengths,
        "truncated": truncated.tolist(),
        **{name: values.tolist() for name, values in batch.fields.items()},
    }


def responses(batch: Batch) -> list[list[int]]:
    masks = batch.fields["loss_mask"].split(batch.lengths)
    return [
        ids[mask > 0].tolist() for ids, mask in zip(batch.input_ids.split(batch.lengths), masks)
    ]


def gap(engine: FSDPEngine, batch: Batch) -> float:
    """The largest |trainer's log-probability - vLLM's|, over all ranks."""
    difference = engine.log_probs(batch)[0] - batch.fields["rollout_log_probs"]
    return max(gather(difference.abs().max().item()))


# -- generating --------------------------------------------------------------------------------------------------------


def protocol(rollout: Rollout, engine: FSDPEngine) -> list:
    """How each call ends on each rank, from the moment when vLLM has started."""

    def generate():
        ask(rollout, engine.config, count=1)

    def update():
        rollout.update_weights(engine.export_weights())

    def broken_update():
        rollout.update_weights(cut_short(engine))

    wake_weights, wake_cache = (
        lambda part=part: rollout.wake(part) for part in ("weights", "kv_cache")
    )
    steps = [
        ("generate at first", generate),
        ("cache at first", wake_cache),
        ("update at first", update),
        ("wake", wake_weights),
        ("generate before update", generate),
        ("cache before update", wake_cache),
        ("update", update),
        ("generate without cache", generate),
        ("cache", wake_cache),
        ("generate", generate),
        ("sleep", rollout.sleep),
        ("generate asleep", generate),
        ("update asleep", update),
        ("wake again", wake_weights),
        ("generate with old weights", generate),
        ("cache with old weights", wake_cache),
        ("a name that is none", lambda: rollout.wake("all")),
        ("update again", update),
        ("cache again", wake_cache),
        ("generate again", generate),
        ("broken update", broken_update),
        ("generate after broken update", generate),
        ("update once more", update),
        ("generate once more", generate),
    ]
    return [(what, gather(told(action))) for what, action in steps]


def cut_short(engine: FSDPEngine):
    weights = engine.export_weights()
    yield next(weights)
    for _ in weights:  # which other ranks wait for
        pass
    raise RuntimeError("cut short")


def seeds(folder: Path, rollout: Rollout, engine: FSDPEngine) -> dict:
    """The responses to 12 prompts, asked for in several orders and batches, sorted by prompt."""
    prompts, wanted = make_prompts(12), [request_seed(0, i) for i in range(12)]
    others = make_prompts(20, length=7)

    def generate(indices, before=()):
        batch, _ = rollout.generate(
            [*before, *(prompts[i] for i in indices)],
            [*range(len(before)), *(wanted[i] for i in indices)],
            sampling,
        )
        return dict(zip(indices, responses(batch)[len(before) :]))

    sampling = OmegaConf.merge(engine.config.rollout, {"stop": []})
    runs = {
        "in order": generate(range(12)),
        "backwards": generate(range(11, -1, -1)),
        "behind others": generate(range(12), others),
        "alone": {i: generate([i])[i] for i in range(12)},
    }
    batch, _ = rollout.generate([prompts[3]] * 9, [*wanted[:8], wanted[0]], sampling)
    return {
        "runs": {name: [run[i] for i in range(12)] for name, run in runs.items()},
        "one prompt": responses(batch),
    }


def long_prompts(folder: Path, rollout: Rollout, engine: FSDPEngine) -> dict:
    prompts = make_prompts(30, LONG_PROMPT)
    sampling = OmegaConf.merge(engine.config.rollout, {"stop": [], "max_tokens": 6})
    batch, _ = rollout.generate(prompts, range(30), sampling)
    last, _ = rollout.generate(prompts[-1:], [29], sampling)
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "gap": gap(engine, batch),
        "last": responses(batch)[-1],
        "last alone": responses(last)[0],
    }


def greedy(folder: Path, rollout: Rollout, engine: FSDPEngine) -> dict:
    """Greedy responses before and after vLLM has slept and got the same weights again."""
    batches = [ask(rollout, engine.config, temperature=0.0, max_tokens=2 * MAX_TOKENS)[0]]
    push(rollout, engine)
    batches.append(ask(rollout, engine.config, temperature=0.0, max_tokens=2 * MAX_TOKENS)[0])
    likeliest = engine.log_probs(batches[0])[2][batches[0].fields["loss_mask"] > 0]
    return {
        "responses": [responses(b) for b in batches],
        "likeliest": gather(likeliest.float().mean().item()),
    }


class Prompts(PromptDataset):
    """Five that are in no file."""

    def __init__(self):
        self.prompts = [
            Prompt(ids, f"prompt {i}", {"bad": i == 3}) for i, ids in enumerate(make_prompts(5))
        ]
        self.drawn_lengths = np.full(5, np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def samples(folder: Path, rollout: Rollout, engine: FSDPEngine) -> dict:
    """What Sampler.draw() makes of 5 prompts; for one of them the reward often raises. And of 3 with a reward of groups. And what
    the first of these teach."""
    dataset, generate, num_local = Prompts(), rollout.generate, []
    rollout.generate = lambda prompts, *others: (
        num_local.append(len(prompts)) or generate(prompts, *others)
    )
    tokenizer, host_group = make_tokenizer(), dist.new_group(backend="gloo")

    def grader(function):
        reward = {"function": f"{folder}/reward.py:{function}", "num_workers": 1, "timeout": 60.0}
        return closing(
            Grader(OmegaConf.merge(engine.config, {"reward": reward, "output_dir": str(folder)}))
        )

    def draw(grader, rows, n, max_failure_rate=0.5):
        sampling = OmegaConf.merge(engine.config.rollout, {"n": n, "stop": []})
        sampler = Sampler(rollout, grader, tokenizer, host_group, max_failure_rate)
        request = Request(dataset, rows, sampling, seed=(7, 1), first_group=10)
        drawn = sampler.draw(request, Profiler())
        check_failures(drawn.failures, drawn.num_drawn, max_failure_rate)
        return drawn

    def told_of(drawn):
        batches, texts, prompts, held = zip(
            *gather((drawn.batch, drawn.texts, [p.text for p in drawn.prompts], drawn.held))
        )
        order = torch.cat(held).argsort()
        return {
            **written(Batch.concat(batches).select(order), drawn.truncated),
            "group": drawn.group.tolist(),
            "scores": drawn.scores.tolist(),
            "sizes": [drawn.lengths.tolist(), drawn.response_lengths.tolist()],
            "parts": {name: values.tolist() for name, values in drawn.parts.items()},
            "held": [len(here) for here in held],
            "metrics": drawn.metrics,
            "texts": [sum(texts, [])[i] for i in order],
            "prompts": [sum(prompts, [])[i] for i in order],
            "failures": [[f.kind, f.row, f.response] for f in drawn.failures],
        }

    with grader("score") as one, grader("rank") as group:
        with counted_bytes() as num_bytes:
            everything = draw(one, range(5), 4)
        drawn = {
            "all": gather(told_of(everything)),
            "lengths": gather(dataset.drawn_lengths.tolist()),
        }
        dataset.drawn_lengths[:4] = [
            1,
            1,
            3,
            1,
        ]  # and those of the last one, many more, as they were
        drawn |= {
            "by length": told_of(draw(one, range(5), 4)),
            "num_local": gather(num_local),
            "bytes": gather(num_bytes),
        }
        return {
            **drawn,
            "two": told_of(draw(one, [4, 2], 4)),
            "one": told_of(draw(one, [1], 1)),
            "groups": gather(told_of(draw(group, [0, 4, 2], 4))),
            "too many failures": gather(
                told(lambda: draw(one, range(5), 4, max_failure_rate=0.01))
            ),
            "learned": {
                name: learned(everything, engine, folder, *more) for name, more in LEARNED.items()
            },
        }


@contextmanager
def counted_bytes():
    """A dictionary of the bytes that this rank gives to each of the collectives of ranks' hosts. Without those of vLLM's tensor
    parallelism, which on some CPUs goes through torch.distributed."""
    from vllm.distributed import get_tp_group

    num_bytes, originals = (
        {},
        {
            name: getattr(dist, name)
            for name in ("all_reduce", "all_to_all_single", "all_gather_object")
        },
    )

    def counting(name, place):
        def call(*given, **more):
            x = given[place]
            if more.get("group") is not get_tp_group().device_group:
                num_bytes[name] = num_bytes.get(name, 0) + (
                    x.nbytes if isinstance(x, torch.Tensor) else len(pickle.dumps(x))
                )
            return originals[name](*given, **more)

        return call

    for name, place in (("all_reduce", 0), ("all_to_all_single", 1), ("all_gather_object", 1)):
        setattr(dist, name, counting(name, place))
    try:
        yield num_bytes
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def learned(drawn: Samples, engine: FSDPEngine, folder: Path, *more: str) -> dict:
    """What two mini-batches of samples are to teach, where the models say of each token what its id says."""
    algorithm = OmegaConf.from_dotlist([pair.replace("FOLDER", str(folder)) for pair in more])
    config = OmegaConf.merge(engine.config, {"algorithm": algorithm})
    drawn = replace(drawn, baseline=drawn.scores.flip(0), metrics={})  # those are times
    with counted_bytes() as moved:
        share = divide(drawn, drawn.mini_batches(3), engine)
    f, ids = share.batch.fields, share.batch.input_ids
    for name, factor in (("old_log_probs", 37), ("ref_log_probs", 53), ("values", 29)):
        f[name] = -(ids * factor % 101 + 1) / 50 * f["loss_mask"]
    f["rollout_log_probs"] = f["old_log_probs"] + (ids % 5 - 2) / 20 * f["loss_mask"]
    with counted_bytes() as told:
        metrics = set_advantages(config, drawn, share, 0.1)
    fields = {
        name: of_all(share, f[name])
        for name in ("advantages", "returns", "loss_weight", "token_weight")
    }
    return {
        "fields": fields,
        "metrics": metrics,
        "counts": [len(part) for part, _ in share.parts],
        "bytes": gather((moved, told, len(ids))),
    }


def of_all(share: Share, x: torch.Tensor) -> list[float]:
    """Numbers per token of this share -> of all responses, one behind the other."""
    shares = gather(
        (share.indices.tolist(), [part.tolist() for part in x.split(share.batch.lengths)])
    )
    of_response = {
        place: numbers for places, parts in shares for place, numbers in zip(places, parts)
    }
    return [number for place in sorted(of_response) for number in of_response[place]]


def shared(engine: FSDPEngine, batch: Batch) -> Share:
    """This rank's share of a batch, all of which rank 0 has."""
    of_each, rank = torch.zeros(len(batch), dtype=torch.int64), dist.get_rank()
    return divide(
        Samples(
            batch.select(range(len(batch)) if rank == 0 else []),
            [],
            [],
            of_each,
            rank,
            batch.cu_seqlens.diff(),
            of_each,
            of_each,
            of_each,
            of_each,
            [],
            len(batch),
        ),
        of_each,
        engine,
    )


def stop_strings(rollout: Rollout, config) -> list[dict]:
    """Strings of one and two tokens that occur in the middle of responses, and the same responses stopped by them."""
    tokenizer = make_tokenizer()
    plain = ask(rollout, config)
    texts = [[tokenizer.decode([i]) for i in response[1:-1]] for response in responses(plain[0])]
    found = [
        [
            s
            for text in texts
            for s in map("".join, zip(*(text[i:] for i in range(length))))
            if s.isascii() and s.isprintable()
        ][0]
        for length in (1, 2)
    ]
    return [
        {"stop": stop, "stopped": written(*ask(rollout, config, stop=[stop]))} for stop in found
    ]


# -- training ----------------------------------------------------------------------------------------------------------


def updates(folder: Path, launch: Launch, rollout: Rollout, temperature: float) -> dict:
    """Rounds of generating and training: how far vLLM is from the trainer in each, and how far the trainer moved."""
    config = settings(folder, launch, SMALL, f"rollout.temperature={temperature}")
    engine = FSDPEngine(config, rollout.device, NUM_UPDATES, temperature=temperature)
    gaps, ratios, fixed, result = [], [], [], {}
    for step in range(NUM_UPDATES + 1):
        push(rollout, engine)
        drawn = ask(rollout, config, seed=10 * step + rollout.replica)
        mine = drawn[0].select(range(rollout.tp_rank, len(drawn[0]), launch.tp))
        if step == 0:
            same, (log_probs, entropy, _) = mine, engine.log_probs(drawn[0])
            result = {
                "drawn": written(*drawn),
                "log_probs": log_probs.tolist(),
                "entropy": entropy.tolist(),
            }
        gaps.append(gap(engine, mine))
        fixed.append(engine.log_probs(same)[0])
        if step < NUM_UPDATES:
            ratios.append(ratio(engine, mine, step))
    return {
        **result,
        "gaps": gaps,
        "ratios": ratios,
        "moved": [(b - a).abs().max().item() for a, b in zip(fixed, fixed[1:])],
    }


def ratio(engine: FSDPEngine, batch: Batch, step: int) -> dict:
    """Train on a batch; compare the log-probabilities that the loss is given with those asked for just before."""
    batch.fields["old_log_probs"] = engine.log_probs(batch)[0]
    sign = torch.tensor([(-1.0) ** i for i in range(len(batch))]).repeat_interleave(
        batch.cu_seqlens.diff()
    )
    unequal = []
    batch.fields["advantages"] = sign * batch.fields["loss_mask"] / len(batch)

    def loss_fn(log_probs, entropy, fields):
        unequal.append(int((log_probs != fields["old_log_probs"]).sum()))
        return -(log_probs * fields["advantages"]).sum(), {}

    engine.train_batch(batch, loss_fn, step)
    return {
        "unequal": gather(sum(unequal)),
        "micro_batches": len(unequal),
        "asked": int((batch.fields["old_log_probs"] != 0).sum()),
    }


def rounded(folder: Path, launch: Launch, rollout: Rollout) -> dict:
    """ratio() of an engine that computes in bf16 and recomputes its layers in backward."""
    config = settings(
        folder,
        launch,
        SMALL,
        "engine.compute_dtype=bfloat16",
        "engine.activation_checkpointing=true",
    )
    return ratio(FSDPEngine(config, rollout.device, NUM_UPDATES), ask(rollout, config)[0], 0)


def critic(folder: Path, name: str) -> dict:
    """A critic that begins with the policy's files and learns returns between -2 and 2 for 40 steps."""
    launch, this_device = LAUNCHES[name], torch.device("cpu")
    config = settings(folder, launch, SMALL, "optim.lr=3e-3")
    batch = make_returns()

    def build(path):
        settings = OmegaConf.merge(config, {"model": {"path": str(path)}})
        return FSDPEngine(settings, this_device, CRITIC_STEPS, head=Head.VALUES)

    def train(engine, loss_fn, steps):
        return [engine.train_batch(shared(engine, batch).batch, loss_fn, s) for s in steps]

    def values(engine, batch=batch):
        share = shared(engine, batch)
        return of_all(share, compute(engine.values, share))

    engine = build(config.model.path)
    result = {
        "first": values(engine),
        "losses": [m["loss"] for m in train(engine, value_error, range(CRITIC_STEPS))],
        "last": values(engine),
        "another end": values(engine, with_other_ends(batch)),
    }
    export_hf(engine, make_tokenizer(), folder / f"{name}_critic")
    result["read again"] = values(build(folder / f"{name}_critic"))

    actor, checkpointer = (
        FSDPEngine(config, this_device, 10),
        Checkpointer(folder / f"{name}_checkpoints", 1, False),
    )
    train(actor, imitation, range(2))
    checkpointer.save(2, actor, {"step": 2, "kl_coef": 0.25}, make_tokenizer(), critic=engine)
    saved = digest(actor.state()), digest(engine.state())
    result["went on"] = [
        *train(actor, imitation, range(2, 4)),
        *train(engine, value_error, range(2)),
    ]
    actor, engine = FSDPEngine(config, this_device, 10), build(config.model.path)
    result["progress"] = checkpointer.load(checkpointer.latest(), actor, critic=engine)
    result["restored"] = gather((digest(actor.state()), digest(engine.state())) == saved)
    result["went on again"] = [
        *train(actor, imitation, range(2, 4)),
        *train(engine, value_error, range(2)),
    ]
    return result


def make_returns() -> Batch:
    """10 sequences; the second half of each counts, one of them not at all. Returns of all sizes, by token."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 30, (10,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(3, 250, (int(lengths.sum()),), generator=generator)
    half = (lengths // 2).repeat_interleave(lengths)
    batch = Batch(ids, cu_seqlens, {"returns": torch.rand(len(ids), generator=generator) * 4 - 2})
    batch.fields["loss_mask"] = (batch.position_ids >= half.clamp(min=1)).float()
    batch.fields["loss_mask"][cu_seqlens[4] : cu_seqlens[5]] = 0
    return batch


def with_other_ends(batch: Batch) -> Batch:
    return Batch(
        batch.input_ids.index_fill(0, batch.cu_seqlens[1:] - 1, 251), batch.cu_seqlens, batch.fields
    )


def value_error(values, fields):
    return ((values - fields["returns"]).square() * fields["loss_mask"]).sum() / 100, {}


def imitation(log_probs, entropy, fields):
    return -log_probs.sum() / 100, {}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
