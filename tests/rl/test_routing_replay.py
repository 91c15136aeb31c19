"""train_ppo.py with rollout.routing_replay: every way of drawing responses keeps their experts.

In fp32 and without learning, vLLM and the trainer choose the same experts, so that the share of
mismatches is 0 if every token has its own experts. It would be 0.98 for others.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from config import InputError
from data.prompts import Prompt
from engines.checkpoint.checkpointer import FILES
from examples.arithmetic import make_rows, make_tokenizer
from rollout.partial.groups import (
    Counters,
    OpenGroup,
    OpenGroups,
    OpenResponse,
    from_bytes,
    to_bytes,
)
from rollout.partial.ledger import Ledger
from rollout.partial.responses import PartialResponses, check_routes
from rollout.partial.resume import check_open_groups
from rollout.responses import Responses
from tests.support.launch import launch, metrics, run
from tests.support.models import make_model
from tests.support.samples import configure

BATCH_SIZE = 6
NUM_STEPS = 3
AGENT = """
import asyncio

async def converse(row, llm):
    messages = row["messages"][:1]
    for turn in range(3):
        reply = await llm.chat(messages)
        messages += [reply.message, {"role": "user", "content": "Go on, " * turn}]
        await asyncio.sleep(row["seconds"])
        if turn == 0 and int(row["answer"]) % 2:
            messages = messages[2:]
    return len(reply.content) % 2
"""
PARTIAL = [
    "rollout.partial.enable=true",
    "rollout.partial.oversample=1.6",
    "algorithm.rollout_is=token",
]
EPISODES = ["rollout.max_episode_tokens=200", "rollout.max_tokens=12", "rollout.episode_workers=1"]
REFERENCE = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1"]
ADAPTERS = ["model.lora.rank=4", "model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"]
MINI_BATCHES = [f"algorithm.ppo_mini_batch_size={BATCH_SIZE // 2}"]
RUNS = {
    "plain": (1, []),
    "critic": (2, ["algorithm.adv_estimator=gae", *REFERENCE, *MINI_BATCHES]),
    "adapters": (1, [*ADAPTERS, "model.lora.merge=true", *REFERENCE]),
    "partial": (1, PARTIAL),
    "episodes": (1, EPISODES),
    "partial episodes": (1, EPISODES + PARTIAL),
    "megatron": (
        2,
        [
            "model_engine=megatron",
            "engine.tensor_model_parallel_size=2",
            "engine.recompute=full",
            *MINI_BATCHES,
        ],
    ),
    "vllm tp2": (2, ["rollout.tensor_parallel_size=2", "engine.context_parallel_size=2"]),
}
LARGEST_GAP = 1e-5  # measured: 5e-7 nats


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A model whose responses have 1 to 40 tokens, since one token in ten ends them."""
    directory = tmp_path_factory.mktemp("routing_replay")
    tokenizer = make_tokenizer()
    vocab_size = len(tokenizer)
    shape = {"vocab_size": vocab_size, "eos_token_id": tokenizer.eos_token_id}
    # vLLM divides experts of a multiple of 32 neurons for each of its ranks.
    make_model(directory / "model", "qwen3_moe", moe_intermediate_size=64, **shape)
    tokenizer.save_pretrained(directory / "model")
    end_ids = list(range(tokenizer.eos_token_id % 10, vocab_size, 10))
    generation = {"eos_token_id": end_ids}
    (directory / "model" / "generation_config.json").write_text(json.dumps(generation))
    (directory / "agent.py").write_text(AGENT)
    (directory / "reward.py").write_text("def score(response):\n    return len(response) % 2\n")
    rows = make_rows()[0][: BATCH_SIZE * NUM_STEPS]
    for i, row in enumerate(rows):
        row["seconds"] = 0.3 if i % 3 == 0 else 0.0
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_token_has_its_experts(assets, tmp_path, name):
    num_ranks, settings = RUNS[name]
    out = tmp_path / "run"
    arguments = [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        "trainer.report=false",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        f"data.train_batch_size={BATCH_SIZE}",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=400",
        "rollout.routing_replay=true",
        "rollout.n=2",
        "rollout.max_tokens=40",
        "rollout.kv_cache_gib=0.05",
        "optim.lr=0",
        f"trainer.total_steps={NUM_STEPS}",
        "trainer.save_freq=-1",
    ]
    if "episodes" in name:
        arguments.append(f"rollout.episode={assets}/agent.py:converse")
    else:
        arguments += [f"reward.function={assets}/reward.py:score", "reward.num_workers=1"]
    launch(num_ranks, "train_ppo.py", *arguments, *settings)
    steps = metrics(out)
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step["rollout_corr/routing_mismatch"] == 0
        assert step["rollout_corr/log_prob_gap"] < LARGEST_GAP


@pytest.mark.slow
def test_a_dense_model_is_an_error_before_models_load(assets, tmp_path):
    make_model(tmp_path / "dense", "qwen3")
    command = [
        sys.executable,
        "train_ppo.py",
        f"model.path={tmp_path / 'dense'}",
        f"output_dir={tmp_path / 'run'}",
        "trainer.report=false",
        f"data.train_files={assets}/train.jsonl",
        f"reward.function={assets}/reward.py:score",
        "rollout.routing_replay=true",
    ]
    done = run(command, returncode=2)
    assert "rollout.routing_replay=true needs a mixture of experts" in done.stderr


def open_response(with_routes: bool) -> OpenResponse:
    response = OpenResponse(seed=5)
    tokens = np.arange(3, dtype=np.int32)
    response.append(tokens, np.zeros(3, np.float32), None, version=0)
    if with_routes:
        response.read(np.arange(5 * 2 * 2, dtype=np.int16).reshape(5, 2, 2))
    return response


def test_carried_responses_keep_their_experts_in_a_checkpoint():
    responses = [OpenResponse(seed=1), open_response(True), open_response(True)]
    content = to_bytes([OpenGroup(0, 0, responses)], Counters(1, 0))
    _, (group,) = from_bytes(content)
    assert group.responses[0].routes is None
    for response in group.responses[1:]:
        assert response.routes.dtype == np.int16
        np.testing.assert_array_equal(response.routes, responses[1].routes)


def make_sampler(*settings: str) -> PartialResponses:
    """Make the part of a sampler that keeps responses, on one replica."""
    rollout = SimpleNamespace(vocab_size=50, num_replicas=1, replica=0)
    return PartialResponses(
        sampler=SimpleNamespace(rollout=rollout),
        ledger=Ledger(num_replicas=1, oversample=1.0, limit=None),
        dataset=None,
        rows_of_batch=None,
        config=configure(*settings),
        open=OpenGroups(max_staleness=1, finishes_old=True),
        continuing=None,
    )


def test_experts_are_divided_over_responses_that_continue():
    """The first response has three tokens already. They are read again, and belong to it."""
    running = [open_response(True), OpenResponse(seed=1)]
    prompts = [Prompt([11, 12], "", {}), Prompt([21, 22, 23], "", {})]
    new = Responses(2, 4, 0)
    zeros = np.zeros((2, 1))
    new.extend(0, zeros[:1], zeros[:1])
    new.extend(1, zeros, zeros)
    new.routes = np.arange(11).reshape(11, 1, 1)
    first, second = make_sampler().routes_of(prompts, running, new)
    assert first.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert second.flatten().tolist() == [6, 7, 8, 9, 10]


def load_responses(responses: list[OpenResponse], *settings: str) -> list[OpenResponse]:
    """Continue the only group of a checkpoint, on one replica; return its responses."""
    sampler = make_sampler(*settings)
    sampler.load_state([to_bytes([OpenGroup(0, 0, responses)], Counters(1, 0))])
    return sampler.open.groups[0].responses


@pytest.mark.parametrize("replays", [False, True])
def test_a_checkpoint_goes_on_with_the_experts_that_it_needs(replays):
    settings = [f"rollout.routing_replay={str(replays).lower()}"]
    (response,) = load_responses([open_response(True)], *settings)
    assert (response.routes is not None) == replays


@pytest.mark.parametrize(
    "setting, message",
    [
        ("rollout.routing_replay=true", "drawn without it: set rollout.routing_replay=false"),
        ("rollout.max_tokens=2", "rollout.max_tokens=2, but the checkpoint has responses"),
        ("rollout.top_k=4", "rollout.top_k=4, but the checkpoint has responses"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_settings_is_rejected(tmp_path, setting, message):
    """Before any model is loaded, and also by those who load the responses."""
    responses = [open_response(False)]
    with pytest.raises(InputError, match=message):
        load_responses(responses, setting)
    (tmp_path / FILES).mkdir()
    content = to_bytes([OpenGroup(0, 0, responses)], Counters(1, 0))
    (tmp_path / FILES / "open_responses_00000.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=message):
        check_open_groups(configure("rollout.partial.enable=true", setting), tmp_path, 50)


def test_carried_responses_without_experts_cannot_be_replayed():
    group = OpenGroup(0, 0, [OpenResponse(seed=1), open_response(False)])
    with pytest.raises(InputError, match="drawn without it: set rollout.routing_replay=false"):
        check_routes([group], OmegaConf.create({"routing_replay": True}))
    group = OpenGroup(0, 0, [open_response(True)])
    check_routes([group], OmegaConf.create({"routing_replay": False}))
    assert group.responses[0].routes is None
