"""What a Hugging Face model is: its configuration, its modules without memory, its number of multiplications."""

import copy
import re
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from operator import itemgetter
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from config import InputError
from engines.heads import Head
from engines.model import mtp  # which also makes transformers know MiMo
from engines.model.experts import num_chosen, stacks

RECURRENT = {
    "linear_attention",
    "conv",
    "hybrid",
}  # of config.json's layer_types, those with a state from token to token

BOTH_WAYS = "bidirectional"  # in the names of keys for attention that sees later tokens, too
CHANGING = (
    "dynamic",
    "longrope",
)  # types of rotary embeddings whose frequencies change with the length


def without(hf_config, word: str, harmless: str) -> str:
    """What to change about the keys of config.json with this word in their names."""
    found = [
        f"{key}={value}" for key, value in hf_config.to_dict().items() if word in key and value
    ]
    return f": set {', '.join(found)} to {harmless} in config.json" if found else ""


def longest_sequence(config: DictConfig) -> tuple[int, str]:
    """The most tokens that a sequence of this run may have, and the keys that say so."""
    if "rollout" in config:
        return (
            config.data.max_prompt_length + config.rollout.max_tokens,
            "data.max_prompt_length + rollout.max_tokens",
        )
    return config.data.max_length, "data.max_length"


def read_hf_config(path: str):
    """What config.json says; get_text_config() of it has the shape of the layers that are trained."""
    if not (Path(path) / "config.json").is_file():
        raise InputError(
            f"model.path={path} holds no config.json: give a directory in Hugging Face format"
        )
    try:
        hf_config = AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError, StrictDataclassError) as error:
        raise InputError(f"model.path={path}: {' '.join(str(error).split())}") from None
    if getattr(hf_config, "quantization_config", None):
        raise InputError(
            f"model.path={path} holds quantized weights (quantization_config in config.json): give the unquantized "
            "model"
        )
    return hf_config


def auto_class(hf_config):
    """transformers' class for the whole model: of images and text where it has one, else of text."""
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
    """The model without memory for its weights, with a configuration of its own, or what text goes through of one that has more.
    For Head.VALUES, the output matrix has one row. attention: None for transformers' choice. with_mtp: with its layers for multi-token
    prediction, which compute nothing here. images: with all that images go through."""
    hf_config = copy.deepcopy(hf_config)
    if head is Head.VALUES:
        hf_config.tie_word_embeddings = False
    kind = auto_class(hf_config)
    try:
        with torch.device("meta"):
            hf = kind.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # it may raise anything for values that it is not made for
        raise InputError(
            f"model.path={hf_config.name_or_path}: transformers cannot build what config.json says: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from None
    if hf_config.get_text_config() is not hf_config and not images:
        keep_text(hf)
    # Batches have no padding: the padding token is a word like the others, and is learned.
    hf.get_input_embeddings().padding_idx = None
    if hf.get_output_embeddings().bias is not None:
        raise InputError("a bias on the output matrix is not supported")
    if head is Head.VALUES:
        width = hf.get_output_embeddings().in_features
        hf.set_output_embeddings(nn.Linear(width, 1, bias=False, dtype=dtype, device="meta"))
    if with_mtp:
        hf.model.mtp_layers = mtp.layers(hf_config)
    return hf


def keep_text(hf: nn.Module) -> None:
    """Leave a model of images and text its decoder and its output matrix alone, under their names. What the files hold besides,
    such as a vision tower, is ignored as transformers ignores weights that a model does not have."""
    text = (hf.get_decoder(), hf.get_output_embeddings())
    kept, names = (
        {m for each in text for m in each.modules()},
        {m: name for name, m in hf.named_modules()},
    )
    for module in [m for m in hf.modules() if m not in kept]:
        module._parameters.clear()
        module._buffers.clear()
        for name, child in [*module.named_children()]:
            if kept.isdisjoint(child.modules()):
                setattr(module, name, None)
    beside = rf"^(?!({'|'.join(re.escape(names[each]) for each in text)})\.)"
    hf._keys_to_ignore_on_load_unexpected = {beside, *(hf._keys_to_ignore_on_load_unexpected or ())}


def text_name(hf: nn.Module, name: str) -> str:
    """What a model of text alone, of the same layers, calls a weight of this model."""
    decoder = next(prefix for prefix, module in hf.named_modules() if module is hf.get_decoder())
    return (
        f"{hf.base_model_prefix}{name.removeprefix(decoder)}"
        if name.startswith(f"{decoder}.")
        else name
    )


def plain_attention(hf: nn.Module) -> str:
    """The attention for padded sequences: engines/fsdp/attention.py's or, of a model with an attention of its own, that."""
    decoder = hf.get_decoder()
    return (
        "padded"
        if decoder._supports_attention_backend
        else "sdpa"
        if decoder._supports_sdpa
        else "eager"
    )


def check_rope(hf_config, config: DictConfig) -> None:
    """Raise InputError for rotary frequencies that change with the length of a sequence, if the run's
    longest sequence has others than short ones: packed with it, these would have its frequencies."""
    longest, key = longest_sequence(config)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") not in CHANGING:  # others may have no such lengths
            continue
        original = each.get("original_max_position_embeddings") or hf_config.max_position_embeddings
        if longest > original:
            raise InputError(
                f"model.path={config.model.path}: rope_type={each['rope_type']} in config.json has other frequencies "
                f"beyond {original} tokens: lower {key}={longest}"
            )


def check_windows(hf_config, path: str) -> None:
    """Raise InputError for layers with a sliding window that has no length."""
    if hf_config.is_heterogeneous or getattr(hf_config, "sliding_window", None):
        return
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        raise InputError(
            f"model.path={path}: layer_types in config.json has sliding_attention, but there is no window: give "
            "sliding_window (and use_sliding_window, if the model has that key), or make them full_attention"
        )


def keep_short_frequencies(hf: nn.Module) -> None:
    """Let rotary embeddings not look at each batch for a sequence that check_rope() has excluded."""
    for module in hf.modules():
        if isinstance(kind := vars(module).get("rope_type"), dict):
            module.rope_type = {
                layer: "default" if each in CHANGING else each for layer, each in kind.items()
            }
        elif kind in CHANGING:
            module.rope_type = "default"


def keep_zero_rows(
    embedding: nn.Module, zero: Tensor, layout: Callable[[Tensor], Tensor] = lambda mask: mask
) -> None:
    """Send no gradient through an embedding to rows that were zero at start, as transformers has it for a padding token. The
    norm of a zero vector multiplies a gradient by 1 / sqrt(eps), 1,000 in RMSNorm: one such token would be a step's gradient.

    zero [V] bool; layout: [batch, length] as the module is asked -> as it answers, without the last dimension
    """
    if zero.any():
        embedding.register_forward_hook(
            lambda _, inputs, output: torch.where(
                layout(zero[inputs[0]])[..., None], output.detach(), output
            )
        )


def logit_constants(hf: nn.Module) -> tuple[float, float | None]:
    """(scale, soft cap c): the model's logits are scale * hidden @ weight.T or, with a soft cap, c * tanh(of that / c). Found by
    the model's own forward pass from hidden states to logits, without its output matrix. Raises InputError for others."""
    base, head = hf.base_model, hf.get_output_embeddings()
    hidden = torch.tensor([2.0**-10, 2.0**60, *torch.linspace(-100, 100, 41)]).view(1, 1, -1)
    base.forward, head.forward = lambda *_, **__: HiddenStates([hidden]), lambda x: x
    try:
        logits = hf(input_ids=torch.zeros(1, 1, dtype=torch.int64, device="meta")).logits
    except Exception:  # a model may raise anything where it is not made for this
        logits = None
    finally:
        del base.forward, head.forward
    if logits is None or logits.is_meta:
        raise InputError(
            f"{type(hf).__name__} does not take its hidden states from its base model, which is not supported"
        )
    scale, largest = logits[0, 0, 0].item() / 2.0**-10, logits[0, 0, 1].item()
    softcap = None if largest == scale * 2.0**60 else largest
    expected = scale * hidden if softcap is None else softcap * torch.tanh(scale * hidden / softcap)
    if not torch.allclose(logits.float(), expected, rtol=1e-5):
        raise InputError(f"{type(hf).__name__} computes its logits in a way that is not supported")
    return scale, softcap


class HiddenStates(tuple):
    """What a base model returns that has nothing else to say."""

    last_hidden_state = property(itemgetter(0))

    def __getattr__(self, name: str) -> None:
        return None


def whole_modules(hf: nn.Module, part: nn.Module) -> list[nn.Module]:
    """The layers of a part of the model: modules that are gathered, and computed once more, as a whole."""
    return [m for m in part.modules() if type(m).__name__ in hf._no_split_modules]


def stages_of_layers(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each pipeline stage has: alike or, where that cannot be, one more in the first ones."""
    return [
        num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)
    ]


def count_flops(hf: nn.Module, hf_config) -> tuple[int, int, int]:
    """FLOPs of forward and backward: (in the layers per token, of experts only those that it goes to; in the output matrix per
    token whose log-probability is asked for; in causal attention per squared length). hf: with adapters if it has some"""
    untouched, hf_config = (
        {*takewhile(lambda p: not p.requires_grad, hf.parameters())},
        hf_config.get_text_config(),
    )
    passed_by = [
        [*layer.parameters()]
        for layer in whole_modules(hf, hf.get_decoder())
        if untouched.issuperset(layer.parameters())
    ]
    untouched = {p for layer in passed_by for p in layer}

    of = partial(matrix_flops, untouched=untouched)
    head = hf.get_output_embeddings().weight
    outside = {hf.get_input_embeddings().weight, head}  # one, if they are tied
    matrices = sum(
        of(p)
        for name, p in hf.get_decoder().named_parameters()
        if p.ndim > 1 and not name.endswith("bias") and p not in outside
    )
    matrices -= sum(of(p) * (len(p) - num_chosen(hf_config)) // len(p) for _, p in stacks(hf))
    kinds = (
        getattr(hf_config, "layer_types", None) or ["full_attention"] * hf_config.num_hidden_layers
    )
    layers = layer_configs(hf_config) if hf_config.is_heterogeneous else [hf_config] * len(kinds)
    attention = sum(
        layer.num_attention_heads * head_dim(layer) * (2 if number < len(passed_by) else 6)
        for number, (layer, kind) in enumerate(zip(layers, kinds))
        if kind not in RECURRENT - {"hybrid"} | {"mlp", "moe"}
    )
    num_mtp_layers = sum(isinstance(module, tuple(mtp.LAYERS.values())) for module in hf.modules())
    attention += 6 * num_mtp_layers * attention_widths(hf_config)[0]
    # Each such layer asks the output matrix once more, without a gradient for it.
    return matrices, of(head) + 4 * num_mtp_layers * head.numel(), attention


def matrix_flops(matrix: nn.Parameter, untouched: set[nn.Parameter]) -> int:
    """FLOPs of forward and backward per token: per weight 6, where it is frozen 4, and 2 in layers with nothing that is trained in
    or before them, which no gradient passes: theirs are `untouched`."""
    return matrix.numel() * (6 if matrix.requires_grad else 2 if matrix in untouched else 4)


def layer_configs(hf_config) -> list:
    """Of layers that differ the configuration of each, since transformers raises where these are read from the whole."""
    return hf_config.per_layer_config if hf_config.is_heterogeneous else [hf_config]


def attention_widths(hf_config) -> tuple[int, int]:
    """heads * head_dim of queries, and of keys, in the layer with most."""
    heads = [
        (
            layer.num_attention_heads,
            getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            head_dim(layer),
        )
        for layer in layer_configs(hf_config)
    ]
    return max(q * dim for q, _, dim in heads), max(kv * dim for _, kv, dim in heads)


def head_dim(hf_config) -> int:
    """Of layers that differ, the largest."""
    if hf_config.is_heterogeneous:
        return max(map(head_dim, layer_configs(hf_config)))
    return (
        getattr(hf_config, "head_dim", None)
        or hf_config.hidden_size // hf_config.num_attention_heads
    )
