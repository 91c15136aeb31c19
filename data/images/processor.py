"""A vision-language model's processor: tokens that stand for an image, and the tensors of images.

An image is decoded and resized once and kept as bytes, which are much smaller than the tensors that
a model reads. The processor makes these tensors when a micro-batch is laid out. So a batch, however
it is split or joined, carries one number per sequence and no pixels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config import InputError
from data.cache import CHECKSUMS
from data.chat.tokens import Tokens
from data.images.stored import StoredImages

# Keys of a processor's output that are not for the model.
NOT_FOR_MODEL = {"input_ids", "attention_mask", "offset_mapping", "text_replacement_offsets"}
GREY = 127
SMALL_SIDE = 32  # in pixels; every processor accepts images of this size
LARGE_SIDE = 2048  # in pixels; processors with a size limit shrink such images
DROP_KEY = "data.drop_processor_keys"
# The exceptions that unsupported processors raise when they are called.
CALL_ERRORS = (TypeError, ValueError, LookupError, AttributeError)
LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, ImportError)


class Expanded(NamedTuple):
    """The tokens of a text whose placeholders have been expanded to the images' tokens.

    Attributes:
        tokens: their spans are in the text before the expansion; an image's tokens are at its
            placeholder.
        is_image_token: [T], 1 for the tokens of images, otherwise 0.
    """

    tokens: Tokens
    is_image_token: list[int]


class Processor:
    """transformers' processor of a vision-language model, with the checks that training needs.

    Args:
        path: the model's path.
        tokenizer: used in place of the processor's own.
        dropped: keys of the processor's output to leave out.

    Attributes:
        image_token: the placeholder for an image in a text.
        token_type_keys: keys of the processor's output that hold a number for each token. The
            number depends on the token alone.
        sample: the input_ids of one small image, and a list with this image.

    Raises:
        InputError: the model has no processor, or an unsupported one; the processor does not return
            a key in `dropped`, or the model needs it.
    """

    def __init__(self, path: Path | str, tokenizer=None, dropped: Sequence[str] = ()):
        self.hf_processor = load_hf_processor(Path(path), tokenizer)
        self.dropped = frozenset(dropped)
        self.image_token = self.hf_processor.image_token
        self.token_type_keys: list[str] = []
        image = grey_image(SMALL_SIDE)
        try:
            output = self._call([image], self.image_token)
            self.expand(self.image_token, [image])
        except CALL_ERRORS as error:
            raise InputError(
                f"model.path={path}: {type(self.hf_processor).__name__} is not supported: {error!r}"
            ) from error
        ids = output["input_ids"][0]
        self.token_type_keys = [
            key
            for key in output
            if key not in NOT_FOR_MODEL and np.shape(output[key]) == (1, len(ids))
        ]
        self._check_dropped(output)
        self._check_all_keys_reach_model(path, output, image)
        self._check_token_types(path, output)
        self.token_type_keys = [key for key in self.token_type_keys if key not in self.dropped]
        self.sample = (torch.tensor(ids), [image])

    def _check_dropped(self, output: dict) -> None:
        keys = output.keys() - NOT_FOR_MODEL
        unknown = self.dropped - keys
        if unknown:
            raise InputError(
                f"{DROP_KEY} names {', '.join(sorted(unknown))}; "
                f"{type(self.hf_processor).__name__} returns {', '.join(sorted(keys))}"
            )
        needed = self.dropped & {*self.hf_processor.image_processor.model_input_names}
        if needed:
            raise InputError(
                f"{DROP_KEY} names {', '.join(sorted(needed))}, which the model needs of an image: "
                "take it out"
            )

    def _check_all_keys_reach_model(
        self, path: Path | str, output: dict, image: np.ndarray
    ) -> None:
        """Check that tensors(), which passes images without text, returns all keys needed."""
        expected = output.keys() - NOT_FOR_MODEL - self.dropped
        lost = sorted(expected - self.tensors([image]).keys() - {*self.token_type_keys})
        if lost:
            raise InputError(
                f"model.path={path}: {type(self.hf_processor).__name__} returns {', '.join(lost)} "
                "only for a text with images, which would not reach the model and is not supported"
                f": leave it out with {DROP_KEY}=[{','.join(lost)}]"
            )

    def _check_token_types(self, path: Path | str, output: dict) -> None:
        types = self.token_types([output["input_ids"][0]]).tolist()
        for key in self.token_type_keys:
            if types != np.asarray(output[key]).tolist():
                raise InputError(
                    f"model.path={path}: {type(self.hf_processor).__name__} returns {key}, which "
                    "depends on more than the tokens and is not supported: leave it out with "
                    f"{DROP_KEY}=[{key}]"
                )

    def _call(self, images: list, text: str, **options) -> dict:
        return self.hf_processor(images=images, text=[text], add_special_tokens=False, **options)

    def tensors(self, images: list[np.ndarray]) -> dict[str, Tensor]:
        """Return the model's inputs for one or more images, uint8 [height, width, 3]."""
        writable = [np.array(image) for image in images]  # torch warns about mapped memory
        output = self.hf_processor(images=writable, return_tensors="pt")
        left_out = self.dropped | NOT_FOR_MODEL | {*self.token_type_keys}
        return {key: tensor for key, tensor in output.items() if key not in left_out}

    def token_types(self, ids: list[list[int]]) -> Tensor:
        """Return int64 [n, T]: 0 for tokens of text, another number for tokens of images."""
        return torch.tensor(self.hf_processor.create_mm_token_type_ids(ids))

    def reads_as(self, other: Processor) -> bool:
        """Return whether both turn small and large images into the same tokens and pixels."""
        images = [self.resized(grey_image(side)) for side in (SMALL_SIDE, LARGE_SIDE)]
        settings = self.hf_processor.image_processor.to_dict()
        other_settings = other.hf_processor.image_processor.to_dict()
        has_same_tokens = self._tokens_of(images) == other._tokens_of(images)
        return has_same_tokens and settings == other_settings

    def _tokens_of(self, images: list[np.ndarray]) -> list[list[int]]:
        return [self.expand(self.image_token, [image]).tokens.ids for image in images]

    def without_images(self, ids: Tensor) -> Tensor:
        """Return ids [T] with another token in place of those that stand for images."""
        is_image_token = self.token_types([ids.tolist()])[0] > 0
        return ids.masked_fill(is_image_token, int(ids[~is_image_token][0]))

    def resized(self, image) -> np.ndarray:
        """Return an image as resized by the processor, if this leads to the same tensors.

        If it does not, or if resizing does not make the image smaller, returns it unchanged.

        Returns:
            uint8 [height, width, 3].

        Raises:
            InputError: the processor rejects the image, e.g. for its aspect ratio.
        """
        image = np.asarray(image)
        resized_images, expected = self._record_resizing(image)
        if len(resized_images) != 1:
            return image
        resized = np.asarray(resized_images[0])
        channels_last = resized.reshape(resized.shape[-3:]).transpose(1, 2, 0)
        if channels_last.dtype != np.uint8 or channels_last.size >= image.size:
            return image
        small = np.ascontiguousarray(channels_last)
        tensors = self.tensors([small])
        is_same = tensors.keys() == expected.keys() and all(
            torch.equal(tensors[key], expected[key]) for key in tensors
        )
        return small if is_same else image

    def _record_resizing(self, image: np.ndarray) -> tuple[list, dict[str, Tensor]]:
        """Return the results of the processor's resize() for an image, and the image's tensors."""
        image_processor = self.hf_processor.image_processor
        resize = image_processor.resize
        recorded = []

        def record(*args, **options):
            result = resize(*args, **options)
            recorded.append(result)
            return result

        image_processor.resize = record
        try:
            return recorded, self.tensors([image])
        except ValueError as error:
            raise InputError(
                f"{type(image_processor).__name__} rejects an image of {image.shape[1]} x "
                f"{image.shape[0]} pixels: {error}"
            ) from None
        finally:
            del image_processor.resize

    def expand(self, text: str, images: list[np.ndarray]) -> Expanded:
        """Tokenize a text that has a placeholder for each of these images.

        Raises:
            InputError: the text has more or fewer placeholders than images, or the model could not
                tell its images from the text or from each other.
        """
        num_placeholders = text.count(self.image_token)
        if num_placeholders != len(images):
            raise InputError(
                f"the rendered chat has {num_placeholders} times {self.image_token!r} for "
                f"{len(images)} images: the template leaves them out, or a text has it, too"
            )
        output = self._call(
            images, text, return_text_replacement_offsets=True, return_offsets_mapping=True
        )
        ids = output["input_ids"][0]
        offsets = output["offset_mapping"][0]
        replacements = output["text_replacement_offsets"][0]
        image_spans = [replacement["new_span"] for replacement in replacements]
        is_image_token = [int(overlaps_any(offset, image_spans)) for offset in offsets]
        self._check_image_tokens(ids, is_image_token, len(images))
        places = [
            (place_before(start, replacements), place_before(end, replacements))
            for start, end in offsets
        ]
        return Expanded(Tokens(ids, places.__getitem__), is_image_token)

    def _check_image_tokens(
        self, ids: list[int], is_image_token: list[int], num_images: int
    ) -> None:
        has_image_type = (self.token_types([ids])[0] > 0).int()
        if has_image_type.gt(torch.tensor(is_image_token)).any():
            raise InputError(
                "a text in it has the placeholder of an image or a video, beside its images"
            )
        num_runs = int(has_image_type.diff(prepend=torch.zeros(1)).gt(0).sum())
        if self.token_type_keys and num_runs < num_images:
            raise InputError(
                "the template puts nothing between two of its images, which the model could not "
                "tell apart"
            )


def grey_image(side: int) -> np.ndarray:
    return np.full((side, side, 3), GREY, np.uint8)


def overlaps_any(offset: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether the characters of `offset` (start:end) overlap any of the spans."""
    start, end = offset
    return any(start < span_end and end > span_start for span_start, span_end in spans)


def place_before(place: int, replacements: Sequence[dict]) -> int:
    """Return where a character of the expanded text was before placeholders were replaced.

    For a character inside an image, this is the end of the image's placeholder.

    Args:
        replacements: in order, each with its `span` in the text before the expansion, and its
            `new_span` in the expanded text.
    """
    num_added = 0
    for replacement in replacements:
        new_start, new_end = replacement["new_span"]
        _, end = replacement["span"]
        if place < new_end:
            return place - num_added if place <= new_start else end
        num_added = new_end - end
    return place - num_added


def load_hf_processor(path: Path, tokenizer=None):
    """Return transformers' processor of a model, with a placeholder for images.

    Args:
        tokenizer: used in place of the processor's own.

    Raises:
        InputError: the model has no processor, or one that cannot be loaded or used.
    """
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    hf_config = AutoConfig.from_pretrained(path)
    kind = PROCESSOR_MAPPING.get(type(hf_config), None)
    if kind is None:
        raise InputError(
            f"model.images=true, but model.path={path} reads no images: transformers has no "
            f"processor for model_type={hf_config.model_type}"
        )
    try:
        try:
            processor = kind.from_pretrained(path)
        except ImportError:
            processor = without_videos(kind).from_pretrained(path)
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"model.images=true: cannot load a processor from model.path={path}: {reason}"
        ) from None
    if tokenizer is not None:
        processor.tokenizer = tokenizer
    if getattr(processor, "image_token", None) is None:
        raise InputError(
            f"model.path={path}: {kind.__name__} has no placeholder for images, which is not "
            "supported"
        )
    return processor


def without_videos(kind: type) -> type:
    """Return a processor class without its video part, the only part that needs torchvision."""

    class WithoutVideos(kind):
        @classmethod
        def get_attributes(cls):
            return [name for name in kind.get_attributes() if name != "video_processor"]

    WithoutVideos.__name__ = kind.__name__  # error messages and saved files contain it
    return WithoutVideos


class ImageStore:
    """The images of rows, and the processor that turns them into tensors.

    Args:
        images: a list of images for each row, uint8 [height, width, 3].
    """

    def __init__(self, images: Sequence[list[np.ndarray]], processor: Processor):
        self.images = images
        self.processor = processor

    @classmethod
    def load(cls, folder: Path, processor: Processor) -> tuple[ImageStore, str]:
        """Return the images of a cache folder, and a hash of the data that a model reads from it.

        The folder's name is not a sufficient hash: it does not depend on the contents of image
        files, which may change.
        """
        checksums = json.loads((folder / CHECKSUMS).read_text())
        contents = [folder.name, checksums["pixels.bin"], sorted(processor.dropped)]
        digest = hashlib.sha256(json.dumps(contents).encode())
        return cls(StoredImages(folder), processor), digest.hexdigest()
