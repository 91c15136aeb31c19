"""The files of an export beside its weights, and the check of a reward model's files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig

from config import InputError
from engines.checkpoint.model_config import save_classifier_config, save_model_config
from engines.model.classifier import check_is_reward_model
from tests.support.models import make_model

COPIED = {"generation_config.json", "preprocessor_config.json", "own_code.py"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = make_model(tmp_path_factory.mktemp("models") / "llama", "llama")
    (path / "preprocessor_config.json").write_text('{"size": 28}')
    (path / "own_code.py").write_text("# code of the model")
    (path / "other.json").write_text("{}")
    GenerationConfig(eos_token_id=[2]).save_pretrained(path)
    return path


def test_an_export_is_described_as_the_model_in_its_new_dtype(model, tmp_path):
    save_model_config(model, torch.bfloat16, tmp_path, new_end_ids=[7])
    assert {file.name for file in tmp_path.iterdir()} == COPIED | {"config.json"}
    written = AutoConfig.from_pretrained(tmp_path)
    assert written.architectures == ["LlamaForCausalLM"]
    assert written.dtype == torch.bfloat16
    before = AutoConfig.from_pretrained(model)
    assert (written.hidden_size, written.vocab_size) == (before.hidden_size, before.vocab_size)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [2, 7]
    assert (tmp_path / "own_code.py").read_text() == "# code of the model"


def test_both_parts_of_a_vision_language_model_are_described_in_the_new_dtype(tmp_path):
    """Programs read the dtype of the text model from its own section."""
    path = make_model(tmp_path / "model", "gemma3 with images", dtype="float32")
    save_model_config(path, torch.bfloat16, tmp_path / "export")
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert written["dtype"] == written["text_config"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("padding_id", [5, None])
def test_an_exported_reward_model_is_described_as_a_classifier(model, tmp_path, padding_id):
    save_classifier_config(model, torch.float32, tmp_path, padding_id)
    assert {file.name for file in tmp_path.iterdir()} == COPIED | {"config.json"}
    written = AutoConfig.from_pretrained(tmp_path)
    assert written.architectures == ["LlamaForSequenceClassification"]
    assert written.num_labels == 1
    assert written.pad_token_id == padding_id
    assert written.dtype == torch.float32


@pytest.mark.parametrize(
    "shape, message",
    [
        ([1, 8], None),
        ([2, 8], "reward.model.path=PATH is a classifier with 2 labels"),
        (None, "reward.model.path=PATH is not a reward model: its files have no score.weight"),
    ],
)
def test_a_reward_model_has_one_label(tmp_path, shape, message):
    weights = {"model.norm.weight": torch.ones(8)}
    if shape is not None:
        weights["score.weight"] = torch.ones(shape)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if message is None:
        check_is_reward_model("reward.model.path", str(tmp_path))
        return
    with pytest.raises(InputError) as error:
        check_is_reward_model("reward.model.path", str(tmp_path))
    assert str(error.value).startswith(message.replace("PATH", str(tmp_path)))


def test_an_adapter_is_no_reward_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"lora_A.weight": torch.ones(2, 8)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match="is a PEFT adapter, not a complete model: merge it first"):
        check_is_reward_model("reward.model.path", str(tmp_path))
