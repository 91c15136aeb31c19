"""LoRA adapters."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file, save_file

from config import InputError
from data.batching.batch import Batch
from engines.checkpoint.export import export_hf, merged_weights
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.model import lora
from tests.engines.fsdp.cases import (
    LORA,
    RECOMPUTE,
    answers_of,
    build,
    make_config,
    on_ranks,
    train,
    worker_case,
)
from tests.engines.fsdp.model_files import add_weight, rewrite_weights
from tests.support.models import make_model
from tests.support.plain import check_answers, plain_answers, plain_model
from tests.support.training import digest, gather, make_batch, make_tokenizer


@worker_case(1, 4)
def adapters(folder: Path, device: torch.device) -> dict:
    """Compare the frozen model before and after training; try adapters that can learn nothing."""
    engine = build(folder / "llama", device, RECOMPUTE, lora=True)
    result = {}
    with engine.without_adapters():
        before = answers_of(engine)
        frozen = digest(dict(engine.export_weights()))
    train(engine, range(3))
    with engine.without_adapters():
        result["same"] = [
            torch.equal(before.nan_to_num(), answers_of(engine).nan_to_num()),
            frozen == digest(dict(engine.export_weights())),
        ]
    if dist.get_rank() == 0:
        save_file({"asked": before}, folder / f"{dist.get_world_size()} adapters.safetensors")
    result["states"] = sum(len(o.state) for o in engine.optimizers)
    result["dropout"] = []
    for seed in (0, 0, 1):
        dropping = build(
            folder / "llama",
            device,
            RECOMPUTE,
            lora=True,
            more=("model.lora.dropout=0.3", "optim.lr=0.0", f"trainer.seed={seed}"),
        )
        result["dropout"].append([train(dropping, [0])[0]["loss"] for _ in range(2)])
    result["dropout by rank"] = gather(log_probs_in_training(dropping, make_batch(0), step=1))
    result["told"] = []
    for first_is_called in (False, True):
        adapted_layer = next(m for m in engine.hf.modules() if hasattr(m, "lora_A"))
        adapted_layer._disable_adapters = not first_is_called
        engine.adapter_guard.is_active = True
        try:
            train(engine, [3])
        except RuntimeError as error:
            result["told"].append(str(error))
        for name, p in engine.hf.named_parameters():
            if ".lora_" in name:
                p.detach().zero_()  # neither A nor B has a gradient then
        engine.model.zero_grad()
    return result


def log_probs_in_training(engine: FSDPEngine, batch: Batch, step: int) -> list[float]:
    """Train on a batch that all data-parallel ranks have, and return its log-probabilities here."""
    log_probs = []

    def loss_fn(outputs, *_):
        log_probs.extend(outputs.tolist())
        return outputs.sum(), {}

    engine.train_batch(batch, loss_fn, step)
    return log_probs


@pytest.mark.slow
@on_ranks("adapters", 1, 4)
def test_without_adapters_the_model_is_the_frozen_one(results, folder, world):
    result = results(world)["adapters"]
    assert result["same"] == [True, True], "also after training"
    asked = load_file(folder / f"{world} adapters.safetensors")["asked"]
    check_answers(asked, plain_answers(folder / "llama"))
    assert result["states"] == 2 * 7 * 3, "the optimizer knows adapters alone"
    assert "no gradient reaches model.layers.0.self_attn.q_proj.lora_A" in result["told"][0]
    assert "the gradient of every adapter is exactly 0" in result["told"][1]
    by_rank = {tuple(log_probs) for log_probs in result["dropout by rank"]}
    assert len(by_rank) == world, "data-parallel ranks drop the same units"
    first, again, other = result["dropout"]
    assert first == again
    assert other != first, "another seed drops the same units"
    assert first[0] != first[1], "the second pass over a step's batch drops the same units"


@pytest.mark.parametrize(
    "pairs, message",
    [
        (
            ["rank=0", "adapter_path={adapter}"],
            "model.lora.adapter_path={adapter} does nothing with model.lora.rank=0",
        ),
        (
            ["rank=8", "adapter_path={adapter}"],
            "has r=4 and lora_alpha=6: give model.lora.rank=4 model.lora.alpha=6",
        ),
        (
            ["rank=4", "alpha=7", "adapter_path={adapter}"],
            "has r=4 and lora_alpha=6: give model.lora.rank=4 model.lora.alpha=6",
        ),
        (
            [*LORA, "adapter_path=nowhere"],
            "model.lora.adapter_path=nowhere is not a directory with a PEFT adapter",
        ),
        ([*LORA, "adapter_path={adapter}", "target_modules=[q_proj]"], "differ in 36 matrices"),
        ([*LORA, "target_modules=[query]"], "model.lora.target_modules=['query']: "),
        (
            [*LORA, "target_modules=[q_proj,v_porj]"],
            "model.lora.target_modules: the model has no linear layer named v_porj",
        ),
        (
            [*LORA, "exclude_modules=[porj]"],
            "model.lora.exclude_modules: the model has no linear layer named porj",
        ),
        (
            [*LORA, "exclude_modules=[mlp]"],
            "model.lora.exclude_modules: the model has no linear layer named mlp",
        ),
        (
            [*LORA, "target_modules=[mlp]"],
            "model.lora.target_modules=['mlp']: Target module LlamaMLP is not a linear layer",
        ),
        ([*LORA, "target_modules=.*(("], "model.lora.target_modules=.*((: "),
        (["dropout=0.1"], "model.lora.dropout=0.1 does nothing with model.lora.rank=0"),
        (
            [*LORA, "target_modules=[lm_head]"],
            "names lm_head: adapters are supported only for linear layers",
        ),
        ([*LORA, "target_modules=[embed_tokens]"], "names model.embed_tokens: adapters are"),
    ],
)
def test_adapters_that_cannot_work(folder, pairs, message):
    adapter = str(folder / "llama_adapter")
    settings = [f"model.lora.{pair.replace('{adapter}', adapter)}" for pair in pairs]
    with pytest.raises(InputError) as error:
        FSDPEngine.check(make_config(folder, *settings), 1)
    assert message.replace("{adapter}", adapter) in str(error.value)


def test_adapters_and_value_heads_have_the_settings_of_the_run(folder):
    settings = ["rank=4", "alpha=6", "dropout=0.3", "dtype=float32"]
    config = make_config(
        folder, "engine.compute_dtype=bfloat16", *(f"model.lora.{pair}" for pair in settings)
    )
    hf, layers = build_model(config, Head.VALUES)
    assert len(layers) == 7 * hf.config.num_hidden_layers
    for layer in layers:
        assert layer.lora_dropout["default"].p == 0.3
        assert layer.scaling["default"] == 6 / 4
        assert layer.r["default"] == 4
    value_head = hf.get_output_embeddings().weight
    for name, parameter in hf.named_parameters():
        is_trained = ".lora_" in name or parameter is value_head
        assert parameter.requires_grad == is_trained, name
        assert parameter.dtype == (torch.float32 if is_trained else torch.bfloat16), name


def test_new_adapters_begin_as_those_of_peft_do():
    """A is uniform in +-1 / sqrt(in features), and B is zero."""
    shapes = {
        "q_proj.lora_A.weight": (8, 400),
        "q_proj.lora_B.weight": (30, 8),
        "k_proj.lora_A.weight": (8, 400),
    }
    settings = OmegaConf.create({"adapter_path": None})
    begin = lora.initial_adapter(settings, shapes, seed=1)
    assert {name: (*x.shape,) for name, x in begin.items()} == shapes
    matrix, zeros, other = begin.values()
    assert not zeros.any()
    assert 0.99 / 20 < matrix.abs().max() <= 1 / 20
    assert matrix.std() == pytest.approx(1 / 20 / 3**0.5, rel=0.05)
    assert not matrix.equal(other), "each matrix has its own numbers"
    again = lora.initial_adapter(settings, shapes, seed=1)
    assert again["q_proj.lora_A.weight"].equal(matrix)
    of_another_seed = lora.initial_adapter(settings, shapes, seed=2)
    assert not of_another_seed["q_proj.lora_A.weight"].equal(matrix)


def test_excluded_modules_get_no_adapter(folder):
    settings = [*LORA, "target_modules=[q_proj,k_proj,up_proj]", "exclude_modules=[k_proj]"]
    config = make_config(folder, *(f"model.lora.{setting}" for setting in settings))
    hf, layers = build_model(config, Head.LOG_PROBS)
    names = [name for name, _ in hf.named_parameters() if ".lora_A." in name]
    assert {name.split(".")[-4] for name in names} == {"q_proj", "up_proj"}
    assert len(names) == len(layers) == 2 * hf.config.num_hidden_layers


@pytest.mark.parametrize(
    "settings, reason",
    [
        (dict(use_rslora=True), "use_rslora=True in"),
        (dict(use_dora=True), "use_dora=True in"),
        (dict(bias="all"), "bias=all in"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save="),
        (dict(rank_pattern={"q_proj": 2}), "rank_pattern="),
        (dict(kasa_config={"tau": 1.0}), "kasa_config="),
        (dict(init_lora_weights="lora_ga"), "init_lora_weights=lora_ga in"),
        (dict(init_lora_weights="OLoRA"), "init_lora_weights=OLoRA in"),
        (dict(lora_alpha=22.5), "lora_alpha=22.5 in"),
        (dict(lora_alpha=6.0, init_lora_weights="eva", use_rslora=None, a_new_one=False), None),
    ],
)
def test_an_adapter_that_is_not_plain_is_refused(folder, tmp_path, settings, reason):
    """Its two matrices could be read, but they mean something else."""
    shutil.copytree(folder / "llama_adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    pairs = (*LORA, f"adapter_path={tmp_path / 'adapter'}")
    config = make_config(folder, *(f"model.lora.{pair}" for pair in pairs))
    if reason is None:
        FSDPEngine.check(config, 1)
    else:
        with pytest.raises(InputError, match=f"{reason}.*not supported"):
            FSDPEngine.check(config, 1)


def test_adapters_beside_matrices_the_other_way_round(tmp_path):
    """Merged as in other families, they would be wrong, silently where a matrix is square."""
    make_model(
        tmp_path,
        "qwen2_tied",
        model_type="gpt2",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        summary_first_dropout=0.0,
        max_position_embeddings=128,
    )
    model = f"model.path={tmp_path}"
    FSDPEngine.check(make_config(tmp_path, model), 1)
    targets = r"model.lora.target_modules='.*\.attn\.c_proj'"
    config = make_config(tmp_path, model, "model.lora.rank=4", targets)
    reason = "names transformer.h.0.attn.c_proj: adapters are supported only for linear layers"
    with pytest.raises(InputError, match=reason):
        FSDPEngine.check(config, 1)


def test_files_name_no_more_layers_than_have_adapters(folder, tmp_path):
    """Otherwise peft would train other layers as well when it continues from the files."""
    settings = OmegaConf.create(
        {
            "rank": 4,
            "alpha": 6,
            "dropout": 0.0,
            "target_modules": ["layers.1.self_attn.q_proj"],
            "exclude_modules": [],
        }
    )
    prefix = "model.layers.1.self_attn.q_proj.lora_"
    lora.write(
        [(f"{prefix}A.weight", torch.ones(4, 32)), (f"{prefix}B.weight", torch.ones(32, 4))],
        settings,
        str(folder / "llama"),
        tmp_path,
    )
    model = PeftModel.from_pretrained(plain_model(folder / "llama"), tmp_path)
    assert sum(".lora_" in name for name, _ in model.named_parameters()) == 2


@pytest.mark.usefixtures("process_group")
def test_an_export_of_a_part_adapts_no_other_part(folder, tmp_path):
    """The vision tower has layers with the same last names as the text model's."""
    model = folder / "gemma3 with images"
    settings = ["model.lora.rank=2", "model.lora.target_modules=[q_proj,v_proj]"]
    engine = build(model, torch.device("cpu"), more=settings)
    export_hf(engine, make_tokenizer(), tmp_path / "hf")
    names = {name.partition(".lora_")[0] for name, _ in engine.export_adapter()}
    written = json.loads((tmp_path / "hf" / "adapter_config.json").read_text())
    assert {*written["target_modules"]} == names
    layers = [name for name, _ in plain_model(model).named_modules() if name.endswith("q_proj")]
    assert len(layers) > len([name for name in names if name.endswith("q_proj")])


def test_merging_offline_rounds_as_the_run_does(folder, tmp_path):
    """Files hold bf16, the run is in fp32. Weights outside of the model keep their dtype."""
    family = "gemma3 with images"
    settings = OmegaConf.create({"rank": 2, "alpha": 6})
    shutil.copytree(folder / family, tmp_path / "base")
    rewrite_weights(tmp_path / "base", lambda name, x: (name, x.bfloat16()))
    add_weight(tmp_path / "base", "vision_tower.ids", torch.arange(300))
    name = "model.language_model.layers.1.self_attn.q_proj"
    adapter = {
        f"{name}.lora_A.weight": torch.randn(2, 32),
        f"{name}.lora_B.weight": torch.randn(128, 2),
    }
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = dict(merged_weights(tmp_path / "base", adapter, settings, torch.float32))
    changed = {n for n in before if not torch.equal(after[n].double(), before[n].double())}
    assert len(changed) == 1
    assert (one := changed.pop()).endswith("layers.1.self_attn.q_proj.weight")
    assert torch.equal(after[one], lora.merge(before[one].float(), *adapter.values(), settings))
    assert after["vision_tower.ids"].dtype == torch.int64
    with pytest.raises(InputError, match="has no weight for model.layers.9"):
        dict(
            merged_weights(
                tmp_path / "base",
                {"model.layers.9.q_proj.lora_A.weight": torch.ones(2, 2)},
                settings,
                torch.float32,
            )
        )
