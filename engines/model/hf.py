"""A Hugging Face model: its configuration, and its modules without memory for their weights."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from config import InputError
from engines.heads import Head
from engines.model import mtp
from engines.model.model_files import check_is_no_adapter


def read_hf_config(path: str):
    """Read config.json. Its get_text_config() describes the layers that are trained.

    Raises:
        InputError: if transformers cannot read it, or the weights are quantized.
    """
    check_is_no_adapter(Path(path))
    if not (Path(path) / "config.json").is_file():
        raise InputError(
            f"model.path={path} contains no config.json: give a directory in Hugging Face format"
        )
    try:
        hf_config = AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError, StrictDataclassError) as error:
        raise InputError(f"model.path={path}: {' '.join(str(error).split())}") from None
    if getattr(hf_config, "quantization_config", None):
        raise InputError(
            f"model.path={path} has quantized weights (quantization_config in config.json): "
            "give the unquantized model"
        )
    return hf_config


def auto_class(hf_config):
    """Return transformers' Auto class for the model, vision-language in preference to text."""
    for kind in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(hf_config) in kind._model_mapping:
            return kind
    raise InputError(
        f"transformers has no causal language model for model_type={hf_config.model_type}"
    )


def build_on_meta(
    hf_config,
    dtype: torch.dtype,
    head: Head = Head.LOG_PROBS,
    attention: str | None = None,
    with_mtp: bool = False,
    images: bool = False,
) -> nn.Module:
    """Build a model on the meta device. The model gets its own copy of the configuration.

    Args:
        head: for Head.VALUES, the output matrix has one row.
        attention: the attention implementation; None lets transformers choose.
        with_mtp: include the layers for multi-token prediction. They hold weights but compute
            nothing.
        images: include the modules that process images. Otherwise a vision-language model is
            reduced to its text model.

    Raises:
        InputError: if transformers cannot build the model, or its output matrix has a bias.
    """
    hf_config = copy.deepcopy(hf_config)
    if head is Head.VALUES:
        hf_config.tie_word_embeddings = False
    hf = from_config(hf_config, dtype, attention)
    has_more_than_text = hf_config.get_text_config() is not hf_config
    if has_more_than_text and not images:
        keep_text_modules(hf)
    # Batches contain no padding tokens, so the padding token is learned like any other token,
    # unless its row is zero: see keep_zero_padding_row().
    embedding = hf.get_input_embeddings()
    embedding.padding_row = getattr(embedding, "padding_idx", None)
    embedding.padding_idx = None
    if hf.get_output_embeddings().bias is not None:
        raise InputError("a bias on the output matrix is not supported")
    if head is Head.VALUES:
        width = hf.get_output_embeddings().in_features
        hf.set_output_embeddings(nn.Linear(width, 1, bias=False, dtype=dtype, device="meta"))
    if with_mtp:
        hf.model.mtp_layers = mtp.layers(hf_config)
    return hf


def from_config(hf_config, dtype: torch.dtype, attention: str | None) -> nn.Module:
    """Let transformers build a model on the meta device."""
    kind = auto_class(hf_config)
    try:
        with torch.device("meta"):
            return kind.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # transformers may raise any error for unexpected values
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"model.path={hf_config.name_or_path}: transformers cannot build the model that "
            f"config.json describes: {type(error).__name__}: {reason}"
        ) from None


def keep_text_modules(hf: nn.Module) -> None:
    """Reduce a vision-language model to its decoder and output matrix, which keep their names.

    The files may hold other weights, such as a vision tower. Their names are added to the patterns
    of weights that transformers ignores when it loads the model.
    """
    text_modules = (hf.get_decoder(), hf.get_output_embeddings())
    kept = {module for text_module in text_modules for module in text_module.modules()}
    names = {module: name for name, module in hf.named_modules()}
    removed = [module for module in hf.modules() if module not in kept]
    for module in removed:
        module._parameters.clear()
        module._buffers.clear()
        for name, child in [*module.named_children()]:
            if kept.isdisjoint(child.modules()):
                setattr(module, name, None)
    prefixes = "|".join(re.escape(names[module]) for module in text_modules)
    not_text = rf"^(?!({prefixes})\.)"
    hf._keys_to_ignore_on_load_unexpected = {
        not_text,
        *(hf._keys_to_ignore_on_load_unexpected or ()),
    }


def layer_modules(hf: nn.Module, part: nn.Module) -> list[nn.Module]:
    """Return the layers within a part of the model: the units of FSDP and of recomputation."""
    return [module for module in part.modules() if type(module).__name__ in hf._no_split_modules]


def plain_attention(hf: nn.Module) -> str:
    """Return the attention implementation for padded sequences.

    This is "padded" (engines/fsdp/attention.py), except for a model that implements attention in
    its own code: then it is one of the model's implementations.
    """
    decoder = hf.get_decoder()
    if decoder._supports_attention_backend:
        return "padded"
    if decoder._supports_sdpa:
        return "sdpa"
    return "eager"


def keep_zero_padding_row(
    embedding: nn.Module,
    padding_row: int | None,
    is_zero: Tensor,
    layout: Callable[[Tensor], Tensor] = lambda mask: mask,
) -> None:
    """Block gradients to the padding token's embedding if it is zero before training.

    transformers initialises this row to zero. Normalising a zero vector multiplies its gradient by
    1 / sqrt(eps), which is 1,000 in RMSNorm, so a single padding token would dominate the gradient
    of a step. Other rows that are zero are learned, as in transformers.

    Args:
        padding_row: the row's number. None if the model has no padding token.
        is_zero: [vocabulary] bool, true for rows that are zero.
        layout: maps a mask with the shape of the module's input [batch, length] to the shape of its
            output without the last dimension.
    """
    if padding_row is None or not is_zero[padding_row]:
        return

    def detach_padding(_, inputs: tuple, output: Tensor) -> Tensor:
        is_padding = layout(inputs[0] == padding_row)[..., None]
        return torch.where(is_padding, output.detach(), output)

    embedding.register_forward_hook(detach_padding)
