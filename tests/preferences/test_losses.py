"""The loss of a step on packed tokens, in any division into micro-batches, against fp64."""

import math

import pytest
import torch

from config import InputError, load
from data.batching.batch import Batch, make_cu_seqlens
from preferences.losses import AnswerCounts, PreferenceLoss

# For each row, the lengths of the chosen and of the rejected answer with their prompts.
PAIR_LENGTHS = [(5, 7), (4, 4), (9, 3), (6, 8)]
# Rows with a label have one answer; the last row has two.
MIXED_LENGTHS = [(5, 0), (0, 7), (9, 0), (6, 8)]


def find_loss(*pairs: str) -> PreferenceLoss:
    return PreferenceLoss.of(load("dpo.yaml", ["model.path=m", "data.train_files=t", *pairs]))


def make_batch(lengths: list[tuple[int, int]], has_reference: bool = True) -> Batch:
    """Return random answers, of which all but the first two tokens are trained."""
    flat = torch.tensor(lengths).flatten()
    answer = torch.repeat_interleave(torch.arange(len(flat)), flat)
    present = flat[flat > 0]
    num_tokens = int(flat.sum())
    generator = torch.Generator().manual_seed(1)
    batch = Batch(torch.arange(num_tokens), make_cu_seqlens(present))
    batch.fields["loss_mask"] = (batch.position_ids >= 2).float()
    batch.fields["answer"] = answer
    batch.fields["log_probs"] = -2 * torch.rand(num_tokens, generator=generator)
    # The values outside the mask must not be read.
    batch.fields["log_probs"][batch.fields["loss_mask"] == 0] = math.nan
    if has_reference:
        noise = 0.3 * torch.randn(num_tokens, generator=generator)
        batch.fields["ref_log_probs"] = batch.fields["log_probs"] + noise
    return batch


def compute(loss: PreferenceLoss, batch: Batch, parts: list[list[int]], kl=None):
    """Return the summed loss, amounts and gradient over the micro-batches `parts` of a batch."""
    counts = AnswerCounts.of(batch)
    loss_fn = loss.of_batch(counts, kl)
    log_probs = batch.fields["log_probs"].clone().requires_grad_()
    token_numbers = Batch(torch.arange(len(batch.input_ids)), batch.cu_seqlens)
    total = torch.zeros(())
    sums: dict[str, float] = {}
    for part in parts:
        tokens = token_numbers.select(part).input_ids
        fields = {name: values[tokens] for name, values in batch.fields.items()}
        part_loss, amounts = loss_fn(log_probs[tokens], torch.zeros(len(tokens)), fields)
        total = total + part_loss
        for name, amount in amounts.items():
            sums[name] = sums.get(name, 0.0) + amount.item()
    total.backward()
    return total.item(), sums, log_probs.grad


def sums_in_fp64(batch: Batch) -> dict[int, dict[str, float]]:
    """Return {answer: sums over its trained tokens}, in Python's floats."""
    sums: dict[int, dict[str, float]] = {}
    for t, answer in enumerate(batch.fields["answer"].tolist()):
        if batch.fields["loss_mask"][t] == 0:
            continue
        entry = sums.setdefault(answer, {"log_prob": 0.0, "log_ratio": 0.0, "length": 0})
        log_prob = batch.fields["log_probs"][t].item()
        entry["log_prob"] += log_prob
        if "ref_log_probs" in batch.fields:
            entry["log_ratio"] += log_prob - batch.fields["ref_log_probs"][t].item()
        entry["length"] += 1
    return sums


PAIR_DIVISIONS = [
    [[*range(8)]],
    [[0, 1], [2, 3], [4, 5], [6, 7]],
    [[6, 7, 0, 1], [], [4, 5, 2, 3]],
]


@pytest.mark.parametrize("parts", PAIR_DIVISIONS)
def test_dpo_and_its_metrics_are_means_over_all_pairs(parts):
    batch = make_batch(PAIR_LENGTHS)
    loss, amounts, gradient = compute(find_loss("algorithm.beta=0.5"), batch, parts)
    sums = sums_in_fp64(batch)
    margins = [0.5 * (sums[2 * i]["log_ratio"] - sums[2 * i + 1]["log_ratio"]) for i in range(4)]
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / 4
    assert loss == pytest.approx(expected, rel=1e-6)
    assert amounts["rewards/margins"] == pytest.approx(sum(margins) / 4, rel=1e-5)
    assert amounts["rewards/accuracies"] == sum(margin > 0 for margin in margins) / 4
    chosen = sum(sums[2 * i]["log_ratio"] for i in range(4))
    assert amounts["rewards/chosen"] == pytest.approx(0.5 * chosen / 4, rel=1e-5)
    for column, kind in enumerate(("chosen", "rejected")):
        log_probs = [sums[2 * i + column]["log_prob"] for i in range(4)]
        assert amounts[f"logps/{kind}"] == pytest.approx(sum(log_probs) / 4, rel=1e-5)
    for t, answer in enumerate(batch.fields["answer"].tolist()):
        pull = 0.5 / (1 + math.exp(margins[answer // 2])) / 4
        sign = 1 if answer % 2 else -1
        expected = sign * pull * batch.fields["loss_mask"][t].item()
        assert gradient[t].item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", ["ipo", "simpo", "orpo"])
def test_other_losses_of_pairs_do_not_depend_on_micro_batches(name):
    batch = make_batch(PAIR_LENGTHS, has_reference=name == "ipo")
    results = [compute(find_loss(f"algorithm.loss={name}"), batch, p) for p in PAIR_DIVISIONS]
    for loss, amounts, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert amounts == pytest.approx(results[0][1], rel=1e-5, abs=1e-7)
        assert torch.allclose(gradient, results[0][2], atol=1e-7)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4]], [[0], [3, 1], [4], [2]]])
def test_kto_is_a_mean_over_all_answers(parts):
    """Two answers of one row may be in different micro-batches."""
    batch = make_batch(MIXED_LENGTHS)
    kl = torch.tensor(0.4)
    kwargs = "algorithm.loss_kwargs.undesirable_weight=0.5"
    loss, amounts, _ = compute(find_loss("algorithm.loss=kto", kwargs), batch, parts, kl)
    sums = sums_in_fp64(batch)
    assert sorted(sums) == [0, 3, 4, 6, 7]
    expected = 0.0
    num_right = 0
    for answer, entry in sums.items():
        gap = 0.1 * (entry["log_ratio"] - 0.4)
        is_chosen = answer % 2 == 0
        expected += 1 / (1 + math.exp(gap)) if is_chosen else 0.5 / (1 + math.exp(-gap))
        num_right += (gap > 0) == is_chosen
    assert loss == pytest.approx(expected / 5, rel=1e-6)
    assert amounts["rewards/accuracies"] == pytest.approx(num_right / 5)
    chosen = [sums[i]["log_ratio"] for i in (0, 4, 6)]
    rejected = [sums[i]["log_ratio"] for i in (3, 7)]
    assert amounts["rewards/chosen"] == pytest.approx(0.1 * sum(chosen) / 3, rel=1e-5)
    assert amounts["rewards/rejected"] == pytest.approx(0.1 * sum(rejected) / 2, rel=1e-5)


@pytest.mark.parametrize("column, present", [(0, "chosen"), (1, "rejected")])
def test_a_batch_without_answers_of_a_kind_has_no_mean_of_them(column, present):
    lengths = [[0, 0] for _ in range(3)]
    for row in lengths:
        row[column] = 5
    loss = find_loss("algorithm.loss=kto", "algorithm.sft_coef=0.3")
    batch = make_batch(lengths)
    names = {f"rewards/{present}", f"logps/{present}", "rewards/accuracies"}
    if present == "chosen":
        names.add("sft_loss")
    for parts in ([[0, 1, 2]], [[0], [], [2, 1]]):
        _, amounts, _ = compute(loss, batch, parts, torch.tensor(0.1))
        assert set(amounts) == names


def test_the_added_sft_loss_is_per_token_of_the_chosen_answers():
    batch = make_batch(PAIR_LENGTHS)
    plain, _, _ = compute(find_loss(), batch, PAIR_DIVISIONS[1])
    added, amounts, _ = compute(find_loss("algorithm.sft_coef=0.3"), batch, PAIR_DIVISIONS[1])
    sums = sums_in_fp64(batch)
    nll = -sum(sums[2 * i]["log_prob"] / sums[2 * i]["length"] for i in range(4)) / 4
    assert amounts["sft_loss"] == pytest.approx(nll, rel=1e-6)
    assert added == pytest.approx(plain + 0.3 * nll, rel=1e-6)


def test_the_added_sft_loss_is_a_mean_over_chosen_answers_alone():
    """Rows with a label may have none."""
    batch = make_batch(MIXED_LENGTHS)
    kl = torch.tensor(0.1)
    loss = find_loss("algorithm.loss=kto", "algorithm.sft_coef=0.3")
    for parts in ([[*range(5)]], [[0, 3], [1, 2, 4]]):
        _, amounts, _ = compute(loss, batch, parts, kl)
        sums = sums_in_fp64(batch)
        nlls = [-sums[a]["log_prob"] / sums[a]["length"] for a in sums if a % 2 == 0]
        assert len(nlls) == 3
        assert amounts["sft_loss"] == pytest.approx(sum(nlls) / 3, rel=1e-6)


# -- functions of the user -------------------------------------------------------------------------


def in_file(tmp_path, code: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(code)
    return f"algorithm.loss={path}:loss"


HINGE = """
import torch

def loss(chosen_log_ratios, rejected_log_ratios, *, beta, margin=1.0, **_):
    chosen = beta * chosen_log_ratios
    rejected = beta * rejected_log_ratios
    return torch.relu(margin - (chosen - rejected)), chosen, rejected
"""


def test_a_loss_of_the_user_gets_the_same_sums(tmp_path):
    setting = in_file(tmp_path, HINGE)
    loss = find_loss(setting, "algorithm.beta=0.2", "algorithm.loss_kwargs.margin=2")
    assert loss.takes_pairs
    assert loss.needs_reference
    batch = make_batch(PAIR_LENGTHS)
    value, _, _ = compute(loss, batch, PAIR_DIVISIONS[2])
    sums = sums_in_fp64(batch)
    gaps = [0.2 * (sums[2 * i]["log_ratio"] - sums[2 * i + 1]["log_ratio"]) for i in range(4)]
    assert value == pytest.approx(sum(max(0, 2 - gap) for gap in gaps) / 4, rel=1e-6)


def test_what_a_loss_reads_decides_what_is_computed(tmp_path):
    assert not find_loss("algorithm.loss=simpo").needs_reference
    assert not find_loss("algorithm.loss=orpo").needs_reference
    assert find_loss("algorithm.loss=ipo").needs_reference
    assert not find_loss().needs_kl
    kto = find_loss("algorithm.loss=kto")
    assert kto.needs_kl and kto.needs_reference and not kto.takes_pairs
    code = "def loss(log_probs, is_chosen, **_):\n    return log_probs, log_probs, 0.0\n"
    plain = find_loss(in_file(tmp_path, code))
    assert not plain.needs_reference and not plain.needs_kl and not plain.takes_pairs


MISTAKES = {
    "a parameter that the loss lacks": (
        ["algorithm.loss_kwargs.gamma=1"],
        "algorithm.loss_kwargs.gamma: dpo has no parameter gamma",
    ),
    "a key that the loss does not read": (
        ["algorithm.loss=ipo", "algorithm.label_smoothing=0.1"],
        "algorithm.label_smoothing=0.1 does nothing with algorithm.loss=ipo",
    ),
    "a key in the wrong place": (
        ["algorithm.loss_kwargs.beta=0.1"],
        "algorithm.loss_kwargs.beta: set algorithm.beta instead",
    ),
    "no such loss": (["algorithm.loss=dpoo"], "algorithm.loss=dpoo"),
    "a negative weight": (
        ["algorithm.loss=kto", "algorithm.loss_kwargs.undesirable_weight=-0.5"],
        "algorithm.loss_kwargs.undesirable_weight=-0.5 must be at least 0",
    ),
    "a weight in words": (
        ["algorithm.loss=kto", "algorithm.loss_kwargs.desirable_weight=much"],
        "algorithm.loss_kwargs.desirable_weight='much' must be a number",
    ),
    "no weight": (
        [
            "algorithm.loss=kto",
            "algorithm.loss_kwargs.desirable_weight=0",
            "algorithm.loss_kwargs.undesirable_weight=0.0",
        ],
        "desirable_weight=0 and algorithm.loss_kwargs.undesirable_weight=0 teach nothing",
    ),
    "half of the labels": (["algorithm.label_smoothing=0.5"], "at least 0 and less than 0.5"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error(mistake):
    pairs, message = MISTAKES[mistake]
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        find_loss(*pairs)


@pytest.mark.parametrize(
    "signature, message",
    [
        ("advantages, **_", "must read either pairs .* it reads advantages"),
        ("chosen_log_probs, is_chosen, **_", "must read either pairs"),
        ("chosen_log_probs", "must take the inputs that it does not read"),
    ],
)
def test_a_loss_with_other_arguments_is_an_error(tmp_path, signature, message):
    with pytest.raises(InputError, match=message):
        find_loss(in_file(tmp_path, f"def loss({signature}):\n    return 0\n"))


@pytest.mark.parametrize(
    "result, message",
    [
        ("chosen_log_probs", "must return losses, chosen rewards, rejected rewards"),
        ("(chosen_log_probs, chosen_log_probs)", "must return losses, chosen rewards, rejected"),
        ("chosen_log_probs.sum(), chosen_log_probs, chosen_log_probs", r"per pair, shape \[4\]"),
        ("1.0, chosen_log_probs, chosen_log_probs", r"per pair, shape \[4\], not 1.0"),
    ],
)
def test_a_loss_that_returns_something_else_is_an_error(tmp_path, result, message):
    code = f"def loss(chosen_log_probs, **_):\n    return {result}\n"
    with pytest.raises(InputError, match=message):
        compute(find_loss(in_file(tmp_path, code)), make_batch(PAIR_LENGTHS), PAIR_DIVISIONS[0])


@pytest.mark.parametrize(
    "result, message",
    [
        ("log_probs", "must return losses, rewards, baseline"),
        ("log_probs.sum(), log_probs, 0.0", r"one loss and reward per answer, shape \[8\]"),
        ("log_probs, log_probs[1:], 0.0", r"per answer, shape \[8\], not \[7\]"),
    ],
)
def test_a_loss_of_answers_that_returns_something_else_is_an_error(tmp_path, result, message):
    code = f"def loss(log_probs, is_chosen, **_):\n    return {result}\n"
    with pytest.raises(InputError, match=message):
        compute(find_loss(in_file(tmp_path, code)), make_batch(MIXED_LENGTHS), [[0, 1, 2, 3, 4]])
