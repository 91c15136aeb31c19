"""Cache folders: written once, named by a hash of everything that their contents depend on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common import disk
from config import InputError
from data.chat.tokenizer import ChatTokenizer

# Files in a model's directory that affect how text and images are tokenized.
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
CHECKSUMS = "sums.json"  # the sha256 of every other file in a folder
SCRATCH = "datasets"  # a folder inside the one being written, removed before it is finished


def cache_key(
    paths: list[Path], chat: ChatTokenizer, tokenizer_dir: Path, version: int | str, options: list
) -> str:
    """Return the name of a cache folder: a sha256 in hexadecimal.

    Args:
        paths: data files and saved data sets; their contents are hashed.
        chat: its template and the tokens that end generation are hashed.
        tokenizer_dir: a directory, whose tokenizer files are hashed, or a hub repository's name.
        version: the version of the cache's file format.
        options: values of the settings that the tokens depend on.
    """
    settings = [version, chat.tokenizer.chat_template, sorted(chat.end_ids), *options]
    if not tokenizer_dir.is_dir():  # a hub name: there are no files to hash
        settings.append(chat.tokenizer.backend_tokenizer.to_str())
    digest = hashlib.sha256(json.dumps(settings).encode())
    for file in [*files_below(paths), *(tokenizer_dir / name for name in TOKENIZER_FILES)]:
        if file.is_file():
            digest.update(file.name.encode() + sha256(file).digest())
    return digest.hexdigest()


def files_below(paths: list[Path]) -> Iterator[Path]:
    """Yield the files among these paths, and all files in the directories among them."""
    for path in paths:
        if path.is_file():
            yield path
        else:
            yield from sorted(path.rglob("*"))


def sha256(path: Path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def always_current(folder: Path) -> bool:
    return True


def cached(
    folder: Path,
    write: Callable[[Path], None],
    is_current: Callable[[Path], bool] = always_current,
) -> Path:
    """Return the folder, after writing it if it is missing, damaged or out of date.

    Several runs may do so at the same time: each writes to its own temporary folder, and the first
    to finish renames its folder to `folder`.

    Args:
        write: fills the folder that it gets as its argument. A folder `datasets` that it leaves
            there is removed.
        is_current: returns whether an intact folder may still be used.

    Raises:
        InputError: the cache directory cannot be written, or the disk is full.
    """
    # Checked before the contents: another run may be about to finish the folder.
    existed = folder.exists()
    if is_intact(folder) and is_current(folder):
        return folder
    if existed:
        print(
            f"data: {folder} is damaged, or files that it was made from have changed: "
            "it is written again",
            flush=True,
        )
        shutil.rmtree(folder, ignore_errors=True)
    with working_folder(folder) as work:
        with disk.writing(work):
            write(work)
            shutil.rmtree(work / SCRATCH)
            write_checksums(work)
        try:
            work.rename(folder)
        except OSError:
            # Another run was faster, and its folder is as good.
            if not (is_intact(folder) and is_current(folder)):
                raise
    return folder


@contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """Create an empty folder NAME.*.tmp next to `folder`; remove it at the end if it still exists.

    The process holds a lock on the file NAME.*.lock as long as it lives. Forked processes do not
    inherit the lock. So a later run can tell which folders were abandoned.
    """
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        remove_abandoned(cache)
        lock = tempfile.NamedTemporaryFile(prefix=f"{folder.name}.", suffix=".lock", dir=cache)
        fcntl.lockf(lock, fcntl.LOCK_EX)
        work = Path(lock.name).with_suffix(".tmp")
        work.mkdir()
    except OSError as error:
        raise InputError(f"data.cache_dir={cache} cannot be written: {error.strerror}") from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        with suppress(FileNotFoundError):  # another run's remove_abandoned() was faster
            lock.close()


def remove_abandoned(cache: Path) -> None:
    """Remove the unfinished folders of processes that were killed."""
    for work in cache.glob("*.tmp"):
        lock = work.with_suffix(".lock")
        # An OSError means that the process is alive, or that this file system has no locks.
        with suppress(OSError), lock.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(work, ignore_errors=True)
            lock.unlink()


def write_checksums(folder: Path) -> None:
    checksums = {path.name: sha256(path).hexdigest() for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=1))


def is_intact(folder: Path) -> bool:
    """Return whether all files of a finished folder have the contents that were written."""
    try:
        checksums = json.loads((folder / CHECKSUMS).read_text())
        return all(
            sha256(folder / name).hexdigest() == expected for name, expected in checksums.items()
        )
    except (OSError, ValueError):
        return False
