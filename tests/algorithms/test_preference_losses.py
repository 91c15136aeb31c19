"""Each loss of preferences against its paper's formula in fp64, one pair or answer at a time."""

import math

import pytest
import torch

from algorithms.preference_losses import PREFERENCE_LOSSES, dpo, ipo, kto, orpo, simpo

NUM_PAIRS = 7
LENGTHS = {"chosen_lengths": [1, 2, 9, 30, 4, 5, 6], "rejected_lengths": [3, 2, 1, 12, 400, 5, 7]}


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def odds(p: float) -> float:
    return p / (1 - p)


def make_inputs(dtype: torch.dtype, requires_grad: bool = False) -> dict[str, torch.Tensor]:
    """Return inputs of pairs: log-probabilities of about -1 per token, log-ratios of up to 3."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for side in ("chosen", "rejected"):
        lengths = torch.tensor(LENGTHS[f"{side}_lengths"], dtype=torch.float64)
        noise = torch.rand(NUM_PAIRS, generator=generator, dtype=torch.float64)
        inputs[f"{side}_log_probs"] = -lengths * (0.2 + noise)
        inputs[f"{side}_log_ratios"] = 6 * (noise - 0.5)
        inputs[f"{side}_lengths"] = lengths
    return {
        name: x.to(dtype).requires_grad_(requires_grad and "log" in name)
        for name, x in inputs.items()
    }


def expected_loss(name: str, pair: dict[str, float]) -> float:
    """Return the loss of one pair, as its paper writes it."""
    chosen_ratio = pair["chosen_log_ratios"]
    rejected_ratio = pair["rejected_log_ratios"]
    chosen = pair["chosen_log_probs"] / pair["chosen_lengths"]
    rejected = pair["rejected_log_probs"] / pair["rejected_lengths"]
    if name == "dpo":
        return -log_sigmoid(0.1 * (chosen_ratio - rejected_ratio))
    if name == "smoothed dpo":
        z = 0.3 * (chosen_ratio - rejected_ratio)
        return -0.8 * log_sigmoid(z) - 0.2 * log_sigmoid(-z)
    if name == "ipo":
        gap = chosen_ratio / pair["chosen_lengths"] - rejected_ratio / pair["rejected_lengths"]
        return (gap - 1 / (2 * 0.1)) ** 2
    if name == "simpo":
        return -log_sigmoid(2.0 * chosen - 2.0 * rejected - 1.0)
    ratio = odds(math.exp(chosen)) / odds(math.exp(rejected))
    return -chosen - 0.1 * log_sigmoid(math.log(ratio))


LOSSES = {
    "dpo": lambda **inputs: dpo(**inputs),
    "smoothed dpo": lambda **inputs: dpo(beta=0.3, label_smoothing=0.2, **inputs),
    "ipo": lambda **inputs: ipo(**inputs),
    "simpo": lambda **inputs: simpo(**inputs),
    "orpo": lambda **inputs: orpo(**inputs),
}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_pairs_is_its_paper_s(name, dtype, tolerance):
    inputs = make_inputs(dtype)
    losses, chosen_rewards, rejected_rewards = LOSSES[name](**inputs)
    for i in range(NUM_PAIRS):
        pair = {key: x[i].item() for key, x in inputs.items()}
        assert losses[i].item() == pytest.approx(expected_loss(name, pair), rel=tolerance)
    assert chosen_rewards.shape == rejected_rewards.shape == (NUM_PAIRS,)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_loss_is_that_of_its_formula(name):
    """Central differences in fp64."""
    inputs = make_inputs(torch.float64, requires_grad=True)
    losses, *_ = LOSSES[name](**inputs)
    losses.sum().backward()
    step = 1e-6
    for key, x in inputs.items():
        if not x.requires_grad:
            continue
        gradient = torch.zeros(NUM_PAIRS) if x.grad is None else x.grad
        for i in range(NUM_PAIRS):
            pair = {name: values[i].item() for name, values in inputs.items()}
            above = expected_loss(name, pair | {key: pair[key] + step})
            below = expected_loss(name, pair | {key: pair[key] - step})
            expected = (above - below) / (2 * step)
            assert gradient[i].item() == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_every_parameter_of_a_loss_counts():
    """Each one differs from its default here."""
    inputs = make_inputs(torch.float64)
    results = {
        "ipo": ipo(**inputs, beta=0.4),
        "simpo": simpo(**inputs, beta=1.5, gamma=0.4, label_smoothing=0.1),
        "orpo": orpo(**inputs, beta=0.7),
    }
    for i in range(NUM_PAIRS):
        pair = {key: x[i].item() for key, x in inputs.items()}
        ratios = {}
        means = {}
        for side in ("chosen", "rejected"):
            length = pair[f"{side}_lengths"]
            ratios[side] = pair[f"{side}_log_ratios"] / length
            means[side] = pair[f"{side}_log_probs"] / length
        z = 1.5 * (means["chosen"] - means["rejected"]) - 0.4
        log_odds = math.log(odds(math.exp(means["chosen"])) / odds(math.exp(means["rejected"])))
        expected = {
            "ipo": (ratios["chosen"] - ratios["rejected"] - 1 / 0.8) ** 2,
            "simpo": -0.9 * log_sigmoid(z) - 0.1 * log_sigmoid(-z),
            "orpo": -means["chosen"] - 0.7 * log_sigmoid(log_odds),
        }
        rewards = {
            "ipo": {side: 0.4 * pair[f"{side}_log_ratios"] for side in means},
            "simpo": {side: 1.5 * mean for side, mean in means.items()},
            "orpo": {side: 0.7 * mean for side, mean in means.items()},
        }
        for name, (losses, chosen, rejected) in results.items():
            assert losses[i].item() == pytest.approx(expected[name], rel=1e-9), name
            assert chosen[i].item() == pytest.approx(rewards[name]["chosen"], rel=1e-9), name
            assert rejected[i].item() == pytest.approx(rewards[name]["rejected"], rel=1e-9), name


def test_by_default_kto_weighs_both_labels_alike():
    """With the paper's beta of 0.1."""
    log_ratios = torch.tensor([2.0, -2.0], dtype=torch.float64)
    losses, rewards, _ = kto(log_ratios, torch.tensor([True, False]), torch.tensor(0.0))
    expected = 1 - 1 / (1 + math.exp(-0.2))
    assert losses.tolist() == pytest.approx([expected, expected])
    assert rewards.tolist() == pytest.approx([0.2, -0.2])


@pytest.mark.parametrize("kl", [0.0, 0.7])
def test_kto_is_its_paper_s(kl):
    log_ratios = torch.tensor([-3.0, -0.2, 0.0, 0.5, 4.0], dtype=torch.float64)
    is_chosen = torch.tensor([True, False, True, False, True])
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    losses, rewards, baseline = kto(log_ratios, is_chosen, torch.tensor(kl), beta=0.2, **weights)
    for i, log_ratio in enumerate(log_ratios.tolist()):
        if is_chosen[i]:
            value = 1.5 / (1 + math.exp(-0.2 * (log_ratio - kl)))
            expected = 1.5 - value
        else:
            value = 0.5 / (1 + math.exp(-0.2 * (kl - log_ratio)))
            expected = 0.5 - value
        assert losses[i].item() == pytest.approx(expected, rel=1e-6)
        assert rewards[i].item() == pytest.approx(0.2 * log_ratio)
    assert baseline.item() == pytest.approx(0.2 * kl)


def test_rewards_are_what_the_losses_compare():
    inputs = make_inputs(torch.float64)
    for name in ("dpo", "ipo"):
        _, chosen, rejected = LOSSES[name](**inputs)
        assert torch.equal(chosen, 0.1 * inputs["chosen_log_ratios"])
        assert torch.equal(rejected, 0.1 * inputs["rejected_log_ratios"])
    _, chosen, _ = simpo(**inputs)
    assert torch.allclose(chosen, 2 * inputs["chosen_log_probs"] / inputs["chosen_lengths"])


def test_orpo_of_an_answer_that_is_certain_is_finite():
    certain = torch.zeros(1, requires_grad=True)
    other = torch.tensor([-2.0])
    losses, *_ = orpo(certain, other, torch.ones(1), torch.ones(1))
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(certain.grad).all()


def test_the_functions_are_those_of_the_configuration():
    assert set(PREFERENCE_LOSSES) == {"dpo", "ipo", "simpo", "orpo", "kto"}
