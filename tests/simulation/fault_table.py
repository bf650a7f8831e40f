"""Faults that are put back into the product, one at a time, to see that the simulation finds them.

Each is one change or several of the source of modules, made as they are imported (see
`faults.py`). `seeds`: within how many it must be found. A text that is not there exactly once any more is an error: whoever changes the line changes it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Change(NamedTuple):
    """What is changed in a module."""

    module: str
    old: str
    new: str


class Fault:
    """Changes that are made together; within how many seeds they must be found, where only seeds
    count whose scene has one of these words in its name.
    """

    def __init__(self, *changes: Change, seeds: int = 100, scenes: Sequence[str] = ("",)) -> None:
        self.changes, self.seeds, self.scenes = changes, seeds, scenes


def fault(module: str, old: str, new: str, **how: Any) -> Fault:
    """A fault of one change."""
    return Fault(Change(module, old, new), **how)


_PASS_LOCK = 'f"ORDER BY rule{database.skip_locked(using)}"'
_AGED = "found.append((limit.aged_from(self.sent_at, self.finished_at), cost - more))"

FAULTS = {
    # --- locks
    "a pass takes no locks": fault("dispatch.release_pass", _PASS_LOCK, '"ORDER BY rule"'),
    "a pass waits for the calls that hosts have": fault(
        "ledger.ready_calls",
        "FROM {source} WHERE {where}{database.skip_locked(using)}",
        "FROM {source} WHERE {where} FOR UPDATE",
    ),
    "a pass goes by calls that it has not locked": fault(
        "ledger.ready_calls",
        "FROM {source} WHERE {where}{database.skip_locked(using)}",
        "FROM {source} WHERE {where}",
    ),
    "a record waits for the calls that hosts have": fault(
        "ledger.row_locks",
        'f"ORDER BY id{database.skip_locked(using)}",\n    )\n    if found',
        '"ORDER BY id FOR UPDATE",\n    )\n    if found',
    ),
    "recovery waits for the calls that hosts have": fault(
        "ledger.row_locks",
        'database.locked(listed.defer("call_data").order_by("pk"))',
        'database.locked(listed.defer("call_data").order_by("pk"), wait=True)',
    ),
    "expiry waits for the calls that hosts have": fault(
        "transitions.moves",
        'rows = database.locked(calls.filter(pk__in=list(seen)).order_by("pk"))',
        'rows = database.locked(calls.filter(pk__in=list(seen)).order_by("pk"), wait=True)',
    ),
    # --- what counts, and from when
    "open attempts are not counted": fault(
        "ledger.account",
        "self.open[budget.id, budget.value_of(found.key, found.queue)] += cost",
        "self.open[budget.id, budget.value_of(found.key, found.queue)] += 0",
    ),
    "answered attempts are not counted": fault("ledger.charges", _AGED, "pass"),
    "attempts age from their release": Fault(
        Change("ledger.charges", _AGED, "found.append((self.released_at, cost - more))"),
        Change("ledger.account", "by_release=any(b.former for b in fine)", "by_release=True"),
    ),
    "attempts age from the instant at which they were begun to be sent": fault(
        "limits.kinds.base", "counted = sent_at + self.jitter_us", "counted = sent_at"
    ),
    "strict limits age from sending, too": fault(
        "limits.kinds.base",
        "(self.strict and finished_at is not None)",
        "(self.strict and finished_at is None)",
        seeds=400,
        scenes=["strict"],
    ),
    "what ends between two readings is in neither": fault(
        "ledger.account",
        "        self._read_open()\n        self._read_aged()",
        "        self._read_aged()\n        self._read_open()",
    ),
    "what is told of is counted no more": fault(
        "ledger.charges", "        if told is not None:\n", "        if told is None:\n"
    ),
    "an instant is taken for the earliest that it can be": fault(
        "clocks",
        "return self.at + round((instant - self.before) * 1_000_000)",
        "return self.at + round((instant - self.after) * 1_000_000)",
        seeds=400,
        scenes=["tight"],
    ),
    "a slot is taken to open as early as it can": fault(
        "clocks",
        "return self.after + (instant - self.at) / 1_000_000",
        "return self.before + (instant - self.at) / 1_000_000",
        seeds=400,
        scenes=["tight"],
    ),
    "a key that has parts is no one's": fault(
        "limits.budgets",
        'return queue if per == "queue" else key_part(key, per)',
        'return queue if per == "queue" else key',
    ),
    # --- tallies and memos
    "tallies give back too much": fault(
        "ledger.tallies",
        "cost_of(database.loaded(charged), unit) - final,",
        "cost_of(database.loaded(charged), unit) - final + 1,",
        seeds=800,
        scenes=["counted"],
    ),
    "corrections are taken again and again": fault(
        "ledger.tallies",
        "SET correction_pending = FALSE",
        "SET correction_pending = TRUE",
        seeds=400,
        scenes=["counted"],
    ),
    "a memo is believed, whoever had the last pass": fault(
        "ledger.memo",
        """            stored.get("version") != version
            or set(kept) != set(group)
            or any(memo.get("group") != own for _, memo in kept.values())
""",
        "            not stored.get('group')\n",
        seeds=800,
        scenes=["linked"],
    ),
    "another limit's tally is believed": Fault(
        Change(
            "ledger.window_tallies",
            'if kept is None or kept["print"] != self.print:',
            "if kept is None:",
        ),
        Change(
            "ledger.memo",
            'or any(memo.get("group") != own for _, memo in kept.values())',
            "",
        ),
        seeds=800,
        scenes=["linked"],
    ),
    # --- settings that differ
    "each dispenser goes by its own settings": fault(
        "limits.agreements",
        "[mine, *(opinion for other, opinion in opinions.items() if other != digest)], agreement",
        "[mine], agreement",
    ),
    "a pass goes by an agreement of the past": fault(
        "dispatch.release_pass",
        """        if any(row.agreement != book.agreement for row in rows.values()):
            return Pass(""",
        """        if False:
            return Pass(""",
    ),
    "an operator's limit is forgotten": fault(
        "limits.agreements",
        "limit = with_rate(limit, agreement.rates.get(settings_id))",
        "limit = with_rate(limit, None)",
    ),
    # --- fences
    "whatever a message names is begun": fault(
        "execution.claim",
        "CASE WHEN (a.started_at IS NULL OR a.worker = %s)",
        "CASE WHEN (TRUE OR a.worker = %s)",
    ),
    "what was begun is voided": fault(
        "ledger.row_locks",
        "if one.finished_at is None and (one.started_at is not None) == begun",
        "if one.finished_at is None",
    ),
    "what was begun is cancelled": fault(
        "ledger.row_locks", "if started is None and finished is None", "if finished is None"
    ),
    "what is out is requeued": fault(
        "transitions.moves",
        "for pk, unique_key, status in found if status in move.sources]",
        "for pk, unique_key, status in found]",
    ),
    "what is out expires": Fault(
        Change(
            "maintenance.recovery",
            "tables.calls(using).waiting().filter(expires_at_dt__lte",
            "tables.calls(using).filter(finished_at_dt=None, expires_at_dt__lte",
        ),
        Change("transitions.moves", "if status in move.sources and value ==", "if value =="),
    ),
    "what a locked call becomes is forgotten": fault(
        "transitions.recording", "if len(locked) < len(results):", "if len(locked) > len(results):"
    ),
    "an attempt that is another's is recorded": fault(
        "transitions.recording",
        '"t.finished_at IS NULL AND t.worker = v.v1"',
        '"t.worker IS NOT NULL"',
    ),
    # --- leases
    "a worker sends after its lease": fault(
        "execution.request",
        "        if left <= 0:\n",
        "        left = 1e9\n        if left <= 0:\n",
    ),
    "recovery minds no lease": Fault(
        Change(
            "maintenance.recovery",
            "overdue = begun.filter(lease_until__lt=database.ClockNow())",
            "overdue = begun",
        ),
        Change("maintenance.recovery", "if lease_until is not None and lease_until < now]", "]"),
    ),
    "a lost attempt is not charged": Fault(
        Change(
            "transitions.recording",
            "from callqueue.states import FINAL, LOST, Move",
            "from callqueue.states import FINAL, VOIDED as LOST, Move",
        ),
    ),
    "no answer is taken for nothing sent": fault(
        "execution.request",
        "return judging.lost(job, why) if gate.sent_at is not None",
        "return transitions.after_void(job, why) if gate.sent_at is not None",
    ),
    # --- slots, clocks, holds, telling
    "what is released ahead is sent at once": fault(
        "execution.request",
        "while (left := opens - clocks.monotonic()) > 0:",
        "while (left := opens - clocks.monotonic()) > 1e9:",
    ),
    "a jump of the clock moves nothing": fault(
        "ledger.clock_shift",
        "return _shift_open(using, jump) + _shift_answered(using, jump)",
        "return 0",
    ),
    "nobody watches the clock": fault(
        "clocks",
        "return 0 if least - slack <= went <= most + slack else went - least",
        "return 0",
    ),
    "a reading in passing swallows a jump": fault(
        "ledger.clock_jumps",
        "return reading if jumped else self._keep(reading), self.steady_from",
        "self._suspicious &= not jumped\n            return self._keep(reading), self.steady_from",
    ),
    "a hold gets shorter": fault(
        "ledger.holds",
        "(shorter.filter(until__lt=until) if until is not None else shorter).update(",
        "shorter.update(",
    ),
    "a hold is not minded": fault(
        "dispatch.choosing", "and not held.blocking(rule)\n", "and True\n"
    ),
    "what is told of is not sent yet": Fault(
        Change("execution.telling", "if sent is None or now - sent < SLOW:", "if False:"),
        Change("execution.telling", "sent = gate.sent_at\n", "sent = gate.sent_at or now\n"),
        Change("execution.telling", "or not gate.is_whole:", "or False:"),
    ),
    "what has not arrived is told of": fault(
        "execution.telling",
        "job.arrived = None if not has_arrived else now if job.is_late else sent",
        "job.arrived = sent - 0.1",
    ),
    "a key that is held goes all the same": fault(
        "ledger.holds",
        'return self.per not in ("rule", "queue") and',
        "return False and",
        seeds=400,
        scenes=["keys"],
    ),
    "what answers tell of limits is not heard": fault(
        "execution.judging", "if result.hold is None:", "if False:"
    ),
    "a calendar window ends at once for all clocks": fault(
        "limits.kinds.fixed_window",
        "if at >= first - self._jitter",
        "if at >= first",
        seeds=400,
        scenes=["calendar"],
    ),
    # --- answers
    "an answer spoils those beside it": Fault(
        Change(
            "execution.recorder", "return _record_apart(using, ended, error, announce)", "raise"
        ),
        Change("texts", "codec = charset(label)\n", "codec = label or 'utf-8'\n"),
    ),
    # --- permits
    "a permit begins before its slot": fault(
        "permits.begun",
        "return 0.0 if job.begins_at is None else max(0.0, job.begins_at - now())",
        "return 0.0",
    ),
    "a permit that was not used is not charged": fault(
        "permits.ending", '"outcome": result.outcome,', '"outcome": states.VOIDED,'
    ),
    "a permit's turn is taken up though it was taken back": fault(
        "permits.request_rows",
        "filter(pk=attempt_id, worker=owner).unbegun()",
        "filter(pk=attempt_id, worker=owner)",
    ),
    "a permit waits for dispensers with the settings of its process": fault(
        "ledger.agreement",
        "return book if book.agreement else replace(book, agreement=_books[using][0])",
        "return book",
    ),
    "a waiter whose row is gone waits on": fault(
        "permits.request_rows", "or row.exists()", "or True"
    ),
}
