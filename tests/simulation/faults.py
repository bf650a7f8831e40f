"""Faults that are put back into the product, one at a time, to see that the simulation finds them.

Each is one change or several of the source of modules, made as they are imported. `seeds`: within
how many it must be found. A text that is not there exactly once any more is an error: whoever
changes the line changes it here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple


class Change(NamedTuple):
    """What is changed in a module."""

    module: str
    old: str
    new: str


class Fault:
    """Changes that are made together; within how many seeds they must be found, and where they are
    looked for.
    """

    def __init__(self, *changes: Change, seeds: int = 60, database: str = "postgresql") -> None:
        self.changes, self.seeds, self.database = changes, seeds, database


def fault(module: str, old: str, new: str, **how: Any) -> Fault:
    """A fault of one change."""
    return Fault(Change(module, old, new), **how)


_PASS_LOCK = 'f"ORDER BY rule{database.skip_locked(using)}"'
_AGED = "found.append((limit.aged_from(self.sent_at, self.finished_at), cost - more))"

FAULTS = {
    # --- locks
    "a pass takes no locks": fault(
        "dispatch.release_pass", _PASS_LOCK, '"ORDER BY rule"', seeds=45
    ),
    "a pass waits for the calls that hosts have": fault(
        "ledger.ready_calls",
        "FROM {source} WHERE {where}{database.skip_locked(using)}",
        "FROM {source} WHERE {where} FOR UPDATE",
        seeds=85,
    ),
    "a pass goes by calls that it has not locked": fault(
        "ledger.ready_calls",
        "FROM {source} WHERE {where}{database.skip_locked(using)}",
        "FROM {source} WHERE {where}",
        seeds=85,
    ),
    "a record waits for the calls that hosts have": fault(
        "ledger.row_locks",
        'f"ORDER BY id{database.skip_locked(using)}",\n    )\n    if found',
        '"ORDER BY id FOR UPDATE",\n    )\n    if found',
        seeds=85,
    ),
    # --- what counts, and from when
    "open attempts are not counted": fault(
        "ledger.account",
        "self.open[budget.id, budget.value_of(found.key, found.queue)] += cost",
        "self.open[budget.id, budget.value_of(found.key, found.queue)] += 0",
        seeds=30,
    ),
    "answered attempts are not counted": fault("ledger.charges", _AGED, "pass", seeds=30),
    "attempts age from their release": Fault(
        Change("ledger.charges", _AGED, "found.append((self.released_at, cost - more))"),
        Change("ledger.account", "by_release=any(b.former for b in fine)", "by_release=True"),
        seeds=35,
    ),
    "attempts age from the instant at which they were begun to be sent": fault(
        "limits.kinds.base", "counted = sent_at + self.jitter_us", "counted = sent_at", seeds=35
    ),
    "what ends between two readings is in neither": fault(
        "ledger.account",
        "        self._read_open()\n        self._read_aged()",
        "        self._read_aged()\n        self._read_open()",
        seeds=50,
    ),
    # --- settings that differ
    "a pass goes by an agreement of the past": fault(
        "dispatch.release_pass",
        """        if any(row.agreement != book.agreement for row in rows.values()):
            return Pass(""",
        """        if False:
            return Pass(""",
        seeds=40,
    ),
    "an operator's limit is forgotten": fault(
        "limits.agreements",
        "limit = with_rate(limit, agreement.rates.get(settings_id))",
        "limit = with_rate(limit, None)",
        seeds=40,
    ),
    # --- fences
    "what a locked call becomes is forgotten": fault(
        "transitions.recording",
        "if len(locked) < len(results):",
        "if len(locked) > len(results):",
        seeds=85,
    ),
    # --- leases
    "recovery minds no lease": Fault(
        Change(
            "maintenance.recovery",
            "overdue = begun.filter(lease_until__lt=database.ClockNow())",
            "overdue = begun",
        ),
        Change("maintenance.recovery", "if lease_until is not None and lease_until < now]", "]"),
        seeds=35,
    ),
    "a lost attempt is not charged": Fault(
        Change(
            "transitions.recording",
            "from callqueue.states import FINAL, LOST, Move",
            "from callqueue.states import FINAL, VOIDED as LOST, Move",
        ),
        seeds=75,
    ),
    # --- slots, clocks, holds, telling
    "what is released ahead is sent at once": fault(
        "execution.request",
        "while (left := opens - clocks.monotonic()) > 0:",
        "while (left := opens - clocks.monotonic()) > 1e9:",
        seeds=35,
    ),
    "a jump of the clock moves nothing": fault(
        "ledger.clock_shift",
        "return _shift_open(using, jump) + _shift_answered(using, jump)",
        "return 0",
        seeds=110,
    ),
    "nobody watches the clock": fault(
        "clocks",
        "return 0 if least - slack <= went <= most + slack else went - least",
        "return 0",
        seeds=110,
    ),
    "a hold is not minded": Fault(
        Change("dispatch.choosing", "and not held.blocking(rule)\n", "and True\n"),
        Change(
            "dispatch.planning",
            "if self.held.blocking(candidate.rule, candidate.key):",
            "if False:",
        ),
        Change("dispatch.planning", "if not held.blocking(candidate.rule, None, queue)", "if True"),
        seeds=55,
    ),
    # --- permits
    "a permit begins before its slot": fault(
        "permits.waiting",
        "return 0.0 if job.begins_at is None else max(0.0, job.begins_at - now())",
        "return 0.0",
        seeds=35,
    ),
    "a permit that was not used is not charged": fault(
        "permits.ending", '"outcome": result.outcome,', '"outcome": states.VOIDED,', seeds=30
    ),
}


def put_back(name: str) -> None:
    """Put a fault into the product, which nobody has imported yet."""
    by_module: dict[str, list[Change]] = {}
    for change in FAULTS[name].changes:
        by_module.setdefault(f"callqueue.{change.module}", []).append(change)
    sys.meta_path.insert(0, _Finder(by_module))


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
