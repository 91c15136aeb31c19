"""When vLLM may sleep, wake, be updated and generate, with a vLLM that has no model."""

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch

from rollout.vllm.engine import Rollout
from tests.rollout.scripted_vllm import ScriptedRollout
from tests.support.samples import configure

pytestmark = pytest.mark.usefixtures("process_group")


class RecordingMemory:
    """Records what is freed and restored."""

    def __init__(self):
        self.calls = []

    def free(self, keep_weights: bool) -> None:
        self.calls.append(("free", keep_weights))

    def restore(self, part: str, are_weights_valid: bool) -> None:
        self.calls.append(("restore", part, are_weights_valid))

    def forget_host_copies(self) -> None:
        self.calls.append(("forget",))


def make_rollout(with_adapter: bool = False) -> Rollout:
    """Return a rollout that sleeps, before its first update."""
    rollout = ScriptedRollout()
    rollout.memory = RecordingMemory()
    rollout.shared_weights = None
    rollout.asleep_gib = []
    rollout.loaded = []
    rollout.sync = SimpleNamespace(load=rollout.loaded.append)
    rollout.adapter = None
    if with_adapter:
        rollout.adapter = SimpleNamespace(update=rollout.loaded.append)
        rollout.needed = {"base", "adapter"}
    rollout.llm.reset_prefix_cache = lambda: rollout.loaded.append("no cached prompts")
    rollout.valid = set()
    rollout.awake = set()
    return rollout


def generate(rollout: Rollout) -> None:
    rollout.generate([[1, 2]], [3], configure("rollout.max_tokens=2").rollout)


CALLS = {
    "wake weights": lambda rollout: rollout.wake("weights"),
    "wake cache": lambda rollout: rollout.wake("kv_cache"),
    "update": lambda rollout: rollout.update_weights("weights"),
    "update adapter": lambda rollout: rollout.update_adapter({"a": 1}.items()),
    "sleep": lambda rollout: rollout.sleep(),
    "generate": generate,
    "log_probs": lambda rollout: rollout.log_probs(None, 1.0),
}
ROUND = ["wake weights", "update", "wake cache"]
WITH_ADAPTER = ["wake weights", "update", "update adapter", "wake cache"]


def call_all(rollout: Rollout, names: list[str]) -> None:
    for name in names:
        CALLS[name](rollout)


def test_a_round_of_all_weights():
    rollout = make_rollout()
    for _ in range(2):
        call_all(rollout, [*ROUND, "generate"])
        assert rollout.sleep() == {"rollout/closed_batch": 0.0}
        assert not rollout.has_base, "the trainer is about to change them"
    assert rollout.loaded == ["weights"] * 2
    of_round = [
        ("restore", "weights", False),
        ("forget",),
        ("restore", "kv_cache", True),
        ("free", False),
    ]
    assert rollout.memory.calls == 2 * of_round


def test_a_base_stays_valid_beside_its_adapter():
    rollout = make_rollout(with_adapter=True)
    call_all(rollout, [*WITH_ADAPTER, "generate", "sleep"])
    assert rollout.has_base
    assert not rollout.is_current
    call_all(rollout, ["wake weights", "update adapter", "wake cache", "generate", "sleep"])
    adapter = [{"a": 1}, "no cached prompts"]
    assert rollout.loaded == ["weights", *adapter, *adapter]
    assert rollout.memory.calls == [
        ("restore", "weights", False),
        ("forget",),
        ("restore", "kv_cache", True),
        ("free", True),
        ("restore", "weights", True),
        ("restore", "kv_cache", True),
        ("free", True),
    ]


def test_what_is_awake_is_not_restored_and_what_sleeps_is_not_freed():
    rollout = make_rollout()
    call_all(rollout, ["sleep", "wake weights", "wake weights", "update", "wake cache"])
    call_all(rollout, ["wake cache", "sleep", "sleep"])
    names = [name for name, *_ in rollout.memory.calls]
    assert names == ["restore", "forget", "restore", "free"]


@pytest.mark.parametrize(
    "calls, message",
    [
        (["generate"], r"generate\(\) with nothing awake and base not valid: call wake"),
        (["wake weights", "update", "generate"], "with weights awake and weights valid"),
        ([*ROUND, "sleep", "wake weights", "generate"], "with weights awake and base not valid"),
        ([*ROUND, "sleep", "log_probs"], r"log_probs\(\) with nothing awake"),
        (["wake cache"], r"wake\('kv_cache'\) before the weights were updated"),
        (["wake weights", "wake cache"], r"wake\('kv_cache'\) before the weights were updated"),
        ([*ROUND, "sleep", "wake cache"], r"wake\('kv_cache'\) before the weights were updated"),
        (["update"], r"update_weights\(\) while the weights are asleep"),
        ([*ROUND, "sleep", "update"], r"update_weights\(\) while the weights are asleep"),
    ],
)
def test_calls_in_another_order(calls, message):
    rollout = make_rollout()
    call_all(rollout, calls[:-1])
    with pytest.raises(RuntimeError, match=message):
        CALLS[calls[-1]](rollout)


@pytest.mark.parametrize(
    "calls, message",
    [
        (["wake weights", "update adapter"], r"update_adapter\(\) without a valid base"),
        ([*WITH_ADAPTER, "sleep", "update adapter"], r"update_adapter\(\) without a valid base"),
        (["wake weights", "update", "wake cache"], r"wake\('kv_cache'\) before the weights"),
        (
            [*WITH_ADAPTER, "update", "generate"],
            "with kv_cache and weights awake and adapter not valid",
        ),
    ],
)
def test_calls_in_another_order_with_an_adapter(calls, message):
    rollout = make_rollout(with_adapter=True)
    call_all(rollout, calls[:-1])
    with pytest.raises(RuntimeError, match=message):
        CALLS[calls[-1]](rollout)


def test_an_unknown_part_and_shared_weights_are_errors():
    rollout = make_rollout()
    with pytest.raises(RuntimeError, match="wake.'cache'.: the part must be"):
        rollout.wake("cache")
    rollout.shared_weights = {}
    rollout.wake("weights")
    with pytest.raises(RuntimeError, match="vLLM and the trainer share the weights: do not call"):
        rollout.update_weights("weights")


class Slots:
    """Counts the memory of routes: allocate() adds 1, and free() takes it away."""

    num_allocated = 0

    def allocate(self) -> None:
        self.num_allocated += 1

    def free(self) -> None:
        self.num_allocated = 0


def test_memory_for_routes_comes_and_goes_with_the_cache():
    rollout = make_rollout()
    rollout.recorder = SimpleNamespace(slot_routes=Slots())
    sizes = []
    for name in [*ROUND, "sleep"]:
        CALLS[name](rollout)
        sizes.append(rollout.recorder.slot_routes.num_allocated)
    assert sizes == [0, 0, 1, 0]


@pytest.mark.parametrize("growth, is_reported", [(0.9, False), (1.1, True)])
def test_memory_that_grows_from_sleep_to_sleep_is_reported(monkeypatch, growth, is_reported):
    """The first two rounds still allocate buffers, so the third one counts."""
    before_and_after = [(2.0, 1.0), (5.0, 4.0), (9.0, 7.0), (9.5, 7.0 + growth)]
    in_use = itertools.chain(*before_and_after)
    monkeypatch.setattr("rollout.vllm.engine.used_gib", lambda device: next(in_use))
    rollout = make_rollout()
    for before, after in before_and_after[:3]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            metrics = rollout.sleep()
        assert metrics["perf/memory_awake_gib"] == before
        assert metrics["perf/memory_asleep_gib"] == after
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rollout.sleep()
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == is_reported
    for message in messages:
        assert message == (
            "8.1 GiB are in use on the device while vLLM sleeps, up from 7.0 GiB in round 3"
        )


def test_vllm_is_awake_when_it_is_shut_down():
    rollout = make_rollout()
    core = rollout.llm.llm_engine.engine_core.engine_core
    rollout.llm.llm_engine.engine_core.shutdown = lambda: rollout.memory.calls.append("end")
    assert not core.batch_queue
    rollout.wake("weights")
    rollout.memory.calls.clear()
    rollout.shutdown()
    assert rollout.memory.calls == [("restore", "kv_cache", False), "end"]


@pytest.mark.parametrize(
    "tp_size, expected", [(1, " (vLLM 1 of 4)"), (2, " (vLLM 1 of 2)"), (4, "")]
)
def test_the_line_of_progress_tells_of_how_many_replicas(monkeypatch, tp_size, expected):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    rollout = ScriptedRollout(tp_size=tp_size)
    assert rollout.progress_label == expected
    assert (rollout.replica, rollout.tp_rank) == divmod(3, tp_size)
    assert rollout.coordinates() == {
        "dp": [rollout.replica, 4 // tp_size],
        "cp": [0, 1],
        "tp": [rollout.tp_rank, tp_size],
        "pp": [0, 1],
        "first_layers": [0],
    }


def fail(weights) -> None:
    raise ValueError("a broken connection")


@pytest.mark.parametrize("call", ["update", "update adapter"])
def test_weights_of_an_update_that_fails_are_not_valid(call):
    """Some of them may have been copied."""
    rollout = make_rollout(with_adapter=True)
    call_all(rollout, WITH_ADAPTER)
    rollout.sync.load = fail
    rollout.adapter.update = fail
    with pytest.raises(ValueError, match="broken connection"):
        CALLS[call](rollout)
    assert not rollout.is_current
    assert rollout.has_base == (call == "update adapter")
