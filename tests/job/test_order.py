"""The order of the data, from the configuration and files to the rows of each batch."""

import json
from pathlib import Path

import pytest

from config import InputError, load
from data.batching.mixture import Mixture
from data.batching.order import global_batch
from data.dataset import TokenDataset, tokenize
from data.prompts import PromptDataset, tokenize_prompts
from data.selection import training_rows
from examples.arithmetic import make_rows, make_tokenizer
from job.order import check_order_settings, make_order, sampler_reads
from tests.support.ranks import on_ranks

SIZE = 4
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer, and three files of 12, 5 and 3 rows, two of them in a directory."""
    folder = tmp_path_factory.mktemp("order")
    make_tokenizer().save_pretrained(folder / "model")
    rows = [{**row, "level": i % 3} for i, row in enumerate(make_rows()[0][:20])]
    (folder / "more").mkdir()
    for name, part in (("a", rows[:12]), ("more/b", rows[12:17]), ("more/c", rows[17:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def configure(folder, *settings, script="sft"):
    return load(
        f"{script}.yaml",
        [
            f"model.path={folder}/model",
            f"data.train_files=[{folder}/a.jsonl,{folder}/more]",
            f"data.train_batch_size={SIZE}",
            "trainer.seed=3",
            *settings,
        ],
    )


def load_rows(folder, config):
    """Return the data set of a configuration for either script."""
    inputs = [training_rows(config.data), make_tokenizer(), config.data, folder / "cache"]
    if "rollout" in config:
        return PromptDataset.load(tokenize_prompts(*inputs, folder / "model"))
    with_rows = sampler_reads(config, "rows")
    return TokenDataset.load(tokenize(*inputs, folder / "model", with_rows=with_rows))


def order_of(folder, *settings, script="sft", total_steps=STEPS):
    config = configure(folder, *settings, script=script)
    check_order_settings(config)
    return make_order(config, load_rows(folder, config), total_steps)


def batches(order) -> list[list[int]]:
    return [order.rows_of_batch(k).tolist() for k in range(STEPS)]


def write_sampler(tmp_path, *lines: str, inputs="batch_index, batch_size, num_rows, seed") -> str:
    """Write a sampler whose body are these lines, and return the setting that names it."""
    body = "".join(f"    {line}\n" for line in lines)
    path = tmp_path / "mine.py"
    path.write_text(f"def mine({inputs}, *, step=1, **_):\n{body}")
    return f"data.sampler={path}:mine"


ROLLING = "return [(batch_index * step + i) % num_rows for i in range(batch_size)]"


@pytest.mark.parametrize("script", ["sft", "ppo"])
def test_the_default_is_a_random_order(folder, script):
    order = order_of(folder, script=script)
    assert batches(order) == [global_batch(20, SIZE, 3, k).tolist() for k in range(STEPS)]
    assert order.identity == {
        "data.shuffle": True,
        "data.weights": "none",
        "data.sampler": "none",
    }
    assert order.notices == []


def test_without_shuffling_a_line_counts_the_rows_that_are_never_used(folder):
    order = order_of(folder, "data.shuffle=false")
    assert batches(order)[:6] == [[*range(4 * k, 4 * k + 4)] for k in (0, 1, 2, 3, 4, 0)]
    assert order.notices == []
    assert order.identity["data.shuffle"] is False
    rest = order_of(folder, "data.shuffle=false", "data.train_batch_size=6")
    assert rest.notices == [
        "data: data.shuffle=false never uses the last 2 of 20 rows, which do not fill a batch of 6"
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("script", ["sft", "ppo"])
def test_weights_mix_the_names_of_train_files(folder, script, shuffle):
    """The second name is a directory of two files, of 5 and 3 rows."""
    settings = ["data.weights=[3,1]", f"data.shuffle={shuffle}"]
    order = order_of(folder, *settings, script=script)
    mixture = Mixture([12, 8], [3, 1], SIZE, seed=3, shuffle=shuffle)
    assert order.identity["data.shuffle"] is shuffle
    assert batches(order) == [mixture.rows_of_batch(k).tolist() for k in range(STEPS)]
    assert order.identity["data.weights"] == "3 for 12 rows, 1 for 8 rows"
    assert order.notices == [
        f"data: {folder}/a.jsonl: 75.0% of each batch (data.weights), 3.00 passes over its 12 rows",
        f"data: {folder}/more: 25.0% of each batch (data.weights), 1.50 passes over its 8 rows",
    ]


@pytest.mark.parametrize("first", ["more", "more/*.jsonl"])
def test_weights_follow_names_that_stand_for_several_files(folder, first):
    """The first name is a directory or a pattern. The next one has 12 rows."""
    files = f"data.train_files=[{folder}/{first},{folder}/a.jsonl,{folder}/more/c.jsonl]"
    order = order_of(folder, files, "data.weights=[1,2,1]")
    assert order.identity["data.weights"] == "1 for 8 rows, 2 for 12 rows, 1 for 3 rows"
    mixture = Mixture([8, 12, 3], [1, 2, 1], SIZE, seed=3)
    assert batches(order) == [mixture.rows_of_batch(k).tolist() for k in range(STEPS)]


def test_weights_count_the_rows_that_are_used(folder, tmp_path):
    """Of the second file, one row is left, the others are blank or too long."""
    long = {"prompt": "1" * 300, "response": "2"}
    short = {"prompt": "1+1", "response": "2"}
    first = tmp_path / "first.jsonl"
    second = tmp_path / "second.jsonl"
    first.write_text(json.dumps(short) + "\n" + json.dumps(short) + "\n")
    second.write_text("\n" + json.dumps(long) + "\n" + json.dumps(short) + "\n")
    settings = [
        f"data.train_files=[{first},{second}]",
        "data.weights=[1,1]",
        "data.max_length=64",
        "data.truncation=drop",
        "data.train_batch_size=2",
    ]
    order = order_of(folder, *settings)
    assert order.identity["data.weights"] == "1 for 2 rows, 1 for 1 rows"
    assert [sorted(order.rows_of_batch(k).tolist())[1] for k in range(4)] == [2] * 4
    second.write_text(json.dumps(long) + "\n")
    with pytest.raises(
        InputError, match=r"second.jsonl has a weight in data.weights=\[1, 1\], but"
    ):
        order_of(folder, *settings)


def test_weights_and_samplers_see_only_the_selected_rows(folder, tmp_path):
    """Six of the 20 rows are validated, and 10 of the others are trained on."""
    settings = ["data.val_size=6", "data.train_max_samples=10"]
    data = load_rows(folder, configure(folder, *settings))
    assert sum(data.file_rows) == len(data) == 10
    order = order_of(folder, *settings, "data.weights=[1,1]")
    sizes = [data.file_rows[0], sum(data.file_rows[1:])]
    assert order.identity["data.weights"] == f"1 for {sizes[0]} rows, 1 for {sizes[1]} rows"
    assert max(row for batch in batches(order) for row in batch) == 9
    sampler = write_sampler(tmp_path, ROLLING, inputs="rows, batch_index, batch_size, num_rows")
    assert max(row for batch in batches(order_of(folder, *settings, sampler)) for row in batch) == 9


@pytest.mark.parametrize("script", ["sft", "ppo"])
def test_a_sampler_reads_rows_lengths_and_sources(folder, tmp_path, script):
    sampler = write_sampler(
        tmp_path,
        "assert len(rows) == num_rows == len(lengths) == len(sources) == 20",
        "assert sources.tolist() == [0] * 12 + [1] * 8",
        "assert not lengths.flags.writeable and not sources.flags.writeable",
        "assert total_steps == 12 and batch_size == 4 and seed == 3",
        "assert rows[-1] == rows[19] and rows[0]['messages'][0]['role'] == 'user'",
        "level = batch_index % 3",
        "return [i for i in range(20) if rows[i]['level'] == level][:4]",
        inputs="rows, lengths, sources, num_rows, total_steps, batch_index, batch_size, seed",
    )
    order = order_of(folder, sampler, script=script)
    assert batches(order)[:4] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11], [0, 3, 6, 9]]
    (notice,) = order.notices
    assert notice.endswith(
        "mine.py:mine chooses the rows; first batch, counting rows from 0: 0, 3, 6, 9"
    )


@pytest.mark.parametrize("size, shown", [(8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "4, 5, 6, 7, ...")])
def test_up_to_eight_rows_of_a_samplers_first_batch_are_shown(folder, tmp_path, size, shown):
    sampler = write_sampler(tmp_path, ROLLING)
    (notice,) = order_of(folder, sampler, f"data.train_batch_size={size}").notices
    assert notice.endswith(shown)


def test_rows_of_dropped_lines_are_not_numbered(folder, tmp_path):
    """The rows that a sampler reads are those that it numbers."""
    rows = [{"prompt": "1" * length, "response": "2", "id": length} for length in (3, 300, 5)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    sampler = write_sampler(tmp_path, ROLLING, inputs="rows, batch_index, batch_size, num_rows")
    settings = [sampler, f"data.train_files={path}", "data.max_length=64", "data.truncation=drop"]
    config = configure(folder, *settings)
    data = load_rows(folder, config)
    assert [row["id"] for row in data.rows] == [3, 5]
    assert len(data) == 2


def test_the_hash_of_the_data_does_not_depend_on_the_sampler(folder, tmp_path):
    sampler = write_sampler(tmp_path, ROLLING, inputs="rows, batch_index, batch_size, num_rows")
    plain = load_rows(folder, configure(folder))
    with_rows = load_rows(folder, configure(folder, sampler))
    assert plain.rows is None
    assert len(with_rows.rows) == 20
    assert with_rows.name == plain.name


def test_the_parameters_of_a_sampler_come_from_its_group(folder, tmp_path):
    sampler = write_sampler(tmp_path, ROLLING)
    assert batches(order_of(folder, sampler))[2] == [2, 3, 4, 5]
    order = order_of(folder, sampler, "data.sampler_kwargs.step=5")
    assert batches(order)[2] == [10, 11, 12, 13]


def test_a_sampler_is_identified_by_all_that_it_depends_on(folder, tmp_path):
    """Also by a file that it reads, which changes its first batch."""
    body = "first = int((Path(__file__).parent / 'first').read_text())"
    lines = ["from pathlib import Path", body, "return [first] * batch_size"]
    (tmp_path / "first").write_text("7")
    sampler = write_sampler(tmp_path, *lines)
    identities = [order_of(folder, sampler).identity["data.sampler"]]
    assert identities[0].startswith("mine.py:mine (file ")
    assert order_of(folder, sampler, total_steps=99).identity["data.sampler"] == identities[0]
    (tmp_path / "first").write_text("8")
    identities.append(order_of(folder, sampler).identity["data.sampler"])
    step = "data.sampler_kwargs.step=2"
    identities.append(order_of(folder, sampler, step).identity["data.sampler"])
    assert "step=2" in identities[-1]
    with (tmp_path / "mine.py").open("a") as file:
        file.write("# changed\n")
    identities.append(order_of(folder, sampler).identity["data.sampler"])
    assert len(set(identities)) == 4


def test_the_order_of_a_samplers_parameters_does_not_identify_it(folder, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(batch_size, *, a=0, b=0, **_):\n    return [a + b] * batch_size\n")
    pairs = ["data.sampler_kwargs.b=1", "data.sampler_kwargs.a=2"]
    first, second = (
        order_of(folder, f"data.sampler={file}:f", *settings).identity["data.sampler"]
        for settings in (pairs, pairs[::-1])
    )
    assert ", a=2, b=1, " in first
    assert first == second


def test_a_sampler_that_reads_the_number_of_steps_depends_on_it(folder, tmp_path):
    sampler = write_sampler(tmp_path, "return [0] * batch_size", inputs="batch_size, total_steps")
    first = order_of(folder, sampler, total_steps=10).identity["data.sampler"]
    assert ", 10 steps, " in first
    assert order_of(folder, sampler, total_steps=11).identity["data.sampler"] != first


def test_batches_that_only_filtering_reaches_are_checked(folder, tmp_path):
    """A step may draw up to 3 batches, so 12 steps reach batch 35."""
    sampler = write_sampler(tmp_path, "return [19 if batch_index < 35 else 20] * batch_size")
    settings = [
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=3",
    ]
    order_of(folder, sampler, script="ppo")
    with pytest.raises(InputError, match="batch 35 has row 20: the rows are numbered from 0 to 19"):
        order_of(folder, sampler, *settings, script="ppo")


CONTRADICTIONS = [
    (["data.weights=[1,2,3]"], "data.weights=[1, 2, 3] must have one weight for each name in"),
    (["data.train_files=a.jsonl", "data.weights=[1,2]"], "train_files, which has 1: a.jsonl"),
    (["data.train_files=a.jsonl", "data.weights=[2]"], "does nothing with a single name in"),
    (["data.train_files=[a.jsonl]", "data.weights=[2]"], "does nothing with a single name in"),
    (["data.sampler_kwargs.a=1"], "data.sampler_kwargs.a does nothing without data.sampler: set"),
    (["{sampler}", "data.shuffle=false"], "data.shuffle=false does nothing with data.sampler="),
    (["{sampler}", "data.weights=[1,2]"], "data.weights=[1, 2] does nothing with data.sampler="),
    (["{sampler}", "data.sampler_kwargs.b=1"], "has no parameter b of its own (it has step)"),
    (["data.sampler=absent.py:f"], "absent.py: no such file"),
]


@pytest.mark.parametrize("settings, message", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_an_error(folder, tmp_path, settings, message):
    sampler = write_sampler(tmp_path, ROLLING)
    config = configure(folder, *(setting.format(sampler=sampler) for setting in settings))
    with pytest.raises(InputError) as caught:
        check_order_settings(config)
    assert message in str(caught.value)


@pytest.mark.parametrize("weights", ["[0,1]", "[-1,1]", "[]", "[a,b]", "[true,1]", "3"])
def test_weights_are_numbers_above_0(folder, weights):
    with pytest.raises(InputError, match="must be a list"):
        configure(folder, f"data.weights={weights}")


# -- two ranks -------------------------------------------------------------------------------------

# The body of a sampler -> the error on both ranks; "" if there is none.
ON_TWO_RANKS = {
    "return [batch_index % num_rows] * batch_size": "",
    "return [RANK] * batch_size": "batch 0 has other rows on rank 1 than on rank 0: the rows must",
    "return [RANK * 20] * batch_size": "batch 0 has row 20: the rows are numbered from 0 to 19",
    "return [0] * batch_size if RANK else [][0]": "mine.py:2 failed for batch 0: IndexError",
    "return [RANK if batch_index == 5 else 0] * batch_size": "batch 5 has other rows on rank 1",
    "return [0] * batch_size if RANK or batch_index != 5 else [][0]": "failed for batch 5: Index",
}


def error_of_rank(folder, sampler, total_steps) -> str:
    """Draw the first batches, and return the error; "" if there is none."""
    try:
        drawn = batches(order_of(folder, sampler, total_steps=total_steps))
    except InputError as error:
        return str(error)
    return "" if len(drawn) == STEPS else "too few"


@pytest.mark.parametrize("total_steps", [STEPS, 10_000])
@pytest.mark.parametrize("body", ON_TWO_RANKS)
def test_ranks_agree_or_all_of_them_report_the_error(folder, tmp_path, body, total_steps):
    """Of a long run, only some batches are checked at the start, and not batch 5."""
    sampler = write_sampler(tmp_path, body.replace("RANK", "int(__import__('os').environ['RANK'])"))
    message = ON_TWO_RANKS[body]
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    first, second = on_ranks(2, ranks, error_of_rank, folder, sampler, total_steps)
    assert first == second
    assert message in first
    assert bool(message) == bool(first)
