"""Settings, a small profiled loop and dumps for the tests of the profiler."""

import json
from collections import Counter
from types import SimpleNamespace

import torch

from config import load
from job import setup as job

CPU = torch.device("cpu")


MODEL_STAGES = [
    "actor_compute_log_prob",
    "ref_compute_log_prob",
    "compute_values",
    "critic_update",
    "actor_update",
]


ON = "trainer.profile_interval=[1,2]"


PROBE = "profiler.tool=msprobe"


def configure(*overrides):
    return load("sft.yaml", ["model.path=unused", "data.train_files=unused", *overrides])


def profile(directory, steps, *overrides, work=None):
    """Profile steps of three stages.

    Returns how often each stage ran, and the metrics of the last step.
    """
    config = configure(f"output_dir={directory}", *overrides)
    ran = Counter()
    results = {}
    profiler = job.start_profiler(config, CPU, 10, ["train_batch"])
    try:
        for step in steps:
            profiler.begin_step(step)
            with profiler.stage("data"):
                ran["data"] += 1
            with profiler.stage("train_batch"):
                ran["train_batch"] += 1
                with profiler.stage("inside"):
                    torch.ones(8, 8) @ torch.ones(8, 8)
                    if work:
                        work(step)
            results = profiler.end_step()
    finally:
        profiler.close()
    return ran, results


def recorded(directory):
    """Return the names of the events in each trace, by the trace's path."""
    profile_directory = directory / "profile"
    events_of_trace = {}
    for path in profile_directory.rglob("*.json"):
        events = json.loads(path.read_text())["traceEvents"]
        name = str(path.relative_to(profile_directory))
        events_of_trace[name] = {event.get("name") for event in events}
    return events_of_trace


def read_dump(run, step, stage, rank=0):
    return json.loads(
        (run / f"profile/step_{step}/{stage}/step{step}/rank{rank}/dump.json").read_text()
    )["data"]


def dumping(directory, *overrides):
    config = configure(
        f"output_dir={directory}", "trainer.profile_interval=[1,9]", PROBE, *overrides
    )
    return job.start_profiler(config, CPU, 9, ["train_batch", "validate"])


def linear():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    return model, SimpleNamespace(modules=lambda: [model], coordinates=dict, padding=lambda: None)


def arguments(assets, out, *overrides):
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_tokens_per_micro_batch=128",
        "optim.lr=3e-3",
        *overrides,
    ]
