"""One picture and one table of a run, from its metrics.jsonl:  python -m profiling.report RUN"""

import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from configs.usage import exit_with_usage

TIMING = "timing/"
STEP = "timing/step"
# Stages that take a smaller share of the run's time are not drawn.
MIN_VISIBLE_SHARE = 0.01
# Steps that take longer than this quantile of all steps may be cut off at the top.
USUAL_QUANTILE = 0.95
NUM_COLUMNS = 4
# Inches. The margins leave room for titles, and for the labels of axes.
PANEL_WIDTH = 4.0
PANEL_HEIGHT = 2.8
LEFT_MARGIN = 0.7
RIGHT_MARGIN = 0.15
TOP_MARGIN = 0.65
BOTTOM_MARGIN = 0.5
COLUMN_GAP = 0.7
ROW_GAP = 0.85
# Of the panel's height. Without it, matplotlib would look for the first place above all labels.
TITLE_HEIGHT = 1.0
MAX_MARKED_POINTS = 30  # longer lines have no markers

Line = dict[str, float | None]  # a line of metrics.jsonl


@dataclass(frozen=True)
class Panel:
    """A panel of the picture. Without names, it shows the reward function's validation scores."""

    title: str
    names: list[str]


AGES = range(9)  # of tokens with rollout.partial, in steps; older ones are not drawn
PANELS = [
    Panel("loss", ["train/loss", "val/loss"]),
    Panel("exact match", ["val/exact_match"]),
    Panel("accuracy of preferences", ["rewards/accuracies", "val/rewards/accuracies"]),
    Panel("rewards of answers", ["rewards/chosen", "rewards/rejected"]),
    Panel("margin of rewards", ["rewards/margins", "val/rewards/margins"]),
    Panel("log-probability of answers [nats]", ["logps/chosen", "logps/rejected"]),
    Panel("score per response", ["score/mean"]),
    Panel("validation score", []),
    Panel("groups with different scores", ["reward/informative_groups"]),
    Panel("response length [tokens]", ["response_length/mean", "val/response_length"]),
    Panel("turns, tool calls per episode", ["episodes/turns/mean", "episodes/tool_calls/mean"]),
    Panel("tool errors of a step", ["episodes/tool_errors"]),
    Panel("vLLM waits for tools [share of time]", ["episodes/vllm_idle"]),
    Panel("cut off at max_tokens", ["response_length/clip_ratio", "val/truncated"]),
    Panel("entropy [nats]", ["actor/entropy"]),
    Panel("KL to the reference [nats]", ["actor/kl_loss", "actor/reward_kl"]),
    Panel("KL of an update [nats]", ["actor/ppo_kl"]),
    Panel("clipped share of tokens", ["actor/pg_clipfrac", "critic/vf_clipfrac"]),
    Panel("log-prob gap of vLLM and trainer", ["rollout_corr/log_prob_gap"]),
    Panel("tokens by age [share]", [f"partial/age_{age}/tokens" for age in AGES]),
    Panel(
        "effective sample size by age",
        [f"partial/age_{age}/effective_sample_size" for age in AGES],
    ),
    Panel("groups that continue, dropped", ["partial/carried_groups", "partial/stale_drops"]),
    Panel("vLLM waits [share]", ["partial/idle_slots", "perf/rollout_idle"]),
    Panel("explained variance of values", ["critic/vf_explained_var"]),
    Panel("gradient norm", ["train/grad_norm", "actor/grad_norm", "critic/grad_norm"]),
    Panel("learning rate", ["train/lr", "actor/lr", "critic/lr"]),
    Panel("tokens/s per device", ["perf/tokens_per_second"]),
    Panel("MFU", ["perf/mfu"]),
    Panel(
        "memory [GiB]",
        ["perf/memory_peak_gib", "perf/memory_training_gib", "perf/memory_asleep_gib"],
    ),
]
# Metrics val/... that do not come from the reward function.
BUILT_IN_VALIDATION = ("loss", "exact_match", "rewards", "response_length", "truncated", "failures")
# Metrics in the table below the stages: name -> unit.
SPEED_AND_MEMORY = {
    "perf/tokens_per_second": "tokens/s per device",
    "perf/mfu": "MFU",
    "perf/memory_peak_gib": "GiB, peak",
    "perf/memory_training_gib": "GiB in use, training",
    "perf/memory_asleep_gib": "GiB in use, vLLM asleep",
}


def read_metrics(run: Path) -> list[Line]:
    """Return the lines of metrics.jsonl, without a last line that is still being written."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def training_steps(lines: list[Line]) -> list[Line]:
    """Return the lines of training steps; other lines have only a validation or a checkpoint."""
    return [line for line in lines if STEP in line]


def stages_in(lines: list[Line]) -> list[str]:
    """Return the names timing/... in these lines, in the order in which they appear."""
    names = dict.fromkeys(name for line in lines for name in line)
    return [name for name in names if name.startswith(TIMING)]


def values_of(name: str, lines: list[Line]) -> list[float]:
    """Return a metric's values in the lines that have one."""
    return [line[name] for line in lines if line.get(name) is not None]


def total_seconds(stage: str, lines: list[Line]) -> float:
    return sum(line.get(stage, 0.0) for line in lines)


# -- table -----------------------------------------------------------------------------------------


def table(run: Path) -> str:
    """Return a table of the time in each stage, then of speed and memory.

    For each stage, it has the median, longest and total seconds, and the share of the total time of
    all steps. Shares need not add up to 1: a stage inside another one counts in both, and neither a
    validation before the first step nor the last checkpoint belongs to a step.
    """
    lines = read_metrics(run)
    steps = training_steps(lines)
    run_seconds = sum(line[STEP] for line in steps)
    header = f"{'stage':<26}{'median [s]':>12}{'longest [s]':>12}{'total [s]':>12}"
    texts = [f"{header}{'share':>8}{'steps':>7}"]
    stages = stages_in(lines)
    for stage in sorted(stages, key=lambda stage: -total_seconds(stage, lines)):
        seconds = [line[stage] for line in lines if stage in line]
        share = sum(seconds) / run_seconds if run_seconds else math.nan
        texts.append(
            f"{stage.removeprefix(TIMING):<26}{median(seconds):>12.4f}{max(seconds):>12.4f}"
            f"{sum(seconds):>12.2f}{share:>8.1%}{len(seconds):>7}"
        )
    for name, unit in SPEED_AND_MEMORY.items():
        values = values_of(name, steps)
        if values:
            texts.append(f"{unit:<26}{median(values):>12.4g}{max(values):>12.4g}")
    return "\n".join(texts)


# -- picture ---------------------------------------------------------------------------------------


def write_report(run: Path) -> Path:
    """Draw RUN/report.png, write the table to RUN/report.txt, and return the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (run / "report.txt").write_text(table(run) + "\n")
    figure = draw(run)
    figure.savefig(run / "report.png", dpi=100)
    pyplot.close(figure)
    return run / "report.png"


def draw(run: Path):
    """Return a figure with the time by stage, and a panel for each group of metrics in the run."""
    from matplotlib import pyplot, ticker

    lines = read_metrics(run)
    panels = panels_with_data(lines)
    # The stages and their legend fill the rest of the last row, which is at least two columns wide.
    num_rows = math.ceil((len(panels) + 2) / NUM_COLUMNS)
    first_free_column = max(0, len(panels) - NUM_COLUMNS * (num_rows - 1))
    figure = pyplot.figure(figsize=(PANEL_WIDTH * NUM_COLUMNS, PANEL_HEIGHT * num_rows))
    grid = add_grid(figure, num_rows)
    stage_places = grid[-1, first_free_column:].subgridspec(1, 2, width_ratios=(3, 1))
    axis = figure.add_subplot(stage_places[0])
    draw_stages(axis, figure.add_subplot(stage_places[1]), lines)
    for i, panel in enumerate(panels):
        place = grid[divmod(i, NUM_COLUMNS)]
        axis = figure.add_subplot(place, sharex=axis)
        draw_metrics(axis, lines, panel.names)
        axis.set_title(panel.title, y=TITLE_HEIGHT)
    for axis in figure.axes:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
        axis.grid(alpha=0.3)
    figure.suptitle(str(run), y=1 - 0.1 / figure.get_figheight())
    return figure


def add_grid(figure, num_rows: int):
    """Return a grid of panels with fixed margins.

    A layout that matplotlib computes from the sizes of all labels would take longer than drawing.
    """
    width = figure.get_figwidth()
    height = figure.get_figheight()
    panels_width = width - LEFT_MARGIN - RIGHT_MARGIN - (NUM_COLUMNS - 1) * COLUMN_GAP
    panels_height = height - TOP_MARGIN - BOTTOM_MARGIN - (num_rows - 1) * ROW_GAP
    return figure.add_gridspec(
        num_rows,
        NUM_COLUMNS,
        left=LEFT_MARGIN / width,
        right=1 - RIGHT_MARGIN / width,
        bottom=BOTTOM_MARGIN / height,
        top=1 - TOP_MARGIN / height,
        wspace=COLUMN_GAP / (panels_width / NUM_COLUMNS),
        hspace=ROW_GAP / (panels_height / num_rows),
    )


def panels_with_data(lines: list[Line]) -> list[Panel]:
    """Return the panels for which the run has metrics, each with only those metrics."""
    present = {name for line in lines for name, value in line.items() if value is not None}
    validation = sorted(name for name in present if name.startswith("val/"))
    scores = [name for name in validation if name.split("/")[1] not in BUILT_IN_VALIDATION]
    panels = []
    for panel in PANELS:
        names = [name for name in panel.names or scores if name in present]
        if names:
            panels.append(Panel(panel.title, names))
    return panels


def draw_metrics(axis, lines: list[Line], names: list[str]) -> None:
    """Draw the named metrics as lines over the steps."""
    for name in names:
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        marker = "o" if len(points) < MAX_MARKED_POINTS else None
        steps, values = zip(*points)
        axis.plot(steps, values, label=name, marker=marker, markersize=3, linewidth=1.2)
    is_always_0 = not any(line.get(name) for line in lines for name in names)
    if is_always_0:
        axis.set_ylim(-0.05, 1)  # otherwise the line would be in the middle of +-0.05
    if len(names) > 1:
        axis.legend(fontsize=8)


def draw_stages(axis, legend, lines: list[Line]) -> None:
    """Draw how many seconds each stage takes, step by step.

    Stages that run in most steps are areas. Stages that run in half of the steps or fewer are bars
    on top of the areas. Outliers far longer than most steps, such as a validation, are cut off at
    the top.

    Args:
        axis: where to draw.
        legend: an axis for the stages' names and median seconds.
        lines: the lines of metrics.jsonl.
    """
    steps = training_steps(lines)
    stages = visible_stages(lines)
    num_steps = Counter(stage for line in steps for stage in stages_in([line]))
    regular = [stage for stage in stages if 2 * num_steps[stage] > len(steps)]
    occasional = [stage for stage in stages if stage not in regular]
    styles = stage_styles(stages, lines)
    # Step -> the seconds drawn so far.
    heights = {}
    for line in steps:
        heights[line["step"]] = sum(line.get(stage, 0.0) for stage in regular)
    usual = math.inf
    if regular:
        usual = sorted(heights.values())[int(USUAL_QUANTILE * len(heights))]
        draw_areas(axis, steps, regular, styles)
    for stage in occasional:
        seconds = {line["step"]: line[stage] for line in lines if stage in line}
        bottoms = [heights.get(step, 0.0) for step in seconds]
        width = max(1, len(lines) / 100)
        axis.bar(seconds.keys(), seconds.values(), width, bottoms, **styles[stage])
        for step, bottom in zip(seconds, bottoms):
            heights[step] = bottom + seconds[step]
    axis.set_title("time by stage [s]", y=TITLE_HEIGHT)
    if stages:
        axis.set_ylim(0, 1.05 * min(max(heights.values()), 2 * usual))
    legend.legend(
        *axis.get_legend_handles_labels(),
        fontsize=8,
        loc="upper left",
        title="median [s]",
        title_fontsize=8,
    )
    legend.set_axis_off()


def visible_stages(lines: list[Line]) -> list[str]:
    """Return the stages that take a visible share of the time, those within steps first."""
    steps = training_steps(lines)
    min_seconds = MIN_VISIBLE_SHARE * sum(line[STEP] for line in steps)
    return [
        stage
        for stage in stages_in([*steps, *lines])
        if stage != STEP and total_seconds(stage, lines) > min_seconds
    ]


def stage_styles(stages: list[str], lines: list[Line]) -> dict[str, dict]:
    """Return a label with the median, and a colour, for each stage."""
    from matplotlib import colormaps

    styles = {}
    for i, stage in enumerate(stages):
        seconds = median(line[stage] for line in lines if stage in line)
        styles[stage] = {
            "label": f"{stage.removeprefix(TIMING)} {seconds:.3g}",
            # The strong colours of this map have even indices; use them first.
            "color": colormaps["tab20"](2 * i % 19),
        }
    return styles


def draw_areas(axis, steps: list[Line], stages: list[str], styles: dict[str, dict]) -> None:
    """Draw stages as areas on top of each other, from half a step before to half a step after."""
    edges = [line["step"] - 0.5 for line in steps]
    edges.append(steps[-1]["step"] + 0.5)
    lines_at_edges = [*steps, steps[-1]]
    seconds = []
    for stage in stages:
        seconds.append([line.get(stage, 0.0) for line in lines_at_edges])
    axis.stackplot(
        edges,
        seconds,
        step="post",
        labels=[styles[stage]["label"] for stage in stages],
        colors=[styles[stage]["color"] for stage in stages],
    )


def main(arguments: list[str]) -> None:
    """Print the table of a run, and write its picture."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        exit_with_usage(__doc__, arguments)
    directory = Path(arguments[0])
    if not (directory / "metrics.jsonl").exists():
        print(
            f"error: {directory} has no metrics.jsonl: give the output_dir of a run that has "
            "finished a step",
            file=sys.stderr,
        )
        sys.exit(2)
    print(table(directory))
    print(write_report(directory))


if __name__ == "__main__":
    main(sys.argv[1:])
