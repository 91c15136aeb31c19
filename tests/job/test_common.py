"""The helpers in common/: disks, checksums, end tokens, and functions that users name."""

import errno
import json
import pickle
import socket
import subprocess
import sys
import zlib

import pytest

from common import disk, plugins
from common.checksum import CHUNK_BYTES, checksum
from common.end_tokens import add_end_ids, read_end_ids
from config import InputError
from tests.support.launch import ROOT

# -- disks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 bytes"),
        (2**20 - 1, "1,048,575 bytes"),
        (2**20, "1.0 MiB"),
        (1.5 * 2**30, "1,536.0 MiB"),
    ],
)
def test_sizes_are_shown_in_bytes_or_mib(num_bytes, text):
    assert disk.format_bytes(num_bytes) == text


def test_room_is_required_on_the_disk_of_a_path_that_does_not_exist_yet(tmp_path):
    path = tmp_path / "new" / "file"
    num_free = disk.free(path)
    assert num_free > 0
    disk.require(path, num_free // 2)
    with pytest.raises(InputError, match=rf"the disk is full: {path} needs .* MiB, .* are free"):
        disk.require(path, 2 * num_free)


@pytest.mark.parametrize(
    "variables, names_node",
    [
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"WORLD_SIZE": "16", "SLURM_NNODES": "2"}, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "SLURM_NNODES": "1"}, False),
        ({"SLURM_NNODES": "2"}, False),
    ],
)
def test_a_full_disk_names_its_node_if_there_are_several(
    tmp_path, monkeypatch, variables, names_node
):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = f"{tmp_path} on {socket.gethostname()}" if names_node else f"{tmp_path}"
    with pytest.raises(InputError, match=f"the disk is full: {place} needs"):
        disk.require(tmp_path, 2 * disk.free(tmp_path))


def test_a_file_that_cannot_be_replaced_keeps_its_content_and_leaves_no_other(tmp_path):
    path = tmp_path / "latest"
    disk.replace(path, "old")
    assert path.read_text() == "old"
    with pytest.raises(UnicodeEncodeError):
        disk.replace(path, "\ud800")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        disk.replace(tmp_path / "folder", "new")
    assert path.read_text() == "old"
    assert {file.name for file in tmp_path.iterdir()} == {"latest", "folder"}


def test_sizes_of_files_and_directories(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"1" * 10)
    (tmp_path / "a" / "b" / "two").write_bytes(b"2" * 7)
    assert disk.size(tmp_path / "a") == 17
    assert disk.size(tmp_path / "a" / "one") == 10
    assert disk.size(tmp_path / "missing") == 0


@pytest.mark.parametrize(
    "error, reason",
    [
        (OSError(errno.ENOSPC, "x"), "the disk is full"),
        (OSError(errno.EDQUOT, "x"), "the disk quota is used up"),
        (OSError(errno.EFBIG, "x"), "a file reached the limit of its size"),
        (RuntimeError("I/O error: no space (os error 28)"), "the disk is full"),
        (OSError(errno.EACCES, "x"), None),
        (RuntimeError("os error 28"), None),
    ],
)
def test_errors_of_full_disks_are_recognized(tmp_path, error, reason):
    """Directly, and if they caused another error."""
    caused = ValueError("another error")
    caused.__cause__ = error
    while_handled = ValueError("another error")
    while_handled.__context__ = error
    for raised in (error, caused, while_handled):
        expected = InputError if reason else type(raised)
        with pytest.raises(expected, match=reason), disk.writing(tmp_path, 5):
            raise raised


def test_a_checksum_covers_every_byte(tmp_path):
    content = bytes(range(256)) * (CHUNK_BYTES // 256) + b"the last chunk"
    (tmp_path / "file").write_bytes(content)
    assert checksum(tmp_path / "file") == f"{zlib.crc32(content):08x} {len(content)}"
    (tmp_path / "file").write_bytes(b"")
    assert checksum(tmp_path / "file") == "00000000 0"


# -- end tokens ------------------------------------------------------------------------------------


def write_configs(folder, generation: dict | None, model: dict) -> None:
    (folder / "config.json").write_text(json.dumps(model))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


@pytest.mark.parametrize(
    "generation, model, added, expected",
    [
        # Without generation_config.json, it gets the special tokens of config.json, and no more.
        (
            None,
            {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None, "hidden_size": 8},
            [7, 5],
            {"eos_token_id": [2, 5, 7], "bos_token_id": 1},
        ),
        (
            {"eos_token_id": [9, 3], "temperature": 0.5, "_from_model_config": True},
            {"eos_token_id": 2},
            [4],
            {"eos_token_id": [3, 9, 4], "temperature": 0.5},
        ),
        ({"eos_token_id": None}, {}, [4], {"eos_token_id": [4]}),
    ],
)
def test_end_tokens_are_added(tmp_path, generation, model, added, expected):
    write_configs(tmp_path, generation, model)
    before = read_end_ids(tmp_path)
    add_end_ids(tmp_path, added)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == expected
    assert read_end_ids(tmp_path) == before | {*added}


def test_end_tokens_that_the_files_name_change_nothing(tmp_path):
    write_configs(tmp_path, None, {"eos_token_id": [2, 0]})
    add_end_ids(tmp_path, [0])
    assert not (tmp_path / "generation_config.json").exists()
    assert read_end_ids(tmp_path) == {0, 2}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_file_of_end_tokens_is_one_line(tmp_path, name):
    (tmp_path / name).write_text('{"eos_token_id": [1')
    with pytest.raises(InputError, match=f"^{tmp_path}/{name} is damaged or incomplete: "):
        read_end_ids(tmp_path)


# -- functions of users ----------------------------------------------------------------------------

FUNCTIONS = """
from dataclasses import dataclass

@dataclass
class State:
    calls: "int" = 0

def good(scores, scale: float = 1.0, count: int = 1, **_):
    return scores * scale * count

def narrow(scores):
    return scores
"""


def test_a_function_gets_its_own_parameters(tmp_path):
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)

    def find(name, **kwargs):
        inputs = ["scores", "lengths"]
        return plugins.find("k", f"{file}:{name}", {}, inputs, "own", kwargs)

    assert find("good")(scores=3, lengths=None) == 3
    assert find("good", scale=2, count=5)(scores=3, lengths=None) == 30
    with pytest.raises(InputError) as error:
        find("good", size=2)
    assert str(error.value) == (
        f"own.size: {file}:good has no parameter size of its own (it has count, scale)"
    )
    with pytest.raises(InputError, match="own.count=2.5 must be a whole number"):
        find("good", count=2.5)
    with pytest.raises(InputError) as error:
        find("narrow")
    message = str(error.value)
    assert "it is called with scores, lengths by name" in message
    assert message.endswith("; its own parameters are set in own")
    without_group = (f"k={file}:narrow: ", "as **_")
    with pytest.raises(InputError) as error:
        plugins.find("k", f"{file}:narrow", {}, ["scores", "lengths"])
    assert str(error.value).startswith(without_group[0])
    assert str(error.value).endswith(without_group[1])


def test_a_file_is_imported_once_and_finds_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    (tmp_path / "main_file.py").write_text(
        "import sys\nfrom neighbour import VALUE\n"
        "assert sys.modules[__name__].__file__ == __file__\n"
        "def value(): return VALUE\ndef other(): return -VALUE\n"
    )
    value = plugins.find("k", f"{tmp_path}/main_file.py:value", {})
    other = plugins.find("k", f"{tmp_path}/main_file.py:other", {})
    assert (value(), other()) == (7, -7)
    assert value.__globals__ is other.__globals__
    built_in = plugins.find("k", "sum", {"sum": sum})
    assert built_in is sum


def test_files_of_one_name_in_different_directories_are_different_modules(tmp_path):
    """Pickle finds a class by the name of its module, also in another process."""
    for folder in ("rewards", "losses"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(FUNCTIONS)
    states = []
    for folder in ("rewards", "losses"):
        make = plugins.find("k", f"{tmp_path}/{folder}/mine.py:State", {})
        states.append(make(calls=len(states)))
    pickled = pickle.dumps(states)
    assert pickle.loads(pickled) == states
    program = (
        "import pickle, sys; from pathlib import Path; from common.imports import import_file; "
        "files = [import_file(Path(path)) for path in sys.argv[1:]]; "
        "states = pickle.loads(sys.stdin.buffer.read()); "
        "print([type(s) is f.State for s, f in zip(states, files)], [s.calls for s in states])"
    )
    paths = [str(tmp_path / folder / "mine.py") for folder in ("rewards", "losses")]
    command = [sys.executable, "-c", program, *paths]
    printed = subprocess.run(command, cwd=ROOT, input=pickled, capture_output=True, check=True)
    assert printed.stdout.decode().strip() == "[True, True] [0, 1]"
