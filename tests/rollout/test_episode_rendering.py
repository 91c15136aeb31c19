"""Prompt ids that continue recorded ids, under the chat templates in use."""

import itertools
from dataclasses import dataclass

import pytest

from config import InputError
from data.chat.tokenizer import ChatTokenizer
from rollout.episodes.rendering import Renderer, Session
from rollout.episodes.stability import describe_stability, written_reply
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
)

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Family:
    """A chat template.

    Attributes:
        ends: its end tokens.
        knows_calls: whether it prints calls and their results.
        knows_tools: whether it prints the tools.
        arguments: template arguments.
    """

    template: str
    ends: tuple[str, ...]
    knows_calls: bool = False
    knows_tools: bool = False
    arguments: tuple[tuple[str, bool], ...] = ()

    def renderer(self, policy: str | None = None) -> Renderer:
        tokenizer = make_tokenizer(self.template, control=CONTROL)
        end_ids = tokenizer.convert_tokens_to_ids(list(self.ends))
        return Renderer(ChatTokenizer(tokenizer, end_ids), policy, dict(self.arguments))

    def kinds(self) -> list[str]:
        """Return the kinds of conversations that the template prints."""
        kinds = ["plain"]
        if self.knows_calls:
            kinds += ["calls"]
        if self.knows_tools:
            kinds += ["tools"]
        return kinds


IM_END = ("<|im_end|>",)
NO_THINKING = (("enable_thinking", False),)
FAMILIES = {
    "chatml": Family(CHATML, IM_END),
    "qwen2": Family(QWEN2, IM_END, True, True),
    "qwen3": Family(QWEN3, IM_END, True, True),
    "qwen3 without thinking": Family(QWEN3, IM_END, True, True, NO_THINKING),
    "thinking": Family(THINKING, IM_END, True, True),
    "llama3": Family(LLAMA3, ("<|eot_id|>",)),
    "mistral": Family(MISTRAL, ("</s>",), True, True),
    "strict": Family(STRICT, IM_END, True, True),
    "qwen1.5": Family(QWEN15, IM_END),
    "apertus": Family(APERTUS, ("<|a_end|>",)),
    "apriel": Family(APRIEL, ("<|a_end|>",)),
    "glm": Family(GLM, ("<|user|>", "<|observation|>"), True),
    "gemma4": Family(GEMMA4, ("<turn|>", "<|tool_response>"), True),
}
# (family, kind of conversation): the turns after which a new branch begins. Everywhere else, the
# next prompt continues the recorded ids. In plain conversations, every turn answers a user; with
# calls, turns 1, 3 and 5 call a tool, and turns 2 and 4 answer a user.
BRANCHES = {
    # Earlier reasoning is dropped. The template writes an empty block into the last turn alone.
    ("qwen3 without thinking", "plain"): [1, 2, 3, 4],
    ("qwen3 without thinking", "calls"): [1, 2, 3, 4],
    ("qwen3 without thinking", "tools"): [1, 2, 3, 4],
    ("qwen3", "plain"): [1, 2, 3, 4],
    ("qwen3", "calls"): [2, 4],
    ("qwen3", "tools"): [2, 4],
    ("thinking", "plain"): [1, 2, 3, 4],
    ("thinking", "calls"): [2, 4],
    ("thinking", "tools"): [2, 4],
    # The tools move to the last user turn.
    ("mistral", "tools"): [2, 4],
    # The prompt begins the answer with a line that later turns lack.
    ("apriel", "plain"): [1, 2, 3, 4],
    # The result of the second call is printed after the first call as well.
    ("gemma4", "calls"): [3],
}
CASES = [(name, kind) for name, family in FAMILIES.items() for kind in family.kinds()]


def made_messages(family: Family, kind: str) -> list[dict]:
    """Return a conversation of five turns."""
    messages = [{"role": "user", "content": "hello"}]
    for turn in range(1, 6):
        reply = {"role": "assistant", "content": f"the cat sat {turn}"}
        if "think" in family.template and not family.arguments:
            reply["reasoning_content"] = f"think {turn}"
        if kind == "plain" or turn % 2 == 0:
            messages += [reply, {"role": "user", "content": f"question {turn}"}]
            continue
        function = {"name": "add", "arguments": {"a": turn}}
        reply |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "name": "add", "content": f"answer {turn}"}
        messages += [reply, result]
    return messages


@pytest.mark.parametrize("name, kind", CASES)
def test_turns_continue_or_branch(name, kind):
    """A prompt continues the sampled ids, or it is the template's own rendering."""
    family = FAMILIES[name]
    renderer = family.renderer()
    chat = renderer.chat
    messages = made_messages(family, kind)
    inputs = renderer.inputs([TOOL] if kind == "tools" else None, {})
    session = Session(renderer)
    branches = []
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, index in enumerate(replies[:-1], start=1):
        prompt = session.prompt(messages[:index], inputs)
        following = messages[: replies[turn]]
        conversation = renderer.request(following, inputs)
        text = written_reply(renderer, messages[: index + 1], inputs, prompt, conversation.text)
        sampled = chat.tokenize(text).ids
        session.record(messages[:index], prompt, messages[index], sampled)
        continued = session.prompt(following, inputs)
        own_ids = chat.render(
            conversation.messages,
            inputs.tools,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=True,
            **inputs.arguments,
        )
        assert continued.ids == own_ids
        if continued.num_recorded:
            assert continued.ids[: continued.num_recorded] == prompt.ids + sampled
        else:
            assert not conversation.text.startswith(prompt.text + text)
            branches.append(turn)
    assert branches == BRANCHES.get((name, kind), [])


@pytest.fixture
def renderer():
    return FAMILIES["qwen2"].renderer()


def play(session: Session, messages: list[dict], content: str, sampled: list[int], **fields):
    """Play a turn, and return the messages with the reply, and the prompt."""
    inputs = session.renderer.inputs(None, {})
    prompt = session.prompt(messages, inputs)
    reply = {"role": "assistant", "content": content, **fields}
    session.record(messages, prompt, reply, sampled)
    return [*messages, reply], prompt


HELLO = [{"role": "user", "content": "hello there"}]
NEXT = {"role": "user", "content": "question"}


def next_prompt(session: Session, messages: list[dict]):
    return session.prompt([*messages, NEXT], session.renderer.inputs(None, {}))


def test_sampled_tokens_are_kept(renderer):
    """Two tokens for a text that the tokenizer writes as one stay two tokens."""
    chat = renderer.chat
    end = chat.tokenize("<|im_end|>").ids
    merged = chat.tokenize("the").ids
    split = [i for letter in "the" for i in chat.tokenize(letter).ids]
    assert len(merged) < len(split)
    session = Session(renderer)
    messages, prompt = play(session, HELLO, "the", split + end)
    continued = next_prompt(session, messages)
    assert continued.ids[: continued.num_recorded] == prompt.ids + split + end
    assert chat.decode(continued.ids) == continued.text
    assert continued.ids != chat.tokenize(continued.text).ids


def test_call_in_other_words_is_kept(renderer):
    """A call with other spaces than the template's continues; its own tokens stay."""
    text = '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call><|im_end|>'
    sampled = renderer.chat.tokenize(text).ids
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    session = Session(renderer)
    messages, prompt = play(session, HELLO, None, sampled, tool_calls=[call])
    # Clients may add empty fields, and write arguments in another way.
    parsed = call | {"index": 0, "function": {"name": "add", "arguments": {"a": 1}}}
    edited = messages[-1] | {"content": "", "refusal": None, "tool_calls": [parsed]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    inputs = renderer.inputs(None, {})
    continued = session.prompt([*HELLO, edited, result], inputs)
    assert continued.num_recorded == len(prompt.ids) + len(sampled)
    assert continued.ids[: continued.num_recorded] == prompt.ids + sampled
    rest = "\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
    rest += "<|im_start|>assistant\n"
    assert renderer.chat.decode(continued.ids[continued.num_recorded :]) == rest


def test_call_before_late_end_is_kept():
    """The same where the template ends a turn only when another one follows."""
    renderer = FAMILIES["glm"].renderer()
    sampled = renderer.chat.tokenize("<tool_call>add\na: 1</tool_call><|observation|>").ids
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    session = Session(renderer)
    messages, prompt = play(session, HELLO, None, sampled, tool_calls=[call])
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    continued = session.prompt([*messages, result], renderer.inputs(None, {}))
    assert continued.ids[: continued.num_recorded] == prompt.ids + sampled
    assert renderer.chat.decode(continued.ids[continued.num_recorded :]) == "\n1<|assistant|>\n"


# Needs texts as contents, and rejects conversations that end with a reply.
NARROW = r"""{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QUESTION_LAST = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    "template, is_continued", [(NARROW, True), (QUESTION_LAST + NARROW, False)]
)
def test_narrow_templates(template, is_continued):
    """A call without content is rendered; a template that rejects the history begins a branch."""
    renderer = Family(template, IM_END).renderer()
    sampled = renderer.chat.tokenize('add{"a":1}<|im_end|>').ids
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    session = Session(renderer)
    play(session, HELLO, None, sampled, tool_calls=[call])
    sent_back = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    continued = session.prompt([*HELLO, sent_back, result], renderer.inputs(None, {}))
    assert bool(continued.num_recorded) == is_continued


def test_reply_without_thinking_continues():
    """A call without reasoning continues, though the last message would get an empty block."""
    renderer = FAMILIES["qwen3"].renderer()
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    sampled = renderer.chat.tokenize(text).ids
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    session = Session(renderer)
    messages, prompt = play(session, HELLO, None, sampled, tool_calls=[call])
    inputs = renderer.inputs(None, {})
    assert not renderer.history(messages, inputs).startswith(prompt.text + text)
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    continued = session.prompt([*messages, result], inputs)
    assert continued.ids[: continued.num_recorded] == prompt.ids + sampled


@pytest.mark.parametrize(
    "reply",
    [
        {"content": "the cat", "reasoning_content": "think"},
        {"content": "the cat", "thinking": "think", "refusal": None, "annotations": []},
        {"content": [{"type": "text", "text": "the cat"}], "reasoning": "think"},
        {"reasoning": "think", "content": "the cat"},
    ],
)
def test_reply_in_other_form_is_recognized(renderer, reply):
    """Clients send the same reply back in different forms."""
    sampled = renderer.chat.tokenize("think, the cat<|im_end|>").ids
    session = Session(renderer)
    play(session, HELLO, "the cat", sampled, reasoning="think")
    continued = next_prompt(session, [*HELLO, {"role": "assistant", **reply}])
    assert continued.num_recorded
    unknown = next_prompt(session, [*HELLO, {"role": "assistant", **reply, "reasoning": "other"}])
    assert not unknown.num_recorded


@pytest.mark.parametrize("content, sampled", [("the cat", "the cat"), ("cat", " cat\n")])
def test_cut_reply_is_closed(renderer, content, sampled):
    """After a reply without an end token, the template's end follows."""
    session = Session(renderer)
    sampled_ids = renderer.chat.tokenize(sampled).ids
    messages, prompt = play(session, HELLO, content, sampled_ids)
    continued = next_prompt(session, messages)
    assert continued.num_recorded == len(prompt.ids) + len(sampled_ids)
    after = renderer.chat.decode(continued.ids[continued.num_recorded :])
    assert after.startswith("<|im_end|>\n<|im_start|>user\n")


def test_other_end_token_begins_branch(renderer):
    """A reply that ends with another end token than the template's cannot be continued."""
    chat = renderer.chat
    session = Session(Renderer(ChatTokenizer(chat.tokenizer, [1, 6]), None, {}))
    messages, _ = play(session, HELLO, "the cat", chat.tokenize("the cat<|eot_id|>").ids)
    continued = next_prompt(session, messages)
    assert continued.num_recorded == 0
    assert continued.ids == chat.tokenize(continued.text).ids


def edited(messages):
    return [messages[0], messages[1] | {"content": "the dog"}]


def compacted(messages):
    return [{"role": "user", "content": "summary"}]


def with_system(messages):
    return [{"role": "system", "content": "be short"}, *messages]


@pytest.mark.parametrize("change", [edited, compacted, with_system])
def test_changed_history_begins_branch(renderer, change):
    chat = renderer.chat
    session = Session(renderer)
    messages, _ = play(session, HELLO, "the cat", chat.tokenize("the cat<|im_end|>").ids)
    assert next_prompt(session, messages).num_recorded
    continued = next_prompt(session, change(messages))
    assert continued.num_recorded == 0
    assert continued.ids == chat.tokenize(continued.text).ids


def test_other_tools_begin_branch(renderer):
    chat = renderer.chat
    session = Session(renderer)
    messages, _ = play(session, HELLO, "the cat", chat.tokenize("the cat<|im_end|>").ids)
    continued = session.prompt([*messages, NEXT], renderer.inputs([TOOL], {}))
    assert continued.num_recorded == 0


def test_retry_and_siblings(renderer):
    """A repeated request has the same ids; of two replies, the one in the history is continued."""
    chat = renderer.chat
    session = Session(renderer)
    first, prompt = play(session, HELLO, "the cat", chat.tokenize("the cat<|im_end|>").ids)
    second, again = play(session, HELLO, "the sat", chat.tokenize("the sat<|im_end|>").ids)
    assert again.ids == prompt.ids
    for messages, text in ((first, "the cat<|im_end|>"), (second, "the sat<|im_end|>")):
        continued = next_prompt(session, messages)
        assert continued.ids[: continued.num_recorded] == prompt.ids + chat.tokenize(text).ids


def test_of_replies_with_the_same_text_the_latest_is_continued(renderer):
    """A client that repeats a request goes on with the last answer; its tokens may be others."""
    chat = renderer.chat
    end = chat.tokenize("<|im_end|>").ids
    merged = chat.tokenize("the").ids
    split = [i for letter in "the" for i in chat.tokenize(letter).ids]
    for replies in ((merged, split), (split, merged)):
        session = Session(renderer)
        for reply in replies:
            messages, prompt = play(session, HELLO, "the", reply + end)
        continued = next_prompt(session, messages)
        assert continued.ids[: continued.num_recorded] == prompt.ids + replies[-1] + end


def test_a_later_reply_does_not_hide_a_longer_conversation(renderer):
    """The first turn is repeated after the second one: the next request continues both turns."""
    chat = renderer.chat
    end = chat.tokenize("<|im_end|>").ids
    session = Session(renderer)
    first, _ = play(session, HELLO, "the cat", chat.tokenize("the cat").ids + end)
    second, prompt = play(session, [*first, NEXT], "sat", chat.tokenize("sat").ids + end)
    play(session, HELLO, "the cat", chat.tokenize("the cat").ids + end)
    continued = next_prompt(session, second)
    assert continued.num_recorded == len(prompt.ids + chat.tokenize("sat").ids + end)


@pytest.mark.parametrize("other", [{"name": "mul"}, {"arguments": '{"a": 2}'}])
def test_of_two_calls_the_one_in_the_history_is_continued(other):
    """Replies with the same text differ if they call another tool, or with other arguments."""
    renderer = FAMILIES["qwen3"].renderer()
    session = Session(renderer)
    function = {"name": "add", "arguments": '{"a": 1}'}
    conversations = []
    for called in (function, function | other):
        text = '{{"name": "{name}", "arguments": {arguments}}}'.format(**called)
        sampled = renderer.chat.tokenize(f"<tool_call>\n{text}\n</tool_call><|im_end|>").ids
        call = {"id": "c1", "type": "function", "function": called}
        messages, prompt = play(session, HELLO, None, sampled, tool_calls=[call])
        conversations.append((messages, prompt.ids + sampled))
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    for messages, recorded in conversations:
        continued = session.prompt([*messages, result], renderer.inputs(None, {}))
        assert continued.ids[: continued.num_recorded] == recorded


def test_of_two_calls_that_differ_in_their_id_alone_the_one_in_the_history_is_continued(renderer):
    """The same call was sampled twice, as other tokens, and the earlier one was carried out."""
    chat = renderer.chat
    session = Session(renderer)
    function = {"name": "the", "arguments": "{}"}
    split = [i for letter in "the" for i in chat.tokenize(letter).ids]
    conversations = []
    for call_id, name in (("c1", split), ("c2", chat.tokenize("the").ids)):
        before = chat.tokenize('<tool_call>\n{"name": "').ids
        after = chat.tokenize('", "arguments": {}}\n</tool_call><|im_end|>').ids
        call = {"id": call_id, "type": "function", "function": function}
        sampled = before + name + after
        messages, prompt = play(session, HELLO, None, sampled, tool_calls=[call])
        conversations.append((messages, prompt.ids + sampled))
    for messages, recorded in conversations:
        result = {"role": "tool", "content": "1"}
        continued = session.prompt([*messages, result], renderer.inputs(None, {}))
        assert continued.ids[: continued.num_recorded] == recorded


def test_no_text_is_lost_if_the_recorded_text_ends_within_a_token():
    """The template goes on with letters that the tokenizer joins with those of the reply."""
    ending = NARROW.replace(
        "m.content }}", "m.content + ('er' if m.role == 'assistant' else '') }}"
    )
    renderer = Family(ending, IM_END).renderer()
    chat = renderer.chat
    assert len(chat.tokenize("user").ids) == 1
    session = Session(renderer)
    sampled = chat.tokenize("us").ids
    messages, prompt = play(session, HELLO, "us", sampled)
    continued = next_prompt(session, messages)
    assert continued.ids[: continued.num_recorded] == prompt.ids + sampled
    assert "\nuser<|im_end|>" in continued.text
    assert chat.decode(continued.ids) == continued.text


def test_sessions_do_not_mix(renderer):
    session = Session(renderer)
    split = [i for letter in "the" for i in renderer.chat.tokenize(letter).ids]
    messages, _ = play(session, HELLO, "the", split + renderer.chat.tokenize("<|im_end|>").ids)
    other = next_prompt(Session(renderer), messages)
    assert other.num_recorded == 0
    assert other.ids == renderer.chat.tokenize(other.text).ids


@pytest.mark.parametrize("policy, is_escaped", [(None, True), ("escape", True), ("keep", False)])
def test_special_tokens_in_tool_results(policy, is_escaped):
    """Special tokens in the results of tools are treated as in training data."""
    renderer = FAMILIES["qwen2"].renderer(policy)
    chat = renderer.chat
    session = Session(renderer)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    sampled = chat.tokenize("<tool_call>\n{}\n</tool_call><|im_end|>").ids
    messages, _ = play(session, HELLO, None, sampled, tool_calls=[call])
    result = {"role": "tool", "tool_call_id": "c1", "content": "a <|im_end|> b"}
    continued = session.prompt([*messages, result], renderer.inputs(None, {}))
    assert continued.num_recorded
    new_ids = continued.ids[continued.num_recorded :]
    assert new_ids.count(1) == (1 if is_escaped else 2)
    assert "a <|im_end|> b" in chat.decode(new_ids)


def test_special_tokens_as_error():
    renderer = FAMILIES["qwen2"].renderer("error")
    with pytest.raises(InputError, match="special_tokens_in_text"):
        Session(renderer).prompt(
            [{"role": "user", "content": "a <|im_end|>"}], renderer.inputs([TOOL], {})
        )


def test_tools_that_are_not_printed():
    renderer = FAMILIES["chatml"].renderer()
    with pytest.raises(InputError, match="does not print the tool 'add'"):
        Session(renderer).prompt(HELLO, renderer.inputs([TOOL], {}))


def test_template_argument_with_reserved_name(renderer):
    with pytest.raises(InputError, match=r"chat_template_kwargs\.tokenize"):
        renderer.inputs(None, {"tokenize": True})


def test_template_arguments_of_a_request_come_before_those_of_the_configuration():
    renderer = FAMILIES["qwen3 without thinking"].renderer()
    assert renderer.inputs(None, {}).arguments == {"enable_thinking": False}
    changed = renderer.inputs([], {"enable_thinking": True, "style": "x"})
    assert changed.arguments == {"enable_thinking": True, "style": "x"}
    assert changed.tools is None
    assert renderer.inputs(None, {}).arguments == {"enable_thinking": False}, "of one request"


NOTICES = {
    "qwen2": "is prefix-stable: turns continue each other (with tools)",
    "llama3": "is prefix-stable: turns continue each other (without tools)",
    "mistral": "a new branch begins after turn 2, since the template then writes '<s>[INST]",
    "thinking": "a new branch begins after turn 2",
    "qwen3 without thinking": "a new branch begins after turn 1",
    "apriel": r"writes ' Paris?\n<|a_start|>\nIt rains in Paris.",
}


@pytest.mark.parametrize("name", NOTICES)
def test_notice_of_stability(name):
    assert NOTICES[name] in describe_stability(FAMILIES[name].renderer())


def test_rejecting_template():
    family = Family("{{ raise_exception('never') }}", IM_END)
    assert "rejects the conversation: never" in describe_stability(family.renderer())


def test_all_cases_of_the_table_exist():
    assert set(BRANCHES) <= set(itertools.product(FAMILIES, ("plain", "calls", "tools")))
