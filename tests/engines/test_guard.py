"""The guard's two comparisons, with layers and an engine that fit on a page."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from config import InputError
from data.batching.batch import Batch
from engines.adapter_guard import AdapterGuard
from engines.heads import LogProbHead, ValueHead
from engines.model import guard

pytestmark = pytest.mark.usefixtures("process_group")

VOCABULARY = 97
WIDTH = 8


class RunningMean(nn.Module):
    """A layer in which every token sees the ones before it in its row."""

    def __init__(self, leaks: bool):
        super().__init__()
        self.leaks = leaks

    def forward(self, hidden: Tensor, starts: list[int]) -> Tensor:
        """hidden [T, WIDTH]; starts: where sequences begin, which a leaking layer ignores."""
        borders = [0] if self.leaks else starts
        sequences = hidden.tensor_split(borders[1:])
        return hidden + torch.cat([self.mean(sequence) for sequence in sequences])

    def mean(self, sequence: Tensor) -> Tensor:
        counts = torch.arange(1, len(sequence) + 1)[:, None]
        return sequence.cumsum(0) / counts


class StubEngine:
    """An engine of one rank that packs sequences."""

    dp_size = 1
    cp_groups = {1: None}
    compute_dtype = torch.float32
    device = torch.device("cpu")
    processor = None

    def __init__(self, leaking_layer: int | None, num_layers: int = 4):
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, WIDTH)
        self.stack = [RunningMean(leaks=number == leaking_layer) for number in range(num_layers)]
        self.head = LogProbHead(1.0, 16, False, VOCABULARY)
        text_config = SimpleNamespace(num_hidden_layers=num_layers, to_dict=dict)
        self.hf_config = SimpleNamespace(vocab_size=VOCABULARY, get_text_config=lambda: text_config)
        engine = {"context_parallel_size": 1, "use_remove_padding": True}
        self.config = OmegaConf.create(
            {"model": {"path": "stub"}, "model_engine": "fsdp", "engine": engine}
        )

    def layers(self) -> list[list[tuple[int, nn.Module]]]:
        return [list(enumerate(self.stack))]

    def modules(self) -> list[nn.Module]:
        return self.stack

    def offload(self) -> None:
        pass

    @contextmanager
    def padded(self):
        yield

    def outputs(self, input_ids: Tensor, starts: list[int]) -> Tensor:
        hidden = self.embedding[input_ids]
        for layer in self.stack:
            hidden = layer(hidden, starts)
        outputs = torch.zeros(3, len(input_ids))
        outputs[:2] = hidden[:, :2].T
        return outputs

    def head_outputs(self, batch: Batch, micro_batches: list) -> Tensor:
        return self.outputs(batch.input_ids, batch.cu_seqlens[:-1].tolist())

    def head_outputs_one_by_one(self, batch: Batch) -> Tensor:
        sequences = batch.input_ids.split(batch.lengths)
        return torch.cat([self.outputs(sequence, [0]) for sequence in sequences], dim=1)


def test_layers_that_keep_sequences_apart_pass():
    difference, bound = guard.check_isolation(StubEngine(leaking_layer=None))
    assert difference <= bound
    assert bound == pytest.approx(guard.MIN_BOUND)


@pytest.mark.parametrize("number", range(4))
def test_the_first_leaking_layer_is_named(number):
    with pytest.raises(InputError, match=f"differ by .*, first in layer {number} of 0 to 3"):
        guard.check_isolation(StubEngine(leaking_layer=number))


class TwoModules(StubEngine):
    """An engine with two virtual pipeline stages."""

    def layers(self) -> list[list[tuple[int, nn.Module]]]:
        layers = list(enumerate(self.stack))
        return [layers[:2], layers[2:]]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_leaking_layer_of_any_module_is_named(number):
    with pytest.raises(InputError, match=f"differ by .*, first in layer {number} of 0 to 3"):
        guard.check_isolation(TwoModules(leaking_layer=number))


@pytest.mark.parametrize("size, shared_by", [(1, 1), (2, 2), (8, 4)])
def test_a_micro_batch_is_shared_by_at_most_the_largest_group(size, shared_by):
    engine = StubEngine(leaking_layer=None)
    engine.cp_groups = {1: None, 2: None, 4: None}
    plans = []
    engine.head_outputs = lambda batch, plan: plans.append(plan) or torch.zeros(3, 4)
    batch = guard.make_batches(engine).three_sequences
    assert guard.outputs_together(engine, batch, size).shape == (2, 4)
    assert plans == [[(shared_by, [0, 1, 2])]]


class LeaksInGroupsOf(StubEngine):
    """Layer 1 mixes sequences only if a micro-batch is shared by this many ranks."""

    dp_size = 4
    cp_groups = {1: None, 2: None, 4: None}

    def __init__(self, leaking_size: int):
        super().__init__(leaking_layer=None)
        self.leaking_size = leaking_size
        self.config.engine.context_parallel_size = "auto"

    def head_outputs(self, batch: Batch, micro_batches: list) -> Tensor:
        ((size, _),) = micro_batches
        self.stack[1].leaks = size == self.leaking_size
        return super().head_outputs(batch, micro_batches)

    def head_outputs_one_by_one(self, batch: Batch) -> Tensor:
        self.stack[1].leaks = False
        return super().head_outputs_one_by_one(batch)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_leak_in_groups_of_any_size_is_found(size):
    """With dynamic context parallelism, micro-batches are shared by 1, 2 or 4 of 4 ranks."""
    with pytest.raises(InputError) as error:
        guard.check_isolation(LeaksInGroupsOf(size))
    message = str(error.value)
    assert "the outputs of packed and shared sequences" in message
    assert "first in layer 1 of 0 to 3" in message
    assert message.endswith(": set engine.context_parallel_size=1")


class LeaksOnlyPacked(StubEngine):
    """Keeps sequences apart if each has a row of its own."""

    @contextmanager
    def padded(self):
        self.stack[1].leaks = False
        yield
        self.stack[1].leaks = True


class LeakingEmbedding(StubEngine):
    def outputs(self, input_ids: Tensor, starts: list[int]) -> Tensor:
        mixed = RunningMean(leaks=True)(self.embedding[input_ids], starts)
        return mixed[:, :3].T


@pytest.mark.parametrize(
    "engine_class, place, advice",
    [
        (LeaksOnlyPacked, "in layer 1 of 0 to 3", "set engine.use_remove_padding=false"),
        (StubEngine, "in layer 1 of 0 to 3", "model_engine=fsdp cannot train this model"),
        (LeakingEmbedding, "in the embedding", "model_engine=fsdp cannot train this model"),
    ],
)
def test_the_error_advises_padding_only_if_it_helps(engine_class, place, advice):
    with pytest.raises(InputError) as error:
        guard.check_isolation(engine_class(leaking_layer=1))
    message = str(error.value)
    assert "the outputs of packed sequences" in message
    assert f"first {place}, but" in message
    assert message.endswith(f": {advice}")


class RoundsToBfloat16(StubEngine):
    """Sequences that are computed together differ by some rounding errors of bfloat16."""

    def head_outputs(self, batch: Batch, micro_batches: list) -> Tensor:
        error = 2 * torch.finfo(torch.bfloat16).eps
        return super().head_outputs(batch, micro_batches) * (1 + error)


def test_differences_that_rounding_explains_are_accepted():
    engine = RoundsToBfloat16(leaking_layer=None)
    engine.compute_dtype = torch.bfloat16
    difference, bound = guard.check_isolation(engine)
    assert difference > bound / guard.MARGIN
    engine.compute_dtype = torch.float32
    with pytest.raises(InputError, match="but rounding explains at most"):
        guard.check_isolation(engine)


def test_a_leak_of_something_that_an_earlier_layer_wrote_is_found():
    """Layers that all read the input of the first one do not show it."""
    engine = StubEngine(leaking_layer=None)
    engine.embedding[:, -1] = 0

    def write(hidden: Tensor, starts: list[int]) -> Tensor:
        return torch.cat([hidden[:, :-1], hidden[:, :1]], dim=1)

    def leak(hidden: Tensor, starts: list[int]) -> Tensor:
        return hidden + hidden[:, -1:].cumsum(0)

    engine.stack[0].forward = write
    engine.stack[2].forward = leak
    with pytest.raises(InputError, match="first in layer 2 of 0 to 3"):
        guard.check_isolation(engine)


def test_groups_of_dynamic_context_parallelism_have_powers_of_two():
    engine = LeaksInGroupsOf(8)
    for dp_size, sizes in ((1, [1]), (3, [1, 2]), (4, [1, 2, 4])):
        engine.dp_size = dp_size
        assert guard.group_sizes(engine) == sizes


def test_hooks_are_removed_after_an_error():
    engine = StubEngine(leaking_layer=1)
    with pytest.raises(InputError):
        guard.check_isolation(engine)
    for layer in engine.stack:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks


class ZeroValues(StubEngine):
    """Has a value head that is still zero, and a layer with stacked experts."""

    def __init__(self, leaking_layer: int | None):
        super().__init__(leaking_layer)
        self.head = ValueHead()
        self.stack[0].experts = Experts()
        self.is_offloaded = False

    def modules(self) -> list[nn.Module]:
        return [nn.ModuleList(self.stack)]

    def offload(self) -> None:
        self.is_offloaded = True

    def outputs(self, input_ids: Tensor, starts: list[int]) -> Tensor:
        hidden = self.embedding[input_ids]
        for layer in self.stack:
            hidden = layer(hidden, starts)
        return self.head(hidden, torch.zeros(1, WIDTH), input_ids, input_ids)[0][None]


class Experts(nn.Module):
    """Returns its arguments."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 2, 2))

    def forward(self, *arguments):
        return arguments


def test_a_value_head_that_is_zero_hides_no_leak():
    with pytest.raises(InputError, match="first in layer 2 of 0 to 3"):
        guard.check_isolation(ZeroValues(leaking_layer=2))
    engine = ZeroValues(leaking_layer=None)
    guard.check_isolation(engine)
    assert engine.is_offloaded
    assert not engine.outputs(torch.arange(3), [0]).any(), "it is zero again"


def test_while_layers_are_compared_all_tokens_go_to_the_same_experts():
    engine = ZeroValues(leaking_layer=None)
    experts = engine.stack[0].experts
    hidden = torch.tensor([[3.0, 1.0, 4.0], [1.0, 5.0, 9.0], [2.0, 6.0, 5.0]])
    chosen = torch.tensor([[2, 3], [1, 0], [3, 1]])
    weights = torch.tensor([[0.2, 0.8], [0.7, 0.3], [0.5, 0.5]])
    with guard.fixed_head_and_routing(engine):
        same_hidden, first, by_size = experts(hidden, chosen, weights)
    assert torch.equal(same_hidden, hidden)
    assert first.tolist() == [[0, 1]] * 3
    torch.testing.assert_close(by_size, torch.tensor([[0.8, 0.2], [0.7, 0.3], [0.5, 0.5]]))
    assert torch.equal(experts(hidden, chosen, weights)[1], chosen)


def test_a_model_that_sees_no_earlier_token_is_reported(capsys):
    engine = StubEngine(leaking_layer=None, num_layers=1)
    engine.stack[0].forward = lambda hidden, starts: hidden
    guard.check_isolation(engine)
    assert "impossible to check whether the model keeps sequences apart" in capsys.readouterr().out


def test_infinite_outputs_are_an_error():
    engine = StubEngine(leaking_layer=None)
    engine.embedding[:] = torch.inf
    with pytest.raises(InputError, match="not finite"):
        guard.check_isolation(engine)


def after_a_pass_without_trained_tokens() -> AdapterGuard:
    """Return the guard of a rank whose own loss has no gradient."""
    adapters = AdapterGuard(torch.device("cpu"), is_active=True)
    loss_fn = adapters.watch(lambda outputs: (outputs * 0).sum())
    loss_fn(torch.ones(3, requires_grad=True)).backward()
    return adapters


def test_adapters_are_watched_until_one_step_has_a_gradient():
    adapters = after_a_pass_without_trained_tokens()
    adapters.check(0.0)
    assert adapters.is_active
    adapters.check(1.0)
    assert not adapters.is_active


def test_independent_layers_read_the_first_input():
    """Layers that each double their input make 1 + 1 + 1 of 1, not 8."""
    engine = StubEngine(leaking_layer=None, num_layers=2)
    for layer in engine.stack:
        layer.forward = lambda hidden, starts: 2 * hidden

    def run() -> Tensor:
        hidden = torch.ones(1, WIDTH)
        for layer in engine.stack:
            hidden = layer(hidden, [0])
        return hidden

    with guard.changed_layers(engine, guard.keep_output, independent=True):
        assert torch.equal(run(), torch.full((1, WIDTH), 3.0))
    with guard.changed_layers(engine, guard.keep_output, independent=False):
        assert torch.equal(run(), torch.full((1, WIDTH), 4.0))
