"""model.freeze: parameters that are not trained."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from config import InputError, load
from engines.checkpoint.checkpointer import Checkpointer
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.model import freeze
from engines.model.flops import count_flops
from engines.model.hf import build_on_meta, read_hf_config
from tests.engines.fsdp.cases import FREEZE, FREEZE_SETTING, build, make_config, train, worker_case
from tests.engines.fsdp.test_training import FROZEN, result_of
from tests.support.cases import case_params, needs
from tests.support.estimates import checkpoint_bytes, estimate_gib
from tests.support.models import make_model
from tests.support.plain import matches_any, tensor_bytes
from tests.support.training import make_tokenizer


@worker_case(2)
def frozen(folder: Path, device: torch.device) -> dict:
    """Take two steps and two more, without interruption and from a checkpoint."""
    checkpointer = Checkpointer(folder / "checkpoints_frozen", 2, asynchronous=False)
    engine = build(folder / "llama", device, more=[FREEZE_SETTING])
    again = build(folder / "llama", device, more=[FREEZE_SETTING])
    train(engine, range(2))
    checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
    checkpointer.load(checkpointer.latest(), again)
    return {"uninterrupted": train(engine, range(2, 4)), "resumed": train(again, range(2, 4))}


@pytest.mark.slow
@pytest.mark.parametrize("world, name", case_params(FROZEN))
def test_frozen_parameters_stay_to_the_bit(results, folder, world, name):
    """Frozen parameters have no weight decay and no optimizer state; all others move."""
    result = result_of(results, world, name)
    before = load_file(folder / "llama" / "model.safetensors")
    after = load_file(folder / f"{world} {name}.safetensors")
    kept = {n for n, x in before.items() if torch.equal(x, after[n])}
    assert kept == {n for n in before if matches_any(FREEZE, n)}
    assert 10 < len(kept) < len(before) / 2 + 1
    assert set(result["trained"]) == before.keys() - kept
    assert result["states"] == len(before.keys() - kept)


@pytest.mark.slow
@needs((2, "frozen"))
def test_a_run_with_frozen_parameters_resumes(results, folder):
    result = results(2)["frozen"]
    assert result["resumed"] == result["uninterrupted"]
    weights = folder / "checkpoints_frozen" / "step_00000002" / "weights"
    written = tensor_bytes(FileSystemReader(weights).read_metadata())
    estimate = checkpoint_bytes(make_config(folder, FREEZE_SETTING))
    assert estimate == pytest.approx(written, rel=0.01)


def test_flops_and_memory_of_frozen_parameters(folder):
    """A product with a weight costs 2 FLOPs, and 2 for each gradient: its input's, the weight's."""

    def measured(*pairs):
        settings = make_config(folder, *pairs)
        hf, _ = build_model(settings, Head.LOG_PROBS)
        flops = count_flops(hf, read_hf_config(folder / "llama"))
        return {"flops": flops, **estimate_gib(settings, 2, "cuda")[0]}

    whole = measured()
    frozen = measured(FREEZE_SETTING)
    attention = 2 * 32 * 32 + 2 * 32 * 16
    layer = attention + 3 * 32 * 48
    assert whole["flops"] == (6 * 3 * layer, 6 * 97 * 32, 6 * 3 * 4 * 8)
    assert frozen["flops"] == (
        (2 + 6 + 6) * layer - 2 * attention,
        6 * 97 * 32,
        (2 + 6 + 6) * 4 * 8,
    )
    above = measured("model.freeze=[layers.1, lm_head]")["flops"]
    assert above == ((6 + 4 + 6) * layer, 4 * 97 * 32, 6 * 3 * 4 * 8)
    sizes = {n: x.numel() for n, x in load_file(folder / "llama/model.safetensors").items()}
    trained_sizes = [size for name, size in sizes.items() if not matches_any(FREEZE, name)]
    trained = sum(trained_sizes) / sum(sizes.values())
    assert frozen["parameters"] == whole["parameters"]
    assert trained < 0.7
    for part in ("gradients", "optimizer"):
        assert frozen[part] == pytest.approx(whole[part] * trained)


@pytest.mark.parametrize(
    "family, pairs, message",
    [
        (
            "llama",
            ["[visual]"],
            "'visual' matches no name in the files of .*; the nearest are .*weight",
        ),
        ("llama", ["['(']"], "model.freeze: '\\(' is not a regular expression"),
        ("llama", ["[model, head]"], "model.freeze=\\['model', 'head'\\] leaves nothing to train"),
        (
            "llama",
            ["[norm]", "model.lora.rank=4"],
            "does nothing with model.lora.rank=4, which trains only adapters",
        ),
        (
            "qwen2_tied",
            ["[embed]"],
            "matches model.embed_tokens.weight but not lm_head.weight. model_engine=fsdp holds",
        ),
        (
            "gemma3 with images",
            ["[vision_tower]"],
            "'vision_tower' matches only weights that this run does not use, "
            "such as .*vision_tower.*: leave the pattern out",
        ),
        (
            "qwen3_moe",
            ["[experts.0]"],
            "matches .*0.mlp.experts.0.gate_proj.weight but not .*0.mlp.experts.1.gate_proj.weight",
        ),
    ],
)
def test_what_cannot_be_frozen(folder, family, pairs, message):
    patterns, *others = pairs
    model = f"model.path={folder / family}"
    settings = make_config(folder, model, f"model.freeze={patterns}", *others)
    with pytest.raises(InputError, match=message):
        FSDPEngine.check(settings, 1)


def test_a_pattern_without_a_match_is_named_for_a_reward_model_too(folder):
    config = make_config(folder, "model.freeze=[lay3rs]")
    with pytest.raises(InputError, match="'lay3rs' matches no name in the files of .*llama"):
        FSDPEngine.check(config, 1, Head.VALUES)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def twelve_layers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("twelve")
    return make_model(directory, "llama", num_hidden_layers=12)


LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32  # numbers in the 9 tensors of a layer


@pytest.mark.parametrize(
    "pattern, frozen_layers, warning",
    [
        (
            "layers.1.",
            (1, 10, 11),
            r"also matches model.layers.10.self_attn.q_proj.weight, because a dot stands for any "
            r"character: write 'layers\\.1\\.' to match only dots",
        ),
        (r"layers\.1\.", (1,), None),
        ("layers[.]1[.]", (1,), None),
        (
            "layers.1",
            (1, 10, 11),
            r"also matches model.layers.10.self_attn.q_proj.weight, because it ends within the "
            r"number: end the pattern with '\.' to match only the whole number",
        ),
        (r"layers\.1[01]\..*", (10, 11), None),
    ],
)
def test_what_is_frozen_is_counted_and_wide_patterns_are_named(
    twelve_layers, capsys, pattern, frozen_layers, warning
):
    freeze = f"model.freeze=['{pattern}']"
    settings = make_config(twelve_layers.parent, f"model.path={twelve_layers}", freeze)
    FSDPEngine.check(settings, 1)
    lines = capsys.readouterr().out.splitlines()
    total = 12 * LAYER + 2 * 97 * 32 + 32
    num_layers = len(frozen_layers)
    assert lines[0] == (
        f"model.freeze={[pattern]} freezes {9 * num_layers} of {12 * 9 + 3} parameters "
        f"({num_layers * LAYER:,} of {total:,} elements): "
        f"model.layers.{frozen_layers[0]}.self_attn.q_proj.weight to "
        f"model.layers.{frozen_layers[-1]}.post_attention_layernorm.weight"
    )
    warnings = [] if warning is None else [f"warning: model.freeze: {pattern!r} {warning}"]
    assert lines[1:] == warnings


def test_a_run_prints_once_what_is_frozen(folder, one_rank, capsys):
    """The check of a run prints it; its engine checks again, and prints nothing."""
    settings = make_config(folder, FREEZE_SETTING)
    FSDPEngine.check(settings, 1)
    assert capsys.readouterr().out.count("model.freeze") == 1
    FSDPEngine(settings, torch.device("cpu"), 1)
    assert "model.freeze" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "family, pattern",
    [("gemma3 with images", r"^language_model\.model\.layers\.0\."), ("mixtral", "experts")],
)
def test_a_dry_run_without_weights_freezes_the_same_parameters(
    folder, tmp_path, capsys, family, pattern
):
    """Patterns are compared with the names that the files would have."""
    path = make_model(tmp_path / "model", family)
    settings = [f"model.path={path}", f"model.freeze=['{pattern}']"]
    FSDPEngine.check(make_config(folder, *settings), 1)
    with_weights = capsys.readouterr().out
    assert re.search(r"freezes [1-9]\d* of", with_weights)
    (path / "model.safetensors").unlink()
    FSDPEngine.check(make_config(folder, *settings, "dry_run=true"), 1)
    assert capsys.readouterr().out == with_weights
    wrong = make_config(folder, settings[0], "model.freeze=['lay3rs']", "dry_run=true")
    with pytest.raises(InputError, match="'lay3rs' matches no parameter of the model that config"):
        FSDPEngine.check(wrong, 1)


def freeze_with_value_head(script: str, model: Path, pattern: str) -> set[str]:
    """Freeze parameters of a model with a value head; return the names of those still trained."""
    pairs = [f"model.path={model}", "data.train_files=unused", f"model.freeze=['{pattern}']"]
    config = load(script, pairs)
    hf = build_on_meta(read_hf_config(model), torch.float32, Head.VALUES)
    freeze.apply(config, hf, Head.VALUES, reports=True)
    return {name for name, parameter in hf.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("script", ["rm.yaml", "ppo.yaml"])
def test_a_value_head_is_always_trained(folder, script):
    """It is new: frozen, all its values would stay what they are at first, 0."""
    assert freeze_with_value_head(script, folder / "llama", "[.]") == {"lm_head.weight"}


def test_a_reward_model_cannot_freeze_its_score_head(folder):
    with pytest.raises(InputError, match="the score head of a reward model is always trained"):
        freeze_with_value_head("rm.yaml", folder / "llama", "lm_head")


def test_a_critic_may_have_nothing_that_the_patterns_of_the_policy_match(folder, capsys):
    """Both read model.freeze, and may be different models."""
    trained = freeze_with_value_head("ppo.yaml", folder / "llama", "lm_head|visual")
    number = len(load_file(folder / "llama" / "model.safetensors"))
    assert len(trained) == number
    assert f"freezes 0 of {number} parameters of the critic (0 of " in capsys.readouterr().out


def test_what_can_be_frozen(folder):
    """A value head is trained whatever the patterns say; its model need not have the names."""

    def trained(patterns, head, family="qwen2_tied", script=None):
        model = f"model.path={folder / family}"
        # Only train_ppo.py has a critic.
        script = script or ("ppo.yaml" if head is Head.VALUES else "sft.yaml")
        settings = load(script, [model, "data.train_files=unused", f"model.freeze={patterns}"])
        FSDPEngine.check(settings, 1, head)
        hf, _ = build_model(settings, head)
        return {name for name, p in hf.named_parameters() if p.requires_grad}

    assert trained("[.]", Head.VALUES) == {"lm_head.weight"}
    # The files have an output matrix, which the value head replaces.
    for script in ("ppo.yaml", "rm.yaml"):
        assert trained("[.]", Head.VALUES, "llama", script) == {"lm_head.weight"}
    for patterns, head in (("[visual, embed]", Head.VALUES), ("[embed, head]", Head.LOG_PROBS)):
        names = trained(patterns, head)
        assert "model.embed_tokens.weight" not in names
        assert len(names) > 30
