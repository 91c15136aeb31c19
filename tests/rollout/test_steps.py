"""Rewards of steps: what a function may return, and at which tokens its steps end."""

import json
import random

import pytest
from transformers import PreTrainedTokenizerFast

from examples.arithmetic import make_tokenizer
from rollout.grading.results import Failure, Reward
from rollout.grading.scores import is_with_steps, read_score, with_steps
from rollout.grading.worker import RewardFunction
from rollout.steps import BLOCK, CharacterCounts, place_steps
from rollout.texts import decode_responses


def placed(steps, response="abcdef", score=1.0):
    return with_steps(read_score(score, {}), steps, response, "reward.function=f")


def test_the_score_includes_the_steps():
    assert placed([(2, 0.5), [6, -1]]) == {
        "score": 0.5,
        "parts": {},
        "steps": [[2, 0.5], [6, -1.0]],
    }
    with_parts = placed([(6, 2.0)], score={"right": 1.0, "short": 0.25})
    assert with_parts["score"] == 3.25
    assert with_parts["parts"] == {"right": 1.0, "short": 0.25}
    assert placed([], response="") == {"score": 1.0, "parts": {}, "steps": []}


@pytest.mark.parametrize(
    "steps, problem",
    [
        ([(7, 1.0)], "a step that ends after 7 characters of a response that has 6"),
        ([(0, 1.0)], "a step that ends after 0 characters of a response that has 6"),
        ([(-1, 1.0)], "a step that ends after -1 characters"),
        ([(3, 1.0), (3, 1.0)], "a step that ends after 3 characters, after one that ends after 3"),
        ([(2.0, 1.0)], "a step that ends at 2.0, which is not a number of characters"),
        ([(True, 1.0)], "a step that ends at True, which is not a number of characters"),
        ([(2, "x")], "a step with the reward 'x', which is not a finite number in fp32"),
        ([(2, float("nan"))], "a step with the reward nan"),
        ([0.5], "the step 0.5, which is not a pair (end, reward)"),
        ([(1, 2, 3)], "the step (1, 2, 3), which is not a pair (end, reward)"),
    ],
)
def test_a_wrong_step_is_a_failure_that_names_the_function(steps, problem):
    answer = placed(steps)
    assert answer["kind"] == "wrong step"
    assert answer["trace"].startswith(f"reward.function=f returned {problem}")


def test_a_failed_score_stays_one():
    assert placed([(1, 1.0)], score="x")["kind"] == "not a number"


def test_a_pair_of_numbers_has_no_steps():
    assert is_with_steps((1.0, []))
    assert not any(map(is_with_steps, [1.0, (1.0, 2.0), [1.0, []], {"a": 1}, (1.0, [], [])]))


SCORE = """
def one(response):
    return None

def group(responses):
    return None
"""
WITH_STEPS = (1.0, [(2, 0.5)])


def answers_of(folder, function: str, value, step_rewards: bool, responses=("abc",)) -> list[dict]:
    """Return what a worker answers if the function returns this value."""
    (folder / "score.py").write_text(SCORE)
    settings = {
        "function": f"{folder}/score.py:{function}",
        "kwargs": {},
        "conversation_keys": ["messages", "prompt"],
        "output": str(folder / "output.txt"),
        "weights": {},
        "step_rewards": step_rewards,
    }
    return RewardFunction(settings).answers(value, {"responses": list(responses)})


def test_a_worker_reads_steps_only_where_they_are_expected(tmp_path):
    placed_steps = {"score": 1.5, "parts": {}, "steps": [[2, 0.5]]}
    assert answers_of(tmp_path, "one", WITH_STEPS, True) == [placed_steps]
    assert answers_of(tmp_path, "one", 2.0, False) == [{"score": 2.0, "parts": {}}]
    (unexpected,) = answers_of(tmp_path, "one", WITH_STEPS, False)
    assert unexpected["kind"] == "not a number"
    assert unexpected["trace"].endswith("the rewards of steps: set reward.step_rewards=true")
    (missing,) = answers_of(tmp_path, "one", 2.0, True)
    assert missing["kind"] == "no steps"
    assert "score.py:one returned 2.0, not a pair" in missing["trace"]
    (wrong,) = answers_of(tmp_path, "one", (1.0, [(4, 0.5)]), True)
    assert "score.py:one returned a step that ends after 4 characters" in wrong["trace"]


def test_a_worker_gives_each_response_of_a_group_its_own_steps(tmp_path):
    values = [(1.0, [(2, 0.5)]), (2.0, [(3, 1.0)])]
    answers = answers_of(tmp_path, "group", values, True, ["ab", "abc"])
    assert [answer["steps"] for answer in answers] == [[[2, 0.5]], [[3, 1.0]]]
    kinds = [answer["kind"] for answer in answers_of(tmp_path, "group", values, True, ["abc"])]
    assert kinds == ["not a list"]


def ends_of(tokenizer, ids, steps, skip_special_tokens=True):
    """Return token -> reward for a response, laid behind another one."""
    results = [Reward(0.0, {}, [[1, 9.0]]), Reward(0.0, {}, steps)]
    other = tokenizer.encode("xy")
    rewards, ends = place_steps(tokenizer, [other, ids], results, skip_special_tokens)
    assert rewards[: len(other)].tolist() == [9.0, 0.0]
    assert ends[: len(other)].tolist() == [1.0, 0.0]
    own_rewards = rewards[len(other) :].tolist()
    own_ends = ends[len(other) :].tolist()
    return {t: own_rewards[t] for t, is_end in enumerate(own_ends) if is_end}


def test_a_step_ends_at_the_token_that_completes_its_last_character():
    """Tokens are bytes: é has two of them, and the euro sign three."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("aé€b")
    assert len(ids) == 7
    steps = [[1, 0.5], [2, 0.0], [3, -1.0], [4, 2.0]]
    assert ends_of(tokenizer, ids, steps) == {0: 0.5, 2: 0.0, 5: -1.0, 6: 2.0}


def test_special_tokens_are_characters_only_if_the_function_gets_them():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("<|im_start|>ab<|im_end|>")
    assert len(ids) == 4
    assert ends_of(tokenizer, ids, [[1, 1.0], [2, 2.0]]) == {1: 1.0, 2: 2.0}
    whole = decode_responses(tokenizer, [ids], [], False)[0]
    steps = [[len("<|im_start|>"), 1.0], [len(whole), 2.0]]
    assert ends_of(tokenizer, ids, steps, skip_special_tokens=False) == {0: 1.0, 3: 2.0}


def word_tokenizer():
    """Return a tokenizer with tokens of several characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["▁one", "▁two", "three", "▁"])}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("is_of_words", [False, True])
def test_characters_of_long_responses_are_counted_in_blocks(is_of_words):
    """The counts are those of decoding from the first token on."""
    rng = random.Random(0)
    if is_of_words:
        tokenizer = word_tokenizer()
        ids = rng.choices([0, 1, 2, 3], k=1000)
    else:
        tokenizer = make_tokenizer()
        ids = tokenizer.encode("".join(rng.choices("ab é€😀\ufffd", k=400)))
    counts = CharacterCounts(tokenizer, ids, True)
    # Each block of words would lose its first space.
    is_in_blocks = len(counts.starts) > len(ids) / BLOCK / 2
    assert is_in_blocks != is_of_words
    for token in range(len(ids)):
        text = tokenizer.decode(ids[: token + 1], skip_special_tokens=True)
        assert counts.up_to(token) == len(text.rstrip("\ufffd"))


def test_several_steps_may_end_at_one_token():
    tokenizer = word_tokenizer()
    ids = [0, 1, 2]
    assert tokenizer.decode(ids) == "one twothree"
    results = [Reward(0.0, {}, [[1, 1.0], [3, 0.5], [4, 0.25], [12, 4.0]])]
    rewards, ends = place_steps(tokenizer, [ids], results, True)
    assert rewards.tolist() == [1.5, 0.25, 4.0]
    assert ends.tolist() == [1, 1, 1]


def test_a_response_that_could_not_be_graded_has_no_steps():
    failed = Failure("raised", "", {}, "")
    rewards, ends = place_steps(make_tokenizer(), [[65], [66, 67]], [failed, None], True)
    assert rewards.tolist() == ends.tolist() == [0, 0, 0]


def test_an_unfinished_character_at_the_end_belongs_to_the_last_token():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("a€")[:-1]
    text = tokenizer.decode(ids)
    assert text == "a\ufffd"
    assert ends_of(tokenizer, ids, [[len(text), 1.0]]) == {len(ids) - 1: 1.0}


def test_steps_are_json():
    assert json.loads(json.dumps(placed([(2, 0.5)])))["steps"] == [[2, 0.5]]
