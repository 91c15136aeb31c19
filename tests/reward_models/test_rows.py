"""Rows of train_rm.py: pairs with and without a margin, and answers with a score."""

import json
import math

import pytest

from config import InputError, load
from data.reward_dataset import RewardDataset, read_rewarded, tokenize_rewards
from data.tokenization import plain_options
from examples.arithmetic import make_tokenizer
from reward_models.losses import RewardLoss
from reward_models.settings import check_lengths, check_rows, check_settings, choose_padding
from tests.support.models import make_model

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
EMPTY = (None, "", " ")
CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def options_of(*settings: str):
    return plain_options(load("rm.yaml", ["model.path=/m", "data.train_files=/f", *settings]).data)


@pytest.mark.parametrize(
    "row, target",
    [
        (PAIR, math.nan),
        (PAIR | {"margin": 2}, 2.0),
        (PAIR | {"margin": "0.5"}, 0.5),
        (PAIR | {"margin": None}, math.nan),
        (PAIR | {"margin": "", "score": " "}, math.nan),
        ({"messages": CHAT, "score": -1.5}, -1.5),
        ({"messages": CHAT, "label": True}, 1.0),
        ({"messages": CHAT, "kto_tag": "false"}, 0.0),
        ({"messages": CHAT, "label": False, "kto_tag": 0}, 0.0),
        ({"prompt": "1+1=", "completion": "2", "score": 3}, 3.0),
    ],
)
def test_the_target_of_a_row(row, target):
    preference, actual = read_rewarded(row, options_of(), has_template=True)
    assert actual == target or math.isnan(actual) and math.isnan(target)
    assert (preference.rejected is None) == ("chosen" not in row)
    read = set(preference.columns)
    assert read >= {key for key in ("margin", "score", "label") if row.get(key) not in EMPTY}


def test_empty_cells_of_a_csv_file_are_no_pair():
    row = {"prompt": "1+1=", "completion": "2", "score": "3", "chosen": "", "rejected": ""}
    preference, score = read_rewarded(row, options_of(), has_template=True)
    assert preference.rejected is None
    assert score == 3.0


@pytest.mark.parametrize(
    "row, message",
    [
        (PAIR | {"score": 1}, 'both a pair of answers and "score"'),
        (PAIR | {"margin": "much"}, "\"margin\" is 'much': must be a number"),
        (PAIR | {"margin": math.inf}, "must be a number"),
        ({"messages": CHAT, "score": [1]}, "must be a number"),
        ({"messages": CHAT, "label": 1, "kto_tag": False}, '"label" is \'1\', and "kto_tag" is '),
        ({"messages": [*CHAT, CHAT[0]], "score": 1}, '"messages" ends with a message of the role'),
        ({"messages": CHAT, "note": None, "score": None}, "in the row, which has messages: name"),
        ({}, "nor a score is in the row, which has no columns"),
        ({"prompt": "1+1=", "chosen": "2"}, '"rejected" is missing'),
    ],
)
def test_a_malformed_row_is_one_line(row, message):
    with pytest.raises(InputError) as error:
        read_rewarded(row, options_of(), has_template=True)
    assert message in str(error.value)


def test_columns_can_have_other_names_or_none():
    row = PAIR | {"gap": 1, "margin": 5, "score": 4}
    options = options_of("data.margin_key=gap", "data.score_key=null")
    assert read_rewarded(row, options, has_template=True)[1] == 1.0
    options = options_of("data.margin_key=null", "data.score_key=null")
    assert math.isnan(read_rewarded(row, options, has_template=True)[1])
    # A label is read only beside the default name of the score.
    options = options_of("data.score_key=rating")
    with pytest.raises(InputError, match="nor a score is in the row"):
        read_rewarded({"messages": CHAT, "label": True}, options, has_template=True)


def test_a_batch_has_the_whole_rendered_conversation(tmp_path):
    tokenizer = make_tokenizer()
    rows = [PAIR | {"margin": 2}, PAIR, PAIR | {"rejected": "2"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tokenize_rewards(str(file), tokenizer, options_of(), tmp_path / "cache", tmp_path)
    dataset = RewardDataset.load(path)
    assert len(dataset) == 2, "equal answers teach nothing"
    assert dataset.num_margins == 1
    batch = dataset.batch([1, 0])
    chosen = tokenizer.apply_chat_template(CHAT, tokenize=False)
    expected = tokenizer(chosen, add_special_tokens=False)["input_ids"]
    (first, *_) = batch.split([1] * 4)
    assert first.input_ids.tolist() == [*expected, expected[-1]]
    ends = batch.cu_seqlens[1:] - 1
    assert batch.fields["target"][ends].tolist() == [0, 0, 2, 2]
    assert batch.fields["answer"][ends].tolist() == [0, 1, 2, 3]
    assert dataset.last_tokens() == {expected[-1]}


def test_the_last_tokens_are_those_of_all_answers(tmp_path):
    """Of a pair with a cut answer, and of an answer with a score that is cut elsewhere."""
    tokenizer = make_tokenizer()
    pair = PAIR | {"chosen": "123456789"}
    scored = {"prompt": "1+1=", "completion": "987654321", "score": 1}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (PAIR, pair, scored)))
    settings = ["data.max_length=12", "data.truncation=right"]
    path = tokenize_rewards(str(file), tokenizer, options_of(*settings), tmp_path / "c", tmp_path)
    dataset = RewardDataset.load(path)
    sequences = dataset.batch(range(3)).split([1] * 5)
    assert dataset.last_tokens() == {int(sequence.input_ids[-1]) for sequence in sequences}
    assert len(dataset.last_tokens()) > 2


@pytest.mark.parametrize("truncation, num_rows", [("left", 2), ("right", 2), ("drop", 1)])
def test_a_long_conversation_is_cut_or_dropped(tmp_path, truncation, num_rows, capsys):
    tokenizer = make_tokenizer()
    file = tmp_path / "rows.jsonl"
    long = PAIR | {"chosen": "123456789"}
    file.write_text("".join(json.dumps(row) + "\n" for row in (PAIR, long)))
    settings = ["data.max_length=15", f"data.truncation={truncation}"]
    path = tokenize_rewards(str(file), tokenizer, options_of(*settings), tmp_path / "c", tmp_path)
    dataset = RewardDataset.load(path)
    assert len(dataset) == num_rows
    if truncation == "drop":
        assert "longer than data.max_length=15: 1 row" in capsys.readouterr().out
        return
    cut, _ = dataset.batch([1]).split([1, 1])
    whole = tokenizer.apply_chat_template([CHAT[0], CHAT[1] | {"content": "123456789"}])
    expected = whole["input_ids"][-15:] if truncation == "left" else whole["input_ids"][:15]
    assert cut.input_ids.tolist() == [*expected, expected[-1]]


def test_transcripts_are_chats_only_for_a_chat_template(tmp_path):
    """Without a template, the transcript itself is scored."""
    question = "\n\nHuman: 1+1=\n\nAssistant: "
    pair = {"chosen": f"{question}2", "rejected": f"{question}3"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(pair) + "\n")
    tokenizer = make_tokenizer()
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False)

    def first_text() -> str:
        path = tokenize_rewards(str(file), tokenizer, options_of(), tmp_path / "cache", tmp_path)
        first, _ = RewardDataset.load(path).batch([0]).split([1, 1])
        return tokenizer.decode(first.input_ids[:-1])

    assert first_text() == chat
    tokenizer.chat_template = None
    assert first_text() == pair["chosen"] + tokenizer.eos_token


@pytest.mark.parametrize(
    "setting, message",
    [
        ("model.images=true", "model.images=true does not work with train_rm.py"),
        ("model.mtp.enable=true", "model.mtp.enable=true does not work with train_rm.py"),
        ("model.mtp.enable_train=true", "set model.mtp.enable=false and model.mtp.enable_train"),
    ],
)
def test_settings_that_a_reward_model_cannot_have(setting, message):
    needed = ["model.path=/m", "data.train_files=/f"]
    assert check_settings(load("rm.yaml", needed)).name == "bradley_terry"
    with pytest.raises(InputError, match=message):
        check_settings(load("rm.yaml", [*needed, setting]))


SCORED = {"messages": CHAT, "score": 1}
WITHOUT_MARGINS = """
def f(chosen_scores, rejected_scores, **_):
    return rejected_scores - chosen_scores
"""


@pytest.mark.parametrize(
    "rows, loss, message",
    [
        ([PAIR, PAIR | {"margin": 2}], "bradley_terry", None),
        ([SCORED, SCORED], "regression", None),
        ([PAIR, PAIR], "{folder}/mine.py:f", None),
        (
            [SCORED, PAIR, SCORED],
            "bradley_terry",
            "2 of 3 rows of data.val_files are answers with a score, and algorithm.loss=bradley_te",
        ),
        (
            [PAIR, PAIR, SCORED],
            "regression",
            "2 of 3 rows of data.val_files are pairs, and algorithm.loss=regression learns from",
        ),
        (
            [PAIR, PAIR | {"margin": 0}],
            "{folder}/mine.py:f",
            "1 of 2 rows of data.val_files have a margin, which .* set data.margin_key=null",
        ),
    ],
)
def test_a_loss_gets_rows_that_it_can_learn_from(tmp_path, rows, loss, message):
    (tmp_path / "mine.py").write_text(WITHOUT_MARGINS)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    path = tokenize_rewards(str(file), tokenizer, options_of(), tmp_path / "cache", tmp_path)
    setting = f"algorithm.loss={loss.format(folder=tmp_path)}"
    of_config = RewardLoss.of(load("rm.yaml", ["model.path=/m", "data.train_files=/f", setting]))
    datasets = {"data.val_files": RewardDataset.load(path)}
    if message is None:
        check_rows(of_config, datasets)
        return
    with pytest.raises(InputError, match=message):
        check_rows(of_config, datasets)


@pytest.mark.parametrize(
    "rows, settings, longest",
    [
        ([PAIR | {"rejected": "300"}], [], lambda lengths: lengths.sum(1).max() + 2),
        (
            [PAIR | {"rejected": "300"}],
            ["engine.use_remove_padding=false"],
            lambda lengths: 2 * (lengths.max() + 1),
        ),
        (
            [{"messages": CHAT, "score": 1}],
            ["algorithm.loss=regression"],
            lambda lengths: lengths.max() + 1,
        ),
    ],
    ids=["packed pairs", "padded pairs", "scores"],
)
def test_the_longest_row_fits_exactly_with_a_token_for_each_score(
    tmp_path, rows, settings, longest
):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    path = tokenize_rewards(str(file), tokenizer, options_of(), tmp_path / "cache", tmp_path)
    dataset = RewardDataset.load(path)
    num_tokens = int(longest(dataset.answer_lengths))
    for limit in (num_tokens, num_tokens - 1):
        pairs = [*settings, f"data.max_tokens_per_micro_batch={limit}"]
        config = load("rm.yaml", ["model.path=/m", "data.train_files=/f", *pairs])
        loss = RewardLoss.of(config)
        if limit == num_tokens:
            check_lengths(config, loss, dataset, world_size=1)
            continue
        with pytest.raises(InputError, match=f"has {num_tokens} tokens, more than data.max_tokens"):
            check_lengths(config, loss, dataset, world_size=1)


@pytest.mark.parametrize(
    "of_tokenizer, of_model, expected",
    [
        ("<|pad|>", "x", "<|pad|>"),
        (None, "x", "x"),
        ("\n", "x", "x"),  # rows end with this one
        ("<|pad|>", None, "<|pad|>"),
        ("\n", None, None),
    ],
    ids=["both", "the model's", "the tokenizer's ends rows", "the tokenizer's", "none"],
)
def test_the_padding_of_an_export_is_the_tokenizers_unless_rows_end_with_it(
    process_group, tmp_path, of_tokenizer, of_model, expected
):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = of_tokenizer

    def id_of(token: str | None) -> int | None:
        return None if token is None else tokenizer(token, add_special_tokens=False).input_ids[0]

    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(PAIR) + "\n")
    path = tokenize_rewards(str(file), tokenizer, options_of(), tmp_path / "cache", tmp_path)
    shape = {"vocab_size": len(tokenizer), "pad_token_id": id_of(of_model)}
    make_model(tmp_path / "model", "qwen3", **shape)
    config = load("rm.yaml", [f"model.path={tmp_path}/model", f"data.train_files={file}"])
    padding_id = choose_padding(config, tokenizer, [RewardDataset.load(path)])
    assert padding_id == id_of(expected)


def test_the_padding_of_an_export_is_no_token_that_validation_rows_end_with(
    process_group, tmp_path
):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "x"
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(PAIR) + "\n")
    datasets = []
    for end in ("", "x"):
        tokenizer.chat_template += end
        path = tokenize_rewards(str(file), tokenizer, options_of(), tmp_path / "cache", tmp_path)
        datasets.append(RewardDataset.load(path))
    training, validation = datasets
    make_model(tmp_path / "model", "qwen3", vocab_size=len(tokenizer), pad_token_id=0)
    config = load("rm.yaml", [f"model.path={tmp_path}/model", f"data.train_files={file}"])
    assert choose_padding(config, tokenizer, [training]) == tokenizer.pad_token_id
    assert choose_padding(config, tokenizer, [training, validation]) == 0


def test_a_later_row_that_the_template_rejects_is_named(tmp_path):
    """Every row is rendered, not only the first."""
    tokenizer = make_tokenizer()
    rejection = (
        "{% if 'zebra' in messages[0].content | string %}{{ raise_exception('no') }}{% endif %}"
    )
    tokenizer.chat_template = rejection + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "model")
    pairs = [PAIR, PAIR, PAIR | {"prompt": "a zebra"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    files = str(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match=r"rows.jsonl:3: .*the chat template rejects .*: no"):
        tokenize_rewards(files, tokenizer, options_of(), tmp_path / "cache", tmp_path / "model")
