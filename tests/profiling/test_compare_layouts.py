"""Comparing dumps of runs whose ranks divide the model or the batch differently."""

import functools
import itertools
import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from profiling import compare, layouts
from profiling.dumps import AxisRank, Coordinates, RankDump, in_whole_model
from profiling.outputs import (
    FILE,
    OutputRecord,
    OutputRecorder,
    RankOutputs,
    Statistics,
    float_tensors,
    read_outputs,
)
from tests.profiling.support import dumping
from tests.profiling.test_compare import PER_MICRO_BATCH
from tests.support.launch import launch

MEGATRON = ("tp", "sp", "vpp", "recompute", "cp", "tp_pp")


# -- records of outputs ----------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A layer that returns its bias separately, as Megatron's do."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 6, bias=False)
        self.bias = torch.nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.linear(x), self.bias


def decoder():
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([Layer()])
    return model


def recorded(folder, x, padding, compute, tp=(0, 1), first_layer=0):
    """Record one call of the layer on x [s, b, 4]; return its outputs by name."""
    model = decoder()
    engine = SimpleNamespace(
        modules=lambda: [model],
        coordinates=lambda: {"tp": tp, "first_layers": [first_layer]},
        padding=lambda: padding,
    )
    recorder = OutputRecorder(engine)
    recorder.start()
    compute(model.decoder.layers[0], x)
    recorder.stop()
    folder.mkdir()
    recorder.write(folder / FILE)
    return {record.module: record.calls for record in read_outputs(folder).records}


def call(layer, x):
    return layer(x)


def test_statistics_of_padded_shards_pool_to_those_of_the_whole(tmp_path):
    """The padding is full of huge numbers. Each of two ranks has half of the sequence."""
    tokens = torch.randn(7, 1, 4)
    no_padding = torch.zeros(7, 1, dtype=torch.bool)
    [whole] = recorded(tmp_path / "whole", tokens, no_padding, call)["decoder.layers.0"]
    padded = torch.cat([tokens, torch.full((3, 1, 4), 1e6)])
    padding = torch.arange(10)[:, None] >= 7
    parts = []
    for rank, part in enumerate(padded.chunk(2)):
        outputs = recorded(tmp_path / f"rank{rank}", part, padding, call, tp=(rank, 2))
        parts += outputs["decoder.layers.0"]
    pooled = layouts.pool(parts)
    assert [part.size for part in parts] == [5 * 6, 2 * 6]
    assert vars(pooled) == pytest.approx(vars(whole), rel=1e-5)
    with torch.no_grad():
        layer = decoder().decoder.layers[0]
        expected = layer.linear(tokens) + layer.bias
    assert whole.max == pytest.approx(expected.max().item())
    assert whole.rms == pytest.approx(expected.square().mean().sqrt().item())


@pytest.mark.parametrize("sign", [1, -1])
def test_ranks_and_calls_without_elements_do_not_count(sign):
    """Their extremes are 0, which are not the extremes of numbers on one side of 0."""
    (low, high) = sorted((sign * 2.0, sign * 4.0))
    part = Statistics(2, max=high, min=low, mean=sign * 3.0, rms=math.sqrt(10))
    pooled = layouts.pool([Statistics(0), part, Statistics(0)])
    assert vars(pooled) == pytest.approx(vars(part))
    assert layouts.pool([Statistics(0)]) == layouts.pool([]) == Statistics(0)


def test_each_call_has_the_padding_of_its_own_micro_batch(tmp_path):
    """The first one has none, and the last has nothing else. It is full of huge numbers."""
    model = decoder()
    paddings = [
        torch.zeros(4, 1, dtype=torch.bool),
        torch.tensor([[False], [False], [True]]),
        torch.ones(2, 1, dtype=torch.bool),
    ]
    current = []
    engine = SimpleNamespace(
        modules=lambda: [model],
        coordinates=lambda: {"first_layers": [0]},
        padding=lambda: current[-1],
    )
    recorder = OutputRecorder(engine)
    recorder.start()
    for padding in paddings:
        current.append(padding)
        model.decoder.layers[0](padding[:, :, None] * torch.full((4,), 1e6))
    recorder.stop()
    recorder.write(tmp_path / FILE)
    for record in read_outputs(tmp_path).records:
        assert [call.size for call in record.calls] == [4 * 6, 2 * 6, 0]
        assert record.calls[1].max < 1e3
        assert record.calls[2] == Statistics(0)


def test_calls_that_recompute_activations_are_not_recorded(tmp_path):
    def train(layer, x):
        # The square needs the layer's output, so the layer is computed to its end once more.
        squares = checkpoint(
            lambda x: layer.linear(x).square(), x.requires_grad_(), use_reentrant=False
        )
        squares.sum().backward()

    outputs = recorded(tmp_path / "rank0", torch.randn(7, 1, 4), None, train, first_layer=3)
    assert list(outputs) == ["decoder.layers.3.linear"], "numbered as in the whole model"
    assert len(outputs["decoder.layers.3.linear"]) == 1
    assert read_outputs(tmp_path / "rank0").num_recomputed == 1


@pytest.mark.parametrize(
    "output, expected",
    [
        (torch.ones(2, 3), [(0, 1.0)]),
        ({"a": torch.ones(2, 3), "b": torch.zeros(2, 1)}, [(0, 1.0), (1, 0.0)]),
        ((torch.ones(2, 3), None, torch.zeros(2, 3)), [(0, 1.0), (2, 0.0)]),
        ((torch.ones(2, 3), torch.ones(3)), [(0, 2.0)]),
        ((torch.ones(2, 3), torch.zeros(2)), [(0, 1.0), (1, 0.0)]),
        ((torch.ones(3), torch.ones(3)), [(0, 1.0), (1, 1.0)]),
        ((torch.ones(2, 3, dtype=torch.int64), torch.tensor(1.0)), []),
        (None, []),
    ],
)
def test_tensors_are_found_in_every_kind_of_output(output, expected):
    found = float_tensors(output)
    assert [(index, x.unique().item()) for index, x in found] == expected


def test_nothing_is_recorded_after_the_stage(tmp_path):
    model = decoder()
    engine = SimpleNamespace(
        modules=lambda: [model], coordinates=lambda: {"first_layers": [0]}, padding=lambda: None
    )
    recorder = OutputRecorder(engine)
    recorder.start()
    layer = model.decoder.layers[0]
    layer(torch.randn(7, 1, 4))
    recorder.stop()
    layer(torch.randn(7, 1, 4))
    recorder.write(tmp_path / FILE)
    outputs = read_outputs(tmp_path)
    assert outputs.world_size == 1
    assert outputs.num_recomputed == 0
    assert [len(record.calls) for record in outputs.records] == [1, 1]


def test_an_output_without_a_row_per_token_is_not_pooled(tmp_path):
    padding = torch.zeros(7, 1, dtype=torch.bool)
    outputs = recorded(tmp_path / "rank0", torch.randn(5, 1, 4), padding, call)
    assert outputs == {"decoder.layers.0.linear": None, "decoder.layers.0": None}


def test_names_have_the_number_of_the_layer_in_the_whole_model():
    name = "Module.1.decoder.layers.1.mlp.linear_fc2.Linear.forward.0.output.0"
    expected = "Module.1.decoder.layers.7.mlp.linear_fc2.Linear.forward.0.output.0"
    assert in_whole_model(name, [2, 6]) == expected
    assert in_whole_model("Module.0.hf.lm_head.Linear.forward.0", [2]) == (
        "Module.0.hf.lm_head.Linear.forward.0"
    )


def test_layers_of_a_virtual_pipeline_are_in_the_order_of_the_model(tmp_path):
    """The first tensor that diverges is the first in this order."""
    ranks = []
    for rank, first_layers in enumerate(([0, 2], [1, 3])):
        chunks = [decoder(), decoder()]
        engine = SimpleNamespace(
            modules=lambda chunks=chunks: chunks,
            coordinates=lambda first_layers=first_layers: {"first_layers": first_layers},
            padding=lambda: None,
        )
        recorder = OutputRecorder(engine)
        recorder.start()
        for chunk in chunks:
            chunk.decoder.layers[0](torch.randn(7, 1, 4))
        recorder.stop()
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        recorder.write(folder / FILE)
        ranks.append(RankDump(folder, coordinates(tp_size=1)))
    outputs = layouts.gather(ranks, layouts.read_all(ranks), translated=False)
    modules = [key.module for key in outputs.statistics]
    layers = [f"decoder.layers.{number}" for number in range(4)]
    assert modules == [name for layer in layers for name in (f"{layer}.linear", layer)]


def test_divergences_are_ordered_over_pipeline_stages():
    """Forward from the first stage to the last, then backward from the last to the first."""
    names = [
        ("Module.0.decoder.layers.0.mlp.M.forward.0.output.0", [0, 4]),
        ("Module.0.decoder.layers.2.mlp.M.forward.0.output.0", [2, 6]),
        ("Module.1.decoder.layers.4.mlp.M.forward.0.output.0", [0, 4]),
        ("Module.0.decoder.layers.0.mlp.M.forward.1.output.0", [0, 4]),
        ("Module.1.decoder.layers.6.mlp.M.backward.0.input.0", [2, 6]),
        ("Module.0.decoder.layers.3.mlp.M.parameters_grad.0.weight.0", [2, 6]),
        ("Module.0.decoder.layers.0.mlp.M.parameters_grad.0.weight.0", [0, 4]),
    ]
    places = [compare.place_in_model(*name) for name in names]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "size_a, size_b, tp_a, tp_b, is_comparable",
    [
        (12, 12, 1, 1, True),
        (24, 12, 2, 1, True),
        (24, 12, 1, 1, False),
        (12, 24, 1, 4, True),
        (10, 12, 2, 2, False),
        (12, 0, 2, 2, False),
    ],
)
def test_sizes_may_differ_by_repetition_on_tensor_parallel_ranks(
    size_a, size_b, tp_a, tp_b, is_comparable
):
    statistics = (Statistics(size_a), Statistics(size_b))
    reason = layouts.reason_to_leave_out(*statistics, coordinates(tp_a), coordinates(tp_b))
    assert (reason is None) == is_comparable


def test_ranks_with_the_same_data_and_context_parallel_rank_see_the_same_tokens():
    dp, cp, tp, pp = (AxisRank(rank, 9) for rank in (1, 2, 3, 4))
    assert Coordinates("Engine", dp, cp, tp, pp, [0], {}).share == (1, 2)


def coordinates(tp_size, dp_size=1, cp_size=1, engine="Engine"):
    tp, dp, cp = (AxisRank(0, size) for size in (tp_size, dp_size, cp_size))
    return Coordinates(engine, dp, cp, tp, AxisRank(), [0], {})


def outputs_of_head(folder, sizes, other_sizes=(), **place):
    """Return the outputs of one rank, whose head's first output has these sizes in each call.

    other_sizes: those of the head's second output. place: see coordinates().
    """
    records = []
    for index, output_sizes in enumerate((sizes, other_sizes)):
        calls = [Statistics(size) for size in output_sizes]
        records.append(OutputRecord("head", index, 0, calls))
    rank = RankDump(folder, coordinates(1, **place))
    return layouts.gather([rank], [RankOutputs(1, 0, records)], translated=False)


def dump_of_head(folder, sizes, recomputes=False) -> RankDump:
    """Return the dump of a rank whose head is called with these numbers of tokens."""
    model = torch.nn.Module()
    model.head = torch.nn.ReLU()
    engine = SimpleNamespace(
        modules=lambda: [model], coordinates=lambda: {"first_layers": [0]}, padding=lambda: None
    )
    recorder = OutputRecorder(engine)
    recorder.start()
    for size in sizes:
        tokens = torch.ones(size, requires_grad=True)
        if recomputes:
            checkpoint(model.head, tokens, use_reentrant=True).sum().backward()
        else:
            model.head(tokens)
    recorder.stop()
    folder.mkdir()
    recorder.write(folder / FILE)
    return RankDump(folder, coordinates(1))


@pytest.mark.parametrize("sizes, are_same", [([3, 4], True), ([4, 3], False), ([3], False)])
def test_a_rank_calls_its_head_for_the_same_micro_batches_in_the_same_order(
    tmp_path, sizes, are_same
):
    first = dump_of_head(tmp_path / "a", [3, 4])
    second = dump_of_head(tmp_path / "b", sizes)
    assert layouts.have_same_calls(first, second) == are_same
    if are_same:
        recomputed = dump_of_head(tmp_path / "recomputed", sizes, recomputes=True)
        assert not layouts.have_same_calls(first, recomputed)


def test_dumps_without_outputs_are_compared_rank_by_rank(tmp_path):
    first = dump_of_head(tmp_path / "a", [3, 4])
    second = dump_of_head(tmp_path / "b", [5])
    for without, other in ((first, second), (second, first)):
        (without.folder / FILE).rename(tmp_path / "outputs")
        assert layouts.have_same_calls(without, other)
        assert layouts.have_same_calls(other, without)
        (tmp_path / "outputs").rename(without.folder / FILE)


@pytest.mark.parametrize(
    "sizes, other_sizes, engine, cp_sizes, are_same",
    [
        ([3, 4], [3, 4], "Engine", (1, 1), True),
        ([3, 4], [4, 3], "Engine", (1, 1), True),  # the first output alone: a critic has no other
        ([3, 4, 0], [], "Engine", (1, 1), True),  # a call without tokens
        ([4, 3], [3, 4], "Engine", (1, 1), False),
        ([7], [3, 4], "Engine", (1, 1), False),
        ([3, 4], [], "Engine", (2, 2), True),
        ([3, 4], [], "Another", (1, 1), True),
        ([3, 4], [], "Another", (1, 2), False),
        ([3, 4], [], "Another", (2, 2), False),
    ],
)
def test_runs_have_the_same_calls_if_their_heads_have_the_same_numbers_of_tokens(
    tmp_path, sizes, other_sizes, engine, cp_sizes, are_same
):
    cp_size, other_cp_size = cp_sizes
    run = outputs_of_head(tmp_path, [3, 4], [3, 4], cp_size=cp_size)
    other_run = outputs_of_head(tmp_path, sizes, other_sizes, engine=engine, cp_size=other_cp_size)
    assert layouts.same_calls(run, other_run) == are_same
    assert layouts.same_calls(other_run, run) == are_same


@pytest.mark.parametrize(
    "call, dp_size, cp_size, text",
    [
        (None, 2, 2, "all calls"),
        (layouts.Call(7, 1, 3), 1, 1, "call 7"),
        (layouts.Call(7, 1, 3), 2, 1, "call 7, data-parallel rank 1"),
        (layouts.Call(7, 1, 3), 1, 4, "call 7, context-parallel rank 3"),
        (layouts.Call(7, 1, 3), 2, 4, "call 7, data-parallel rank 1, context-parallel rank 3"),
    ],
)
def test_an_output_is_described_by_its_call_and_ranks(call, dp_size, cp_size, text):
    key = layouts.OutputKey(call, "head", 5)
    described = layouts.describe(key, coordinates(2, dp_size, cp_size))
    assert described == f"output 5, {text}"


def outputs_of(calls_of_module, engine="Engine"):
    """Return the outputs of a run of one rank: module -> the sizes of its calls, or None."""
    records = []
    for module, sizes in calls_of_module.items():
        calls = None if sizes is None else [Statistics(size, 1.0) for size in sizes]
        records.append(OutputRecord(module, 0, 0, calls))
    rank = RankDump(None, coordinates(1, engine=engine))
    return layouts.gather([rank], [RankOutputs(1, 0, records)], translated=False)


def test_outputs_that_only_one_run_counts_are_left_out_whichever_comes_first():
    """A module that neither run counts could never be compared, so it is not missing."""
    run = outputs_of({"first": [6, 6], "router": None, "norm": [6, 6], "gate": None})
    other_run = outputs_of({"first": [6, 6], "router": None, "norm": None, "last": [6, 6]})
    for a, b in ((run, other_run), (other_run, run)):
        matches = layouts.match(a, b)
        assert [tensor.name for tensor, _, _ in matches.pairs] == ["first", "first"]
        assert [place for *_, place in matches.pairs] == ["output 0, call 0", "output 0, call 1"]
        assert matches.left_out == {layouts.NO_ROWS: 2}
        assert sorted(matches.only_in_one) == ["gate", "last"]


def test_outputs_of_different_sizes_before_a_pair_are_counted():
    run = outputs_of({"first": [6], "wide": [12], "empty": [0], "last": [6]})
    other_run = outputs_of({"first": [6], "wide": [18], "empty": [0], "last": [6]})
    matches = layouts.match(run, other_run)
    assert [tensor.name for tensor, _, _ in matches.pairs] == ["first", "last"]
    assert matches.before == [0, 1]
    assert matches.left_out == {layouts.OTHER_SIZES: 1}
    assert not matches.only_in_one


# -- coverage --------------------------------------------------------------------------------------


def dump_stack(folder, widths, tp_size, biases=(), first_layer=0):
    """Dump a stack of layers with these widths, whose weights are 0.

    Args:
        biases: layer -> what it returns, if that is not 0.
        first_layer: its number in the whole model.
    """
    linears = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList(linears)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    for layer, bias in dict(biases).items():
        torch.nn.init.constant_(linears[layer].bias, bias)
    model.forward = lambda x: functools.reduce(lambda x, layer: layer(x), linears, x)
    engine = SimpleNamespace(
        modules=lambda: [model],
        coordinates=lambda: {"tp": [0, tp_size], "first_layers": [first_layer]},
        padding=lambda: None,
    )
    profiler = dumping(folder)
    profiler.begin_step(1)
    with profiler.stage("train_batch", engine):
        model(torch.ones(3, widths[0]))
    profiler.close()


def test_comparing_a_small_part_is_not_an_agreement(tmp_path, capsys):
    """In the second run three of four layers have other widths: nothing shows that they agree."""
    dump_stack(tmp_path / "a", [4, 4, 4, 4, 4], 1)
    dump_stack(tmp_path / "b", [4, 5, 5, 5, 4], 3)
    code = compare.compare_runs(tmp_path / "a", tmp_path / "b", 1, None, compare.Settings())
    printed = capsys.readouterr().out
    assert code == 3
    assert "train_batch: only 1 of 4 tensors could be compared; they agree" in printed
    assert "layers of which nothing was compared: [0, 1, 2]" in printed
    assert "3 not compared: the runs have different numbers of elements" in printed


def test_a_layer_of_which_nothing_is_compared_is_named(tmp_path, capsys):
    """Of many layers, only one has another width: less than a tenth of all tensors."""
    num_layers = 21
    dump_stack(tmp_path / "a", [4] * (num_layers + 1), 1)
    dump_stack(tmp_path / "b", [4, 4, 5, *[4] * (num_layers - 2)], 3)
    code = compare.compare_runs(tmp_path / "a", tmp_path / "b", 1, None, compare.Settings())
    assert code == compare.ExitCode.PARTLY_COMPARED
    assert "    layers of which nothing was compared: [1]\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "tp_size, title, place, num_tensors",
    [
        (
            1,
            "train_batch rank0",
            "Module.0.model.layers.1.Linear.forward.0.output.0, relative difference 1; tensor 4 "
            "of 9",
            9,
        ),
        (
            2,
            "train_batch",
            "model.layers.1 (output 0, call 0), relative difference 1; tensor 2 of 3, only outputs "
            "of forward passes",
            3,
        ),
    ],
    ids=["rank by rank", "other layout"],
)
def test_the_first_tensor_that_differs_is_named(
    tmp_path, capsys, tp_size, title, place, num_tensors
):
    """A bias of a layer of width 4 is 2 in one run, where the others have zeros everywhere."""
    dump_stack(tmp_path / "a", [4, 4, 4, 4], 1)
    dump_stack(tmp_path / "equal", [4, 4, 4, 4], tp_size)
    dump_stack(tmp_path / "defect", [4, 4, 4, 4], tp_size, {1: 2.0})
    loss = {"a": 1.0, "equal": 1.00001, "defect": 1.5}
    for name, value in loss.items():
        line = json.dumps({"step": 1, "train/loss": value}) + "\n"
        (tmp_path / name / "metrics.jsonl").write_text(line)
    settings = compare.Settings(output=tmp_path / "tables")
    capsys.readouterr()  # what msprobe printed

    code = compare.compare_runs(tmp_path / "a", tmp_path / "equal", 1, "train_batch", settings)
    lines = capsys.readouterr().out.splitlines()
    assert code == compare.ExitCode.AGREE
    assert lines[0] == "metrics of step 1 agree"
    assert lines[1].split()[:5] == ["train/loss", "A", "1.0", "B", "1.00001"]
    assert lines[2].startswith(f"{title}: {num_tensors} tensors agree")
    assert lines[2].endswith("; largest difference 0")
    (table,) = (tmp_path / "tables").iterdir()
    assert len(table.read_text().splitlines()) == 1 + num_tensors

    code = compare.compare_runs(tmp_path / "a", tmp_path / "defect", 1, None, compare.Settings())
    lines = capsys.readouterr().out.splitlines()
    assert code == compare.ExitCode.DIVERGE
    assert lines[0] == "metrics of step 1 diverge"
    assert lines[1].endswith("relative difference 0.33")
    assert lines[2] == f"{title}: diverges at {place}"
    assert lines[3].startswith("    A: ")
    assert "max 0.0  min 0.0  mean 0.0" in lines[3]
    assert "max 2.0  min 2.0  mean 2.0" in lines[4]

    code = compare.compare_runs(tmp_path / "a", tmp_path / "equal", 1, "validate", settings)
    assert code == compare.ExitCode.NOTHING_TO_COMPARE
    assert "no stage validate of step 1 was dumped by both" in capsys.readouterr().out


def test_layers_of_a_pipeline_stage_have_their_numbers_in_the_whole_model(tmp_path, capsys):
    dump_stack(tmp_path / "a", [4, 4, 4], 1, first_layer=2)
    dump_stack(tmp_path / "b", [4, 4, 4], 1, {1: 2.0}, first_layer=2)
    compare.compare_runs(tmp_path / "a", tmp_path / "b", 1, None, compare.Settings())
    diverging = "train_batch rank0: diverges at Module.0.model.layers.3.Linear.forward.0.output.0"
    assert diverging in capsys.readouterr().out


def test_a_dump_without_outputs_is_reported(tmp_path, capsys):
    dump_stack(tmp_path / "a", [4, 4], 1)
    dump_stack(tmp_path / "b", [4, 4], 2)
    for path in (tmp_path / "b").rglob(FILE):
        path.unlink()
    code = compare.compare_runs(tmp_path / "a", tmp_path / "b", 1, None, compare.Settings())
    assert code == 2
    assert f"run B has a dump without {FILE}" in capsys.readouterr().out


# -- layouts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """Dumps of the same update in each layout, with and without a defect."""
    out = tmp_path_factory.mktemp("layouts")
    for num_ranks in (1, 2, 4):
        launch(num_ranks, "tests/profiling/profiling_worker.py", "layouts", assets, out)
    return out


def compare_layouts(capsys, a, b):
    code = compare.compare_runs(a, b, 2, None, compare.Settings())
    return code, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "a, b", list(itertools.combinations(["fsdp", "fsdp_whole", "dp", *MEGATRON], 2))
)
def test_layouts_agree(runs, capsys, a, b):
    """Also with other micro-batches, or other numbers of ranks that see different tokens."""
    code, printed = compare_layouts(capsys, runs / a, runs / b)
    assert code == 0, printed
    assert printed.startswith("metrics of step 2 agree")
    for stage in ("compute_values", "actor_update"):
        # One rank per line if both runs have the same layout and recompute nothing.
        title = rf"^{stage}(?: rank0)?: (\d+) tensors agree"
        line = title + "(?:, only outputs of forward passes)?; largest"
        match = re.search(line, printed, re.M)
        assert match, printed
        if stage == "actor_update" and b in MEGATRON and a not in MEGATRON:
            assert int(match[1]) % PER_MICRO_BATCH == 0


@pytest.mark.slow
@pytest.mark.parametrize("a", ["fsdp", "fsdp_whole", "dp", *MEGATRON])
@pytest.mark.parametrize(
    "b, layer",
    [
        ("sp_early", 0),
        ("vpp_early", 0),
        ("dp_early", 0),
        ("cp_early", 0),
        ("vpp_late", 3),
        ("tp_pp_late", 3),
    ],
)
def test_the_first_divergence_is_in_the_layer_of_the_defect(runs, capsys, a, b, layer):
    """All layers in the names are numbered as in the whole model."""
    code, printed = compare_layouts(capsys, runs / a, runs / b)
    assert code == 1
    lines = [line for line in printed.splitlines() if line.startswith("actor_update")]
    named = lines[0].split(" at ")[1].split(", relative")[0]
    assert set(re.findall(r"layers\.(\d+)\.", named)) == {str(layer)}, lines[0]
    part = "up}?_proj|linear_fc1" if layer == 0 else "down_proj|linear_fc2"
    assert re.search(part, named), lines[0]
    assert "could not be compared" not in printed


@pytest.mark.slow
def test_another_output_matrix_is_found_at_the_head(runs, capsys):
    """On the second pipeline rank, after layers that agree. The critic's head is its own."""
    code, printed = compare_layouts(capsys, runs / "fsdp", runs / "head")
    assert code == 1
    assert printed.startswith("metrics of step 2 diverge\n    actor/loss ")
    assert "\nactor_update: diverges at head (output 0, call 0), relative" in printed
    assert f"; tensor {PER_MICRO_BATCH - 1} of {2 * PER_MICRO_BATCH}, " in printed
    assert re.search(r"\ncompute_values: \d+ tensors agree", printed)


@pytest.mark.slow
def test_missing_ranks_are_reported(runs, capsys):
    one_rank = shutil.copytree(runs / "tp", runs / "one_rank")
    for path in one_rank.glob("profile/step_2/*/step2/rank1"):
        shutil.rmtree(path)
    code, printed = compare_layouts(capsys, runs / "fsdp", one_rank)
    assert code == 2
    assert "run B has dumps of only 1 of 2 ranks: set profiler.ranks=all" in printed


@pytest.mark.slow
def test_losses_that_differ_are_found_where_dumps_agree(runs, capsys):
    path = shutil.copytree(runs / "fsdp", runs / "another_loss") / "metrics.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "actor/loss": 1.87}) + "\n")
    code, printed = compare_layouts(capsys, runs / "fsdp", runs / "another_loss")
    assert code == 1
    assert "diverge" in printed.splitlines()[0]
    assert "B 1.87" in printed
    assert "actor_update rank0: " in printed
    path.unlink()
    code, printed = compare_layouts(capsys, runs / "fsdp", runs / "another_loss")
    assert code == 0
    assert printed.startswith("metrics of step 2 are not in both runs")
