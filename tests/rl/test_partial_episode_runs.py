"""train_ppo.py with episodes that continue in the next step, and validations in between."""

import json
import sys

import pytest

from examples.arithmetic import make_rows, make_tokenizer
from tests.support.launch import checkpoints, kill_all, launch, metrics, run, start, wait_for
from tests.support.models import make_model

pytestmark = pytest.mark.slow

BATCH_SIZE = 4
GROUP_SIZE = 2
NUM_STEPS = 4
# Every third question has a slow tool, so that the others are trained before it.
AGENT = """
import asyncio
from pathlib import Path

async def converse(row, llm):
    messages = row["messages"][:1]
    printable = 0
    for turn in range(3):
        reply = await llm.chat(messages)
        printable += sum(c.isascii() and c.isprintable() for c in reply.content)
        messages += [reply.message, {"role": "user", "content": "Go on."}]
        await asyncio.sleep(row["seconds"])
    return printable / 36
"""
PARTIAL = [
    "rollout.partial.enable=true",
    "rollout.partial.oversample=1.6",
    "algorithm.rollout_is=token",
]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A model whose turns have 1 to 12 tokens, an agent, and prompts."""
    directory = tmp_path_factory.mktemp("partial_episodes")
    tokenizer = make_tokenizer()
    shape = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    # vLLM has no attention on CPUs for heads of less than 32 numbers.
    make_model(directory / "model", "qwen3", num_hidden_layers=2, head_dim=32, **shape)
    tokenizer.save_pretrained(directory / "model")
    (directory / "agent.py").write_text(AGENT)
    train, val = make_rows()
    for name, rows in (("train", train[: BATCH_SIZE * NUM_STEPS]), ("val", val[:2])):
        for i, row in enumerate(rows):
            row["seconds"] = 0.4 if i % 3 == 0 else 0.0
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def arguments(assets, out, *more):
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        "trainer.report=false",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        f"data.train_batch_size={BATCH_SIZE}",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=400",
        f"rollout.episode={assets}/agent.py:converse",
        f"rollout.n={GROUP_SIZE}",
        "rollout.max_tokens=12",
        "rollout.max_episode_tokens=160",
        "rollout.episode_workers=1",
        "rollout.kv_cache_gib=0.05",
        "optim.lr=0",
        f"trainer.total_steps={NUM_STEPS}",
        "trainer.rollout_freq=1",
        "trainer.save_freq=-1",
        *more,
    ]


def samples(out, folder="rollouts", name="step_*") -> list[dict]:
    lines = []
    for file in sorted((out / folder).glob(f"{name}.jsonl")):
        lines += [json.loads(line) for line in file.read_text().splitlines()]
    return lines


def texts(out) -> dict[str, list[str]]:
    """Return the episodes of every prompt of a run."""
    episodes: dict[str, list[str]] = {}
    for sample in samples(out):
        episodes.setdefault(sample["prompt"], []).append(sample["response"])
    return {prompt: sorted(own) for prompt, own in episodes.items()}


@pytest.fixture(scope="module")
def plain(assets, tmp_path_factory):
    """A run with a learning rate of 0, in which no episode continues."""
    out = tmp_path_factory.mktemp("plain")
    run([sys.executable, "train_ppo.py", *arguments(assets, out)])
    return out


VALIDATION = ["trainer.test_freq=1", "trainer.val_before_train=false"]


@pytest.mark.parametrize(
    "num_ranks, settings",
    [(1, VALIDATION), (2, []), (2, ["rollout.tensor_parallel_size=2"])],
    ids=["validation", "two replicas", "tp"],
)
def test_with_the_same_weights_the_episodes_are_the_same(
    assets, tmp_path, plain, num_ranks, settings
):
    if VALIDATION == settings:
        settings = [*VALIDATION, f"data.val_files={assets}/val.jsonl"]
    launch(num_ranks, "train_ppo.py", *arguments(assets, tmp_path, *PARTIAL, *settings))
    lines = metrics(tmp_path)
    assert len(lines) == NUM_STEPS
    assert all(line["partial/carried_groups"] > 0 for line in lines[:-1])
    assert lines[-1]["partial/carried_groups"] == 0
    assert max(line["partial/age_1/tokens"] for line in lines) > 0.1
    # A step may have no token of the current weights, and then it has no gap.
    gaps = [line.get("rollout_corr/log_prob_gap") for line in lines]
    assert max(gap for gap in gaps if gap is not None) < 1e-5
    assert texts(tmp_path) == texts(plain)
    if VALIDATION[0] in settings:
        first, *later = [validated(tmp_path, step) for step in range(1, NUM_STEPS + 1)]
        assert len(first) > 0
        assert all(episodes == first for episodes in later)


def validated(out, step: int) -> list[str]:
    return [sample["response"] for sample in samples(out, "validation", f"step_{step}")]


def test_a_run_that_is_killed_plays_episodes_that_continue_from_their_beginning(
    assets, tmp_path, plain
):
    """vLLM swaps an adapter between two parts of an episode."""
    lora = ["model.lora.rank=4", "model.lora.alpha=8"]
    settings = arguments(assets, tmp_path, *PARTIAL, *lora, "trainer.save_freq=1")
    command = [sys.executable, "train_ppo.py", *settings]
    process = start(command, tmp_path / "log")
    checkpoint = tmp_path / "checkpoints" / "step_00000002"
    wait_for(checkpoint.exists, process)
    kill_all(process)
    num_steps_before = int(checkpoints(tmp_path)[-1].removeprefix("step_"))
    assert num_steps_before < NUM_STEPS
    run(command)
    lines = metrics(tmp_path)
    assert len(lines) == NUM_STEPS
    assert lines[num_steps_before - 1]["partial/carried_groups"] > 0
    resumed = lines[num_steps_before]
    assert resumed["partial/age_0/tokens"] == pytest.approx(1), "nothing is older"
    assert texts(tmp_path) == texts(plain)
