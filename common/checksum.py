"""Checksums of files."""

import os
import zlib
from pathlib import Path

CHUNK_BYTES = 2**22


def checksum(path: Path) -> str:
    """Return the CRC-32 and the size of a file, as text.

    When this function returns, the contents of the file are on the disk (fsync).
    """
    size = 0
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
        os.fsync(file.fileno())
    return f"{crc:08x} {size}"
