"""Images in rows of data: where a row has them, and the files that keep them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np

from config import InputError

PARTS = ("image", "image_url")  # types of a message's parts that are images
TEXTS = ("text", "input_text", "output_text")
UNREAD = ("video", "video_url", "audio", "audio_url", "input_audio")
# Keys of such a part, under which the image may be. A path beside bytes is but a name.
SOURCES = (*PARTS, "bytes", "base64", "url", "path")
MARK = "<image>"  # in a text: an image of the row's column
IMAGE = {"type": "image"}


def place(messages: list[dict], column, key: str) -> tuple[list[dict], list]:
    """(messages in which a content is a string, or a list of parts {"type": "text", "text"} and {"type": "image"}, of which each
    stands for an image; the images in their order, as source_of() has them).

    column: an image or a list of them, also as JSON in a text, for parts without an image of their own, or for each <image> in a
    text; where messages have neither, they stand before the first text of the user. Raises InputError where there are more of the
    one than of the other, and for videos and audio. Parts of other kinds stay as they are.
    """
    column = parsed(column)
    empty = column is None or isinstance(column, str) and not column  # as a cell of CSV may be
    listed = [] if empty else list(column) if isinstance(column, (list, tuple)) else [column]
    found, used = [], []

    def next_listed(index: int | None):
        used.append(len(used) if index is None else index)
        if index is not None and index not in range(len(listed)):
            raise InputError(
                f'a part of a message has index {index!r}, and "{key}" has {len(listed)} images'
            )
        if used[-1] >= len(listed):
            raise InputError(
                f'the messages have {len(used)} images or more that are in "{key}", which has {len(listed)}'
            )
        return listed[used[-1]]

    def marked(text: str) -> list:
        first, *others = text.split(MARK) if listed else [text]
        return [*texts(first), *(part for text in others for part in (placed(IMAGE), *texts(text)))]

    def parts_of(content) -> list:
        parts = []
        for part in content if isinstance(content, list) else [content or ""]:
            said = None if is_image(part) else read_text(part)
            parts += [placed(part)] if is_image(part) else [part] if said is None else marked(said)
        return parts

    def placed(part: dict) -> dict:
        if part.get("text"):
            raise InputError("a part of a message has both text and an image: make it two parts")
        index, source = (
            part.get("index"),
            source_of({k: v for k, v in part.items() if k not in ("type", "text", "index")}),
        )
        if index is not None and source is not None:
            raise InputError(
                "a part of a message has both an image and an index: leave one of them out"
            )
        found.append(next_listed(index) if source is None else source)
        return IMAGE

    contents = [parts_of(message.get("content")) for message in messages]
    if listed and not used:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        if found:
            raise InputError(f'"{key}" has {len(listed)} images, and the messages have others')
        contents[first], found, used = (
            [IMAGE] * len(listed) + contents[first],
            listed,
            range(len(listed)),
        )
    if len({*used}) < len(listed):
        raise InputError(
            f'"{key}" has {len(listed)} images, and the messages name {len({*used})} of them'
        )
    return [
        message | {"content": content}
        if IMAGE in content or isinstance(message.get("content"), list)
        else message
        for message, content in zip(messages, contents)
    ], found


def is_image(part) -> bool:
    return isinstance(part, dict) and (
        part.get("type") in PARTS or any(part.get(name) is not None for name in PARTS)
    )


def read_text(part) -> str | None:
    """What a part of a message that is no image says; None for one of another kind, which is left to the chat template. Raises
    InputError for what is no part."""
    if isinstance(part, str):
        return part
    said = part if isinstance(part, dict) else {"type": "text"}
    kind = said.get("type")
    if unread := next((x for x in UNREAD if kind == x or said.get(x) is not None), None):
        raise InputError(
            f"a part of a message is of type {unread}: videos and audio are not read, leave it out"
        )
    if kind not in (None, *TEXTS):
        return None
    if not isinstance(said.get("text"), str):
        raise InputError(
            f"a part of a message, {str(part)[:60]}, is neither text nor an image: it must be "
            '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
        )
    return said["text"]


def parsed(column):
    """A column of images, which data sets whose columns are typed keep as JSON in a text."""
    if isinstance(column, str) and column.startswith("["):
        with suppress(json.JSONDecodeError):  # else a path
            return json.loads(column)
    return column


def without_pixels(row: dict, key: str) -> dict:
    """The row as its record in JSON has it: None in place of an image's bytes, and paths as they are. key: the column of images."""
    from PIL.Image import Image

    def without(value, name: str):
        if isinstance(value, dict):
            return {inner: without(x, inner) for inner, x in value.items()}
        if isinstance(value, (list, tuple)):
            return [without(x, name) for x in value]
        if name in SOURCES and (column := parsed(value)) is not value:
            return json.dumps(without(column, name))
        is_pixels = (
            isinstance(value, (bytes, Image))
            or name == "base64"
            or name in SOURCES
            and is_data_url(value)
        )
        return None if is_pixels else value

    return {name: without(value, "image" if name == key else "") for name, value in row.items()}


def is_data_url(value) -> bool:
    return isinstance(value, str) and value[:5].lower() == "data:"


def source_of(value):
    """The image in a part of a message, or in a dict such as {"bytes": ..., "path": ...}: its bytes, its path, or a PIL.Image;
    None if there is none."""
    name = None
    while isinstance(value, dict):
        if unread := [
            key for key, inner in value.items() if inner is not None and key not in SOURCES
        ]:
            raise InputError(
                f'an image has the key "{unread[0]}", which is not read: leave it out, and give the image as a '
                'path, a data URL or bytes, such as {"type": "image", "image": "a.png"}'
            )
        names = sorted(
            (name for name in SOURCES if value.get(name) is not None),
            key=lambda name: not value[name],
        )
        name = names[0] if names else None  # what is empty comes last
        value = value.get(name)
    if not is_data_url(value) and not (name == "base64" and isinstance(value, str)):
        return value
    try:
        return base64.b64decode("".join(value.rpartition(",")[2].split()), validate=True)
    except ValueError as error:
        raise InputError(f"an image's base64 cannot be read: {error}") from None


def file_of(source, folder: Path) -> Path | None:
    """The file that read() would read."""
    source = source_of(source)
    return folder / source.removeprefix("file://") if source and isinstance(source, str) else None


def texts(text: str | None) -> list[dict]:
    return [{"type": "text", "text": text}] if text else []


def read(source, folder: Path):
    """The image, a PIL.Image in RGB, upright. source: one, or its bytes, path (relative to the folder) or data URL, or a dict with
    bytes or path. Raises InputError for what is no image."""
    from PIL import Image, ImageOps

    source, path = source_of(source), file_of(source, folder)
    if not source:
        raise InputError("an image is empty: give its path, a data URL or bytes, or leave it out")
    if path and "://" in source and not source.startswith("file://"):
        raise InputError(f"{source[:60]} is on the net: download it, and give its path")
    shown = str(path)[:200] if path else f"of type {type(source).__name__}"
    try:
        image = source if isinstance(source, Image.Image) else Image.open(path or BytesIO(source))
        if image.mode[0] in "IF":  # of which convert() keeps what is below 256
            raise ValueError(f"its mode is {image.mode}, save it with 8 bits per channel")
        image = ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # of a kind of each format's
        raise InputError(
            f"an image {shown} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if min(image.size) < 4:  # processors may take a height of 1 or 3 for channels
        raise InputError(
            f"an image {shown} of {image.width} x {image.height} pixels is too small: 4 a side are needed"
        )
    return image


class StoredImages(Sequence):
    """Of the rows of a cache folder: pixels.bin uint8, mapped; image_sizes.npy int32 [m, 2] (height, width); image_rows.npy int64
    [n+1]: row i has the images image_rows[i]:image_rows[i+1]."""

    def __init__(self, path: Path):
        self.sizes, self.rows = np.load(path / "image_sizes.npy"), np.load(path / "image_rows.npy")
        self.pixels = (
            np.memmap(path / "pixels.bin", np.uint8, "r")
            if len(self.sizes)
            else np.empty(0, np.uint8)
        )
        self.ends = np.cumsum(self.sizes.prod(1, dtype=np.int64) * 3)

    def __len__(self) -> int:
        return len(self.rows) - 1

    def __getitem__(self, row: int) -> list[np.ndarray]:
        numbers = range(self.rows[row], self.rows[row + 1])
        return [
            self.pixels[self.ends[i] - self.sizes[i].prod() * 3 : self.ends[i]].reshape(
                *self.sizes[i], 3
            )
            for i in numbers
        ]


def write(folder: Path, table, used: np.ndarray) -> dict:
    """The files of StoredImages, of a table with columns pixels, image_sizes, image_files. Returns what stats.json says of them."""
    sizes = [np.array(row, np.int32).reshape(-1, 2) for row in table["image_sizes"].to_pylist()]
    with open(folder / "pixels.bin", "wb") as file:
        for chunk in table["pixels"].chunks:
            for pixels in chunk:
                file.write(pixels.as_buffer() or b"")
    np.save(folder / "image_sizes.npy", np.concatenate(sizes))
    np.save(
        folder / "image_rows.npy",
        np.cumsum([0, *(len(row) for row, is_used in zip(sizes, used) if is_used)], dtype=np.int64),
    )
    files = {name: state(Path(name)) for row in table["image_files"].to_pylist() for name in row}
    (folder / "image_files.json").write_text(json.dumps(files))
    return {"images": sum(map(len, sizes))}


def state(path: Path) -> list[int] | None:
    """What changes when a file does."""
    return [path.stat().st_size, path.stat().st_mtime_ns] if path.is_file() else None


def are_current(folder: Path) -> bool:
    """Whether the files that a cache has images of are as they were."""
    path = folder / "image_files.json"
    return not path.is_file() or all(
        state(Path(name)) == was for name, was in json.loads(path.read_text()).items()
    )
