"""linear_log_probs against the formula in float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engines.logprobs import LogitTransform, LogProbSettings, linear_log_probs

VOCAB_SIZE = 53
HIDDEN_SIZE = 16
PLAIN = LogitTransform()


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    # The gradients of a loss with respect to log_probs and entropy.
    grad_log_probs: Tensor
    grad_entropy: Tensor


class Expected(NamedTuple):
    log_probs: Tensor
    entropy: Tensor
    is_greedy: Tensor
    # Leaves, in float64.
    hidden: Tensor
    weight: Tensor


def make_inputs(num_tokens: int, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) / 3
    return Inputs(
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator),
        torch.randn(num_tokens, generator=generator),
        torch.randn(num_tokens, generator=generator),
    )


def make_settings(
    chunk_size: int = 2048, temperature: float = 1.0, is_compiled: bool = False, **constants
) -> LogProbSettings:
    transform = LogitTransform(temperature, **constants)
    return LogProbSettings(transform, chunk_size, is_compiled)


def expected_logits(hidden: Tensor, weight: Tensor, transform: LogitTransform) -> Tensor:
    """Return the input of the softmax."""
    logits = transform.scale * hidden @ weight.T
    if transform.softcap:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return logits / transform.temperature


def expected_results(inputs: Inputs, transform: LogitTransform = PLAIN) -> Expected:
    """Compute the same in float64, from leaves of its own."""
    hidden = inputs.hidden.detach().double().requires_grad_()
    weight = inputs.weight.detach().double().requires_grad_()
    targets = inputs.targets
    p = expected_logits(hidden, weight, transform).softmax(-1)
    log_probs = p[torch.arange(len(targets)), targets].log()
    entropy = -(p * p.log()).sum(-1)
    return Expected(log_probs, entropy, p.argmax(-1) == targets, hidden, weight)


def backward(log_probs: Tensor, entropy: Tensor, inputs: Inputs) -> None:
    """Propagate the gradients of a loss that uses both outputs."""
    gradients = [
        inputs.grad_log_probs.to(log_probs.dtype),
        inputs.grad_entropy.to(entropy.dtype),
    ]
    torch.autograd.backward([log_probs, entropy], gradients)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_size", [1, 5, 7, 24, 1000])
@pytest.mark.parametrize(
    "constants",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"scale": 0.25},
        {"temperature": 0.6, "scale": 3.0},
        {"softcap": 1.5},
        {"temperature": 0.6, "scale": 2.0, "softcap": 1.5},
    ],
    ids=str,
)
def test_values_and_gradients(chunk_size, constants):
    inputs = make_inputs(24)
    hidden, weight, targets, *_ = inputs
    # By chance alone few targets would be the most likely token.
    targets[::3] = (hidden @ weight.T).argmax(-1)[::3]
    settings = make_settings(chunk_size, **constants)
    log_probs, entropy, is_greedy = linear_log_probs(hidden, weight, targets, settings)
    backward(log_probs, entropy, inputs)
    expected = expected_results(inputs, settings.transform)
    backward(expected.log_probs, expected.entropy, inputs)

    assert log_probs.dtype == torch.float32
    assert entropy.dtype == torch.float32
    assert is_greedy.dtype == torch.bool
    assert 8 <= is_greedy.sum() < 24
    assert torch.equal(is_greedy, expected.is_greedy)
    assert_close(log_probs, expected.log_probs)
    assert_close(entropy, expected.entropy)
    assert_close(hidden.grad, expected.hidden.grad)
    assert_close(weight.grad, expected.weight.grad)


@pytest.mark.parametrize("chunk_size", [5, 1000])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_tokens_that_sampling_left_out_have_no_probability(chunk_size, softcap):
    """Values and gradients are those of a softmax over the kept tokens; -1 is not a token."""
    inputs = make_inputs(24)
    hidden, weight, targets, *_ = inputs
    others = torch.rand(24, VOCAB_SIZE).argsort(1)[:, :6]
    others = others.where(others != targets[:, None], -1)
    kept_tokens = torch.cat([targets[:, None], others], 1)
    settings = make_settings(chunk_size, temperature=0.7, softcap=softcap)
    log_probs, entropy, is_greedy = linear_log_probs(hidden, weight, targets, settings, kept_tokens)
    backward(log_probs, entropy, inputs)

    expected_hidden = hidden.detach().double().requires_grad_()
    expected_weight = weight.detach().double().requires_grad_()
    logits = expected_logits(expected_hidden, expected_weight, settings.transform)
    kept_logits = logits.gather(1, kept_tokens.clamp(0)).masked_fill(kept_tokens < 0, -1e9)
    log_p = kept_logits.log_softmax(-1)
    expected_log_probs = log_p[:, 0]
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    backward(expected_log_probs, expected_entropy, inputs)
    assert_close(log_probs, expected_log_probs)
    assert_close(entropy, expected_entropy)
    assert_close(hidden.grad, expected_hidden.grad)
    assert_close(weight.grad, expected_weight.grad)
    assert torch.equal(is_greedy, kept_logits.argmax(-1) == 0)

    full_log_probs, *_ = linear_log_probs(hidden, weight, targets, settings)
    assert (log_probs > full_log_probs).all()


def test_no_kept_tokens_mean_the_whole_vocabulary():
    hidden, weight, targets, *_ = make_inputs(24)
    full = linear_log_probs(hidden, weight, targets)
    no_columns = torch.empty(24, 0, dtype=torch.int64)
    with_no_columns = linear_log_probs(hidden, weight, targets, candidate_ids=no_columns)
    for actual, expected in zip(with_no_columns, full):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("output", [0, 1], ids=["log_probs", "entropy"])
def test_a_loss_may_use_one_output_alone(output):
    inputs = make_inputs(9)
    hidden, weight, targets, upstream, _ = inputs
    linear_log_probs(hidden, weight, targets, make_settings(4))[output].backward(upstream)
    expected = expected_results(inputs)
    expected[output].backward(upstream.double())
    assert_close(hidden.grad, expected.hidden.grad)
    assert_close(weight.grad, expected.weight.grad)


def test_numeric_gradient():
    """Compare with finite differences of the function itself.

    Its statistics are fp32 whatever the inputs are, hence the wide step (rounding of 1e-6 over a
    step of 1e-2) and the loose bounds.
    """
    hidden, weight, targets, *_ = make_inputs(3, torch.float64)
    settings = make_settings(2, temperature=0.7)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, targets, settings)[:2],
        (hidden, weight),
        eps=1e-2,
        atol=1e-3,
        rtol=1e-3,
        fast_mode=True,
    )


def test_large_logits_do_not_overflow():
    inputs = make_inputs(8)
    hidden, weight, targets, *_ = inputs
    with torch.no_grad():
        hidden *= 200
    log_probs, entropy, _ = linear_log_probs(hidden, weight, targets, make_settings(3))
    backward(log_probs, entropy, inputs)
    logits = hidden.double() @ weight.double().T
    expected = logits.log_softmax(-1)[torch.arange(8), targets]
    assert_close(log_probs, expected)
    assert entropy.abs().max() < 1
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens(dtype):
    hidden, weight, targets, *_ = make_inputs(0, dtype)
    log_probs, entropy, is_greedy = linear_log_probs(hidden, weight, targets)
    assert log_probs.shape == (0,)
    assert entropy.shape == (0,)
    assert is_greedy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, HIDDEN_SIZE)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_frozen_weight_gets_no_gradient():
    inputs = make_inputs(10)
    hidden, weight, targets, upstream, _ = inputs
    log_probs, _, _ = linear_log_probs(hidden, weight.detach(), targets, make_settings(4))
    log_probs.backward(upstream)
    expected = expected_results(inputs)
    expected.log_probs.backward(upstream.double())
    assert weight.grad is None
    assert_close(hidden.grad, expected.hidden.grad)


@pytest.mark.parametrize("chunk_size", [3, 64])
def test_bfloat16(chunk_size):
    """bf16 keeps 8 bits: a logit below 2**3 is off by at most 2**-6, log p by two such errors.

    The gradients, sums of many products, are within 1 % of the largest entry.
    """
    inputs = make_inputs(64, torch.bfloat16)
    hidden, weight, targets, *_ = inputs
    log_probs, entropy, _ = linear_log_probs(hidden, weight, targets, make_settings(chunk_size))
    backward(log_probs, entropy, inputs)
    expected = expected_results(inputs)
    backward(expected.log_probs, expected.entropy, inputs)
    assert (hidden @ weight.T).abs().max() < 2**3
    assert (log_probs - expected.log_probs).abs().max() < 2**-5
    assert (entropy - expected.entropy).abs().max() < 2**-5
    for actual, exact in ((hidden, expected.hidden), (weight, expected.weight)):
        assert actual.grad.dtype == torch.bfloat16
        assert (actual.grad - exact.grad).abs().max() < 0.01 * exact.grad.abs().max()


def test_a_bf16_weight_gradient_is_summed_over_chunks_in_fp32():
    """A sum in bf16 stops growing once it is 256 times as large as the next chunk's part."""
    num_tokens = 4096
    inputs = make_inputs(1, torch.bfloat16)
    hidden = inputs.hidden.detach().expand(num_tokens, -1).contiguous()
    targets = inputs.targets.expand(num_tokens).contiguous()
    inputs = inputs._replace(hidden=hidden, targets=targets)
    upstream = torch.ones(num_tokens)
    log_probs, _, _ = linear_log_probs(hidden, inputs.weight, targets, make_settings(4))
    log_probs.backward(upstream)

    expected = expected_results(inputs)
    expected.log_probs.backward(upstream.double())
    exact = expected.weight.grad
    assert (inputs.weight.grad - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.slow
def test_compiled_equals_eager():
    results = {}
    for is_compiled in (False, True):
        inputs = make_inputs(12)
        hidden, weight, targets, *_ = inputs
        settings = make_settings(5, is_compiled=is_compiled)
        log_probs, entropy, is_greedy = linear_log_probs(hidden, weight, targets, settings)
        backward(log_probs, entropy, inputs)
        results[is_compiled] = (log_probs, entropy, is_greedy, hidden.grad, weight.grad)
    for eager, compiled in zip(results[False], results[True]):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_an_offset_that_all_logits_share_costs_no_digits(offset):
    inputs = make_inputs(50)
    targets = inputs.targets
    hidden = torch.cat([inputs.hidden.detach(), torch.ones(50, 1)], 1)
    weight = torch.cat([inputs.weight.detach(), torch.full((VOCAB_SIZE, 1), offset)], 1)
    p = (hidden @ weight.T).double().softmax(-1)  # from logits that are rounded to fp32
    log_probs, entropy, _ = linear_log_probs(hidden, weight, targets)
    assert_close(entropy, -(p * p.log()).sum(-1), tolerance=3e-4)
    assert_close(log_probs, p[torch.arange(50), targets].log(), tolerance=3e-4)
