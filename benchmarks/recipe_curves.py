"""Read the metrics that benchmarks/recipes.py and benchmarks/trl_grpo.py wrote, and draw them."""

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Metrics of benchmarks/trl_grpo.py -> their names here.
TRL_NAMES = {
    "step": "timing/step",
    "score": "score/mean",
    "length": "response_length/mean",
    "grad_norm": "actor/grad_norm",
}


@dataclass
class RunCurves:
    """The metrics of one run.

    Attributes:
        name: the recipe, or "TRL".
        metrics: for every step, metrics by name; timing/step is its seconds.
    """

    name: str
    metrics: list[dict]

    def values(self, metric: str, window: int) -> dict[int, float]:
        """Return step -> the metric, as a running mean over `window` of its values."""
        values = {line["step"]: line[metric] for line in self.metrics if metric in line}
        return dict(zip(values, smooth(list(values.values()), window)))

    def seconds(self) -> dict[int, float]:
        """Return step -> the sum of timing/step up to this step."""
        seconds = {}
        total = 0.0
        for line in self.metrics:
            total += line.get("timing/step", 0.0)
            seconds[line["step"]] = total
        return seconds


def smooth(values: list[float], window: int) -> list[float]:
    """Return running means over the last `window` values."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def read_curves(paths: list[Path]) -> list[RunCurves]:
    """Return the runs of result files that ended well."""
    runs = []
    for path in paths:
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            steps = enumerate(content["steps"], start=1)
            runs.append(RunCurves("TRL", [trl_metrics(step, values) for step, values in steps]))
            continue
        for entry in content:
            if entry["exit_code"] == 0:
                runs.append(RunCurves(entry["recipe"], entry["metrics"]))
    return runs


def trl_metrics(step: int, values: dict[str, float]) -> dict:
    """Return the metrics of a step of benchmarks/trl_grpo.py under our names."""
    metrics = {name: values[trl_name] for trl_name, name in TRL_NAMES.items()}
    return {"step": step, **metrics}


def draw(runs: list[RunCurves], arguments: Namespace) -> "Figure":
    """Draw each metric in a panel: for every recipe the mean of its seeds, and their range."""
    from matplotlib.figure import Figure

    axis_labels = ("step", "seconds of steps") if arguments.seconds else ("step",)
    panels = [(metric, label) for metric in arguments.metric for label in axis_labels]
    width = 2 + 5 * len(panels)
    figure = Figure(figsize=(width, 4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)
    names = dict.fromkeys(run.name for run in runs)
    for axes, (metric, label) in zip(all_axes[0], panels):
        for name in names:
            of_name = [run for run in runs if run.name == name]
            draw_recipe(axes, name, of_name, metric, arguments.window, label != "step")
        axes.set_xlabel(label)
        axes.set_ylabel(metric)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def draw_recipe(
    axes: "Axes",
    name: str,
    runs: list[RunCurves],
    metric: str,
    window: int,
    is_over_seconds: bool,
) -> None:
    """Draw the mean of runs with several seeds, and their range, at the steps that all have.

    Runs without the metric are left out. Metrics of validations are not averaged over steps.
    """
    is_rare = metric.startswith("val/")
    curves = [run.values(metric, 1 if is_rare else window) for run in runs]
    steps = sorted(set.intersection(*map(set, curves)))
    if not steps:
        return
    columns = [values_at(step, curves) for step in steps]
    x = steps
    if is_over_seconds:
        seconds = [run.seconds() for run in runs]
        x = [mean(values_at(step, seconds)) for step in steps]
    label = f"{name}, {len(runs)} seeds" if len(runs) > 1 else name
    (line,) = axes.plot(x, [mean(column) for column in columns], label=label)
    lowest = [min(column) for column in columns]
    highest = [max(column) for column in columns]
    axes.fill_between(x, lowest, highest, alpha=0.2, color=line.get_color())


def values_at(step: int, curves: list[dict[int, float]]) -> list[float]:
    return [curve[step] for curve in curves]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
