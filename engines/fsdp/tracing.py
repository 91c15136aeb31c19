"""What passes over shapes alone, on the meta device, tell of a model before any weight is read."""

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from config import InputError
from engines.context_parallel import shares_sequences
from engines.fsdp.attention import NOT_CAUSAL, WINDOW, Packing
from engines.fsdp.recurrence import recurrent_layers
from engines.model.hf import BOTH_WAYS, keep_short_frequencies, plain_attention, without

ALONE = "transformers has it with"
# Of four tokens; models cannot make one kind or another without values.
MASKS = [torch.empty(size, device="meta") for size in ((1, 1, 4, 4), (1, 4))]


class Dropout(TorchFunctionMode):
    """Around a pass: notes the probabilities with which something would be dropped in training."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.dropout and kwargs["training"]:
            self.found |= {kwargs["p"]} - {0}
        return function(*args, **(kwargs or {}))


class Noise(TorchDispatchMode):
    """Around a pass: notes whether anything is random but dropout, as routers' jitter is."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.found.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def check(hf: nn.Module, config: DictConfig) -> None:
    """Raise InputError for a model on the meta device whose attention takes no packed sequences, where they are configured, or
    that fails, or drops anything in training. Whether it computes what it should, engines/model/guard.py sees."""
    decoder, path, name = hf.get_decoder(), config.model.path, type(hf).__name__
    decoder.config._experts_implementation = "batched_mm"  # which is defined without memory, too
    dropout, noise = Dropout(), Noise()
    keep_short_frequencies(hf)
    with dropout, noise:
        failed = failure(hf, "eager")  # with which the guard runs one sequence at a time
        if failed and failed.startswith(ALONE):
            failed = failure(hf, plain_attention(hf))
    if dropout.found:
        raise InputError(
            f"model.path={path}: dropout is not supported: set {keys(decoder.config, dropout.found)} to 0 in "
            "config.json"
        )
    if noise.found:
        raise InputError(
            f"model.path={path}: {name} computes with random numbers in training ({min(noise.found)}), which is not "
            "supported" + without(decoder.config, "jitter", "0")
        )
    if failed:
        raise InputError(f"model.path={path}: {name} fails: {failed}")
    packed, shared = config.engine.use_remove_padding, shares_sequences(config.engine)
    others = packed * ["engine.use_remove_padding=false"] + shared * [
        "engine.context_parallel_size=1"
    ]
    instead = f": give {' and '.join(others)}"
    if not others:
        return
    if decoder._is_stateful and not recurrent_layers(hf):
        raise InputError(
            f"model.path={path}: {name} carries a state from token to token, and so from one packed sequence to the "
            f"next{instead}"
        )
    packing = Packing(torch.zeros(3, dtype=torch.int32, device="meta"), [0, 2, 4], 2)
    failed = failure(hf, "packed", **packing.arguments())
    if not failed and (said := failure(hf, "packed", attention_mask=MASKS[1], packing=packing)):
        # That transformers cannot make its masks without values is no fault of the model.
        failed = said if said.startswith(WINDOW) else None
    if failed:
        instead = without(decoder.config, BOTH_WAYS, "null") if NOT_CAUSAL in failed else instead
        raise InputError(
            f"model.path={path}: {name} does not take packed sequences: {failed}{instead}"
        )


def failure(hf: nn.Module, attention: str, **arguments) -> str | None:
    """What is wrong with a forward pass, in a line."""
    decoder = hf.get_decoder()
    decoder.set_attn_implementation(attention)
    if decoder.config._attn_implementation != attention:
        return f"{ALONE} {decoder.config._attn_implementation} attention alone"
    ids, said = torch.zeros(1, 4, dtype=torch.int64, device="meta"), None
    for options in [arguments] if arguments else [{"attention_mask": mask} for mask in MASKS]:
        try:
            with torch.device("meta"), torch.no_grad():
                decoder(input_ids=ids, position_ids=ids, use_cache=False, **options)
            return None
        except InputError as error:
            said = said or str(error)
        except NotImplementedError:
            said = (
                said
                or "its layers decide by values what to compute, so that it cannot be checked before they are loaded"
            )
        except Exception as error:  # a model may raise anything where it is not made for this
            said = said or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return said


def keys(hf_config, values: set[float]) -> str:
    """The keys of config.json that say so."""
    found = [
        f"{key}={value}"
        for key, value in hf_config.to_dict().items()
        if "drop" in key and value in values
    ]
    return ", ".join(found) or "its dropout"
