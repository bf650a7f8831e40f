"""Faults that are put back into the product, one at a time, to see that the simulation finds them.

Each is a change of the source of one module, made as the module is imported. `seeds`: within how
many it must be found. A text that is not there exactly once any more is an error: whoever changes
the line changes it here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What is changed in a module. `database`: where it is looked for."""

    module: str
    old: str
    new: str
    seeds: int = 60
    database: str = "postgresql"


FAULTS = {
    "a pass takes no locks": Fault(
        "dispatch.release_pass", 'f"ORDER BY rule{database.skip_locked(using)}"', '"ORDER BY rule"'
    ),
    "open attempts are not counted": Fault(
        "ledger.account",
        "                self.open[budget.id, budget.value_of(found.key, found.queue)] += cost",
        "                self.open[budget.id, budget.value_of(found.key, found.queue)] += 0",
    ),
    "answered attempts are not counted": Fault("ledger.account", "append((at, cost))", "__len__()"),
    "attempts age from their release": Fault(
        "ledger.account",
        "at = budget.limit.aged_from(found.sent_at, found.finished_at)",
        "at = min(found.released_at or found.finished_at, found.sent_at or found.finished_at) - 300_000",
    ),
    "what is released ahead is sent at once": Fault(
        "execution.request",
        "while (left := opens - clocks.monotonic()) > 0:",
        "while (left := opens - clocks.monotonic()) > 1e9:",
    ),
}


def put_back(name: str) -> None:
    """Put a fault into the product, which nobody has imported yet."""
    fault = FAULTS[name]
    sys.meta_path.insert(0, _Finder(f"callqueue.{fault.module}", fault))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, fault: Fault) -> None:
        self._module, self._fault = module, fault

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(name, spec.origin, self._fault)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, fault: Fault) -> None:
        super().__init__(name, path)
        self._fault = fault

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(changed(self._fault, self.get_source(fullname) or ""), self.path)


def changed(fault: Fault, source: str) -> str:
    """The module's source with the fault in it."""
    count = source.count(fault.old)
    if count != 1:
        raise LookupError(f"callqueue.{fault.module} has {count} times, not once: {fault.old!r}")
    return source.replace(fault.old, fault.new)
