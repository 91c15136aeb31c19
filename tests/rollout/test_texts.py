"""The texts of responses that rewards see."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollout.texts import decode_responses

WORDS = ["<|channel|>", "<|end|>", "final", "4", "2", "\n\n", "\n\nQ", ":", "é"]


@pytest.fixture(scope="module")
def tokenizer():
    """Tokens are whole words, some of which reach beyond a stop string."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="é"))
    core.decoder = decoders.Fuse()
    special = ["<|channel|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=special
    )


def ids(*words):
    return [WORDS.index(word) for word in words]


@pytest.mark.parametrize(
    "words, stop, kept, skipped",
    [
        (["4", "2", "<|end|>"], [], "42<|end|>", "42"),
        (["<|channel|>", "final", "4", "<|end|>"], [], "<|channel|>final4<|end|>", "final4"),
        (["4", "<|end|>"], ["<|end|>"], "4", "4"),
        (["<|channel|>", "4", "<|end|>"], ["<|end|>"], "<|channel|>4", "4"),
        (["4", "\n\nQ", ":"], ["Q:"], "4\n\n", "4\n\n"),
        (["<|channel|>", "4", "\n\nQ", ":"], ["Q:"], "<|channel|>4\n\n", "4\n\n"),
        (["4", "\n\nQ"], ["\n\n"], "4", "4"),
        (["4", "2"], ["\n\n", ":"], "42", "42"),
        ([":"], [":"], "", ""),
        (["é", "4", ":", "\n\n"], ["\n\n", ":"], "é4:", "é4:"),
        ([], ["\n\n"], "", ""),
    ],
)
def test_a_stop_string_is_no_part_of_a_response(tokenizer, words, stop, kept, skipped):
    responses = [ids(*words), ids("4")]
    assert decode_responses(tokenizer, responses, stop, False) == [kept, "4"]
    assert decode_responses(tokenizer, responses, stop, True) == [skipped, "4"]
