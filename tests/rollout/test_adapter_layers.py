"""The adapter in vLLM's layers, which are real, and computed with. No engine is started."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from config import InputError, load
from rollout.vllm.adapters import ADAPTER_ID, Adapter, LayoutError, matrix_shapes
from tests.support.models import make_model
from tests.support.ranks import on_ranks

RANK = 4
ALPHA = 12
SETTINGS = [
    "data.train_files=unused",
    "data.max_prompt_length=16",
    "rollout.max_tokens=16",
    "engine.compute_dtype=float32",
    f"model.lora.rank={RANK}",
    f"model.lora.alpha={ALPHA}",
]
EXCLUDED = "model.lora.exclude_modules=[k_proj,down_proj]"
NUM_KEY_COLUMNS = 32  # two heads of 16 numbers
# vLLM's fused layers, and the parts that they have in the model's files.
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "o_proj": ("o_proj",),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict:
    from tests.rollout import wrapped_layers  # imports vLLM, which takes seconds

    folder = tmp_path_factory.mktemp("adapter_layers")
    model = make_model(folder / "model", "qwen3")
    (results,) = on_ranks(1, folder, run_cases, wrapped_layers, model)
    return results


def random_matrices(shapes: dict, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def in_other_memory(name: str, matrix: Tensor) -> Tensor:
    """Return the matrix as a view: transposed in some layers, else in the middle of a storage."""
    if "q_proj" in name or "o_proj" in name:
        return matrix.t().contiguous().t()
    storage = torch.cat([matrix.new_full((7,), 100.0), matrix.flatten()])
    return storage[7:].view_as(matrix)


@torch.no_grad()
def run_cases(wrapped_layers, path: Path) -> dict:
    config = load("ppo.yaml", [f"model.path={path}", *SETTINGS, EXCLUDED])
    model, names = wrapped_layers.build(config)
    results = {"names": names}
    adapter = Adapter(model, config)
    manager = model.lora_manager

    def effects() -> dict[str, Tensor]:
        wrapped_layers.map_tokens(model)
        return wrapped_layers.Outputs.of(model).effects

    adapter.register()
    results["new"] = effects()
    results["inputs"] = wrapped_layers.Outputs.of(model).inputs
    shapes = matrix_shapes(config)
    results["shapes"] = shapes
    matrices = random_matrices(shapes, 1)
    adapter.update(dict(matrices))
    results["first effects"] = effects()
    views = {name: in_other_memory(name, x) for name, x in random_matrices(shapes, 2).items()}
    adapter.update(views)
    results["second effects"] = effects()
    wrapped_layers.map_tokens(model, have_adapter=False)
    results["without"] = wrapped_layers.Outputs.of(model).effects

    results["slept"] = sleep_and_wake(wrapped_layers, model, adapter.forget_mapping)
    with adapter.unwrapped():
        results["unwrapped names"] = [name for name, _ in model.named_parameters()]
    results["wrapped names"] = [name for name, _ in model.named_parameters()]
    results["wrapped again"] = effects()

    results["rows"] = rows_of_views(model, adapter)
    results["layouts"] = layout_errors(model, adapter)
    adapter.register()
    results["registered again"] = effects()
    results["active"] = (list(manager.list_adapters()), manager.lora_index_to_id)
    del matrices[min(shapes)]
    with pytest.raises(RuntimeError) as error:
        adapter.update(matrices)
    results["incomplete"] = str(error.value)
    with pytest.raises(InputError) as error:
        Adapter(model, load("ppo.yaml", [f"model.path={path}", *SETTINGS]))
    results["not supported"] = str(error.value)
    return results


def sleep_and_wake(wrapped_layers, model, forget_mapping: Callable) -> list[int]:
    """Lose the memory of the mapping from tokens to adapters, as in a sleep.

    Returns how many tokens the mapping has when vLLM maps the same tokens again: without
    forget_mapping(), and with it.
    """
    wrapped_layers.map_tokens(model)
    (punica_wrapper,) = model.lora_manager.punica_wrapper_mapping.values()
    punica_wrapper._seq_lengths.zero_()
    num_tokens = []
    for prepare in (lambda: None, forget_mapping):
        prepare()
        wrapped_layers.map_tokens(model)
        num_tokens.append(int(punica_wrapper._seq_lengths[0]))
    return num_tokens


def rows_of_views(model, adapter: Adapter) -> dict[str, list[str]]:
    """Fill the view of each weight with a number of its own.

    Returns for each of vLLM's tensors the names of the weights whose numbers its rows have, and
    "padding" for other rows.
    """
    views = adapter.base_weights(torch.float32)
    names = ["padding", *views]
    with adapter.unwrapped():
        for parameter in model.parameters():
            parameter.zero_()
    for number, view in enumerate(views.values(), 1):
        view.fill_(number)
    rows = {}
    with adapter.unwrapped():
        for vllm_name, parameter in model.named_parameters():
            columns = parameter.reshape(len(parameter), -1)
            assert (columns == columns[:, :1]).all()
            rows[vllm_name] = [names[int(number)] for number in columns[:, 0].tolist()]
    return rows


def layout_errors(model, adapter: Adapter) -> dict[str, str]:
    """Return the errors where vLLM's layout would differ from that of the model's files."""
    load_weights = model.load_weights

    def load_twice(weights) -> None:
        weights = list(weights)
        load_weights(iter(weights))
        load_weights(iter(weights))

    loaders = {"another dtype": load_weights, "copied twice": load_twice, "left out": list}
    errors = {}
    for name, loader in loaders.items():
        model.load_weights = loader
        dtype = torch.bfloat16 if name == "another dtype" else torch.float32
        with pytest.raises(LayoutError) as error:
            adapter.base_weights(dtype)
        errors[name] = str(error.value)
    model.load_weights = load_weights
    return errors


def parts_of(layer_name: str) -> list[str]:
    """Return the names in the model's files of the layers that vLLM's layer is made of."""
    prefix, _, name = layer_name.rpartition(".")
    return [f"{prefix}.{part}" for part in PARTS[name]]


def expected_effects(cases: dict, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return alpha / rank * B A x of each layer, where its parts lie beside each other."""
    effects = {}
    for name, x in cases["inputs"].items():
        columns = []
        for part in parts_of(name):
            if f"{part}.lora_A.weight" in matrices:
                a = matrices[f"{part}.lora_A.weight"]
                b = matrices[f"{part}.lora_B.weight"]
                columns.append(ALPHA / RANK * (x @ a.T @ b.T))
            else:
                columns.append(torch.zeros(len(x), NUM_KEY_COLUMNS))
        effects[name] = torch.cat(columns, 1)
    return effects


def assert_effects(effects: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert len(effects) == len(expected) > 0
    for name, effect in effects.items():
        torch.testing.assert_close(effect, expected[name], rtol=1e-4, atol=1e-3, msg=name)


def assert_no_effect(effects: dict[str, Tensor]) -> None:
    assert_effects(effects, {name: torch.zeros_like(x) for name, x in effects.items()})


def test_a_new_adapter_changes_nothing(cases):
    assert {name.rpartition(".")[2] for name in cases["new"]} == PARTS.keys()
    assert_no_effect(cases["new"])


@pytest.mark.parametrize("update, seed", [("first", 1), ("second", 2)])
def test_each_layer_adds_its_matrices_in_their_order_and_scaled(cases, update, seed):
    """The layers of k have no adapter. The second time, matrices are views of other memory."""
    matrices = random_matrices(cases["shapes"], seed)
    assert_effects(cases[f"{update} effects"], expected_effects(cases, matrices))


def test_tokens_without_adapter_get_the_base_alone(cases):
    assert_no_effect(cases["without"])


def test_the_mapping_of_tokens_to_adapters_is_written_again_after_a_sleep(cases):
    without_forgetting, with_forgetting = cases["slept"]
    assert without_forgetting == 0, "a mapping that is lost would go unnoticed"
    assert with_forgetting == len(cases["inputs"]["model.layers.0.self_attn.qkv_proj"])


def test_layers_without_wrappers_have_the_names_of_the_model(cases):
    assert cases["unwrapped names"] == cases["names"]
    assert cases["wrapped names"] != cases["names"]
    assert_effects(cases["wrapped again"], cases["second effects"])


def test_views_of_the_base_are_the_rows_of_their_weights(cases):
    shape_of = dict(cases["shapes"])
    for vllm_name, rows in cases["rows"].items():
        layer = vllm_name.removesuffix(".weight")
        is_fused = layer.rpartition(".")[2] in PARTS
        names = [f"{part}.weight" for part in parts_of(layer)] if is_fused else [vllm_name]
        is_padded = vllm_name in ("model.embed_tokens.weight", "lm_head.weight")
        assert list(dict.fromkeys(rows)) == names + is_padded * ["padding"]
        for name in names:
            b_shape = shape_of.get(name.replace("weight", "lora_B.weight"))
            if b_shape:
                assert rows.count(name) == b_shape[0]


def test_a_base_in_another_layout_cannot_be_shared(cases):
    assert cases["layouts"].keys() == {"another dtype", "copied twice", "left out"}
    for error in cases["layouts"].values():
        assert error.startswith("vLLM stores model.embed_tokens.weight in a different layout")


def test_an_adapter_that_is_registered_again_is_zero(cases):
    assert_no_effect(cases["registered again"])
    assert cases["active"] == ([ADAPTER_ID], [ADAPTER_ID])


def test_an_update_has_all_matrices(cases):
    assert f"the first difference is {min(cases['shapes'])}" in cases["incomplete"]


def test_a_layer_that_vllm_did_not_wrap_is_an_input_error(cases):
    """Of vLLM's layers, q_proj with k_proj is wrapped, but down_proj is not."""
    assert "an adapter for model.layers.0.mlp.down_proj: exclude it" in cases["not supported"]
