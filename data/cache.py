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
WITH_ROWS = "-rows"  # the suffix of folders that also hold complete rows, as data.sampler may need
SCRATCH = "datasets"  # a folder for temporary files inside a cache folder that is being written


def cache_key(
    paths: list[Path], chat: ChatTokenizer, tokenizer_dir: Path, version: int | str, options: list
) -> str:
    """Return the name of a cache folder: a sha256 in hexadecimal.

    Args:
        paths: data files and saved data sets; their contents are hashed.
        chat: the chat template and the tokens that end generation are hashed.
        tokenizer_dir: a directory, whose tokenizer files are hashed, or the name of a repository on
            the hub.
        version: the version of the cache's file format.
        options: the values of the settings that the tokens depend on.
    """
    settings = [version, chat.tokenizer.chat_template, sorted(chat.end_ids), *options]
    if not tokenizer_dir.is_dir():  # a hub name: there are no files to hash
        settings.append(chat.tokenizer.backend_tokenizer.to_str())
    digest = hashlib.sha256(json.dumps(settings).encode())
    for file in [*files_below(paths), *(tokenizer_dir / name for name in TOKENIZER_FILES)]:
        if file.is_file():
            digest.update(file.name.encode() + sha256(file).digest())
    return digest.hexdigest()


def key_of(folder: Path) -> str:
    """Return the cache_key() in the name of a cache folder."""
    return folder.name.removesuffix(WITH_ROWS)


def files_below(paths: list[Path]) -> Iterator[Path]:
    """Yield all these files, and all files in these directories."""
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


def ensure_cached(
    folder: Path,
    write: Callable[[Path], None],
    is_current: Callable[[Path], bool] = always_current,
) -> Path:
    """Return the folder. Writes it first if it is missing, damaged or out of date.

    Several runs may call this at the same time. Each writes to a temporary folder of its own, and
    the first to finish renames it to `folder`.

    Args:
        write: fills a folder, which it gets as its argument. The folder `datasets` in it is
            for temporary files and is removed afterwards.
        is_current: returns whether an undamaged folder is up to date.

    Raises:
        InputError: the cache directory cannot be written, or the disk is full.
    """
    # Check this first: another run may finish the folder while the contents are checked.
    existed = folder.exists()
    if is_intact(folder) and is_current(folder):
        return folder
    if existed:
        print(
            f"data: {folder} is damaged, or the files that it was made from have changed: "
            "writing it again",
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
            # Another run was faster, and its folder can be used.
            if not (is_intact(folder) and is_current(folder)):
                raise
    return folder


@contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """Create an empty folder NAME.*.tmp next to `folder`; remove it at the end if it still exists.

    Meanwhile, the process holds a lock on the file NAME.*.lock, which forked processes do not
    inherit. A folder without a lock was abandoned by a process that was killed.
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
        with suppress(FileNotFoundError):  # another run's remove_abandoned() has removed the lock
            lock.close()


def remove_abandoned(cache: Path) -> None:
    """Remove the unfinished folders of processes that were killed."""
    for work in cache.glob("*.tmp"):
        lock = work.with_suffix(".lock")
        # An OSError means that the process is still running, or that the file system has no locks.
        with suppress(OSError), lock.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(work, ignore_errors=True)
            lock.unlink()


def write_checksums(folder: Path) -> None:
    checksums = {path.name: sha256(path).hexdigest() for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=1))


def is_intact(folder: Path) -> bool:
    """Return whether the folder is complete, and its files match their checksums."""
    try:
        checksums = json.loads((folder / CHECKSUMS).read_text())
        return all(
            sha256(folder / name).hexdigest() == expected for name, expected in checksums.items()
        )
    except (OSError, ValueError):
        return False
