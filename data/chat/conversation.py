"""From one row of data to token ids and a mask of the tokens that the model has to generate.

Templates are not local: Qwen3 drops the thinking of earlier turns, Mistral moves the tools to the last user turn, Gemma 4 puts
what a tool returns into the middle of the assistant's turn. So a conversation is rendered as a whole and tokenized once. The
turns are found in its text afterwards (data/chat/marks.py tells which message each part of it comes from), and a turn that cannot
be found, or that nothing ends, is an error: a wrong mask would train in silence.
"""

from __future__ import annotations

import os.path
from bisect import bisect_right
from collections.abc import Generator, Sequence
from functools import cached_property
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from config import InputError
from data.chat.forms import forms, has_image, left_out, prints, text_of
from data.chat.marks import Piece, Text, find_pieces, mark, places_of, texts_of, unmark
from data.chat.tokens import HALF_CHARACTER, TEMPLATE_ERRORS, ChatTokenizer, Tokens
from data.images.sources import IMAGE, MARK, file_of, place, read
from data.rows import conversation_of, template_arguments

WAY_OUT = "give the message loss_mask 0, which trains without it, or name another template in data.chat_template"
Result = TypeVar("Result")
Steps = Generator["Conversation", None, Result]


def encode(
    row: dict, chat: ChatTokenizer, options, folder: Path = Path()
) -> Steps[tuple[list[int], list[int], Seen]]:
    """(input_ids, loss_mask, images): lists of T int, of which loss_mask is 1 on the tokens to learn, and 0 on the first token;
    the images that the row has. In steps: see in_step().

    row has `messages` (and `tools`, template arguments), or `prompt` and `response`; of these only the response is
    learned. options is the `data` section of the configuration: its train_on picks all assistant turns or the last one,
    and a message's loss_mask 0 or weight 0 takes its turn out.
    Raises InputError, without the row's place, when the row is malformed, or a turn cannot be located or has no end.
    """
    messages, seen = conversation_of(row, bool(chat.tokenizer.chat_template), options), Seen()
    if messages is None:
        check_no_images(row, options)
        tokens, mask = encode_plain(
            row[options.prompt_key], row[options.response_key], chat, options
        )
    else:
        if not chat.tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template: give data.chat_template, or rows of two strings"
            )
        trained = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        trained = [
            i
            for i in trained[-1 if options.train_on == "last" else 0 :]
            if messages[i].get("loss_mask", 1) and messages[i].get("weight", 1)
        ]
        messages, images = place(messages, row.get(options.images_key), options.images_key)
        conversation = Conversation(
            messages, chat, *template_arguments(row, chat.parameters, options)
        )
        yield conversation
        spans = conversation.spans(trained)
        tokens, seen = conversation.with_images(images, options, folder)
        mask = tokens.mask(spans)
        if any(learned and of_image for learned, of_image in zip(mask, seen.of_tokens)):
            raise InputError(
                "a turn of the assistant that is learned has an image, which no model can write: give the message "
                "loss_mask 0"
            )
    return tokens.ids, [0, *mask[1:]][: len(mask)], seen  # nothing predicts the first token


class Seen(NamedTuple):
    """The images of a row. of_tokens: [T] of 0 and 1, the tokens that stand for images; empty without images. images: uint8
    [height, width, 3]; files: those that they were read from."""

    of_tokens: Sequence[int] = ()
    images: Sequence[np.ndarray] = ()
    files: Sequence[str] = ()

    def would_be_cut(self, kept: slice) -> bool:
        """Whether a row that keeps these tokens would lose one of an image, or end with one, which nothing follows from."""
        of_tokens = self.of_tokens[kept]
        return sum(of_tokens) < sum(self.of_tokens) or 1 in of_tokens[-1:]

    def columns(self) -> dict:
        """What a cache holds of a row's images, if it has any."""
        return (
            {
                "pixels": b"".join(image.tobytes() for image in self.images),
                "image_sizes": [image.shape[:2] for image in self.images],
            }
            if self.images
            else {}
        )


def in_step(rows: list[Steps[Result]]) -> list[Result | InputError]:
    """What each of them returns, or the InputError that it raises. Each yields its conversation once, if it has one, and then
    waits, so that those of all rows are tokenized in one call."""
    results: list = [None] * len(rows)

    def advance(i: int) -> Conversation | None:
        try:
            return next(rows[i])
        except StopIteration as end:
            results[i] = end.value
        except InputError as error:
            results[i] = error

    waiting = {
        i: conversation for i in range(len(rows)) if (conversation := advance(i)) is not None
    }
    together = [
        c for c in waiting.values() if c.chat.is_stock and not HALF_CHARACTER.search(c.text)
    ]
    if together:
        for conversation, tokens in zip(
            together, together[0].chat.tokens_of([c.text for c in together]), strict=True
        ):
            conversation.tokens = tokens
    for i in waiting:
        advance(i)
    return results


def check_no_images(row: dict, options) -> None:
    """Raise InputError for a row of plain text with images, which a chat template would give a place."""
    if row.get(options.images_key):
        raise InputError(
            f'it has "{options.images_key}", and the tokenizer has no chat template: give data.chat_template'
        )


def encode_plain(
    prompt: str, response: str, chat: ChatTokenizer, options
) -> tuple[Tokens, list[int]]:
    """prompt + response + eos for a model without a chat template, with the special tokens that it puts in front."""
    eos = chat.tokenizer.eos_token_id
    if eos is None:
        raise InputError("the tokenizer has no eos token to end a response with")
    tokens = chat.plain(prompt + response, options.special_tokens_in_text)
    mask = tokens.mask([(len(prompt), len(prompt) + len(response))])
    if (
        tokens.ids and tokens.ids[-1] == eos and not mask[-1]
    ):  # a tokenizer that ends every text itself
        return tokens, mask[:-1] + [1]
    return Tokens(tokens.ids + [eos], tokens.place), mask + [1]


class Conversation:
    """One rendered conversation: `text`, in which the turns of the assistant can be located, and its `tokens`.

    options go to the template with the whole conversation alone: add_generation_prompt.
    """

    def __init__(
        self,
        messages: list[dict],
        chat: ChatTokenizer,
        tools: list | None,
        arguments: dict,
        **options,
    ):
        self.chat, self.tools, self.arguments, self.options = chat, tools, arguments, options
        accepted, refused = [], None
        for form in forms(
            [{k: v for k, v in m.items() if k not in ("loss_mask", "weight")} for m in messages]
        ):
            try:
                text = self.render(form, **options)
            except TEMPLATE_ERRORS as error:
                refused = refused or error
                continue
            if prints(form, text):
                accepted = [(form, text)]
                break
            accepted.append((form, text))
        if not accepted:
            raise InputError(f"the chat template refuses the conversation: {refused}") from refused
        self.messages, self.text = accepted[0]
        self.check_parts()

    def check_parts(self) -> None:
        """Templates skip parts of a message that they do not know. Earlier thinking may be left out."""
        asked = max(
            (i for i, message in enumerate(self.messages) if message["role"] == "user"), default=0
        )
        for i, message in enumerate(self.messages):
            looked_at = isinstance(message.get("content"), list) and (
                message["role"] != "assistant" or i > asked
            )
            parts = message["content"] if looked_at else []
            for part in (
                part for part in parts if part != IMAGE and part.get("type") not in (None, "text")
            ):
                without = message | {"content": [other for other in parts if other is not part]}
                if (
                    self.attempt(
                        [*self.messages[:i], without, *self.messages[i + 1 :]], **self.options
                    )
                    == self.text
                ):
                    raise InputError(
                        f"the chat template leaves out a part of message {i}, {str(part)[:60]}: leave it "
                        'out, or make it {"type": "image", "image": ...} or {"type": "text", "text": ...}'
                    )

    def render(self, messages: list[dict], **options):
        return self.chat.render(messages, self.tools, **options, **self.arguments)

    def attempt(self, messages: list[dict], **options) -> str | None:
        return self.chat.attempt(messages, self.tools, **options, **self.arguments)

    @cached_property
    def tokens(self) -> Tokens:
        tokens = self.chat.tokens(self.text)
        if not self.chat.is_stock and tokens.ids != self.render(
            self.messages, tokenize=True, return_dict=False, **self.options
        ):
            raise InputError(
                "apply_chat_template(tokenize=True) gives other ids than tokenizing its text: the "
                "tokenizer cannot be used for training"
            )
        return tokens

    @cached_property
    def texts(self) -> list[Text]:
        return texts_of(self.messages)

    @cached_property
    def pieces(self) -> list[Piece]:
        return find_pieces(
            self.text,
            self.messages,
            self.texts,
            lambda messages: self.attempt(messages, **self.options),
            self.chat.literals,
        )

    def spans(self, turns: list[int]) -> list[tuple[int, int]]:
        """The characters (start, end) of these assistant messages, from the generation prompt to the token that ends
        generation, in order. A turn has several where a template puts what others say into it. Where a template leaves
        out the end of the last turn, text and tokens get it."""
        runs, spans, said = self.runs(turns), [], dict.fromkeys(turns, "")
        texts = {piece.source.message for piece in self.pieces if piece.source.spoken}
        for r, (i, start, end) in enumerate(runs):
            if i not in said:
                continue
            before, behind = (
                runs[r - 1] if r else (None, 0, 0),
                runs[r + 1] if r + 1 < len(runs) else None,
            )
            if i in texts and not said[i]:  # else runs() has put an empty turn behind its header
                start = self.header_end(i, before[0], before[2], start, end)
            spans.append((self.behind_header(start), self.turn_end(i, end, behind)))
            said[i] += self.text[slice(*spans[-1])]
            self.check_end(i, *spans[-1])
        for i in turns:
            self.check_complete(i, said[i])
        for piece in self.pieces:
            k = bisect_right(spans, piece.start, key=itemgetter(1))
            if (
                not (piece.source.spoken and piece.source.message in said)
                and k < len(spans)
                and spans[k][0] < piece.end
            ):
                raise InputError(
                    f"the chat template puts {self.text[piece.start : piece.end][:40]!r}, which message "
                    f"{piece.source.message} says, where the assistant would learn it"
                )
        return spans

    def runs(self, turns: list[int]) -> list[tuple[int | None, int, int]]:
        """(message, start, end) of the texts of each message, from its first to its last as long as no other message's is
        between, in order; message is None where the assistant's has what it did not say. An empty turn has a place, too."""
        runs, seen = [], set()
        for piece in self.pieces:
            if piece.source.number in seen:
                continue  # gpt-oss repeats the name of the called function before what it returns
            seen.add(piece.source.number)
            i = piece.source.message if piece.source.spoken else None
            start = runs.pop()[1] if runs and runs[-1][0] == i else piece.start
            runs.append((i, start, piece.end))
        for i in sorted({*turns} - {run[0] for run in runs}):
            before = max(
                (run for run in runs if run[0] is not None and run[0] < i),
                key=itemgetter(2),
                default=(None, 0, 0),
            )
            behind = min(
                (run[1] for run in runs if run[1] >= before[2] and run != before),
                default=len(self.text),
            )
            place = self.header_end(i, before[0], before[2], behind, behind)
            runs.insert(bisect_right(runs, place, key=itemgetter(1)), (i, place, place))
        return runs

    def header_end(self, i: int, before: int | None, reached: int, start: int, end: int) -> int:
        """Where the prompt for turn i ends, behind `reached`, where the text of message `before` does. Turn i's is start:end;
        start may be end for an empty turn, of which it is only known that it lies in reached:end.

        Where the template writes something else than when it prompts for this turn (an empty <think> block, a prompt that
        it refuses), the header of a chat of two turns is looked for.
        """
        gap, role = self.text[reached:start], before is not None and self.messages[before]["role"]
        key = gap, role, bool(self.tools), str(self.arguments)
        if key not in self.chat.prompts:
            if (
                len(self.chat.prompts) > 1000
            ):  # a template that writes something else into every gap
                self.chat.prompts.clear()
            self.chat.prompts[key] = self.prompt(i, before)
        prompt, (header, whole) = self.chat.prompts[key], self.chat.header
        common = len(os.path.commonprefix([prompt, self.text[reached:end]]))
        at = (gap.find(header) if start == end else gap.rfind(header)) if header else -1
        if prompt and common == len(prompt):
            return reached + max(
                common, at + len(header) if at >= 0 and start < end else 0
            )  # a header that the prompt lacks
        if at < 0:
            if (
                len(gap.rstrip()) <= common <= len(gap)
                and start < end
                and (role == "assistant" or gap.strip() and (not header or header not in prompt))
            ):
                return (
                    reached + common
                )  # the beginning of the prompt alone, or the assistant's turn goes on
            raise self.lost(i, f"the prompt for it, {prompt or header!r}, is not in {gap!r}")
        # Some turns of the history have the whole prompt, e.g. with a <think> block, others its header.
        return reached + at + len(whole if gap.startswith(whole, at) else header)

    def prompt(self, i: int, before: int | None) -> str:
        """What the template writes behind message `before` when it prompts for turn i, "" if something else is between."""
        texts = texts_of(self.messages[:i])
        places = [places_of(text.text, self.chat.literals(text.text)) for text in texts]
        marked = self.attempt(mark(self.messages[:i], texts, places), add_generation_prompt=True)
        plain, pieces = unmark(marked or "", texts, places)
        last = pieces[-1] if pieces else None
        return (
            plain[last.end if last else 0 :]
            if before == (last.source.message if last else None)
            else ""
        )

    def behind_header(self, start: int) -> int:
        """start, or the end of the header's last token where this takes in white space that follows it."""
        if not self.chat.takes_space:
            return start
        tokens = self.tokens
        t = bisect_right(range(len(tokens.ids)), start, key=lambda t: tokens.place(t)[1])
        if (
            t < len(tokens.ids)
            and tokens.ids[t] in self.chat.added
            and self.text[tokens.place(t)[0] : start].strip()
        ):
            return tokens.place(t)[1]
        return start

    def turn_end(self, i: int, said: int, behind: tuple[int | None, int, int] | None) -> int:
        """Where turn i ends, whose text ends at `said`, before the run `behind`: with the token that ends generation."""
        ending, gap = self.chat.ending, self.text[said : behind[1] if behind else len(self.text)]
        tokens = self.tokens.between(said, said + len(gap))
        if (end := tokens.first(ending.ids)) is not None:
            return tokens.place(end)[1]
        if ending.text and ending.text in gap:
            return said + gap.index(ending.text) + len(ending.text)
        if (
            behind
            and behind[0] is not None
            and self.messages[behind[0]]["role"] == "assistant"
            and (not gap.strip() or (header := self.chat.header[0]) and header not in gap)
        ):
            return said  # the same turn of the assistant goes on
        tail = ending.call_tail if self.messages[i].get("tool_calls") else ending.tail
        if behind or not tail:
            ends = ", ".join(sorted(self.chat.added.get(token, str(token)) for token in ending.ids))
            raise self.lost(
                i,
                f"nothing behind it would teach the model to stop: the template writes {gap[:40]!r}, generation "
                f"ends with {ends or 'no token that is known'} (eos_token_id of generation_config.json)",
            )
        self.text += tail
        self.tokens = self.chat.tokens(self.text)
        return len(self.text)

    def check_end(self, i: int, start: int, end: int) -> None:
        """Generation stops at the first end, so that nothing of the template may follow it in start:end."""
        ids = self.chat.ending.ids
        if all(
            self.text.find(text, start, end) in (-1, end - len(text))
            for text in map(self.chat.added.get, ids)
            if text
        ):
            return
        tokens = self.tokens.between(start, end)
        for t, token in enumerate(tokens.ids[:-1]):
            at, behind = tokens.place(t)
            if token in ids and not any(piece.start <= at < piece.end for piece in self.pieces):
                raise self.lost(i, f"the template ends it before {self.text[behind:end][:40]!r}")

    def check_complete(self, i: int, said: str) -> None:
        """Templates skip what they do not know, tool calls for example: the turn would be learned without it."""
        if missing := left_out(self.messages[i], said):
            raise InputError(
                f"the chat template leaves out what the assistant says in message {i}: {missing[:40]!r}. Leave it "
                f"out of the row, or {WAY_OUT}"
            )

    def lost(self, i: int, why: str) -> InputError:
        return InputError(
            f"cannot locate the assistant turn of message {i} in the rendered chat template: {why}. You may "
            + WAY_OUT
        )

    def with_images(self, sources: list, options, folder: Path) -> tuple[Tokens, Seen]:
        """The tokens, with those of images where their placeholders are, and the images. sources, folder: as for images.read()."""
        tokens, reader = self.escaped(options), self.chat.reader
        if not sources and reader and (reader.token_types([tokens.ids]) > 0).any():
            raise InputError(
                f"it has no image, and a text in it has what stands for one, such as {reader.image_token!r}"
            )
        if reader and any(
            MARK in text_of(m.get("content")) for m in self.messages if m["role"] != "assistant"
        ):
            raise InputError(
                f'a text has {MARK}, and the row has no image in "{options.images_key}": name the column of '
                "images in data.images_key"
            )
        if not sources:
            return tokens, Seen()
        if reader is None:
            raise InputError("it has images: set model.images=true, or leave them out")
        if tokens is not self.tokens:
            raise InputError(
                "it has images, and texts with special tokens, which cannot be escaped beside images: set "
                "data.special_tokens_in_text=keep, or leave them out"
            )
        if len(sources) > 1:
            self.check_order()
        images = [reader.resized(read(source, folder)) for source in sources]
        tokens, of_tokens = reader.expand(self.text, images)
        return tokens, Seen(
            of_tokens,
            images,
            [str(path) for source in sources if (path := file_of(source, folder))],
        )

    def check_order(self) -> None:
        """Templates move messages: images would stand for each other. Seen where texts stand in their places."""
        number, messages = count(), []
        for message in self.messages:
            parts = message.get("content")
            messages.append(
                message
                if not has_image(parts)
                else message
                | {
                    "content": [
                        {"type": "text", "text": f"<<{next(number)}>>"} if part == IMAGE else part
                        for part in parts
                    ]
                }
            )
        text = self.attempt(messages, **self.options) or ""
        found = [text.find(f"<<{i}>>") for i in range(next(number))]
        if sorted(at for at in found if at >= 0) != [at for at in found if at >= 0]:
            raise InputError("the chat template puts its images in another order")

    def escaped(self, options) -> Tokens:
        """The tokens, where options.special_tokens_in_text says what becomes of special tokens that are written in texts."""
        if (
            options.special_tokens_in_text is None
            and not any(m["role"] == "tool" or len(m) > 2 for m in self.messages)
            or options.special_tokens_in_text == "keep"
        ):
            return self.tokens

        def quotes(source: Text) -> bool:
            role = self.messages[source.message]["role"] if source.spoken else "tool"
            policy = options.special_tokens_in_text or ("escape" if role == "tool" else "keep")
            return self.chat.to_escape(source.text, policy)

        quoting = [source for source in self.texts if quotes(source)]
        if not quoting:
            return self.tokens
        return self.chat.escape(
            self.tokens, self.text, [(p.start, p.end) for p in self.pieces if p.source in quoting]
        )
