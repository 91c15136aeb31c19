"""A step and a validation of preference training, with engines whose numbers are simple."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from config import InputError, load
from data.batching.batch import Batch
from engines.model.model_files import fingerprint
from preferences import reference as reference_module, trainer as trainer_module
from preferences.losses import PreferenceLoss
from preferences.mismatched import mismatched
from preferences.reference import Reference, check_models, identify_loss, model_stages, role_configs
from preferences.settings import check_settings
from preferences.trainer import PreferenceTrainer
from preferences.validation import validate
from tests.preferences.test_losses import MIXED_LENGTHS, PAIR_LENGTHS, make_batch
from tests.support.models import make_model
from tests.support.planned import PlannedEngine

BETA = 0.5
FACTOR = -0.02
BASE = -0.03
KTO = "algorithm.loss=kto"
LORA = "model.lora.rank=4"
CACHE = "reference.cache=true"


class Engine(PlannedEngine):
    """The log-probability of a token is its number times a factor; another one without adapters.

    calls: also the steps that it has taken
    """

    def __init__(self, factor: float, without: float = 0.0):
        super().__init__()
        self.factor = factor
        self.without = without

    def log_probs(self, batch: Batch, micro_batches) -> tuple[Tensor, None, None]:
        return self.factor * batch.input_ids.float(), None, None

    def train_batch(self, share: Batch, loss_fn, step: int, micro_batches) -> dict[str, float]:
        self.calls.append(("step", step))
        loss, amounts = loss_fn(self.log_probs(share, micro_batches)[0], None, share.fields)
        return {"loss": loss.item(), **{name: amount.item() for name, amount in amounts.items()}}

    @contextmanager
    def without_adapters(self):
        self.factor, self.without = self.without, self.factor
        yield
        self.factor, self.without = self.without, self.factor


def configure(*settings: str):
    needed = ["model.path=m", "data.train_files=t", f"algorithm.beta={BETA}"]
    return load("dpo.yaml", [*needed, *settings])


def make_trainer(*settings: str, max_length: int = 100) -> PreferenceTrainer:
    loss = PreferenceLoss.of(configure(*settings))
    reference = Reference(Engine(BASE), without_adapters=False)
    trainer = PreferenceTrainer(Engine(FACTOR), loss, reference, max_length)
    trainer.stages = []
    trainer.stage = lambda *stage: trainer.stages.append(stage) or nullcontext()
    return trainer


def rewards_of(batch: Batch) -> dict[str, float]:
    """Return the mean reward of each kind of answer."""
    sums: dict[int, list[float]] = {0: [], 1: []}
    for sequence in batch.split([1] * len(batch)):
        learned = (sequence.input_ids * sequence.fields["loss_mask"]).sum().item()
        sums[int(sequence.fields["answer"][0]) % 2].append(BETA * (FACTOR - BASE) * learned)
    means = {kind: sum(values) / len(values) for kind, values in sums.items()}
    return {"rewards/chosen": means[0], "rewards/rejected": means[1]}


def test_a_step_compares_pairs_with_the_reference():
    trainer = make_trainer()
    results = trainer.train_batch(make_batch(PAIR_LENGTHS, has_reference=False), 5)
    assert {name: results[name] for name in ("rewards/chosen", "rewards/rejected")} == (
        pytest.approx(rewards_of(make_batch(PAIR_LENGTHS)), rel=1e-4)
    )
    assert results["perf/plan_efficiency"] == 0.75
    assert trainer.engine.calls == [2, ("step", 5)], "the answers of a pair stay together"
    engines = {"ref_compute_log_prob": trainer.reference.engine, "train_batch": trainer.engine}
    assert trainer.stages == list(engines.items())


def test_a_step_of_kto_begins_with_its_baseline():
    trainer = make_trainer(KTO, max_length=6)
    batch = make_batch(MIXED_LENGTHS, has_reference=False)
    results = trainer.train_batch(batch, 5)
    pairs = mismatched(batch, 6)
    total = (pairs.input_ids * pairs.fields["loss_mask"]).sum().item()
    assert results["kl"] == pytest.approx((FACTOR - BASE) * total / len(pairs), rel=1e-4)
    assert trainer.engine.calls == [1, 1, ("step", 5)]
    assert [name for name, _ in trainer.stages] == [
        "compute_kl",
        "ref_compute_log_prob",
        "train_batch",
    ]
    evaluated = trainer.evaluate(batch)
    assert evaluated["loss"] == pytest.approx(results["loss"])


@pytest.mark.parametrize("others", [(), (0, 1)])
def test_a_row_that_another_rank_reports_is_not_counted_twice(others):
    trainer = make_trainer()
    batch = make_batch(PAIR_LENGTHS, has_reference=False)
    whole = trainer.evaluate(batch)
    alone = trainer.evaluate(batch.select([0, 1]))
    trainer.engine.others = others
    part = trainer.evaluate(batch)
    for name, value in whole.items():
        left_out = alone[name] / len(PAIR_LENGTHS) if others else 0.0
        assert part[name] == pytest.approx(value - left_out, rel=1e-4), name


class Rows:
    """A data set of the rows of PAIR_LENGTHS."""

    def __len__(self) -> int:
        return len(PAIR_LENGTHS)

    def batch(self, rows: range) -> Batch:
        return make_batch([PAIR_LENGTHS[row] for row in rows], has_reference=False)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_validation_covers_all_rows(process_group, batch_size):
    trainer = make_trainer()
    metrics = validate(trainer, Rows(), batch_size)
    each = [trainer.evaluate(Rows().batch([row])) for row in range(len(PAIR_LENGTHS))]
    if batch_size == 4:
        each = [trainer.evaluate(Rows().batch(range(4)))]
    else:  # a single row at the end belongs to the batch before
        each = [*each[:2], *[trainer.evaluate(Rows().batch([2, 3]))] * 2]
    for name in ("loss", "rewards/accuracies", "rewards/margins"):
        mean = sum(result[name] for result in each) / len(each)
        assert metrics[f"val/{name}"] == pytest.approx(mean), name


@pytest.mark.parametrize(
    "settings, built, has_reference",
    [
        ([], ["trained", "frozen"], True),
        (["algorithm.loss=simpo"], ["trained"], False),
        ([LORA], ["trained"], True),
        ([LORA, "reference.path=other"], ["trained", "frozen"], True),
        ([CACHE], ["groups", "frozen", "cached", "trained"], False),
        ([LORA, CACHE], ["trained", "cached"], False),
    ],
)
def test_engines_are_built_as_the_reference_needs_them(
    monkeypatch, tmp_path, settings, built, has_reference
):
    """A frozen reference whose results are cached is gone before the trained engine is built."""
    made = []

    def build(config, device, total_steps, optimize=True):
        assert (device, total_steps) == ("cpu", 9)
        made.append("trained" if optimize else "frozen")
        if not optimize:
            assert config.model.lora.rank == 0
        return Engine(FACTOR, BASE)

    def cache(config, datasets, cache_dir, make_reference):
        assert (datasets, cache_dir) == (["rows"], tmp_path)
        references.append(make_reference())
        made.append("cached")

    references: list[Reference] = []
    monkeypatch.setattr(trainer_module, "engine_class", lambda name: build)
    monkeypatch.setattr(trainer_module, "cache_reference", cache)
    monkeypatch.setattr(trainer_module, "create_groups", lambda config: made.append("groups"))
    config = configure(*settings, "data.max_length=77")
    loss = (
        PreferenceLoss.of(configure("algorithm.loss=simpo"))
        if "simpo" in str(settings)
        else (PreferenceLoss.of(config))
    )
    trainer = PreferenceTrainer.build(config, loss, "cpu", 9, ["rows"], tmp_path)
    assert made == built
    assert trainer.max_length == 77
    assert (trainer.reference is not None) == has_reference
    if has_reference:
        references.append(trainer.reference)
    batch = make_batch(PAIR_LENGTHS)
    for reference in references:
        is_own = "frozen" not in built
        assert (reference.engine is trainer.engine) == is_own
        expected = (BASE if is_own else FACTOR) * batch.input_ids
        torch.testing.assert_close(reference.log_probs(batch, []), expected)


CONTRADICTIONS = {
    "images": (["model.images=true"], "model.images=true does not work with train_dpo.py yet"),
    "mtp": (
        ["model_engine=megatron", "model.mtp.enable=true", "model.mtp.enable_train=true"],
        "model.mtp.enable_train=true does not work with train_dpo.py",
    ),
    "path": (
        ["algorithm.loss=orpo", "reference.path=r"],
        "reference.path=r does nothing with algorithm.loss=orpo",
    ),
    "cache": (["algorithm.loss=orpo", CACHE], "reference.cache=True does nothing with"),
    "cache of kto": ([KTO, CACHE], "reference.cache=true does not work with algorithm.loss=kto"),
    "one row": ([KTO, "data.train_batch_size=1"], "set data.train_batch_size to at least 2"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_an_error(what):
    settings, message = CONTRADICTIONS[what]
    with pytest.raises(InputError) as caught:
        check_settings(configure(*settings))
    assert message in str(caught.value)
    assert check_settings(configure(KTO, "data.train_batch_size=2")).name == "kto"


@pytest.mark.parametrize(
    "settings, roles, stages",
    [
        ([], [None, "reference"], ["ref_compute_log_prob", "train_batch"]),
        ([CACHE], [None], ["train_batch"]),
        ([LORA], [None], ["ref_compute_log_prob", "train_batch"]),
        ([KTO], [None, "reference"], ["compute_kl", "ref_compute_log_prob", "train_batch"]),
    ],
)
def test_a_run_has_the_roles_and_stages_of_its_loss(settings, roles, stages):
    config = configure(*settings)
    loss = PreferenceLoss.of(config)
    assert [*role_configs(config, loss)] == roles
    assert model_stages(config, loss, has_validation=False) == stages
    assert model_stages(config, loss, has_validation=True) == [*stages, "validate"]


def test_a_reference_has_the_vocabulary_of_the_model(monkeypatch):
    def check(config, world_size):
        if config.model.path == "broken":
            raise InputError("it is broken")
        return SimpleNamespace(vocab_size=9 if config.model.path == "other" else 8)

    monkeypatch.setattr(reference_module, "engine_class", lambda name: SimpleNamespace(check=check))
    loss = PreferenceLoss.of(configure())
    assert check_models(configure(), loss, 4).vocab_size == 8
    for path, message in (("other", "has a vocabulary of 9"), ("broken", ": it is broken")):
        with pytest.raises(InputError, match=f"^reference.path={path}.*{message}"):
            check_models(configure(f"reference.path={path}"), loss, 4)


def test_a_run_is_identified_by_its_loss_and_the_weights_of_its_reference(tmp_path):
    path = make_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    other = make_model(tmp_path / "other", "qwen3", num_hidden_layers=2)
    for settings, weights in (([], path), ([f"reference.path={other}"], other)):
        config = configure(f"model.path={path}", *settings)
        assert identify_loss(config, PreferenceLoss.of(config)) == {
            "algorithm.loss": "dpo",
            "the reference": fingerprint(weights),
        }
    (path / "model.safetensors").unlink()
    described = configure(f"model.path={path}", "dry_run=true")
    assert identify_loss(described, PreferenceLoss.of(described))["the reference"] == "none"
