"""Find the images of a row, and read them.

Images are in the parts of messages, or in a column of their own. place_images() brings both into
one form; read_image() reads an image from a path, from bytes or from a data URL.
"""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from config import InputError

# Types of the parts of a message.
IMAGE_PARTS = ("image", "image_url")
TEXT_PARTS = ("text", "input_text", "output_text")
UNSUPPORTED_PARTS = ("video", "video_url", "audio", "audio_url", "input_audio")
# Keys of a part that may hold its image, in order of preference.
SOURCES = (*IMAGE_PARTS, "bytes", "base64", "url", "path")
MARK = "<image>"  # in a text, this stands for the next image of the row's column
IMAGE = {"type": "image"}
# Processors may mistake a side of 1 or 3 pixels for the number of channels.
MIN_SIDE = 4


# -- images of a row -------------------------------------------------------------------------------


def place_images(messages: list[dict], column, key: str) -> tuple[list[dict], list]:
    """Bring the images of a row, and the contents of its messages, into one form.

    Args:
        column: the row's column of images: an image or a list of images, possibly as JSON text.
            They fill image parts without an image of their own, and replace each <image> in a
            text. If the messages have neither, the images are put before the user's first text.
        key: the name of the column, for error messages.

    Returns:
        The messages and their images. The content of a message is a string or a list of the parts
        {"type": "text", "text": ...} and {"type": "image"}; parts of other types are unchanged. The
        images are in the same order as their parts, in the form that source_of() returns.

    Raises:
        InputError: the number of images differs from the number of image parts, or a message
            contains video or audio.
    """
    image_column = ImageColumn.of(column, key)
    placement = Placement(image_column)
    contents = [placement.parts_of(message.get("content")) for message in messages]
    sources = placement.sources
    if image_column.images and not image_column.used:
        if sources:
            raise InputError(
                f'the messages contain {len(sources)} images, and the column "{key}" contains '
                f"{len(image_column.images)} more: add a part "
                '{"type": "image"} for each image of the column, or remove the column'
            )
        first = first_of_user(messages)
        sources = image_column.take_all()
        contents[first] = [IMAGE] * len(sources) + contents[first]
    image_column.check_all_used()
    placed = []
    for message, content in zip(messages, contents):
        if IMAGE in content or isinstance(message.get("content"), list):
            message = message | {"content": content}
        placed.append(message)
    return placed, sources


def first_of_user(messages: list[dict]) -> int:
    """Return the index of the user's first message; 0 if there is none."""
    for i, message in enumerate(messages):
        if message["role"] == "user":
            return i
    return 0


@dataclass
class ImageColumn:
    """A row's column of images.

    Attributes:
        key: the name of the column.
        images: the images, in the form in which the row stores them.
        used: the indices of the images that the messages have used so far.
    """

    key: str
    images: list
    used: list[int] = field(default_factory=list)

    @staticmethod
    def of(column, key: str) -> ImageColumn:
        column = parse_column(column)
        is_empty_cell = isinstance(column, str) and not column  # in a CSV file
        if column is None or is_empty_cell:
            return ImageColumn(key, [])
        if isinstance(column, list | tuple):
            return ImageColumn(key, list(column))
        return ImageColumn(key, [column])

    def take(self, index: int | None):
        """Return the image with this index, or the next one if the index is None."""
        if index is None:
            index = len(self.used)
        elif index not in range(len(self.images)):
            raise InputError(
                f'a part of a message has index {index!r}, but "{self.key}" has '
                f"{len(self.images)} images"
            )
        self.used.append(index)
        if index >= len(self.images):
            raise InputError(
                f"the messages refer to at least {len(self.used)} images of the column "
                f'"{self.key}", which has {len(self.images)}'
            )
        return self.images[index]

    def take_all(self) -> list:
        self.used = list(range(len(self.images)))
        return self.images

    def check_all_used(self) -> None:
        num_used = len(set(self.used))
        if num_used < len(self.images):
            raise InputError(
                f'"{self.key}" has {len(self.images)} images, but the messages use only {num_used} '
                "of them"
            )


class Placement:
    """Replaces the images in messages by IMAGE, and collects them in `sources`."""

    def __init__(self, column: ImageColumn):
        self.column = column
        self.sources: list = []

    def parts_of(self, content) -> list:
        """Return a message's content as a list of parts."""
        parts = []
        for part in content if isinstance(content, list) else [content or ""]:
            if is_image(part):
                parts.append(self.add(part))
                continue
            text = read_text(part)
            if text is None:
                parts.append(part)
            else:
                parts += self.parts_of_text(text)
        return parts

    def parts_of_text(self, text: str) -> list[dict]:
        """Split a text into parts. If the row has a column of images, <image> becomes an image."""
        if not self.column.images:
            return text_parts(text)
        before, *texts = text.split(MARK)
        parts = text_parts(before)
        for after_image in texts:
            parts.append(self.add(IMAGE))
            parts += text_parts(after_image)
        return parts

    def add(self, part: dict) -> dict:
        """Add a part's image, or the column's next one, to `sources`; return the new part."""
        if part.get("text"):
            raise InputError(
                "a part of a message contains both text and an image: split it into two parts"
            )
        index = part.get("index")
        own_keys = {
            key: value for key, value in part.items() if key not in ("type", "text", "index")
        }
        source = source_of(own_keys)
        if index is not None and source is not None:
            raise InputError(
                "a part of a message has both an image and an index: remove one of them"
            )
        self.sources.append(self.column.take(index) if source is None else source)
        return IMAGE


def text_parts(text: str | None) -> list[dict]:
    return [{"type": "text", "text": text}] if text else []


def is_image(part) -> bool:
    """Return whether a part of a message is an image."""
    if not isinstance(part, dict):
        return False
    return part.get("type") in IMAGE_PARTS or any(
        part.get(name) is not None for name in IMAGE_PARTS
    )


def read_text(part) -> str | None:
    """Return the text of a part that is not an image; None if the part has another type.

    The chat template may know other types.

    Raises:
        InputError: the part is video or audio, or it is not a valid part of a message.
    """
    if isinstance(part, str):
        return part
    fields = part if isinstance(part, dict) else {"type": "text"}
    kind = fields.get("type")
    for name in UNSUPPORTED_PARTS:
        if kind == name or fields.get(name) is not None:
            raise InputError(
                f"a part of a message is of type {name}: videos and audio are not supported; "
                "remove it"
            )
    if kind not in (None, *TEXT_PARTS):
        return None
    if not isinstance(fields.get("text"), str):
        raise InputError(
            f"a part of a message, {str(part)[:60]}, is neither text nor an image: write it as "
            '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
        )
    return fields["text"]


def parse_column(column):
    """Return a column of images. Decodes a list that is stored as JSON text, as in CSV files."""
    if isinstance(column, str) and column.startswith("["):
        with suppress(json.JSONDecodeError):  # a path that begins with "["
            return json.loads(column)
    return column


def without_pixels(row: dict, key: str) -> dict:
    """Return a row that can be stored as JSON: the bytes of images become None, paths stay.

    Args:
        key: the column of images. Bytes in it may be anything; reading the images checks them.

    Raises:
        InputError: a value has other bytes than those of an image.
    """
    stripped = {}
    for column, value in row.items():
        try:
            stripped[column] = strip_pixels(value, "image" if column == key else "")
        except OtherBytesError as error:
            raise InputError(
                f'the column "{column}" has bytes ({error}), and no reward function could read '
                "them: write them as a text, or remove the column from the file"
            ) from None
    return stripped


class OtherBytesError(Exception):
    """A value has bytes that are not those of an image."""


def strip_pixels(value, name: str):
    """Return a value of a row without pixels. `name` is the key of the value, or of its list."""
    from PIL.Image import Image

    if isinstance(value, dict):
        return {key: strip_pixels(inner, key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strip_pixels(item, name) for item in value]
    if isinstance(value, Image):
        return None
    if isinstance(value, bytes):
        if name not in SOURCES and not is_image_file(value):
            raise OtherBytesError(f"{value[:20]!r}")
        return None
    if name in SOURCES and isinstance(value, str):
        return strip_encoded_pixels(value, name)
    return value


def strip_encoded_pixels(text: str, name: str) -> str | None:
    """Return a text without pixels: a list of images as JSON, a data URL or base64.

    Other texts stay.
    """
    column = parse_column(text)
    if column is not text:
        stripped = strip_pixels(column, name)
        return text if stripped == column else json.dumps(stripped)
    encoded = text.partition(",")[2] if is_data_url(text) else text
    is_encoded = is_data_url(text) or name == "base64"
    return None if is_encoded and is_base64_of_image(encoded) else text


def is_base64_of_image(text: str) -> bool:
    try:
        return is_image_file(base64.b64decode(text))
    except ValueError:
        return False


def is_image_file(content: bytes) -> bool:
    """Return whether bytes begin like the file of an image, in any format that Pillow knows."""
    from PIL import Image

    try:
        Image.open(BytesIO(content)).close()
    except Image.DecompressionBombError:
        return True  # a very large one
    except (OSError, ValueError, SyntaxError):
        return False
    return True


# -- one image -------------------------------------------------------------------------------------


def is_data_url(value) -> bool:
    return isinstance(value, str) and value[:5].lower() == "data:"


def source_of(value):
    """Return an image as bytes, a path or a PIL.Image; None if there is none.

    Args:
        value: bytes, a path, a PIL.Image, a data URL, or a possibly nested dict that contains one,
            such as {"bytes": ..., "path": ...}.

    Raises:
        InputError: the dict has an unsupported key, or base64 text cannot be decoded.
    """
    key = None
    while isinstance(value, dict):
        key = source_key(value)
        value = value.get(key)
    is_base64 = key == "base64" and isinstance(value, str)
    if not is_base64 and not is_data_url(value):
        return value
    _, _, encoded = value.rpartition(",")
    try:
        return base64.b64decode("".join(encoded.split()), validate=True)
    except ValueError as error:
        raise InputError(f"an image's base64 cannot be decoded: {error}") from None


def source_key(fields: dict) -> str | None:
    """Return the key that holds an image, preferably one whose value is not empty; else None."""
    for key, value in fields.items():
        if value is not None and key not in SOURCES:
            raise InputError(
                f'an image has the key "{key}", which is not supported: remove it, and write the '
                'image as a path, a data URL or bytes, e.g. {"type": "image", "image": "a.png"}'
            )
    keys = [key for key in SOURCES if fields.get(key) is not None]
    keys.sort(key=lambda key: not fields[key])
    return keys[0] if keys else None


def file_of(source, folder: Path) -> Path | None:
    """Return the file that contains an image; None if the image is not in a file."""
    source = source_of(source)
    if not source or not isinstance(source, str):
        return None
    return folder / source.removeprefix("file://")


def read_image(source, folder: Path):
    """Read an image, and return it as a PIL.Image, upright and in RGB.

    Args:
        source: a PIL.Image, bytes, a path, a data URL, or a dict with bytes or path.
        folder: the directory that relative paths refer to.

    Raises:
        InputError: the image cannot be read, is too small, or does not have 8 bits per channel.
    """
    path = file_of(source, folder)
    source = source_of(source)
    if not source:
        raise InputError("an image is empty: set it to a path, a data URL or bytes, or remove it")
    if path and "://" in source and not source.startswith("file://"):
        raise InputError(
            f"{source[:60]} is a remote image: download it, and use the path of the file"
        )
    description = str(path)[:200] if path else f"of type {type(source).__name__}"
    try:
        image = decode(path or source)
    except Exception as error:  # each image format raises its own exceptions
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"an image {description} cannot be read: {reason}") from None
    if min(image.size) < MIN_SIDE:
        raise InputError(
            f"an image {description} of {image.width} x {image.height} pixels is too small: use "
            f"images with at least {MIN_SIDE} pixels on both sides"
        )
    return image


def decode(source):
    """Return the image in a file, in bytes, or in a PIL.Image, upright and in RGB."""
    from PIL import Image, ImageOps

    if isinstance(source, Image.Image):
        image = source
    elif isinstance(source, Path):
        image = Image.open(source)
    else:
        image = Image.open(BytesIO(source))
    if image.mode[0] in "IF":
        # convert() would clip the values at 255.
        raise ValueError(f"its mode is {image.mode}: save it with 8 bits per channel")
    return ImageOps.exif_transpose(image).convert("RGB")
