"""What the scripts set up before the models, with real files, on one rank."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

import preferences.settings
import reward_models.settings
import train_dpo
import train_ppo
import train_rm
import train_sft
from config import InputError, load
from configs.files import SCRIPTS
from data.dataset import OPTIONS
from data.selection import training_rows
from engines.parallel import device
from examples.arithmetic import make_rows, make_tokenizer
from job import setup
from job.run import Run
from tests.support.models import make_model
from tests.support.scripts import (
    CHANGED,
    change_description,
    check_changed_settings,
    set_up_in_fork,
)

NEW_TOKEN = "<new>"


@pytest.fixture(scope="module", autouse=True)
def clean_environment():
    """Setting up opens a process group and sets variables of the environment."""
    environment = dict(os.environ)
    threads = torch.get_num_threads()
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with a model, and with rows for training and for validation."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = make_tokenizer()
    vocab_size = len(tokenizer)
    tokenizer.add_tokens([NEW_TOKEN])
    make_model(folder / "model", "qwen3", vocab_size=vocab_size, max_position_embeddings=256)
    tokenizer.save_pretrained(folder / "model")
    rows, _ = make_rows()
    question = rows[0]["messages"][0]
    answers = {"val": "1" * 300, "unknown": NEW_TOKEN}
    for name, answer in answers.items():
        row = {"messages": [question, {"role": "assistant", "content": answer}]}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:9]))
    return folder


@pytest.fixture
def settings(own_signals, files, tmp_path, monkeypatch):
    """Settings for a run with a copy of the files. What the run has started ends after the test."""
    heartbeats = []
    start = setup.start_heartbeat

    def start_heartbeat(config):
        heartbeats.append(start(config))
        return heartbeats[-1]

    monkeypatch.setattr(setup, "start_heartbeat", start_heartbeat)
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    inputs = [f"model.path={tmp_path}/model", f"data.train_files={tmp_path}/train.jsonl"]
    folders = [f"output_dir={tmp_path}/out", f"data.cache_dir={tmp_path}/cache"]
    yield [*inputs, *folders, "data.train_batch_size=4", "trainer.total_epochs=3"]
    for heartbeat in heartbeats:
        heartbeat.close()
    device.shutdown()


@pytest.fixture
def set_up(settings):
    """Return a function that sets up a run of train_sft.py."""

    def call(*pairs: str):
        return train_sft.set_up(load("sft.yaml", [*settings, *pairs]))

    return call


def test_a_run_knows_its_data_steps_and_identity(set_up, tmp_path, capsys, monkeypatch):
    record = tmp_path / "out" / "heartbeat" / "rank_7"
    record.parent.mkdir(parents=True)
    record.write_text("of a run that has ended")
    bound = []
    monkeypatch.setattr(setup, "bind_cpus", lambda *values: bound.append(values))
    times = ["trainer.timeout_minutes=3", "trainer.save_minutes=2", "trainer.save_freq=7"]
    run = set_up(f"data.val_files={tmp_path}/val.jsonl", "trainer.max_checkpoints=5", *times)
    assert not record.exists()
    assert bound == [(run.named_config, run.device)]
    assert run.heartbeat.limit == 3 * 60
    assert dist.group.WORLD._get_backend(run.device).options._timeout.total_seconds() == 3 * 60
    assert (run.agreement.save_freq, run.agreement.save_seconds) == (7, 2 * 60)
    assert (len(run.train), len(run.val)) == (9, 1)
    assert (run.steps_per_epoch, run.total_steps) == (2, 6)
    assert (run.rank, run.world_size, run.resume_from) == (0, 1, None)
    assert run.base_name == str(tmp_path / "model")
    assert [*run.memory_plan.roles] == [None]
    assert run.heartbeat.explain_out_of_memory == run.memory_plan.explain
    assert run.checkpointer.directory == tmp_path / "out" / "checkpoints"
    assert run.checkpointer.max_checkpoints == 5
    progress = run.progress
    assert (progress.step, progress.skipped, progress.lora) == (0, 0, None)
    assert progress.export_dtype == run.config.engine.compute_dtype
    assert progress.tokenization["data.train_files"].endswith("train.jsonl")
    assert progress.identity.keys() == {
        "model_engine",
        "model.lora",
        "model.mtp.enable_train",
        "model.freeze",
        "optim.name",
        "optim.state_dtype",
        "the model",
        "data.train_batch_size",
        "data.train_files",
        *run.order.identity,
        "trainer.seed",
    }
    assert run.order.identity.keys() == {"data.shuffle", "data.weights", "data.sampler"}
    assert progress.identity["data.train_batch_size"] == 4
    assert progress.identity["data.train_files"].startswith(run.train.name[:16])
    assert progress.identity["the model"] == "qwen3 of 3 layers of 32"
    longest = int(run.val.lengths.max())
    assert f"warning: a row has {longest} tokens, more than the model's" in capsys.readouterr().out


def test_a_run_knows_its_settings_and_those_of_its_teacher(settings, tmp_path):
    model = tmp_path / "model"
    make_tokenizer().save_pretrained(model)
    change_description(model, num_nextn_predict_layers=1)
    pairs = [*settings, *CHANGED, f"data.val_files={tmp_path}/val.jsonl", "data.max_length=1000"]
    pairs.append(f"distill.teacher={model}")
    made = set_up_in_fork(train_sft.set_up, "sft.yaml", pairs, tmp_path / "log")
    check_changed_settings(made, model, OPTIONS)
    assert made["rows"] == {"data.train_files": 9, "data.val_files": 1}
    assert made["stages"] == ["teacher_compute", "train_batch", "validate"]
    assert made["roles"] == [None, "teacher"]


def test_without_validation_only_training_computes(settings, tmp_path):
    made = set_up_in_fork(train_sft.set_up, "sft.yaml", settings, tmp_path / "log")
    assert made["stages"] == ["train_batch"]


def test_a_setting_of_a_teacher_needs_one(settings):
    with pytest.raises(InputError, match="distill.top_k=3 does nothing without distill.teacher"):
        train_sft.set_up(load("sft.yaml", [*settings, "distill.top_k=3"]))


def test_a_token_that_only_a_validation_row_has_is_checked(set_up, tmp_path):
    with pytest.raises(InputError, match=f"^data.val_files has rows with the token {NEW_TOKEN}"):
        set_up(f"data.val_files={tmp_path}/unknown.jsonl")


def test_the_longest_row_fits_exactly_into_a_micro_batch(set_up):
    run = set_up()
    longest = int(run.train.lengths.max())
    for num_tokens in (longest, longest - 1):
        changed = {"data": {"max_tokens_per_micro_batch": num_tokens}}
        run.config = OmegaConf.merge(run.config, changed)
        if num_tokens == longest:
            rows = train_sft.load_data(run, training_rows(run.config.data))
            assert rows.lengths.tolist() == run.train.lengths.tolist()
            continue
        setting = f"data.max_tokens_per_micro_batch={num_tokens}"
        with pytest.raises(InputError, match=f"has {longest} tokens, more than {setting}: raise"):
            train_sft.load_data(run, training_rows(run.config.data))


GROUPS = "def f(responses):\n    return [0.0 for _ in responses]\n"


def test_a_function_of_groups_cannot_grade_the_greedy_response_of_remax(settings, tmp_path):
    (tmp_path / "groups.py").write_text(GROUPS)
    pairs = [*settings, f"reward.function={tmp_path}/groups.py:f"]
    train_ppo.start_grader(load("ppo.yaml", [*pairs, "algorithm.adv_estimator=rloo"])).close()
    with pytest.raises(InputError, match="but algorithm.adv_estimator=remax needs a greedy"):
        train_ppo.start_grader(load("ppo.yaml", [*pairs, "algorithm.adv_estimator=remax"]))


NO_COLUMN = "data.tools_key=tols names no column of data.train_files, which have messages, answer"


def test_a_column_that_no_row_has_is_an_error(set_up):
    with pytest.raises(InputError, match=NO_COLUMN):
        set_up("data.tools_key=tols")


def test_a_column_that_no_prompt_has_is_an_error(settings):
    config = load("ppo.yaml", [*settings, "reward.function=exact_match", "data.tools_key=tols"])
    grader = train_ppo.start_grader(config)
    try:
        with pytest.raises(InputError, match=NO_COLUMN):
            train_ppo.set_up(config, grader)
    finally:
        grader.close()


def write_answers(file, rows: list[dict], answer: str) -> None:
    """Write preferences: this answer and another one, or with a label and a score instead."""
    lines = []
    for row in rows:
        message = {"role": "assistant", "content": answer}
        lines.append(json.dumps({"prompt": "1+2", "chosen": [message]} | row) + "\n")
    file.write_text("".join(lines))


PAIR = {"rejected": "3"}
UNFIT_ANSWERS = {
    "column": (PAIR, "1", ["data.tools_key=tols"], "data.tools_key=tols names no column"),
    "label": ({"label": 1, "score": 1, "response": "1"}, "1", [], "4 of 4 rows of data.train_f"),
    "token": (PAIR, NEW_TOKEN, [], f"data.train_files has rows with the token {NEW_TOKEN}"),
    "length": (PAIR, "1" * 60, ["data.max_tokens_per_micro_batch=64"], "a pair"),
}


@pytest.mark.parametrize("script", [train_dpo, train_rm])
@pytest.mark.parametrize("what", UNFIT_ANSWERS)
def test_answers_that_do_not_fit_a_run_are_an_error(settings, tmp_path, script, what):
    row, answer, pairs, message = UNFIT_ANSWERS[what]
    if "label" in row:
        row = row | {"chosen": None}
    write_answers(tmp_path / "train.jsonl", [row] * 4, answer)
    name = script.__name__.removeprefix("train_")
    config = load(f"{name}.yaml", [*settings, *pairs])
    check = {"dpo": preferences.settings, "rm": reward_models.settings}[name].check_settings
    with pytest.raises(InputError) as caught:
        script.set_up(config, check(config))
    assert str(caught.value).startswith(message)


@pytest.fixture
def set_up_ppo(settings, monkeypatch, tmp_path):
    """Return a function that sets up a run of train_ppo.py, and the checks that it has called.

    Checks of vLLM and of teachers do nothing.
    """
    called = []

    def record(name):
        return lambda *values: called.append((name, values))

    for name in ("check_vllm_model", "check_rollout"):
        monkeypatch.setattr(f"rollout.vllm.settings.{name}", record(name))
    monkeypatch.setattr("rollout.partial.resume.check_open_groups", record("check_open_groups"))
    monkeypatch.setattr("rl.teacher.check_rows", record("check_rows"))
    monkeypatch.setattr("rl.models.check_conversations", record("check_conversations"))
    monkeypatch.setattr("job.end_tokens.warn_of_end_token", record("warn_of_end_token"))

    def call(*pairs: str):
        needed = ["reward.function=exact_match", f"data.val_files={tmp_path}/train.jsonl"]
        config = load("ppo.yaml", [*settings, *needed, *pairs])
        grader = train_ppo.start_grader(config)
        try:
            return train_ppo.set_up(config, grader), called
        finally:
            grader.close()

    return call


def test_a_run_of_ppo_checks_its_prompts_and_knows_its_settings(set_up_ppo):
    pairs = ["algorithm.kl_ctrl.kl_coef=0.25", "algorithm.use_kl_in_reward=true", "rollout.n=3"]
    run, called = set_up_ppo(*pairs, "trainer.seed=5", "model.lora.rank=2")
    checks = dict(called)
    names = ["check_rollout", "warn_of_end_token", "check_rows", "check_conversations"]
    assert [*checks] == [*names, "check_vllm_model", "check_open_groups"]
    assert checks["check_rollout"] == (run.config, 1)
    assert checks["check_rows"] == (run.config, run.train)
    assert checks["check_conversations"] == (run.config, run.datasets())
    assert checks["check_open_groups"][:2] == (run.config, None)
    assert (run.steps_per_epoch, run.total_steps) == (2, 6)
    progress = run.progress
    assert progress.kl_coef == 0.25
    assert progress.lora["rank"] == 2
    assert progress.export_dtype == run.config.engine.compute_dtype
    assert progress.tokenization["data.max_prompt_length"] == run.config.data.max_prompt_length
    assert progress.identity["rollout.n"] == 3
    assert progress.identity["trainer.seed"] == 5
    assert [*run.memory_plan.roles] == ["actor"]


def test_no_teacher_reads_the_prompts_of_a_validation(set_up_ppo):
    pairs = ["algorithm.distill.teacher=self", "data.teacher_prompt_key=answer"]
    run, _ = set_up_ppo(*pairs)
    assert run.train[0].teacher_ids not in (None, run.train[0].input_ids)
    assert run.val[0].teacher_ids is None


@pytest.mark.parametrize("num_warmup_steps, is_refused", [(5, False), (6, True)])
def test_the_warm_up_of_a_critic_leaves_a_step_for_the_actor(
    set_up_ppo, num_warmup_steps, is_refused
):
    pairs = ["algorithm.adv_estimator=gae", f"critic.warmup_steps={num_warmup_steps}"]
    if not is_refused:
        run, _ = set_up_ppo(*pairs)
        assert [*run.memory_plan.roles] == ["actor", "critic"]
        return
    with pytest.raises(InputError, match="critic.warmup_steps=6 leaves no step for the actor"):
        set_up_ppo(*pairs)


@pytest.mark.parametrize("file", ["train", "val"])
def test_a_reward_is_checked_with_a_row_of_each_file(settings, tmp_path, file):
    """Rows of val.jsonl have no answer."""
    files = [f"data.train_files={tmp_path}/train.jsonl", f"data.val_files={tmp_path}/val.jsonl"]
    if file == "train":
        files = [f"data.train_files={tmp_path}/val.jsonl", f"data.val_files={tmp_path}/train.jsonl"]
    config = load("ppo.yaml", [*settings, *files, "reward.function=exact_match"])
    grader = train_ppo.start_grader(config)
    try:
        with pytest.raises(InputError, match="exact_match: the row has no answer"):
            train_ppo.set_up(config, grader)
    finally:
        grader.close()


@pytest.mark.parametrize("script", SCRIPTS)
def test_names_that_only_wandb_reads_need_it(script):
    needed = ["model.path=m", "data.train_files=t"]
    for name in ("project_name", "experiment_name"):
        named = [*needed, f"trainer.{name}=first"]
        with pytest.raises(InputError, match=f"trainer.{name}=first has no effect without wandb"):
            setup.check_names(load(f"{script}.yaml", named))
        setup.check_names(load(f"{script}.yaml", [*named, "trainer.logger=[wandb]"]))
    setup.check_names(load(f"{script}.yaml", needed))


BEFORE_MODELS = {
    "names": ("trainer.project_name=first", "trainer.project_name=first has no effect"),
    "validation": (
        "trainer.test_freq=4",
        "trainer.test_freq=4 does nothing without data.val_files",
    ),
    "order": ("data.sampler_kwargs.x=1", "data.sampler_kwargs.x does nothing without data.sampler"),
    "assumptions": ("assume.num_gpus=8", "assume.num_gpus=8 does nothing without dry_run"),
    "loggers": ("trainer.logger=[wandb]", "wandb, which is not installed"),
}


PROBE = ["profiler.tool=msprobe", "trainer.profile_interval=[1,1]"]


@pytest.mark.parametrize("kind, is_refused", [("cuda", True), ("cpu", False)])
def test_layers_that_are_compiled_by_default_cannot_be_probed(tmp_path, kind, is_refused):
    needed = ["model.path=m", "data.train_files=t", f"output_dir={tmp_path}"]
    config = load("sft.yaml", [*needed, *PROBE, "engine.torch_compile=auto"])
    arguments = (config, torch.device(kind), 3, ["train_batch"])
    if not is_refused:
        setup.start_profiler(*arguments).close()
        return
    with pytest.raises(InputError, match="sees nothing in compiled layers: set engine.torch_comp"):
        setup.start_profiler(*arguments)


@pytest.mark.parametrize(
    "tool, rank, is_told", [("torch", "0", True), ("torch", "1", False), ("null", "0", False)]
)
def test_a_tool_that_records_nothing_is_reported_once(
    tmp_path, monkeypatch, capsys, tool, rank, is_told
):
    monkeypatch.setenv("RANK", rank)
    needed = ["model.path=m", "data.train_files=t", f"output_dir={tmp_path}"]
    settings = [f"profiler.tool={tool}", "trainer.profile_interval=[-1,-1]"]
    setup.start_profiler(load("sft.yaml", [*needed, *settings]), torch.device("cpu"), 3, [])
    assert ("profiler.tool records nothing" in capsys.readouterr().out) == is_told


@pytest.mark.parametrize("check", ["run.check_ranks_agree", "setup.check_directories"])
def test_a_run_begins_with_a_check_of_its_ranks_and_directories(settings, monkeypatch, check):
    def fail(config):
        raise InputError("they differ")

    monkeypatch.setattr(f"job.{check}", fail)
    with pytest.raises(InputError, match="they differ"):
        Run.begin(load("sft.yaml", settings))


@pytest.mark.parametrize(
    "kind, setting, is_bound",
    [("cuda", "true", True), ("cuda", "false", False), ("cpu", "true", False)],
)
def test_a_rank_stays_near_its_accelerator(monkeypatch, capsys, kind, setting, is_bound):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr("engines.parallel.affinity.bind", lambda device: f"near {device.type}")
    needed = ["model.path=m", "data.train_files=t", f"trainer.numa_affinity={setting}"]
    setup.bind_cpus(load("sft.yaml", needed), torch.device(kind))
    assert capsys.readouterr().out == ("rank 0: near cuda\n" if is_bound else "")


@pytest.mark.parametrize("what", BEFORE_MODELS)
def test_a_run_checks_its_settings(settings, monkeypatch, what):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    setting, message = BEFORE_MODELS[what]
    with pytest.raises(InputError, match=message):
        Run.begin(load("sft.yaml", [*settings, setting]))
