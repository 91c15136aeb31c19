"""Folders that are written once, under a name that says what they depend on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common import disk
from config import InputError
from data.chat.tokens import ChatTokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
SUMS = "sums.json"  # the sha256 of every other file of a folder


def cache_key(
    paths: list[Path], chat: ChatTokenizer, tokenizer_dir: Path, version: int | str, options: list
) -> str:
    """sha256 in hexadecimal over the contents of data and tokenizer files, the template and the ends of generation, the
    version of what is written, and the values of the options."""
    parts = [
        part for path in paths for part in ([path] if path.is_file() else sorted(path.rglob("*")))
    ]
    parts = [
        part
        for part in [*parts, *(tokenizer_dir / name for name in TOKENIZER_FILES)]
        if part.is_file()
    ]
    settings = [version, chat.tokenizer.chat_template, sorted(chat.end_ids), *options]
    if not tokenizer_dir.is_dir():  # a hub name: no files to read
        settings.append(chat.tokenizer.backend_tokenizer.to_str())
    digest = hashlib.sha256(json.dumps(settings).encode())
    for path in parts:
        digest.update(path.name.encode() + sha256(path).digest())
    return digest.hexdigest()


def sha256(path: Path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def cached(
    folder: Path, write: Callable[[Path], None], is_current: Callable[[Path], bool] = lambda _: True
) -> Path:
    """The folder. If there is none, or one with files that have changed since, or that is not current, write(work) first fills
    another one, which then gets this name, without the folder datasets in it, which is for files that nobody needs afterwards."""
    there = folder.exists()  # asked first: another run may be about to finish it
    if is_intact(folder) and is_current(folder):
        return folder
    if there:
        print(
            f"data: {folder} is damaged, or files that it was made of have changed, and it is made anew",
            flush=True,
        )
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder.parent)
        # Beside every *.tmp whose process lives there is a *.lock that it holds. Forked processes do not share it.
        lock = tempfile.NamedTemporaryFile(
            prefix=f"{folder.name}.", suffix=".lock", dir=folder.parent
        )
        fcntl.lockf(lock, fcntl.LOCK_EX)
        work = Path(lock.name).with_suffix(".tmp")
        work.mkdir()
    except OSError as error:
        raise InputError(
            f"data.cache_dir={folder.parent} cannot be written: {error.strerror}"
        ) from error
    try:
        with disk.writing(work):
            write(work)
            shutil.rmtree(work / "datasets")
            sums = {path.name: sha256(path).hexdigest() for path in sorted(work.iterdir())}
            (work / SUMS).write_text(json.dumps(sums, indent=1))
        try:
            work.rename(folder)
        except OSError:  # another run has been faster
            if not (is_intact(folder) and is_current(folder)):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
        with suppress(FileNotFoundError):  # another run's remove_abandoned() has been faster
            lock.close()
    return folder


def is_intact(folder: Path) -> bool:
    try:
        sums = json.loads((folder / SUMS).read_text())
        return all(sha256(folder / name).hexdigest() == expected for name, expected in sums.items())
    except (OSError, ValueError):
        return False


def remove_abandoned(cache: Path) -> None:
    """Remove the unfinished folders of processes that were killed."""
    for work in cache.glob("*.tmp"):
        lock = work.with_suffix(".lock")
        with (
            suppress(OSError),
            lock.open("a") as file,
        ):  # its process lives, or this file system has no locks
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(work, ignore_errors=True)
            lock.unlink()
