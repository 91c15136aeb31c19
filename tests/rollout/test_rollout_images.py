"""Responses to prompts with images. Judges the launch of rollout_images_worker.py."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from engines.model.names import model_names
from rollout.vllm.image_prompts import image_arguments
from tests.rollout.launches import ROLLOUT_BOUND, split_written, written_responses
from tests.rollout.rollout_images_worker import (
    GROUP_SIZE,
    MANY_SIZES,
    PLACEHOLDER,
    SIZES,
    WEIGHTS,
    changed_weights,
    make_prompt,
)
from tests.support.launch import launch
from tests.support.models import make_ocr_model

PLACEHOLDERS = {PLACEHOLDER, 263}
END_TOKENS = {257, *PLACEHOLDERS}


@dataclass
class Compared:
    """A response's tokens, and their log-probabilities by vLLM and by transformers."""

    tokens: list[int]
    vllm_log_probs: Tensor
    log_probs: Tensor

    @property
    def gap(self) -> float:
        return (self.vllm_log_probs - self.log_probs).abs().max().item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    make_ocr_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict:
    launch(1, "tests/rollout/rollout_images_worker.py", folder)
    return json.loads((folder / "results.json").read_text())


def compare(
    directory: Path, weights_name: str, written: dict, sizes: list, group_size: int
) -> list[Compared]:
    """Compute the log-probabilities of responses to prompts with images of these sizes."""
    processor = AutoProcessor.from_pretrained(directory)
    model = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    name_in_model = model_names(model, directory)
    weights = changed_weights(directory, weights_name)
    model.load_state_dict({name_in_model[name]: weight for name, weight in weights.items()})
    compared = []
    for i, (ids, mask, vllm_log_probs, truncated) in enumerate(split_written(written)):
        inputs, _ = make_prompt(processor, i // group_size, sizes[i // group_size])
        is_response = mask > 0
        num_response = int(is_response.sum())
        tokens = ids[is_response].tolist()
        assert ids[~is_response].tolist() == inputs.pop("input_ids")[0].tolist()
        assert len(ids) - num_response == mask.argmax()
        assert truncated == (tokens[-1] not in END_TOKENS)
        token_types = inputs.pop("mm_token_type_ids")
        # A placeholder that ends a response is an ordinary token. No other one follows, so any
        # token may take its place in the input.
        input_ids = ids.index_fill(0, torch.tensor([len(ids) - 1]), 0)[None]
        inputs["input_ids"] = input_ids
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(token_types, (0, num_response))
        inputs["attention_mask"] = torch.ones_like(input_ids)
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        log_probs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        compared.append(Compared(tokens, vllm_log_probs[is_response], log_probs[-num_response:]))
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("case, group_size", [("", GROUP_SIZE), (", greedy", 1)])
def test_log_probs_of_responses_to_images(results, folder, name, case, group_size):
    """Without images, with one and two, and after each change of the tower or the projector."""
    compared = compare(folder / "model", name, results[name + case], SIZES, group_size)
    assert len(compared) == len(SIZES) * group_size
    assert max(response.gap for response in compared) < ROLLOUT_BOUND
    assert len({tuple(response.tokens) for response in compared}) > 3
    for response in compared:
        assert PLACEHOLDERS.isdisjoint(response.tokens[:-1])
    ends_with_placeholder = [response.tokens[-1] in PLACEHOLDERS for response in compared]
    assert any(ends_with_placeholder) == (name == "placeholders")
    assert not all(ends_with_placeholder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["another tower", "another projector"])
def test_stale_features_would_be_noticed(results, folder, name):
    compared = compare(folder / "model", "as they are", results[name], SIZES, GROUP_SIZE)
    has_moved = [response.gap > 100 * ROLLOUT_BOUND for response in compared]
    has_images = [bool(SIZES[i // GROUP_SIZE]) for i in range(len(compared))]
    assert has_moved == has_images


@pytest.mark.slow
def test_texts_beside_images(results):
    expected = written_responses(results["as they are"])[:GROUP_SIZE]
    assert written_responses(results["text"]) == expected


@pytest.mark.slow
def test_responses_of_a_replica_have_the_images_of_their_prompts(results):
    rows = results["of a replica"]["rows"]
    assert rows == [3, 3, 1, 1]
    expected_sizes = [list(size) for row in rows for size in SIZES[row]]
    assert results["of a replica"]["sizes"] == expected_sizes


@pytest.mark.slow
def test_more_images_than_vllm_keeps_at_a_time(results, folder):
    """With either scheduler, bit for bit, where memory is short for features and the KV cache."""
    assert results["as they are"] == results["vLLM's"]
    assert results["many"] == results["vLLM's many"]
    num_steps, num_vllm_steps = results["steps"]
    assert num_steps < 40, "features of a prompt were kept to the end of its response"
    assert 0 < num_vllm_steps < num_steps / 2
    compared = compare(folder / "model", "as they are", results["many"], MANY_SIZES, 1)
    assert len(compared) == len(MANY_SIZES)
    assert max(response.gap for response in compared) < ROLLOUT_BOUND


@pytest.mark.slow
def test_vllm_and_the_trainer_must_see_the_same_image_tokens(results):
    assert results["another size"].startswith(
        "vLLM sees 12 image tokens in a prompt of 40 tokens with images of 84 x 56, 84 x 56 "
        "pixels, but the trainer sees 8 in 36 tokens"
    )
    assert "vLLM rejects a prompt with images" in results["too long"]


def test_the_processor_normalizes_pixels_for_vllm_too():
    """Otherwise the tower reads raw bytes if preprocessor_config.json lacks a mean."""
    from vllm import EngineArgs

    arguments = vars(EngineArgs(model="m", **image_arguments()))
    expected = False if "mm_device_do_normalize" in vars(EngineArgs) else None
    assert arguments.get("mm_device_do_normalize") is expected
