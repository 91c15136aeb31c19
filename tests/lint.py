"""Check how the code reads: ruff's rules and format, and rules about shape that ruff lacks.

    python -m tests.lint [FILE ...]

Ruff's rules are in pyproject.toml. The rules below come from the same standard, which
CONTRIBUTING.md describes:

    function-length         a function has at most 60 lines
    file-length             a file has at most 500 lines
    packed-assignment       no `a, b = x, y`, except to swap names
    nested-comprehension    name the result of the inner comprehension
    nested-conditional      name the inner result, or write an if statement
    expression-statement    no `x and f()`, `x or f()` or `f() if x else g()` as a statement

Tests and benchmarks may be long; every other rule holds for them too. Exits with code 1 and
prints one line per violation.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
MAY_BE_LONG = ("tests", "benchmarks")
LENGTH_RULES = ("function-length", "file-length", "PLR0915")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# (file, rule): the reason why the rule does not hold there.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("algorithms/advantages.py", "PLR0913"): "called by argument name; names are the interface",
    ("algorithms/policy_losses.py", "PLR0913"): "called by argument name; names are the interface",
    ("algorithms/rollout_correction.py", "PLR0913"): "called by argument name, as above",
    ("engines/optimizer.py", "PLR0913"): "called by argument name, as above",
}


@dataclass(frozen=True)
class Violation:
    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


def tracked_files() -> list[str]:
    """Return the Python files that git tracks or would track, relative to the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def ruff_violations(files: list[str]) -> Iterator[Violation]:
    """Yield what ruff reports about rules and format."""
    for command in (["check"], ["format", "--check"]):
        for finding in ruff_findings([*command, "--output-format", "json", *files]):
            file = str(Path(finding["filename"]).relative_to(ROOT))
            line = finding["location"]["row"]
            yield Violation(file, line, finding["code"], finding["message"])


def ruff_findings(arguments: list[str]) -> list[dict]:
    """Return what ruff prints as JSON."""
    ruff = str(Path(sys.executable).with_name("ruff"))
    reported = subprocess.run([ruff, *arguments], cwd=ROOT, capture_output=True, text=True)
    if reported.returncode not in (0, 1):
        sys.exit(reported.stderr)
    return json.loads(reported.stdout)


def shape_violations(file: str) -> Iterator[Violation]:
    """Yield the violations of the rules in this module's docstring."""
    source = (ROOT / file).read_text()
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        message = f"the file has {num_lines} lines, more than {MAX_FILE_LINES}"
        yield Violation(file, 1, "file-length", message)
    for node in ast.walk(ast.parse(source)):
        rule = violated_rule(node)
        if rule is not None:
            yield Violation(file, node.lineno, *rule)


def violated_rule(node: ast.AST) -> tuple[str, str] | None:
    """Return (rule, message) if this node breaks a rule about shape."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        num_lines = node.end_lineno - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            message = f"{node.name} has {num_lines} lines, more than {MAX_FUNCTION_LINES}"
            return "function-length", message
    if isinstance(node, ast.Assign) and is_packed(node):
        return "packed-assignment", "one assignment per line"
    if isinstance(node, COMPREHENSIONS) and contains(node, COMPREHENSIONS):
        return "nested-comprehension", "name the result of the inner comprehension"
    if isinstance(node, ast.IfExp) and contains(node, ast.IfExp):
        return "nested-conditional", "name the inner result, or write an if statement"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp | ast.IfExp):
        return "expression-statement", "write an if statement"
    return None


def is_packed(node: ast.Assign) -> bool:
    """Return whether an assignment packs several values that are not a swap."""
    target = node.targets[-1]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    assigned = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    return assigned != values


def contains(node: ast.AST, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a node of one of these types lies below `node`."""
    descendants = (child for child in ast.walk(node) if child is not node)
    return any(isinstance(child, kinds) for child in descendants)


def is_allowed(violation: Violation) -> bool:
    """Return whether a violation is an exception, or one of length where files may be long."""
    room = Path(violation.file).parts[0]
    if room in MAY_BE_LONG and violation.rule in LENGTH_RULES:
        return True
    return (violation.file, violation.rule) in EXCEPTIONS


def main(named: list[str]) -> None:
    files = named or tracked_files()
    violations = list(ruff_violations(files))
    for file in files:
        violations.extend(shape_violations(file))
    violations = [violation for violation in violations if not is_allowed(violation)]
    for violation in sorted(violations, key=lambda v: (v.file, v.line)):
        print(violation)
    if violations:
        sys.exit(f"{len(violations)} violations")


if __name__ == "__main__":
    main(sys.argv[1:])
