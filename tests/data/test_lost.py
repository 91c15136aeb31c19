"""Every text and field of a row reaches the tokens, or is reported."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from config import InputError
from data.chat import encoding
from data.chat.conversation import Conversation
from data.chat.losses import Loss
from data.chat.lost import find_losses, must_be_dropped
from data.chat.tokenizer import ChatTokenizer
from data.dataset import TokenDataset
from data.prompts import encode_prompt
from data.rows import TemplateInputs
from tests.data.chat_templates import (
    CHATML,
    CONTROL,
    GEMMA4,
    LLAMA3,
    QWEN2,
    QWEN3,
    THINKING,
    make_tokenizer,
)
from tests.data.test_chat import TOOL, call, encode, options, say, trained
from tests.data.test_dataset import chat, make, tokenizer_dir, write  # noqa: F401 (fixtures)

# Cuts the thinking out of every answer, even out of the last one, as DeepSeek-R1 does.
CUTTING = CHATML.replace("m.content", "m.content.split('</think>')[-1] | trim")
# Prints the system message only in front of a last user message, as Mistral's templates do.
SYSTEM_BEFORE_LAST_USER = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{{ messages[0].content + '\n' if loop.last and messages[0].role == 'system' }}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% endif %}{% endfor %}"
)
READS_REASONING = CHATML.replace(
    "m.content", "('<think>' + m.KEY + '</think>' if m.KEY else '') + m.content"
)
TOOL_RESULT = {"role": "tool", "content": "3"}


def answer(content="the cat", **fields):
    return {"role": "assistant", "content": content} | fields


def losses(template, messages, tools=None, arguments=None, **rendering):
    """Return {(kind, field)} of the losses in a conversation."""
    tokenizer = make_tokenizer(template, control=CONTROL)
    inputs = TemplateInputs(tools, arguments or {})
    conversation = Conversation(messages, ChatTokenizer(tokenizer), inputs, **rendering)
    return {(loss.kind, loss.field) for loss in find_losses(conversation)}


@pytest.mark.parametrize("content", ["2", "2+3?", " spaces \n\n within  ", 'a "quoted" <b>b</b>'])
@pytest.mark.parametrize("template", [CHATML, QWEN2, QWEN3, THINKING, LLAMA3, GEMMA4])
def test_texts_that_a_template_only_trims_are_not_lost(template, content):
    messages = [{"role": "system", "content": content}, *say(content, content, content, content)]
    assert not losses(template, messages)
    assert not losses(template, messages[:-1], add_generation_prompt=True)


@pytest.mark.parametrize("template", [QWEN2, QWEN3])
def test_calls_and_tools_that_are_printed_as_json_are_not_lost(template):
    calls = [call("add", a='say "hi"\nand é', b=[1, {"c": "x"}], d=2.5), call("add", a=1)]
    messages = [*say("q"), answer("", tool_calls=calls), TOOL_RESULT, answer("done")]
    described = {"name": "sub", "description": 'Subtracts "b"\nfrom a.', "parameters": {}}
    assert not losses(template, messages, [TOOL, {"type": "function", "function": described}])


@pytest.mark.parametrize(
    "field, value",
    [
        ("reasoning_content", "let me see"),
        ("reasoning", "let me see"),
        ("thinking", "let me see"),
        ("refusal", "I cannot do that"),
        ("function_call", {"name": "f", "arguments": '{"a": "b"}'}),
        ("function_call", {"name": "f", "arguments": "{}"}),
        ("name", "Bob"),
        ("audio", {"id": "audio_1"}),
        ("audio", {"transcript": "hello"}),
        ("foo", "the cat sat"),
        ("foo", [1, 2]),
    ],
)
def test_a_field_that_is_not_printed_is_lost(field, value):
    row = {"messages": [*say("q"), answer(**{field: value})]}
    assert losses(CHATML, row["messages"]) == {("lost", field)}
    with pytest.raises(InputError, match=rf"leaves out {field} of message 1 \(assistant\): "):
        trained(CHATML, row)
    assert trained(CHATML, row, lost_fields="ignore") == ["the cat<|im_end|>"]
    assert trained(CHATML, row, ignored_fields=[field]) == ["the cat<|im_end|>"]


def test_numbers_and_ids_are_not_texts():
    links = {"id": "call_1", "type": "function"}
    messages = [
        *say("q"),
        answer("", tool_calls=[call("add", a="x") | links], score=0.5, is_good=True),
        TOOL_RESULT | {"tool_call_id": "call_1", "name": "add"},
        answer("done", score=1),
    ]
    assert losses(QWEN2, messages) == {("unread", "score"), ("unread", "is_good")}


def test_a_text_that_the_message_has_twice_is_printed_once():
    messages = [*say("q"), answer("the cat sat there", text="the cat sat there")]
    assert not losses(CHATML, messages)
    # But two messages with the same text have to be printed both.
    silent = CHATML.replace("m.content", "('' if loop.index == 3 else m.content)")
    for text in ("yes", "yes, this is a long text"):
        messages = say(text, "the answer to it", text, "another answer to it")
        assert losses(silent, messages) == {("lost", "content")}


def test_parts_of_a_text_are_lost():
    text = "some long text with a secret word, which the template removes"
    for part in ("secret word", "some long", text):
        cut = CHATML.replace("m.content", f"m.content | replace('{part}', '')")
        with pytest.raises(InputError, match=f"leaves out content of message 1 .*: '{part[:60]}'"):
            trained(cut, {"messages": say("q", text)})
    shortened = CHATML.replace("m.content", "m.content | truncate(30, true, '')")
    assert losses(shortened, say("q", text)) == {("lost", "content")}


@pytest.mark.parametrize("printed", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_from_the_key_that_the_template_prints(printed, key):
    row = {"messages": [*say("q"), answer(**{key: "let me see"})]}
    template = READS_REASONING.replace("KEY", printed)
    learned = ["<think>let me see</think>the cat<|im_end|>"]
    tokenizer = make_tokenizer(template)
    ids, mask = encode(row, ChatTokenizer(tokenizer), options())
    assert tokenizer.decode([i for i, m in zip(ids, mask) if m]) == learned[0]


def test_reasoning_is_under_the_key_that_the_template_prints_with_the_arguments_of_the_row():
    content = "('<a>' + m.reasoning_content if enable_thinking and m.reasoning_content else '') + "
    content += "('<b>' + m.thinking if not enable_thinking and m.thinking else '') + m.content"
    tokenizer = make_tokenizer(CHATML.replace("m.content", f"({content})"))
    chat = ChatTokenizer(tokenizer)
    learned = []
    for is_thinking in (True, False, True):
        messages = [*say("q"), answer(reasoning="let me see")]
        row = {"messages": messages, "enable_thinking": is_thinking}
        ids, mask = encode(row, chat, options())
        learned.append(tokenizer.decode([i for i, m in zip(ids, mask) if m]))
    first = "<a>let me seethe cat<|im_end|>"
    assert learned == [first, "<b>let me seethe cat<|im_end|>", first]


def test_thinking_that_is_cut_out_of_the_last_answer_is_lost():
    thought = "<think>\nlet me see\n</think>\n\nthe cat"
    with pytest.raises(InputError, match=r"leaves out content of message 1 .*'<think>\\nlet me"):
        trained(CUTTING, {"messages": say("q", thought)})
    # Every template cuts it out of earlier answers.
    messages = say("q", thought, "and now?", "the dog")
    assert losses(CUTTING, messages) == {("earlier", "content")}
    assert losses(QWEN3, messages) == {("earlier", "content")}
    assert losses(QWEN3, say("q", thought, "and now?", thought)) == {("earlier", "content")}
    assert losses(CUTTING, messages[:-1], add_generation_prompt=True) == {("earlier", "content")}
    # But none cuts it out of the user's texts.
    assert losses(CUTTING, say(thought, "a", "and now?", "b")) == {("lost", "content")}


@pytest.mark.parametrize(
    "printed, kind",
    [
        ("split('</think>')[-1]", "earlier"),
        ("split('</think>')[0]", "lost"),
        ("split('<a>')[-1]", "lost"),
        ("split('<b>')[-1]", "lost"),
    ],
)
def test_only_the_thinking_may_be_cut_out_of_an_earlier_answer_that_is_rewritten(printed, kind):
    """The template also joins two spaces to one, so that the answer is not found as it is."""
    template = CHATML.replace("m.content", f"m.content.{printed} | replace('  ', ' ')")
    thought = "<think>let me <a>see</think>  the  <b>big cat"
    assert losses(template, say("q", thought, "and now?", "the dog")) == {(kind, "content")}
    no_later_question = [*say("q", thought), TOOL_RESULT, answer()]
    assert losses(template, no_later_question) == {("lost", "content")}


def test_an_earlier_answer_that_is_lost_with_its_thinking_is_lost():
    without_first = CHATML.replace("m.content", "('' if loop.index0 == 1 else m.content)")
    for earlier in ("<think>\nlet me see\n</think>\n\nthe cat", "the cat"):
        messages = say("q", earlier, "and now?", "the dog")
        assert losses(without_first, messages) == {("lost", "content")}


@pytest.mark.parametrize("printed", ["m.content[:-1]", "(m.content[:-1] | tojson)"])
def test_a_text_without_its_last_letter_is_lost(printed):
    cutting = CHATML.replace("m.content", printed)
    messages = say("what does the cat do all day long?", 'it sits on "the mat" and sleeps there')
    assert losses(cutting, messages) == {("lost", "content")}


def test_reasoning_of_earlier_answers_is_only_reported_if_the_template_prints_the_last():
    messages = [*say("q"), answer(reasoning_content="let me see"), *say("more", "the dog")]
    assert losses(QWEN3, messages) == {("earlier", "reasoning_content")}
    assert losses(CHATML, messages) == {("lost", "reasoning_content")}


def test_reasoning_is_only_dropped_by_design_if_the_template_prints_it_for_a_row_of_its_kind():
    """A row with a template argument, or with a call, tells nothing about rows without."""
    condition = "m.reasoning_content and loop.last and (show or m.tool_calls)"
    content = f"('<think>' + m.reasoning_content if {condition} else '') + m.content"
    content += " + (m.tool_calls[0].function.name if m.tool_calls else '')"
    chat_tokenizer = ChatTokenizer(make_tokenizer(CHATML.replace("m.content", f"({content})", 1)))

    def kinds(arguments, **fields):
        messages = [*say("q"), answer(reasoning_content="let me see", **fields), *say("r", "a")]
        inputs = TemplateInputs(None, arguments)
        return {loss.kind for loss in find_losses(Conversation(messages, chat_tokenizer, inputs))}

    shown = {"show": True}
    assert kinds(shown) == kinds({}, tool_calls=[call("add")]) == {"earlier"}
    assert kinds({}) == {"lost"}
    assert kinds(shown) == kinds({}, tool_calls=[call("add")]) == {"earlier"}


def test_an_error_about_lost_fields_names_all_of_them_and_those_that_may_be_ignored():
    messages = [*say("q"), answer(reasoning="let me see", audio={"id": "x"}, name="Bob")]
    row = {"messages": messages, "tools": [TOOL]}
    with pytest.raises(InputError) as raised:
        trained(CHATML, row)
    message = str(raised.value)
    assert "leaves out reasoning of message 1 (assistant): 'let me see' (and audio, name" in message
    assert ", tools). Name a template" in message
    assert "set data.ignored_fields=[reasoning,audio,name] if the model must not" in message
    with pytest.raises(InputError) as raised:
        trained(CHATML, {"messages": say("q", "a"), "tools": [TOOL]})
    assert "leaves out tools: " in str(raised.value)
    assert "ignored_fields" not in str(raised.value)


def test_roles_that_a_template_skips():
    skipping = CHATML.replace("in messages", "in messages if m.role in ('user', 'assistant')")
    for role in ("system", "developer", "tool"):
        messages = [*say("q", "a"), {"role": role, "content": "no"}, *say("r", "b")]
        assert losses(skipping, messages) == {("lost", "content")}
        assert not losses(CHATML, messages)


def test_a_system_message_that_only_prompts_have():
    messages = [{"role": "system", "content": "be brief"}, *say("q", "a")]
    assert losses(SYSTEM_BEFORE_LAST_USER, messages) == {("lost", "content")}
    assert not losses(SYSTEM_BEFORE_LAST_USER, messages[:-1], add_generation_prompt=True)


def test_tools_that_are_not_printed():
    assert losses(CHATML, say("q", "a"), [TOOL]) == {("lost", "tools")}
    # The name also stands in a message.
    assert losses(CHATML, say("call add", "a"), [TOOL]) == {("lost", "tools")}
    in_prompt = losses(CHATML, say("call add"), [TOOL], add_generation_prompt=True)
    assert in_prompt == {("lost", "tools")}
    quoted = {"function": TOOL["function"] | {"description": "Adds two numbers."}}
    assert losses(CHATML, say("add? Adds two numbers.", "a"), [quoted]) == {("lost", "tools")}
    only_names = CHATML + "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    described = {"function": TOOL["function"] | {"description": "Adds two numbers."}}
    assert not losses(only_names, say("q", "a"), [TOOL])
    assert losses(only_names, say("q", "a"), [described]) == {("lost", "tools")}
    assert losses(only_names, say("q", "a"), [TOOL, described]) == {("lost", "tools")}


def test_descriptions_of_parameters_are_reported_and_no_error():
    number = {"type": "object", "properties": {"x": {"type": "number", "description": "A size"}}}
    schema = {"type": "object", "properties": {"a": number, "b": {"description": 'the "other"'}}}
    tool = {"function": {"name": "add", "parameters": schema}}
    only_names = CHATML + "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    found = losses(only_names, say("q", "a"), [tool])
    assert found == {("unprinted", "descriptions within tools")}
    assert losses(only_names, say("q", "a"), [TOOL, tool]) == found
    assert not must_be_dropped([Loss(*pair, None, "") for pair in found], "error")
    as_json = CHATML + "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    assert not losses(as_json, say("q", "a"), [tool])


def test_calls_with_numbers_alone():
    messages = [*say("q"), answer("", tool_calls=[call("add", a=17, b=4)]), TOOL_RESULT, answer()]
    assert not losses(QWEN2, messages)
    names = CHATML.replace(
        "m.content", "m.content + (m.tool_calls[0].function.name if m.tool_calls else '')"
    )
    assert losses(names, messages) == {("lost", "tool_calls")}
    # Here only the second call is lost, of which one number also stands in the first.
    calls = "(m.tool_calls[0] | tojson) + m.tool_calls[1].function.name if m.tool_calls else ''"
    first = CHATML.replace("m.content", f"m.content + ({calls})")
    messages[1]["tool_calls"] = [call("add", a=17), call("sub", b=17, c=4)]
    assert losses(first, messages) == {("lost", "tool_calls")}
    assert not losses(QWEN2, messages)


def test_template_arguments_without_effect():
    assert losses(CHATML, say("q", "a"), None, {"enable_thinking": False}) == {
        ("lost", "enable_thinking")
    }
    # The value is the default, which is no reason for an error.
    assert not losses(QWEN3, say("q", "a"), None, {"enable_thinking": True})
    assert not losses(QWEN3, say("q", "a"), None, {"enable_thinking": False})
    assert losses(QWEN3, say("q", "a"), None, {"instructions": "Be very brief."}) == {
        ("lost", "instructions")
    }


def test_prompts_are_checked_as_rows_for_fine_tuning_are():
    def prompt(messages, **changes):
        row = encode_prompt({"prompt": messages}, chat_tokenizer, options(**changes))
        (result,) = encoding.encode_together([row])
        if isinstance(result, InputError):
            raise result
        return result.text

    chat_tokenizer = ChatTokenizer(make_tokenizer(CHATML))
    messages = [*say("q"), answer(reasoning="let me see"), *say("more")]
    with pytest.raises(InputError, match="leaves out reasoning of message 1"):
        prompt(messages)
    assert prompt(messages, lost_fields="ignore").endswith(
        "more<|im_end|>\n<|im_start|>assistant\n"
    )


def test_plain_text_has_no_place_for_tools():
    row = {"prompt": "q", "response": "a", "tools": [TOOL]}
    with pytest.raises(InputError, match='it has "tools", and the tokenizer has no chat template'):
        trained(None, row)
    assert trained(None, row, lost_fields="ignore") == ["a</s>"]


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["loss_mask", "weight", "loss", "train", "training", "trainable"])
def test_masks_under_other_names(key):
    first = answer("one", **{key: False})
    row = {"messages": [*say("q"), first, *say("r"), answer("two", **{key: 1})]}
    assert trained(CHATML, row) == ["two<|im_end|>"]
    row["messages"][1][key] = 0.5
    with pytest.raises(InputError, match=rf'"messages\[1\].{key}" is 0.5: must be true or false'):
        trained(CHATML, row)


@pytest.mark.parametrize(
    "key, value",
    [
        ("train_detail", [{"begin_offset": 0, "end_offset": 2, "train": False}]),
        ("masked", True),
        ("is_masked", False),
        ("sample_weight", 0.5),
    ],
)
def test_masks_that_are_not_read_are_errors(key, value):
    row = {"messages": [*say("q"), answer(**{key: value})]}
    with pytest.raises(InputError, match=rf'"message 1.{key}" is .* nothing reads it'):
        trained(CHATML, row)
    assert trained(CHATML, row, ignored_fields=[key]) == ["the cat<|im_end|>"]


@pytest.mark.parametrize(
    "column, value",
    [("weight", 0.5), ("weight", "0.5"), ("loss_mask", [0, 1]), ("train", False), ("masked", True)],
)
def test_rows_have_no_weight(column, value):
    row = {"messages": say("q", "a"), column: value}
    with pytest.raises(InputError, match=f'the column "{column}" is .* rows have no weight'):
        trained(CHATML, row)
    assert trained(CHATML, row, ignored_fields=[column]) == ["a<|im_end|>"]
    assert trained(CHATML, row | {column: 0 if column == "masked" else 1}) == ["a<|im_end|>"]
    assert trained(CHATML, row | {column: "a text"}) == ["a<|im_end|>"]


# -- files -----------------------------------------------------------------------------------------


def texts_of_rows(folder, directory):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    data = TokenDataset.load(folder)
    return [tokenizer.decode(data.batch([i]).input_ids) for i in range(len(data))]


@pytest.mark.parametrize(
    "row",
    [
        chat("q", "a"),
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "output": "a"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ],
)
def test_the_column_system_becomes_the_system_message(make, tokenizer_dir, tmp_path, capsys, row):  # noqa: F811
    path = write(tmp_path / "a.jsonl", [row | {"system": "be brief"}, row])
    first, second = texts_of_rows(make(path), tokenizer_dir)
    assert first == "<|im_start|>system\nbe brief<|im_end|>\n" + second
    assert (
        "a.jsonl: the system column becomes the system message (1 row)" in capsys.readouterr().out
    )
    unread, _ = texts_of_rows(make(path, system_key=None), tokenizer_dir)
    assert unread == second


def test_a_second_system_message(make, tokenizer_dir, tmp_path):  # noqa: F811
    messages = [{"role": "system", "content": "be brief"}, *chat("q", "a")["messages"]]
    row = {"messages": messages, "system": "be brief"}
    (text,) = texts_of_rows(make(write(tmp_path / "a.jsonl", [row])), tokenizer_dir)
    assert text.count("be brief") == 1
    row["system"] = "be long"
    with pytest.raises(InputError, match="column \"system\" is 'be long', and the messages have"):
        make(write(tmp_path / "a.jsonl", [row]))


def test_context_is_the_input_of_an_instruction(make, tokenizer_dir, tmp_path):  # noqa: F811
    dolly = {"instruction": "add", "context": "1+2", "response": "3", "category": "math"}
    alpaca = {"instruction": "add", "context": "1+2", "input": "", "output": "3"}
    path = write(tmp_path / "a.jsonl", [dolly, alpaca])
    first, second = texts_of_rows(make(path), tokenizer_dir)
    assert first == second
    assert "user\nadd\n\n1+2<|im_end|>" in first
    with pytest.raises(InputError, match='may have "input" or "context", and this one has both'):
        make(write(tmp_path / "a.jsonl", [alpaca | {"input": "2"}]))


def test_a_run_prints_how_each_file_is_read(make, tmp_path, capsys):  # noqa: F811
    rows = [chat("q", "a") | {"source": "web", "lang": None}, chat("q", "a") | {"lang": "en"}]
    rows[0]["messages"][1]["score"] = 0.5
    path = write(tmp_path / "a.jsonl", [*rows, chat("q", "a")])
    expected = (
        "data: a.jsonl: reads messages (role, content); ignores the columns source (1 row), "
        "lang (1 row); ignores in messages score (1 row)\n"
    )
    make(path)
    assert expected in capsys.readouterr().out
    make(path)  # from the cache
    assert expected in capsys.readouterr().out
    same = [write(tmp_path / f"{name}.jsonl", [*rows, chat("q", "a")]) for name in "bcd"]
    make(same)
    assert "b.jsonl and 2 more files: reads messages" in capsys.readouterr().out


def test_rows_that_lose_text_are_dropped_and_counted(make, tokenizer_dir, tmp_path, capsys):  # noqa: F811
    lost = chat("q", "a")
    lost["messages"][1]["reasoning"] = "let me see"
    path = write(tmp_path / "a.jsonl", [chat("q", "a"), lost, chat("r", "b")])
    with pytest.raises(InputError, match="a.jsonl:2: the chat template leaves out reasoning of"):
        make(path)
    folder = make(path, lost_fields="drop")
    assert len(TokenDataset.load(folder)) == 2
    stats = json.loads((folder / "stats.json").read_text())
    assert stats["dropped_lost_fields"] == 1
    assert stats["dropped_no_loss"] == stats["dropped_long"] == 0
    output = capsys.readouterr().out
    assert "the chat template leaves out reasoning (1 row): see data.lost_fields" in output
    assert "dropped because of data.lost_fields=drop: 1 row" in output
    assert len(TokenDataset.load(make(path, lost_fields="ignore"))) == 3
    write(path, [lost])
    with pytest.raises(InputError, match="1 lose text under the chat template"):
        make(path, lost_fields="drop")


@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA3, GEMMA4])
def test_images_for_a_text_model_are_the_reason_that_an_error_names(template):
    image = {"type": "image", "image": "a.png"}
    text = {"type": "text", "text": "q"}
    rows = [
        {"messages": say("q", "a"), "images": ["a.png"]},
        {"messages": [{"role": "user", "content": [image, text]}, answer()]},
    ]
    chat = ChatTokenizer(make_tokenizer(template, control=CONTROL))
    settings = options(lost_fields="drop", max_prompt_length=100, teacher_prompt_key=None)
    for row in rows:
        for encoded in (encoding.encode(row, chat, settings), encode_prompt(row, chat, settings)):
            (result,) = encoding.encode_together([encoded])
            assert "the row has images: set model.images=true" in str(result)
