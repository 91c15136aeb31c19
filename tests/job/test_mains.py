"""What the scripts of fine-tuning do around their loops, without a model."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

import train_dpo
import train_rm
import train_sft
from engines.heads import Head
from job.run import Run
from tests.job.test_run import CPU, make_run

STEPS = 10
PROGRESS = {
    train_sft: train_sft.SftProgress,
    train_dpo: train_dpo.DpoProgress,
    train_rm: train_rm.RewardProgress,
}


class Recorder:
    """Everything around a run of a script, which records what is called.

    engine: the trained engine, whose checkpoint ends with step `step`
    """

    def __init__(self, script: ModuleType, run: Run, step: int):
        self.script = script
        self.run = run
        self.step = step
        self.calls: list = []
        self.engine = SimpleNamespace(dp_size=2)

    def of(self, name: str, result=None):
        """Return a function that records its call under this name."""

        def call(*values, **options):
            self.calls.append((name, *values, *options.values()))
            return result

        return call

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = self.run
        run.world_size = 4
        run.named_config = OmegaConf.merge(run.config, {"model": {"path": "a name on the hub"}})
        run.tokenizer = "tokenizer"
        run.resume_from = "step_7"
        run.progress = PROGRESS[self.script](identity={})
        load = self.of("load", {"step": self.step, "skipped": 2})
        run.checkpointer = SimpleNamespace(load=load)
        run.start = self.of("start")
        monkeypatch.setattr(Run, "end_loop", lambda run: self.calls.append(("end_loop",)))
        monkeypatch.setattr(Run, "close", lambda run: self.calls.append(("close",)))
        trainer = SimpleNamespace(engine=self.engine)
        for name, result in {
            "preferences.settings.check_settings": "loss",
            "reward_models.settings.check_settings": "loss",
            "preferences.reference.role_configs": "roles",
            "preferences.trainer.PreferenceTrainer.build": trainer,
            "reward_models.settings.choose_padding": 7,
            "engines.build.engine_class": self.of("build", self.engine),
            "job.distillation.role_configs": "roles",
            "job.distillation.build_teachers": "teachers",
            "job.end_tokens.new_end_ids": [5],
        }.items():
            monkeypatch.setattr(name, lambda *values, result=result: result)
        for name in ("job.plan.print_plan", "engines.checkpoint.export.export_hf"):
            monkeypatch.setattr(name, self.of(name.rpartition(".")[2]))
        monkeypatch.setattr("engines.parallel.device.shutdown", self.of("shutdown"))
        monkeypatch.setattr(self.script, "set_up", lambda *values: run)
        monkeypatch.setattr(self.script, "train", self.of("train"))


@pytest.fixture(params=[train_sft, train_dpo, train_rm], ids=lambda script: script.__name__)
def record(request, own_signals, tmp_path, monkeypatch):
    """Return a function that calls a script's main(), and returns the Recorder."""

    def call(step: int, *settings: str) -> Recorder:
        script = request.param
        defaults = f"{script.__name__.removeprefix('train_')}.yaml"
        recorder = Recorder(script, make_run(tmp_path, *settings, script=defaults), step)
        recorder.install(monkeypatch)
        script.main(recorder.run.config)
        return recorder

    return call


@pytest.mark.parametrize("step", [STEPS, STEPS - 1])
def test_a_resumed_run_continues_and_exports_if_it_is_complete(record, step):
    recorder = record(step)
    run = recorder.run
    engine = recorder.engine
    assert run.progress == PROGRESS[recorder.script](identity={}, step=step, skipped=2)
    names = [name for name, *_ in recorder.calls]
    exports = ["export_hf"] if step == STEPS else []
    middle = ["load", "start", "train", "end_loop", *exports, "close", "shutdown"]
    assert [name for name in names if name != "build"] == middle
    calls = {name: values for name, *values in recorder.calls}
    assert calls["load"] == ["step_7", engine]
    assert calls["start"] == ["1 row, 2 data-parallel ranks on cpu"]
    assert calls["train"][0] is run
    if exports:
        expected = [engine, "tokenizer", run.output_dir / "hf", "a name on the hub"]
        assert calls["export_hf"] == expected


def test_the_engine_has_what_the_script_gives_it(record):
    recorder = record(STEPS)
    calls = {name: values for name, *values in recorder.calls}
    config = recorder.run.config
    if recorder.script is train_rm:
        assert calls["build"] == [config, CPU, STEPS, Head.VALUES]
        assert recorder.engine.padding_id == 7
        _, trainer = calls["train"]
        assert (trainer.engine, trainer.loss) == (recorder.engine, "loss")
        return
    assert recorder.engine.new_end_ids == [5]
    if recorder.script is train_sft:
        assert calls["build"] == [config, CPU, STEPS]
        assert calls["train"][1:] == [recorder.engine, "teachers"]
        return
    _, trainer = calls["train"]
    assert trainer.stage == recorder.run.profiler.stage


def test_a_dry_run_prints_the_plan_and_builds_nothing(record):
    recorder = record(STEPS, "dry_run=true")
    (plan, run, roles), end = recorder.calls
    assert (plan, end) == ("print_plan", ("shutdown",))
    assert run is recorder.run
    of_reward_model = {"trained reward model": run.config}
    assert roles == (of_reward_model if recorder.script is train_rm else "roles")


def test_a_step_with_a_teacher_adds_its_outputs_and_the_divergence(own_signals, tmp_path):
    run = make_run(tmp_path, "distill.teacher=wise", "distill.coef=0.5", step=4)
    calls = []
    engines = []

    def stage(name, engine):
        engines.append((name, engine))
        return teaching(name)

    class teaching:
        """Records when a block begins and ends."""

        def __init__(self, name):
            self.name = name

        def __enter__(self):
            calls.append(f"begin {self.name}")

        def __exit__(self, *_):
            calls.append(f"end {self.name}")

    def train_batch(share, loss_fn, step, micro_batches):
        calls.append(("step", step, micro_batches))
        log_probs = torch.tensor([-1.0, -3.0])
        return loss_fn(log_probs, torch.ones(2), share.fields)[0].item()

    def compute(parts):
        calls.append(("compute", parts))
        return {"divergence": torch.tensor([2.0, 6.0])}

    run.profiler = SimpleNamespace(stage=stage)
    share = SimpleNamespace(fields={"loss_mask": torch.tensor([1.0, 0.0])})
    engine = SimpleNamespace(train_batch=train_batch)
    teachers = SimpleNamespace(
        engine="teacher", compute=compute, teaching=lambda engine: teaching("teaching")
    )
    loss = train_sft.train_batch(run, engine, teachers, share, "micro-batches", 2)
    assert loss == pytest.approx(1.0 / 2 + 0.5 * 2.0 / 2)
    assert engines == [("teacher_compute", "teacher"), ("train_batch", engine)]
    assert calls == [
        "begin teacher_compute",
        ("compute", [(share, "micro-batches")]),
        "end teacher_compute",
        "begin train_batch",
        "begin teaching",
        ("step", 4, "micro-batches"),
        "end teaching",
        "end train_batch",
    ]
    alone = SimpleNamespace(fields={"loss_mask": torch.tensor([1.0, 0.0])})
    assert train_sft.train_batch(run, engine, None, alone, [], 2) == pytest.approx(0.5)
