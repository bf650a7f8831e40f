"""The rows of rules that passes lock: how they are made, and locked where others may have them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from callqueue import clocks, database, tables
from callqueue.clocks import Reading
from callqueue.ledger import clock_jumps
from callqueue.states import Move

if TYPE_CHECKING:
    from callqueue.models import CallAttempt, CallQueue

# Rows that are no rule's, since no rule has these names: the one in which the clock's jumps are
# written down (`passes`: how many, `served`: their sum), and the one of the attempts that are still
# to be moved along (`memo`: by rule).
FRAME, MOVING = "\njumps", "\nmoving"
OF_NO_RULE = (FRAME, MOVING)


def ensure(using: str, rules: Collection[str]) -> None:
    """Make the row of every rule that has none yet."""
    states = tables.rule_states(using)
    missing = set(rules) - set(states.filter(rule__in=rules).values_list("rule", flat=True))
    if missing:
        made = [tables.RuleState(rule=rule) for rule in sorted(missing)]
        states.bulk_create(made, ignore_conflicts=True)


def memos(using: str, rules: Collection[str]) -> dict[str, tuple[int, dict[str, Any]]]:
    """What passes remember of each rule: their count, and their memo. One statement."""
    stored = tables.rule_states(using).filter(rule__in=rules).values_list("rule", "passes", "memo")
    return {rule: (passes, memo or {}) for rule, passes, memo in stored}


@dataclass(frozen=True)
class Pair:
    """An attempt and its call, locked. None: the call is gone, or waits for another attempt."""

    attempt: CallAttempt
    call: CallQueue | None


def calls_to_change(using: str, pks: Iterable[int], *columns: str) -> list[Any]:
    """Lock these calls, waiting for whoever has them; their primary keys and these columns. To be
    called in a transaction.
    """
    rows = tables.calls(using).filter(pk__in=list(pks)).order_by("pk")
    return list(database.locked(rows, wait=True).values_list("pk", *columns))


def unbegun_of(using: str, call_ids: Iterable[int]) -> list[tuple[int, int, int]]:
    """Lock what no worker has begun of calls that are locked already: (attempt, call, number).

    A begin that is under way is waited for.
    """
    unbegun = tables.attempts(using).unbegun().filter(call_id__in=list(call_ids))
    pks = list(unbegun.values_list("pk", flat=True))
    rows = database.locked(tables.attempts(using).filter(pk__in=pks).order_by("pk"), wait=True)
    found = rows.values_list("pk", "call_id", "number", "started_at", "finished_at")
    return [
        (pk, call, number)
        for pk, call, number, started, finished in found
        if started is None and finished is None
    ]


def calls_to_end(using: str, pks: Sequence[int]) -> tuple[dict[int, tuple[int, int]], Reading]:
    """Lock these calls, those that nobody else has locked: by primary key (status, last attempt);
    and the clock, as `clock_jumps.held` reads it. One statement, where any of them is free.

    To be called in a transaction.
    """
    before = clocks.monotonic()
    found = database.rows(
        using,
        "SELECT id, status, last_attempt, "
        f"{clock_jumps.moved_sql(using, held=True)}, {database.clock_sql(using)} "
        f"FROM {tables.name(using, 'CallQueue')} WHERE id IN ({database.listed(pks)}) "
        f"ORDER BY id{database.skip_locked(using)}",
    )
    if found:
        moved, shown = found[0][3:]
        reading = clock_jumps.brought_held(using, before, shown, moved)
    else:
        reading = clock_jumps.held(using)
    return {pk: (status, last_attempt) for pk, status, last_attempt, _, _ in found}, reading


def free_pairs(using: str, attempt_ids: Iterable[int], *, begun: bool) -> list[Pair]:
    """Lock these attempts, those that are open and begun or not, with their calls: the pairs of
    which nobody has locked either.

    To be called in a transaction.
    """
    rows = database.locked(tables.attempts(using).filter(pk__in=list(attempt_ids)).order_by("pk"))
    found = [
        one for one in rows if one.finished_at is None and (one.started_at is not None) == begun
    ]
    wanted = {attempt.call_id for attempt in found if attempt.call_id is not None}
    calls, busy = _free_calls(using, wanted) if wanted else ({}, set())
    return [
        Pair(attempt, _own(attempt, calls.get(attempt.call_id or 0)))
        for attempt in found
        if attempt.call_id not in busy
    ]


def _free_calls(using: str, pks: set[int]) -> tuple[dict[int, CallQueue], set[int]]:
    """Lock these calls that nobody else has locked, by key; and the keys of the others."""
    listed = tables.calls(using).filter(pk__in=pks)
    free = {call.pk: call for call in database.locked(listed.defer("call_data").order_by("pk"))}
    away = pks - free.keys()
    busy = set(listed.filter(pk__in=away).values_list("pk", flat=True)) if away else set()
    return free, busy


def _own(attempt: CallAttempt, call: CallQueue | None) -> CallQueue | None:
    """The call, where this attempt is the one that it waits for."""
    if call is None or call.last_attempt != attempt.number:
        return None
    return call if call.status in Move.VOID.sources else None
