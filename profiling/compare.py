"""Where two runs part: compares their msprobe dumps of one step, stage by stage.

    python -m profiling.compare RUN_A RUN_B --step N [--stage S] [--tolerance 1e-4] [--output DIR]

Prints, for each stage and rank, the first module in execution order whose numbers differ by more than the tolerance,
relative to the largest number there. Of FSDP2 and Megatron the outputs of forward passes are compared, of modules that
compute the same (not of level L1, which dumps none); both runs must have the same ranks, so there leave Megatron without
tensor and pipeline parallelism. Exit code 0: all agree; 1: they part, or one ran what the other did not; 2: there is
nothing to compare. --output keeps msprobe's tables, which have every number.
"""

import argparse
import csv
import json
import math
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path

STATISTICS = ("max", "min", "mean", "l2norm")
# Megatron's module -> Hugging Face's that computes the same. Its qkv and gate-up projections, fused with the norm before
# them, have no partner.
SAME = {"embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm",
        "input_layernorm": "input_layernorm", "self_attention": "self_attn", "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm", "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm", "mlp": "mlp", "mlp.linear_fc2": "mlp.down_proj", "": ""}


def compare(run_a: Path, run_b: Path, step: int, stage: str | None, tolerance: float, output: Path) -> int:
    """Print where the runs part; return the exit code."""
    stages = [stages_of(run, step) for run in (run_a, run_b)]
    both = [name for name in stages[0] if name in stages[1] and stage in (None, name)]
    if not both:
        print(f"no stage {stage or ''} of step {step} was dumped by both: {run_a} has {list(stages[0])}, {run_b} has "
              f"{list(stages[1])}")
        return 2
    left_out = sorted(set(stages[0]) ^ set(stages[1])) if stage is None else []
    if left_out:
        print(f"in one run only, left out: {', '.join(left_out)}")
    two_engines = engine_of(run_a) != engine_of(run_b)
    codes = [compare_stage(name, stages[0][name], stages[1][name], tolerance, output / name, two_engines) for name in both]
    return worst([*codes, int(bool(left_out))])


def engine_of(run: Path) -> str | None:
    from omegaconf import OmegaConf
    return OmegaConf.load(run / "config.yaml").model_engine if (run / "config.yaml").exists() else None


def worst(codes: Iterable[int]) -> int:
    """Of several exit codes: that two runs part is more than that there is nothing to compare."""
    return max(codes, key=(0, 2, 1).index)


def stages_of(run: Path, step: int) -> dict[str, Path]:
    """{stage: directory of its ranks} of the stages that were dumped, in the order in which they ran."""
    found = {dump.parents[2].name: dump.parents[1] for dump in sorted(
        run.glob(f"profile/step_{step}/*/step{step}/*/dump.json"), key=lambda path: path.stat().st_mtime, reverse=True)}
    return dict(reversed(found.items()))


def compare_stage(stage: str, a: Path, b: Path, tolerance: float, output: Path, two_engines: bool) -> int:
    ranks = [sorted(path.name for path in side.iterdir()) for side in (a, b)]
    if ranks[0] != ranks[1]:
        print(f"{stage}: other ranks in the two dumps, {ranks[0]} and {ranks[1]}")
        return 2
    output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "msprobe.msprobe", "compare", "-tp", str(a), "-gp", str(b), "-o", str(output)]
    pairs = None
    if two_engines:
        pairs = {k: v for rank in ranks[0] for k, v in paired(*(names(side / rank) for side in (a, b))).items()}
        if not pairs:
            print(f"{stage}: no module in common; level L1 dumps none")
            return 2
        (output / "pairs.yaml").write_text("".join(f"{json.dumps(k)}: {json.dumps(v)}\n" for k, v in pairs.items()))
        command += ["-dm", str(output / "pairs.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    tables = {rank: sorted(output.glob(f"compare_result_{rank}_*.csv")) for rank in ranks[0]}
    if done.returncode or not all(tables.values()):
        print(f"{stage}: msprobe compare failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return 2
    return worst(report(f"{stage} {rank}", read_rows(tables[rank][-1]), tolerance, pairs) for rank in tables)


def read_rows(path: Path) -> list[dict[str, str]]:
    csv.field_size_limit(2**30)                 # a column holds call stacks
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def report(title: str, rows: list[dict[str, str]], tolerance: float, pairs: dict[str, str] | None) -> int:
    """Print what the rows of one rank say. pairs: of two engines, {name in A: name in B} of what both compute."""
    # What is handed to a module or function is what another one put out, or an argument that it may not even read.
    rows = [row for row in rows if not re.search(r"\.forward(\.\d+)?\.input\.", row["NPU Name"] + row["Bench Name"])]
    if pairs is not None:
        rows = [row for row in rows if pairs.get(row["NPU Name"]) == row["Bench Name"]]
    matched = [row for row in rows if "N/A" not in (row["NPU Name"], row["Bench Name"])]
    if not matched:
        print(f"{title}: no module in common")
        return 2
    gaps = [gap(row) for row in matched]
    largest = max(range(len(gaps)), key=gaps.__getitem__)
    alone = [row for row in rows if "N/A" in (row["NPU Name"], row["Bench Name"])]
    unmatched = ", outputs of forward passes alone" if pairs else f", {len(alone)} in one run only" if alone else ""
    first = next((i for i, x in enumerate(gaps) if x > tolerance), None)
    if first is None:
        print(f"{title}: {len(matched)} tensors agree{unmatched}; largest difference {gaps[largest]:.2g}")
        if alone:
            names = alone[0]["NPU Name"], alone[0]["Bench Name"]
            print(f"    the first in one run only: {next(x for x in names if x != 'N/A')}")
        return int(bool(alone))
    row = matched[first]
    partner = "" if row["NPU Name"] == row["Bench Name"] else f" / {row['Bench Name']}"
    print(f"{title}: parts at {row['NPU Name']}{partner}, "
          f"relative difference {gaps[first]:.3g}; tensor {first + 1} of {len(matched)}{unmatched}")
    for side, run in (("NPU", "A"), ("Bench", "B")):
        print(f"    {run}: shape {row[f'{side} Tensor Shape']}  " +
              "  ".join(f"{name} {row[f'{side} {name}']}" for name in STATISTICS))
    print(f"    largest difference {gaps[largest]:.3g}, at {matched[largest]['NPU Name']}")
    return 1


def gap(row: dict[str, str]) -> float:
    """The largest difference of a statistic (and, of tensors dumped whole, of an element) relative to the largest number
    there; inf where only one of the two is a finite number."""
    pairs = [(number(row[f"NPU {name}"]), number(row[f"Bench {name}"])) for name in STATISTICS]
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    if any(math.isfinite(a) != math.isfinite(b) for a, b in pairs):
        return math.inf
    pairs = [(a, b) for a, b in pairs if math.isfinite(a)]
    scale = max((abs(x) for pair in pairs[:2] for x in pair), default=0.0)
    gaps = [abs(a - b) / max(abs(a), abs(b), scale) for a, b in pairs if a != b]
    element = number(row.get("MaxAbsErr"))
    if element and math.isfinite(element) and scale:
        gaps.append(element / scale)
    return max(gaps, default=0.0)


def number(text: str | None) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


# -- names -------------------------------------------------------------------------------------------------------------


def names(rank: Path) -> list[str]:
    """Names of all tensors of a dump, as msprobe compare calls them."""
    found = []
    for name, call in json.loads((rank / "dump.json").read_text())["data"].items():
        for part, label in (("input_args", "input"), ("input", "input"), ("output", "output")):
            found += [f"{name}.{label}.{i}" for i, value in enumerate(call.get(part) or []) if value]
    return found


def paired(a: list[str], b: list[str]) -> dict[str, str]:
    """{name in a: name in b} where a Megatron and a Hugging Face module compute the same."""
    ours, theirs = ({canonical(name): name for name in side if canonical(name)} for side in (a, b))
    return {ours[key]: theirs[key] for key in ours if key in theirs}


def canonical(name: str) -> str | None:
    """The name of a module's output in Hugging Face's terms, without classes and wrappers. None for one that has no
    partner."""
    match = re.fullmatch(r"Module\.\d+\.(.*)\.(?!Identity)\w+\.forward\.(\d+)\.output\.0", name)
    if not match:
        return None
    path, call = match[1].removeprefix("hf."), match[2]
    layer = re.fullmatch(r"(?:decoder|model)\.(layers\.\d+)\.?(.*)", path)
    prefix, last = (f"model.{layer[1]}.", layer[2]) if layer else ("", path)
    last = SAME.get(last, last if last in SAME.values() else None)
    return None if last is None else f"{prefix}{last} {call}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_a", type=Path)
    parser.add_argument("run_b", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--stage")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return compare(given.run_a, given.run_b, given.step, given.stage, given.tolerance, given.output or Path(scratch))


if __name__ == "__main__":
    try:
        code = main()
    except Exception:                           # not Python's 1, which says that the runs part
        traceback.print_exc()
        code = 2
    sys.exit(code)
