"""What attempts do now, how fast, who takes calls, which queues nobody does. One statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from django.db.models.functions import Coalesce

from callqueue import states, tables
from callqueue.clocks import Us
from callqueue.database import as_parameter, from_us, micros_sql, placeholders, rows
from callqueue.limits.kinds import SECOND

RECENT_S = 60  # over which rates are taken
PACED = 100  # attempts that say how long calls take, where none was answered lately
WAY_S = 0.04  # the usual way from a slot to the wire, which does not count as late
NEWEST = 500  # begun attempts that are looked at for the workers that began them
WORKERS_S = 300  # for how long a worker that has begun nothing is still named
UNBEGUN_S = 10  # after which a released call that nobody took says that its queue has no worker


@dataclass(frozen=True)
class InFlight:
    """Open attempts of a rule: `begun` of the `count` are being made."""

    count: int = 0
    begun: int = 0

    @property
    def unbegun(self) -> int:
        return self.count - self.begun


@dataclass(frozen=True)
class Pace:
    per_second: float = 0.0  # answered, over RECENT_S; 0 of those that `read_newest_pace` reads
    latency: float = 0.0  # mean seconds from release to answer; 0: none was
    is_stamped: bool = True  # False: some were answered, of none is known when it was sent
    late: float = 0.0  # mean seconds from a slot to the wire, less WAY_S; only of the newest


@dataclass(frozen=True)
class Stall:
    """A queue whose calls nobody takes: how many, of which rules, released since when."""

    queue: str
    calls: int
    rules: tuple[str, ...]
    since: Us


@dataclass(frozen=True)
class Attempts:
    flights: Mapping[str, InFlight]
    paces: Mapping[str, Pace]
    workers: Sequence[Us]  # by process, its last begin within WORKERS_S, the latest first
    stalls: Sequence[Stall]  # the queues that nobody takes calls from


def read(using: str, names: Sequence[str], now: Us) -> Attempts:
    """What is in flight, stalls, who begins, of all rules; of `names`, the last minute's pace."""
    flights: dict[str, InFlight] = {}
    answered: dict[str, list[tuple[int, int, bool]]] = {name: [] for name in names}
    unbegun: dict[str, list[tuple[str, int, Us]]] = {}  # by queue: rule, calls, since when
    last: dict[str, Us] = {}  # by queue, when a call was begun
    processes: dict[str, Us] = {}
    for kind, name, queue, many, some, us, begun in rows(using, *_attempts_sql(using, names, now)):
        last[queue] = max(last.get(queue, Us(0)), Us(begun or 0))
        if kind == _WORKER:
            process = name.rpartition(":")[0]
            processes[process] = max(Us(begun), processes.get(process, Us(0)))
            continue
        if kind == _ANSWERED:
            answered[name].append((int(many), int(us), bool(some)))
            continue
        flight = flights.get(name, InFlight())
        flights[name] = InFlight(flight.count + int(many), flight.begun + int(some))
        if us is not None:
            unbegun.setdefault(queue, []).append((name, int(many) - int(some), Us(us)))
    lately, patience = now - WORKERS_S * SECOND, now - UNBEGUN_S * SECOND
    stalls = [
        Stall(
            queue,
            sum(calls for _, calls, _ in waiting),
            tuple(sorted(name for name, _, _ in waiting)),
            min(since for _, _, since in waiting),
        )
        for queue, waiting in sorted(unbegun.items())
        if last[queue] <= patience
    ]
    return Attempts(
        flights,
        {name: _mean_pace(listed) for name, listed in answered.items()},
        sorted((at for at in processes.values() if at > lately), reverse=True),
        [one for one in stalls if one.since <= patience],
    )


_OPEN, _ANSWERED, _WORKER = 0, 1, 2


def _attempts_sql(using: str, names: Sequence[str], now: Us) -> tuple[str, list[object]]:
    """Rows: kind, name, queue, count, begun (stamped), first unbegun (summed us), last begin."""
    table = tables.name(using, "CallAttempt")
    released, started, ended = (
        micros_sql(using, name) for name in ("released_at", "started_at", "finished_at")
    )
    # a block that makes its call itself says nothing of the queue's workers
    by_worker = f"SUBSTR(worker, 1, {len(states.OF_PERMITS)}) <> '{states.OF_PERMITS}'"
    began = f"CASE WHEN {by_worker} THEN {started} END"
    is_open = (
        f"SELECT {_OPEN} AS kind, rule AS name, queue, COUNT(*) AS many, "
        "COUNT(started_at) AS some, "
        f"MIN(CASE WHEN started_at IS NULL THEN {released} END) AS us, MAX({began}) AS last_begun "
        f"FROM {table} WHERE finished_at IS NULL GROUP BY rule, queue"
    )
    # what failed without an instant of sending was perhaps never sent
    is_stamped = (
        "CASE WHEN COUNT(sent_at) > 0 OR COUNT(CASE WHEN outcome = %s THEN 1 END) = 0 "
        "THEN 1 ELSE 0 END"
    )
    answered = (
        f"SELECT {_ANSWERED}, rule, queue, COUNT(*), {is_stamped}, SUM({ended} - {released}), "
        f"MAX({began}) FROM {table} "
        f"WHERE rule IN ({placeholders(names)}) AND finished_at > %s AND outcome <> %s "
        "GROUP BY rule, queue"
    )
    newest = (
        f"SELECT worker, queue, started_at FROM {table} WHERE started_at IS NOT NULL "
        f"AND worker <> '' AND {by_worker} ORDER BY id DESC LIMIT {NEWEST}"
    )
    of_workers = (
        f"SELECT {_WORKER}, worker, queue, 0, 0, 0, MAX({began}) FROM ({newest}) AS newest "
        "GROUP BY worker, queue"
    )
    minute = as_parameter(using, from_us(now - RECENT_S * SECOND))
    sql = " UNION ALL ".join((is_open, answered, of_workers))
    return sql, [states.SUCCEEDED, *names, minute, states.VOIDED]


def _mean_pace(answered: Sequence[tuple[int, int, bool]]) -> Pace:
    """The pace of rows: how many were answered, their microseconds in all, whether any stamped."""
    if not (many := sum(count for count, _, _ in answered)):
        return Pace()
    latency = sum(us for _, us, _ in answered) / SECOND / many
    return Pace(many / RECENT_S, latency, any(stamped for _, _, stamped in answered))


def read_newest_pace(using: str, rule: str) -> Pace:
    """The pace of a rule's latest attempts, however long ago: without a rate a second."""
    ended = tables.attempts(using).charged().filter(rule=rule, finished_at__isnull=False)
    slot = Coalesce("send_at", "released_at")
    columns = (slot, "released_at", "sent_at", "finished_at")
    newest = list(ended.order_by("-finished_at").values_list(*columns)[:PACED])
    if not newest:
        return Pace()
    stamped = [(sent - due).total_seconds() for due, _, sent, _ in newest if sent is not None]
    taken = [(end - start).total_seconds() for _, start, _, end in newest if end is not None]
    late = max(0.0, fmean(stamped) - WAY_S) if stamped else 0.0
    return Pace(0.0, max(0.001, fmean(taken)), bool(stamped), late)
