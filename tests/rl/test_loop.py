"""The loop of train_ppo.py, with roles that compute nothing but record how they are called."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

import train_ppo
from config import InputError, load
from job.hardware import Hardware
from job.order import Order
from job.run import Run
from profiling import Profiler
from tests.support.samples import Episode, failure, make_episodes, make_samples

NUM_RANKS = 4
SECONDS_PER_LOOK = 2.0  # by which the clock advances whenever it is read


class Heartbeat:
    """Records the stages that it is told of."""

    def __init__(self):
        self.stages = []

    def enter(self, stage, step=None):
        self.stages.append((stage, step))


class Agreement:
    """Never stops, and saves after the last step."""

    stop = False

    def __init__(self, last_step):
        self.last_step = last_step
        self.save = False

    def begin(self, total_steps):
        """Nothing to do: there are no signals."""

    def describe(self):
        return "checkpoints: after the last step"

    def update(self, step, device):
        self.save = step == self.last_step


class Roles:
    """Draws the same samples in every step, of which the first step's actor is still waiting.

    calls: the name of each call with the number of a step or a batch that it received
    skipped: role -> how many of its updates are skipped in a step
    """

    host_group = None
    skipped = {"actor": 0, "critic": 1}

    def __init__(self, profiler, samples):
        self.profiler = profiler
        self.samples = samples
        self.rows = []
        self.saved = []
        self.calls = []

    def wake(self):
        self.calls.append("wake")
        with self.profiler.stage("wake"):
            pass

    def collect(self, dataset, rows_of_batch, batch_index, step):
        self.calls.append(("collect", batch_index, step))
        self.rows.append(rows_of_batch(batch_index))
        with self.profiler.stage("rollout_generate"):
            return self.samples, batch_index + 2

    def validate(self, dataset, step):
        self.calls.append(("validate", step))
        return self.samples

    def sleep(self):
        self.calls.append("sleep")
        return {"perf/asleep": 1.0}

    def score(self, samples):
        self.calls.append("score")
        return samples

    def divide(self, samples):
        self.calls.append("divide")
        return SimpleNamespace(num_mini_batches=3)

    def compute_log_probs(self, share, step):
        self.calls.append(("log_probs", step))

    def compute_values(self, share):
        self.calls.append("values")

    def compute_advantages(self, samples, share, kl_coef):
        self.calls.append(("advantages", kl_coef))
        return {"critic/advantages/mean": 2.0, "actor/reward_kl": 0.0}

    def update_critic(self, share, step):
        self.calls.append(("critic", step))
        return {"critic/skipped": self.skipped["critic"]}

    def update_actor(self, share, step):
        self.calls.append(("actor", step))
        return {} if step == 0 else {"actor/skipped": self.skipped["actor"]}

    def memory(self):
        return {"perf/memory": 3.0}

    def save(self, checkpointer, step, progress):
        self.calls.append(("save", checkpointer, step))
        self.saved.append(progress)


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A run of two steps and its roles, after the loop."""
    samples = make_samples([1, 2, 3], [1, 0, 2], [0, 0, 1], failures=[failure(0)])
    return finish(tmp_path, monkeypatch, samples)


def finish(tmp_path, monkeypatch, samples, *more, before=lambda run: None):
    """Take the two steps of a run; return it with its roles.

    before: changes the run before its loop
    """
    pairs = ["model.path=m", "data.train_files=t", f"output_dir={tmp_path}"]
    pairs += ["data.val_files=v", "trainer.val_before_train=true", "reward.function=my.py:letters"]
    config = load("ppo.yaml", [*pairs, "algorithm.ppo_epochs=2", "trainer.rollout_freq=-1", *more])
    run = Run(
        config=config,
        named_config=config,
        device=torch.device("cpu"),
        hardware=Hardware(NUM_RANKS, "cpu", 0),
        rank=0,
        world_size=NUM_RANKS,
        output_dir=Path(tmp_path),
        heartbeat=Heartbeat(),
        agreement=Agreement(last_step=2),
    )
    run.steps_per_epoch = 4
    run.total_steps = 2
    run.order = Order(rows_of_batch=range, identity={})
    run.train = [0]
    run.val = [0]
    run.profiler = Profiler()
    run.progress = train_ppo.PpoProgress(identity={}, kl_coef=0.5)
    run.resume_from = None
    run.checkpointer = "checkpointer"
    roles = Roles(run.profiler, samples)

    def log(step, line):
        roles.calls.append(("log", step))
        run.tracker.lines.append({"step": step, **line})

    gc.freeze()  # start() collects garbage, which would take seconds among the suite's objects
    run.start("1 prompt")
    run.tracker = SimpleNamespace(
        lines=[],
        reported=[],
        log=log,
        log_samples=lambda step, examples: None,
        report_failures=lambda step, samples: run.tracker.reported.append(step),
        passing=[],
        report_passing_scores=lambda *values: run.tracker.passing.append(values),
    )
    before(run)
    clock = iter(range(1000))
    now = SimpleNamespace(perf_counter=lambda: SECONDS_PER_LOOK * next(clock))
    monkeypatch.setattr(train_ppo, "time", now)
    train_ppo.train(run, roles)
    return run, roles


class Prompts(list):
    """The rows of a data set, of which a later one has a column more than the first."""

    uses = [{"columns": {"prompt": 2}, "other_columns": {"answer": 1}}]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_grader_checks_the_first_row_of_each_data_set(capsys, rank):
    """With the columns of all rows. Rank 0 prints what it says, once."""
    checked = []

    def check(row, columns):
        checked.append((row, columns))
        return {"a": "same", "b": "same", "c": ""}[row]

    grader = SimpleNamespace(check=check)
    later = SimpleNamespace(row="later")
    rows = {name: Prompts([SimpleNamespace(row=name), later]) for name in "abc"}
    for train, val, printed in (("a", "b", "same\n"), ("c", None, "")):
        run = SimpleNamespace(train=rows[train], val=rows.get(val), rank=rank)
        train_ppo.check_first_rows(run, grader)
        assert capsys.readouterr().out == (printed if rank == 0 else "")
    assert checked == [(row, {"prompt", "answer"}) for row in "abc"]


def test_the_heartbeat_hears_of_every_stage(finished):
    run, _ = finished
    names = ["wake", "rollout_generate"]
    assert run.heartbeat.stages == [(name, step) for step in (1, 2) for name in names]


def test_the_rows_are_those_of_the_runs_order(finished):
    """Each step has drawn two batches."""
    _, roles = finished
    assert roles.rows == [range(0), range(2)]


def test_tokens_per_second_are_those_of_one_device(finished):
    run, roles = finished
    num_tokens = roles.samples.lengths.sum().item()
    for line in run.tracker.lines[1:]:
        assert line["perf/tokens_per_second"] == num_tokens / SECONDS_PER_LOOK / NUM_RANKS
        assert line["timing/step"] == 2 * SECONDS_PER_LOOK


def test_progress_counts_batches_and_the_updates_of_each_model(finished):
    run, roles = finished
    (progress,) = roles.saved
    assert progress["step"] == 2
    assert progress["batch"] == 4
    assert progress["kl_coef"] == 0.5
    updates_per_step = 3 * 2
    assert progress["critic_updates"] == 2 * updates_per_step
    assert progress["critic_skipped"] == 2
    assert progress["actor_updates"] == updates_per_step, "it waits in the first step"
    assert progress["actor_skipped"] == 0
    assert progress["failures"] == 2
    assert [line["train/epoch"] for line in run.tracker.lines[1:]] == [0.5, 1.0]


@pytest.mark.parametrize("role, num_updates", [("actor", 6), ("critic", 12)])
def test_skipped_updates_of_either_model_end_the_run(tmp_path, monkeypatch, role, num_updates):
    """One of the actor's in its first step, the second; or one of the critic's in each step."""
    monkeypatch.setattr(Roles, "skipped", {"actor": 0, "critic": 0} | {role: 1})
    limit = 0 if role == "actor" else 1
    samples = make_samples([1], [1], [0])
    with pytest.raises(InputError, match=f"in {limit + 1} of {num_updates} updates"):
        finish(tmp_path, monkeypatch, samples, f"trainer.max_skipped_steps={limit}")


def test_an_adaptive_penalty_counts_episodes_and_not_their_branches(tmp_path, monkeypatch):
    """Without any divergence, it falls by a fifth of the episodes' share of the horizon."""
    samples = make_episodes([Episode(0, 1.0, [".x", ".xx"]), Episode(0, 0.0, [".x"])])
    assert len(samples) == 3
    control = ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=10"]
    control.append("algorithm.use_kl_in_reward=true")
    _, roles = finish(tmp_path, monkeypatch, samples, *control)
    coefficients = [call[1] for call in roles.calls if call[0] == "advantages"]
    assert coefficients == pytest.approx([0.5, 0.5 * (1 - 0.2 * 2 / 10)])
    assert roles.saved[0]["kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 2 / 10) ** 2)


def test_the_end_of_a_step_reports_its_failures(finished):
    """So the loops of examples/ report them, too, which call end_step() and not train()."""
    run, roles = finished
    run.tracker.reported.clear()
    run.progress.step = 0
    train_ppo.end_step(run, roles, roles.samples, {}, 1, 0.0)
    assert run.tracker.reported == [1]


@pytest.mark.parametrize("n, reported", [(1, []), (2, [([1, 0, 2], 1)] * 2)])
def test_a_validation_reports_the_scores_that_pass_at_k_counts(tmp_path, monkeypatch, n, reported):
    samples = make_samples([1, 2, 3], [1, 0, 2], [0, 0, 1])
    settings = [f"validation.n={n}", "validation.temperature=1"]
    run, _ = finish(tmp_path, monkeypatch, samples, *settings)
    assert run.tracker.passing == reported


def test_the_stages_of_a_step_are_called_in_order_with_its_number(finished):
    """A step is logged before it is saved: a killed run then has the metrics of its steps."""
    _, roles = finished
    expected = [("validate", 0), ("log", 0)]
    for step in (0, 1):
        expected += ["wake", ("collect", 2 * step, step + 1), "sleep", "score", "divide"]
        expected += [("log_probs", step), "values", ("advantages", 0.5)]
        expected += [("critic", step), ("actor", step)]
        expected += [("log", 1)] if step == 0 else [("validate", 2), ("log", 2)]
    assert roles.calls == [*expected, ("save", "checkpointer", 2)]


def resume(run):
    run.progress.step = 1


def forget_validation_rows(run):
    run.val = None


@pytest.mark.parametrize(
    "settings, before, steps",
    [
        ([], resume, [2]),
        (["trainer.val_before_train=false"], lambda run: None, [2]),
        (["trainer.test_freq=1"], lambda run: None, [0, 1, 2]),
        ([], forget_validation_rows, []),
    ],
)
def test_it_validates_a_new_run_before_training_and_as_often_as_it_should(
    tmp_path, monkeypatch, settings, before, steps
):
    samples = make_samples([1, 2], [1, 0], [0, 0])
    _, roles = finish(tmp_path, monkeypatch, samples, *settings, before=before)
    assert [call for call in roles.calls if call[0] == "validate"] == [
        ("validate", step) for step in steps
    ]


def test_a_signal_ends_the_loop_with_a_checkpoint(tmp_path, monkeypatch):
    """It arrives in the first step, after which the run does not validate."""

    def stop(run):
        def update(step, device):
            run.agreement.stop = run.agreement.save = True

        run.agreement.update = update

    samples = make_samples([1, 2], [1, 0], [0, 0])
    settings = ["trainer.val_before_train=false", "trainer.test_freq=1"]
    _, roles = finish(tmp_path, monkeypatch, samples, *settings, before=stop)
    assert roles.calls[-2:] == [("log", 1), ("save", "checkpointer", 1)]
    assert "validate" not in [call[0] for call in roles.calls]


@pytest.mark.parametrize("rollout_freq, files", [(1, [1, 2]), (2, [2]), (-1, [])])
def test_responses_are_written_as_often_as_they_should(tmp_path, monkeypatch, rollout_freq, files):
    written = []
    monkeypatch.setattr("rollout.records.write_samples", lambda *values: written.append(values))
    monkeypatch.setattr(Roles, "host_group", "group")
    samples = make_samples([1, 2], [1, 0], [0, 0])
    monkeypatch.setattr("rollout.records.examples", lambda *values: [])
    finish(tmp_path, monkeypatch, samples, f"trainer.rollout_freq={rollout_freq}")
    validated = [] if rollout_freq < 0 else [("validation", 0), ("validation", 2)]
    paths = {*validated, *(("rollouts", step) for step in files)}
    assert {(file.parent.name, int(file.stem[5:])) for _, file, _ in written} == paths
    assert {(id(of), group) for of, _, group in written} <= {(id(samples), "group")}


def test_a_step_logs_the_metrics_of_all_its_stages(finished):
    run, _ = finished
    first_validation, first, last = run.tracker.lines
    assert [line["step"] for line in run.tracker.lines] == [0, 1, 2]
    assert run.tracker.reported == [0, 1, 2, 2]
    assert not any(name.startswith("train/") for name in first_validation)
    for line in (first, last):
        assert line["perf/asleep"] == 1.0
        assert line["perf/memory"] == 3.0
        assert line["critic/advantages/mean"] == 2.0
        assert line["critic/skipped"] == 1
        assert "timing/wake" in line
    assert "actor/skipped" not in first
    assert last["actor/skipped"] == 0
    assert [line["train/skipped"] for line in (first, last)] == [1, 2]
    assert [line["reward/failures"] for line in (first, last)] == [1, 2]
    for line in (first_validation, last):
        assert line["val/letters"] == 1.0
    assert not any(name.startswith("val/") for name in first)


@pytest.mark.parametrize("only_validates", [False, True])
def test_a_model_that_is_only_validated_is_not_exported(monkeypatch, finished, only_validates):
    """Even if its run is complete."""
    run, roles = finished
    run.config = OmegaConf.merge(run.config, {"trainer": {"val_only": only_validates}})
    exported = []
    roles.export = lambda folder, base_name: exported.append(folder)
    roles.close = lambda: None
    run.end_loop = lambda: None
    run.close = lambda: None
    grader = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr("engines.parallel.device.shutdown", lambda: None)
    train_ppo.finish(run, roles, grader)
    assert exported == ([] if only_validates else [run.output_dir / "hf"])


@pytest.mark.parametrize("kind, kl_coef", [("fixed", 0.25), ("adaptive", 0.125)])
@pytest.mark.parametrize("step", [2, 1])
def test_a_resumed_run_continues_with_the_checkpoints_counters(
    tmp_path, monkeypatch, finished, kind, kl_coef, step
):
    """A fixed coefficient comes from the configuration. Only a finished run is exported."""
    run, roles = finished
    settings = {"kl_ctrl": {"type": kind, "kl_coef": 0.25}}
    run.config = OmegaConf.merge(run.config, {"algorithm": settings})
    run.named_config = OmegaConf.merge(run.config, {"model": {"path": "a name on the hub"}})
    run.resume_from = tmp_path / "step_1"
    run.checkpointer = "checkpointer"
    run.tokenizer = "tokenizer"
    run.progress = train_ppo.PpoProgress(identity={}, kl_coef=0.25)
    failures = [json.dumps({"step": number}) + "\n" for number in (1, 2, 3)]
    (tmp_path / "failures.jsonl").write_text("".join(failures))
    calls = []
    saved = {"step": step, "batch": 7, "kl_coef": 0.125, "actor_updates": 5, "failures": 4}
    roles.load = lambda *values: calls.append(("load", *values)) or saved
    roles.start_rollout = lambda: calls.append("start_rollout")
    roles.export = lambda *values: calls.append(("export", *values))
    roles.close = lambda: calls.append("roles.close")
    roles.actor = SimpleNamespace(dp_size=4)
    roles.rollout = SimpleNamespace(num_replicas=2)
    run.start = lambda description: calls.append(description)
    run.end_loop = lambda: calls.append("end_loop")
    run.close = lambda: calls.append("close")
    grader = SimpleNamespace(close=lambda: calls.append("grader.close"))
    monkeypatch.setattr("rl.roles.Roles", lambda *values: roles)
    monkeypatch.setattr(train_ppo, "start_grader", lambda config: grader)
    monkeypatch.setattr(train_ppo, "set_up", lambda config, grader: run)
    monkeypatch.setattr(train_ppo, "train", lambda run, roles: calls.append("train"))
    monkeypatch.setattr("torch.distributed.barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr("engines.parallel.device.shutdown", lambda: calls.append("shutdown"))

    train_ppo.main(run.config)

    export = ("export", tmp_path / "hf", "a name on the hub")
    exports = [export] if step == 2 else []
    assert calls == [
        ("load", "checkpointer", tmp_path / "step_1"),
        "start_rollout",
        "1 prompt, 4 data-parallel ranks and 2 replicas of vLLM on cpu",
        "train",
        "end_loop",
        "grader.close",
        *exports,
        "close",
        "barrier",
        "roles.close",
        "shutdown",
    ]
    counters = saved | {"kl_coef": kl_coef}
    assert {name: getattr(run.progress, name) for name in counters} == counters
    assert (tmp_path / "failures.jsonl").read_text() == "".join(failures[:step])


@pytest.mark.parametrize(
    "rollout_freq, files", [(2, ["step_0.jsonl", "step_1.jsonl", "step_2.jsonl"]), (-1, [])]
)
def test_every_validation_writes_its_responses(tmp_path, monkeypatch, rollout_freq, files):
    """trainer.rollout_freq=2 writes those of training in every second step; -1 writes none."""
    samples = make_samples([1, 2], [1, 0], [0, 0])
    settings = ["trainer.test_freq=1", f"trainer.rollout_freq={rollout_freq}"]
    run, _ = finish(tmp_path, monkeypatch, samples, *settings)
    written = (run.output_dir / "validation").glob("*")
    assert sorted(file.name for file in written) == files
