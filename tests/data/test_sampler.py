"""Samplers of the user: which results are taken, and which mistakes are reported."""

import itertools
import random
import time

import numpy as np
import pytest
import torch

from config import InputError, load
from data.batching.sampler import INPUTS, UserSampler, find_sampler

NUM_ROWS = 20
SIZE = 4
BATCH = [3, 19, 0, 3]
PATHS = ["model.path=m", "data.train_files=t"]


def make_sampler(function) -> UserSampler:
    inputs = dict.fromkeys(INPUTS, None) | {"seed": 5, "batch_size": SIZE, "num_rows": NUM_ROWS}
    del inputs["batch_index"]
    return UserSampler("my.py:mine", function, inputs)


@pytest.mark.parametrize(
    "result",
    [
        BATCH,
        tuple(BATCH),
        np.array(BATCH),
        np.array(BATCH, np.uint8),
        torch.tensor(BATCH),
        [np.int32(row) for row in BATCH],
    ],
    ids=lambda result: type(result).__name__,
)
def test_lists_and_arrays_of_whole_numbers_are_rows(result):
    rows = make_sampler(lambda **_: result).rows_of_batch(3)
    assert rows.dtype == np.int64
    assert rows.tolist() == BATCH


def test_a_sampler_gets_its_inputs_by_name():
    calls = []

    def record(**inputs):
        calls.append(inputs)
        return BATCH

    make_sampler(record).rows_of_batch(7)
    assert all(set(inputs) == set(INPUTS) for inputs in calls)
    assert calls[0]["batch_index"] == 7
    assert calls[0]["seed"] == 5


NUMBERS = "return data.train_batch_size=4 row numbers, as a list or an array of whole numbers"
WRONG = {
    "short": ([1, 2], "has 2 rows: return data.train_batch_size=4 of them"),
    "empty": ([], "has 0 rows: return data.train_batch_size=4"),
    "too large": ([0, 1, NUM_ROWS, 2], "has row 20: the rows are numbered from 0 to 19"),
    "negative": ([0, 1, -1, 2], "has row -1: the rows are numbered from 0 to 19"),
    "huge": (np.array([0, 1, 2**64 - 1, 2], np.uint64), "has row -1"),
    "none": (None, f"has the type NoneType: {NUMBERS}"),
    "one": (3, f"has the type int: {NUMBERS}"),
    "text": ("1234", f"has the type str: {NUMBERS}"),
    "texts": (["1", "2", "3", "4"], "has the type list of <U1: return"),
    "floats": ([0.0, 1.0, 2.0, 3.0], "has the type list of float64: return"),
    "booleans": (np.ones(4, bool), "has the type ndarray of bool: return"),
    "a set": ({0, 1, 2, 3}, f"has the type set: {NUMBERS}"),
    "a generator": ((i for i in range(4)), f"has the type generator: {NUMBERS}"),
    "a matrix": (np.zeros((2, 2), int), "has the type ndarray of shape [2, 2]: return"),
    "ragged": ([[1], [2, 3]], f"has the type list: {NUMBERS}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_an_error_of_one_line(name):
    result, message = WRONG[name]
    with pytest.raises(InputError) as caught:
        make_sampler(lambda **_: result).rows_of_batch(3)
    text = str(caught.value)
    assert text.startswith("data.sampler=my.py:mine: batch 3 ")
    assert message in text
    assert "\n" not in text


COUNTER = itertools.count()
UNSTABLE = {
    "numpy": lambda **_: np.random.permutation(NUM_ROWS)[:SIZE],
    "torch": lambda **_: torch.randperm(NUM_ROWS)[:SIZE],
    "random": lambda **_: random.sample(range(NUM_ROWS), SIZE),
    "a new generator": lambda **_: np.random.default_rng().choice(NUM_ROWS, SIZE),
    "a counter": lambda **_: [next(COUNTER) % NUM_ROWS] * SIZE,
    "the clock": lambda **_: [time.perf_counter_ns() % NUM_ROWS for _ in range(SIZE)],
}


@pytest.mark.parametrize("name", UNSTABLE)
def test_a_result_that_changes_is_an_error(name):
    """The clock may return the same twice, but not in all batches."""
    with pytest.raises(InputError, match="returned different rows: the rows must follow from the"):
        make_sampler(UNSTABLE[name]).check(1000)


def test_a_memory_of_earlier_batches_is_an_error():
    """Two calls in a row agree."""
    seen = []

    def remember(batch_index, **_):
        if batch_index not in seen:
            seen.append(batch_index)
        return [len(seen)] * SIZE

    sampler = make_sampler(remember)
    sampler.rows_of_batch(0)
    with pytest.raises(InputError, match="has other rows after other batches have been drawn"):
        sampler.check(10)


def test_a_seeded_generator_is_stable():
    def seeded(seed, batch_index, batch_size, num_rows, **_):
        return np.random.default_rng([seed, batch_index]).integers(num_rows, size=batch_size)

    sampler = make_sampler(seeded)
    sampler.check(1000)
    assert sampler.rows_of_batch(0).tolist() != sampler.rows_of_batch(1).tolist()


@pytest.mark.parametrize("num_batches, failing", [(1000, 999), (1000, 0), (1, 0), (3, 1)])
def test_the_check_includes_the_first_and_the_last_batch(num_batches, failing):
    def function(batch_index, **_):
        return [NUM_ROWS if batch_index == failing else 0] * SIZE

    with pytest.raises(InputError, match=f"batch {failing} has row 20"):
        make_sampler(function).check(num_batches)


def test_an_exception_is_located_in_the_users_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(rows, batch_index, **_):\n    return [rows[batch_index]['level']]\n"
    )
    name = f"{tmp_path}/mine.py:mine"
    function = find_sampler(load("sft.yaml", [*PATHS, f"data.sampler={name}"]).data)
    inputs = {"batch_size": SIZE, "num_rows": NUM_ROWS, "rows": [{"text": "a"}] * NUM_ROWS}
    with pytest.raises(InputError) as caught:
        UserSampler(name, function, inputs).check(10)
    assert str(caught.value) == (
        f"data.sampler={name}: {tmp_path}/mine.py:2 failed for batch 0: KeyError: 'level'"
    )


MISTAKES = [
    (["data.sampler=curriculum"], "data.sampler=curriculum must be path/to/file.py:name"),
    (["data.sampler=mine:f"], "did you mean mine.py:f?"),
    (["data.sampler=none.py:f"], "none.py: no such file"),
    (["data.sampler={mine}:absent"], "has no function 'absent'; the nearest is mine.py:"),
    (["data.sampler={mine}:greedy"], "missing a required argument: 'temperature'; it is called"),
    (["data.sampler={mine}:few"], "got an unexpected keyword argument"),
    (
        ["data.sampler={mine}:fine", "data.sampler_kwargs.power=2"],
        "data.sampler_kwargs.power: {mine}:fine has no parameter power of its own (it has share)",
    ),
    (
        ["data.sampler={mine}:fine", "data.sampler_kwargs.share=high"],
        "data.sampler_kwargs.share='high' must be a number",
    ),
]


@pytest.mark.parametrize("settings, message", MISTAKES)
def test_a_function_that_cannot_be_called_is_an_error(tmp_path, settings, message):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def fine(seed, *, share: float = 0.5, **_): ...\n"
        "def greedy(temperature, **_): ...\n"
        "def few(seed): ...\n"
    )
    config = load("sft.yaml", [*PATHS, *(text.format(mine=mine) for text in settings)])
    with pytest.raises(InputError) as caught:
        find_sampler(config.data)
    assert message.format(mine=mine) in str(caught.value)
