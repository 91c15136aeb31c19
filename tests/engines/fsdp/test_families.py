"""Families of models: what they compute, and what their files hold."""

import io
import json
import traceback
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from config import InputError
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_hf
from engines.fsdp import attention
from engines.fsdp.attention import Packing
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.recurrence import StateResets
from engines.heads import Head
from engines.model import guard
from engines.model.hf import auto_class
from engines.model.model_files import fingerprint
from job.progress import adapter as adapter_record
from tests import families
from tests.engines.fsdp.cases import (
    BF16,
    CP2,
    LORA,
    PADDED,
    RECOMPUTE,
    answers_of,
    build,
    on_ranks,
    register,
    train,
    worker_case,
)
from tests.engines.fsdp.test_training import result_of
from tests.support.cases import needs
from tests.support.foreign import FOREIGN
from tests.support.launch import export
from tests.support.models import MULTIMODAL, write_model
from tests.support.plain import (
    LOG_PROB_BOUND,
    LOSS_BOUND,
    NORM_BOUND,
    check_answers,
    plain_answers,
    plain_loss,
    plain_model,
    worst,
)
from tests.support.training import digest, gather, make_batch, make_tokenizer

FORMS = {"packed": "", "padded": PADDED}


# (number of ranks, family, form); on two ranks, a family whose attention has sinks.
FAMILY_CASES = [(1, family, form) for family in (*FOREIGN, *MULTIMODAL) for form in FORMS]
FAMILY_CASES.append((2, "gpt_oss", "cp2"))


def first_step(folder: Path, device: torch.device, family: str, form: str) -> dict:
    """Export a family's weights, evaluate it, and take a step."""
    settings = CP2 if form == "cp2" else FORMS[form]
    try:
        settings = f"{settings} torch_compile=never"
        engine = build(folder / family, device, settings, always_guarded=True)
        weights = dict(engine.export_weights())
        answers = answers_of(engine)
        if dist.get_rank() == 0:
            save_file({"asked": answers, **weights}, folder / f"{family} {form}.safetensors")
        return train(engine, [0])[0]
    except Exception:
        return {"error": traceback.format_exc()}


for num_ranks, a_family, a_form in FAMILY_CASES:
    case_function = partial(first_step, family=a_family, form=a_form)
    register(case_function, f"{a_family} {a_form}", [num_ranks])


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, family, form",
    [
        pytest.param(world, family, form, marks=needs((world, f"{family} {form}")))
        for world, family, form in FAMILY_CASES
    ],
)
def test_other_families(results, folder, world, family, form):
    """Answers, loss and gradient equal transformers', and the exported files are bit-identical."""
    step = result_of(results, world, f"{family} {form}")
    weights = load_file(folder / f"{family} {form}.safetensors")
    asked = weights.pop("asked")
    files = load_file(folder / family / "model.safetensors")
    model = plain_model(folder / family)
    assert weights.keys() == files.keys()
    assert all(torch.equal(weights[n], files[n]) for n in files)
    check_answers(asked, plain_answers(folder / family), cp=world)
    loss, _ = plain_loss(model, make_batch(0))
    loss.backward()
    assert worst([step["loss"]], [loss.item()]) < LOSS_BOUND
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert worst([step["grad_norm"]], [norm.item()]) < NORM_BOUND


def text_training(folder: Path, device: torch.device, family: str, lora: bool) -> None:
    """Train the text of a vision-language model, or adapters of it; save, export and evaluate."""
    name = f"{family} lora" if lora else family
    more = [f"model.lora.{key}" for key in LORA] if lora else []
    engine = build(folder / family, device, more=more)
    checkpointer = Checkpointer(folder / f"steps {name}", 2, False)
    train(engine, range(3))
    progress = {
        "export_dtype": "float32",
        "run": {"frozen weights": fingerprint(folder / family)},
        "lora": adapter_record(engine.config, str(engine.config.model.path)),
    }
    checkpointer.save(3, engine, progress, make_tokenizer())
    export_hf(engine, make_tokenizer(), folder / f"hf {name}")
    answers = answers_of(engine)
    if dist.get_rank() == 0:
        save_file({"asked": answers}, folder / f"images {name}.safetensors")


for a_family in MULTIMODAL:
    case_function = partial(text_training, family=a_family, lora=False)
    register(case_function, f"text of {a_family}", [2])
GEMMA = "gemma3 with images"
register(partial(text_training, family=GEMMA, lora=True), f"adapters of {GEMMA}", [2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=needs((2, f"text of {name}"))) for name in MULTIMODAL]
)
def test_the_text_of_a_model_of_images_is_trained_and_the_rest_is_kept(
    results, folder, tmp_path, family
):
    """transformers loads both exports; text computes as in the engine, the rest is unchanged."""
    results(2)
    export(folder / f"steps {family}" / "step_00000003", tmp_path / "offline")
    asked = load_file(folder / f"images {family}.safetensors")["asked"]
    before = load_file(folder / family / "model.safetensors")
    for exported in (folder / f"hf {family}", tmp_path / "offline"):
        check_whole(exported, family, folder)
        check_answers(asked, plain_answers(exported))
        after = load_file(exported / "model.safetensors")
        assert after.keys() == before.keys()
        same = {n for n in after if torch.equal(after[n], before[n])}
        rest = {n for n in after if "vision" in n or "visual" in n or "projector" in n}
        assert rest
        assert rest <= same
        assert not any("proj.weight" in n for n in same - rest), "the text was not trained"
    change = plain_answers(folder / family) - plain_answers(exported)
    assert change[0].abs().max() > 100 * LOG_PROB_BOUND
    moved = folder / f"{family}.elsewhere"
    (folder / family).rename(moved)
    try:
        told = export(
            folder / f"steps {family}" / "step_00000003", tmp_path / "other", returncode=2
        )
    finally:
        moved.rename(folder / family)
    assert "The other weights were in" in told


def check_whole(exported, family, folder):
    kind = auto_class(AutoConfig.from_pretrained(exported))
    model, loading_info = kind.from_pretrained(exported, output_loading_info=True)
    assert type(model).__name__.endswith("ForConditionalGeneration")
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading_info[key], key
    assert (exported / "preprocessor_config.json").exists()
    assert AutoTokenizer.from_pretrained(exported)("a b a").input_ids == [1, 2, 1]
    ours = json.loads((exported / "config.json").read_text())
    theirs = json.loads((folder / family / "config.json").read_text())
    assert ours["architectures"] == theirs["architectures"]
    assert ours["vision_config"] == theirs["vision_config"]


@pytest.mark.slow
@needs((2, f"adapters of {GEMMA}"))
def test_adapters_of_a_model_of_images(results, folder, tmp_path):
    """peft adds them to the text model alone, although the tower's layers have the same names.

    Merged, they make a whole model.
    """
    results(2)
    family = GEMMA
    name = f"{family} lora"
    asked = load_file(folder / f"images {family} lora.safetensors")["asked"]
    export(folder / f"steps {name}" / "step_00000003", tmp_path / "merged", "--merge")
    check_whole(tmp_path / "merged", family, folder)
    check_answers(asked, plain_answers(tmp_path / "merged"))
    model = PeftModel.from_pretrained(plain_model(folder / family), folder / f"hf {name}")
    assert not any("lora_" in n and "vision" in n for n, _ in model.named_parameters())
    model.merge_and_unload().save_pretrained(tmp_path / "by peft")
    check_answers(asked, plain_answers(tmp_path / "by peft"))
    change = plain_answers(folder / family) - plain_answers(tmp_path / "by peft")
    assert change[0].abs().max() > 100 * LOG_PROB_BOUND


@worker_case(1, 2)
def renamed(folder: Path, device: torch.device) -> dict:
    """Export and restore a model whose weights transformers renames at load."""
    engine = build(folder / "renamed", device, PADDED)
    before = answers_of(engine)
    state = engine.state()
    kept = {name: x.clone() for name, x in state["model"].items()}
    train(engine, [0])
    engine.load_state({**engine.state(), "model": kept})
    after = answers_of(engine)
    weights = dict(engine.export_weights())
    if dist.get_rank() == 0:
        save_file({"asked": before}, folder / f"{dist.get_world_size()} renamed.safetensors")
    return {
        "exported": sorted(weights),
        "kept": sorted(kept),
        "same": torch.equal(before.nan_to_num(), after.nan_to_num()),
    }


@pytest.mark.slow
@on_ranks("renamed", 1, 2)
def test_renamed_weights_keep_the_names_of_their_files(results, folder, world):
    result = results(world)["renamed"]
    names = sorted(load_file(folder / "renamed" / "model.safetensors"))
    assert all("language_model" in name for name in names)
    assert result["exported"] == names
    assert result["same"]
    assert set(names) <= set(result["kept"]) <= {*names, "lm_head.weight"}
    check_answers(
        load_file(folder / f"{world} renamed.safetensors")["asked"],
        plain_answers(folder / "renamed"),
    )


@worker_case(1, 2, 4)
def refused(folder: Path, device: torch.device) -> dict[str, list[str] | None]:
    """Return the error on each rank for models that cannot be loaded; None for one that could."""
    errors = {}
    for name in ("no_files", "missing_weight", "wrong_shape"):
        try:
            build(folder / name, device, always_guarded=True)
            errors[name] = None
        except InputError as error:
            errors[name] = gather(str(error))
    return errors


@pytest.mark.slow
@on_ranks("refused", 1, 2, 4)
@pytest.mark.parametrize(
    "name, message",
    [
        ("no_files", "lacks model.safetensors"),
        ("missing_weight", "lacks 1 weights of LlamaForCausalLM, such as model.norm.weight"),
        ("wrong_shape", "lm_head.weight has shape [96, 32] in the file, but should have [97, 32]"),
    ],
)
def test_broken_models(results, world, name, message):
    errors = results(world)["refused"][name]
    assert errors is not None
    assert len(errors) == world
    for error in errors:
        assert message in error


@worker_case(1, 2)
def guarded(folder: Path, device: torch.device) -> dict:
    """Return the guard's errors on each rank for layers that forget where sequences begin.

    Also what the guard leaves changed, and its warning for a model that ignores earlier tokens.
    """
    layouts = {"": "", "bf16": BF16, "critic": ""}
    told = {}

    def record_errors(model: str, layouts: dict[str, str]) -> None:
        for name, settings in layouts.items():
            try:
                head = Head.VALUES if name == "critic" else Head.LOG_PROBS
                build(folder / model, device, settings, head=head, always_guarded=True)
                told[f"{model} {name}"] = None
            except InputError as error:
                told[f"{model} {name}"] = gather(str(error))

    by_sequence = attention.by_sequence

    def forgetful(q, k, v, packing, *scoring):
        return by_sequence(q, k, v, Packing(packing.cu_seqlens, [0, len(q)], len(q)), *scoring)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            StateResets,
            "by_sequence",
            lambda self, forward, *args, **kwargs: forward(*args, **kwargs),
        )
        record_errors("lfm2", layouts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "by_sequence", forgetful)
        shared = {"cp2": CP2} if dist.get_world_size() == 2 else {}
        record_errors("llama", layouts | shared)
    record_errors("both ways", {"packed": ""})

    engine = build(folder / "llama", device, RECOMPUTE, lora=True)
    before = traces(engine)
    told["found"] = guard.check_isolation(engine)
    told["same"] = gather(before == traces(engine))
    with redirect_stdout(io.StringIO()) as output:
        build(folder / "deaf", device, always_guarded=True)
    return told | {"deaf": gather(output.getvalue())}


def traces(engine: FSDPEngine) -> dict:
    """Return everything that the guard might leave changed."""
    modules = list(engine.model.modules())
    return {
        "random": digest({"state": torch.get_rng_state()}),
        "weights": digest(engine.state()),
        "training": engine.model.training,
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules),
        "gradients": sum(p.grad is not None for p in engine.model.parameters()),
        "dropout seeds": vars(engine.dropout_seeds).copy(),
        "attention": engine.hf.config._attn_implementation,
        "config": engine.config,
    }


@pytest.mark.slow
@on_ranks("guarded", 1, 2)
def test_sequences_that_leak_into_others_are_found(results, world):
    """All ranks report it before the first step, even in bf16 or with a value head of zeros."""
    told = results(world)["guarded"]
    names = [
        f"{model} {layout}" for model in ("lfm2", "llama") for layout in ("", "bf16", "critic")
    ]
    if world == 2:
        names.append("llama cp2")
    for name in names:
        setting = "engine.use_remove_padding=false"
        if "cp2" in name:
            setting = "engine.context_parallel_size=1"
        assert told[name] is not None, name
        assert len(told[name]) == world, name
        for error in told[name]:
            assert "sequence at a time differ by" in error
            assert "first in layer 0 of 0 to 2, but rounding" in error
            assert setting in error
    for error in told["both ways packed"]:
        assert "cannot train this model: set use_bidirectional_attention=True to null in" in error
    difference, bound = told["found"]
    assert difference < 1e-5
    assert bound == 1e-4
    assert told["same"] == [True] * world
    assert "impossible to check whether the model keeps sequences apart" in told["deaf"][0]
    assert not any(told["deaf"][1:])


@pytest.mark.parametrize(
    "family, is_packed",
    [
        ("zaya", True),  # its recurrent modules return queries, keys and values
        ("zaya", False),
        ("deepseek_v4", False),  # transformers has a rule that would rename its last norm, too
    ],
)
def test_families_that_are_compared_in_this_process(tmp_path, family, is_packed):
    model = write_model(tmp_path, **families.SHAPES[family])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        difference = families.compare(model, is_packed)
    finally:
        dist.destroy_process_group()
    assert difference.is_small, difference
