"""From one row of data to token ids and a mask of the tokens that the model has to generate.

Templates are not local: Qwen3 drops the thinking of earlier turns, Mistral moves the tools to the last user turn, tool
results are merged into one user turn. So a conversation is rendered once, as a whole, and tokenized once. The turns are
found in its text afterwards, and a turn that cannot be found is an error: a wrong mask would train in silence.
"""

from __future__ import annotations

import os.path
from functools import cached_property

import jinja2

from config import InputError
from data.rows import conversation_of, template_arguments

# What Jinja templates raise on a conversation that they refuse, raise_exception(...) included.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError)
MARK = "qZxMarkxZq"         # letters only, so that templates which trim, escape or dump JSON leave it alone
PROBE = ("pQuestionOne", "pAnswerOne", "pQuestionTwo", "pAnswerTwo")


def encode(row: dict, tokenizer, options) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask), two lists of T int; loss_mask is 1 on the tokens to learn, and 0 on the first token.

    row has `messages` (and `tools`, template arguments), or `prompt` and `response`; of these only the response is
    learned. options is the `data` section of the configuration: its train_on picks all assistant turns or the last one,
    and a message's loss_mask 0 takes its turn out.
    Raises InputError, without the row's place, when the row is malformed or its turns cannot be located.
    """
    if not tokenizer.is_fast:
        raise InputError(f"{type(tokenizer).__name__} gives no character offsets: a fast tokenizer is needed")
    messages = conversation_of(row, bool(tokenizer.chat_template), options)
    if messages is None:
        return encode_plain(row[options.prompt_key], row[options.response_key], tokenizer)
    if not tokenizer.chat_template:
        raise InputError("the tokenizer has no chat template: give data.chat_template, or rows of two strings")

    trained = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    trained = [i for i in trained[-1 if options.train_on == "last" else 0:] if messages[i].get("loss_mask", 1)]
    messages = [{k: v for k, v in m.items() if k != "loss_mask"} for m in messages]
    chat = Conversation(messages, tokenizer, *template_arguments(row, tokenizer, options))
    encoding = chat.encoding()
    return encoding["input_ids"], overlap_mask(encoding["offset_mapping"], chat.spans(trained))


def encode_plain(prompt: str, response: str, tokenizer) -> tuple[list[int], list[int]]:
    """prompt + response + eos for a model without a chat template, with the special tokens that it puts in front."""
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no eos token to end a response with")
    encoding = tokens_of(prompt + response, tokenizer)
    mask = overlap_mask(encoding["offset_mapping"], [(len(prompt), len(prompt) + len(response))])
    ids = encoding["input_ids"]
    if ids and ids[-1] == tokenizer.eos_token_id and not mask[-1]:      # a tokenizer that ends every text itself
        return ids, mask[:-1] + [1]
    return ids + [tokenizer.eos_token_id], mask + [1]


def tokens_of(text: str, tokenizer, **options):
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text has half a character: {error}") from error
    return tokenizer(text, return_offsets_mapping=True, verbose=False, **options)


def overlap_mask(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    """[T] of 0 and 1: the tokens that share a character with one of the spans, which are in order and apart."""
    mask, k = [0] * len(offsets), 0
    for t, (first, last) in enumerate(offsets):
        while k < len(spans) and first >= spans[k][1]:
            k += 1
        mask[t] = int(k < len(spans) and last > spans[k][0])
    mask[:1] = [0] * len(mask[:1])      # nothing predicts the first token
    return mask


class Conversation:
    """One rendered conversation, `text`, in which the turns of the assistant can be located.

    options go to the template with the whole conversation alone: add_generation_prompt.
    """

    def __init__(self, messages: list[dict], tokenizer, tools: list | None, arguments: dict, **options):
        self.messages, self.tokenizer, self.tools, self.arguments = messages, tokenizer, tools, arguments
        self.options = options
        try:
            self.text = self.render(messages, **options)
        except TEMPLATE_ERRORS as error:
            raise InputError(f"the chat template refuses the conversation: {error}") from error

    def render(self, messages, tokenize=False, **options):
        return self.tokenizer.apply_chat_template(messages, tools=self.tools, tokenize=tokenize, **options,
                                                  **self.arguments)

    def encoding(self):
        """The text as the tokenizer returns it, with input_ids and offset_mapping, lists of T."""
        encoding = tokens_of(self.text, self.tokenizer, add_special_tokens=False)
        if encoding["input_ids"] != self.render(self.messages, tokenize=True, return_dict=False, **self.options):
            raise InputError("apply_chat_template(tokenize=True) gives other ids than tokenizing its text: the "
                             "tokenizer cannot be used for training")
        return encoding

    def attempt(self, messages, **options) -> str | None:
        """The text, or None: a template may refuse a part of a conversation, e.g. one without a user turn."""
        try:
            return self.render(messages, **options)
        except TEMPLATE_ERRORS:
            return None

    def spans(self, turns: list[int]) -> list[tuple[int, int]]:
        """The characters (start, end) of these assistant messages, from the generation prompt to the end of turn."""
        spans, reached = [], 0
        for i in turns:
            start, end = self.span(i)
            if not reached <= start < end:
                raise self.lost(i, "overlaps another")
            self.check_complete(self.messages[i], i, self.text[start:end])
            spans.append((start, reached := end))
        return spans

    def check_complete(self, message: dict, i: int, span: str) -> None:
        """A template for images, or one without tools, skips what it does not know: the turn would be learned empty."""
        answer = message["content"] if isinstance(message.get("content"), str) else ""
        calls = [str(call.get("function", call).get("name", "")) for call in message.get("tool_calls", [])]
        for part in (answer.rpartition("</think>")[2].strip().split("\n")[-1], *calls):
            if part not in span:
                raise InputError(f"the chat template leaves out what the assistant says in message {i}: {part[:40]!r}")

    def span(self, i: int) -> tuple[int, int]:
        """Where a prefix of the conversation renders to a prefix of the text, its length is the place, exactly.

        Elsewhere (thinking dropped, tools moved) the place is looked for between the contents of messages i-1 and i,
        which are known to the character, with the turn header that the template shows in a two-turn probe.
        """
        prompt = self.attempt(self.messages[:i], add_generation_prompt=True)
        turn = self.attempt(self.messages[:i + 1])
        header, _, end_of_turn = self.shape
        start = end = content_end = None
        if prompt is not None and self.text.startswith(prompt):
            start = len(prompt)
        if turn is not None and self.text.startswith(turn):
            end = len(turn.rstrip())
            if end_of_turn and (last := self.text.rfind(end_of_turn, start or 0, end)) >= 0:
                end = last + len(end_of_turn)       # Phi-3 closes a text with one more token, which no turn has
        if start is None or end is None:
            content_end = self.content_end(i)
        if start is None:
            start = self.find_start(i, content_end)
        if end is None:
            body = max(start, content_end or 0)
            end = self.text.find(end_of_turn, body) + len(end_of_turn)
            if not end_of_turn or end < body + len(end_of_turn) or (header and header in self.text[body:end]):
                raise self.lost(i, "does not end like other turns")
        return start, end

    def find_start(self, i: int, content_end: int | None) -> int:
        header, prompt, _ = self.shape
        if not header and i:    # Mistral opens a turn with nothing: take all that a prompt has behind the last content
            marked = self.attempt(self.marked(i - 1)[:i], add_generation_prompt=True) or ""
            header = prompt = marked.partition(MARK)[2]
        at = self.text.find(header, self.reach(i), content_end)
        if not header or at < 0:
            raise self.lost(i, f"has no header {header!r}")
        # Some turns of the history have the whole generation prompt, e.g. an empty <think> block, others its header.
        return at + len(prompt if self.text.startswith(prompt, at) else header)

    def lost(self, i: int, why: str) -> InputError:
        return InputError(f"cannot locate the assistant turn of message {i} in the rendered chat template: it {why}. "
                          "data.train_on=last, or loss_mask 0 on the message, trains without it")

    def reach(self, i: int) -> int:
        """A place in the text behind the content of message i-1 and before turn i."""
        if i == 0:
            return 0
        if (end := self.content_end(i - 1)) is not None:
            return end
        return self.span(i - 1)[1] if self.messages[i - 1]["role"] == "assistant" else self.reach(i - 1)

    def content_end(self, i: int) -> int | None:
        """The place in the text where the content of message i ends; None if a mark there changes other text too."""
        text = self.attempt(self.marked(i))
        if text is None or text.count(MARK) != 1 or text.replace(MARK, "") != self.text:
            return None
        return text.index(MARK)

    def marked(self, i: int) -> list[dict]:
        """The messages with a mark behind the last visible character of message i, if it has one."""
        content = self.messages[i].get("content")
        if not isinstance(content, str) or not content.strip():
            return self.messages
        kept = content.rstrip()
        message = {**self.messages[i], "content": kept + MARK + content[len(kept):]}
        return [*self.messages[:i], message, *self.messages[i + 1:]]

    @cached_property
    def shape(self) -> tuple[str, str, str]:
        """(header, prompt, end): what opens a turn in the history, what prompts for a new one, what ends all turns."""
        user_1, assistant_1, _, assistant_2 = PROBE
        probe = [{"role": role, "content": c} for role, c in zip(("user", "assistant") * 2, PROBE)]
        text, bare = self.attempt(probe), self.attempt(probe[:1])
        asked = self.attempt(probe[:1], add_generation_prompt=True)
        if None in (text, asked, bare) or any(text.count(c) != 1 for c in PROBE):
            return "", "", ""
        asked = asked.partition(user_1)[2]
        closing = self.shared(asked, bare.partition(user_1)[2])     # what ends the user's turn
        prompt = asked[len(closing):]
        before = text[text.index(user_1) + len(user_1):text.index(assistant_1)].removeprefix(closing)
        end = self.shared(text.partition(assistant_2)[2], text.partition(assistant_1)[2])
        return os.path.commonprefix([prompt, before]), prompt, end.strip()

    def shared(self, a: str, b: str) -> str:
        """The longest common beginning in whole tokens: <|end|> and <|return|> have none."""
        tokens = self.tokenizer([a, b], add_special_tokens=False, return_offsets_mapping=True)
        count = len(os.path.commonprefix(tokens["input_ids"]))
        return a[:tokens["offset_mapping"][0][count - 1][1]] if count else ""
