"""Rows of preferences in the forms of other projects, their tokens, and what is not used."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from config import InputError
from data.columns import check_column_keys, report_lines, unused_row_lines
from data.messages import as_context
from data.preference_dataset import PreferenceDataset, tokenize_preferences
from data.preferences import read_preference
from tests.data.chat_templates import QWEN2, make_tokenizer
from tests.data.test_chat import options, say

USER = {"role": "user", "content": "2+3?"}
GOOD = {"role": "assistant", "content": "5"}
BAD = {"role": "assistant", "content": "6"}
HH = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: 2+3?\n\nAssistant:"

# Rows whose prompt is 2+3?, and whose answers are 5 and 6, in all forms.
FORMS = {
    "TRL, texts": {"prompt": "2+3?", "chosen": "5", "rejected": "6"},
    "TRL, messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "TRL, complete chats": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "complete chats beside their prompt": {
        "prompt": "2+3?",
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
        "score_chosen": 9.0,
    },
    "UltraFeedback, which repeats the chosen chat": {
        "prompt": "2+3?",
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
        "messages": [USER, GOOD],
    },
    "complete chats beside their prompt as a message": {
        "prompt": [USER],
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
    },
    "complete chats of ShareGPT beside their prompt": {
        "prompt": "2+3?",
        "chosen": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}],
        "rejected": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "6"}],
    },
    "messages of a table, whose empty fields are null": {
        "prompt": [USER | {"name": None}],
        "chosen": [USER, GOOD | {"name": None}],
        "rejected": [USER | {"name": None}, BAD],
    },
    "messages beside the name of a prompt": {
        "messages": [USER],
        "prompt": "question 7",
        "chosen": "5",
        "rejected": "6",
    },
    "an empty cell of a label": {"prompt": "2+3?", "chosen": "5", "rejected": "6", "label": ""},
    "messages and texts": {"messages": [USER], "chosen": "5", "rejected": "6"},
    "LLaMA-Factory, Alpaca": {"instruction": "2+3?", "input": "", "chosen": "5", "rejected": "6"},
    "LLaMA-Factory, ShareGPT": {
        "conversations": [{"from": "human", "value": "2+3?"}],
        "chosen": {"from": "gpt", "value": "5"},
        "rejected": {"from": "gpt", "value": "6"},
    },
    "Anthropic-HH": {
        "chosen": "\n\nHuman: 2+3?\n\nAssistant: 5",
        "rejected": "\n\nHuman: 2+3?\n\nAssistant: 6",
    },
    "Anthropic-HH, divided": {
        "prompt": "\n\nHuman: 2+3?\n\nAssistant:",
        "chosen": " 5",
        "rejected": " 6",
    },
    "Anthropic-HH, divided after the space": {
        "prompt": "\n\nHuman: 2+3?\n\nAssistant: ",
        "chosen": "5",
        "rejected": "6",
    },
    "Anthropic-HH, divided before the answer's name": {
        "prompt": "\n\nHuman: 2+3?",
        "chosen": " 5",
        "rejected": " 6",
    },
    "a text before messages": {"prompt": "2+3?", "chosen": [GOOD], "rejected": [BAD]},
    "ShareGPT in a cell of a CSV file": {
        "conversations": json.dumps([{"from": "human", "value": "2+3?"}]),
        "chosen": "5",
        "rejected": "6",
    },
    "JSON in cells of a CSV file": {
        "prompt": json.dumps([USER]),
        "chosen": json.dumps([GOOD]),
        "rejected": json.dumps([BAD]),
    },
}
LABELLED = {
    "TRL, texts": {"prompt": "2+3?", "completion": "5", "label": True},
    "TRL, messages": {"prompt": [USER], "completion": [GOOD], "label": True},
    "a chat": {"messages": [USER, GOOD], "label": 1},
    "prompt and response": {"prompt": "2+3?", "response": "5", "label": "true"},
    "LLaMA-Factory, Alpaca": {"instruction": "2+3?", "input": "", "output": "5", "kto_tag": True},
    "LLaMA-Factory, ShareGPT": {
        "conversations": [
            {"from": "human", "value": "2+3?"},
            {"from": "gpt", "value": "5"},
        ],
        "kto_tag": True,
    },
    "two labels that agree": {"messages": [USER, GOOD], "label": True, "kto_tag": "1"},
    "a CSV file that also has pairs": {
        "prompt": "2+3?",
        "completion": "5",
        "label": "true",
        "chosen": "",
        "rejected": "",
    },
}


def data_options(**changes):
    """Return the section `data`, which has no train_on."""
    values = vars(options()) | dict(
        chosen_key="chosen",
        rejected_key="rejected",
        label_key="label",
        max_length=100,
        truncation="error",
        num_proc=None,
    )
    del values["train_on"]
    return SimpleNamespace(**values | changes)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = make_tokenizer(QWEN2)
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def load(tmp_path, rows, tokenizer, **changes):
    """Return the PreferenceDataset of rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tokenize_preferences(
        str(path), tokenizer, data_options(**changes), tmp_path / "cache", tmp_path
    )
    return PreferenceDataset(folder)


def texts_of(dataset, row, tokenizer):
    """Return (the whole text, its trained part) of each answer of a row."""
    texts = []
    for _, ids, mask in dataset.sequences(row):
        trained = [token for token, is_trained in zip(ids, mask) if is_trained]
        texts.append((tokenizer.decode(ids), tokenizer.decode(trained)))
    return texts


# -- forms -----------------------------------------------------------------------------------------


def test_all_forms_of_a_pair_have_the_same_tokens(tmp_path, tokenizer, capsys):
    dataset = load(tmp_path, FORMS.values(), tokenizer)
    assert len(dataset) == dataset.num_pairs == len(FORMS)
    expected = [
        (f"<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n", answer)
        for answer in ("5", "6")
    ]
    for row in range(len(dataset)):
        for (text, trained), (whole, answer) in zip(
            texts_of(dataset, row, tokenizer), expected, strict=True
        ):
            assert text.endswith(whole)
            assert trained == f"{answer}<|im_end|>"
    printed = capsys.readouterr().out
    assert "reads prompt (role, content, from, value), chosen, rejected, messages" in printed
    assert "ignores the columns score_chosen (1 row)" in printed


def test_all_forms_of_a_label_have_the_same_tokens(tmp_path, tokenizer):
    rows = [*LABELLED.values(), LABELLED["a chat"] | {"label": False}]
    dataset = load(tmp_path, rows, tokenizer)
    assert dataset.num_pairs == 0
    assert (dataset.stats["ShareGPT"], dataset.stats["Alpaca"]) == (1, 1)
    for row in range(len(rows)):
        ((text, trained),) = texts_of(dataset, row, tokenizer)
        assert text.endswith("<|im_start|>assistant\n5<|im_end|>\n")
        assert trained == "5<|im_end|>"
    names = [dataset.sequences(row)[0][0] for row in range(len(rows))]
    assert names[:-1] == [f"row {i + 1}, chosen" for i in range(len(LABELLED))]
    assert names[-1] == f"row {len(rows)}, rejected"


def test_turns_that_both_answers_share_are_not_trained(tmp_path, tokenizer):
    """Also in HH's texts, and also the assistant's own; the rest of each chat is."""
    chats = [
        say("Hi", "Hello.", "2+3?", answer, "Sure?", f"Yes, {answer}") for answer in ("5", "6")
    ]
    rows = [
        {"chosen": chats[0], "rejected": chats[1]},
        {"chosen": HH + " 5", "rejected": HH + " 6"},
    ]
    dataset = load(tmp_path, rows, tokenizer)
    chat, hh = [texts_of(dataset, row, tokenizer) for row in range(2)]
    assert [trained for _, trained in chat] == [
        "5<|im_end|>Yes, 5<|im_end|>",
        "6<|im_end|>Yes, 6<|im_end|>",
    ]
    assert [trained for _, trained in hh] == ["5<|im_end|>", "6<|im_end|>"]
    assert "assistant\nHello.<|im_end|>" in hh[0][0]


def test_without_a_chat_template_texts_stay_texts(tmp_path):
    tokenizer = make_tokenizer(None)
    tokenizer.eos_token = "<|im_end|>"
    divided = {"prompt": HH, "chosen": " 5", "rejected": " 6"}
    rows = [FORMS["TRL, texts"], {"chosen": HH + " 5", "rejected": HH + " 6"}, divided]
    dataset = load(tmp_path, rows, tokenizer)
    assert texts_of(dataset, 2, tokenizer) == texts_of(dataset, 1, tokenizer)
    assert texts_of(dataset, 0, tokenizer) == [
        ("2+3?5<|im_end|>", "5<|im_end|>"),
        ("2+3?6<|im_end|>", "6<|im_end|>"),
    ]
    assert texts_of(dataset, 1, tokenizer) == [
        (f"{HH} {answer}<|im_end|>", f" {answer}<|im_end|>") for answer in "56"
    ]


def test_a_label_is_for_the_last_answer_of_a_chat_and_for_all_turns_of_a_completion(
    tmp_path, tokenizer
):
    chat = say("Hi", "Hello.", "2+3?", "5")
    rows = [
        {"messages": chat, "label": True},
        {"prompt": chat[:1], "completion": chat[1:], "label": True},
    ]
    dataset = load(tmp_path, rows, tokenizer)
    trained = [texts_of(dataset, row, tokenizer)[0][1] for row in range(2)]
    assert trained == ["5<|im_end|>", "Hello.<|im_end|>5<|im_end|>"]


def test_one_of_two_chats_may_be_the_beginning_of_the_other():
    short = say("2+3?", "5")
    long = say("2+3?", "5", "Sure?", "Yes.")
    for chosen, rejected in ((short, long), (long, short)):
        row = {"chosen": chosen, "rejected": rejected}
        preference = read_preference(row, data_options(), has_template=True)
        prompt = [as_context(USER)]
        assert preference.chosen == {"messages": prompt + chosen[1:]}
        assert preference.rejected == {"messages": prompt + rejected[1:]}


def test_an_answer_may_be_the_text_of_its_prompt():
    row = {"prompt": "again", "chosen": "again", "rejected": "no"}
    preference = read_preference(row, data_options(), has_template=True)
    assert preference.chosen == {"prompt": "again", "response": "again"}


def test_only_the_named_column_of_a_label_is_read():
    row = {"messages": [USER, GOOD], "label": "of a cluster", "kto_tag": True}
    preference = read_preference(row, data_options(label_key="kto_tag"), has_template=True)
    assert preference.rejected is None
    assert "kto_tag" in preference.columns
    assert "label" not in preference.columns


def test_only_the_columns_that_a_row_has_are_reported_as_read():
    preference = read_preference(FORMS["LLaMA-Factory, Alpaca"], data_options(), has_template=True)
    assert preference.columns == ["instruction", "input", "chosen", "rejected"]


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_has_the_answers_of_its_rows_in_order(tmp_path, tokenizer):
    rows = [FORMS["TRL, texts"], LABELLED["a chat"], LABELLED["a chat"] | {"label": False}]
    rows.append({"prompt": "2+3?", "chosen": "five", "rejected": "6"})
    dataset = load(tmp_path, rows, tokenizer)
    batch = dataset.batch([3, 2, 1])
    lengths = [
        *dataset.answer_lengths[3],
        dataset.answer_lengths[2, 1],
        dataset.answer_lengths[1, 0],
    ]
    assert batch.lengths == lengths
    answers = np.repeat([0, 1, 3, 4], lengths).tolist()
    assert batch.fields["answer"].tolist() == answers
    assert "ref_log_probs" not in batch.fields
    texts = [tokenizer.decode(part.input_ids) for part in batch.split([1] * 4)]
    assert ["five" in text for text in texts] == [True, False, False, False]

    reference = np.arange(len(dataset.input_ids), dtype=np.float32)
    dataset.attach(reference)
    starts = dataset.cu_seqlens[[3, 2, 1]]
    expected = [np.arange(s, s + dataset.lengths[i]) for s, i in zip(starts, [3, 2, 1])]
    attached = dataset.batch([3, 2, 1]).fields["ref_log_probs"]
    assert attached.tolist() == np.concatenate(expected).tolist()


def test_rows_are_cut_and_counted(tmp_path, tokenizer, capsys):
    """max_length is for each answer with its prompt, and cuts each of them."""
    long = {"prompt": "2+3?", "chosen": "5" * 60, "rejected": "6"}
    rows = [FORMS["TRL, texts"], long]
    with pytest.raises(InputError, match=r"1 of 2 rows are longer than data.max_length=80"):
        load(tmp_path, rows, tokenizer, max_length=80)
    dropped = load(tmp_path, rows, tokenizer, max_length=80, truncation="drop")
    assert len(dropped) == 1
    assert (
        "dropped, because they are longer than data.max_length=80: 1 row" in capsys.readouterr().out
    )
    cut = load(tmp_path, rows, tokenizer, max_length=80, truncation="right")
    assert cut.answer_lengths[1].tolist() == [80, cut.answer_lengths[0, 1]]
    assert "cut to data.max_length=80" in capsys.readouterr().out
    left = load(tmp_path, rows, tokenizer, max_length=80, truncation="left")
    assert texts_of(left, 1, tokenizer)[0][1] == "5" * 60 + "<|im_end|>"


def test_the_first_token_is_not_trained_even_if_its_prompt_is_cut_off(tmp_path, tokenizer):
    """Nothing predicts it."""
    long = {"prompt": "2+3?", "chosen": "5" * 90, "rejected": "6"}
    dataset = load(tmp_path, [long], tokenizer, max_length=80, truncation="left")
    (_, ids, mask), _ = dataset.sequences(0)
    assert tokenizer.decode(ids).startswith("55")
    assert mask[:2] == [0, 1]


def test_a_pair_of_which_one_answer_is_cut_off_is_not_used_and_counted(tmp_path, tokenizer, capsys):
    long_prompt = {"prompt": "2" * 90, "chosen": "5", "rejected": "6"}
    dataset = load(
        tmp_path, [FORMS["TRL, texts"], long_prompt], tokenizer, max_length=80, truncation="right"
    )
    assert len(dataset) == 1
    assert dataset.stats["dropped_no_loss"] == 1
    assert "not used, because no token is trained: 1 row" in capsys.readouterr().out


def test_a_pair_of_equal_answers_is_not_used_and_counted(tmp_path, tokenizer, capsys):
    same = {"prompt": [USER], "chosen": [GOOD], "rejected": [GOOD]}
    same_chats = {"chosen": [USER, GOOD], "rejected": [USER, GOOD]}
    dataset = load(tmp_path, [same, FORMS["TRL, texts"], same_chats], tokenizer)
    assert len(dataset) == 1
    assert dataset.stats["dropped_identical"] == 2
    expected = "not used, because the chosen and the rejected answer are the same: 2 rows"
    assert expected in capsys.readouterr().out
    assert expected in [*unused_row_lines(dataset.stats, "", "")]
    with pytest.raises(InputError, match="no row is left: .* 1 have two answers that are the same"):
        load(tmp_path, [same], tokenizer)


def test_answers_that_truncation_makes_equal_are_not_used(tmp_path, tokenizer):
    same_start = {"prompt": "2+3?", "chosen": "5" * 90 + "1", "rejected": "5" * 90 + "2"}
    rows = [FORMS["TRL, texts"], same_start]
    dataset = load(tmp_path, rows, tokenizer, max_length=80, truncation="right")
    assert len(dataset) == 1
    assert dataset.stats["dropped_identical"] == 1
    assert dataset.stats["dropped_no_loss"] == 0


def test_an_empty_answer_is_trained_and_reported(tmp_path, tokenizer, capsys):
    dataset = load(tmp_path, [{"prompt": "2+3?", "chosen": "5", "rejected": ""}], tokenizer)
    assert [trained for _, trained in texts_of(dataset, 0, tokenizer)] == [
        "5<|im_end|>",
        "<|im_end|>",
    ]
    assert "an empty answer is trained (1 row)" in capsys.readouterr().out


# -- mistakes --------------------------------------------------------------------------------------

MISTAKES = {
    "no rejected answer": (
        {"prompt": "2+3?", "chosen": "5"},
        '"rejected" is missing; the row has prompt, chosen: name the columns in data.chosen_key',
    ),
    "neither answers nor a label": (
        {"question": "2+3?", "best": "5"},
        '"chosen" and "rejected" are missing; the row has question, best',
    ),
    "no prompt": (
        {"chosen": "5", "rejected": "6"},
        "\"chosen\" is the text '5', and the row has no prompt: name its column",
    ),
    "no prompt before messages": (
        {"chosen": [GOOD], "rejected": [BAD]},
        "the row has no prompt, and chosen and rejected begin with an answer",
    ),
    "other prompts": (
        {"chosen": [USER, GOOD], "rejected": say("1+1?", "6")},
        "chosen and rejected answer different prompts: the first message in which they differ, "
        'number 0, is not of the assistant in "chosen"',
    ),
    "chats that one side goes on with a question": (
        {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, GOOD, BAD]},
        "chosen and rejected answer different prompts: the first message in which they differ, "
        'number 2, is not of the assistant in "chosen"',
    ),
    "other prompts in HH": (
        {"chosen": HH + " 5", "rejected": HH.replace("Hi", "Hey") + " 6"},
        "chosen and rejected answer different prompts",
    ),
    "another prompt than the column's": (
        {"prompt": "1+1?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        '"prompt" is not the prompt that the chats of both answers',
    ),
    "one complete chat": (
        {"prompt": "2+3?", "chosen": [USER, GOOD], "rejected": "6"},
        '"chosen" begins with its prompt, and the other answer does not',
    ),
    "an HH text that ends with a question": (
        {"chosen": "\n\nHuman: a", "rejected": HH},
        '"chosen" must end with a turn of the Assistant',
    ),
    "an answer that is a number": (
        {"prompt": "2+3?", "chosen": 5, "rejected": 6},
        '"chosen" must be a text, a message or a list of messages, not',
    ),
    "a label that is a score": (
        {"prompt": "2+3?", "completion": "5", "label": 0.7},
        "\"label\" is '0.7': must be true for an answer that is desirable",
    ),
    "two labels that differ": (
        {"prompt": "2+3?", "completion": "5", "label": True, "kto_tag": "false"},
        "\"label\" is 'True', and \"kto_tag\" is 'false': leave out one of them, or set "
        "data.label_key=kto_tag, which does not read label",
    ),
    "a prompt that is to be trained": (
        {"prompt": [USER, GOOD | {"loss_mask": 1}, USER], "chosen": [GOOD], "rejected": [BAD]},
        '"message 1.loss_mask" is 1, but the message belongs to the prompt, and only answers are '
        'trained: leave out loss_mask, or set data.ignored_fields=["loss_mask"]',
    ),
    "a prompt with a label that is to be trained": (
        {"prompt": [USER, GOOD | {"train": True}, USER], "completion": [GOOD], "label": True},
        '"message 1.train" is 1, but the message belongs to the prompt',
    ),
    "a common beginning of chats that is to be trained": (
        {"chosen": [USER | {"loss_mask": 1}, GOOD], "rejected": [USER | {"loss_mask": 1}, BAD]},
        '"messages[0].loss_mask" is 1, but the role is user',
    ),
    "a prompt that is a list of texts": (
        {"prompt": ["2+3?"], "chosen": "5", "rejected": "6"},
        '"prompt" must be a list of messages, not',
    ),
    "a chat with a label that ends with a question": (
        {"messages": [USER, GOOD, USER], "label": True},
        '"messages" ends with a message of the role user: it must end with an answer',
    ),
    "a ShareGPT chat with a label that ends with a question": (
        {"conversations": [{"from": "human", "value": "2+3?"}], "label": True},
        '"conversations" ends with a message of the role user',
    ),
    "an answer that ends with a question": (
        {"prompt": [USER], "chosen": [GOOD, USER], "rejected": [BAD]},
        '"chosen" ends with a message of the role user: it must end with an answer',
    ),
    "an answer of an unknown role": (
        {"prompt": [USER], "chosen": [GOOD, GOOD | {"role": "robot"}], "rejected": [BAD]},
        "\"messages[2].role\" is 'robot'",
    ),
    "a prompt that ends with an answer": (
        {"prompt": [USER, GOOD], "chosen": "5", "rejected": "6"},
        '"prompt" ends with an answer of the assistant, and "chosen" is another one',
    ),
    "a prompt that ends with an answer before messages": (
        {"prompt": [USER, GOOD], "chosen": [GOOD], "rejected": [BAD]},
        '"prompt" ends with an answer of the assistant, and "chosen" is another one',
    ),
    "a prompt that is no chat": (
        {"conversations": "2+3?", "chosen": "5", "rejected": "6"},
        "\"conversations\" must be a list of messages, not '2+3?'",
    ),
    "a label beside answers": (
        FORMS["TRL, texts"] | {"label": True},
        'the row has both "chosen" and the label "label"',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_malformed_row_is_an_error_with_its_line(tmp_path, tokenizer, mistake):
    row, message = MISTAKES[mistake]
    with pytest.raises(InputError) as caught:
        load(tmp_path, [FORMS["TRL, texts"], row], tokenizer)
    assert f"rows.jsonl:2: {message}" in str(caught.value)


def test_other_names_of_columns(tmp_path, tokenizer):
    row = {"question": "2+3?", "best": "5", "worst": "6", "label": "easy"}
    keys = {"prompt_key": "question", "chosen_key": "best", "rejected_key": "worst"}
    dataset = load(tmp_path, [row], tokenizer, **keys, label_key=None)
    assert [trained for _, trained in texts_of(dataset, 0, tokenizer)] == [
        "5<|im_end|>",
        "6<|im_end|>",
    ]
    check_column_keys(data_options(**keys, label_key=None), {"data.train_files": dataset})
    with pytest.raises(InputError, match="data.chosen_key=good names no column"):
        wrong = data_options(**keys | {"chosen_key": "good"}, label_key=None)
        check_column_keys(wrong, {"data.train_files": dataset})


def test_a_template_that_loses_text_is_an_error_or_drops_the_pair(tmp_path, tokenizer, capsys):
    lossy = {
        "prompt": [USER],
        "chosen": [GOOD | {"reasoning_content": "two and three"}],
        "rejected": [BAD],
    }
    with pytest.raises(InputError, match="leaves out"):
        load(tmp_path, [FORMS["TRL, texts"], lossy], tokenizer)
    dataset = load(tmp_path, [FORMS["TRL, texts"], lossy], tokenizer, lost_fields="drop")
    assert len(dataset) == 1
    assert dataset.stats["dropped_lost_fields"] == 1
    lost = "the chat template leaves out reasoning_content (1 row): see data.lost_fields"
    assert lost in capsys.readouterr().out


@pytest.mark.parametrize("answers", [{"chosen": [GOOD], "rejected": [BAD]}, {"completion": [GOOD]}])
def test_a_prompt_is_not_trained_if_loss_masks_are_ignored(tmp_path, tokenizer, answers):
    prompt = [USER, GOOD | {"loss_mask": 1}, USER]
    row = {"prompt": prompt, **answers}
    if "completion" in answers:
        row["label"] = True
    dataset = load(tmp_path, [row], tokenizer, ignored_fields=["loss_mask"])
    assert texts_of(dataset, 0, tokenizer)[0][1] == "5<|im_end|>"


def test_an_answer_may_begin_with_the_result_of_a_tool():
    """Its prompt then ends with the call."""
    call = {"function": {"name": "add", "arguments": {}}}
    prompt = [USER, {"role": "assistant", "tool_calls": [call]}]
    results = [{"role": "tool", "content": text} for text in ("5", "6")]
    row = {"prompt": prompt, "chosen": [results[0], GOOD], "rejected": [results[1], BAD]}
    preference = read_preference(row, data_options(), has_template=True)
    context = [as_context(message) for message in prompt]
    assert preference.chosen == {"messages": [*context, results[0], GOOD]}
    assert preference.rejected == {"messages": [*context, results[1], BAD]}


def test_texts_of_hh_with_other_prompts_are_an_error_without_a_template():
    row = {"chosen": f"{HH} 5", "rejected": f"{HH.replace('Hi', 'Hey')} 6"}
    with pytest.raises(InputError, match="^chosen and rejected answer different prompts$"):
        read_preference(row, data_options(), has_template=False)


def test_other_texts_without_a_prompt_are_an_error_without_a_template():
    row = {"chosen": "5\n\nAssistant: 5", "rejected": "6\n\nAssistant: 6"}
    with pytest.raises(InputError, match='^"chosen" is the text .*, and the row has no prompt: '):
        read_preference(row, data_options(), has_template=False)


def test_the_prompt_of_a_row_is_not_changed():
    row = FORMS["TRL, messages"]
    before = json.dumps(row)
    read_preference(row, data_options(), has_template=True)
    assert json.dumps(row) == before


def test_texts_of_hh_without_a_question_have_no_prompt():
    """The columns have names of their own."""
    row = {"good": "\n\nAssistant: 5", "bad": "\n\nAssistant: 6"}
    options = data_options(chosen_key="good", rejected_key="bad")
    with pytest.raises(InputError) as error:
        read_preference(row, options, has_template=True)
    assert str(error.value) == (
        "the row has no prompt, and good and bad begin with an answer: name the column of the "
        "prompt in data.prompt_key"
    )


def test_the_use_of_columns_is_reported(tmp_path, tokenizer):
    dataset = load(tmp_path, [FORMS["LLaMA-Factory, Alpaca"]], tokenizer)
    (line, *_) = report_lines([tmp_path / "rows.jsonl"], dataset.uses, is_training=True)
    assert line == "rows.jsonl: reads instruction, chosen, rejected"
