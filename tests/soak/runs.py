"""The runs of the soak test, and what a run must leave behind whatever happens to it."""

import json
import re
from pathlib import Path

from engines.checkpoint.checkpointer import checkpoints
from examples.arithmetic import make_rows, make_tokenizer
from tests.support.launch import metrics
from tests.support.models import make_model

NUM_TRAIN_ROWS = 2000
NUM_VAL_ROWS = 16
CLOCK_METRICS = ("timing/", "perf/")
REWARD = """
def coin(prompt, response, row):
    if "Q" in response:
        raise ValueError("no Q, please")
    return float(sum(response.encode()) % 2)
"""


def make_assets(directory: Path) -> None:
    """Write tiny models with a tokenizer, training and validation rows, and a reward.

    The models are `model`, `teacher` and `experts`, a mixture of experts.
    """
    write_model(directory / "model", "qwen3", num_hidden_layers=2, head_dim=32)
    write_model(directory / "teacher", "llama", num_hidden_layers=2, hidden_size=48)
    # vLLM needs experts of a multiple of 32 neurons.
    write_model(directory / "experts", "qwen3_moe", num_hidden_layers=2, moe_intermediate_size=64)
    (directory / "reward.py").write_text(REWARD)
    train, val = make_rows()
    write_rows(directory / "train.jsonl", train[:NUM_TRAIN_ROWS])
    write_rows(directory / "val.jsonl", val[:NUM_VAL_ROWS])


def write_model(directory: Path, family: str, **shape) -> None:
    """Write a model with the demo's tokenizer, whose responses differ in length."""
    tokenizer = make_tokenizer()
    eos = tokenizer.eos_token_id
    make_model(directory, family, vocab_size=len(tokenizer), eos_token_id=eos, **shape)
    tokenizer.save_pretrained(directory)
    # Many tokens end a response.
    generation = {"eos_token_id": list(range(eos, len(tokenizer), 10))}
    (directory / "generation_config.json").write_text(json.dumps(generation))


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sft(assets: Path, out: Path) -> list[str]:
    """Return the command of an SFT run.

    The run has a token cache of its own, so that it can be killed while it tokenizes.
    """
    return [
        "train_sft.py",
        *paths(assets, out),
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_tokens_per_micro_batch=128",
        "optim.lr=3e-3",
        "trainer.total_steps=30",
        "trainer.save_freq=5",
        "trainer.test_freq=7",
    ]


def megatron(assets: Path, out: Path) -> list[str]:
    """Return the command of an SFT run that saves tensor-parallel shards in the background."""
    return [
        *sft(assets, out),
        "model_engine=megatron",
        "engine.tensor_model_parallel_size=2",
        "trainer.async_save=true",
    ]


def ppo(assets: Path, out: Path) -> list[str]:
    """Return the command of a PPO run that uses everything a resume has to restore.

    That is a critic, an adaptive KL coefficient, prompts that are drawn again, and failures.
    """
    return [
        "train_ppo.py",
        *paths(assets, out),
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=200",
        "rollout.n=2",
        "rollout.max_tokens=12",
        "validation.max_tokens=12",
        "rollout.kv_cache_gib=0.05",
        "optim.lr=3e-3",
        f"reward.function={assets}/reward.py:coin",
        "reward.num_workers=1",
        "reward.max_failure_rate=0.5",
        "algorithm.adv_estimator=gae",
        "critic.lr=1e-3",
        "critic.warmup_steps=1",
        "algorithm.filter_groups.enable=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.kl_ctrl.horizon=50",
        "algorithm.kl_ctrl.target_kl=0.02",
        "trainer.total_steps=12",
        "trainer.save_freq=2",
        "trainer.test_freq=5",
        "trainer.async_save=true",
        "trainer.rollout_freq=1",
    ]


def partial(assets: Path, out: Path) -> list[str]:
    """Return the command of a PPO run whose responses continue in later steps."""
    return [
        *ppo(assets, out),
        "rollout.max_tokens=40",
        "data.max_tokens_per_micro_batch=400",
        "rollout.partial.enable=true",
        "rollout.partial.oversample=1.75",
        "rollout.partial.max_staleness=2",
        "algorithm.rollout_is=token",
    ]


def distill(assets: Path, out: Path) -> list[str]:
    """Return the command of a PPO run that also learns from a teacher."""
    return [*ppo(assets, out), f"algorithm.distill.teacher={assets}/teacher"]


def replay(assets: Path, out: Path) -> list[str]:
    """Return the command of a PPO run that replays vLLM's experts, also those of earlier steps."""
    return [*partial(assets, out), f"model.path={assets}/experts", "rollout.routing_replay=true"]


def paths(assets: Path, out: Path) -> list[str]:
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"data.val_files={assets}/val.jsonl",
        f"data.cache_dir={out.parent}/cache",
        f"output_dir={out}",
    ]


RUNS = {
    "sft": sft,
    "ppo": ppo,
    "partial": partial,
    "distill": distill,
    "replay": replay,
    "megatron": megatron,
}


def last_step(out: Path) -> int:
    """Return the last step with a complete line in metrics.jsonl, or 0."""
    file = out / "metrics.jsonl"
    if not file.exists():
        return 0
    lines = file.read_bytes().splitlines(keepends=True)
    complete = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return max((line["step"] for line in complete), default=0)


def newest_checkpoint(out: Path) -> int:
    """Return the step of the newest checkpoint, or 0."""
    names = [path.name for path in checkpoints(out / "checkpoints")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def first_step_of(log: Path) -> int | None:
    """Return the step from which a run says that it starts or resumes, or None."""
    text = log.read_text(errors="replace")
    started = re.search(r"(?:resuming from \S+|starting): step (\d+) of", text)
    return int(started[1]) if started else None


def results_of(out: Path) -> dict[str, object]:
    """Return what a run must leave: its metrics by step without clock times, and its files."""
    results: dict[str, object] = {}
    for line in metrics(out):
        name = f"metrics of step {line['step']}"
        without_clock = {k: v for k, v in line.items() if not k.startswith(CLOCK_METRICS)}
        results[name] = "written twice" if name in results else without_clock
    files = list(out.glob("failures.jsonl"))
    for folder in ("hf", "rollouts", "validation"):
        files += [path for path in (out / folder).rglob("*") if path.is_file()]
    for path in files:
        results[str(path.relative_to(out))] = path.read_bytes()
    checkpoint = out / "checkpoints" / (out / "checkpoints" / "latest").read_text().strip()
    progress = json.loads((checkpoint / "trainer.json").read_text())
    del progress["checksums"]
    results["trainer.json"] = progress
    return results


def differences(out: Path, expected: dict[str, object], stopped: set[int]) -> list[str]:
    """Describe how a run's results differ from those of an undisturbed run.

    Args:
        stopped: steps after which a signal stopped the run; it skips validation there.
    """
    results = results_of(out)
    for step in stopped:
        expected = without_validation(expected, results, step)
    messages = []
    for name in sorted(results.keys() | expected.keys()):
        if name not in results:
            messages.append(f"{name} is missing")
        elif name not in expected:
            messages.append(f"{name} is unexpected")
        elif results[name] != expected[name]:
            messages.append(f"{name} differs{differing_keys(results[name], expected[name])}")
    unfinished = []
    for folder in (out, out / "checkpoints", out.parent / "cache"):
        unfinished += folder.glob("*.tmp")
    messages += [f"{path.relative_to(out.parent)} is left over" for path in unfinished]
    return messages


def without_validation(
    expected: dict[str, object], results: dict[str, object], step: int
) -> dict[str, object]:
    """Remove a step's validation from the expected results if the run has none for it."""
    name = f"metrics of step {step}"
    if name not in results or any(key.startswith("val/") for key in results[name]):
        return expected
    changed = dict(expected)
    changed[name] = {k: v for k, v in expected[name].items() if not k.startswith("val/")}
    changed.pop(f"validation/step_{step}.jsonl", None)
    return changed


def differing_keys(result: object, expected: object) -> str:
    """Describe which keys of two dictionaries differ; nothing is said about files."""
    if not isinstance(result, dict):
        return ""
    keys = sorted(result.keys() | expected.keys())
    changed = [key for key in keys if result.get(key) != expected.get(key)]
    texts = [f", {key}: {result.get(key)} instead of {expected.get(key)}" for key in changed]
    return "".join(texts)
