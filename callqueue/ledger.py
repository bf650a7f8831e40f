"""The ledger: what every budget is charged with now, read from the attempts. The only place that counts.

An attempt is charged from its release until its answer, then ages from the latest instant at which the provider can have
counted it; a voided one never reached the wire and is not charged. `Account` gives the meters that a pass plans with.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import QuerySet

from callqueue import states
from callqueue.budgets import Book, Budget, charged_on, cost_of, key_part
from callqueue.database import as_parameter, from_us, instant_us, places, quoted, rows
from callqueue.limits import (
    SECOND,
    Concurrency,
    FixedWindow,
    Limit,
    Meter,
    SlidingWindow,
    TokenBucket,
    Usage,
    bucket_level,
)
from callqueue.slots import Series, Slots, total_cost

COARSE = 2000  # a window that may hold more attempts than this is summed by the database, not read row by row
SLICES = 240  # parts of such a window whose charges are told apart by those who only look
MARGIN = 60 * SECOND
GRAIN = 1000  # what was free in such a window is remembered, and counted again at most this often per window

Scope = tuple[str, str]  # a budget's id, and the value of its `per` ("" for per="rule")


@dataclass(frozen=True)
class Aged:
    """An answered attempt, or several that can be told apart no more."""

    rule: str
    key: str
    queue: str
    cost: Any
    sent_at: int | None
    finished_at: int


class KnownRoom(Meter):
    """A coarse budget between two counts: so much was free, less what was released since. Room can only have grown."""

    def __init__(self, capacity: int, free: int, now: int) -> None:
        self.free, self.used, self._now = max(0, free), capacity - free, now

    def free_at(self, cost: int) -> int | None:
        return self._now if cost <= self.free else None

    def take(self, cost: int) -> None:
        self.free -= cost
        self.used += cost


@dataclass
class Account:
    """The charges on the budgets of some rules at `now` (microseconds on the database's clock).

    `memo` is what earlier passes remembered, and is updated; keep it with the rules' locked rows, or throw it away.
    `slots`: for those who only look, and for so long; a coarse budget that there is no time to count is estimated, and
    `estimated` names it.
    """

    using: str
    book: Book
    rules: tuple[str, ...]
    now: int
    memo: dict[str, Any] = field(default_factory=dict)
    slots: Slots | None = None
    estimated: set[Scope] = field(default_factory=set)
    open_by_queue: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    open_by_rule: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    unbegun_since: dict[str, int] = field(default_factory=dict)  # by rule: when the oldest that no worker has begun was released
    recount_at: int | None = None  # when a coarse budget that is used up may be counted again
    _open: dict[Scope, int] = field(default_factory=lambda: defaultdict(int))
    _aged: dict[Scope, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    _coarse: dict[Scope, int] = field(default_factory=dict)
    _meters: dict[Scope, Meter] = field(default_factory=dict)
    _keys_read: set[str] = field(default_factory=set)
    _oldest_open: int | None = None
    open_count: int = 0

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Every budget of the rules."""
        return self.book.group_budgets(self.rules)

    def meter(self, budget: Budget, value: str = "") -> Meter:
        """The meter of one budget for one value of its `per`."""
        scope = (budget.id, value)
        if scope not in self._meters:
            self._meters[scope] = self._new_meter(budget, scope)
        return self._meters[scope]

    def read_keys(self, keys: Iterable[str]) -> None:
        """Read what the budgets per key are charged with for these keys; each key is read once."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self._keys_read]
        budgets = [b for b in self.budgets if b.limit.per == "key"]
        if not budgets or not wanted:
            return
        self._keys_read.update(wanted)
        fine = [b for b in budgets if not is_coarse(b.limit)]
        for row in _aged_rows(self, fine, keys=wanted):
            self._age(row, fine)
        for budget in budgets:
            if is_coarse(budget.limit):
                for key, total in _sums_by(self, budget, "key", wanted).items():
                    self._coarse[budget.id, key_part(key, "key")] = total

    def usage(self, budget: Budget, value: str = "") -> Usage:
        """What one budget is charged with, for one value of its `per`. A coarse window's charges come in slices of it."""
        scope, limit = (budget.id, value), budget.limit
        if is_coarse(limit):
            return Usage(self._open.get(scope, 0), _sliced(self, budget, value), limit.horizon(self.now))
        usage = Usage(self._open.get(scope, 0), sorted(self._aged.get(scope, ())), limit.horizon(self.now))
        if isinstance(limit, TokenBucket) and limit.per in ("rule", "queue"):
            usage = self._remembered_level(limit, scope, usage)
        return usage

    def values(self, budget: Budget) -> list[str]:
        """The values of the budget's `per` that are known to be charged: of open attempts, and of those that were read."""
        charged = {**self._open, **self._aged, **self._coarse}
        return sorted({value for budget_id, value in charged if budget_id == budget.id})

    def _read(self) -> None:
        _read_open(self)
        if self._oldest_open is None or self._oldest_open > self.now:
            self._oldest_open = self.now
        fine = [b for b in self.budgets if b.limit.per != "key" and not is_coarse(b.limit) and not _is_open_only(b.limit)]
        for row in _aged_rows(self, fine):
            self._age(row, fine)

    def _age(self, row: Aged, budgets: Sequence[Budget]) -> None:
        for budget in budgets:
            if row.rule in budget.rules and (cost := cost_of(row.cost, budget.limit.unit)):
                at = budget.limit.aged_from(row.sent_at, row.finished_at)
                self._aged[budget.id, scope_value(budget.limit, row.key, row.queue)].append((at, cost))

    def _new_meter(self, budget: Budget, scope: Scope) -> Meter:
        limit = budget.limit
        if isinstance(limit, SlidingWindow | FixedWindow) and is_coarse(limit):
            return self._coarse_meter(budget, scope)
        return limit.meter(self.usage(budget, scope[1]), self.now)

    def _remembered_level(self, limit: TokenBucket, scope: Scope, usage: Usage) -> Usage:
        """The level kept from an earlier pass, brought up to the oldest instant that an open attempt may still age from."""
        kept = self.memo.get("levels", {}).get(_scope_text(scope))
        if kept and kept[2] == limit.rate_text + f" {limit.burst}" and usage.since <= kept[0] <= self.now:
            usage = Usage(usage.open, [c for c in usage.aged if c[0] > kept[0]], kept[0], kept[1])
        sealed = min(self._oldest_open or self.now, self.now)
        if sealed > usage.since:
            before = Usage(0, [c for c in usage.aged if c[0] <= sealed], usage.since, usage.level)
            level, at = bucket_level(limit, before, sealed)
            self.memo.setdefault("levels", {})[_scope_text(scope)] = [at, level, limit.rate_text + f" {limit.burst}"]
        return usage

    def _coarse_meter(self, budget: Budget, scope: Scope) -> Meter:
        limit = budget.limit
        if limit.per == "key":
            used = self._coarse.get(scope, 0) + self._open.get(scope, 0)
            return KnownRoom(limit.capacity, limit.capacity - used, self.now)
        kept = self.memo.get("free", {}).get(_scope_text(scope))
        every = limit.window_us // GRAIN
        horizon = limit.horizon(self.now)
        known = (
            kept is not None
            and kept[2] == limit.rate_text
            and horizon <= kept[0] <= self.now
            and kept[3] == horizon_id(limit, self.now)
            and not any(self.book.rules[rule].settle for rule in budget.rules)  # what settles may turn out dearer
        )
        if not known or (kept[1] < min(limit.capacity, 1000) and self.now - kept[0] >= every):
            if self.slots is not None:
                return self._counted_meter(budget, scope)
            used = _sum(self, budget, scope[1]) + self._open.get(scope, 0)
            kept = [self.now, limit.capacity - used, limit.rate_text, horizon_id(limit, self.now)]
            self.memo.setdefault("free", {})[_scope_text(scope)] = kept
        if kept[1] < 1000:
            again = kept[0] + every
            self.recount_at = again if self.recount_at is None else min(self.recount_at, again)
        return _RememberedRoom(limit.capacity, kept, self.now)

    def _counted_meter(self, budget: Budget, scope: Scope) -> Meter:
        """The meter of a coarse budget for those who only look: counted slot by slot, and estimated where time runs out."""
        counts, missing = _counted(self, budget, scope[1])
        if missing:
            self.estimated.add(scope)
        used = sum(counts.values()) + self._open.get(scope, 0)
        return KnownRoom(budget.limit.capacity, budget.limit.capacity - used, self.now)


class _RememberedRoom(KnownRoom):
    def __init__(self, capacity: int, kept: list[Any], now: int) -> None:
        super().__init__(capacity, kept[1], now)
        self._kept = kept

    def take(self, cost: int) -> None:
        super().take(cost)
        self._kept[1] -= cost


def read(
    using: str, book: Book, rules: Sequence[str], now: int, memo: dict[str, Any] | None = None, *, slots: Slots | None = None
) -> Account:
    """The account of these rules (a whole group) at `now`. Two statements, whatever the backlog and the limits' size.

    With `slots` it is for those who only look, and may estimate what there is no time to count.
    """
    account = Account(using, book, tuple(rules), now, memo if memo is not None else {}, slots)
    account._read()
    return account


def fits(account: Account, rule: str, key: str, cost: Any) -> bool:
    """Whether a call of this cost fits into every limit of its rule now, on one of the rule's queues at least."""
    queues, charge = account.book.rules[rule].queue_names, account.book.charge_of(rule, cost)
    return any(
        all(
            account.meter(b, scope_value(b.limit, key, queue)).free_at(charged_on(b.limit, charge)) == account.now
            for b in account.book.budgets[rule]
            if charged_on(b.limit, charge)
        )
        for queue in queues
    )


def open_counts(using: str) -> dict[str, int]:
    """How many attempts of each rule are open: what a waiting dispenser looks at to learn that an answer came."""
    return dict(rows(using, f"SELECT rule, COUNT(*) FROM {_table(using)} WHERE finished_at IS NULL GROUP BY rule"))


def horizon_id(limit: Limit, now: int) -> int:
    """Which calendar window `now` is in, for a fixed window; 0 for others."""
    return limit.horizon(now) if isinstance(limit, FixedWindow) else 0


def counted_for(book: Book) -> dict[str, int]:
    """By rule: microseconds after its end for which an attempt may still be counted by some limit, and a minute."""
    return {rule: max((b.limit.window_us for b in budgets), default=0) + MARGIN for rule, budgets in book.budgets.items()}


def longest_window(book: Book) -> int:
    """The longest of them; of attempts whose rule is not in the book any more, too."""
    return max(counted_for(book).values(), default=MARGIN)


def _table(using: str) -> str:
    from callqueue.models import CallAttempt

    return quoted(using, CallAttempt._meta.db_table)


def _attempts(using: str) -> Any:
    from callqueue.models import CallAttempt

    return CallAttempt.objects.using(using)


def _read_open(account: Account) -> None:
    """Sum the open attempts over no more columns than the budgets tell apart."""
    budgets = account.budgets
    columns = ["rule"]
    if any(len(account.book.rules[r].queue_names) > 1 for r in account.rules) or any(b.limit.per == "queue" for b in budgets):
        columns.append("queue")
    if any(b.limit.per not in ("rule", "queue") for b in budgets):
        columns.append("key")
    if any(b.limit.unit != "calls" for b in budgets) or _has_redirects_in_flight(account):
        columns.append("cost")
    names = ", ".join(quoted(account.using, column) for column in columns)
    found = rows(
        account.using,
        f"SELECT SUM(calls), COUNT(*), MIN(released_at), MIN(CASE WHEN started_at IS NULL THEN released_at END), {names} "
        f"FROM {_table(account.using)} "
        f"WHERE finished_at IS NULL AND rule IN ({places(account.rules)}) GROUP BY {names}",
        account.rules,
    )
    for calls, count, released_at, unbegun_since, *values in found:
        row = dict(zip(columns, values, strict=True))
        account.open_count += count
        account.open_by_queue[row.get("queue", "")] += count
        account.open_by_rule[row["rule"]] += count
        if unbegun_since is not None:
            since = account.unbegun_since.get(row["rule"], account.now)
            account.unbegun_since[row["rule"]] = min(since, instant_us(unbegun_since))
        oldest = instant_us(released_at)
        account._oldest_open = oldest if account._oldest_open is None else min(oldest, account._oldest_open)
        for budget in budgets:
            if row["rule"] in budget.rules:
                cost = charged_on(budget.limit, _loaded(row["cost"])) * count if "cost" in row else int(calls)
                account._open[budget.id, scope_value(budget.limit, row.get("key", ""), row.get("queue", ""))] += cost


def _has_redirects_in_flight(account: Account) -> bool:
    """Whether what open attempts charge differs between limits of calls: only those of requests count redirects."""
    follows = any(account.book.rules[rule].redirects for rule in account.rules if rule in account.book.rules)
    return follows and any(isinstance(budget.limit, Concurrency) for budget in account.budgets)


def _aged_rows(account: Account, budgets: Sequence[Budget], keys: Sequence[str] | None = None) -> Iterable[Aged]:
    """The answered attempts that any of the budgets may still count."""
    if not budgets:
        return
    using = account.using
    since = min(_since(account, b) for b in budgets)
    rules = sorted({rule for b in budgets for rule in b.rules if rule in account.book.rules})
    by_units = any(b.limit.unit != "calls" for b in budgets)
    key, what = quoted(using, "key"), "cost" if by_units else "calls"
    sql = (
        f"SELECT rule, {key}, queue, {what}, sent_at, finished_at FROM {_table(using)} "
        f"WHERE rule IN ({places(rules)}) AND finished_at > %s AND outcome <> %s"
    )
    params = [*rules, as_parameter(using, from_us(since)), states.VOIDED]
    if keys is not None:
        sql, params = f"{sql} AND {key} IN ({places(keys)})", [*params, *keys]
    for rule, name, queue, cost, sent_at, finished_at in rows(using, sql, params):
        sent = None if sent_at is None else instant_us(sent_at)
        yield Aged(rule, name, queue, _loaded(cost) if by_units else cost, sent, instant_us(finished_at))


def _loaded(cost: Any) -> Any:
    """A cost as JSON, from what the driver returned for its column."""
    return json.loads(cost) if isinstance(cost, str | bytes) else cost


def _since(account: Account, budget: Budget) -> int:
    """The end after which an attempt may still matter to the budget. A remembered bucket level needs only what is newer."""
    limit = budget.limit
    since = limit.horizon(account.now)
    if isinstance(limit, TokenBucket) and limit.per == "rule":
        kept = account.memo.get("levels", {}).get(_scope_text((budget.id, "")))
        if kept and kept[2] == limit.rate_text + f" {limit.burst}" and since <= kept[0] <= account.now:
            return int(kept[0])
    return since


def _sum(account: Account, budget: Budget, value: str) -> int:
    """What the answered attempts of a coarse budget charge now."""
    charged = _charged_rows(account, budget)
    if budget.limit.per == "queue":
        charged = charged.filter(queue=value)
    elif budget.limit.per != "rule":
        return sum(
            total for key, total in _sums_by(account, budget, "key", None).items() if key_part(key, budget.limit.per) == value
        )
    return int(charged.aggregate(total=total_cost(budget.limit.unit))["total"] or 0)


def _sliced(account: Account, budget: Budget, value: str) -> list[tuple[int, int]]:
    """What the answered attempts of a coarse budget charge, each slice of the window as one charge at its end."""
    limit, now = budget.limit, account.now
    if isinstance(limit, FixedWindow) or limit.per not in ("rule", "queue"):
        used = account.meter(budget, value).used - account._open.get((budget.id, value), 0)
        return [(now, used)] if used > 0 else []
    counts, _ = _counted(account, budget, value)
    late = limit.window_us // SLICES + round(limit.jitter * SECOND)
    return sorted((min(now, start + late), total) for start, total in counts.items() if total)


def _counted(account: Account, budget: Budget, value: str) -> tuple[dict[int, int], int]:
    """What the answered attempts of a coarse budget charge, by the beginning of slots of its window, and how many slots there
    was no time to count: each of those is taken to be like the mean of the others.
    """
    limit, now = budget.limit, account.now
    series, horizon = sliced(budget, value), limit.horizon(account.now)
    first = horizon if isinstance(limit, FixedWindow) else -(-horizon // series.width) * series.width
    starts = list(range(first, now + 1, series.width))
    sums = (account.slots or Slots(account.using, now)).sums(series, starts)
    missing = [start for start in starts if start not in sums]
    mean = round(sum(sums.values()) / len(sums)) if sums else 0
    room = max(0, limit.capacity - sum(sums.values()))
    return sums | dict.fromkeys(missing, min(mean, room // len(missing)) if missing else 0), len(missing)


def sliced(budget: Budget, value: str) -> Series:
    """What is summed for those who only look at a coarse budget."""
    limit = budget.limit
    width, expected = limit.window_us // SLICES, limit.capacity // SLICES
    return Series(budget.rules, limit.per, value, limit.unit, width, limit.strict, expected=expected)


def _sums_by(account: Account, budget: Budget, column: str, values: Sequence[str] | None) -> dict[str, int]:
    charged = _charged_rows(account, budget)
    if values is not None:
        charged = charged.filter(**{f"{column}__in": values})
    return dict(charged.values_list(column).annotate(total=total_cost(budget.limit.unit)).order_by())


def _charged_rows(account: Account, budget: Budget) -> QuerySet[Any]:
    horizon = from_us(budget.limit.horizon(account.now))
    charged: QuerySet[Any] = _attempts(account.using).charged().filter(rule__in=budget.rules, finished_at__gt=horizon)
    return charged


def is_coarse(limit: Limit) -> bool:
    """Whether the limit's window may hold so many attempts that they are summed."""
    return isinstance(limit, SlidingWindow | FixedWindow) and limit.n > COARSE and limit.unit == "calls"


def _is_open_only(limit: Limit) -> bool:
    return isinstance(limit, Concurrency)


def scope_value(limit: Limit, key: str, queue: str) -> str:
    """The value of the limit's `per` for a call with this key on this queue: which of its budgets it counts in."""
    if limit.per == "rule":
        return ""
    return queue if limit.per == "queue" else key_part(key, limit.per)


def _scope_text(scope: Scope) -> str:
    return "\x1f".join(scope)
