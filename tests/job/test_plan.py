"""The plan that a dry run prints."""

import shutil
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from common import disk
from config import InputError, load
from data.chat.tokenizer import ChatTokenizer
from engines.build import engine_class
from engines.heads import Head
from engines.memory import GIB
from examples.arithmetic import make_tokenizer
from job.hardware import Hardware
from job.plan import describe_rows, layout, print_memory, print_plan, print_rollout
from rollout.vllm import capacity, routing
from tests.support.models import make_model


def test_each_role_is_estimated_for_its_own_model(tmp_path, capsys):
    """The critic has twice as many layers as the actor."""
    roles = {}
    for role, num_layers in (("actor", 2), ("critic", 4)):
        make_model(tmp_path / role, "qwen3", num_hidden_layers=num_layers)
        needed = [f"model.path={tmp_path / role}", "data.train_files=t", f"output_dir={tmp_path}"]
        roles[role] = load("sft.yaml", needed)
    run = SimpleNamespace(
        named_config=roles["actor"],
        world_size=1,
        hardware=Hardware(1, "cpu", 0),
        train=[],
        chat_tokenizer=lambda: ChatTokenizer(make_tokenizer()),
        val=None,
        total_steps=8,
        resume_from="runs/step_5",
    )
    print_plan(run, roles)
    printed = capsys.readouterr().out
    assert "steps: 8, continuing from runs/step_5\n" in printed
    assert "memory of one rank for the actor [GiB], estimated, with 16,384 tokens" in printed
    engine = engine_class("fsdp")
    actor_bytes = engine.checkpoint_bytes(roles["actor"], Head.LOG_PROBS)
    critic_bytes = engine.checkpoint_bytes(roles["critic"], Head.VALUES)
    assert f"checkpoint of the actor: {disk.format_bytes(actor_bytes)};" in printed
    assert f"checkpoint of the critic: {disk.format_bytes(critic_bytes)};" in printed


def test_the_plan_says_when_few_tokens_need_the_most_memory(tmp_path, capsys):
    make_model(tmp_path, "llama", vocab_size=4096, num_hidden_layers=1)
    pairs = [f"model.path={tmp_path}", "data.train_files=t", f"output_dir={tmp_path}"]
    pairs += ["data.max_tokens_per_micro_batch=2", "engine.activation_checkpointing=true"]
    run = SimpleNamespace(world_size=2, hardware=Hardware(2, "cpu", 0))
    print_memory(load("sft.yaml", pairs), run, role=None)
    expected = "memory of one rank [GiB], estimated at the end of the backward pass, with 2 tokens"
    assert capsys.readouterr().out.startswith(expected)


class Rows(list):
    stats = {"rows": 3, "tokens": 7, "max_length": 4}


@pytest.mark.parametrize("warnings, answer", [([], "fits"), (["warning"], "may run out of memory")])
def test_the_plan_says_whether_a_run_fits_its_devices(tmp_path, capsys, warnings, answer):
    make_model(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    needed = [f"model.path={tmp_path}", "data.train_files=t", f"output_dir={tmp_path}"]
    config = load("sft.yaml", [*needed, "dry_run=true", "model.lora.rank=4"])
    run = SimpleNamespace(
        named_config=config,
        world_size=2,
        hardware=Hardware(2, "cuda", 80 * GIB),
        memory_plan=SimpleNamespace(warnings=lambda: warnings, describe=lambda: "80 GiB"),
        train=[],
        chat_tokenizer=lambda: ChatTokenizer(make_tokenizer()),
        val=Rows("abc"),
        total_steps=8,
        resume_from=None,
    )
    print_plan(run, {"actor": config, "reference": config})
    lines = capsys.readouterr().out.splitlines()
    assert "layout: 2 ranks on cuda with 80.0 GiB each = 2 data-parallel" in lines
    assert "val: 3 rows with 7 tokens; the longest row has 4 tokens" in lines
    assert "steps: 8" in lines
    assert lines[-1] == f"this run {answer}: 80 GiB"
    frozen = [number for number, line in enumerate(lines) if "for the reference [GiB]" in line]
    stored = [number for number, line in enumerate(lines) if line.startswith("checkpoint of the")]
    assert len(frozen) == len(stored) == 1, "the reference is in no checkpoint"
    assert stored < frozen
    assert len([line for line in lines if line.startswith(f"weights: {tmp_path} has none")]) == 2


@pytest.mark.parametrize(
    "num_bytes, settings, weights",
    [
        (0, "", None),
        (0, "rollout.kv_cache_gib=2", None),
        (64 * GIB, "rollout.max_num_seqs=7", None),
        (64 * GIB, "model.lora.rank=4", "has a copy, because the trainer's weights are sharded"),
        (64 * GIB, "model.lora.rank=4 engine.fsdp_size=1", "uses the trainer's own"),
        (
            64 * GIB,
            "model.lora.rank=4 engine.fsdp_size=1 rollout.share_base=never",
            "has a copy, because rollout.share_base=never",
        ),
    ],
)
def test_the_plan_shows_vllms_memory(tmp_path, capsys, num_bytes, settings, weights):
    make_model(tmp_path, "qwen3")
    config = load("ppo.yaml", [f"model.path={tmp_path}", "data.train_files=t", *settings.split()])
    run = SimpleNamespace(world_size=2, hardware=Hardware(2, "cuda", num_bytes))
    print_rollout(config, run)
    num_sequences = capacity.max_num_seqs(config, 2, num_bytes)
    decodes = f"it decodes {num_sequences} responses at once"
    if num_bytes:
        awake = capacity.AwakeMemory.of(config, num_bytes).describe()
        expected = [
            f"vLLM while awake: {awake}; {decodes}",
            f"vLLM while asleep, and CUDA: about {capacity.ASLEEP_BYTES / GIB:.0f} GiB",
        ]
    else:
        kv_cache_gib = config.rollout.kv_cache_gib or capacity.CPU_KV_CACHE_GIB
        expected = [f"vLLM's KV cache: {kv_cache_gib} GiB; {decodes}"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(expected)] == expected
    if weights is None:
        assert len(lines) == len(expected)
        return
    (line,) = lines[len(expected) :]
    assert line.startswith(f"frozen weights: vLLM {weights}")


def test_rows_are_described_by_their_counts():
    stats = {"rows": 1, "dropped_long": 2, "truncated": 0, "tokens": 1, "max_length": 1}
    assert describe_rows(stats) == "1 row with 1 token; the longest row has 1 token"
    stats = {"rows": 3, "tokens": 1_530, "max_length": 530, "loss_tokens": 41, "dropped_images": 2}
    assert describe_rows(stats) == (
        "3 rows with 1,530 tokens, 41 of them trained; the longest row has 530 tokens; "
        "dropped images: 2"
    )


@pytest.mark.parametrize(
    "world_size, pairs, text",
    [
        (8, [], "8 data-parallel"),
        (8, ["engine.context_parallel_size=2"], "4 data-parallel x 2 context-parallel"),
        (
            8,
            ["engine.context_parallel_size=auto"],
            "8 data-parallel, which share long sequences",
        ),
        (
            16,
            [
                "model_engine=megatron",
                "engine.tensor_model_parallel_size=2",
                "engine.pipeline_model_parallel_size=4",
                "engine.expert_model_parallel_size=2",
            ],
            "2 data-parallel x 2 tensor-parallel x 4 pipeline-parallel; experts divided by 2 "
            "within a pipeline stage",
        ),
        (
            8,
            ["rollout.tensor_parallel_size=2"],
            "8 data-parallel to train, 4 vLLM x 2 tensor-parallel to generate",
        ),
    ],
)
def test_the_layout_names_every_kind_of_parallelism(world_size, pairs, text):
    script = "ppo.yaml" if "rollout" in str(pairs) else "sft.yaml"
    assert layout(load(script, ["model.path=m", "data.train_files=t", *pairs]), world_size) == text


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    "settings", [["model.lora.rank=4"], ["model.freeze=['layers\\.0\\.']"]], ids=["lora", "freeze"]
)
def test_a_dry_run_needs_no_weights(tmp_path, engine, settings):
    """The estimate is that of the whole model. A run itself needs the weights."""
    make_model(tmp_path / "whole", "qwen3")
    shutil.copytree(tmp_path / "whole", tmp_path / "described")
    (tmp_path / "described" / "model.safetensors").unlink()
    needed = ["data.train_files=t", f"output_dir={tmp_path}", f"model_engine={engine}", *settings]

    def estimate(name, *more):
        config = load("sft.yaml", [f"model.path={tmp_path / name}", *needed, *more])
        kind = engine_class(config.model_engine)
        kind.check(config, 1)
        stages = kind.estimate_memory(config, 1, "cpu", Head.LOG_PROBS, True)
        return [stage.rows() for stage in stages], kind.checkpoint_bytes(config, Head.LOG_PROBS)

    assert estimate("described", "dry_run=true") == estimate("whole")
    with pytest.raises(InputError, match="described lacks model.safetensors"):
        estimate("described")


def test_the_plan_hides_secrets_and_describes_the_data_before_the_steps(
    tmp_path, capsys, monkeypatch
):
    """It names the model as the user does."""
    monkeypatch.setenv("MY_API_KEY", "a secret of mine")
    make_model(tmp_path, "qwen3")
    needed = [f"model.path={tmp_path}", "data.train_files=t", f"output_dir={tmp_path}/out"]
    config = load("sft.yaml", [*needed, "trainer.experiment_name=${oc.env:MY_API_KEY}"])
    run = SimpleNamespace(
        named_config=OmegaConf.merge(config, {"model": {"path": "a name on the hub"}}),
        world_size=1,
        hardware=Hardware(1, "cpu", 0),
        train=Rows("abc"),
        chat_tokenizer=lambda: ChatTokenizer(make_tokenizer()),
        val=Rows("d"),
        total_steps=8,
        resume_from=None,
    )
    monkeypatch.setattr("job.plan.preview_dataset", lambda data, chat, number: [f"{number} rows"])
    print_plan(run, {None: config})
    printed = capsys.readouterr().out
    assert "a secret of mine" not in printed
    assert "path: a name on the hub" in printed
    lines = printed[printed.index("layout: ") :].splitlines()
    rows = "3 rows with 7 tokens; the longest row has 4 tokens"
    assert lines[1:6] == [
        f"train: {rows}",
        f"val: {rows}",
        "the first rows, with the trained tokens highlighted:",
        "3 rows",
        "steps: 8",
    ]
    assert lines[6].startswith("memory of one rank [GiB], estimated, with 16,384 tokens")
    assert lines[-1].startswith("checkpoint: ")
    assert lines[-1].endswith(f" are free in {tmp_path}/out")


def test_each_pipeline_stage_has_a_column_of_its_memory(tmp_path, capsys):
    make_model(tmp_path, "qwen3", num_hidden_layers=4)
    needed = [f"model.path={tmp_path}", "data.train_files=t", f"output_dir={tmp_path}"]
    pairs = ["model_engine=megatron", "engine.pipeline_model_parallel_size=2"]
    config = load("sft.yaml", [*needed, *pairs, "data.max_tokens_per_micro_batch=2048"])
    run = SimpleNamespace(world_size=2, hardware=Hardware(2, "cuda", 80 * GIB))
    print_memory(config, run, None)
    header, *rows, checkpoint = capsys.readouterr().out.splitlines()
    assert header.startswith("memory of one rank [GiB], estimated")
    assert header.endswith(" for each pipeline stage, with 2,048 tokens in a micro-batch:")
    stages = engine_class("megatron").estimate_memory(config, 2, "cuda", Head.LOG_PROBS, True)
    assert len(stages) == 2
    expected = []
    for name in stages[0].rows():
        numbers = [stage.rows()[name] / GIB for stage in stages]
        expected.append(f"  {name:<30}" + "".join(f"{number:9.2f}" for number in numbers))
    assert rows == expected
    assert checkpoint.startswith("checkpoint: ")


def test_the_plan_names_the_memory_of_replayed_experts(tmp_path, capsys):
    make_model(tmp_path, "qwen3_moe")
    needed = [f"model.path={tmp_path}", "data.train_files=t", "rollout.routing_replay=true"]
    config = load("ppo.yaml", needed)
    run = SimpleNamespace(world_size=2, hardware=Hardware(2, "cpu", 0))
    print_rollout(config, run)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [routing.describe_memory(config, 2)]


@pytest.mark.parametrize(
    "script, pairs, text",
    [
        (
            "sft",
            [
                "engine.tensor_model_parallel_size=2",
                "engine.context_parallel_size=4",
                "engine.pipeline_model_parallel_size=2",
            ],
            "1 data-parallel x 2 tensor-parallel x 4 context-parallel x 2 pipeline-parallel",
        ),
        (
            "ppo",
            ["engine.pipeline_model_parallel_size=2", "engine.expert_model_parallel_size=4"],
            "8 data-parallel x 2 pipeline-parallel; experts divided by 4 within a pipeline stage "
            "to train, 16 vLLM x 1 tensor-parallel to generate",
        ),
    ],
)
def test_the_layout_of_megatron_has_several_kinds_at_once(script, pairs, text):
    needed = ["model.path=m", "data.train_files=t", "model_engine=megatron"]
    assert layout(load(f"{script}.yaml", [*needed, *pairs]), 16) == text
