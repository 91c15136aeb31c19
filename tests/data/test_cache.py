"""The names of cache folders, and when their contents are written again."""

import ctypes
import json
import os
import shutil
import signal

import pytest

from config import load
from data.cache import cache_key, ensure_cached, key_of
from data.chat.tokenizer import ChatTokenizer
from data.dataset import TokenDataset, tokenize
from data.preference_dataset import PreferenceDataset, tokenize_preferences
from data.reward_dataset import RewardDataset, tokenize_rewards
from data.tokenization import plain_options
from data.workers import forking_workers
from tests.data.chat_templates import CHATML, QWEN2, make_tokenizer
from tests.data.test_chat import say

PR_GET_PDEATHSIG = 2  # linux/prctl.h
MODEL_FILES = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(CHATML)


@pytest.fixture
def make_key(tmp_path, tokenizer):
    """Return a function: the key of a file and a folder of files, with changes."""
    (tmp_path / "saved").mkdir()
    for name in ("a.jsonl", "saved/part0", "saved/part1"):
        (tmp_path / name).write_text(name)
    (tmp_path / "model").mkdir()
    for name in MODEL_FILES:
        (tmp_path / "model" / name).write_text("{}")

    def make(paths=("a.jsonl", "saved"), chat=None, version=1, options=("all", 64)):
        chat = chat or ChatTokenizer(tokenizer)
        paths = [tmp_path / name for name in paths]
        return cache_key(paths, chat, tmp_path / "model", version, list(options))

    return make


def test_the_key_depends_on_all_that_tokens_depend_on(make_key, tokenizer, tmp_path):
    before = make_key()
    assert make_key() == before
    assert key_of(tmp_path / f"{before}-rows") == before
    changed = {
        "version": make_key(version=2),
        "options": make_key(options=("all", 65)),
        "end tokens": make_key(chat=ChatTokenizer(tokenizer, [5])),
        "chat template": make_key(chat=ChatTokenizer(make_tokenizer(QWEN2))),
        "fewer files": make_key(["a.jsonl"]),
    }
    assert before not in changed.values()
    assert len({*changed.values()}) == len(changed)


@pytest.mark.parametrize(
    "file", ["a.jsonl", "saved/part1", *(f"model/{name}" for name in MODEL_FILES)]
)
def test_the_key_depends_on_the_contents_of_every_file(make_key, tmp_path, file):
    before = make_key()
    (tmp_path / file).write_text("other")
    assert make_key() != before


def test_the_key_depends_on_the_names_of_files(make_key, tmp_path):
    """Rows are read as the name says, and in its order."""
    before = make_key()
    (tmp_path / "saved" / "part1").rename(tmp_path / "saved" / "part2")
    renamed = make_key()
    assert renamed != before
    (tmp_path / "a.jsonl").rename(tmp_path / "a.csv")
    assert make_key(["a.csv", "saved"]) != renamed


def write(work) -> None:
    (work / "datasets").mkdir()
    (work / "tokens").write_text("new")


def test_a_folder_is_written_again_when_it_is_out_of_date(tmp_path, capsys):
    written = []

    def write_and_count(work) -> None:
        written.append(work)
        write(work)

    for is_current, num_written in ((True, 1), (True, 1), (False, 2), (True, 2)):
        ensure_cached(tmp_path / "key", write_and_count, lambda folder: is_current)
        assert len(written) == num_written
        is_reported = "the files that it was made from have changed" in capsys.readouterr().out
        assert is_reported == (not is_current)


@pytest.mark.parametrize("problem", [None, "damaged", "out of date"])
def test_the_folder_of_a_faster_run_is_used_only_if_it_is_good(tmp_path, problem):
    """Another run finishes while this one writes."""
    folder = tmp_path / "key"
    finished = ensure_cached(tmp_path / "other", write)
    if problem == "damaged":
        (finished / "tokens").write_text("old")

    def write_late(work) -> None:
        write(work)
        shutil.copytree(finished, folder)

    def is_current(folder) -> bool:
        return problem != "out of date"

    if problem:
        with pytest.raises(OSError):
            ensure_cached(folder, write_late, is_current)
    else:
        assert ensure_cached(folder, write_late, is_current) == folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "other"]


def signal_at_the_end_of_the_parent() -> int:
    """Return the signal that a fork of this process gets when this process ends; 0: none."""
    child = os.fork()
    if child == 0:
        number = ctypes.c_int(-1)
        ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
        os._exit(number.value)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_only_processes_that_tokenize_end_with_this_one():
    with forking_workers():
        assert signal_at_the_end_of_the_parent() == signal.SIGKILL
    assert signal_at_the_end_of_the_parent() == 0


KINDS = {
    "sft": (tokenize, TokenDataset, {"messages": say("1+1=", "2"), "id": 7}),
    "dpo": (
        tokenize_preferences,
        PreferenceDataset,
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "id": 7},
    ),
    "rm": (
        tokenize_rewards,
        RewardDataset,
        {"prompt": "1+1=", "completion": "2", "score": 0.5, "id": 7},
    ),
}


@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("script", KINDS)
def test_rows_are_stored_only_for_a_sampler_that_reads_them(tmp_path, tokenizer, script, with_rows):
    write, dataset, row = KINDS[script]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    pairs = ["model.path=/model", f"data.train_files={file}"]
    options = plain_options(load(f"{script}.yaml", pairs).data)
    path = write(str(file), tokenizer, options, tmp_path / "cache", tmp_path, with_rows=with_rows)
    rows = dataset.load(path).rows
    assert (rows and [*rows]) == ([row] if with_rows else None)
