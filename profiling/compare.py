"""Where two runs diverge: compare the losses and the msprobe dumps of one step.

    python -m profiling.compare RUN_A RUN_B --step N [--stage S] [--tolerance 1e-4] [--output DIR]

Prints the step's losses, entropies and gradient norms. Then, for each stage and rank, it prints the
first tensor in execution order that differs by more than the tolerance, relative to the largest
number in the tensor.

If both runs use the same engine and layout, dumps are compared rank by rank. They are compared
element by element if whole tensors were dumped. The inputs of forward passes are left out.

If the engines or the layouts differ (for example, tensor-parallel ranks against one rank), the
outputs of equivalent modules in forward passes are compared by their statistics; level L1 dumps no
modules. Shards are joined, and layers are numbered as in the whole model. All ranks must be dumped
(profiler.ranks=all). Runs with different numbers of data- or context-parallel ranks cannot be
compared, because their ranks see different tokens.

Exit code 0: everything that was compared agrees, and the rest is listed; 1: the runs diverge, or
one ran something that the other did not; 2: there is nothing to compare. --output keeps tables of
every number.
"""

import argparse
import csv
import math
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from profiling.report import read_metrics
from profiling.shards import (
    HEAD,
    STATISTICS,
    DumpedTensor,
    Output,
    OutputKey,
    RankDump,
    Share,
    gather,
    largest_difference,
    pairs,
    read,
    read_ranks,
)

METRICS = ("loss", "entropy", "grad_norm")
# Smaller metrics are compared relative to this: a policy's first loss is 0 up to rounding.
SMALL_METRIC = 0.01
# A module's input is another module's output, or an argument that the module may not even read.
FORWARD_INPUT = re.compile(r"\.forward(\.\d+)?\.input\.")
DIFFERENT_MICRO_BATCHES = "their micro-batches differ (raise data.max_tokens_per_micro_batch)"
RECOMPUTED = "only one run recomputes them in its backward pass"
PADDED = (
    "only one run pads them (set engine.sequence_parallel=false or profiler.msprobe.task=tensor)"
)


class ExitCode(IntEnum):
    AGREE = 0
    DIVERGE = 1
    NOTHING_TO_COMPARE = 2


@dataclass(frozen=True)
class Settings:
    """How runs are compared.

    Attributes:
        tolerance: numbers agree up to this relative difference.
        output: directory for tables of every number; None for no tables.
    """

    tolerance: float = 1e-4
    output: Path | None = None


@dataclass(frozen=True)
class Pair:
    """Two tensors that should be equal.

    Attributes:
        difference: the largest difference, relative to the largest number in the tensors.
    """

    a: DumpedTensor
    b: DumpedTensor
    difference: float


@dataclass
class Comparison:
    """The tensors that both runs have, and the tensors in only one of them.

    Attributes:
        title: names the stage and the ranks.
        pairs: in execution order.
        only_in_one: names of tensors in one run only.
        notes: remarks on the tensors that were compared or left out.
    """

    title: str
    pairs: list[Pair]
    only_in_one: list[str]
    notes: list[str] = field(default_factory=list)


def compare_runs(
    run_a: Path, run_b: Path, step: int, stage: str | None, settings: Settings
) -> ExitCode:
    """Print where the runs diverge in a step.

    Args:
        run_a, run_b: directories of the runs.
        step: counted from 1.
        stage: None for all stages.
        settings: tolerance and output.
    """
    metrics = compare_metrics(run_a, run_b, step, settings.tolerance)
    stages_a = stages_of(run_a, step)
    stages_b = stages_of(run_b, step)
    common = [name for name in stages_a if name in stages_b and stage in (None, name)]
    if not common:
        print(
            f"no stage {stage or ''} of step {step} was dumped by both: {run_a} has "
            f"{list(stages_a)}, {run_b} has {list(stages_b)}"
        )
        return worst([metrics, ExitCode.NOTHING_TO_COMPARE])
    codes = [metrics]
    left_out = sorted(set(stages_a) ^ set(stages_b))
    if left_out and stage is None:
        print(f"dumped in only one run, so not compared: {', '.join(left_out)}")
        codes.append(ExitCode.DIVERGE)
    for name in common:
        codes.append(compare_stage(name, stages_a[name], stages_b[name], settings))
    return worst(codes)


def worst(codes: Iterable[int]) -> ExitCode:
    """Return the most important exit code: DIVERGE, then NOTHING_TO_COMPARE, then AGREE."""
    severity = (ExitCode.AGREE, ExitCode.NOTHING_TO_COMPARE, ExitCode.DIVERGE)
    return ExitCode(max(codes, key=severity.index))


# -- metrics ---------------------------------------------------------------------------------------


def compare_metrics(run_a: Path, run_b: Path, step: int, tolerance: float) -> ExitCode:
    """Print the losses, entropies and gradient norms that both runs have in a step."""
    a = metrics_of(run_a, step)
    b = metrics_of(run_b, step)
    names = [name for name in a if name in b and name.endswith(METRICS)]
    differences = {name: metric_difference(a[name], b[name]) for name in names}
    code = ExitCode.AGREE
    verdict = "agree" if names else "are not in both runs"
    if any(difference > tolerance for difference in differences.values()):
        code = ExitCode.DIVERGE
        verdict = "diverge"
    print(f"metrics of step {step} {verdict}")
    for name, difference in differences.items():
        print(
            f"    {name:<24} A {a[name]:<22} B {b[name]:<22} relative difference {difference:.2g}"
        )
    return code


def metrics_of(run: Path, step: int) -> dict[str, float]:
    """Return a run's metrics of one step, with nan for numbers that were not finite."""
    if not (run / "metrics.jsonl").exists():
        return {}
    metrics = {}
    for line in read_metrics(run):
        if line["step"] == step:
            metrics |= line
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def metric_difference(a: float, b: float) -> float:
    """Return the relative difference of two numbers; inf if only one is finite, 0 if none is."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(abs(a), abs(b), SMALL_METRIC)
    return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf


# -- dumps -----------------------------------------------------------------------------------------


def stages_of(run: Path, step: int) -> dict[str, Path]:
    """Return the directories of the stages that were dumped, in the order in which they ran."""
    dumps = run.glob(f"profile/step_{step}/*/step{step}/*/dump.json")
    stages = {}
    for dump in sorted(dumps, key=lambda path: path.stat().st_mtime):
        ranks = dump.parents[1]
        name = ranks.parent.name
        stages.pop(name, None)  # a stage's last dump determines its order
        stages[name] = ranks
    return stages


def compare_stage(stage: str, folder_a: Path, folder_b: Path, settings: Settings) -> ExitCode:
    ranks_a = read_ranks(folder_a)
    ranks_b = read_ranks(folder_b)
    layout_a = {rank.name: rank.coordinates for rank in ranks_a}
    layout_b = {rank.name: rank.coordinates for rank in ranks_b}
    if layout_a != layout_b:
        return compare_layouts(stage, ranks_a, ranks_b, settings)
    codes = []
    for a, b in zip(ranks_a, ranks_b, strict=True):
        comparison = compare_ranks(f"{stage} {a.name}", a, b)
        codes.append(report(comparison, settings))
    return worst(codes)


def compare_ranks(title: str, rank_a: RankDump, rank_b: RankDump) -> Comparison:
    """Compare the same rank of two runs with the same layout."""
    a = compared_tensors(rank_a)
    b = compared_tensors(rank_b)
    common = [
        Pair(tensor, b[name], tensor_difference(tensor, b[name]))
        for name, tensor in a.items()
        if name in b
    ]
    only_in_one = [name for name in (*a, *b) if name not in a or name not in b]
    return Comparison(title, common, only_in_one)


def compared_tensors(rank: RankDump) -> dict[str, DumpedTensor]:
    tensors = read(rank.folder)
    return {name: tensor for name, tensor in tensors.items() if not FORWARD_INPUT.search(name)}


def tensor_difference(a: DumpedTensor, b: DumpedTensor) -> float:
    return relative_difference(a.statistics, b.statistics, largest_difference(a, b))


def relative_difference(
    a: dict[str, float | None], b: dict[str, float | None], element: float | None = None
) -> float:
    """Return the largest difference, relative to the largest number in the tensors.

    Args:
        a, b: statistics of two tensors.
        element: the largest difference of two elements, if whole tensors were dumped.

    Returns:
        inf if a statistic of only one tensor is finite.
    """
    known = [
        (a[name], b[name]) for name in STATISTICS if a[name] is not None and b[name] is not None
    ]
    if any(math.isfinite(x) != math.isfinite(y) for x, y in known):
        return math.inf
    finite = [(x, y) for x, y in known if math.isfinite(x)]
    # The first two statistics are the largest and the smallest element.
    scale = max((max(abs(x), abs(y)) for x, y in finite[:2]), default=0.0)
    differences = [abs(x - y) / max(abs(x), abs(y), scale) for x, y in finite if x != y]
    if element and math.isfinite(element) and scale:
        differences.append(element / scale)
    return max(differences, default=0.0)


# -- dumps of different layouts --------------------------------------------------------------------


def compare_layouts(
    stage: str, ranks_a: list[RankDump], ranks_b: list[RankDump], settings: Settings
) -> ExitCode:
    """Compare the outputs of equivalent modules, in each share of the batch."""
    coordinates_a = ranks_a[0].coordinates
    coordinates_b = ranks_b[0].coordinates
    is_one_engine = coordinates_a.engine == coordinates_b.engine
    dp_sizes = (coordinates_a.dp.size, coordinates_b.dp.size)
    cp_sizes = (coordinates_a.cp.size, coordinates_b.cp.size)
    if dp_sizes[0] != dp_sizes[1]:
        return report_different_tokens(stage, dp_sizes, "data")
    # The two engines divide sequences over context-parallel ranks differently.
    if cp_sizes[0] != cp_sizes[1] or (cp_sizes[0] > 1 and not is_one_engine):
        return report_different_tokens(stage, cp_sizes, "context")
    shares_a = by_share(ranks_a)
    shares_b = by_share(ranks_b)
    codes = []
    for share in sorted(shares_a.keys() & shares_b.keys()):
        title = stage
        if dp_sizes[0] > 1:
            title += f" dp{share[0]}"
        if cp_sizes[0] > 1:
            title += f" cp{share[1]}"
        ranks = (shares_a[share], shares_b[share])
        codes.append(compare_share(title, *ranks, is_one_engine, settings))
    if not codes:
        print(f"{stage}: no rank was dumped in both")
        return ExitCode.NOTHING_TO_COMPARE
    return worst(codes)


def report_different_tokens(stage: str, sizes: tuple[int, int], axis: str) -> ExitCode:
    print(
        f"{stage}: modules are not compared, because {sizes[0]} and {sizes[1]} {axis}-parallel "
        "ranks see different tokens"
    )
    return ExitCode.NOTHING_TO_COMPARE


def by_share(ranks: list[RankDump]) -> dict[tuple[int, int], list[RankDump]]:
    """Return the ranks of each share of the batch: (data-parallel rank, context-parallel rank)."""
    shares = {}
    for rank in ranks:
        shares.setdefault(rank.coordinates.share, []).append(rank)
    return shares


def compare_share(
    title: str,
    ranks_a: list[RankDump],
    ranks_b: list[RankDump],
    is_one_engine: bool,
    settings: Settings,
) -> ExitCode:
    """Compare the ranks that see one share of the batch, gathered into one model."""
    if not (is_complete(title, "A", ranks_a) and is_complete(title, "B", ranks_b)):
        return ExitCode.NOTHING_TO_COMPARE
    a = gather(ranks_a)
    b = gather(ranks_b)
    calls_a = calls_of_outputs(a)
    calls_b = calls_of_outputs(b)
    changed_calls = calls_with_different_tokens(a, b)
    common = []
    num_left_out = Counter()
    for key in a.outputs:
        if key.output not in calls_b:
            continue
        if key.call in changed_calls:
            num_left_out[DIFFERENT_MICRO_BATCHES] += 1
            continue
        if calls_a[key.output] != calls_b[key.output]:
            num_left_out[RECOMPUTED] += 1
            continue
        matched = pairs(a, b, key)
        if not matched:
            num_left_out[PADDED] += 1
        for x, y in matched:
            common.append(Pair(x, y, relative_difference(x.statistics, y.statistics)))
    only_in_one = []
    if is_one_engine:
        only_in_one = [
            str(key.output)
            for key in (*a.outputs, *b.outputs)
            if key.output not in calls_a or key.output not in calls_b
        ]
    notes = [", only outputs of forward passes"]
    notes += [f"; {number} not compared: {why}" for why, number in num_left_out.items()]
    return report(Comparison(title, common, only_in_one, notes), settings)


def is_complete(title: str, run: str, ranks: list[RankDump]) -> bool:
    """Return whether all ranks of the model were dumped; print a message if not."""
    tp_size = ranks[0].coordinates.tp.size
    pp_size = ranks[0].coordinates.pp.size
    if len(ranks) == tp_size * pp_size:
        return True
    print(
        f"{title}: run {run} has dumps of only {len(ranks)} of {tp_size} tensor- x {pp_size} "
        "pipeline-parallel ranks: set profiler.ranks=all"
    )
    return False


def calls_of_outputs(share: Share) -> Counter[Output]:
    """Return how often each output was computed."""
    return Counter(key.output for key in share.outputs)


def calls_with_different_tokens(a: Share, b: Share) -> set[int]:
    """Return the calls in which the runs saw different tokens.

    The head's outputs show this, because the head never computes padding.
    """
    heads_a = head_outputs(a)
    heads_b = head_outputs(b)
    return {key.call for key in heads_a + heads_b if heads_a != heads_b or not pairs(a, b, key)}


def head_outputs(share: Share) -> list[OutputKey]:
    return [key for key in share.outputs if key.output.module == HEAD]


# -- report ----------------------------------------------------------------------------------------


def report(comparison: Comparison, settings: Settings) -> ExitCode:
    """Print where a comparison diverges, and write its table."""
    title = comparison.title
    note = "".join(comparison.notes)
    if not comparison.pairs:
        print(f"{title}: no module in common{note}")
        return ExitCode.NOTHING_TO_COMPARE
    if settings.output:
        write_table(settings.output / f"{title.replace(' ', '_')}.csv", comparison.pairs)
    only_in_one = comparison.only_in_one
    if only_in_one:
        note += f", {len(only_in_one)} in only one run"
    differences = [pair.difference for pair in comparison.pairs]
    largest = comparison.pairs[differences.index(max(differences))]
    too_large = [i for i, difference in enumerate(differences) if difference > settings.tolerance]
    if too_large:
        print_divergence(comparison, too_large[0], largest, note)
    else:
        print(
            f"{title}: {len(comparison.pairs)} tensors agree{note}; "
            f"largest difference {largest.difference:.2g}"
        )
    if only_in_one:
        print(f"    the first in only one run: {only_in_one[0]}")
    return ExitCode.DIVERGE if too_large or only_in_one else ExitCode.AGREE


def print_divergence(comparison: Comparison, first: int, largest: Pair, note: str) -> None:
    """Print the first pair that diverges, and the largest difference.

    first: the index of the first pair.
    """
    pair = comparison.pairs[first]
    name = pair.a.name
    if pair.a.name != pair.b.name:
        name += f" / {pair.b.name}"
    print(
        f"{comparison.title}: diverges at {name}, relative difference {pair.difference:.3g}; "
        f"tensor {first + 1} of {len(comparison.pairs)}{note}"
    )
    for run, tensor in (("A", pair.a), ("B", pair.b)):
        statistics = [f"{name} {value}" for name, value in tensor.statistics.items()]
        print(f"    {run}: shape {tensor.shape}  {'  '.join(statistics)}")
    print(f"    largest difference {largest.difference:.3g}, at {largest.a.name}")


def write_table(path: Path, compared_pairs: list[Pair]) -> None:
    """Write a CSV file with a line for each pair of tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = ("name", "shape", *STATISTICS)
    header = [f"{run} {column}" for run in "AB" for column in columns]
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*header, "relative difference"])
        for pair in compared_pairs:
            cells_a = (pair.a.name, pair.a.shape, *pair.a.statistics.values())
            cells_b = (pair.b.name, pair.b.shape, *pair.b.statistics.values())
            table.writerow([*cells_a, *cells_b, pair.difference])


def main() -> ExitCode:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_a", type=Path)
    parser.add_argument("run_b", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--stage")
    parser.add_argument("--tolerance", type=float, default=Settings.tolerance)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    settings = Settings(arguments.tolerance, arguments.output)
    return compare_runs(arguments.run_a, arguments.run_b, arguments.step, arguments.stage, settings)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        # Python would exit with 1, which means here that the runs diverge.
        traceback.print_exc()
        code = ExitCode.NOTHING_TO_COMPARE
    sys.exit(code)
