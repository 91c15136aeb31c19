"""Store the pixels of images in a cache folder, and detect changes to their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

NUM_CHANNELS = 3


class StoredImages(Sequence):
    """The images in a cache folder. Item i is the list of row i's images, uint8 [height, width, 3].

    Files:
        pixels.bin: uint8, all images end to end, memory-mapped.
        image_sizes.npy: int32 [m, 2], the height and width of each image.
        image_rows.npy: int64 [n+1]; row i has the images image_rows[i] : image_rows[i+1].
    """

    def __init__(self, path: Path):
        self.sizes = np.load(path / "image_sizes.npy")
        self.rows = np.load(path / "image_rows.npy")
        self.pixels = np.empty(0, np.uint8)
        if len(self.sizes):  # an empty file cannot be mapped
            self.pixels = np.memmap(path / "pixels.bin", np.uint8, "r")
        self.ends = np.cumsum(self.sizes.prod(1, dtype=np.int64) * NUM_CHANNELS)

    def __len__(self) -> int:
        return len(self.rows) - 1

    def __getitem__(self, row: int) -> list[np.ndarray]:
        return [self.image(i) for i in range(self.rows[row], self.rows[row + 1])]

    def image(self, index: int) -> np.ndarray:
        size = self.sizes[index]
        end = self.ends[index]
        start = end - size.prod() * NUM_CHANNELS
        return self.pixels[start:end].reshape(*size, NUM_CHANNELS)


def write(folder: Path, table, is_used: np.ndarray) -> int:
    """Write the files of StoredImages, and image_files.json for are_current().

    Args:
        table: has the columns pixels, image_sizes and image_files.
        is_used: bool, one per row of the table. The pixels of unused rows are not stored, but
            their image files are recorded.

    Returns:
        The number of images.
    """
    with open(folder / "pixels.bin", "wb") as file:
        for chunk in table["pixels"].chunks:
            for pixels in chunk:
                file.write(pixels.as_buffer() or b"")
    sizes = [np.array(row, np.int32).reshape(-1, 2) for row in table["image_sizes"].to_pylist()]
    np.save(folder / "image_sizes.npy", np.concatenate(sizes))
    counts = [len(row_sizes) for row_sizes, used in zip(sizes, is_used) if used]
    np.save(folder / "image_rows.npy", np.cumsum([0, *counts], dtype=np.int64))
    states = {}
    for names in table["image_files"].to_pylist():
        states |= {name: state(Path(name)) for name in names}
    (folder / "image_files.json").write_text(json.dumps(states))
    return sum(map(len, sizes))


def state(path: Path) -> list[int] | None:
    """Return a file's size and modification time in ns; None if the file is missing."""
    if not path.is_file():
        return None
    return [path.stat().st_size, path.stat().st_mtime_ns]


def are_current(folder: Path) -> bool:
    """Return whether the image files are the same as when the cache folder was written."""
    path = folder / "image_files.json"
    if not path.is_file():
        return True
    states = json.loads(path.read_text())
    return all(state(Path(name)) == stored_state for name, stored_state in states.items())
