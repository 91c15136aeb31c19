"""Fixtures for the tests of the gateway, and those that judge the launches of rollout_worker.py."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from examples import arithmetic
from tests.data.chat_templates import CONTROL, QWEN2, make_tokenizer
from tests.rollout.episode_gateway import save_tokenizer
from tests.rollout.launches import END_TOKENS, LAUNCHES
from tests.support.cases import selected_launches
from tests.support.launch import launch, launch_each
from tests.support.models import make_model

REWARD = """
def score(prompt, response, row):
    if row["bad"] and len(response) % 2:
        raise ValueError("an odd length")
    return len(response)

def rank(prompts, responses, rows):
    size = len(responses) * len(set(prompts))
    return [{"rank": sorted(responses).index(r) / 4, "size": size} for r in responses]
"""
FUNCTIONS = """
import torch

def surprising(mask, sequence, num_sequences, values, outcome, group, total, **_):
    best = torch.stack([outcome[group == g].max() for g in group])
    mean_value = total(values) / total(mask)
    advantages = (outcome - best)[sequence] * mask - (values - mean_value).float() * mask
    return advantages, values * num_sequences

def later(lengths, max_tokens):
    return torch.arange(len(lengths)) / max_tokens / lengths.sum()
"""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A model folder for gateways. Its chat template is Qwen 2's."""
    return save_tokenizer(tmp_path_factory.mktemp("model"), QWEN2, "<|im_end|>")


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer in model_path."""
    return make_tokenizer(QWEN2, control=CONTROL)


@pytest.fixture(scope="session")
def rollout_folder(tmp_path_factory):
    """A directory with the models and functions of rollout_worker.py."""
    folder = tmp_path_factory.mktemp("rollout")
    tokenizer = arithmetic.make_tokenizer()
    shape = {"vocab_size": len(tokenizer), "eos_token_id": END_TOKENS[-1]}
    # vLLM has no attention on CPUs for heads of fewer than 32 numbers.
    make_model(folder / "qwen3", "qwen3", head_dim=32, **shape)
    make_model(folder / "one_layer", "qwen3", head_dim=32, num_hidden_layers=1, **shape)
    make_model(folder / "moe", "qwen3_moe", **shape)
    small = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_model(folder / "tied", "qwen2_tied", **small, **shape)
    make_model_with_implied_settings(folder / "tied_unsaid", shape)
    for family in ("qwen3", "one_layer", "moe", "tied", "tied_unsaid"):
        tokenizer.save_pretrained(folder / family)
        generation_config = {"eos_token_id": END_TOKENS[:-1]}
        file = folder / family / "generation_config.json"
        file.write_text(json.dumps(generation_config))
    (folder / "reward.py").write_text(REWARD)
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


def make_model_with_implied_settings(path: Path, shape: dict) -> None:
    """Write a Gemma 2 whose files leave out what its class implies.

    Its embeddings are tied although config.json does not say so, and vLLM has no output matrix for
    it whatever hf_overrides demands. The names of its weights lack the prefix of the base model,
    which transformers adds.
    """
    softcapping = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    make_model(path, "gemma3", model_type="gemma2", **softcapping, **shape)
    config = json.loads((path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (path / "config.json").write_text(json.dumps(config))
    file = path / "model.safetensors"
    weights = {name.removeprefix("model."): weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


@pytest.fixture(scope="session")
def rollout_results(request, rollout_folder):
    """A function: name of a launch -> its results, for the launches that the tests need."""
    # A run that was killed leaves this file, and vLLM on CPUs could not start beside it.
    Path("/dev/shm/-tp:0-[0-1]-cpushm_1").touch()

    def run(name):
        launch(LAUNCHES[name].ranks, "tests/rollout/rollout_worker.py", rollout_folder, name)
        return json.loads((rollout_folder / f"{name}.json").read_text())

    return launch_each(selected_launches(request, LAUNCHES), run)


@pytest.fixture
def result(rollout_results, name):
    """The results of the launch `name`, by which the test is parametrized."""
    return rollout_results(name)
