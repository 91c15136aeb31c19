"""What several ranks compute together: attention, plans, decisions, and checks.

Each rank is a fork of this process.
"""

import gc
import itertools
import math
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config import InputError, load
from engines.adapter_guard import AdapterGuard
from engines.checkpoint.checkpointer import Checkpointer
from engines.fsdp.attention import Packing, ulysses_attention
from engines.heads import LogProbHead
from engines.model import guard
from engines.parallel.collectives import (
    AllGatherSliceGrad,
    AllGatherSumGrad,
    groups_by_size,
    groups_of_grid,
)
from engines.parallel.device import on_all_ranks, on_rank0, set_timeouts
from engines.parallel.varlen import (
    Scoring,
    Zigzag,
    attend_by_segment,
    attend_in_segment,
    causal_mask,
)
from engines.planning import Planner
from job.consistency import check_ranks_agree
from job.signals import Agreement
from tests.engines import stub_engine
from tests.engines.test_guard import StubEngine
from tests.support.models import make_model
from tests.support.ranks import group_beside_rank0, on_ranks

CPU = torch.device("cpu")
LENGTHS = [8, 24, 8]
NUM_TOKENS = sum(LENGTHS)
NUM_HEADS = 4
NUM_KV_HEADS = 2
DIM = 8
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SCORINGS = {
    "plain": Scoring(None),
    "scaled window": Scoring(0.7, 5),
    "soft cap in a window": Scoring(None, 5, 2.0),
    "sinks": Scoring(None, sinks=SINKS),
}


# -- attention -------------------------------------------------------------------------------------


def make_inputs() -> list[torch.Tensor]:
    """Return queries, keys and values [T, heads, dim], and the weights of the loss."""
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    return [torch.randn(NUM_TOKENS, number, DIM, generator=generator) for number in heads]


def attend_token_by_token(scoring: Scoring) -> list[torch.Tensor]:
    """Return the outputs [T, heads, dim], and the loss's gradients by queries, keys and values."""
    *inputs, weights = make_inputs()
    q, k, v = (x.requires_grad_() for x in inputs)
    starts = [sum(LENGTHS[:i]) for i, length in enumerate(LENGTHS) for _ in range(length)]
    scaling = scoring.scaling or 1 / math.sqrt(DIM)
    outputs = []
    for token, start in enumerate(starts):
        first = max(start, token + 1 - scoring.window) if scoring.window else start
        for head in range(NUM_HEADS):
            kv_head = head * NUM_KV_HEADS // NUM_HEADS
            scores = k[first : token + 1, kv_head] @ q[token, head] * scaling
            if scoring.softcap:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            if scoring.sinks is not None:
                scores = torch.cat([scores, scoring.sinks[head : head + 1]])
            probabilities = scores.softmax(0)[: token + 1 - first]
            outputs.append(probabilities @ v[first : token + 1, kv_head])
    output = torch.stack(outputs).unflatten(0, (NUM_TOKENS, NUM_HEADS))
    (output * weights).sum().backward()
    return [x.detach() for x in (output, q.grad, k.grad, v.grad)]


def own_tokens(num_ranks: int, rank: int, zigzag: bool) -> list[int]:
    """Return the tokens of a rank: a part of all, or the chunks r and -r - 1 of each sequence."""
    if not zigzag:
        share = NUM_TOKENS // num_ranks
        return [*range(rank * share, (rank + 1) * share)]
    tokens = []
    for i, length in enumerate(LENGTHS):
        chunk = length // (2 * num_ranks)
        for number in (rank, 2 * num_ranks - 1 - rank):
            start = sum(LENGTHS[:i]) + number * chunk
            tokens += range(start, start + chunk)
    return tokens


def attend_on_rank(zigzag: bool) -> list[list[list]]:
    """Return the results of attend() for all SCORINGS; none on rank 0, which shares no sequence."""
    group = group_beside_rank0()
    results = []
    if group.size() == 1:
        return results
    for scoring in SCORINGS.values():
        results.append([x.tolist() for x in attend(scoring, zigzag, group)])
    return results


def attend(scoring: Scoring, zigzag: bool, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the same as attend_token_by_token(), for this rank's tokens."""
    tokens = own_tokens(group.size(), group.rank(), zigzag)
    *inputs, weights = make_inputs()
    q, k, v = (x[tokens].requires_grad_() for x in inputs)
    packing = Packing.of(LENGTHS, group, CPU, zigzag)
    if zigzag:
        by_row = [x[:, None] for x in (q, k, v)]
        output = packing.zigzag.attention(*by_row, scoring)[:, 0]
    else:
        output = ulysses_attention(q, k, v, packing, scoring)
    (output * weights[tokens]).sum().backward()
    return [output.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("zigzag, num_ranks", [(False, 2), (False, 4), (True, 2), (True, 4)])
def test_ranks_that_share_sequences_attend_as_one(tmp_path, zigzag, num_ranks):
    by_rank = on_ranks(1 + num_ranks, tmp_path, attend_on_rank, zigzag)[1:]
    for number, (name, scoring) in enumerate(SCORINGS.items()):
        expected = attend_token_by_token(scoring)
        for rank, results in enumerate(by_rank):
            tokens = own_tokens(num_ranks, rank, zigzag)
            for values, whole in zip(results[number], expected, strict=True):
                difference = (torch.tensor(values) - whole[tokens]).abs().max()
                assert difference < 1e-5, (name, rank)


@pytest.mark.parametrize("name", SCORINGS)
def test_a_rank_attends_as_token_by_token(name):
    """Several queries share each of several key heads."""
    ends = list(itertools.accumulate(LENGTHS))
    segments = [(end - length, end) * 2 for end, length in zip(ends, LENGTHS)]
    by_row = [x[:, None] for x in make_inputs()[:3]]
    attended = attend_by_segment(*by_row, segments, SCORINGS[name])[:, 0]
    expected, *_ = attend_token_by_token(SCORINGS[name])
    torch.testing.assert_close(attended, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "window, expected",
    [
        (0, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        (1, [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]),
        (3, [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]),
        (9, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
    ],
)
def test_a_query_sees_as_many_keys_as_its_window_has_with_its_own(window, expected):
    assert causal_mask(2, 5, window, CPU).int().tolist() == expected


def test_without_a_causal_mask_a_query_sees_all_keys():
    q, k, v, _ = (x.transpose(0, 1)[None] for x in make_inputs())
    queries = q[:, :NUM_KV_HEADS, :5]
    for num_keys in (5, 9):
        keys = k[:, :, :num_keys]
        values = v[:, :, :num_keys]
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(DIM)
        expected = scores.softmax(-1) @ values
        attended = attend_in_segment(queries, keys, values, Scoring(None, is_causal=False))
        torch.testing.assert_close(attended, expected)


def positions_on_rank() -> list[int]:
    offsets = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    return Zigzag(offsets, dist.group.WORLD, CPU).positions.tolist()


def test_a_ranks_tokens_know_their_places(tmp_path):
    places = [place for length in LENGTHS for place in range(length)]
    for rank, positions in enumerate(on_ranks(4, tmp_path, positions_on_rank)):
        assert positions == [places[token] for token in own_tokens(4, rank, zigzag=True)]


def kernel_ranges() -> tuple[list, list, list[int]]:
    """Return the ranges of queries and the keys of each segment, and the same as the packed kernel
    of GPUs gets them; and the kernel's longest ranges."""
    zigzag = Zigzag([0, 8, 32, 40], dist.group.WORLD, CPU)
    expected = []
    for segment in zigzag.segments:
        keys = [*range(segment.first_key, segment.end_key)]
        expected.append((segment.first_query, segment.end_query, keys))
    in_kernel = zigzag._kernel_segments
    keys = zigzag._keys_of_segments
    if keys is None:
        keys = torch.arange(40)
    ranges = []
    query_ranges = itertools.pairwise(in_kernel.cu_queries)
    key_ranges = itertools.pairwise(in_kernel.cu_keys)
    for queries, keys_of in zip(query_ranges, key_ranges, strict=True):
        ranges.append((*map(int, queries), keys[slice(*keys_of)].tolist()))
    assert in_kernel.cu_queries.dtype == in_kernel.cu_keys.dtype == torch.int32
    return expected, ranges, [in_kernel.max_queries, in_kernel.max_keys]


@pytest.mark.parametrize("num_ranks, longest", [(1, [[24, 24]]), (2, [[6, 24], [6, 18]])])
def test_a_packed_kernel_gets_the_same_segments(tmp_path, num_ranks, longest):
    for rank, (expected, ranges, longest_ranges) in enumerate(
        on_ranks(num_ranks, tmp_path, kernel_ranges)
    ):
        assert ranges == expected
        assert longest_ranges == longest[rank]


def gather_on_rank() -> dict[str, tuple[list, list]]:
    """Return what each collective gathers, and its gradient for this rank's part."""
    group = group_beside_rank0()
    rank = group.rank()
    results = {}
    for kind, scale in ((AllGatherSliceGrad, 1), (AllGatherSumGrad, 1 + rank)):
        own = torch.tensor([2.0 * rank, 2.0 * rank + 1], requires_grad=True)
        gathered = kind.apply(own, group)
        (gathered * torch.arange(10.0, 10 + len(gathered)) * scale).sum().backward()
        results[kind.__name__] = (gathered.tolist(), own.grad.tolist())
    return results


def test_the_gradient_of_a_gathered_tensor_is_a_slice_or_a_sum(tmp_path):
    alone, *by_rank = on_ranks(4, tmp_path, gather_on_rank)
    assert alone == dict.fromkeys(alone, ([0, 1], [10, 11]))
    for rank, results in enumerate(by_rank):
        gathered = [0, 1, 2, 3, 4, 5]
        own_slice = [10 + 2 * rank, 11 + 2 * rank]
        assert results["AllGatherSliceGrad"] == (gathered, own_slice)
        assert results["AllGatherSumGrad"] == (gathered, [(1 + 2 + 3) * x for x in own_slice])


# -- heads -----------------------------------------------------------------------------------------

VOCAB_SIZE = 10
TARGETS = [0, 9, 3, 7, 4, 5]
# The last rank of three has rows 8 and 9, and two rows that pad the vocabulary.
NUM_ROWS = 4


def make_head_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, the output matrix, and the candidates of each target."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(TARGETS), DIM, generator=generator)
    weight = torch.randn(VOCAB_SIZE, DIM, generator=generator)
    hidden[1] = 10 * weight[9]  # so that its target is the most likely token
    candidates = [[target, (target + 1) % 10, (target + 5) % 10] for target in TARGETS]
    candidates[-1][-1] = -1
    return hidden, weight, torch.tensor(candidates)


def head_loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    factors = torch.arange(1.0, 1 + len(TARGETS))
    return (log_probs * factors).sum() + (entropy * factors.flip(0)).sum()


def run_head_on_rank(has_candidates: bool) -> list[list]:
    """Return the head's results and the gradients, by rows of the output matrix on this rank."""
    hidden, weight, candidates = make_head_inputs()
    group = group_beside_rank0()
    rank = group.rank()
    padded = torch.cat([weight, torch.full((2, DIM), 1e3)])
    rows = padded[rank * NUM_ROWS : (rank + 1) * NUM_ROWS].clone()
    hidden.requires_grad_()
    rows.requires_grad_()
    head = LogProbHead(0.7, 4, False, VOCAB_SIZE, group, scale=1.5, softcap=3.0)
    if not has_candidates:
        candidates = candidates[:, :0]
    log_probs, entropy, is_greedy = head(hidden, rows, torch.tensor(TARGETS), candidates)
    head_loss(log_probs, entropy).backward()
    outputs = (log_probs, entropy, is_greedy, hidden.grad, rows.grad)
    return [x.tolist() for x in outputs]


@pytest.mark.parametrize("has_candidates", [False, True])
def test_ranks_that_divide_the_vocabulary_compute_the_whole_softmax(tmp_path, has_candidates):
    hidden, weight, candidates = make_head_inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = 3.0 * torch.tanh(1.5 * hidden @ weight.T / 3.0) / 0.7
    if has_candidates:
        is_candidate = (candidates[:, :, None] == torch.arange(VOCAB_SIZE)).any(1)
        logits = logits.masked_fill(~is_candidate, -1e9)
    distribution = torch.distributions.Categorical(logits=logits)
    targets = torch.tensor(TARGETS)
    log_probs = distribution.log_prob(targets)
    entropy = distribution.entropy()
    is_greedy = logits.argmax(-1) == targets
    assert is_greedy.any()
    assert not is_greedy.all()
    head_loss(log_probs, entropy).backward()

    by_rank = on_ranks(4, tmp_path, run_head_on_rank, has_candidates)[1:]
    hidden_grad = 0
    for rank, results in enumerate(by_rank):
        own_log_probs, own_entropy, own_greedy, grad, rows_grad = map(torch.tensor, results)
        torch.testing.assert_close(own_log_probs, log_probs.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own_entropy, entropy.detach(), rtol=1e-4, atol=1e-5)
        assert own_greedy.tolist() == is_greedy.tolist()
        own_rows = weight.grad[rank * NUM_ROWS : (rank + 1) * NUM_ROWS]
        torch.testing.assert_close(rows_grad[: len(own_rows)], own_rows, rtol=1e-4, atol=1e-5)
        assert (rows_grad[len(own_rows) :] == 0).all()
        hidden_grad = hidden_grad + grad
    torch.testing.assert_close(hidden_grad, hidden.grad, rtol=1e-4, atol=1e-5)


# -- plans -----------------------------------------------------------------------------------------

SEQUENCES = [5, 60, 12, 33, 7, 7, 41, 19, 2, 64, 28, 3, 50]
MAX_TOKENS = 64


PLANS = {
    "fixed": (1, SEQUENCES, 1),
    "a multiple": (1, SEQUENCES, 3),
    "one each": (1, [3, 4, 5, 6], 1),
    "dynamic": ("auto", [*SEQUENCES, 200], 1),
}


def plan_on_rank() -> dict[str, dict]:
    return {name: make_plan(*arguments) for name, arguments in PLANS.items()}


def make_plan(context_parallel_size, lengths: list[int], multiple: int) -> dict:
    pairs = [
        f"data.max_tokens_per_micro_batch={MAX_TOKENS}",
        f"engine.context_parallel_size={context_parallel_size}",
    ]
    config = load("sft.yaml", ["model.path=m", "data.train_files=t", *pairs])
    world = dist.group.WORLD
    planner = Planner(config, world.rank(), world.size(), world, CPU, lambda size: size, multiple)
    plan = planner.plan(lengths, [float(length * length) for length in lengths])
    reported = plan.reported_by(world.rank()).tolist()
    return {
        "sequences": plan.sequences,
        "micro_batches": plan.micro_batches,
        "reported": [i for i, is_own in zip(plan.sequences, reported) if is_own],
    }


def test_every_sequence_is_in_one_micro_batch_of_each_of_its_ranks(tmp_path):
    by_rank = on_ranks(4, tmp_path, plan_on_rank)
    for name, (size, lengths, multiple) in PLANS.items():
        plans = [plans_of_rank[name] for plans_of_rank in by_rank]
        (num_passes,) = {len(plan["micro_batches"]) for plan in plans}
        assert num_passes % multiple == 0, name
        sizes = set()
        for plan in plans:
            members = [i for _, part in plan["micro_batches"] for i in part]
            assert sorted(members) == [*range(len(plan["sequences"]))], name
            for group_size, part in plan["micro_batches"]:
                num_tokens = sum(lengths[plan["sequences"][i]] for i in part)
                assert num_tokens <= MAX_TOKENS * group_size, name
                sizes.add(group_size)
        reported = [i for plan in plans for i in plan["reported"]]
        assert sorted(reported) == [*range(len(lengths))], name
        assert (max(sizes) > 1) == (size == "auto"), name


def ranks_that_take_part(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks that take part in a collective of this rank's group."""
    takes_part = torch.zeros(dist.get_world_size())
    takes_part[dist.get_rank()] = 1
    dist.all_reduce(takes_part, group=group)
    return takes_part.nonzero().flatten().tolist()


def groups_on_rank() -> dict[int, list[int]]:
    """Return the ranks that take part in a collective of each of this rank's groups, by size."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5])]
    singles = [dist.new_group([number]) for number in range(6)]
    groups = groups_by_size(halves[rank > 3], singles[rank])
    return {size: ranks_that_take_part(group) for size, group in groups.items()}


def test_groups_are_powers_of_two_of_neighbouring_data_parallel_ranks(tmp_path):
    four = [0, 1, 2, 3]
    assert on_ranks(6, tmp_path, groups_on_rank) == [
        {1: [0], 2: [0, 1], 4: four},
        {1: [1], 2: [0, 1], 4: four},
        {1: [2], 2: [2, 3], 4: four},
        {1: [3], 2: [2, 3], 4: four},
        {1: [4], 2: [4, 5]},
        {1: [5], 2: [4, 5]},
    ]


def groups_of_all_ranks() -> dict[int, int]:
    """Return the number of ranks of each of this rank's groups, by the size that it is for."""
    singles = [dist.new_group([number]) for number in range(dist.get_world_size())]
    groups = groups_by_size(dist.group.WORLD, singles[dist.get_rank()])
    return {size: group.size() for size, group in groups.items()}


def test_the_last_of_three_ranks_is_in_no_group_of_two(tmp_path):
    assert on_ranks(3, tmp_path, groups_of_all_ranks) == [{1: 1, 2: 2}, {1: 1, 2: 2}, {1: 1}]


def test_all_ranks_may_be_one_group(tmp_path):
    assert on_ranks(2, tmp_path, groups_of_all_ranks) == [{1: 1, 2: 2}] * 2


def groups_along_axes(shape: tuple[int, ...]) -> list[list[int]]:
    return [ranks_that_take_part(group) for group in groups_of_grid(shape)]


def test_each_axis_of_a_grid_has_a_group_of_the_ranks_along_it(tmp_path):
    assert on_ranks(6, tmp_path, groups_along_axes, (2, 3)) == [
        [[0, 3], [0, 1, 2]],
        [[1, 4], [0, 1, 2]],
        [[2, 5], [0, 1, 2]],
        [[0, 3], [3, 4, 5]],
        [[1, 4], [3, 4, 5]],
        [[2, 5], [3, 4, 5]],
    ]


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_along_an_axis_of_one_rank_each_rank_is_alone(tmp_path, shape):
    all_alone = [[[0, 1], [0]], [[0, 1], [1]]]
    if shape == (1, 2):
        all_alone = [groups[::-1] for groups in all_alone]
    assert on_ranks(2, tmp_path, groups_along_axes, shape) == all_alone


# -- decisions and checks --------------------------------------------------------------------------


def work_on_rank0() -> list:
    def fail() -> None:
        raise InputError("a mistake")

    try:
        on_rank0(fail)
        message = None
    except InputError as error:
        message = str(error)
    return [on_rank0(dist.get_rank), on_rank0(max, 3, 4), message]


def test_what_rank_0_returns_or_raises_reaches_all_ranks(tmp_path):
    assert on_ranks(3, tmp_path, work_on_rank0) == [[0, 4, "a mistake"]] * 3


def groups_after_work_on_rank0(is_a_mistake: bool) -> list[float]:
    """Return the limit of waiting [s] of each group that is left after work on rank 0."""

    def work() -> None:
        if is_a_mistake:
            raise InputError("a mistake")

    for _ in range(2):
        with suppress(InputError):
            on_rank0(work)
    return limits_of_waiting()


def limits_of_waiting() -> list[float]:
    """Return the limit of each group [s], in the order in which the groups were made."""
    groups = dist.distributed_c10d._world.pg_map
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


@pytest.mark.parametrize("is_a_mistake", [False, True])
def test_work_on_rank_0_leaves_no_group_behind(tmp_path, is_a_mistake):
    """Each group has threads and sockets, which a long run would collect."""
    for limits in on_ranks(2, tmp_path, groups_after_work_on_rank0, is_a_mistake):
        assert len(limits) == 1


def work_in_a_group_of_ones_own() -> list:
    """Work twice in a group that is given, then in a new one."""
    group = dist.new_group(backend="gloo")
    limits = [on_rank0(limits_of_waiting, group=group) for _ in range(2)]
    return [*limits, on_rank0(limits_of_waiting)]


def test_ranks_may_wait_for_days_for_work_on_rank_0(tmp_path):
    """Rank 0 may tokenize a large file. A group that is given stays, and is used again."""
    minutes_30 = 1800.0
    days_7 = 7 * 86400.0
    given = [minutes_30, minutes_30]
    expected = [given, given, [*given, days_7]]
    assert on_ranks(2, tmp_path, work_in_a_group_of_ones_own) == [expected] * 2


def work_on_every_rank() -> list:
    def fail_on_later_ranks() -> None:
        if dist.get_rank():
            raise InputError(f"a mistake on rank {dist.get_rank()}")

    try:
        on_all_ranks(fail_on_later_ranks)
        message = None
    except InputError as error:
        message = str(error)
    return [on_all_ranks(max, 3, dist.get_rank() + 2), message]


def test_a_mistake_on_any_rank_is_an_error_on_all(tmp_path):
    expected = [[3, "a mistake on rank 1"], [3, "a mistake on rank 1"], [4, "a mistake on rank 1"]]
    assert on_ranks(3, tmp_path, work_on_every_rank) == expected


def timeouts_on_rank() -> list[float]:
    group = dist.new_group(backend="gloo")
    set_timeouts(0.5)
    groups = [dist.group.WORLD, group]
    return [g._get_backend(CPU).options._timeout.total_seconds() for g in groups]


def test_the_limit_of_waiting_holds_in_all_groups(tmp_path):
    assert on_ranks(2, tmp_path, timeouts_on_rank) == [[30.0, 30.0], [30.0, 30.0]]


def decide_on_rank() -> list[tuple[bool, bool]]:
    agreement = Agreement(save_freq=3, save_minutes=1)
    agreement.begin(total_steps=100)
    rank = dist.get_rank()
    decisions = []
    for step in range(1, 7):
        if (step, rank) in ((2, 0), (4, 1)):
            agreement.saved_at -= 60  # as if a minute had passed, on this rank's clock
        if (step, rank) == (5, 1):
            signal.raise_signal(signal.SIGTERM)
        agreement.update(step, CPU)
        decisions.append((agreement.save, agreement.stop))
    return decisions


def test_ranks_save_by_the_clock_of_rank_0_and_stop_for_any_ranks_signal(tmp_path):
    saves = [False, True, True, False, True, True]
    stops = [False, False, False, False, True, True]
    assert on_ranks(2, tmp_path, decide_on_rank) == [list(zip(saves, stops))] * 2


def compare_on_rank(*rates: float) -> list[str | None]:
    """Return the error for ranks that agree, and for ranks with these learning rates."""
    errors = []
    for rate in (rates[0], rates[dist.get_rank()]):
        try:
            check_ranks_agree(
                load("sft.yaml", ["model.path=m", "data.train_files=t", f"optim.lr={rate}"])
            )
            errors.append(None)
        except InputError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_differ_are_named_on_all_of_them(tmp_path):
    first, *others = on_ranks(3, tmp_path, compare_on_rank, 1e-3, 1e-3, 1e-4)
    agree, differ = first
    assert agree is None
    assert differ.startswith("optim.lr differs between ranks: 0.001 on rank 0, 0.0001 on rank 2:")
    assert others == [first] * 2


def guard_on_rank() -> str | None:
    engine = StubEngine(leaking_layer=None)
    if dist.get_rank() == 1:
        engine.embedding[:] = torch.inf
    try:
        guard.check_isolation(engine)
    except InputError as error:
        return str(error)
    return None


def test_what_the_guard_finds_on_one_rank_is_an_error_on_all(tmp_path):
    for message in on_ranks(2, tmp_path, guard_on_rank):
        assert message is not None
        assert "not finite" in message


def watch_adapters_on_rank(scale: float, grad_norm: float, names: list[str]) -> str | None:
    """Only rank 1 has trained tokens, whose loss has a gradient unless scale is 0."""
    adapters = AdapterGuard(CPU, is_active=True)
    own_scale = scale * dist.get_rank()
    loss_fn = adapters.watch(lambda outputs: (outputs * own_scale).sum())
    loss_fn(torch.ones(3, requires_grad=True)).backward()
    try:
        adapters.check(grad_norm, names)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "grad_norm, names, message",
    [
        (0.0, [], "the gradient of every adapter is exactly 0"),
        (1.0, ["b", "a"], "no gradient reaches a, because"),
    ],
)
def test_adapters_need_a_gradient_if_any_ranks_loss_has_one(tmp_path, grad_norm, names, message):
    found = on_ranks(2, tmp_path, watch_adapters_on_rank, 1.0, grad_norm, names)
    assert [text.startswith(message) for text in found] == [True, True]
    assert on_ranks(2, tmp_path, watch_adapters_on_rank, 0.0, grad_norm, names) == [None, None]


def save_on_full_disk(model: Path, directory: Path) -> str:
    """Return the error of a rank, when the disk fills up after the checkpoint is complete."""
    engine = stub_engine.StubEngine(model)
    checkpointer = Checkpointer(directory, max_checkpoints=3, asynchronous=False)
    try:
        stub_engine.save(checkpointer, 1, engine)
    except InputError as error:
        return str(error)
    raise AssertionError("the checkpoint was saved")


def test_a_disk_that_fills_up_at_latest_ends_all_ranks_with_one_line(tmp_path):
    """Rank 0 alone writes `latest`, and the other ranks wait for its result."""
    model = make_model(tmp_path / "model", "qwen2_tied")
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    (directory / "latest.tmp").symlink_to("/dev/full")
    errors = on_ranks(2, tmp_path, save_on_full_disk, model, directory)
    message = f"the disk is full: {directory}/latest needs 14 bytes"
    assert [error.startswith(message) for error in errors] == [True, True]
    assert (directory / "step_00000001" / "trainer.json").is_file()


def collect_garbage() -> bool:
    return gc.collect() >= 0


def test_a_fork_does_not_delete_the_process_groups_of_its_parent(tmp_path):
    """It has none of their threads, and would wait for them forever."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    try:
        cycle = [dist.group.WORLD]
        cycle.append(cycle)
        dist.destroy_process_group()
        del cycle
        assert on_ranks(2, tmp_path, collect_garbage) == [True, True]
    finally:
        gc.enable()
