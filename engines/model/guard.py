"""Check, before the first step, that sequences which share a batch do not see each other.

The bug. For speed, several sequences go through a model at once: packed one after the other,
padded to the same length, or divided over context-parallel ranks. That is correct only if every
layer keeps them apart. A layer that does not know where a sequence begins (a convolution, a
recurrence, an attention that ignores cu_seqlens) mixes them. Training then raises no error, but
learns the wrong thing.

The idea. We keep no list of families that work. We compute, with the real model and its real
weights, the log-probabilities of a few short random sequences twice: all sequences together, the
way the run will batch them, and one sequence at a time. The results must agree up to rounding
error. We measure the rounding error on the same model, by adding noise of that size to every layer.

The refinement. Every layer amplifies rounding errors, and in bfloat16 that may hide a small leak.
So there are two comparisons. In the first, layers are independent: all of them read the input of
the first layer, and their increments are added up. Nothing is amplified, yet each layer still has
to keep sequences apart. The second comparison runs the model unchanged.

The limits. The check cannot find a leak through weights that are still zero, or a leak smaller than
rounding error. It does not cover sliding windows longer than these sequences, which are checked in
engines/fsdp/tracing.py. Adapters and value heads need no check: they treat every token separately.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import InputError
from data.batching.batch import Batch, make_cu_seqlens
from data.images.processor import ImageStore
from engines.base import Engine
from engines.context_parallel import has_dynamic_cp, shares_sequences
from engines.heads import ValueHead
from engines.model import float8
from engines.model.quirks import BIDIRECTIONAL, config_json_fix

# Numbers of tokens in the first two sequences. The third sequence repeats the beginning of the
# first one, which also exposes wrong positions.
LENGTHS = (24, 9)
SHARED_LENGTH = 15
# Number of tokens before the image in the first sequence, for a model that reads images.
TOKENS_BEFORE_IMAGE = 5
# Differences below this are always accepted [nats, in fp32].
MIN_BOUND = 1e-4
# Differences up to this multiple of the measured rounding error are accepted.
MARGIN = 4
POWERS_OF_TWO = [1 << exponent for exponent in range(20)]

# (layer number, layer input, layer output) -> the output to use instead.
Change = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ProbeBatches:
    """The same random tokens on every rank, in three arrangements."""

    two_sequences: Batch
    # The same two, and a third one that repeats the beginning of the first.
    three_sequences: Batch
    # All tokens of three_sequences as a single sequence, which is how a model that mixes sequences
    # would see them.
    joined: Batch

    def with_third(self, values: Tensor) -> Tensor:
        """Extend values [..., T] of two_sequences to three_sequences by repeating its start."""
        third_length = self.three_sequences.lengths[2]
        return torch.cat([values, values[..., :third_length]], -1)


def check_isolation(engine: Engine) -> tuple[float, float]:
    """Check that a sequence's outputs do not depend on the other sequences of its batch.

    All ranks call this together. The engine's state does not change.

    Returns:
        (difference, bound): the largest difference between a token's outputs, and the largest that
        rounding may explain [nats].

    Raises:
        InputError: on all ranks, if a difference exceeds the bound.
    """
    batches = make_batches(engine)
    # Compiling for these shapes would take a minute.
    with fixed_head_and_routing(engine), torch.compiler.set_stance("force_eager"):
        compare(engine, batches, independent_layers=True)
        comparison = compare(engine, batches, independent_layers=False)
        warn_if_inconclusive(engine, batches, comparison)
    return comparison.difference, comparison.bound


@dataclass(frozen=True)
class Comparison:
    # [outputs, T]: the outputs for two_sequences, computed one sequence at a time.
    expected: Tensor
    # The largest difference between these and the outputs of sequences computed together [nats].
    difference: float
    # The largest difference that rounding may explain [nats].
    bound: float


def compare(engine: Engine, batches: ProbeBatches, independent_layers: bool) -> Comparison:
    """Compare sequences computed together and one at a time; raise InputError if outputs differ."""
    path = engine.config.model.path
    with changed_layers(engine, keep_output, independent_layers):
        expected = outputs_one_by_one(engine, batches.two_sequences)
        differences = []
        for size in group_sizes(engine):
            together = outputs_together(engine, batches.three_sequences, size)
            difference = largest_absolute(engine, together - batches.with_third(expected))
            differences.append((difference, size))
    difference, size = max(differences)
    if largest_absolute(engine, expected) == torch.inf:
        raise InputError(f"model.path={path}: the model's outputs are not finite")

    with changed_layers(engine, add_rounding_noise(engine), independent_layers):
        noisy = outputs_one_by_one(engine, batches.two_sequences)
        bound = max(MIN_BOUND, MARGIN * largest_absolute(engine, noisy - expected))
    if difference > bound:

        def difference_of_first_layers(num_layers: int | None) -> float:
            """Return the difference if only the first layers run. None: all layers."""
            with changed_layers(engine, keep_first_layers(num_layers), independent_layers):
                together = outputs_together(engine, batches.three_sequences, size)
                single = outputs_one_by_one(engine, batches.two_sequences)
                return largest_absolute(engine, together - batches.with_third(single))

        reason = explain(engine, difference, bound, difference_of_first_layers)
        raise InputError(f"model.path={path}: {reason}")
    return Comparison(expected, difference, bound)


def group_sizes(engine: Engine) -> list[int]:
    """Return the sizes of the groups of ranks that may share a micro-batch."""
    if has_dynamic_cp(engine.config.engine):
        return [size for size in POWERS_OF_TWO if size <= engine.dp_size]
    return [*engine.cp_groups]


def warn_if_inconclusive(engine: Engine, batches: ProbeBatches, comparison: Comparison) -> None:
    """Warn if the comparison proves nothing, because a leak would hardly change the outputs.

    It proves nothing if they hardly change even when all sequences are joined into one.
    """
    size = group_sizes(engine)[0]
    together = outputs_together(engine, batches.joined, size)
    leak = together - batches.with_third(comparison.expected)
    # The first token of a sequence has no output.
    leak = leak[:, batches.three_sequences.position_ids > 0]
    if largest_absolute(engine, leak) <= comparison.bound and dist.get_rank() == 0:
        print(
            f"model.path={engine.config.model.path}: the outputs for a token depend so little on "
            "earlier tokens that it is impossible to check whether the model keeps sequences apart",
            flush=True,
        )


# -- batches and outputs -------------------------------------------------------------------------


def make_batches(engine: Engine) -> ProbeBatches:
    """Draw random tokens, with an image in the first sequence if the model reads images."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = engine.hf_config.vocab_size
    tokens = torch.randint(vocabulary, (sum(LENGTHS),), generator=generator)
    first, second = tokens.split(LENGTHS)
    image_store = None
    shared_length = SHARED_LENGTH
    if engine.processor:
        processor = engine.processor
        pixels = torch.randint(256, (60, 90, 3), dtype=torch.uint8, generator=generator)
        image = processor.resized(pixels.numpy())
        image_tokens = torch.tensor(processor.expand(processor.image_token, [image]).tokens.ids)
        before = processor.without_images(first[:TOKENS_BEFORE_IMAGE])
        after = processor.without_images(first[TOKENS_BEFORE_IMAGE:])
        first = torch.cat([before, image_tokens, after])
        second = processor.without_images(second)
        shared_length += len(image_tokens)
        image_store = ImageStore([[image], [], [image, image]], processor)
    third = first[:shared_length]

    def batch(sequences: list[Tensor], image_rows: list[int]) -> Batch:
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        rows = torch.tensor(image_rows)
        return Batch(torch.cat(sequences), make_cu_seqlens(lengths), {}, rows, image_store)

    return ProbeBatches(
        two_sequences=batch([first, second], [0, 1]),
        three_sequences=batch([first, second, third], [0, 1, 0]),
        joined=batch([torch.cat([first, second, third])], [2]),
    )


def outputs_one_by_one(engine: Engine, batch: Batch) -> Tensor:
    """Return the outputs [outputs, T] of sequences that are computed one at a time."""
    return engine.head_outputs_one_by_one(batch)[: engine.head.num_differentiable]


def outputs_together(engine: Engine, batch: Batch, size: int) -> Tensor:
    """Return the outputs [outputs, T] of a batch that is computed as one micro-batch.

    Args:
        size: the number of ranks that share the micro-batch. It is capped at the size of this
            rank's largest context-parallel group.
    """
    size = min(size, max(engine.cp_groups))
    micro_batches = [(size, list(range(len(batch))))]
    return engine.head_outputs(batch, micro_batches)[: engine.head.num_differentiable]


def largest_absolute(engine: Engine, values: Tensor) -> float:
    """Return the largest absolute value over all ranks; infinity if any value is NaN."""
    value = values.abs().nan_to_num(torch.inf).max()
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def explain(
    engine: Engine,
    difference: float,
    bound: float,
    difference_of_first_layers: Callable[[int | None], float],
) -> str:
    """Return one line that says where the outputs diverge first, and what to change."""
    first_place = find_divergence(engine, bound, difference_of_first_layers)
    config = engine.config
    text_config = engine.hf_config.get_text_config()
    bidirectional_fix = config_json_fix(text_config, BIDIRECTIONAL, "null")
    fix = f"model_engine={config.model_engine} cannot train this model{bidirectional_fix}"
    arrangement = "packed" if config.engine.use_remove_padding else "padded"
    if shares_sequences(config.engine):
        arrangement += " and shared"
        fix = "set engine.context_parallel_size=1"
    elif config.engine.use_remove_padding:
        with engine.padded():
            if difference_of_first_layers(None) <= bound:
                fix = "set engine.use_remove_padding=false"
    return (
        f"the outputs of {arrangement} sequences and of one sequence at a time differ by "
        f"{difference:.2g}, first {first_place}, but rounding explains at most {bound:.2g}: {fix}"
    )


def find_divergence(
    engine: Engine, bound: float, difference_of_first_layers: Callable[[int | None], float]
) -> str:
    """Search by bisection for the first layer after which the outputs differ."""
    num_layers = engine.hf_config.get_text_config().num_hidden_layers
    if difference_of_first_layers(0) > bound:
        return "in the embedding"
    # The outputs are equal after the first num_equal layers, and differ after num_different layers.
    num_equal = 0
    num_different = num_layers
    while num_different - num_equal > 1:
        middle = (num_equal + num_different) // 2
        if difference_of_first_layers(middle) > bound:
            num_different = middle
        else:
            num_equal = middle
    return f"in layer {num_equal} of 0 to {num_layers - 1}"


# -- changes to a model's layers -----------------------------------------------------------------


def keep_output(number: int, layer_input: Tensor, layer_output: Tensor) -> Tensor:
    return layer_output


def keep_first_layers(num_layers: int | None) -> Change:
    """Return a change that turns all but the first num_layers layers into the identity.

    With None, it changes nothing.
    """

    def change(number: int, layer_input: Tensor, layer_output: Tensor) -> Tensor:
        is_kept = num_layers is None or number < num_layers
        return layer_output if is_kept else layer_input

    return change


def add_rounding_noise(engine: Engine) -> Change:
    """Return a change that adds noise slightly larger than rounding to the compute dtype.

    Ranks that hold the same tensors add the same noise.
    """
    eps = torch.finfo(engine.compute_dtype).eps
    generator = torch.Generator(engine.device).manual_seed(0)

    def change(number: int, layer_input: Tensor, layer_output: Tensor) -> Tensor:
        noise = torch.randn(layer_output.shape, generator=generator, device=layer_output.device)
        return layer_output + eps * layer_output * noise.to(layer_output.dtype)

    return change


class IndependentLayers:
    """Feeds the first layer's input to all layers of a module, and sums their increments.

    With is_active=False, each layer reads the output of the previous one, as usual.
    """

    def __init__(self, change: Change, is_active: bool):
        self.change = change
        self.is_active = is_active
        # The input of the current layer; if layers are independent, the first layer's input.
        self.input: Tensor | None = None
        # The sum of the increments so far, in fp32.
        self.increments: Tensor | float = 0.0

    def before_layer(self, is_first: bool, _, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Forward pre-hook: replace a layer's hidden states, its first argument."""
        first_name = None if args else next(iter(kwargs))
        hidden = args[0] if args else kwargs[first_name]
        if is_first or not self.is_active:
            self.input = hidden
            self.increments = 0.0
        if args:
            return (self.input, *args[1:]), kwargs
        return args, {**kwargs, first_name: self.input}

    def after_layer(self, number: int, _, args: tuple, output):
        """Forward hook: change a layer's hidden states, the first of its outputs."""
        hidden, *other_outputs = output if isinstance(output, tuple) else (output,)
        hidden = self.change(number, self.input, hidden)
        if self.is_active:
            self.increments = self.increments + (hidden.float() - self.input.float())
            hidden = (self.input.float() + self.increments).to(hidden.dtype)
        return (hidden, *other_outputs) if isinstance(output, tuple) else hidden


@contextmanager
def changed_layers(engine: Engine, change: Change, independent: bool) -> Iterator[None]:
    """Within this block, change the layers' outputs and, optionally, make layers independent."""
    handles = []
    for layers in engine.layers():
        hooks = IndependentLayers(change, is_active=independent)
        for position, (number, layer) in enumerate(layers):
            before = partial(hooks.before_layer, position == 0)
            after = partial(hooks.after_layer, number)
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(layer.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def fixed_head_and_routing(engine: Engine) -> Iterator[None]:
    """Within this block, fix the parts of a model that would hide or fake a leak; then free memory.

    A value head may be zero and so hide a leak; its weight is replaced by a fixed vector. Rounding
    may change which experts are chosen, which would look like a leak; all tokens go to the same
    experts. Layers in FP8 multiply in the compute dtype, because FP8 rounds more than the bounds
    allow.
    """
    handles = []
    if isinstance(engine.head, ValueHead):
        handles.append(engine.head.register_forward_pre_hook(use_fixed_direction))
    for model in engine.modules():
        for name, module in model.named_modules():
            if name.endswith(".experts") and has_stacked_weights(module):
                handles.append(module.register_forward_pre_hook(use_first_experts))
    try:
        with float8.disabled(engine.modules()):
            yield
    finally:
        for handle in handles:
            handle.remove()
        engine.offload()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def has_stacked_weights(experts: nn.Module) -> bool:
    return any(parameter.ndim == 3 for parameter in experts.parameters(recurse=False))


def use_fixed_direction(_, args: tuple) -> tuple:
    """Forward pre-hook of a value head: replace its weight by a fixed vector without zeros."""
    hidden, weight, *other_args = args
    angles = torch.arange(weight.numel(), device=weight.device)
    direction = angles.cos().view_as(weight).to(weight.dtype)
    return (hidden, direction, *other_args)


def use_first_experts(_, args: tuple) -> tuple:
    """Forward pre-hook of experts: send every token to experts 0 to k - 1.

    Args:
        args: the hidden states [t, h], the indices of the chosen experts [t, k] int64, and their
            weights [t, k], in any order. This hook sorts the weights, largest first.
    """
    chosen = next(tensor for tensor in args if not tensor.is_floating_point())

    def replacement(tensor: Tensor) -> Tensor:
        if tensor is chosen:
            return torch.arange(tensor.shape[1], device=tensor.device).expand_as(tensor)
        if tensor.shape == chosen.shape:
            return tensor.sort(descending=True).values
        return tensor

    return tuple(replacement(tensor) for tensor in args)
