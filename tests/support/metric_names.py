"""The names of metrics: those on docs/metrics.md, and those that the code can write.

The code's names are computed from its syntax trees: every string with a slash that is a key of a
dictionary. Where a part of a name is a parameter, its values are those at the calls of the
function; where it is not known, it is "*".
"""

import ast
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/metrics.md"
TABLE = re.compile(r"^\| metric \|.*\n(?:\|.*\n)+", re.MULTILINE)
# The part of a name that stands for others, such as STAGE.
PLACEHOLDER = re.compile(r"[A-Z]+")
NAME = re.compile(r"[a-z][a-z_]*(/[\w@*]+)+")
# Resolving a name follows at most this many parameters and variables.
MAX_DEPTH = 4


# -- the page --------------------------------------------------------------------------------------


@cache
def documented() -> list[str]:
    """Return the names in the first columns of the page's tables."""
    names = []
    for table in TABLE.findall(PAGE.read_text()):
        for row in table.splitlines()[2:]:
            names += row.split("|")[1].split(",")
    return [name.strip() for name in names]


def matches(documented_name: str, name: str) -> bool:
    """Return whether a name is the documented one; a placeholder stands for any text."""
    return re.fullmatch(PLACEHOLDER.sub("[^/]+", documented_name), name) is not None


def undocumented(names: Iterable[str]) -> list[str]:
    """Return the names that the page does not have."""
    return [name for name in names if not is_documented(name)]


def is_documented(name: str) -> bool:
    return any(matches(known, name) for known in documented())


def check_run(directory: Path) -> None:
    """Assert that the page has every metric that a run has written, if it has written any.

    Metrics of a policy loss in a user's file are not the page's.
    """
    names = set()
    file = directory / "metrics.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    for line in lines:
        with suppress(ValueError):  # a killed run's last line, or one that a test has broken
            names |= json.loads(line).keys()
    config = directory / "config.yaml"
    has_own_loss = config.exists() and re.search(r"loss_mode: .*\.py:", config.read_text())
    ours = [name for name in names if not (has_own_loss and name.startswith("actor/"))]
    assert not undocumented(ours), f"docs/metrics.md lacks {undocumented(ours)} of {file}"


# -- the code --------------------------------------------------------------------------------------


class Code:
    """Resolves the strings in the syntax trees of some files.

    Attributes:
        keys: the keys of dictionaries, without those that contain a slash.
        names: the keys that contain a slash, with "*" for parts that are not known.
    """

    def __init__(self, files: Iterable[Path]):
        self.constants: dict[str, str] = {}
        self.calls: dict[str, list[ast.Call]] = {}
        self.scope_of_call: dict[ast.Call, ast.FunctionDef | None] = {}
        found = []
        for file in files:
            self._visit(ast.parse(file.read_text()), None, found)
        self.keys: set[str] = set()
        self.names: set[str] = set()
        for node, scope in found:
            for text in self.resolve(node, scope):
                if NAME.fullmatch(text):
                    self.names.add(text)
                elif text.isidentifier():
                    self.keys.add(text)

    def _visit(self, node: ast.AST, scope: ast.FunctionDef | None, found: list) -> None:
        """Collect constants, calls, and the keys of dictionaries with the function around them."""
        if isinstance(node, ast.FunctionDef):
            scope = node
        if isinstance(node, ast.Assign) and scope is None:
            self._note_constant(node)
        if isinstance(node, ast.Call):
            self.calls.setdefault(called_name(node), []).append(node)
            self.scope_of_call[node] = scope
        found += [(key, scope) for key in keys_of(node)]
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope, found)

    def _note_constant(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant):
            self.constants[target.id] = str(node.value.value)

    def resolve(self, node: ast.AST, scope: ast.FunctionDef | None, depth: int = 0) -> set[str]:
        """Return the strings that an expression may be."""
        if isinstance(node, ast.Constant):
            return {node.value} if isinstance(node.value, str) else set()
        if isinstance(node, ast.JoinedStr):
            parts = [self.resolve(part, scope, depth) for part in node.values]
            return {"".join(choice) for choice in product(*parts)}
        if isinstance(node, ast.FormattedValue):
            return self.resolve(node.value, scope, depth)
        if isinstance(node, ast.Name) and depth < MAX_DEPTH:
            return self._resolve_variable(node.id, scope, depth + 1)
        return {"*"}

    def _resolve_variable(self, name: str, scope: ast.FunctionDef | None, depth: int) -> set[str]:
        if scope is None:
            return {self.constants.get(name, "*")}
        parameters = [argument.arg for argument in scope.args.args]
        if name in parameters:
            return self._resolve_parameter(name, parameters, scope, depth)
        values = set()
        for node in ast.walk(scope):
            is_assigned = isinstance(node, ast.Assign) and is_name(node.targets[0], name)
            if is_assigned:
                values |= self.resolve(node.value, scope, depth)
        return values or {self.constants.get(name, "*")}

    def _resolve_parameter(
        self, name: str, parameters: list[str], scope: ast.FunctionDef, depth: int
    ) -> set[str]:
        """Return the values of a parameter at all calls of its function."""
        position = [parameter for parameter in parameters if parameter != "self"].index(name)
        values = set()
        for call in self.calls.get(scope.name, []):
            keywords = [keyword.value for keyword in call.keywords if keyword.arg == name]
            for value in call.args[position : position + 1] + keywords:
                values |= self.resolve(value, self.scope_of_call[call], depth)
        return values or {"*"}


def called_name(call: ast.Call) -> str:
    """Return the last name of the called function, such as update of updates.update()."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def keys_of(node: ast.AST) -> list[ast.AST]:
    """Return the expressions that a node uses as keys of a dictionary which it makes or changes."""
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.DictComp):
        return [node.key]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return [node.slice]
    return []
