"""linear_log_probs against the formula in float64."""

import pytest
import torch

from engines.logprobs import linear_log_probs

WORDS, HIDDEN = 53, 16


def make(num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """hidden, weight, targets, and the upstream gradients of log_probs and entropy."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(WORDS, HIDDEN, generator=g) / 3).to(dtype).requires_grad_()
    targets = torch.randint(WORDS, (num_tokens,), generator=g)
    return (
        hidden,
        weight,
        targets,
        torch.randn(num_tokens, generator=g),
        torch.randn(num_tokens, generator=g),
    )


def by_formula(hidden, weight, targets, temperature, scale=1.0, softcap=None):
    """The same in float64, out of leaves of its own: log_probs, entropy, greedy, hidden, weight."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = scale * hidden @ weight.T
    p = ((softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature).softmax(-1)
    log_probs = p[torch.arange(len(targets)), targets].log()
    return log_probs, -(p * p.log()).sum(-1), p.argmax(-1) == targets, hidden, weight


@pytest.mark.parametrize("chunk_size", [1, 5, 7, 24, 1000])
@pytest.mark.parametrize(
    "temperature, constants",
    [
        (1.0, {}),
        (0.6, {}),
        (2.5, {}),
        (1.0, {"scale": 0.25}),
        (0.6, {"scale": 3.0}),
        (1.0, {"softcap": 1.5}),
        (0.6, {"scale": 2.0, "softcap": 1.5}),
    ],
)
def test_values_and_gradients(chunk_size, temperature, constants):
    hidden, weight, targets, grad_log_probs, grad_entropy = make(24)
    targets[::3] = (hidden @ weight.T).argmax(-1)[::3]  # chance alone would make few of them greedy
    log_probs, entropy, greedy = linear_log_probs(
        hidden, weight, targets, temperature, chunk_size, **constants
    )
    torch.autograd.backward([log_probs, entropy], [grad_log_probs, grad_entropy])
    want = by_formula(hidden, weight, targets, temperature, **constants)
    torch.autograd.backward(want[:2], [grad_log_probs.double(), grad_entropy.double()])

    assert log_probs.dtype == entropy.dtype == torch.float32 and greedy.dtype == torch.bool
    assert 8 <= greedy.sum() < 24 and torch.equal(greedy, want[2])
    for got, exact in (
        (log_probs, want[0]),
        (entropy, want[1]),
        (hidden.grad, want[3].grad),
        (weight.grad, want[4].grad),
    ):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [5, 1000])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_words_that_sampling_left_out_have_no_probability(chunk_size, softcap):
    """Values and gradients are those of a softmax over the words that were kept; -1 is none. No column: all words."""
    hidden, weight, targets, grad_log_probs, grad_entropy = make(24)
    others = torch.rand(24, len(weight)).argsort(1)[:, :6]
    kept = torch.cat([targets[:, None], others.where(others != targets[:, None], -1)], 1)
    log_probs, entropy, greedy = linear_log_probs(
        hidden, weight, targets, 0.7, chunk_size, kept_words=kept, softcap=softcap
    )
    torch.autograd.backward([log_probs, entropy], [grad_log_probs, grad_entropy])
    want_hidden, want_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = want_hidden @ want_weight.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    few = (logits / 0.7).gather(1, kept.clamp(0)).masked_fill(kept < 0, -1e9)
    log_p = few.log_softmax(-1)
    want = log_p[:, 0], -(log_p.exp() * log_p).sum(-1)
    torch.autograd.backward(want, [grad_log_probs.double(), grad_entropy.double()])
    for got, exact in zip(
        (log_probs, entropy, hidden.grad, weight.grad), (*want, want_hidden.grad, want_weight.grad)
    ):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(greedy, few.argmax(-1) == 0)
    every = linear_log_probs(hidden, weight, targets, 0.7, chunk_size, softcap=softcap)
    none_left_out = linear_log_probs(
        hidden, weight, targets, 0.7, chunk_size, kept_words=kept[:, :0], softcap=softcap
    )
    assert all(map(torch.equal, every, none_left_out)) and (log_probs > every[0]).all()


@pytest.mark.parametrize("output", [0, 1])
def test_one_output_alone_has_a_gradient(output):
    hidden, weight, targets, upstream, _ = make(9)
    linear_log_probs(hidden, weight, targets, chunk_size=4)[output].backward(upstream)
    want = by_formula(hidden, weight, targets, 1.0)
    want[output].backward(upstream.double())
    torch.testing.assert_close(hidden.grad.double(), want[3].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), want[4].grad, rtol=1e-5, atol=1e-5)


def test_numeric_gradient():
    """Finite differences of the function itself. Its statistics are fp32 whatever it is given, hence the wide step
    (rounding of 1e-6 over a step of 1e-2) and the loose bounds."""
    hidden, weight, targets, _, _ = make(3, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, targets, 0.7, 2)[:2],
        (hidden, weight),
        eps=1e-2,
        atol=1e-3,
        rtol=1e-3,
        fast_mode=True,
    )


def test_large_logits_do_not_overflow():
    hidden, weight, targets, grad_log_probs, grad_entropy = make(8)
    with torch.no_grad():
        hidden *= 200
    log_probs, entropy, _ = linear_log_probs(hidden, weight, targets, chunk_size=3)
    torch.autograd.backward([log_probs, entropy], [grad_log_probs, grad_entropy])
    logits = hidden.double() @ weight.double().T
    want = logits.log_softmax(-1)[torch.arange(8), targets]
    torch.testing.assert_close(log_probs.double(), want, rtol=1e-5, atol=1e-5)
    assert entropy.abs().max() < 1 and hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens(dtype):
    hidden, weight, targets, _, _ = make(0, dtype)
    log_probs, entropy, greedy = linear_log_probs(hidden, weight, targets)
    assert log_probs.shape == entropy.shape == greedy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, HIDDEN) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_frozen_weight_gets_no_gradient():
    hidden, weight, targets, upstream, _ = make(10)
    linear_log_probs(hidden, weight.detach(), targets, chunk_size=4)[0].backward(upstream)
    want = by_formula(hidden, weight, targets, 1.0)
    want[0].backward(upstream.double())
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad.double(), want[3].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [3, 64])
def test_bfloat16(chunk_size):
    """bf16 keeps 8 bits: a logit below 2**3 is off by at most 2**-6, log p by two such errors. The gradients, sums of
    many products, are within 1 % of the largest entry."""
    hidden, weight, targets, grad_log_probs, grad_entropy = make(64, torch.bfloat16)
    log_probs, entropy, _ = linear_log_probs(hidden, weight, targets, chunk_size=chunk_size)
    torch.autograd.backward([log_probs, entropy], [grad_log_probs, grad_entropy])
    want = by_formula(hidden, weight, targets, 1.0)
    torch.autograd.backward(want[:2], [grad_log_probs.double(), grad_entropy.double()])
    assert (hidden @ weight.T).abs().max() < 2**3
    assert (log_probs - want[0]).abs().max() < 2**-5 and (entropy - want[1]).abs().max() < 2**-5
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    for got, exact in ((hidden.grad, want[3].grad), (weight.grad, want[4].grad)):
        assert (got - exact).abs().max() < 0.01 * exact.abs().max()


def test_compiled_equals_eager():
    results = []
    for compiled in (False, True):
        hidden, weight, targets, grad_log_probs, grad_entropy = make(12)
        log_probs, entropy, greedy = linear_log_probs(
            hidden, weight, targets, chunk_size=5, compiled=compiled
        )
        torch.autograd.backward([log_probs, entropy], [grad_log_probs, grad_entropy])
        results.append((log_probs, entropy, greedy, hidden.grad, weight.grad))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_an_offset_that_all_logits_share_costs_no_digits(offset):
    hidden, weight, targets, _, _ = make(50)
    hidden, weight = (
        torch.cat([x.detach(), torch.full((len(x), 1), value)], 1)
        for x, value in ((hidden, 1.0), (weight, offset))
    )
    p = (hidden @ weight.T).double().softmax(-1)  # of the logits as fp32 has them
    log_probs, entropy, _ = linear_log_probs(hidden, weight, targets)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), rtol=0, atol=3e-4)
    torch.testing.assert_close(
        log_probs.double(), p[torch.arange(50), targets].log(), rtol=0, atol=3e-4
    )


def test_a_bf16_weight_gradient_is_summed_over_chunks_in_fp32():
    """A sum in bf16 stops growing once it is 256 times as large as the next chunk's part."""
    num_tokens, chunk_size = 4096, 4
    hidden, weight, targets, _, _ = make(1, torch.bfloat16)
    hidden = hidden.detach().expand(num_tokens, -1).contiguous()
    targets = targets.expand(num_tokens).contiguous()
    upstream = torch.ones(num_tokens)
    log_probs, _, _ = linear_log_probs(hidden, weight, targets, chunk_size=chunk_size)
    log_probs.backward(upstream)

    exact = by_formula(hidden, weight, targets, 1.0)
    exact[0].backward(upstream.double())
    error = (weight.grad - exact[4].grad).abs().max()
    assert error < 0.01 * exact[4].grad.abs().max()
