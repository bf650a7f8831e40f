"""Puts a fault of `fault_table.py` into the product, as its modules are imported; and looks for all
of them, one after the other: `python -m tests.simulation --faults`.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import CodeType
from typing import Any

from tests.simulation.fault_table import FAULTS, Change
from tests.simulation.lengths import LONG_ONES
from tests.simulation.unseen_faults import UNSEEN

MOST = 20_000  # seeds whose scene is looked at


def looked_for(
    options: argparse.Namespace, databases: Sequence[str]
) -> Iterator[tuple[str, int | None, str]]:
    """Each fault, with the first long run's seed that finds it, or None where none does of those
    that the table allows, and what the judge says.
    """
    free: SimpleQueue[str] = SimpleQueue()
    for database in databases:
        free.put(database)

    def look(name: str) -> tuple[str, int | None, str]:
        database = free.get()
        try:
            return name, *_found(options, name, database)
        finally:
            free.put(database)

    with ThreadPoolExecutor(len(databases)) as pool:
        yield from pool.map(look, [name for name in FAULTS if options.fault in name])


def _found(options: argparse.Namespace, name: str, database: str) -> tuple[int | None, str]:
    from tests.simulation.command import start

    fault = (FAULTS | UNSEEN)[name]
    own = {
        **vars(options), "fault": name, "until_found": True, "scene": fault.scenes,
        "runs": fault.runs,
    }  # fmt: skip
    seeds = range(0, MOST * LONG_ONES, LONG_ONES)
    process = start(argparse.Namespace(**own), database, list(seeds))
    lines = process.stdout.read().splitlines()
    if process.wait():
        return None, f"its process ended with {process.returncode}"
    if not lines:
        return None, "no such scene"
    last = json.loads(lines[-1])
    return (last["seed"], last["complaints"][0]) if last["complaints"] else (None, "not found")


def put_back(name: str) -> None:
    """Put a fault into the product, which nobody has imported yet."""
    sys.meta_path.insert(0, _Finder(changes_of(name)))


def changes_of(name: str) -> dict[str, list[Change]]:
    """The changes of a fault, by the modules' full names."""
    by_module: dict[str, list[Change]] = {}
    for change in (FAULTS | UNSEEN)[name].changes:
        by_module.setdefault(f"callqueue.{change.module}", []).append(change)
    return by_module


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: dict[str, list[Change]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(name, spec.origin, self._changes[name])
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, changes: Sequence[Change]) -> None:
        super().__init__(name, path)
        self._changes = changes

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(
            changed(self._changes, self.get_source(fullname) or ""), self.path
        )


def changed(changes: Sequence[Change], source: str) -> str:
    """The module's source with the fault in it."""
    for module, old, new in changes:
        count = source.count(old)
        if count != 1:
            raise LookupError(f"callqueue.{module} has {count} times, not once: {old!r}")
        source = source.replace(old, new)
    return source
