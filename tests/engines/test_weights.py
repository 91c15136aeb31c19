"""Names, files and loading of a model's weights, in one process without an engine."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from config import InputError, load
from engines.fsdp.state import ModelState
from engines.heads import Head
from engines.model import lora
from engines.model.experts import check_experts_per_token, expert_weights, experts_per_token
from engines.model.hf import auto_class, build_on_meta, read_hf_config
from engines.model.model_files import (
    check_is_no_adapter,
    fingerprint,
    ignored_weights,
    shapes_in_files,
    weight_files,
)
from engines.model.names import described_names, model_names, split_stacks, stacked, stored_tensors
from engines.model.shape import stage_sizes
from engines.model.weights import Placement, check_files, copy_rows, load_adapter, load_weights
from tests.support.foreign import FOREIGN
from tests.support.loading import loaded, on_meta
from tests.support.models import make_image_model, make_model
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")
FAMILIES = ("qwen2_tied", "apertus", "qwen3_moe", "mixtral", "gemma3 with images")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Return a directory with a model of each of FAMILIES."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_model(folder / family, family)
    return folder


def change_file(path: Path, changes: dict[str, torch.Tensor]) -> None:
    """Replace or add tensors in model.safetensors."""
    weights = load_file(path / "model.safetensors")
    save_file(weights | changes, path / "model.safetensors", metadata={"format": "pt"})


# -- loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES[:4])
def test_loaded_weights_and_buffers_are_those_of_transformers(models, family):
    path = models / family
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert_same_tensors(loaded(path), expected)


def test_loaded_buffers_of_a_vision_tower_are_those_of_transformers(models):
    """Only the tower's own class knows how to compute them."""
    path = models / "gemma3 with images"
    hf_config = read_hf_config(path)
    expected = auto_class(hf_config).from_pretrained(path, dtype=torch.float32)
    hf = build_on_meta(hf_config, torch.float32, images=True)
    load_weights(hf, path, model_names(hf, path), Placement(CPU, CPU, torch.float32))
    assert_same_tensors(hf, expected)


def assert_same_tensors(hf: nn.Module, expected: nn.Module) -> None:
    tensors = dict(hf.state_dict())
    assert tensors.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    # Those that are in no file, such as rotary frequencies.
    buffers = dict(hf.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_a_new_value_head_is_zero(models):
    hf = loaded(models / "qwen3_moe", head=Head.VALUES)
    assert hf.get_output_embeddings().weight.shape == (1, 32)
    assert not hf.get_output_embeddings().weight.any()


def test_shared_weights_are_filled_in_place(models):
    name = "model.layers.0.self_attn.q_proj.weight"
    path = models / "qwen2_tied"
    shared = torch.zeros(shapes_in_files(path)[name])
    hf = loaded(path, shared_weights={name: shared})

    assert dict(hf.named_parameters())[name].data_ptr() == shared.data_ptr()
    assert torch.equal(shared, load_file(path / "model.safetensors")[name])


def test_copy_rows_of_a_part_of_a_stack():
    stack = nn.Parameter(torch.zeros(2, 3, 4))
    source = torch.arange(8.0).view(2, 4)
    with torch.no_grad():
        # The last row of the first matrix, and the first row of the second one.
        copy_rows(stack, source, range(2, 4))

    assert torch.equal(stack[0, 2], source[0])
    assert torch.equal(stack[1, 0], source[1])
    assert stack.count_nonzero() == 7


def test_an_export_casts_parameters_but_not_buffers(tmp_path):
    """The experts that a token goes to depend on a buffer, which transformers keeps in fp32."""
    path = make_model(tmp_path / "glm4_moe", "qwen2_tied", **FOREIGN["glm4_moe"])
    config = load("sft.yaml", [f"model.path={path}", "data.train_files=unused"])
    assert config.engine.compute_dtype == "bfloat16"

    exported = dict(ModelState(loaded(path), [], config, CPU).weights())

    in_files = load_file(path / "model.safetensors")
    buffers = [name for name in in_files if name.endswith("e_score_correction_bias")]
    assert buffers
    for name, tensor in in_files.items():
        expected = tensor if name in buffers else tensor.bfloat16()
        assert exported[name].dtype == expected.dtype, name
        assert torch.equal(exported[name], expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_in_the_dtype_of_the_run_unless_transformers_keeps_them_in_fp32(
    models, tmp_path, dtype
):
    """Those that are in no file, such as rotary frequencies, are computed in fp32."""
    placement = Placement(CPU, CPU, dtype)
    apertus = on_meta(models / "apertus")
    names = model_names(apertus, models / "apertus")
    load_weights(apertus, models / "apertus", names, placement)
    in_files = load_file(models / "apertus" / "model.safetensors")
    num_in_files = 0
    for name, buffer in apertus.named_buffers():
        is_in_files = name in in_files
        num_in_files += is_in_files
        assert buffer.dtype == (dtype if is_in_files else torch.float32), name
    assert num_in_files > 0

    path = make_model(tmp_path / "glm4_moe", "qwen2_tied", **FOREIGN["glm4_moe"])
    glm = on_meta(path)
    load_weights(glm, path, model_names(glm, path), placement)
    kept = [buffer for name, buffer in glm.named_buffers() if "e_score_correction_bias" in name]
    assert kept
    assert {buffer.dtype for buffer in kept} == {torch.float32}


def rows_on_ranks(mesh_shape: tuple[int, ...], num_rows: int) -> list[bool]:
    """Return whether copies of whole tensors, and of a part of a stack, are equal to them."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    are_equal = []
    for shape in ((num_rows, 3), (num_rows, 2, 3)):
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        parameter = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
        with torch.no_grad():
            copy_rows(parameter, whole)
        are_equal.append(torch.equal(parameter.full_tensor(), whole))
    # All rows of the stack's matrices but the first and the last.
    flat = whole.flatten(0, -2)
    parameter = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
    with torch.no_grad():
        copy_rows(parameter, flat[1:-1].clone(), range(1, len(flat) - 1))
    expected = flat.clone()
    expected[[0, -1]] = 0
    are_equal.append(torch.equal(parameter.full_tensor().flatten(0, -2), expected))
    return are_equal


@pytest.mark.parametrize(
    "mesh_shape, num_rows", [((2,), 7), ((3,), 4), ((3,), 2), ((2, 2), 5)], ids=str
)
def test_every_rank_copies_its_own_rows(tmp_path, mesh_shape, num_rows):
    """The last rank may have fewer, or none. Replicas have the same rows."""
    num_ranks = torch.Size(mesh_shape).numel()
    for are_equal in on_ranks(num_ranks, tmp_path, rows_on_ranks, mesh_shape, num_rows):
        assert are_equal == [True, True, True]


@pytest.mark.parametrize("is_from_file", [True, False])
def test_an_adapter_is_read_or_begins_with_no_effect(models, tmp_path, is_from_file):
    """Without files, A depends on the seed and B is zero."""
    settings = {"rank": 2, "alpha": 4, "dropout": 0.0, "exclude_modules": [], "dtype": "float32"}
    settings |= {"target_modules": ["q_proj", "down_proj"], "adapter_path": None}
    if is_from_file:
        settings["adapter_path"] = str(tmp_path)
    settings = OmegaConf.create(settings)
    hf = on_meta(models / "qwen2_tied")
    lora.inject(hf, settings)
    shapes = lora.shapes(hf)
    written = {name: torch.randn(shape) for name, shape in shapes.items()}
    lora.write(written.items(), settings, "base", tmp_path)
    hf.to_empty(device="cpu")
    load_adapter(hf, settings, seed=3)
    loaded = {lora.plain_name(name): p for name, p in hf.named_parameters() if ".lora_" in name}
    assert loaded.keys() == shapes.keys()
    first = {name: tensor.detach().clone() for name, tensor in loaded.items()}
    load_adapter(hf, settings, seed=4)
    for name, tensor in first.items():
        if is_from_file:
            assert torch.equal(tensor, written[name]), name
        else:
            assert bool(tensor.any()) == ("lora_A" in name), name
            assert torch.equal(tensor, loaded[name]) == ("lora_B" in name), name


def test_weights_are_exported_with_adapters_unless_these_are_disabled(models):
    path = models / "qwen2_tied"
    settings = ["model.lora.rank=2", "model.lora.alpha=3", "model.lora.target_modules=[up_proj]"]
    needed = [f"model.path={path}", "data.train_files=unused", "engine.compute_dtype=float32"]
    config = load("sft.yaml", [*needed, *settings])
    hf = on_meta(path)
    layers = lora.inject(hf, config.model.lora)
    load_weights(hf, path, model_names(hf, path), Placement(CPU, CPU, torch.float32))
    with torch.no_grad():
        for layer in layers:
            layer.lora_A["default"].weight.fill_(0.5)
            layer.lora_B["default"].weight.fill_(0.25)
    state = ModelState(hf, layers, config, CPU)
    in_files = load_file(path / "model.safetensors")
    for is_used in (True, False, True):
        state.use_adapters(is_used)
        exported = dict(state.weights())
        assert exported.keys() == in_files.keys()
        for name, tensor in in_files.items():
            is_adapted = is_used and "up_proj" in name
            change = 3 / 2 * 2 * 0.5 * 0.25 if is_adapted else 0.0
            torch.testing.assert_close(exported[name], tensor + change, rtol=1e-6, atol=1e-6)
    assert len(dict(state.adapter())) == 2 * len(layers)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_leave_as_the_files_have_them(models, family):
    path = models / family
    hf = loaded(path)
    names = model_names(hf, path)
    file_names = {name: file_name for file_name, name in names.items() if name}
    stacks = {name: parts for name, parts in stacked(hf).items() if name not in file_names}

    written = dict(split_stacks(stored_tensors(hf), stacks))
    written = {file_names.get(name, name): tensor for name, tensor in written.items()}
    written |= dict(ignored_weights(path, names))

    in_file = load_file(path / "model.safetensors")
    assert written.keys() == in_file.keys()
    for name, tensor in in_file.items():
        assert torch.equal(written[name], tensor), name


def test_a_vision_tower_is_no_part_of_the_model(models):
    path = models / "gemma3 with images"
    names = model_names(on_meta(path), path)
    ignored = {file_name for file_name, name in names.items() if name is None}
    assert any("vision_tower" in name for name in ignored)
    assert not any("language_model" in name for name in ignored)


# -- checks of the files ---------------------------------------------------------------------------


@pytest.fixture
def changed(models, tmp_path) -> Path:
    """Return a copy of a tied model, to be changed by a test."""
    return shutil.copytree(models / "qwen2_tied", tmp_path / "changed")


def test_files_may_hold_a_tied_matrix_twice(changed):
    embedding = load_file(changed / "model.safetensors")["model.embed_tokens.weight"]
    change_file(changed, {"lm_head.weight": embedding.clone()})
    check_files(on_meta(changed), changed, Head.LOG_PROBS)


def test_tied_matrices_with_different_values_are_rejected(changed):
    embedding = load_file(changed / "model.safetensors")["model.embed_tokens.weight"]
    embedding[-1, -1] += 1
    change_file(changed, {"lm_head.weight": embedding.clone()})
    with pytest.raises(InputError, match="different values, but config.json ties them"):
        check_files(on_meta(changed), changed, Head.LOG_PROBS)


def write_in_two_files(path: Path, changes: dict[str, torch.Tensor]) -> None:
    """Write the weights of a model, and new ones in a file of their own."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    parts = {"model-1.safetensors": weights, "model-2.safetensors": changes}
    weight_map = {}
    for file, tensors in parts.items():
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= {name: file for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("difference", [0, 1])
def test_tied_matrices_are_compared_over_all_files(changed, difference):
    embedding = load_file(changed / "model.safetensors")["model.embed_tokens.weight"]
    embedding[-1, -1] += difference
    write_in_two_files(changed, {"lm_head.weight": embedding})
    differ = "different values, but config.json ties them"
    with pytest.raises(InputError, match=differ) if difference else nullcontext():
        check_files(on_meta(changed), changed, Head.LOG_PROBS)


def test_the_shapes_are_those_of_all_files(changed):
    before = shapes_in_files(changed)
    write_in_two_files(changed, {"score.weight": torch.zeros(3, 5)})
    assert shapes_in_files(changed) == before | {"score.weight": [3, 5]}


def test_unknown_weights_are_rejected(changed):
    change_file(changed, {"model.extra.weight": torch.zeros(2)})
    with pytest.raises(InputError, match="1 weights that Qwen2ForCausalLM does not have"):
        check_files(on_meta(changed), changed, Head.LOG_PROBS)


def test_a_model_may_have_the_configuration_of_an_adapter_beside_its_own(changed):
    (changed / "adapter_config.json").write_text("{}")
    check_is_no_adapter(changed)
    (changed / "config.json").unlink()
    with pytest.raises(InputError, match=f"model.path={changed} is a PEFT adapter, not a compl"):
        check_is_no_adapter(changed)


def test_a_damaged_file_is_rejected(changed):
    file = changed / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match="model.safetensors is damaged or incomplete"):
        shapes_in_files(changed)


@pytest.mark.parametrize(
    "content, problem",
    [('{"weight_map": {"a"', "is damaged or incomplete"), ("{}", "has no weight_map")],
)
def test_a_damaged_index_is_rejected(changed, content, problem):
    index = changed / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(InputError, match=f"{index} {problem}"):
        weight_files(changed)


def test_the_fingerprint_depends_on_weights_and_configuration(changed):
    before = fingerprint(changed)
    assert fingerprint(changed) == before

    change_file(changed, {"model.norm.weight": torch.zeros(32)})
    with_other_weights = fingerprint(changed)
    assert with_other_weights != before

    config_file = changed / "config.json"
    config_file.write_text(config_file.read_text() + " ")
    assert fingerprint(changed) not in (before, with_other_weights)


# -- shapes ----------------------------------------------------------------------------------------


def test_experts_are_found_by_their_stacks(models):
    hf = on_meta(models / "mixtral")
    num_layers = 4
    assert len(expert_weights(hf)) == 2 * num_layers
    assert experts_per_token(hf.config) == 3
    assert experts_per_token(read_hf_config(models / "apertus")) == 0


def test_experts_without_a_number_per_token_are_an_error(models):
    hf = on_meta(models / "mixtral")
    check_experts_per_token(hf, hf.config, "a model")
    hf.config.num_experts_per_tok = 0
    with pytest.raises(InputError, match="model.path=a model: .* one number of experts per token"):
        check_experts_per_token(hf, hf.config, "a model")
    check_experts_per_token(on_meta(models / "apertus"), hf.config, "a model")


def test_the_first_stages_have_one_layer_more():
    assert stage_sizes(5, 2) == [3, 2]
    assert stage_sizes(8, 4) == [2, 2, 2, 2]


def test_names_of_a_model_without_files_are_those_in_its_files_but_for_experts(tmp_path):
    path = make_model(tmp_path / "experts", "qwen3_moe")
    hf = build_on_meta(read_hf_config(path), torch.float32)
    in_files = load_file(path / "model.safetensors").keys()
    without_experts = {name for name in in_files if ".experts." not in name}
    assert without_experts < set(in_files)
    assert described_names(hf).keys() == without_experts


def test_names_of_a_model_without_files_are_translated_where_the_files_have_others(tmp_path):
    path = make_image_model(tmp_path / "vision", "qwen2_5_vl")
    hf = build_on_meta(read_hf_config(path), torch.float32, images=True)
    names = described_names(hf)
    assert names.keys() == load_file(path / "model.safetensors").keys()
    assert {*names.values()} == {name for name, _ in hf.named_parameters()}
    assert names["visual.patch_embed.proj.weight"] == "model.visual.patch_embed.proj.weight"
