"""The lines about the columns of a file: what is counted, in which order, and what is advised."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from config import InputError, load
from data.columns import (
    RowUse,
    check_column_keys,
    filled_columns,
    report_lines,
    to_json,
    unused_row_lines,
    uses_of_file,
)

NOTHING = {name: () for name in RowUse._fields}
CHAT = NOTHING | {
    "columns": ("messages",),
    "fields": ("role", "content"),
    "has_system_column": False,
    "has_empty_answer": False,
}


def use_of(*rows: tuple[dict, int]) -> dict:
    """Return the use of a file from (changes of CHAT, number of rows) for each kind of row."""
    uses = []
    for changes, number in rows:
        uses.append({"values": to_json(RowUse(**(CHAT | changes))), "counts": number})
    return uses_of_file(uses)


def lines_about(*uses: dict, is_training: bool = True) -> list[str]:
    """Return the lines about the files a.jsonl, b.jsonl and so on."""
    paths = [Path(f"/data/{letter}.jsonl") for letter in "abcd"[: len(uses)]]
    return list(report_lines(paths, [*uses], is_training))


@pytest.mark.parametrize(
    "is_training, verb",
    [(True, "ignores the columns"), (False, "leaves to the reward function")],
)
def test_columns_are_counted_over_all_rows(is_training, verb):
    """An answer is in five rows of seven, an id in all."""
    use = use_of(
        ({"other_columns": ("answer", "id")}, 5),
        ({"columns": ("messages", "tools"), "other_columns": ("id",)}, 2),
    )
    assert lines_about(use, is_training=is_training) == [
        f"a.jsonl: reads messages (role, content), tools; {verb} answer (5 rows), id (7 rows)"
    ]


def test_one_line_for_each_kind_of_use_in_a_fixed_order():
    use = use_of(
        (
            {
                "columns": ("messages", "system"),
                "fields": ("role",),
                "ignored_fields": ("name",),
                "lost": ("tools",),
                "earlier": ("thinking",),
                "has_system_column": True,
                "json_chats": ("messages",),
            },
            1_000,
        ),
        ({"has_empty_answer": True}, 1),
    )
    assert lines_about(use) == [
        "a.jsonl: reads messages (role, content), system; ignores in messages name (1,000 rows)",
        "a.jsonl: JSON text is read as a chat: messages (1,000 rows)",
        "a.jsonl: the system column becomes the system message (1,000 rows)",
        "a.jsonl: an empty answer is trained (1 row): it ends at once",
        "a.jsonl: the chat template drops from earlier turns, by design: thinking (1,000 rows)",
        "a.jsonl: the chat template leaves out tools (1,000 rows): see data.lost_fields",
    ]


def test_files_of_one_kind_share_their_line_and_their_counts():
    """Which columns are empty does not matter. Each file keeps its own use."""
    first = use_of(({"other_columns": ("id",), "empty_columns": ("tools",)}, 3))
    other = use_of(({}, 9))
    last = use_of(({"other_columns": ("id",)}, 4))
    expected = [
        "a.jsonl and 2 more files: reads messages (role, content); ignores the columns id "
        "(11 rows)",
        "b.jsonl: reads messages (role, content)",
    ]
    assert lines_about(first, other, last, last) == expected
    assert lines_about(first, other, last, last) == expected


def test_system_messages_and_empty_answers_of_several_files_are_added_up():
    first = use_of(({"has_system_column": True, "has_empty_answer": True}, 3))
    second = use_of(({"has_system_column": True}, 4), ({"has_empty_answer": True}, 2))
    assert lines_about(first, second)[1:] == [
        "a.jsonl and 1 more file: the system column becomes the system message (7 rows)",
        "a.jsonl and 1 more file: an empty answer is trained (5 rows): it ends at once",
    ]


def test_a_file_without_a_row_that_can_be_read_has_no_line():
    nothing = uses_of_file([{"values": "", "counts": 4}])
    assert lines_about(nothing) == []
    assert len(lines_about(nothing, use_of(({}, 1)))) == 1


@pytest.mark.parametrize(
    "column, is_read, is_advised",
    [
        ("System_Prompt", False, True),
        ("system", True, False),
        ("my_system", False, False),
    ],
)
def test_a_column_that_looks_like_a_system_message_has_an_advice(column, is_read, is_advised):
    use = use_of(({"other_columns": (column,), "has_system_column": is_read}, 2))
    advice = f"a.jsonl: data.system_key={column} would make this column the system message"
    assert (advice in lines_about(use)) == is_advised


def test_rows_that_are_not_used_are_counted_by_their_reason():
    stats = {
        "rows": 100,
        "dropped_identical": 1,
        "dropped_no_loss": 2,
        "dropped_lost_fields": 3,
        "truncated": 4_000,
        "dropped_long": 5,
        "dropped_images": 6,
    }
    lines = list(unused_row_lines(stats, "data.max_length=64", "left"))
    assert lines == [
        "dropped, because they are longer than data.max_length=64: 5 rows",
        "cut to data.max_length=64 (data.truncation=left): 4,000 rows",
        "dropped because of data.lost_fields=drop: 3 rows",
        "not used, because no token is trained: 2 rows",
        "not used, because the chosen and the rejected answer are the same: 1 row",
    ]
    assert list(unused_row_lines(dict.fromkeys(stats, 0), "data.max_length=64", "left")) == []


def check_keys(*settings: str, train: dict, val: dict | None = None) -> None:
    config = load("sft.yaml", ["model.path=m", "data.train_files=t", *settings])
    datasets = {"data.train_files": SimpleNamespace(uses=[train])}
    if val:
        datasets["data.val_files"] = SimpleNamespace(uses=[val])
    check_column_keys(config.data, datasets)


def test_a_key_for_a_column_that_no_row_has_is_answered_with_those_that_exist():
    train = use_of(({"other_columns": ("id",), "lost": ("tools",)}, 1))
    val = use_of(({"columns": ("prompt", "response"), "other_columns": ("id",)}, 1))
    with pytest.raises(InputError) as caught:
        check_keys("data.images_key=pictures", train=train, val=val)
    assert str(caught.value) == (
        "data.images_key=pictures names no column of data.train_files and data.val_files, which "
        "have messages, prompt, response, id, tools: name one of these, or leave out "
        "data.images_key"
    )


def test_a_key_for_a_column_that_is_not_read_is_answered_with_those_that_are():
    train = use_of(({"columns": ("messages", "tools"), "other_columns": ("question",)}, 1))
    with pytest.raises(InputError) as caught:
        check_keys("data.prompt_key=question", train=train)
    assert str(caught.value) == (
        "data.prompt_key=question has no effect: the rows have this column, but they are read from "
        "messages, tools. Leave out data.prompt_key"
    )


@pytest.mark.parametrize("place", ["columns", "lost", "empty_columns"])
def test_a_key_for_a_column_that_some_file_has_is_accepted(place):
    """The column may be read, left out by the template, or empty."""
    check_keys(
        "data.tools_key=functions", train=use_of(({}, 1)), val=use_of(({place: ("functions",)}, 1))
    )
    with pytest.raises(InputError, match="data.tools_key=functions names no column"):
        check_keys("data.tools_key=functions", train=use_of(({}, 1)))


def test_a_reward_function_gets_all_columns_but_those_that_the_template_lost():
    first = use_of(({"other_columns": ("answer",), "lost": ("tools",)}, 1))
    second = use_of(({"columns": ("prompt",), "empty_columns": ("system",)}, 1))
    dataset = SimpleNamespace(uses=[first, second])
    assert filled_columns(dataset) == {"messages", "answer", "prompt"}
