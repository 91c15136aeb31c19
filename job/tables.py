"""Tables of sampled responses: for a terminal, and in Markdown."""

import unicodedata

MIN_COLUMN_WIDTH = 8


def column_names(rows: list[dict]) -> list[str]:
    """Return the keys of all rows, in the order in which they first occur."""
    return list(dict.fromkeys(name for row in rows for name in row))


def table(rows: list[dict], width: int) -> str:
    """Return rows of texts and numbers as a table for a terminal, with a line of column names.

    Args:
        width: width of the terminal, in characters. Texts that are too long lose their middle.
    """
    names = column_names(rows)
    lines = [names]
    for row in rows:
        lines.append([cell_text(row.get(name, "")) for name in names])
    widths = column_widths(lines, width)
    shown = []
    for line in lines:
        cells = ["  " + fit(cell, widths[k]) for k, cell in enumerate(line)]
        shown.append("".join(cells).rstrip())
    return "\n".join(shown)


def cell_text(value) -> str:
    return f"{value:.2f}" if isinstance(value, float) else printable(str(value))


def column_widths(lines: list[list[str]], width: int) -> dict[int, int]:
    """Divide a terminal's width: narrow columns get all they need, wide ones equal shares."""
    num_columns = len(lines[0])
    needed = {}
    for k in range(num_columns):
        needed[k] = max(terminal_width(line[k]) for line in lines)
    free = width - 2 * num_columns
    widths = {}
    narrow_first = sorted(needed, key=needed.get)
    for num_remaining, k in zip(range(num_columns, 0, -1), narrow_first):
        widths[k] = min(needed[k], max(free // num_remaining, MIN_COLUMN_WIDTH))
        free -= widths[k]
    return widths


def fit(text: str, width: int) -> str:
    """Pad the text to `width` columns of a terminal, or cut its middle if it is too long."""
    short = text
    kept = width
    while terminal_width(short) > width:
        kept -= 1
        end = kept // 2
        short = f"{text[: kept - end]}…{text[len(text) - end :]}"
    return short + " " * (width - terminal_width(short))


def terminal_width(text: str) -> int:
    """Return the number of terminal columns that a text takes: two for a Chinese character."""
    num_columns = 0
    for character in text:
        if unicodedata.east_asian_width(character) in "WF":
            num_columns += 2
        elif not unicodedata.combining(character):
            num_columns += 1
    return num_columns


def printable(text: str) -> str:
    """Return the text in one line, with escapes such as \\n for control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def markdown_table(columns: list[str], rows: list[list]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append([markdown(str(cell)) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(text: str) -> str:
    """Return text for a cell of a Markdown table, with every special character escaped."""
    escaped = []
    for character in text:
        if character.isalnum() or character == " ":
            escaped.append(character)
        elif character == "\n":
            escaped.append("<br>")
        else:
            escaped.append(f"&#{ord(character)};")
    return "".join(escaped)
