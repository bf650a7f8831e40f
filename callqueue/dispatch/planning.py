"""Which candidates a pass releases, by which queue and for which slot; how many fit. In memory."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from callqueue.clocks import Us
from callqueue.database import to_us
from callqueue.dispatch.next_look import ROOMY, Room, Wait
from callqueue.handlers import HTTP_METHODS
from callqueue.ledger.account import Account
from callqueue.ledger.holds import Held
from callqueue.ledger.ready_calls import Candidate
from callqueue.ledger.tallies import Scope
from callqueue.limits.budgets import Budget
from callqueue.limits.kinds import SECOND, Meter

# of a longer window it is a small part how much later a review sees what a call did not use up
SHORT = 10 * SECOND


@dataclass
class Plan:
    releases: list[Candidate] = field(default_factory=list)
    wait: Wait = field(default=Wait())  # of those who do not go
    # calls that wait for a budget per key, with that budget
    kept_back: list[tuple[Candidate, Budget]] = field(default_factory=list)
    # by rule, the budget that keeps its next call back, by id
    binding: dict[str, str] = field(default_factory=dict)
    # the calls that no instant will ever admit, by id, and why
    unfit: Mapping[int, str] = field(default_factory=dict)

    def drop_workers_calls(self) -> None:
        """Drop workers' calls, which nobody here publishes, and if any, what they may keep back."""
        own = [call for call in self.releases if call.is_permit]
        self.kept_back = self.kept_back if len(own) == len(self.releases) else []
        self.releases = own

    def note_kept_back(self, candidate: Candidate, budget: Budget) -> None:
        """Note the budget that a candidate waits for: the first of its rule, and each per key."""
        self.binding.setdefault(candidate.rule, budget.id)
        if budget.limit.is_keyed:
            self.kept_back.append((candidate, budget))


def plan(
    account: Account,
    candidates: Mapping[str, Iterable[Candidate]],
    held: Held,
    served: Mapping[str, int],
    room: Room = ROOMY,
    room_of_workers: Mapping[tuple[str, str], int] | None = None,
) -> Plan:
    """Choose releases up to `account.until`: rules by priority, equals in turns, calls in order.
    A call that waits for a budget shuts it for those behind it, so that a costly call is not
    starved by cheap ones. One that waits for room with its maker shuts nothing: another process may
    have some. `served`: when each rule was served last (a running number). `room_of_workers`: by
    rule and queue, how many attempts workers have room for; what is not in it, for any number.
    """
    planner = _Planner(account, held, room, room_of_workers or {})
    queues = {rule: deque(listed) for rule, listed in candidates.items()}
    turn = {rule: served.get(rule, 0) for rule in queues}
    clock = max(turn.values(), default=0)
    rules = account.book.rules
    while queues:
        rule = min(queues, key=lambda name: (-rules[name].priority, turn[name], name))
        if planner.release_next(queues[rule]):
            clock += 1
            turn[rule] = clock
        else:
            del queues[rule]
    return planner.made


def room_of_rule(account: Account, rule: str, most: int, queues: Collection[str]) -> int:
    """How many more its limits in calls admit by `account.until`, by these queues; up to `most`."""
    of_rule, of_queues = _limits_in_calls(account, rule)
    for budget in of_rule:
        most = most_that_fits(account.meter(budget), account.until, most)
    if not of_queues:
        return most
    by_queue = (
        min(most_that_fits(account.meter(one, queue), account.until, most) for one in of_queues)
        for queue in queues
    )
    return min(most, sum(by_queue))


def next_opening(
    account: Account, rule: str, queues: Collection[str]
) -> tuple[Us | None, Budget | None]:
    """When a call of cost 1 may go (None: after an answer), and the limit in calls that says so."""
    of_rule, of_queues = _limits_in_calls(account, rule)
    ways = [
        max(
            (_opening_of(account, one, queue), -place, one)
            for place, one in enumerate((*of_rule, *of_queues))
        )
        for queue in (queues if of_queues else ("",))
    ]
    at, _, binding = min(ways, key=itemgetter(0), default=(math.inf, 0, None))
    return (None if at == math.inf else Us(int(at))), binding


def _opening_of(account: Account, budget: Budget, queue: str) -> float:
    instant = account.meter(budget, budget.value_of("", queue)).free_at(1)
    return math.inf if instant is None else instant


def room_for_similar(account: Account, call: Candidate, most: int) -> int:
    """How many calls of its cost the limits per rule in other units admit; up to `most`."""
    for budget in account.book.budgets[call.rule]:
        cost = budget.charge_of(call.cost)
        if budget.limit.is_per_rule and budget.limit.unit != "calls" and cost:
            most = most_that_fits(account.meter(budget), account.until, most, cost)
    return most


def _limits_in_calls(account: Account, rule: str) -> tuple[list[Budget], list[Budget]]:
    """The rule's own limits in calls: those per rule, and those per queue."""
    own = [one for one in account.book.budgets[rule] if one.limit.unit == "calls"]
    of_queues = [one for one in own if one.limit.is_per_queue]
    return [one for one in own if one.limit.is_per_rule], of_queues


def most_that_fits(meter: Meter, until: Us, most: int, cost: int = 1) -> int:
    """The largest number up to `most` of calls of this cost that fit by `until`."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2 + 1
        instant = meter.known_free_at(middle * cost)
        if instant is not None and instant <= until:
            low = middle
        else:
            high = middle - 1
    return low


class _Way(NamedTuple):
    """A queue that a candidate may go by."""

    queue: str
    instant: Us | None  # from when on; None: after an answer, or behind another call that waits
    binding: tuple[Budget, str] | None  # which budget says so, for which value of its `per`
    charges: Sequence[tuple[Meter, int]] = ()  # what it takes of each meter, where it goes


class _Planner:
    def __init__(
        self,
        account: Account,
        held: Held,
        room: Room,
        room_of_workers: Mapping[tuple[str, str], int],
    ) -> None:
        self.account, self.held, self.room = account, held, room
        self.room_of_workers = dict(room_of_workers)
        self.made = Plan()
        self._count = Counter[bool]()  # of releases, by whether they are HTTP calls
        self._shut: set[Scope] = set()  # what a call waits for: those behind it must not take it

    def release_next(self, waiting: deque[Candidate]) -> bool:
        """Release a rule's next candidate that fits. False: none does, or one keeps all back."""
        while waiting:
            candidate = waiting.popleft()
            if self.held.blocking_hold(candidate.rule, candidate.key):
                continue
            if not self._has_room(candidate):
                self.made.wait |= Wait(on_room=True)
                continue
            way = self._best_way(candidate)
            if way is None:
                continue
            if way.instant is not None and way.instant <= self._latest_release(candidate):
                self._release(candidate, way, way.instant)
                return True
            if way.binding is not None and not self._keep_back(candidate, way):
                return False
        return False

    def _has_room(self, candidate: Candidate) -> bool:
        is_http = candidate.method in HTTP_METHODS
        has_room = self.room.takes_more_than(self._count[is_http], is_http=is_http)
        return candidate.is_permit or has_room

    def _release(self, candidate: Candidate, way: _Way, instant: Us) -> None:
        candidate.queue = way.queue
        candidate.send_at = instant if instant > self.account.now else None
        self.made.releases.append(candidate)
        if not candidate.is_permit:
            self.account.open_by_queue[way.queue] += 1
            if (of_queue := (candidate.rule, way.queue)) in self.room_of_workers:
                self.room_of_workers[of_queue] -= 1
            self._count[candidate.method in HTTP_METHODS] += 1
        for meter, cost in way.charges:
            meter.take(cost)

    def _latest_release(self, candidate: Candidate) -> int:
        until, expires_at = self.account.until, candidate.expires_at
        return until if expires_at is None else min(until, to_us(expires_at) - self.account.moved)

    def _keep_back(self, candidate: Candidate, way: _Way) -> bool:
        """Keep it back, and those behind it; whether those of other keys may go."""
        assert way.binding is not None
        budget, value = way.binding
        self.made.note_kept_back(candidate, budget)
        if (budget.id, value) not in self._shut:  # else it waits for what the one before it does
            self.made.wait |= Wait.for_room(way.instant)
            self.made.wait |= Wait(on_answer=self._may_open_sooner(budget))
            self._shut.add((budget.id, value))
        return budget.limit.is_keyed

    def _may_open_sooner(self, budget: Budget) -> bool:
        """Whether a short window may have room sooner: an open call may cost less than charged."""
        rules, has_open = self.account.book.rules, self.account.open_count or self.made.releases
        settles = any(rules[name].settle for name in budget.rules)
        return bool(settles and has_open) and budget.limit.window_us <= SHORT

    def _best_way(self, candidate: Candidate) -> _Way | None:
        """Best by `_rank`; the first, if all wait for answers; None: all held or workers behind."""
        rule, names = candidate.rule, self.account.book.rules[candidate.rule].queue_names
        free = [queue for queue in names if not self.held.blocking_hold(rule, None, queue)]
        if not candidate.is_permit:
            free = [queue for queue in free if self.room_of_workers.get((rule, queue), 1) > 0]
        if len(free) == 1:
            return self._way_by(candidate, free[0])
        ways = [self._way_by(candidate, queue) for queue in free]
        known = [way for way in ways if way.instant is not None]
        if len(known) > 1:
            return min(known, key=lambda way: self._rank(candidate, way))
        return next(iter(known or ways), None)

    def _way_by(self, candidate: Candidate, queue: str) -> _Way:
        """When every limit admits the call on this queue, and the budget that does so last."""
        latest, binding, charges = self.account.now, None, []
        for budget in self.account.book.budgets[candidate.rule]:
            cost = budget.charge_of(candidate.cost)
            if not cost:
                continue
            value = budget.value_of(candidate.key, queue)
            meter = self.account.meter(budget, value)
            is_shut = (budget.id, value) in self._shut
            instant = None if is_shut else meter.free_at(cost)
            if instant is None:
                return _Way(queue, None, (budget, value))
            charges.append((meter, cost))
            if instant > latest or binding is None:
                latest, binding = max(latest, instant), (budget, value)
        return _Way(queue, latest, binding, charges)

    def _rank(self, candidate: Candidate, way: _Way) -> tuple[int, int, int, int]:
        """The least is best: when it is free, whose turn it is, the most room, the fewest open."""
        names = self.account.book.rules[candidate.rule].queue_names
        turn = 0
        if candidate.queue in names:  # perhaps nobody listens on its last
            turn = (names.index(way.queue) - names.index(candidate.queue) - 1) % len(names)
        budgets = [b for b in self.account.book.budgets[candidate.rule] if b.limit.is_per_queue]
        free = min((self.account.meter(b, way.queue).free for b in budgets), default=0)
        return way.instant or 0, turn, -free, self.account.open_by_queue[way.queue]
