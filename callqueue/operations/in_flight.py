"""What is in flight, by rule, and which workers began it. A statement each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from callqueue import tables
from callqueue.database import from_us, instant_us, rows

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


def in_flight(using: str) -> dict[str, InFlight]:
    """What is in flight of every rule."""
    sql = (
        "SELECT rule, COUNT(*), COUNT(started_at), "
        "MIN(CASE WHEN started_at IS NULL THEN released_at END) "
        f"FROM {tables.name(using, 'CallAttempt')} WHERE finished_at IS NULL GROUP BY rule"
    )
    return {
        rule: InFlight(int(count), int(begun), None if since is None else instant_us(since))
        for rule, count, begun, since in rows(using, sql)
    }


def workers(using: str, now: int) -> list[tuple[str, datetime]]:
    """The workers that began any of the newest attempts within the last minutes, and when each did
    last; the newest first.
    """
    newest = (
        f"SELECT worker, started_at FROM {tables.name(using, 'CallAttempt')} "
        f"ORDER BY id DESC LIMIT {NEWEST}"
    )
    sql = (
        f"SELECT worker, MAX(started_at) FROM ({newest}) AS newest "
        "WHERE started_at IS NOT NULL AND worker <> '' GROUP BY worker"
    )
    found = [(name, from_us(instant_us(at))) for name, at in rows(using, sql)]
    lately = [(name, at) for name, at in found if at > from_us(now) - LATELY]
    return sorted(lately, key=lambda one: one[1], reverse=True)
