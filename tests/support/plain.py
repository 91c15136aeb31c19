"""A plain training loop around transformers, whose results the engines must match.

It runs one sequence at a time in fp32 with transformers' eager attention and shares no code with
the engines.
"""

import copy
import functools
import math
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from data.batching.batch import Batch
from engines.model.hf import auto_class
from tests.support.training import (
    BETAS,
    CLIP,
    ENTROPY_BONUS,
    MIN_LR_RATIO,
    PEAK_LR,
    TOTAL_STEPS,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    divide,
    kept_logits,
    make_batch,
)

# Relative errors. Adam divides a gradient by its own size, so a rounding error in a small one is a
# whole step of that weight.
LOSS_BOUND = 2e-6
NORM_BOUND = 5e-5
WEIGHT_BOUND = 0.01 * PEAK_LR  # absolute: a hundredth of one step
LOG_PROB_BOUND = 1e-5  # absolute, nats
# Numbers of steps after which plain_training() keeps the weights. The second batch limits what
# sampling could have drawn; from the third on, both moments of Adam count.
FEW = 3
MORE = 6  # batches repeat every four steps
LORA_RANK = 4
LORA_ALPHA = 6


# -- training -------------------------------------------------------------------------------------


@dataclass
class PlainTraining:
    """The results of a plain loop.

    losses, norms  of each step; the gradient norm before clipping
    weights        number of steps -> the weights after them, {name in the files: weight}
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@functools.cache
def plain_training(
    directory: Path,
    with_muon: bool = False,
    lora: bool = False,
    freeze: tuple[str, ...] = (),
    num_steps: int = MORE,
) -> PlainTraining:
    """Train the model of a directory; the learning rate's schedule has TOTAL_STEPS.

    lora: peft trains the adapter in {directory}_adapter, and the weights kept are merged.
    freeze: regular expressions of the parameters that are not trained.
    """
    model = plain_model(directory)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not matches_any(freeze, name))
    if lora:
        model = PeftModel.from_pretrained(model, f"{directory}_adapter", is_trainable=True)
    optimizers = plain_optimizers(model, with_muon)
    result = PlainTraining()
    for step in range(num_steps):
        loss, _ = plain_loss(model, make_batch(step))
        loss.backward()
        result.losses.append(loss.item())
        result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
        if step + 1 in (FEW, MORE, num_steps):
            result.weights[step + 1] = weights_in_files(model, lora)
    return result


def plain_optimizers(model: nn.Module, with_muon: bool) -> list[torch.optim.Optimizer]:
    """Return AdamW, without weight decay for norms and biases, and optionally Muon.

    with_muon: whether Muon trains the hidden matrices.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    spared = {
        name: p
        for name, p in trained.items()
        if "norm" in name or ".act_fn." in name or name.endswith("bias")
    }
    hidden = {name: p for name, p in trained.items() if with_muon and "_proj.weight" in name}
    decayed = [p for name, p in trained.items() if name not in spared and name not in hidden]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": list(spared.values()), "weight_decay": 0.0},
    ]
    optimizers = [torch.optim.AdamW(groups, betas=BETAS, foreach=False)]
    if with_muon:
        muon = torch.optim.Muon(
            list(hidden.values()), weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    return optimizers


def learning_rate(step: int) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then a cosine."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (TOTAL_STEPS - WARMUP_STEPS)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return PEAK_LR * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * cosine)


def weights_in_files(model: nn.Module, lora: bool) -> dict[str, Tensor]:
    """Return copies of a model's weights, named as in its files; adapters are merged."""
    whole = copy.deepcopy(model).merge_and_unload() if lora else model
    weights = {name: x.detach().clone() for name, x in stored_tensors(whole).items()}
    return weights if lora else revert_weight_conversion(model, weights)


def matches_any(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


# -- models, losses and answers -------------------------------------------------------------------


def plain_model(directory: Path | str) -> nn.Module:
    """Load a model in fp32 with transformers' eager attention."""
    kind = auto_class(AutoConfig.from_pretrained(directory))
    return kind.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def make_adapter(directory: Path) -> None:
    """Write a peft adapter with two random matrices per layer to {directory}_adapter."""
    torch.manual_seed(1)
    settings = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(directory), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.detach().normal_(std=0.1)
    model.save_pretrained(f"{directory}_adapter")


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the buffers that are saved with them."""
    state = model.state_dict()
    buffers = {name: x for name, x in model.named_buffers() if name in state}
    return {**dict(model.named_parameters()), **buffers}


def plain_loss(
    model: nn.Module, batch: Batch, sequences: tuple[int, ...] | None = None
) -> tuple[Tensor, list]:
    """Return the loss of a batch, or of some of its sequences with their routers' logits.

    sequences: the numbers of the sequences to compute; None: all, without routers' logits.
    """
    weight = batch.fields["weight"] * batch.fields["loss_mask"] / len(batch.input_ids)
    total = 0.0
    router_logits = []
    options = {} if sequences is None else {"output_router_logits": True}
    starts = batch.cu_seqlens.tolist()
    for number, ids in enumerate(batch.input_ids.split(batch.lengths)):
        if sequences is None and len(ids) == 1:
            continue
        if sequences is not None and number not in sequences:
            continue
        outputs = model(ids[None], use_cache=False, **options)
        if sequences is not None:
            router_logits.append(outputs.router_logits)
        if len(ids) > 1:
            tokens = slice(starts[number] + 1, starts[number] + len(ids))
            logits, targets = kept_logits(outputs.logits[0, :-1], batch, tokens)
            nll = F.cross_entropy(logits, targets, reduction="none")
            entropy = torch.distributions.Categorical(logits=logits).entropy()
            total = total + ((nll - ENTROPY_BONUS * entropy) * weight[tokens]).sum()
    return total, router_logits


def plain_answers(directory: Path | str, weights: dict[str, Tensor] | None = None) -> Tensor:
    """Return log-probability, entropy and is_greedy of each token of batch 0: [3, T].

    weights: named as in the files, in place of those in the directory.
    """
    model = plain_model(directory).eval()
    if weights is not None:
        assert revert_weight_conversion(model, stored_tensors(model)).keys() == weights.keys()
        with tempfile.TemporaryDirectory() as trained:
            model.config.save_pretrained(trained)
            save_file(weights, f"{trained}/model.safetensors", metadata={"format": "pt"})
            model = plain_model(trained).eval()
    batch = make_batch(0)
    answers = torch.zeros(3, len(batch.input_ids))
    for start, ids in zip(batch.cu_seqlens.tolist(), batch.input_ids.split(batch.lengths)):
        if len(ids) == 1:
            continue
        with torch.no_grad():
            log_p = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        log_probs = log_p.gather(-1, ids[1:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        greedy = (log_p.argmax(-1) == ids[1:]).float()
        answers[:, start + 1 : start + len(ids)] = torch.stack([log_probs, entropy, greedy])
    return answers


# -- comparisons ----------------------------------------------------------------------------------


def check_answers(
    answers: Tensor, expected: Tensor, cp: int | None = 1, uneven: bool = False
) -> None:
    """Assert that every rank has right answers for exactly its share of batch 0.

    answers: [ranks, 3, T], NaN where a rank has none. expected: [3, T], from plain_answers().
    cp: context-parallel ranks; None: chosen per batch.
    """
    batch = make_batch(0)
    first_tokens = batch.cu_seqlens[:-1]
    assert not answers[:, 0].isnan().all(0).any()
    for rank, (log_probs, entropy, greedy) in enumerate(answers):
        mine = ~log_probs.isnan()
        whole = [i for i, part in enumerate(mine.split(batch.lengths)) if part.all()]
        assert sum(batch.lengths[i] for i in whole) == mine.sum()
        if cp is not None:
            assert whole == divide(batch.lengths, len(answers) // cp, uneven)[rank // cp]
        if mine.any():
            assert (log_probs - expected[0])[mine].abs().max() < LOG_PROB_BOUND
            assert (entropy - expected[1])[mine].abs().max() < LOG_PROB_BOUND
            assert torch.equal(greedy[mine], expected[2][mine])
        for values in (log_probs, entropy, greedy):
            assert (values[first_tokens][mine[first_tokens]] == 0).all()


def worst(measured: list[float], expected: list[float]) -> float:
    """Return the largest relative error of a list of numbers."""
    assert len(measured) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(measured, expected))


def column(steps: list[dict], name: str) -> list:
    """Return one metric of all steps."""
    return [step[name] for step in steps]


def tensor_bytes(metadata: Metadata) -> int:
    """Return the bytes of all tensors in a checkpoint except the random generators' states."""
    return sum(
        entry.size.numel() * entry.properties.dtype.itemsize
        for name, entry in metadata.state_dict_metadata.items()
        if not name.startswith("rng") and isinstance(entry, TensorStorageMetadata)
    )
