"""One picture and one table of a run, from its metrics.jsonl:  python -m profiling.report RUN"""

import json
import math
import sys
from pathlib import Path
from statistics import median

PANELS = [("loss", ["train/loss", "val/loss"]), ("score of a response", ["critic/score/mean"]),
          ("exact match", ["val/exact_match"]), ("response length [tokens]", ["response_length/mean"]),
          ("cut off at max_tokens", ["response_length/clip_ratio"]), ("entropy [nats]", ["actor/entropy"]),
          ("KL to the reference [nats]", ["actor/kl_loss", "actor/reward_kl"]),
          ("KL of an update [nats]", ["actor/ppo_kl"]), ("clipped share of tokens", ["actor/pg_clipfrac", "critic/vf_clipfrac"]),
          ("vLLM and trainer: gap of log p", ["rollout_corr/log_prob_gap"]),
          ("explained variance of values", ["critic/vf_explained_var"]),
          ("gradient norm", ["train/grad_norm", "actor/grad_norm", "critic/grad_norm"]),
          ("learning rate", ["train/lr", "actor/lr", "critic/lr"]),
          ("tokens/s a device", ["perf/tokens_per_second"]), ("MFU", ["perf/mfu"]),
          ("memory [GiB]", ["perf/memory_peak_gib", "perf/memory_training_gib", "perf/memory_asleep_gib"])]


OTHER_VALIDATION = ("loss", "exact_match", "response_length", "truncated", "failures")      # all but the reward's own


def read_metrics(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]         # the last one may still be written


def table(run: Path) -> str:
    """Seconds of each stage (median, longest, in all, share of all steps), then speed and memory. A stage that ran inside
    another is counted in both, validation before the first step and the last checkpoint in no step: so shares need not add
    up."""
    lines = read_metrics(run)
    steps = [line for line in lines if "timing/step" in line]
    total = sum(line["timing/step"] for line in steps)
    texts = [f"{'stage':<26}{'median [s]':>12}{'longest [s]':>12}{'in all [s]':>12}{'share':>8}{'steps':>7}"]
    stages = dict.fromkeys(name for line in lines for name in line if name.startswith("timing/"))
    for name in sorted(stages, key=lambda name: -sum(line.get(name, 0.0) for line in lines)):
        seconds = [line[name] for line in lines if name in line]
        texts.append(f"{name.removeprefix('timing/'):<26}{median(seconds):>12.4f}{max(seconds):>12.4f}{sum(seconds):>12.2f}"
                     f"{sum(seconds) / total if total else math.nan:>8.1%}{len(seconds):>7}")
    for name, unit in (("perf/tokens_per_second", "tokens/s a device"), ("perf/mfu", "MFU"),
                       ("perf/memory_peak_gib", "GiB, peak"), ("perf/memory_training_gib", "GiB in use, training"),
                       ("perf/memory_asleep_gib", "GiB in use, vLLM asleep")):
        values = [line[name] for line in steps if line.get(name) is not None]
        if values:
            texts.append(f"{unit:<26}{median(values):>12.4g}{max(values):>12.4g}")
    return "\n".join(texts)


def write_report(run: Path) -> Path:
    """Draw RUN/report.png, a panel for each group of metrics that the run has and the time by stage, and write the table
    to RUN/report.txt. Returns the path of the picture."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    (run / "report.txt").write_text(table(run) + "\n")
    lines = read_metrics(run)
    present = {name for line in lines for name in line if line[name]}       # what is always 0 says nothing
    scores = sorted(n for n in present if n.startswith("val/") and n.split("/")[1] not in OTHER_VALIDATION)
    panels = [(title, [n for n in names if n in present]) for title, names in [*PANELS, ("validation score", scores)]]
    panels = [(title, names) for title, names in panels if names]
    steps = [line for line in lines if "timing/step" in line]
    visible = 0.01 * sum(line["timing/step"] for line in steps)
    stages = [n for n in sorted(present - {"timing/step"})
              if n.startswith("timing/") and sum(s.get(n, 0.0) for s in steps) > visible]
    columns = 4
    rows = max(1, -(-(len(panels) + bool(stages)) // columns))
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for axis, (title, names) in zip(flat, panels):
        for name in names:
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            axis.plot(*zip(*points), label=name, marker="o" if len(points) < 30 else None, markersize=3, linewidth=1.2)
        axis.set_title(title)
        if len(names) > 1:
            axis.legend(fontsize=8)
    used = len(panels)
    if stages:
        flat[used].stackplot([s["step"] for s in steps], [[s.get(n, 0.0) for s in steps] for n in stages],
                             labels=[n.removeprefix("timing/") for n in stages])
        flat[used].set_ylim(top=1.6 * max(sum(s.get(n, 0.0) for n in stages) for s in steps))      # room for the legend
        flat[used].set_title("time by stage [s]")
        flat[used].legend(fontsize=8, loc="upper right", ncols=2)
        used += 1
    for axis in flat[:used]:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    for axis in flat[used:]:
        axis.remove()
    figure.suptitle(str(run))
    figure.savefig(run / "report.png", dpi=100)
    pyplot.close(figure)
    return run / "report.png"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if not Path(sys.argv[1], "metrics.jsonl").exists():
        sys.exit(f"{sys.argv[1]} has no metrics.jsonl (yet)")
    print(table(Path(sys.argv[1])), write_report(Path(sys.argv[1])), sep="\n")
