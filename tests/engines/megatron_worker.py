"""Runs cases of the Megatron engine's tests and writes down numbers, which the tests judge.

    torchrun --nproc-per-node N tests/engines/megatron_worker.py FOLDER NAME ...

The cases are defined beside their assertions, in the test modules that main() imports. Training
cases are of class Case; other work is a function decorated with @work(numbers of ranks).

Reads models from FOLDER/{family}. Writes FOLDER/{N}.json with the results by name, and for training
cases FOLDER/{N} {name}.safetensors with the final weights and the answers to batch 0. Checkpoints
pass from launch to launch: 2 ranks run first, then 4, then 1.
"""

import gc
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file
from torch import Tensor

from config import load
from data.batching.batch import Batch
from data.batching.plan import MicroBatches
from engines.base import Engine
from engines.fsdp.engine import FSDPEngine
from engines.heads import Head
from engines.megatron.engine import MegatronEngine
from engines.megatron.torch_layers import TorchAttention
from engines.parallel import collectives, device
from tests.support.cases import CaseKey, Registry
from tests.support.guarded import guarded_once, unguarded
from tests.support.training import SETTINGS, digest, gather, make_batch, make_loss, share_of

CASES = Registry()
# In the order in which their cases run. vLLM, when it shuts down, ends the process group.
MODULES = (
    "tests.engines.test_megatron",
    "tests.engines.test_megatron_adapters",
    "tests.engines.test_mtp",
    "tests.engines.test_megatron_internals",
    "tests.engines.test_megatron_checkpoints",
    "tests.engines.test_routing_replay",
    "tests.engines.test_megatron_rollout",
)
TOTAL_STEPS = 10  # of the learning rate's schedule
# Steps that cases train. The second batch limits what sampling could have drawn; from the third on,
# both moments of Adam count. Batches repeat every four steps, so that six learn something twice.
FEW_STEPS = 3
MORE_STEPS = 6
TOKEN_CAP = 96

# -- settings --------------------------------------------------------------------------------------

TP2 = "tensor_model_parallel_size=2"
TP4 = "tensor_model_parallel_size=4"
PP2 = "pipeline_model_parallel_size=2"
VPP2 = "virtual_pipeline_model_parallel_size=2"
CP2 = "context_parallel_size=2"
EP2 = "expert_model_parallel_size=2"
EP4 = "expert_model_parallel_size=4"
NO_SP = "sequence_parallel=false"
PADDED = "use_remove_padding=false"
REPLICATED = "use_distributed_optimizer=false"
OVERLAP = "overlap_grad_reduce=true"
BUCKETS = "override_ddp_config.bucket_size=1000"
BF16_GRADIENTS = "override_ddp_config.grad_reduce_in_fp32=false"
FULL = "recompute=full"
SELECTIVE = "recompute=selective"
BF16 = "compute_dtype=bfloat16"
AUX = "router_aux_loss_coef=0.3"
# With these caps some sequences are longer than the share of one rank or, with four ranks, of two.
AUTO = "context_parallel_size=auto"
# So that a sequence gets no larger group than it needs.
COSTLY_SHARING = "context_parallel_costs=[1,0,0,0.5]"
SHORT = "data.max_tokens_per_micro_batch=24"
SHORTER = "data.max_tokens_per_micro_batch=16"
SHORTEST = "data.max_tokens_per_micro_batch=12"
# What decides which tokens a layer sees, and how layers are divided.
ARRANGEMENTS = (TP2, TP4, PP2, VPP2, CP2, EP2, EP4, NO_SP, PADDED, AUTO, BF16)
# Large enough to keep Adam from making a whole step of a rounding error in a tiny gradient.
EPS = "optim.eps=1e-5"
LORA = f"model.lora.rank=4 model.lora.alpha=8 {EPS}"


def keys(settings: str) -> list[str]:
    """Return settings as configuration keys: those without a section belong to engine."""
    sections = ("model.", "optim.", "data.")
    return [
        setting if setting.startswith(sections) else f"engine.{setting}"
        for setting in settings.split()
    ]


# -- training cases --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Training of a model with these settings.

    family: names the model
    settings: see keys()
    critic: with a value head and value_loss()
    uneven: the last data-parallel rank has no sequences; see training.divide()
    engine: the class of the engine
    """

    family: str
    settings: str = ""
    steps: int = FEW_STEPS
    critic: bool = False
    uneven: bool = False
    engine: type[Engine] = MegatronEngine

    @property
    def has_experts(self) -> bool:
        return self.family.startswith(("qwen3_moe", "mixtral"))

    @property
    def has_aux_loss(self) -> bool:
        """Whether routers have an auxiliary loss: by the settings, or by config.json."""
        return AUX in self.settings or self.family == "qwen3_moe_raw"

    @property
    def has_lora(self) -> bool:
        return LORA in self.settings

    @property
    def is_rounded(self) -> bool:
        return BF16 in self.settings

    @property
    def head(self) -> Head:
        return Head.VALUES if self.critic else Head.LOG_PROBS

    @property
    def arrangement(self) -> tuple[type[Engine], bool, frozenset[str]]:
        return self.engine, self.critic, frozenset(ARRANGEMENTS).intersection(self.settings.split())


CaseTable = dict[CaseKey, Case]


def register(table: CaseTable) -> None:
    """Let the worker run these training cases."""
    for (num_ranks, name), case in table.items():
        CASES.add(num_ranks, name, partial(run_case, title=f"{num_ranks} {name}", case=case))


def run_case(folder: Path, this_device: torch.device, title: str, case: Case) -> dict:
    """Train, export and evaluate, and measure what else the engine does meanwhile."""
    print(title, flush=True)
    with guarded_once(case.family, case.arrangement):
        engine = build(
            case.engine, folder / case.family, this_device, case.settings, head=case.head
        )
    attentions = attention_modules(engine)
    with counted_calls(attentions) as calls:
        steps = train(engine, range(case.steps), case)
    result = {"steps": steps, "flops": engine.flops([3, 5], 4)}
    if case.engine is MegatronEngine:
        plans = [step_share(engine, step, case).micro_batches for step in range(case.steps)]
        num_passes = sum(map(len, plans))
        result["bytes"] = gather(count_bytes(engine))
        result["group sizes"] = used_group_sizes(gather(plans))
        result["attention passes"] = gather(len(calls) / len(attentions) / num_passes)
    if case.has_experts:
        result["micro_batches"] = [
            micro_batches_of_ranks(engine, step, case) for step in range(case.steps)
        ]
    weights = dict(engine.export_weights())
    answers = evaluate(engine, case)
    if case.has_lora:
        result |= evaluate_adapters(engine, case, folder, title)
    save_tensors({"answers": answers, **weights}, folder / f"{title}.safetensors")
    return result | {"digests": gather(digest(weights)), "names": gather(list(weights))}


def evaluate_adapters(engine: MegatronEngine, case: Case, folder: Path, title: str) -> dict:
    """Write down the adapters, and what the model is without them."""
    adapters = dict(engine.export_adapter())
    with engine.without_adapters():
        base = {"answers": evaluate(engine, case), **dict(engine.export_weights())}
    digests = gather([digest(adapters), list(adapters)])
    save_tensors(adapters, folder / f"{title} adapter.safetensors")
    save_tensors(base, folder / f"{title} base.safetensors")
    return {"adapter digests": digests}


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file of tensors on rank 0."""
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


# -- engines ---------------------------------------------------------------------------------------


def build(
    kind: type[Engine], model: Path, this_device: torch.device, settings: str = "", **arguments
) -> Engine:
    """Build an engine on a layout of its own. Only one layout lives at a time."""
    new_layout()
    name = "fsdp" if kind is FSDPEngine else "megatron"
    config = load(
        "sft.yaml",
        [
            f"model_engine={name}",
            f"model.path={model}",
            f"data.max_tokens_per_micro_batch={TOKEN_CAP}",
            *SETTINGS,
            *keys(settings),
        ],
    )
    return kind(config, this_device, TOTAL_STEPS, **arguments)


def new_layout() -> None:
    """Forget Megatron's process groups, so that the next engine makes new ones."""
    gc.collect()
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
        # Megatron only forgets its groups. Each has a few gloo threads: after thirty layouts there
        # would be thousands.
        groups = [
            group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD
        ]
        for group in groups:
            dist.destroy_process_group(group)
        collectives._create_groups.cache_clear()


def attention_modules(engine: Engine) -> list[TorchAttention]:
    modules = [module for model in engine.modules() for module in model.modules()]
    return [module for module in modules if isinstance(module, TorchAttention)]


@contextmanager
def counted_calls(modules: Iterable[torch.nn.Module]) -> Iterator[list[int]]:
    """Within this block, append to the returned list on each call of one of the modules."""
    calls = []
    handles = [module.register_forward_hook(lambda *_: calls.append(1)) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# -- batches ---------------------------------------------------------------------------------------


@dataclass
class StepShare:
    """This data-parallel rank's part of a step.

    num_tokens: of all ranks together
    """

    batch: Batch
    micro_batches: MicroBatches
    num_tokens: int


def step_share(engine: Engine, step: int, case: Case) -> StepShare:
    batch = make_batch(step)
    sequences, micro_batches = share_of(engine, batch.lengths, case.uneven)
    return StepShare(batch.select(sequences), micro_batches, len(batch.input_ids))


def micro_batches_of_ranks(engine: Engine, step: int, case: Case) -> list[list[int]]:
    """Return the sequences of each micro-batch of any rank, on which an auxiliary loss depends."""
    sequences, planned = share_of(engine, make_batch(step).lengths, case.uneven)
    own = []
    for _, members in planned:
        own.append(tuple(sequences[i] for i in members))
    distinct = set()
    for micro_batches in gather(own):
        distinct |= set(micro_batches)
    return sorted(distinct)


def used_group_sizes(plans_of_ranks: list[list[MicroBatches]]) -> list[int]:
    """Return the sizes of the context-parallel groups that work on any sequence."""
    sizes = set()
    for plans in plans_of_ranks:
        for plan in plans:
            sizes |= {size for size, members in plan if members}
    return sorted(sizes)


def train(engine: Engine, steps: Iterable[int], case: Case) -> list[dict[str, float]]:
    """Train on the batches of these steps and return the metrics of each."""
    results = []
    for step in steps:
        share = step_share(engine, step, case)
        make = value_loss if case.critic else make_loss
        loss_fn = make(share.num_tokens)
        results.append(engine.train_batch(share.batch, loss_fn, step, share.micro_batches))
    return results


def value_loss(num_tokens: int) -> Callable:
    """Return a loss function for a critic: the mean squared error against fields["weight"]."""

    def loss_fn(values, fields):
        error = (values - fields["weight"]) * fields["loss_mask"]
        entropy = (values.detach() + 1).sum() / num_tokens
        return (error**2).sum() / num_tokens, {"entropy": entropy}

    return loss_fn


def evaluate(engine: Engine, case: Case) -> Tensor:
    """Return the answers of all ranks to batch 0, without a mask, [ranks, 3, T].

    They are log-probabilities, entropies and greedy; of a critic, three times the values. NaN where
    a rank has no answer.
    """
    batch = Batch(make_batch(0).input_ids, make_batch(0).cu_seqlens)
    sequences, planned = share_of(engine, batch.lengths, case.uneven)
    token_numbers = Batch(torch.arange(len(batch.input_ids)), batch.cu_seqlens)
    own_tokens = token_numbers.select(sequences).input_ids
    answers = torch.full((3, len(batch.input_ids)), torch.nan)
    if case.critic:
        values = engine.values(batch.select(sequences), planned).cpu()
        answers[:, own_tokens] = values.expand(3, -1)
    else:
        outputs = engine.log_probs(batch.select(sequences), planned)
        answers[:, own_tokens] = torch.stack([x.float().cpu() for x in outputs])
    return torch.stack(gather(answers))


def count_bytes(engine: MegatronEngine) -> list[int]:
    """Return this rank's pipeline stage, and its bytes of parameters, gradients and optimizer."""

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    parameters = [p for model in engine.models for p in model.parameters()]
    optimizers = engine.optimizer.chained_optimizers
    of_optimizer = []
    for optimizer in optimizers:
        for state in optimizer.state.values():
            of_optimizer += [x for name, x in state.items() if name != "step"]
        if optimizers[0].config.bf16:  # Otherwise its weights are the parameters themselves.
            of_optimizer += optimizer.get_parameters()
    return [
        engine.pp_group.rank(),
        size(parameters),
        size(p.main_grad for p in parameters if p.requires_grad),
        size(of_optimizer),
    ]


def work(*numbers_of_ranks: int) -> Callable[[Callable], Callable]:
    """Decorate a function of (folder, device) as a case of its name, unguarded."""

    def register_unguarded(function: Callable) -> Callable:
        for num_ranks in numbers_of_ranks:
            CASES.add(num_ranks, function.__name__, unguarded()(function))
        return function

    return register_unguarded


# -- the worker ------------------------------------------------------------------------------------


def main(folder: Path, *names: str) -> None:
    for module in MODULES:
        importlib.import_module(module)
    this_device = device.init()
    num_ranks = dist.get_world_size()
    is_first_rank = dist.get_rank() == 0
    gc.freeze()  # what imports made: otherwise each new_layout() would look through it
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # On CUDA every length of a micro-batch would be compiled, which takes seconds.
    torch.compiler.set_stance("eager_on_recompile")
    results = CASES.run(num_ranks, names, folder, this_device)
    if is_first_rank:
        (folder / f"{num_ranks}.json").write_text(json.dumps(results))
    # The last case with vLLM may have ended the process group.
    if dist.is_initialized():
        device.shutdown()


if __name__ == "__main__":
    # The test modules register their cases with the importable module, not with __main__.
    from tests.engines import megatron_worker

    megatron_worker.main(Path(sys.argv[1]), *sys.argv[2:])
