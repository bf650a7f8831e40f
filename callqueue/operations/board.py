"""Where every rule stands, all of them at once: what the dashboard and a rule's page show first.

In: a database alias. Out: a Board. A dozen statements, however many rules there are; every number
is exact, as of the instant that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from django.db.models import Q

from callqueue import conf, database, tables
from callqueue.database import from_us, to_us
from callqueue.ledger import agreement
from callqueue.limits.budgets import Book
from callqueue.limits.kinds import SECOND
from callqueue.limits.opinions import Difference
from callqueue.operations import attempts_now, backlog, dispensers, history, standing
from callqueue.operations.attempts_now import InFlight
from callqueue.operations.drains import Known, drains
from callqueue.operations.standing import STATES, HoldNow, Standing

SILENT = 20 * SECOND  # without a sign of life, which comes every five, no dispenser is taken to run
BEHIND = 120 * SECOND  # what is counted no further says nothing of the present


@dataclass(frozen=True)
class Board:
    """All rules, the worst first, and what concerns them all. Instants in microseconds.

    `counted_until`: up to when history is counted. `dispensers`: each one alive, and when it was
    last seen; `last_seen`: of any. `workers`: those that began a call within the last minutes, and
    when. `known`: what drain times were worked out from.
    """

    now: int
    book: Book
    rules: Sequence[Standing]
    counted_until: int
    peaks_until: int
    dispensers: Sequence[tuple[str, datetime]]
    last_seen: datetime | None
    workers: Sequence[tuple[str, datetime]]
    known: Known
    disagreements: Sequence[Difference] = ()

    @property
    def is_counting(self) -> bool:
        """Whether history is counted up to the present, or nearly."""
        return self.counted_until > self.now - BEHIND

    @property
    def is_dispensing(self) -> bool:
        """Whether any dispenser gave a sign of life lately."""
        return bool(self.dispensers)


def read(using: str, *, rates: Mapping[str, str] | None = None) -> Board:
    """Read where all rules stand, as of one moment. `rates`: as if these limits had other rates (id
    in the settings -> rate).
    """
    with database.one_view(using):
        return _read(using, rates or {})


def _read(using: str, rates: Mapping[str, str]) -> Board:
    now, counted_until, peaks_until = history.counted_until(using)
    book = agreement.book_in_force(using).with_rates(rates)
    names = tuple(conf.current().rules)
    seen = _dispensers(using)
    alive = [one for one in seen if _is_alive(one, now)]
    held = _holds(using, from_us(now))
    on_all = {
        name: standing.hold_on_all(held.get(name, ()), book.rules[name].queue_names, now)
        for name in names
    }
    keyed = {name for name in names if any(one.limit.per == "key" for one in book.budgets[name])}
    waits = backlog.backlogs(using, names, keyed)
    attempts = attempts_now.read(using, names, now)
    lately = history.lately(using, names, now)
    peaks = history.peaks(using, history.QUARTER, history.quarter_before(now, history.HOUR))
    known = Known(
        using=using,
        book=book,
        now=now,
        backlogs=waits,
        flights=attempts.flights,
        lately=lately,
        rates=attempts.rates,
        holds=held,
        held=standing.held_s(on_all, now),
    )
    pace = drains(known)
    rules = []
    for name in names:
        flight, drain = attempts.flights.get(name, InFlight()), pace.get(name)
        made = Standing(
            name=name,
            queues=tuple(book.rules[name].queues or ()),
            state="idle",
            backlog=waits[name],
            in_flight=flight,
            hold=on_all[name],
            holds=held.get(name, ()),
            lately=lately[name],
            peaks=[(one, peaks.get(history.kept_name(one.id))) for one in book.budgets[name]],
            drain=drain,
            drained_s=standing.drained_s(drain, flight, now, bool(alive)),
            rate=attempts.rates[name].per_second,
            latency=attempts.rates[name].latency,
        )
        rules.append(replace(made, state=made.doing(now, bool(alive))))
    rules.sort(key=lambda one: (STATES.index(one.state), -one.backlog.waiting))
    digests = {one.digest for one in alive if one.digest}
    return Board(
        now=now,
        book=book,
        rules=rules,
        counted_until=counted_until,
        peaks_until=peaks_until,
        dispensers=[(one.name, one.seen_at) for one in alive],
        last_seen=seen[0].seen_at if seen else None,
        workers=attempts.workers,
        disagreements=agreement.disagreements(using, digests) if len(digests) > 1 else (),
        known=known,
    )


def drained_with(board: Board, rule: Standing, more: int) -> float | None:
    """Seconds until the rule's backlog is gone, had it so many calls more, each of a key of its
    own; None where nobody can say.
    """
    of_rule = rule.backlog
    added = replace(of_rule, ready=of_rule.ready + more, sizes=[*of_rule.sizes, (1, more)])
    waits = {**board.known.backlogs, rule.name: added}
    return drains(replace(board.known, backlogs=waits))[rule.name].seconds()


class _Sign(NamedTuple):
    """A dispenser's last sign of life."""

    name: str
    seen_at: datetime
    digest: str
    kind: str


def _dispensers(using: str) -> list[_Sign]:
    """The newest sign first."""
    rows = tables.dispensers(using).order_by("-seen_at")
    return [_Sign(*row) for row in rows.values_list("name", "seen_at", "digest", "kind")]


def _is_alive(sign: _Sign, now: int) -> bool:
    """Whether it runs; beat's task may also be between two of its runs."""
    patience = round(dispensers.beat_patience().total_seconds() * SECOND)
    return to_us(sign.seen_at) > now - (patience if sign.kind == "beat" else SILENT)


def _holds(using: str, now: datetime) -> dict[str, list[HoldNow]]:
    rows = tables.holds(using).filter(Q(until__isnull=True) | Q(until__gt=now)).order_by("id")
    found: dict[str, list[HoldNow]] = {}
    for one in rows.values_list("rule", "per", "value", "until", "reason", "source"):
        found.setdefault(one[0], []).append(HoldNow(*one))
    return found
