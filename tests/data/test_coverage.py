"""Characters that a tokenizer drops, because its vocabulary lacks them."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from config import InputError, load
from data.chat import encoding
from data.chat.coverage import first_dropped
from data.chat.tokenizer import ChatTokenizer, load_tokenizer
from data.chat.tokens import Tokens
from tests.data.chat_templates import CHATML, make_tokenizer
from tests.data.test_chat import encode, options, say


def lower_case_tokenizer(unknown=None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each of the characters of CHATML and of a to z."""
    characters = "abcdefghijklmnopqrstuvwxyz<|>_ \n"
    vocabulary = {character: i for i, character in enumerate(characters)}
    if unknown:
        vocabulary[unknown] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        unk_token=unknown,
        chat_template=CHATML,
    )


@pytest.mark.parametrize("row", [{"messages": say("q", "a7b")}, {"prompt": "q", "response": "a7b"}])
def test_a_row_with_a_character_that_would_be_dropped_is_an_error(row):
    chat = ChatTokenizer(lower_case_tokenizer())
    with pytest.raises(InputError, match="has no token for '7' in '"):
        encode(row, chat, options())


def test_other_rows_of_its_batch_are_encoded():
    chat = ChatTokenizer(lower_case_tokenizer())
    rows = [{"messages": say("q", "a7")}, {"messages": say("q", "a")}]
    bad, good = encoding.encode_together([encoding.encode(row, chat, options()) for row in rows])
    assert isinstance(bad, InputError)
    assert chat.decode(good.input_ids).count("a") > 0


@pytest.mark.parametrize("tokenizer", [make_tokenizer(CHATML), lower_case_tokenizer("<unk>")])
def test_nothing_is_dropped_with_tokens_for_all_bytes_or_an_unknown_token(tokenizer):
    chat = ChatTokenizer(tokenizer)
    assert not chat.drops_characters
    assert chat.tokenize("\u00e9\U0001f600").ids


def test_a_tokenizer_that_transformers_rebuilds_for_another_vocabulary(tmp_path):
    """Of a model of Qwen2, transformers reads vocabulary and merges, and nothing else."""
    words = Tokenizer(models.WordLevel(vocab={"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    saved = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<unk>")
    saved.save_pretrained(tmp_path)
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path)
    loaded = load_tokenizer(load("sft.yaml", ["data.train_files=x", f"model.path={tmp_path}"]))
    with pytest.raises(InputError, match=r"Qwen2Tokenizer\) has no token for 'onetw' in 'one two'"):
        ChatTokenizer(loaded).tokenize("one two")


@pytest.mark.parametrize(
    "text, spans, position",
    [
        ("ab", [(0, 1), (1, 2)], None),
        ("a b\u200b", [(0, 1), (2, 3)], None),  # spaces, and characters that nobody sees
        ("abc", [(0, 1), (2, 3)], 1),
        ("abc", [(1, 3)], 0),
        ("abc", [(0, 2)], 2),
        ("abcd", [(0, 3), (1, 2), (3, 4)], None),  # parts of a character have the same span
        ("a", [], 0),
    ],
)
def test_the_first_character_without_a_token(text, spans, position):
    assert first_dropped(text, Tokens([0] * len(spans), spans.__getitem__)) == position
