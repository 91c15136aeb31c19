"""What vLLM is told about models and requests, and the settings that it would reject."""

import json
import re
import shutil
import sys

import pytest

from config import InputError, load
from engines.check import is_supported_by_vllm
from rollout.vllm.sampling import find_stop_token_ids, request_seed
from rollout.vllm.settings import check_rollout, check_vllm_model
from rollout.vllm.weight_names import vllm_weight_names
from tests.rollout.launches import END_TOKENS
from tests.support.models import make_model, make_ocr_model


def make_config(path, *settings: str):
    return load("ppo.yaml", [f"model.path={path}", "data.train_files=x", *settings])


@pytest.mark.parametrize("tp_size, world_size", [(2, 4), (1, 3)])
def test_layouts(rollout_folder, tp_size, world_size):
    setting = f"rollout.tensor_parallel_size={tp_size}"
    check_rollout(make_config(rollout_folder / "tied", setting), world_size)


@pytest.mark.parametrize(
    "tp_size, world_size, message",
    [
        (
            2,
            3,
            "rollout.tensor_parallel_size=2 does not divide the number of ranks, 3: lower it, or "
            "start other ranks with torchrun --nproc-per-node",
        ),
        (4, 4, "rollout.tensor_parallel_size=4 does not divide the model's 2 attention heads"),
    ],
)
def test_layouts_that_do_not_fit(rollout_folder, tp_size, world_size, message):
    setting = f"rollout.tensor_parallel_size={tp_size}"
    with pytest.raises(InputError) as error:
        check_rollout(make_config(rollout_folder / "tied", setting), world_size)
    assert str(error.value) == message


@pytest.fixture(scope="module")
def ocr_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("ocr")
    make_ocr_model(path)
    return path


@pytest.mark.parametrize("settings", [[], ["model.lora.rank=4", "model.lora.merge=true"]])
def test_settings_that_images_support(ocr_model, settings):
    check_rollout(make_config(ocr_model, "model.images=true", *settings), 1)


@pytest.mark.parametrize(
    "setting, remedy",
    [
        ("model.lora.rank=4", "model.lora.merge=true"),
        ("rollout.speculative=ngram", "rollout.speculative=null"),
    ],
)
def test_settings_that_images_do_not_support(ocr_model, setting, remedy):
    config = make_config(ocr_model, "model.images=true", setting)
    with pytest.raises(InputError, match="model.images=true.*" + re.escape(remedy)):
        check_rollout(config, 1)


@pytest.mark.parametrize(
    "settings, is_accepted",
    [
        (["validation.max_tokens=57", "data.val_files=x"], False),
        (["validation.max_tokens=56", "data.val_files=x"], True),
        (["validation.max_tokens=57"], True),  # nothing is validated
        (["data.val_files=x"], True),  # as long as responses in training
    ],
)
def test_vllm_would_apply_the_long_factors_of_longrope(tmp_path, settings, is_accepted):
    """vLLM chooses them for all requests, by the longest one; the trainer has the short factors."""
    rope = dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0] * 4,
        long_factor=[2.0] * 4,
        original_max_position_embeddings=64,
    )
    lengths = dict(rope_parameters=rope, original_max_position_embeddings=64)
    make_model(tmp_path, "llama", model_type="phi3", **lengths)
    limits = ["data.max_prompt_length=8", "rollout.max_tokens=56"]
    config = make_config(tmp_path, *limits, *settings)
    if is_accepted:
        check_rollout(config, 1)
        return
    with pytest.raises(InputError) as error:
        check_rollout(config, 1)
    assert str(error.value) == (
        "validation.max_tokens=57 and data.max_prompt_length=8 allow more than the 64 tokens of "
        "longrope's short factors, so vLLM would apply the long factors to training responses "
        "too: lower validation.max_tokens to at most 56"
    )


def test_a_model_for_which_vllm_needs_torchvision(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    make_model(tmp_path, "gemma3 with images")
    lengths = ["data.max_prompt_length=9", "rollout.max_tokens=9", "validation.max_tokens=9"]
    config = make_config(tmp_path, "model.images=true", *lengths)
    with pytest.raises(
        InputError, match="Gemma3ForConditionalGeneration: .*pip install torchvision"
    ):
        check_vllm_model(config)


def test_weight_names_that_vllm_does_not_know_are_replaced(rollout_folder):
    assert vllm_weight_names(rollout_folder / "qwen3", with_images=False) == {}
    names = vllm_weight_names(rollout_folder / "tied_unsaid", with_images=False)
    assert "embed_tokens.weight" in names
    for name, vllm_name in names.items():
        assert vllm_name == f"model.{name}"


def test_whether_vllm_has_a_class(rollout_folder, tmp_path):
    """engines.check tolerates that vLLM cannot run a model only if it has no class for it."""
    assert is_supported_by_vllm(rollout_folder / "qwen3")
    assert not is_supported_by_vllm(make_model(tmp_path, "qwen3", model_type="openai-gpt"))


def test_end_tokens_come_from_both_files(rollout_folder, tmp_path):
    model = rollout_folder / "tied"
    assert find_stop_token_ids(model) == END_TOKENS
    shutil.copy(model / "config.json", tmp_path)
    assert find_stop_token_ids(tmp_path) == END_TOKENS[-1:]


def test_an_end_token_may_be_0_but_not_missing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(InputError, match="has an eos_token_id"):
        find_stop_token_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert find_stop_token_ids(tmp_path) == [0]


def test_seeds_are_distinct_and_have_62_bits():
    seeds = set()
    for step in range(-1, 9):
        for row in range(100):
            seeds.update(request_seed(0, step, row, sample) for sample in range(10))
    assert len(seeds) == 10_000
    assert min(seeds) >= 0
    assert 2**61 < max(seeds) < 2**62
    assert request_seed(1, 23) != request_seed(12, 3)
