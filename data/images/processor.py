"""A model's processor of images: what it puts into a text for an image, and the tensors that it makes of one.

An image is decoded and resized once, and kept as bytes, which are a small part of what a model reads. The processor makes tensors
of them when a micro-batch is laid out. So a batch carries one number per sequence, whatever is done with it, and never pixels.
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
from data.chat.tokens import Tokens
from data.images.sources import StoredImages

OWN = {
    "input_ids",
    "attention_mask",
    "offset_mapping",
    "text_replacement_offsets",
}  # of what a processor says, not the model's


class Expanded(NamedTuple):
    """A text in which the processor has put as many tokens for each image as the model reads of it.

    tokens: its tokens, which lie at places in the text as it was before, those of an image where its placeholder was
    of_images: [T] of 0 and 1: the tokens that stand for images
    """

    tokens: Tokens
    of_images: list[int]


class Reader:
    """A model's processor. Of what it says, names in `dropped` are left out."""

    def __init__(self, path: Path | str, tokenizer=None, dropped: Sequence[str] = ()):
        """Raises InputError for a model without one, for one that cannot work here, and for names that it does not say."""
        self.processor, self.dropped = load_processor(Path(path), tokenizer), frozenset(dropped)
        self.image_token = self.processor.image_token
        blank = np.full((32, 32, 3), 127, np.uint8)
        self.of_tokens: list[str] = []
        try:
            said = self._call([blank], self.image_token)
            self.expand(self.image_token, [blank])
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
        ) as error:  # some have a call of their own
            raise InputError(
                f"model.path={path}: {type(self.processor).__name__} is not supported: {error!r}"
            ) from error
        length = len(said["input_ids"][0])
        # What it says of each token, which follows from the token alone, and of images.
        self.of_tokens = [
            name for name in said if name not in OWN and np.shape(said[name]) == (1, length)
        ]
        kind, drop = type(self.processor).__name__, "data.drop_processor_keys"
        if unknown := self.dropped - (said.keys() - OWN):
            raise InputError(
                f"{drop} names {', '.join(sorted(unknown))}; {kind} says {', '.join(sorted(said.keys() - OWN))}"
            )
        if needed := self.dropped & {*self.processor.image_processor.model_input_names}:
            raise InputError(
                f"{drop} names {', '.join(sorted(needed))}, which the model needs of an image: take it out"
            )
        if (
            lost := said.keys()
            - OWN
            - self.dropped
            - self.tensors([blank]).keys()
            - {*self.of_tokens}
        ):
            raise InputError(
                f"model.path={path}: {kind} says {', '.join(sorted(lost))} of a text with images alone, which would "
                f"not reach the model, and is not supported: leave it out with {drop}=[{','.join(sorted(lost))}]"
            )
        for name in self.of_tokens:
            if self.token_types([said["input_ids"][0]]).tolist() != np.asarray(said[name]).tolist():
                raise InputError(
                    f"model.path={path}: {kind} says {name}, which does not follow from the tokens, and is not "
                    f"supported: leave it out with {drop}=[{name}]"
                )
        self.of_tokens = [name for name in self.of_tokens if name not in self.dropped]
        self.sample = (torch.tensor(said["input_ids"][0]), [blank])

    def _call(self, images: list, text: str | None, **options) -> dict:
        return self.processor(
            images=images,
            text=None if text is None else [text],
            add_special_tokens=False,
            **options,
        )

    def tensors(self, images: list[np.ndarray]) -> dict[str, Tensor]:
        """What the model is given of these uint8 images [height, width, 3], one or more."""
        said = self.processor(
            images=[np.array(image) for image in images], return_tensors="pt"
        )  # torch wants to write
        return {
            name: tensor
            for name, tensor in said.items()
            if name not in self.dropped | OWN | {*self.of_tokens}
        }

    def token_types(self, ids: list[list[int]]) -> Tensor:
        """int64 [n, T]: 0 for a text's token, another number for an image's."""
        return torch.tensor(self.processor.create_mm_token_type_ids(ids))

    def reads_as(self, other: Reader) -> bool:
        """Whether images, small and large, are the same tokens for both, and their pixels are computed in the same way."""
        images = [self.resized(np.full((side, side, 3), 127, np.uint8)) for side in (32, 2048)]
        mine, theirs = (
            [x.expand(x.image_token, [image]).tokens.ids for image in images] for x in (self, other)
        )
        return (
            mine == theirs
            and self.processor.image_processor.to_dict()
            == other.processor.image_processor.to_dict()
        )

    def without_images(self, ids: Tensor) -> Tensor:
        """ids [T], with other words in place of those that stand for images."""
        of_images = self.token_types([ids.tolist()])[0] > 0
        return ids.masked_fill(of_images, int(ids[~of_images][0]))

    def resized(self, image) -> np.ndarray:
        """uint8 [height, width, 3]: the image as the processor has resized it, if it makes the same of that; else as it is."""
        processor, found = self.processor.image_processor, []
        resize, image = processor.resize, np.asarray(image)

        def noting(*args, **options):
            found.append(resize(*args, **options))
            return found[-1]

        processor.resize = noting
        try:
            expected = self.tensors([image])
        except ValueError as error:  # such as its aspect ratio
            raise InputError(
                f"{type(processor).__name__} refuses an image of {image.shape[1]} x {image.shape[0]} pixels: "
                f"{error}"
            ) from None
        finally:
            del processor.resize
        if len(found) == 1:
            small = np.asarray(found[0]).reshape(np.shape(found[0])[-3:]).transpose(1, 2, 0)
            if small.dtype == np.uint8 and small.size < image.size:
                again = self.tensors([small := np.ascontiguousarray(small)])
                if again.keys() == expected.keys() and all(
                    torch.equal(again[name], expected[name]) for name in again
                ):
                    return small
        return image

    def expand(self, text: str, images: list[np.ndarray]) -> Expanded:
        """Raises InputError where the text has not as many placeholders as there are images."""
        if (count := text.count(self.image_token)) != len(images):
            raise InputError(
                f"the rendered chat has {count} times {self.image_token!r} for {len(images)} images: the template "
                "leaves them out, or a text has it, too"
            )
        said = self._call(
            images, text, return_text_replacement_offsets=True, return_offsets_mapping=True
        )
        offsets, spans = said["offset_mapping"][0], said["text_replacement_offsets"][0]
        ends = [span["new_span"] for span in spans]

        def before(at: int) -> int:
            """Of a place in the expanded text, that in the text before; inside an image its placeholder's end."""
            gained = 0
            for span in spans:
                if at < span["new_span"][1]:
                    return at - gained if at <= span["new_span"][0] else span["span"][1]
                gained = span["new_span"][1] - span["span"][1]
            return at - gained

        places = [(before(start), before(end)) for start, end in offsets]
        of_images = [
            int(any(start < behind and end > at for at, behind in ends)) for start, end in offsets
        ]
        by_type = (self.token_types(said["input_ids"])[0] > 0).int()
        if by_type.gt(torch.tensor(of_images)).any():
            raise InputError(
                "a text in it has what stands for an image or a video, beside its images"
            )
        if self.of_tokens and int(by_type.diff(prepend=torch.zeros(1)).gt(0).sum()) < len(images):
            raise InputError(
                "the template puts nothing between two of its images, which the model could not tell apart"
            )
        return Expanded(Tokens(said["input_ids"][0], places.__getitem__), of_images)


def load_processor(path: Path, tokenizer=None):
    """transformers' processor of images and text; where torchvision is missing, without what reads videos."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    hf_config = AutoConfig.from_pretrained(path)
    if (kind := PROCESSOR_MAPPING.get(type(hf_config), None)) is None:
        raise InputError(
            f"model.images=true, but model.path={path} reads no images: transformers has no processor for "
            f"model_type={hf_config.model_type}"
        )

    class OfImages(kind):
        @classmethod
        def get_attributes(cls):
            return [name for name in kind.get_attributes() if name != "video_processor"]

    OfImages.__name__ = kind.__name__
    try:
        try:
            processor = kind.from_pretrained(path)
        except ImportError:  # videos alone need torchvision
            processor = OfImages.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise InputError(
            f"model.images=true: no processor from model.path={path}: {' '.join(str(error).split())[:300]}"
        ) from None
    if tokenizer is not None:
        processor.tokenizer = tokenizer
    if getattr(processor, "image_token", None) is None:
        raise InputError(
            f"model.path={path}: {kind.__name__} has no placeholder for images, which is not supported"
        )
    return processor


class Pictures:
    """The images of rows, and what the model is given of them. images: those of each row, uint8 [height, width, 3]."""

    def __init__(self, images: Sequence[list[np.ndarray]], reader: Reader):
        self.images, self.reader = images, reader

    @classmethod
    def load(cls, folder: Path, reader: Reader) -> tuple[Pictures, str]:
        """Those of a cache, and a hash of what models see of its rows: files of images may change, and its name does not."""
        sums = json.loads((folder / "sums.json").read_text())
        seen = hashlib.sha256(
            json.dumps([folder.name, sums["pixels.bin"], sorted(reader.dropped)]).encode()
        )
        return cls(StoredImages(folder), reader), seen.hexdigest()
