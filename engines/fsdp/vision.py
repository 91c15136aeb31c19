"""Inputs of vision-language models besides tokens, and what their vision towers cost."""

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
from data.batching.batch import Batch
from data.images.processor import Reader
from engines.model.flops import matrix_flops
from engines.model.hf import layer_modules

FP32_BYTES = 4


def check_images(config: DictConfig) -> None:
    """Raise InputError for settings that do not work together with images."""
    cp = config.engine.context_parallel_size
    rank = config.model.lora.rank
    if cp != 1:
        raise InputError(
            f"engine.context_parallel_size={cp} with model.images=true is not supported: ranks "
            "would share an image"
        )
    if rank:
        raise InputError(
            f"model.lora.rank={rank} with model.images=true is not supported: set one of them back"
        )


# -- costs -----------------------------------------------------------------------------------------


def image_matrices(hf: nn.Module, reader: Reader) -> dict[nn.Parameter, float]:
    """Return the matrices that images pass through before the text model, in order.

    The values are the number of rows that each token of an image sends through the matrix: those of
    its patches in the tower's layers and where patches are made of pixels, otherwise 1.
    """
    text_parameters = {
        *hf.get_decoder().parameters(),
        *hf.get_input_embeddings().parameters(),
        *hf.get_output_embeddings().parameters(),
    }
    matrices = [
        p
        for name, p in hf.named_parameters()
        if p not in text_parameters and p.ndim > 1 and not name.endswith("bias")
    ]
    in_layers = {p for layer in layer_modules(hf, hf) for p in layer.parameters()}
    # Patches are made by a convolution or, without one, by the first matrix.
    patch_matrix = next((p for p in matrices if p.ndim > 2), matrices[0])
    patches = patches_per_token(reader, patch_matrix)
    rows = {}
    for p in matrices:
        sees_patches = p in in_layers or p is patch_matrix or p.ndim > 2
        rows[p] = patches if sees_patches else 1.0
    return rows


def patches_per_token(reader: Reader, patch_matrix: nn.Parameter) -> float:
    """Return the number of patches for each token that stands for a part of an image."""
    ids, image = reader.sample
    num_pixels = reader.tensors(image)["pixel_values"].numel()
    num_patches = num_pixels // patch_matrix[0].numel()
    num_image_tokens = int((reader.token_types([ids.tolist()]) > 0).sum())
    return num_patches / num_image_tokens


def without_gradient(matrices: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Return the first matrices, up to the first that is trained: no gradient passes them."""
    return {*takewhile(lambda p: not p.requires_grad, matrices)}


def count_flops(hf: nn.Module, reader: Reader) -> int:
    """Return the FLOPs of forward and backward in the vision tower, per image token.

    Counted as in engines.model.hf.count_flops().
    """
    matrices = image_matrices(hf, reader)
    untouched = without_gradient(matrices)
    return int(sum(matrix_flops(p, untouched) * rows for p, rows in matrices.items()))


def count_kept(hf: nn.Module, reader: Reader, itemsize: int, checkpointing: bool) -> float:
    """Return the bytes per image token that the vision tower keeps for the backward pass.

    For each matrix that a gradient passes, its input and output are kept. A layer also keeps the
    output of its activation, and fp32 copies inside norms that are not torch's own.
    itemsize: bytes of an activation's number.
    checkpointing: layers keep their inputs only, and one layer at a time everything.
    """
    matrices = image_matrices(hf, reader)
    untouched = without_gradient(matrices)
    outside_layers = matrices.keys()
    layer_inputs = [0.0]
    layer_totals = [0.0]

    def kept_around(parameters: Iterable[nn.Parameter]) -> float:
        return sum(
            (p[0].numel() + len(p)) * itemsize * matrices[p]
            for p in parameters
            if p not in untouched
        )

    for layer in layer_modules(hf, hf):
        own = [p for p in layer.parameters() if p in matrices and p not in untouched]
        if not own:
            continue
        rows = matrices[own[0]]
        activation = max(p.shape[1] for p in own) * itemsize
        norms = norm_width(layer) * (FP32_BYTES + FP32_BYTES)
        layer_inputs.append(own[0].shape[1] * itemsize * rows)
        layer_totals.append(kept_around(own) + (activation + norms) * rows)
        outside_layers -= {*own}
    in_layers = sum(layer_totals)
    if checkpointing:
        in_layers = sum(layer_inputs) + max(layer_totals)
    return kept_around(outside_layers) + in_layers


def norm_width(layer: nn.Module) -> int:
    """Return the total width of a layer's norms other than nn.LayerNorm."""
    width = 0
    for module in layer.modules():
        if isinstance(module, nn.LayerNorm):
            continue
        for name, p in module.named_parameters(recurse=False):
            if p.ndim == 1 and name == "weight":
                width += p.numel()
    return width


# -- transform -------------------------------------------------------------------------------------


def multiply_patches(hf: nn.Module) -> None:
    """Compute convolutions whose kernel covers a whole patch as matrix products.

    The gradient is many times as fast.
    """
    for module in hf.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            module.forward = partial(convolve_or_multiply, module, module.forward)


def convolve_or_multiply(conv: nn.Module, convolve: Callable, patches: Tensor) -> Tensor:
    is_padded = conv.padding != "valid" and any(conv.padding)
    if patches.shape[2:] != conv.kernel_size or is_padded:
        return convolve(patches)
    product = F.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)
    return product[(...,) + (None,) * len(conv.kernel_size)]


# -- inputs ----------------------------------------------------------------------------------------


class Images:
    """Prepares a vision-language model's inputs for micro-batches, in host memory.

    filler  ids [t] of a sequence with one small image. A micro-batch without images gets it after
            its own sequences, so that every rank goes through the vision tower, whose collectives
            other ranks wait for. No loss depends on its tokens, so its gradient is 0.
    """

    def __init__(self, hf: nn.Module, reader: Reader):
        self.reader = reader
        self.filler, self.image = reader.sample
        # Models with multi-axis position ids (M-RoPE, Qwen2-VL 2024) have their own way to count
        # them.
        self.get_position_ids = getattr(hf.base_model, "get_rope_index", None)
        self.position_arguments = {}
        if self.get_position_ids:
            self.position_arguments = inspect.signature(self.get_position_ids).parameters
        available = {"input_ids", *reader.token_type_keys, *reader.tensors(self.image)}
        for parameter in self.position_arguments.values():
            is_required = (
                parameter.default is parameter.empty
                and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            )
            if is_required and parameter.name not in available:
                raise InputError(
                    f"{type(hf).__name__} needs {parameter.name}: take it out of "
                    "data.drop_processor_keys"
                )

    def prepare_ahead(
        self, batches: Iterable[Batch], packed: bool
    ) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
        """Yield each batch with its inputs().

        A thread prepares the next batch's inputs while the device computes.
        """

        def prepare(batch: Batch) -> dict[str, Tensor]:
            return self.inputs(batch, batch.images, packed)

        with ThreadPoolExecutor(1) as thread:
            waiting = deque()
            for batch in batches:
                waiting.append((batch, thread.submit(prepare, batch)))
                if len(waiting) > 1:
                    first_batch, first_future = waiting.popleft()
                    yield first_batch, first_future.result()
            for batch, future in waiting:
                yield batch, future.result()

    def inputs(self, batch: Batch, images: list[np.ndarray], packed: bool) -> dict[str, Tensor]:
        """Return the model's arguments for a batch's sequences.

        images: the batch's images; if there are none, the filler is appended with its own.
        packed: sequences are laid end to end in one row; otherwise they are padded to one length.
        """
        sequences = [self.without_open_image(ids) for ids in batch.input_ids.split(batch.lengths)]
        if not images:
            sequences.append(self.filler)
        ids = pad_sequence(sequences, True)
        is_token = pad_sequence([torch.ones_like(sequence) for sequence in sequences], True)
        types = {
            name: self.reader.token_types(ids.tolist()) for name in self.reader.token_type_keys
        }
        image_tensors = self.reader.tensors(images or self.image)
        inputs = image_tensors | types | {"input_ids": ids, "attention_mask": is_token}
        by_token = {"input_ids": ids, "position_ids": self._position_ids(inputs), **types}
        if packed:
            kept = is_token.bool()
            by_token = {name: x[..., kept].unsqueeze(-2) for name, x in by_token.items()}
        del inputs["attention_mask"]
        return inputs | by_token

    def _position_ids(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return position ids [rows, length], or [axes, rows, length] for M-RoPE."""
        if not self.get_position_ids:
            ids = inputs["input_ids"]
            return torch.arange(ids.shape[1]).expand_as(ids)
        arguments = {name: x for name, x in inputs.items() if name in self.position_arguments}
        return self.get_position_ids(**arguments)[0]

    def without_open_image(self, ids: Tensor) -> Tensor:
        """Replace a sampled image token at the end of a sequence, [t], by token 0.

        It has no image, and nothing depends on it, since no token follows.
        """
        is_image = self.reader.token_types([ids[-1:].tolist()])[0] > 0
        return torch.cat([ids[:-1], ids[-1:].masked_fill(is_image, 0)])
