"""Checks a model before weights are read, by running it on the meta device (shapes only)."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from config import InputError
from engines.context_parallel import shares_sequences
from engines.fsdp.attention import NEEDS_WINDOW_MASK, NOT_CAUSAL, PARTIAL_WINDOW, Packing
from engines.fsdp.recurrence import recurrent_layers
from engines.model.hf import plain_attention
from engines.model.lengths import keep_short_frequencies
from engines.model.quirks import BIDIRECTIONAL, config_json_fix

OTHER_ATTENTION = "transformers implements it only with"
# (class, configuration, whether sequences are packed) of the models that have passed the checks. An
# actor, a critic and a reference are often the same model, and a run checks each of them twice.
PASSED: set[tuple[str, str, bool]] = set()
# Shapes of masks for four tokens. On the meta device, some models accept only the first shape,
# others only the second.
MASK_SHAPES = ((1, 1, 4, 4), (1, 4))


class DropoutRecorder(TorchFunctionMode):
    """Records the probabilities of dropout in a forward pass, as in training."""

    def __init__(self):
        super().__init__()
        self.probabilities = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.dropout and kwargs["training"] and kwargs["p"] != 0:
            self.probabilities.add(kwargs["p"])
        return function(*args, **(kwargs or {}))


class RandomnessRecorder(TorchDispatchMode):
    """Records random operations other than dropout, such as routers' jitter."""

    def __init__(self):
        super().__init__()
        self.operations = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.operations.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@dataclass
class PlainPass:
    """The result of a forward pass without packing.

    failure        one line that describes the failure, or None
    probabilities  the nonzero probabilities of dropout
    operations     the names of random operations other than dropout
    """

    failure: str | None = None
    probabilities: set[float] = field(default_factory=set)
    operations: set[str] = field(default_factory=set)


def check_forward_pass(hf: nn.Module, config: DictConfig) -> None:
    """Raise InputError for a model that fails, is random in training, or cannot be packed.

    This does not check the numbers that the model computes: see engines/model/guard.py.

    Args:
        hf: the model on the meta device.
    """
    is_packed = config.engine.use_remove_padding or shares_sequences(config.engine)
    key = (type(hf).__name__, hf.config.to_json_string(use_diff=False), is_packed)
    if key in PASSED:
        return
    decoder = hf.get_decoder()
    # This implementation of experts works on the meta device.
    decoder.config._experts_implementation = "batched_mm"
    keep_short_frequencies(hf)
    reject_randomness_and_failure(hf, config, plain_pass(hf))
    if is_packed:
        check_packed_sequences(hf, config)
    PASSED.add(key)


def plain_pass(hf: nn.Module) -> PlainPass:
    """Run the model on four tokens, with the attention that the guard uses for single sequences."""
    with DropoutRecorder() as dropout, RandomnessRecorder() as randomness:
        failure = failure_with(hf, "eager")
        if failure and failure.startswith(OTHER_ATTENTION):
            failure = failure_with(hf, plain_attention(hf))
    return PlainPass(failure, dropout.probabilities, randomness.operations)


def reject_randomness_and_failure(hf: nn.Module, config: DictConfig, plain: PlainPass) -> None:
    """Raise InputError if a pass used dropout or other random numbers, or failed."""
    path = config.model.path
    name = type(hf).__name__
    hf_config = hf.get_decoder().config
    if plain.probabilities:
        keys = dropout_keys(hf_config, plain.probabilities)
        raise InputError(
            f"model.path={path}: dropout is not supported: set {keys} to 0 in config.json"
        )
    if plain.operations:
        fix = config_json_fix(hf_config, "jitter", "0")
        raise InputError(
            f"model.path={path}: {name} uses random numbers in training "
            f"({min(plain.operations)}), which is not supported{fix}"
        )
    if plain.failure:
        raise InputError(f"model.path={path}: the forward pass of {name} fails: {plain.failure}")


def check_packed_sequences(hf: nn.Module, config: DictConfig) -> None:
    """Raise InputError for a model that would mix the sequences in a row."""
    path = config.model.path
    name = type(hf).__name__
    hf_config = hf.get_decoder().config
    advice = f": set {' and '.join(padding_settings(config))}"
    if hf.get_decoder()._is_stateful and not recurrent_layers(hf):
        raise InputError(
            f"model.path={path}: {name} carries a state from token to token, and so from one "
            f"packed sequence to the next{advice}"
        )
    failure = packed_failure(hf)
    if failure:
        if NOT_CAUSAL in failure:
            advice = config_json_fix(hf_config, BIDIRECTIONAL, "null")
        elif PARTIAL_WINDOW in failure:
            advice = config_json_fix(hf_config, "sliding_window", "null")
        raise InputError(
            f"model.path={path}: {name} does not take packed sequences: {failure}{advice}"
        )


def padding_settings(config: DictConfig) -> list[str]:
    """Return the settings with which this run would neither pack nor share sequences."""
    settings = []
    if config.engine.use_remove_padding:
        settings.append("engine.use_remove_padding=false")
    if shares_sequences(config.engine):
        settings.append("engine.context_parallel_size=1")
    return settings


def packed_failure(hf: nn.Module) -> str | None:
    """Return one line that describes why a pass over two packed sequences fails, or None."""
    packing = Packing(torch.zeros(3, dtype=torch.int32, device="meta"), [0, 2, 4], 2)
    failure = failure_with(hf, "packed", **packing.arguments())
    if failure:
        return failure
    row_mask = make_mask(MASK_SHAPES[1])
    failure = failure_with(hf, "packed", attention_mask=row_mask, packing=packing)
    # Other failures do not matter here: transformers cannot build all masks on the meta device.
    wrong_windows = (NEEDS_WINDOW_MASK, PARTIAL_WINDOW)
    return failure if failure and failure.startswith(wrong_windows) else None


def failure_with(hf: nn.Module, attention: str, **arguments) -> str | None:
    """Return one line that describes why a pass over four tokens fails, or None.

    Args:
        arguments: arguments of the decoder. If there are none, both kinds of masks are tried, and
            one of them must succeed.
    """
    decoder = hf.get_decoder()
    decoder.set_attn_implementation(attention)
    available = decoder.config._attn_implementation
    if available != attention:
        return f"{OTHER_ATTENTION} {available} attention"
    choices = [arguments]
    if not arguments:
        choices = [{"attention_mask": make_mask(shape)} for shape in MASK_SHAPES]
    first_failure = None
    for choice in choices:
        failure = failure_of_call(decoder, choice)
        if failure is None:
            return None
        first_failure = first_failure or failure
    return first_failure


def failure_of_call(decoder: nn.Module, arguments: dict) -> str | None:
    """Return one line that describes why a call of the decoder fails, or None."""
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    try:
        with torch.device("meta"), torch.no_grad():
            decoder(input_ids=ids, position_ids=ids, use_cache=False, **arguments)
    except InputError as error:
        return str(error)
    except NotImplementedError:
        return (
            "the values of tensors determine what its layers compute, so it cannot be checked "
            "before weights are loaded"
        )
    except Exception as error:  # a model may raise any error for unexpected inputs
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def make_mask(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def dropout_keys(hf_config, probabilities: set[float]) -> str:
    """Return the keys of config.json that set these dropout probabilities, with their values."""
    keys = [
        f"{key}={value}"
        for key, value in hf_config.to_dict().items()
        if "drop" in key and value in probabilities
    ]
    return ", ".join(keys) or "its dropout"
