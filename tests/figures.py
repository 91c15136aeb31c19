"""Measure how dense the product's code is: one table for all files, one for the five densest.

    python -m tests.figures [CHECKOUT]

Tokens per line count Python's tokens over lines that hold at least one, docstrings and comments
left out. The other figures are per 1,000 such lines, but for the share of lines over 110 columns,
which counts all lines.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

from tests.lint import COMPREHENSIONS, ROOT, contains, is_packed

NOT_PRODUCT = ("tests", "benchmarks", "examples")
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
LONG_LINE = 110
NUM_WORST = 5


def product_files(checkout: Path) -> list[Path]:
    """Return the Python files of the product that git tracks."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if Path(name).parts[0] not in NOT_PRODUCT]
    return [checkout / name for name in names]


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the lines of strings that stand alone as statements."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines |= set(range(node.lineno, node.end_lineno + 1))
    return lines


def count(path: Path) -> Counter:
    """Count lines, tokens and the shapes of expressions in a file."""
    source = path.read_text()
    tree = ast.parse(source)
    left_out = docstring_lines(tree)
    code_lines: set[int] = set()
    counts: Counter = Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE and token.start[0] not in left_out:
            counts["tokens"] += 1
            code_lines.add(token.start[0])
    counts["code lines"] = len(code_lines)
    counts["lines"] = len(source.splitlines())
    counts["long lines"] = sum(len(line) > LONG_LINE for line in source.splitlines())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_packed(node):
            counts["packed assignments"] += 1
        if isinstance(node, COMPREHENSIONS) and contains(node, COMPREHENSIONS):
            counts["nested comprehensions"] += 1
        if isinstance(node, ast.IfExp):
            counts["conditional expressions"] += 1
    return counts


def row(name: str, counts: Counter) -> str:
    num_lines = max(counts["code lines"], 1)
    cells = [
        f"{counts['lines']:,}",
        f"{counts['tokens'] / num_lines:.1f}",
        f"{counts['long lines'] / max(counts['lines'], 1):.1%}",
    ]
    for shape in ("packed assignments", "nested comprehensions", "conditional expressions"):
        cells.append(f"{1000 * counts[shape] / num_lines:.1f}")
    return f"| {name} | {' | '.join(cells)} |"


def main(checkout: Path) -> None:
    counts = {path: count(path) for path in product_files(checkout)}
    total: Counter = sum(counts.values(), Counter())
    print(
        "| file | lines | tokens per line | over 110 columns | packed assignments | "
        "nested comprehensions | conditional expressions |"
    )
    print("|---|---|---|---|---|---|---|")
    print(row("all", total))
    sized = [path for path in counts if counts[path]["code lines"] >= 20]
    densest = sorted(sized, key=lambda path: -counts[path]["tokens"] / counts[path]["code lines"])
    for path in densest[:NUM_WORST]:
        print(row(str(path.relative_to(checkout)), counts[path]))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
