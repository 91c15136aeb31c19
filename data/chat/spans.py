"""Find the characters of each assistant turn in a rendered chat: those the model has to generate.

Training with a wrong mask would go unnoticed, so a turn that cannot be located with certainty is an
error. An example shows how turns are found. The conversation

    user: "2+3?"   assistant: "5"   user: "really?"   assistant: "yes"

is rendered by a ChatML template as

    <|im_start|>user\\n2+3?<|im_end|>\\n<|im_start|>assistant\\n5<|im_end|>\\n
    <|im_start|>user\\nreally?<|im_end|>\\n<|im_start|>assistant\\nyes<|im_end|>\\n

1. Pieces (pieces.py): which message does each part come from? The chat is rendered again with
   marks in every text: "2qZx0y0Zq+3qZx0y1Zq?", "5qZx1y0Zq", "reallyqZx2y0Zq?", "yesqZx3y0Zq".
   Apart from the marks, both renderings are equal, so the marks show where the texts are. "5" and
   "yes" are found even if the same characters also occur elsewhere.
2. Runs (runs.py): consecutive pieces of the same message. Here, each of the four texts is a run.
3. Headers (headers.py): where does the turn "5" begin? The chat up to "2+3?" is rendered with
   add_generation_prompt=True. The text after "2+3?" is the generation prompt for the turn,
   "<|im_end|>\\n<|im_start|>assistant\\n". The whole chat contains the same text there, and the
   turn begins after it.
4. Endings (endings.py): where does the turn end? After the first token following "5" that ends
   generation, "<|im_end|>". This token is learned as well, to teach the model to stop.

So "5<|im_end|>" and "yes<|im_end|>" are learned. Nothing depends on the names of these tokens: the
same steps work for any template. Exceptions are described where they are handled: turns without
text; templates that drop thinking from the history, or add it; tool results inside an assistant
turn; and a last turn without an end.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

from config import InputError
from data.chat.conversation import Conversation
from data.chat.endings import check_nothing_follows_end, find_turn_end, read_ending
from data.chat.forms import missing_text
from data.chat.headers import find_header_end, read_header, role_of, skip_absorbed_spaces
from data.chat.marks import Piece
from data.chat.runs import ADVICE, CHAT_START, Run, runs_of_pieces, turn_not_found
from data.chat.template_mask import marked_spans
from data.chat.tokens import Span


def find_spans(conversation: Conversation, turns: list[int]) -> list[Span]:
    """Return the spans of these assistant messages, in order, each with the turn's end token.

    If the template's own marks are exact, they are used (template_mask.py). Otherwise the turns are
    searched for.

    Raises:
        InputError: a turn cannot be located, has no end, is incomplete, or contains the text of
            another message.
    """
    spans = marked_spans(conversation, turns)
    if spans is None:
        spans = search_spans(conversation, turns)
    check_no_foreign_text(conversation, turns, spans)
    return spans


def search_spans(conversation: Conversation, turns: list[int]) -> list[Span]:
    """Find these assistant messages by rendering the chat again, and return their spans.

    A turn has several spans if the template puts the texts of other messages into it. If the
    template leaves out the end of the last turn, the end is appended to the conversation's text and
    tokens.

    Raises:
        InputError: a turn cannot be located, has no end, or is incomplete.
    """
    runs = find_runs(conversation, turns)
    messages_with_text = {piece.source.message for piece in conversation.pieces if is_own(piece)}
    spans: list[Span] = []
    learned_text = dict.fromkeys(turns, "")
    for number, run in enumerate(runs):
        if run.message not in learned_text:
            continue
        previous = runs[number - 1] if number else CHAT_START
        following = runs[number + 1] if number + 1 < len(runs) else None
        start = run.start
        # Only the first run of a turn has a header. The run of a turn without text begins after it.
        if run.message in messages_with_text and not learned_text[run.message]:
            start = find_header_end(conversation, run, previous)
            check_has_header(conversation, run, previous)
        start = skip_absorbed_spaces(conversation, start)
        span = Span(start, find_turn_end(conversation, run, following))
        spans.append(span)
        learned_text[run.message] += conversation.text[span.start : span.end]
        check_nothing_follows_end(conversation, run.message, span)

    for message in turns:
        check_complete(conversation, message, learned_text[message])
    return spans


def check_has_header(conversation: Conversation, turn: Run, previous: Run) -> None:
    """Raise InputError if there is no header between the end of one assistant turn and the next.

    The model would learn to go on after the token that ends generation.
    """
    header = read_header(conversation.chat).text
    gap = conversation.text[previous.end : turn.start]
    if role_of(conversation, previous) != "assistant" or not header or header in gap:
        return
    tokens = conversation.tokens.between(previous.end, turn.start)
    if tokens.first(read_ending(conversation.chat).ids) is not None:
        raise turn_not_found(
            turn.message,
            f"the template ends the assistant's message before it, {gap!r}, and begins no new turn "
            f"with {header!r} (the two messages could be joined)",
        )


def find_runs(conversation: Conversation, turns: list[int]) -> list[Run]:
    """Return the runs of all messages, in order, including those of turns without text."""
    runs = runs_of_pieces(conversation.pieces)
    empty_turns = {*turns} - {run.message for run in runs}
    for message in sorted(empty_turns):
        position = place_empty_turn(conversation, message, runs)
        index = bisect_right(runs, position, key=attrgetter("end"))
        runs.insert(index, Run(message, position, position))
    return runs


def place_empty_turn(conversation: Conversation, message: int, runs: list[Run]) -> int:
    """Return the position after the header of a turn without text.

    The header is between the texts of earlier messages and the next run.
    """
    earlier = [run for run in runs if run.message is not None and run.message < message]
    previous = max(earlier, key=attrgetter("end"), default=CHAT_START)
    gap_end = min(
        (run.start for run in runs if run.start >= previous.end and run != previous),
        default=len(conversation.text),
    )
    return find_header_end(conversation, Run(message, gap_end, gap_end), previous)


def is_own(piece: Piece) -> bool:
    """Return whether a piece was written by the author of its message."""
    return piece.source.is_own


def check_complete(conversation: Conversation, message: int, learned_text: str) -> None:
    """Raise InputError if the template left out a part of a turn, for example its tool calls."""
    missing = missing_text(conversation.messages[message], learned_text)
    if missing:
        raise InputError(
            f"the chat template leaves out a part of the assistant's message {message}: "
            f"{missing[:40]!r}. Remove it from the row, or {ADVICE}"
        )


def check_no_foreign_text(conversation: Conversation, turns: list[int], spans: list[Span]) -> None:
    """Raise InputError if a span contains the text of another message, which would be learned."""
    for piece in conversation.pieces:
        if is_own(piece) and piece.source.message in turns:
            continue
        following = bisect_right(spans, piece.start, key=attrgetter("end"))
        if following < len(spans) and spans[following].start < piece.end:
            text = conversation.text[piece.start : piece.end]
            raise InputError(
                f"the chat template puts {text[:40]!r}, a text of message {piece.source.message}, "
                "into an assistant turn, where it would be learned: set data.chat_template to "
                "another template"
            )
