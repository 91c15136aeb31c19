"""Names that users write and read: patterns of model.freeze, adapters, and classifiers."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import nn

from config import InputError, load
from engines.check import Reference, find_differences, require_close
from engines.heads import Head
from engines.model import freeze
from engines.model.classifier import check_trainable
from engines.model.freeze import warn_of_wide_pattern, with_literal_dots
from engines.model.hf import build_on_meta, read_hf_config
from engines.model.lora import check_is_plain, selects_by_last_name
from engines.model.names import literal_names
from tests.engines.test_microbatch import make_batch
from tests.support.models import make_model

LAYERS = ["layers.1.a", "layers.10.a", "layers.11.b", "norm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


# -- model.freeze ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, named, reason",
    [
        ("layers.1.", "layers.10.a", r"write 'layers\\.1\\.' to match only dots"),
        ("layers.1", "layers.10.a", "it ends within the number"),
        (r"layers\.1\.", None, None),
        (r"layers\.1", "layers.10.a", "it ends within the number"),
        ("layers.*a", None, None),
        ("layers.[0-9]+", None, None),
        ("layers.1[01]", None, None),
        ("l.yers", None, None),
        ("norm", None, None),
    ],
)
def test_a_pattern_that_matches_more_than_it_says_is_reported(capsys, pattern, named, reason):
    warn_of_wide_pattern(pattern, LAYERS)
    printed = capsys.readouterr().out
    if named is None:
        assert printed == ""
        return
    assert f"model.freeze: {pattern!r} also matches {named}, because" in printed
    assert reason in printed


def test_a_pattern_that_always_ends_within_a_number_says_what_it_means(capsys):
    warn_of_wide_pattern(r"layers\.1", LAYERS[1:])
    assert capsys.readouterr().out == ""


def test_dots_that_stand_for_one_character_become_literal():
    changes = {"a.b": r"a\.b", r"a\.b": r"a\.b", "a.*b": "a.*b", "[.]a.+": "[.]a.+", "a.?": "a.?"}
    for pattern, expected in changes.items():
        assert with_literal_dots(pattern) == expected


# -- adapters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, reason",
    [
        (dict(use_rslora=True), "use_rslora=True"),
        (dict(bias="all"), "bias=all"),
        (dict(rank_pattern={"q_proj": 2}), "rank_pattern={'q_proj': 2}"),
        (dict(a_new_one="x"), "a_new_one=x"),
        (dict(init_lora_weights="pissa"), "init_lora_weights=pissa"),
        (dict(lora_alpha=22.5), "lora_alpha=22.5"),
        (dict(lora_alpha=6.0, use_rslora=None, a_new_one=False, bias="none", r=4), None),
        (dict(init_lora_weights="gaussian", peft_type="LORA", target_modules=["q_proj"]), None),
    ],
)
def test_variants_of_lora_are_refused(settings, reason):
    if reason is None:
        check_is_plain(settings, Path("adapter"))
        return
    with pytest.raises(InputError) as caught:
        check_is_plain(settings, Path("adapter"))
    expected = f"model.lora.adapter_path=adapter: {reason} in adapter_config.json is not supported"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "targets, excluded, expected",
    [
        ("all-linear", [], True),
        ("all-linear", ["lm_head"], False),
        (["q_proj", "v_proj"], [], True),
        (["q_proj"], ["k_proj"], False),
        (["q_proj", "layers.0.self_attn.v_proj"], [], False),
        (r".*\.q_proj", [], False),
    ],
)
def test_last_names_are_enough_if_all_layers_with_them_are_adapted(targets, excluded, expected):
    settings = OmegaConf.create({"target_modules": targets, "exclude_modules": excluded})
    assert selects_by_last_name(settings) == expected


@pytest.mark.parametrize(
    "pattern, num_frozen, span",
    [
        (
            r"layers\.[12]\.",
            2 * 9,
            "model.layers.1.self_attn.q_proj.weight to "
            "model.layers.2.post_attention_layernorm.weight",
        ),
        ("lm_head|embed", 2, "model.embed_tokens.weight to lm_head.weight"),
        ("embed", 1, "model.embed_tokens.weight"),
    ],
)
def test_the_first_and_last_frozen_weights_are_named(model, capsys, pattern, num_frozen, span):
    """In the order of the model: in that of the alphabet, layers.10 comes before layers.2."""
    settings = [f"model.path={model}", "data.train_files=t", f"model.freeze=['{pattern}']"]
    config = load("sft.yaml", settings)
    hf = build_on_meta(read_hf_config(model), torch.float32)
    freeze.apply(config, hf, reports=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"freezes {num_frozen} of {3 * 9 + 3} parameters" in line
    num_elements = sum(p.numel() for p in hf.parameters())
    num_frozen_elements = sum(p.numel() for p in hf.parameters() if not p.requires_grad)
    assert line.endswith(f"({num_frozen_elements:,} of {num_elements:,} elements): {span}")


# -- names in files --------------------------------------------------------------------------------


def test_weights_that_transformers_ignores_have_no_name(model, tmp_path):
    hf = build_on_meta(read_hf_config(model), torch.float32)
    hf._keys_to_ignore_on_load_unexpected = [r"^mtp\.", "norm"]
    names = ["mtp.fc.weight", "model.norm.weight", "other.weight"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    expected = {name: name for name in names} | {"mtp.fc.weight": None}
    assert literal_names(hf, tmp_path) == expected


def test_a_reward_model_has_the_parameters_of_a_classifier(model):
    hf_config = read_hf_config(model)
    hf = build_on_meta(hf_config, torch.float32, Head.VALUES)
    check_trainable(hf_config, hf)
    message = "LlamaForSequenceClassification of .* such as model.layers.1.{}.weight: a reward"
    hf.model.layers[1].more = nn.Linear(1, 1, bias=False)
    with pytest.raises(InputError, match=message.format("more")):
        check_trainable(hf_config, hf)
    del hf.model.layers[1].more
    del hf.model.layers[1].input_layernorm
    with pytest.raises(InputError, match=message.format("input_layernorm")):
        check_trainable(hf_config, hf)


# -- engines.check ---------------------------------------------------------------------------------


def test_an_export_is_compared_with_its_model_name_by_name(tmp_path):
    original = {
        "a": torch.tensor([1.0, 1.0 + 2**-12]),
        "b": torch.ones(2),
        "gone": torch.ones(1),
        "lm_head.weight": torch.ones(1),
        "x.rotary_emb.inv_freq": torch.ones(1),
    }
    exported = {"a": torch.ones(2).bfloat16(), "b": torch.tensor([1.0, 2.0]), "new": torch.ones(1)}
    for name, tensors in (("model", original), ("export", exported)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    paths = (tmp_path / "model", tmp_path / "export")
    always = ["b has different values", "gone is missing", "new is not in model.path"]
    assert sorted(find_differences(*paths, is_tied=True)) == always
    with_output = sorted([*always, "lm_head.weight is missing"])
    assert sorted(find_differences(*paths, is_tied=False)) == with_output


@pytest.mark.usefixtures("process_group")
def test_log_probabilities_are_close_in_the_root_mean_square(capsys):
    """Of four, one is off by 0.2, so the root mean square is 0.1."""
    reference = Reference(make_batch(), torch.tensor([-1.0, -2.0, -3.0, -4.0]), bound=0.09)
    other = torch.tensor([-1.0, -2.2, -3.0, -4.0])
    require_close("reload", "numbers", other, reference, 0.11)
    line = "reload        ok  numbers differ by 0.1 nats (at most 0.1 allowed)\n"
    assert capsys.readouterr().out == line
    for values in (other, torch.full((4,), torch.nan)):
        with pytest.raises(InputError, match="^reload: numbers differ by .* nats .at most 0.09"):
            require_close("reload", "numbers", values, reference)
