"""Where every rule stands: what the dashboard, callqueue_status and the metrics show. Reads, and
changes nothing.

In: a database alias. Out: `look()`, a list of RuleOverview, or `overview()`, the same as one JSON
document. Every read is bounded, so that it costs the same with a million calls waiting as with ten
thousand; only `exact` counts are not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import mean
from typing import Any

from django.db.models import Count

from callqueue import conf, database, states, tables
from callqueue.database import as_parameter, from_us, instant_us, quoted, rows, to_us
from callqueue.ledger import account as ledger
from callqueue.ledger import agreement, holds
from callqueue.ledger import ready_calls as waiting
from callqueue.ledger.ready_calls import READY
from callqueue.ledger.time_buckets import Slots
from callqueue.limits import draining
from callqueue.limits.budgets import Book, Budget, cost_of, key_part
from callqueue.limits.kinds import SECOND

CAP = 10_000  # calls of a rule that are counted one by one; more than that are estimated
SMALLEST_CAP = 1000  # the same where there are many rules
NEXT = 1000  # calls whose keys are looked at: those that go next; CAP where counts are to be exact
OF_KEY = 1000  # calls of a key that are counted one by one
SAMPLE = 20_000  # rows that the estimate reads
RECENT = 60  # seconds over which the rate is taken
LATEST = 100  # attempts of that time whose mean is the latency
COUNTING = 0.04  # seconds spent on counting what large windows hold
KEYS = 10  # keys that are shown of a rule, those with most calls waiting


@dataclass(frozen=True)
class LimitOverview:
    """One limit. Where it is per queue, of all queues together; where it is per key, of the key
    that used most of it.

    `value` is that key. `configured` is the rate in the settings; it differs from `rate` where an
    operator changed it. `rules` share it. `budget` is the limit itself, as it is in force.
    `is_estimate`: there was no time to count all its use.
    """

    id: str
    name: str
    kind: str
    per: str
    unit: str
    rate: str
    configured: str
    capacity: int
    used: int
    free: int
    budget: Budget
    value: str = ""
    rules: tuple[str, ...] = ()
    is_estimate: bool = False


@dataclass(frozen=True)
class KeyOverview:
    """One key of a rule: its calls waiting and in flight, its limits, and the hold on it.
    `is_least`: more wait than counted.
    """

    key: str
    waiting: int
    in_flight: int
    limits: Sequence[LimitOverview]
    hold: holds.InForce | None
    is_least: bool = False


@dataclass(frozen=True)
class RuleOverview:
    """One rule. Times in seconds; None: nothing is due, nobody can say.

    `waiting` is exact unless `is_estimate`. `rate_per_s`: attempts answered over the last minute;
    `failing`: the share of them that did not succeed, also where their calls are tried again; None
    where none was answered. `drain_s`: until everything that waits is answered, if the limits are
    all that holds it back. `hold`: on the whole rule; `holds`: all.
    """

    name: str
    priority: int
    waiting: int
    is_estimate: bool
    in_flight: int
    oldest_due_s: float | None
    drain_s: float | None
    rate_per_s: float
    hold: holds.InForce | None
    limits: Sequence[LimitOverview]
    holds: Sequence[holds.InForce] = ()
    keys: Sequence[KeyOverview] = ()
    queues: tuple[str, ...] = ()
    failing: float | None = None

    def as_json(self) -> dict[str, Any]:
        """What `callqueue_status --json` prints of a rule."""
        hold = self.hold
        return {
            "waiting": self.waiting,
            "in_flight": self.in_flight,
            "oldest_due_s": None if self.oldest_due_s is None else round(self.oldest_due_s, 3),
            "drain_s": None if self.drain_s is None else round(self.drain_s, 3),
            "rate_per_s": round(self.rate_per_s, 3),
            "hold": hold
            and {"until": hold.until.isoformat() if hold.until else None, "reason": hold.reason},
            "limits": [
                {
                    "name": limit.name,
                    "per": limit.per,
                    "rate": limit.rate,
                    "used": limit.used,
                    "free": limit.free,
                }
                for limit in self.limits
            ],
        }


def overview(using: str) -> dict[str, Any]:
    """`{"rules": {NAME: {...}}, "disagreements": [...]}` as `callqueue_status --json` prints it,
    with exact counts.
    """
    return {
        "rules": {rule.name: rule.as_json() for rule in look(using, exact=True)},
        "disagreements": [
            {
                "limit": one.limit,
                "rules": list(one.rules),
                "said": {what: list(who) for what, who in one.said.items()},
            }
            for one in agreement.disagreements(using)
        ],
    }


def look(
    using: str,
    *,
    exact: bool = False,
    keys: int = 0,
    rates: Mapping[str, str] | None = None,
    only: str | None = None,
    until: float | None = None,
) -> list[RuleOverview]:
    """Every rule of the settings, or `only` one, in the settings' order.

    With `exact` every waiting call is counted, one index entry each. `keys`: so many keys of each
    rule that is limited per key. `rates`: what if these budgets had other rates (budget id ->
    rate)? `until`: when (monotonic) it is late, and what large windows hold is estimated.
    """
    config = conf.current()
    book = agreement.book_in_force(using)
    names = tuple(rule for rule in config.rules if only is None or rule in book.groups[only])
    counting = time.monotonic() + COUNTING
    book = book.with_rates(rates or {})
    seen = _Seen(
        using, book, names, exact, keys, counting if until is None else min(until, counting)
    )
    return [_of_rule(seen, name) for name in config.rules if name in names and only in (None, name)]


def drain_with(using: str, rule: str, rates: Mapping[str, str]) -> float | None:
    """The rule's drain time if these budgets had other rates; None where nobody can say."""
    (found,) = look(using, only=rule, rates=rates)
    return found.drain_s


class _Seen:
    """What is read once for all rules."""

    def __init__(
        self, using: str, book: Book, names: Sequence[str], exact: bool, keys: int, until: float
    ) -> None:
        self.using, self.book, self.names, self.keys = using, book, names, keys
        self.now = to_us(database.clock(using))
        self.slots = None if exact else Slots(using, self.now, until)
        self.kept = agreement.memos(using, {rule for name in names for rule in book.groups[name]})
        self.held = holds.in_force(using, names, from_us(self.now))
        self.in_flight = ledger.open_counts(using)
        self.later = _later(using)
        self.waiting, self.estimated = _waiting(using, names, self.later, exact)
        self.next = CAP if exact else NEXT
        self.keyed = {
            name: _next_keys(using, name, self.next) for name in names if _is_keyed(self, name)
        }
        self.priorities = {
            name: waiting.priorities(using, name) for name in names if self.has_ready(name)
        }
        self.oldest = _oldest_due(self)
        self.recent = _recent(using, names, self.now)
        self._accounts: dict[tuple[str, ...], ledger.Account] = {}

    def has_ready(self, name: str) -> bool:
        """Whether calls of the rule wait that are due."""
        return self.waiting[name] > self.later.get(name, (0, 0))[0]

    def account(self, rule: str) -> ledger.Account:
        """The account of the rule's group, beginning with what the dispensers remember of it."""
        group = self.book.groups[rule]
        if group not in self._accounts:
            self._accounts[group] = _account(self, group)
        return self._accounts[group]


def _of_rule(seen: _Seen, name: str) -> RuleOverview:
    recent, oldest = seen.recent[name], seen.oldest.get(name)
    on_rule = [hold for hold in seen.held.by_rule.get(name, ()) if hold.per == "rule"]
    hold = max(on_rule, key=_end, default=None)
    rule = seen.book.rules[name]
    return RuleOverview(
        name=name,
        priority=rule.priority,
        waiting=seen.waiting[name],
        is_estimate=name in seen.estimated,
        in_flight=seen.in_flight.get(name, 0),
        oldest_due_s=None if oldest is None else max(0.0, (seen.now - oldest) / SECOND),
        drain_s=_drain(seen, name, hold, recent),
        rate_per_s=recent.per_second,
        hold=hold,
        limits=[_of_limit(seen, name, budget) for budget in seen.book.budgets[name]],
        holds=seen.held.by_rule.get(name, ()),
        keys=_of_keys(seen, name),
        queues=tuple(rule.queues or ()),
        failing=recent.failing,
    )


def _each(using: str, select: str, params: Sequence[Sequence[Any]]) -> list[Any]:
    """What a SELECT returns for each of these parameters, two hundred in a statement. The first
    names what the row is about.
    """
    found: list[Any] = []
    for chunk in (params[at : at + 200] for at in range(0, len(params), 200)):
        found += rows(
            using,
            " UNION ALL ".join([select] * len(chunk)),
            [value for one in chunk for value in one],
        )
    return found


# --- what waits


def _waiting(
    using: str, names: Sequence[str], later: Mapping[str, tuple[int, int]], exact: bool
) -> tuple[dict[str, int], frozenset[str]]:
    """Calls waiting by rule, and the rules whose number is an estimate."""
    if exact:
        return _exact(using, names), frozenset()
    cap = max(SMALLEST_CAP, min(CAP, 5 * CAP // max(1, len(names))))
    few = f"(SELECT 1 AS one FROM {_table(using)} WHERE {READY} LIMIT {cap + 1}) AS few"
    ready = dict(_each(using, f"SELECT %s, COUNT(*) FROM {few}", [(name, name) for name in names]))
    counts = {name: ready[name] + later.get(name, (0, 0))[0] for name in names}
    many = {name for name in names if ready[name] > cap}
    if sum(count for count, _ in later.values()) > CAP:
        many |= set(names) & later.keys()
    if not many:
        return counts, frozenset()
    sampled = _sampled(using)
    if sampled is None:
        return _exact(using, names), frozenset()
    return {
        **counts,
        **{name: max(_rounded(sampled[name]), counts[name]) for name in many},
    }, frozenset(many)


def _exact(using: str, names: Sequence[str]) -> dict[str, int]:
    """Each half of the waiting set has an index of its own."""
    counts: Counter[str] = Counter()
    for ready in (True, False):
        rows = tables.calls(using).waiting().filter(ready=ready, rule__in=names)
        counts.update(dict(rows.order_by().values_list("rule").annotate(count=Count("pk"))))
    return {name: counts[name] for name in names}


def _later(using: str) -> dict[str, tuple[int, int]]:
    """Of the calls that are not ready, the first CAP to become so: by rule, how many, and when the
    first is due.
    """
    found = rows(
        using,
        f"SELECT rule, COUNT(*), MIN(due_at_dt) FROM (SELECT rule, due_at_dt FROM {_table(using)} "
        f"WHERE status IN (0, 2) AND NOT ready ORDER BY due_at_dt LIMIT {CAP + 1}) later GROUP BY rule",
    )
    return {rule: (int(count), instant_us(due)) for rule, count, due in found}


def _sampled(using: str) -> Counter[str] | None:
    """Calls waiting by rule, from a part of the table; None where the database cannot read a
    part.
    """
    total = database.estimated_rows(using, tables.CallQueue._meta.db_table) or 0
    percent = min(100.0, 100 * SAMPLE / max(total, 1))
    source = database.sample_of(using, tables.CallQueue._meta.db_table, percent)
    if source is None:
        return None
    found = rows(using, f"SELECT rule, COUNT(*) FROM {source} WHERE status IN (0, 2) GROUP BY rule")
    return Counter({rule: round(count * 100 / percent) for rule, count in found})


def _rounded(count: int) -> int:
    """To two digits: an estimate claims no more."""
    unit: int = 10 ** max(0, len(str(count)) - 2)
    return round(count / unit) * unit


def _oldest_due(seen: _Seen) -> dict[str, int]:
    """By rule: when the call that is due longest became due; without those that have none."""
    found = {rule: due for rule, (count, due) in seen.later.items() if count and due <= seen.now}
    firsts = (
        f"SELECT %s, MIN(due_at_dt) FROM (SELECT due_at_dt FROM {_table(seen.using)} "
        f"WHERE {READY} AND priority = %s ORDER BY due_at_dt LIMIT 1) AS first_call"
    )
    of_each = [
        (name, name, priority)
        for name, priorities in seen.priorities.items()
        for priority in priorities
    ]
    for name, due in _each(seen.using, firsts, of_each):
        if due is not None and instant_us(due) <= seen.now:
            found[name] = min(found.get(name, seen.now), instant_us(due))
    return found


def _next_keys(using: str, name: str, most: int) -> Counter[str]:
    """How many of the next `most` calls each key has."""
    key, table = quoted(using, "key"), _table(using)
    # Their ids first: to read their keys there, PostgreSQL would rather sort all that waits by an
    # index that has the keys.
    ids = f"SELECT id FROM {table} WHERE {READY} ORDER BY priority DESC, due_at_dt, id LIMIT {most}"
    found = rows(
        using,
        f"SELECT c.{key}, COUNT(*) FROM ({ids}) AS next_calls JOIN {table} c ON c.id = next_calls.id GROUP BY c.{key}",
        [name],
    )
    return Counter({text: int(count) for text, count in found})


def _waiting_of_keys(seen: _Seen, name: str, keys: Sequence[str]) -> Counter[str]:
    """How many calls of each key wait that are due, each counted up to one more than OF_KEY."""
    where = f"{READY} AND priority = %s AND {quoted(seen.using, 'key')} = %s"
    few = f"(SELECT 1 AS one FROM {_table(seen.using)} WHERE {where} LIMIT {OF_KEY + 1}) AS few"
    of_each = [
        (key, name, priority, key) for key in keys for priority in seen.priorities.get(name, ())
    ]
    found: Counter[str] = Counter()
    for key, count in _each(seen.using, f"SELECT %s, COUNT(*) FROM {few}", of_each):
        found[key] = min(OF_KEY + 1, found[key] + count)
    return found


def _is_keyed(seen: _Seen, name: str) -> bool:
    return any(b.limit.per not in ("rule", "queue") for b in seen.book.budgets[name])


# --- what was made lately


@dataclass(frozen=True)
class _Recent:
    """A rule's attempts over the last minute: answered per second, mean seconds from release to
    answer, and what share failed.
    """

    per_second: float = 0.0
    latency: float = 0.0
    failing: float | None = None


def _recent(using: str, names: Sequence[str], now: int) -> dict[str, _Recent]:
    since = as_parameter(using, from_us(now) - timedelta(seconds=RECENT))
    newest = f"FROM {_attempts(using)} WHERE rule = %s AND finished_at > %s AND outcome <> %s ORDER BY finished_at DESC LIMIT"
    counts = (
        "SELECT %s, COUNT(*), MIN(finished_at), SUM(CASE WHEN outcome = %s THEN 0 ELSE 1 END) "
        f"FROM (SELECT finished_at, outcome {newest} {CAP}) AS newest"
    )
    counted = {
        name: (
            count,
            (now - instant_us(first)) / SECOND if count >= CAP else RECENT,
            int(failed) / count,
        )
        for name, count, first, failed in _each(
            using, counts, [(name, states.SUCCEEDED, name, since, states.VOIDED) for name in names]
        )
        if count
    }
    taken = f"SELECT %s, released_at, finished_at FROM (SELECT released_at, finished_at {newest} {LATEST}) AS latest"
    latencies: dict[str, list[int]] = {name: [] for name in counted}
    for name, begin, end in _each(
        using, taken, [(name, name, since, states.VOIDED) for name in counted]
    ):
        latencies[name].append(instant_us(end) - instant_us(begin))
    return {
        name: _Recent(
            counted[name][0] / max(counted[name][1], 0.001),
            mean(latencies[name]) / SECOND,
            counted[name][2],
        )
        if latencies.get(name)
        else _Recent()
        for name in names
    }


# --- limits


def _account(seen: _Seen, group: tuple[str, ...]) -> ledger.Account:
    memo = ledger.Memo.load(group, {rule: seen.kept[rule] for rule in group if rule in seen.kept})
    account = ledger.read(seen.using, seen.book, group, seen.now, memo, slots=seen.slots)
    account.read_keys(
        [
            key
            for name in group
            for key, _ in seen.keyed.get(name, Counter()).most_common(max(seen.keys, KEYS))
        ]
    )
    return account


def _of_limit(seen: _Seen, name: str, budget: Budget) -> LimitOverview:
    account, limit = seen.account(name), budget.limit
    if limit.per == "rule":
        values: Sequence[str] = [""]
    elif limit.per == "queue":
        values = sorted(
            {queue for rule in budget.rules for queue in seen.book.rules[rule].queue_names}
        )
    else:
        values = account.values(budget)
    return _limit_of(account, budget, values)


def _limit_of(account: ledger.Account, budget: Budget, values: Sequence[str]) -> LimitOverview:
    limit = budget.limit
    meters = [account.meter(budget, value) for value in values]
    is_summed = limit.per == "queue"
    used = (sum if is_summed else max)([meter.used for meter in meters] or [0])
    free = (sum if is_summed else min)([meter.free for meter in meters] or [limit.capacity])
    settings = conf.current().book.budgets
    configured = {b.id: b.limit.rate_text for rule in budget.rules for b in settings.get(rule, ())}
    return LimitOverview(
        id=budget.known_as,
        name=limit.label,
        kind=type(limit).__name__,
        per=limit.per,
        unit=limit.unit,
        rate=limit.rate_text,
        configured=configured.get(budget.known_as, limit.rate_text),
        capacity=limit.capacity * (len(meters) if is_summed else 1),
        used=used,
        free=free,
        budget=budget,
        value=""
        if is_summed
        else max(zip([meter.used for meter in meters], values, strict=True), default=(0, ""))[1],
        rules=budget.rules,
        is_estimate=any((budget.id, value) in account.estimated for value in values),
    )


def _of_keys(seen: _Seen, name: str) -> list[KeyOverview]:
    if not seen.keys or name not in seen.keyed:
        return []
    most = [key for key, _ in seen.keyed[name].most_common(seen.keys)]
    counts, open_by_key = _waiting_of_keys(seen, name, most), _open_by_key(seen.using, name, most)
    account = seen.account(name)
    budgets = [b for b in seen.book.budgets[name] if b.limit.per not in ("rule", "queue")]
    return [
        KeyOverview(
            key=key,
            waiting=min(OF_KEY, counts[key]),
            in_flight=open_by_key[key],
            limits=[_limit_of(account, b, [key_part(key, b.limit.per)]) for b in budgets],
            hold=next((h for h in seen.held.by_rule.get(name, ()) if _is_on_key(h, key)), None),
            is_least=counts[key] > OF_KEY,
        )
        for key in most
    ]


def _open_by_key(using: str, name: str, keys: Sequence[str]) -> Counter[str]:
    found = tables.attempts(using).open().filter(rule=name, key__in=keys)
    return Counter(dict(found.order_by().values_list("key").annotate(count=Count("pk"))))


def _is_on_key(hold: holds.InForce, key: str) -> bool:
    return hold.per not in ("rule", "queue") and key_part(key, hold.per) == hold.value


# --- the drain


def _drain(seen: _Seen, name: str, hold: holds.InForce | None, recent: _Recent) -> float | None:
    count = seen.waiting[name]
    if not count:
        return 0.0
    if hold is not None and hold.until is None:
        return None
    held = (
        0.0
        if hold is None or hold.until is None
        else max(0.0, (to_us(hold.until) - seen.now) / SECOND)
    )
    taken = [_drain_of(seen, name, budget, recent) for budget in seen.book.budgets[name]]
    if None in taken:
        return None
    known = [seconds for seconds in taken if seconds is not None]
    if known:
        return held + max(known) + recent.latency
    return held + count / recent.per_second if recent.per_second else None


def _drain_of(seen: _Seen, name: str, budget: Budget, recent: _Recent) -> float | None:
    limit, account = budget.limit, seen.account(name)
    each = _mean_cost(seen, name, limit.unit)
    if not each:
        return 0.0
    if limit.per in ("rule", "queue"):
        queues = len(seen.book.rules[name].queue_names) if limit.per == "queue" else 1
        amount = _ahead(seen, name, budget) * each / queues
        value = "" if limit.per == "rule" else seen.book.rules[name].queue_names[0]
    else:
        value, calls = _heaviest(seen, name, limit.per)
        amount = calls * each
    return draining.seconds_until_gone(
        limit, account.meter(budget, value), amount, seen.now, recent.latency
    )


def _ahead(seen: _Seen, name: str, budget: Budget) -> int:
    """Calls that pass the budget before this rule is drained: all of higher rules; of its equals as
    many, taking turns.
    """
    own, rules = seen.waiting[name], seen.book.rules
    ahead = own
    for other in budget.rules:
        if other != name and other in seen.waiting:
            if rules[other].priority > rules[name].priority:
                ahead += seen.waiting[other]
            elif rules[other].priority == rules[name].priority:
                ahead += min(own, seen.waiting[other])
    return ahead


def _heaviest(seen: _Seen, name: str, per: str) -> tuple[str, float]:
    """The value of the calls' key with most calls waiting, and how many those are."""
    shares: Counter[str] = Counter()
    for key, count in seen.keyed[name].items():
        shares[key_part(key, per)] += count
    if not shares:
        return "", 0
    value, count = shares.most_common(1)[0]
    counted = shares.total()
    return value, count if counted < seen.next else count * max(1.0, seen.waiting[name] / counted)


def _mean_cost(seen: _Seen, name: str, unit: str) -> float:
    """What a waiting call costs in this unit, from the next hundred."""
    if unit == "calls":
        return 1.0
    ready = (
        tables.calls(seen.using)
        .waiting()
        .filter(ready=True, rule=name)
        .order_by("-priority", "due_at_dt", "id")
    )
    costs = [cost_of(cost, unit) for cost in ready.values_list("cost", flat=True)[:100]]
    return sum(costs) / len(costs) if costs else 0.0


def _end(hold: holds.InForce) -> float:
    return float("inf") if hold.until is None else hold.until.timestamp()


def _table(using: str) -> str:
    return quoted(using, tables.CallQueue._meta.db_table)


def _attempts(using: str) -> str:
    return quoted(using, tables.CallAttempt._meta.db_table)
