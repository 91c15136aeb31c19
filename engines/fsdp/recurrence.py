"""Recurrent layers over packed sequences: gated delta nets, Mamba, short convolutions."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

# (start, end) of a sequence in the row.
Segment = tuple[int, int]


def recurrent_layers(hf: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers, which we recognise by their causal convolution."""
    return [module for module in hf.modules() if has_convolution(module)]


def has_convolution(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in module.children())


class StateResets:
    """Makes recurrent layers start every packed sequence with a fresh state.

    offsets  where the sequences of the current micro-batch begin, and the end of the last one; None
             if every row is one sequence
    """

    def __init__(self, hf: nn.Module):
        self.offsets: list[int] | None = None
        for layer in recurrent_layers(hf):
            layer.forward = partial(self.by_sequence, layer.forward)

    # Not compiled: every new set of lengths would cause a recompilation.
    @torch.compiler.disable
    def by_sequence(self, forward: Callable, hidden_states: Tensor, *args, **kwargs):
        """Run a layer on packed sequences [1, T, h], with one row per sequence.

        Without further packages, transformers' kernels cannot reset the state within a row, and one
        call per sequence would be slow. So sequences of similar lengths become the rows of one
        call. Arguments of shape [1, T, ...], such as positions, are divided in the same way.

        Returns:
            [1, T, h], or a tuple that starts with it. Further outputs of shape [1, T, ...], such as
            keys and values, are joined in the same way. Others are the layer's final state, which
            training does not use: they are None.
        """
        if self.offsets is None:
            return forward(hidden_states, *args, **kwargs)
        whole_shape = hidden_states.shape[:2]
        # The outputs for the sequence that begins at an offset.
        outputs: dict[int, list[Tensor | None]] = {}
        is_tuple = False
        for segments in similar_segments(self.offsets):
            divide = partial(rows_of, segments=segments, whole_shape=whole_shape)
            rows = divide(hidden_states)
            row_kwargs = {name: divide(x) for name, x in kwargs.items()}
            result = forward(rows, *map(divide, args), **row_kwargs)
            is_tuple = isinstance(result, tuple)
            results = result if is_tuple else (result,)
            for row, (start, end) in enumerate(segments):
                outputs[start] = [part_of_row(x, row, end - start, rows.shape) for x in results]
        in_order = [outputs[start] for start in self.offsets[:-1]]
        joined = tuple(map(join, zip(*in_order)))
        return joined if is_tuple else joined[0]


def part_of_row(output, row: int, length: int, shape: torch.Size) -> Tensor | None:
    """Return the first tokens of a row of a layer's output; None if it has no tokens.

    Args:
        shape: the shape of the layer's input, [rows, tokens, h].
    """
    if not isinstance(output, Tensor) or output.shape[:2] != shape[:2]:
        return None
    return output[row, :length]


def join(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """Return the outputs for all sequences as one row [1, T, ...]; None if one is missing."""
    if any(part is None for part in parts):
        return None
    return torch.cat(parts)[None]


def similar_segments(offsets: list[int]) -> list[list[Segment]]:
    """Group sequences whose lengths round up to the same power of two."""
    groups = defaultdict(list)
    for start, end in pairwise(offsets):
        groups[(end - start - 1).bit_length()].append((start, end))
    return list(groups.values())


def rows_of(value, segments: list[Segment], whole_shape: torch.Size):
    """Return the segments of a tensor [1, T, ...] as padded rows; other values are unchanged."""
    if not isinstance(value, Tensor) or value.shape[:2] != whole_shape:
        return value
    return pad_sequence([value[0, start:end] for start, end in segments], batch_first=True)
