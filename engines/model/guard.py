"""Before the first step: an engine must compute sequences side by side as it does each by itself.

A few short sequences of random tokens go through the real model with its real weights, the way the run is configured to take them
(packed or padded, divided over context-parallel ranks), and one at a time. Rounding, which each layer amplifies, may hide a leak in
bfloat16. So this happens once more with layers that do not read each other: they all have the input of the first one, and what they
add to it is summed up. What rounding may make of either is seen by adding noise of its size.

What cannot be seen so: a leak through weights that are still zero, and one that is smaller than rounding. Windows longer than these
sequences engines/fsdp/tracing.py compares. Adapters, and a critic's head, work on each token alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from config import InputError
from data.batching.packing import Batch, bounds
from data.images.processor import Pictures
from engines.base import Engine
from engines.context_parallel import has_dynamic_cp, shares_sequences
from engines.heads import ValueHead
from engines.model.hf import BOTH_WAYS, without

LENGTHS, SHARED = (
    (24, 9),
    15,
)  # words; a third sequence is the first one without its last words, so that positions count, too
BEFORE = 5  # words of the first one before its image, if the model is one of images
BOUND = 1e-4  # nats, in fp32
MARGIN = 4  # times what rounding changes
POWERS = [1 << k for k in range(20)]

Change = Callable[
    [int, Tensor, Tensor], Tensor
]  # (number of a layer, its input, its output) -> another output


def check(engine: Engine) -> tuple[float, float]:
    """Raise InputError, on all ranks, if the model computes a sequence differently among others. Returns the largest difference of
    a token's answers, and the bound that rounding sets. Leaves nothing behind."""
    path, (alone, among, joined) = engine.config.model.path, sequences(engine)
    sizes = (
        [size for size in POWERS if size <= engine.dp_size]
        if has_dynamic_cp(engine.config.engine)
        else [*engine.cp_groups]
    )

    def with_third(values: Tensor) -> Tensor:
        """[..., tokens] of two sequences -> of three."""
        return torch.cat([values, values[..., : among.lengths[2]]], -1)

    # Compiled for these shapes it would take a minute.
    with quiet(engine), torch.compiler.set_stance("force_eager"):
        for apart in (True, False):

            def difference(size: int, num_layers: int | None = None, apart: bool = apart) -> float:
                with changed(engine, partial(first_layers, num_layers), apart):
                    return largest(
                        engine, ask(engine, among, size) - with_third(one_at_a_time(engine, alone))
                    )

            with changed(engine, partial(first_layers, None), apart):
                expected = one_at_a_time(engine, alone)
                found, size = max(
                    (largest(engine, ask(engine, among, size) - with_third(expected)), size)
                    for size in sizes
                )
            if largest(engine, expected) == torch.inf:
                raise InputError(f"model.path={path}: what the model says is not finite")
            with changed(engine, noise(engine), apart):
                bound = max(
                    BOUND, MARGIN * largest(engine, one_at_a_time(engine, alone) - expected)
                )
            if found > bound:
                raise InputError(
                    f"model.path={path}: {explain(engine, found, bound, partial(difference, size))}"
                )
        leak = ask(engine, joined, sizes[0]) - with_third(expected)
        if largest(engine, leak[:, among.position_ids > 0]) <= bound and dist.get_rank() == 0:
            print(
                f"model.path={path}: what the model says of a token depends so little on earlier ones that nobody can see "
                "whether it keeps sequences apart",
                flush=True,
            )
    return found, bound


def first_layers(count: int | None, number: int, before: Tensor, after: Tensor) -> Tensor:
    """Of a model that has but `count` layers; None: all."""
    return after if count is None or number < count else before


def noise(engine: Engine) -> Change:
    """Of the size of rounding to the compute dtype, or some more; the same on ranks that hold the same."""
    eps, generator = (
        torch.finfo(engine.compute_dtype).eps,
        torch.Generator(engine.device).manual_seed(0),
    )
    return lambda number, before, after: (
        after
        + eps
        * after
        * torch.randn(after.shape, generator=generator, device=after.device).to(after.dtype)
    )


def sequences(engine: Engine) -> tuple[Batch, Batch, Batch]:
    """(two of random words, always the same; with a third, which is the beginning of the first; as if they were one). With an image
    in the first and the third."""
    generator, reader = torch.Generator().manual_seed(0), engine.reader
    first, second = torch.randint(
        engine.hf_config.vocab_size, (sum(LENGTHS),), generator=generator
    ).split(LENGTHS)
    pictures, num_shared = None, SHARED
    if reader:
        image = reader.resized(
            torch.randint(256, (60, 90, 3), dtype=torch.uint8, generator=generator).numpy()
        )
        ids = torch.tensor(reader.expand(reader.image_token, [image]).tokens.ids)
        first = torch.cat(
            [reader.without_images(first[:BEFORE]), ids, reader.without_images(first[BEFORE:])]
        )
        second, num_shared = reader.without_images(second), SHARED + len(ids)
        pictures = Pictures([[image], [], [image, image]], reader)
    parts = [first, second, first[:num_shared]]

    def batch(parts: list[Tensor], rows: list[int]) -> Batch:
        return Batch(
            torch.cat(parts),
            bounds(torch.tensor([len(part) for part in parts])),
            {},
            torch.tensor(rows),
            pictures,
        )

    return batch(parts[:2], [0, 1]), batch(parts, [0, 1, 0]), batch([torch.cat(parts)], [2])


def explain(
    engine: Engine, found: float, bound: float, difference: Callable[[int | None], float]
) -> str:
    """A line: where the two ways diverge, and what would help."""
    config, total = engine.config, engine.hf_config.get_text_config().num_hidden_layers
    low, high = 0, total  # the first layers, of which none and all diverge
    if difference(0) > bound:
        where = "in the embedding"
    else:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if difference(middle) > bound else (middle, high)
        where = f"in layer {low} of 0 to {total - 1}"
    way, help = (
        "padded",
        f"model_engine={config.model_engine} cannot train it"
        + without(engine.hf_config.get_text_config(), BOTH_WAYS, "null"),
    )
    if shares_sequences(config.engine):
        way = f"{'packed' if config.engine.use_remove_padding else 'padded'} and shared"
        help = "give engine.context_parallel_size=1"
    elif config.engine.use_remove_padding:
        way = "packed"
        with engine.padded():
            if difference() <= bound:
                help = "give engine.use_remove_padding=false"
    return f"{way} sequences and one at a time differ, first {where}: by {found:.2g} where rounding may make {bound:.2g}; {help}"


def one_at_a_time(engine: Engine, batch: Batch) -> Tensor:
    return engine.one_at_a_time(batch)[: engine.head.num_differentiable]


def ask(engine: Engine, batch: Batch, size: int) -> Tensor:
    """Of a batch that is one micro-batch for groups of this size, or of the largest that a rank has."""
    return engine.ask(batch, [(min(size, max(engine.cp_groups)), list(range(len(batch))))])[
        : engine.head.num_differentiable
    ]


def largest(engine: Engine, values: Tensor) -> float:
    """The largest amount, over all ranks; infinite where one is no number."""
    value = values.abs().nan_to_num(torch.inf).max()
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


@contextmanager
def changed(engine: Engine, change: Change, apart: bool) -> Iterator[None]:
    """Meanwhile layers have other outputs. apart: all layers of a module read what the first of them does, and what they add to it
    is summed up."""
    handles = []

    def before(state: SimpleNamespace, first: bool, _, args: tuple, kwargs: dict):
        names = [*range(len(args)), *kwargs]
        hidden = (args or kwargs)[names[0]]
        if first or not apart:
            state.input, state.added = hidden, 0.0
        if args:
            return (state.input, *args[1:]), kwargs
        return args, {**kwargs, names[0]: state.input}

    def after(state: SimpleNamespace, number: int, _, args: tuple, output):
        hidden, *others = output if isinstance(output, tuple) else (output,)
        hidden = change(number, state.input, hidden)
        if apart:
            state.added = state.added + (hidden.float() - state.input.float())
            hidden = (state.input.float() + state.added).to(hidden.dtype)
        return (hidden, *others) if isinstance(output, tuple) else hidden

    for layers in engine.layers():
        state = SimpleNamespace()
        for i, (number, layer) in enumerate(layers):
            handles += [
                layer.register_forward_pre_hook(partial(before, state, i == 0), with_kwargs=True),
                layer.register_forward_hook(partial(after, state, number)),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def quiet(engine: Engine) -> Iterator[None]:
    """Meanwhile a critic's head, which may be zero, has a fixed direction, and all tokens go to the same experts, since rounding
    may choose others; then what was gathered is given back."""

    def directed(_, args: tuple):
        hidden, weight, *others = args
        return (
            hidden,
            torch.arange(weight.numel(), device=weight.device)
            .cos()
            .view_as(weight)
            .to(weight.dtype),
            *others,
        )

    handles = (
        [engine.head.register_forward_pre_hook(directed)]
        if isinstance(engine.head, ValueHead)
        else []
    )
    handles += [
        module.register_forward_pre_hook(to_first_experts)
        for model in engine.modules()
        for name, module in model.named_modules()
        if name.endswith(".experts") and any(p.ndim == 3 for p in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        engine.offload()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def to_first_experts(_, args: tuple) -> tuple:
    """Of [t, h] tokens, and in any order the chosen experts' numbers [t, k] int64 and weights [t, k]: the same weights, the largest
    first, for experts 0 to k - 1."""
    chosen = next(x for x in args if not x.is_floating_point())
    return tuple(
        torch.arange(x.shape[1], device=x.device).expand_as(x)
        if x is chosen
        else x.sort(descending=True).values
        if x.shape == chosen.shape
        else x
        for x in args
    )
