"""Pairs stay in one micro-batch, under the token cap, and every pair is computed once."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config import load
from data.batching.plan import Plan
from engines.planning import Planner, round_up
from tests.support.ranks import on_ranks

MAX_TOKENS = 96
LENGTHS = torch.randint(3, 40, (46,), generator=torch.Generator().manual_seed(0)).tolist()


def plan_on_rank(settings: list[str]) -> Plan:
    config = load(
        "dpo.yaml",
        [
            "model.path=m",
            "data.train_files=t",
            f"data.max_tokens_per_micro_batch={MAX_TOKENS}",
            *settings,
        ],
    )
    planner = Planner(
        config,
        dist.get_rank(),
        dist.get_world_size(),
        dist.group.WORLD,
        torch.device("cpu"),
        padding_multiple=lambda size: 2 * size if size > 1 else 1,
        micro_batches_multiple=1,
    )
    costs = [float(length**2) for length in LENGTHS]
    return planner.plan_groups(LENGTHS, costs, group_size=2)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["engine.use_remove_padding=false"],
        ["engine.context_parallel_size=auto"],
        ["engine.context_parallel_size=2"],
    ],
    ids=["packed", "padded", "dynamic context parallelism", "context parallelism"],
)
def test_pairs_stay_together(tmp_path, settings):
    plans = on_ranks(3, Path(tmp_path), plan_on_rank, settings)
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    is_padded = "engine.use_remove_padding=false" in settings
    is_dynamic = "engine.context_parallel_size=auto" in settings
    counts = torch.zeros(len(LENGTHS), dtype=torch.int64)
    for rank, plan in enumerate(plans):
        lengths = [LENGTHS[i] for i in plan.sequences]
        for size, members in plan.micro_batches:
            sequences = [plan.sequences[i] for i in members]
            assert sequences[1::2] == [i + 1 for i in sequences[::2]]
            assert not (torch.tensor(sequences[::2]) % 2).any()
            padded = [round_up(lengths[i], 2 * size if size > 1 else 1) for i in members]
            num_tokens = max(padded) * len(padded) if is_padded and padded else sum(padded)
            assert num_tokens <= MAX_TOKENS * (size if is_dynamic else 1)
        reported = torch.tensor(plan.sequences)[plan.reported_by(rank)]
        counts[reported] += 1
    assert counts.tolist() == [1] * len(LENGTHS)


def test_pairs_are_balanced_over_ranks(tmp_path):
    plans = on_ranks(2, Path(tmp_path), plan_on_rank, [])
    squares = torch.tensor(LENGTHS).square()
    work = [squares[plan.sequences].sum().item() for plan in plans]
    assert max(work) < 1.02 * min(work)
