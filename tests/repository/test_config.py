import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from config import (
    InputError,
    hide_secrets,
    leave_process_group,
    load,
    report,
    run,
    without_secrets,
)
from configs.environment import LOWEST
from configs.files import CONFIGS, SCRIPTS, engine_files, flatten, read_comments
from configs.help import unknown_group_problem
from configs.json_schema import DIRECTORY, schema, write_schemas
from configs.names import readers
from configs.rules import (
    RULES,
    above,
    above_or,
    at_least,
    between,
    is_path,
    one_of,
    optional,
    problem_with,
)
from engines.checkpoint.__main__ import main as export_main
from job.setup import write_config
from profiling.report import main as report_main
from tests.support.launch import ROOT, run as run_script

NEEDED = ["model.path=m", "data.train_files=t.jsonl"]


def test_later_layers_win(tmp_path):
    (tmp_path / "a.yaml").write_text("optim: {lr: 1e-3, weight_decay: 0.5}\n")
    (tmp_path / "b.yaml").write_text("optim: {lr: 2e-3}\n")
    config = load(
        "sft.yaml",
        [*NEEDED, "optim.betas=[0.8,0.9]", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")],
    )
    assert (config.optim.lr, config.optim.weight_decay, config.optim.eps) == (2e-3, 0.5, 1e-8)
    assert list(config.optim.betas) == [0.8, 0.9]
    assert load("sft.yaml", [str(tmp_path / "b.yaml"), *NEEDED, "optim.lr=7"]).optim.lr == 7
    assert config.engine.param_dtype == "float32", "the engine's own file fills the group engine"


def test_secrets_are_shown_and_kept_as_the_variables_that_hold_them(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-1234567")
    monkeypatch.setenv("JUDGE", "pass-7654321")
    monkeypatch.setenv("OTHER", "messages")
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("BEGINNING_TOKEN", "DB_PWD-val")
    for name in ("PGPASSWORD", "DB_PWD", "GITHUB_PAT"):
        monkeypatch.setenv(name, f"{name}-value")
        assert hide_secrets(f"a {name}-value") == f"a ${{oc.env:{name}}}", "no end of it is shown"
    config = load(
        "ppo.yaml",
        [
            *NEEDED,
            f"output_dir={tmp_path}",
            "reward.kwargs.header=Bearer ${oc.env:JUDGE_API_KEY}",
            "reward.kwargs.api_key=${oc.env:JUDGE}",
            "reward.kwargs.twice=${reward.kwargs.header}",
            "trainer.project_name=sk-1234567",
        ],
    )
    shown = without_secrets(config)
    text = OmegaConf.to_yaml(shown)
    write_config(config)
    assert (tmp_path / "config.yaml").read_text() == text
    assert "sk-1234567" not in text and "pass-7654321" not in text
    assert "api_key: ${oc.env:JUDGE}" in text and "header: Bearer ${oc.env:JUDGE_API_KEY}" in text
    assert "messages_key: messages" in text and OmegaConf.to_container(
        shown, resolve=True
    ) == OmegaConf.to_container(config)


def test_home_and_environment_variables_are_expanded_in_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("DATA_TOKEN", "/secret_data")
    (tmp_path / "a.yaml").write_text(
        "output_dir: ~/x\nmodel: {path: $SCRATCH/m}\n"
        "data: {train_files: [~/a.jsonl, '${SCRATCH}/b.jsonl', $DATA_TOKEN/c.jsonl]}\n"
        "optim: {name: ~/my.py:adam, kwargs: {note: ~/$SCRATCH}}\n"
    )
    arguments = [
        "trainer.resume=${output_dir}/checkpoints/step_1",
        "data.chat_template=${oc.env:SCRATCH}/t.jinja",
        "algorithm.loss_mode=~/my.py:loss",
        "data.val_files=~/val.jsonl",
    ]
    config = load("ppo.yaml", [str(tmp_path / "a.yaml"), *arguments])
    assert config.output_dir == "/home/me/x"
    assert config.model.path == "/scratch/m"
    files = ["/home/me/a.jsonl", "/scratch/b.jsonl", "/secret_data/c.jsonl"]
    assert config.data.train_files == files
    assert config.data.val_files == "/home/me/val.jsonl"
    assert config.data.chat_template == "/scratch/t.jinja"
    assert config.optim.name == "/home/me/my.py:adam"
    assert config.algorithm.loss_mode == "/home/me/my.py:loss"
    assert config.trainer.resume == "/home/me/x/checkpoints/step_1"
    assert config.optim.kwargs.note == "~/$SCRATCH", "this is no path"
    shown = without_secrets(config)
    assert OmegaConf.to_container(shown, resolve=False)["data"]["train_files"] == [
        *files[:2],
        "${oc.env:DATA_TOKEN}/c.jsonl",
    ]


@pytest.mark.parametrize("path", ["$SCRATCH/x", "${SCRATCH}/x", "${oc.env:SCRATCH}/x"])
def test_the_same_path_is_expanded_anew_by_each_load(monkeypatch, path):
    """An argument is read once in a process, and the value that was read stays as it is."""
    for scratch in ("/one", "/two"):
        monkeypatch.setenv("SCRATCH", scratch)
        config = load("sft.yaml", [*NEEDED, f"output_dir={path}", f"data.val_files=['{path}',a]"])
        assert config.output_dir == f"{scratch}/x"
        assert config.data.val_files == [f"{scratch}/x", "a"]


@pytest.mark.parametrize("path", ["$SCRATCH/x", "${SCRATCH}/x", "${oc.env:SCRATCH}/x"])
def test_a_home_in_an_environment_variable_is_expanded(monkeypatch, path):
    """As in a file of variables, where no shell expands it. A run would make a directory ~."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "~/scratch")
    config = load("sft.yaml", [*NEEDED, f"output_dir={path}", f"data.val_files=['{path}',a]"])
    assert config.output_dir == "/home/me/scratch/x"
    assert config.data.val_files == ["/home/me/scratch/x", "a"]


@pytest.mark.parametrize(
    "argument, message",
    [
        ("output_dir=$NOWHERE/x", "output_dir=$NOWHERE/x: the environment variable NOWHERE is not"),
        ("output_dir=${NOWHERE}/x", "output_dir=${NOWHERE}/x: the environment variable NOWHERE is"),
        ("data.val_files=[a,$NOWHERE]", "data.val_files=$NOWHERE: the environment variable"),
        ("output_dir=$OF_NOBODY/x", "output_dir=$OF_NOBODY/x: ~nobody_here is not the home of any"),
        (r"output_dir=a\${b}", r"output_dir=a\${b}: a path cannot contain an escaped ${"),
        ("output_dir=~nobody_here/x", "~nobody_here is not the home of any user; write ./~nobody"),
    ],
)
def test_a_path_that_cannot_be_expanded_is_a_mistake(monkeypatch, argument, message):
    monkeypatch.setenv("OF_NOBODY", "~nobody_here/s")
    assert message in told("sft", argument)


def test_every_key_that_names_files_has_the_rule_of_a_path():
    files = [*(CONFIGS / f"{script}.yaml" for script in SCRIPTS), *engine_files()]
    comments = {key: text for file in files for key, text in read_comments(file).items()}
    name = re.compile(r"(^|[._])(path|dir|files|template)$")
    value = re.compile(r"\.py:name|^(a )?(file|directory) |path of a")
    for key, comment in comments.items():
        names_files = name.search(key) or value.search(comment)
        assert is_path(key) == bool(names_files), key


def test_the_configuration_is_read_only():
    with pytest.raises(Exception, match="read-only"):
        load("sft.yaml", NEEDED).optim.lr = 1.0


@pytest.mark.parametrize(
    "argument, message",
    [
        ("optm.lr=1", "unknown key optm.lr; the nearest is optim.lr"),
        ("data.train_file=x", "the nearest is data.train_files"),
        ("optim=1", "optim is a group of keys"),
        ("optim.lr.x=1", "unknown key optim.lr.x"),
        ("optim.lr=fast", "optim.lr='fast' must be a number"),
        ("optim.lr=-1", "optim.lr=-1 must be at least 0"),
        ("optim.betas=[0.9]", "two numbers in [0, 1)"),
        ("data.val_size=-1", "data.val_size=-1 must be a number of rows, or a share"),
        ("data.val_size=1.0", "data.val_size=1.0 must be a number of rows, or a share"),
        ("data.val_size=true", "data.val_size=True must be a number of rows, or a share"),
        ("optim.betas=[false,false]", "two numbers in [0, 1)"),
        ("optim.betas={}", "optim.betas is a value, not a group of keys"),
        ("optim.betas.0=0.5", "unknown key optim.betas.0"),
        (
            "optim.kwargs=[1]",
            "optim.kwargs is a group of keys, not a value: write optim.kwargs.NAME=...",
        ),
        ("optim.kwargs=x", "optim.kwargs is a group of keys"),
        ("optim.kwargs=null", "optim.kwargs is a group of keys"),
        ("optim=[1]", "optim is a group of keys"),
        ("data.train_batch_size=1.5", "data.train_batch_size=1.5 must be a whole number"),
        ("data.train_batch_size=0", "must be at least 1"),
        ("data.train_batch_size=true", "must be a whole number"),
        ("dry_run=1", "dry_run=1 must be true or false"),
        ("data.truncation=none", "must be one of error, left, right, drop"),
        ("data.num_proc=x", "must be a whole number or null"),
        ("data.ignored_fields=[on]", "data.ignored_fields=[True] must be a list of strings"),
        ("data.drop_processor_keys=[1]", "must be a list of strings"),
        ("trainer.save_freq=0", "must be above 0, or -1 for never"),
        ("trainer.logger=[console,neptune]", "not 'neptune'"),
        ("trainer.logger=console", "must be a list"),
        ("model_engine=ray", "model_engine=ray must be one of fsdp"),
        ("model.path=7", "must be a string"),
        ("a={", "is not YAML"),
        ("data.train_files=*.jsonl", "quote it, 'data.train_files=\"*.jsonl\"'"),
        ("absent.yaml", "absent.yaml: No such file"),
        ("output_dir=${nowhere}", "nowhere"),
        ("optim.lr=.inf", "optim.lr=inf must be a finite number"),
        ("optim.kwargs.momentum=.nan", "optim.kwargs.momentum=nan must be a finite number"),
        ("optim.kwargs.momentum=???", "optim.kwargs.momentum is missing"),
        ("optim.lr=", "optim.lr=null must be a number"),
        ("optim.lr=???", "optim.lr is missing"),
        ("data.cache_dir=None", "cache_dir='None' is a string in YAML; an empty value is null"),
        ("data.chat_template=none", "an empty value is null"),
        ("data.max_length=010", "010 is 8 in YAML; write that, or quote the text"),
        ("trainer.profile_interval=[1, 1:30]", "1:30 is 90 in YAML"),
        ("output_dir=runs/a #2", "#2 is a comment in YAML; quote the value, 'output_dir=\"runs/a"),
        ("data.prompt_key=#q", "#q is a comment in YAML"),
        ("optim.kwargs={ns_steps:5}", "needs a space after the colon; write '{ns_steps: 5}'"),
        ("optim.kwargs={momentum:0.9}", "write '{momentum: 0.9}'"),
        ("OPTIM.LR=1", "the nearest is optim.lr"),
        ("trainer.total_steps=0", "or -1 for as many as total_epochs has"),
        ("trainer.max_checkpoints=0", "or -1 for all"),
        ("engine.fsdp_size=0", "or -1 for all"),
    ],
)
def test_a_mistake_names_the_key_and_what_to_change(argument, message):
    with pytest.raises(InputError) as caught:
        load("sft.yaml", [*NEEDED, argument])
    assert message in str(caught.value)


def test_values_without_their_keys_are_answered_with_the_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert told("sft", str(tmp_path)).endswith(f"write model.path={tmp_path}")
    assert told("sft", str(rows)) == f"{rows} is not YAML: write data.train_files={rows}"
    assert told("sft", "absent.parquet").endswith("write data.train_files=absent.parquet")


def test_a_problem_of_an_interpolation_is_one_line_with_its_key():
    problem = told("sft", "trainer.experiment_name=${oc.env:NOT_SET}")
    assert problem.startswith("trainer.experiment_name: ") and "NOT_SET" in problem
    assert "object_type" not in problem


def test_numbers_of_files_are_read_as_they_are_written(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("trainer: {seed: 010, total_steps: 1:30}\ndata: {max_length: 0x10}\n")
    problems = told("sft", str(file)).splitlines()
    assert problems == [
        f"{file}: 010 is 8 in YAML; write that, or quote the text",
        f"{file}: 1:30 is 90 in YAML; write that, or quote the text",
    ]
    file.write_text("trainer: {seed: 1_000, experiment_name: '010'}\noptim: {lr: 1.0e-4}\n")
    config = load("sft.yaml", [*NEEDED, str(file), "data.max_length=0x10"])
    assert (config.trainer.seed, config.trainer.experiment_name) == (1000, "010")
    assert (config.optim.lr, config.data.max_length) == (1e-4, 16)


def test_a_key_left_open_in_a_file_is_missing_until_a_later_layer_sets_it(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("optim:\n  lr: ???\n")
    assert "optim.lr is missing" in told("sft", str(file))
    assert load("sft.yaml", [*NEEDED, str(file), "optim.lr=0.5"]).optim.lr == 0.5


def told(script, *arguments):
    with pytest.raises(InputError) as caught:
        load(f"{script}.yaml", [*NEEDED, *arguments])
    return str(caught.value)


@pytest.mark.parametrize(
    "argument, message",
    [
        ("rollout.top_k=0", "between 1 and 1024, or be -1 for all tokens"),
        ("validation.top_k=5000", "between 1 and 1024"),
        ("rollout.temperature=0.0", "at least 0.01"),
        ("validation.temperature=0.001", "must be 0 (greedy) or at least 0.01"),
        ("validation.temperature=.inf", "must be a finite number"),
        (r"rollout.stop=[\n]", "a backslash and a letter in place of a line break"),
        (r"validation.stop=[x, '\n\n']", "a backslash and a letter in place of a line break"),
        ("rollout.stop=[1]", "must be a list of strings"),
    ],
)
def test_bounds_of_sampling(argument, message):
    assert message in told("ppo", argument)


@pytest.mark.parametrize(
    "script, key, advice",
    [
        # The first group wins.
        ("ppo", "lr", "the nearest is optim.lr"),
        ("ppo", "n", "the nearest is rollout.n"),
        ("ppo", "max_tokens", "the nearest is rollout.max_tokens"),
        ("ppo", "validatoin.n", "the nearest is validation.n"),
        # Nothing is near.
        ("sft", "optim.momentum", "--help lists the keys"),
        ("sft", "zzz", "--help lists the keys"),
        ("ppo", "model.x.y.z", "--help lists the keys"),
        ("ppo", "data.zzz.path", "--help lists the keys"),
        # Something is near, and it is something else.
        ("ppo", "data.val_batch_size", "all rows of data.val_files are validated at once"),
        (
            "ppo",
            "reward_model.reward_kwargs.overlong_buffer_cfg.len",
            "the nearest is reward.overlong_buffer",
        ),
        ("ppo", "critic.enable", "algorithm.adv_estimator=gae uses a critic"),
        ("sft", "num_workers", "data.num_proc processes tokenize"),
        ("sft", "stage", "train_sft.py, train_dpo.py, train_rm.py and train_ppo.py are the stages"),
        ("ppo", "optimizer", "the nearest is optim.name"),
        # A key that another script or engine reads.
        ("sft", "rollout.n", "only train_ppo.py reads it"),
        ("sft", "engine.tensor_model_parallel_size", "only model_engine=megatron reads it"),
        ("sft", "num_generations", "the nearest is rollout.n (a key of train_ppo.py)"),
        # verl
        ("ppo", "actor_rollout_ref.actor.optim.lr", "the nearest is optim.lr"),
        ("ppo", "critic.optim.lr", "the nearest is critic.lr"),
        ("ppo", "actor_rollout_ref.model.path", "the nearest is model.path"),
        ("ppo", "critic.model.path", "the nearest is critic.path"),
        ("ppo", "distillation.enabled", "algorithm.distill.teacher turns it on"),
        ("ppo", "distillation.distillation_loss.loss_max_clamp", "docs/distillation.md"),
        (
            "ppo",
            "distillation.distillation_loss.loss_mode",
            "algorithm.distill.mode is reverse_kl",
        ),
        ("sft", "teacher_model_name_or_path", "distill.teacher in train_sft.py"),
        ("ppo", "data.max_response_length", "the nearest is rollout.max_tokens"),
        (
            "ppo",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "the nearest is algorithm.ppo_mini_batch_size",
        ),
        (
            "ppo",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "data.max_tokens_per_micro_batch",
        ),
        ("ppo", "actor_rollout_ref.actor.use_dynamic_bsz", "always on"),
        (
            "ppo",
            "actor_rollout_ref.actor.clip_ratio_high",
            "the nearest is algorithm.clip_ratio_high",
        ),
        ("ppo", "actor_rollout_ref.actor.kl_loss_coef", "the nearest is algorithm.kl_loss_coef"),
        (
            "ppo",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            "the nearest is engine.context_parallel_size",
        ),
        ("ppo", "actor_rollout_ref.actor.fsdp_config.param_offload", "offload.parameters"),
        ("ppo", "actor_rollout_ref.actor.fsdp_config.fsdp_size", "the nearest is engine.fsdp_size"),
        (
            "ppo",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
            "the nearest is engine.tensor_model_parallel_size",
        ),
        (
            "ppo",
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "the nearest is rollout.tensor_parallel_size",
        ),
        ("ppo", "actor_rollout_ref.rollout.val_kwargs.n", "the nearest is validation.n"),
        ("ppo", "actor_rollout_ref.rollout.name", "vLLM always generates"),
        ("ppo", "algorithm.rollout_correction.rollout_is", "the nearest is algorithm.rollout_is"),
        ("ppo", "custom_reward_function.path", "use reward.function="),
        ("ppo", "reward_model.model.path", "reward.model.path names a sequence classifier"),
        ("ppo", "trainer.n_gpus_per_node", "torchrun --nproc-per-node"),
        ("ppo", "trainer.total_training_steps", "the nearest is trainer.total_steps"),
        ("ppo", "trainer.default_local_dir", "the nearest is output_dir"),
        ("sft", "optim.warmup_steps_ratio", "the nearest is optim.lr_warmup_steps_ratio"),
        # TRL, Hugging Face, PEFT
        ("sft", "learning_rate", "the nearest is optim.lr"),
        ("sft", "optim.learning_rate", "the nearest is optim.lr"),
        ("sft", "gradient_accumulation_steps", "data.train_batch_size is a step's batch"),
        ("sft", "warmup_steps", "optim.lr_warmup_steps_ratio is the share"),
        ("sft", "bf16", "engine.param_dtype=bfloat16"),
        ("sft", "max_seq_length", "the nearest is data.max_length"),
        ("sft", "target_modules", "the nearest is model.lora.target_modules"),
        ("ppo", "max_completion_length", "the nearest is rollout.max_tokens"),
        ("ppo", "epsilon_high", "the nearest is algorithm.clip_ratio_high"),
        ("ppo", "steps_per_generation", "use algorithm.ppo_mini_batch_size"),
        ("sft", "neftune_noise_alpha", "not supported"),
        ("sft", "ddp_timeout", "trainer.timeout_minutes, in minutes"),
        # LLaMA-Factory
        ("sft", "template", "data.chat_template is a file with another one"),
        ("sft", "max_samples", "the nearest is data.train_max_samples"),
        ("sft", "val_size", "the nearest is data.val_size"),
        ("sft", "quantization_bit", "training quantized models is not supported"),
        ("sft", "mask_history", "data.train_on=last trains only the last turn"),
        ("sft", "tokenized_path", "read from data.cache_dir"),
        # A group of another project does not hide the name in it.
        ("sft", "optimizer.lr", "the nearest is optim.lr"),
        ("sft", "optimizer.weight_decay", "the nearest is optim.weight_decay"),
        ("sft", "lora.dropout", "the nearest is model.lora.dropout"),
        (
            "ppo",
            "actor_rollout_ref.actor.fsdp_config.reshard_after_forward",
            "the nearest is engine.reshard_after_forward",
        ),
        ("ppo", "actor_rollout_ref.profiler.enable", "profiler.tool names the tool"),
        (
            "ppo",
            "actor_rollout_ref.rollout.agent.num_workers",
            "the nearest is rollout.episode_workers",
        ),
    ],
)
def test_a_key_that_is_not_known_is_answered_with_ours(script, key, advice):
    message = told(script, f"{key}=1")
    assert message.startswith(f"unknown key {key}; ") and advice in message
    assert advice.startswith("the nearest is") or "the nearest" not in message


@pytest.mark.parametrize(
    "arguments, advice",
    [
        (["--learning_rate", "1e-5"], "write optim.lr=1e-5"),
        (["--learning_rate=1e-5"], "write optim.lr=1e-5"),
        (["--lr=3"], "write optim.lr=3"),
        (["-optim.lr", "3"], "write optim.lr=3"),
        (["--use_remove_padding", "my.yaml"], "write engine.use_remove_padding=..."),
        (
            ["--tensor-model-parallel-size", "2"],
            "write engine.tensor_model_parallel_size=2 (a key of model_engine=megatron)",
        ),
        (["+optim.lr=3"], "write optim.lr=3"),
        (["++trainer.total_training_steps=3"], "write trainer.total_steps=3"),
        (["~optim.lr"], "write optim.lr=..."),
        (["--bf16", "--fp16"], "engine.param_dtype=bfloat16"),
        (["--nproc-per-node=8"], "torchrun --nproc-per-node"),
        (["--verbose"], "--help lists the keys"),
    ],
)
def test_arguments_of_argparse_and_hydra_are_answered_with_the_form_to_use(arguments, advice):
    message = told("sft", *arguments)
    assert message.startswith(f"{arguments[0]}: {advice}")
    assert message.count("; arguments are YAML files and key=value pairs") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["optim.lr", "=", "1e-5"], "optim.lr = 1e-5: write optim.lr=1e-5, without spaces"),
        (["optim.lr=", "1e-5"], "optim.lr= 1e-5: write optim.lr=1e-5, without spaces"),
        (["optim.lr", "=1e-5"], "optim.lr =1e-5: write optim.lr=1e-5, without spaces"),
        (["optimizer.lr", "=", "3"], "optimizer.lr = 3: write optim.lr=3, without spaces"),
        (["optim.lr", "1e-5"], "optim.lr 1e-5: write optim.lr=1e-5"),
        (["optim.lr", "data.num_proc=1"], "optim.lr: write optim.lr=..."),
        (["=3"], "=3: there is no key before the ="),
        (["--lr", "3"], "--lr: write optim.lr=3"),
        (["--lr", "-1"], "--lr: write optim.lr=...\n-1: --help lists the keys"),
        (["--lr=2", "optim.lr"], "--lr=2: write optim.lr=2\noptim.lr: write optim.lr=..."),
        (["~optim.lr", "optim.lr"], "~optim.lr: write optim.lr=...\noptim.lr: write optim.lr=..."),
    ],
)
def test_a_pair_with_spaces_or_dashes_is_answered_with_the_form_to_use(arguments, message):
    usage = "; arguments are YAML files and key=value pairs"
    assert told("sft", *arguments) == message + usage
    with_another = told("sft", *arguments, "--verbose")
    assert with_another == f"{message}\n--verbose: --help lists the keys{usage}"


@pytest.mark.slow
def test_every_key_that_may_be_null_can_be_null():
    nullable = [key for key, rule in RULES.items() if rule.allows_null]
    assert "data.system_key" in nullable
    for script in SCRIPTS:
        keys = [key for key in nullable if key in flatten(load(f"{script}.yaml", NEEDED))]
        config = load(f"{script}.yaml", [*NEEDED, *(f"{key}=null" for key in keys)])
        values = flatten(config)
        assert {values[key] for key in keys} == {None}
        document = schema(script)
        jsonschema.validate(OmegaConf.to_container(config), document)


def test_a_pair_without_a_value_is_still_empty():
    assert load("sft.yaml", [*NEEDED, "data.val_files=", "optim.lr=1"]).data.val_files is None


def test_every_mistake_of_a_command_is_reported_in_a_line_of_its_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.yaml").write_text("trainer: {save_steps: 5}\noptim.lr: 1\n")
    (tmp_path / "good.yaml").write_text("optim: {learning_rate: 1}\n")
    arguments = [
        *NEEDED,
        str(tmp_path / "mine.yaml"),
        str(tmp_path / "good.yaml"),
        "absent.yaml",
        "--warmup_ratio",
        "0.1",
        "+actor_rollout_ref.rollout.n=5",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=m",
        "trainer.nnodes=1",
        "trainer.nnodes=1",
        "zzz=1",
    ]
    expected = [
        "--warmup_ratio: write optim.lr_warmup_steps_ratio=0.1",
        "+actor_rollout_ref.rollout.n=5: write rollout.n=5; arguments are YAML files and key=value",
        "absent.yaml: No such file",
        "optim.lr: keys of a YAML file cannot contain dots",
        "unknown key optim.learning_rate; the nearest is optim.lr",
        "unknown key actor_rollout_ref.model.path; the nearest is model.path",
        "unknown key trainer.nnodes; torchrun --nnodes sets it",
        "unknown key zzz; --help lists the keys",
    ]
    monkeypatch.setattr("sys.argv", ["train_ppo.py", *arguments])
    with pytest.raises(SystemExit) as left:
        run(None, "ppo.yaml", "")
    lines = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and len(lines) == len(expected)
    for line, beginning in zip(lines, expected):
        assert line.startswith(f"error: {beginning}")


def test_every_wrong_value_is_reported():
    with pytest.raises(InputError) as caught:
        load("sft.yaml", ["optim.lr=fast", "optim.betas=[1]", "model.path=m"])
    assert caught.value.problems == (
        "optim.lr='fast' must be a number, like its default 1e-05",
        "optim.betas=[1] must be two numbers in [0, 1)",
        "data.train_files is missing: pass data.train_files=... or set it in a YAML file",
    )


def test_keys_of_another_script_or_engine_share_a_line():
    keys = ["engine.fsdp_size=2", "rollout.n=2", "engine.float8=rowwise", "zzz=1"]
    assert told("sft", "model_engine=megatron", *keys, "engine.fsdp_size=4").splitlines() == [
        "unknown key zzz; --help lists the keys",
        "unknown keys engine.fsdp_size, engine.float8; only model_engine=fsdp reads them",
        "unknown key rollout.n; only train_ppo.py reads it",
    ]


def test_every_key_that_advice_names_exists():
    places = readers()
    names = OmegaConf.to_container(OmegaConf.load(CONFIGS / "names.yaml"))
    assert len(names) > 600
    for name, advice in names.items():
        assert name not in places, f"{name} is a key of ours"
        words = (
            advice.split("=")[0].split()
            if " " not in advice
            else re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", advice)
        )
        for word in words:
            assert word in places or re.search(r"\.(py|yaml|jsonl?|md|png)$", word), (
                f"{name}: {advice}: {word} is no key of ours"
            )


def test_a_missing_value_and_a_broken_file(tmp_path):
    with pytest.raises(InputError, match="data.train_files is missing"):
        load("sft.yaml", NEEDED[:1])
    (tmp_path / "bad.yaml").write_text("optim: [1\n")
    with pytest.raises(InputError, match="bad.yaml is not YAML"):
        load("sft.yaml", [*NEEDED, str(tmp_path / "bad.yaml")])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(InputError, match="must hold keys and values"):
        load("sft.yaml", [*NEEDED, str(tmp_path / "list.yaml")])
    (tmp_path / "dots.yaml").write_text("trainer: {seed: 1}\noptim.lr: 1\n")
    with pytest.raises(
        InputError,
        match=r"optim.lr: keys of a YAML file cannot contain dots; write a group, optim: {lr: ...}",
    ):
        load("sft.yaml", [*NEEDED, str(tmp_path / "dots.yaml")])


VALUES = [
    -1,
    0,
    1,
    2,
    3,
    0.5,
    1.5,
    -0.5,
    True,
    "",
    "x",
    "token",
    "all",
    "tensor",
    None,
    [],
    [0.5, 0.9],
    [1, 2],
    [-1, -1],
    [0],
    [True, True],
    ["console"],
    ["x", "y"],
    [""],
]


def test_schemas_are_written_where_the_yaml_files_expect_them(tmp_path, capsys):
    write_schemas(tmp_path / "schema")
    files = sorted((tmp_path / "schema").iterdir())
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "schema" / f"{s}.json") for s in SCRIPTS
    ]
    assert [file.stem for file in files] == sorted(SCRIPTS)
    for file in files:
        assert json.loads(file.read_text()) == schema(file.stem)


def check_values(validator, defaults: Path, engine: dict[str, str]) -> None:
    """Check that the schema accepts each value that fits a key of this file, and no other one."""
    for key, default in flatten(OmegaConf.load(defaults)).items():
        for value in VALUES if key != "model_engine" else []:
            fits = problem_with(key, value, default) is None
            tree = value
            for part in reversed(key.split(".")):
                tree = {part: tree}
            assert validator.is_valid(tree | engine) == fits, f"{key}={value!r}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_schema_of_the_yaml_files(script):
    path = DIRECTORY / f"{script}.json"
    jsonschema.Draft202012Validator.check_schema(schema(script))
    validator = jsonschema.Draft202012Validator(schema(script))
    runs = [
        file
        for file in [*CONFIGS.glob("demo/*.yaml"), *CONFIGS.glob("models/*/*.yaml")]
        if f"schema/{script}.json\n" in file.read_text()
    ]
    assert len(runs) >= (1 if script == "rm" else 3)
    files = [CONFIGS / f"{script}.yaml", *runs, *CONFIGS.glob("model_engine/*.yaml")]
    for file in files:
        validator.validate(OmegaConf.to_container(OmegaConf.load(file)))
        pointer = re.match(r"# yaml-language-server: \$schema=(.*)\n", file.read_text())[1]
        assert (file.parent / pointer).resolve().parent == path.parent.resolve()
        assert "model_engine" in file.parts or (file.parent / pointer).resolve() == path.resolve()

    # An editor refuses what a run refuses, and nothing else.
    tensor_parallel = {"engine": {"tensor_model_parallel_size": 2}}
    assert validator.is_valid(
        tensor_parallel | {"model_engine": "megatron"}
    ) and validator.is_valid(tensor_parallel)
    for wrong in (
        {"optim": {"learning_rate": 1.0}},
        {"optm": {}},
        {"optim": 1},
        {"model_engine": "ray"},
        tensor_parallel | {"model_engine": "fsdp"},
        {"engine": {"tensor_parallel": 2}},
    ):
        assert not validator.is_valid(wrong), wrong
    check_values(validator, CONFIGS / f"{script}.yaml", {})
    for path in engine_files():
        check_values(validator, path, {"model_engine": path.stem})
    assert validator.is_valid(
        {"optim": {"lr": "${oc.env:LR}"}, "data": {"num_proc": "${oc.env:CPUS}"}}
    )

    trainer = schema(script)["properties"]["trainer"]["properties"]
    assert trainer["seed"]["default"] == 0 and trainer["log_freq"]["description"].startswith(
        "steps between lines on the console"
    )
    assert trainer["resume_override"]["description"].endswith(
        "rows are seen twice or not at all"
    ), "comments of several lines"
    assert (
        "\n" not in trainer["resume_override"]["description"]
        and "#" not in trainer["resume_override"]["description"]
    )
    assert schema(script)["properties"]["profiler"]["description"].startswith("wall time by stage")


@pytest.mark.parametrize(
    "rank, local_rank, said",
    [
        (None, None, "error: {}\n"),
        ("0", "0", "error: {}\n"),
        ("1", "1", ""),
        ("1", None, ""),
        ("8", "0", "error on rank 8: {}\n"),
    ],
)
def test_an_error_is_one_line_a_node_and_exit_code_2(monkeypatch, capsys, rank, local_rank, said):
    monkeypatch.setattr("config.SECONDS_TO_PRINT", 0.1)
    monkeypatch.setattr("sys.argv", ["train_sft.py", *NEEDED])
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)

    monkeypatch.setenv("HUB_TOKEN", "hf_123456")

    def main(config):
        raise InputError("broken hf_123456")

    with pytest.raises(SystemExit) as left:
        run(main, "sft.yaml", "")
    assert left.value.code == 2 and capsys.readouterr().err == said.format(
        "broken ${oc.env:HUB_TOKEN}"
    )


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "abc"}, "RANK='abc' must be a whole number, at least 0: start with torchrun"),
        ({"RANK": ""}, "RANK='' must be a whole number"),
        ({"RANK": "-1"}, "RANK='-1' must be a whole number, at least 0"),
        ({"RANK": "0", "LOCAL_RANK": "x"}, "LOCAL_RANK='x' must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be a whole number, at least 1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' must be a whole number"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "0", "MASTER_PORT": "http"}, "MASTER_PORT='http' must be a whole number"),
        ({"RANK": "0", "MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be at most 65535"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "65535"}, None),
        ({}, None),
    ],
)
def test_environment_variables_of_ranks_are_numbers(monkeypatch, capsys, variables, message):
    monkeypatch.setattr("sys.argv", ["train_sft.py", *NEEDED])
    for name in LOWEST:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    configs = []
    if message is None:
        run(configs.append, "sft.yaml", "")
        assert len(configs) == 1
        return
    with pytest.raises(SystemExit) as left:
        run(configs.append, "sft.yaml", "")
    lines = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and len(lines) == 1 and not configs
    assert re.match(rf"error( on rank 2)?: the environment variable {re.escape(message)}", lines[0])


def help_of(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["train_ppo.py", *arguments])
    run(None, "ppo.yaml", "the script's docstring")
    return capsys.readouterr().out


def test_help_prints_groups(monkeypatch, capsys):
    text = help_of(monkeypatch, capsys, "--help", "rollout", "my.yaml", "optim.lr", "engine")
    assert "docstring" not in text and "train_files" not in text and "weight_decay" not in text
    lines = text.splitlines()
    assert lines[:2] == ["# rollout in configs/ppo.yaml", "rollout:"]
    for key, place in readers().items():
        if key.startswith(("rollout.", "engine.")):
            name = key.rpartition(".")[2]
            assert any(re.match(rf" +{name}:", line) for line in lines), (key, place)
    assert sum(line.startswith("  lr:") for line in lines) == 1
    assert "model_engine/fsdp.yaml" in text and "model_engine/megatron.yaml" in text
    assert text.rstrip().endswith("tokens whose logits are in memory at the same time")
    assert "# log-probabilities cover the full vocabulary" in text, "a comment's second line"


def test_help_of_a_group_may_be_one_argument(monkeypatch, capsys):
    texts = []
    for arguments in (["--help", "rollout", "optim"], ["--help=rollout,optim"]):
        monkeypatch.setattr("sys.argv", ["train_ppo.py", *arguments])
        run(print, "ppo.yaml", "The script.")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "max_num_seqs" in texts[0] and "val_files" not in texts[0]


@pytest.mark.parametrize("main", [export_main, report_main])
def test_modules_print_their_usage(main, capsys):
    for arguments, code in (["--help"], 0), (["exprt", "a", "b"], 2), ([], 2):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == code
        output = capsys.readouterr()
        assert "python -m" in (output.err if code else output.out)
        assert ("error: " in output.err) == bool(code)
        assert ("not understood: exprt a b" in output.err) == (len(arguments) == 3)


def test_help_of_a_group_that_does_not_exist_lists_the_groups(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_ppo.py", "--help", "rolout"])
    with pytest.raises(SystemExit) as left:
        run(None, "ppo.yaml", "")
    message = capsys.readouterr().err
    assert left.value.code == 2 and message.startswith("error: --help rolout: there is no such")
    assert "the groups are model, data, rollout, " in message and "engine" in message


def test_the_nearest_group_of_help_is_a_key_and_no_advice():
    files = [CONFIGS / "ppo.yaml"]
    problem = unknown_group_problem("optim.learning_rate", files)
    assert problem.startswith("--help optim.learning_rate: there is no such group; the nearest is ")
    assert problem.partition("the nearest is ")[2].partition(";")[0] == "optim.lr"
    # configs/names.yaml answers this name with a sentence.
    for name in ("load", "zzz"):
        problem = unknown_group_problem(name, files)
        assert problem.startswith(f"--help {name}: there is no such group; the groups are model,")


def test_help_lists_every_key(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_sft.py", "--help"])
    run(None, "sft.yaml", "the script's docstring")
    said = capsys.readouterr().out
    assert said.startswith("the script's docstring\n")
    for key, place in readers().items():
        is_of_other_script = place in ("train_dpo.py", "train_ppo.py", "train_rm.py")
        assert is_of_other_script or f"{key.rpartition('.')[2]}:" in said, key


def without_packages(tmp_path, *kept: str) -> dict[str, str]:
    """Return environment variables with which `python -S` finds only these modules."""
    for name in kept:
        module = importlib.import_module(name)
        folder = Path(module.__file__).parent
        (tmp_path / name).symlink_to(folder, target_is_directory=True)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(
    "kept, missing, importer",
    [
        ([], "omegaconf", "config.py"),
        (["omegaconf", "yaml", "antlr4"], "(?!omegaconf)[a-z_]+", r"\S+\.py"),
    ],
)
def test_a_missing_package_is_one_line(tmp_path, kept, missing, importer):
    """As with another Python than the environment's, or with an incomplete environment."""
    env = without_packages(tmp_path, *kept)
    command = [sys.executable, "-S", "train_ppo.py", *NEEDED]
    error = run_script(command, returncode=2, fresh=True, **env).stderr
    assert re.fullmatch(
        rf"error: \S+ \(Python 3\.1[12]\.\d+\) has no module '{missing}', which "
        rf"\S*{importer} imports: activate the environment .*\n",
        error,
    )


def test_schemas_of_keys_of_different_kinds():
    model = schema("sft")["properties"]["model"]["properties"]
    assert model["path"].keys() == {"description", "type"}, "a required key has no default"
    assert model["path"]["type"] == "string"
    trainer = schema("sft")["properties"]["trainer"]["properties"]
    interpolation = {"$ref": "#/$defs/interpolation"}
    seed = {"type": "integer"} | RULES["trainer.seed"].schema if "trainer.seed" in RULES else None
    assert trainer["seed"]["anyOf"] == [seed or {"type": "integer"}, interpolation]
    assert trainer["seed"]["default"] == 0


def test_an_argument_that_is_no_file_is_answered_with_the_form_of_arguments():
    with pytest.raises(InputError) as error:
        load("sft.yaml", [*NEEDED, "unknown"])
    message = str(error.value)
    assert message.startswith("unknown: No such file or directory; arguments are YAML files or")
    assert "data.train_files" not in message


@pytest.mark.parametrize(
    "key, value, default, problem",
    [
        ("no.rule", 5, None, "must be a string"),
        ("no.rule", "text", None, None),
        ("no.rule", "none", None, "is a string in YAML; an empty value is null"),
        ("no.rule", "none", "text", None),
        ("no.rule", "None", "text", "is a string in YAML; an empty value is null"),
        ("no.rule", 5, "???", "must be a string"),
        ("no.rule", 1, 0.5, None),
        ("no.rule", 1.5, 2, "must be a whole number, like its default 2"),
        ("no.rule", True, 2, "must be a whole number, like its default 2"),
        ("no.rule", 1, False, "must be true or false, like its default False"),
        ("no.rule", float("inf"), 0.5, "must be a finite number"),
    ],
)
def test_types_of_values(key, value, default, problem):
    assert problem_with(key, value, default) == problem


def test_optional_values_are_null_or_follow_their_rule():
    whole = optional(int, at_least(2))
    problems = [whole.problem(value) for value in (None, 2, 1, 2.5, True, "2")]
    wrong_type = "must be a whole number or null"
    assert problems == [None, None, "must be at least 2", *[wrong_type] * 3]
    assert whole.schema == {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "null"}]}


@pytest.mark.parametrize(
    "made, inside, outside",
    [
        (one_of("a", "b"), ["a", "b"], ["c", 1]),
        (at_least(1), [1, 2.5], [0.99]),
        (above(1), [1.01], [1, 0]),
        (above_or(1, -1, "all"), [2, -1], [1, 0, -2]),
        (between(0, 1), [0, 0.5, 1], [-0.01, 1.01]),
    ],
)
def test_bounds_of_rules(made, inside, outside):
    """Their schemas have the same bounds."""
    validator = jsonschema.Draft202012Validator(made.schema)
    for value in inside:
        assert made.problem(value) is None
        assert validator.is_valid(value)
    for value in outside:
        assert made.problem(value).startswith("must be ") or "must lie" in made.problem(value)
        assert not validator.is_valid(value)


def test_the_process_group_is_left_after_a_mistake(monkeypatch, capsys):
    """Otherwise its threads could end the process with another exit code."""
    monkeypatch.setattr("config.reported_errors", [])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        leave_process_group()
        assert dist.is_initialized(), "nothing was reported"
        report(InputError("a mistake"))
        leave_process_group()
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert capsys.readouterr().err == "error: a mistake\n"


def test_other_ranks_end_after_the_first_has_printed(monkeypatch, capsys):
    """torchrun stops all ranks when one has ended."""
    monkeypatch.setattr("config.reported_errors", [])
    monkeypatch.setattr("config.SECONDS_TO_PRINT", 0.3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    start = time.perf_counter()
    report(InputError("a mistake"))
    assert time.perf_counter() - start > 0.2
    assert capsys.readouterr().err == ""


def test_a_process_ends_with_its_parent():
    """Its parent ends before or after it asks for that."""
    code = """if True:
        import os, sys, time
        from config import die_with
        late = sys.argv[1] == "late"
        parent = os.getpid()
        if os.fork() == 0:
            if late:
                while os.getppid() == parent:
                    time.sleep(0.01)
            die_with(parent)
            time.sleep(0 if late else 600)
        elif not late:
            time.sleep(0.2)
        os._exit(0)"""
    for moment in ("early", "late"):
        command = [sys.executable, "-c", code, moment]
        # The pipes close when the child has ended, too.
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        has_noticed = "which started this one, has ended" in result.stderr
        assert has_noticed == (moment == "late")


def test_the_values_of_a_free_group_follow_its_rule():
    arguments = ["model.path=m", "data.train_files=t", "reward.function=exact_match"]
    with pytest.raises(InputError, match=r"algorithm.distill.teachers.math=3 must be a string"):
        load("ppo.yaml", [*arguments, "algorithm.distill.teachers.math=3"])
