"""Faults that no seed was seen to find yet, in up to 150 long runs: `python -m tests.simulation --fault
NAME --until-found` looks for one. What is found goes into `fault_table.py`; what known room forgets
is found by tests/db/dispatch/test_known_room.py. "Former rules may be at it" needs an open pass of
a process that takes permits while the last dispenser with its settings leaves: no run draws that.
"""

from __future__ import annotations

from tests.simulation.fault_table import Change, Fault, fault

UNSEEN = {
    "ledger time that was late is put forward": fault(
        "ledger.ledger_time", "if by >= 0 or (by < -MISSED and seen < 0 and is_fresh):", "if True:"
    ),
    "who has just begun writes what counts": fault(
        "ledger.ledger_time", " and not found.settles_in()", ""
    ),
    "what is recorded after its window stays in the tallies": fault(
        "execution.recorder",
        "LATE = timedelta(seconds=0.5)",
        "LATE = timedelta(days=1)",
        scenes=["crossed"],
    ),
    "a slot is taken to open as early as it can": fault(
        "clocks",
        "return self.after + (instant - self.at) / 1_000_000",
        "return self.before + (instant - self.at) / 1_000_000",
        runs=200,
        scenes=["tight"],
    ),
    "tallies give back too much": fault(
        "ledger.tallies",
        "self.change(value, cost - charged)",
        "self.change(value, cost - charged - 1)",
        runs=400,
        scenes=["counted"],
    ),
    "a memo is believed, whoever had the last pass": fault(
        "ledger.memo",
        """            stored.get("version") != version
            or set(kept) != set(group)
            or any(memo.get("group") != own for _, memo in kept.values())
""",
        "            not stored.get('group')\n",
        runs=400,
        scenes=["linked"],
    ),
    "another limit's tally is believed": Fault(
        Change(
            "ledger.tallies",
            'if kept is None or kept["print"] != self.print:',
            "if kept is None:",
        ),
        Change(
            "ledger.memo",
            'or any(memo.get("group") != own for _, memo in kept.values())',
            "",
        ),
        runs=400,
        scenes=["linked"],
    ),
    "what was begun is cancelled": fault(
        "ledger.transaction", "if started is None and finished is None", "if finished is None"
    ),
    "what is out is requeued": fault(
        "transitions.verbs",
        "if status in move.sources and method != states.PERMIT",
        "if method != states.PERMIT",
    ),
    "what is out expires": Fault(
        Change(
            "maintenance.recovery",
            "tables.calls(using).waiting().filter(expires_at_dt__lte",
            "tables.calls(using).filter(finished_at_dt=None, expires_at_dt__lte",
        ),
        Change("transitions.verbs", "if status in move.sources and value ==", "if value =="),
    ),
    "an attempt that is another's is recorded": fault(
        "transitions.verbs",
        'rows, is_open, unchanged="worker")',
        'rows, "t.worker IS NOT NULL")',
    ),
    "a worker sends after its lease": fault(
        "execution.request",
        "        if left <= 0:\n",
        "        left = 1e9\n        if left <= 0:\n",
    ),
    "no answer is taken for nothing sent": fault(
        "execution.request",
        "return judging.lost(job, why) if gate.sent_at is not None",
        "return transitions.after_void(job, why) if gate.sent_at is not None",
    ),
    "a reading in passing swallows a jump": fault(
        "ledger.ledger_time",
        "return reading if jumped else self._keep(reading), self.steady_from",
        "self._suspicious &= not jumped\n            return self._keep(reading), self.steady_from",
    ),
    "a hold gets shorter": fault(
        "ledger.holds",
        "(shorter.filter(until__lt=until) if until is not None else shorter).update(",
        "shorter.update(",
    ),
    "what is told of is not sent yet": Fault(
        Change("execution.telling", "if sent is None or now - sent < SLOW:", "if False:"),
        Change("execution.telling", "sent = gate.sent_at\n", "sent = gate.sent_at or now\n"),
        Change("execution.telling", "or not gate.is_whole:", "or False:"),
    ),
    "a calendar window ends at once for all clocks": fault(
        "limits.kinds.windows",
        "if at >= first - self._jitter",
        "if at >= first",
        runs=200,
        scenes=["calendar"],
    ),
    "an answer spoils those beside it": Fault(
        Change("execution.recorder", "return _record_apart(using, ended, error)", "raise"),
        Change("texts", "codec = charset(label)\n", "codec = label or 'utf-8'\n"),
    ),
    "a waiter whose permit has expired gives up": fault(
        "permits.waiting", "seen is None or seen.status == states.EXPIRED", "seen is None"
    ),
    "a permit whose pass was not heard of is asked for anew": fault(
        "permits.waiting", "if self._is_passing and self.pk is None:", "if False:"
    ),
    "a permit that was lost is retried": fault(
        "transitions.ends",
        'on_lost = "unknown" if method == states.PERMIT',
        'on_lost = "retry" if False',
    ),
    "workers are sent what has its maker": fault(
        "dispatch.release_pass",
        "return [call for call in releases if not call.has_maker]",
        "return list(releases)",
    ),
    "an instant is taken for the earliest that it can be": fault(
        "clocks",
        "return self.at + round((instant - self.before) * 1_000_000)",
        "return self.at + round((instant - self.after) * 1_000_000)",
        runs=200,
        scenes=["tight"],
    ),
    "corrections are taken again and again": fault(
        "ledger.tally_rows",
        "SET correction_pending = FALSE",
        "SET correction_pending = TRUE",
        runs=200,
        scenes=["counted"],
    ),
    "a permit waits for dispensers with the settings of its process": fault(
        "permits.waiting",
        "party.brought_up(conf.current().book, is_outdated=self._is_outdated)",
        "party.book or party.brought_up(conf.current().book, is_outdated=False)",
    ),
    # Looked for in a handful of long runs yet, chosen by their scenes.
    "open attempts of former rules are not counted": fault(
        "ledger.account", "else formers[place - 1] in budget.former", "else False"
    ),
    "what an answer adds ages from its sending": fault(
        "ledger.account",
        "found = [(self.finished_at, more)] if more else []",
        "found = [(self.sent_at or self.finished_at, more)] if more else []",
    ),
    "the last key that waits says when": fault(
        "ledger.ready_calls", "SELECT MIN(blocked_until)", "SELECT MAX(blocked_until)"
    ),
    "a hold on one queue is on all": fault(
        "ledger.holds", "queue is not None and hold.value == queue", "queue is not None"
    ),
    "a lease that was written by the wrong time stays": fault(
        "ledger.ledger_time", '.open(), "started_at", "lease_until")', '.none(), "started_at")'
    ),
    "the loss of an older attempt ends a call": fault(
        "ledger.transaction",
        "if call is None or call.last_attempt != attempt.number:",
        "if call is None:",
    ),
    "an answered attempt ages from the later instant": fault(
        "limits.kinds.base",
        "finished_at is None else min(finished_at, counted)",
        "finished_at is None else max(finished_at, counted)",
    ),
    "a calendar window's horizon has no jitter": fault(
        "limits.kinds.windows",
        "return self.window(now - self.jitter_us)[0] - self.jitter_us",
        "return self.window(now)[0] - self.jitter_us",
    ),
    "a window waits for one more than it needs": Fault(
        Change(
            "limits.kinds.windows",
            "from bisect import bisect_left",
            "from bisect import bisect_right",
        ),
        Change(
            "limits.kinds.windows",
            "last = self._instants[bisect_left(self._leaving, excess)]",
            "last = self._instants[min(len(self._leaving) - 1, bisect_right(self._leaving, excess))]",
        ),
    ),
    "a changed limit waits for nobody": fault(
        "ledger.settings",
        "    while busy and time.monotonic() < end:\n",
        "    while False:\n",
    ),
    "a call that waits keeps nobody back": fault(
        "dispatch.planning", "is_shut = (budget.id, value) in self._shut", "is_shut = False"
    ),
    "what is planned is charged, whether it goes or not": fault(
        "ledger.tallies", ".planned += cost", ".used += cost"
    ),
    "begin minds no jump": fault(
        "transitions.verbs",
        "AND COALESCE({moved_sql(using, held=True)}, 0) = %s",
        "AND %s IS NOT NULL",
    ),
    "a correction of a correction": fault(
        "permits.granted",
        'believed = known["charged"] if known["correction_pending"] else known["cost"]',
        'believed = known["cost"]',
    ),
    "who gives up keeps what was granted": fault(
        "permits.waiting", " or transitions.cancel(self.using, [pk])", ""
    ),
    "permits are granted to the dead": fault(
        "ledger.ready_calls",
        "(expires_at_dt IS NULL OR expires_at_dt > %s)",
        "(expires_at_dt IS NULL OR %s IS NOT NULL)",
    ),
    # Looked for in a handful of runs yet, chosen by their scenes.
    "a group is locked in part": fault(
        "dispatch.release_pass",
        "    if len(found) < len(group):\n",
        "    if not found:\n",
        scenes=["linked", "shared"],
    ),
    "former rules may be at it": fault(
        "dispatch.release_pass",
        "if former and not rule_rows.are_free(using, former):",
        "if False:",
        scenes=["linked", "shared"],
    ),
    "what is begun and was not heard of is left": fault(
        "dispatch.dispenser", 'group.unmade = begins.worker if begins is not None else ""', ""
    ),
    "after a sleep the others are silent": fault(
        "ledger.settings",
        "known = self._signs if moment - self._looked_at < GAP else {}",
        "known = self._signs",
    ),
    "a retry is due by the clock of its begin": fault(
        "transitions.verbs",
        "moved = timedelta(microseconds=reading.moved - result.job.clock.moved)",
        "moved = timedelta(0)",
    ),
    "retries stay where a clock was that is set back": fault(
        "ledger.ledger_time", "        _bring_back(using, jump, reading)\n", "        pass\n"
    ),
}
