"""Small parts of the chat code by themselves: spans, marks, headers, and the order of pieces."""

import itertools

import pytest
from transformers import PreTrainedTokenizerFast

from config import InputError, load
from data.chat.conversation import Conversation
from data.chat.lost import MAX_MARKS, find_losses, word_ends
from data.chat.marks import agreement, mark_offsets
from data.chat.plain_text import tokenize_plain
from data.chat.special_tokens import find_special_tokens
from data.chat.tokenizer import ChatTokenizer, load_tokenizer, template_literals
from data.chat.tokens import Span, Tokens
from data.prompts import last_user_text
from data.rows import TemplateInputs
from tests.data.chat_templates import CHATML, CONTROL, QWEN2, QWEN3, make_tokenizer
from tests.data.test_chat import encode, learned_text, options, say, trained

NO_INPUTS = TemplateInputs(tools=None, arguments={})


def losses_of(template, messages, arguments=None, tools=None):
    """Return (kind, field, message) of each loss in a conversation."""
    chat = ChatTokenizer(make_tokenizer(template, control=CONTROL))
    conversation = Conversation(messages, chat, TemplateInputs(tools, arguments or {}))
    return [(loss.kind, loss.field, loss.message) for loss in find_losses(conversation)]


# -- tokens ----------------------------------------------------------------------------------------

SPANS = [(0, 2), (2, 3), (3, 3), (3, 6), (7, 9)]


@pytest.fixture
def tokens() -> Tokens:
    """Five tokens: the third is empty, and a character before the last belongs to none."""
    return Tokens([10, 11, 12, 13, 14], SPANS.__getitem__)


@pytest.mark.parametrize(
    "spans, mask",
    [
        ([], [0, 0, 0, 0, 0]),
        ([(0, 2)], [1, 0, 0, 0, 0]),
        ([(1, 3)], [1, 1, 0, 0, 0]),
        ([(2, 4)], [0, 1, 1, 1, 0]),
        ([(6, 7)], [0, 0, 0, 0, 0]),
        ([(0, 1), (8, 9)], [1, 0, 0, 0, 1]),
    ],
)
def test_a_mask_has_the_tokens_that_share_a_character(tokens, spans, mask):
    assert tokens.mask([Span(*span) for span in spans]) == mask


def test_tokens_between_two_positions_lie_within_them(tokens):
    assert tokens.between(0, 9).ids == [10, 11, 12, 13, 14]
    assert tokens.between(1, 6).ids == [11, 12, 13]
    assert tokens.between(2, 5).ids == [11, 12]
    part = tokens.between(3, 9)
    assert part.ids == [12, 13, 14]
    assert (part.start(1), part.end(2)) == (3, 9), "positions refer to the whole text"
    assert tokens.first({13, 14}) == 3
    assert tokens.first({99}) is None


# -- marks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plain, position, text, offset, agreeing",
    [
        ("zwei two thr!", 8, "one two three four", 7, "two"),
        ("zwei two three cat", 8, "one two three four", 7, "two three"),
        ("one two three four", 7, "one two three four", 7, "one two three four"),
        (" one two  [", 8, "  one two  ", 9, "one two"),
        ("wone two three", 8, "one two three", 7, "one two three"),
    ],
)
def test_whole_words_around_a_mark_agree(plain, position, text, offset, agreeing):
    start, end = agreement(plain, position, text, offset)
    assert plain[start:end] == agreeing


@pytest.mark.parametrize(
    "text, special, offsets",
    [
        ("<think>\nOkay, so", [], [12, 16]),
        ("word", [], [4]),
        ("...", [], [3]),
        ("?! ", [], [2]),
        ("one <|x|> two", [Span(4, 9)], [3, 6, 13]),
        ("why?</b>", [], [3]),
        ("one two" + "!" * 100, [], [3, 7]),
    ],
)
def test_marks_are_after_the_first_word_and_the_last_letter(text, special, offsets):
    assert mark_offsets(text, special) == offsets


def test_texts_are_decoded_together_as_they_are_alone():
    chat = ChatTokenizer(make_tokenizer(CHATML))
    texts = ["<|im_start|>the cat", "", " sat ", "the cat .", "<|im_end|>"]
    ids = [tokens.ids for tokens in chat.tokenize_batch(texts)]
    assert chat.decode_batch(ids) == [chat.decode(own_ids) for own_ids in ids]
    assert chat.decode_batch(ids)[0].startswith("<|im_start|>")


def test_special_tokens_in_a_text_are_found_in_order():
    chat = ChatTokenizer(make_tokenizer(CHATML))
    found = find_special_tokens("<|im_end|>a<|im_start|><|im_end|>", chat)
    assert found == [Span(0, 10), Span(11, 23), Span(23, 33)]


def test_marks_of_words():
    assert word_ends("a bc  def") == [1, 4, 9]
    assert word_ends("?! ") == [2], "a text without a word has one mark"
    num_words = 7 * MAX_MARKS
    ends = word_ends("ab " * num_words)
    assert MAX_MARKS / 2 < len(ends) <= MAX_MARKS + 1
    assert ends[-1] == 3 * num_words - 1
    assert ends[0] == 2
    assert ends == sorted(set(ends))


def test_texts_that_are_searched_for_are_in_order_with_those_of_marks():
    """A template compares the second text, so marks cannot show it."""
    content = "(('[S]' if m.content == 'secret' else '') + m.content)"
    chat = ChatTokenizer(make_tokenizer(CHATML.replace("m.content", content)))
    conversation = Conversation(say("hi", "secret", "so", "a2"), chat, NO_INPUTS)
    assert [piece.source.message for piece in conversation.pieces] == [0, 1, 2, 3]
    located = [conversation.text[piece.start : piece.end] for piece in conversation.pieces]
    assert located == ["hi", "secret", "so", "a2"]


def test_a_long_text_that_the_template_also_writes_itself_is_located_in_its_message():
    text = "You are made by a cloud."  # the template's default system message
    chat = ChatTokenizer(make_tokenizer(QWEN2))
    conversation = Conversation(say(text, "Yes, that is what I am."), chat, NO_INPUTS)
    assert conversation.text.count(text) == 2
    question, _ = conversation.pieces
    assert conversation.text[: question.start].endswith("<|im_start|>user\n")
    assert conversation.text[question.start : question.end] == text


def test_a_text_that_the_template_leaves_out_is_not_searched_for():
    """The template writes the same word itself. It compares the second text, as above."""
    content = "(('[S]' if m.content == 'secret' else '') + ('' if loop.first else m.content))"
    chat = ChatTokenizer(make_tokenizer(CHATML.replace("m.content", content)))
    conversation = Conversation(say("user", "secret", "so", "a2"), chat, NO_INPUTS)
    assert [piece.source.message for piece in conversation.pieces] == [1, 2, 3]


# -- turns -----------------------------------------------------------------------------------------


def test_the_first_token_is_never_learned():
    """Nothing predicts it, although it belongs to the response."""
    tokenizer = make_tokenizer(None)
    row = {"prompt": "", "response": "the cat"}
    ids, mask = encode(row, ChatTokenizer(tokenizer), options())
    assert tokenizer.decode(ids) == "the cat</s>"
    assert mask == [0] + [1] * (len(ids) - 1)


def test_a_turn_may_end_with_a_text_that_is_no_token():
    """Both turns end with it, so a model learns to write it."""
    template = (
        "{%- for m in messages %}{{ m.role + ':' + m.content + ' [END]\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    row = {"messages": say("q1", "a1", "q2", "a2")}
    assert trained(template, row) == ["a1 [END]", "a2 [END]"]
    assert trained(template, row, train_on="last") == ["a2 [END]"]


def test_a_turn_without_text_may_follow_a_message_that_moves_to_the_top():
    system = "{{ '<|im_start|>system\n' + m.content + '<|im_end|>\n' }}"
    system_first = (
        f"{{%- for m in messages if m.role == 'system' %}}{system}{{% endfor %}}"
        + CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    )
    messages = [*say("q1", "a1", "q2"), {"role": "system", "content": "late"}]
    messages += [{"role": "assistant", "content": ""}, *say("q3", "a3")]
    learned = ["a1<|im_end|>", "<|im_end|>", "a3<|im_end|>"]
    assert trained(system_first, {"messages": messages}) == learned


def test_two_turns_of_the_assistant_need_a_header_between_them():
    """Here the second one would follow the end token of the first."""
    role = "'<|im_start|>' + m.role"
    follows = "loop.previtem and loop.previtem.role == m.role"
    bare = CHATML.replace(role, f"('' if {follows} else {role})")
    messages = [*say("q", "one"), {"role": "assistant", "content": "two"}]
    with pytest.raises(InputError, match="ends the assistant's message before it"):
        trained(bare, {"messages": messages})
    messages[1]["loss_mask"] = 0
    with pytest.raises(InputError, match="the two messages could be joined"):
        trained(bare, {"messages": messages})


def test_a_turn_without_its_header_is_named_with_the_text_before_it():
    odd = CHATML.replace(
        "{{ '<|im_start|>' + m.role",
        "{{ ('HEAD' if loop.last else '<|im_start|>' + m.role)",
    )
    with pytest.raises(InputError) as raised:
        trained(odd, {"messages": say("q1", "a1", "q2", "a2")})
    message = str(raised.value)
    assert "message 3" in message
    assert "it should begin after the generation prompt" in message
    assert "HEAD" in message


def test_a_tokenizer_with_a_method_of_its_own_is_used_if_it_agrees():
    class Passing(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, **kwargs):
            return super().apply_chat_template(*args, **kwargs)

    own = Passing(tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="</s>")
    own.chat_template = CHATML
    row = {"messages": say("q", "the cat", "r", "sat")}
    assert not ChatTokenizer(own).is_stock
    assert learned_text(row, own) == "the cat<|im_end|>sat<|im_end|>"


def test_a_turn_begins_after_the_generation_prompt_of_its_own_row():
    """These rows have the same text, but only some ask for answers without thinking."""
    chat = ChatTokenizer(make_tokenizer(QWEN3))
    learned = []
    for thinks in (False, True, False):
        ids, mask = encode({"messages": say("q", "a"), "enable_thinking": thinks}, chat, options())
        learned.append(chat.tokenizer.decode(list(itertools.compress(ids, mask))))
    answer = "a<|im_end|>"
    assert learned == [answer, f"<think>\n\n</think>\n\n{answer}", answer]


def test_literals_of_a_template():
    template = (
        "{% if '/no_think' in x or y == \"user\" %}{{ 'say \\n' + '\u00e9t\u00e9!' }}{% endif %}"
    )
    assert sorted(template_literals(template)) == ["/no_think", "say \n", "\u00e9t\u00e9!"]
    assert template_literals("{% if %}{{") == []


def test_the_question_is_the_last_text_of_the_user():
    messages = [{"role": "system", "content": "s"}, *say("q1", "a1", "q2", "a2")]
    assert last_user_text(messages) == "q2"
    assert last_user_text(messages[:1]) == ""


def test_an_end_token_that_a_tokenizer_adds_to_plain_texts():
    tokenizer = make_tokenizer(None)
    ids = tokenize_plain("the cat", None, ChatTokenizer(tokenizer)).ids
    assert tokenizer.decode(ids) == "the cat"


def test_the_tokenizer_has_the_template_of_the_run(tmp_path):
    """data.chat_template is a file; without it, the template of the model stays."""
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "other.jinja").write_text(QWEN3)

    def load_with(*settings):
        return load_tokenizer(load("sft.yaml", ["data.train_files=x", *settings]))

    model = f"model.path={tmp_path / 'model'}"
    assert load_with(model).chat_template == CHATML
    other = f"data.chat_template={tmp_path / 'other.jinja'}"
    assert load_with(model, other).chat_template == QWEN3
    missing = tmp_path / "missing.jinja"
    with pytest.raises(InputError, match=f"data.chat_template={missing}: No such file"):
        load_with(model, f"data.chat_template={missing}")
    other_encoding = tmp_path / "latin1.jinja"
    other_encoding.write_bytes("{{ 'Gr\u00fc\u00dfe' }}".encode("latin-1"))
    with pytest.raises(InputError, match=f"data.chat_template={other_encoding} is not UTF-8: "):
        load_with(model, f"data.chat_template={other_encoding}")
    with pytest.raises(InputError, match="no tokenizer in model.path="):
        load_with(f"model.path={tmp_path}")
    (tmp_path / "model" / "tokenizer.json").write_text('{"added_tokens": [], "model": "new"}')
    with pytest.raises(InputError, match="no tokenizer in model.path=.*: .* untagged enum"):
        load_with(model)


# -- what a template leaves out --------------------------------------------------------------------


def test_arguments_of_a_template_are_lost_one_by_one():
    template = "{{ style | default('') }}" + CHATML
    arguments = {"style": "be brief", "other": "is not printed", "empty": "", "flag": True}
    assert losses_of(template, say("q", "a"), arguments) == [
        ("lost", "other", None),
        ("lost", "flag", None),
    ]


def test_an_argument_that_changes_only_the_generation_prompt_has_an_effect():
    template = CHATML + "{% if add_generation_prompt and hint %}{{ hint }}{% endif %}"
    assert losses_of(template, say("q", "a"), {"hint": "think first"}) == []


def test_fields_that_a_template_compares_are_not_lost():
    """Each field by itself: one that has an effect does not hide one that has none."""
    template = CHATML.replace("m.content", "m.content + ('!' if m.name == 'Bob' else '')")
    messages = say("q", {"role": "assistant", "content": "a", "name": "Bob", "audio": {"id": "x"}})
    assert losses_of(template, messages) == [("lost", "audio", 1)]
    messages[1].pop("audio")
    assert losses_of(template, messages) == []
    assert losses_of(CHATML, messages) == [("lost", "name", 1)]


@pytest.mark.parametrize(
    "tool, num_lost",
    [
        ({"name": "add", "description": "Adds two numbers."}, 0),
        ({"type": "function", "function": {"name": "add", "description": " "}}, 0),
        ({"name": "unknown", "description": "Adds two numbers."}, 1),
        ({"name": "add", "description": "It is not printed."}, 1),
    ],
)
def test_names_and_descriptions_of_tools(tool, num_lost):
    template = "{{ 'tools: add Adds two numbers.' if tools }}" + CHATML
    lost = losses_of(template, say("q", "a"), tools=[tool])
    assert lost == [("lost", "tools", None)] * num_lost


def test_columns_that_plain_texts_cannot_have():
    tokenizer = make_tokenizer(None)
    chat = ChatTokenizer(tokenizer)
    pair = {"prompt": "p", "response": "r"}
    for column, value in (("system", "s"), ("tools", [{"a": 1}]), ("enable_thinking", True)):
        with pytest.raises(InputError, match=f'it has "{column}", and the tokenizer has no chat'):
            encode(pair | {column: value}, chat, options())
    for column, value in (("system", None), ("system", ""), ("tools", [])):
        assert encode(pair | {column: value}, chat, options())
    with pytest.raises(InputError, match='it has "persona"'):
        encode(pair | {"persona": "s"}, chat, options(system_key="persona"))


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_reasoning_under_a_printed_key_stays_there(key):
    """The template prints both keys, in different ways."""
    content = "('<a>' + m.reasoning_content if m.reasoning_content else '') + "
    content += "('<b>' + m.thinking if m.thinking else '') + m.content"
    template = CHATML.replace("m.content", f"({content})")
    message = {"role": "assistant", "content": "x", key: "why"}
    expected = {"reasoning_content": "<a>whyx<|im_end|>", "thinking": "<b>whyx<|im_end|>"}
    assert trained(template, {"messages": [*say("q"), message]}) == [expected[key]]
    moved = {"role": "assistant", "content": "x", "reasoning": "why"}
    row = {"messages": [*say("q"), moved]}
    assert learned_text(row, make_tokenizer(template)) == "<a>whyx<|im_end|>"


def test_thinking_of_earlier_answers_is_reported_as_dropped_by_design():
    messages = say("q1", "<think>\nlet me see\n</think>\n\na1", "q2", "a2")
    assert losses_of(QWEN3, messages) == [("earlier", "content", 1)]
