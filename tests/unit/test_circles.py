"""Modules import downward: none imports, through whichever others, what imports it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_module_stands_on_itself() -> None:
    spec = importlib.util.spec_from_file_location("sizes", ROOT / ".ci" / "sizes.py")
    assert spec is not None and spec.loader is not None
    sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sizes)
    package = ROOT / "callqueue"
    graph = sizes.arrows(
        {
            sizes.name_of(path, package): ast.parse(path.read_text())
            for path in package.rglob("*.py")
        }
    )
    assert len(graph) > 100
    assert {name: sizes.circle_of(name, graph) - {name} for name in graph} == dict.fromkeys(
        graph, frozenset()
    )
