"""What attempts are doing now: what is in flight, how fast each rule's were answered over the last
minute, and which workers began the newest. One statement for all; what a dispenser keeps (history)
is some seconds behind, and by whole minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from callqueue import states, tables
from callqueue.database import as_parameter, from_us, micros_sql, places, rows
from callqueue.limits.kinds import SECOND

RECENT = 60  # seconds over which the rate is taken
NEWEST = 500  # attempts that are looked at for the workers that began them
LATELY = timedelta(minutes=5)


@dataclass(frozen=True)
class InFlight:
    """Open attempts of a rule. `begun` of the `count` are with a worker; `unbegun_since`: when the
    oldest of the others was released, in microseconds.
    """

    count: int = 0
    begun: int = 0
    unbegun_since: int | None = None

    def is_stalled(self, since: int) -> bool:
        """Whether something was released before that instant which no worker has begun."""
        return self.unbegun_since is not None and self.unbegun_since < since


@dataclass(frozen=True)
class Rate:
    """A rule's attempts over the last minute: answered per second, and mean seconds from release to
    answer, 0 where none was. `is_stamped`: False where some were answered, and of none is known
    when it was sent.
    """

    per_second: float = 0.0
    latency: float = 0.0
    is_stamped: bool = True


@dataclass(frozen=True)
class AttemptsNow:
    """By rule, what is in flight and the rate; `workers`: those that began any of the newest
    attempts within the last minutes, and when each did last, the newest first.
    """

    flights: Mapping[str, InFlight]
    rates: Mapping[str, Rate]
    workers: Sequence[tuple[str, datetime]]


def read(using: str, names: Sequence[str], now: int) -> AttemptsNow:
    """What attempts of these rules are doing as of `now`, in microseconds. Reads what is open, and
    what was answered in the last minute.
    """
    table = tables.name(using, "CallAttempt")
    released, began, ended = (
        micros_sql(using, name) for name in ("released_at", "started_at", "finished_at")
    )
    is_open = (
        "SELECT 0 AS kind, rule AS name, COUNT(*) AS many, COUNT(started_at) AS some, "
        f"MIN(CASE WHEN started_at IS NULL THEN {released} END) AS us "
        f"FROM {table} WHERE finished_at IS NULL GROUP BY rule"
    )
    # what failed without an instant of sending was perhaps never sent
    is_stamped = (
        "CASE WHEN COUNT(sent_at) > 0 OR COUNT(CASE WHEN outcome = %s THEN 1 END) = 0 "
        "THEN 1 ELSE 0 END"
    )
    answered = (
        f"SELECT 1, rule, COUNT(*), {is_stamped}, SUM({ended} - {released}) FROM {table} "
        f"WHERE rule IN ({places(names)}) AND finished_at > %s AND outcome <> %s GROUP BY rule"
    )
    newest = f"SELECT worker, started_at FROM {table} ORDER BY id DESC LIMIT {NEWEST}"
    by_worker = (
        f"SELECT 2, worker, 0, 0, MAX({began}) FROM ({newest}) AS newest "
        "WHERE started_at IS NOT NULL AND worker <> '' GROUP BY worker"
    )
    minute = as_parameter(using, from_us(now - RECENT * SECOND))
    flights: dict[str, InFlight] = {}
    rates, workers = dict.fromkeys(names, Rate()), list[tuple[str, datetime]]()
    sql = " UNION ALL ".join((is_open, answered, by_worker))
    params = [states.SUCCEEDED, *names, minute, states.VOIDED]
    for kind, name, many, some, us in rows(using, sql, params):
        if kind == 0:
            flights[name] = InFlight(int(many), int(some), None if us is None else int(us))
        elif kind == 1:
            rates[name] = Rate(int(many) / RECENT, int(us) / SECOND / int(many), bool(some))
        elif from_us(int(us)) > from_us(now) - LATELY:
            workers.append((name, from_us(int(us))))
    workers.sort(key=lambda one: one[1], reverse=True)
    return AttemptsNow(flights, rates, workers)
