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

PARTS = ("image", "image_url")          # types of a message's parts that are images
UNREAD = ("video", "video_url", "audio", "audio_url", "input_audio")
# Keys of such a part, under which the image may be. A path beside bytes is but a name.
SOURCES = (*PARTS, "bytes", "base64", "url", "path")
MARK = "<image>"                        # in a text: an image of the row's column


def place(messages: list[dict], column, key: str) -> tuple[list[dict], list]:
    """(messages in which each image is a part {"type": "image"} of a content, the images in their order, as the row has them).

    column: an image or a list of them, also as JSON in a text, for parts without an image of their own, or for each <image> in a
    text; where messages have neither, they stand before the first text of the user. Raises InputError where there are more of the
    one than of the other, and for videos and audio.
    """
    if isinstance(column, str) and column.startswith("["):          # as data sets keep lists whose columns are typed
        with suppress(json.JSONDecodeError):                        # else a path
            column = json.loads(column)
    empty = column is None or isinstance(column, str) and not column            # as a cell of CSV may be
    listed = [] if empty else list(column) if isinstance(column, (list, tuple)) else [column]
    found, used = [], 0

    def next_listed():
        nonlocal used
        used += 1
        if used > len(listed):
            raise InputError(f'the messages have {used} images or more that are in "{key}", which has {len(listed)}')
        return listed[used - 1]

    def parts_of(content) -> list:
        if isinstance(content, list):
            return [own for part in content for own in (marked(part["text"]) if is_text(part) and MARK in part["text"] else [part])]
        return marked(content)

    def marked(text: str | None) -> list:
        first, *others = (text or "").split(MARK) if listed else [text]
        return [*texts(first), *(part for text in others for part in ({"type": "image"}, *texts(text)))]

    def placed(part):
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if isinstance(part, dict) and (kind := next((x for x in UNREAD if part.get("type") == x or part.get(x) is not None), None)):
            raise InputError(f"a part of a message is of type {kind}: videos and audio are not read, leave it out")
        if not isinstance(part, dict) or part.get("type") not in PARTS and all(part.get(name) is None for name in PARTS):
            return part
        if part.get("text"):
            raise InputError("a part of a message has both text and an image: make it two parts")
        source = source_of(part)
        found.append(next_listed() if source is None else source)
        return {"type": "image"}

    contents = [[placed(part) for part in parts_of(message.get("content"))] for message in messages]
    if listed and not used:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        if any(isinstance(part, dict) and part.get("type") == "image" for content in contents for part in content):
            raise InputError(f'"{key}" has {len(listed)} images, and the messages have others')
        contents[first], found, used = [{"type": "image"}] * len(listed) + contents[first], listed, len(listed)
    if used < len(listed):
        raise InputError(f'"{key}" has {len(listed)} images, and the messages name {used} of them')
    if not found:
        return messages, []
    return [message | {"content": content} if {"type": "image"} in content else message
            for message, content in zip(messages, contents)], found


def without_pixels(value) -> None:
    """What a row's record in JSON has instead of an image's bytes."""
    from PIL.Image import Image
    if not isinstance(value, (bytes, Image)):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def is_text(part) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def source_of(value):
    """The image in a part of a message, or in a dict such as {"bytes": ..., "path": ...}; None if there is none."""
    while isinstance(value, dict):
        name = next((name for name in SOURCES if value.get(name) is not None), None)
        value = value.get(name)
        if name == "base64" and isinstance(value, str) and not value.startswith("data:"):
            value = f"data:;base64,{value}"
    return value


def file_of(source, folder: Path) -> Path | None:
    """The file that read() would read."""
    source = source_of(source)
    return folder / source.removeprefix("file://") if isinstance(source, str) and not source.startswith("data:") else None


def texts(text: str | None) -> list[dict]:
    return [{"type": "text", "text": text}] if text else []


def read(source, folder: Path):
    """The image, a PIL.Image in RGB, upright. source: one, or its bytes, path (relative to the folder) or data URL, or a dict with
    bytes or path. Raises InputError for what is no image."""
    from PIL import Image, ImageOps
    source, path = source_of(source), file_of(source, folder)
    if path and "://" in source and not source.startswith("file://"):
        raise InputError(f"{source[:60]} is on the net: download it, and give its path")
    shown = str(path)[:200] if path else f"of type {type(source).__name__}"
    try:
        if isinstance(source, str) and not path:
            source = base64.b64decode(source.partition(",")[2], validate=True)
        image = source if isinstance(source, Image.Image) else Image.open(path or BytesIO(source))
        image = ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:          # of a kind of each format's
        raise InputError(f"an image {shown} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if min(image.size) < 4:             # processors may take a height of 1 or 3 for channels
        raise InputError(f"an image {shown} of {image.width} x {image.height} pixels is too small: 4 a side are needed")
    return image


class StoredImages(Sequence):
    """Of the rows of a cache folder: pixels.bin uint8, mapped; image_sizes.npy int32 [m, 2] (height, width); image_rows.npy int64
    [n+1]: row i has the images image_rows[i]:image_rows[i+1]."""

    def __init__(self, path: Path):
        self.sizes, self.rows = np.load(path / "image_sizes.npy"), np.load(path / "image_rows.npy")
        self.pixels = np.memmap(path / "pixels.bin", np.uint8, "r") if len(self.sizes) else np.empty(0, np.uint8)
        self.ends = np.cumsum(self.sizes.prod(1, dtype=np.int64) * 3)

    def __len__(self) -> int:
        return len(self.rows) - 1

    def __getitem__(self, row: int) -> list[np.ndarray]:
        numbers = range(self.rows[row], self.rows[row + 1])
        return [self.pixels[self.ends[i] - self.sizes[i].prod() * 3:self.ends[i]].reshape(*self.sizes[i], 3) for i in numbers]


def write(folder: Path, table, used: np.ndarray) -> dict:
    """The files of StoredImages, of a table with columns pixels, image_sizes, image_files. Returns what stats.json says of them."""
    sizes = [np.array(row, np.int32).reshape(-1, 2) for row in table["image_sizes"].to_pylist()]
    with open(folder / "pixels.bin", "wb") as file:
        for chunk in table["pixels"].chunks:
            for pixels in chunk:
                file.write(pixels.as_buffer() or b"")
    np.save(folder / "image_sizes.npy", np.concatenate(sizes))
    np.save(folder / "image_rows.npy", np.cumsum([0, *(len(row) for row, is_used in zip(sizes, used) if is_used)], dtype=np.int64))
    files = {name: state(Path(name)) for row in table["image_files"].to_pylist() for name in row}
    (folder / "image_files.json").write_text(json.dumps(files))
    return {"images": sum(map(len, sizes))}


def state(path: Path) -> list[int] | None:
    """What changes when a file does."""
    return [path.stat().st_size, path.stat().st_mtime_ns] if path.is_file() else None


def are_current(folder: Path) -> bool:
    """Whether the files that a cache has images of are as they were."""
    path = folder / "image_files.json"
    return not path.is_file() or all(state(Path(name)) == was for name, was in json.loads(path.read_text()).items())
