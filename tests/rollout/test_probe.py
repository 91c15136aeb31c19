"""The comparison of vLLM's log-probabilities with the trainer's after an update."""

import pytest
import torch

from config import load
from rollout.vllm.probe import LENGTH, MAX_GAP, NUM_SEQUENCES, Probe
from tests.engines.fsdp.cases import build
from tests.support.models import make_model
from tests.support.plain import make_adapter

ROUNDING = 1e-5
NUM_COMPARED = NUM_SEQUENCES * (LENGTH - 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("probe"), "qwen3")


@pytest.fixture
def make_probe(model):
    """Return a function that makes a probe whose adapters change each token by `change` nats."""

    def make_probe(change: float, *settings: str) -> Probe:
        defaults = [f"model.path={model}", "data.train_files=x", "engine.compute_dtype=float32"]
        probe = Probe(load("ppo.yaml", [*defaults, *settings]))
        generator = torch.Generator().manual_seed(1)
        probe.base_log_probs = -torch.rand(NUM_COMPARED, generator=generator).double() - 1
        direction = torch.randn(NUM_COMPARED, generator=generator).double()
        probe.trainer_log_probs = probe.base_log_probs + change * direction
        return probe

    return make_probe


def rounding_errors() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return ROUNDING * torch.randn(NUM_COMPARED, generator=generator)


@pytest.mark.parametrize("change", [0.0, 1e-4, 0.1])
def test_rounding_errors_are_accepted(make_probe, change):
    probe = make_probe(change)
    probe.compare((probe.trainer_log_probs + rounding_errors()).float())


@pytest.mark.parametrize("change", [3e-4, 0.1])
@pytest.mark.parametrize("applied", [0.0, 2.0])
def test_adapters_that_are_not_applied_or_applied_twice_are_found(make_probe, change, applied):
    """Even if they change the log-probabilities by less than the largest gap."""
    probe = make_probe(change)
    effect = probe.trainer_log_probs - probe.base_log_probs
    with pytest.raises(RuntimeError, match=rf"adapters {applied:.2f} times"):
        probe.compare(probe.base_log_probs + applied * effect + rounding_errors())


@pytest.mark.parametrize("error, is_accepted", [(0.9, True), (1.1, False), (float("nan"), False)])
def test_the_largest_gap_depends_on_the_dtype(make_probe, error, is_accepted):
    for dtype, max_gap in MAX_GAP.items():
        probe = make_probe(0.0, f"engine.compute_dtype={dtype}")
        signs = torch.arange(NUM_COMPARED) % 2 * 2 - 1
        log_probs = probe.trainer_log_probs + signs * error * max_gap
        if is_accepted:
            probe.compare(log_probs)
            continue
        with pytest.raises(RuntimeError, match="differ from the trainer's: by .* nats"):
            probe.compare(log_probs)


@pytest.mark.parametrize("error, is_accepted", [(0.9, True), (1.1, False)])
def test_the_largest_gap_grows_with_the_log_probabilities(make_probe, error, is_accepted):
    """Rounding errors of bfloat16 are relative; a long run makes random tokens very unlikely."""
    probe = make_probe(0.0, "engine.compute_dtype=bfloat16")
    spread = torch.linspace(-20, -1, NUM_COMPARED).double()
    probe.base_log_probs = probe.trainer_log_probs = spread
    signs = torch.arange(NUM_COMPARED) % 2 * 2 - 1
    log_probs = spread + signs * error * 0.7 * spread.std()
    if is_accepted:
        probe.compare(log_probs)
        return
    with pytest.raises(RuntimeError, match="differ from the trainer's: by .* nats"):
        probe.compare(log_probs)


def test_its_tokens_are_fixed_and_fit_into_short_sequences(make_probe):
    probe = make_probe(0.0, "rollout.temperature=0.7")
    assert probe.temperature == 0.7
    assert probe.batch.lengths == [LENGTH] * NUM_SEQUENCES
    assert probe.batch.fields["loss_mask"].tolist() == ([0] + [1] * (LENGTH - 1)) * NUM_SEQUENCES
    again = make_probe(0.0).batch
    assert again.input_ids.tolist() == probe.batch.input_ids.tolist()
    short = make_probe(0.0, "data.max_prompt_length=2", "rollout.max_tokens=3")
    assert short.batch.lengths == [5] * NUM_SEQUENCES


@pytest.mark.usefixtures("process_group")
def test_the_base_is_recorded_without_the_adapters_that_a_run_begins_with(model, make_probe):
    """Those of a resumed run have an effect from the first sync on."""
    make_adapter(model)
    engine = build(model, torch.device("cpu"), lora=True)
    probe = make_probe(0.0)
    probe.base_log_probs = None
    probe.record_trainer(engine)
    merged = probe.trainer_log_probs
    assert (merged - probe.base_log_probs).abs().max() > 0.01
    with engine.without_adapters():
        probe.record_trainer(engine)
    assert torch.equal(probe.base_log_probs, probe.trainer_log_probs)
