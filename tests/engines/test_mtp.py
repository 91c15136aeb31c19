"""Multi-token prediction (MTP) on the Megatron engine, against a plain loop, in fp32."""

import json
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from config import InputError, load
from data.batching.batch import Batch
from engines import schedule
from engines.build import engine_class
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_checkpoint, export_hf
from engines.megatron import bridge
from engines.megatron.engine import MegatronEngine
from engines.model import mtp
from engines.model.flops import count_flops
from engines.model.hf import build_on_meta, read_hf_config
from examples.arithmetic import make_rows, make_tokenizer as make_digit_tokenizer
from job.models import report_unused_mtp
from tests.engines.megatron_checks import plain_adamw
from tests.engines.megatron_worker import (
    AUTO,
    BF16,
    CASES,
    CP2,
    EPS,
    FULL,
    NO_SP,
    OVERLAP,
    PADDED,
    PP2,
    REPLICATED,
    SELECTIVE,
    SHORT,
    TOTAL_STEPS,
    TP2,
    VPP2,
    Case,
    StepShare,
    build,
    count_bytes,
    counted_calls,
    keys,
    save_tensors,
    step_share,
)
from tests.support.cases import id_of, needs
from tests.support.estimates import checkpoint_bytes, estimate_bytes
from tests.support.launch import launch, run
from tests.support.models import make_model
from tests.support.plain import column, plain_model, tensor_bytes, worst
from tests.support.training import (
    CLIP,
    SETTINGS,
    gather,
    kept_logits,
    make_batch,
    make_loss,
    make_tokenizer,
)

BOUND = 1e-6
NUM_STEPS = 4
MTP = "model.mtp.enable=true model.mtp.enable_train=true model.mtp.mtp_loss_scaling_factor=0.3"
DETACHED = "model.mtp.detach_encoder=true"
FROZEN = "model.mtp.enable=true"
GRADIENT = "gradient of "


def make_config(directory: Path, settings: str):
    return load(
        "sft.yaml",
        ["model_engine=megatron", f"model.path={directory}", *SETTINGS, *keys(settings)],
    )


# -- training, on ranks ----------------------------------------------------------------------------


@dataclass
class Training:
    """What an engine reports of some steps.

    gradients: of the first step, by Hugging Face name, if they were asked for
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def train(
    engine: MegatronEngine,
    steps: range,
    with_gradients: bool = False,
    uneven: bool = False,
    batch: Batch | None = None,
) -> Training:
    """Train on the batches of these steps.

    with_gradients: keep those of the first step; every rank must hold them whole
    batch: in place of each step's
    """
    result = Training()
    step_optimizer = engine.step_optimizer

    def step_and_keep_gradients(lr: float) -> float:
        if with_gradients and not result.gradients:
            exported = bridge.export(
                engine.mapping,
                engine.models,
                torch.float32,
                engine.device,
                lambda parameter: parameter.main_grad.detach(),
            )
            result.gradients.update((name, x.clone()) for name, x in exported)
        return step_optimizer(lr)

    engine.step_optimizer = step_and_keep_gradients
    for step in steps:
        if batch is None:
            share = step_share(engine, step, Case("any", uneven=uneven))
        else:
            share = StepShare(batch, None, len(batch.input_ids))
        loss_fn = make_loss(share.num_tokens)
        result.steps.append(engine.train_batch(share.batch, loss_fn, step, share.micro_batches))
    engine.step_optimizer = step_optimizer
    return result


def save_weights(folder: Path, name: str, weights: dict, gradients: dict) -> None:
    """Write down the final weights, and the first step's gradients."""
    named_gradients = {GRADIENT + hf_name: x for hf_name, x in gradients.items()}
    save_tensors(weights | named_gradients, folder / f"{name}.safetensors")


def load_gradients(folder: Path, name: str) -> dict[str, Tensor]:
    tensors = load_file(folder / f"{name}.safetensors")
    return {
        hf_name.removeprefix(GRADIENT): x
        for hf_name, x in tensors.items()
        if hf_name.startswith(GRADIENT)
    }


# -- a plain loop ----------------------------------------------------------------------------------


@dataclass
class PlainRun:
    """What a plain loop computes; gradients are the first step's."""

    steps: list[dict[str, float]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class PlainModel:
    """A transformers model with MTP layers, which run on one sequence after another."""

    def __init__(self, directory: Path, detach_encoder: bool):
        self.model = plain_model(directory)
        self.num_layers = mtp.num_layers(self.model.config)
        self.detach_encoder = detach_encoder
        layers = [mtp.LAYERS["mimo"](self.model.config) for _ in range(self.num_layers)]
        self.layers = self.model.model.mtp_layers = nn.ModuleList(layers)
        prefix = "model.mtp_layers."
        files = load_file(directory / "model.safetensors")
        weights = {
            name.removeprefix(prefix): x for name, x in files.items() if name.startswith(prefix)
        }
        self.layers.load_state_dict(weights)
        self.before_norm: list[Tensor] = []
        self.model.model.norm.register_forward_pre_hook(
            lambda _, inputs: self.before_norm.append(inputs[0][0])
        )

    def loss(self, sequence: Batch, loss_fn) -> Tensor:
        """Return the loss of a sequence, without MTP."""
        logits = self.model(sequence.input_ids[None], use_cache=False).logits[0, :-1]
        logits, targets = kept_logits(logits, sequence, slice(1, None))
        log_p = logits.log_softmax(-1)
        log_probs = log_p.gather(-1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        mask = (sequence.fields["loss_mask"] * (sequence.position_ids > 0)).bool()
        outputs = [F.pad(x, (1, 0)) * mask for x in (log_probs, entropy)]
        return loss_fn(*outputs, sequence.fields)[0]

    def mtp_losses(self, sequence: Batch) -> list[Tensor]:
        """Return each MTP layer's sum of cross-entropies; call after loss()."""
        ids = sequence.input_ids
        hidden = self.before_norm.pop()
        output_matrix = self.model.lm_head.weight.detach()
        if self.detach_encoder:
            hidden = hidden.detach()
        losses = []
        for number, layer in enumerate(self.layers, 1):
            embeddings = self.model.model.embed_tokens(ids[1 + number :])
            if self.detach_encoder:
                embeddings = embeddings.detach()
            # No token is ahead of the last ones. vLLM's drafters see none for the first either.
            tokens = torch.zeros_like(hidden)
            tokens[1 : len(ids) - number] = embeddings
            hidden = self.mtp_layer(layer, hidden, tokens)
            trained = (sequence.fields["loss_mask"][number + 1 :] != 0).nonzero()[:, 0]
            logits = hidden[trained] @ output_matrix.T
            losses.append(F.cross_entropy(logits, ids[trained + number + 1], reduction="sum"))
        return losses

    def mtp_layer(self, layer: nn.Module, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Run a layer on the hidden states and the embeddings ahead of a sequence, [n, h] each."""
        length = len(hidden)
        joined = torch.cat([layer.hidden_layernorm(hidden), layer.token_layernorm(tokens)], -1)[
            None
        ]
        positions = self.model.model.rotary_emb(joined, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        outputs = layer(
            layer.input_proj(joined), attention_mask=mask, position_embeddings=positions
        )
        return layer.final_layernorm(outputs[0])


def plain_backward(plain: PlainModel, batch: Batch, scaling_factor: float) -> dict[str, float]:
    """Compute the gradients of a step; return its metrics."""
    loss_fn = make_loss(len(batch.input_ids))
    is_trained = batch.fields["loss_mask"] != 0
    num_targets = [
        (is_trained & (batch.position_ids > layer)).sum() for layer in range(plain.num_layers + 1)
    ]
    metrics = {"loss": 0.0}
    total = 0.0
    mtp_losses = [torch.zeros(()) for _ in range(plain.num_layers)]
    for number in range(len(batch)):
        sequence = batch.select([number])
        loss = plain.loss(sequence, loss_fn)
        total = total + loss
        metrics["loss"] += loss.item()
        for layer, layer_loss in enumerate(plain.mtp_losses(sequence)):
            mtp_losses[layer] = mtp_losses[layer] + layer_loss / num_targets[layer + 1]
    (total + scaling_factor / plain.num_layers * sum(mtp_losses)).backward()
    for layer, layer_loss in enumerate(mtp_losses, 1):
        metrics[f"mtp/loss_{layer}"] = layer_loss.item()
    return metrics


@cache
def plain_training(directory: Path, detach_encoder: bool) -> PlainRun:
    """Train NUM_STEPS steps with a loop around transformers, one sequence after another."""
    config = make_config(directory, f"{MTP} {EPS}")
    plain = PlainModel(directory, detach_encoder)
    named = {name: p for name, p in plain.model.named_parameters() if p.requires_grad}
    optimizer = plain_adamw(plain.model, config.optim.eps)
    steps = []
    gradients = {}
    for step in range(NUM_STEPS):
        factor = config.model.mtp.mtp_loss_scaling_factor
        metrics = plain_backward(plain, make_batch(step), factor)
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in named.items()}
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(plain.model.parameters(), CLIP).item()
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(config.optim, step, TOTAL_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(metrics)
    return PlainRun(steps, gradients, {name: p.detach() for name, p in named.items()})


# -- training equals a plain loop ------------------------------------------------------------------


@dataclass
class MTPCase:
    """Training of a model with MTP. With a replicated optimizer, gradients are compared too."""

    family: str
    settings: str = ""
    uneven: bool = False

    @property
    def all_settings(self) -> str:
        return f"{MTP} {EPS} {self.settings}"

    @property
    def is_detached(self) -> bool:
        return DETACHED in self.settings

    @property
    def has_gradients(self) -> bool:
        return REPLICATED in self.settings

    def run(self, folder: Path, this_device: torch.device, name: str) -> dict:
        print(name, flush=True)
        engine = build(MegatronEngine, folder / self.family, this_device, self.all_settings)
        training = train(engine, range(NUM_STEPS), self.has_gradients, self.uneven)
        weights = dict(engine.export_weights())
        save_weights(folder, name, weights, training.gradients)
        return {
            "steps": training.steps,
            "flops": engine.flops([3, 5], 4),
            "bytes": gather(count_bytes(engine)),
        }


MTP_CASES = {
    "mtp tp2": MTPCase("mimo_two", f"{TP2} {REPLICATED}"),
    "mtp tp2 no sp padded": MTPCase("mimo", f"{TP2} {NO_SP} {PADDED} {REPLICATED}"),
    "mtp tp2 full detached": MTPCase("mimo_two", f"{TP2} {FULL} {DETACHED} {REPLICATED}"),
    "mtp pp2": MTPCase("mimo", f"{PP2} {REPLICATED} {SELECTIVE}"),
    "mtp pp2 detached padded": MTPCase("mimo_two", f"{PP2} {DETACHED} {PADDED}"),
    "mtp pp2 vpp2": MTPCase("mimo_two", f"{PP2} {VPP2}"),
    "mtp pp2 vpp2 tied full": MTPCase("mimo_tied", f"{PP2} {VPP2} {FULL} {REPLICATED}"),
    "mtp cp2": MTPCase("mimo_two", f"{CP2} {REPLICATED}"),
    "mtp cp2 padded full": MTPCase("mimo", f"{CP2} {PADDED} {FULL} {REPLICATED}"),
    "mtp dp2 overlap": MTPCase("mimo", OVERLAP),
    "mtp dp2 uneven": MTPCase("mimo_two", REPLICATED, uneven=True),
    "mtp tied detached": MTPCase("mimo_tied", f"{REPLICATED} {DETACHED}"),
    "mtp bf16 tp2": MTPCase("mimo", f"{TP2} {BF16}"),
    "mtp auto": MTPCase("mimo_two", f"{AUTO} {SHORT} {REPLICATED}"),
    "mtp auto padded full": MTPCase("mimo", f"{AUTO} {SHORT} {PADDED} {FULL} {REPLICATED}"),
}
for name, case in MTP_CASES.items():
    CASES.add(2, name, lambda folder, device, case=case, name=name: case.run(folder, device, name))
MTP_PARAMS = [pytest.param(name, marks=needs((2, name)), id=id_of(name)) for name in MTP_CASES]


@pytest.mark.slow
@pytest.mark.parametrize("name", MTP_PARAMS)
def test_training_equals_a_plain_loop(megatron_results, megatron_folder, name):
    case = MTP_CASES[name]
    steps = megatron_results[2][name]["steps"]
    plain = plain_training(megatron_folder / case.family, case.is_detached)
    assert steps[0].keys() - {"entropy", "lr", "skipped"} == plain.steps[0].keys()
    is_rounded = BF16 in case.settings
    bound = 0.05 if is_rounded else 1e-5
    for key in plain.steps[0]:
        assert worst(column(steps, key), column(plain.steps, key)) < bound, key
    if is_rounded:
        return
    tensors = load_file(megatron_folder / f"{name}.safetensors")
    expected_names = set(plain.weights)
    if case.has_gradients:
        expected_names |= {GRADIENT + hf_name for hf_name in plain.gradients}
        for hf_name, gradient in plain.gradients.items():
            error = (tensors[GRADIENT + hf_name] - gradient).abs().max()
            assert error < BOUND, hf_name
    assert tensors.keys() == expected_names
    for hf_name, weight in plain.weights.items():
        assert (tensors[hf_name] - weight).norm() < 1e-5 * weight.norm(), hf_name


@pytest.mark.slow
@pytest.mark.parametrize("name", MTP_PARAMS)
def test_flops_count_the_layers(megatron_results, megatron_folder, name):
    hf_config = read_hf_config(megatron_folder / MTP_CASES[name].family)
    num_layers = mtp.num_layers(hf_config)
    without = count_flops(build_on_meta(hf_config, torch.float32), hf_config)
    with_mtp = count_flops(build_on_meta(hf_config, torch.float32, with_mtp=True), hf_config)
    # Attention of 4 heads and 2; gate, up and down; input.
    in_layer = 4 * 128 * 128 - 2 * 64 * 128 + 3 * 48 * 128 + 2 * 128 * 128
    added = [new - old for new, old in zip(with_mtp, without)]
    assert added == [
        6 * num_layers * in_layer,
        num_layers * without[1] * 2 / 3,
        6 * num_layers * 128,
    ]
    expected = 8 * with_mtp[0] + 4 * with_mtp[1] + 34 * with_mtp[2]
    assert megatron_results[2][name]["flops"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", MTP_PARAMS)
def test_estimate_of_memory_counts_the_layers(megatron_results, megatron_folder, name):
    case = MTP_CASES[name]
    config = make_config(megatron_folder / case.family, case.all_settings)
    stages = estimate_bytes(config, 2, "cpu")
    for stage, parameters, gradients, _ in megatron_results[2][name]["bytes"]:
        assert parameters == stages[stage]["parameters"]
        assert gradients == stages[stage]["gradients"]


# -- layers that are not trained -------------------------------------------------------------------

UNTRAINED = {
    "mtp frozen": ("mimo", FROZEN),
    "mtp left out": ("mimo_two", ""),
    "mtp bf16": ("mimo", f"{FROZEN} {BF16}"),
    "mtp left out tied": ("mimo_tied", ""),
}


@CASES.case(2)
def untrained(folder: Path, this_device: torch.device) -> dict:
    """Train steps that leave the MTP layers out; save a checkpoint of the first run."""
    results = {}
    for name, (family, settings) in UNTRAINED.items():
        settings = f"{settings} {EPS} {REPLICATED}"
        engine = build(MegatronEngine, folder / family, this_device, settings)
        training = train(engine, range(NUM_STEPS), with_gradients=True)
        results[name] = training.steps
        weights = dict(engine.export_weights())
        save_weights(folder, name, weights, training.gradients)
        if name == "mtp frozen":
            progress = {"step": NUM_STEPS, "export_dtype": "float32"}
            checkpointer = Checkpointer(folder / "mtp checkpoints", 2, asynchronous=False)
            checkpointer.save(NUM_STEPS, engine, progress, make_tokenizer())
    return results


@pytest.mark.slow
@needs((2, "untrained"))
@pytest.mark.parametrize("name", ["mtp frozen", "mtp left out", "mtp bf16"])
def test_untrained_layers_are_exported_as_they_were(megatron_results, megatron_folder, name):
    """After steps with weight decay, in which everything else has changed."""
    steps = megatron_results[2]["untrained"][name]
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert not any("mtp" in key for key in step)
    family, _ = UNTRAINED[name]
    weights = load_file(megatron_folder / f"{name}.safetensors")
    files = load_file(megatron_folder / family / "model.safetensors")
    assert {n for n in weights if not n.startswith(GRADIENT)} == files.keys()
    for hf_name, weight in files.items():
        is_unchanged = torch.equal(weights[hf_name], weight.to(weights[hf_name].dtype))
        assert is_unchanged is ("mtp_layers" in hf_name), hf_name


@pytest.mark.slow
@needs((2, "untrained"))
@pytest.mark.parametrize(
    "with_mtp, without, is_detached",
    [
        pytest.param("mtp tp2", "mtp left out", False, marks=needs((2, "mtp tp2"))),
        pytest.param(
            "mtp tp2 full detached",
            "mtp left out",
            True,
            marks=needs((2, "mtp tp2 full detached")),
        ),
        pytest.param(
            "mtp tied detached", "mtp left out tied", True, marks=needs((2, "mtp tied detached"))
        ),
    ],
)
def test_gradients_of_head_and_trunk(
    megatron_results, megatron_folder, with_mtp, without, is_detached
):
    """MTP gives no gradient to the output matrix and the norm before it.

    With detach_encoder it gives none to anything but its own layers. (A tied matrix is also the
    embedding.)
    """
    gradients = load_gradients(megatron_folder, with_mtp)
    expected = load_gradients(megatron_folder, without)
    assert len(expected) > 40
    assert not any("mtp" in hf_name for hf_name in expected)
    equal = {
        hf_name
        for hf_name, gradient in expected.items()
        if (gradients[hf_name] - gradient).abs().max() < BOUND
    }
    if is_detached:
        assert equal == expected.keys()
    else:
        assert equal == {"lm_head.weight", "model.norm.weight"}
    for hf_name, gradient in gradients.items():
        assert "mtp_layers" not in hf_name or gradient.abs().max() > 1000 * BOUND, hf_name


@pytest.mark.slow
@needs((2, "untrained"))
def test_export_of_a_checkpoint_includes_untrained_layers(
    megatron_results, megatron_folder, tmp_path
):
    """They come from model.path, which must still be there."""
    checkpoint = megatron_folder / f"mtp checkpoints/step_{NUM_STEPS:08d}"
    model = megatron_folder / "mimo"
    export_checkpoint(checkpoint, tmp_path / "hf")
    exported = load_file(tmp_path / "hf/model.safetensors")
    expected = load_file(megatron_folder / "mtp frozen.safetensors")
    assert exported.keys() == load_file(model / "model.safetensors").keys()
    for hf_name, weight in exported.items():
        assert torch.equal(expected[hf_name], weight), hf_name
    gone = megatron_folder / "gone"
    model.rename(gone)
    message = re.escape(f"The other weights were in {model}, which does not exist")
    try:
        with pytest.raises(InputError, match=message):
            export_checkpoint(checkpoint, tmp_path / "other")
    finally:
        gone.rename(model)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "settings, is_reported", [(MTP, False), ("model.mtp.enable=true", True), ("", True)]
)
def test_layers_that_are_left_out_are_reported(megatron_folder, capsys, settings, is_reported):
    directory = megatron_folder / "mimo_two"
    report_unused_mtp(make_config(directory, settings), read_hf_config(directory))
    message = "the model is built without its 2 MTP layers"
    assert (message in capsys.readouterr().out) is is_reported


# -- when the layers run ---------------------------------------------------------------------------


@CASES.case(2)
def mtp_passes(folder: Path, this_device: torch.device) -> list[int]:
    """Return how often the MTP layer ran in a step, its micro-batches, and how often else."""
    engine = build(MegatronEngine, folder / "mimo", this_device, MTP)
    batch = make_batch(0)
    with counted_calls([engine.models[-1].mtp.layers[0]]) as calls:
        train(engine, range(1), batch=batch)
        num_in_step = len(calls)
        engine.log_probs(batch)
    return [num_in_step, len(engine.divide_share(batch.lengths)), len(calls) - num_in_step]


@pytest.mark.slow
@needs((2, "mtp_passes"))
def test_only_training_runs_the_layers(megatron_results):
    num_in_step, num_micro_batches, num_otherwise = megatron_results[2]["mtp_passes"]
    assert num_in_step == num_micro_batches
    assert num_micro_batches > 1
    assert num_otherwise == 0


@CASES.case(2)
def mtp_without_targets(folder: Path, this_device: torch.device) -> dict:
    """Train on no token, and on second tokens alone, which no MTP layer predicts."""
    results = {}
    for name in ("none", "second"):
        engine = build(MegatronEngine, folder / "mimo", this_device, f"{MTP} {REPLICATED}")
        batch = make_batch(0)
        is_trained = (batch.position_ids == 1) & (name == "second")
        batch.fields["loss_mask"] = is_trained.float()
        training = train(engine, range(1), with_gradients=True, batch=batch)
        of_mtp = [x for hf_name, x in training.gradients.items() if "mtp_layers" in hf_name]
        gradient_sum = sum(gradient.abs().sum().item() for gradient in of_mtp)
        results[name] = training.steps[0] | {"gradients of MTP": gradient_sum}
    return results


@pytest.mark.slow
@needs((2, "mtp_without_targets"))
@pytest.mark.parametrize("name", ["none", "second"])
def test_nothing_to_predict(megatron_results, name):
    step = megatron_results[2]["mtp_without_targets"][name]
    assert step["mtp/loss_1"] == 0
    assert step["gradients of MTP"] == 0
    assert step["skipped"] == 0
    assert (step["grad_norm"] > 0.01) is (name == "second")


# -- checkpoints -----------------------------------------------------------------------------------

SAVED_AT = 2


@CASES.case(2)
def mtp_resume(folder: Path, this_device: torch.device) -> dict:
    """Export what was read; save, and resume on another layout."""
    settings = f"{MTP} {EPS}"
    engine = build(MegatronEngine, folder / "mimo_two", this_device, f"{settings} {TP2}")
    exported = dict(engine.export_weights())
    files = load_file(folder / "mimo_two" / "model.safetensors")
    is_same = exported.keys() == files.keys()
    is_same = is_same and all(torch.equal(exported[name], x) for name, x in files.items())
    train(engine, range(SAVED_AT))
    checkpointer = Checkpointer(folder / "mtp resumed", 2, asynchronous=False)
    progress = {"step": SAVED_AT, "export_dtype": "float32"}
    checkpointer.save(SAVED_AT, engine, progress, make_tokenizer())
    export_hf(engine, make_tokenizer(), folder / "mtp hf")
    saved = train(engine, range(SAVED_AT, NUM_STEPS)).steps
    engine = build(MegatronEngine, folder / "mimo_two", this_device, f"{settings} {PP2}")
    checkpointer.load(checkpointer.directory / f"step_{SAVED_AT:08d}", engine)
    resumed = train(engine, range(SAVED_AT, NUM_STEPS)).steps
    return {"round trip": is_same, "saved": saved, "resumed": resumed}


@pytest.mark.slow
@needs((2, "mtp_resume"))
def test_round_trip_and_resume_on_another_layout(megatron_results):
    result = megatron_results[2]["mtp_resume"]
    assert result["round trip"] is True
    for key in ("loss", "mtp/loss_1", "mtp/loss_2", "grad_norm", "lr"):
        assert worst(column(result["resumed"], key), column(result["saved"], key)) < 1e-5, key


@pytest.mark.slow
@needs((2, "mtp_resume"))
def test_files_of_a_checkpoint(megatron_results, megatron_folder, tmp_path):
    """Its export equals the engine's, and it is as large as a dry run reports."""
    checkpoint = megatron_folder / "mtp resumed" / f"step_{SAVED_AT:08d}"
    export_checkpoint(checkpoint, tmp_path / "hf")
    by_engine = load_file(megatron_folder / "mtp hf" / "model.safetensors")
    by_export = load_file(tmp_path / "hf" / "model.safetensors")
    assert by_engine.keys() == by_export.keys()
    for hf_name, weight in by_engine.items():
        assert torch.equal(by_export[hf_name], weight), hf_name
    files = load_file(megatron_folder / "mimo_two" / "model.safetensors")
    assert by_engine.keys() == files.keys()
    config = make_config(megatron_folder / "mimo_two", f"{MTP} {EPS} {TP2}")
    stored = FileSystemReader(checkpoint / "weights").read_metadata()
    assert checkpoint_bytes(config) == pytest.approx(tensor_bytes(stored), rel=0.01)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, settings, message",
    [
        ("qwen3", "enable=true", "num_nextn_predict_layers=None and mtp_num_hidden_layers=None"),
        (
            "mimo",
            "enable_train=true",
            "model.mtp.enable_train=True does nothing with model.mtp.enable=false",
        ),
        (
            "mimo",
            "enable=true detach_encoder=true",
            "model.mtp.detach_encoder=True does nothing with model.mtp.enable_train=false",
        ),
        (
            "mimo",
            "enable=true enable_train=true model_engine=fsdp",
            "needs model_engine=megatron: transformers has no MTP layers",
        ),
        (
            "mimo",
            "enable=true enable_train=true model.lora.rank=4",
            "with model.lora.rank=4 only adapters are trained",
        ),
        (
            "mimo",
            "enable=true enable_train=true engine.bridge=mbridge",
            "does not support mimo models",
        ),
        (
            "mimo",
            "enable=true enable_train=true detach_encoder=true model.freeze=[mtp_layers]",
            "leave nothing to train for the loss of the MTP layers",
        ),
        (
            "lost",
            "enable=true",
            "lack 1 of the 16 weights of its 1 MTP layers, such as "
            "model.mtp_layers.0.input_proj.weight",
        ),
        (
            "qwen3_mtp",
            "enable=true enable_train=true",
            "no MTP layers for model_type=qwen3, only for mimo",
        ),
    ],
)
def test_mistakes(tmp_path, family, settings, message):
    model = make_refused_model(tmp_path / family, family)
    pairs = []
    for setting in settings.split():
        has_section = "." in setting or "model_engine" in setting
        pairs.append(setting if has_section else f"model.mtp.{setting}")
    with pytest.raises(InputError, match=re.escape(message)):
        config = load(
            "sft.yaml",
            ["model_engine=megatron", f"model.path={model}", "data.train_files=unused", *pairs],
        )
        engine_class(config.model_engine).check(config, 1)


def make_refused_model(directory: Path, name: str) -> Path:
    """Write mimo, qwen3, mimo without one weight, or qwen3 whose config.json has an MTP layer."""
    make_model(directory, "mimo" if name in ("mimo", "lost") else "qwen3")
    if name == "lost":
        file = directory / "model.safetensors"
        weights = load_file(file)
        kept = {n: x for n, x in weights.items() if not n.endswith("input_proj.weight")}
        save_file(kept, file, {"format": "pt"})
    if name == "qwen3_mtp":
        path = directory / "config.json"
        hf_config = json.loads(path.read_text())
        path.write_text(json.dumps(hf_config | {"num_nextn_predict_layers": 1}))
    return directory


# -- a step of PPO ---------------------------------------------------------------------------------

# A program that drafts with the exported layer, in a vLLM that knows nothing of this repository.
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
path, result, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(
    path, dtype="float32", max_model_len=64, enforce_eager=True, kv_cache_memory_bytes=10**7,
    skip_tokenizer_init=True, trust_remote_code=True,
    speculative_config={"method": "mtp", "num_speculative_tokens": 1},
)
params = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
tokens = llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
open(result, "w").write(json.dumps(list(tokens)))
"""


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory) -> Path:
    """Two steps of PPO; only the actor is trained with MTP, and vLLM drafts with its layer."""
    folder = tmp_path_factory.mktemp("mtp_ppo")
    tokenizer = make_digit_tokenizer()
    make_model(
        folder / "model", "mimo", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id
    )
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps(row) + "\n" for row in make_rows()[0][:16]]
    (folder / "train.jsonl").write_text("".join(rows))
    launch(
        1,
        "train_ppo.py",
        "model_engine=megatron",
        f"model.path={folder}/model",
        f"data.train_files={folder}/train.jsonl",
        f"output_dir={folder}/out",
        "trainer.report=false",
        f"data.cache_dir={folder}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=200",
        "rollout.n=2",
        "rollout.max_tokens=12",
        "rollout.kv_cache_gib=0.05",
        "reward.num_workers=1",
        "optim.lr=3e-3",
        *keys(MTP),
        "model.mtp.enable_rollout=true",
        "model.mtp.num_speculative_tokens=2",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_loss=true",
        "trainer.total_steps=2",
        "algorithm.ppo_epochs=2",
    )
    return folder


@pytest.mark.slow
def test_a_step_of_ppo(ppo_run):
    """vLLM takes the weights and drafts. The MTP layer is trained and exported."""
    lines = (ppo_run / "out/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    losses = [step["mtp/loss_1"] for step in steps if "mtp/loss_1" in step]
    assert len(losses) == 2
    assert 0 < min(losses)
    assert max(losses) < 20
    for step in steps[:2]:
        rate = step["mtp/accept_rate"]
        assert 0 <= rate <= 1
        assert step["mtp/accept_length"] == pytest.approx(1 + 2 * rate, rel=0.2)
        assert step["rollout_corr/log_prob_gap"] < 1e-4
    before = load_file(ppo_run / "model" / "model.safetensors")
    after = load_file(ppo_run / "out/hf" / "model.safetensors")
    assert before.keys() == after.keys()
    for hf_name, weight in before.items():
        assert "mtp_layers" not in hf_name or not torch.equal(after[hf_name], weight), hf_name


@pytest.mark.slow
def test_another_vllm_drafts_with_the_exported_layer(ppo_run):
    """And generates the same greedy tokens as transformers."""
    prompt = [*range(4, 20)]
    result = ppo_run / "tokens.json"
    command = [sys.executable, "-c", GENERATE, ppo_run / "out/hf", result, json.dumps(prompt)]
    run(command, cwd=ppo_run, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    model = AutoModelForCausalLM.from_pretrained(ppo_run / "out/hf", dtype=torch.float32)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=-1
        )
    assert json.loads(result.read_text()) == expected[0, len(prompt) :].tolist()
