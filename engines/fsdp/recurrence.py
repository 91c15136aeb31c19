"""Layers that carry a state from token to token (gated delta nets, Mamba, short convolutions) over packed sequences."""

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


def recurrent_layers(hf: nn.Module) -> list[nn.Module]:
    """All such layers have a causal convolution of their own in front."""
    return [module for module in hf.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())]


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
        """[1, T, h] -> [1, T, h]. Sequences of about the same length are the rows of one call: the kernels of transformers that
        need nothing installed do not know where sequences begin, and a call for each would be slow."""
        if self.now is None:
            return forward(hidden_states, *others, **more)
        groups, outputs = defaultdict(list), {}
        for start, end in zip(self.now, self.now[1:]):
            groups[(end - start - 1).bit_length()].append((start, end))
        for group in groups.values():
            rows = forward(pad_sequence([hidden_states[0, a:b] for a, b in group], batch_first=True), *others, **more)
            outputs |= {a: row[:b - a] for (a, b), row in zip(group, rows)}
        return torch.cat([outputs[start] for start in self.now[:-1]])[None]
