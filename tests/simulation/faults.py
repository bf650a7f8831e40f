"""Puts a fault of `faults.txt` into the product, as its modules are imported; and looks for all of
them, one after the other: `python -m tests.simulation --faults`.

In the table each has a line with its name, its module, and what else there is to say: within how
many long runs it must be found; words, one of which the names of their scenes have.
After "- " and "+ " stand what is changed and what it becomes; "@ " begins a change more. A text that
is not there exactly once any more is an error: whoever changes the line changes it there.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import CodeType
from typing import Any, NamedTuple

from tests.simulation.scenes import LONG_ONES

MOST = 20_000  # seeds whose scene is looked at
RUNS = 100  # long ones, where nothing else is said


class Change(NamedTuple):
    """What is changed in a module."""

    module: str
    old: str
    new: str


@dataclass
class Fault:
    """Changes that are made together; within how many long runs they must be found, where only
    those are made whose scene has one of these words in its name.
    """

    changes: list[Change] = field(default_factory=list)
    runs: int = RUNS
    scenes: Sequence[str] = ("",)


def _table() -> dict[str, Fault]:
    """The faults by their names."""
    found, fault = dict[str, Fault](), Fault()
    for line in (Path(__file__).parent / "faults.txt").read_text(encoding="utf-8").splitlines():
        sign, text = line[:2], line[2:]
        if sign == "@ ":
            fault.changes.append(Change(text, "", ""))
        elif sign in ("- ", "+ "):
            module, old, new = fault.changes[-1]
            old, new = (f"{old}\n{text}", new) if sign == "- " else (old, f"{new}\n{text}")
            fault.changes[-1] = Change(module, old, new)
        elif line and sign != "# ":
            name, module, *more = line.split(" | ")
            found[name] = fault = Fault([Change(module, "", "")])
            for one in more:
                if one.endswith(" runs"):
                    fault.runs = int(one.removesuffix(" runs"))
                else:
                    fault.scenes = one.split(", ")
    for one in found.values():
        one.changes = [Change(m, old[1:], new[1:]) for m, old, new in one.changes]
    return found


FAULTS = _table()


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
            return name, *_found(options, name, database, running)
        finally:
            free.put(database)

    wanted = [name for name in FAULTS if options.fault in name]
    pool, running = ThreadPoolExecutor(len(databases)), list[Any]()
    try:
        yield from pool.map(look, wanted)
    finally:  # whoever interrupts it waits for none of them
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()


def _found(
    options: argparse.Namespace, name: str, database: str, running: list[Any]
) -> tuple[int | None, str]:
    from tests.simulation.command import start

    fault = FAULTS[name]
    own = {
        **vars(options), "fault": name, "until_found": True, "scene": fault.scenes,
        "runs": fault.runs,
    }  # fmt: skip
    seeds = range(0, MOST * LONG_ONES, LONG_ONES)
    process = start(argparse.Namespace(**own), database, list(seeds))
    running.append(process)
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
    for change in FAULTS[name].changes:
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
