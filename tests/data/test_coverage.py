"""Characters that a tokenizer drops, because its vocabulary lacks them."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, PreTrainedTokenizerFast

from config import InputError, load
from data import unknown_tokens
from data.chat import encoding
from data.chat.tokenizer import ChatTokenizer, load_tokenizer
from data.dataset import TokenDataset, tokenize
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


@pytest.mark.parametrize(
    "parts, missing",
    [
        ({"end_of_word_suffix": "</w>"}, "q</w>"),  # "q" is known within a word only
        ({"continuing_subword_prefix": "##"}, "q"),  # only after other letters
    ],
)
def test_a_character_that_is_known_at_some_places_of_a_word_alone_is_found(parts, missing):
    characters = "abcdefghijklmnopqrstuvwxyz"
    if "end_of_word_suffix" in parts:
        others = [f"{c}</w>" for c in characters]
    else:
        others = [f"##{c}" for c in characters]
    tokens = [token for token in [*characters, *others] if token != missing]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], **parts))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    chat = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert chat.coverage.unknown("aqz") == {"q"}


def test_one_missing_character_of_a_large_vocabulary_is_found():
    """A vocabulary of characters, without bytes, rarely has all that a data set contains."""
    characters = [chr(number) for number in range(0x4E00, 0xA000) if number != 0x4E01]
    vocabulary = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    chat = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert chat.tokenize("\u4e00\u4e02").ids == [0, 1]
    with pytest.raises(InputError, match="has no token for '\u4e01' in '\u4e00\u4e01'"):
        chat.tokenize("\u4e00\u4e01")


@pytest.mark.parametrize("character", ["\r", "\u200b", "\N{REPLACEMENT CHARACTER}"])
def test_characters_that_say_nothing_may_be_dropped(character):
    chat = ChatTokenizer(lower_case_tokenizer())
    assert chat.tokenize(character).ids == []
    assert chat.decode(chat.tokenize(f"a{character}b").ids) == "a b"


def test_a_character_that_a_word_keeps_does_not_hide_one_that_is_dropped():
    """Here "q" is known after other letters only, and "z" nowhere."""
    vocabulary = {token: i for i, token in enumerate(["a", "##a", "##q"])}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[], continuing_subword_prefix="##"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    chat = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
    assert chat.decode(chat.tokenize("aq").ids) == "a ##q"
    with pytest.raises(InputError, match="has no token for 'z' in 'aq az'"):
        chat.tokenize("aq az")


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
    learned = [i for i, is_learned in zip(good.input_ids, good.loss_mask) if is_learned]
    assert chat.decode(learned).split() == ["a", "<|im_end|>"]


@pytest.mark.parametrize("tokenizer", [make_tokenizer(CHATML), lower_case_tokenizer("<unk>")])
def test_nothing_is_dropped_with_tokens_for_all_bytes_or_an_unknown_token(tokenizer):
    chat = ChatTokenizer(tokenizer)
    assert not chat.coverage.unknown("\u00e9\U0001f600")
    assert chat.tokenize("\u00e9\U0001f600").ids


@pytest.mark.parametrize("text", ["a7b", "a<unk>b"])
def test_the_unknown_token_is_a_token_of_texts_unlike_control_tokens(text):
    tokenizer = lower_case_tokenizer("<unk>")
    chat = ChatTokenizer(tokenizer)
    assert chat.special.keys() == {*tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])}
    strict = options(special_tokens_in_text="error")
    ids, loss_mask = encode({"messages": say("q", text)}, chat, strict)
    learned = [i for i, is_learned in zip(ids, loss_mask) if is_learned]
    assert tokenizer.unk_token_id in learned
    with pytest.raises(InputError, match="<.im_start.>"):
        encode({"messages": say("q", f"{text}<|im_start|>")}, chat, strict)


def test_a_tokenizer_that_transformers_rebuilds_for_another_vocabulary(tmp_path):
    """Of a model of Qwen2, transformers reads vocabulary and merges, and nothing else."""
    words = Tokenizer(models.WordLevel(vocab={"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    saved = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<unk>")
    saved.save_pretrained(tmp_path)
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path)
    loaded = load_tokenizer(load("sft.yaml", ["data.train_files=x", f"model.path={tmp_path}"]))
    with pytest.raises(InputError, match=r"Qwen2Tokenizer\) has no token for 'o' in 'one two'"):
        ChatTokenizer(loaded).tokenize("one two")


@pytest.mark.parametrize("text", ["a7b", "a7b\n", "7", "a longer word7withoutspaces"])
def test_plain_text_between_tokens_that_the_tokenizer_adds(text):
    tokenizer = lower_case_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 32)]
    )
    tokenizer.chat_template = None
    chat = ChatTokenizer(tokenizer)
    row = {"prompt": "q", "response": "a"}
    ids, _ = encode(row, chat, options())
    assert chat.decode(ids).split() == ["<|im_start|>", "q", "a", "<|im_end|>"]
    with pytest.raises(InputError, match="has no token for '7' in '"):
        encode(row | {"response": text}, chat, options())


def test_characters_of_which_only_some_bytes_have_tokens_are_dropped():
    alphabet = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter != "\u00a9"]
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    chat = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert chat.tokenize("\u00e8").ids  # C3 A8 in UTF-8
    with pytest.raises(InputError, match="has no token for '\u00e9' in "):
        chat.tokenize("\u00e9")  # C3 A9


def test_words_whose_letters_have_no_tokens_of_their_own():
    words = Tokenizer(models.WordLevel(vocab={"one": 0, "two": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    chat = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
    assert chat.tokenize("one two").ids == [0, 1]


def load_rows(folder, tokenizer, answers):
    """Return the data set of questions with these answers."""
    path = folder / "rows.jsonl"
    rows = [{"messages": say("q", answer)} for answer in answers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = options(max_length=100, truncation="error", num_proc=None)
    return TokenDataset.load(tokenize(str(path), tokenizer, settings, folder / "cache", folder))


def test_rows_with_unknown_tokens_are_counted(tmp_path, capsys):
    answers = ["seven", "7 of 9", "five", "7"]
    for _ in range(2):  # the second time, from the cache
        dataset = load_rows(tmp_path, lower_case_tokenizer("<unk>"), answers)
        assert len(dataset) == 4
        line = "data: the tokenizer writes '<unk>' for text that it cannot represent: 2 rows"
        assert line in capsys.readouterr().out
    load_rows(tmp_path, lower_case_tokenizer("<unk>"), ["seven"])
    assert "cannot represent" not in capsys.readouterr().out


def test_a_row_that_consists_mostly_of_unknown_tokens_is_named(tmp_path):
    message = "rows.jsonl:2: 30 of .* tokens are '<unk>', which the tokenizer .* cannot represent"
    with pytest.raises(InputError, match=message):
        load_rows(tmp_path, lower_case_tokenizer("<unk>"), ["seven", "7" * 30])


def test_an_unknown_token_that_also_ends_texts_tells_nothing(tmp_path, capsys):
    """As in GPT-2."""
    tokenizer = lower_case_tokenizer("<unk>")
    tokenizer.eos_token = "<unk>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    load_rows(tmp_path, tokenizer, ["seven"])
    assert "cannot represent" not in capsys.readouterr().out


def test_neighbouring_unknown_tokens_of_two_rows_are_two_rows():
    ids = np.array([5, 0, 0, 5, 5])
    assert unknown_tokens.count_rows(ids, np.array([0, 2, 4, 5]), 0) == {unknown_tokens.COUNT: 2}
