"""Where every rule stands, all of them at once: what the dashboard and a rule's page show first.

In: a database alias. Out: a Board. A dozen statements, however many rules there are; every number
is exact, as of the instant that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from django.db.models import Q

from callqueue import conf, database, tables
from callqueue.database import from_us, to_us
from callqueue.ledger import agreement
from callqueue.limits.budgets import Book, Budget
from callqueue.limits.kinds import SECOND
from callqueue.limits.opinions import Difference
from callqueue.operations import backlog, histograms, history
from callqueue.operations.backlog import Backlog
from callqueue.operations.draining import Drain
from callqueue.operations.drains import drains
from callqueue.operations.history import Lately, PeakUse
from callqueue.operations.in_flight import InFlight, in_flight, workers

SILENT = 20 * SECOND  # without a sign of life, which comes every five, no dispenser is taken to run
STALLED = 10 * SECOND  # after which a released call that no worker began says that none is there
FAILING = 0.2  # share of failed attempts over a quarter of an hour from which a rule is failing

# What a rule is doing, the worst first.
STATES = (
    "held", "no_dispenser", "no_workers", "failing", "stuck", "at_limit", "draining", "idle",
)  # fmt: skip


@dataclass(frozen=True)
class HoldNow:
    """A hold in force. `source`: who laid it."""

    rule: str
    per: str
    value: str
    until: datetime | None
    reason: str
    source: str


@dataclass(frozen=True)
class Standing:
    """Where one rule stands. `drain`: how its backlog goes; None where it has none. `peaks`: the
    highest use of its limits within the last hour, in the settings' order.
    """

    name: str
    queues: tuple[str, ...]
    state: str
    backlog: Backlog
    in_flight: InFlight
    holds: Sequence[HoldNow]
    lately: Lately
    peaks: Sequence[tuple[Budget, PeakUse | None]]
    drain: Drain | None
    drained_s: float | None

    @property
    def hold(self) -> HoldNow | None:
        """What holds the whole rule: of several, the one that ends last."""
        whole = [one for one in self.holds if one.per == "rule"]
        return max(whole, key=lambda one: (one.until is None, one.until or 0), default=None)

    @property
    def p95(self) -> float | None:
        """The 95th percentile of the wait, in seconds, over the last quarter of an hour."""
        return histograms.percentile(self.lately.quarter.waits, histograms.P95)

    @property
    def rate(self) -> float:
        """Attempts sent a second, over the last whole minute that is counted."""
        return self.lately.minute.sent / 60


@dataclass(frozen=True)
class Board:
    """All rules, the worst first, and what concerns them all. Instants in microseconds.

    `counted_until`: up to when history is counted. `dispensers`: each one alive, and when it was
    last seen; `last_seen`: of any. `workers`: those that began a call within the last minutes, and
    when.
    """

    now: int
    book: Book
    rules: Sequence[Standing]
    counted_until: int
    peaks_until: int
    dispensers: Sequence[tuple[str, datetime]]
    last_seen: datetime | None
    workers: Sequence[tuple[str, datetime]]
    disagreements: Sequence[Difference] = field(default=())

    @property
    def is_dispensing(self) -> bool:
        """Whether any dispenser gave a sign of life lately."""
        return bool(self.dispensers)


def read(using: str, *, rates: Mapping[str, str] | None = None) -> Board:
    """Read where all rules stand. `rates`: as if these limits had other rates (id in the settings
    -> rate).
    """
    now = to_us(database.clock(using))
    book = agreement.book_in_force(using).with_rates(rates or {})
    names = tuple(conf.current().rules)
    seen = _dispensers(using)
    alive = [(name, at) for name, at, _ in seen if to_us(at) > now - SILENT]
    held = _holds(using, from_us(now))
    waits = backlog.backlogs(using, names)
    flights = in_flight(using)
    counted_until, peaks_until = history.counted_until(using)
    lately = history.lately(using, now, counted_until)
    peaks = history.peaks(using, history.QUARTER, history.quarter_before(now, history.HOUR))
    latest = {name: lately.get(name, Lately()) for name in names}
    pace = drains(using, book, now, waits, flights, latest, _held_s(held, now))
    rules = []
    for name in names:
        flight, drain = flights.get(name, InFlight()), pace.get(name)
        budgets = [(budget, peaks.get(budget.id)) for budget in book.budgets[name]]
        made = Standing(
            name=name,
            queues=tuple(book.rules[name].queues or ()),
            state="idle",
            backlog=waits[name],
            in_flight=flight,
            holds=held.get(name, ()),
            lately=latest[name],
            peaks=budgets,
            drain=drain,
            drained_s=_drained_s(drain, flight, held.get(name, ()), now, bool(alive)),
        )
        rules.append(_with_state(made, now, bool(alive)))
    rules.sort(key=lambda one: (STATES.index(one.state), -one.backlog.waiting))
    differ = len({digest for name, at, digest in seen if digest and to_us(at) > now - SILENT}) > 1
    return Board(
        now=now,
        book=book,
        rules=rules,
        counted_until=counted_until,
        peaks_until=peaks_until,
        dispensers=alive,
        last_seen=seen[0][1] if seen else None,
        workers=workers(using, now),
        disagreements=agreement.disagreements(using) if differ else (),
    )


def drained_with(using: str, board: Board, rule: Standing, more: int) -> float | None:
    """Seconds until the rule's backlog is gone, had it so many calls more, each of a key of its
    own; None where nobody can say.
    """
    waits = {one.name: one.backlog for one in board.rules}
    sizes = [*rule.backlog.sizes, (1, more)]
    waits[rule.name] = replace(rule.backlog, sizes=sizes)
    flights = {one.name: one.in_flight for one in board.rules}
    lately = {one.name: one.lately for one in board.rules}
    held = _held_s({rule.name: rule.holds}, board.now)
    made = drains(using, board.book, board.now, waits, flights, lately, held)
    return made[rule.name].seconds()


def _with_state(rule: Standing, now: int, is_dispensing: bool) -> Standing:
    return replace(rule, state=_state(rule, now, is_dispensing))


def _state(rule: Standing, now: int, is_dispensing: bool) -> str:
    """The worst that can be said of it."""
    ready, quarter = rule.backlog.ready, rule.lately.quarter
    if rule.hold is not None:
        return "held"
    if not is_dispensing and (ready or rule.in_flight.count):
        return "no_dispenser"
    if rule.in_flight.is_stalled(now - STALLED):
        return "no_workers"
    if quarter.failed and quarter.failed >= FAILING * quarter.sent:
        return "failing"
    if not ready:
        return "idle"
    if any(peak and peak.last >= peak.allowed for _, peak in rule.peaks):
        return "at_limit"
    return "draining" if rule.lately.minute.sent or rule.in_flight.count else "stuck"


def _drained_s(
    drain: Drain | None,
    flight: InFlight,
    held: Sequence[HoldNow],
    now: int,
    is_dispensing: bool,
) -> float | None:
    """Seconds until all that waits is gone; None where nobody can say."""
    if drain is None:
        return 0.0
    if not is_dispensing or flight.is_stalled(now - STALLED):
        return None
    if any(one.per == "rule" and one.until is None for one in held):
        return None
    return drain.seconds()


def _dispensers(using: str) -> list[tuple[str, datetime, str]]:
    """Each dispenser, when it was last seen, and the digest of its settings; the newest sign
    first.
    """
    rows = tables.dispensers(using).order_by("-seen_at")
    return list(rows.values_list("name", "seen_at", "digest"))


def _holds(using: str, now: datetime) -> dict[str, list[HoldNow]]:
    rows = tables.holds(using).filter(Q(until__isnull=True) | Q(until__gt=now)).order_by("id")
    found: dict[str, list[HoldNow]] = {}
    for one in rows.values_list("rule", "per", "value", "until", "reason", "source"):
        found.setdefault(one[0], []).append(HoldNow(*one))
    return found


def _held_s(held: Mapping[str, Sequence[HoldNow]], now: int) -> dict[str, float]:
    """Seconds until the holds on whole rules end that end by themselves."""
    ends = {
        rule: max((to_us(h.until) for h in listed if h.per == "rule" and h.until), default=now)
        for rule, listed in held.items()
    }
    return {rule: max(0.0, (end - now) / SECOND) for rule, end in ends.items()}
