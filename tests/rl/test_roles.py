"""The stages of a step, with engines that only record their calls."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from config import InputError
from engines import schedule
from engines.heads import Head
from engines.model.routes import FIELD as ROUTES
from rl import roles as roles_module
from tests.rl.recording import GAE, REFERENCE, RecordingEngine, RecordingRollout, make_share
from tests.support.samples import failure, make_samples, whole


def test_the_actors_schedule_begins_after_the_critics_warm_up(make_roles):
    num_steps = 6
    num_warmup_steps = 2
    roles = make_roles(
        num_steps,
        GAE,
        f"critic.warmup_steps={num_warmup_steps}",
        "critic.lr=2.0",
        "optim.lr=1.0",
        "optim.lr_scheduler_type=cosine",
    )
    part = (None, SimpleNamespace(micro_batches=None))
    share = SimpleNamespace(parts=[part], batch=[])
    share.without_routes = share

    actor_metrics = [roles.update_actor(share, step) for step in range(num_steps)]
    critic_metrics = [roles.update_critic(share, step) for step in range(num_steps)]

    optim = roles.actor.config.optim
    num_actor_steps = num_steps - num_warmup_steps
    expected = [schedule.learning_rate(optim, k, num_actor_steps) for k in range(num_actor_steps)]
    assert actor_metrics[:num_warmup_steps] == [{}] * num_warmup_steps
    assert [m["actor/lr"] for m in actor_metrics[num_warmup_steps:]] == expected
    assert expected[0] == 1.0
    critic_optim = roles.critic.config.optim
    expected = [schedule.learning_rate(critic_optim, k, num_steps) for k in range(num_steps)]
    assert [m["critic/lr"] for m in critic_metrics] == expected


def test_trained_engines_leave_the_device_before_vllm_wakes(make_roles):
    """vLLM's weights need the critic's memory. The actor keeps its parameters until they are sent.

    Before this, a checkpoint was saved, which moves everything to the device.
    """
    roles = make_roles(6, GAE, device="cuda")
    assert roles.offloaded == ["parameters", "optimizer"]
    engines = {"actor": roles.actor, "critic": roles.critic}
    roles.rollout = RecordingRollout(engines)
    for engine in engines.values():
        engine.onload()

    roles.wake()

    assert roles.rollout.held["weights"] == {"actor": {"parameters"}, "critic": set()}
    assert roles.rollout.held["kv_cache"] == {"actor": set(), "critic": set()}


def test_a_critic_leaves_the_device_before_the_actor_is_updated(make_roles):
    roles = make_roles(6, GAE, device="cuda")
    roles.update_critic(make_share(), 0)
    assert roles.critic.batches == [None]
    assert roles.critic.on_device == set()


def test_engines_are_built_for_their_roles(make_roles):
    roles = make_roles(6, GAE, REFERENCE, "rollout.temperature=0.7", "critic.warmup_steps=2")
    built = {"actor": roles.actor, "critic": roles.critic, "reference": roles.reference}
    heads = {role: engine.options["head"] for role, engine in built.items()}
    assert heads == {
        "actor": Head.LOG_PROBS,
        "critic": Head.VALUES,
        "reference": Head.LOG_PROBS,
    }
    optimized = {role: engine.options["optimize"] for role, engine in built.items()}
    assert optimized == {"actor": True, "critic": True, "reference": False}
    steps = {role: engine.total_steps for role, engine in built.items()}
    assert steps == {"actor": 4, "critic": 6, "reference": 6}
    assert {engine.options["temperature"] for engine in built.values()} == {0.7}
    assert roles.actor.number < roles.critic.number < roles.reference.number
    alone = make_roles(6, "algorithm.adv_estimator=grpo")
    assert alone.critic is None
    assert alone.reference is None


@pytest.mark.parametrize(
    "device, settings, trained, reference",
    [
        ("cpu", [], {"parameters", "optimizer"}, {"parameters", "optimizer"}),
        ("cuda", ["offload.reference=true"], set(), {"optimizer"}),
        (
            "cuda",
            ["offload.parameters=false", "offload.reference=false"],
            {"parameters"},
            {"parameters", "optimizer"},
        ),
        ("cuda", ["offload.optimizer=false"], {"optimizer"}, {"optimizer"}),
    ],
)
def test_each_engine_leaves_the_device_once_it_is_built(
    make_roles, device, settings, trained, reference
):
    roles = make_roles(6, GAE, REFERENCE, "offload.reference=true", *settings, device=device)
    assert roles.actor.on_device == trained
    assert roles.critic.on_device == trained
    assert roles.reference.on_device == reference


def test_teachers_compute_nothing_while_the_critic_warms_up(make_roles):
    """Their output matrices would stay on the device, because no update of the actor drops them."""
    roles = make_roles(6, GAE, "critic.warmup_steps=2", "algorithm.distill.teacher=unused")
    for step in range(2):
        share = make_share()
        roles.compute_log_probs(share, step)
        assert roles.teachers.engine.batches == []
        assert roles.teachers.matrices == []
        assert "teacher_hidden" not in share.batch.fields
    share = make_share()
    roles.compute_log_probs(share, 2)
    assert roles.teachers.engine.batches == [None]
    assert len(roles.teachers.matrices) == 1
    assert "teacher_hidden" in share.batch.fields


def test_each_field_comes_from_the_engine_of_its_role(make_roles):
    roles = make_roles(6, GAE, REFERENCE, "algorithm.ppo_epochs=2", device="cuda")
    share = make_share()
    roles.compute_log_probs(share, 1)
    roles.compute_values(share)
    expected = {
        "old_log_probs": roles.actor.number,
        "ref_log_probs": roles.reference.number,
        "values": 10 * roles.critic.number,
    }
    assert {name: x.tolist() for name, x in share.batch.fields.items()} == {
        name: [number, number] for name, number in expected.items()
    }
    assert "parameters" not in roles.reference.on_device
    stages = {name.removeprefix("timing/") for name in roles.profiler.end_step()}
    assert stages == {"actor_compute_log_prob", "ref_compute_log_prob", "compute_values"}


def test_a_kv_cache_in_fp8_is_checked_when_the_first_step_is_divided(
    make_roles, monkeypatch, process_group
):
    """So loops that never call compute_log_probs() have the check, too."""
    roles = make_roles(6)
    roles.must_check_kv_cache = True
    share = make_share()
    share.batch.fields["loss_mask"] = torch.ones(2)
    share.batch.fields["rollout_log_probs"] = torch.full((2,), roles.actor.number - 1.0)
    monkeypatch.setattr(roles_module, "divide", lambda *values: share)
    samples = make_samples([0], [1.0], [0])
    with pytest.raises(InputError, match="by 1 nats on average, but 8 bits explain at most 0.5"):
        roles.divide(samples)
    share.batch.fields["rollout_log_probs"] += 0.75
    assert roles.divide(samples) is share
    share.batch.fields["rollout_log_probs"] += 9
    assert roles.divide(samples) is share, "only the first step is checked"


@pytest.mark.parametrize("has_adapters", [False, True])
def test_the_actor_alone_replays_the_experts_that_vllm_chose(make_roles, has_adapters):
    """The routers of other models choose by themselves, and so does the actor as the reference."""
    roles = make_roles(6, GAE, REFERENCE, "algorithm.ppo_epochs=2")
    if has_adapters:
        roles.config = OmegaConf.merge(roles.config, {"model": {"lora": {"rank": 4}}})
        roles.reference = None
    samples = make_samples([0], [1.0], [0])  # two tokens, as many as the engines compute
    samples.batch.fields[ROUTES] = torch.zeros(len(samples.batch.input_ids), 2, 1)
    share = whole(samples)
    roles.compute_log_probs(share, 1)
    roles.compute_values(share)
    roles.update_critic(share, 1)
    roles.update_actor(share, 1)

    def replays(engine: RecordingEngine) -> list[bool]:
        return [ROUTES in batch.fields for batch in engine.batches]

    if has_adapters:
        # The log-probabilities before the update, those of the reference, and two epochs.
        assert replays(roles.actor) == [True, False, True, True]
    else:
        assert replays(roles.actor) == [True, True, True]
        assert replays(roles.reference) == [False]
    assert replays(roles.critic) == [False, False, False]


def test_the_rate_of_failures_is_that_of_all_draws_of_a_step(make_roles, monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    settings = [f"output_dir={tmp_path}", "reward.max_failure_rate=0.25"]
    roles = make_roles(6, *settings)
    draw = make_samples([2], [1.0], [0], failures=[failure(1)])
    with pytest.raises(InputError, match="1 of 2 samples .* more than reward.max_failure_rate"):
        roles._report_failures(1, draw)
    roles._report_failures(1, draw, num_drawn=8, num_earlier=1)
    with pytest.raises(InputError, match="3 of 8 samples"):
        roles._report_failures(1, draw, num_drawn=8, num_earlier=2)
    written = (tmp_path / "failures.jsonl").read_text().splitlines()
    assert len(written) == 3


def test_an_actor_without_its_adapters_is_the_reference(make_roles):
    roles = make_roles(6, REFERENCE, "algorithm.ppo_epochs=2")
    roles.config = OmegaConf.merge(roles.config, {"model": {"lora": {"rank": 4}}})
    share = make_share()
    roles.reference = None
    roles.compute_log_probs(share, 1)
    number = roles.actor.number
    assert share.batch.fields["old_log_probs"].tolist() == [number, number]
    assert share.batch.fields["ref_log_probs"].tolist() == [-number, -number]


@pytest.mark.parametrize(
    "has_base, adapter, drafter, sent",
    [
        (False, None, None, [("weights", True, False)]),
        (False, None, "mtp", [("weights", True, True)]),
        (False, "adapter", None, [("weights", False, False), "adapter"]),
        (True, "adapter", None, ["adapter"]),
        (True, None, "mtp", []),
    ],
)
def test_vllm_gets_the_weights_that_it_lacks(make_roles, has_base, adapter, drafter, sent):
    roles = make_roles(6)
    roles.rollout = RecordingRollout({"actor": roles.actor})
    roles.rollout.has_base = has_base
    roles.rollout.adapter = adapter
    roles.rollout.drafter = drafter
    roles.wake()
    assert roles.rollout.calls == sent
    roles.rollout.is_current = True
    roles.wake()
    assert roles.rollout.calls == sent, "vLLM is still awake, with these weights"


def test_checkpoints_hold_the_trained_engines_and_vllm_sleeps_meanwhile(
    make_roles, monkeypatch, tmp_path
):
    roles = make_roles(6, GAE, REFERENCE, device="cuda")
    roles.rollout = RecordingRollout({})
    roles.tokenizer = "tokenizer"
    calls = []
    checkpointer = SimpleNamespace(
        save=lambda *values, **roles: calls.append((values, roles)),
        load=lambda *values, **roles: (values, roles),
    )
    critic = {"critic": roles.critic}
    monkeypatch.setattr(roles_module, "read_files", lambda path: [path])
    assert roles.load(checkpointer, tmp_path) == ((tmp_path, roles.actor), critic)
    assert roles.carried_files == [tmp_path]
    roles.save(checkpointer, 3, {"step": 3})
    assert roles.rollout.calls == []
    roles.rollout.awake = True
    roles.save(checkpointer, 4, {"step": 4})
    assert roles.rollout.calls == ["sleep"]
    assert calls == [((n, roles.actor, {"step": n}, "tokenizer", {}), critic) for n in (3, 4)]
    for engine in (roles.actor, roles.critic):
        engine.onload()
    roles.sampler = SimpleNamespace(close=lambda: roles.rollout.calls.append("sampler"))
    roles.close()
    assert roles.actor.on_device == roles.critic.on_device == set()
    assert roles.rollout.calls == ["sleep", "sampler", "shutdown"]


def test_vllm_is_built_while_no_trained_engine_is_on_the_device(make_roles, monkeypatch):
    """A checkpoint has moved them there. One that is built already is kept."""
    settings = ["reward.max_failure_rate=0.5", "reward.skip_special_tokens=false"]
    roles = make_roles(6, GAE, *settings, device="cuda")
    engines = {"actor": roles.actor, "critic": roles.critic}
    for engine in engines.values():
        engine.onload()
    built = []

    def build(config, device):
        built.append({role: set(engine.on_device) for role, engine in engines.items()})
        return "vLLM"

    monkeypatch.setattr(roles_module, "Rollout", build)
    for _ in range(2):
        roles.start_rollout()
        assert built == [{"actor": set(), "critic": set()}]
    assert roles.sampler.rollout == "vLLM"
    assert roles.sampler.max_failure_rate == 0.5
    assert not roles.sampler.skip_special_tokens


def test_a_reward_model_scores_a_validation_while_vllm_sleeps(make_roles, monkeypatch, tmp_path):
    """Its scores are a part, and are not added to those of the function."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    roles = make_roles(6, f"output_dir={tmp_path}")
    roles.rollout = RecordingRollout({"actor": roles.actor})
    draw = make_samples([2], [1.0], [0])
    scored = replace(draw, parts={"model": torch.tensor([3.0])})
    roles.sampler = SimpleNamespace(draw=lambda *values: draw)

    def score(samples, group):
        roles.rollout.calls.append("score")
        assert samples is draw
        return scored

    roles.reward_model = SimpleNamespace(engine=None, score=score)
    assert roles.validate([0], step=1) is scored
    assert roles.rollout.calls == ["sleep", "score"]
    assert roles.score(draw).scores.tolist() == [4.0]
    draw.parts["model"] = torch.tensor([1.0])
    with pytest.raises(InputError, match='returns a part named "model"'):
        roles.score(draw)


def test_what_a_step_and_a_validation_ask_the_sampler_for(make_roles, monkeypatch, tmp_path):
    """A validation reports its total time, and not that of its stages."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    settings = ["trainer.seed=5", "validation.n=2", "reward.max_failure_rate=1"]
    roles = make_roles(6, *settings, f"output_dir={tmp_path}")
    roles.rollout = RecordingRollout({"actor": roles.actor})
    draw = make_samples([2], [1.0], [0], failures=[failure(1)])
    requests = []
    roles.sampler = SimpleNamespace(draw=lambda *values: requests.append(values) or draw)
    dataset = [0, 1, 2]

    samples, next_batch = roles.collect(dataset, range, 4, step=3)
    assert len(samples) == 1
    assert next_batch == 5
    assert roles.validate(dataset, step=7) is draw

    (step, of_step), (validation, of_validation) = requests
    assert (step.rows, step.seed, step.section) == (range(4), (5, 4), "rollout")
    assert step.sampling == roles.config.rollout
    assert of_step is roles.profiler
    assert validation.dataset is dataset
    assert validation.rows == range(3)
    assert (validation.seed, validation.section) == ((5, -1), "validation")
    assert validation.sampling.n == 2
    assert of_validation is not roles.profiler
    assert "timing/validate" in roles.profiler.end_step()
    failures = (tmp_path / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in failures] == [3, 7]


@pytest.mark.parametrize("max_staleness, oversample", [(0, 1.0), (2, 1.5)])
def test_more_groups_than_a_step_needs_begin_only_if_they_may_wait(
    make_roles, monkeypatch, max_staleness, oversample
):
    monkeypatch.setattr(roles_module, "ContinuingRollout", lambda rollout: rollout)
    partial = ["rollout.partial.enable=true", "algorithm.rollout_is=token"]
    partial += [f"rollout.partial.max_staleness={max_staleness}", "rollout.partial.oversample=1.5"]
    roles = make_roles(6, *partial, "data.train_batch_size=8")
    roles.rollout = SimpleNamespace(num_replicas=2)
    sampler = roles.start_partial([0], range, step=3)
    assert sampler.ledger.num_replicas == 2
    assert sampler.ledger.oversample == oversample
    assert sampler.ledger.limit == 4 * 8, "the groups of the steps that are left"
    filtering = make_roles(6, *partial, "algorithm.filter_groups.enable=true")
    filtering.rollout = roles.rollout
    limit = filtering.start_partial([0], range, step=3).ledger.limit
    assert limit is None, "a step may need any number of groups"
