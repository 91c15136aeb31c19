"""Prompts: the template's ids, rows that come back unchanged, and when a cache is used."""

import base64
import csv
import datetime
import json
import os
import random
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from config import InputError
from data import dataset, preference_dataset, prompts as prompts_module, reward_dataset
from data.chat.encoding import encode_together
from data.chat.tokenizer import ChatTokenizer
from data.dataset import tokenize
from data.prompts import PromptDataset, tokenize_prompts
from examples.arithmetic import make_rows, make_tokenizer

ROOT = Path(__file__).parents[2]
TOOLS_AND_THINKING = (
    "{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    "{% endif %}"
    "{%- if style is defined %}{{ style }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    make_tokenizer().save_pretrained(folder := tmp_path_factory.mktemp("tokenizer"))
    return folder


@pytest.fixture
def make(tokenizer_dir, tmp_path):
    """make(files, option=value, ...) -> the cache folder."""

    def make(files, tokenizer=None, **changes):
        files = [str(f) for f in files] if isinstance(files, list) else str(files)
        folder = "hub/name" if tokenizer else tokenizer_dir  # another tokenizer has no files there
        tokenizer = tokenizer or PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
        return tokenize_prompts(files, tokenizer, options(**changes), tmp_path / "cache", folder)

    return make


def options(**changes):
    return SimpleNamespace(
        **dict(
            messages_key="messages",
            prompt_key="prompt",
            images_key="images",
            tools_key="tools",
            template_kwargs_key="chat_template_kwargs",
            system_key="system",
            lost_fields="error",
            ignored_fields=[],
            system_prompt=None,
            teacher_prompt_key=None,
            max_prompt_length=200,
            truncation="error",
            num_proc=None,
            special_tokens_in_text=None,
        )
        | changes
    )


def write(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def rendered(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_rows_of_the_example(make, tmp_path):
    tokenizer = make_tokenizer()
    rows = make_rows()[1][:50]
    folder = make(write(tmp_path / "a.jsonl", rows))
    prompts = PromptDataset.load(folder)
    assert {p.name for p in folder.iterdir()} == {
        "input_ids.npy",
        "cu_seqlens.npy",
        "records.jsonl",
        "record_ends.npy",
        "file_rows.json",
        "stats.json",
        "sums.json",
        "uses.json",
    }
    assert len(prompts) == 50
    assert prompts.name == folder.name
    assert len(prompts.name) == 64
    expected = [
        tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, return_dict=False
        )
        for row in rows
    ]
    assert [p.input_ids for p in prompts] == expected
    assert type(prompts[0].input_ids[0]) is int
    assert [p.text for p in prompts] == [rendered(row["messages"][0]["content"]) for row in rows]
    assert [p.row for p in prompts] == rows
    assert prompts.lengths.dtype == np.int64
    assert prompts.lengths.tolist() == [len(ids) for ids in expected]
    assert prompts.stats == {
        "rows": 50,
        "dropped_long": 0,
        "truncated": 0,
        "tokens": sum(map(len, expected)),
        "max_length": max(map(len, expected)),
    }


def test_expected_lengths_are_those_drawn_last_or_their_mean(make, tmp_path):
    rows = [{"prompt": f"q{i}"} for i in range(10)]
    prompts = PromptDataset.load(make(write(tmp_path / "a.jsonl", rows)))
    assert prompts.expected_lengths([7, 3]) == [1, 1]
    prompts.drawn_lengths[3] = 20
    prompts.drawn_lengths[9] = 40
    assert prompts.expected_lengths(range(2, 5)) == [20, 20, 20]
    assert prompts.expected_lengths([9, 4, 3]) == [40, 30, 20]


def test_prompts_are_read_in_any_order(make, tmp_path):
    prompts = PromptDataset.load(
        make(write(tmp_path / "a.jsonl", [{"prompt": f"q{i}" * i + "?"} for i in range(40)]))
    )
    order = list(range(40))
    random.Random(0).shuffle(order)
    assert [prompts[i].row["prompt"] for i in order] == [f"q{i}" * i + "?" for i in order]
    assert prompts[-1] == prompts[39]
    assert prompts[np.int64(39)] == prompts[39]
    assert prompts[-40] == prompts[0]
    for index in (40, -41):
        with pytest.raises(IndexError):
            prompts[index]


@pytest.mark.parametrize(
    "row, text",
    [
        ({"prompt": "q"}, rendered("q")),
        ({"prompt": [user("q")]}, rendered("q")),
        ({"prompt": "q", "response": "r"}, rendered("q")),
        ({"messages": [user("q")]}, rendered("q")),
        ({"messages": [user("q"), assistant("a"), assistant("b")]}, rendered("q")),
        (
            {"messages": [user("q"), assistant("a"), user("r"), assistant("b") | {"loss_mask": 0}]},
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n" + rendered("r"),
        ),
        ({"messages": None, "prompt": "q"}, rendered("q")),
        ({"messages": [user("m")], "prompt": "p"}, rendered("m")),
        ({"instruction": "do", "input": "it", "output": "done"}, rendered("do\n\nit")),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            rendered("q"),
        ),
        ({"prompt": "q", "completion": "c"}, rendered("q")),
    ],
)
def test_replies_are_not_part_of_the_prompt(make, tmp_path, row, text):
    (prompt,) = PromptDataset.load(make(write(tmp_path / "a.jsonl", [row])))
    assert prompt.text == text
    assert prompt.row == row
    assert make_tokenizer().decode(prompt.input_ids) == text
    assert prompt.question
    assert text.endswith(rendered(prompt.question))


def test_other_columns(make, tmp_path):
    row = {"question": "q", "chat": None}
    (prompt,) = PromptDataset.load(
        make(write(tmp_path / "a.jsonl", [row]), prompt_key="question", messages_key="chat")
    )
    assert prompt.text == rendered("q")
    assert prompt.row == row
    assert prompt.question == "q"
    row = {"prompt": [user("q"), assistant("a")]}
    (prompt,) = PromptDataset.load(make(write(tmp_path / "a.jsonl", [row]), messages_key="prompt"))
    assert prompt.text == rendered("q")
    assert prompt.row == row


def test_the_question_is_the_text_of_the_last_message_of_the_user(make, tmp_path):
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]
    messages = [
        user("p"),
        assistant("a"),
        user(parts),
        assistant("b"),
        {"role": "tool", "content": "t"},
    ]
    path = write(tmp_path / "a.jsonl", [{"messages": messages}])
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOLS_AND_THINKING.replace("m.content", "m.content | string")
    (prompt,) = PromptDataset.load(make(path, tokenizer))
    assert prompt.question == "q\nr"


def test_tools_and_template_arguments(make, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOLS_AND_THINKING
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    rows = [
        {"prompt": "q", "tools": tools},
        {"prompt": "q", "enable_thinking": False},
        {"prompt": "q", "chat_template_kwargs": {"style": "Short: "}},
    ]
    prompts = PromptDataset.load(make(write(tmp_path / "a.jsonl", rows), tokenizer))
    arguments = [{"tools": tools}, {"enable_thinking": False}, {"style": "Short: "}]
    for prompt, row, extra in zip(prompts, rows, arguments, strict=True):
        assert prompt.row == row
        for tokenized, got in ((True, prompt.input_ids), (False, prompt.text)):
            assert got == tokenizer.apply_chat_template(
                [user("q")],
                add_generation_prompt=True,
                tokenize=tokenized,
                return_dict=False,
                **extra,
            )
    assert "add" in prompts[0].text
    assert prompts[1].text.endswith("</think>")
    assert prompts[2].text.endswith("Short: ")


def test_every_format_gives_the_same_prompts(make, tmp_path):
    rows = [
        {
            "prompt": [user(f"{i} \u00e9\u2028?")],
            "answer": str(i),
            "meta": {"level": i, "tags": ["a", "b"]},
        }
        for i in range(7)
    ]
    write(tmp_path / "a.jsonl", [rows[0], "", *rows[1:], "  "])
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    expected = list(PromptDataset.load(make(tmp_path / "a.jsonl")))
    assert [prompt.row for prompt in expected] == rows
    for name in ("a.json", "a.parquet", "saved"):
        assert list(PromptDataset.load(make(tmp_path / name))) == expected, name
    both = list(PromptDataset.load(make([tmp_path / "a.parquet", tmp_path / "a.jsonl"])))
    assert both == expected + expected


def test_csv_cells_are_text(make, tmp_path):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], ["1+6", "007"], ["two\nlines", "NA"]])
    prompts = PromptDataset.load(make(tmp_path / "a.csv"))
    assert [p.row for p in prompts] == [
        {"prompt": "1+6", "answer": "007"},
        {"prompt": "two\nlines", "answer": "NA"},
    ]
    assert [p.text for p in prompts] == [rendered("1+6"), rendered("two\nlines")]


def test_plain_text_without_a_chat_template(make, tmp_path):
    """They begin with the tokenizer's first special token, and lack the one at the end."""
    vocabulary = {
        c: i for i, c in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    framed = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    path = write(tmp_path / "a.jsonl", [{"prompt": "ab"}, {"prompt": "a</s>"}])
    ids = {name: vocabulary[name] for name in "ab"}
    assert [p.input_ids for p in PromptDataset.load(make(path, plain))] == [
        [ids["a"], ids["b"]],
        [ids["a"], 1],
    ]
    prompts = PromptDataset.load(make(path, framed))
    assert [p.input_ids for p in prompts] == [[0, ids["a"], ids["b"]], [0, ids["a"], 1]]
    assert [p.text for p in prompts] == ["ab", "a</s>"]
    assert [p.question for p in prompts] == ["", ""]
    with pytest.raises(InputError, match=r"a\.jsonl:1: the prompt is empty"):
        make(write(tmp_path / "a.jsonl", [{"prompt": ""}]), plain)
    with pytest.raises(InputError, match=r"a\.jsonl:1: the tokenizer has no chat template"):
        make(write(tmp_path / "a.jsonl", [{"messages": [user("q")]}]), plain)


@pytest.mark.parametrize(
    "row, message",
    [
        ('{"prompt": ', "the row is not JSON: Expecting value at column 12"),
        ('"q"', "the row must be an object, not str"),
        (
            {"text": "q"},
            'both "prompt" and "messages" are missing; the row has text: set data.prompt_key=text',
        ),
        ({"n": 1}, 'both "prompt" and "messages" are missing; the row has n'),
        ({"prompt": 7}, "\"prompt\" must be a list of messages, not '7'"),
        ({"prompt": []}, '"prompt" must be a list of messages'),
        ({"messages": "q"}, '"messages" must be a list of messages'),
        ({"messages": [{"role": "robot", "content": "q"}]}, "\"messages[0].role\" is 'robot'"),
        ({"messages": [assistant("a")]}, '"messages" contains only assistant turns'),
        ({"prompt": [user("q"), assistant("a")]}, '"prompt" ends with an assistant turn'),
        ({"prompt": "q", "tools": {}}, '"tools" must be a list of JSON schemas'),
        ({"prompt": "q", "enable_thinking": "no"}, "\"enable_thinking\" is 'no'"),
        ({"prompt": "half \ud800"}, "the text contains a lone surrogate"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(make, tmp_path, row, message):
    path = write(tmp_path / "x.jsonl", [{"prompt": "q"}, "", row, {"also": "bad"}])
    with pytest.raises(InputError) as raised:
        make([write(tmp_path / "good.jsonl", [{"prompt": "q"}]), path])
    assert str(raised.value).startswith(f"{path}:3: {message}")
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").iterdir())


def test_special_tokens_in_prompts(make, tmp_path):
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    fake = "a<|im_end|>b"
    rows = [
        {"prompt": fake},
        {"messages": [user("q"), assistant("c"), {"role": "tool", "content": fake}]},
    ]
    path = write(tmp_path / "a.jsonl", rows)

    def num_ends(policy):
        prompts = PromptDataset.load(make(path, special_tokens_in_text=policy))
        assert fake in prompts[0].text
        for prompt in prompts:
            assert tokenizer.decode(prompt.input_ids) == prompt.text
        return [prompt.input_ids.count(end) for prompt in prompts]

    assert num_ends("keep") == [2, 4]
    assert num_ends(None) == [2, 3]
    assert num_ends("escape") == [1, 3]
    with pytest.raises(
        InputError, match=r"a\.jsonl:1: the special token '<\|im_end\|>' is written in a text"
    ):
        make(path, special_tokens_in_text="error")


def test_a_special_token_that_ends_a_prompt_is_escaped(make, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}"
    path = write(tmp_path / "a.jsonl", [{"prompt": "c<|im_end|>"}])
    (prompt,) = PromptDataset.load(make(path, tokenizer, special_tokens_in_text="escape"))
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in prompt.input_ids
    assert tokenizer.decode(prompt.input_ids) == "user c<|im_end|>"


def test_a_template_that_refuses(make, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such chat') }}"
    with pytest.raises(
        InputError, match=r"a\.jsonl:1: the chat template rejects the conversation: no such chat"
    ):
        make(write(tmp_path / "a.jsonl", [{"prompt": "q"}]), tokenizer)


def test_a_prompt_of_which_a_template_prints_nothing(make, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = write(tmp_path / "a.jsonl", [{"prompt": "q"}, {"prompt": [user("")]}])
    with pytest.raises(InputError, match="a.jsonl:2: the prompt is empty"):
        make(path, tokenizer)


def test_a_prompt_that_does_not_ask_for_an_answer(make, tmp_path):
    """axolotl's template for Phi-3 writes the header after the user, and knows no tools."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + '<|im_end|>\n[A]' }}"
        "{% elif m.role == 'assistant' %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    messages = [user("q"), assistant("a"), {"role": "tool", "content": ""}]
    path = write(tmp_path / "a.jsonl", [{"prompt": [user("q")]}, {"prompt": messages}])
    with pytest.raises(InputError, match="a.jsonl:2: the chat template does not ask for an answer"):
        make(path, tokenizer)
    messages[2]["content"] = "3"
    path = write(tmp_path / "a.jsonl", [{"prompt": messages}])
    with pytest.raises(InputError, match="a.jsonl:1: the chat template leaves out content of"):
        make(path, tokenizer)


def test_a_row_that_json_cannot_hold(make, tmp_path):
    rows = [{"prompt": "q", "when": datetime.datetime(2020, 1, 1)}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(
        InputError, match=r"a\.parquet:1: the row cannot be .* as JSON: Object of type datetime"
    ):
        make(tmp_path / "a.parquet")


def test_files_that_cannot_be_read(make, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "bad.parquet").write_text("not parquet")
    for name, message in {
        "absent.jsonl": "no such file",
        "a.txt": "unknown suffix '.txt'",
        "empty.jsonl": "is empty",
        "blank.jsonl": "no row is left",
        "bad.parquet": "cannot be read",
    }.items():
        with pytest.raises(InputError, match=message) as raised:
            make(tmp_path / name)
        assert "\n" not in str(raised.value), name


# <|im_start|> "user\n" q <|im_end|> \n <|im_start|> "assistant\n": 6 tokens around the question.
LONG = [{"prompt": "q"}, {"prompt": "abcdefghij"}, {"prompt": "\u00e9" * 10}]


def test_truncation_error_lists_the_rows(make, tmp_path):
    path = write(tmp_path / "a.jsonl", LONG)
    with pytest.raises(InputError) as raised:
        make(path, max_prompt_length=15)
    assert str(raised.value) == (
        f"2 of 3 rows are longer than data.max_prompt_length=15: {path}:2 (16 tokens), "
        f"{path}:3 (26 tokens); raise it, or set data.truncation to left, right or drop"
    )
    assert len(PromptDataset.load(make(path, max_prompt_length=26))) == 3
    assert len(PromptDataset.load(make(path, max_prompt_length=None))) == 3


@pytest.mark.parametrize(
    "truncation, texts, counts",
    [
        ("drop", [rendered("q")], [1, 2, 0, 7]),
        (
            "left",
            [
                rendered("q"),
                rendered("abcdefghij")[len("<|im_start|>user\n") + 2 :],
                "\u00e9" * 4 + "<|im_end|>\n<|im_start|>assistant\n",
            ],
            [3, 0, 2, 7 + 12 + 12],
        ),
        (
            "right",
            [rendered("q"), "<|im_start|>user\nabcdefghij", "<|im_start|>user\n" + "\u00e9" * 5],
            [3, 0, 2, 7 + 12 + 12],
        ),
    ],
)
def test_truncation(make, tmp_path, truncation, texts, counts):
    tokenizer = make_tokenizer()
    prompts = PromptDataset.load(
        make(write(tmp_path / "a.jsonl", LONG), max_prompt_length=12, truncation=truncation)
    )
    assert [p.text for p in prompts] == texts == [tokenizer.decode(p.input_ids) for p in prompts]
    assert [p.row for p in prompts] == LONG[: len(prompts)]
    assert [prompts.stats[k] for k in ("rows", "dropped_long", "truncated", "tokens")] == counts
    for row, prompt in zip(LONG, prompts):
        whole = tokenizer.apply_chat_template(
            [user(row["prompt"])], add_generation_prompt=True, return_dict=False
        )
        assert prompt.input_ids == (whole[-12:] if truncation == "left" else whole[:12])
    with pytest.raises(
        InputError, match="no row is left: 3 rows are longer than data.max_prompt_length=6"
    ):
        make(write(tmp_path / "a.jsonl", LONG), max_prompt_length=6, truncation="drop")


def test_parallel_equals_serial(make, tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{"prompt": f"question {i}" * (1 + i % 5)} for i in range(40)]
    )
    serial = make(path, num_proc=1, max_prompt_length=30, truncation="drop")
    before = {p.name: p.read_bytes() for p in serial.iterdir()}
    shutil.rmtree(serial)
    parallel = make(path, num_proc=2, max_prompt_length=30, truncation="drop")
    assert parallel == serial
    assert {p.name: p.read_bytes() for p in parallel.iterdir()} == before


def test_a_cache_is_found_until_something_changes(make, tokenizer_dir, tmp_path):
    rows = [{"prompt": "q", "response": "a"}]
    path = write(tmp_path / "a.jsonl", rows)
    folder = make(path)
    stamp = (folder / "input_ids.npy").stat().st_mtime_ns
    assert make(path) == folder
    assert make(path, num_proc=2) == folder
    assert (folder / "input_ids.npy").stat().st_mtime_ns == stamp
    changed_folders = {
        make(path, max_prompt_length=300),
        make(path, truncation="left"),
        make(path, tools_key="functions"),
        make(write(path, [rows[0] | {"answer": 1}])),
    }
    write(path, rows)
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{#- edited #}"
    changed_folders.add(
        tokenize_prompts(str(path), tokenizer, options(), tmp_path / "cache", tokenizer_dir)
    )
    sft = options(response_key="response", train_on="all", max_length=200)
    changed_folders.add(
        tokenize(str(path), make_tokenizer(), sft, tmp_path / "cache", tokenizer_dir)
    )
    assert len(changed_folders | {folder}) == 7
    assert make(path) == folder
    assert len(list((tmp_path / "cache").iterdir())) == 7


COMPLETIONS = [{"prompt": "q", "response": "a"}, {"messages": [user("q"), assistant("a")]}]
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    "module, rows, set_by_module",
    [
        (dataset, COMPLETIONS, set()),
        (prompts_module, COMPLETIONS, set()),
        (preference_dataset, [PAIR, *(row | {"label": True} for row in COMPLETIONS)], {"train_on"}),
        (
            reward_dataset,
            [PAIR | {"margin": 2}, *(row | {"score": 1} for row in COMPLETIONS)],
            {"train_on", "label_key"},
        ),
    ],
    ids=["sft", "prompts", "preferences", "rewards"],
)
def test_every_option_that_tokenizes_a_row_is_part_of_the_caches_name(module, rows, set_by_module):
    names = set()

    class RecordedOptions(SimpleNamespace):
        """Options that record which of them are read."""

        def __getattribute__(self, name):
            value = super().__getattribute__(name)  # an error for options of other datasets
            names.add(name)
            return value

    sft = {"response_key": "response", "train_on": "all", "max_length": 200}
    preferences = {"chosen_key": "chosen", "rejected_key": "rejected", "label_key": "label"}
    rewards = {"margin_key": "margin", "score_key": "score"} if module is reward_dataset else {}
    recorded = RecordedOptions(**vars(options(**sft, **preferences, **rewards)))
    chat = ChatTokenizer(make_tokenizer())
    results = encode_together([module.tokenize_row(row, chat, recorded) for row in rows])
    assert not [result for result in results if isinstance(result, InputError)]
    read = {name for name in names if not name.startswith("__")}
    assert read - set_by_module == set(module.OPTIONS)


@pytest.mark.slow
def test_a_cache_hit_needs_no_datasets_library(make, tokenizer_dir, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "answer": 5}])
    folder = make(path)
    code = f"""if True:
        import sys
        sys.modules["datasets"] = None
        from types import SimpleNamespace
        from transformers import PreTrainedTokenizerFast
        from data.prompts import PromptDataset, tokenize_prompts
        tokenizer = PreTrainedTokenizerFast.from_pretrained({str(tokenizer_dir)!r})
        options = SimpleNamespace(**{vars(options())!r})
        cache, tokenizer_dir = {str(tmp_path / "cache")!r}, {str(tokenizer_dir)!r}
        folder = tokenize_prompts({str(path)!r}, tokenizer, options, cache, tokenizer_dir)
        assert PromptDataset.load(folder)[0].row["answer"] == 5
        heavy = {{"datasets", "pyarrow", "pandas"}}
        imported = [name for name in sys.modules if sys.modules[name]]
        assert not heavy & {{name.split(".")[0] for name in imported}}, "imported on a hit"
        print(folder)"""
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    *report, printed = out.stdout.splitlines()
    assert printed == str(folder), out.stderr
    assert "reads " in report[-1]


def test_fields_that_a_prompt_loses_are_reported(make, tmp_path, capsys):
    row = {"messages": [user("q") | {"mood": "glad"}, assistant("a")]}
    path = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(InputError, match="leaves out mood of message 0"):
        make(path)
    make(path, lost_fields="ignore")
    printed = capsys.readouterr().out
    assert "the chat template leaves out mood (1 row): see data.lost_fields" in printed


# -- prompts of a teacher --------------------------------------------------------------------------


def test_the_prompt_that_a_teacher_sees(make, tmp_path):
    """A string or messages, rendered like the row's prompt, with the row's tools and arguments."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOLS_AND_THINKING
    rows = [
        {"messages": [user("1+1=")], "hint": "2: 1+1=", "enable_thinking": False},
        {"prompt": "3+4=", "hint": [user("7: 3+4=")], "chat_template_kwargs": {"style": "7"}},
    ]
    file = write(tmp_path / "rows.jsonl", rows)
    prompts = PromptDataset.load(make(file, tokenizer, teacher_prompt_key="hint"))
    seen = [tokenizer.decode(prompt.teacher_ids) for prompt in prompts]
    start = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert seen == [start.format("2: 1+1=") + "<think></think>", start.format("7: 3+4=") + "7"]
    own = [tokenizer.decode(prompt.input_ids) for prompt in prompts]
    assert own == [start.format("1+1=") + "<think></think>", start.format("3+4=") + "7"]
    assert [prompt.row for prompt in prompts] == rows
    without = PromptDataset.load(make(file, tokenizer))
    assert [prompt.teacher_ids for prompt in without] == [None, None]


def test_the_prompt_of_a_teacher_keeps_the_system_message_of_the_policys_messages(make, tmp_path):
    system = {"role": "system", "content": "Add."}
    own_system = {"role": "system", "content": "Teach."}
    rows = [
        {"messages": [system, user("1+1=")], "hint": "2: 1+1="},
        {"prompt": [system, user("1+1=")], "hint": [user("2: 1+1=")]},
        {"prompt": [system, user("1+1=")], "hint": [own_system, user("2: 1+1=")]},
        {"prompt": "1+1=", "hint": "2: 1+1="},
    ]
    file = write(tmp_path / "rows.jsonl", rows)
    prompts = PromptDataset.load(make(file, teacher_prompt_key="hint"))
    seen = [make_tokenizer().decode(prompt.teacher_ids) for prompt in prompts]
    begin = "<|im_start|>system\n{}<|im_end|>\n"
    rest = "<|im_start|>user\n2: 1+1=<|im_end|>\n<|im_start|>assistant\n"
    expected = [begin.format(text) for text in ("Add.", "Add.", "Teach.")]
    assert seen == [start + rest for start in [*expected, ""]]


def test_the_prompt_of_a_teacher_may_be_json_text(make, tmp_path):
    messages = [user("7: 3+4=")]
    rows = [{"prompt": "3+4=", "hint": hint} for hint in (messages, json.dumps(messages))]
    file = write(tmp_path / "rows.jsonl", rows)
    first, second = PromptDataset.load(make(file, teacher_prompt_key="hint"))
    assert first.teacher_ids == second.teacher_ids
    file = write(tmp_path / "rows.jsonl", [{"prompt": "3+4=", "hint": str(messages)}])
    with pytest.raises(InputError, match="data.teacher_prompt_key=hint: .* the notation of Python"):
        make(file, teacher_prompt_key="hint")


def test_a_long_prompt_of_a_teacher_is_treated_as_prompts_are(make, tmp_path):
    rows = [
        {"messages": [user("1+1=")], "hint": "2" * 30 + " 1+1="},
        {"messages": [user("1+2=")], "hint": "3 1+2="},
    ]
    file = write(tmp_path / "rows.jsonl", rows)
    limit = {"teacher_prompt_key": "hint", "max_prompt_length": 20}
    with pytest.raises(InputError, match=r"1 of 2 rows are longer than .*rows.jsonl:1 \("):
        make(file, **limit)
    dropped = PromptDataset.load(make(file, truncation="drop", **limit))
    assert [prompt.row for prompt in dropped] == rows[1:]
    whole = PromptDataset.load(make(file, teacher_prompt_key="hint"))
    cut = PromptDataset.load(make(file, truncation="left", **limit))
    assert [prompt.teacher_ids for prompt in cut] == [p.teacher_ids[-20:] for p in whole]
    assert [prompt.input_ids for prompt in cut] == [prompt.input_ids for prompt in whole]


def test_a_prompt_of_a_teacher_that_loses_text_is_treated_as_prompts_are(make, tmp_path, capsys):
    losing = {"messages": [user("1+1=")], "hint": [user("2: 1+1=") | {"mood": "glad"}]}
    rows = [losing, {"messages": [user("1+2=")], "hint": "3: 1+2="}]
    file = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        InputError, match="teacher_prompt_key=hint: .* leaves out mood of message 0"
    ):
        make(file, teacher_prompt_key="hint")
    kept = PromptDataset.load(make(file, teacher_prompt_key="hint", lost_fields="drop"))
    assert [prompt.row for prompt in kept] == rows[1:]
    assert kept.stats["dropped_lost_fields"] == 1
    capsys.readouterr()
    whole = PromptDataset.load(make(file, teacher_prompt_key="hint", lost_fields="ignore"))
    assert len(whole) == 2
    assert "the chat template leaves out mood (1 row)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "hint, problem",
    [
        (None, '"hint" is missing or empty'),
        ("", '"hint" is missing or empty'),
        (7, "data.teacher_prompt_key=hint: "),
        ([{"role": "user"}], "data.teacher_prompt_key=hint: "),
    ],
)
def test_a_malformed_prompt_of_a_teacher_is_one_line(make, tmp_path, hint, problem):
    file = write(tmp_path / "rows.jsonl", [{"messages": [user("1+1=")], "hint": hint}])
    with pytest.raises(InputError) as error:
        make(file, teacher_prompt_key="hint")
    assert str(error.value).startswith(f"{file}:1: ")
    assert problem in str(error.value)


PNG = BytesIO()
Image.new("RGB", (4, 4)).save(PNG, "png")
PIXELS = PNG.getvalue()


def test_bytes_that_are_no_image_are_an_error(make, tmp_path):
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"prompt": "q", "answer": b"42"}]).to_parquet(path)
    message = "rows.parquet:1: the column \"answer\" has bytes .b'42'"
    with pytest.raises(InputError, match=message):
        make(path)
    datasets.Dataset.from_list([{"prompt": "q", "picture": PIXELS}]).to_parquet(path)
    assert PromptDataset(make(path))[0].row == {"prompt": "q", "picture": None}


def test_texts_that_hold_no_pixels_reach_the_reward(make, tmp_path):
    encoded = base64.b64encode(PIXELS).decode()
    texts = {"base64": "aGVsbG8=", "url": "data:text/plain,hello", "path": "[1,2]"}
    pixels = {"base64": encoded, "url": f"data:image/png;base64,{encoded}"}
    row = {"prompt": "q", "task": texts, "shown": pixels}
    path = write(tmp_path / "a.jsonl", [row])
    kept = PromptDataset(make(path))[0].row
    assert kept == row | {"shown": {"base64": None, "url": None}}


@pytest.mark.parametrize("column", ["input", "context"])
def test_an_alpaca_prompt_needs_no_output(make, tmp_path, column):
    rows = [
        {"instruction": "add", column: "1+2", "answer": "3"},
        {"instruction": "add 1+2", column: "", "history": [["hi", "ho"]], "answer": "3"},
    ]
    first, second = PromptDataset(make(write(tmp_path / "a.jsonl", rows)))
    assert first.question == "add\n\n1+2"
    assert "ho<|im_end|>" in second.text and second.question == "add 1+2"
    assert first.row == rows[0]
