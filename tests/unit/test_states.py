"""Who writes what moves change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from callqueue import states

PACKAGE = Path(states.__file__).parent


# By column: the modules that may write it, besides those that only show it.
WRITERS = {
    "status": {"transitions/verbs.py"},
    # The end of an attempt: who made its call hands the columns to transitions.
    "finished_at": {"transitions/verbs.py", "execution/recorder.py", "ledger/ledger_time.py"},
    # A release gives a lease, whoever begins gives the next, and a clock set back shortens it.
    "lease_until": {
        "dispatch/release_pass.py",
        "execution/claim.py",
        "ledger/ledger_time.py",
        "transitions/verbs.py",
    },
    # What an attempt was charged, where it costs something else; tallies forget it once they know.
    "charged": {
        "transitions/verbs.py",
        "execution/recorder.py",
        "permits/granted.py",
        "ledger/tally_rows.py",
    },
}


def test_no_other_module_writes_what_moves_change() -> None:
    found: dict[str, set[str]] = {column: set() for column in WRITERS}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("admin", "integrations", "migrations", "models"):
            nodes = list(_at_work(ast.parse(path.read_text("utf-8"))))
            by_name = any(_updates(node) and None in _keywords(node) for node in nodes)
            for column in WRITERS:
                if any(_writes(node, column, by_name) for node in nodes):
                    found[column].add(str(path.relative_to(PACKAGE)))
    assert found == WRITERS


def test_attempts_are_inserted_by_a_pass_alone() -> None:
    """That is what charges a call, or a permit."""
    made = re.compile(
        r"insert_\w+\(\s*tables\.CallAttempt|attempts\(using\)\.(bulk_)?create|CallAttempt\(\w+="
    )
    found = [path for path in PACKAGE.rglob("*.py") if made.search(path.read_text("utf-8"))]
    assert [str(path.relative_to(PACKAGE)) for path in found] == ["dispatch/release_pass.py"]


def _at_work(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes, but for mappings that fill in a text."""
    texts = {id(node.right) for node in ast.walk(tree) if isinstance(node, ast.BinOp)}
    return (node for node in ast.walk(tree) if id(node) not in texts)


def _updates(node: ast.AST) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr == "update"


def _keywords(node: ast.AST) -> list[str | None]:
    return [one.arg for one in node.keywords] if isinstance(node, ast.Call) else []


def _writes(node: ast.AST, column: str, by_name: bool) -> bool:
    """Whether it is an update of the column, a mapping of columns with it, or such SQL. `by_name`:
    its module updates columns whose names it has in a tuple.
    """
    if _updates(node):
        return column in _keywords(node)
    named = node.keys if isinstance(node, ast.Dict) else []
    named = node.elts if by_name and isinstance(node, ast.Tuple) else named
    if named:
        return any(isinstance(one, ast.Constant) and one.value == column for one in named)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and re.search(rf"(SET|,) {column} = ", node.value) is not None
