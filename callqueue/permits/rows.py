"""A permit's row among the calls, while it waits: inserted, kept alive, looked at, forgotten.

A row is its waiter's alone: passes charge it as they charge a call, and its waiter, which looks at
it, begins it then. A waiter that dies says no more that it lives, and its row expires.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from callqueue import database, states, tables
from callqueue.ledger.transaction import untimed
from callqueue.permits.asking import Wanted

MANY = 64  # permits before one that are counted


class Seen(NamedTuple):
    """What a look has found. `attempt_id`: what it was charged as, if it was; `ahead`: the permits
    that go before it, MANY at most.
    """

    status: int
    why: str
    attempt_id: int | None
    ahead: int


def insert(
    using: str, wanted: Wanted, identity: UUID, due_at: datetime, expires_at: datetime
) -> int:
    """Have a permit wait; its row's primary key."""
    columns = {
        "rule": wanted.rule_name,
        "key": wanted.key,
        "priority": wanted.priority,
        "cost": wanted.cost,
        "method": states.PERMIT,
        "call_data": {"method": states.PERMIT, "params": {"label": wanted.label}},
        "path": wanted.shown_label,
        "idempotency_key": identity,
        "due_at_dt": due_at,
        "expires_at_dt": expires_at,
        "ready": True,
    }
    row = database.new_object(tables.CallQueue, columns)
    database.insert_objects(tables.CallQueue, using, [row], batch_size=1)
    pk = row.pk or find(using, identity)  # MySQL does not tell it
    assert pk is not None
    return pk


def keep_alive(using: str, pk: int, until: datetime) -> bool:
    """Say that the waiter lives; whether its permit still waits, and nobody has locked it."""
    said = [{"pk": pk, "expires_at_dt": until}]
    waits = f"t.status IN ({database.listed(states.WAITING)})"
    return bool(database.update_free(tables.CallQueue, using, said, waits))


def find(using: str, identity: UUID) -> int | None:
    """The row that was inserted, though its inserter may not know."""
    rows = tables.calls(using).filter(idempotency_key=identity, method=states.PERMIT)
    return rows.values_list("pk", flat=True).first()


def look(using: str, pk: int, wanted: Wanted, due_at: datetime, now: datetime) -> Seen | None:
    """What has become of the permit; None where its row is gone. One statement.

    Where keys have limits of their own, only those of its key go before it.
    """
    calls, attempts = (tables.name(using, model) for model in ("CallQueue", "CallAttempt"))
    at, shown = (database.as_parameter(using, one) for one in (due_at, now))
    key = database.quoted(using, "key")
    is_rival = "o.rule = %s"
    rival = [wanted.rule_name]
    if any(limit.is_keyed for limit in wanted.rule.limits):
        is_rival, rival = f"{is_rival} AND o.{key} = %s", [*rival, wanted.key]
    rivals = (
        f"SELECT 1 FROM {calls} o WHERE o.method = '{states.PERMIT}' AND o.ready AND o.status IN "
        f"({database.listed(states.WAITING)}) AND {is_rival} AND (o.priority > %s OR "
        "(o.priority = %s AND (o.due_at_dt < %s OR (o.due_at_dt = %s AND o.id < %s)))) "
        f"AND o.expires_at_dt > %s LIMIT {MANY}"
    )
    found = database.rows(
        using,
        f"SELECT c.status, c.error_message, (SELECT MAX(a.id) FROM {attempts} a "
        f"WHERE a.call_id = c.id AND a.finished_at IS NULL), (SELECT COUNT(*) FROM ({rivals}) r) "
        f"FROM {calls} c WHERE c.id = %s",
        [*rival, wanted.priority, wanted.priority, at, at, pk, shown, pk],
    )
    return Seen(*found[0]) if found else None


def forget(using: str, pk: int) -> bool:
    """Wait no more: the row goes, and leaves nothing. False where it does not wait, or was charged
    before.
    """

    def work() -> bool:
        rows = tables.calls(using).filter(pk=pk)
        found = database.locked(rows, wait=True).values_list("status", "last_attempt").first()
        if found is not None and (found[0] not in states.WAITING or found[1]):
            return False
        rows.delete()
        return True

    return untimed(using, work)
