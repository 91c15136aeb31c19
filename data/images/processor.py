"""A vision-language model's processor: it turns images into tokens and input tensors.

An image is decoded and resized once and stored as bytes, which are much smaller than the model's
input tensors. The processor computes these tensors when a micro-batch is laid out. So batches carry
no pixels, but only the row number of each sequence.
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
from data.cache import CHECKSUMS, key_of
from data.chat.tokens import Tokens
from data.images.stored import StoredImages

# Keys of a processor's output that are not passed to the model.
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
        tokens: the tokens. Their spans refer to the text before the expansion; the tokens of an
            image have the span of its placeholder.
        is_image_token: [T], 1 for tokens of images, 0 for tokens of text.
    """

    tokens: Tokens
    is_image_token: list[int]


class Processor:
    """transformers' processor of a vision-language model, with the checks that training needs.

    Args:
        path: the model's path.
        tokenizer: replaces the processor's own tokenizer.
        dropped: keys of the processor's output that are not passed to the model.

    Attributes:
        hf_processor: the processor of transformers.
        image_token: the placeholder for an image in a text.
        token_type_keys: keys of the processor's output with one number per token, which depends
            only on the token itself.
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
            if key not in NOT_FOR_MODEL | self.dropped and np.shape(output[key]) == (1, len(ids))
        ]
        self._check_dropped(output)
        self._check_all_keys_reach_model(path, output, image)
        self._check_token_types(path, output)
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
                f"{DROP_KEY} names {', '.join(sorted(needed))}, which the model needs: remove it "
                "from the list"
            )

    def _check_all_keys_reach_model(
        self, path: Path | str, output: dict, image: np.ndarray
    ) -> None:
        """Check that tensors(), which processes images without text, returns all necessary keys."""
        expected = output.keys() - NOT_FOR_MODEL - self.dropped
        lost = sorted(expected - self.tensors([image]).keys() - {*self.token_type_keys})
        if lost:
            raise InputError(
                f"model.path={path}: {type(self.hf_processor).__name__} returns {', '.join(lost)} "
                "only for images together with text, which is not supported: if the model does not "
                f"need it, set {DROP_KEY}=[{','.join(lost)}]"
            )

    def _check_token_types(self, path: Path | str, output: dict) -> None:
        types = self.token_types([output["input_ids"][0]]).tolist()
        for key in self.token_type_keys:
            if types != np.asarray(output[key]).tolist():
                raise InputError(
                    f"model.path={path}: {type(self.hf_processor).__name__} returns {key}, which "
                    "depends on more than the tokens and is not supported: if the model does not "
                    f"need it, set {DROP_KEY}=[{key}]"
                )

    def _call(self, images: list, text: str, **options) -> dict:
        return self.hf_processor(images=images, text=[text], add_special_tokens=False, **options)

    def tensors(self, images: list[np.ndarray]) -> dict[str, Tensor]:
        """Return the model's inputs for one or more images, uint8 [height, width, 3]."""
        writable = [np.array(image) for image in images]  # torch warns about read-only memory
        output = self.hf_processor(images=writable, return_tensors="pt")
        left_out = self.dropped | NOT_FOR_MODEL | {*self.token_type_keys}
        return {key: tensor for key, tensor in output.items() if key not in left_out}

    def token_types(self, ids: list[list[int]]) -> Tensor:
        """Return the types of tokens, int64 [n, T]: 0 for text, other numbers for images."""
        return torch.tensor(self.hf_processor.create_mm_token_type_ids(ids))

    def is_equivalent(self, other: Processor) -> bool:
        """Return whether both processors turn images into the same tokens and pixels."""
        images = [self.resized(grey_image(side)) for side in (SMALL_SIDE, LARGE_SIDE)]
        settings = self.hf_processor.image_processor.to_dict()
        other_settings = other.hf_processor.image_processor.to_dict()
        has_same_tokens = self._tokens_of(images) == other._tokens_of(images)
        return has_same_tokens and settings == other_settings

    def _tokens_of(self, images: list[np.ndarray]) -> list[list[int]]:
        return [self.expand(self.image_token, [image]).tokens.ids for image in images]

    def without_images(self, ids: Tensor) -> Tensor:
        """Return ids [T] with each token of an image replaced by a token of text."""
        is_image_token = self.token_types([ids.tolist()])[0] > 0
        return ids.masked_fill(is_image_token, int(ids[~is_image_token][0]))

    def resized(self, image) -> np.ndarray:
        """Return an image as the processor resizes it, provided that its tensors stay the same.

        Returns the image unchanged if they do not, or if the resized image is not smaller.

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
        """Process an image; return the results of the processor's resize(), and the tensors."""
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
            InputError: the number of placeholders differs from the number of images, or the model
                could not distinguish the images from the text or from each other.
        """
        num_placeholders = text.count(self.image_token)
        if num_placeholders != len(images):
            raise InputError(
                f"the rendered chat contains {self.image_token!r} {num_placeholders} times for "
                f"{len(images)} images: either the chat template leaves out images, or a text "
                "contains the placeholder literally"
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
        spans = [
            (position_before(start, replacements), position_before(end, replacements))
            for start, end in offsets
        ]
        return Expanded(Tokens(ids, spans.__getitem__), is_image_token)

    def _check_image_tokens(
        self, ids: list[int], is_image_token: list[int], num_images: int
    ) -> None:
        has_image_type = (self.token_types([ids])[0] > 0).int()
        if has_image_type.gt(torch.tensor(is_image_token)).any():
            raise InputError(
                "a text contains the placeholder of an image or a video, in addition to the row's "
                "images: remove it"
            )
        num_runs = int(has_image_type.diff(prepend=torch.zeros(1)).gt(0).sum())
        if self.token_type_keys and num_runs < num_images:
            raise InputError(
                "the chat template writes nothing between two images, so the model could not tell "
                "them apart: put text between them"
            )


def grey_image(side: int) -> np.ndarray:
    return np.full((side, side, 3), GREY, np.uint8)


def overlaps_any(offset: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether the characters of `offset` (start:end) overlap any of the spans."""
    start, end = offset
    return any(start < span_end and end > span_start for span_start, span_end in spans)


def position_before(position: int, replacements: Sequence[dict]) -> int:
    """Convert a position in the expanded text to a position in the text before the expansion.

    A position inside an image becomes the end of the image's placeholder.

    Args:
        replacements: the replaced placeholders in order, each with its `span` in the text before
            the expansion and its `new_span` in the expanded text.
    """
    num_added = 0
    for replacement in replacements:
        new_start, new_end = replacement["new_span"]
        _, end = replacement["span"]
        if position < new_end:
            return position - num_added if position <= new_start else end
        num_added = new_end - end
    return position - num_added


def load_processor(config, tokenizer) -> Processor | None:
    """Return the processor of model.path, or None if model.images is false.

    If the tokenizer has no chat template, it gets the template of the processor.
    """
    if not config.model.images:
        return None
    processor = Processor(config.model.path, tokenizer, config.data.drop_processor_keys)
    # Older models store the chat template with the processor.
    tokenizer.chat_template = tokenizer.chat_template or processor.hf_processor.chat_template
    return processor


def load_hf_processor(path: Path, tokenizer=None):
    """Load transformers' processor of a model.

    Args:
        tokenizer: replaces the processor's own tokenizer.

    Raises:
        InputError: the model has no processor, the processor cannot be loaded, or it has no
            placeholder for images.
    """
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        hf_config = AutoConfig.from_pretrained(path)
    except LOAD_ERRORS as error:
        raise cannot_load(path, error) from None
    processor_class = PROCESSOR_MAPPING.get(type(hf_config), None)
    if processor_class is None:
        raise InputError(
            f"model.images=true, but model.path={path} reads no images: transformers has no "
            f"processor for model_type={hf_config.model_type}"
        )
    try:
        try:
            processor = processor_class.from_pretrained(path)
        except ImportError:
            processor = without_videos(processor_class).from_pretrained(path)
    except LOAD_ERRORS as error:
        raise cannot_load(path, error) from None
    if tokenizer is not None:
        processor.tokenizer = tokenizer
    if getattr(processor, "image_token", None) is None:
        raise InputError(
            f"model.path={path}: {processor_class.__name__} has no placeholder for images, "
            "which is not supported"
        )
    return processor


def cannot_load(path: Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:300]
    return InputError(
        f"model.images=true: cannot load a processor from model.path={path}: {reason}"
    )


def without_videos(processor_class: type) -> type:
    """Return a processor class without its video processor, which alone needs torchvision."""

    class WithoutVideos(processor_class):
        @classmethod
        def get_attributes(cls):
            names = processor_class.get_attributes()
            return [name for name in names if name != "video_processor"]

    WithoutVideos.__name__ = processor_class.__name__  # error messages and saved files contain it
    return WithoutVideos


class ImageStore:
    """The images of a dataset, and the processor that turns them into tensors.

    Args:
        images: for each row, the list of its images, uint8 [height, width, 3].
    """

    def __init__(self, images: Sequence[list[np.ndarray]], processor: Processor):
        self.images = images
        self.processor = processor

    @classmethod
    def load(cls, folder: Path, processor: Processor) -> tuple[ImageStore, str]:
        """Return the images of a cache folder, and a hash of everything a model reads from it.

        The folder's name is not enough: it does not depend on the contents of the image files,
        which may change.
        """
        checksums = json.loads((folder / CHECKSUMS).read_text())
        contents = [key_of(folder), checksums["pixels.bin"], sorted(processor.dropped)]
        digest = hashlib.sha256(json.dumps(contents).encode())
        return cls(StoredImages(folder), processor), digest.hexdigest()
