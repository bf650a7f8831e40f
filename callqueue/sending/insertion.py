"""Inserts the rows of prepared calls, in the caller's transaction. A unique key that an unfinished
call carries gives that call instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction

from callqueue import database, states, tables

TRIES = 100  # to insert calls, or to find those that carry their unique keys
_FOUND = ("pk", "active_key", "status", "idempotency_key", "created_dt", "due_at_dt")


def insert(call: tables.CallQueue, *, using: str) -> tables.CallQueue:
    """Insert a row that was prepared; the row, or the one there is where a unique key says so."""
    if call.unique_key is None:
        call.save(using=using, force_insert=True)
        return _complete(call)

    def insert_alone() -> tables.CallQueue:
        with transaction.atomic(using=using):
            return insert_many([call], batch_size=1, using=using)[0]

    return database.again_after_deadlock(using, insert_alone)


def insert_many(
    calls: Sequence[tables.CallQueue], *, batch_size: int, using: str
) -> list[tables.CallQueue]:
    """Insert prepared rows, in a transaction; in their order, each row, or the one that has its
    unique key.
    """
    plain = [call for call in calls if call.unique_key is None]
    for call in database.insert_objects(tables.CallQueue, using, plain, batch_size=batch_size):
        _complete(call)
    first: dict[str, tables.CallQueue] = {}
    for call in calls:
        if call.unique_key is not None:
            first.setdefault(call.unique_key, call)
    keys = sorted(first)  # whoever waits for others' keys does so in this order, and in no ring
    carriers: dict[str, tables.CallQueue] = {}
    for at in range(0, len(keys), batch_size):
        carriers |= _carriers([first[key] for key in keys[at : at + batch_size]], using)
    return [call if call.unique_key is None else carriers[call.unique_key] for call in calls]


def _carriers(calls: Sequence[tables.CallQueue], using: str) -> dict[str, tables.CallQueue]:
    """By unique key, the unfinished call that carries it: one of these, or the one that was there.

    Another sender's uncommitted row is waited for. Where the transaction's snapshot hides it, the
    database's own serialization error says so, or a locking read finds it. All of it is one
    transaction: a call that was inserted here cannot end before it is found.
    """
    carriers: dict[str, tables.CallQueue] = {}
    for tries in range(TRIES):
        left = [call for call in calls if call.unique_key not in carriers]
        if not left:
            return carriers
        database.insert_objects(
            tables.CallQueue, using, left, batch_size=len(left), unless_there=True
        )
        own = {call.idempotency_key: call for call in left}
        rows = tables.calls(using).filter(active_key__in=[call.unique_key for call in left])
        found = rows if tries == 0 else database.locked(rows, wait=True)
        others, ended = dict[int, str](), list[int]()
        for pk, key, status, identity, *times in found.values_list(*_FOUND):
            if identity in own:
                call = carriers[key] = own[identity]
                call.pk, (call.created_dt, call.due_at_dt) = pk, times
                call._state.adding, call._state.db = False, using
            elif status in states.UNFINISHED:
                others[pk] = key
            else:
                ended.append(pk)
        if others:
            # read as they were found: a snapshot would hide them once more
            carriers |= {others[row.pk]: row for row in found.filter(pk__in=others)}
        if ended:  # by other code, which has not freed their keys
            rows.filter(pk__in=ended, status__in=states.FINAL).update(active_key=None)
    for call in left:
        call.save(using=using, force_insert=True)  # whatever is in the way: the database says what
        carriers[str(call.unique_key)] = _complete(call)
    return carriers


def _complete(call: tables.CallQueue) -> tables.CallQueue:
    """The call, where the database filled in its times: read them when they are asked for."""
    for name in ("created_dt", "due_at_dt"):
        if hasattr(call.__dict__.get(name), "resolve_expression"):
            del call.__dict__[name]
    return call
