"""Find the tools and template arguments of a row that do not reach its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator

from data.chat.conversation import Conversation
from data.chat.forms import as_json
from data.chat.losses import LOST, UNPRINTED, Loss, is_empty, squash
from data.chat.pieces import UNMISTAKABLE_LENGTH


def lost_tools(conversation: Conversation) -> Iterator[Loss]:
    """Yield the tools whose name or description is not printed."""
    tools = conversation.inputs.tools
    if not tools:
        return
    is_proven = False
    for tool in tools:
        for text in tool_texts(tool):
            if text not in conversation.text and not is_written(text, conversation.text):
                yield Loss(LOST, "tools", None, text[:60])
            elif len(text) > UNMISTAKABLE_LENGTH and not occurs_in_messages(conversation, text):
                is_proven = True
    if is_proven:
        return
    without_tools = conversation.chat.try_render(
        conversation.messages, None, **conversation.options, **conversation.inputs.arguments
    )
    if without_tools == conversation.text:
        yield Loss(LOST, "tools", None, str(tools)[:60])


def is_written(text: str, rendered: str) -> bool:
    """Return whether a text appears in a rendered chat, apart from white space and escapes."""
    squashed = squash(rendered)
    return squash(text) in squashed or squash(as_json(text)[1:-1]) in squashed


def occurs_in_messages(conversation: Conversation, text: str) -> bool:
    return any(text in other.text for other in conversation.texts)


def tool_texts(tool) -> list[str]:
    """Return the name and the description of a tool, without those that are empty."""
    function = tool.get("function", tool) if isinstance(tool, dict) else tool
    if isinstance(function, dict):
        texts = [function.get("name"), function.get("description")]
    else:
        texts = [function]
    return [text for text in texts if isinstance(text, str) and text.strip()]


def lost_descriptions(conversation: Conversation) -> Iterator[Loss]:
    """Yield a loss if a description within a tool, such as a parameter's, is not printed.

    It is only reported: templates may write a tool's signature in a shorter form.
    """
    for tool in conversation.inputs.tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        for text in descriptions_within(function.get("parameters")):
            is_printed = text in conversation.text or is_written(text, conversation.text)
            if not is_printed:
                yield Loss(UNPRINTED, "descriptions within tools", None, text[:60])
                return


def descriptions_within(schema) -> Iterator[str]:
    """Yield the descriptions at any depth of a JSON schema."""
    if isinstance(schema, dict):
        text = schema.get("description")
        if isinstance(text, str) and text.strip():
            yield text
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            yield from descriptions_within(item)


def lost_template_arguments(conversation: Conversation) -> Iterator[Loss]:
    """Yield the arguments of the template that have no effect.

    A single word, number or boolean is not reported if the template names the argument: it may be
    the default value, and have an effect in other rows.
    """
    arguments = conversation.inputs.arguments
    template = str(conversation.chat.tokenizer.chat_template)
    for name, value in arguments.items():
        if is_empty(value):
            continue
        is_value = isinstance(value, (bool, int, float)) or " " not in str(value).strip()
        is_named = re.search(rf"\b{re.escape(name)}\b", template)
        if is_value and is_named:
            continue
        if not argument_has_effect(conversation, name):
            yield Loss(LOST, name, None, str(value)[:60])


def argument_has_effect(conversation: Conversation, name: str) -> bool:
    """Return whether the chat or its generation prompt changes without this argument."""
    arguments = conversation.inputs.arguments
    shortened = {key: value for key, value in arguments.items() if key != name}

    def render(**options) -> str | None:
        return conversation.chat.try_render(
            conversation.messages, conversation.inputs.tools, **options
        )

    for has_prompt in (False, True):
        with_argument = render(add_generation_prompt=has_prompt, **arguments)
        without_argument = render(add_generation_prompt=has_prompt, **shortened)
        if with_argument != without_argument:
            return True
    return False
