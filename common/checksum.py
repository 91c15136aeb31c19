"""Checksums of files."""

import os
import zlib
from pathlib import Path

CHUNK_BYTES = 2**22


def checksum(path: Path) -> str:
    """Return the CRC-32 and the length of a file, as text.

    The file's contents are on the disk when this returns (fsync).
    """
    size = 0
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
        os.fsync(file.fileno())
    return f"{crc:08x} {size}"
