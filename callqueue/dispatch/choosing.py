"""Which calls a pass lets go: the candidates that fit. Locks candidates, writes turns of keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, Q

from callqueue import conf, states, tables
from callqueue.database import from_us, to_us
from callqueue.dispatch import planning
from callqueue.dispatch.next_look import ROOMY, Room, Wait
from callqueue.dispatch.planning import Plan
from callqueue.dispatch.turns import FEWEST, KeysInTurn
from callqueue.exceptions import InvalidCall
from callqueue.ledger import ready_calls
from callqueue.ledger.account import SAMPLE as KNOWN
from callqueue.ledger.account import Account
from callqueue.ledger.holds import Held
from callqueue.ledger.ready_calls import TOP, Candidate
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.sending.validation import check_cost

LATELY = 2.0  # seconds, of which the begun ones show how fast workers are
# attempts that a queue gets on trust: so many for each second that they may wait to be begun
PER_SECOND, LEAST, MOST = 3, 32, 1000
# attempts of each kind that are counted at most: where more have been begun, workers are there
SAMPLE = 5000
AGAIN = 250_000  # microseconds until a group is looked at again whose workers are behind


def trusted_count(lease: float) -> int:
    """How many unbegun attempts a queue may have whose workers have shown nothing yet."""
    return max(LEAST, min(MOST, round(PER_SECOND * lease)))


def rooms_of_workers(
    account: Account, candidates: Mapping[str, Sequence[Candidate]]
) -> tuple[dict[tuple[str, str], int], bool]:
    """By rule and queue, room for attempts where workers may be behind; whether calls exceed it."""
    lease = conf.current().release_lease
    rooms: dict[tuple[str, str], int] = {}
    is_short = False
    for rule, found in candidates.items():
        listed = [call for call in found if not call.is_permit]
        if _may_lack_workers(account, rule, listed, lease):
            queues = account.book.rules[rule].queue_names
            own = {(rule, queue): _room_of_queue(account, rule, queue, lease) for queue in queues}
            rooms |= own
            is_short |= sum(own.values()) < len(listed)
    return rooms, is_short


def _may_lack_workers(
    account: Account, rule: str, candidates: Sequence[Candidate], lease: float
) -> bool:
    """Whether much is open, or calls came back while nothing is known to be begun."""
    if not candidates:
        return False
    is_of_one_queue = len(account.book.rules[rule].queue_names) == 1
    has_begun = is_of_one_queue and account.open_by_rule[rule] and rule not in account.unbegun_since
    came_back = not (has_begun and account.is_counted) and any(c.last_attempt for c in candidates)
    return (
        came_back
        or account.is_cut
        or workers_may_be_behind(account.open_by_rule[rule])
        or account.open_by_rule[rule] + len(candidates) > trusted_count(lease)
    )


def workers_may_be_behind(open_attempts: int) -> bool:
    """Whether as many are open as go on trust, or all that an account may know of: its sample."""
    return open_attempts >= min(trusted_count(conf.current().release_lease), KNOWN)


def _room_of_queue(account: Account, rule: str, queue: str, lease: float) -> int:
    """How many more attempts may be released: some on trust and as many as were begun lately, less
    those unbegun. Where nobody seems to listen, one at a time: begun as soon as somebody does.
    """
    now = from_us(account.now)
    lately = now - timedelta(seconds=min(LATELY, lease / 4))
    rows = tables.attempts(account.using).filter(rule=rule, queue=queue)
    rows = rows.exclude(worker__startswith=states.OF_PERMITS)  # no workers of a queue's
    counts: dict[str, int] = (
        rows.open()
        .order_by()
        .values("pk", "started_at")[:SAMPLE]
        .aggregate(
            unbegun=Count("pk", filter=Q(started_at__isnull=True)),
            begun=Count("pk", filter=Q(started_at__gte=lately)),
        )
    )
    answered = rows.filter(finished_at__gte=lately, started_at__isnull=False)
    begun = counts["begun"] + answered.order_by()[:SAMPLE].count()
    is_unheard = not begun and _nobody_listens(rows, now, lease)
    return max(0, (1 if is_unheard else trusted_count(lease) + begun) - counts["unbegun"])


def _nobody_listens(attempts: Any, now: datetime, lease: float) -> bool:
    """Whether a queue's attempt was taken back lately, and none begun that was released since."""
    since = now - timedelta(seconds=2 * lease + 10)
    ended = attempts.filter(
        finished_at__gte=since, finished_at__gt=F("lease_until"), started_at__isnull=True
    )
    last = (
        ended.filter(outcome=states.VOIDED)
        .order_by("-finished_at")
        .values_list("released_at", flat=True)
        .first()
    )
    if last is None:
        return False
    shown = attempts.filter(
        Q(finished_at__isnull=True) | Q(finished_at__gte=last), started_at__gte=last
    )
    return not shown.exists()


@dataclass(frozen=True)
class _Found:
    calls: list[Candidate]
    wait: Wait = field(default=Wait())  # of the others, where all of these go
    is_limited: bool = False  # the others wait for room in the rule's own limits
    is_cut: bool = False  # the others wait for nothing: they were not looked for


def choose(
    account: Account,
    held: Held,
    served: Mapping[str, int],
    batch: int,
    sake: tuple[str, int] | None = None,
    room: Room = ROOMY,
) -> Plan:
    """Choose about `batch` releases of each rule at most, in as many statements whatever waits.
    `served`: when each rule was served last. `room`: of whoever makes the calls. `sake`: a rule and
    a priority, where the pass is for a permit: nothing is looked at that cannot go before it, and
    only permits go.
    """
    keys = KeysInTurn(account, held, batch)
    finder = _Finder(account, held, keys, batch, sake, room)
    found = {
        rule: finder.find_candidates(rule)
        for rule in account.rules
        if rule in account.book.settings.rules
        and not held.blocking_hold(rule)
        and finder.looks_at(rule)
    }
    candidates, unfit = _split_unfit({rule: one.calls for rule, one in found.items()}, account.book)
    rooms, is_short = rooms_of_workers(account, candidates)
    made = planning.plan(account, candidates, held, served, room, rooms)
    made.unfit = unfit
    gone = Counter(call.rule for call in made.releases)
    if sake is not None:
        made.drop_workers_calls()
    made.wait |= keys.finish(made) | _end_of_holds(account, held)
    for rule, one in found.items():
        made.wait |= one.wait
        if gone[rule] < len(candidates[rule]):
            continue
        if one.is_limited:
            at, budget = planning.next_opening(account, rule, _queues_not_held(account, held, rule))
            made.wait |= Wait.for_room(at)
            if budget is not None:
                made.binding.setdefault(rule, budget.id)
        made.wait |= Wait(is_unfinished=one.is_cut)
    if is_short:
        made.wait = replace(made.wait, is_unfinished=False) | Wait(until=account.now + AGAIN)
    return made


@dataclass(frozen=True)
class _Finder:
    """Finds and locks the candidates of one rule after the other; `sake` as in `choose`."""

    account: Account
    held: Held
    keys: KeysInTurn
    batch: int
    sake: tuple[str, int] | None
    room: Room = ROOMY

    def looks_at(self, rule: str) -> bool:
        """Whether calls of the rule may go before the one, if any, for whose sake the pass is."""
        rules = self.account.book.rules
        return self.sake is None or rules[rule].priority >= rules[self.sake[0]].priority

    def _least_priority(self, rule: str) -> int:
        return self.sake[1] if self.sake is not None and self.sake[0] == rule else -TOP

    def find_candidates(self, rule: str) -> _Found:
        """Lock a rule's next calls, as many as its limits in calls let go; what others wait for."""
        queues = _queues_not_held(self.account, self.held, rule)
        count = planning.room_of_rule(self.account, rule, self.batch, queues)
        if not count:
            return _Found([], is_limited=self.batch > 0)
        wanted = self._count_to_look_for(rule, count)
        calls, wait = self._next_candidates(rule, wanted)
        is_full = len(calls) >= self.batch
        if rule in self.keys.in_turn:
            wait |= Wait(is_unfinished=is_full)
        is_limited = count < self.batch and len(calls) >= count
        return _Found(calls, wait, is_limited, is_cut=is_full or len(calls) >= wanted < count)

    def _count_to_look_for(self, rule: str, count: int) -> int:
        """`count`; in other units, one more than fit of calls like the first, which is locked."""
        budgets = self.account.book.budgets[rule]
        if all(one.limit.unit == "calls" for one in budgets if one.limit.is_per_rule):
            return count
        args = self.account.using, rule, self.keys.wall, 1, self._least_priority(rule)
        first = ready_calls.lock_next(*args)
        if not first or _why_unfit(first[0], rule, self.account.book):
            return count
        least = FEWEST if rule in self.keys.in_turn else 1
        return min(count, max(least, 1 + planning.room_for_similar(self.account, first[0], count)))

    def _next_candidates(self, rule: str, count: int) -> tuple[list[Candidate], Wait]:
        least = self._least_priority(rule)
        if rule in self.keys.in_turn:
            return self.keys.lock_candidates(rule, count, least)
        using, wall, only = self.account.using, self.keys.wall, self.room.only_http
        found = ready_calls.lock_next(using, rule, wall, count, least, is_http=only)
        return found, Wait(on_room=only is not None)


def _split_unfit(
    by_rule: Mapping[str, Sequence[Candidate]], book: Book
) -> tuple[dict[str, list[Candidate]], dict[int, str]]:
    """The candidates that some instant could admit, and why the others, by id, never will go. What
    one dispenser's limit never admits and another's does, waits until one of the two has gone.
    """
    fit: dict[str, list[Candidate]] = {rule: [] for rule in by_rule}
    unfit: dict[int, str] = {}
    for rule, candidates in by_rule.items():
        for call in candidates:
            why = _why_unfit(call, rule, book)
            if why is None:
                fit[rule].append(call)
            else:
                unfit[call.id] = why
    return fit, unfit


def _why_unfit(call: Candidate, rule: str, book: Book) -> str | None:
    """Why no instant will ever admit the call, in words for its owner; None: some may."""
    if call.cost == 1:
        return None
    try:
        check_cost(call.cost)
    except InvalidCall as error:
        return str(error)
    for budget in book.settings.budgets[rule]:
        wanted = cost_of(call.cost, budget.limit.unit)
        if wanted > budget.limit.capacity and not _any_settings_admit(book, rule, budget, wanted):
            limit = f"{budget.limit.unit} are more than {budget.limit.label} ever admits"
            return f"cost: {wanted} {limit}"
    return None


def _any_settings_admit(book: Book, rule: str, own: Budget, wanted: int) -> bool:
    """Whether any dispenser's settings give this limit another unit, or as much as is wanted."""
    return any(
        wanted <= one.limit.capacity or one.limit.unit != own.limit.unit
        for one in book.budgets[rule]
        if one.known_as == own.known_as
    )


def _queues_not_held(account: Account, held: Held, rule: str) -> list[str]:
    names = account.book.rules[rule].queue_names
    return [queue for queue in names if not held.blocking_hold(rule, None, queue)]


def _end_of_holds(account: Account, held: Held) -> Wait:
    end = held.first_end(account.rules)
    return Wait(until=to_us(end) if end else None)
