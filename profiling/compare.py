"""Where two runs diverge: compare the losses and the msprobe dumps of one step.

    python -m profiling.compare RUN_A RUN_B --step N [--stage S] [--tolerance 1e-4] [--output DIR]

Prints the step's losses, entropies and gradient norms. Then, for each stage and rank, it prints the
first tensor in execution order that differs by more than the tolerance, relative to the largest
number in the tensor.

If both runs use the same engine and layout, dumps are compared rank by rank. They are compared
element by element if whole tensors were dumped. The inputs of forward passes are left out.

If the engines, the layouts or the micro-batches differ (for example, tensor-parallel ranks against
one rank), the outputs of equivalent modules in forward passes are compared by their statistics over
all tokens, without padding. All ranks must be dumped (profiler.ranks=all).

Layers are numbered as in the whole model.

Exit code 0: the runs agree; 1: the runs diverge, or one ran something that the other did not;
2: there is nothing to compare; 3: what could be compared agrees, but more than a tenth of the
tensors, or all tensors of a layer, could not be compared. --output keeps tables of every number.
"""

import argparse
import csv
import math
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from profiling import layouts
from profiling.dumps import (
    DumpedTensor,
    RankDump,
    in_whole_model,
    largest_difference,
    read,
    read_ranks,
)
from profiling.report import read_metrics

METRICS = ("loss", "entropy", "grad_norm")
# Smaller metrics are compared relative to this: a policy's first loss is 0 up to rounding.
SMALL_METRIC = 0.01
# Not compared: an input is another module's output, or an argument that the module may not read.
FORWARD_INPUT = re.compile(r"\.forward(\.\d+)?\.input\.")
PLACE = re.compile(
    r"(?:Module\.(?P<chunk>\d+)\.)?.*\.(?P<part>forward|backward|parameters_grad)\.(?P<call>\d+)"
)
OUTPUTS_ALONE = ", only outputs of forward passes"
# Runs agree only if at least this share of the outputs could be compared.
ENOUGH = 0.9


class ExitCode(IntEnum):
    AGREE = 0
    DIVERGE = 1
    NOTHING_TO_COMPARE = 2
    PARTLY_COMPARED = 3


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
        place: the output and the call, if the names do not contain them.
    """

    a: DumpedTensor
    b: DumpedTensor
    difference: float
    place: str = ""


@dataclass
class Comparison:
    """The tensors that both runs have, and the tensors in only one of them.

    Attributes:
        title: names the stage and the ranks.
        pairs: in execution order.
        only_in_one: names of tensors in one run only.
        notes: remarks on the tensors that were compared.
        num_before: for each pair, how many tensors before it could not be compared; may be empty.
        left_out: reason -> the number of tensors that could not be compared.
        layers_left_out: the layers of which no tensor could be compared.
    """

    title: str
    pairs: list[Pair]
    only_in_one: list[str]
    notes: list[str] = field(default_factory=list)
    num_before: list[int] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    layers_left_out: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.pairs) + self.left_out.total()

    @property
    def is_complete_enough(self) -> bool:
        return not self.layers_left_out and len(self.pairs) >= ENOUGH * self.total


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
        dumped = f"stage {stage}" if stage else "stage"
        print(
            f"no {dumped} of step {step} was dumped by both runs: {run_a} has "
            f"{list(stages_a)}, {run_b} has {list(stages_b)}. To dump a step, set "
            f"profiler.tool=msprobe trainer.profile_interval=[{step},{step}]"
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
    """Return the most important exit code.

    That is DIVERGE, then NOTHING_TO_COMPARE, then PARTLY_COMPARED, then AGREE.
    """
    severity = (
        ExitCode.AGREE,
        ExitCode.PARTLY_COMPARED,
        ExitCode.NOTHING_TO_COMPARE,
        ExitCode.DIVERGE,
    )
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
    """Compare the dumps of one stage, and print the result."""
    ranks_a = read_ranks(folder_a)
    ranks_b = read_ranks(folder_b)
    if not have_same_layout(ranks_a, ranks_b):
        return compare_layouts(stage, ranks_a, ranks_b, settings)
    comparisons = [
        compare_ranks(f"{stage} {a.name}", a, b) for a, b in zip(ranks_a, ranks_b, strict=True)
    ]
    if len(comparisons) > 1:
        print_first_divergence(stage, ranks_a, comparisons, settings)
    return worst([report(comparison, settings) for comparison in comparisons])


def have_same_layout(ranks_a: list[RankDump], ranks_b: list[RankDump]) -> bool:
    """Return whether the ranks of both runs hold the same parts of the model, and of the batch."""
    layout_a = {rank.name: rank.coordinates for rank in ranks_a}
    layout_b = {rank.name: rank.coordinates for rank in ranks_b}
    if layout_a != layout_b:
        return False
    return all(layouts.have_same_calls(a, b) for a, b in zip(ranks_a, ranks_b, strict=True))


def print_first_divergence(
    stage: str, ranks: list[RankDump], comparisons: list[Comparison], settings: Settings
) -> None:
    """Print which rank diverges first: a difference passes from layer to layer between ranks."""
    candidates = []
    for rank, comparison in zip(ranks, comparisons, strict=True):
        for index, pair in enumerate(comparison.pairs):
            if pair.difference > settings.tolerance:
                place = place_in_model(pair.a.name, rank.coordinates.first_layers)
                candidates.append((place, index, rank.name, pair.a.name))
    if candidates:
        _, _, rank_name, name = min(candidates)
        print(f"{stage}: diverges first on {rank_name}, at {name}")


def place_in_model(name: str, first_layers: Sequence[int]) -> tuple[bool, int, int]:
    """Return a sort key: forward before backward, by call, then from the first stage to the last.

    In backward passes, the last stage comes first.
    """
    match = PLACE.match(name)
    is_backward = match["part"] != "forward" if match else False
    call = int(match["call"]) if match else 0
    chunk = int(match["chunk"]) if match and match["chunk"] else 0
    first_layer = first_layers[chunk] if chunk < len(first_layers) else 0
    return is_backward, call, -first_layer if is_backward else first_layer


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
    """Return a rank's tensors by name, with the numbers of layers in the whole model."""
    tensors = {}
    for name, tensor in read(rank.folder).items():
        if not FORWARD_INPUT.search(name):
            tensor.name = in_whole_model(name, rank.coordinates.first_layers)
            tensors[tensor.name] = tensor
    return tensors


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
    names = [name for name in a if a[name] is not None and b[name] is not None]
    if any(math.isfinite(a[name]) != math.isfinite(b[name]) for name in names):
        return math.inf
    finite = [name for name in names if math.isfinite(a[name])]
    extremes = [max(abs(a[name]), abs(b[name])) for name in finite if name in ("max", "min")]
    scale = max(extremes, default=0.0)
    differences = []
    for name in finite:
        if a[name] == b[name]:
            continue
        largest = max(abs(a[name]), abs(b[name]))
        # Norms are themselves as large as the tensor.
        largest = largest if name in ("l2norm", "rms") else max(largest, scale)
        differences.append(abs(a[name] - b[name]) / largest)
    if element and math.isfinite(element) and scale:
        differences.append(element / scale)
    return max(differences, default=0.0)


# -- dumps of different layouts --------------------------------------------------------------------


def compare_layouts(
    stage: str, ranks_a: list[RankDump], ranks_b: list[RankDump], settings: Settings
) -> ExitCode:
    """Compare the outputs of equivalent modules over all tokens."""
    outputs_of_runs = []
    for run, ranks in (("A", ranks_a), ("B", ranks_b)):
        try:
            outputs_of_runs.append(layouts.read_all(ranks))
        except ValueError as error:
            print(f"{stage}: run {run} {error}")
            return ExitCode.NOTHING_TO_COMPARE
    is_one_engine = ranks_a[0].coordinates.engine == ranks_b[0].coordinates.engine
    a = layouts.gather(ranks_a, outputs_of_runs[0], translated=not is_one_engine)
    b = layouts.gather(ranks_b, outputs_of_runs[1], translated=not is_one_engine)
    matches = layouts.match(a, b)
    pairs = [Pair(x, y, tensor_difference(x, y), place) for x, y, place in matches.pairs]
    # An engine has modules without an equivalent in the other engine.
    only_in_one = matches.only_in_one if is_one_engine else []
    comparison = Comparison(stage, pairs, only_in_one, [OUTPUTS_ALONE])
    comparison.num_before = matches.before
    comparison.left_out = matches.left_out
    comparison.layers_left_out = matches.layers_left_out
    return report(comparison, settings)


# -- report ----------------------------------------------------------------------------------------


def report(comparison: Comparison, settings: Settings) -> ExitCode:
    """Print where a comparison diverges, and write its table."""
    title = comparison.title
    note = "".join(comparison.notes)
    reasons = [f"{number} not compared: {why}" for why, number in comparison.left_out.items()]
    note += "".join(f"; {reason}" for reason in reasons)
    if not comparison.pairs:
        print(f"{title}: nothing could be compared{note}")
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
        print_agreement(comparison, largest, note)
    if only_in_one:
        print(f"    the first in only one run: {only_in_one[0]}")
    if too_large or only_in_one:
        return ExitCode.DIVERGE
    return ExitCode.AGREE if comparison.is_complete_enough else ExitCode.PARTLY_COMPARED


def print_agreement(comparison: Comparison, largest: Pair, note: str) -> None:
    """Print that all compared tensors agree, and how many could be compared."""
    num_compared = len(comparison.pairs)
    subject = f"{num_compared} tensors agree"
    if not comparison.is_complete_enough:
        subject = f"only {num_compared} of {comparison.total} tensors could be compared; they agree"
    print(f"{comparison.title}: {subject}{note}; largest difference {largest.difference:.2g}")
    if comparison.layers_left_out:
        print(f"    layers of which nothing was compared: {comparison.layers_left_out}")


def print_divergence(comparison: Comparison, first: int, largest: Pair, note: str) -> None:
    """Print the first pair that diverges, and the largest difference.

    first: the index of the first pair.
    """
    pair = comparison.pairs[first]
    name = pair.a.name
    if pair.a.name != pair.b.name:
        name += f" / {pair.b.name}"
    if pair.place:
        name += f" ({pair.place})"
    num_before = comparison.num_before[first] if comparison.num_before else 0
    warning = f" ({num_before} tensors before it could not be compared)" if num_before else ""
    print(
        f"{comparison.title}: diverges at {name}{warning}, relative difference "
        f"{pair.difference:.3g}; tensor {first + 1} of {len(comparison.pairs)}{note}"
    )
    for run, tensor in (("A", pair.a), ("B", pair.b)):
        statistics = [f"{name} {value}" for name, value in tensor.statistics.items()]
        print(f"    {run}: shape {tensor.shape}  {'  '.join(statistics)}")
    print(f"    largest difference {largest.difference:.3g}, at {largest.a.name}")
    if comparison.layers_left_out:
        print(f"    layers of which nothing was compared: {comparison.layers_left_out}")


def write_table(path: Path, compared_pairs: list[Pair]) -> None:
    """Write a CSV file with a line for each pair of tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = ("name", "shape", *compared_pairs[0].a.statistics)
    header = [f"{run} {column}" for run in "AB" for column in columns]
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*header, "relative difference"])
        for pair in compared_pairs:
            cells_a = (pair.a.name, pair.a.shape, *pair.a.statistics.values())
            cells_b = (pair.b.name, pair.b.shape, *pair.b.statistics.values())
            table.writerow([*cells_a, *cells_b, pair.difference])


def directory(text: str) -> Path:
    """Return a run's directory. Raises ArgumentTypeError if there is none of this name."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such directory; give a run's output_dir")
    return Path(text)


def tolerance(text: str) -> float:
    """Parse a tolerance. Raises ArgumentTypeError unless it is a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number of at least 0")
    return value


def main() -> ExitCode:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_a", type=directory)
    parser.add_argument("run_b", type=directory)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--stage")
    parser.add_argument("--tolerance", type=tolerance, default=Settings.tolerance)
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
