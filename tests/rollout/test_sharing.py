"""Which ranks train on a response, and the numbers that they exchange."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from data.batching.plan import Plan
from data.images.processor import ImageStore
from engines.model.routes import FIELD
from rollout.samples import Samples
from rollout.sharing import Routes, Share, divide, plan_mini_batches
from tests.engines.fsdp.cases import build
from tests.support.guarded import unguarded
from tests.support.models import make_image_model, make_model
from tests.support.ranks import on_ranks
from tests.support.samples import make_samples

LENGTHS = [3, 9, 1, 4, 1, 5, 9, 2, 6, 5]  # of the responses; prompts have two tokens
OWNERS = [1, 0, 1, 1, 0, 1, 0, 0, 1, 1]
TEACHERS = 1000  # what is added to the tokens that a teacher sees
MINI_BATCHES = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 0, 1])


def all_samples() -> Samples:
    samples = make_samples(LENGTHS, range(10), range(10))
    ids = samples.batch.input_ids
    # As for a model of 512 experts, two of them per token; no expert of the first token is known.
    samples.batch.fields["routes"] = torch.stack([9 * ids - 1, -1 - ids], 1).short()
    return samples


def held_samples(rank: int, num_ranks: int) -> Samples:
    """Return the samples as this rank holds them after drawing."""
    samples = replace(all_samples(), owner=torch.tensor(OWNERS) % num_ranks, rank=rank)
    held = samples.held.tolist()
    texts = [samples.texts[i] for i in held]
    prompts = [samples.prompts[i] for i in held]
    return replace(samples, batch=samples.batch.select(held), texts=texts, prompts=prompts)


def divide_and_exchange(model: Path, engine_settings: str, max_tokens: int) -> dict:
    cap = [f"data.max_tokens_per_micro_batch={max_tokens}"]
    with unguarded():
        engine = build(model, torch.device("cpu"), engine_settings, cap)
    samples = held_samples(dist.get_rank(), dist.get_world_size())
    teachers_batch = replace(samples.batch, input_ids=samples.batch.input_ids + TEACHERS)
    seen_by_teacher = replace(samples, batch=teachers_batch)
    share = divide(samples, MINI_BATCHES, engine, seen_by_teacher=seen_by_teacher)
    numbers = torch.stack([share.indices, share.batch.cu_seqlens.diff()], 1)
    return {
        "share": replace(share, group=None),
        "dp_rank": engine.dp_rank,
        "gathered": share.gather_responses(numbers),
        "repeated": share.repeat_on_tokens(torch.arange(10) * 10),
        "sizes": [len(batch) for batch, _ in share.parts],
        "metrics": share.metrics,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("sharing") / "llama", "llama")


@pytest.mark.parametrize(
    "engine_settings, max_tokens, dp_ranks",
    [
        ("context_parallel_size=2", 24, [0, 0]),
        # Two ranks share the longest sequences, of 11 tokens.
        ("context_parallel_size=auto", 9, [0, 1]),
    ],
)
def test_each_response_reaches_the_ranks_that_train_on_it(
    model, tmp_path, engine_settings, max_tokens, dp_ranks
):
    results = on_ranks(2, tmp_path, divide_and_exchange, model, engine_settings, max_tokens)
    whole = all_samples().batch
    assert [result["dp_rank"] for result in results] == dp_ranks
    num_reports = torch.zeros(10, dtype=torch.int64)
    trained = set()
    for result in results:
        share = result["share"]
        indices = share.indices.tolist()
        by_mini_batch = [(int(MINI_BATCHES[i]), i) for i in indices]
        assert by_mini_batch == sorted(by_mini_batch)
        trained |= set(indices)
        num_reports[share.indices[share.is_reporter]] += 1
        expected = whole.select(indices)
        assert share.batch.input_ids.tolist() == expected.input_ids.tolist()
        assert share.batch.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
        assert share.teacher_batch.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
        assert torch.equal(share.teacher_batch.input_ids, expected.input_ids + TEACHERS)
        assert share.batch.fields.keys() == expected.fields.keys()
        for name, values in expected.fields.items():
            assert share.batch.fields[name].tolist() == values.tolist(), name
        assert share.num_mini_batches == 2
        num_second = sum(mini_batch for mini_batch, _ in by_mini_batch)
        assert result["sizes"] == [len(indices) - num_second, num_second]
        check_micro_batches(share, result["dp_rank"])
        expected_numbers = [[i, length + 2] for i, length in enumerate(LENGTHS)]
        assert result["gathered"].tolist() == expected_numbers
        repeated = [10 * i for i in indices for _ in range(LENGTHS[i] + 2)]
        assert result["repeated"].tolist() == repeated
    assert trained == set(range(10))
    assert num_reports.tolist() == [1] * 10, "one rank reports each response"
    num_trained = [len(result["share"].indices) for result in results]
    if dp_ranks == [0, 0]:
        assert num_trained == [10, 10]
        assert results[0]["share"].is_reporter.all()
    else:
        assert max(num_trained) < 10
        assert sum(num_trained) > 10, "both ranks train on the longest responses"


def check_micro_batches(share: Share, dp_rank: int) -> None:
    """The micro-batches of each mini-batch hold its sequences once, and its plan names them."""
    for mini_batch, (batch, plan) in enumerate(share.parts):
        indices = sorted(i for _, members in plan.micro_batches for i in members)
        assert indices == list(range(len(batch)))
        inside = (MINI_BATCHES == mini_batch).nonzero()[:, 0]
        of_this_rank = (plan.first <= dp_rank) & (dp_rank < plan.first + plan.count)
        expected = inside[of_this_rank].tolist()
        assert share.indices[share.mini_batches[share.indices] == mini_batch].tolist() == expected


def divide_with_images(model: Path) -> dict:
    """Divide samples of which some begin with image tokens, and plan them without sharing."""
    engine = build(model, torch.device("cpu"), more=["model.images=true"])
    image_token = engine.processor.hf_processor.image_token_id
    samples = held_samples(dist.get_rank(), 2)
    whole = all_samples().batch
    for batch in (whole, samples.batch):
        batch.input_ids[(batch.position_ids > 0) & (batch.input_ids > 40)] = image_token
    store = ImageStore([[]] * 10, engine.processor)
    batch = replace(samples.batch, rows=samples.held, image_store=store)
    samples = replace(samples, batch=batch, rows=torch.arange(10))
    share = divide(samples, torch.zeros(10, dtype=torch.int64), engine)
    lengths = whole.lengths
    flops = engine.image_flops(whole)
    return {
        "first": share.plans[0].first.tolist(),
        "rows": (share.batch.rows.tolist(), share.indices.tolist()),
        "expected": engine.plan(lengths, flops).first.tolist(),
        "without images": engine.plan(lengths).first.tolist(),
    }


@pytest.mark.slow
def test_work_on_images_of_all_ranks_counts_in_the_division(tmp_path):
    model = make_image_model(tmp_path / "qwen2_5_vl", "qwen2_5_vl")
    for result in on_ranks(2, tmp_path, divide_with_images, model):
        assert result["first"] == result["expected"]
        assert result["first"] != result["without images"]
        rows, indices = result["rows"]
        assert rows == indices


def test_tokens_of_group_sizes_are_summed_over_mini_batches_and_shares_averaged():
    empty = torch.zeros(0)
    plans = [
        Plan([], [], empty, empty, {"perf/cp_1": tokens, "perf/plan_efficiency": efficiency})
        for tokens, efficiency in ((100.0, 0.5), (20.0, 1.0))
    ]
    samples = all_samples()
    share = Share(samples.batch, torch.arange(10), MINI_BATCHES, plans, torch.ones(10))
    assert share.metrics == {"perf/cp_1": 120.0, "perf/plan_efficiency": 0.75}


def test_models_with_routing_of_their_own_get_all_but_the_routes():
    samples = all_samples()
    samples.batch.fields[FIELD] = samples.batch.fields.pop("routes")
    share = Share(samples.batch, torch.arange(10), MINI_BATCHES, [], torch.ones(10))
    without = share.without_routes
    assert without.batch.fields.keys() == {"loss_mask", "rollout_log_probs"}
    assert without.batch.input_ids is share.batch.input_ids
    assert without.indices is share.indices
    assert FIELD in share.batch.fields


class RecordingEngine:
    """Gives the k-th mini-batch to data-parallel rank k alone, and records what it plans.

    The images of a response take as many FLOPs as it has tokens.
    """

    def __init__(self):
        self.planned = []

    def plan(self, lengths, image_flops):
        place = len(self.planned)
        self.planned.append((lengths, image_flops))
        first = torch.arange(len(lengths)) + 10 * place
        return Plan([], [], first, torch.full((len(lengths),), 1 + place))

    def image_flops(self, batch):
        return [float(length) for length in batch.lengths]


@pytest.mark.parametrize("has_images", [False, True])
def test_each_mini_batch_is_planned_by_its_whole_sequences_and_their_images(has_images):
    """Prompts count, too. This rank holds the responses of rank 1, and knows only their images."""
    samples = held_samples(1, 2)
    if has_images:
        batch = replace(samples.batch, rows=samples.held, image_store=object())
        samples = replace(samples, batch=batch)
    engine = RecordingEngine()
    routes = plan_mini_batches(samples, MINI_BATCHES, engine, None)
    inside = [[0, 3, 4, 6, 8], [1, 2, 5, 7, 9]]
    for indices, (lengths, flops) in zip(inside, engine.planned, strict=True):
        assert lengths == [LENGTHS[i] + 2 for i in indices]
        is_known = [has_images and OWNERS[i] == 1 for i in indices]
        assert flops == [length * known for length, known in zip(lengths, is_known)]
    assert routes.first.tolist() == [0, 10, 11, 1, 2, 12, 3, 13, 4, 14]
    assert routes.count.tolist() == [1, 2, 2, 1, 1, 2, 1, 2, 1, 2]
    assert len(routes.plans) == 2


def test_a_response_reaches_the_ranks_from_its_first_one_on():
    routes = Routes([], torch.tensor([0, 1, 2]), torch.tensor([2, 1, 3]))
    reached = [routes.reach(dp_rank).tolist() for dp_rank in range(6)]
    assert reached == [
        [True, False, False],
        [True, True, False],
        [False, False, True],
        [False, False, True],
        [False, False, True],
        [False, False, False],
    ]


def test_only_the_first_rank_of_a_response_reports_its_numbers():
    """Without other ranks, numbers that nobody reports stay 0, whatever their shape and dtype."""
    samples = all_samples()
    is_reporter = torch.tensor([True, False, True])
    indices = torch.tensor([7, 2, 4])
    share = Share(samples.batch.select(indices), indices, MINI_BATCHES, [], is_reporter)
    gathered = share.gather_responses(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert gathered.dtype == torch.int64
    expected = torch.zeros(10, 2, dtype=torch.int64)
    expected[7] = torch.tensor([1, 2])
    expected[4] = torch.tensor([5, 6])
    assert torch.equal(gathered, expected)
