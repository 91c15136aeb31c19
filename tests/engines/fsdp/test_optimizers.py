"""Optimizers and schedules."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from config import InputError, defaults, load
from configs.files import CONFIGS
from engines import optimizer, schedule
from engines.adamw import AdamW, Storage
from engines.checkpoint.checkpointer import Checkpointer
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.memory import GIB
from engines.optimizer import ShardedMuon
from engines.parallel import offload
from tests.engines.fsdp.cases import build, make_config, on_ranks, train, worker_case
from tests.support.cases import needs
from tests.support.estimates import estimate_gib
from tests.support.plain import (
    LOSS_BOUND,
    column,
    plain_model,
    worst,
)
from tests.support.training import digest, gather, make_tokenizer

STORAGE = Storage(state_dtype=None, stochastic=True, seed=0, compiled=False)


@worker_case(1, 2, 4)
def muon_steps(folder: Path, device: torch.device) -> dict[str, float]:
    """Return how much sharded matrices differ from whole ones after three steps.

    Their gradients are equal, and so are their learning rates, which change from step to step. The
    result has an entry for each mesh.
    """
    num_ranks = dist.get_world_size()
    sizes = [(32, 32), (7, 96), (48, 5), (1, 8), (33, 16)]  # ranks do not divide all rows
    meshes = {"shard": (num_ranks,)}
    if num_ranks == 4:
        meshes["replicate and shard"] = (2, 2)
    differences = {}
    for name, shape in meshes.items():
        mesh = init_device_mesh(device.type, shape)
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        g = torch.Generator().manual_seed(0)
        whole = [torch.nn.Parameter(torch.randn(size, generator=g)) for size in sizes]
        parts = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, placements)) for p in whole]
        settings = dict(lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        optimizers = [torch.optim.Muon(whole, **settings), ShardedMuon(parts, STORAGE, **settings)]
        for lr in (0.1, 0.05, 0.02):
            for p, part in zip(whole, parts):
                p.grad = torch.randn(p.shape, generator=g)
                part.grad = distribute_tensor(p.grad, mesh, placements)
            for each in optimizers:
                each.param_groups[0]["lr"] = lr
                each.step()
        distances = [p - part.full_tensor() for p, part in zip(whole, parts)]
        differences[name] = max(distance.abs().max().item() for distance in distances)
    return differences


@pytest.mark.slow
@on_ranks("muon_steps", 1, 2, 4)
def test_muon_orthogonalizes_whole_matrices(results, world):
    """The numbers equal those on one rank, except for the rounding of an addition."""
    assert all(difference < 1e-6 for difference in results(world)["muon_steps"].values())
    assert len(results(world)["muon_steps"]) == (2 if world == 4 else 1)


def test_muon_follows_the_learning_rate_on_one_rank(folder):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        differences = muon_steps(folder, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert differences["shard"] < 1e-6


def test_muon_has_the_hidden_matrices_and_adamw_the_rest(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    found = optimizer.build(
        model,
        model.model.layers,
        make_config(folder, "optim.name=muon", "optim.kwargs.momentum=0.5"),
    )
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = found
    of_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    of_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert isinstance(muon, torch.optim.Muon)
    assert muon.param_groups[0]["momentum"] == 0.5
    assert of_muon == {name for name in names.values() if "_proj.weight" in name}
    assert len(of_muon) == 3 * 7
    assert of_adamw == set(names.values()) - of_muon
    assert {"lm_head.weight", "model.embed_tokens.weight"} < of_adamw


def test_muon_alone_updates_adapters(folder):
    """They are hidden matrices, so AdamW would have nothing to update."""
    config = make_config(folder, "optim.name=muon", "model.lora.rank=4")
    hf, _ = build_model(config, Head.LOG_PROBS)
    (muon,) = optimizer.build(hf, hf.model.layers, config)
    (hidden,) = muon.param_groups
    assert len(hidden["params"]) == 3 * 7 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_optimizers_of_muon_have_the_settings_of_the_run(folder, dtype):
    """bfloat16 weights are rounded by optimizers of this repository."""
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=dtype)
    optim = ["lr=0.01", "weight_decay=0.3", "betas=[0.5,0.6]", "eps=1e-5"]
    own = ["nesterov=false", "ns_steps=3"]
    settings = [f"optim.{pair}" for pair in optim] + [f"optim.kwargs.{pair}" for pair in own]
    config = make_config(folder, "optim.name=muon", "trainer.seed=7", *settings)
    muon, adamw = optimizer.build(model, model.model.layers, config, compiled=False)
    expected = {"lr": 0.01, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
    (hidden,) = muon.param_groups
    assert expected.items() <= hidden.items()
    assert hidden["weight_decay"] == 0.3
    decays = []
    for group in adamw.param_groups:
        decays.append(group["weight_decay"])
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.5, 0.6), 1e-5)
    assert decays == [0.3, 0.0], "matrices, then norms"
    is_own = dtype is torch.bfloat16
    assert isinstance(muon, ShardedMuon) == is_own
    assert isinstance(adamw, AdamW) == is_own
    if is_own:
        storage = Storage(state_dtype=None, stochastic=True, seed=7, compiled=False)
        assert muon.storage == adamw.storage == storage


def test_moments_are_stored_as_the_run_says(folder):
    config = make_config(folder, "optim.state_dtype=int8", "optim.rounding=nearest")
    expected = Storage(torch.uint8, stochastic=False, seed=config.trainer.seed, compiled=True)
    assert Storage.of(config, compiled=True) == expected


OWN_RATES = """
import torch

def slow_vectors(params, lr, **_):
    for group in params:
        group["lr"] = lr if group["weight_decay"] else lr / 4
    return torch.optim.SGD(params, lr=lr)
"""


@pytest.mark.slow  # it trains a model
@pytest.mark.usefixtures("process_group")
def test_an_optimizer_of_the_user_keeps_the_ratios_of_its_learning_rates(folder, tmp_path):
    (tmp_path / "own.py").write_text(OWN_RATES)
    settings = [f"optim.name={tmp_path}/own.py:slow_vectors", "optim.weight_decay=0.1"]
    schedule = ["optim.lr=0.01", "optim.lr_warmup_steps_ratio=0.5"]
    engine = build(folder / "qwen3", torch.device("cpu"), more=[*settings, *schedule])
    (step,) = train(engine, range(1))
    assert step["lr"] < 0.01, "it warms up"
    rates = {g["weight_decay"]: g["lr"] for g in engine.optimizers[0].param_groups}
    assert rates == pytest.approx({0.1: step["lr"], 0.0: step["lr"] / 4})


def host_memory(engine: FSDPEngine) -> tuple[list[int], int]:
    """Offload; return the addresses of the host memory, and the bytes left in the tensors."""
    engine.offload("parameters", "optimizer")
    tensors = engine.host_memory.storages(engine.tensors_of("parameters", "optimizer"))
    addresses = [part.result().data_ptr() for part in engine.host_memory.parts]
    return addresses, sum(x.nbytes() for x in tensors)


@worker_case(1, 2, 4, reads=[(4, "muon_resume")])
def muon_resume(folder: Path, device: torch.device) -> dict:
    """Resume on any number of ranks what 4 ranks have saved after two steps, for two more.

    4 ranks also go on without interruption.
    """
    checkpointer = Checkpointer(folder / "checkpoints_muon", 2, asynchronous=False)
    result = {}
    if dist.get_world_size() == 4:
        # Small enough for this model to need several parts.
        offload.PART_BYTES = 2**14
        offload.MIN_BYTES = 64
        engine = build(folder / "qwen3", device, more=["optim.name=muon"])
        result["host memory"] = [host_memory(engine)]
        train(engine, range(2))
        checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
        result["host memory"].append(host_memory(engine))
        result["uninterrupted"] = train(engine, range(2, 4))
        result["host memory"].append(host_memory(engine))
        result["weights"] = digest(dict(engine.export_weights()))
    engine = build(folder / "qwen3", device, more=["optim.name=muon"])
    checkpointer.load(folder / "checkpoints_muon" / "step_00000002", engine)
    result["resumed"] = train(engine, range(2, 4))
    states = [x.to_local() if isinstance(x, DTensor) else x for x in engine.tensors_of("optimizer")]
    return result | {
        "resumed_weights": digest(dict(engine.export_weights())),
        "state_bytes": gather(sum(x.nbytes for x in states if x.ndim)),
    }


@pytest.mark.slow
@needs((4, "muon_resume"))
def test_host_memory_is_taken_before_the_optimizer_has_a_state(results):
    """It is taken once, as much as the moments of AdamW and Muon will need."""
    first, second, third = results(4)["muon_resume"]["host memory"]
    addresses = first[0]
    assert second[0] == addresses
    assert third[0] == addresses
    assert len(addresses) > 4
    bytes_left = second[1]
    assert bytes_left < 2000
    assert third[1] == bytes_left


@pytest.mark.slow
@on_ranks("muon_resume", 1, 2, 4, also=[(4, "muon_resume")])
def test_muon_resumes_and_has_one_moment(results, folder, world):
    whole = results(4)["muon_resume"]
    result = results(world)["muon_resume"]
    uninterrupted = column(whole["uninterrupted"], "loss")
    assert worst(column(result["resumed"], "loss"), uninterrupted) < LOSS_BOUND
    if world == 4:
        assert result["resumed"] == whole["uninterrupted"]
        assert whole["resumed_weights"] == whole["weights"]
    settings = make_config(
        folder, f"model.path={folder / 'qwen3'}", "engine.compute_dtype=float32", "optim.name=muon"
    )
    estimate = estimate_gib(settings, world, "cpu")[0]["optimizer"] * GIB
    assert sum(result["state_bytes"]) / world == pytest.approx(estimate)
    adam_settings = make_config(folder, f"model.path={folder / 'qwen3'}")
    adam_estimate = estimate_gib(adam_settings, world, "cpu")[0]["optimizer"] * GIB
    assert adam_estimate / 2 < estimate < 0.9 * adam_estimate


def test_biases_of_experts_are_not_decayed_and_no_matrices_for_muon(folder):
    hf = plain_model(folder / "gpt_oss")
    muon, adamw = optimizer.build(
        hf, hf.model.layers, make_config(folder, "optim.name=muon", "optim.weight_decay=0.5")
    )
    names = {id(p): name for name, p in hf.named_parameters()}
    decayed = {
        names[id(p)]
        for o in (muon, adamw)
        for g in o.param_groups
        for p in g["params"]
        if g["weight_decay"]
    }
    assert {name for name in names.values() if ".experts." in name} - decayed == {
        f"model.layers.{i}.mlp.experts.{x}_proj_bias" for i in range(3) for x in ("gate_up", "down")
    }
    assert not any(".experts." in names[id(p)] for p in muon.param_groups[0]["params"])


@pytest.mark.parametrize(
    "pairs, message",
    [
        (
            ["optim.name=adam"],
            "optim.name=adam must be one of adamw, muon, or path/to/file.py:name; "
            "the nearest is adamw",
        ),
        (
            ["optim.kwargs.momentum=0.9"],
            "optim.kwargs.momentum: adamw has no parameter momentum of its own (it has none)",
        ),
        (
            ["optim.name=muon", "optim.kwargs.eps=1e-7"],
            "eps: muon has no parameter eps of its own (it has momentum, nesterov, ns_steps)",
        ),
        (
            ["optim.name={file}:bare"],
            "unexpected keyword argument 'betas'; it is called with params, lr, betas, eps, ",
        ),
        (
            ["optim.name={file}:sgd", "optim.eps=1e-6"],
            "optim.eps=1e-06 has no effect with optim.name={file}:sgd",
        ),
        (
            ["optim.lr_scheduler_type=cosin"],
            "must be one of constant, linear, cosine, wsd, or path/to/file.py:name",
        ),
        (
            ["optim.lr_scheduler_type={file}:nothing"],
            "{file}:nothing returned None: it must return a number",
        ),
        (["optim.lr_scheduler_type={file}:sgd"], "missing a required argument: 'params'"),
        (
            ["optim.lr_scheduler_kwargs.power=2"],
            "optim.lr_scheduler_kwargs.power: cosine has no parameter power of its own",
        ),
    ],
)
def test_optimizers_and_schedules_that_cannot_work(folder, tmp_path, pairs, message):
    (tmp_path / "my.py").write_text(
        "def bare(params, lr): pass\ndef sgd(params, lr, **_): pass\ndef nothing(step, **_): pass\n"
    )
    settings = [pair.replace("{file}", f"{tmp_path}/my.py") for pair in pairs]
    with pytest.raises(InputError) as error:
        FSDPEngine.check(make_config(folder, *settings), 1)
    assert message.replace("{file}", f"{tmp_path}/my.py") in str(error.value)


@pytest.mark.parametrize(
    "key, old, new, value",
    [
        ("betas", "[0.9, 0.95]", "[0.9, 0.98]", [0.9, 0.98]),
        ("eps", "1e-8 ", "1e-7 ", 1e-7),
        ("state_dtype", "auto ", "float32 ", "float32"),
        ("lr_decay_steps_ratio", "0.1 ", "0.2 ", 0.2),
    ],
)
def test_a_default_may_change_in_the_yaml_file_alone(
    folder, tmp_path, monkeypatch, key, old, new, value
):
    """This optimizer and this schedule read none of the keys: only the default is accepted."""
    (tmp_path / "my.py").write_text("def sgd(params, lr, **_): pass\n")
    own = f"optim.name={tmp_path}/my.py:sgd"
    loaded = make_config(folder, own, "optim.lr_scheduler_type=linear")
    config = OmegaConf.create(OmegaConf.to_container(loaded))

    def check() -> None:
        optimizer.check_optimizer(config)
        schedule.check_schedule(config.optim)

    check()
    text = (CONFIGS / "ppo.yaml").read_text()
    line = f"  {key}: {old}"
    assert text.count(line) == 1
    (tmp_path / "ppo.yaml").write_text(text.replace(line, f"  {key}: {new}"))
    monkeypatch.setattr("config.CONFIGS", tmp_path)
    with pytest.raises(InputError, match=f"optim.{key}=.* has no effect"):
        check()
    config.optim[key] = value
    check()


def test_all_scripts_have_the_defaults_that_are_left_out():
    """The checks read them from ppo.yaml."""
    keys = ("betas", "eps", "rounding", "state_dtype", "lr_decay_steps_ratio")
    for script in ("sft", "dpo", "rm", "ppo"):
        optim = OmegaConf.load(CONFIGS / f"{script}.yaml").optim
        for key in keys:
            assert optim[key] == defaults("optim")[key], f"{script}.yaml: {key}"


HALF = 0.1 + 0.9 * 0.5


SCHEDULES = {  # 20 steps, 4 of them warm-up; from 1 to 0.1, wsd over the last 8
    "constant": {0: 0.25, 3: 1, 4: 1, 12: 1, 19: 1},
    "linear": {0: 0.25, 1: 0.5, 3: 1, 4: 1, 8: 0.1 + 0.9 * 0.75, 12: HALF, 20: 0.1, 25: 0.1},
    "cosine": {0: 0.25, 3: 1, 4: 1, 8: 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 12: HALF, 20: 0.1, 25: 0.1},
    "wsd": {0: 0.25, 3: 1, 4: 1, 11: 1, 12: 1, 14: 0.1 + 0.9 * 0.75, 16: HALF, 20: 0.1, 25: 0.1},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedule(folder, kind):
    floor = 0.0 if kind == "constant" else 0.1
    decay = "optim.lr_decay_steps_ratio=0.4"
    settings = [
        f"optim.lr_scheduler_type={kind}",
        "optim.lr=1.0",
        "optim.lr_warmup_steps_ratio=0.2",
        f"optim.min_lr_ratio={floor}",
    ]
    if kind != "wsd":
        message = "lr_decay_steps_ratio=0.4 has no effect without optim.lr_scheduler_type=wsd"
        with pytest.raises(InputError, match=message):
            schedule.check_schedule(make_config(folder, *settings, decay).optim)
    if kind == "wsd":
        settings.append(decay)
    optim = make_config(folder, *settings).optim
    schedule.check_schedule(optim)
    rates = {step: schedule.learning_rate(optim, step, 20) for step in SCHEDULES[kind]}
    assert rates == pytest.approx(SCHEDULES[kind])


@pytest.mark.parametrize(
    "warmup, decay, rates",
    [
        (0.5, 0.8, {5: 1, 6: 0.8, 9: 0.2}),  # at most over the steps after the warm-up
        (0.5, 0.2, {5: 1, 8: 1, 9: 0.5}),  # over 2 of all 10 steps
        (0.0, 0.0, {0: 1, 9: 1, 10: 0}),  # at least over one step, the one after the last
        (0.0, 1.0, {0: 1, 1: 0.9, 9: 0.1}),
    ],
)
def test_wsd_decays_over_a_share_of_all_steps(folder, warmup, decay, rates):
    settings = [
        "optim.lr_scheduler_type=wsd",
        "optim.lr=1.0",
        f"optim.lr_warmup_steps_ratio={warmup}",
        f"optim.lr_decay_steps_ratio={decay}",
    ]
    optim = make_config(folder, *settings).optim
    schedule.check_schedule(optim)
    result = {step: schedule.learning_rate(optim, step, 10) for step in rates}
    assert result == pytest.approx(rates)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup", [0.0, 1.0])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_schedule_of_few_steps(folder, kind, warmup, total):
    optim = make_config(
        folder,
        f"optim.lr_scheduler_type={kind}",
        "optim.lr=1.0",
        f"optim.lr_warmup_steps_ratio={warmup}",
    ).optim
    rates = [schedule.learning_rate(optim, s, total) for s in range(total)]
    assert all(0 < rate <= 1 for rate in rates)
    assert max(rates) == 1


@pytest.mark.parametrize(
    "setting, message",
    [
        ("momentum=high", "optim.kwargs.momentum='high' must be a number"),
        ("momentum=1.5", "optim.kwargs.momentum=1.5 must be at least 0 and less than 1"),
        ("ns_steps=0", "optim.kwargs.ns_steps=0 must be at least 1"),
        ("ns_steps=2.5", "optim.kwargs.ns_steps=2.5 must be a whole number"),
        ("nesterov=1", "optim.kwargs.nesterov=1 must be true or false"),
    ],
)
def test_parameters_of_muon_have_types_and_bounds(setting, message):
    needed = ["model.path=m", "data.train_files=t", "optim.name=muon"]
    with pytest.raises(InputError) as caught:
        optimizer.check_optimizer(load("sft.yaml", [*needed, f"optim.kwargs.{setting}"]))
    assert str(caught.value) == message
    valid = ["optim.kwargs.momentum=0", "optim.kwargs.ns_steps=3", "optim.kwargs.nesterov=false"]
    optimizer.check_optimizer(load("sft.yaml", [*needed, *valid]))


@pytest.mark.parametrize(
    "settings, message",
    [
        (["model.freeze=['layers\\.']"], "optim.name=muon has nothing to update: model.freeze="),
        (["model.lora.rank=4", "optim.betas=[0.9,0.99]"], "optim.betas=[0.9, 0.99] has no effect"),
        (["model.lora.rank=4", "optim.eps=1e-6"], "optim.eps=1e-06 has no effect with optim.name="),
    ],
)
def test_muon_and_the_adamw_beside_it_have_parameters(folder, settings, message):
    muon = make_config(folder, "optim.name=muon", *settings)
    with pytest.raises(InputError) as caught:
        FSDPEngine.check(muon, 1)
    assert message in str(caught.value)
    FSDPEngine.check(make_config(folder, *settings), 1)
    if "model.lora.rank=4" in settings:
        FSDPEngine.check(muon, 1, Head.VALUES)  # AdamW trains the value head
    FSDPEngine.check(make_config(folder, "optim.name=muon", *settings[1:]), 1)
