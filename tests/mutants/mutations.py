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
                yield from _of_statements(block)


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
        if not (isinstance(other.value, ast.Constant) and other.value.value is None):
            yield ast.Return(ast.Constant(None))
    elif isinstance(other, ast.Call):
        for place, keyword in enumerate(other.keywords):
            if keyword.arg is not None:
                fewer = copy.deepcopy(other)
                del fewer.keywords[place]
                yield fewer
    elif isinstance(other, ast.IfExp):
        other.body, other.orelse = other.orelse, other.body
        yield _in_brackets(other)


def _of_statements(block: list[ast.stmt]) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """A statement that is left out, and two that change places."""
    simple = ast.Expr, ast.Assign, ast.AugAssign
    for one in block:
        if isinstance(one, (ast.Expr, ast.AugAssign)) and not _is_told(one):
            yield one, one, "pass"
    for one, other in pairwise(block):
        both = one, other
        if all(isinstance(each, simple) for each in both) and not any(map(_is_told, both)):
            yield one, other, f"{ast.unparse(other)}\n{ast.unparse(one)}"


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
