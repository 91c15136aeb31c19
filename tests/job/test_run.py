"""What happens around a loop, without a model."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

import job.distillation  # noqa: F401  a test replaces functions that it imports
import train_sft
from config import InputError, load
from configs.files import SCRIPTS
from job.hardware import Hardware
from job.metrics import throughput
from job.progress import Progress
from job.run import Run
from job.setup import check_directories, check_skipped, check_validation, count_steps
from job.signals import Agreement
from profiling import Profiler
from tests.support.launch import ROOT
from tests.support.models import make_model

CPU = torch.device("cpu")
STEPS_PER_EPOCH = 5


class Recorder:
    """In place of a Heartbeat."""

    def __init__(self):
        self.entered = []

    def enter(self, stage: str, step: int | None = None) -> None:
        self.entered.append((stage, step))


def make_run(out, *pairs, step: int = 0, total_steps: int = 10, script: str = "sft.yaml") -> Run:
    """Return a run that is ready to start."""
    needed = ["model.path=m", "data.train_files=t", f"output_dir={out}"]
    config = load(script, [*needed, "trainer.logger=[console]", *pairs])
    run = Run(
        config=config,
        named_config=config,
        device=CPU,
        hardware=Hardware(1, "cpu", 0),
        rank=0,
        world_size=1,
        output_dir=out,
        heartbeat=Recorder(),
        agreement=Agreement(save_freq=-1, save_minutes=0),
    )
    run.steps_per_epoch = STEPS_PER_EPOCH
    run.total_steps = total_steps
    run.train = [0]
    run.val = [0]
    run.profiler = Profiler()
    run.progress = Progress(identity={}, step=step)
    run.resume_from = None
    gc.freeze()  # start() collects garbage, which would take seconds among the suite's objects
    return run


def lines_without_metrics(capsys) -> list[str]:
    """Return the printed lines, except for those of metrics and of the picture."""
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith(("step ", "curves: "))]


@pytest.fixture
def run(own_signals, tmp_path) -> Run:
    return make_run(tmp_path, "trainer.test_freq=4")


def test_the_heartbeat_hears_of_every_stage(run):
    run.start("1 row")
    run.profiler.begin_step(3)
    with run.profiler.stage("data"):
        pass
    with run.profiler.stage("train_batch"):
        pass
    assert run.heartbeat.entered == [("data", 3), ("train_batch", 3)]


def test_collectives_wait_longer_than_the_heartbeat(process_group, own_signals, tmp_path):
    """The heartbeat names the missing ranks, so it has to be the first that gives up."""
    make_run(tmp_path, "trainer.timeout_minutes=3").start("1 row")
    timeout = dist.group.WORLD._get_backend(CPU).options._timeout
    assert timeout.total_seconds() == 4 * 60


def test_garbage_collections_skip_what_exists_before_the_loop(run):
    num_frozen = gc.get_freeze_count()
    existing = [[] for _ in range(100_000)]
    run.start("1 row")
    assert gc.get_freeze_count() >= num_frozen + len(existing)


@pytest.mark.slow
def test_a_run_that_ends_with_an_error_reports_no_leaks(tmp_path):
    """What is exempt from garbage collection at the end is a leak to some libraries."""
    program = (
        "from pathlib import Path; from vllm import LLM; from tests.job.test_run import make_run; "
        f"make_run(Path({str(tmp_path)!r})).start('1 row'); raise SystemExit('error: of mine')"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: of mine" in done.stderr
    assert "leak" not in done.stderr


def test_the_first_lines_say_where_a_run_begins(run, capsys):
    run.start("1 row")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "starting: step 0 of 10 (5 per epoch), 1 row",
        "checkpoints: when asked to stop, and after the last step",
    ]


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            ["trainer.test_freq=1"],
            "trainer.test_freq=1 does nothing without data.val_files or data",
        ),
        (["data.val_max_samples=4"], "data.val_max_samples=4 does nothing without data.val_files"),
        (
            ["data.val_files=x", "data.val_size=4"],
            "data.val_files=x and data.val_size=4 both choose",
        ),
        (["trainer.test_freq=4", "data.val_files=x"], None),
        (["trainer.test_freq=4", "data.val_max_samples=4", "data.val_size=0.5"], None),
        ([], None),
    ],
)
def test_settings_of_the_validation_need_rows_to_validate(settings, message):
    config = load("sft.yaml", ["model.path=x", "data.train_files=x", *settings])
    if message is None:
        check_validation(config)
        return
    with pytest.raises(InputError, match=message):
        check_validation(config)


def test_a_run_that_resumes_says_where_it_comes_from(own_signals, tmp_path, capsys):
    run = make_run(tmp_path, "trainer.save_freq=3", step=4)
    run.resume_from = "runs/step_4"
    run.start("1 row")
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line == "resuming from runs/step_4: step 4 of 10 (5 per epoch), 1 row"
    assert run.agreement.is_training
    assert run.agreement.total_steps == 10
    assert (tmp_path / "config.yaml").exists()


def test_a_run_that_only_validates_writes_no_configuration_and_no_checkpoints(
    own_signals, tmp_path, capsys
):
    pairs = ["data.val_files=v", "trainer.val_only=true"]
    run = make_run(tmp_path, *pairs, step=4, script="ppo.yaml")
    run.start("1 row")
    run.tracker.log(4, {"val/score": 1.0})
    run.close()
    assert not (tmp_path / "config.yaml").exists()
    assert lines_without_metrics(capsys) == [
        "starting: step 4 of 10 (5 per epoch), 1 row",
        "validated the model; nothing was trained (trainer.val_only=true)",
    ]


@pytest.mark.parametrize(
    "step, pairs, line",
    [
        (10, [], "model: {out}/hf"),
        (10, ["model.lora.rank=4"], "adapter: {out}/hf"),
        (9, [], "stopped by a signal after step 9; the same command continues from there"),
    ],
)
def test_the_last_line_says_how_a_run_ended(own_signals, tmp_path, capsys, step, pairs, line):
    run = make_run(tmp_path, *pairs, step=step)
    run.start("1 row")
    run.tracker.log(step, {"train/loss": 1.0})
    run.close()
    assert lines_without_metrics(capsys)[-1] == line.format(out=tmp_path)
    assert (tmp_path / "report.png").exists(), "the logs are closed"


@pytest.mark.parametrize(
    "step, pairs, last_line",
    [
        (10, [], "model: {out}/hf"),
        (10, ["model.lora.rank=4"], "adapter: {out}/hf"),
        (9, [], "stopped by a signal after step 9; the same command continues from there"),
        (
            4,
            ["data.val_files=v", "trainer.val_only=true"],
            "validated the model; nothing was trained (trainer.val_only=true)",
        ),
    ],
)
def test_the_logs_are_closed_however_a_run_ends(
    own_signals, tmp_path, capsys, step, pairs, last_line
):
    run = make_run(tmp_path, *pairs, "trainer.report=false", step=step, script="ppo.yaml")
    run.start("1 row")
    assert not run.tracker.bar.disable
    run.close()
    assert run.tracker.bar.disable, "the progress bar is still open"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last_line.format(out=tmp_path)
    has_checkpoints = any(line.startswith("checkpoints: ") for line in lines)
    assert has_checkpoints == ("validated" not in last_line)


def test_logs_and_configuration_name_models_as_the_user_does(run, monkeypatch, tmp_path):
    run.named_config = OmegaConf.merge(run.config, {"model": {"path": "a name on the hub"}})
    run.progress.step = 4
    made = []

    def make_tracker(*values):
        made.append(values)
        return SimpleNamespace(print=lambda text: None)

    monkeypatch.setattr("job.tracking.Tracker", make_tracker)
    run.start("1 row")
    assert made == [(run.named_config, 0, 4, 10)]
    assert "path: a name on the hub" in (tmp_path / "config.yaml").read_text()


def test_the_configuration_is_written_without_secrets(own_signals, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "a secret of mine")
    make_run(tmp_path, "trainer.experiment_name=${oc.env:MY_API_KEY}").start("1 row")
    written = (tmp_path / "config.yaml").read_text()
    assert "experiment_name: ${oc.env:MY_API_KEY}" in written
    assert "a secret of mine" not in written


@pytest.mark.parametrize("dry_run", [False, True])
def test_ranks_share_the_directories_and_a_dry_run_claims_none(tmp_path, monkeypatch, dry_run):
    checked = []
    claimed = []
    monkeypatch.setattr("job.output.check_shared", lambda *values: checked.append(values))
    monkeypatch.setattr("job.output.claim", claimed.append)
    settings = [f"output_dir={tmp_path}/out", f"data.cache_dir={tmp_path}/cache"]
    settings += [f"dry_run={dry_run}", "model.path=m", "data.train_files=t"]
    check_directories(load("sft.yaml", settings))
    assert checked == [(tmp_path / "out", "output_dir"), (tmp_path / "cache", "data.cache_dir")]
    assert claimed == ([] if dry_run else [tmp_path / "out"])


@pytest.mark.parametrize(
    "pair, key", [("data.val_size=4", "data.val_size"), ("data.val_files=v", "data.val_files")]
)
def test_data_sets_are_named_by_the_key_that_chooses_their_rows(own_signals, tmp_path, pair, key):
    run = make_run(tmp_path, pair)
    assert run.datasets() == {"data.train_files": run.train, key: run.val}
    run.val = None
    assert run.datasets() == {"data.train_files": run.train}


def test_rows_are_tokenized_with_the_runs_tokenizer_and_settings(
    own_signals, process_group, tmp_path
):
    run = make_run(tmp_path, "data.cache_dir=cache")
    run.tokenizer = "tokenizer"
    run.processor = "processor"
    expected = ["rows", "tokenizer", run.config.data, Path("cache"), "m", "processor"]

    def tokenize(*values):
        return list(values)

    assert run.tokens_of(tokenize, "rows") == expected
    assert run.tokens_of(tokenize, "rows", True) == [*expected, True]
    expected[2] = "other settings"
    assert run.tokens_of(tokenize, "rows", data="other settings") == expected


def test_the_time_of_the_last_checkpoint_belongs_to_the_last_step(run, tmp_path):
    run.start("1 row")
    run.tracker.log(3, {"train/loss": 1.0})
    run.progress.step = 3
    with run.profiler.stage("save"):
        pass
    run.heartbeat.close = lambda: None
    run.checkpointer = SimpleNamespace(wait=lambda: None)
    run.end_loop()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {"step", "train/loss", "timing/save"}


@pytest.mark.parametrize(
    "num_rows, pairs, steps",
    [
        (21, ["trainer.total_epochs=3"], (5, 15)),
        (20, ["trainer.total_epochs=3", "trainer.total_steps=7"], (5, 7)),
        (20, ["trainer.total_epochs=3", "trainer.total_steps=1"], (5, 1)),
        (4, [], (1, 1)),
    ],
)
def test_steps_are_whole_batches(num_rows, pairs, steps):
    settings = ["model.path=x", "data.train_files=x", "data.train_batch_size=4", *pairs]
    assert count_steps(load("sft.yaml", settings), range(num_rows)) == steps
    with pytest.raises(InputError, match="train_batch_size=4 is more than the 3 rows of x"):
        count_steps(load("sft.yaml", settings), range(3))


@pytest.mark.parametrize(
    "epochs, steps, is_unused",
    [(3, 7, True), (3, 15, False), (3, -1, False), (1, 7, False)],
    ids=["contradict", "agree", "epochs alone", "steps alone"],
)
def test_epochs_that_total_steps_overrides_are_reported(epochs, steps, is_unused, capsys):
    settings = ["model.path=x", "data.train_files=x", "data.train_batch_size=4"]
    settings += [f"trainer.total_epochs={epochs}", f"trainer.total_steps={steps}"]
    for script in SCRIPTS:
        count_steps(load(f"{script}.yaml", settings), range(20))
        warning = "warning: trainer.total_epochs=3 (15 steps) is not used, because"
        assert capsys.readouterr().out.startswith(warning) == is_unused


@pytest.mark.parametrize(
    "skipped, updates, is_last, is_refused",
    [
        (2, 9, False, False),
        (3, 9, False, True),
        (2, 2, False, False),
        (2, 2, True, True),
        (2, 3, True, False),
        (0, 0, True, False),
    ],
)
def test_a_run_ends_when_too_many_or_all_updates_are_skipped(skipped, updates, is_last, is_refused):
    trainer = SimpleNamespace(max_skipped_steps=2)
    if not is_refused:
        check_skipped(trainer, skipped, updates, is_last)
        return
    with pytest.raises(InputError, match=f"not finite in {skipped} of {updates} updates"):
        check_skipped(trainer, skipped, updates, is_last)


def test_validation_is_due_every_few_steps_and_after_the_last(run):
    due = []
    while run.should_continue:
        run.progress.step += 1
        if run.is_validation_due:
            due.append(run.progress.step)
    assert due == [4, 8, 10]
    run.agreement.stop = True
    assert not run.is_validation_due, "the remaining time is for the checkpoint"


def test_a_run_ends_when_it_is_asked_to_stop(run):
    assert run.should_continue
    run.agreement.stop = True
    assert not run.should_continue
    assert not run.is_complete


def test_nothing_is_due_with_a_frequency_of_minus_one(run):
    run.progress.step = 4
    assert run.is_due(2)
    assert not run.is_due(3)
    assert not run.is_due(-1)


def test_speed_is_of_one_device(monkeypatch):
    run = SimpleNamespace(world_size=4, device=CPU)
    assert throughput(run, 100.0, 8e12) == {"perf/tokens_per_second": 25.0}
    monkeypatch.setattr("engines.parallel.device.peak_flops", lambda device: 8e12)
    assert throughput(run, 100.0, 8e12)["perf/mfu"] == 0.25


@pytest.mark.parametrize("step", [10, 9])
def test_a_resumed_run_continues_its_checkpoint_and_exports_its_model(
    run, monkeypatch, capsys, step
):
    """Of four ranks, two share each row. A run that is stopped exports nothing."""
    run.world_size = 4
    run.named_config = OmegaConf.merge(run.config, {"model": {"path": "a name on the hub"}})
    run.resume_from = "step_7"
    run.tokenizer = "tokenizer"
    calls = []
    engine = SimpleNamespace(dp_size=2)

    def build(*values):
        calls.append(values)
        return engine

    def load_counters(*values):
        calls.append(values)
        return {"step": step, "skipped": 2}

    def record(name):
        return lambda *_: calls.append(name)

    run.checkpointer = SimpleNamespace(load=load_counters, wait=record("wait"))
    run.heartbeat.close = record("heartbeat.close")
    run.profiler.close = record("profiler.close")
    run.progress = train_sft.SftProgress(identity={})
    monkeypatch.setattr(train_sft, "set_up", lambda config: run)
    monkeypatch.setattr(train_sft, "train", lambda *values: calls.append(values))
    monkeypatch.setattr(Run, "close", record("run.close"))
    monkeypatch.setattr("job.end_tokens.new_end_ids", lambda run: [5])
    monkeypatch.setattr("engines.build.engine_class", lambda name: build)
    monkeypatch.setattr("engines.checkpoint.export.export_hf", lambda *values: calls.append(values))
    monkeypatch.setattr("engines.parallel.device.shutdown", record("shutdown"))

    train_sft.main(run.config)

    export = (engine, "tokenizer", run.output_dir / "hf", "a name on the hub")
    exports = [export] if step == 10 else []
    assert calls == [
        (run.config, CPU, 10),
        ("step_7", engine),
        (run, engine, None),
        "heartbeat.close",
        "profiler.close",
        "wait",
        *exports,
        "run.close",
        "shutdown",
    ]
    assert engine.new_end_ids == [5]
    assert run.progress == train_sft.SftProgress(identity={}, step=step, skipped=2)
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.startswith(f"resuming from step_7: step {step} of 10")
    assert first_line.endswith("1 row, 2 data-parallel ranks on cpu")


def test_settings_that_only_a_validation_reads_are_named_together():
    pairs = ["model.path=x", "data.train_files=x", "trainer.test_freq=3", "data.val_max_samples=5"]
    with pytest.raises(InputError) as caught:
        check_validation(load("sft.yaml", pairs))
    assert str(caught.value) == (
        "trainer.test_freq=3, data.val_max_samples=5 does nothing without data.val_files or "
        "data.val_size: set one of these, or leave it out"
    )


def test_skipped_updates_are_beside_their_limit():
    with pytest.raises(InputError) as caught:
        check_skipped(SimpleNamespace(max_skipped_steps=4), 5, 30, is_last=False)
    assert str(caught.value) == (
        "the gradient was not finite in 5 of 30 updates (trainer.max_skipped_steps=4): lower "
        "optim.lr, or look at the data and the rewards"
    )


@pytest.mark.parametrize("rank, is_printed", [("0", True), ("1", False)])
def test_one_rank_warns_of_epochs_that_are_not_used(monkeypatch, capsys, rank, is_printed):
    monkeypatch.setenv("RANK", rank)
    settings = ["model.path=x", "data.train_files=x", "data.train_batch_size=4"]
    settings += ["trainer.total_epochs=300", "trainer.total_steps=70"]
    assert count_steps(load("sft.yaml", settings), range(20)) == (5, 70)
    warning = (
        "warning: trainer.total_epochs=300 (1,500 steps) is not used, because "
        "trainer.total_steps=70 is set: leave out one of them\n"
    )
    assert capsys.readouterr().out == (warning if is_printed else "")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_reports_each_notice_of_the_order(run, capsys, rank):
    """Of five rows, the last one never fills a batch of two."""
    run.config = OmegaConf.merge(run.config, {"data": {"shuffle": False, "train_batch_size": 2}})
    run.train = range(5)
    run.rank = rank
    run.choose_order()
    assert run.order.rows_of_batch(1).tolist() == [2, 3]
    assert len(run.order.notices) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed == (run.order.notices if rank == 0 else [])


@pytest.mark.parametrize("rank, is_dry", [(0, False), (1, False), (0, True)])
def test_a_run_that_may_lack_memory_is_warned_by_one_rank(
    run, process_group, tmp_path, capsys, rank, is_dry
):
    """Also in a dry run, which has no heartbeat to explain the error of a rank without memory."""
    make_model(tmp_path / "model", "qwen3")
    model = {"model": {"path": str(tmp_path / "model")}}
    run.config = OmegaConf.merge(run.config, model)
    run.hardware = Hardware(1, "cuda", 2**20)
    run.rank = rank
    if is_dry:
        run.heartbeat = None
    run.plan_memory({None: run.config})
    expected = run.memory_plan.warnings()
    assert len(expected) == 1
    assert capsys.readouterr().out.splitlines() == (expected if rank == 0 else [])
    if not is_dry:
        assert run.heartbeat.explain_out_of_memory == run.memory_plan.explain


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_are_kept_and_written_as_the_run_is_configured(
    own_signals, process_group, tmp_path, asynchronous
):
    pairs = ["trainer.max_checkpoints=7", f"trainer.async_save={asynchronous}"]
    run = make_run(tmp_path, *pairs)
    run.find_checkpoint(Progress(identity={}))
    assert run.checkpointer.directory == tmp_path / "checkpoints"
    assert run.checkpointer.max_checkpoints == 7
    assert run.checkpointer.asynchronous == asynchronous
    assert run.resume_from is None


def test_a_run_without_rows_to_validate_never_validates(run):
    run.val = None
    run.progress.step = 4
    assert run.is_due(4)
    assert not run.is_validation_due
