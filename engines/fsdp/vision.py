"""What a model of images is given besides tokens: pixels, which tokens stand for them, and places of more than one axis."""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from config import InputError
from data.batching.packing import Batch
from data.images.processor import Reader
from engines.model.hf import matrix_flops, whole_modules


def check(config: DictConfig) -> None:
    """Raise InputError for what cannot be had with images."""
    cp, rank = config.engine.context_parallel_size, config.model.lora.rank
    if cp != 1:
        raise InputError(
            f"engine.context_parallel_size={cp} with model.images=true is not supported: ranks would share an image"
        )
    if rank:
        raise InputError(
            f"model.lora.rank={rank} with model.images=true is not supported: set one of them back"
        )


def products(hf: nn.Module, reader: Reader) -> dict[nn.Parameter, float]:
    """The matrices that images go through before the text model does, in their order, and how often for each token that stands for
    a part of an image: once or, those of the tower's layers and what makes patches of pixels, for each of its patches."""
    outside = {
        *hf.get_decoder().parameters(),
        *hf.get_input_embeddings().parameters(),
        *hf.get_output_embeddings().parameters(),
    }
    matrices = [
        p
        for name, p in hf.named_parameters()
        if p not in outside and p.ndim > 1 and not name.endswith("bias")
    ]
    in_layers = {p for layer in whole_modules(hf, hf) for p in layer.parameters()}
    of_patch = next((p for p in matrices if p.ndim > 2), matrices[0])  # a convolution, or a matrix
    ids, image = reader.sample
    num_patches = reader.tensors(image)["pixel_values"].numel() // of_patch[0].numel()
    per_token = num_patches / int((reader.token_types([ids.tolist()]) > 0).sum())
    return {
        p: per_token if p in in_layers or p is of_patch or p.ndim > 2 else 1.0 for p in matrices
    }


def passed_by(matrices: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """The first of them, which no gradient passes."""
    return {*takewhile(lambda p: not p.requires_grad, matrices)}


def count_flops(hf: nn.Module, reader: Reader) -> int:
    """FLOPs of forward and backward in what images go through, for each token that stands for a part of an image; as
    engines.model.hf.count_flops()."""
    matrices = products(hf, reader)
    untouched = passed_by(matrices)
    return int(sum(matrix_flops(p, untouched) * number for p, number in matrices.items()))


def count_kept(hf: nn.Module, reader: Reader, itemsize: int, checkpointing: bool) -> float:
    """Bytes that the backward pass finds in what images go through, for each token that stands for a part of an image: input and
    output of each matrix that a gradient passes; in a layer also what its activation makes, and the fp32 copies inside norms that
    are not torch's own. checkpointing: of the layers their inputs, and all of one."""
    matrices = products(hf, reader)
    untouched, inputs, layers, others = passed_by(matrices), [0.0], [0.0], matrices.keys()

    def kept(parameters: Iterable[nn.Parameter]) -> float:
        return sum(
            (p[0].numel() + len(p)) * itemsize * matrices[p]
            for p in parameters
            if p not in untouched
        )

    for layer in whole_modules(hf, hf):
        own = [p for p in layer.parameters() if p in matrices and p not in untouched]
        if own:
            norms = sum(
                p.numel()
                for m in layer.modules()
                if not isinstance(m, nn.LayerNorm)
                for name, p in m.named_parameters(recurse=False)
                if p.ndim == 1 and name == "weight"
            )
            inputs.append(own[0].shape[1] * itemsize * matrices[own[0]])
            layers.append(
                kept(own)
                + (max(p.shape[1] for p in own) * itemsize + norms * (4 + 4)) * matrices[own[0]]
            )
            others -= {*own}
    return kept(others) + (sum(inputs) + max(layers) if checkpointing else sum(layers))


def multiply_patches(hf: nn.Module) -> None:
    """A convolution of patches as large as its kernel is a matrix product, and as that its gradient is many times as fast."""

    def forward(conv: nn.Module, convolve: Callable, patches: Tensor) -> Tensor:
        if patches.shape[2:] != conv.kernel_size or conv.padding != "valid" and any(conv.padding):
            return convolve(patches)
        made = F.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)
        return made[(...,) + (None,) * len(conv.kernel_size)]

    for module in hf.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            module.forward = partial(forward, module, module.forward)


class Images:
    """Of micro-batches, in host memory.

    filler  ids [t] of a sequence with one small image, which a micro-batch without images gets behind its own sequences: each rank
            goes through the vision tower, whose collectives others wait for. Nothing asks for its tokens: its gradient is 0.
    """

    def __init__(self, hf: nn.Module, reader: Reader):
        self.reader, (self.filler, self.image) = reader, reader.sample
        # Of a model whose places have several axes (multi-axis rotary embeddings, Qwen2-VL 2024): its own way to count them.
        self.places = getattr(hf.base_model, "get_rope_index", None)
        self.asked = inspect.signature(self.places).parameters if self.places else {}
        told = {"input_ids", *reader.of_tokens, *reader.tensors(self.image)}
        if missing := [
            x.name
            for x in self.asked.values()
            if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD and x.name not in told
        ]:
            raise InputError(
                f"{type(hf).__name__} needs {missing[0]}: take it out of data.drop_processor_keys"
            )

    def ahead(
        self, batches: Iterable[Batch], packed: bool
    ) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
        """Each batch and its given(). A thread makes that of the next one, while the device computes."""
        with ThreadPoolExecutor(1) as thread:
            waiting = deque()
            for batch in batches:
                waiting.append(
                    (
                        batch,
                        thread.submit(lambda batch: self.given(batch, batch.images, packed), batch),
                    )
                )
                if len(waiting) > 1:
                    batch, future = waiting.popleft()
                    yield batch, future.result()
            for batch, future in waiting:
                yield batch, future.result()

    def given(self, batch: Batch, images: list[np.ndarray], packed: bool) -> dict[str, Tensor]:
        """The model's arguments for the sequences of a batch, laid end to end in one row, or padded to one length. images: those of
        the batch; none: those of the filler, which stands behind them."""
        sequences = [
            *map(self.readable, batch.input_ids.split(batch.lengths)),
            *[self.filler] * (not images),
        ]
        ids, real = (
            pad_sequence(sequences, True),
            pad_sequence([torch.ones_like(ids) for ids in sequences], True),
        )
        types = {name: self.reader.token_types(ids.tolist()) for name in self.reader.of_tokens}
        given = (
            self.reader.tensors(images or self.image)
            | types
            | {"input_ids": ids, "attention_mask": real}
        )
        places = torch.arange(ids.shape[1]).expand_as(ids)
        if self.places:
            places = self.places(**{name: x for name, x in given.items() if name in self.asked})[0]
        by_token = {"input_ids": ids, "position_ids": places, **types}
        if packed:
            by_token = {name: x[..., real.bool()].unsqueeze(-2) for name, x in by_token.items()}
        del given["attention_mask"]
        return given | by_token

    def readable(self, ids: Tensor) -> Tensor:
        """ids [t] of a sequence that may end with a sampled placeholder, which has no image: nothing follows from it."""
        ends = self.reader.token_types([ids[-1:].tolist()])[0] > 0
        return torch.cat([ids[:-1], ids[-1:].masked_fill(ends, 0)])
