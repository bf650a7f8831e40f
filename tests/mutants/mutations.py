"""The small faults that one module may have: each is another text for one place in its source."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

OPERATORS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SILENT = {"events", "log", "logger", "warnings"}  # what is told to people only
PURE = {
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "frozenset", "int", "isinstance",
    "len", "list", "max", "min", "round", "set", "sorted", "str", "sum", "tuple", "zip",
}  # fmt: skip
ORDERS = ast.Lt, ast.LtE, ast.Gt, ast.GtE
PLACES = ast.Name, ast.Attribute, ast.Subscript
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """A fault of a function: the bytes from `begin` to `end` are `text` instead."""

    line: int
    function: str
    begin: int
    end: int
    was: str
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.text.encode() + source[self.end :]


def mutants(source: bytes) -> list[Mutant]:
    """All of a module, in the order of its lines. Only inside of functions, and not in the types
    that they name."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for function, name in _functions(ast.parse(source), ""):
        for first, last, text in _faults(function):
            begin = starts[first.lineno - 1] + first.col_offset
            end = starts[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)
            was = source[begin:end].decode()
            if was != text:
                text = text.replace("\n", "\n" + " " * first.col_offset)
                found.append(Mutant(first.lineno, name, begin, end, was, text))
    return sorted(found, key=lambda one: (one.begin, one.end, one.text))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield child, prefix + child.name
            yield from _functions(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _faults(function: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """First and last node of the place, and its new text."""
    for node in _own_nodes(function):
        for changed in _changed(node):
            yield node, node, ast.unparse(changed)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield from _of_statements(block, begins=getattr(function, "name", "") == "__init__")


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Those of the function itself: not of functions within, nor of types and decorators."""
    yield function
    waiting: list[ast.AST] = list(function.body)  # type: ignore[attr-defined]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.JoinedStr)):
            continue
        if _is_told(node):
            continue
        yield node
        of_type = getattr(node, "annotation", None)
        waiting += [child for child in ast.iter_child_nodes(node) if child is not of_type]


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in OPERATORS:
        if isinstance(other.ops[0], ORDERS) and _reads_clock(other):
            return
        other.ops[0] = OPERATORS[type(other.ops[0])]()
        yield _in_brackets(other)
    elif isinstance(other, (ast.BoolOp, ast.BinOp)) and type(other.op) in OPERATORS:
        if not isinstance(other, ast.BinOp) or not _is_text(other.left):
            other.op = OPERATORS[type(other.op)]()
            yield _in_brackets(other)
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not):
        yield _in_brackets(other.operand)
    elif isinstance(other, ast.Constant) and isinstance(other.value, bool):
        yield ast.Constant(not other.value)
    elif isinstance(other, ast.Constant) and isinstance(other.value, (int, float)):
        yield ast.Constant(other.value + 1)
    elif isinstance(other, ast.Return) and other.value is not None:
        if not isinstance(other.value, ast.Constant) or other.value.value:
            yield ast.Return(ast.Constant(None))
    elif isinstance(other, ast.Call):
        for place, keyword in enumerate(other.keywords):
            if keyword.arg not in (None, "strict"):  # which only asserts
                fewer = copy.deepcopy(other)
                del fewer.keywords[place]
                yield fewer
    elif isinstance(other, ast.IfExp):
        other.body, other.orelse = other.orelse, other.body
        yield _in_brackets(other)


def _of_statements(
    block: list[ast.stmt], *, begins: bool
) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """A statement that is left out, and two that change places."""
    simple = ast.Expr, ast.Assign, ast.AugAssign
    for one in block:
        if isinstance(one, (ast.Expr, ast.AugAssign)) and not _is_told(one):
            yield one, one, "pass"
    for one, other in pairwise(block):
        both = one, other
        if not all(isinstance(each, simple) for each in both) or any(map(_is_told, both)):
            continue
        if not _is_free(one, other, begins=begins):
            yield one, other, f"{ast.unparse(other)}\n{ast.unparse(one)}"


def _reads_clock(one: ast.AST) -> bool:
    """Whether it is of a reading of a clock, which is no other instant to the last digit."""
    called = [node.func for node in ast.walk(one) if isinstance(node, ast.Call)]
    return any(ast.unparse(func).rpartition(".")[2] in ("monotonic", "now") for func in called)


def _is_free(one: ast.stmt, other: ast.stmt, *, begins: bool) -> bool:
    """Whether neither of the two can see which is first: both assign, one at most calls what may do
    anything, and neither reads or writes what the other writes. `begins`: in an `__init__`, whose
    `self` nobody else has.
    """
    kinds = ast.Assign, ast.AugAssign
    if not isinstance(one, kinds) or not isinstance(other, kinds):
        return False
    seen, written = zip(*(_seen_and_written(each) for each in (one, other)), strict=True)
    if written[0] & seen[1] or written[1] & seen[0]:
        return False
    calls = [_calls(each) for each in (one, other)]
    if all(calls):
        return False
    if any(calls):  # what is called may read and change all but names of this function
        calling, still = (one, seen[1]) if calls[0] else (other, seen[0])
        is_own = begins and calling.value is not None and "self" not in _places(calling.value)
        return all(name.isidentifier() or (is_own and name.startswith("self.")) for name in still)
    return True


def _seen_and_written(one: ast.Assign | ast.AugAssign) -> tuple[set[str], set[str]]:
    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
    written = {
        ast.unparse(node)
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, PLACES) and isinstance(node.ctx, ast.Store)
    }
    return _places(one), written


def _places(one: ast.AST) -> set[str]:
    called = {node.func for node in ast.walk(one) if isinstance(node, ast.Call)}
    return {
        ast.unparse(node)
        for node in ast.walk(one)
        if isinstance(node, PLACES) and not (isinstance(node, ast.Name) and node in called)
    }


def _calls(one: ast.AST) -> bool:
    """Whether something is called that is not known to do nothing besides."""
    return any(
        not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PURE
        )
        for node in ast.walk(one)
        if isinstance(node, (ast.Call, ast.Await, ast.Yield))
    )


def _in_brackets(node: ast.AST) -> ast.AST:
    """Whatever stands around it, it stays one value."""
    return ast.Name(f"({ast.unparse(node)})")


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str)
    )


def _is_told(node: ast.AST) -> bool:
    """Whether the statement only tells somebody something: a docstring, a line of the log."""
    if not isinstance(node, ast.Expr) or _is_text(node):
        return isinstance(node, ast.Expr)
    called: ast.AST = node.value
    while isinstance(called, (ast.Call, ast.Attribute)):
        called = called.func if isinstance(called, ast.Call) else called.value
    return isinstance(called, ast.Name) and called.id in SILENT
