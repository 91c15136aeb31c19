"""The Megatron engine's state comes back from a checkpoint to the bit, in a new engine.

test_megatron_checkpoints.py does the same on other layouts, up to rounding. Here are few ranks and
no torchrun.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from config import load
from engines.heads import Head
from engines.megatron.checkpoint_files import copy_to_host, hf_weights
from engines.megatron.engine import MegatronEngine
from engines.megatron.sharded_state import get_step, num_steps_of_run
from tests.support.cases import id_of, slow_unless_quick
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.training import SETTINGS, digest, make_batch, make_loss

NUM_STEPS = 2  # before the checkpoint
TP2 = "engine.tensor_model_parallel_size=2"
PP2 = "engine.pipeline_model_parallel_size=2"
EP2 = "engine.expert_model_parallel_size=2"
BF16 = "engine.compute_dtype=bfloat16"
REPLICATED = "engine.use_distributed_optimizer=false"
BUCKETS = ("engine.overlap_grad_reduce=true", "engine.override_ddp_config.bucket_size=1000")
LORA = "model.lora.rank=4"
FREEZE_FIRST_STAGE = r"model.freeze=['embed_tokens','layers\.0\.']"


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    num_ranks: int
    settings: tuple[str, ...] = ()
    head: Head = Head.LOG_PROBS
    is_quick: bool = False


CASES = [
    Case("one rank", "tied", 1, is_quick=True),
    Case("a critic with adapters", "tied", 1, (LORA, REPLICATED), Head.VALUES, is_quick=True),
    Case("rounded weights", "tied", 2, (BF16,)),
    Case("rounded and replicated", "tied", 2, (BF16, REPLICATED, TP2)),
    Case("buckets", "tied", 2, BUCKETS),
    Case("virtual stages", "deep", 2, (PP2, "engine.virtual_pipeline_model_parallel_size=2")),
    Case(
        "fp32 adapters of rounded weights", "tied", 2, (LORA, "model.lora.dtype=float32", BF16, TP2)
    ),
    Case("a frozen stage", "untied", 2, (FREEZE_FIRST_STAGE, PP2)),
    Case("experts", "moe", 2, (EP2,)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "tied", "qwen2_tied", num_hidden_layers=2)
    make_model(folder / "deep", "llama", num_hidden_layers=4)
    make_model(folder / "untied", "llama", num_hidden_layers=2)
    make_model(folder / "moe", "qwen3_moe", num_hidden_layers=2)
    return folder


def build(case: Case, folder: Path) -> MegatronEngine:
    needed = ["model_engine=megatron", f"model.path={folder / case.model}"]
    needed.append("data.max_tokens_per_micro_batch=80")
    config = load("sft.yaml", [*needed, *SETTINGS, *case.settings])
    return MegatronEngine(config, torch.device("cpu"), total_steps=10, head=case.head)


def value_loss(values: Tensor, fields: dict) -> tuple[Tensor, dict]:
    return ((values - fields["weight"]).square() * fields["loss_mask"]).mean(), {}


def train_step(engine: MegatronEngine, step: int) -> dict[str, float]:
    batch = make_batch(step)
    plan = engine.plan(batch.lengths)
    loss_fn = make_loss(len(batch.input_ids))
    if engine.head_kind is Head.VALUES:
        loss_fn = value_loss
    return engine.train_batch(batch.select(plan.sequences), loss_fn, step, plan.micro_batches)


def contents(engine: MegatronEngine) -> dict:
    """Return copies of this rank's weights, and the optimizers' weights and states."""
    contents = {}
    for number, model in enumerate(engine.models):
        for name, parameter in model.named_parameters():
            contents[f"weight {number} {name}"] = parameter.detach().clone()
    for number, optimizer in enumerate(engine.optimizer.chained_optimizers):
        for index, parameter in enumerate(optimizer.get_parameters()):
            tensors = {"weight": parameter, **optimizer.optimizer.state[parameter]}
            for name, tensor in tensors.items():
                contents[f"optimizer {number} {index} {name}"] = tensor.detach().clone()
    return contents


def changed(before: dict, after: dict) -> list[str]:
    """Return the names of what is not in both to the bit."""
    names = before.keys() | after.keys()
    return [
        name
        for name in names
        if name not in before or name not in after or digest(before[name]) != digest(after[name])
    ]


@dataclass(frozen=True)
class Resumed:
    """What one rank knows.

    lost  the names of what differs from the engine that was saved
    steps  the metrics of the steps after the checkpoint: undisturbed, and resumed
    later  what differs after them
    random  the random state that was saved for this rank, and the one that was read
    weights  what the engine exports after loading
    num_collectives  of the group that a save in the background has for itself
    """

    lost: list[str]
    steps: list[list[dict[str, float]]]
    later: list[str]
    random: list[list[int]]
    weights: dict[str, Tensor]
    num_collectives: int


def save_and_resume(case: Case, folder: Path, checkpoint: Path) -> Resumed:
    """Save while training goes on, and resume in a new engine."""
    rank = f"rank_{dist.get_rank()}"
    engine = build(case, folder)
    for step in range(NUM_STEPS):
        train_step(engine, step)
    saved = contents(engine)
    group = dist.new_group(backend="gloo")
    random = torch.tensor([dist.get_rank(), 7])
    states = {"engine": engine.state(), "rng": {rank: random}}
    writing = engine.write(states, checkpoint / "weights", group)
    undisturbed = [train_step(engine, step) for step in (NUM_STEPS, NUM_STEPS + 1)]
    expected = contents(engine)
    writing.result()
    dist.barrier()
    if dist.get_rank() == 0:
        engine.save_config(checkpoint / "hf")
    engine = build(case, folder)
    states = {"engine": engine.state(loading=True), "rng": {rank: torch.zeros_like(random)}}
    states = engine.read(states, checkpoint / "weights")
    engine.load_state(states["engine"])
    loaded = contents(engine)
    exported = dict(engine.export_weights()) | dict(engine.export_adapter())
    weights = {name: weight.clone() for name, weight in exported.items()}
    resumed = [train_step(engine, step) for step in (NUM_STEPS, NUM_STEPS + 1)]
    return Resumed(
        lost=changed(saved, loaded),
        steps=[undisturbed, resumed],
        later=changed(expected, contents(engine)),
        random=[random.tolist(), states["rng"][rank].tolist()],
        weights=weights,
        num_collectives=group._get_sequence_number_for_group(),
    )


@pytest.mark.parametrize(
    "case", slow_unless_quick(CASES, lambda case: case.is_quick, lambda case: id_of(case.name))
)
def test_a_new_engine_goes_on_where_the_saved_one_was(models, tmp_path, case):
    """The save is of its moment, although training goes on while files are written."""
    checkpoint = tmp_path / "checkpoint"
    ranks = on_ranks(case.num_ranks, tmp_path, save_and_resume, case, models, checkpoint)
    for rank in ranks:
        assert rank.lost == []
        assert rank.random[0] == rank.random[1]
        undisturbed, resumed = rank.steps
        assert resumed == undisturbed
        assert rank.later == []
        assert rank.num_collectives > 0, "training has the other groups at the same time"
    has_adapters = LORA in case.settings
    stored = dict(hf_weights(checkpoint, case.head, has_adapters))
    expected = ranks[0].weights
    if case.head is Head.VALUES:
        assert torch.equal(stored.pop("output_layer.weight"), expected["lm_head.weight"])
    if has_adapters:
        expected = {name: x for name, x in expected.items() if ".lora_" in name}
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_save_in_the_background_has_a_copy_of_the_tensors():
    weight = torch.ones(3)
    part = ShardedTensor.from_rank_offsets("weight", weight)
    copy_to_host({"engine": [part]})
    weight.zero_()
    assert part.data.tolist() == [1, 1, 1]


def optimizer_after(num_steps: int) -> SimpleNamespace:
    """Return what a MegatronOptimizer holds after so many steps."""
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([weight])
    for _ in range(num_steps):
        weight.grad = torch.ones(3)
        adam.step()
    return SimpleNamespace(optimizer=adam)


def steps_of_rank(*numbers_of_steps: tuple[int, int]) -> float:
    """Return the step that a checkpoint stores. numbers_of_steps: of each rank's two optimizers."""
    optimizers = [optimizer_after(number) for number in numbers_of_steps[dist.get_rank()]]
    return num_steps_of_run(optimizers, torch.device("cpu"))


def test_an_optimizer_without_state_has_taken_no_steps():
    assert get_step(optimizer_after(0)) == 0.0
    assert get_step(optimizer_after(2)) == 2.0


@pytest.mark.parametrize("numbers_of_steps", [((0, 0), (0, 3)), ((3, 0), (0, 0))])
def test_a_checkpoint_stores_the_step_of_a_rank_that_has_something_to_train(
    tmp_path, numbers_of_steps
):
    """Otherwise Adam's bias correction would begin anew if the first pipeline stage is frozen."""
    assert on_ranks(2, tmp_path, steps_of_rank, *numbers_of_steps) == [3.0, 3.0]


def errors_of_other_states(folder: Path) -> list[str]:
    """Return the errors of a state without a weight, and of one with a weight too many."""
    engine = build(Case("one rank", "untied", 1), folder)
    weights = {
        name: x.detach() for name, x in engine.models[0].state_dict().items() if x is not None
    }
    without = {name: x for name, x in weights.items() if name != "decoder.final_layernorm.weight"}
    errors = []
    for other in (without, weights | {"more.weight": torch.ones(1)}):
        with pytest.raises(AssertionError) as raised:
            engine.load_state({"model": other})
        errors.append(str(raised.value))
    return errors


def test_a_state_of_other_weights_is_not_loaded(models, tmp_path):
    (errors,) = on_ranks(1, tmp_path, errors_of_other_states, models)
    assert errors == ["['decoder.final_layernorm.weight']", "['more.weight']"]


# -- mbridge ---------------------------------------------------------------------------------------


def trained_with(bridge: str, case: Case, folder: Path) -> dict[str, str]:
    """Return digests of what an engine exports before a step, and after it."""
    engine = build(replace(case, settings=(*case.settings, f"engine.bridge={bridge}")), folder)
    before = {name: digest(x) for name, x in named_exports(engine)}
    train_step(engine, 0)
    after = {f"{name} after": digest(x) for name, x in named_exports(engine)}
    return before | after


def named_exports(engine: MegatronEngine) -> Iterator[tuple[str, dict]]:
    for name, tensor in (*engine.export_weights(), *engine.export_adapter()):
        yield name, {"tensor": tensor}


def trained_with_both(case: Case, folder: Path) -> list[dict[str, str]]:
    return [trained_with(bridge, case, folder) for bridge in ("own", "mbridge")]


BRIDGED = [
    Case("adapters", "tied", 2, (LORA, TP2)),
    Case("a critic", "tied", 2, (TP2,), Head.VALUES),
    Case("stages", "untied", 2, (PP2,)),
]


@pytest.mark.slow  # the import of mbridge alone takes seconds
@pytest.mark.parametrize("case", BRIDGED, ids=lambda case: id_of(case.name))
def test_an_engine_trains_the_same_with_mbridge(models, tmp_path, case):
    """The adapters of fused projections, too."""
    for own, theirs in on_ranks(2, tmp_path, trained_with_both, case, models):
        assert own == theirs
        assert any(own[name] != own[f"{name} after"] for name in own if f"{name} after" in own)
