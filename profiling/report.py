"""One picture of a run, from its metrics.jsonl:  python -m profiling.report RUN"""

import json
import sys
from pathlib import Path

PANELS = [("loss", ["train/loss", "val/loss"]), ("score of a response", ["critic/score/mean"]),
          ("exact match", ["val/exact_match"]), ("response length [tokens]", ["response_length/mean"]),
          ("cut off at max_tokens", ["response_length/clip_ratio"]), ("entropy [nats]", ["actor/entropy"]),
          ("KL to the reference [nats]", ["actor/kl_loss", "actor/reward_kl"]),
          ("KL of an update [nats]", ["actor/ppo_kl"]), ("clipped share of tokens", ["actor/pg_clipfrac", "critic/vf_clipfrac"]),
          ("vLLM and trainer: gap of log p", ["rollout_corr/log_prob_gap"]),
          ("explained variance of values", ["critic/vf_explained_var"]),
          ("gradient norm", ["train/grad_norm", "actor/grad_norm", "critic/grad_norm"]),
          ("learning rate", ["train/lr", "actor/lr", "critic/lr"]), ("tokens/s a device", ["perf/tokens_per_second"]), ("MFU", ["perf/mfu"]),
          ("memory, peak [GiB]", ["perf/memory_peak_gib"])]


def write_report(run: Path) -> Path:
    """Draw RUN/report.png: a panel for each group of metrics that the run has, and the time by stage."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    present = {name for line in lines for name in line if line[name]}       # what is always 0 says nothing
    panels = [(title, [n for n in names if n in present]) for title, names in PANELS]
    panels = [(title, names) for title, names in panels if names]
    stages = sorted(n for n in present if n.startswith("timing/") and n != "timing/step")
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
        steps = [line for line in lines if "timing/step" in line]
        flat[used].stackplot([s["step"] for s in steps], [[s.get(n, 0.0) for s in steps] for n in stages],
                             labels=[n.removeprefix("timing/") for n in stages])
        flat[used].set_title("time by stage [s]")
        flat[used].legend(fontsize=8, loc="upper right")
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
    print(write_report(Path(sys.argv[1])))
