"""Trained text, to the character, under the templates in use. Each template has the structure of a published one."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from config import InputError
from data.chat import encode

CHATML = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Qwen2.5: a default system prompt, tools in the system turn, neighbouring tool results in one user turn.
QWEN2 = r"""
{%- set own = messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + (messages[0].content if own else 'You are made by a cloud.') }}
{%- if tools %}{{ '\n\n# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{% endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first)
           or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{ '\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Qwen3: thinking stays only behind the last user query, which a reverse scan finds; GENERATION differs by release.
QWEN3_BODY = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(searching=true, query=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- if ns.searching and m.role == 'user' and m.content is string
           and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{% set ns.query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{ content }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{ '\n' }}{% endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}GENERATION{% endif %}"""
QWEN3 = QWEN3_BODY.replace(
    "GENERATION",
    r"{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}")
THINKING = QWEN3_BODY.replace("GENERATION", r"{{ '<think>\n' }}")

LLAMA3 = r"""
{%- for m in messages %}
    {%- set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' %}
    {{- (bos_token if loop.first else '') + text }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Mistral: no header for the assistant, and the tools stand before the last user turn, so they move as a chat grows.
MISTRAL = r"""
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + m.content + ' [/INST]' }}
    {%- elif m.tool_calls %}{{ '[TOOL_CALLS] ' + m.tool_calls | tojson + eos_token }}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
    {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('Only user, tool and assistant roles are supported') }}{% endif %}
{%- endfor %}"""

STRICT = "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}" \
         "{{ raise_exception('No user query found in messages.') }}{% endif %}" + QWEN2

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "[INST]", "[/INST]", "<|begin_of_text|>"]


def make_tokenizer(template=None, bos="<s>", eos="</s>"):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    words = "user assistant system tool think answer question hello there the cat sat"
    tokenizer.train_from_iterator([words, QWEN2.replace("\n", " ")], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    made.chat_template = template
    return made


def options(**changes):
    return SimpleNamespace(**dict(
        messages_key="messages", prompt_key="prompt", response_key="response", tools_key="tools",
        template_kwargs_key="chat_template_kwargs", train_on="all") | changes)


def trained(template, row, **changes):
    """The trained runs of a row, as text. Checks the ids on the way."""
    tokenizer = make_tokenizer(template) if isinstance(template, (str, type(None))) else template
    ids, mask = encode(row, tokenizer, options(**changes))
    assert len(ids) == len(mask) and set(mask) <= {0, 1} and mask[0] == 0
    if row.get("messages") and "None" not in str(row):
        arguments = row.get("chat_template_kwargs", {k: v for k, v in row.items() if k == "enable_thinking"})
        assert ids == tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=False, **arguments)
    runs, before = [], 0
    for token, m in zip(ids, mask):
        if m and not before:
            runs.append([])
        if m:
            runs[-1].append(token)
        before = m
    return [tokenizer.decode(run) for run in runs]


def say(*turns):
    """user("..."), assistant("...") in turn; a dict stands for itself."""
    roles = iter(("user", "assistant") * len(turns))
    return [t if isinstance(t, dict) else {"role": next(roles), "content": t} for t in turns]


def call(name, **arguments):
    return {"function": {"name": name, "arguments": arguments}}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ADD, SUB = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', \
           '<tool_call>\n{"name": "sub", "arguments": {"b": "x"}}\n</tool_call>'
AGENT = [{"role": "user", "content": "q"},
         {"role": "assistant", "tool_calls": [call("add", a=1), call("sub", b="x")]},
         {"role": "tool", "content": "2"}, {"role": "tool", "content": "y"},
         {"role": "assistant", "content": "It is 2."}]


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
    """A renderer of single messages gives each tool result a user turn, and repeats the default system prompt."""
    # The turn opens "<|im_start|>assistant" + "\n<tool_call>", which is what the generation prompt asks for.
    expected = [f"{ADD}\n{SUB}<|im_end|>", "It is 2.<|im_end|>"]
    assert trained(template, {"messages": AGENT, "tools": [TOOL]}) == expected
    content_none = [{"content": None, "tool_calls": None} | m for m in AGENT]
    assert trained(template, {"messages": content_none, "tools": None}) == expected


def test_strict_template_with_a_greeting_first():
    """The prefix before the first turn has no user query: the template refuses it, and the header is searched."""
    greeting = {"role": "assistant", "content": "welcome"}
    row = {"messages": [{"role": "system", "content": "<|im_start|>assistant\nfake"}, greeting, *say("q", "a")]}
    assert trained(STRICT, row) == ["welcome<|im_end|>", "a<|im_end|>"]
    assert trained(STRICT, {"messages": [greeting, *say("q", "a")]}) == ["welcome<|im_end|>", "a<|im_end|>"]
    assert trained(QWEN2, {"messages": [greeting, *say("q", "a")]}) == ["welcome<|im_end|>", "a<|im_end|>"]


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
    assert trained(QWEN3, {"messages": two}) == ["a1<|im_end|>", "<think>\nt2\n</think>\n\na2<|im_end|>"]
    # Thinking around tool calls stays behind the last query, and goes from an earlier one, where content may be empty.
    agent = [*say("q1"), turn("t1", "", tool_calls=[call("add", a=1)]), {"role": "tool", "content": "2"},
             turn("t2", "so", tool_calls=[call("sub", b="x")]), {"role": "tool", "content": "y"},
             {"role": "tool", "content": "z"}, turn("t3", "done")]
    assert trained(QWEN3, {"messages": agent, "tools": [TOOL]}) == [
        f"<think>\nt1\n</think>\n\n{ADD}<|im_end|>", f"<think>\nt2\n</think>\n\nso\n{SUB}<|im_end|>",
        "<think>\nt3\n</think>\n\ndone<|im_end|>"]
    assert trained(QWEN3, {"messages": [*agent, *say("q2"), turn("t4", "bye")]}) == [
        f"{ADD}<|im_end|>", f"so\n{SUB}<|im_end|>", "done<|im_end|>", "<think>\nt4\n</think>\n\nbye<|im_end|>"]


def test_qwen3_without_thinking():
    """The empty think block is in the prompt of the last turn, so it is not learned; earlier turns have none."""
    row = {"messages": say("q1", "a1", "q2", "a2"), "chat_template_kwargs": {"enable_thinking": False}}
    assert trained(QWEN3, row) == ["a1<|im_end|>", "a2<|im_end|>"]
    column = {"messages": row["messages"], "enable_thinking": False}
    assert trained(QWEN3, column) == ["a1<|im_end|>", "a2<|im_end|>"]
    thinks = {"messages": row["messages"], "enable_thinking": None, "chat_template_kwargs": {"enable_thinking": True}}
    assert trained(QWEN3, thinks) == ["a1<|im_end|>", "<think>\n\n</think>\n\na2<|im_end|>"]


def test_text_like_the_template_in_contents():
    """Headers and ends of turn quoted in contents lead nobody astray, where turns have to be searched too."""
    fake = "see <|im_start|>assistant\nno<|im_end|>\nok"
    row = {"messages": say(fake, f"<think>t</think>{fake}", fake, "a2"), "enable_thinking": False}
    assert trained(QWEN3, row) == [f"{fake}<|im_end|>", "a2<|im_end|>"]
    assert trained(CHATML, {"messages": say(fake, fake)}) == [f"{fake}<|im_end|>"]


def test_tool_responses_as_user_messages():
    wrapped = "<tool_response>\n2\n</tool_response>"
    messages = say("q1", "<think>t1</think>call", wrapped, "<think>t2</think>a1")
    assert trained(QWEN3, {"messages": messages}) == [
        "<think>\nt1\n</think>\n\ncall<|im_end|>", "<think>\nt2\n</think>\n\na1<|im_end|>"]
    assert trained(QWEN3, {"messages": [*messages, *say("q2", "a2")]})[:2] == ["call<|im_end|>", "a1<|im_end|>"]


def test_generation_prompt_that_opens_the_thinking():
    row = {"messages": say("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")}
    assert trained(THINKING, row) == ["a1<|im_end|>", "t2\n</think>\n\na2<|im_end|>"]
    assert trained(THINKING, row, train_on="last") == ["t2\n</think>\n\na2<|im_end|>"]


def test_llama3():
    tokenizer = make_tokenizer(LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>")
    row = {"messages": [{"role": "system", "content": "s"}, *say("q1", " a1 \n", "q2", "\nthe cat")]}
    assert trained(tokenizer, row) == ["a1<|eot_id|>", "the cat<|eot_id|>"]
    ids, _ = encode(row, tokenizer, options())
    assert ids.count(tokenizer.bos_token_id) == 1


def test_mistral():
    assert trained(MISTRAL, {"messages": say("q1", "a1", "q2", "a2")}) == [" a1</s>", " a2</s>"]
    calls = '[TOOL_CALLS] [{"function": {"arguments": {"a": 1}, "name": "add"}}]</s>'
    agent = [*say("q1"), {"role": "assistant", "content": None, "tool_calls": [call("add", a=1)]},
             {"role": "tool", "content": 'two\n"2"'}, {"role": "assistant", "content": "it is 2"}]
    texts = trained(MISTRAL, {"messages": agent, "tools": [TOOL]})
    assert [t.replace('{"name": "add", "arguments": {"a": 1}}', '{"arguments": {"a": 1}, "name": "add"}')
            for t in texts] == [calls, " it is 2</s>"]
    texts = trained(MISTRAL, {"messages": [*agent, *say("q2", "a2")], "tools": [TOOL]})
    assert texts[0].startswith("[TOOL_CALLS] [{") and texts[0].endswith("]</s>")
    assert texts[1:] == [" it is 2</s>", " a2</s>"]


def test_turns_that_cannot_be_located_are_errors():
    no_header = "{%- for m in messages %}{{ '<' ~ loop.length ~ m.role ~ '>' ~ m.content }}{% endfor %}" \
                "{% if add_generation_prompt %}<assistant>{% endif %}"
    row = {"messages": say("q1", "a1", "q2", "a2")}
    with pytest.raises(InputError, match="cannot locate the assistant turn of message 1"):
        trained(no_header, row)
    # Like gpt-oss: the last turn ends with a token of its own.
    own_end = "{%- for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}" \
              "{{ '</s>' if loop.last and m.role == 'assistant' else '.' }}{% endfor %}" \
              "{% if add_generation_prompt %}<assistant>{% endif %}"
    with pytest.raises(InputError, match="message 1 .* does not end like other turns"):
        trained(own_end, row)
    assert trained(own_end, row, train_on="last") == ["a2</s>"]


def test_phi3_closes_a_text_with_a_token_that_no_turn_has():
    phi3 = "{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}" \
           "{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}"
    tokenizer = make_tokenizer(phi3)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|assistant|>", "<|user|>"]})
    assert trained(tokenizer, {"messages": say("q1", "a1", "q2", "a2")}) == ["a1<|end|>", "a2<|end|>"]


def test_a_template_that_leaves_out_what_is_said_is_an_error():
    with pytest.raises(InputError, match="leaves out what the assistant says in message 1: 'add'"):
        trained(CHATML, {"messages": [{"content": ""} | m for m in AGENT]})
    images = CHATML.replace("m.content", "(m.content | selectattr('text', 'defined') | map(attribute='text') | join)")
    with pytest.raises(InputError, match="leaves out what the assistant says in message 1: 'the cat'"):
        trained(images, {"messages": say("q", "hi\nthe cat")})
    parts = say([{"type": "text", "text": "q"}], [{"type": "text", "text": "the cat"}])
    assert trained(images, {"messages": parts}) == ["the cat<|im_end|>"]


def test_prompt_and_response():
    pair = {"prompt": "the cat", "response": " sat"}
    assert trained(CHATML, pair) == [" sat<|im_end|>"]
    assert trained(None, pair) == [" sat</s>"]
    ids, _ = encode(pair, tokenizer := make_tokenizer(None), options())
    assert tokenizer.decode(ids) == "the cat sat</s>"
    few_shot = {"messages": None, "prompt": say("q1", "a1", "q2"), "response": "a2"}
    assert trained(CHATML, few_shot) == ["a2<|im_end|>"]
    renamed = {"question": "q", "answer": "a"}
    assert trained(CHATML, renamed, prompt_key="question", response_key="answer") == ["a<|im_end|>"]


@pytest.mark.parametrize("row, message", [
    ({}, '"messages" is missing'),
    ({"messages": "hi"}, '"messages" must be a list of messages'),
    ({"messages": []}, '"messages" must be a list of messages'),
    ({"messages": ["hi"]}, r'"messages\[0\]" must be an object'),
    ({"messages": [{"role": "human", "content": "x"}]}, r"\"messages\[0\].role\" is 'human'"),
    ({"messages": [{"role": "user"}]}, r'"messages\[0\].content" is missing'),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "content\" is missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "content\" must be a string"),
    ({"messages": [{"role": "user", "content": "x", "loss_mask": 1}]}, "only assistant messages"),
    ({"messages": [{"role": "assistant", "content": "x", "loss_mask": "none"}]}, "must be 0 or 1"),
    ({"messages": [{"role": "assistant", "tool_calls": ["add"]}]}, 'tool_calls" must be a list of objects'),
    ({"messages": say("x", "y"), "tools": "none"}, '"tools" must be a list'),
    ({"messages": say("x", "y"), "enable_thinking": "none"}, '"enable_thinking" is \'none\''),
    ({"messages": say("x", "y"), "chat_template_kwargs": {"tokenize": True}}, "tokenize\" is not a template argument"),
    ({"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}]}, "No user query found"),
    ({"messages": say("x\ud83d", "y")}, "the text has half a character"),
    ({"prompt": "x"}, '"response" is missing'),
    ({"prompt": 3, "response": "x"}, '"prompt" must be a list of messages'),
])
def test_malformed_rows(row, message):
    with pytest.raises(InputError, match=message):
        trained(STRICT, row)


def test_tokenizers_that_cannot_serve():
    with pytest.raises(InputError, match="no chat template"):
        trained(None, {"messages": say("q", "a")})
    with pytest.raises(InputError, match="fast tokenizer"):
        encode({}, SimpleNamespace(is_fast=False), options())

    class Prefixing(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, tokenize=True, **kwargs):
            out = super().apply_chat_template(*args, tokenize=tokenize, **kwargs)
            return [0, *out] if tokenize else out
    odd = Prefixing(tokenizer_object=make_tokenizer().backend_tokenizer, chat_template=CHATML)
    with pytest.raises(InputError, match="other ids"):
        encode({"messages": say("q", "a")}, odd, options())


TOKENIZER = make_tokenizer(CHATML)
CONTENT = st.text(st.sampled_from("ab \n\t<|>é漢😀\u2028") | st.characters(codec="utf-8"), max_size=20)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4))
def test_every_turn_is_its_content_and_the_end(turns):
    messages = say(*(text for turn in turns for text in turn))
    assert trained(TOKENIZER, {"messages": messages}) == [answer + "<|im_end|>" for _, answer in turns]
