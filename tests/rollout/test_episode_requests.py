"""The fields of requests to the gateway."""

import pytest

from rollout.episodes.requests import (
    RequestError,
    Sampling,
    read_chat_request,
    read_generate_request,
    read_reward,
)

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add"}}
SAMPLING = Sampling(temperature=0.5, top_k=20, stop=["END"])


def read_chat(**fields):
    return read_chat_request({"messages": HELLO, **fields}, SAMPLING)


def read_generate(**fields):
    body = {"token_ids": [1, 2], "sampling_params": fields}
    return read_generate_request(body, SAMPLING, vocabulary_size=10, end_ids={7, 8})


@pytest.mark.parametrize("read", [read_chat, read_generate])
@pytest.mark.parametrize(
    "stop, expected",
    [
        (None, ["END"]),
        ("x", ["END", "x"]),
        (["x", "END", "y"], ["END", "x", "y"]),
        ([], ["END"]),
    ],
)
def test_a_turn_ends_at_the_stop_strings_of_the_draw_and_of_the_request(read, stop, expected):
    assert read(stop=stop).stop == expected


@pytest.mark.parametrize("read", [read_chat, read_generate])
def test_the_smallest_number_of_tokens_counts(read):
    assert read().max_tokens is None
    assert read(max_tokens=5).max_tokens == 5
    assert read_chat(max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert read_chat(max_tokens=2, max_completion_tokens=3).max_tokens == 2
    assert read(max_tokens=1).max_tokens == 1


@pytest.mark.parametrize(
    "read, logprobs, expected",
    [
        (read_chat, None, False),
        (read_chat, False, False),
        (read_chat, True, True),
        (read_generate, None, False),
        (read_generate, False, False),
        (read_generate, 0, True),
        (read_generate, 1, True),
        (read_generate, True, True),
    ],
)
def test_log_probabilities_are_returned_on_request(read, logprobs, expected):
    """0 asks for those of the sampled tokens alone, as in vLLM's SamplingParams."""
    assert read().has_logprobs is False
    assert read(logprobs=logprobs).has_logprobs is expected


def test_a_reply_is_searched_for_calls_of_the_tools_that_are_offered():
    assert not read_chat().may_call
    assert read_chat(tools=[TOOL]).may_call
    hidden = read_chat(tools=[TOOL], tool_choice="none")
    assert hidden.tools == [TOOL] and not hidden.may_call
    assert read_chat(tools=[]).tools is None


def test_values_that_the_draw_has_anyway_are_accepted():
    read_chat(temperature=0.5, top_k=20, top_p=1.0, n=1, stream=False, user="me")
    read_generate(temperature=0.5, stop_token_ids=[8])


@pytest.mark.parametrize(
    "read, fields, message",
    [
        (read_chat, {"temperature": 1.0}, "set rollout.temperature=1.0"),
        (read_chat, {"top_k": -1}, "top_k=-1 differs from rollout.top_k=20"),
        (read_chat, {"n": 2}, "send n requests"),
        (read_chat, {"tool_choice": "required"}, "it would force tokens"),
        (read_chat, {"max_tokens": 0}, "must be a positive integer"),
        (read_chat, {"stop": [1]}, "must be a text or a list of texts"),
        (read_chat, {"unheard_of": 1}, "unheard_of=1 is not supported"),
        (read_generate, {"stop_token_ids": [6]}, r"turns end with the tokens \[7, 8\]"),
    ],
)
def test_what_would_change_the_tokens_is_an_error(read, fields, message):
    with pytest.raises(RequestError, match=message):
        read(**fields)


@pytest.mark.parametrize("own, accepted, refused", [(0, [0, -1], [1]), (1, [1], [0, -1, 2])])
def test_a_top_k_of_zero_or_less_means_all_tokens(own, accepted, refused):
    sampling = Sampling(temperature=1.0, top_k=own, stop=[])
    for top_k in accepted:
        read_chat_request({"messages": HELLO, "top_k": top_k}, sampling)
    for top_k in refused:
        with pytest.raises(RequestError, match=f"top_k={top_k} differs from rollout.top_k={own}"):
            read_chat_request({"messages": HELLO, "top_k": top_k}, sampling)


def test_a_reward_is_a_finite_number():
    assert read_reward({"reward": 2}) == 2.0
    for wrong in (None, True, "1", float("nan")):
        with pytest.raises(RequestError, match="must be a finite number"):
            read_reward({"reward": wrong})
