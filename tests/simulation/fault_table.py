"""Faults that are put back into the product, one at a time, to see that the simulation finds them.

Each is one change or several of the source of modules, made as they are imported (see
`faults.py`). `runs`: within how many long runs it must be found. A text that is not there exactly
once any more is an error: whoever changes the line changes it here.
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
    """Changes that are made together; within how many long runs they must be found, where only
    those are made whose scene has one of these words in its name.
    """

    def __init__(self, *changes: Change, runs: int = 100, scenes: Sequence[str] = ("",)) -> None:
        self.changes, self.runs, self.scenes = changes, runs, scenes


def fault(module: str, old: str, new: str, **how: Any) -> Fault:
    """A fault of one change."""
    return Fault(Change(module, old, new), **how)


_PASS_LOCK = 'f"ORDER BY rule{database.skip_locked(using)}"'
_AGED = "found.append((limit.aged_from(self.sent_at, self.finished_at), cost - more))"

FAULTS = {
    "a pass takes no locks": fault("dispatch.release_pass", _PASS_LOCK, '"ORDER BY rule"'),
    "a pass waits for the calls that hosts have": fault(
        "ledger.ready_calls",
        'locking = database.skip_locked(using) if locks else ""',
        'locking = " FOR UPDATE" if locks else ""',
    ),
    "a pass goes by calls that it has not locked": fault(
        "ledger.ready_calls",
        'locking = database.skip_locked(using) if locks else ""',
        'locking = ""',
    ),
    "a record waits for the calls that hosts have": fault(
        "ledger.transaction",
        'f"ORDER BY id{database.skip_locked(using)}",\n    )\n    if found',
        '"ORDER BY id FOR UPDATE",\n    )\n    if found',
    ),
    "recovery waits for the calls that hosts have": fault(
        "ledger.transaction",
        'database.locked(listed.defer("call_data").order_by("pk"))',
        'database.locked(listed.defer("call_data").order_by("pk"), wait=True)',
    ),
    "open attempts are not counted": fault(
        "ledger.account",
        "self.open[scope] += int(calls or 0) if each is None else each * count",
        "self.open[scope] += 0",
    ),
    "answered attempts are not counted": fault("ledger.account", _AGED, "pass"),
    "attempts age from their release": Fault(
        Change("ledger.account", _AGED, "found.append((self.released_at, cost - more))"),
        Change("ledger.account", "by_release=any(b.former for b in fine)", "by_release=True"),
    ),
    "attempts age from the instant at which they were begun to be sent": fault(
        "limits.kinds.base", "counted = sent_at + self.jitter_us", "counted = sent_at"
    ),
    "strict limits age from sending, too": fault(
        "limits.kinds.base",
        "(self.strict and finished_at is not None)",
        "(self.strict and finished_at is None)",
        runs=200,
        scenes=["strict"],
    ),
    "what ends between two readings is in neither": fault(
        "ledger.account",
        "        self._read_open()\n        self._read_aged()",
        "        self._read_aged()\n        self._read_open()",
    ),
    "what is told of is counted no more": fault(
        "ledger.account", "        if told is not None:\n", "        if told is None:\n"
    ),
    "a key that has parts is no one's": fault(
        "limits.budgets",
        'return queue if per == "queue" else key_part(key, per)',
        'return queue if per == "queue" else key',
    ),
    "a pass goes by settings of the past": Fault(
        Change("dispatch.release_pass", "if found[0][2] != book.version:", "if False:"),
        Change("dispatch.release_pass", "    if fresh and not changed_rows:", "    if False:"),
    ),
    "an operator's limit is forgotten": fault(
        "limits.in_force",
        "limit = with_rate(limit, stated.rates.get(settings_id))",
        "limit = with_rate(limit, None)",
    ),
    "opinions are not stated": fault(
        "ledger.settings",
        "comes = {} if digest in before.opinions else {digest: opinion}",
        "comes: dict[str, Opinion] = {}",
    ),
    "what a locked call becomes is forgotten": fault(
        "transitions.verbs", "    if others:\n", "    if False:\n"
    ),
    "recovery minds no lease": Fault(
        Change(
            "maintenance.recovery",
            "overdue = begun.filter(lease_until__lt=LedgerNow())",
            "overdue = begun",
        ),
        Change("maintenance.recovery", "if lease_until is not None and lease_until < now]", "]"),
    ),
    "a lost attempt is not charged": Fault(
        Change(
            "transitions.verbs",
            "from callqueue.states import FINAL, LOST, Move",
            "from callqueue.states import FINAL, VOIDED as LOST, Move",
        ),
    ),
    "what is released ahead is sent at once": fault(
        "execution.request",
        "while (left := opens - clocks.monotonic()) > 0:",
        "while (left := opens - clocks.monotonic()) > 1e9:",
    ),
    "a jump of the clock moves nothing": fault(
        "ledger.ledger_time",
        "by = self._unfollowed(last, reading)",
        "by = 0",
    ),
    "nobody watches the clock": fault(
        "clocks",
        "return 0 if least - slack <= went <= most + slack else went - least",
        "return 0",
    ),
    "a hold is not minded": fault(
        "ledger.holds", "for hold in self.by_rule.get(rule, ()):", "for hold in ():"
    ),
    "a permit begins before its slot": fault(
        "permits.waiting", "return max(0.0, self._slot_at - now())", "return 0.0"
    ),
    "a permit that was not used is not charged": fault(
        "permits.granted", "ended_at=None,", "ended_at=None, outcome=states.VOIDED,"
    ),
    "expiry waits for the calls that hosts have": fault(
        "transitions.verbs",
        'rows = database.locked(calls.filter(pk__in=list(seen)).order_by("pk"))',
        'rows = database.locked(calls.filter(pk__in=list(seen)).order_by("pk"), wait=True)',
    ),
    "each dispenser goes by its own settings": fault(
        "limits.in_force",
        "[mine, *(self.opinions[d] for d in self.opinions if d != digest)], self",
        "[mine], self",
    ),
    "whatever a message names is begun": Fault(
        Change(
            "execution.claim",
            'is_free = row["a.started_at"] is None or row["a.worker"] == worker',
            "is_free = True",
        ),
        Change(
            "transitions.verbs",
            '"(t.started_at IS NULL OR t.worker = %s) AND',
            '"(TRUE OR t.worker = %s) AND',
        ),
    ),
    "what was begun is voided": fault(
        "ledger.transaction",
        "if one.finished_at is None and (one.started_at is not None) == begun",
        "if one.finished_at is None",
    ),
    "what has not arrived is told of": fault(
        "execution.telling",
        "gate.arrived = None if not has_arrived else now if gate.is_late else sent",
        "gate.arrived = sent - 0.1",
    ),
    "a key that is held goes all the same": fault(
        "ledger.holds",
        'return self.per not in ("rule", "queue") and',
        "return False and",
        scenes=["keys"],
    ),
    "what refuses holds nothing": fault(
        "execution.judging", "    result.hold = hold\n", "    result.hold = None\n"
    ),
    "who records judges by settings of his own what is tallied": Fault(
        Change(
            "execution.recorder",
            "        for one, own in zip(results, attempts, strict=True)\n    ]\n    if not any",
            "        if _is_tallied(one.job) else {}\n"
            "        for one, own in zip(results, attempts, strict=True)\n    ]\n    if not any",
        ),
        Change(
            "execution.recorder",
            "def correction(",
            """def _is_tallied(job: Any) -> bool:
    from callqueue import conf
    from callqueue.ledger.tallies import is_tallied

    budgets = conf.current().book.budgets.get(job.call.rule, ())
    return any(is_tallied(budget.limit) for budget in budgets)


def correction(""",
        ),
        scenes=["crossed", "limited"],
    ),
    "a forecast counts each wait twice": fault(
        "forecast",
        "+ timedelta(seconds=seconds)",
        "+ timedelta(seconds=2 * seconds)",
    ),
    "rules' priorities are not minded": fault(
        "dispatch.planning",
        "key=lambda name: (-rules[name].priority, turn[name], name)",
        "key=lambda name: (turn[name], name)",
        scenes=["shared"],
    ),
    "answers are not looked for": fault(
        "dispatch.next_look",
        "        on_answer=wait.on_answer,\n",
        "        on_answer=False,\n",
        scenes=["once"],
    ),
    "a bucket fills beyond its size": fault(
        "limits.kinds.token_bucket",
        "level = min(cap, level + self.n * max(0, leave - at)) - taken * self.period_us",
        "level = level + self.n * max(0, leave - at) - taken * self.period_us",
        scenes=["bucket"],
    ),
    "whatever it costs, it is one call": fault(
        "dispatch.release_pass",
        '"calls": cost_of(call.cost, "calls"),',
        '"calls": 1,',
        scenes=["mixed"],
    ),
    "a calendar's tally is never new": fault(
        "ledger.tallies", "return known.left == self.horizon()", "return True", scenes=["quota"]
    ),
    "what has left leaves again": fault(
        "ledger.tallies",
        "self.kept.left = max(begin, end)",
        "self.kept.left = begin",
        scenes=["tallied"],
    ),
    "keys are not woken by other limits": fault(
        "dispatch.turns",
        "            ready_calls.wake_all(self.using, self.account.rules)\n",
        "            pass\n",
        scenes=["parts"],
    ),
    "a bucket's level is kept of now": fault(
        "ledger.memo",
        "    if oldest_open > usage.since:\n",
        "    oldest_open = now\n    if oldest_open > usage.since:\n",
        scenes=["bucket"],
    ),
    "what opens is looked at at the next review": fault(
        "dispatch.next_look",
        "after=REVIEW if opens_in is None else min(REVIEW, opens_in)",
        "after=REVIEW",
        runs=200,
        scenes=["window"],
    ),
    "answers wake no key": fault(
        "dispatch.turns",
        "return freed | {ready_calls.waits_for_answer(scope) for scope in account.answered()}",
        "return freed",
        runs=200,
        scenes=["mixed"],
    ),
    "a tallied bucket is full again at once": fault(
        "ledger.tallies",
        "        self._lower(value, ended, cost)\n        self.change(value, -cost)",
        "        self.change(value, -cost)",
        runs=200,
        scenes=["mixed"],
    ),
    "of two variants of a limit the last holds": fault(
        "limits.in_force",
        "joint.variants[digest_of(as_data(limit))] = limit",
        "joint.variants = {digest_of(as_data(limit)): limit}",
        runs=200,
        scenes=["calendar"],
    ),
    "what is in flight takes no room": fault(
        "maker", "return Room(most - http,", "return Room(most,"
    ),
    "a pass fills the room again and again": fault(
        "dispatch.planning",
        "self._count[candidate.method in HTTP_METHODS] += 1",
        "self._count[candidate.method in HTTP_METHODS] += 0",
    ),
    "nobody is said to have begun": fault(
        "dispatch.release_pass", '"started_at": now if worker else None,', '"started_at": None,'
    ),
    "a slot is looked at once it has opened": fault(
        "dispatch.release_pass", "/ 1_000_000 - LEAD / 2)", "/ 1_000_000 + LEAD)"
    ),
    "tokens are read as calls beside calls": fault(
        "ledger.account",
        'by_units=any(b.limit.unit != "calls" for b in fine)',
        'by_units=all(b.limit.unit != "calls" for b in fine)',
        scenes=["both"],
    ),
    "a rate raises no version": fault(
        "ledger.settings",
        "_raise_version(using, before.version, ledger_time.now(using), rates=rates)",
        "tables.settings(using).update(rates=rates)",
    ),
    "a calendar goes by ledger time": fault(
        "dispatch.release_pass",
        "    book = book.moved_by(reading.moved)\n",
        "",
        scenes=["calendar", "quota"],
    ),
    "keys' calls expire by ledger time": fault(
        "dispatch.turns",
        "self.wall = from_us(account.now + account.moved)",
        "self.wall = from_us(account.now)",
    ),
    "one attempt more than the rule has": fault(
        "transitions.ends",
        "failed >= rule.retry.max_attempts",
        "failed > rule.retry.max_attempts",
        runs=200,
        scenes=["settled"],
    ),
    "what is taken of known room is not taken off": fault(
        "ledger.memo", "left - charged.get(name, 0)", "left", scenes=["window", "two"]
    ),
    "a rate takes the others back": fault(
        "ledger.settings",
        "rates = {name: old for name, old in before.rates.items() if name != limit}",
        "rates: dict[str, str] = {}",
        scenes=["two", "keys", "shared"],
    ),
    "corrections come before the tallies": fault(
        "ledger.account",
        "        self.tallies = {one.budget.id: one for one in found}\n"
        "        if has_corrections:\n"
        "            take_corrections(self.using, self.rules, self.tallies.values())\n",
        "        if has_corrections:\n"
        "            take_corrections(self.using, self.rules, self.tallies.values())\n"
        "        self.tallies = {one.budget.id: one for one in found}\n",
        scenes=["counted", "both"],
    ),
    "of two waits the later is waited for": fault(
        "dispatch.next_look", "min(instants, default=None),", "max(instants, default=None),"
    ),
    "room is not waited for": fault(
        "dispatch.next_look", "        on_room=wait.on_room,\n", "        on_room=False,\n"
    ),
    "a maker ends with calls on the wire": fault("maker", "            in_flight.land()\n", ""),
    "what is composed is sent before it is committed": fault(
        "execution.request",
        "if self._job.clearance is not None and not self._job.clearance.wait():",
        "if False:",
    ),
    "a permit gives no news of its key": fault(
        "dispatch.release_pass",
        "if own is not None and own.maker.is_new:",
        "if own is not None and not own.maker.is_new:",
        scenes=["keys", "parts"],
    ),
    "news is forgotten untaken": fault(
        "ledger.ready_calls",
        "        if (rule, priority, key) not in known\n",
        "        if (rule, priority, key) not in known and known\n",
        scenes=["keys", "parts"],
    ),
    "a key that was served is the first again": fault(
        "dispatch.turns",
        "served = {self._turns[place].pk: self.now + 1 for place in in_turn}",
        "served = {self._turns[place].pk: 0 for place in in_turn}",
        scenes=["keys", "parts"],
    ),
    "what is not begun is voided at once": fault(
        "maintenance.recovery",
        "overdue = tables.attempts(using).unbegun().filter(lease_until__lt=LedgerNow())",
        "overdue = tables.attempts(using).unbegun()",
    ),
    "a call is charged to the first of its limits": fault(
        "dispatch.planning",
        "for meter, cost in way.charges:",
        "for meter, cost in way.charges[:1]:",
        scenes=["shared", "linked"],
    ),
    "what is born begun has the lease of a message": fault(
        "dispatch.release_pass",
        "config.lease(rule) if own is None",
        "config.release_lease / 3 if own is None",
    ),
    "a hold is laid by the wall": fault(
        "ledger.holds",
        "until = None if lasts is None else locked.now + lasts",
        "until = None if lasts is None else locked.wall + lasts",
        runs=250,
    ),
    "an answer that gives back is not waited for": fault(
        "dispatch.planning",
        "self.made.wait |= Wait(on_answer=self._may_be_given_back(budget))",
        "pass",
        scenes=["counted"],
    ),
    "a permit's lease is a message's": fault(
        "dispatch.release_pass", "else own.maker.lease", "else config.release_lease / 3"
    ),
}
