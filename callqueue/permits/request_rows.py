"""The row by which passes see a permit that waits: made, kept alive, taken up, taken back.

In: what is wanted. Out: what it was granted. A row is its waiter's alone: passes write no more into
it than the attempt that they grant. Instants are microseconds, monotonic ones seconds.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from callqueue import database, tables, transitions
from callqueue.database import from_us
from callqueue.execution import claim
from callqueue.ledger import clock_jumps, ledger_time
from callqueue.ledger.ready_calls import Candidate
from callqueue.ledger.transaction import untimed
from callqueue.permits.begun import Granted

# seconds for which passes mind a permit whose waiter has not said that it lives, if it waits for as
# long, and after which it says so again
ALIVE, BEAT = 8.0, 2.0


def insert(using: str, own: Candidate, due_at: datetime | None, within: float | None) -> int:
    """Let passes see a permit, that is due since then (None: now); its row's primary key."""
    assert own.asked is not None
    reading = ledger_time.read(using)
    row = tables.permit_requests(using).create(
        rule=own.rule,
        key=own.key,
        priority=own.priority,
        cost=own.cost,
        label=own.asked.label,
        owner=own.asked.owner,
        due_at_dt=due_at or from_us(reading.wall),
        **_lives(from_us(reading.at), within),
    )
    return row.pk


def beat(using: str, pk: int, within: float | None) -> bool:
    """Say that the waiter lives; `within`: seconds that are left of its wait. False where the row
    is gone: to whoever deleted it the waiter seemed dead, since the clock was set.
    """
    row = tables.permit_requests(using).filter(pk=pk)
    waiting = row.filter(attempt_id__isnull=True)
    return bool(waiting.update(**_lives(ledger_time.now(using), within))) or row.exists()


def look(using: str, pk: int, now: int) -> tuple[int | None, bool]:
    """The attempt that a pass has granted the permit, None until then; and whether no permit of its
    rule and key goes before it, of those whose waiters live. One look-up.
    """
    own = "o.rule = r.rule AND o.{key} = r.{key} AND o.attempt_id IS NULL AND o.alive_until > %s"
    table, key = tables.name(using, "PermitRequest"), database.quoted(using, "key")
    found = database.rows(
        using,
        f"SELECT r.attempt_id, EXISTS (SELECT 1 FROM {table} o WHERE {own.format(key=key)} AND ("
        "o.priority > r.priority OR (o.priority = r.priority AND (o.due_at_dt < r.due_at_dt OR"
        " (o.due_at_dt = r.due_at_dt AND o.id < r.id))))) "
        f"FROM {table} r WHERE r.id = %s",
        [database.as_parameter(using, from_us(now)), pk],
    )
    return (None, False) if not found else (found[0][0], not found[0][1])


def take_up(using: str, pk: int, attempt_id: int, owner: str, lease: float) -> Granted | None:
    """Begin the attempt that was granted, as a worker does; None where it was taken back before:
    then the row waits again.
    """
    requests = tables.permit_requests(using).filter(pk=pk)

    def work() -> Granted | None:
        reading = ledger_time.held(using)
        rows = tables.attempts(using).filter(pk=attempt_id, worker=owner).unbegun()
        found = database.locked(rows, wait=True).values_list("send_at", "released_at", "queue")
        row = found.first()
        if row is None:
            requests.update(attempt_id=None)
            return None
        send_at, released_at, queue = row
        narrowed, steady_from = clock_jumps.watch(using).take(reading)
        now = from_us(reading.at)
        opens = claim.slot(send_at, released_at, narrowed, from_us(steady_from))
        until = max(now, opens or now) + timedelta(seconds=lease)
        transitions.begin_permit(using, attempt_id, owner, now, until)
        requests.delete()
        begins_at = None if opens is None else narrowed.monotonic_at(database.to_us(opens))
        return Granted(attempt_id, queue, narrowed, begins_at)

    # A jump is left to the next look, as it is by a worker that begins.
    return untimed(using, work)


def take_back(using: str, pk: int) -> int | None:
    """Wait no more. The attempt that was granted meanwhile, if one was: then the row stays."""
    row = tables.permit_requests(using).filter(pk=pk)

    def work() -> int | None:
        attempt_id = database.locked(row, wait=True).values_list("attempt_id", flat=True).first()
        if attempt_id is None:
            row.delete()
        return attempt_id

    return untimed(using, work)


def withdraw(using: str, rule: str, owner: str, pk: int | None) -> None:
    """Wait no more, and void whatever the waiter was granted, also what it does not know of."""

    def work() -> None:
        if pk is not None:
            tables.permit_requests(using).filter(pk=pk).delete()
        transitions.void_permits(using, rule, owner)

    untimed(using, work)


def _lives(now: datetime, within: float | None) -> dict[str, datetime | None]:
    return {
        "alive_until": now + timedelta(seconds=ALIVE if within is None else min(ALIVE, within)),
        "until": None if within is None else now + timedelta(seconds=within),
    }
