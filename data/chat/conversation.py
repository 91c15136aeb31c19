"""A conversation as its chat template renders it.

A template may render a message differently depending on the other messages: Qwen3 drops the
thinking of earlier turns, Mistral moves the tools to the last user turn, and Gemma 4 puts tool
results into the assistant's turn. So a conversation is rendered as a whole and tokenized once.
Afterwards, data/chat/spans.py locates the assistant's turns in the text.
"""

from __future__ import annotations

from functools import cached_property

import jinja2

from config import InputError
from data.chat.forms import forms, is_complete, is_list_of_texts, printed_as_code
from data.chat.marks import Piece, Text, texts_of
from data.chat.pieces import RenderedChat, find_pieces
from data.chat.reasoning import with_readable_reasoning
from data.chat.special_tokens import escape_special_tokens, find_special_tokens, needs_escape
from data.chat.tokenizer import TEMPLATE_ERRORS, ChatTokenizer
from data.chat.tokens import Span, Tokens
from data.images.sources import IMAGE
from data.messages import CONTEXT_KEY, LOSS_KEYS
from data.rows import TemplateInputs

ADVICE_ON_PARTS = (
    'write texts as {"type": "text", "text": ...}, images as {"type": "image", "image": ...}, '
    'reasoning as the key "reasoning_content" of the message, tool calls as its key "tool_calls", '
    'and each result of a tool as a message with the role "tool"'
)


class Conversation:
    """A rendered conversation.

    Args:
        messages: checked messages, as data.rows returns them.
        chat: the tokenizer with its template.
        inputs: the tools and template arguments of the row.
        options: passed to the template when it renders the whole conversation, e.g.
            add_generation_prompt=True.

    Attributes:
        messages: the messages in the form that suits the template (data/chat/forms.py).
        text: the rendered chat.
        tokens: the tokens of the text; computed when first used, or set by
            encoding.encode_together().

    Raises:
        InputError: the template rejects the conversation, or it leaves out a part of a message.
    """

    def __init__(
        self, messages: list[dict], chat: ChatTokenizer, inputs: TemplateInputs, **options
    ):
        self.chat = chat
        self.inputs = inputs
        self.options = options
        self.messages, self.text = self.choose_form(messages)
        self.check_no_part_left_out()

    def choose_form(self, messages: list[dict]) -> tuple[list[dict], str]:
        """Return the messages in the form that suits the template, and the rendered text.

        This is the first form that the template prints completely, without objects in the notation
        of code. If there is none, it is the first one without such objects.
        """
        template_messages = with_readable_reasoning(
            [without_loss_keys(message) for message in messages],
            self.try_render,
            self.chat.reasoning_keys.setdefault(str(self.inputs.arguments), {}),
        )
        incomplete = []
        code = ""
        first_error = None
        for form in forms(template_messages):
            try:
                text = self.render(form, **self.options)
            except TEMPLATE_ERRORS as error:
                first_error = first_error or error
                continue
            code_in_form = printed_as_code(form, text)
            code = code or code_in_form
            if code_in_form:
                continue
            if is_complete(form, text):
                return form, text
            incomplete.append((form, text))
        if incomplete:
            return incomplete[0]
        unusual_part = describe_unusual_part(messages)
        # raise_exception() of a template raises exactly this class, with the template's own reason.
        has_own_reason = type(first_error) is jinja2.TemplateError
        if has_own_reason:
            code = ""
        if code and unusual_part:
            raise InputError(f"the chat template does not know {unusual_part}: {ADVICE_ON_PARTS}")
        if code:
            raise InputError(
                f"the chat template prints {code[:80]}, a value in the notation of a program: the "
                "arguments of tool calls must be an object, or an object as JSON text"
            )
        advice = f". It may not know {unusual_part}: {ADVICE_ON_PARTS}" if unusual_part else ""
        raise InputError(
            f"the chat template rejects the conversation: {first_error}{advice}"
        ) from first_error

    def check_no_part_left_out(self) -> None:
        """Raise InputError if the template skips a message part because it does not know its type.

        Answers before the last user turn are not checked, since a template may drop their thinking.
        """
        last_user_turn = max(
            (i for i, message in enumerate(self.messages) if message["role"] == "user"), default=0
        )
        for i, message in enumerate(self.messages):
            is_earlier_answer = message["role"] == "assistant" and i <= last_user_turn
            content = message.get("content")
            if is_earlier_answer or not isinstance(content, list):
                continue
            for part in content:
                is_known = part == IMAGE or part.get("type") in (None, "text")
                if not is_known:
                    self.check_part_is_printed(i, part)

    def check_part_is_printed(self, index: int, part: dict) -> None:
        """Raise InputError if the rendered chat is the same without this part of a message."""
        message = self.messages[index]
        other_parts = [other for other in message["content"] if other is not part]
        shortened = list(self.messages)
        shortened[index] = message | {"content": other_parts}
        if self.try_render(shortened, **self.options) == self.text:
            raise InputError(
                f"the chat template leaves out a part of message {index}, {str(part)[:60]}: "
                f"{ADVICE_ON_PARTS}"
            )

    def render(self, messages: list[dict], **options):
        """Render messages with this conversation's tools and template arguments."""
        return self.chat.render(messages, self.inputs.tools, **options, **self.inputs.arguments)

    def try_render(self, messages: list[dict], **options) -> str | None:
        """Render messages, or return None if the template rejects them."""
        return self.chat.try_render(messages, self.inputs.tools, **options, **self.inputs.arguments)

    def append(self, text: str) -> None:
        """Add text to the end of the rendered chat."""
        self.text += text
        self.tokens = self.chat.tokenize(self.text)

    @cached_property
    def tokens(self) -> Tokens:
        tokens = self.chat.tokenize(self.text)
        if self.chat.is_stock:
            return tokens
        ids = self.render(self.messages, tokenize=True, return_dict=False, **self.options)
        if tokens.ids != ids:
            raise InputError(
                "apply_chat_template(tokenize=True) does not return the tokens of the rendered "
                "text: this tokenizer cannot be used for training"
            )
        return tokens

    @cached_property
    def texts(self) -> list[Text]:
        """All texts of the messages."""
        return texts_of(self.messages)

    @cached_property
    def inputs_as_text(self) -> str:
        return str(self.inputs)

    @cached_property
    def literals_of_messages(self) -> list[frozenset[str]]:
        """For each message, the literals of the template that its texts contain."""
        literals: list[set[str]] = [set() for _ in self.messages]
        for text in self.texts:
            literals[text.message].update(
                literal for literal in self.chat.literals if literal in text.text
            )
        return [frozenset(of_message) for of_message in literals]

    def literals_before(self, message: int) -> frozenset[str]:
        """Return the literals of the template that the texts before a message contain."""
        return frozenset().union(*self.literals_of_messages[:message])

    @cached_property
    def pieces(self) -> list[Piece]:
        """The parts of the rendered chat that come from messages, in order."""
        rendered = RenderedChat(
            self.text,
            self.messages,
            self.texts,
            lambda messages: self.try_render(messages, **self.options),
        )
        return find_pieces(rendered, lambda text: find_special_tokens(text, self.chat))

    def escaped_tokens(self, policy: str | None) -> Tokens:
        """Return the tokens after applying a policy to special tokens that are written in texts.

        Args:
            policy: the value of data.special_tokens_in_text. None means: escape special tokens in
                tool results, and keep them elsewhere.
        """
        has_tools = any(m["role"] == "tool" or len(m) > 2 for m in self.messages)
        if policy == "keep" or (policy is None and not has_tools):
            return self.tokens
        texts_to_escape = [text for text in self.texts if self.is_escaped(text, policy)]
        if not texts_to_escape:
            return self.tokens
        spans = [
            Span(piece.start, piece.end) for piece in self.pieces if piece.source in texts_to_escape
        ]
        return escape_special_tokens(self.tokens, self.text, spans, self.chat)

    def is_escaped(self, text: Text, policy: str | None) -> bool:
        """Return whether this text contains special tokens that have to be escaped."""
        is_tool_result = not text.is_own or self.messages[text.message]["role"] == "tool"
        default = "escape" if is_tool_result else "keep"
        return needs_escape(text.text, policy or default, self.chat)


def without_loss_keys(message: dict) -> dict:
    """Return a message without the keys that only control the loss."""
    hidden = (*LOSS_KEYS, CONTEXT_KEY)
    return {key: value for key, value in message.items() if key not in hidden}


def describe_unusual_part(messages: list[dict]) -> str:
    """Return a description of the first part that is neither a text nor an image, or ""."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part != IMAGE and not is_list_of_texts([part]):
                return f"a part of message {i}, {str(part)[:80]}"
    return ""
