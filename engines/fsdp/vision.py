"""Image inputs of vision-language models, and the FLOPs and memory of their vision towers."""

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
from data.images.processor import Processor
from engines.model.flops import matrix_flops
from engines.model.hf import layer_modules

FP32_BYTES = 4


def check_images(config: DictConfig) -> None:
    """Raise InputError for settings that are not supported with images."""
    cp = config.engine.context_parallel_size
    rank = config.model.lora.rank
    if cp != 1:
        raise InputError(
            f"engine.context_parallel_size={cp} is not supported with model.images=true, since "
            "ranks would share an image: set engine.context_parallel_size=1"
        )
    if rank:
        raise InputError(
            f"model.lora.rank={rank} is not supported with model.images=true: set "
            "model.lora.rank=0 or model.images=false"
        )


# -- costs -----------------------------------------------------------------------------------------


def image_matrices(hf: nn.Module, processor: Processor) -> dict[nn.Parameter, float]:
    """Return {matrix: rows per image token} for the matrices before the text model, in order.

    The matrix that turns pixels into patches and the matrices of the vision tower's layers process
    one row per patch. All others process one row per image token.
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
    # A convolution turns pixels into patches. If there is none, the first matrix does.
    patch_matrix = next((p for p in matrices if p.ndim > 2), matrices[0])
    patches = patches_per_token(processor, patch_matrix)
    rows = {}
    for p in matrices:
        sees_patches = p in in_layers or p is patch_matrix or p.ndim > 2
        rows[p] = patches if sees_patches else 1.0
    return rows


def patches_per_token(processor: Processor, patch_matrix: nn.Parameter) -> float:
    """Return the number of patches per image token."""
    ids, image = processor.sample
    num_pixels = processor.tensors(image)["pixel_values"].numel()
    num_patches = num_pixels // patch_matrix[0].numel()
    num_image_tokens = int((processor.token_types([ids.tolist()]) > 0).sum())
    return num_patches / num_image_tokens


def matrices_without_gradient(matrices: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Return the matrices before the first trained one: the backward pass does not reach them."""
    return {*takewhile(lambda p: not p.requires_grad, matrices)}


def count_flops(hf: nn.Module, processor: Processor) -> int:
    """Return the FLOPs per image token of a forward and backward pass through the vision tower.

    They are counted as in engines.model.flops.count_flops().
    """
    matrices = image_matrices(hf, processor)
    skipped = matrices_without_gradient(matrices)
    return int(sum(matrix_flops(p, skipped) * rows for p, rows in matrices.items()))


def kept_bytes_per_token(
    hf: nn.Module, processor: Processor, itemsize: int, checkpointing: bool
) -> float:
    """Return the bytes per image token that the vision tower keeps for the backward pass.

    These are the input and output of each matrix that the backward pass reaches. A layer also keeps
    the output of its activation function, and fp32 copies inside norms that are not torch's own.

    Args:
        itemsize: bytes per element of an activation.
        checkpointing: whether all layers but one keep only their inputs.
    """
    matrices = image_matrices(hf, processor)
    skipped = matrices_without_gradient(matrices)
    outside_layers = matrices.keys()
    layer_inputs = [0.0]
    layer_totals = [0.0]

    def kept_around(parameters: Iterable[nn.Parameter]) -> float:
        return sum(
            (p[0].numel() + len(p)) * itemsize * matrices[p] for p in parameters if p not in skipped
        )

    for layer in layer_modules(hf, hf):
        own = [p for p in layer.parameters() if p in matrices and p not in skipped]
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


def replace_patch_convolutions(hf: nn.Module) -> None:
    """Compute convolutions whose kernel covers a whole patch as matrix products.

    This makes their gradients many times faster.
    """
    for module in hf.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            module.forward = partial(convolve_or_multiply, module, module.forward)


def convolve_or_multiply(conv: nn.Module, convolve: Callable, patches: Tensor) -> Tensor:
    """Return the convolution of patches, as a matrix product if the kernel covers each patch."""
    is_padded = conv.padding != "valid" and any(conv.padding)
    if patches.shape[2:] != conv.kernel_size or is_padded:
        return convolve(patches)
    product = F.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)
    return product[(...,) + (None,) * len(conv.kernel_size)]


# -- inputs ----------------------------------------------------------------------------------------


class Images:
    """Prepares a vision-language model's inputs for micro-batches, in host memory.

    filler  ids [t] of a sequence with one small image, which is appended to micro-batches without
            images. Every rank then runs the vision tower and joins its collectives. No loss depends
            on the filler's tokens, so its gradient is 0.
    """

    def __init__(self, hf: nn.Module, processor: Processor):
        self.processor = processor
        self.filler, self.image = processor.sample
        # Models with multi-axis position ids (M-RoPE, Qwen2-VL 2024) compute them with this method.
        self.get_position_ids = getattr(hf.base_model, "get_rope_index", None)
        self.position_arguments = {}
        if self.get_position_ids:
            self.position_arguments = inspect.signature(self.get_position_ids).parameters
        available = {"input_ids", *processor.token_type_keys, *processor.tensors(self.image)}
        for parameter in self.position_arguments.values():
            is_required = (
                parameter.default is parameter.empty
                and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            )
            if is_required and parameter.name not in available:
                raise InputError(
                    f"{type(hf).__name__} needs {parameter.name}: remove it from "
                    "data.drop_processor_keys"
                )

    def prefetch_inputs(
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

        Args:
            images: the batch's images. If there are none, the filler and its image are appended.
            packed: True: sequences are laid end to end in one row. False: they are padded to the
                same length.
        """
        sequences = [self.without_open_image(ids) for ids in batch.input_ids.split(batch.lengths)]
        if not images:
            sequences.append(self.filler)
        ids = pad_sequence(sequences, True)
        is_token = pad_sequence([torch.ones_like(sequence) for sequence in sequences], True)
        types = {
            name: self.processor.token_types(ids.tolist())
            for name in self.processor.token_type_keys
        }
        image_tensors = self.processor.tensors(images or self.image)
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
        """Replace an image token at the end of a sequence [t] by token 0.

        Such a token was sampled and has no image. No token follows it, so nothing depends on it.
        """
        is_image = self.processor.token_types([ids[-1:].tolist()])[0] > 0
        return torch.cat([ids[:-1], ids[-1:].masked_fill(is_image, 0)])
