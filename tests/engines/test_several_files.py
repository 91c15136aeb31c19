"""Models whose weights are in several safetensors files, dealt out one by one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

from config import InputError, load
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_checkpoint, merged_weights, write_safetensors
from engines.heads import Head
from engines.megatron import bridge
from engines.megatron.engine import MegatronEngine
from engines.model import mtp, weights
from engines.model.classifier import check_is_reward_model
from engines.model.hf import read_hf_config
from engines.model.model_files import (
    fingerprint,
    ignored_weights,
    is_only_described,
    shapes_in_files,
    weight_files,
)
from engines.model.names import model_names
from engines.model.weights import check_files
from tests.engines.stub_engine import StubEngine, StubTokenizer
from tests.support.loading import loaded, on_meta
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.training import flip_bit

CPU = torch.device("cpu")
NUM_FILES = 3
INDEX = "model.safetensors.index.json"
FAMILIES = ("llama", "qwen2_tied", "mixtral", "qwen3_moe", "gemma3 with images", "mimo")


def file_name(number: int) -> str:
    return f"model-{number + 1:05d}-of-{NUM_FILES:05d}.safetensors"


def deal_out(source: Path, target: Path, extra: dict[str, Tensor] | None = None) -> Path:
    """Copy a model, with each weight in another file than the weight before it.

    extra: further tensors, in the last file.
    """
    shutil.copytree(source, target)
    single = target / "model.safetensors"
    parts: list[dict[str, Tensor]] = [{} for _ in range(NUM_FILES)]
    for position, (name, tensor) in enumerate(sorted(load_file(single).items())):
        parts[position % NUM_FILES][name] = tensor
    parts[-1] |= extra or {}
    single.unlink()
    weight_map = {}
    for number, part in enumerate(parts):
        save_file(part, target / file_name(number), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name(number))
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    """Return a directory with a model of each of FAMILIES, in one file each."""
    folder = tmp_path_factory.mktemp("single")
    for family in FAMILIES:
        make_model(folder / family, family)
    return folder


@pytest.fixture(scope="module")
def dealt(single, tmp_path_factory) -> Path:
    """Return a directory with the same models in several files."""
    folder = tmp_path_factory.mktemp("dealt")
    for family in FAMILIES:
        deal_out(single / family, folder / family)
    return folder


def weights_of(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES[:5])
def test_a_model_in_several_files_is_loaded_as_from_one(single, dealt, family):
    """The experts of a stack come from all files."""
    expected = loaded(single / family).state_dict()
    result = loaded(dealt / family).state_dict()
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(result[name], tensor), name
        assert tensor.count_nonzero() > 0, name


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_unused_weights_are_those_of_all_files(single, dealt, family):
    in_one = single / family
    in_several = dealt / family
    assert shapes_in_files(in_several) == shapes_in_files(in_one)
    names = model_names(on_meta(in_several), in_several)
    assert names == model_names(on_meta(in_one), in_one)
    check_files(on_meta(in_several), in_several, Head.LOG_PROBS)
    unused = dict(ignored_weights(in_several, names))
    stored = weights_of(in_one)
    assert unused.keys() == {name for name, of_model in names.items() if of_model is None}
    for name, tensor in unused.items():
        assert torch.equal(tensor, stored[name]), name
    if family == "gemma3 with images":
        assert len(unused) > NUM_FILES


@pytest.mark.parametrize("number", range(NUM_FILES))
def test_every_file_counts_for_the_fingerprint(dealt, tmp_path, number):
    model = shutil.copytree(dealt / "llama", tmp_path / "model")
    before = fingerprint(model)
    assert before == fingerprint(dealt / "llama")
    flip_bit(model / file_name(number))
    assert fingerprint(model) != before


@pytest.mark.parametrize("number", range(NUM_FILES))
def test_a_file_that_is_missing_or_damaged_is_named(dealt, tmp_path, number):
    model = shutil.copytree(dealt / "llama", tmp_path / "model")
    file = model / file_name(number)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{file} is damaged or incomplete"):
        shapes_in_files(model)
    file.unlink()
    with pytest.raises(InputError, match=f"model.path={model} lacks {file.name}$"):
        weight_files(model)


def test_files_that_the_index_does_not_list_are_left_alone(dealt, tmp_path):
    """They may be other variants of the same weights."""
    model = shutil.copytree(dealt / "llama", tmp_path / "model")
    shutil.copy(model / file_name(0), model / "consolidated.safetensors")
    shutil.copy(model / file_name(0), model / "model.safetensors")
    expected = [model / file_name(number) for number in range(NUM_FILES)]
    assert weight_files(model) == expected
    assert fingerprint(model) == fingerprint(dealt / "llama")


def test_a_weight_that_one_of_the_files_lacks_is_missing(dealt, tmp_path):
    model = shutil.copytree(dealt / "llama", tmp_path / "model")
    last = load_file(model / file_name(NUM_FILES - 1))
    name = min(last)
    del last[name]
    save_file(last, model / file_name(NUM_FILES - 1), metadata={"format": "pt"})
    message = f"model.path={model} lacks 1 weights of LlamaForCausalLM, such as {name}$"
    with pytest.raises(InputError, match=message):
        check_files(on_meta(model), model, Head.LOG_PROBS)


def test_a_weight_of_another_shape_is_named_with_both_shapes(single, tmp_path):
    embedding = "model.embed_tokens.weight"
    wrong = {embedding: torch.zeros(96, 32)}
    model = shutil.copytree(single / "llama", tmp_path / "model")
    save_file(weights_of(model) | wrong, model / "model.safetensors", metadata={"format": "pt"})
    reason = r"has shape \[96, 32\] in the file, but should have \[97, 32\] according to config"
    with pytest.raises(InputError, match=f"{model}: {embedding} {reason}"):
        check_files(on_meta(model), model, Head.LOG_PROBS)


def test_an_unknown_weight_of_the_last_file_is_rejected(single, tmp_path):
    extra = {"model.extra.weight": torch.zeros(2)}
    model = deal_out(single / "llama", tmp_path / "model", extra)
    with pytest.raises(InputError, match="holds 1 weights .* such as model.extra.weight$"):
        check_files(on_meta(model), model, Head.LOG_PROBS)
    # Old versions of transformers saved these; they are computed again.
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    model = deal_out(single / "llama", tmp_path / "old", frequencies)
    check_files(on_meta(model), model, Head.LOG_PROBS)


@pytest.mark.parametrize("row", [0, 9, 10, 95, 96])
def test_tied_matrices_are_compared_to_the_last_row(single, tmp_path, monkeypatch, row):
    """A few rows at a time: here in nine tens and a rest."""
    monkeypatch.setattr(weights, "ROWS_AT_ONCE", 10)
    embedding = weights_of(single / "qwen2_tied")["model.embed_tokens.weight"]
    same = deal_out(single / "qwen2_tied", tmp_path / "same", {"lm_head.weight": embedding})
    check_files(on_meta(same), same, Head.LOG_PROBS)
    changed = embedding.clone()
    changed[row, 3] += 1
    other = deal_out(single / "qwen2_tied", tmp_path / "other", {"lm_head.weight": changed})
    with pytest.raises(InputError, match="different values, but config.json ties them"):
        check_files(on_meta(other), other, Head.LOG_PROBS)


@pytest.mark.parametrize("num_rows", [96, 98])
def test_a_tied_matrix_with_other_rows_is_another_one(single, tmp_path, monkeypatch, num_rows):
    """Even if all rows that both of them have are equal."""
    monkeypatch.setattr(weights, "ROWS_AT_ONCE", 97)
    embedding = weights_of(single / "qwen2_tied")["model.embed_tokens.weight"]
    twice = torch.cat([embedding, embedding])
    model = deal_out(
        single / "qwen2_tied", tmp_path / "model", {"lm_head.weight": twice[:num_rows]}
    )
    with pytest.raises(InputError, match="different values, but config.json ties them"):
        check_files(on_meta(model), model, Head.LOG_PROBS)


@pytest.mark.parametrize("num_labels", [1, 2])
def test_the_score_head_of_a_classifier_may_be_in_the_last_file(single, tmp_path, num_labels):
    """Its model has no output matrix. As a critic's or reward model's, it has one label."""
    headless = shutil.copytree(single / "llama", tmp_path / "headless")
    stored = weights_of(headless)
    del stored["lm_head.weight"]
    save_file(stored, headless / "model.safetensors", metadata={"format": "pt"})
    score = {"score.weight": torch.ones(num_labels, 32)}
    model = deal_out(headless, tmp_path / "model", score)
    if num_labels == 1:
        check_is_reward_model("reward.model.path", str(model))
        for path in (model, headless, single / "llama"):
            check_files(on_meta(path, Head.VALUES), path, Head.VALUES)
            bridge.check_files(on_meta(path, Head.VALUES), path, Head.VALUES)
        names = model_names(on_meta(model, Head.VALUES), model)
        assert names["score.weight"] == "lm_head.weight"
        return
    with pytest.raises(InputError, match="reward.model.path=.* is a classifier with 2 labels"):
        check_is_reward_model("reward.model.path", str(model))
    for check in (check_files, bridge.check_files):
        with pytest.raises(InputError, match=r"2 labels \(score.weight has shape \[2, 32\]\)"):
            check(on_meta(model, Head.VALUES), model, Head.VALUES)


def test_weights_for_multi_token_prediction_are_looked_for_in_all_files(single, dealt, tmp_path):
    hf_config = read_hf_config(dealt / "mimo")
    mtp.check_has_weights(hf_config, dealt / "mimo")
    model = shutil.copytree(single / "mimo", tmp_path / "model")
    stored = weights_of(model)
    lost = sorted(name for name in stored if ".mtp_layers." in name)[-2:]
    number = sum(".mtp_layers." in name for name in stored)
    for name in lost:
        del stored[name]
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    message = f"lack 2 of the {number} weights of its 1 MTP layers, such as {lost[0]}$"
    with pytest.raises(InputError, match=message):
        mtp.check_has_weights(hf_config, model)


@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_only_a_dry_run_can_do_without_weights(single, tmp_path, dry_run):
    with_weights = single / "llama"
    without = shutil.copytree(with_weights, tmp_path / "model")
    (without / "model.safetensors").unlink()
    needed = ["data.train_files=none", f"dry_run={dry_run}"]
    assert not is_only_described(load("sft.yaml", [f"model.path={with_weights}", *needed]))
    config = load("sft.yaml", [f"model.path={without}", *needed])
    assert is_only_described(config) == (dry_run == "true")


def megatron_weights(model: Path, settings: tuple[str, ...]) -> list[tuple[str, Tensor]]:
    """Return what Megatron engines hold after they have read the files."""
    pairs = [f"model.path={model}", "model_engine=megatron", "data.train_files=unused"]
    config = load("sft.yaml", [*pairs, "engine.compute_dtype=float32", *settings])
    engine = MegatronEngine(config, CPU, 1, optimize=False)
    return list(engine.export_weights())


@pytest.mark.parametrize(
    "family, num_ranks, settings",
    [
        ("qwen3_moe", 1, ()),
        ("llama", 2, ("engine.tensor_model_parallel_size=2",)),
        ("qwen2_tied", 2, ("engine.pipeline_model_parallel_size=2",)),
        ("qwen3_moe", 2, ("engine.expert_model_parallel_size=2",)),
    ],
    ids=["experts", "tp", "pp tied", "ep"],
)
def test_megatron_reads_its_parts_from_several_files(
    single, dealt, tmp_path, family, num_ranks, settings
):
    """Matrices that it fuses lie in different files. Tensor-parallel ranks pad the vocabulary."""
    expected = weights_of(single / family)
    for exported in on_ranks(num_ranks, tmp_path, megatron_weights, dealt / family, settings):
        assert sorted(name for name, _ in exported) == sorted(expected)
        for name, tensor in exported:
            assert torch.equal(tensor, expected[name]), name


# -- merging and exporting -------------------------------------------------------------------------


def make_adapter(model: Path) -> dict[str, Tensor]:
    """Return matrices of an adapter for every linear layer."""
    adapter = {}
    for name, weight in weights_of(model).items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix("weight")
            adapter[f"{layer}lora_A.weight"] = torch.full((2, weight.shape[1]), 0.5)
            adapter[f"{layer}lora_B.weight"] = torch.full((weight.shape[0], 2), 0.25)
    return adapter


def test_adapters_are_merged_into_layers_of_all_files(single, dealt):
    adapter = make_adapter(single / "llama")
    settings = OmegaConf.create({"rank": 2, "alpha": 3})
    merged = dict(merged_weights(dealt / "llama", adapter, settings, torch.float32))
    expected = weights_of(single / "llama")
    assert merged.keys() == expected.keys()
    for name, weight in expected.items():
        # Two products of 1/2 and 1/4, times 3/2.
        change = 3 / 2 * 2 * 0.5 * 0.25 if name.endswith("_proj.weight") else 0.0
        torch.testing.assert_close(merged[name], weight + change, rtol=1e-6, atol=1e-6)


def test_an_adapter_of_a_layer_that_no_file_has_is_not_merged(single, dealt):
    adapter = make_adapter(single / "llama")
    adapter["model.layers.7.mlp.up_proj.lora_A.weight"] = torch.ones(2, 32)
    settings = OmegaConf.create({"rank": 2, "alpha": 3})
    message = "has no weight for model.layers.7.mlp.up_proj.lora_A.weight$"
    with pytest.raises(InputError, match=message):
        dict(merged_weights(dealt / "llama", adapter, settings, torch.float32))


@pytest.mark.usefixtures("process_group")
def test_an_export_takes_unused_weights_from_all_files(single, dealt, tmp_path):
    """The vision tower keeps its dtype, whatever that of the export is."""
    model = single / "gemma3 with images"
    engine = StubEngine(model)
    unused = ignored_of(model).keys()
    engine.weights = {name: x for name, x in engine.weights.items() if name not in unused}
    checkpointer = Checkpointer(tmp_path / "checkpoints", 1, asynchronous=False)
    rest = str(dealt / "gemma3 with images")
    progress = {"export_dtype": "bfloat16", "rest": rest}
    checkpointer.save(1, engine, progress, StubTokenizer())
    export_checkpoint(checkpointer.latest(), tmp_path / "exported")
    exported = weights_of(tmp_path / "exported")
    expected = weights_of(model)
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        kept = tensor if name in unused else tensor.bfloat16()
        assert exported[name].dtype == kept.dtype, name
        assert torch.equal(exported[name], kept), name


def ignored_of(model: Path) -> dict[str, Tensor]:
    return dict(ignored_weights(model, model_names(on_meta(model), model)))


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, files",
    [
        ([4, 4], [["0", "1"]]),  # exactly the limit
        ([4, 4, 1], [["0", "1"], ["2"]]),
        ([9, 1], [["0"], ["1"]]),  # larger than the limit: a file of its own
        ([1, 9, 1], [["0"], ["1"], ["2"]]),
        ([5, 5, 3], [["0"], ["1", "2"]]),  # the size starts anew in each file
        ([3, 3, 3, 3, 3], [["0", "1"], ["2", "3"], ["4"]]),
        ([9], [["0"]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_is_filled_up_to_the_limit(tmp_path, sizes, files, dtype):
    """The limit is that of 8 numbers."""
    tensors = {str(i): torch.full((size,), i, dtype=dtype) for i, size in enumerate(sizes)}
    write_safetensors(tensors.items(), tmp_path, max_bytes=8 * dtype.itemsize)
    if len(files) == 1:
        assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
        assert load_file(tmp_path / "model.safetensors").keys() == {*files[0]}
        return
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes) * dtype.itemsize
    expected = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        expected |= dict.fromkeys(names, file)
        stored = load_file(tmp_path / file)
        assert stored.keys() == {*names}
        for name in names:
            assert torch.equal(stored[name], tensors[name])
    assert index["weight_map"] == expected
    assert len([*tmp_path.iterdir()]) == len(files) + 1
