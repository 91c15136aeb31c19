"""What the tests of the Megatron engine compare with: a loop around transformers, and estimates."""

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import peft
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from config import load
from data.batching.batch import Batch
from engines import schedule
from engines.megatron.mapping import Mapping
from engines.model import lora
from tests.engines.megatron_worker import (
    AUTO,
    AUX,
    FULL,
    SELECTIVE,
    TOTAL_STEPS,
    Case,
    keys,
    value_loss,
)
from tests.support.estimates import estimate_bytes
from tests.support.plain import check_answers, plain_model
from tests.support.training import (
    BETAS,
    CLIP,
    SETTINGS,
    WEIGHT_DECAY,
    kept_logits,
    make_batch,
    make_loss,
)

# Relative errors: in fp32, in bf16, and of experts' weights. (Some gradients in experts are next to
# nothing, and Adam makes a whole step of their rounding errors.)
BOUND = 1e-5
ROUNDED_BOUND = 0.02
EXPERTS_BOUND = 1e-4
# The coefficient of the routers' auxiliary loss, where a case has one.
AUX_COEFFICIENT = 0.3
# The sequences of each micro-batch of a step.
StepMicroBatches = tuple[tuple[int, ...], ...]
ONE_MICRO_BATCH: StepMicroBatches = (tuple(range(len(make_batch(0)))),)


def distance(measured: Tensor, expected: Tensor) -> float:
    """Return the difference of two tensors, relative to the norm of the second."""
    return ((measured - expected).norm() / expected.norm()).item()


def make_config(folder: Path, *pairs: str) -> DictConfig:
    """Return a configuration of the Megatron engine.

    pairs: key=value, with FOLDER for the folder of models
    """
    return load(
        "sft.yaml",
        [
            "model_engine=megatron",
            f"model.path={folder / 'llama'}",
            "data.train_files=unused",
            *(pair.replace("FOLDER", str(folder)) for pair in pairs),
        ],
    )


# -- a plain loop ----------------------------------------------------------------------------------


@dataclass
class PlainRun:
    """What a plain loop computes.

    steps: the loss, gradient norm, entropy and auxiliary loss of each step
    weights: at the end, named as in files; with adapters, only what is trained
    answers: log-probabilities (a critic: values) of batch 0 at the end, [T]
    """

    steps: list[dict[str, float]]
    weights: dict[str, Tensor]
    answers: Tensor


@dataclass
class SequenceOutputs:
    """A model's outputs for one sequence, [n] each, with 0 for the first token.

    outputs: log-probabilities and entropies, or a critic's values
    router_logits: of each layer with experts
    """

    outputs: list[Tensor]
    router_logits: tuple[Tensor, ...]


def plain_reference(folder: Path, case: Case, result: dict) -> PlainRun:
    """Return a plain run with the settings of a case that change results.

    result: the worker's, with the micro-batches of each step of a case with experts
    """
    relevant = []
    for setting in case.settings.split():
        is_of_model = setting.startswith(("model.", "optim.")) and "dtype" not in setting
        if is_of_model or setting == AUX:
            relevant.append(setting)
    micro_batches = [ONE_MICRO_BATCH] * len(result["steps"])
    if "micro_batches" in result:
        micro_batches = [tuple(map(tuple, of_step)) for of_step in result["micro_batches"]]
    plain_case = replace(case, settings=" ".join(relevant), uneven=False)
    return plain_training(folder / case.family, plain_case, tuple(micro_batches))


@cache
def plain_training(
    directory: Path, case: Case, micro_batches: tuple[StepMicroBatches, ...]
) -> PlainRun:
    """Train with a loop around transformers, one sequence after another, in fp32.

    micro_batches: of each step; the auxiliary loss depends on them
    """
    config = load(
        "sft.yaml", ["model_engine=megatron", "model.path=unused", *SETTINGS, *keys(case.settings)]
    )
    model = plain_model(directory)
    hf_config = model.config
    prepare(model, config, case)
    optimizer = plain_adamw(model, config.optim.eps)
    steps = []
    for step, of_step in enumerate(micro_batches):
        metrics = plain_backward(model, make_batch(step), of_step, case)
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(config.optim, step, TOTAL_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(metrics)
    batch = make_batch(0)
    with torch.no_grad():
        answers = [
            sequence_outputs(model, batch.select([i]), case).outputs[0] for i in range(len(batch))
        ]
    weights = {
        name.replace(".default", ""): parameter.detach()
        for name, parameter in Mapping(hf_config).hf_parameters(model)
        if parameter.requires_grad or not case.has_lora
    }
    return PlainRun(steps, weights, torch.cat(answers))


def prepare(model: nn.Module, config: DictConfig, case: Case) -> None:
    """Freeze parameters, attach adapters and put in a value head, as the case wants it."""
    for name, parameter in model.named_parameters():
        is_frozen = any(re.search(pattern, name) for pattern in config.model.freeze)
        parameter.requires_grad_(not is_frozen)
    if case.has_lora:
        attach_peft_adapters(model, config)
    if case.critic:
        model.lm_head = nn.Linear(model.config.hidden_size, 1, bias=False)
        nn.init.zeros_(model.lm_head.weight)


def attach_peft_adapters(model: nn.Module, config: DictConfig) -> None:
    """Attach PEFT's adapters, with the values that the engine's start from."""
    settings = OmegaConf.to_container(config.model.lora)
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=settings["rank"],
            lora_alpha=settings["alpha"],
            target_modules=settings["target_modules"],
        ),
        model,
    )
    for name, parameter in model.named_parameters():
        is_adapter = ".lora_" in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            plain_name = name.replace(".default", "")
            start = lora.initial_matrix(plain_name, parameter.shape, config.trainer.seed)
            parameter.data.copy_(start)


def plain_adamw(model: nn.Module, eps: float) -> torch.optim.AdamW:
    """Return AdamW, without weight decay for norms and biases."""
    decayed = []
    spared = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_spared = "norm" in name or name.endswith("bias")
            (spared if is_spared else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": spared, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, eps=eps, foreach=False)


def plain_backward(
    model: nn.Module, batch: Batch, micro_batches: StepMicroBatches, case: Case
) -> dict[str, float]:
    """Compute the gradients of a step; return its metrics.

    The auxiliary loss is transformers', for each layer's choices in each micro-batch, divided by
    the number of choices per token and weighted by the micro-batch's tokens.
    """
    metrics = {"loss": 0.0, "entropy": 0.0, "router_aux_loss": 0.0}
    num_tokens = len(batch.input_ids)
    make = value_loss if case.critic else make_loss
    loss_fn = make(num_tokens)
    for members in micro_batches:
        if not members:
            continue
        loss = 0.0
        router_logits = []
        for i in members:
            sequence = batch.select([i])
            of_sequence = sequence_outputs(model, sequence, case)
            mask = (sequence.fields["loss_mask"] * (sequence.position_ids > 0)).bool()
            term, extra = loss_fn(*(x * mask for x in of_sequence.outputs), sequence.fields)
            loss = loss + term
            metrics["entropy"] += extra["entropy"].item()
            router_logits.append(of_sequence.router_logits)
        aux_loss = torch.zeros(())
        for layer in map(torch.cat, zip(*router_logits)):  # none without experts
            weight = len(layer) / num_tokens
            aux_loss = aux_loss + layer_aux_loss(layer, model.config) * weight
        coefficient = AUX_COEFFICIENT if case.has_aux_loss else 0.0
        (loss + coefficient * aux_loss).backward()
        metrics["loss"] += loss.item()
        metrics["router_aux_loss"] += aux_loss.item() / model.config.num_hidden_layers
    return metrics


def layer_aux_loss(router_logits: Tensor, hf_config) -> Tensor:
    """Return the auxiliary loss of one layer's choices, 1 if they are balanced."""
    num_choices = hf_config.num_experts_per_tok
    loss = load_balancing_loss_func((router_logits,), hf_config.num_experts, num_choices)
    return loss / num_choices


def sequence_outputs(model: nn.Module, sequence: Batch, case: Case) -> SequenceOutputs:
    """Run a model on one sequence."""
    options = {"output_router_logits": True} if case.has_experts else {}
    outputs = model(sequence.input_ids[None], use_cache=False, **options)
    logits = outputs.logits[0, :-1]
    if case.critic:
        of_tokens = [logits[:, 0]]
    else:
        logits, targets = kept_logits(logits, sequence, slice(1, None))
        log_p = logits.log_softmax(-1)
        log_probs = log_p.gather(-1, targets[:, None])[:, 0]
        of_tokens = [log_probs, -(log_p.exp() * log_p).sum(-1)]
    router_logits = outputs.router_logits if case.has_experts else ()
    return SequenceOutputs([F.pad(x, (1, 0)) for x in of_tokens], router_logits)


# -- what holds for every training case ------------------------------------------------------------


def check_export(folder: Path, num_ranks: int, name: str, case: Case, result: dict) -> None:
    """Assert that all weights are exported, in the compute dtype, alike on all ranks."""
    assert len(set(result["digests"])) == 1
    names = result["names"][0]
    assert all(of_rank == names for of_rank in result["names"])
    files = load_file(folder / case.family / "model.safetensors")
    shapes = {hf_name: weight.shape for hf_name, weight in files.items()}
    if case.critic:
        shapes["lm_head.weight"] = torch.Size([1, 32])
    exported = load_file(folder / f"{num_ranks} {name}.safetensors")
    del exported["answers"]
    assert {hf_name: weight.shape for hf_name, weight in exported.items()} == shapes
    assert len(names) == len(shapes)
    dtype = torch.bfloat16 if case.is_rounded else torch.float32
    assert {weight.dtype for weight in exported.values()} == {dtype}


def check_memory_estimate(folder: Path, num_ranks: int, case: Case, result: dict) -> None:
    """Assert that the estimate is what there is, on each rank of each pipeline stage.

    The estimate for the optimizer is the mean over a stage's ranks.
    """
    config = make_config(
        folder,
        f"model.path={folder / case.family}",
        "engine.compute_dtype=float32",
        *keys(case.settings),
    )
    role = "critic" if case.critic else "actor"
    stages = estimate_bytes(config, num_ranks, "cpu", role)
    assert len(stages) == len({stage for stage, *_ in result["bytes"]})
    for number, estimated in enumerate(stages):
        optimizer_bytes = []
        for stage, parameters, gradients, optimizer in result["bytes"]:
            if stage == number:
                assert parameters == estimated["parameters"]
                assert gradients == estimated["gradients"]
                optimizer_bytes.append(optimizer)
        mean = sum(optimizer_bytes) / len(optimizer_bytes)
        assert math.isclose(mean, estimated["optimizer"], rel_tol=1e-12)


def check_recomputation(case: Case, result: dict) -> None:
    """Assert that attention runs again in the backward pass if, and only if, it is recomputed."""
    is_recomputed = FULL in case.settings or SELECTIVE in case.settings
    assert set(result["attention passes"]) == {2.0 if is_recomputed else 1.0}


def check_answers_by_dp_rank(answers: Tensor, expected: Tensor, case: Case) -> None:
    """Assert that every rank has the answers for its own share, and no others.

    answers: [ranks, 3, T]
    expected: [3, T]
    """
    sizes = dict(pair.split("=") for pair in case.settings.split())
    inner_size = None  # the ranks that share every sequence
    if AUTO not in case.settings:
        tensor_parallel_size = int(sizes.get("tensor_model_parallel_size", 1))
        inner_size = tensor_parallel_size * int(sizes.get("context_parallel_size", 1))
    num_stages = int(sizes.get("pipeline_model_parallel_size", 1))
    # Ranks are ordered by tensor, context, data, pipeline; the first changes fastest.
    for of_stage in answers.chunk(num_stages):
        check_answers(of_stage, expected, inner_size, case.uneven)
