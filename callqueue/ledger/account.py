"""The ledger: what every budget is charged with now, from the attempts and their tallies. The only
place that counts.

An attempt is charged from its release until its answer, then ages from the latest instant at which
the provider can have counted it; a voided one never reached the wire and is not charged. `Account`
gives the meters that a pass plans with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from callqueue import states, tables
from callqueue.database import (
    as_parameter,
    from_us,
    instant_us,
    loaded,
    places,
    quoted,
    rows,
    to_us,
)
from callqueue.ledger.tallies import (
    COARSE,
    Scope,
    Tallies,
    fingerprint,
    former_sql,
    is_tallied,
    longest_gap,
    take_corrections,
)
from callqueue.ledger.time_buckets import Series, Slots, attempts, total_cost
from callqueue.limits.budgets import Book, Budget, charged_on, cost_of
from callqueue.limits.kinds import (
    SECOND,
    Concurrency,
    FixedWindow,
    Limit,
    Meter,
    TokenBucket,
    Usage,
    bucket_level,
)

SLICES = 240  # parts of a tallied window whose charges are told apart by those who only look
MARGIN = 60 * SECOND
LATELY = 2 * SECOND
GLANCED = 1000
SAMPLE = 500  # open attempts that are read where no limit asks how many there are


@dataclass(frozen=True)
class Aged:
    """An answered attempt."""

    rule: str
    key: str
    queue: str
    cost: Any
    sent_at: int | None
    finished_at: int
    released_at: int = 0  # read where a budget has former rules


class KnownRoom(Meter):
    """A tallied budget as those see it who only look: so much is free, and when there is more,
    nobody says.
    """

    def __init__(self, capacity: int, free: int, now: int) -> None:
        self.free, self.used, self._now = max(0, free), capacity - free, now

    def free_at(self, cost: int) -> int | None:
        return self._now if cost <= self.free else None

    def take(self, cost: int) -> None:
        self.free -= cost
        self.used += cost


@dataclass
class Memo:
    """What passes remember of a group of rules, in the row of its first.

    It is believed only while every row of the group has had as many passes since as `version` says,
    and names this group as the last that had one: whoever else released from one of the rules, or
    told its tallies anything, in whatever group, has made it void. `was`: what the clock showed
    before it jumped, so that what was due then still is.
    """

    levels: dict[str, list[Any]] = field(
        default_factory=dict
    )  # of token buckets: (instant, level, fingerprint) by scope
    tallies: dict[str, Any] = field(default_factory=dict)  # by budget: tallies.Kept
    places: dict[str, list[Any]] = field(
        default_factory=dict
    )  # by rule: where the look for keys stopped
    was: int = 0
    agreement: str = ""  # that by which keys were last found to be blocked

    @classmethod
    def load(cls, group: Sequence[str], kept: Mapping[str, tuple[int, Mapping[str, Any]]]) -> Memo:
        """From the group's rows: by rule how many passes there were, and the memo."""
        stored = kept[min(group)][1] if min(group) in kept else {}
        was = int(stored.get("was", 0))
        version, last = {rule: passes for rule, (passes, _) in kept.items()}, sorted(group)
        if (
            stored.get("version") != version
            or sorted(kept) != last
            or any(m.get("group") != last for _, m in kept.values())
        ):
            return cls(was=was)
        return cls(
            dict(stored["levels"]),
            dict(stored["tallies"]),
            dict(stored["places"]),
            was,
            stored.get("agreement", ""),
        )

    def dump(self, version: Mapping[str, int]) -> dict[str, Any]:
        """As JSON for the first row, once the rows have had so many passes; the others name the
        group.
        """
        return {
            "version": dict(version),
            "group": sorted(version),
            "levels": self.levels,
            "tallies": self.tallies,
            "places": self.places,
            "was": self.was,
            "agreement": self.agreement,
        }


@dataclass
class Account:
    """The charges on the budgets of some rules at `now` (microseconds on the database's clock).

    `memo` is what earlier passes remembered; `slots` is for those who only look, and for so long: a
    tallied budget is then counted from the attempts, or estimated where there is no time to;
    `estimated` names it.
    """

    using: str
    book: Book
    rules: tuple[str, ...]
    now: int
    until: int  # the instant up to which a pass releases
    memo: Memo = field(default_factory=Memo)
    slots: Slots | None = None
    has_corrections: bool = False
    estimated: set[Scope] = field(default_factory=set)
    open_by_queue: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    open_by_rule: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    unbegun_since: dict[str, int] = field(
        default_factory=dict
    )  # by rule: when the oldest that no worker has begun was released
    open_count: int = 0
    tallies: dict[str, Tallies] = field(default_factory=dict)  # by budget
    _open: dict[Scope, int] = field(default_factory=lambda: defaultdict(int))
    _aged: dict[Scope, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    _seen: dict[Scope, int] = field(
        default_factory=dict
    )  # of tallied budgets per key, for those who only look
    _meters: dict[Scope, Meter] = field(default_factory=dict)
    _keys_read: set[str] = field(default_factory=set)
    _oldest_open: int | None = None

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Every budget of the rules."""
        return self.book.group_budgets(self.rules)

    def meter(self, budget: Budget, value: str = "") -> Meter:
        """The meter of one budget for one value of its `per`."""
        scope = (budget.id, value)
        if scope not in self._meters:
            self._meters[scope] = self._new_meter(budget, value)
        return self._meters[scope]

    def read_keys(self, keys: Iterable[str]) -> None:
        """Read what the tallied budgets per key are charged with for these keys; each key is read
        once.
        """
        wanted = [key for key in dict.fromkeys(keys) if key not in self._keys_read]
        self._keys_read.update(wanted)
        for budget in self.budgets if wanted else ():
            if budget.limit.is_keyed and is_tallied(budget.limit):
                values = dict.fromkeys(budget.value_of(key, "") for key in wanted)
                if self.slots is None:
                    self.tallies[budget.id].load(values)
                else:
                    self._look_at(
                        budget, [value for value in values if (budget.id, value) not in self._seen]
                    )

    def usage(self, budget: Budget, value: str = "") -> Usage:
        """What one budget is charged with, for one value of its `per`. A tallied window's charges
        come in slices of it.
        """
        scope, limit = (budget.id, value), budget.limit
        if is_tallied(limit) and not self._is_read_by_rows(limit):
            return Usage(
                self._open.get(scope, 0), _sliced(self, budget, value), limit.horizon(self.now)
            )
        usage = Usage(
            self._open.get(scope, 0), sorted(self._aged.get(scope, ())), limit.horizon(self.now)
        )
        if isinstance(limit, TokenBucket) and not limit.is_keyed:
            usage = self._remembered_level(budget, scope, usage)
        return usage

    def answered(self) -> list[Scope]:
        """The scopes per key, of budgets that are not tallied, in which calls were answered
        lately.
        """
        keyed = [b for b in self.budgets if b.limit.is_keyed and b.id not in self.tallies]
        found = {scope for scope in self._aged if any(scope[0] == b.id for b in keyed)}
        in_flight = [b for b in keyed if isinstance(b.limit, Concurrency)]
        for rule, key in _answered_lately(self) if in_flight else ():
            found |= {(b.id, b.value_of(key, "")) for b in in_flight if rule in b.rules}
        return sorted(found)

    def values(self, budget: Budget) -> list[str]:
        """The values of the budget's `per` that are known to be charged: of open attempts, and of
        those that were read.
        """
        return sorted(
            {
                value
                for budget_id, value in {**self._open, **self._aged, **self._seen}
                if budget_id == budget.id
            }
        )

    def _read(self) -> None:
        self._tally()
        _read_open(self)
        if self._oldest_open is None or self._oldest_open > self.now:
            self._oldest_open = self.now
        fine = [
            b
            for b in self.budgets
            if not is_tallied(b.limit) and not isinstance(b.limit, Concurrency)
        ]
        for row in _aged_rows(self, fine):
            self._age(row, fine)

    def _tally(self) -> None:
        """Bring the tallies up to date: recounts first, then corrections, then what has left."""
        if self.slots is not None:
            return
        tallied = [budget for budget in self.budgets if is_tallied(budget.limit)]
        for budget in tallied:
            self.tallies[budget.id] = Tallies(
                self.using, budget, self.now, self.memo.tallies.get(budget.id), self.until
            )
        if tallied and self.has_corrections:
            take_corrections(self.using, self.rules, self.tallies.values())
        for one in self.tallies.values():
            if one.limit.is_keyed:
                one.advance()

    def _age(self, row: Aged, budgets: Sequence[Budget]) -> None:
        for budget in budgets:
            if budget.counts(row.rule, row.released_at) and (
                cost := cost_of(row.cost, budget.limit.unit)
            ):
                at = budget.limit.aged_from(row.sent_at, row.finished_at)
                self._aged[budget.id, budget.value_of(row.key, row.queue)].append((at, cost))

    def _new_meter(self, budget: Budget, value: str) -> Meter:
        if budget.id in self.tallies:
            return self.tallies[budget.id].meter(value)
        if is_tallied(budget.limit) and not self._is_read_by_rows(budget.limit):
            return self._counted_meter(budget, (budget.id, value))
        return budget.limit.meter(self.usage(budget, value), self.now)

    def _remembered_level(self, budget: Budget, scope: Scope, usage: Usage) -> Usage:
        """The level kept from an earlier pass, brought up to the oldest instant that an open
        attempt may still age from.
        """
        limit, name, kept = budget.limit, _scope_text(scope), self._kept_level(budget, scope)
        assert isinstance(limit, TokenBucket)
        if kept:
            usage = Usage(usage.open, [c for c in usage.aged if c[0] > kept[0]], kept[0], kept[1])
        sealed = min(self._oldest_open or self.now, self.now)
        if sealed > usage.since:
            before = Usage(0, [c for c in usage.aged if c[0] <= sealed], usage.since, usage.level)
            level, at = bucket_level(limit, before, sealed)
            self.memo.levels[name] = [at, level, fingerprint(budget)]
        return usage

    def _kept_level(self, budget: Budget, scope: Scope) -> list[Any] | None:
        kept = self.memo.levels.get(_scope_text(scope))
        since = budget.limit.horizon(self.now)
        return (
            kept
            if kept and kept[2] == fingerprint(budget) and since <= kept[0] <= self.now
            else None
        )

    def _is_read_by_rows(self, limit: Limit) -> bool:
        """Whether those who only look read a tallied limit's attempts one by one: of some keys, and
        not too many.
        """
        return (
            self.slots is not None
            and limit.is_keyed
            and (limit.capacity <= COARSE or isinstance(limit, TokenBucket))
        )

    def _look_at(self, budget: Budget, values: Sequence[str]) -> None:
        """Read what these values of a tallied budget per key are charged with, for those who only
        look.
        """
        horizon, unit = from_us(budget.limit.horizon(self.now)), budget.limit.unit
        for value in values:
            scope = (budget.id, value)
            charged = attempts(
                self.using, budget.rules, budget.limit.per, value, budget.former
            ).filter(finished_at__gt=horizon)
            if not self._is_read_by_rows(budget.limit):
                self._seen[scope] = int(charged.aggregate(total=total_cost(unit))["total"] or 0)
                continue
            self._seen[scope] = 0
            for key, cost, sent, ended in charged.values_list(
                "key", "cost", "sent_at", "finished_at"
            ):
                if budget.value_of(key, "") == value and (spent := cost_of(cost, unit)):
                    at = budget.limit.aged_from(None if sent is None else to_us(sent), to_us(ended))
                    self._aged[scope].append((at, spent))

    def _counted_meter(self, budget: Budget, scope: Scope) -> Meter:
        """The meter of a tallied budget for those who only look: counted slot by slot, and
        estimated where time runs out.
        """
        limit = budget.limit
        if limit.is_keyed:
            used = self._seen.get(scope, 0) + self._open.get(scope, 0)
            return KnownRoom(limit.capacity, limit.capacity - used, self.now)
        counts, missing = _counted(self, budget, scope[1])
        if missing:
            self.estimated.add(scope)
        used = sum(counts.values()) + self._open.get(scope, 0)
        return KnownRoom(limit.capacity, limit.capacity - used, self.now)


def read(
    using: str,
    book: Book,
    rules: Sequence[str],
    now: int,
    memo: Memo | None = None,
    *,
    until: int | None = None,
    slots: Slots | None = None,
    has_corrections: bool = False,
) -> Account:
    """The account of these rules (a whole group) at `now`. The same number of statements, whatever
    the backlog and the limits.

    `until`: up to when the caller releases; `has_corrections`: whether it is to tell the tallies
    what attempts cost after all, which those who hold the rules' lock may. With `slots` it is for
    those who only look, and may estimate what there is no time to count.
    """
    account = Account(
        using,
        book,
        tuple(rules),
        now,
        now if until is None else until,
        memo or Memo(),
        slots,
        has_corrections,
    )
    account._read()
    return account


def save(account: Account) -> None:
    """Write what the tallies became, and put into the memo what the next pass wants to know. Under
    the rules' lock.

    Of other budgets nothing stays in the memo: what this pass released is missing from their
    tallies.
    """
    for one in account.tallies.values():
        one.save()
    account.memo.tallies = {name: one.remembered() for name, one in account.tallies.items()}
    ids = {budget.id for budget in account.budgets}
    account.memo.levels = {
        scope: kept
        for scope, kept in account.memo.levels.items()
        if scope.partition("\x1f")[0] in ids
    }


def fits(account: Account, rule: str, key: str, cost: Any) -> bool:
    """Whether a call of this cost fits into every limit of its rule now, on one of the rule's
    queues at least.
    """
    queues, charge = account.book.rules[rule].queue_names, account.book.charge_of(rule, cost)
    return any(
        all(
            account.meter(b, b.value_of(key, queue)).free_at(charged_on(b.limit, charge))
            == account.now
            for b in account.book.budgets[rule]
            if charged_on(b.limit, charge)
        )
        for queue in queues
    )


def open_counts(using: str) -> dict[str, int]:
    """How many attempts of each rule are open."""
    return dict(
        rows(
            using,
            f"SELECT rule, COUNT(*) FROM {_table(using)} WHERE finished_at IS NULL GROUP BY rule",
        )
    )


def answers(using: str, rules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """What changes when an answer comes, by rule: how many attempts are open, up to GLANCED, and
    when the last one ended.

    What a dispenser that waits for answers looks at. One statement, which reads no more rows
    however many there are.
    """
    table = _table(using)
    count = f"SELECT COUNT(*) FROM (SELECT 1 FROM {table} WHERE finished_at IS NULL AND rule = %s LIMIT {GLANCED}) o"
    newest = f"SELECT MAX(finished_at) FROM {table} WHERE finished_at IS NOT NULL AND rule = %s"
    found = rows(
        using,
        " UNION ALL ".join([f"SELECT %s, ({count}), ({newest})"] * len(rules)),
        [r for r in rules for _ in "123"],
    )
    return {
        rule: (int(is_open), 0 if ended is None else instant_us(ended))
        for rule, is_open, ended in found
    }


def counted_for(book: Book) -> dict[str, int]:
    """By rule: microseconds after its end for which an attempt may still be counted by some limit,
    and a minute.
    """
    longest = dict.fromkeys(book.budgets, 0)
    for budget in book.all_budgets():
        for rule in (*budget.rules, *(name for name, _ in budget.former)):
            longest[rule] = max(longest.get(rule, 0), _counted_by(budget.limit))
    return {rule: window + MARGIN for rule, window in longest.items()}


def longest_window(book: Book) -> int:
    """The longest of them; of attempts whose rule is not in the book any more, too."""
    return max(counted_for(book).values(), default=MARGIN)


def _counted_by(limit: Limit) -> int:
    return limit.window_us + (longest_gap(limit) if is_tallied(limit) else 0)


def _table(using: str) -> str:
    return quoted(using, tables.CallAttempt._meta.db_table)


def _read_open(account: Account) -> None:
    """Sum the open attempts over no more columns than the budgets tell apart; a sample of them
    where no budget asks.
    """
    budgets = [b for b in account.budgets if b.id not in account.tallies]
    columns = ["rule"]
    if any(len(account.book.rules[r].queue_names) > 1 for r in account.rules) or any(
        b.limit.per == "queue" for b in budgets
    ):
        columns.append("queue")
    if any(b.limit.is_keyed for b in budgets):
        columns.append("key")
    if any(b.limit.unit != "calls" for b in budgets) or _has_redirects_in_flight(account):
        columns.append("cost")
    names = ", ".join(quoted(account.using, column) for column in columns)
    source = (
        f"{_table(account.using)} WHERE finished_at IS NULL AND rule IN ({places(account.rules)})"
    )
    if not budgets:
        source = f"(SELECT {names}, calls, released_at, started_at FROM {source} LIMIT {SAMPLE}) AS sample"
    sums = "SUM(calls), COUNT(*), MIN(released_at), MIN(CASE WHEN started_at IS NULL THEN released_at END)"
    sql, params = (
        f"SELECT 0, {sums}, {names} FROM {source} GROUP BY {names}",
        list[Any](account.rules),
    )
    formers = sorted({former for budget in budgets for former in budget.former}, key=str)
    for place, former in enumerate(formers, start=1):
        where, of_former = former_sql(account.using, former)
        of_it = f"{_table(account.using)} WHERE finished_at IS NULL AND {where}"
        sql, params = (
            f"{sql} UNION ALL SELECT {place}, {sums}, {names} FROM {of_it} GROUP BY {names}",
            [*params, *of_former],
        )
    for place, calls, count, released_at, unbegun_since, *values in rows(
        account.using, sql, params
    ):
        row = dict(zip(columns, values, strict=True))
        oldest = instant_us(released_at)
        account._oldest_open = (
            oldest if account._oldest_open is None else min(oldest, account._oldest_open)
        )
        for budget in budgets:
            if formers[place - 1] in budget.former if place else row["rule"] in budget.rules:
                cost = (
                    charged_on(budget.limit, loaded(row["cost"])) * count
                    if "cost" in row
                    else int(calls)
                )
                account._open[
                    budget.id, budget.value_of(row.get("key", ""), row.get("queue", ""))
                ] += cost
        if place:
            continue
        account.open_count += count
        account.open_by_queue[row.get("queue", "")] += count
        account.open_by_rule[row["rule"]] += count
        if unbegun_since is not None:
            since = account.unbegun_since.get(row["rule"], account.now)
            account.unbegun_since[row["rule"]] = min(since, instant_us(unbegun_since))


def _has_redirects_in_flight(account: Account) -> bool:
    """Whether what open attempts charge differs between limits of calls: only those of requests
    count redirects.
    """
    follows = any(
        account.book.rules[rule].redirects for rule in account.rules if rule in account.book.rules
    )
    return follows and any(isinstance(budget.limit, Concurrency) for budget in account.budgets)


def _aged_rows(account: Account, budgets: Sequence[Budget]) -> Iterable[Aged]:
    """The answered attempts that any of the budgets may still count, whatever their keys."""
    if not budgets:
        return
    using = account.using
    by_units = any(b.limit.unit != "calls" for b in budgets)
    key, what = quoted(using, "key"), "cost" if by_units else "calls"
    released = ", released_at" if any(b.former for b in budgets) else ""
    parts, params = [], list[Any]()
    for since, rules in _rules_by_since(account, budgets).items():
        parts.append(
            f"SELECT rule, {key}, queue, {what}, sent_at, finished_at{released} FROM {_table(using)} "
            f"WHERE rule IN ({places(rules)}) AND finished_at > %s AND outcome <> %s"
        )
        params += [*rules, as_parameter(using, from_us(since)), states.VOIDED]
    for rule, name, queue, cost, sent_at, finished_at, *released_at in rows(
        using, " UNION ALL ".join(parts), params
    ):
        sent, spent = (
            None if sent_at is None else instant_us(sent_at),
            loaded(cost) if by_units else cost,
        )
        yield Aged(
            rule, name, queue, spent, sent, instant_us(finished_at), *map(instant_us, released_at)
        )


def _rules_by_since(account: Account, budgets: Sequence[Budget]) -> dict[int, list[str]]:
    """Since when the attempts of which rules are wanted: no rule's are read for the sake of a
    longer window of another's.
    """
    since: dict[str, int] = {}
    for budget in budgets:
        for rule in (*budget.rules, *(name for name, _ in budget.former)):
            since[rule] = min(_since(account, budget), since.get(rule, account.now))
    found: dict[int, list[str]] = {}
    for rule, instant in sorted(since.items()):
        found.setdefault(instant, []).append(rule)
    return found


def _answered_lately(account: Account) -> list[Any]:
    """The rules and keys of what was answered in the last seconds."""
    since = as_parameter(account.using, from_us(account.now - LATELY))
    sql = (
        f"SELECT DISTINCT rule, {quoted(account.using, 'key')} FROM {_table(account.using)} WHERE "
    )
    return rows(
        account.using,
        f"{sql}rule IN ({places(account.rules)}) AND finished_at > %s",
        [*account.rules, since],
    )


def _since(account: Account, budget: Budget) -> int:
    """The end after which an attempt may still matter to the budget. A remembered bucket level
    needs only what is newer.
    """
    if isinstance(budget.limit, TokenBucket) and budget.limit.per == "rule":
        kept = account._kept_level(budget, (budget.id, ""))
        if kept:
            return int(kept[0])
    return budget.limit.horizon(account.now)


def _sliced(account: Account, budget: Budget, value: str) -> list[tuple[int, int]]:
    """What the answered attempts of a tallied budget charge, each slice of the window as one charge
    at its end.
    """
    limit, now = budget.limit, account.now
    if isinstance(limit, FixedWindow) or limit.is_keyed:
        used = account.meter(budget, value).used - account._open.get((budget.id, value), 0)
        return [(now, used)] if used > 0 else []
    counts, _ = _counted(account, budget, value)
    late = limit.window_us // SLICES + round(limit.jitter * SECOND)
    return sorted((min(now, start + late), total) for start, total in counts.items() if total)


def _counted(account: Account, budget: Budget, value: str) -> tuple[dict[int, int], int]:
    """What the answered attempts of a tallied budget charge, by the beginning of slots of its
    window, and how many slots there was no time to count: each of those is taken to be like the
    mean of the others.
    """
    limit, now = budget.limit, account.now
    series, horizon = sliced(budget, value), limit.horizon(account.now)
    first = (
        horizon if isinstance(limit, FixedWindow) else -(-horizon // series.width) * series.width
    )
    starts = list(range(first, now + 1, series.width))
    sums = (account.slots or Slots(account.using, now)).sums(series, starts)
    missing = [start for start in starts if start not in sums]
    mean = round(sum(sums.values()) / len(sums)) if sums else 0
    room = max(0, limit.capacity - sum(sums.values()))
    return sums | dict.fromkeys(missing, min(mean, room // len(missing)) if missing else 0), len(
        missing
    )


def sliced(budget: Budget, value: str) -> Series:
    """What is summed for those who only look at a tallied budget."""
    limit = budget.limit
    width, expected = limit.window_us // SLICES, limit.capacity // SLICES
    return Series(
        budget.rules,
        limit.per,
        value,
        limit.unit,
        width,
        limit.strict,
        budget.former,
        expected=expected,
    )


def _scope_text(scope: Scope) -> str:
    return "\x1f".join(scope)
