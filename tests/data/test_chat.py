"""Which text is learned, to the character, under the chat templates in use."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from omegaconf import OmegaConf
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from config import InputError
from data.chat import encoding
from data.chat.conversation import Conversation
from data.chat.spans import search_spans
from data.chat.template_mask import marked_spans
from data.chat.tokenizer import ChatTokenizer, load_tokenizer
from data.rows import TemplateInputs
from tests.data.chat_templates import (
    APERTUS,
    APRIEL,
    CHATML,
    CONTROL,
    GEMMA4,
    GLM,
    LLAMA3,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN15,
    STRICT,
    THINKING,
    make_tokenizer,
    read_template,
)


def options(**changes):
    return SimpleNamespace(
        **dict(
            messages_key="messages",
            prompt_key="prompt",
            response_key="response",
            images_key="images",
            tools_key="tools",
            template_kwargs_key="chat_template_kwargs",
            system_key="system",
            lost_fields="error",
            ignored_fields=[],
            system_prompt=None,
            train_on="all",
            special_tokens_in_text=None,
        )
        | changes
    )


def encode(row, chat, options):
    (result,) = encoding.encode_together([encoding.encode(row, chat, options)])
    if isinstance(result, InputError):
        raise result
    return result[:2]


def losses_of(row, tokenizer):
    """Return (kind, field) of each loss of a row."""
    encoded = encoding.encode(row, ChatTokenizer(tokenizer), options())
    (result,) = encoding.encode_together([encoded])
    return [(loss.kind, loss.field) for loss in result.losses]


def learned_text(row, tokenizer):
    """Return the learned tokens of a row as one text."""
    ids, mask = encode(row, ChatTokenizer(tokenizer), options())
    return tokenizer.decode([token for token, is_learned in zip(ids, mask) if is_learned])


def trained(template, row, ends=(), tail=(), **changes):
    """Return the runs of learned tokens of a row, as texts.

    On the way, checks the ids: those of the template, followed by the tokens of `tail`.

    Args:
        template: a chat template, or a tokenizer that has one.
        ends: tokens that end generation besides the tokenizer's eos.
        changes: options that differ from the defaults.
    """
    is_template = isinstance(template, (str, type(None)))
    tokenizer = make_tokenizer(template) if is_template else template
    chat = ChatTokenizer(tokenizer, tokenizer.convert_tokens_to_ids(list(ends)))
    ids, mask = encode(row, chat, options(**changes))
    assert len(ids) == len(mask)
    assert set(mask) <= {0, 1}
    assert mask[0] == 0
    if row.get("messages") and "None" not in str(row):
        assert ids == template_ids(row, tokenizer) + tokenizer.convert_tokens_to_ids(list(tail))
    return [tokenizer.decode(run) for run in runs_of(ids, mask)]


def template_ids(row, tokenizer):
    """Return the ids that transformers gives for a row."""
    column = {key: value for key, value in row.items() if key == "enable_thinking"}
    arguments = row.get("chat_template_kwargs", column)
    return tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), return_dict=False, **arguments
    )


def runs_of(ids, mask):
    """Return each run of ids whose mask is 1."""
    runs = []
    for is_learned, group in itertools.groupby(zip(ids, mask), key=lambda pair: pair[1]):
        if is_learned:
            runs.append([token for token, _ in group])
    return runs


def say(*turns):
    """user("..."), assistant("...") in turn; a dict stands for itself."""
    roles = iter(("user", "assistant") * len(turns))
    return [t if isinstance(t, dict) else {"role": next(roles), "content": t} for t in turns]


def call(name, **arguments):
    return {"function": {"name": name, "arguments": arguments}}


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SUB = '<tool_call>\n{"name": "sub", "arguments": {"b": "x"}}\n</tool_call>'
AGENT = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "tool_calls": [call("add", a=1), call("sub", b="x")]},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "y"},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.mark.parametrize("template", [CHATML, QWEN2, STRICT])
def test_chatml(template):
    row = {"messages": say("hi", "hello ", "the <think> cat", " sat\n")}
    assert trained(template, row) == ["hello <|im_end|>", " sat\n<|im_end|>"]
    assert trained(template, row, train_on="last") == [" sat\n<|im_end|>"]
    row["messages"][3]["loss_mask"] = 0
    assert trained(template, row) == ["hello <|im_end|>"]
    assert trained(template, row, train_on="last") == []
    row["messages"][3]["loss_mask"] = 1
    row["messages"][1]["loss_mask"] = False
    assert trained(template, row) == [" sat\n<|im_end|>"]


@pytest.mark.parametrize("template", [QWEN2, STRICT])
def test_tool_calls_without_content_and_merged_results(template):
    """Rendering single messages would be wrong here.

    It would give each tool result a user turn, and repeat the default system prompt.
    """
    # The turn opens "<|im_start|>assistant" + "\n<tool_call>": the newline is the prompt's.
    expected = [f"{ADD}\n{SUB}<|im_end|>", "It is 2.<|im_end|>"]
    assert trained(template, {"messages": AGENT, "tools": [TOOL]}) == expected
    content_none = [{"content": None, "tool_calls": None} | m for m in AGENT]
    assert trained(template, {"messages": content_none, "tools": None}) == expected


def test_strict_template_with_a_greeting_first():
    """The chat before the first turn has no user query, so the template rejects it.

    Then the header is searched for.
    """
    greeting = {"role": "assistant", "content": "welcome"}
    row = {
        "messages": [
            {"role": "system", "content": "<|im_start|>assistant\nfake"},
            greeting,
            *say("q", "a"),
        ]
    }
    assert trained(STRICT, row) == ["welcome<|im_end|>", "a<|im_end|>"]
    assert trained(STRICT, {"messages": [greeting, *say("q", "a")]}) == [
        "welcome<|im_end|>",
        "a<|im_end|>",
    ]
    assert trained(QWEN2, {"messages": [greeting, *say("q", "a")]}) == [
        "welcome<|im_end|>",
        "a<|im_end|>",
    ]


def test_consecutive_assistant_turns():
    messages = [*say("q", "one"), {"role": "assistant", "content": "two"}, *say("q", "three")]
    for template in (CHATML, QWEN2, QWEN3):
        *texts, last = trained(template, {"messages": messages})
        assert texts == ["one<|im_end|>", "two<|im_end|>"]
        assert last == ("<think>\n\n</think>\n\n" if template == QWEN3 else "") + "three<|im_end|>"


@pytest.mark.parametrize("split", [False, True])
def test_qwen3_drops_earlier_thinking(split):
    def turn(thought, text, **more):
        if split:
            return {"role": "assistant", "content": text, "reasoning_content": thought} | more
        return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{text}"} | more

    one = [*say("q1"), turn("t1", "a1")]
    assert trained(QWEN3, {"messages": one}) == ["<think>\nt1\n</think>\n\na1<|im_end|>"]
    two = [*one, *say("q2"), turn("t2", "a2")]
    assert trained(QWEN3, {"messages": two}) == [
        "a1<|im_end|>",
        "<think>\nt2\n</think>\n\na2<|im_end|>",
    ]
    # Thinking around tool calls stays after the last query, and is dropped before it, where the
    # content may be empty.
    agent = [
        *say("q1"),
        turn("t1", "", tool_calls=[call("add", a=1)]),
        {"role": "tool", "content": "2"},
        turn("t2", "so", tool_calls=[call("sub", b="x")]),
        {"role": "tool", "content": "y"},
        {"role": "tool", "content": "z"},
        turn("t3", "done"),
    ]
    assert trained(QWEN3, {"messages": agent, "tools": [TOOL]}) == [
        f"<think>\nt1\n</think>\n\n{ADD}<|im_end|>",
        f"<think>\nt2\n</think>\n\nso\n{SUB}<|im_end|>",
        "<think>\nt3\n</think>\n\ndone<|im_end|>",
    ]
    assert trained(QWEN3, {"messages": [*agent, *say("q2"), turn("t4", "bye")]}) == [
        f"{ADD}<|im_end|>",
        f"so\n{SUB}<|im_end|>",
        "done<|im_end|>",
        "<think>\nt4\n</think>\n\nbye<|im_end|>",
    ]


def test_qwen3_without_thinking():
    """The empty think block is in the prompt of the last turn, so it is not learned.

    Earlier turns have none.
    """
    row = {
        "messages": say("q1", "a1", "q2", "a2"),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert trained(QWEN3, row) == ["a1<|im_end|>", "a2<|im_end|>"]
    column = {"messages": row["messages"], "enable_thinking": False}
    assert trained(QWEN3, column) == ["a1<|im_end|>", "a2<|im_end|>"]
    thinks = {
        "messages": row["messages"],
        "enable_thinking": None,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    assert trained(QWEN3, thinks) == ["a1<|im_end|>", "<think>\n\n</think>\n\na2<|im_end|>"]


def test_text_like_the_template_in_contents():
    """Headers and ends of turns that are quoted in contents are not taken for real ones."""
    fake = "see <|im_start|>assistant\nno<|im_end|>\nok"
    row = {"messages": say(fake, f"<think>t</think>{fake}", fake, "a2"), "enable_thinking": False}
    assert trained(QWEN3, row) == [f"{fake}<|im_end|>", "a2<|im_end|>"]
    assert trained(CHATML, {"messages": say(fake, fake)}) == [f"{fake}<|im_end|>"]


def test_tool_responses_as_user_messages():
    wrapped = "<tool_response>\n2\n</tool_response>"
    messages = say("q1", "<think>t1</think>call", wrapped, "<think>t2</think>a1")
    assert trained(QWEN3, {"messages": messages}) == [
        "<think>\nt1\n</think>\n\ncall<|im_end|>",
        "<think>\nt2\n</think>\n\na1<|im_end|>",
    ]
    assert trained(QWEN3, {"messages": [*messages, *say("q2", "a2")]})[:2] == [
        "call<|im_end|>",
        "a1<|im_end|>",
    ]


def test_generation_prompt_that_opens_the_thinking():
    row = {
        "messages": say("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")
    }
    assert trained(THINKING, row) == ["a1<|im_end|>", "t2\n</think>\n\na2<|im_end|>"]
    assert trained(THINKING, row, train_on="last") == ["t2\n</think>\n\na2<|im_end|>"]


def test_llama3():
    tokenizer = make_tokenizer(LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>")
    row = {
        "messages": [{"role": "system", "content": "s"}, *say("q1", " a1 \n", "q2", "\nthe cat")]
    }
    assert trained(tokenizer, row) == ["a1<|eot_id|>", "the cat<|eot_id|>"]
    ids, _ = encode(row, ChatTokenizer(tokenizer), options())
    assert ids.count(tokenizer.bos_token_id) == 1


def test_mistral():
    assert trained(MISTRAL, {"messages": say("q1", "a1", "q2", "a2")}) == [" a1</s>", " a2</s>"]
    calls = '[TOOL_CALLS] [{"function": {"arguments": {"a": 1}, "name": "add"}}]</s>'
    agent = [
        *say("q1"),
        {"role": "assistant", "content": None, "tool_calls": [call("add", a=1)]},
        {"role": "tool", "content": 'two\n"2"'},
        {"role": "assistant", "content": "it is 2"},
    ]
    texts = trained(MISTRAL, {"messages": agent, "tools": [TOOL]})
    assert [
        t.replace(
            '{"name": "add", "arguments": {"a": 1}}', '{"arguments": {"a": 1}, "name": "add"}'
        )
        for t in texts
    ] == [calls, " it is 2</s>"]
    texts = trained(MISTRAL, {"messages": [*agent, *say("q2", "a2")], "tools": [TOOL]})
    assert texts[0].startswith("[TOOL_CALLS] [{")
    assert texts[0].endswith("]</s>")
    assert texts[1:] == [" it is 2</s>", " a2</s>"]


HEADER = "{{ '<|im_start|>assistant\n' }}"
START = "{% generation %}"
CONTENT_AND_END = "{{ m.content + '<|im_end|>' }}"
STOP = "{% endgeneration %}"


def marking(turn):
    """Return a ChatML template that writes `turn` for the assistant's messages."""
    return (
        "{%- for m in messages %}{% if m.role == 'assistant' %}" + turn + "{{ '\n' }}{% else %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@pytest.mark.parametrize(
    "turn, is_used",
    [
        (HEADER + START + CONTENT_AND_END + STOP, True),
        (HEADER + START + "{{ m.content }}" + STOP + "{{ '<|im_end|>' }}", False),  # no end token
        (START + HEADER + CONTENT_AND_END + STOP, False),  # with the header
        (HEADER + START + CONTENT_AND_END + "{{ '\n' }}" + STOP, False),  # more than the end token
    ],
)
def test_a_template_that_marks_the_turns_itself(turn, is_used):
    """Exact marks are used; otherwise turns are searched for, with the same result."""
    tokenizer = make_tokenizer(marking(turn), eos="<|im_end|>")
    row = {"messages": say("q1", "a1", "q2", "the cat")}
    assert trained(tokenizer, row) == ["a1<|im_end|>", "the cat<|im_end|>"]
    assert trained(tokenizer, row, train_on="last") == ["the cat<|im_end|>"]
    conversation = Conversation(
        row["messages"], ChatTokenizer(tokenizer), TemplateInputs(tools=None, arguments={})
    )
    spans = marked_spans(conversation, [1, 3])
    assert (spans is not None) == is_used
    if is_used:
        assert spans == search_spans(conversation, [1, 3])


@pytest.mark.parametrize(
    "question, answer, tools, arguments, is_used",
    [
        ("user", "a1", None, {}, True),
        ("tool", "a1", None, {}, False),
        ("user", "a1 <|im_end|> b1", None, {}, False),
        ("user", "a1", [TOOL], {}, False),
        ("user", "a1", None, {"enable_thinking": False}, False),
    ],
    ids=["plain", "role tool", "an end token in a text", "tools", "an argument"],
)
def test_marks_of_a_template_are_only_used_for_plain_chats(
    question, answer, tools, arguments, is_used
):
    """Others may have another generation prompt, or go on after the end token."""
    template = marking(HEADER + START + CONTENT_AND_END + STOP)
    chat = ChatTokenizer(make_tokenizer(template, eos="<|im_end|>"))
    messages = [{"role": question, "content": "q1"}, {"role": "assistant", "content": answer}]
    conversation = Conversation(messages, chat, TemplateInputs(tools, arguments))
    assert (marked_spans(conversation, [1]) is not None) == is_used


def test_a_turn_ends_with_the_first_text_that_ends_turns():
    """The header of the next message begins with the same characters as the end."""
    template = (
        "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content }}"
        "{{ '###' if m.role == 'assistant' }}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}### assistant\n{% endif %}"
    )
    row = {"messages": say("one", "two", "three", "four")}
    assert trained(template, row) == ["two###", "four###"]


def test_turns_that_cannot_be_located_are_errors():
    no_header = (
        "{%- for m in messages %}{{ '<' ~ loop.length ~ m.role ~ '>' ~ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = {"messages": say("q1", "a1", "q2", "a2")}
    with pytest.raises(InputError, match="cannot locate the assistant turn of message 1"):
        trained(no_header, row)
    # Like gpt-oss: the last turn ends with a token of its own.
    own_end = (
        "{%- for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}"
        "{{ '</s>' if loop.last and m.role == 'assistant' else '.' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with pytest.raises(InputError, match="message 1 .* nothing after it would teach"):
        trained(own_end, row)
    assert trained(own_end, row, train_on="last") == ["a2</s>"]


def test_phi3_closes_a_text_with_a_token_that_no_turn_has():
    phi3 = (
        "{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}"
    )
    tokenizer = make_tokenizer(phi3)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|end|>", "<|assistant|>", "<|user|>"]}
    )
    assert trained(tokenizer, {"messages": say("q1", "a1", "q2", "a2")}) == [
        "a1<|end|>",
        "a2<|end|>",
    ]


@pytest.mark.parametrize("single", [False, True])
def test_a_missing_end_of_the_last_turn_is_added_and_learned(single):
    """The end comes with the next message, or is its header.

    It is added after the last turn, so that a model learns to stop.
    """
    row = {"messages": say("q1", "a1")} if single else {"messages": say("q1", "a1", "q2", " a2 ")}
    ends = [1] if single else [1, 2]

    def answers(end):
        return ["a1" + end, " a2 " + end][: len(ends)]

    assert trained(QWEN15, row, tail=["<|im_end|>"]) == answers("<|im_end|>")
    assert trained(make_tokenizer(QWEN15, eos="<|im_end|>"), row, tail=["<|im_end|>"]) == answers(
        "<|im_end|>"
    )
    assert trained(
        make_tokenizer(APERTUS, eos="<|a_end|>", control=CONTROL), row, tail=["<|a_end|>"]
    ) == answers("<|a_end|>")
    glm = make_tokenizer(GLM, control=CONTROL)
    assert trained(glm, row, ["<|user|>", "<|observation|>"], tail=["<|user|>"]) == answers(
        "<|user|>"
    )
    with pytest.raises(
        InputError,
        match="nothing after it would teach the model to stop: .*eos_token_id of generation_con",
    ):
        trained(glm, row)  # <|user|> ends nothing
    apriel = make_tokenizer(APRIEL, eos="<|a_end|>", control=CONTROL)
    ids, mask = encode(row, ChatTokenizer(apriel), options())
    assert (
        apriel.decode(ids)
        == apriel.apply_chat_template(row["messages"], tokenize=False) + "\n<|a_end|>"
    )
    assert apriel.decode([t for t, m in zip(ids, mask) if m]) == "".join(answers("\n<|a_end|>"))


def test_a_tool_call_ends_with_the_header_of_its_result():
    glm = make_tokenizer(GLM, control=CONTROL)
    ends = ["<|user|>", "<|observation|>"]
    add = "\n<tool_call>add\na: 1\n</tool_call>"
    sub = "\n<tool_call>sub\nb: x\n</tool_call>"
    assert trained(glm, {"messages": AGENT[:3]}, ends) == [add + sub + "<|observation|>"]
    assert trained(glm, {"messages": AGENT[:2]}, ends, tail=["<|observation|>"]) == [
        add + sub + "<|observation|>"
    ]


def test_tool_results_inside_the_turn_of_the_assistant_are_not_learned():
    gemma = make_tokenizer(GEMMA4, eos="<turn|>", control=CONTROL)
    messages = [
        *say("q1"),
        {"role": "assistant", "content": "I add.", "tool_calls": [call("add", a="one")]},
        {"role": "tool", "content": "the result"},
        {"role": "assistant", "content": "It is 2."},
        *say("q2", "bye"),
    ]
    add = '<|tool_call>call:add{"a": "one"}<tool_call|><|tool_response>'
    ends = ["<|tool_response>"]
    assert trained(gemma, {"messages": messages}, ends) == [
        add,
        "I add.It is 2.<turn|>",
        "bye<turn|>",
    ]
    assert trained(gemma, {"messages": messages[:2]}, ends) == [
        add.replace("<|tool_r", "I add.<|tool_r")
    ]
    silent_call = {"role": "assistant", "tool_calls": messages[1]["tool_calls"]}
    silent = [messages[0], silent_call, *messages[2:]]
    assert trained(gemma, {"messages": silent}, ends) == [add, "It is 2.<turn|>", "bye<turn|>"]
    unlearned = [*messages[:3], messages[3] | {"loss_mask": 0}, *messages[4:]]
    assert trained(gemma, {"messages": unlearned}, ends) == [add, "I add.", "bye<turn|>"]
    with pytest.raises(
        InputError, match="message 1 .*nothing after it would teach the model to stop"
    ):
        trained(gemma, {"messages": messages})
    # Results in the message itself, as Gemma's own data have them.
    inside = read_template("tool_responses")
    gemma = make_tokenizer(inside, eos="<turn|>", control=CONTROL)
    answer = {
        "role": "assistant",
        "content": "so",
        "tool_calls": [call("add")],
        "tool_responses": [{"response": "two"}],
    }
    assert trained(gemma, {"messages": [*say("q"), answer]}, ends) == [
        "add<|tool_response>",
        "so<turn|>",
    ]
    silent = {"role": "assistant", "content": ""}
    assert trained(gemma, {"messages": [*say("q"), answer, *say("r"), silent]}, ends) == [
        "add<|tool_response>",
        "so<turn|>",
        "<turn|>",
    ]


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{%- if add_generation_prompt %}", "{%- if true %}"),  # Hammer 2.1
        # Command-A
        "{%- for m in messages %}"
        "{{ '<|turn>' + m.role + '<|a_start|>' + m.content + '<|a_end|><|im_end|>' }}"
        "{% endfor %}{{- '<|turn>assistant<|a_start|>' }}",
    ],
)
@pytest.mark.parametrize("eos", ["<|im_end|>", "</s>"])
def test_a_template_that_always_prompts_for_an_answer(template, eos):
    tokenizer = make_tokenizer(template, eos=eos, control=CONTROL)
    end = "<|im_end|>" if "<|im_start|>" in template else "<|a_end|><|im_end|>"
    if end == "<|a_end|><|im_end|>" and eos == "</s>":
        end = "<|a_end|>"  # no end token is known: the first added token is taken
    one_turn = say("q1", "a1")
    assert trained(tokenizer, {"messages": one_turn}) == [f"a1{end}"]
    two_turns = say("q1", "a1", "q2", "a2")
    assert trained(tokenizer, {"messages": two_turns}) == [f"a1{end}", f"a2{end}"]


CHAT = (
    "{%- for m in messages %}{{ USER if m.role == 'user' else TURN }}{% endfor %}"
    "{% if add_generation_prompt %}{{ PROMPT }}{% endif %}"
)


@pytest.mark.parametrize(
    "user, turn, prompt, answers",
    [
        # DeepSeek V3.2, GLM 4.7: the prompt opens the thinking that the history closes.
        # Both tags begin alike.
        (
            "'<|user|>' + m.content",
            "'<|assistant|><shut>' + m.content + eos_token",
            "'<|assistant|><open>'",
            ["<shut>a1</s>", "<shut>a2</s>"],
        ),
        # Alpaca, Llama 4: other white space before a header than before the prompt.
        (
            "'### User:\\n' + m.content",
            "'\\n\\n### Answer:\\n' + m.content + eos_token",
            "'### Answer:\\n'",
            ["a1</s>", "a2</s>"],
        ),
        (
            "'### User:\\n' + m.content",
            "'### Answer:\\n' + m.content + eos_token",
            "'\\n\\n### Answer:\\n'",
            ["a1</s>", "a2</s>"],
        ),
    ],
)
def test_headers_that_differ_from_the_prompt(user, turn, prompt, answers):
    template = CHAT.replace("USER", user).replace("TURN", turn).replace("PROMPT", prompt)
    tokenizer = make_tokenizer(template, control=CONTROL)
    assert trained(tokenizer, {"messages": say("q1", "a1", "q2", "a2")}) == answers


def test_a_template_that_always_prompts_for_thoughts():
    """Command R7B: not one turn of its history begins as its prompt does."""
    template = (
        "{%- for m in messages %}"
        "{{ '<|turn>' + m.role + ('<|a_start|>' if m.role == 'assistant' else '') }}"
        "{{- m.content + '<turn|>' }}{% endfor %}{{- '<|turn>assistant<|assistant|><|u_end|>' }}"
    )
    tokenizer = make_tokenizer(template, eos="<turn|>", control=CONTROL)
    assert trained(tokenizer, {"messages": say("q1", "a1", "q2", "a2")}) == [
        "<|a_start|>a1<turn|>",
        "<|a_start|>a2<turn|>",
    ]


AXOLOTL_PHI3 = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '<|end|>\n<|assistant|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
)


def test_a_second_message_of_the_assistant_without_a_header():
    template = CHATML.replace(
        "{{ '<|im_start|>' + m.role + '\n' +",
        "{{ ('' if m.role == 'assistant' and messages[loop.index0 - 1]"
        ".role == 'assistant' else '<|im_start|>' + m.role + '\n') +",
    ).replace(
        "if add_generation_prompt", "if add_generation_prompt and messages[-1].role != 'assistant'"
    )
    row = {
        "messages": [
            *say("q1", "one, and more of it"),
            {"role": "assistant", "content": "two, and more of it"},
        ]
    }
    with pytest.raises(InputError, match="message 2 .* begins no new turn"):
        trained(template, row)
    row["messages"][2]["loss_mask"] = 0
    assert trained(template, row) == ["one, and more of it<|im_end|>"]


def test_axolotls_phi3_writes_the_header_after_the_user():
    """So a second answer in a row would follow the end of the first one."""
    phi3 = make_tokenizer(AXOLOTL_PHI3, eos="<|end|>", control=["<|end|>"])
    messages = say("q", "one", "r", "two")
    assert trained(phi3, {"messages": messages}) == ["one<|end|>", "two<|end|>"]
    with pytest.raises(InputError, match="message 2 .* begins no new turn"):
        trained(phi3, {"messages": [*say("q", "one"), messages[3]]})
    call_without_tools = [*say("q", "one"), {"role": "tool", "content": ""}, messages[3]]
    with pytest.raises(InputError, match="message 3 .* begins no new turn"):
        trained(phi3, {"messages": call_without_tools})


PROMPT_BY_ROW = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' + ('<think>\n' if CONDITION else '') }}",
)


@pytest.mark.parametrize(
    "condition, role, system, tools",
    [
        ("tools and tools[0].function.name == 'add'", "system", "be brief", [TOOL]),
        ("'/think' in messages[0].content", "system", "be brief /think", None),
        ("messages[0].role == 'developer'", "developer", "be brief", None),
    ],
)
def test_the_prompt_for_a_turn_is_that_of_its_own_row(condition, role, system, tools):
    """It is cached, but another row's prompt must not be used."""
    template = "{{ tools | tojson if tools }}" + PROMPT_BY_ROW.replace("CONDITION", condition)
    tokenizer = make_tokenizer(template)
    chat = ChatTokenizer(tokenizer)
    other_tools = [{"function": {"name": "sub"}}] if tools else None
    answer = "<think>\nlet me see</think>the cat"
    learned = []
    other = {"role": "system", "content": "be brief"}
    own = {"role": role, "content": system}
    for first, tools_of_row in ((other, other_tools), (own, tools)):
        row = {"messages": [first, *say("q", answer)], "tools": tools_of_row}
        ids, mask = encode(row, chat, options())
        learned.append(tokenizer.decode([token for token, bit in zip(ids, mask) if bit]))
    assert learned[0] == answer + "<|im_end|>"
    assert learned[1] == answer.removeprefix("<think>\n") + "<|im_end|>"


def test_a_turn_that_goes_on_after_its_end_is_an_error():
    """Generation would stop too early.

    GigaChat 3 ends the turn before the call; diffusion Gemma has a header there.
    """
    calling = {"role": "assistant", "content": "I add.", "tool_calls": [call("add", a="one")]}
    for between in ("<|im_end|>\nfunction call<|user|>", "<|im_end|>\n<|im_start|>assistant\n"):
        calls = (
            "{% for c in m.tool_calls or [] %}"
            "{{ BETWEEN + c.function.name + c.function.arguments | tojson }}{% endfor %}"
        )
        template = CHATML.replace(
            "m.content + '", "m.content }}" + calls.replace("BETWEEN", repr(between)) + "{{ '"
        )
        tokenizer = make_tokenizer(template, eos="<|im_end|>", control=CONTROL)
        for ends in ([], ["</s>"], ["<|im_start|>"]):
            with pytest.raises(
                InputError, match="message 1 .* the template ends it before '.*add.*Either set"
            ):
                trained(tokenizer, {"messages": [*say("q1"), calling]}, ends)
        assert trained(tokenizer, {"messages": say("q1", "see <|im_end|>\nno")}) == [
            "see <|im_end|>\nno<|im_end|>"
        ]
    headed = GEMMA4.replace("not (m.role == 'assistant' and ns.before == 'assistant')", "true")
    gemma = make_tokenizer(headed, eos="<turn|>", control=CONTROL)
    messages = [
        *say("q1"),
        calling,
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    with pytest.raises(
        InputError, match="message 1 .*nothing after it would teach the model to stop"
    ):
        trained(gemma, {"messages": messages}, ["<|tool_response>"])


def test_a_prompt_that_writes_more_than_the_history():
    """Gemma 4 prompts for thoughts in the open turn, after the result of a tool.

    There are none in its history.
    """
    template = GEMMA4.replace(
        r"and messages[-1].role != 'tool' %}{{ '<|turn>assistant\n' }}",
        r"%}{{ '' if messages[-1].role == 'tool' else '<|turn>assistant\n' }}"
        r"{{ '<|u_start|><|u_end|>' }}",
    )
    gemma = make_tokenizer(template, eos="<turn|>", control=CONTROL)
    messages = [
        *say("q1"),
        {"role": "assistant", "tool_calls": [call("add", a="one")]},
        {"role": "tool", "content": "the result"},
        {"role": "assistant", "content": "It is 2."},
    ]
    assert trained(gemma, {"messages": messages}, ["<|tool_response>"]) == [
        '<|tool_call>call:add{"a": "one"}<tool_call|><|tool_response>',
        "It is 2.<turn|>",
    ]


def test_texts_of_other_messages_are_never_learned():
    quoted = (
        "m.content + (' (' + messages[loop.index0 - 1].content + ')' if m.role != 'user' else '')"
    )
    tokenizer = make_tokenizer(CHATML.replace("m.content", quoted), eos="<|im_end|>")
    for text in ("q1", "a longer question than that"):
        with pytest.raises(
            InputError,
            match=f"puts .{text}., a text of message 0, into an assistant turn, where it would",
        ):
            encode({"messages": say(text, "a1")}, ChatTokenizer(tokenizer), options())
    # gpt-oss: the name of the function that was called stands before what it returns.
    naming = CHATML.replace(
        "m.content",
        "(messages[loop.index0 - 1].tool_calls[0].function.name + ': ' if m.role == 'tool' "
        "else '') + m.content + (m.tool_calls[0].function.name if m.tool_calls else '')",
    )
    messages = [
        *say("q1"),
        {"role": "assistant", "content": "", "tool_calls": [call("add")]},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "so"},
    ]
    learned = learned_text({"messages": messages}, make_tokenizer(naming))
    assert learned == "add<|im_end|>so<|im_end|>"


def test_tokens_that_take_in_white_space():
    """In Phi-3, <|assistant|> absorbs the white space after it, and still belongs to the prompt."""
    template = (
        "{%- for m in messages %}"
        "{{ '<|' + m.role + '|>\n' + m.content + '<|a_end|>\n' }}{% endfor %}"
        "{{- '<|assistant|>\n' if add_generation_prompt }}"
    )
    tokenizer = make_tokenizer(template, eos="<|a_end|>")
    tokenizer.add_tokens(
        [
            AddedToken(text, rstrip=True, special=True, normalized=False)
            for text in ("<|user|>", "<|assistant|>", "<|a_end|>")
        ]
    )
    ids, mask = encode(
        {"messages": say("q1", "\n a1", "q2", "a2 ")}, ChatTokenizer(tokenizer), options()
    )
    assert [tokenizer.decode([t]) for t, m in zip(ids, mask) if m] == [
        "a",
        "1",
        "<|a_end|>",
        "a",
        "2",
        " ",
        "<|a_end|>",
    ]


def test_an_answer_may_begin_with_a_token_that_stands_alone():
    """The header's token absorbs white space, so that added tokens after it are looked at."""
    template = (
        "{%- for m in messages %}"
        "{{ '<|' + m.role + '|>\n' + m.content + '<|a_end|>' }}{% endfor %}"
        "{{- '<|assistant|>\n' if add_generation_prompt }}"
    )
    tokenizer = make_tokenizer(template, eos="<|a_end|>")
    absorbing = AddedToken("<|assistant|>", rstrip=True, special=True, normalized=False)
    tokenizer.add_tokens([absorbing, "<think>"])
    messages = say("q1", "<think>a1", "q2", "a2")
    assert learned_text({"messages": messages}, tokenizer) == "<think>a1<|a_end|>a2<|a_end|>"


def test_weight_0_takes_a_turn_out():
    messages = say("q1", "a1", "q2", "a2")
    messages[1]["weight"] = 0
    messages[3]["weight"] = 1
    assert trained(CHATML, {"messages": messages}) == ["a2<|im_end|>"]
    assert trained(CHATML, {"messages": messages}, train_on="last") == ["a2<|im_end|>"]
    messages[0]["weight"] = 0.5
    with pytest.raises(InputError, match=r'"messages\[0\].weight" is 0.5: must be true or false'):
        trained(CHATML, {"messages": messages})


CALLS = (
    "{% for c in m.tool_calls or [] %}{{ 'CALL ' + c.function.name + ' ' + ARGUMENTS }}{% endfor %}"
)


@pytest.mark.parametrize(
    "content",
    [
        "(m.content or '')",
        "('' if m.content is none else m.content + '')",  # refuses a message without content
        "(m.content + '' if 'content' in m else '')",  # refuses null
        "m.content + ''",  # refuses both
    ],
)
def test_content_null_beside_a_call(content):
    template = CHATML.replace("m.content", content).replace(
        "+ '<|im_end|>",
        "}}" + CALLS.replace("ARGUMENTS", "c.function.arguments | tojson") + "{{ '<|im_end|>",
    )
    for message in ({}, {"content": None}):
        message = {"role": "assistant", "tool_calls": [call("add", a=1)]} | message
        learned = learned_text({"messages": [*say("q"), message]}, make_tokenizer(template))
        assert learned == 'CALL add {"a": 1}<|im_end|>'


def test_a_template_that_writes_calls_for_content_null_alone():
    """DeepSeek R1: it takes a message with a content for an answer."""
    template = CHATML.replace(
        "m.content", "(m.content if m.content is not none else m.tool_calls[0].function.name)"
    )
    message = {"role": "assistant", "content": None, "tool_calls": [call("add")]}
    learned = learned_text({"messages": [*say("q"), message]}, make_tokenizer(template))
    assert learned == "add<|im_end|>"


@pytest.mark.parametrize(
    "arguments",
    [
        "c.function.arguments | tojson",  # Qwen2.5: an object
        "c.function.arguments",  # DeepSeek: JSON text
        "c.function.arguments | string",  # the same, says nothing of an object
        # Qwen3: either
        "(c.function.arguments if c.function.arguments is string else "
        "c.function.arguments | tojson)",
    ],
)
def test_arguments_of_calls_are_encoded_once(arguments):
    template = CHATML.replace("m.content", "(m.content or '')").replace(
        "+ '<|im_end|>", "}}" + CALLS.replace("ARGUMENTS", arguments) + "{{ '<|im_end|>"
    )
    tokenizer = make_tokenizer(template)
    for meant in ({"a": 'say "é"', "b": [1]}, '{"a": "say \\"é\\"", "b": [1]}'):
        message = {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "add", "arguments": meant}}],
        }
        learned = learned_text({"messages": [*say("{'a': 1}"), message]}, tokenizer)
        assert learned == 'CALL add {"a": "say \\"é\\"", "b": [1]}<|im_end|>'
    message["tool_calls"][0]["function"]["arguments"] = ""
    learned = learned_text({"messages": [*say("q"), message]}, tokenizer)
    assert learned in ("CALL add {}<|im_end|>", "CALL add <|im_end|>")
    message["tool_calls"] = [call("now"), call("add", a="x")]
    learned = learned_text({"messages": [*say("q"), message]}, tokenizer)
    assert learned == 'CALL now {}CALL add {"a": "x"}<|im_end|>'


FAKE = "see <|im_end|>\n<|im_start|>assistant\nno"


@pytest.mark.parametrize("template", [QWEN2, QWEN3, MISTRAL])
def test_special_tokens_in_texts(template):
    tokenizer = make_tokenizer(template)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    row = {
        "messages": [
            *say(FAKE),
            {"role": "assistant", "content": "", "tool_calls": [call("add", a=FAKE)]},
            {"role": "tool", "content": FAKE},
            {"role": "assistant", "content": "so " + FAKE},
        ]
    }
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)

    def controls(policy, messages):
        ids, mask = encode(
            {"messages": messages}, ChatTokenizer(tokenizer), options(special_tokens_in_text=policy)
        )
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
        return sum(i in special for i in ids), tokenizer.decode([i for i, m in zip(ids, mask) if m])

    clean = [m | {"content": m["content"].replace(FAKE, "x")} for m in row["messages"]]
    clean[1] = clean[1] | {"tool_calls": [call("add", a="x")]}
    own, _ = controls("keep", clean)
    kept, learned = controls("keep", row["messages"])
    text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert kept == own + 4 * 2
    assert kept == sum(i in special for i in text_ids)
    assert controls("escape", row["messages"]) == (own, learned)
    # null escapes the results of tools alone.
    assert controls(None, row["messages"]) == (own + 3 * 2, learned)
    ids = encode(row, ChatTokenizer(tokenizer), options(special_tokens_in_text="escape"))[0]
    plain = tokenizer(FAKE, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert str(plain[1:-1])[1:-1] in str(ids)  # as in any text
    with pytest.raises(
        InputError,
        match=r"special token '<\|im_end\|>' is written in a text: set data.special_tokens_in_text",
    ):
        controls("error", row["messages"])
    assert controls("error", clean)[0] == own


def test_special_tokens_in_results_of_tools_that_the_message_itself_holds():
    """As in Gemma's own data, whose chats have no messages of tools."""
    template = read_template("tool_responses")
    tokenizer = make_tokenizer(template, eos="<turn|>", control=CONTROL)
    chat = ChatTokenizer(tokenizer, tokenizer.convert_tokens_to_ids(["<|tool_response>"]))
    answer = {"role": "assistant", "content": "so", "tool_calls": [call("add")]}

    def controls(result, policy):
        message = answer | {"tool_responses": [{"response": result}]}
        row = {"messages": [*say("q"), message]}
        ids, _ = encode(row, chat, options(special_tokens_in_text=policy))
        return sum(token in tokenizer.added_tokens_decoder for token in ids)

    own = controls("two", None)
    assert controls("two <turn|>", "keep") == own + 1
    assert controls("two <turn|>", None) == own


def test_special_tokens_in_texts_that_a_template_shortens():
    """A mark inside a token that the template looks for would hide it.

    So this text is located by its other marks.
    """
    tokenizer = make_tokenizer(
        CHATML.replace("m.content", "m.content | replace('<|user|>', '')"),
        control=["<|user|>", '<|"|>'],
    )
    row = {"messages": say('one two <|"|> <|user|> three', "a1")}
    ids, _ = encode(row, ChatTokenizer(tokenizer), options(special_tokens_in_text="escape"))
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert sum(i in tokenizer.added_tokens_decoder for i in ids) == 4


def test_special_tokens_in_plain_texts():
    tokenizer = make_tokenizer(None)
    row = {"prompt": "a</s>", "response": "b<|im_end|>"}
    chat = ChatTokenizer(tokenizer)
    default, keep, escape = (
        encode(row, chat, options(special_tokens_in_text=policy))[0]
        for policy in (None, "keep", "escape")
    )
    assert default == keep
    assert len(escape) > len(keep)
    assert escape[-1] == tokenizer.eos_token_id
    for ids in (keep, escape):
        assert tokenizer.decode(ids) == "a</s>b<|im_end|></s>"
    assert not set(escape[:-1]) & set(tokenizer.added_tokens_decoder)
    with pytest.raises(InputError, match="special token '</s>' is written in a text"):
        encode(row, ChatTokenizer(tokenizer), options(special_tokens_in_text="error"))


def test_a_template_that_writes_the_time():
    tokenizer = make_tokenizer("{{ strftime_now('%H:%M:%S.%f') }}" + CHATML)
    assert learned_text({"messages": say("a", "a")}, tokenizer) == "a<|im_end|>"


def test_texts_that_templates_look_at():
    """Marks in these texts change how the template renders them, so each is tried by itself."""
    template = CHATML.replace(
        "m.content",
        "(m.content if m.content != 'secret' else 'public') + ("
        "' (short)' if m.role == 'user' and m.content.endswith('brief') else '')",
    )
    assert trained(template, {"messages": say("be brief", "a1", "secret", "a2 secret")}) == [
        "a1<|im_end|>",
        "a2 secret<|im_end|>",
    ]
    with pytest.raises(InputError, match="cannot locate the text of message 0 .*'secret'"):
        shouted = template.replace("'public'", "'secret secret'")
        trained(shouted, {"messages": say("secret", "a1")})


def test_a_template_that_leaves_out_text_is_an_error():
    with pytest.raises(InputError, match="leaves out tool_calls of message 1 .*: 'add'"):
        trained(CHATML, {"messages": [{"content": ""} | m for m in AGENT]})
    silent = CHATML.replace("m.content", "('' if 'cat' in m.content | string else m.content)")
    for text in ("hi\nthe cat", [{"type": "text", "text": "the cat"}]):
        with pytest.raises(
            InputError,
            match="leaves out content of message 1 .*'(hi.*)?the cat'",
        ):
            encode({"messages": say("q", text)}, ChatTokenizer(make_tokenizer(silent)), options())


@pytest.mark.parametrize(
    "content",
    [
        "m.content",  # refuses a list
        "m.content | string",  # prints it as Python does
        "(m.content if m.content is string else m.content | tojson)",  # prints it as JSON
        "(m.content if m.content is string else '')",  # leaves it out
        # leaves out strings
        "(m.content | selectattr('text', 'defined') | map(attribute='text') | join)",
        "m.content[0].text",  # refuses strings
    ],
)
def test_contents_of_parts_and_of_text_are_read_by_every_template(content):
    tokenizer = make_tokenizer(CHATML.replace("m.content", content))
    for turns in (
        ("the dog", "the cat"),
        [[{"type": "text", "text": text}] for text in ("the dog", "the cat")],
    ):
        row = {"messages": say(*turns)}
        ids, _ = encode(row, ChatTokenizer(tokenizer), options())
        assert (
            tokenizer.decode(ids)
            == "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n"
        )
        assert learned_text(row, tokenizer) == "the cat<|im_end|>"


def test_parts_of_other_kinds_are_left_to_the_template():
    """Magistral has thinking as a part. Only earlier thinking may be left out."""
    template = CHATML.replace("m.content", "said(m, loop.last)").replace(
        "{%- for",
        """
        {%- macro said(m, last) -%}
            {%- if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
                {%- if part.type == 'text' %}{{ part.text }}
                {%- elif part.type == 'thinking' and last %}[THINK]{{ part.thinking }}[/THINK]
                {%- endif %}
            {%- endfor %}{% endif %}
        {%- endmacro %}{%- for""",
        1,
    )
    thoughtful = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}],
    }
    assert trained(template, {"messages": [*say("hi"), thoughtful]}) == [
        "[THINK]hm[/THINK]yes<|im_end|>"
    ]
    assert trained(template, {"messages": [*say("hi"), thoughtful, *say("and?", "no")]}) == [
        "yes<|im_end|>",
        "no<|im_end|>",
    ]
    lost = {
        "role": "user",
        "content": [{"type": "text", "text": "q"}, {"type": "file", "path": "a.txt"}],
    }
    with pytest.raises(InputError, match="leaves out a part of message 0, {'type': 'file'"):
        trained(template, {"messages": [lost, thoughtful]})


@pytest.mark.parametrize(
    "content, message",
    [
        ("raise_exception('no')", r"rejects the conversation: no\. It may not know PART: write"),
        ("(m.content ~ '')", "template does not know PART: write"),
    ],
    ids=["rejected", "printed as code"],
)
def test_a_part_that_a_template_cannot_print_is_named(content, message):
    known = {"type": "text", "text": "q2"}
    unknown = {"type": "file", "path": "a.txt"}
    template = CHATML.replace("m.content", f"(m.content if m.content is string else {content})")
    message = message.replace("PART", "a part of message 2, {'type': 'file', 'path': 'a.txt'}")
    messages = [*say("q1", "a1"), {"role": "user", "content": [known, unknown]}, *say("q", "a")]
    with pytest.raises(InputError, match=message):
        trained(template, {"messages": messages})


def test_an_error_of_a_template_about_texts_does_not_advise_about_parts():
    template = CHATML.replace("m.content", "raise_exception('no')")
    with pytest.raises(InputError, match="rejects the conversation: no$"):
        trained(template, {"messages": say("q", "a")})


def test_a_template_that_rejects_a_text_is_quoted_although_it_prints_lists_as_code():
    """With the content as a list of parts, 'bad' is in none of them as a whole."""
    template = CHATML.replace("m.content", "(NO if 'bad' in m.content else m.content ~ '')")
    template = template.replace("NO", "raise_exception('no bad words')")
    with pytest.raises(InputError, match="rejects the conversation: no bad words$"):
        trained(template, {"messages": say("a bad day", "yes")})


def test_prompt_and_response():
    pair = {"prompt": "the cat", "response": " sat"}
    assert trained(CHATML, pair) == [" sat<|im_end|>"]
    assert trained(None, pair) == [" sat</s>"]
    tokenizer = make_tokenizer(None)
    ids, _ = encode(pair, ChatTokenizer(tokenizer), options())
    assert tokenizer.decode(ids) == "the cat sat</s>"
    few_shot = {"messages": None, "prompt": say("q1", "a1", "q2"), "response": "a2"}
    assert trained(CHATML, few_shot) == ["a2<|im_end|>"]
    assert losses_of({"prompt": "the cat", "response": "\n"}, tokenizer) == [("empty", "response")]
    assert losses_of(pair, tokenizer) == []
    renamed = {"question": "q", "answer": "a"}
    assert trained(CHATML, renamed, prompt_key="question", response_key="answer") == ["a<|im_end|>"]


@pytest.mark.parametrize(
    "row, message",
    [
        ({}, '"messages" is missing'),
        ({"messages": "hi"}, '"messages" must be a list of messages'),
        ({"messages": []}, '"messages" must be a list of messages'),
        ({"messages": ["hi"]}, r'"messages\[0\]" must be an object'),
        ({"messages": [{"role": "human", "content": "x"}]}, r"\"messages\[0\].role\" is 'human'"),
        ({"messages": [{"role": "user"}]}, r'"messages\[0\].content" is missing'),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
            'content" is missing',
        ),
        ({"messages": [{"role": "user", "content": 3}]}, 'content" must be a string'),
        (
            {"messages": [{"role": "user", "content": "x", "loss_mask": 1}]},
            "only assistant messages",
        ),
        (
            {
                "prompt": say("x", {"role": "assistant", "content": "y", "loss_mask": 1}, "z"),
                "response": "a",
            },
            '"message 1.loss_mask" is 1, but the message belongs to the prompt',
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "loss_mask": "none"}]},
            "must be true or false",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": ["add"]}]},
            'tool_calls" must be a list of objects',
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call("add"), call(" ")]}]},
            r'tool_calls\[1\]" has no function name',
        ),
        ({"messages": say("x", "y"), "tools": "none"}, '"tools" must be a list'),
        ({"messages": say("x", "y"), "enable_thinking": "none"}, "\"enable_thinking\" is 'none'"),
        (
            {"messages": say("x", "y"), "chat_template_kwargs": {"tokenize": True}},
            'tokenize" is not a template argument',
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "x"},
                    {"role": "assistant", "content": "x"},
                ]
            },
            "No user query found",
        ),
        ({"messages": say("x\ud83d", "y")}, "lone surrogate"),
        ({"prompt": "x"}, '"response" is missing'),
        ({"prompt": 3, "response": "x"}, '"prompt" must be a list of messages'),
    ],
)
def test_malformed_rows(row, message):
    with pytest.raises(InputError, match=message):
        trained(STRICT, row)


def test_tokenizers_that_cannot_serve():
    with pytest.raises(InputError, match="no chat template"):
        trained(None, {"messages": say("q", "a")})
    with pytest.raises(InputError, match="fast tokenizer"):
        ChatTokenizer(SimpleNamespace(is_fast=False))

    class Prefixing(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, tokenize=True, **kwargs):
            out = super().apply_chat_template(*args, tokenize=tokenize, **kwargs)
            return [0, *out] if tokenize else out

    odd = Prefixing(tokenizer_object=make_tokenizer().backend_tokenizer, chat_template=CHATML)
    with pytest.raises(InputError, match="does not return the tokens of the rendered text"):
        encode({"messages": say("q", "a")}, ChatTokenizer(odd), options())


TOKENIZER = make_tokenizer(CHATML)
CONTENT = st.text(
    st.sampled_from("ab \n\t<|>é漢😀\u2028") | st.characters(codec="utf-8"), max_size=20
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4))
def test_every_turn_is_its_content_and_the_end(turns):
    messages = say(*(text for turn in turns for text in turn))
    assert trained(TOKENIZER, {"messages": messages}) == [
        answer + "<|im_end|>" for _, answer in turns
    ]


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "gpt2", "gpt_neox", "llama"])
def test_a_model_without_a_tokenizer_is_an_error(tmp_path, model_type):
    """For some families, transformers would return a tokenizer without a vocabulary."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = OmegaConf.create({"model": {"path": str(tmp_path)}, "data": {"chat_template": None}})
    with pytest.raises(InputError, match=f"no tokenizer in model.path={tmp_path}: "):
        load_tokenizer(config)
