"""Turn messages into prompt ids that continue the ids of earlier turns.

The chat template renders every request completely, as it does for training data. If the text
begins with a recorded prompt and its reply, the prompt ids begin with the recorded ids, which end
with exactly the tokens that were sampled. Only the text after them is tokenized. Otherwise the
whole text is tokenized, and the trainer records a new branch of the episode.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass

from config import InputError
from data.chat.conversation import Conversation
from data.chat.endings import read_ending
from data.chat.forms import arguments_to_object, is_list_of_texts, text_of
from data.chat.lost_inputs import lost_tools
from data.chat.reasoning import REASONING_KEYS
from data.chat.tokenizer import ChatTokenizer
from data.messages import without_none
from data.rows import TemplateInputs


@dataclass(frozen=True)
class Prompt:
    """A rendered request.

    Attributes:
        text: what the template renders.
        ids: the tokens to continue.
        num_recorded: how many of the ids were recorded in earlier turns; 0 in a new branch.
    """

    text: str
    ids: list[int]
    num_recorded: int = 0


@dataclass(frozen=True)
class State:
    """A conversation up to and including a sampled reply.

    Attributes:
        messages: ends with the reply.
        keys: the messages in the form in which they are compared.
        prompt_text: the text that the reply continued.
        reply_ids: the sampled tokens.
        ids: the prompt's ids and the sampled tokens.
    """

    messages: list[dict]
    keys: list[str]
    prompt_text: str
    reply_ids: list[int]
    ids: list[int]


class Renderer:
    """Renders and tokenizes conversations as the training data path does.

    Args:
        chat: the tokenizer with its template.
        special_tokens_in_text: data.special_tokens_in_text of the configuration.
        template_kwargs: arguments of the template that a request may override.
    """

    def __init__(
        self, chat: ChatTokenizer, special_tokens_in_text: str | None, template_kwargs: dict
    ):
        self.chat = chat
        self.special_tokens_in_text = special_tokens_in_text
        self.template_kwargs = template_kwargs
        end_ids = read_ending(chat).ids if chat.tokenizer.chat_template else chat.end_ids
        self.end_texts = {i: chat.decode([i]) for i in sorted(end_ids)}

    def inputs(self, tools: list | None, template_kwargs: dict) -> TemplateInputs:
        """Return what a request passes to the template in addition to its messages.

        Raises:
            InputError: a template argument has the name of a parameter of apply_chat_template().
        """
        taken = template_kwargs.keys() & self.chat.parameters
        if taken:
            raise InputError(f"chat_template_kwargs.{min(taken)} is not a template argument")
        return TemplateInputs(tools or None, self.template_kwargs | template_kwargs)

    def request(self, messages: list[dict], inputs: TemplateInputs) -> Conversation:
        """Render messages, and the prompt for a reply to them.

        Raises:
            InputError: the template rejects the messages, or does not print the tools.
        """
        conversation = Conversation(messages, self.chat, inputs, add_generation_prompt=True)
        for loss in lost_tools(conversation):
            raise InputError(
                f"the chat template does not print the tool {loss.excerpt!r}: set "
                "data.chat_template to a template with tools, or describe the tools in a message"
            )
        return conversation

    def history(self, messages: list[dict], inputs: TemplateInputs) -> str:
        """Render messages that end with a reply, without a prompt for another one."""
        return Conversation(messages, self.chat, inputs).text

    def ids(self, conversation: Conversation, start: int = 0) -> list[int]:
        """Return the token ids of a rendered conversation from a position of its text on."""
        tokens = conversation.escaped_tokens(self.special_tokens_in_text)
        num_tokens = len(tokens.ids)
        first = bisect_left(range(num_tokens), start, key=tokens.start)
        boundary = tokens.start(first) if first < num_tokens else len(conversation.text)
        # The position may lie within a token, if the recorded text ends there.
        partial = self.chat.tokenize(conversation.text[start:boundary])
        return partial.ids + tokens.ids[first:]


class Session:
    """The recorded conversations of one episode."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self.states: list[State] = []

    def prompt(self, messages: list[dict], inputs: TemplateInputs) -> Prompt:
        """Return the prompt of a request, which continues recorded ids where it can.

        Raises:
            InputError: the template rejects the messages.
        """
        conversation = self.renderer.request(messages, inputs)
        state = self._longest_state(messages)
        start = None if state is None else self._end_of_recorded(state, conversation, inputs)
        if start is None:
            return Prompt(conversation.text, self.renderer.ids(conversation))
        ids = state.ids + self.renderer.ids(conversation, start)
        return Prompt(conversation.text, ids, len(state.ids))

    def record(
        self, messages: list[dict], prompt: Prompt, reply: dict, reply_ids: list[int]
    ) -> None:
        """Record a reply to these messages."""
        messages = [*messages, without_none(reply)]
        self.states.append(
            State(
                messages=messages,
                keys=[comparable(message) for message in messages],
                prompt_text=prompt.text,
                reply_ids=reply_ids,
                ids=prompt.ids + reply_ids,
            )
        )

    def _longest_state(self, messages: list[dict]) -> State | None:
        """Return the longest state whose messages begin these; the latest one if several do."""
        keys = [comparable(message) for message in messages]
        longest = None
        for state in self.states:
            num_messages = len(state.keys)
            is_prefix = keys[:num_messages] == state.keys
            if is_prefix and (longest is None or num_messages >= len(longest.keys)):
                longest = state
        return longest

    def _end_of_recorded(
        self, state: State, conversation: Conversation, inputs: TemplateInputs
    ) -> int | None:
        """Return where the recorded ids end in a conversation's text; None in a new branch."""
        text = conversation.text
        recorded = state.prompt_text + self.renderer.chat.decode(state.reply_ids)
        if text.startswith(recorded):
            return len(recorded)
        # The template writes the reply differently, e.g. with other spaces in a tool call. The
        # sampled tokens stand for it, if its end can be located.
        try:
            history = self.renderer.history(state.messages, inputs)
        except InputError:  # some templates reject messages that end with a reply
            return None
        if not (text.startswith(history) and history.startswith(state.prompt_text)):
            return None
        return self._end_of_reply(state, text, len(history))

    def _end_of_reply(self, state: State, text: str, history_end: int) -> int | None:
        """Return where the text after the recorded reply begins, or None if it is not clear.

        Args:
            text: a rendered request that continues the state.
            history_end: where the rendered messages of the state end in this text.
        """
        end_texts = self.renderer.end_texts
        turn_start = len(state.prompt_text)
        ends = [text.rfind(end, turn_start, history_end) for end in end_texts.values()]
        end_start = max(ends, default=-1)
        if end_start < 0:
            # Some templates end a turn only when another one follows.
            end_start = history_end
        written = [end for end in end_texts.values() if text.startswith(end, end_start)]
        if not written:
            return None
        sampled_end = end_texts.get(state.reply_ids[-1])
        if sampled_end is None:
            # The reply was cut, or a stop string ended it: the template's end follows.
            return end_start
        return end_start + len(sampled_end) if sampled_end in written else None


def comparable(message: dict) -> str:
    """Return a text that is the same for messages that mean the same.

    Clients add or drop empty fields, write arguments as text or as an object, and have different
    names for the field with the reasoning.
    """
    kept = {}
    for key, value in message.items():
        name = "reasoning" if key in REASONING_KEYS else key
        if value not in (None, "", [], {}):
            kept[name] = value
    if is_list_of_texts(kept.get("content")):
        kept["content"] = text_of(kept["content"])
    if "tool_calls" in kept:
        kept["tool_calls"] = [comparable_call(call) for call in kept["tool_calls"]]
    return as_key(kept)


def comparable_call(call: dict) -> list:
    function = call.get("function") or call
    arguments = arguments_to_object(function.get("arguments") or {})
    return [call.get("id"), function.get("name"), arguments]


def as_key(value) -> str:
    return json.dumps(value, sort_keys=True, default=str)
