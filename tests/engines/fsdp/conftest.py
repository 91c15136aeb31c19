"""What all tests of the FSDP engine share: a folder of tiny models, and the worker's results."""

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.fsdp.cases import with_prerequisites
from tests.engines.fsdp.model_files import add_weight, rewrite_weights
from tests.support.cases import selected_cases
from tests.support.foreign import FOREIGN
from tests.support.launch import LONG_LIMIT, launch
from tests.support.models import MULTIMODAL, make_model
from tests.support.plain import make_adapter

# Weights of layers that transformers does not have: they predict further tokens. Experts among them
# are not stacked.
IGNORED = {
    "qwen3_next": "mtp.fc.weight",
    "glm4_moe": "model.layers.46.mlp.experts.0.gate_proj.weight",
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    for family in ("qwen2_tied", "qwen3", "llama"):
        make_model(folder / family, family)
        make_adapter(folder / family)
    for family in ("qwen3_moe", "apertus", "lfm2"):
        make_model(folder / family, family)
    make_variants(folder)
    for name, changes in FOREIGN.items():
        make_model(folder / name, "qwen2_tied", **changes)
    for family in MULTIMODAL:
        make_model(folder / family, family)
        (folder / family / "preprocessor_config.json").write_text('{"size": 28}')
    for family, name in IGNORED.items():
        add_weight(folder / family, name, torch.randn(4, 3))
    # Not every model has one.
    (folder / "qwen2_tied" / "generation_config.json").unlink(missing_ok=True)
    make_broken_models(folder)
    return folder


def make_variants(folder):
    # Of 3 choices in 2 layers: 0.3 of the sum over layers.
    make_model(
        folder / "qwen3_moe_balanced",
        "qwen3_moe",
        num_hidden_layers=2,
        output_router_logits=True,
        router_aux_loss_coef=0.2,
    )
    make_model(
        folder / "three_heads",
        "llama",
        num_attention_heads=3,
        num_key_value_heads=3,
        hidden_size=48,
    )
    # Its attention has no effect.
    make_model(folder / "deaf", "qwen3")
    rewrite_weights(folder / "deaf", lambda name, x: (name, x * 0 if "o_proj" in name else x))
    make_model(folder / "both ways", "gemma3", use_bidirectional_attention=True)
    make_model(
        folder / "renamed",
        "qwen2_tied",
        model_type="qwen3_5_text",
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    rewrite_weights(
        folder / "renamed", lambda name, x: (name.replace("model.", "model.language_model.", 1), x)
    )
    make_model(
        folder / "sliding",
        "qwen2_tied",
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


def make_broken_models(folder):
    for name in ("no_files", "missing_weight", "wrong_shape"):
        make_model(folder / name, "llama")
    (folder / "no_files" / "model.safetensors").unlink()

    file = folder / "missing_weight" / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})

    file = folder / "wrong_shape" / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()
    save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def results(request, folder) -> Callable[[int], dict]:
    """Return a function: number of ranks -> {name of a case: what its function returned}.

    Runs only the cases that selected tests need, in one launch for each number of ranks: 4, 2, 1,
    because fewer ranks read checkpoints of more.
    """
    names = with_prerequisites(selected_cases(request))
    waiting = [num_ranks for num_ranks in (4, 2, 1) if num_ranks in names]
    results = {}
    failures = {}

    def run(num_ranks: int) -> None:
        script = "tests/engines/fsdp/worker.py"
        try:
            launch(num_ranks, script, folder, *names[num_ranks], timeout=LONG_LIMIT)
            results[num_ranks] = json.loads((folder / f"{num_ranks}.json").read_text())
        except AssertionError as failure:
            failures[num_ranks] = failure

    def results_of(num_ranks: int) -> dict:
        while num_ranks in waiting:
            run(waiting.pop(0))
        if num_ranks in failures:
            raise failures[num_ranks]
        return results[num_ranks]

    return results_of
