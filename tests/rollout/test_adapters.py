"""vLLM with the trainer's adapters: merged, swapped in memory, and on weights that are the trainer's own.

One launch of adapters_worker.py, with one vLLM, for each way and layout runs all its cases; they are judged here.
"""

import json

import pytest

from config import InputError, load
from examples.arithmetic import make_tokenizer
from rollout.vllm.settings import check_rollout, check_vllm_model
from tests.rollout.adapters_worker import LAUNCHES, NUM_UPDATES
from tests.rollout.test_rollout import ROLLOUT_BOUND
from tests.support.launch import launch, launch_each
from tests.support.models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, shape = (
        tmp_path_factory.mktemp("adapters"),
        dict(vocab_size=len(make_tokenizer()), eos_token_id=257),
    )
    make_model(folder / "qwen3", "qwen3", head_dim=32, **shape)
    make_model(
        folder / "tied",
        "qwen2_tied",
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        **shape,
    )
    for family in ("gemma3 with images", "mistral3 with images"):
        make_model(folder / family, family, **shape)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """name of a launch -> what it wrote down, and what it said"""

    def run(name):
        said = launch(LAUNCHES[name].ranks, "tests/rollout/adapters_worker.py", folder, name).stdout
        return json.loads((folder / f"{name}.json").read_text()), said

    return launch_each(LAUNCHES, run)


@pytest.fixture(params=LAUNCHES)
def name(request):
    return request.param


def test_log_probs_agree_after_every_update(results, name):
    updates = results(name)[0]["updates"]
    assert len(updates) == NUM_UPDATES + 1
    assert all(gap < ROLLOUT_BOUND for update in updates for gap in update["gap"]), updates
    # New adapters change nothing; after that, vLLM with stale ones would be seen.
    assert updates[0]["effect"] == 0 and all(
        update["effect"] > 1000 * ROLLOUT_BOUND for update in updates[1:]
    )
    # Of Gemma, whose layers differ in their attention, every batch is vLLM's own.
    assert {update["closed"] for update in updates} == {
        0.0 if "gemma3" in LAUNCHES[name].family else 1.0
    }
    assert all(update["as vLLM's"] for update in updates)


def test_the_base_is_sent_once_or_never(results, name):
    way = name.partition("_")[0]
    assert (
        results(name)[0]["base updates"]
        == {"merged": NUM_UPDATES + 1, "swapped": 1, "shared": 0}[way]
    )
    said = results(name)[1]
    assert ("share the frozen weights, which saves 0.000" in said) == (way == "shared")
    assert (
        "rollout.share_base: rollout.tensor_parallel_size=2 divides vLLM's weights" in said
    ) == (name == "swapped_tp2")


def test_calls_that_come_too_early_are_errors(results, name):
    said = dict(results(name)[0]["protocol"])
    early = {
        "generate asleep",
        "generate before the adapter",
        "cache before the adapter",
        "adapter asleep",
    } & said.keys()
    assert len(early) == 3 + (name.partition("_")[0] != "merged")
    for what, errors in said.items():
        assert all((error is not None) == (what in early) for error in errors), (what, errors)
    assert all(
        "adapter not valid" in error[1] or "base not valid" in error[1]
        for error in said["generate asleep"]
    )


def test_the_probe_stops_what_is_not_the_trainers(results, name):
    """Adapters applied twice, or not at all, however little they change, and another base; and nothing else."""
    traps = results(name)[0]["traps"]
    assert len(traps) == {"merged": 2, "swapped": 7, "shared": 6}[name.partition("_")[0]]
    for trap, errors in traps.items():
        for error in errors:
            if trap in ("tiny", "views"):
                assert error is None, error
            elif trap == "merged_base" and name.startswith("shared"):
                assert "the trainer's own" in error[1], error
            else:
                assert (
                    error[0] == "RuntimeError"
                    and "vLLM does not compute what the trainer does" in error[1]
                ), (trap, error)


@pytest.mark.parametrize(
    "more, ranks, said",
    [
        ("rollout.share_base=always", 1, "does nothing without model.lora.rank"),
        (
            "model.lora.rank=8 model.lora.merge=true rollout.share_base=never",
            1,
            "does nothing without model.lora.rank",
        ),
        (
            "model.lora.rank=8 rollout.share_base=always rollout.tensor_parallel_size=2",
            2,
            "tensor_parallel_size=2 divides",
        ),
        ("model.lora.rank=8 rollout.share_base=always", 2, "engine.fsdp_size=1"),
        (
            "model.lora.rank=8 rollout.share_base=always model_engine=megatron",
            1,
            "model_engine=megatron keeps",
        ),
        ("model.lora.rank=513", 1, "model.lora.rank=513 is larger than vLLM's largest, 512"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(folder, more, ranks, said):
    config = load(
        "ppo.yaml", [f"model.path={folder / 'qwen3'}", "data.train_files=unused", *more.split()]
    )
    with pytest.raises(InputError, match=said):
        check_rollout(config, ranks)
        check_vllm_model(config)
