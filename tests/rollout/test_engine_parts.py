"""Parts of Rollout that need no vLLM, or only one class of it."""

import json
import warnings
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from config import InputError, load
from engines.model.routes import no_route
from rollout.vllm.continuing import RandomStreams
from rollout.vllm.device_memory import PARTS, CpuMemory, OwnMemory, SharedMemory
from rollout.vllm.engine import MAX_GROWTH_GIB, Rollout
from rollout.vllm.routing import WORKER, KeptRoutes, RouteRecorder
from rollout.vllm.weight_sync import WeightSync
from tests.support.models import make_image_model, make_model
from tests.support.ranks import on_ranks

VOCAB_SIZE = 50


def unstarted(**attributes) -> Rollout:
    rollout = Rollout.__new__(Rollout)
    vars(rollout).update(attributes)
    return rollout


def coordinates_on_rank(tp_size: int) -> list:
    rollout = unstarted()
    rollout._set_coordinates(tp_size)
    return [rollout.coordinates()["dp"], rollout.coordinates()["tp"], rollout.progress_label]


def test_ranks_of_a_replica_are_consecutive(tmp_path):
    """Two replicas of two ranks each; one alone is not numbered in the line of progress."""
    label = " (vLLM 1 of 2)"
    assert on_ranks(4, tmp_path, coordinates_on_rank, 2) == [
        [[0, 2], [0, 2], label],
        [[0, 2], [1, 2], label],
        [[1, 2], [0, 2], label],
        [[1, 2], [1, 2], label],
    ]
    assert unstarted(num_replicas=1).progress_label == ""


@pytest.mark.parametrize(
    "awake, valid, needed, state",
    [
        ([], ["base"], ["base"], "nothing awake and weights valid"),
        (["weights"], [], ["base"], "weights awake and base not valid"),
        (["weights"], ["base"], ["base"], "weights awake and weights valid"),
        (PARTS, ["base"], ["base", "adapter"], "kv_cache and weights awake and adapter not valid"),
        (PARTS, [], ["base", "adapter"], "kv_cache and weights awake and adapter and base not"),
    ],
)
def test_vllm_computes_nothing_without_memory_or_with_old_weights(awake, valid, needed, state):
    rollout = unstarted(awake=set(awake), valid=set(valid), needed=set(needed))
    for name, arguments in (("generate", ([], [], None)), ("log_probs", (None, 1.0))):
        with pytest.raises(RuntimeError) as error:
            getattr(rollout, name)(*arguments)
        assert str(error.value).startswith(f"{name}() with {state}")


def test_weights_that_cannot_be_written_are_not_sent():
    """vLLM would write to memory that it has freed, or over weights that the trainer uses."""
    asleep = unstarted(awake={"kv_cache"}, valid={"base"}, shared_weights=None, adapter=None)
    with pytest.raises(RuntimeError, match="update_weights\\(\\) while the weights are asleep"):
        asleep.update_weights([])
    with pytest.raises(RuntimeError, match="update_adapter\\(\\) without a valid base"):
        asleep.update_adapter([])
    without_base = unstarted(awake={"weights"}, valid=set(), shared_weights={})
    with pytest.raises(RuntimeError, match="update_adapter\\(\\) without a valid base"):
        without_base.update_adapter([])
    with pytest.raises(RuntimeError, match="update_weights.* share the weights: do not call it"):
        without_base.update_weights([])


@pytest.mark.parametrize("growth, is_warned", [(0.9, False), (1.1, True)])
def test_memory_that_grows_while_vllm_sleeps_is_reported(growth, is_warned):
    """It may grow in the first two rounds, and shrink; the third round is compared with."""
    rollout = unstarted(asleep_gib=[])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for gib in (5.0, 20.0, 30.0, 28.0, 30.9):
            rollout._check_growth(gib)
        assert not caught
        rollout._check_growth(30.0 + growth * MAX_GROWTH_GIB)
    messages = [str(warning.message) for warning in caught]
    expected = "31.1 GiB are in use on the device while vLLM sleeps, up from 30.0 GiB in round 3"
    assert messages == [expected] * is_warned


@pytest.mark.parametrize(
    "device, drafter, level",
    [("cuda", None, 2), ("cuda", "ngram", 2), ("cuda", "mtp", 1), ("npu", None, 1)],
)
def test_weights_that_no_update_restores_are_kept_in_a_sleep(device, drafter, level):
    """MTP layers have buffers that are not updated, and Ascend supports no other level."""
    attributes = {"shared_weights": None, "llm": None, "adapter": None, "drafter": drafter}
    rollout = unstarted(device=SimpleNamespace(type=device), **attributes)
    memory = rollout._make_memory()
    assert isinstance(memory, OwnMemory)
    assert memory.level == level


def test_memory_follows_who_owns_it():
    on_cpu = unstarted(device=torch.device("cpu"), shared_weights={})
    assert isinstance(on_cpu._make_memory(), CpuMemory)
    shared = unstarted(device=torch.device("cuda"), shared_weights={}, llm=None)
    assert isinstance(shared._make_memory(), SharedMemory)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "setting, shares_base, is_reported",
    [("auto", False, True), ("never", False, False), ("auto", True, False)],
)
def test_a_copy_of_the_base_is_reported_unless_it_was_asked_for(
    tmp_path, capsys, setting, shares_base, is_reported
):
    model = make_model(tmp_path / "model", "qwen3")
    settings = ["data.train_files=unused", "model.lora.rank=4", "rollout.tensor_parallel_size=2"]
    config = load("ppo.yaml", [f"model.path={model}", *settings, f"rollout.share_base={setting}"])
    unstarted(adapter="an adapter")._report_copy_of_base(config, shares_base)
    expected = (
        "rollout.share_base: rollout.tensor_parallel_size=2 divides vLLM's weights, so vLLM has "
        "its own copy of the frozen weights\n"
    )
    assert capsys.readouterr().out == expected * is_reported


def test_a_response_ends_with_the_placeholder_of_an_image(tmp_path):
    """Only with images: a text model may draw any token."""
    model = make_image_model(tmp_path / "model", "qwen2_5_vl")
    keys = [f"model.path={model}", "data.train_files=unused"]
    ends = []
    for images in ("true", "false"):
        rollout = unstarted()
        rollout._set_tokens(load("ppo.yaml", [*keys, f"model.images={images}"]))
        ends.append(rollout.stop_token_ids)
    with_images, of_texts = ends
    placeholders = with_images[len(of_texts) :]
    assert with_images == of_texts + placeholders
    assert len(placeholders) > 0
    hf_config = json.loads((model / "config.json").read_text())
    assert hf_config["image_token_id"] in placeholders


def test_shapes_are_remembered_if_vllm_quantizes_the_weights():
    """Its first update cannot be in place, because it is not known yet where they belong."""
    weights = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4))]
    quantized = WeightSync(None, "cuda", {}, None, None, is_quantized=True)
    assert not quantized.can_load_in_place()
    assert [*quantized.recorded_shapes(iter(weights))] == weights
    assert quantized.shapes == {"a": (2, 3), "b": (4,)}
    plain = WeightSync(None, "cuda", {}, None, None)
    assert plain.can_load_in_place()
    assert [*plain.recorded_shapes(iter(weights))] == weights
    assert plain.shapes == {}


# -- the random numbers of responses that continue ------------------------------------------------


def sampling_metadata(generators: list[torch.Generator]):
    """Return vLLM's SamplingMetadata of requests with these random generators."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    values = {field.name: None for field in fields(SamplingMetadata)}  # they depend on the release
    values |= {
        "temperature": torch.ones(len(generators)),
        "all_greedy": False,
        "all_random": True,
        "generators": dict(enumerate(generators)),
        "no_penalties": True,
        "output_token_ids": [[]] * len(generators),
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**values)


def draw(sampler, logits: torch.Tensor, generators: list[torch.Generator]) -> list[int]:
    """Draw a token for each request, from its row of logits."""
    output = sampler(logits=logits.clone(), sampling_metadata=sampling_metadata(generators))
    return output.sampled_token_ids.flatten().tolist()


def test_a_request_that_continues_draws_the_next_random_numbers_of_its_response():
    """The first request continues after three tokens, the second is new, and the third after one.

    They take other places in vLLM's batch.
    """
    from vllm.v1.sample.sampler import Sampler

    num_drawn = {"a": 3, "b": 0, "c": 1}
    num_new = 2
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    expected = {}
    for seed, (name, num_tokens) in enumerate(num_drawn.items()):
        generator = torch.Generator().manual_seed(seed)
        drawn = [draw(Sampler(), row[None], [generator])[0] for row in logits]
        expected[name] = drawn[num_tokens : num_tokens + num_new]
        assert drawn[:num_new] != drawn[num_tokens : num_tokens + num_new] or num_tokens == 0

    sampler = Sampler()
    order = ["c", "a", "b"]
    runner = SimpleNamespace(sampler=sampler, input_batch=SimpleNamespace(req_ids=order))
    streams = RandomStreams(rollout_of(runner, "cpu"))
    streams.skip(list(num_drawn), list(num_drawn.values()))
    generators = [torch.Generator().manual_seed("abc".index(name)) for name in order]
    drawn = []
    for step in range(num_new):
        rows = torch.stack([logits[num_drawn[name] + step] for name in order])
        drawn.append(draw(sampler, rows, generators))
    assert dict(zip(order, map(list, zip(*drawn)))) == expected


def test_a_request_that_never_drew_a_token_is_forgotten():
    from vllm.v1.sample.sampler import Sampler

    runner = SimpleNamespace(sampler=Sampler(), input_batch=None)
    streams = RandomStreams(rollout_of(runner, "cpu"))
    streams.skip(["aborted"], [3])
    streams.forget()
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    draw(runner.sampler, logits, [torch.Generator()])  # it would look for the request otherwise


def rollout_of(runner, device: str) -> Rollout:
    """Return a Rollout whose vLLM has this V1 model runner."""
    worker = SimpleNamespace(use_v2_model_runner=False, model_runner=runner)
    llm = SimpleNamespace(collective_rpc=lambda function: [function(worker)])
    return unstarted(llm=llm, device=torch.device(device))


def test_the_v1_model_runner_of_a_gpu_cannot_continue():
    with pytest.raises(InputError, match="V1 model runner on cuda: set VLLM_USE_V2_MODEL_RUNNER=1"):
        RandomStreams(rollout_of(None, "cuda"))


# -- recorded experts -----------------------------------------------------------------------------

MISSING = no_route(torch.uint8)


def recorder_with(**kept: list) -> RouteRecorder:
    """Return a recorder that keeps these experts of requests: for two layers, one per token."""
    recorder = RouteRecorder.__new__(RouteRecorder)
    recorder.slot_routes = SimpleNamespace(shape=(2, 1), dtype=torch.uint8)
    recorder.kept = {}
    for name, routes in kept.items():
        tensor = torch.tensor(routes, dtype=torch.uint8)[:, :, None]
        recorder.kept[name] = KeptRoutes(tensor, None)
    return recorder


def test_routes_of_requests_are_laid_end_to_end():
    """Of a block that is not full, further rows are left out. The second request has no record."""
    recorder = recorder_with(a=[[1, 2], [3, 4], [9, 9]], c=[[5, 6]])
    taken = recorder.take_all(["a", "b", "c"], [3, 2, 2])
    missing = [MISSING, MISSING]
    assert taken[:, :, 0].tolist() == [[1, 2], [3, 4], *3 * [missing], [5, 6], missing]
    assert recorder.kept == {}
    recorder = recorder_with(a=[[1, 2], [3, 4]], b=[[5, 6]])
    assert recorder.take("b", 2)[:, :, 0].tolist() == [[5, 6], missing]
    assert [*recorder.kept] == ["a"]


def test_routes_of_no_sequence_have_the_shape_of_others():
    recorder = recorder_with()
    assert recorder.join([]).shape == (0, 2, 1)
    parts = [recorder.take("a", 2), recorder.take("b", 1)]
    assert recorder.join(parts).shape == (3, 2, 1)


def test_a_layer_whose_experts_are_not_recorded_is_an_error():
    """One layer suffices, and only the first token counts: a later one may not have been read."""
    with pytest.raises(InputError, match="chooses experts in a kernel, without its routers"):
        recorder_with(a=[[1, MISSING], [1, 2]]).take("a", 3)
    recorder_with(a=[[1, 2], [MISSING, MISSING]]).take("a", 3)


def test_experts_are_kept_with_the_first_layers_that_keep_all_tokens():
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    from rollout.vllm.routing_worker import full_attention_group

    shape = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    windows = KVCacheGroupSpec(["a"], SlidingWindowSpec(4, sliding_window=8, **shape))
    full = KVCacheGroupSpec(["b"], FullAttentionSpec(4, **shape))
    assert full_attention_group(KVCacheConfig(9, [], [windows, full, full])) == 1
    with pytest.raises(InputError, match="needs a model with full attention in some layer"):
        full_attention_group(KVCacheConfig(9, [], [windows]))


@pytest.fixture(scope="module")
def given():
    from tests.rollout import given_tokens  # imports vLLM, which takes seconds

    return given_tokens


@pytest.fixture
def slot_routes(given):
    """The experts of two layers, one per token, with a cache of three blocks of four slots."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from rollout.vllm.routing_worker import SlotRoutes

    spec = FullAttentionSpec(4, num_kv_heads=1, head_size=32, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(3, [], [KVCacheGroupSpec(["layer"], spec)])
    layers = torch.nn.ModuleList()
    for _ in range(2):
        layer = torch.nn.Module()
        layer.router = given.GivenRouter(1, 8)
        wrapper = torch.nn.Module()
        wrapper.base_layer = layer
        wrapper.router = layer.router
        layers.append(wrapper)
    slot_routes = SlotRoutes(layers, kv_cache_config, 16, torch.device("cpu"))
    slot_routes.layers = layers
    return slot_routes


def record(slot_routes, experts: list[int], slots: list[int]) -> None:
    """Let the routers choose these experts, and ten more in the second layer, and record them."""
    for number, layer in enumerate(slot_routes.layers):
        layer.router.experts = torch.tensor(experts)[:, None] + 10 * number
        layer.router._select_experts(None, None)
    slot_routes.record(SimpleNamespace(slot_mappings={"layer": torch.tensor(slots)}))


def test_the_name_of_the_worker_that_records_experts_is_that_of_a_class():
    from rollout.vllm.routing_worker import RecordingWorker

    assert f"{RecordingWorker.__module__}.{RecordingWorker.__name__}" == WORKER


def test_experts_are_read_in_the_order_of_the_blocks(slot_routes):
    """A layer that is wrapped, as for adapters, counts once."""
    assert slot_routes.shape == (2, 1)
    record(slot_routes, [1, 2, 3, 4, 5, 6], [8, 9, 10, 11, 0, 1])
    record(slot_routes, [7, 0], [2, -1])
    read = slot_routes.read([2, 0])[:, :, 0].tolist()
    missing = [MISSING, MISSING]
    assert read == [[1, 11], [2, 12], [3, 13], [4, 14], [5, 15], [6, 16], [7, 17], missing]


def test_experts_are_kept_while_vllm_is_awake_and_steps_in_a_sleep_leave_none(slot_routes):
    record(slot_routes, [1], [4])
    slot_routes.allocate()
    assert slot_routes.read([1])[0].flatten().tolist() == [1, 11]
    slot_routes.free()
    record(slot_routes, [2], [4])
    slot_routes.allocate()
    assert (slot_routes.read([1]) == MISSING).all()
