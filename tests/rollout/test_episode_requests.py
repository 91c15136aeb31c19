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


# Requests of vLLM's protocol, each with its default value and with one that changes the tokens.
SWITCHES = {
    "add_generation_prompt": (True, False),
    "continue_final_message": (False, True),
    "echo": (False, True),
    "ignore_eos": (False, True),
    "include_reasoning": (True, False),
    "include_stop_str_in_output": (False, True),
    "parallel_tool_calls": (True, False),
    "stream": (False, True),
    "use_beam_search": (False, True),
    "length_penalty": (1.0, 2.0),
    "min_tokens": (0, 1),
    "presence_penalty": (0.0, 1.0),
    "repetition_penalty": (1.0, 1.1),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_may_have_its_default_value_alone(name):
    default, other = SWITCHES[name]
    read_chat(**{name: default})
    with pytest.raises(RequestError, match=f"{name}={other} is not supported"):
        read_chat(**{name: other})


@pytest.mark.parametrize("name", ["detokenize", "skip_special_tokens"])
def test_how_vllm_would_write_the_text_does_not_matter(name):
    for value in (True, False):
        read_chat(**{name: value})


@pytest.mark.parametrize(
    "read, fields, message",
    [
        (read_chat, {"temperature": 1.0}, "set rollout.temperature=1.0"),
        (read_chat, {"top_k": -1}, "top_k=-1 differs from rollout.top_k=20"),
        (read_chat, {"n": 2}, "send n requests"),
        (read_chat, {"tool_choice": "required"}, "it would force tokens"),
        (read_chat, {"max_tokens": 0}, "must be a positive integer"),
        (read_chat, {"stop": ["x", 1]}, "must be a text or a list of texts"),
        (read_chat, {"stop": ["x", ""]}, "must be a text or a list of texts"),
        (read_chat, {"stop": 1}, "must be a text or a list of texts"),
        (read_chat, {"unheard_of": 1}, "unheard_of=1 is not supported"),
        (read_chat, {"max_tokens": 5, "max_completion_tokens": 0}, "max_tokens=0 must be"),
        (read_generate, {"stop_token_ids": [6]}, r"turns end with the tokens \[7, 8\]"),
        (read_generate, {"stop_token_ids": [7, 6]}, r"turns end with the tokens \[7, 8\]"),
        (read_generate, {"min_tokens": 1}, "min_tokens=1 is not supported"),
    ],
)
def test_what_would_change_the_tokens_is_an_error(read, fields, message):
    with pytest.raises(RequestError, match=message):
        read(**fields)


POET = {"role": "poet", "content": "hello"}
PARTS = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": "x"}]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"messages": [*HELLO, POET]}, "\"messages[1].role\" is 'poet'"),
        (
            {"messages": [*HELLO, {"role": "user", "content": PARTS}]},
            "\"messages[1].content[1]\" is of the type 'image_url'",
        ),
        ({"tools": [TOOL, {"name": "add"}]}, '"tools[1]" must be'),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object, not [1]"),
    ],
)
def test_errors_point_to_the_part_of_a_request_that_is_wrong(fields, message):
    with pytest.raises(RequestError) as raised:
        read_chat(**fields)
    assert message in str(raised.value)


@pytest.mark.parametrize("token_ids", [[1, 10], [1, -1], [1, True], [1, 2.0], [], None, "12"])
def test_every_token_of_a_prompt_has_to_be_in_the_vocabulary(token_ids):
    with pytest.raises(RequestError, match="a list of integers from 0 to 9, not"):
        read_generate_request({"token_ids": token_ids}, SAMPLING, 10, end_ids={7, 8})


def test_empty_values_do_not_reach_the_template():
    """Clients send every field of their classes."""
    tool = {"type": "function", "function": {"name": "add", "description": None}}
    request = read_chat(
        messages=[HELLO[0] | {"name": None}],
        tools=[tool],
        chat_template_kwargs={"thinking": False, "documents": None},
    )
    assert request.messages == HELLO
    assert request.tools == [TOOL]
    assert request.template_kwargs == {"thinking": False}


@pytest.mark.parametrize("own, accepted, refused", [(0, [0, -1], [1]), (1, [1], [0, -1, 2])])
def test_a_top_k_of_zero_or_less_means_all_tokens(own, accepted, refused):
    sampling = Sampling(temperature=1.0, top_k=own, stop=[])
    for top_k in accepted:
        read_chat_request({"messages": HELLO, "top_k": top_k}, sampling)
    for top_k in refused:
        with pytest.raises(RequestError, match=f"top_k={top_k} differs from rollout.top_k={own}"):
            read_chat_request({"messages": HELLO, "top_k": top_k}, sampling)


def test_a_greedy_draw_has_no_use_for_other_settings_but_for_the_temperature():
    """A validation takes the most likely token, whatever top_p is. A sampled one is refused."""
    greedy = Sampling(temperature=0.0, section="validation")
    read_chat_request({"messages": HELLO, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, greedy)
    read_chat_request({"messages": HELLO, "temperature": 0}, greedy)
    body = {"messages": HELLO, "temperature": 0.7}
    with pytest.raises(RequestError, match="temperature=0.7 differs from validation.*, or set val"):
        read_chat_request(body, greedy)
    with pytest.raises(RequestError, match="temperature=0 differs from rollout.temperature=0.5"):
        read_chat(temperature=0)


@pytest.mark.parametrize(
    "fields", [{"top_p": 0.9}, {"min_p": 0.1}, {"temperature": "0.5"}, {"top_p": True}]
)
def test_each_setting_of_a_draw_is_compared(fields):
    (name,) = fields
    with pytest.raises(RequestError, match=f"{name}=.* differs from rollout.{name}="):
        read_chat(**fields)
    with pytest.raises(RequestError, match=f"{name}=.* differs from rollout.{name}="):
        read_generate(**fields)


def test_numbers_are_compared_up_to_rounding():
    sampling = Sampling(temperature=0.3)
    read_chat_request({"messages": HELLO, "temperature": 0.1 + 0.2}, sampling)
    with pytest.raises(RequestError, match="temperature=0.3001 differs"):
        read_chat_request({"messages": HELLO, "temperature": 0.3001}, sampling)


def test_a_reward_is_a_finite_number():
    assert read_reward({"reward": 2}) == 2.0
    for wrong in (None, True, "1", float("nan")):
        with pytest.raises(RequestError, match="must be a finite number"):
            read_reward({"reward": wrong})
