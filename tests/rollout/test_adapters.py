"""vLLM with the trainer's adapters: merged, separate, and on weights that the trainer shares.

One launch of adapters_worker.py with one vLLM runs all cases for each of these and a layout.
"""

import json
from dataclasses import dataclass

import pytest

from config import InputError, load
from examples.arithmetic import make_tokenizer
from rollout.vllm.settings import check_rollout, check_vllm_model
from tests.rollout.adapters_worker import LAUNCHES, NUM_UPDATES
from tests.rollout.launches import ROLLOUT_BOUND
from tests.support.cases import launch_params, selected_launches
from tests.support.launch import launch, launch_each
from tests.support.models import make_model


@dataclass
class Result:
    """What a launch wrote down and printed.

    kind: "merged", "swapped" (separate), or "shared".
    """

    name: str
    numbers: dict
    stdout: str

    @property
    def kind(self) -> str:
        return self.name.partition("_")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    shape = {"vocab_size": len(make_tokenizer()), "eos_token_id": 257}
    make_model(folder / "qwen3", "qwen3", head_dim=32, **shape)
    small = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_model(folder / "tied", "qwen2_tied", **small, **shape)
    for family in ("gemma3 with images", "mistral3 with images"):
        make_model(folder / family, family, **shape)
    return folder


@pytest.fixture(scope="module")
def adapter_results(request, folder):
    def run(name):
        worker = "tests/rollout/adapters_worker.py"
        stdout = launch(LAUNCHES[name].ranks, worker, folder, name).stdout
        return Result(name, json.loads((folder / f"{name}.json").read_text()), stdout)

    return launch_each(selected_launches(request, LAUNCHES), run)


@pytest.fixture(params=launch_params(LAUNCHES))
def result(adapter_results, request) -> Result:
    return adapter_results(request.param)


@pytest.mark.slow
def test_log_probs_agree_after_every_update(result):
    updates = result.numbers["updates"]
    assert len(updates) == NUM_UPDATES + 1
    for update in updates:
        assert max(update["gap"]) < ROLLOUT_BOUND, updates
    # New adapters change nothing. Later ones do, so that stale ones in vLLM would be noticed.
    assert updates[0]["effect"] == 0
    for update in updates[1:]:
        assert update["effect"] > 1000 * ROLLOUT_BOUND


@pytest.mark.slow
def test_the_closed_batch_scheduler_gives_vllms_results(result):
    # Gemma's layers differ in their attention, so that vLLM's own scheduler makes every step.
    is_gemma = "gemma3" in LAUNCHES[result.name].family
    for update in result.numbers["updates"]:
        assert update["closed"] == (0.0 if is_gemma else 1.0)
        assert update["equals vLLM's scheduler"]


@pytest.mark.slow
def test_the_base_is_sent_once_or_never(result):
    expected = {"merged": NUM_UPDATES + 1, "swapped": 1, "shared": 0}[result.kind]
    assert result.numbers["base updates"] == expected
    is_sharing_reported = "share the frozen weights, which saves 0.000" in result.stdout
    assert is_sharing_reported == (result.kind == "shared")
    if result.kind == "shared":
        assert "vLLM has its own copy of the frozen weights" not in result.stdout
    obstacle = "rollout.share_base: rollout.tensor_parallel_size=2 divides vLLM's weights"
    assert (obstacle in result.stdout) == (result.name == "swapped_tp2")


@pytest.mark.slow
def test_calls_that_come_too_early_are_errors(result):
    protocol = dict(result.numbers["protocol"])
    too_early = {"generate asleep", "generate before the adapter", "cache before the adapter"}
    if result.kind != "merged":
        too_early.add("adapter asleep")
    assert too_early <= protocol.keys()
    for call, errors in protocol.items():
        for error in errors:
            assert (error is not None) == (call in too_early), (call, error)
    for _, message in protocol["generate asleep"]:
        assert "adapter not valid" in message or "base not valid" in message


@pytest.mark.slow
def test_the_probe_detects_a_difference_from_the_trainer(result):
    """Adapters applied twice or not at all, however small their effect, and another base."""
    traps = result.numbers["traps"]
    assert len(traps) == {"merged": 2, "swapped": 7, "shared": 6}[result.kind]
    for trap, errors in traps.items():
        for error in errors:
            if trap in ("tiny", "views"):  # these are right
                assert error is None, (trap, error)
                continue
            kind, message = error
            assert kind == "RuntimeError", (trap, error)
            if trap == "merged_base" and result.kind == "shared":
                assert "the trainer share the weights" in message, (trap, error)
            else:
                assert "vLLM's log-probabilities differ from the trainer's" in message, (
                    trap,
                    error,
                )


@pytest.mark.parametrize(
    "settings, ranks, message",
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
            "model_engine=megatron stores",
        ),
    ],
)
def test_settings_that_are_not_supported(folder, settings, ranks, message):
    model = f"model.path={folder / 'qwen3'}"
    config = load("ppo.yaml", [model, "data.train_files=unused", *settings.split()])
    with pytest.raises(InputError, match=message):
        check_rollout(config, ranks)


def test_a_rank_that_vllm_does_not_support(folder):
    model = f"model.path={folder / 'qwen3'}"
    config = load("ppo.yaml", [model, "data.train_files=unused", "model.lora.rank=513"])
    check_rollout(config, 1)
    with pytest.raises(InputError, match="model.lora.rank=513 is larger than vLLM supports"):
        check_vllm_model(config)
