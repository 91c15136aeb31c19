"""The engines that train_dpo.py builds, and the stages in which they compute."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig

from config import load
from preferences import trainer as trainer_module
from preferences.losses import PreferenceLoss
from preferences.trainer import PreferenceTrainer
from tests.support.loops import Dataset

TOTAL_STEPS = 7
ADAPTERS = "model.lora.rank=4"
CACHE = "reference.cache=true"
OWN = "reference.path=other"
TRAINED = ("m", TOTAL_STEPS, {})


class RecordingEngine:
    """An engine that computes nothing.

    built: (the path of its model, its number of steps, its options)
    """

    def __init__(self, config, device, total_steps, **options):
        self.built = (config.model.path, total_steps, options)

    def plan(self, lengths, group_size):
        sequences = range(len(lengths))
        return SimpleNamespace(sequences=sequences, micro_batches=None, metrics={"perf/plan": 1.0})

    def train_batch(self, share, loss_fn, step, micro_batches):
        return {"loss": float(step)}

    def log_probs(self, share, micro_batches):
        return torch.zeros(len(share.input_ids)), None, None


def configure(*settings: str) -> DictConfig:
    return load("dpo.yaml", ["model.path=m", "data.train_files=t", "data.max_length=9", *settings])


@pytest.fixture
def build(monkeypatch):
    """Return a function: settings -> the trainer, and the engines and caches in their order."""
    events = []

    def build_engine(*values, **options):
        engine = RecordingEngine(*values, **options)
        events.append(engine.built)
        return engine

    def cache_reference(config, datasets, cache_dir, make_reference):
        reference = make_reference()
        events.append(("cache", datasets, cache_dir, reference.without_adapters))

    monkeypatch.setattr(trainer_module, "engine_class", lambda name: build_engine)
    monkeypatch.setattr(trainer_module, "create_groups", lambda config: events.append("groups"))
    monkeypatch.setattr(trainer_module, "cache_reference", cache_reference)

    def build(*settings: str) -> tuple[PreferenceTrainer, list]:
        config = configure(*settings)
        loss = PreferenceLoss.of(config)
        device = torch.device("cpu")
        trainer = PreferenceTrainer.build(config, loss, device, TOTAL_STEPS, ["rows"], "folder")
        assert trainer.engine.built == TRAINED
        assert trainer.max_length == 9
        return trainer, events

    return build


def frozen(path: str) -> tuple:
    return (path, TOTAL_STEPS, {"optimize": False})


@pytest.mark.parametrize(
    "settings, path", [([], "m"), ([OWN], "other"), ([OWN, ADAPTERS], "other")]
)
def test_a_reference_of_its_own_is_built_after_the_trained_engine(build, settings, path):
    trainer, events = build(*settings)
    assert events == [TRAINED, frozen(path)]
    assert trainer.reference.engine.built == frozen(path)
    assert not trainer.reference.without_adapters


@pytest.mark.parametrize("settings, path", [([CACHE], "m"), ([CACHE, OWN, ADAPTERS], "other")])
def test_a_cached_reference_has_left_before_the_trained_engine_is_built(build, settings, path):
    trainer, events = build(*settings)
    assert events == ["groups", frozen(path), ("cache", ["rows"], "folder", False), TRAINED]
    assert trainer.reference is None


def test_the_trained_engine_without_its_adapters_is_the_reference(build):
    trainer, events = build(ADAPTERS)
    assert events == [TRAINED]
    assert trainer.reference.engine is trainer.engine
    assert trainer.reference.without_adapters


def test_its_log_probabilities_without_adapters_are_cached(build):
    trainer, events = build(ADAPTERS, CACHE)
    assert events == [TRAINED, ("cache", ["rows"], "folder", True)]
    assert trainer.reference is None


def test_a_loss_that_reads_no_reference_has_none(build):
    trainer, events = build("algorithm.loss=simpo")
    assert events == [TRAINED]
    assert trainer.reference is None


def test_each_stage_of_a_step_has_the_engine_that_computes(build, monkeypatch):
    """KTO has all stages. Its baseline is estimated with rows of the whole batch."""
    trainer, _ = build("algorithm.loss=kto")
    stages = []

    @contextmanager
    def stage(name, engine):
        stages.append((name, engine))
        yield

    def estimate_kl(engine, reference, batch, max_length):
        assert (engine, reference, max_length) == (trainer.engine, trainer.reference, 9)
        return torch.tensor(0.5), 0.5

    monkeypatch.setattr(trainer_module, "estimate_kl", estimate_kl)
    trainer.stage = stage
    batch = Dataset().batch([0, 1])
    monkeypatch.setattr(trainer_module.AnswerCounts, "of", lambda batch: None)
    monkeypatch.setattr(PreferenceLoss, "of_batch", lambda self, counts, kl: kl)
    assert trainer.train_batch(batch, 3) == {"loss": 3.0, "kl": 0.5, "perf/plan": 1.0}
    assert stages == [
        ("compute_kl", trainer.engine),
        ("ref_compute_log_prob", trainer.reference.engine),
        ("train_batch", trainer.engine),
    ]
