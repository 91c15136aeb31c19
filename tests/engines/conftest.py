"""Models for the tests of the Megatron engine, and the launches that all of them share."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.cases import selected_cases
from tests.support.launch import LONG_LIMIT, launch
from tests.support.models import GROUPED_EXPERTS, make_model, write_model

# Checkpoints pass from launch to launch in this order.
LAUNCH_ORDER = (2, 4, 1)


@pytest.fixture(scope="session")
def megatron_folder(tmp_path_factory) -> Path:
    """A folder with a small model of each family."""
    folder = tmp_path_factory.mktemp("megatron")
    for family in ("qwen2_tied", "qwen3", "llama", "qwen3_moe"):
        make_model(folder / family, family, num_hidden_layers=4)
    for family in ("mistral", "llama_yarn", "qwen3_windows", "mixtral"):
        make_model(folder / family, family)
    make_model(
        folder / "qwen3_moe_raw",
        "qwen3_moe",
        num_hidden_layers=4,
        norm_topk_prob=False,
        output_router_logits=True,
        router_aux_loss_coef=0.4,
    )  # of 3 choices in 4 layers: 0.3 of Megatron's sum
    write_model(folder / "glm4_moe", **GROUPED_EXPERTS)
    make_model(folder / "mimo", "mimo")
    make_model(folder / "mimo_two", "mimo", num_hidden_layers=4, num_nextn_predict_layers=2)
    make_model(folder / "mimo_tied", "mimo", num_hidden_layers=4, tie_word_embeddings=True)
    make_model(folder / "zero_rows", "llama", num_hidden_layers=2)
    zero_rows(folder / "zero_rows")
    make_broken_models(folder)
    return folder


def zero_rows(model: Path) -> None:
    """Set two rows of the embedding to zero; a third one, of the padding token, is zero already."""
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][[7, 50]] = 0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def make_broken_models(folder: Path) -> None:
    """Write models without files, without one weight, and with a weight of a wrong shape."""
    for name in ("no_files", "missing_weight", "wrong_shape"):
        make_model(folder / name, "llama", num_hidden_layers=4)
        file = folder / name / "model.safetensors"
        weights = load_file(file)
        if name == "no_files":
            file.unlink()
            continue
        if name == "missing_weight":
            del weights["model.norm.weight"]
        else:
            weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()
        save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def megatron_results(request, megatron_folder) -> dict[int, dict]:
    """What the worker wrote down: {number of ranks: {case: result}}, of the cases needed."""
    selected = selected_cases(request)
    results = {}
    for num_ranks in LAUNCH_ORDER:
        names = selected.get(num_ranks)
        if not names:
            continue
        launch(
            num_ranks,
            "tests/engines/megatron_worker.py",
            megatron_folder,
            *names,
            timeout=LONG_LIMIT,
        )
        results[num_ranks] = json.loads((megatron_folder / f"{num_ranks}.json").read_text())
    return results
