"""Layers that carry a state from token to token (gated delta nets, Mamba, short convolutions) over packed sequences."""

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


def recurrent_layers(hf: nn.Module) -> list[nn.Module]:
    """All such layers have a causal convolution of their own in front."""
    return [
        module
        for module in hf.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    ]


class Bounds:
    """Where the sequences of the micro-batch begin that is being computed, and the end; None: a row is a sequence."""

    def __init__(self, hf: nn.Module):
        """Let the recurrent layers of a model begin every sequence anew."""
        self.now: list[int] | None = None
        for layer in recurrent_layers(hf):
            layer.forward = partial(self.by_sequence, layer.forward)

    # Not compiled: it would be compiled again for every new set of lengths.
    @torch.compiler.disable
    def by_sequence(self, forward, hidden_states: Tensor, *others, **more) -> Tensor:
        """[1, T, h] -> [1, T, h], or a tuple that begins with it. Sequences of about the same length are the rows of one call: the
        kernels of transformers that need nothing installed do not know where sequences begin, and a call for each would be slow.
        Other arguments of [1, T], such as positions, are divided alike."""
        if self.now is None:
            return forward(hidden_states, *others, **more)

        def rows_of(x):
            if not isinstance(x, Tensor) or x.shape[:2] != hidden_states.shape[:2]:
                return x
            return pad_sequence([x[0, a:b] for a, b in group], batch_first=True)

        groups, outputs, rest = defaultdict(list), {}, []
        for start, end in zip(self.now, self.now[1:]):
            groups[(end - start - 1).bit_length()].append((start, end))
        for group in groups.values():
            rows = forward(
                rows_of(hidden_states),
                *map(rows_of, others),
                **{name: rows_of(x) for name, x in more.items()},
            )
            rows, *rest = rows if isinstance(rows, tuple) else (rows,)
            outputs |= {a: row[: b - a] for (a, b), row in zip(group, rows)}
        joined = torch.cat([outputs[start] for start in self.now[:-1]])[None]
        return (
            (joined, *[None] * len(rest)) if rest else joined
        )  # a state, which training has no use for
