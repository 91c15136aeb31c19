"""Which rows are trained on, and which are validated."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from config import InputError
from data.dataset import TokenDataset, tokenize
from data.selection import Selection, training_rows, validation_rows
from tests.data.test_dataset import options, tokenizer_dir  # noqa: F401


def settings(**changes):
    """Return a section `data` with the keys that choose rows."""
    defaults = dict(
        train_files="t", val_files=None, val_size=0, train_max_samples=-1, val_max_samples=-1
    )
    return SimpleNamespace(**(defaults | changes))


def selected(selection, num_rows=100) -> set[int]:
    return set(np.flatnonzero(selection.mask(num_rows)).tolist())


@pytest.mark.parametrize("val_size, num_validated", [(10, 10), (0.1, 10), (0.001, 1), (99, 99)])
def test_rows_are_either_trained_on_or_validated(val_size, num_validated):
    data = settings(val_size=val_size)
    trained = selected(training_rows(data))
    validated = selected(validation_rows(data))
    assert len(validated) == num_validated
    assert trained | validated == set(range(100))
    assert not trained & validated


def test_a_smaller_selection_is_a_part_of_a_larger_one_and_is_random():
    few = selected(training_rows(settings(train_max_samples=10)))
    more = selected(training_rows(settings(train_max_samples=50)))
    assert len(few) == 10 and len(more) == 50
    assert few < more
    assert few != set(range(10))
    assert min(more) < 20 and max(more) >= 80
    assert selected(training_rows(settings(train_max_samples=1000))) == set(range(100))


def test_limits_of_rows_apply_after_the_split():
    whole = settings(val_size=0.5)
    limited = settings(val_size=0.5, train_max_samples=7, val_max_samples=3)
    for rows_of, count in ((training_rows, 7), (validation_rows, 3)):
        assert len(selected(rows_of(limited))) == count
        assert selected(rows_of(limited)) < selected(rows_of(whole))


def test_validation_files_are_validated_whole_unless_limited():
    assert validation_rows(settings()) is None
    assert validation_rows(settings(val_files="v")).has_all_rows
    assert len(selected(validation_rows(settings(val_files="v", val_max_samples=4)))) == 4


@pytest.mark.parametrize(
    "rows_of, changes, expected",
    [
        (training_rows, {}, "7 rows of t are trained on, chosen at random ("),
        (validation_rows, {"val_files": "v"}, "7 rows of v are validated, chosen at random ("),
        (validation_rows, {"val_size": 50}, "7 rows of t are validated, chosen at random ("),
    ],
    ids=["trained", "files of their own", "split off"],
)
def test_a_selection_describes_its_purpose_and_the_key_that_limits_it(rows_of, changes, expected):
    data = settings(train_max_samples=8, val_max_samples=9, **changes)
    description = rows_of(data).describe(7)
    assert description.startswith(expected)
    limit = "train_max_samples=8" if rows_of is training_rows else "val_max_samples=9"
    split = ", data.val_size=50" if "val_size" in changes else ""
    assert description.endswith(f"(data.{limit}{split})")


def test_a_selection_of_one_row_is_described_in_the_singular():
    description = training_rows(settings(train_max_samples=1)).describe(1)
    assert description.startswith("1 row of t is trained on, chosen at random (")


def test_only_a_selection_of_some_rows_has_settings_that_tokens_depend_on():
    assert Selection("t").settings == validation_rows(settings(val_files="v")).settings == []
    data = settings(val_size=5, train_max_samples=7)
    selections = [training_rows(data), validation_rows(data), training_rows(settings(val_size=5))]
    different = {tuple(selection.settings) for selection in selections}
    assert len(different) == len(selections)
    assert () not in different


@pytest.mark.parametrize("val_size", [100, 0.999])
def test_rows_to_train_on_must_be_left(val_size):
    with pytest.raises(InputError, match=f"data.val_size={val_size} leaves no row to train on"):
        training_rows(settings(val_size=val_size)).mask(100)


@pytest.fixture
def files(tmp_path):
    """Two files with rows of different lengths, so that a length identifies a row."""
    for name, lengths in (("a", range(1, 13)), ("b", range(13, 21))):
        rows = [{"prompt": "p", "response": "x" * length} for length in lengths]
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


@pytest.fixture
def load(tokenizer_dir, tmp_path):  # noqa: F811
    """Return a function: load(selection, option=value, ...) -> TokenDataset."""

    def load(selection, **changes):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
        chosen = options(prompt_key="prompt", response_key="response", **changes)
        return TokenDataset.load(
            tokenize(selection, tokenizer, chosen, tmp_path / "cache", tokenizer_dir)
        )

    return load


def test_selected_rows_of_all_files_are_tokenized_in_their_order(load, files, capsys):
    everything = load(files).lengths.tolist()
    assert everything == sorted(everything) and len(everything) == 20
    data = settings(train_files=files, val_size=5, train_max_samples=12)
    trained = load(training_rows(data))
    validated = load(validation_rows(data))
    lines = capsys.readouterr().out
    assert (
        f"12 rows of {files} are trained on, chosen at random (data.train_max_samples=12, " in lines
    )
    assert f"5 rows of {files} are validated, chosen at random (data.val_size=5)" in lines
    for dataset in (trained, validated):
        lengths = dataset.lengths.tolist()
        assert lengths == sorted(lengths) and set(lengths) < set(everything)
    assert len(trained) == 12 and len(validated) == 5
    assert not set(trained.lengths.tolist()) & set(validated.lengths.tolist())
    assert trained.name != validated.name


def test_a_selection_is_the_same_in_several_processes(load, files):
    selection = Selection(files, 15)
    serial = load(selection, num_proc=1)
    parallel = load(Selection(files, 15), num_proc=2, max_length=999)
    assert serial.name != parallel.name
    assert serial.lengths.tolist() == parallel.lengths.tolist()


def test_errors_name_the_lines_of_the_file_and_only_selected_rows(load, files):
    selection = Selection(files, 10)
    chosen = np.flatnonzero(selection.mask(20))
    chosen_in_a = chosen[chosen < 12]
    others_in_a = sorted({*range(12)} - {*chosen.tolist()})
    path = Path(files[0])
    lines = path.read_text().splitlines()
    lines[others_in_a[0]] = "no json"
    path.write_text("\n".join(lines))
    assert len(load(selection)) == 10
    lines[chosen_in_a[-1]] = "no json"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=f"a.jsonl:{chosen_in_a[-1] + 1}: "):
        load(selection)


def test_a_system_prompt_is_a_part_of_every_row_and_of_the_caches_name(load, files):
    plain = load(files)
    prompted = load(files, system_prompt="Be brief")
    assert prompted.name != plain.name
    extra = prompted.lengths - plain.lengths
    assert extra.min() == extra.max() > len("Be brief")
    assert prompted.stats["loss_tokens"] == plain.stats["loss_tokens"]


def test_rows_that_are_too_long_are_counted_among_the_selected_ones(load, files):
    longest = int(load(files).lengths.max())
    selection = Selection(files, 10)
    num_long = int((load(selection).lengths > longest - 10).sum())
    with pytest.raises(InputError, match=f"{num_long} of 10 rows are longer than data.max_length"):
        load(selection, max_length=longest - 10)
