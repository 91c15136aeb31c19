"""What vLLM is told about models and requests, and the settings that it would reject."""

import json
import random
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from config import InputError, load
from engines.check import is_supported_by_vllm
from engines.model.hf import build_on_meta, read_hf_config
from rollout.vllm.arguments import modality_arguments
from rollout.vllm.image_prompts import (
    ImagePrompt,
    describe_mismatch,
    find_placeholder_ids,
    vllm_prompts,
)
from rollout.vllm.sampling import (
    NUM_TIES,
    count_candidates,
    find_stop_token_ids,
    next_token_params,
    preserved_random_state,
    request_seed,
    sampling_params,
)
from rollout.vllm.settings import check_rollout, check_vllm_model
from rollout.vllm.weight_names import vllm_weight_names
from rollout.vllm.weight_sync import WeightSync
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
        (
            4,
            4,
            "rollout.tensor_parallel_size=4 does not divide the model's 2 attention heads: "
            "lower it",
        ),
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


@pytest.mark.slow
def test_a_model_for_which_vllm_needs_torchvision(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    make_model(tmp_path, "gemma3 with images")
    lengths = ["data.max_prompt_length=9", "rollout.max_tokens=9", "validation.max_tokens=9"]
    config = make_config(tmp_path, "model.images=true", *lengths)
    with pytest.raises(
        InputError, match="Gemma3ForConditionalGeneration: .*pip install torchvision"
    ):
        check_vllm_model(config)


def test_a_model_with_shorter_sequences(tmp_path):
    """The message names the group with the longest responses."""
    make_model(tmp_path, "qwen3", max_position_embeddings=64)
    settings = ["data.max_prompt_length=30", "rollout.max_tokens=20", "data.val_files=x"]
    check_vllm_model(make_config(tmp_path, *settings, "validation.max_tokens=34"))
    with pytest.raises(InputError) as error:
        check_vllm_model(make_config(tmp_path, *settings, "validation.max_tokens=35"))
    message = str(error.value)
    assert "sequences of 65 tokens (data.max_prompt_length=30 + validation.max_tokens=35): " in (
        message
    )
    assert "\n" not in message
    assert "[type=" not in message
    assert "max_position_embeddings" in message


def test_a_model_with_shorter_sequences_than_an_episode(tmp_path):
    make_model(tmp_path, "qwen3", max_position_embeddings=64)
    settings = ["rollout.episode=my.py:play", "rollout.max_episode_tokens=65"]
    with pytest.raises(InputError) as error:
        check_vllm_model(make_config(tmp_path, *settings))
    assert "sequences of 65 tokens (rollout.max_episode_tokens=65): " in str(error.value)


def test_weight_names_that_vllm_does_not_know_are_replaced(rollout_folder):
    assert vllm_weight_names(rollout_folder / "qwen3", with_images=False) == {}
    names = vllm_weight_names(rollout_folder / "tied_unsaid", with_images=False)
    assert "embed_tokens.weight" in names
    for name, vllm_name in names.items():
        assert vllm_name == f"model.{name}"


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("gemma3"), "gemma3 with images")


def test_a_vision_language_model_without_images_runs_as_its_text_model(gemma3):
    """vLLM has a class of its own for the text part of Gemma 3, with the names of a text model."""
    hf_config = read_hf_config(gemma3)
    arguments = modality_arguments(hf_config, is_tied=False, with_images=False)
    assert arguments.keys() == {"hf_overrides"}
    text_config = arguments["hf_overrides"](read_hf_config(gemma3))
    assert text_config.model_type == "gemma3_text"
    assert text_config.architectures == ["Gemma3ForCausalLM"]
    assert text_config.tie_word_embeddings is False
    names = vllm_weight_names(gemma3, with_images=False)
    text_model = build_on_meta(text_config, torch.float32)
    of_text = {name: vllm_name for name, vllm_name in names.items() if vllm_name is not None}
    assert set(of_text.values()) == set(text_model.state_dict()) - {"lm_head.weight"}
    without = names.keys() - of_text.keys()
    assert without
    assert all("vision" in name or "projector" in name for name in without)


def test_a_vision_language_model_with_images_keeps_its_names(gemma3, ocr_model):
    hf_config = read_hf_config(gemma3)
    arguments = modality_arguments(hf_config, is_tied=True, with_images=True)
    overrides = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}
    assert arguments["hf_overrides"] == overrides
    assert arguments["limit_mm_per_prompt"] == {"video": 0, "audio": 0}
    assert "language_model_only" not in arguments
    names = vllm_weight_names(gemma3, with_images=True)
    assert any("vision" in name for name in names)
    assert all(name == vllm_name for name, vllm_name in names.items())
    # vLLM has no class for the text part of PaddleOCR-VL alone.
    arguments = modality_arguments(read_hf_config(ocr_model), is_tied=False, with_images=False)
    assert arguments["language_model_only"] is True
    assert arguments["hf_overrides"]["text_config"] == {"tie_word_embeddings": False}
    names = vllm_weight_names(ocr_model, with_images=False)
    in_vllm = {name: vllm_name for name, vllm_name in names.items() if vllm_name is not None}
    assert all(name == vllm_name for name, vllm_name in in_vllm.items())
    assert len(in_vllm) < len(names)


def test_weights_are_renamed_left_out_and_copied_to_the_output_matrix(rollout_folder):
    names = {"embed_tokens.weight": "model.embed_tokens.weight", "tower.weight": None}
    weights = [(name, torch.tensor(i)) for i, name in enumerate([*names, "model.norm.weight"])]
    sync = WeightSync(None, "cpu", names, adapter=None, drafter=None)
    renamed = [("model.embed_tokens.weight", 0), ("model.norm.weight", 2)]
    assert list(sync.renamed(weights)) == renamed
    model = build_on_meta(read_hf_config(rollout_folder / "tied"), torch.float32)
    sync.untie_output_matrix(model.model)
    assert list(sync.renamed(weights)) == renamed, "without an output matrix nothing is added"
    sync.untie_output_matrix(model)
    assert list(sync.renamed(weights)) == [renamed[0], ("lm_head.weight", 0), renamed[1]]


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


SAMPLED = dict(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, max_tokens=50, stop=["Q", "</s>"])


def sampling_section(rollout_folder, **changes):
    return OmegaConf.merge(make_config(rollout_folder / "tied").rollout, SAMPLED, changes)


def test_parameters_of_a_request(rollout_folder):
    params = sampling_params(sampling_section(rollout_folder), 77, [3, 5], vocab_size=1000)
    for name, value in SAMPLED.items():
        assert getattr(params, name) == value, name
    assert params.seed == 77
    assert params.stop_token_ids == [3, 5]
    assert params.logprobs == 20 + NUM_TIES
    assert params.flat_logprobs is True
    assert params.detokenize is True
    assert params.skip_special_tokens is False
    assert params.spaces_between_special_tokens is False
    assert not params.ignore_eos


def test_a_greedy_request_has_no_cuts_and_no_candidates(rollout_folder):
    section = sampling_section(rollout_folder, temperature=0, stop=[])
    params = sampling_params(section, 77, [3], vocab_size=1000)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 1, 0, 0)
    assert params.logprobs == 0
    assert params.stop == []
    assert params.detokenize is False


def test_candidates_are_those_of_top_k_and_ties(rollout_folder):
    section = sampling_section(rollout_folder)
    assert count_candidates(section, 1000) == 20 + NUM_TIES
    assert count_candidates(section, 25) == 25
    everything = sampling_section(rollout_folder, top_k=-1)
    assert count_candidates(everything, 1000) == 0
    assert sampling_params(everything, 1, [3], 1000).top_k == 0


def test_a_request_for_the_log_probability_of_one_token():
    params = next_token_params(0.5, 42)
    assert params.temperature == 0.5
    assert params.max_tokens == 1
    assert params.logprob_token_ids == [42]


def test_random_generators_go_on_as_before():
    def draw() -> tuple:
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = draw()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    with pytest.raises(ValueError), preserved_random_state():
        draw()
        raise ValueError
    assert draw() == expected


# -- prompts with images ---------------------------------------------------------------------------


def test_placeholders_of_a_model(ocr_model, gemma3):
    ocr_config = json.loads((ocr_model / "config.json").read_text())
    expected = sorted([ocr_config["image_token_id"], ocr_config["video_token_id"]])
    assert find_placeholder_ids(read_hf_config(ocr_model)) == expected
    gemma_config = read_hf_config(gemma3)
    assert find_placeholder_ids(gemma_config) == [gemma_config.image_token_id]


def test_prompts_with_images_in_the_format_of_vllm():
    """The same array is one image; an array of another shape with the same bytes is not."""
    shared = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    turned = shared.reshape(4, 2, 3)
    first, second, third = vllm_prompts(
        [ImagePrompt([1, 9], [shared]), ImagePrompt([2], [turned, shared]), ImagePrompt([3], [])]
    )
    assert [p["prompt_token_ids"] for p in (first, second, third)] == [[1, 9], [2], [3]]
    assert third["multi_modal_data"] == {"image": []}
    (image,) = first["multi_modal_data"]["image"]
    assert isinstance(image, Image.Image)
    assert (np.asarray(image) == shared).all()
    turned_image, same_image = second["multi_modal_data"]["image"]
    assert same_image is image
    assert turned_image.size == (2, 4)
    turned_id, same_id = second["multi_modal_uuids"]["image"]
    assert first["multi_modal_uuids"]["image"] == [same_id]
    assert turned_id != same_id
    (copied,) = vllm_prompts([ImagePrompt([4], [shared.copy()])])
    assert copied["multi_modal_uuids"]["image"] == [same_id]
    another = shared.copy()
    another[-1, -1, -1] += 1
    (other,) = vllm_prompts([ImagePrompt([4], [another])])
    assert other["multi_modal_uuids"]["image"] != [same_id]
    (pair,) = vllm_prompts([ImagePrompt([5], [shared, another])])
    assert pair["multi_modal_uuids"]["image"] == [same_id, *other["multi_modal_uuids"]["image"]]


def test_a_mismatch_of_image_tokens_is_described():
    image = np.zeros((20, 30, 3), np.uint8)
    assert describe_mismatch([1, 7, 7, 2], [1, 7, 8, 7, 2], [image], [7, 8]).startswith(
        "vLLM sees 2 image tokens in a prompt of 4 tokens with images of 30 x 20 pixels, but the "
        "trainer sees 3 in 5 tokens: "
    )
