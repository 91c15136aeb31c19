"""What plans of dynamic context parallelism count for a pass, besides the work on its sequences."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig

from benchmarks.cp_cost import Row, costs_setting
from config import load
from data.batching.plan import PassCosts
from engines.model.flops import cost_of_length
from engines.parallel import device
from engines.pass_costs import pass_costs
from engines.planning import Planner
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")
PEAK = 1e15


def make_config(*pairs: str) -> DictConfig:
    settings = ["model.path=m", "data.train_files=t", "data.max_tokens_per_micro_batch=2000"]
    return load("sft.yaml", [*settings, "engine.context_parallel_size=auto", *pairs])


def costs_of_rank(peaks: list[float | None]) -> PassCosts:
    device.peak_flops = lambda this_device: peaks[dist.get_rank()]  # in a fork
    return pass_costs(make_config().engine, 10, 2, CPU)


def test_ranks_with_different_devices_agree(tmp_path):
    """With plans of their own, they would wait for each other forever."""
    slower, other = on_ranks(2, tmp_path, costs_of_rank, [2 * PEAK, PEAK])
    assert slower == other
    assert slower.least_alone == pytest.approx(0.07 * 0.4 * PEAK)
    unknown = on_ranks(2, tmp_path, costs_of_rank, [None, PEAK])
    assert unknown == [PassCosts(slowdown=0.05)] * 2


def test_measured_costs_are_counted_in_flops():
    """A rank that computes 2e12 FLOPs per second does 1e12 of them in 500 ms."""
    engine = make_config("engine.context_parallel_costs=[2,500,750,0.25]").engine
    assert pass_costs(engine, 24, 2, CPU) == PassCosts(1e12, 1.5e12, 0.25)


def test_attention_takes_longer_than_its_flops_say():
    assert cost_of_length((100, 10, 3), 4) == pytest.approx(4 * 110 + 1.7 * 3 * 16)


@pytest.mark.usefixtures("process_group")
def test_nothing_is_known_of_a_device_without_peak_flops():
    assert pass_costs(make_config().engine, 24, 2, CPU) == PassCosts(0, 0, 0.05)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "pairs, num_ranks, dp_size, factor",
    [
        ([], 2, 2, 1),
        (["engine.tensor_model_parallel_size=2"], 4, 2, 2),
        # Each of two stages has half of the layers, and both compute at the same time.
        (["engine.pipeline_model_parallel_size=2"], 4, 2, 1),
    ],
)
def test_without_a_measurement_the_time_per_layer_of_an_h200_counts(
    monkeypatch, pairs, num_ranks, dp_size, factor
):
    monkeypatch.setattr("engines.parallel.device.peak_flops", lambda device: PEAK)
    monkeypatch.setattr(dist, "get_world_size", lambda: num_ranks)
    engine = make_config(*(["model_engine=megatron"] if pairs else []), *pairs).engine
    costs = pass_costs(engine, 10, dp_size, CPU)
    assert costs.least_alone == pytest.approx(0.07 * 0.4 * PEAK * factor)
    assert costs.least_shared == pytest.approx(0.1 * 0.4 * PEAK * factor)
    assert costs.slowdown == 0.05


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("least_shared, is_shared", [(1100, True), (2100, False)])
def test_plans_count_what_a_pass_costs(least_shared, is_shared):
    """The first sequence takes 2,000 on one rank, and the others take 1,200 in total."""
    planner = Planner(
        make_config(), 0, 4, dist.group.WORLD, CPU, lambda size: 1, micro_batches_multiple=1
    )
    planner = replace(planner, pass_costs=PassCosts(least_shared=least_shared))
    lengths = [2000, *[100] * 12]
    plan = planner.plan(lengths, [float(n) for n in lengths])
    assert (plan.metrics["perf/cp_2"] > 0) == is_shared


def test_the_benchmark_prints_the_setting():
    """The larger pass determines the speed and the slowdown, the fastest passes the least times."""
    rows = [Row(4096, 2e12, 0.25, 0.26), Row(8192, 4e12, 0.4, 0.6), Row(2048, 1e12, 0.2, 0.3)]
    setting = costs_setting(rows)
    assert setting == "engine.context_parallel_costs=[10,200.0,260.0,0.50]"
    assert pass_costs(make_config(setting).engine, 1, 1, CPU) == PassCosts(2e12, 2.6e12, 0.5)
    too_noisy = [*rows, Row(1024, 1e11, -0.01, 0.2)]
    assert costs_setting(too_noisy).startswith("no setting: ")


@pytest.mark.parametrize("alone, shared", [(0.22, 0.5), (0.4, 0.3)])
def test_passes_that_only_take_as_long_as_their_start_show_no_slowdown(alone, shared):
    rows = [Row(2048, 1e12, 0.2, 0.28), Row(8192, 4e12, alone, shared)]
    assert costs_setting(rows).endswith(",200.0,280.0,0.00]")


def test_a_large_model_needs_smaller_passes_to_show_the_least_time():
    rows = [Row(4096, 2e12, 0.2, 0.21), Row(8192, 4e12, 0.39, 0.4)]
    assert costs_setting(rows).startswith("no setting: even the smallest pass")
    assert costs_setting(rows[:1]).startswith("no setting: even the smallest pass")
