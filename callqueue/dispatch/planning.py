"""Which of the candidates go now, by which queue, and at what instant: the decision of one pass, in
memory.

In: an account of the charges, candidates by rule, holds. Out: releases, and what the others wait
for. Calls may be released ahead of their slot, up to `account.until`, with the instant to send at.
No statement is made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from callqueue.dispatch.next_look import Wait
from callqueue.ledger.account import Account
from callqueue.ledger.holds import Held
from callqueue.ledger.ready_calls import Candidate
from callqueue.ledger.tallies import Scope
from callqueue.limits.budgets import Budget, charged_on
from callqueue.limits.kinds import Meter


@dataclass(frozen=True)
class Release:
    """A candidate that goes: by this queue, to be sent at `send_at` (microseconds, the database's
    clock; None: at once).
    """

    candidate: Candidate
    queue: str
    send_at: int | None


@dataclass
class Plan:
    """What a pass decided: who goes, what those wait for who do not, and who is kept back by which
    budget per key.
    """

    releases: list[Release] = field(default_factory=list)
    wait: Wait = field(default=Wait())
    kept_back: list[tuple[Candidate, Budget]] = field(default_factory=list)

    def keep_back(self, candidate: Candidate, budget: Budget, instant: int | None) -> None:
        """Note that a candidate waits for room in the budget: until `instant`, or for an answer
        where that is None.
        """
        if budget.limit.is_keyed:
            self.kept_back.append((candidate, budget))
        self.wait |= Wait.for_room(instant)


def plan(
    account: Account,
    candidates: Mapping[str, Iterable[Candidate]],
    held: Held,
    served: Mapping[str, int],
) -> Plan:
    """Choose releases up to the instant `account.until`: rules by priority, equals in turns, each
    rule's candidates in order.

    `served` says when each rule was served last (a running number). A call that waits for a budget
    shuts it for those behind it, so that a costly call is not starved by cheap ones.
    """
    made = Plan()
    queues = {rule: deque(listed) for rule, listed in candidates.items()}
    turn = {rule: served.get(rule, 0) for rule in queues}
    clock = max(turn.values(), default=0)
    shut: set[Scope] = set()
    while queues:
        rule = min(queues, key=lambda name: (-account.book.rules[name].priority, turn[name], name))
        if not queues[rule] or not _next(account, made, rule, queues[rule], held, shut):
            del queues[rule]
        else:
            clock += 1
            turn[rule] = clock
    return made


def room(account: Account, rule: str, most: int) -> int:
    """How many calls of cost 1 the rule's own limits let go by `account.until`; at most `most`."""
    meters = own_meters(account, rule)
    return min((most_that_fits(meter, account.until, most) for meter in meters), default=most)


def own_meters(account: Account, rule: str) -> list[Meter]:
    """The meters of the rule's own limits: those per rule, in calls."""
    return [
        account.meter(budget)
        for budget in account.book.budgets[rule]
        if budget.limit.per == "rule" and budget.limit.unit == "calls"
    ]


def most_that_fits(meter: Meter, until: int, most: int) -> int:
    """The largest cost up to `most` that fits by `until`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        instant = meter.known_at(middle)
        if instant is not None and instant <= until:
            low = middle
        else:
            high = middle - 1
    return low


def _next(
    account: Account,
    made: Plan,
    rule: str,
    waiting: deque[Candidate],
    held: Held,
    shut: set[Scope],
) -> bool:
    """Release the rule's next candidate that fits; False when none does, or none is left."""
    while waiting:
        candidate = waiting.popleft()
        if held.blocking(rule, candidate.key):
            continue
        queue, instant, binding = _best_queue(account, candidate, held, shut)
        if queue is not None and instant is not None and instant <= account.until:
            _take(account, candidate, queue)
            made.releases.append(
                Release(candidate, queue, instant if instant > account.now else None)
            )
            return True
        if binding is None:
            continue  # every queue is held
        budget, value = binding
        made.keep_back(candidate, budget, instant)
        shut.add((budget.id, value))
        if not budget.limit.is_keyed:
            return False
    return False


def _best_queue(
    account: Account, candidate: Candidate, held: Held, shut: set[Scope]
) -> tuple[str | None, int | None, tuple[Budget, str] | None]:
    """The queue with most room, the instant at which every limit admits the call there, and the
    budget that binds.

    A call that went before goes by the next of the queues that are free at the same instant:
    perhaps nobody listens on its last.
    """
    best: tuple[tuple[int, int, int, int], str, int] | None = None
    blocked: tuple[Budget, str] | None = None
    names = account.book.rules[candidate.rule].queue_names
    start = names.index(candidate.queue) + 1 if candidate.queue in names else None
    for place, queue in enumerate(names):
        if held.blocking(candidate.rule, None, queue):
            continue
        instant, binding = _free_at(account, candidate, queue, shut)
        if instant is None:
            blocked = blocked or binding
            continue
        turn = 0 if start is None else (place - start) % len(names)
        rank = (
            instant,
            turn,
            -_queue_room(account, candidate, queue),
            account.open_by_queue[queue],
        )
        if best is None or rank < best[0]:
            best, blocked = (rank, queue, instant), binding or blocked
    if best is None:
        return None, None, blocked
    return best[1], best[2], blocked


def _free_at(
    account: Account, candidate: Candidate, queue: str, shut: set[Scope]
) -> tuple[int | None, tuple[Budget, str] | None]:
    latest, binding = account.now, None
    for budget in account.book.budgets[candidate.rule]:
        cost = charged_on(budget.limit, candidate.cost)
        if not cost:
            continue
        value = budget.value_of(candidate.key, queue)
        instant = None if (budget.id, value) in shut else account.meter(budget, value).free_at(cost)
        if instant is None:
            return None, (budget, value)
        if instant > latest or binding is None:
            latest, binding = max(latest, instant), (budget, value)
    return latest, binding


def _queue_room(account: Account, candidate: Candidate, queue: str) -> int:
    budgets = [b for b in account.book.budgets[candidate.rule] if b.limit.per == "queue"]
    return min((account.meter(b, queue).free for b in budgets), default=0)


def _take(account: Account, candidate: Candidate, queue: str) -> None:
    account.open_by_queue[queue] += 1
    for budget in account.book.budgets[candidate.rule]:
        if cost := charged_on(budget.limit, candidate.cost):
            account.meter(budget, budget.value_of(candidate.key, queue)).take(cost)
