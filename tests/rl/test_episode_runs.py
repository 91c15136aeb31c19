"""train_ppo.py with episodes: layouts agree, and a run that is killed loses nothing."""

import json
import sys

import pytest

from examples.arithmetic import make_rows, make_tokenizer
from tests.support.launch import kill_all, launch, metrics, run, start, wait_for
from tests.support.models import make_model

pytestmark = pytest.mark.slow

# Every call is noted in a file, so that a test can see how far an episode is.
AGENT = """
import os
from pathlib import Path

async def converse(row, llm):
    messages = row["messages"][:1]
    printable = 0
    for turn in range(3):
        reply = await llm.chat(messages)
        with open(Path(__file__).with_name("calls"), "a") as file:
            file.write("x")
        printable += sum(c.isascii() and c.isprintable() for c in reply.content)
        await llm.reward(0.01 * turn)
        messages += [reply.message, {"role": "user", "content": "Go on."}]
        if turn == 0 and int(row["answer"]) % 2:
            messages = messages[2:]
    return {"printable": printable / 36, "turns": 0.0}
"""
CALLS_PER_STEP = 8 * 2 * 3


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A model, an agent, and prompts: 32 to train on, 4 to validate on."""
    directory = tmp_path_factory.mktemp("episodes")
    tokenizer = make_tokenizer()
    shape = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    # vLLM has no attention on CPUs for heads of less than 32 numbers.
    make_model(directory / "model", "qwen3", num_hidden_layers=2, head_dim=32, **shape)
    tokenizer.save_pretrained(directory / "model")
    (directory / "agent.py").write_text(AGENT)
    train, val = make_rows()
    for name, rows in (("train", train[:32]), ("val", val[:4])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def arguments(assets, out, *more):
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"data.val_files={assets}/val.jsonl",
        f"output_dir={out}",
        "trainer.report=false",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=400",
        f"rollout.episode={assets}/agent.py:converse",
        "rollout.n=2",
        "rollout.max_tokens=12",
        "rollout.max_episode_tokens=160",
        "rollout.episode_workers=1",
        "rollout.kv_cache_gib=0.05",
        "optim.lr=3e-3",
        "trainer.total_steps=4",
        *more,
    ]


def learned(out) -> list[dict]:
    """Return the metrics of every step that do not depend on how long something took."""
    return [without_times(line) for line in metrics(out)]


def without_times(line: dict) -> dict:
    unstable = ("timing/", "perf/", "episodes/vllm_idle")
    return {name: value for name, value in line.items() if not name.startswith(unstable)}


@pytest.fixture(scope="module")
def undisturbed(assets, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    run([sys.executable, "train_ppo.py", *arguments(assets, out)])
    return out


def test_a_run_learns_from_episodes(undisturbed):
    lines = learned(undisturbed)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines[1:]:
        assert line["episodes/turns/mean"] == 3
        assert line["episodes/branches/max"] == 2
        assert 0 < line["episodes/branched"] < 1
        assert line["reward/printable/mean"] > 0
        assert line["score/mean"] == pytest.approx(line["reward/printable/mean"] + 0.03)
        assert line["actor/grad_norm"] > 0
        assert line["rollout_corr/log_prob_gap"] < 1e-5
        assert line["rollout/closed_batch"] > 0.9, "the fast scheduler is not used"
    assert "val/converse" in lines[0]


def test_samples_are_written_with_their_conversations(undisturbed):
    lines = (undisturbed / "rollouts" / "step_1.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    last_of_episode = [line for line in samples if line["branch"] == line["num_branches"] - 1]
    assert len(last_of_episode) == 16
    for line in last_of_episode:
        roles = [message["role"] for message in line["messages"]]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert line["turns"] == 3


def test_a_run_killed_while_episodes_are_played_resumes_to_the_last_bit(
    assets, tmp_path, undisturbed
):
    calls = assets / "calls"
    calls.unlink(missing_ok=True)
    command = [sys.executable, "train_ppo.py", *arguments(assets, tmp_path, "trainer.save_freq=1")]
    process = start(command, tmp_path / "log")
    # The validation before the first step has a turn of its own for each of 4 rows x 3.
    middle_of_third_step = 12 + 2.5 * CALLS_PER_STEP
    wait_for(lambda: calls.exists() and calls.stat().st_size > middle_of_third_step, process)
    kill_all(process)
    run(command)
    assert learned(tmp_path) == learned(undisturbed)


@pytest.mark.parametrize(
    "num_ranks, settings",
    [
        (1, ["model.lora.rank=4", "model.lora.alpha=8"]),
        (
            2,
            [
                "model_engine=megatron",
                "engine.tensor_model_parallel_size=2",
                "rollout.tensor_parallel_size=2",
            ],
        ),
    ],
    ids=["LoRA", "Megatron"],
)
def test_other_layouts_draw_the_same_episodes_at_first(
    assets, tmp_path, undisturbed, num_ranks, settings
):
    """They learn the same, too, up to rounding; LoRA learns something else."""
    launch(
        num_ranks, "train_ppo.py", *arguments(assets, tmp_path, "trainer.total_steps=2", *settings)
    )
    first = learned(tmp_path)[1]
    expected = learned(undisturbed)[1]
    assert first["score/mean"] == pytest.approx(expected["score/mean"])
    assert first["response_length/mean"] == expected["response_length/mean"]
    if "model.lora.rank=4" not in settings:
        assert first["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
