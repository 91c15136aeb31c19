"""Before the first step: prove that sequences which share a batch do not see each other.

The bug. For speed, several sequences go through a model at once: packed one after the other,
padded to the same length, or divided over context-parallel ranks. That is right only if every
layer treats them as separate. A layer that does not know where a sequence begins (a convolution,
a recurrence, an attention that ignores cu_seqlens) mixes them. Training then works, and learns
something else.

The idea. We keep no list of families that work. We compute, with the real model and its real
weights: a few short sequences of random tokens once together, in the way in which the run is
configured, and once each by itself. The log-probabilities must be the same up to rounding. The
effect of rounding is measured on the same model, by adding noise of its size to every layer.

The refinement. Every layer amplifies rounding, and in bfloat16 that may hide a small leak. So
there are two comparisons. In the first one, layers are independent: all of them read the input of
the first layer, and their increments are added up. Nothing is amplified, and each layer still has
to keep sequences apart. The second comparison takes the model as it is.

What this cannot find: a leak through weights that are still zero, and one smaller than rounding.
Windows longer than these sequences are compared in engines/fsdp/tracing.py. Adapters, and a value
head, work on each token by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import InputError
from data.batching.batch import Batch, bounds
from data.images.processor import Pictures
from engines.base import Engine
from engines.context_parallel import has_dynamic_cp, shares_sequences
from engines.heads import ValueHead
from engines.model.quirks import BIDIRECTIONAL, config_json_fix

# Tokens of the first two sequences. The third sequence repeats the first tokens of the first one:
# a mistake in positions then shows, too.
LENGTHS = (24, 9)
SHARED_LENGTH = 15
# Tokens of the first sequence before its image, for a model that reads images.
TOKENS_BEFORE_IMAGE = 5
# Differences below this are accepted in any case [nats, in fp32].
MIN_BOUND = 1e-4
# Differences up to this multiple of the effect of rounding are accepted.
MARGIN = 4
POWERS_OF_TWO = [1 << exponent for exponent in range(20)]

# (number of a layer, its input, its output) -> the output to use in place of its own.
Change = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ProbeBatches:
    """The same random tokens on every rank, in three arrangements."""

    # Two sequences.
    alone: Batch
    # The two, and a third one that is the beginning of the first.
    among: Batch
    # All tokens of `among` as a single sequence: what a model would see that mixes sequences.
    joined: Batch

    def with_third(self, values: Tensor) -> Tensor:
        """Extend [..., T] from the sequences of `alone` to those of `among`."""
        third_length = self.among.lengths[2]
        return torch.cat([values, values[..., :third_length]], -1)


def check_isolation(engine: Engine) -> tuple[float, float]:
    """Check that a model computes a sequence the same, whether by itself or among others.

    Leaves no trace in the engine. Called by all ranks.

    Returns:
        The largest difference of a token's outputs, and the bound that rounding sets [nats].

    Raises:
        InputError: on all ranks, if a difference exceeds the bound.
    """
    batches = make_batches(engine)
    # Compiling for these shapes would take a minute.
    with quiet(engine), torch.compiler.set_stance("force_eager"):
        compare(engine, batches, independent_layers=True)
        comparison = compare(engine, batches, independent_layers=False)
        warn_if_blind(engine, batches, comparison)
    return comparison.difference, comparison.bound


@dataclass(frozen=True)
class Comparison:
    # [outputs, T]: the outputs for `alone`, one sequence at a time.
    expected: Tensor
    # The largest difference to them, and the largest that rounding may explain.
    difference: float
    bound: float


def compare(engine: Engine, batches: ProbeBatches, independent_layers: bool) -> Comparison:
    """Compute the sequences together and one at a time; raise InputError if they differ."""
    path = engine.config.model.path
    with changed_layers(engine, keep_output, independent_layers):
        expected = one_at_a_time(engine, batches.alone)
        differences = []
        for size in group_sizes(engine):
            together = run_together(engine, batches.among, size)
            difference = largest(engine, together - batches.with_third(expected))
            differences.append((difference, size))
    difference, size = max(differences)
    if largest(engine, expected) == torch.inf:
        raise InputError(f"model.path={path}: the outputs of the model are not finite")

    with changed_layers(engine, add_noise(engine), independent_layers):
        noisy = one_at_a_time(engine, batches.alone)
        bound = max(MIN_BOUND, MARGIN * largest(engine, noisy - expected))
    if difference > bound:

        def difference_of_first_layers(num_layers: int | None) -> float:
            """Return the difference that a model with only its first layers has. None: all."""
            with changed_layers(engine, keep_first_layers(num_layers), independent_layers):
                together = run_together(engine, batches.among, size)
                single = one_at_a_time(engine, batches.alone)
                return largest(engine, together - batches.with_third(single))

        reason = explain(engine, difference, bound, difference_of_first_layers)
        raise InputError(f"model.path={path}: {reason}")
    return Comparison(expected, difference, bound)


def group_sizes(engine: Engine) -> list[int]:
    """Return the sizes of the groups of ranks that may share a micro-batch."""
    if has_dynamic_cp(engine.config.engine):
        return [size for size in POWERS_OF_TWO if size <= engine.dp_size]
    return [*engine.cp_groups]


def warn_if_blind(engine: Engine, batches: ProbeBatches, comparison: Comparison) -> None:
    """Report a model for which the comparison proves nothing.

    That is one whose outputs stay the same even if the sequences are one.
    """
    size = group_sizes(engine)[0]
    together = run_together(engine, batches.joined, size)
    leak = together - batches.with_third(comparison.expected)
    # The first token of a sequence has no output.
    leak = leak[:, batches.among.position_ids > 0]
    if largest(engine, leak) <= comparison.bound and dist.get_rank() == 0:
        print(
            f"model.path={engine.config.model.path}: the outputs for a token depend so little on "
            "earlier tokens that nobody can see whether it keeps sequences apart",
            flush=True,
        )


# -- what is computed ----------------------------------------------------------------------------


def make_batches(engine: Engine) -> ProbeBatches:
    """Draw random tokens, with an image in the first sequence if the model reads images."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = engine.hf_config.vocab_size
    tokens = torch.randint(vocabulary, (sum(LENGTHS),), generator=generator)
    first, second = tokens.split(LENGTHS)
    pictures = None
    shared_length = SHARED_LENGTH
    if engine.reader:
        reader = engine.reader
        pixels = torch.randint(256, (60, 90, 3), dtype=torch.uint8, generator=generator)
        image = reader.resized(pixels.numpy())
        image_tokens = torch.tensor(reader.expand(reader.image_token, [image]).tokens.ids)
        before = reader.without_images(first[:TOKENS_BEFORE_IMAGE])
        after = reader.without_images(first[TOKENS_BEFORE_IMAGE:])
        first = torch.cat([before, image_tokens, after])
        second = reader.without_images(second)
        shared_length += len(image_tokens)
        pictures = Pictures([[image], [], [image, image]], reader)
    third = first[:shared_length]

    def batch(sequences: list[Tensor], rows_of_pictures: list[int]) -> Batch:
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        rows = torch.tensor(rows_of_pictures)
        return Batch(torch.cat(sequences), bounds(lengths), {}, rows, pictures)

    return ProbeBatches(
        alone=batch([first, second], [0, 1]),
        among=batch([first, second, third], [0, 1, 0]),
        joined=batch([torch.cat([first, second, third])], [2]),
    )


def one_at_a_time(engine: Engine, batch: Batch) -> Tensor:
    """Return the outputs [outputs, T] for sequences computed one at a time."""
    return engine.one_at_a_time(batch)[: engine.head.num_differentiable]


def run_together(engine: Engine, batch: Batch, size: int) -> Tensor:
    """Return the outputs [outputs, T] for a batch that is one micro-batch.

    Args:
        size: the ranks that share it, at most as many as this rank's largest group has.
    """
    size = min(size, max(engine.cp_groups))
    micro_batches = [(size, list(range(len(batch))))]
    return engine.ask(batch, micro_batches)[: engine.head.num_differentiable]


def largest(engine: Engine, values: Tensor) -> float:
    """Return the largest absolute value on all ranks; infinity if one is not a number."""
    value = values.abs().nan_to_num(torch.inf).max()
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def explain(
    engine: Engine,
    difference: float,
    bound: float,
    difference_of_first_layers: Callable[[int | None], float],
) -> str:
    """Return one line: where the two ways diverge, and what to change."""
    place = find_divergence(engine, bound, difference_of_first_layers)
    config = engine.config
    text_config = engine.hf_config.get_text_config()
    bidirectional_fix = config_json_fix(text_config, BIDIRECTIONAL, "null")
    fix = f"model_engine={config.model_engine} cannot train it{bidirectional_fix}"
    way = "packed" if config.engine.use_remove_padding else "padded"
    if shares_sequences(config.engine):
        way += " and shared"
        fix = "set engine.context_parallel_size=1"
    elif config.engine.use_remove_padding:
        with engine.padded():
            if difference_of_first_layers(None) <= bound:
                fix = "set engine.use_remove_padding=false"
    return (
        f"{way} sequences and one at a time differ, first {place}: by {difference:.2g}, where "
        f"rounding explains at most {bound:.2g}; {fix}"
    )


def find_divergence(
    engine: Engine, bound: float, difference_of_first_layers: Callable[[int | None], float]
) -> str:
    """Search by bisection for the first layer after which the outputs differ."""
    num_layers = engine.hf_config.get_text_config().num_hidden_layers
    if difference_of_first_layers(0) > bound:
        return "in the embedding"
    # With the first `agree` layers the outputs agree; with the first `differ` layers they do not.
    agree = 0
    differ = num_layers
    while differ - agree > 1:
        middle = (agree + differ) // 2
        if difference_of_first_layers(middle) > bound:
            differ = middle
        else:
            agree = middle
    return f"in layer {agree} of 0 to {num_layers - 1}"


# -- changes of a model --------------------------------------------------------------------------


def keep_output(number: int, layer_input: Tensor, layer_output: Tensor) -> Tensor:
    return layer_output


def keep_first_layers(num_layers: int | None) -> Change:
    """Return a change that leaves a model only its first layers. None: all layers."""

    def change(number: int, layer_input: Tensor, layer_output: Tensor) -> Tensor:
        is_kept = num_layers is None or number < num_layers
        return layer_output if is_kept else layer_input

    return change


def add_noise(engine: Engine) -> Change:
    """Return a change by about as much as rounding to the compute dtype, or a little more.

    Ranks that hold the same tensors add the same noise.
    """
    eps = torch.finfo(engine.compute_dtype).eps
    generator = torch.Generator(engine.device).manual_seed(0)

    def change(number: int, layer_input: Tensor, layer_output: Tensor) -> Tensor:
        noise = torch.randn(layer_output.shape, generator=generator, device=layer_output.device)
        return layer_output + eps * layer_output * noise.to(layer_output.dtype)

    return change


class IndependentLayers:
    """Lets every layer of a module read the input of the first one, and adds up their increments.

    With is_active=False, layers read what they always read.
    """

    def __init__(self, change: Change, is_active: bool):
        self.change = change
        self.is_active = is_active
        # The input of the layer that runs: the first one's, if layers are independent.
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
    """Within this block, layers have changed outputs and, if asked for, are independent."""
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
def quiet(engine: Engine) -> Iterator[None]:
    """Within this block, outputs depend on nothing but the layers; afterwards, free memory.

    A value head, which may be zero, gets a fixed direction. All tokens go to the same experts,
    since rounding may change which ones are chosen.
    """
    handles = []
    if isinstance(engine.head, ValueHead):
        handles.append(engine.head.register_forward_pre_hook(use_fixed_direction))
    for model in engine.modules():
        for name, module in model.named_modules():
            if name.endswith(".experts") and has_stacked_weights(module):
                handles.append(module.register_forward_pre_hook(use_first_experts))
    try:
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
    """Forward pre-hook of a value head: replace its weight."""
    hidden, weight, *other_args = args
    angles = torch.arange(weight.numel(), device=weight.device)
    direction = angles.cos().view_as(weight).to(weight.dtype)
    return (hidden, direction, *other_args)


def use_first_experts(_, args: tuple) -> tuple:
    """Forward pre-hook of experts: send every token to experts 0 to k - 1.

    Args:
        args: in any order, hidden states [t, h], the numbers of the chosen experts [t, k] int64,
            and their weights [t, k], which are sorted here, the largest first.
    """
    chosen = next(tensor for tensor in args if not tensor.is_floating_point())

    def replacement(tensor: Tensor) -> Tensor:
        if tensor is chosen:
            return torch.arange(tensor.shape[1], device=tensor.device).expand_as(tensor)
        if tensor.shape == chosen.shape:
            return tensor.sort(descending=True).values
        return tensor

    return tuple(replacement(tensor) for tensor in args)
