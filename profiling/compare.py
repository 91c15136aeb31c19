"""Where two runs diverge: compares the losses and the msprobe dumps of one step.

    python -m profiling.compare RUN_A RUN_B --step N [--stage S] [--tolerance 1e-4] [--output DIR]

Prints the step's losses, entropies and gradient norms and, for each stage and rank, the first tensor in execution order that
differs by more than the tolerance, relative to the largest number there. Dumps of one engine and layout are compared rank by
rank, element by element where tensors were dumped, in all but the inputs of forward passes. Others (FSDP2 and Megatron; tensor
or pipeline parallel ranks and one rank) are compared by statistics of what equivalent modules output in forward passes (level
L1 dumps none): shards are joined, and layers are numbered as in the whole model. All of these ranks have to be dumped
(profiler.ranks=all). Ranks that see other tokens cannot be compared: different numbers of data or context parallel ranks.
Exit code 0: all that was compared agrees, and what was not is listed; 1: the runs diverge, or one ran what the other did not; 2:
there is nothing to compare. --output keeps tables of every number.
"""

import argparse
import csv
import json
import math
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from profiling.report import read_metrics
from profiling.shards import STATISTICS, Dumped, gather, largest_difference, pairs, read

METRICS = ("loss", "entropy", "grad_norm")
SMALL = 0.01  # below, a metric's difference is relative to this: a policy's first loss is 0 but for rounding


def compare(
    run_a: Path, run_b: Path, step: int, stage: str | None, tolerance: float, output: Path | None
) -> int:
    """Print where the runs diverge; return the exit code."""
    metrics = compare_metrics(run_a, run_b, step, tolerance)
    stages = [stages_of(run, step) for run in (run_a, run_b)]
    both = [name for name in stages[0] if name in stages[1] and stage in (None, name)]
    if not both:
        print(
            f"no stage {stage or ''} of step {step} was dumped by both: {run_a} has {list(stages[0])}, {run_b} has "
            f"{list(stages[1])}"
        )
        return worst([metrics, 2])
    left_out = sorted(set(stages[0]) ^ set(stages[1])) if stage is None else []
    if left_out:
        print(f"in one run only, left out: {', '.join(left_out)}")
    codes = [
        compare_stage(name, stages[0][name], stages[1][name], tolerance, output) for name in both
    ]
    return worst([metrics, *codes, int(bool(left_out))])


def worst(codes: Iterable[int]) -> int:
    """Of several exit codes: that two runs diverge is more than that there is nothing to compare."""
    return max(codes, key=(0, 2, 1).index)


def compare_metrics(run_a: Path, run_b: Path, step: int, tolerance: float) -> int:
    a, b = (metrics_of(run, step) for run in (run_a, run_b))
    names = [name for name in a if name in b and name.endswith(METRICS)]
    gaps = {name: metric_gap(a[name], b[name]) for name in names}
    verdict = (
        "diverge"
        if any(x > tolerance for x in gaps.values())
        else "agree"
        if names
        else "are not in both runs"
    )
    print(f"metrics of step {step} {verdict}")
    for name in names:
        print(
            f"    {name:<24} A {a[name]:<22} B {b[name]:<22} relative difference {gaps[name]:.2g}"
        )
    return int(verdict == "diverge")


def metrics_of(run: Path, step: int) -> dict[str, float]:
    lines = read_metrics(run) if (run / "metrics.jsonl").exists() else []
    return {
        name: math.nan if x is None else x
        for line in lines
        if line["step"] == step
        for name, x in line.items()
    }


def metric_gap(a: float, b: float) -> float:
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(abs(a), abs(b), SMALL)
    return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf


def stages_of(run: Path, step: int) -> dict[str, Path]:
    """{stage: directory of its ranks} of the stages that were dumped, in the order in which they ran."""
    found = {
        dump.parents[2].name: dump.parents[1]
        for dump in sorted(
            run.glob(f"profile/step_{step}/*/step{step}/*/dump.json"),
            key=lambda path: path.stat().st_mtime,
            reverse=True,
        )
    }
    return dict(reversed(found.items()))


def compare_stage(stage: str, a: Path, b: Path, tolerance: float, output: Path | None) -> int:
    sides = [
        {
            rank: json.loads((rank / "coordinates.json").read_text())
            for rank in sorted(side.iterdir())
        }
        for side in (a, b)
    ]
    layouts = [{rank.name: place for rank, place in side.items()} for side in sides]
    if layouts[0] != layouts[1]:
        return compare_layouts(stage, *sides, tolerance, output)
    codes = []
    for name in layouts[0]:
        # What a module is handed is what another one output, or an argument that it may not even read.
        left, right = (
            {
                x: tensor
                for x, tensor in read(side / name).items()
                if not re.search(r"\.forward(\.\d+)?\.input\.", x)
            }
            for side in (a, b)
        )
        alone = [x for x in (*left, *right) if x not in left or x not in right]
        rows = [
            (
                x,
                right[key],
                gap(x.statistics, right[key].statistics, largest_difference(x, right[key])),
            )
            for key, x in left.items()
            if key in right
        ]
        codes.append(report(f"{stage} {name}", rows, tolerance, output, alone))
    return worst(codes)


def compare_layouts(
    stage: str, a: dict[Path, dict], b: dict[Path, dict], tolerance: float, output: Path | None
) -> int:
    """Of each share of the batch what modules output that compute the same; a, b: {folder of a rank: its coordinates}."""
    places = [next(iter(side.values())) for side in (a, b)]
    one_engine = places[0]["of"] == places[1]["of"]
    for axis, what in (("dp", "data"), ("cp", "context")):
        sizes = [place[axis][1] for place in places]
        if sizes[0] != sizes[1] or axis == "cp" and sizes[0] > 1 and not one_engine:
            print(
                f"{stage}: modules are not compared, since {sizes[0]} and {sizes[1]} {what} parallel ranks see other tokens"
            )
            return 2
    shares = [by_share(side) for side in (a, b)]
    codes = []
    for share in sorted(shares[0].keys() & shares[1].keys()):
        title = stage + "".join(
            f" {axis}{rank}" for axis, rank in zip(("dp", "cp"), share) if places[0][axis][1] > 1
        )
        codes.append(
            compare_share(title, shares[0][share], shares[1][share], one_engine, tolerance, output)
        )
    if not codes:
        print(f"{stage}: no rank was dumped in both")
    return worst(codes or [2])


def by_share(ranks: dict[Path, dict]) -> dict[tuple[int, int], dict[Path, dict]]:
    """{(data, context parallel rank): {folder: coordinates}}"""
    shares = {}
    for rank, place in ranks.items():
        shares.setdefault((place["dp"][0], place["cp"][0]), {})[rank] = place
    return shares


def compare_share(
    title: str,
    a: dict[Path, dict],
    b: dict[Path, dict],
    one_engine: bool,
    tolerance: float,
    output: Path | None,
) -> int:
    for name, ranks in (("A", a), ("B", b)):
        place = next(iter(ranks.values()))
        if len(ranks) != place["tp"][1] * place["pp"][1]:
            print(
                f"{title}: {name} has the dumps of {len(ranks)} of {place['tp'][1]} tensor x {place['pp'][1]} pipeline parallel "
                "ranks: set profiler.ranks=all"
            )
            return 2
    a, b = gather(a), gather(b)
    calls = [Counter(key[1:] for key in side.outputs) for side in (a, b)]
    # The head is asked about the same tokens, whatever padding is around them.
    heads = [[key for key in side.outputs if key[1] == "head"] for side in (a, b)]
    other_tokens = {
        key[0] for key in heads[0] + heads[1] if heads[0] != heads[1] or not pairs(a, b, key)
    }
    rows, left_out = [], Counter()
    for key in a.outputs:
        if key[1:] not in calls[1]:
            continue
        if key[0] in other_tokens:
            left_out["their micro-batches differ (raise data.max_tokens_per_micro_batch)"] += 1
        elif calls[0][key[1:]] != calls[1][key[1:]]:
            left_out["one run alone calls them again (recomputation)"] += 1
        elif found := pairs(a, b, key):
            rows += [(x, y, gap(x.statistics, y.statistics)) for x, y in found]
        else:
            left_out[
                "one run alone pads them (engine.sequence_parallel=false or profiler.msprobe.task=tensor)"
            ] += 1
    note = ", outputs of forward passes alone" + "".join(
        f"; {n} not compared: {why}" for why, n in left_out.items() if n
    )
    alone = [
        ".".join(map(str, key[1:]))
        for key in (*a.outputs, *b.outputs)
        if not all(key[1:] in side for side in calls)
    ]
    return report(title, rows, tolerance, output, alone if one_engine else [], note)


def report(
    title: str,
    rows: list[tuple[Dumped, Dumped, float]],
    tolerance: float,
    output: Path | None,
    alone: list[str],
    note: str = "",
) -> int:
    """Print where pairs of tensors with their gaps, in execution order, diverge. alone: names in one run only."""
    if not rows:
        print(f"{title}: no module in common{note}")
        return 2
    gaps = [row[2] for row in rows]
    if output:
        write_table(output / f"{title.replace(' ', '_')}.csv", rows)
    note += f", {len(alone)} in one run only" * bool(alone)
    largest = max(range(len(gaps)), key=gaps.__getitem__)
    first = next((i for i, x in enumerate(gaps) if x > tolerance), None)
    if first is None:
        print(f"{title}: {len(rows)} tensors agree{note}; largest difference {gaps[largest]:.2g}")
    else:
        a, b, _ = rows[first]
        print(
            f"{title}: diverges at {a.name}{'' if a.name == b.name else f' / {b.name}'}, relative difference "
            f"{gaps[first]:.3g}; tensor {first + 1} of {len(rows)}{note}"
        )
        for run, x in (("A", a), ("B", b)):
            print(
                f"    {run}: shape {x.shape}  "
                + "  ".join(f"{name} {value}" for name, value in x.statistics.items())
            )
        print(f"    largest difference {gaps[largest]:.3g}, at {rows[largest][0].name}")
    if alone:
        print(f"    the first in one run only: {alone[0]}")
    return int(first is not None or bool(alone))


def gap(
    a: dict[str, float | None], b: dict[str, float | None], element: float | None = None
) -> float:
    """The largest difference of a statistic (and, of tensors dumped whole, of an element) relative to the largest number
    there; inf where only one of the two is a finite number."""
    both = [
        (a[name], b[name]) for name in STATISTICS if a[name] is not None and b[name] is not None
    ]
    if any(math.isfinite(x) != math.isfinite(y) for x, y in both):
        return math.inf
    both = [(x, y) for x, y in both if math.isfinite(x)]
    scale = max(
        (abs(x) for pair in both[:2] for x in pair), default=0.0
    )  # of the largest and smallest element
    gaps = [abs(x - y) / max(abs(x), abs(y), scale) for x, y in both if x != y]
    if element and math.isfinite(element) and scale:
        gaps.append(element / scale)
    return max(gaps, default=0.0)


def write_table(path: Path, rows: list[tuple[Dumped, Dumped, float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            [f"{run} {what}" for run in "AB" for what in ("name", "shape", *STATISTICS)]
            + ["relative difference"]
        )
        for *both, relative in rows:
            table.writerow(
                [cell for x in both for cell in (x.name, x.shape, *x.statistics.values())]
                + [relative]
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_a", type=Path)
    parser.add_argument("run_b", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--stage")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    return compare(given.run_a, given.run_b, given.step, given.stage, given.tolerance, given.output)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # not Python's 1, which says that the runs diverge
        traceback.print_exc()
        code = 2
    sys.exit(code)
