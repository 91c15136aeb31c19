"""How the experts that vLLM's routers choose become those of a request, without a model."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from config import InputError
from engines.model.routes import no_route
from rollout.vllm.routing import RouteRecorder
from tests.support.models import make_model
from tests.support.samples import configure

NUM_LAYERS = 3
TOP_K = 3
NUM_EXPERTS = 8
BLOCK = 4  # tokens
NUM_BLOCKS = 6
LAYER = "layer"
MISSING = no_route(torch.uint8)
FREE = "_free_blocks"  # vLLM's method that frees the blocks of a request


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "moe"
    make_model(path, "qwen3_moe")
    return configure("rollout.routing_replay=true", path=path)


def make_slots(num_layers: int = NUM_LAYERS):
    """Return the experts of the KV cache's slots, and the routers of the layers."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from rollout.vllm.routing_worker import SlotRoutes

    routers = [FusedTopKRouter(TOP_K, NUM_EXPERTS) for _ in range(num_layers)]
    layers = [nn.Identity() for _ in routers]
    for layer, router in zip(layers, routers):
        layer.router = router
    other = SimpleNamespace(kv_cache_spec=None, layer_names=["other"])
    spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    groups = [other, SimpleNamespace(kv_cache_spec=spec, layer_names=[LAYER])]
    cache = SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS)
    # A wrapper of a layer has the same router.
    model = nn.ModuleList([*layers, *layers[:1]])
    return SlotRoutes(model, cache, 16, torch.device("cpu")), routers


def experts_of(tokens: list[int], layer: int) -> torch.Tensor:
    """Return the choices of a layer: number of the token plus number of the layer, three times."""
    return (torch.tensor(tokens)[:, None] + layer).expand(-1, TOP_K) % NUM_EXPERTS


def run_step(slots, routers, tokens: list[int], slot_of_token: list[int], name: str) -> None:
    """Compute a step with some tokens and two padding ones."""
    for layer, router in enumerate(routers):
        router.capture_fn(experts_of([*tokens, 7, 7], layer))
    mapping = {LAYER: torch.tensor([*slot_of_token, -1, -1])}
    slots.record(SimpleNamespace(**{name: mapping}))


class Scheduler:
    """vLLM's scheduler, as far as blocks are concerned."""

    def __init__(self, blocks: dict[str, list[int]]):
        self.kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: ([], blocks[name]))
        self.freed = []
        setattr(self, FREE, lambda request: self.freed.append(request.request_id))

    def end(self, name: str) -> None:
        getattr(self, FREE)(SimpleNamespace(request_id=name))


def make_recorder(config, slots, blocks: dict[str, list[int]]) -> tuple[RouteRecorder, Scheduler]:
    scheduler = Scheduler(blocks)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    llm = SimpleNamespace(
        collective_rpc=lambda function: [function(SimpleNamespace(slot_routes=slots))],
        llm_engine=SimpleNamespace(engine_core=core),
    )
    return RouteRecorder(llm, config), scheduler


@pytest.mark.parametrize("name", ["slot_mappings", "slot_mappings_by_layer"])
def test_a_request_has_the_experts_of_its_blocks(config, name):
    """Its tokens are computed in two steps, beside those of another request."""
    slots, routers = make_slots()
    recorder, scheduler = make_recorder(config, slots, {"a": [3, 1], "b": [2]})
    run_step(slots, routers, [1, 2, 3, 4, 5, 6], [12, 13, 14, 8, 9, 10], name)
    run_step(slots, routers, [0, 1], [15, 4], name)
    slots.record(None)
    slots.record(SimpleNamespace(**{name: None}))
    scheduler.end("a")
    scheduler.end("b")
    assert scheduler.freed == ["a", "b"]
    routes = recorder.take("a", 6)
    assert routes.dtype == np.uint8
    for layer in range(NUM_LAYERS):
        expected = experts_of([1, 2, 3, 0, 1], layer).tolist()
        assert routes[:, layer].tolist() == [*expected, [MISSING] * TOP_K], "the last was not read"
    assert not (recorder.take("b", 4)[:3] == MISSING).any()
    assert (recorder.take("b", 4) == MISSING).all(), "taken already"


def test_requests_that_were_aborted_early_lack_experts(config):
    slots, routers = make_slots()
    recorder, scheduler = make_recorder(config, slots, {"a": [3], "b": [2]})
    run_step(slots, routers, [1, 2], [12, 13], "slot_mappings")
    scheduler.end("a")
    routes = recorder.take_all(["never begun", "a"], np.array([2, 3]))
    assert (routes[:2] == MISSING).all()
    assert routes[2:, 0, 0].tolist() == [1, 2, MISSING]
    joined = recorder.join([routes[:1], routes[2:]])
    assert joined[:, 0, 0].tolist() == [MISSING, 1, 2, MISSING]
    nothing = recorder.join([])
    assert nothing.shape == (0, NUM_LAYERS, TOP_K)
    assert nothing.dtype == np.uint8
    scheduler.end("a")
    recorder.forget()
    assert (recorder.take("a", 3) == MISSING).all()


def test_choices_that_no_router_has_made_are_an_error(config):
    slots, routers = make_slots()
    recorder, scheduler = make_recorder(config, slots, {"a": [3]})
    run_step(slots, routers[:2], [1, 2], [12, 13], "slot_mappings")
    scheduler.end("a")
    with pytest.raises(InputError, match="in a kernel, without its routers"):
        recorder.take("a", 3)


def test_slots_are_empty_after_a_sleep():
    slots, routers = make_slots()
    run_step(slots, routers, [1], [0], "slot_mappings")
    held = slots.slots
    slots.allocate()
    assert slots.slots is held, "allocated already"
    slots.free()
    assert slots.slots is None
    run_step(slots, routers, [1], [0], "slot_mappings")
    slots.allocate()
    assert len(slots.slots) == NUM_BLOCKS * BLOCK + 1, "one more for padding"
    assert (slots.slots == MISSING).all()


def test_models_that_cannot_be_recorded(config):
    with pytest.raises(InputError, match="ModuleList has no router whose choices can be recorded"):
        make_slots(num_layers=0)
    slots, _ = make_slots(num_layers=2)
    with pytest.raises(InputError, match="chooses 3 experts in 2 layers"):
        make_recorder(config, slots, {})
