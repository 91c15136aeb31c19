"""What a run's settings and its checkpoint make of the roles, with engines that only record."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rl import roles as roles_module
from rollout.partial.groups import Counters, OpenGroup, OpenResponse, to_bytes
from tests.rl.recording import (
    GAE,
    REFERENCE,
    RecordingEngine,
    RecordingRollout,
    make_share,
)
from tests.support.samples import make_samples

PARTIAL = ["rollout.partial.enable=true", "algorithm.rollout_is=token"]


@pytest.mark.parametrize("dtype, must_check", [("fp8", True), ("auto", False)])
def test_a_kv_cache_in_fp8_has_to_be_checked_after_each_start(make_roles, dtype, must_check):
    assert make_roles(6, f"rollout.kv_cache_dtype={dtype}").must_check_kv_cache == must_check


def test_vllm_whose_frozen_weights_the_actor_shares_is_built_before_all_engines(
    make_roles,
    monkeypatch,
):
    asked = []
    built = []

    def build(config, device):
        built.append(RecordingEngine.num_built)
        return SimpleNamespace(shared_weights="weights of vLLM")

    def shares_base(config, world_size):
        asked.append(world_size)
        return True

    monkeypatch.setattr(roles_module, "Rollout", build)
    monkeypatch.setattr(roles_module.adapters, "shares_base", shares_base)
    num_before = RecordingEngine.num_built
    roles = make_roles(6, GAE, REFERENCE)
    assert asked == [1]
    assert built == [num_before], "the device is still empty"
    assert roles.actor.options["shared_weights"] == "weights of vLLM"
    for engine in (roles.critic, roles.reference):
        assert "shared_weights" not in engine.options
    roles.start_rollout()
    assert built == [num_before], "it is built once"


def test_without_shared_weights_the_actor_reads_its_own(make_roles):
    roles = make_roles(6)
    assert roles.rollout is None
    assert roles.actor.options["shared_weights"] is None


def test_only_an_adapter_is_probed(make_roles, monkeypatch):
    monkeypatch.setattr(roles_module.probe, "Probe", lambda config: ("probe", config.model.path))
    assert make_roles(6).probe is None
    settings = ["model.lora.rank=4", "rollout.share_base=never"]
    assert make_roles(6, *settings).probe == ("probe", "unused")


def test_engines_are_built_in_the_order_of_their_roles(make_roles, monkeypatch):
    """Each with the path of its role, and teachers in the order of their names."""
    monkeypatch.setattr(roles_module, "RewardModel", lambda config, engine, offloaded: engine)
    teachers = ["algorithm.distill.teachers={b: wise, a: old}"]
    paths = ["critic.path=judge", "reference.path=base", "reward.model.path=scorer"]
    roles = make_roles(6, GAE, REFERENCE, *teachers, *paths)
    engines = [roles.actor, roles.critic, roles.reference, *roles.teachers.engines]
    engines.append(roles.reward_model)
    expected = ["unused", "judge", "base", "wise", "old", "scorer"]
    assert [engine.config.model.path for engine in engines] == expected
    numbers = [engine.number for engine in engines]
    assert numbers == list(range(numbers[0], numbers[0] + 6))
    assert not any(engine.options["optimize"] for engine in engines[2:])


def test_teachers_leave_the_device_as_the_reference_does(make_roles):
    """Also those that are kept on the device while trained engines leave it, and the reverse."""
    distill = ["algorithm.distill.teacher=wise", "offload.parameters=false"]
    distill += ["offload.optimizer=false", "offload.reference=true"]
    roles = make_roles(6, *distill, device="cuda")
    assert roles.teachers.engine.on_device == {"optimizer"}
    assert roles.teachers.offloaded == ["parameters"]
    assert roles.actor.on_device == {"parameters", "optimizer"}


def open_group(number: int, num_tokens: int) -> OpenGroup:
    tokens = torch.arange(num_tokens, dtype=torch.int32).numpy()
    response = OpenResponse(seed=number)
    response.append(tokens, -tokens.astype("float32"), None, version=1)
    return OpenGroup(number, number, [response])


def test_groups_of_a_checkpoint_count_among_those_that_the_rest_of_the_run_trains(
    make_roles,
    monkeypatch,
):
    """Of 30 groups, 3 were dropped, 2 are open and so 25 were trained before step 4 of 6."""
    monkeypatch.setattr(roles_module, "ContinuingRollout", lambda rollout: rollout)
    roles = make_roles(6, *PARTIAL, "data.train_batch_size=8")
    roles.rollout = SimpleNamespace(num_replicas=1, replica=0, vocab_size=50)
    roles.sampler = SimpleNamespace(rollout=roles.rollout)
    groups = [open_group(27, 2), open_group(29, 3)]
    roles.carried_files = [to_bytes(groups, Counters(30, 3))]
    sampler = roles.start_partial([0], range, step=4)
    assert [group.number for group in sampler.open.groups] == [27, 29]
    assert (sampler.ledger.next_group, sampler.ledger.num_dropped) == (30, 3)
    assert sampler.ledger.limit == 25 + 3 * 8


@pytest.mark.parametrize("on_stale, finishes_old", [("finish", True), ("drop", False)])
def test_old_groups_are_finished_or_dropped_as_configured(
    make_roles,
    monkeypatch,
    on_stale,
    finishes_old,
):
    monkeypatch.setattr(roles_module, "ContinuingRollout", lambda rollout: rollout)
    stale = [f"rollout.partial.on_stale={on_stale}", "rollout.partial.max_staleness=3"]
    roles = make_roles(6, *PARTIAL, *stale)
    roles.rollout = SimpleNamespace(num_replicas=2)
    sampler = roles.start_partial(["row"], range, step=1)
    assert sampler.open.finishes_old == finishes_old
    assert sampler.open.max_staleness == 3
    assert sampler.dataset == ["row"]
    assert sampler.rows_of_batch is range
    assert sampler.config is roles.config
    assert sampler.continuing is roles.rollout


def test_open_groups_are_saved_with_a_checkpoint(make_roles):
    roles = make_roles(6)
    roles.rollout = RecordingRollout({})
    roles.partial = SimpleNamespace(state=lambda: {"open": b"groups"})
    saved = []
    roles.save(SimpleNamespace(save=lambda *values: saved.append(values)), 3, {"step": 3})
    assert saved == [(3, roles.actor, {"step": 3}, None, {"open": b"groups"})]


def test_vllm_stays_awake_after_a_validation_without_a_reward_model(
    make_roles,
    monkeypatch,
):
    """The step that follows generates with the same weights. Before it, vLLM is woken up."""
    monkeypatch.setattr(roles_module.dist, "get_rank", lambda: 1)
    roles = make_roles(6)
    roles.rollout = RecordingRollout({"actor": roles.actor})
    held = []
    draw = make_samples([2], [1.0], [0])

    def sample(*values):
        held.extend(roles.rollout.held)
        return draw

    roles.sampler = SimpleNamespace(draw=sample)
    assert roles.validate([0], step=2) is draw
    assert held == ["weights", "kv_cache"]
    assert roles.rollout.calls == []


def test_the_actor_is_taught_during_its_update_and_not_after_it(make_roles, monkeypatch):
    """With several teachers, the sums of divergences then become means."""
    settings = ["algorithm.distill.teachers={a: x, b: y}", "algorithm.ppo_epochs=2"]
    roles = make_roles(6, *settings)
    state = []

    @contextmanager
    def teaching(student):
        state.append(("begin", student))
        yield
        state.append(("end", student))

    monkeypatch.setattr(roles.teachers, "teaching", teaching)

    def train_batch(batch, loss_fn, step, micro_batches):
        state.append(("train", step))
        share_and_sum = {"distill/share/a": 0.25, "distill/divergence/a": 0.5}
        return {"loss": 1.0, "skipped": 0, **share_and_sum}

    monkeypatch.setattr(roles.actor, "train_batch", train_batch)
    share = make_share()
    share.batch = []
    metrics = roles.update_actor(share, 4)
    actor = roles.actor
    assert state == [("begin", actor), ("train", 4), ("train", 4), ("end", actor)]
    assert metrics["distill/divergence/a"] == 2.0
    assert metrics["actor/loss"] == 1.0


def test_both_updates_take_the_configured_passes_in_a_stage_of_their_own(make_roles):
    """A loop of one's own passes once, unless it says otherwise."""
    roles = make_roles(6, GAE, "algorithm.ppo_epochs=3", "critic.warmup_steps=1")
    share = make_share()
    share.batch = []
    roles.update_actor(share, 1)
    roles.update_critic(share, 1)
    assert len(roles.actor.batches) == len(roles.critic.batches) == 3
    stages = roles.profiler.end_step()
    assert {"timing/actor_update", "timing/critic_update"} == stages.keys()
    metrics = roles.update(share, None, 2)
    assert len(roles.actor.batches) == 4
    assert {name.partition("/")[0] for name in metrics} == {"actor"}
