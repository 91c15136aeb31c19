"""The experts that vLLM chose, as rollout.routing_replay records them."""

import json

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from config import InputError, load
from engines.model.routes import joined_parts, no_route, route_dtype
from rollout.vllm.routing import check_routing_replay, check_same_layers, describe_memory
from rollout.vllm.settings import check_rollout
from tests.support.launch import launch
from tests.support.models import GROUPED_EXPERTS, make_model, write_model

# 300 tokens of 6 prompts and short ones, in blocks of 16 tokens: vLLM preempts some requests.
SMALL_CACHE = "rollout.kv_cache_gib=0.0012"
LARGE_CACHE = "rollout.kv_cache_gib=0.1"
# On one H200, 5 choices of some 5,000 differed: fp32 products of vLLM and of the trainer round
# differently there. The experts of another token would differ in a large part of all choices.
SHARE_OF_TIES = 0.01 if torch.cuda.is_available() else 0
LAUNCHES = {
    "plain": (1, "moe", LARGE_CACHE),
    "preempted": (1, "moe", SMALL_CACHE),
    "tp2": (2, "moe", LARGE_CACHE, "rollout.tensor_parallel_size=2"),
    # Repetitive responses, whose drafts are accepted.
    "ngram": (1, "moe", LARGE_CACHE, "rollout.speculative=ngram", "rollout.temperature=0.05"),
    # Sigmoid scores with a bias, groups of experts, a shared expert, a first layer without experts,
    # and more experts than uint8 can number.
    "grouped": (1, "grouped", LARGE_CACHE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models of few tokens, so that n-grams repeat."""
    folder = tmp_path_factory.mktemp("routes")
    make_model(folder / "moe", "qwen3_moe", vocab_size=24, moe_intermediate_size=32)
    write_model(folder / "grouped", **{**GROUPED_EXPERTS, "n_routed_experts": 300})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_vllm_records_the_experts_of_every_token(folder, name):
    num_ranks, family, *settings = LAUNCHES[name]
    launch(num_ranks, "tests/rollout/routes_worker.py", folder, family, *settings)
    results = json.loads((folder / "routes.json").read_text())
    cases = {key: result for key, result in results.items() if isinstance(result, dict)}
    assert len(cases) == (4 if name == "ngram" else 6)
    for key, case in cases.items():
        assert case["missing"] == case["last"], key
        assert case["choices"] == case["expected_choices"], key
        assert case["mismatches"] <= SHARE_OF_TIES * case["choices"], key
        assert case["dtype"] == ("torch.int16" if family == "grouped" else "torch.uint8")
    assert (cases["closed"]["closed_batch"] > 0) == (name != "ngram")
    assert results["asleep"] is True
    assert results["kept"] == 0
    if name == "ngram":
        assert results["accepted"] > 50  # of 1,500 tokens
    else:
        assert cases["open"]["closed_batch"] == 0
        assert cases["continued"]["parts"] > 3


def test_a_part_keeps_its_experts():
    missing = no_route(route_dtype(8))
    first = np.array([[[1]], [[2]], [[missing]]], np.uint8)
    later = np.array([[[5]], [[6]], [[7]], [[missing]]], np.uint8)
    assert joined_parts(first, later)[:, 0, 0].tolist() == [1, 2, 7, missing]
    assert joined_parts(None, later) is later


def test_settings_that_cannot_be_replayed(tmp_path):
    make_model(tmp_path / "dense", "qwen3")
    make_model(tmp_path / "moe", "qwen3_moe")

    def problem(family: str, *settings: str) -> str:
        keys = [f"model.path={tmp_path / family}", "data.train_files=unused", *settings]
        config = load("ppo.yaml", ["rollout.routing_replay=true", *keys])
        with pytest.raises(InputError) as error:
            check_routing_replay(config)
        with pytest.raises(InputError):
            check_rollout(config, world_size=1)
        return str(error.value)

    assert "is qwen3, which has no experts: set rollout.routing_replay=false" in problem("dense")
    assert "set model.lora.merge=true" in problem("moe", "model.lora.rank=4")
    assert "model.images=true" in problem("moe", "model.images=true")


def test_vllm_and_the_trainer_have_experts_in_the_same_layers(tmp_path):
    make_model(tmp_path, "qwen3_moe")
    config = load("ppo.yaml", [f"model.path={tmp_path}", "data.train_files=unused"])
    check_same_layers(config, (3, 3))
    with pytest.raises(InputError, match="vLLM chooses 2 experts in 3 layers .* chooses 3 in 3"):
        check_same_layers(config, (3, 2))


def test_memory_is_described(tmp_path):
    make_model(tmp_path, "qwen3_moe")
    settings = ["data.train_batch_size=64", "rollout.n=16", "rollout.tensor_parallel_size=2"]
    keys = [f"model.path={tmp_path}", "data.train_files=unused", *settings]
    config = load("ppo.yaml", [*keys, "data.max_prompt_length=1000", "rollout.max_tokens=15000"])
    # 3 layers, 3 experts per token; 16,000 tokens of 1,024 responses, twice on one of two replicas
    # of two ranks, and once on one of the four ranks that train.
    gib = 9 * 16_000 * (1024 / 2 + 1024 / 4) / 2**30
    described = describe_memory(config, world_size=4)
    on_four_ranks = OmegaConf.merge(config, {"rollout": {"tensor_parallel_size": 4}})
    share_on_four_ranks = describe_memory(on_four_ranks, world_size=4).rpartition("next to")[2]
    assert described.startswith(f"routing replay: 9 bytes per token; at most {gib:.2f} GiB")
    # Keys and values of 3 layers, in bf16, with one of two heads of 32 numbers on each rank.
    assert f"next to the KV cache {9 / (2 * 3 * 32 * 2):.2%} of its size" in described
    assert described.endswith(share_on_four_ranks), "a rank has at least one head"
