"""From files of each format to memory-mapped arrays.

Which rows are kept, which errors name file and line, and when a cache is used again.
"""

import csv
import gc
import gzip
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from config import InputError
from data import dataset as dataset_module
from data.cache import ensure_cached
from data.dataset import TokenDataset, tokenize
from data.lengths import kept_tokens
from data.workers import forking_workers

CHATML = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}
{{- c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    """A tokenizer with a token for each byte and the two of ChatML, to count lengths by eye."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make(tokenizer_dir, tmp_path):
    """Return a function: make(files, option=value, ...) -> the cache folder."""

    def make(files, **changes):
        files = [str(f) for f in files] if isinstance(files, list) else str(files)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
        return tokenize(files, tokenizer, options(**changes), tmp_path / "cache", tokenizer_dir)

    return make


def options(**changes):
    return SimpleNamespace(
        **dict(
            messages_key="messages",
            prompt_key="prompt",
            response_key="response",
            images_key="images",
            tools_key="tools",
            num_proc=None,
            template_kwargs_key="chat_template_kwargs",
            system_key="system",
            lost_fields="error",
            ignored_fields=[],
            system_prompt=None,
            train_on="all",
            max_length=200,
            truncation="error",
            special_tokens_in_text=None,
        )
        | changes
    )


def chat(*texts):
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
        ]
    }


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def texts(folder, tokenizer_dir, field="loss_mask"):
    """Return the tokens of each row where a field is 1, decoded."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    data = TokenDataset.load(folder)
    rows = [data.batch([i]) for i in range(len(data))]
    return [tokenizer.decode(row.input_ids[row.fields[field].bool()]) for row in rows]


ROWS = [chat("q", "first"), chat("q", "second", "r", "third")]
ANSWERS = ["first<|im_end|>", "second<|im_end|>third<|im_end|>"]


def test_every_format_gives_the_same_arrays(make, tokenizer_dir, tmp_path):
    write(tmp_path / "a.jsonl", [ROWS[0], "", ROWS[1], "  "])
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=2))
    write(tmp_path / "lines.json", ROWS)
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    write(tmp_path / "b.jsonl", [ROWS[1]])
    for files in ("a.jsonl", "array.json", "lines.json", "a.parquet", "saved"):
        assert texts(make(tmp_path / files), tokenizer_dir) == ANSWERS, files
    both_files = make([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert texts(both_files, tokenizer_dir) == [*ANSWERS, ANSWERS[1]]


@pytest.mark.parametrize(
    "content, problem",
    [
        (b'{"splits": ["tra', "is damaged or incomplete: Unterminated string"),
        (b"\xff", "is damaged or incomplete: 'utf-8' codec"),
        (b"[]", "must hold a JSON object, not list"),
        (b'{"splits": []}', "names no splits: save the data set again"),
        (b'{"splits": "train"}', "names no splits: save the data set again"),
    ],
)
def test_a_damaged_list_of_splits_is_one_line(make, tmp_path, content, problem):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"^{tmp_path}/saved/dataset_dict.json {problem}"):
        make(tmp_path / "saved")


def test_names_of_files(make, tokenizer_dir, tmp_path):
    """Byte-order marks, .gz, patterns, directories, and data sets saved with one or more splits."""
    (tmp_path / "many").mkdir()
    write(tmp_path / "many" / "1.jsonl", ROWS[:1])
    write(tmp_path / "many" / "2.jsonl", ROWS[1:])
    (tmp_path / "many" / "README.md").write_text("# not data")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "mark.jsonl").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "mark.json").write_text(json.dumps(ROWS), encoding="utf-8-sig")
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "array.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"all": rows}).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    for name in (
        "many",
        "many/*.jsonl",
        "m*y/?.jsonl",
        "**/[12].jsonl",
        "mark.jsonl",
        "mark.json",
        "packed.jsonl.gz",
        "array.json.gz",
        "one",
        "splits/test",
    ):
        assert texts(make(tmp_path / name), tokenizer_dir) == ANSWERS, name
    with pytest.raises(InputError) as raised:
        make(tmp_path / "splits")
    assert str(raised.value) == (
        f"{tmp_path}/splits holds the splits train, test: choose one, e.g. {tmp_path}/splits/train"
    )
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode() + b"nonsense\n"))
    with pytest.raises(InputError, match=r"packed\.jsonl\.gz:3: the row is not JSON"):
        make(tmp_path / "packed.jsonl.gz")
    (tmp_path / "packed.jsonl.gz").write_bytes(b"not packed")
    with pytest.raises(InputError, match=r"packed\.jsonl\.gz: the file cannot be read"):
        make(tmp_path / "packed.jsonl.gz")


def test_csv_cells_are_text(make, tokenizer_dir, tmp_path):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [["prompt", "response"], ["1+6", "007"], ["two\nlines", "NA"], ["empty", ""]]
        )
    assert texts(make(tmp_path / "a.csv"), tokenizer_dir) == [
        "007<|im_end|>",
        "NA<|im_end|>",
        "<|im_end|>",
    ]


def test_arrays_and_batches(make, tmp_path):
    folder = make(write(tmp_path / "a.jsonl", ROWS))
    data = TokenDataset.load(folder)
    assert {p.name for p in folder.iterdir()} == {
        "cu_seqlens.npy",
        "file_rows.json",
        "input_ids.npy",
        "loss_mask.npy",
        "stats.json",
        "sums.json",
        "uses.json",
    }
    assert [a.dtype for a in (data.input_ids, data.loss_mask, data.cu_seqlens)] == [
        np.int32,
        np.uint8,
        np.int64,
    ]
    assert len(data) == 2
    assert data.lengths.dtype == np.int64
    assert data.lengths.sum() == data.stats["tokens"]
    assert data.stats == {
        "rows": 2,
        "dropped_no_loss": 0,
        "dropped_long": 0,
        "truncated": 0,
        "tokens": 82,
        "loss_tokens": 6 + 7 + 6,
        "max_length": 55,
    }
    batch = data.batch([1, 0, 1])
    assert batch.cu_seqlens.tolist() == [0, 55, 82, 137]
    assert batch.input_ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int64
    assert set(batch.fields) == {"loss_mask", "answer_mask"}
    for field in batch.fields.values():
        assert field.dtype == torch.float32
        assert field.shape == (137,)
    assert batch.input_ids[:55].equal(batch.input_ids[82:])
    assert batch.input_ids[55:82].equal(data.batch([0]).input_ids)
    empty = data.batch([])
    assert empty.input_ids.shape == (0,)
    assert empty.cu_seqlens.tolist() == [0]


def test_answer_mask_is_the_last_turn(make, tokenizer_dir, tmp_path):
    folder = make(write(tmp_path / "a.jsonl", ROWS))
    assert texts(folder, tokenizer_dir, "answer_mask") == ["first<|im_end|>", "third<|im_end|>"]


def test_exact_match_asks_for_the_last_of_many_answers(make, tokenizer_dir, tmp_path):
    """With more than the last turn in the mask, hardly any row would be answered exactly."""
    messages = []
    for number in ("one", "two", "three"):
        messages.append({"role": "user", "content": "q"})
        messages.append({"role": "assistant", "content": number})
    folder = make(write(tmp_path / "a.jsonl", [{"messages": messages}]))
    assert texts(folder, tokenizer_dir, "answer_mask") == ["three<|im_end|>"]


def test_arguments_of_different_tool_calls_stay_apart(make, tokenizer_dir, tmp_path):
    def row(**arguments):
        call = {"function": {"name": "f", "arguments": arguments}}
        return {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [call]},
            ]
        }

    rows = [row(a=1), row(b="x"), row(a="mixed"), row(c=None)]
    expected = ['f{"a": 1}<|im_end|>', 'f{"b": "x"}<|im_end|>', 'f{"a": "mixed"}<|im_end|>']
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for path in (write(tmp_path / "a.jsonl", rows), tmp_path / "a.json"):
        assert texts(make(path), tokenizer_dir)[:3] == expected


def test_unicode_line_separators_do_not_end_a_line(make, tokenizer_dir, tmp_path):
    path = write(tmp_path / "a.jsonl", [chat("q", "a\u2028b\x85c\x0bd"), "nonsense"])
    with pytest.raises(InputError, match=r"a\.jsonl:2: the row is not JSON"):
        make(path)
    assert texts(make(write(path, [chat("q", "a\u2028b\x85c")])), tokenizer_dir) == [
        "a\u2028b\x85c<|im_end|>"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row, message",
    [
        ('{"messages": [', "the row is not JSON: Expecting value at column 15"),
        ("[1]", "the row must be an object, not list"),
        ({"text": "x"}, '"messages" is missing'),
        ({"messages": [{"role": "robot", "content": "x"}]}, "\"messages[0].role\" is 'robot'"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(make, tmp_path, row, message):
    path = write(tmp_path / "x.jsonl", [ROWS[0], "", ROWS[1], row, {"also": "bad"}])
    good = write(tmp_path / "good.jsonl", ROWS)
    for num_proc in (1, 2):
        with pytest.raises(InputError) as raised:
            make([good, path], num_proc=num_proc)
        assert str(raised.value).startswith(f"{path}:4: {message}")
        assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").iterdir())


def test_rows_of_tables_are_counted_from_1(make, tmp_path):
    datasets.Dataset.from_list([chat("q", "a"), {"messages": None}]).to_parquet(
        tmp_path / "a.parquet"
    )
    with pytest.raises(InputError, match=r'a\.parquet:2: "messages" is missing'):
        make(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps([chat("q", "a"), 3]))
    with pytest.raises(InputError, match=r"a\.json:2: the row must be an object, not int"):
        make(tmp_path / "a.json")


def test_files_that_cannot_be_read(make, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "bad.parquet").write_text("not parquet")
    (tmp_path / "bad.json").write_text("[{]")
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}\n')
    (tmp_path / "header.csv").write_text("prompt,response\n")
    (tmp_path / "none").mkdir()
    for name, message in {
        "absent.jsonl": "no such file",
        "a.txt": "unknown suffix '.txt'",
        "empty.jsonl": "is empty",
        "none.json": "no rows",
        "blank.jsonl": "no row is left",
        "bad.parquet": "cannot be read",
        "bad.json": "cannot be read",
        "latin.jsonl": "cannot be read",
        "header.csv": "has no rows",
        "none": "not written by save_to_disk",
        "*.jsonlines": "no such file",
    }.items():
        with pytest.raises(InputError, match=message) as raised:
            make(tmp_path / name)
        assert "\n" not in str(raised.value), name


SHAPES = {
    "Alpaca": [
        (
            {"instruction": "add", "input": "1+2", "output": "3"},
            "user\nadd\n\n1+2<|im_end|>",
            ["3"],
        ),
        (
            {
                "instruction": "hi",
                "input": "",
                "output": "ho",
                "system": "s",
                "history": [["q", "a"]],
            },
            "system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>",
            ["a", "ho"],
        ),
    ],
    "ShareGPT": [
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "system": "s",
            },
            "system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>",
            ["a"],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "2"},
                    {"from": "gpt", "value": "b"},
                ],
            },
            "tool\n2<|im_end|>",
            ['f{"a": 1}', "b"],
        ),
        ({"conversations": chat("q", "a")["messages"]}, "user\nq<|im_end|>", ["a"]),
    ],
    "prompt/completion": [
        ({"prompt": "q", "completion": "a"}, "user\nq<|im_end|>", ["a"]),
        (
            {
                "prompt": chat("q", "x", "r")["messages"],
                "completion": [{"role": "assistant", "content": "a"}],
            },
            "assistant\nx<|im_end|>",
            ["a"],
        ),
    ],
}


@pytest.mark.parametrize("name", SHAPES)
def test_data_sets_in_common_shapes_are_read_as_they_are(
    make, tokenizer_dir, tmp_path, capsys, name
):
    rows, questions, answers = zip(*SHAPES[name], strict=True)
    write(tmp_path / "a.jsonl", [*rows, chat("q", "plain")])
    table = [dict.fromkeys([*rows[0], "messages"]) | row for row in (rows[0], chat("q", "plain"))]
    datasets.Dataset.from_list(table).to_parquet(tmp_path / "a.parquet")
    folder = make(tmp_path / "a.jsonl")
    expected = []
    for row in [*answers, ["plain"]]:
        expected.append("".join(f"{answer}<|im_end|>" for answer in row))
    assert texts(folder, tokenizer_dir) == expected
    assert texts(make(tmp_path / "a.parquet"), tokenizer_dir) == [expected[0], expected[-1]]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    data = TokenDataset.load(folder)
    for i, text in enumerate(questions):
        assert f"<|im_start|>{text}" in tokenizer.decode(data.batch([i]).input_ids)
    assert data.stats[name] == len(rows)
    assert data.stats["rows"] == len(rows) + 1
    capsys.readouterr()
    make(tmp_path / "a.jsonl")  # a cache reports it, too
    assert capsys.readouterr().out.startswith(f"data: {len(rows)} rows are in the {name} format: ")


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"question": "q", "answer": "a", "level": 3},
            '"messages" is missing; the row has question, answer, level: set '
            "data.prompt_key=question data.response_key=answer",
        ),
        (
            {"prompt": "q", "text": "a", "source": "s"},
            '"response" is missing; the row has prompt, text, source: set data.response_key=text',
        ),
        (
            {"id": 3, "dialog": chat("q", "a")["messages"]},
            '"messages" is missing; the row has id, dialog: set data.messages_key=dialog',
        ),
        (
            {"prompt": None, "n": 1},
            '"messages" is missing; the row has n: name the column of messages in '
            "data.messages_key",
        ),
        (
            {"question": "q", "n": 1},
            '"messages" is missing; the row has question, n: name the column of messages in '
            "data.messages_key",
        ),
        (
            {"conversations": [{"from": "robot", "value": "q"}]},
            "\"messages[0].from\" is 'robot': must be one of human, gpt,",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "f(1)"}]},
            "function_call 'f(1)', which is not JSON",
        ),
    ],
)
def test_errors_of_rows_in_an_unknown_shape_name_the_key_to_set(make, tmp_path, row, message):
    path = write(tmp_path / "a.jsonl", [ROWS[0], row])
    with pytest.raises(InputError) as raised:
        make(path)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    if "set data." in message:  # and the keys that it names do
        keys = dict(
            pair.removeprefix("data.").split("=") for pair in message.partition(": set ")[2].split()
        )
        make(write(tmp_path / "b.jsonl", [row]), **keys)


def test_keys_that_are_set_exclude_other_shapes(make, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"instruction": "q", "output": "a", "prompt": None}])
    make(path)
    for keys in ({"response_key": "reply"}, {"prompt_key": "ask"}, {"messages_key": "talk"}):
        with pytest.raises(
            InputError, match="is missing; the row has instruction, output: set data"
        ):
            make(path, **keys)


LONG = [
    chat("q", "a"),
    chat("q", "b" * 20),
    chat("q" * 30, "c"),
    chat("q", "d" * 30),
]  # 23, 42, 52 and 52 tokens


def test_truncation_error_lists_the_rows(make, tmp_path):
    first = write(tmp_path / "a.jsonl", LONG[:1] + LONG[1:2] * 3)
    second = write(tmp_path / "b.jsonl", LONG[2:])
    with pytest.raises(InputError) as raised:
        make([first, second], max_length=41)
    assert str(raised.value) == (
        f"5 of 6 rows are longer than data.max_length=41: {first}:2 (42 tokens), {first}:3 "
        f"(42 tokens), {first}:4 (42 tokens), {second}:1 (52 tokens), {second}:2 (52 tokens); "
        "raise it, or set data.truncation to left, right or drop"
    )
    make([first, second], max_length=52)
    make([first, second], max_length=None)


def test_truncation(make, tokenizer_dir, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", LONG)

    def truncated(truncation):
        folder = make(path, max_length=30, truncation=truncation)
        stats = TokenDataset.load(folder).stats
        counts = [stats[k] for k in ("rows", "dropped_no_loss", "dropped_long", "truncated")]
        return texts(folder, tokenizer_dir), counts

    assert truncated("drop") == (["a<|im_end|>"], [1, 0, 3, 0])
    dropped = "data: dropped, because they are longer than data.max_length=30: 3 rows"
    assert dropped in capsys.readouterr().out
    truncated("drop")
    assert dropped in capsys.readouterr().out, "also if the tokens are in the cache"
    # There are 20 tokens before an answer, so 10 of it fit; after the long question, none does.
    assert truncated("right") == (["a<|im_end|>", "b" * 10, "d" * 10], [3, 1, 0, 2])
    # The last 30 tokens: the newline after the turn is not trained, and nothing predicts the first
    # token.
    answers = ["a", "b" * 20, "c", "d" * 27]
    assert "cut to data.max_length=30 (data.truncation=right): 2 rows" in capsys.readouterr().out
    assert truncated("left") == ([f"{answer}<|im_end|>" for answer in answers], [4, 0, 0, 3])


def test_rows_without_a_trained_token_are_dropped(make, tokenizer_dir, tmp_path):
    masked = chat("q", "masked")
    masked["messages"][1]["loss_mask"] = 0
    folder = make(write(tmp_path / "a.jsonl", [chat("q"), ROWS[0], masked]))
    assert texts(folder, tokenizer_dir) == ANSWERS[:1]
    assert TokenDataset.load(folder).stats["dropped_no_loss"] == 2
    with pytest.raises(
        InputError,
        match="no row is left: 0 rows are longer than data.max_length=200, 2 have no trained",
    ):
        make(write(tmp_path / "a.jsonl", [chat("q"), "", masked]))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_parallel_equals_serial(make, tmp_path):
    path = write(
        tmp_path / "a.jsonl", [chat(f"question {i}", "answer " * (i % 7)) for i in range(60)]
    )
    serial = make(path, num_proc=1)
    before = contents(serial)
    shutil.rmtree(serial)
    parallel = make(path, num_proc=2)
    assert parallel == serial
    assert contents(parallel) == before


def test_a_cache_is_found_until_something_changes(make, tokenizer_dir, tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    folder = make(path)
    stamp = (folder / "input_ids.npy").stat().st_mtime_ns
    assert make(path) == folder
    assert make(path, num_proc=2) == folder
    assert (folder / "input_ids.npy").stat().st_mtime_ns == stamp
    other_folders = {
        make(path, train_on="last"),
        make(path, max_length=300),
        make(path, truncation="left"),
        make(write(path, ROWS[:1])),
    }
    write(path, ROWS)
    template = tokenizer_dir / "chat_template.jinja"
    original = template.read_text()
    template.write_text(original + "{#- edited #}")
    other_folders.add(make(path))
    template.write_text(original)
    assert len(other_folders | {folder}) == 6
    assert make(path) == folder
    assert len(list((tmp_path / "cache").iterdir())) == 6


@pytest.mark.slow
def test_a_killed_tokenization_leaves_nothing_for_good(make, tokenizer_dir, tmp_path):
    path = write(tmp_path / "a.jsonl", [chat("question", "answer " * 20)] * 400)
    cache = tmp_path / "cache"
    code = f"""if True:
        import os, sys, time
        from types import SimpleNamespace
        from transformers import PreTrainedTokenizerFast
        import data.dataset, data.tokenization

        def wait_for_input(*_):
            print("ready", flush=True)
            sys.stdin.read()

        if sys.argv[1] == "wait":
            data.tokenization.os.getpid = lambda: 7  # as in containers
        tokenizer = PreTrainedTokenizerFast.from_pretrained({str(tokenizer_dir)!r})
        options = SimpleNamespace(**{vars(options())!r})
        if sys.argv[1] == "wait":
            data.tokenization.write_arrays = wait_for_input
        if sys.argv[1] == "work":
            options.num_proc = 2
            wait = lambda *_: (os.write(1, b"ready\\n"), time.sleep(600))
            data.dataset.SPEC = data.dataset.SPEC._replace(tokenize_row=wait)
        folders = {str(cache)!r}, {str(tokenizer_dir)!r}
        print(data.dataset.tokenize({str(path)!r}, tokenizer, options, *folders))
        """
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

    def start(how="wait"):
        process = subprocess.Popen(
            [*command, how],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert "ready\n" in iter(process.stdout.readline, ""), "ended too early"
        return process

    killed = start()
    alive = start()
    assert len(list(cache.glob("*.tmp"))) == 2, "two runs, one pid: they would share a folder"
    killed.kill()
    killed.wait()
    folder = make(path)
    (remaining,) = cache.glob("*.tmp")  # of the run that still lives
    assert {p.name for p in cache.iterdir()} == {
        folder.name,
        remaining.name,
        remaining.with_suffix(".lock").name,
    }
    assert len(TokenDataset.load(folder)) == 400
    alive.kill()
    alive.wait()
    make(write(path, ROWS))
    assert not list(cache.glob("*.tmp"))
    assert not list(cache.glob("*.lock"))
    write(path, [chat("question", "answer " * 20)] * 300)
    working = start("work")  # with processes of its own, which would keep the folder
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    forked = [pid for pid in pids if process_state(pid)[1:] == [str(working.pid)]]
    working.kill()
    working.wait()
    assert len(forked) >= 2
    assert list(cache.glob("*.tmp"))
    deadline = time.monotonic() + 60
    while any(process_state(pid)[:1] not in ([], ["Z"]) for pid in forked):
        assert time.monotonic() < deadline, "they live on"
        time.sleep(0.05)
    make(path)
    assert not list(cache.glob("*.tmp"))


def test_runs_that_write_the_same_cache_at_the_same_time_share_it(tmp_path):
    def make(rank, barrier, failures):
        def write(work):
            (work / "datasets").mkdir()
            (work / "tokens").write_text("tokens")
            barrier.wait(60)

        try:
            for i in range(30):
                assert (ensure_cached(tmp_path / str(i), write) / "tokens").read_text() == "tokens"
        except BaseException as error:
            failures.put(repr(error))
            barrier.abort()

    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    failures = context.Queue()
    runs = [context.Process(target=make, args=(rank, barrier, failures)) for rank in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert failures.empty(), failures.get()
    assert {path.name for path in tmp_path.iterdir()} == set(map(str, range(30)))


def process_state(pid):
    """Return [state, parent] of a process, empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return []


def test_a_damaged_cache_is_written_again(make, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", ROWS)
    folder = make(path)
    intact = contents(folder)
    flipped = bytearray(intact["input_ids.npy"])
    flipped[-1] ^= 1
    for damage in (
        lambda: (folder / "input_ids.npy").write_bytes(flipped),
        lambda: (folder / "stats.json").write_text(""),
        (folder / "cu_seqlens.npy").unlink,
        (folder / "sums.json").unlink,
    ):
        damage()
        capsys.readouterr()
        assert make(path) == folder
        assert contents(folder) == intact
        assert f"data: {folder} is damaged" in capsys.readouterr().out
    make(path)
    assert "damaged" not in capsys.readouterr().out


def test_ends_of_generation_are_part_of_the_cache(make, tokenizer_dir, tmp_path):
    """Which token ends a turn is eos_token_id in the model's directory."""
    path = write(tmp_path / "a.jsonl", ROWS)
    file = tokenizer_dir / "generation_config.json"
    folder = make(path)
    try:
        for ids in (0, [0, 1]):
            file.write_text(json.dumps({"eos_token_id": ids}))
            assert make(path) != folder
    finally:
        file.unlink()
    assert make(path) == folder


def test_special_tokens_in_a_text_are_an_error_of_their_row(make, tmp_path):
    path = write(tmp_path / "a.jsonl", [ROWS[0], chat("see <|im_end|>", "a")])
    assert make(path) != make(path, special_tokens_in_text="escape")
    with pytest.raises(
        InputError, match=r"a\.jsonl:2: the special token '<\|im_end\|>' is written in a text"
    ):
        make(path, special_tokens_in_text="error")


def test_tokenizers_of_the_hub_are_told_apart(tokenizer_dir, tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    folders = []
    for tokens in ([], ["<|new|>"]):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
        tokenizer.add_tokens(tokens)
        folders.append(tokenize([str(path)], tokenizer, options(), tmp_path / "cache", "hub/name"))
    assert folders[0] != folders[1]


@pytest.mark.slow
def test_a_cache_hit_needs_no_datasets_library(make, tokenizer_dir, tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    folder = make(path)
    code = f"""if True:
        import sys
        sys.modules["datasets"] = None
        from types import SimpleNamespace
        from transformers import PreTrainedTokenizerFast
        from data.dataset import TokenDataset, tokenize
        tokenizer = PreTrainedTokenizerFast.from_pretrained({str(tokenizer_dir)!r})
        options = SimpleNamespace(**{vars(options())!r})
        cache = {str(tmp_path / "cache")!r}
        folder = tokenize({str(path)!r}, tokenizer, options, cache, {str(tokenizer_dir)!r})
        assert len(TokenDataset.load(folder).batch([0, 1])) == 2
        imported = {{name.split(".")[0] for name, module in sys.modules.items() if module}}
        assert not imported & {{"datasets", "pyarrow", "pandas"}}, "imported on a hit"
        print(folder)"""
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=os.environ, capture_output=True, text=True
    )
    *report, printed = out.stdout.splitlines()
    assert printed == str(folder), out.stderr
    assert "reads " in report[-1]


def test_options_of_a_run_and_plain_ones_name_the_same_cache(make, tokenizer_dir, tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    settings = OmegaConf.create(vars(options(ignored_fields=["a", "b"])))
    folder = tokenize(str(path), tokenizer, settings, tmp_path / "cache", tokenizer_dir)
    assert folder == make(path, ignored_fields=["a", "b"])
    assert folder != make(path, ignored_fields=["a"])


@pytest.mark.parametrize("at_once", [1, 2, 5, 1000])
def test_the_end_tokens_that_rows_teach(make, tokenizer_dir, tmp_path, monkeypatch, at_once):
    """Found in parts of the tokens, whose borders are anywhere in a turn."""
    monkeypatch.setattr(dataset_module, "TOKENS_AT_ONCE", at_once)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (start,) = {tokenizer.convert_tokens_to_ids("<|im_start|>")}
    (letter,) = tokenizer("a")["input_ids"]
    data = TokenDataset.load(make(write(tmp_path / "a.jsonl", ROWS)))
    assert data.trained_ends([end, start, letter]) == {end}
    assert data.trained_ends([start]) == set()
    assert data.trained_ends([]) == set()


@pytest.mark.parametrize(
    "length, limit, truncation, kept",
    [
        (10, None, "error", range(10)),
        (10, 10, "error", range(10)),
        (10, 4, "left", range(6, 10)),
        (10, 4, "right", range(4)),
        (10, 4, "drop", range(0)),
        (10, 4, "error", range(0)),
    ],
)
def test_tokens_that_a_long_row_keeps(length, limit, truncation, kept):
    assert range(length)[kept_tokens(length, limit, truncation)] == kept


def test_an_abandoned_folder_is_removed_and_one_in_use_is_not(tmp_path):
    """A process that was killed leaves a folder whose lock is free."""
    for name in ("abandoned", "used"):
        (tmp_path / f"{name}.x.tmp").mkdir()
        (tmp_path / f"{name}.x.tmp" / "file").write_text("x")
        (tmp_path / f"{name}.x.lock").touch()
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", code, str(tmp_path / "used.x.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"locked\n"
        ensure_cached(tmp_path / "new", lambda work: (work / "datasets").mkdir())
    finally:
        holder.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "used.x.lock", "used.x.tmp"]
    assert (tmp_path / "new" / "sums.json").read_text() == "{}"


@pytest.mark.parametrize("is_frozen", [True, False])
def test_tokenizing_unfreezes_only_what_it_froze_itself(is_frozen):
    """A fork freezes what it must not destroy, and then tokenizes."""
    gc.unfreeze()
    try:
        if is_frozen:
            gc.freeze()
        with forking_workers():
            assert gc.get_freeze_count() > 0
        # All objects are unfrozen at once, or none.
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.freeze()  # as the suite's start did
