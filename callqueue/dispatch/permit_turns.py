"""Permits among the calls of a pass: which wait, where each takes its turn, and what one that was
asked for is told.

A permit that waits is a row, `PermitRequest`, and a candidate of every pass over its rule: by
priority, then by due time, as calls go. Callers hold the lock of the rules' rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from callqueue import database, tables
from callqueue.clocks import Reading
from callqueue.database import from_us, to_us
from callqueue.dispatch.planning import Choice
from callqueue.ledger.account import Account
from callqueue.ledger.holds import Held, InForce
from callqueue.ledger.ready_calls import TOP, Asked, Candidate
from callqueue.limits.budgets import Book

MOST = 500  # permits that one pass looks at
DEAD = 60_000_000  # microseconds after which a waiter that was taken for dead does not come back


@dataclass(frozen=True)
class Asking:
    """The permits of a pass, in the order in which they go. `alone`: the pass grants these, and
    releases no call: whoever makes it can publish none. `rules_with_calls`: which have any that are
    ready.
    """

    permits: Sequence[Candidate] = ()
    alone: bool = False
    rules_with_calls: frozenset[str] = frozenset()
    by_rule: Mapping[str, list[Candidate]] = field(init=False)

    def __post_init__(self) -> None:
        by_rule: dict[str, list[Candidate]] = {}
        for one in sorted(self.permits, key=lambda permit: permit.order):
            by_rule.setdefault(one.rule, []).append(one)
        object.__setattr__(self, "by_rule", by_rule)

    def concerns(self, rule: str, book: Book) -> bool:
        """Whether the rule's calls are to be looked at: all may go before a permit but those of
        rules with a lower priority.
        """
        if not self.alone:
            return True
        least = min((book.rules[name].priority for name in self.by_rule), default=TOP)
        return book.rules[rule].priority >= least

    def least(self, rule: str) -> int:
        """The lowest priority of the rule's calls that are to be looked at."""
        if not self.alone or rule not in self.by_rule:
            return -TOP
        return min(one.priority for one in self.by_rule[rule])


NOBODY = Asking()


def waiting(using: str, group: Sequence[str], now: int) -> list[Candidate]:
    """The permits of these rules that wait, and whose waiters live; locked. One statement, and one
    that deletes the rows of waiters that died, where there are no others. What those were granted
    ends with its lease.
    """
    stored = tables.permit_requests(using).filter(rule__in=group)
    living = stored.filter(attempt_id__isnull=True, alive_until__gt=from_us(now))
    rows = list(database.locked(living.order_by("-priority", "due_at_dt", "pk"))[:MOST])
    if not rows:
        stored.filter(alive_until__lt=from_us(now - DEAD)).delete()
    return [
        Candidate(
            id=row.pk,
            rule=row.rule,
            key=row.key,
            priority=row.priority,
            cost=row.cost,
            method="",
            last_attempt=0,
            due_at=row.due_at_dt,
            asked=Asked(row.owner, row.label, None if row.until is None else to_us(row.until)),
        )
        for row in rows
    ]


def merged(
    calls: Sequence[Candidate], permits: Sequence[Candidate], *, is_full: bool
) -> tuple[list[Candidate], bool]:
    """The rule's calls with its permits in their turns, where both come as they go; and whether
    permits are left out, since calls that were not listed (`is_full`) may go before them.
    """
    found, place = list[Candidate](), 0
    for permit in permits:
        while place < len(calls) and calls[place].order <= permit.order:
            found.append(calls[place])
            place += 1
        if is_full and place == len(calls):
            return found, True
        found.append(permit)
    return found + list(calls[place:]), False


@dataclass(frozen=True)
class Answer:
    """What a pass says to a permit. Granted: `attempt_id`, to begin at `send_at` (None: now).

    Else what it waits for: `reason`, and the instant at which that should end (None: nobody can
    say). `is_behind`: others go before it, of `waiting` permits, or may, where `until` is known;
    `is_first`: none of its rule and key does; `earliest`: no pass has room for it before, for all
    that is known; `is_held`: an operator or the provider keeps it back; `is_misfit`: no instant
    will ever admit it. Instants are microseconds.

    Without a `reading` of the clock no pass was made: somebody else has the rules; or, where
    `is_outdated`, the book is not what all agree on; or `is_gone`: no pass sees the permit's
    request.
    """

    reading: Reading | None = None
    attempt_id: int | None = None
    queue: str = ""
    send_at: int | None = None
    until: int | None = None
    reason: str = ""
    is_behind: bool = False
    is_first: bool = True
    waiting: int = 0
    earliest: int | None = None
    is_held: bool = False
    is_misfit: bool = False
    is_outdated: bool = False
    is_gone: bool = False


def answer(
    own: Candidate,
    held: Held,
    book: Book,
    choice: Choice,
    granted: Mapping[str, int],
    reading: Reading,
) -> Answer:
    """What the pass has come to for this permit."""
    owner = own.asked.owner if own.asked is not None else ""
    if owner in granted:
        made = next(one for one in choice.releases if one.candidate.asked == own.asked)
        return Answer(reading, granted[owner], made.queue, made.send_at)
    if owner in choice.misfits:
        return Answer(reading, reason=choice.misfits[owner], is_misfit=True)
    if (hold := _hold_on(own, held, book)) is not None:
        until = None if hold.until is None else database.to_us(hold.until)
        reason = f"held: {hold.reason}" if hold.reason else "held"
        return Answer(reading, until=until, reason=reason, is_held=True)
    if (blocked := choice.blocked.get(owner)) is not None:
        label = blocked.budget.limit.label
        return Answer(reading, until=blocked.instant, reason=f"{label} is used up")
    return Answer(reading, reason="others go before it", is_behind=True)


def with_place(found: Answer, own: Candidate, account: Account, asking: Asking) -> Answer:
    """The answer to a permit that is to wait, and its place among those that wait too."""
    if found.attempt_id is not None or found.is_misfit:
        return found
    rivals = [one for one in asking.permits if one.rule == own.rule and one is not own]
    ahead = [one for one in rivals if one.order <= own.order]
    of_key = [one for one in ahead if one.key == own.key]
    # Those of other keys may wait for something else, and take no room.
    by_key = any(budget.limit.is_keyed for budget in account.book.budgets[own.rule])
    may_be_behind = bool(of_key) or (by_key and own.rule in asking.rules_with_calls)
    return replace(
        found,
        is_behind=found.is_behind or (may_be_behind and not found.is_held),
        is_first=not of_key,
        waiting=len(asking.permits),
        earliest=_earliest(account, own, of_key if by_key else ahead),
    )


def _earliest(account: Account, own: Candidate, ahead: Sequence[Candidate]) -> int | None:
    """When the limits that all of its rule share have room for it and those ahead of it; for as
    many of those as the ledger can say, and None where it cannot for any.
    """
    instants = []
    for budget in account.book.budgets[own.rule]:
        if not budget.limit.is_per_rule:
            continue
        meter, least = account.meter(budget), budget.charge_of(own.cost)
        is_exact = budget.id not in account.tallies
        more = sum(budget.charge_of(one.cost) for one in ahead) if is_exact else 0
        instant = meter.free_at(min(budget.limit.capacity, least + more))
        while instant is None and more:
            more //= 2
            instant = meter.free_at(min(budget.limit.capacity, least + more))
        if instant is None:
            return None
        instants.append(instant)
    return max(instants, default=None)


def _hold_on(own: Candidate, held: Held, book: Book) -> InForce | None:
    """The hold that keeps a permit back; where all queues are held, the first to end."""
    on_queues = [held.blocking(own.rule, None, q) for q in book.rules[own.rule].queue_names]
    if (hold := held.blocking(own.rule, own.key)) is None and all(on_queues):
        hold = min((one for one in on_queues if one is not None), key=lambda one: one.end)
    return hold
