"""Which tests give a bound of the product more than it has. A fault that the bound brings about is
then seen by nobody: counting in steps of an hour instead of 50 ms hid that it began anew at each.

Each such place has a reason here, and a test beside it that leaves the bound as it is, or smaller.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
REASONS = {
    "db/conftest.py: choosing.LEAST": "a pass's own figures; test_backpressure.py has the bound",
    "db/dispatch/test_in_workers.py: publisher.ALONE": "the test ends it itself, however slow it is",
    "db/dispatch/test_in_workers.py: worker.LOOK": "makes its fault larger: the end waits as long",
    "db/dispatch/test_in_workers.py: worker.WAIT": "makes its fault larger: the end waits as long",
}


def test_no_test_widens_a_bound_without_a_reason() -> None:
    found = {
        f"{path.relative_to(TESTS).as_posix()}: {bound}"
        for path in sorted(TESTS.rglob("*.py"))
        if "benchmarks" not in path.parts
        for bound in widened(ast.parse(path.read_text("utf-8")))
    }
    assert found == set(REASONS)


def widened(tree: ast.Module) -> Iterator[str]:
    """The constants of the product that are given a number larger than their own."""
    modules = dict(_modules(tree))
    for node in ast.walk(tree):
        for module, name, value in _patches(node, modules):
            own, given = getattr(module, name, None), _number(value)
            if isinstance(own, int | float) and given is not None and given > own:
                yield f"{module.__name__.rpartition('.')[2]}.{name}"


def _modules(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """The product's modules by the names that a test imports them by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("callqueue"):
            for one in node.names:
                try:
                    found = importlib.import_module(f"{node.module}.{one.name}")
                except ImportError:
                    continue  # a name in a module
                yield one.asname or one.name, found


def _patches(node: ast.AST, modules: dict[str, Any]) -> Iterator[tuple[Any, str, ast.expr]]:
    """Module, name and value of what a node sets."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "object"):
        match node.args:
            case [ast.Name(id=module), ast.Constant(value=str(name)), value] if module in modules:
                yield modules[module], name, value
            case [ast.Constant(value=str(path)), value] if path.startswith("callqueue."):
                yield (
                    importlib.import_module(path.rpartition(".")[0]),
                    path.rpartition(".")[2],
                    value,
                )
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            match target:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules:
                    yield modules[module], name, node.value


def _number(value: ast.expr) -> float | None:
    """What a test sets, where it can be read: 3600, 1_000_000, float("inf"), math.inf."""
    match value:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))]):
            return float(text)
        case ast.Attribute(value=ast.Name(id="math"), attr="inf"):
            return float("inf")
        case _:
            return None
