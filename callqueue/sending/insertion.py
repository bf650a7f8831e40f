"""Inserts the rows of prepared calls, in the caller's transaction. A unique key that an unfinished
call carries gives that call instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from django.db import IntegrityError, transaction

from callqueue import database, states, tables

TRIES = 100  # to insert a call, or to find the one that carries its unique key


def insert(call: tables.CallQueue, *, using: str) -> tables.CallQueue:
    """Insert a row that was prepared; the row, or the one there is where a unique key says so."""
    if call.unique_key is None:
        call.save(using=using, force_insert=True)
        return _complete(call)
    return database.again_after_deadlock(using, lambda: _insert_unique(call, using))


def insert_many(
    calls: Sequence[tables.CallQueue], *, batch_size: int, using: str
) -> list[tables.CallQueue]:
    """Insert prepared rows; in their order, each row, or the one that has its unique key."""
    plain = [call for call in calls if call.unique_key is None]
    database.insert_objects(tables.CallQueue, using, plain, batch_size=batch_size)
    by_place = {id(call): _complete(call) for call in plain}
    unique = _by_key([call for call in calls if call.unique_key is not None], using)
    for at in range(0, len(unique), batch_size):
        batch = unique[at : at + batch_size]
        by_key = _insert_uniques(batch, using)
        by_place.update((id(call), by_key[str(call.unique_key)]) for call in batch)
    return [by_place[id(call)] for call in calls]


def _by_key(calls: Sequence[tables.CallQueue], using: str) -> list[tables.CallQueue]:
    """Calls in the order of their unique keys: whoever inserts several waits for others' keys in
    that order, and in no ring.

    They still go in the order in which they were given: where that is another, each is due a
    microsecond after the one before.
    """
    ordered = sorted(calls, key=lambda call: str(call.unique_key))
    by_default = [call for call in calls if hasattr(call.due_at_dt, "resolve_expression")]
    if by_default and (ordered != list(calls) or len(by_default) < len(calls)):
        now = database.clock(using)
        for before, call in enumerate(reversed(by_default)):
            call.due_at_dt = now - timedelta(microseconds=before)
    return ordered


def _insert_uniques(calls: Sequence[tables.CallQueue], using: str) -> dict[str, tables.CallQueue]:
    """Insert those whose key no unfinished call carries, in one statement; by key, the call that
    carries it then.

    Where another sender is faster with one of them, one after the other in the order of their keys,
    none of them inserted before.
    """
    first: dict[str, tables.CallQueue] = {}
    for call in calls:
        first.setdefault(str(call.unique_key), call)
    if database.returns_inserted(using):
        rows = tables.calls(using).filter(active_key__in=list(first), status__in=states.UNFINISHED)
        found = {str(call.active_key): call for call in rows}
        free = [call for key, call in first.items() if key not in found]
        if _try_insert(free, using):
            return {**first, **found}
    return {key: _insert_unique(call, using) for key, call in first.items()}


def _insert_unique(call: tables.CallQueue, using: str) -> tables.CallQueue:
    """Insert, or find the unfinished call that carries the key. Another sender's uncommitted row is
    waited for.

    Where the transaction's snapshot hides that call, the database's own serialization error says
    so, or a locking read finds it.
    """
    rows = tables.calls(using).filter(active_key=call.unique_key)
    for tries in range(TRIES):
        may_be_hidden = tries > 1 and database.in_transaction(using)
        found = (database.locked(rows, wait=True) if may_be_hidden else rows).first()
        if found is not None and found.status in states.UNFINISHED:
            return found
        if found is not None:  # other code ended it without freeing its key
            rows.filter(pk=found.pk, status__in=states.FINAL).update(active_key=None)
        if _try_insert([call], using):
            return call
    call.save(using=using, force_insert=True)  # whatever is in the way: the database says what
    return _complete(call)


def _try_insert(calls: Sequence[tables.CallQueue], using: str) -> bool:
    """Insert these calls, all or none: False where an unfinished call carries one's key."""
    insert_all = partial(database.insert_objects, tables.CallQueue, using, calls)
    if len(calls) == 1 and database.passes_over_conflicts(using):
        return bool(insert_all(batch_size=1, unless_there=True))
    try:
        with transaction.atomic(using=using):
            insert_all(batch_size=len(calls) or 1)
    except IntegrityError:
        for call in calls:
            call.pk, call._state.adding = None, True
        return False
    for call in calls:
        _complete(call)
    return True


def _complete(call: tables.CallQueue) -> tables.CallQueue:
    """Forget defaults that the database did not return: they are read when asked for."""
    for name in ("created_dt", "due_at_dt"):
        value = call.__dict__.get(name)
        if hasattr(value, "as_sql") or hasattr(value, "resolve_expression"):
            del call.__dict__[name]
    return call
