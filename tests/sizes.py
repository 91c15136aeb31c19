"""Small is a feature: `make lint` fails when a file, or all of them together, outgrow their budgets.

    python -m tests.sizes

Lines that hold something are counted. Tests, benchmarks and examples have no budget, and `make test` does not count: a
fork may be as large as it likes.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("algorithms", "data", "engines", "profiling", "rollout")
SCRIPTS = sorted(ROOT.glob("train_*.py"))
PRODUCT = sorted([*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))])
MAX_SCRIPT, MAX_FILE, MAX_PRODUCT = 300, 400, 8500


def num_lines(path: Path) -> int:
    return sum(bool(line.strip()) for line in path.read_text().splitlines())


def main() -> None:
    sizes = {path: num_lines(path) for path in PRODUCT}
    limits = {path: MAX_SCRIPT if path in SCRIPTS else MAX_FILE for path in PRODUCT}
    over = [f"{path.relative_to(ROOT)}: {size} lines, more than {limits[path]}" for path, size in sizes.items() if size > limits[path]]
    total = sum(sizes.values())
    if total > MAX_PRODUCT:
        over.append(f"the product: {total} lines, more than {MAX_PRODUCT}")
    print(*over, sep="\n", end="\n" if over else "")
    print(f"{len(sizes)} files, {total} lines of {MAX_PRODUCT}; the largest: "
          + ", ".join(f"{path.relative_to(ROOT)} {sizes[path]}" for path in sorted(sizes, key=sizes.get)[:-4:-1]))
    sys.exit(bool(over))


if __name__ == "__main__":
    main()
