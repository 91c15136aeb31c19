"""One picture and one table of a run, from its metrics.jsonl:  python -m profiling.report RUN"""

import json
import math
import sys
from pathlib import Path
from statistics import median

PANELS = [
    ("loss", ["train/loss", "val/loss"]),
    ("exact match", ["val/exact_match"]),
    ("score per response", ["critic/score/mean"]),
    ("validation score", []),
    ("groups with different scores", ["reward/informative_groups"]),
    ("response length [tokens]", ["response_length/mean", "val/response_length"]),
    ("cut off at max_tokens", ["response_length/clip_ratio", "val/truncated"]),
    ("entropy [nats]", ["actor/entropy"]),
    ("KL to the reference [nats]", ["actor/kl_loss", "actor/reward_kl"]),
    ("KL of an update [nats]", ["actor/ppo_kl"]),
    ("clipped share of tokens", ["actor/pg_clipfrac", "critic/vf_clipfrac"]),
    ("log-prob gap of vLLM and trainer", ["rollout_corr/log_prob_gap"]),
    ("explained variance of values", ["critic/vf_explained_var"]),
    ("gradient norm", ["train/grad_norm", "actor/grad_norm", "critic/grad_norm"]),
    ("learning rate", ["train/lr", "actor/lr", "critic/lr"]),
    ("tokens/s per device", ["perf/tokens_per_second"]),
    ("MFU", ["perf/mfu"]),
    (
        "memory [GiB]",
        ["perf/memory_peak_gib", "perf/memory_training_gib", "perf/memory_asleep_gib"],
    ),
]
OTHER_VALIDATION = (
    "loss",
    "exact_match",
    "response_length",
    "truncated",
    "failures",
)  # all but the reward's own
NUM_COLUMNS = 4


def read_metrics(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [
        json.loads(line) for line in lines if line.endswith("\n")
    ]  # the last one may still be written


def table(run: Path) -> str:
    """Seconds of each stage (median, longest, total, share of the time of all steps), then speed and memory. Shares need not
    add up: a stage inside another one counts in both; validation before the first step and the last checkpoint are in no
    step."""
    lines = read_metrics(run)
    steps = [line for line in lines if "timing/step" in line]
    total = sum(line["timing/step"] for line in steps)
    texts = [
        f"{'stage':<26}{'median [s]':>12}{'longest [s]':>12}{'total [s]':>12}{'share':>8}{'steps':>7}"
    ]
    stages = dict.fromkeys(name for line in lines for name in line if name.startswith("timing/"))
    for name in sorted(stages, key=lambda name: -sum(line.get(name, 0.0) for line in lines)):
        seconds = [line[name] for line in lines if name in line]
        texts.append(
            f"{name.removeprefix('timing/'):<26}{median(seconds):>12.4f}{max(seconds):>12.4f}{sum(seconds):>12.2f}"
            f"{sum(seconds) / total if total else math.nan:>8.1%}{len(seconds):>7}"
        )
    for name, unit in (
        ("perf/tokens_per_second", "tokens/s per device"),
        ("perf/mfu", "MFU"),
        ("perf/memory_peak_gib", "GiB, peak"),
        ("perf/memory_training_gib", "GiB in use, training"),
        ("perf/memory_asleep_gib", "GiB in use, vLLM asleep"),
    ):
        values = [line[name] for line in steps if line.get(name) is not None]
        if values:
            texts.append(f"{unit:<26}{median(values):>12.4g}{max(values):>12.4g}")
    return "\n".join(texts)


def write_report(run: Path) -> Path:
    """Draw RUN/report.png and write the table to RUN/report.txt. Returns the path of the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (run / "report.txt").write_text(table(run) + "\n")
    figure = draw(run)
    figure.savefig(run / "report.png", dpi=100)
    pyplot.close(figure)
    return run / "report.png"


def draw(run: Path):
    """A figure with a panel for each group of metrics that the run has, and the time by stage."""
    from matplotlib import pyplot, ticker

    lines = read_metrics(run)
    present = {name for line in lines for name in line if line[name] is not None}
    scores = sorted(
        n for n in present if n.startswith("val/") and n.split("/")[1] not in OTHER_VALIDATION
    )
    panels = [(title, [n for n in (names or scores) if n in present]) for title, names in PANELS]
    panels = [(title, names) for title, names in panels if names]
    num_rows = -(
        -(len(panels) + 2) // NUM_COLUMNS
    )  # the stages take two places or more, those that are left
    figure = pyplot.figure(figsize=(4 * NUM_COLUMNS, 2.8 * num_rows), layout="constrained")
    grid = figure.add_gridspec(num_rows, NUM_COLUMNS)
    last_row = grid[-1, max(0, len(panels) - NUM_COLUMNS * (num_rows - 1)) :].subgridspec(
        1, 2, width_ratios=(3, 1)
    )
    axis = figure.add_subplot(last_row[0])
    draw_stages(axis, figure.add_subplot(last_row[1]), lines)
    for place, (title, names) in enumerate(panels):
        axis = figure.add_subplot(grid[divmod(place, NUM_COLUMNS)], sharex=axis)
        draw_metrics(axis, lines, names)
        axis.set_title(title)
    for axis in figure.axes:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
        axis.grid(alpha=0.3)
    figure.suptitle(str(run))
    return figure


def draw_metrics(axis, lines: list[dict], names: list[str]) -> None:
    for name in names:
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        axis.plot(
            *zip(*points),
            label=name,
            marker="o" if len(points) < 30 else None,
            markersize=3,
            linewidth=1.2,
        )
    if not any(line.get(name) for line in lines for name in names):
        axis.set_ylim(-0.05, 1)  # a line on the ground, not one in the middle of +-0.05
    if len(names) > 1:
        axis.legend(fontsize=8)


def draw_stages(axis, legend, lines: list[dict]) -> None:
    """Seconds of each step by stage, as areas; on top of them, as bars, the stages of half of the steps or fewer. What is far
    longer than most steps, such as a validation, is cut off at the top. The axis `legend` gets the names and the medians."""
    from matplotlib import colormaps

    steps = [line for line in lines if "timing/step" in line]
    stages = dict.fromkeys(
        name for line in (*steps, *lines) for name in line if name.startswith("timing/")
    )
    visible = 0.01 * sum(line["timing/step"] for line in steps)
    stages = [
        name
        for name in stages
        if name != "timing/step" and sum(line.get(name, 0.0) for line in lines) > visible
    ]
    often = [name for name in stages if 2 * sum(name in line for line in steps) > len(steps)]
    style = {
        name: {
            "label": f"{name.removeprefix('timing/')} {median(line[name] for line in lines if name in line):.3g}",
            "color": colormaps["tab20"](2 * i % 19),
        }
        for i, name in enumerate(stages)
    }  # strong colors first
    top = {line["step"]: sum(line.get(name, 0.0) for name in often) for line in steps}
    usual = sorted(top.values())[int(0.95 * len(top))] if often else math.inf
    if often:
        edges = [*(line["step"] - 0.5 for line in steps), steps[-1]["step"] + 0.5]
        axis.stackplot(
            edges,
            [[line.get(name, 0.0) for line in (*steps, steps[-1])] for name in often],
            step="post",
            labels=[style[name]["label"] for name in often],
            colors=[style[name]["color"] for name in often],
        )
    for name in (name for name in stages if name not in often):
        seconds = {line["step"]: line[name] for line in lines if name in line}
        below = [top.get(step, 0.0) for step in seconds]
        axis.bar(seconds.keys(), seconds.values(), max(1, len(lines) / 100), below, **style[name])
        top |= {step: top.get(step, 0.0) + more for step, more in seconds.items()}
    axis.set_title("time by stage [s]")
    if stages:
        axis.set_ylim(0, 1.05 * min(max(top.values()), 2 * usual))
    legend.legend(
        *axis.get_legend_handles_labels(),
        fontsize=8,
        loc="upper left",
        title="median [s]",
        title_fontsize=8,
    )
    legend.set_axis_off()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if not Path(sys.argv[1], "metrics.jsonl").exists():
        sys.exit(f"{sys.argv[1]} has no metrics.jsonl (yet)")
    print(table(Path(sys.argv[1])), write_report(Path(sys.argv[1])), sep="\n")
