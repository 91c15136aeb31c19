"""Find additional fields of text parts, such as the sources that an answer cites.

A chat template gets the type and the text of such a part, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from data.chat.losses import LOST, UNREAD, Loss, is_empty
from data.chat.marks import texts_of
from data.images.sources import TEXT_PARTS, is_image


def lost_part_fields(messages: list[dict]) -> Iterator[Loss]:
    """Yield the fields of text parts besides type and text. Nothing reads them."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            is_text = isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS
            if not is_text or is_image(part):
                continue
            for key, value in part.items():
                if key in ("type", "text") or is_empty(value):
                    continue
                kind = LOST if texts_of([{key: value}]) else UNREAD
                yield Loss(kind, key, i, str(value)[:60])
