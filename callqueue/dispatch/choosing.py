"""Which calls a pass lets go: candidates of every rule, no more than its limits can let go, and of
those the ones that fit, by a queue whose workers have room.

In: an account and the holds. Out: releases, calls that never fit, and what the others wait for.
Locks the candidates, and writes the turns of keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from callqueue.database import from_us, to_us
from callqueue.dispatch import backpressure, permit_turns, planning
from callqueue.dispatch.candidates_by_key import FEWEST, KeysInTurn
from callqueue.dispatch.next_look import Wait
from callqueue.dispatch.permit_turns import NOBODY, Asking
from callqueue.dispatch.planning import Blocked, Plan, Release
from callqueue.exceptions import InvalidCall
from callqueue.ledger import ready_calls
from callqueue.ledger.account import Account
from callqueue.ledger.holds import Held
from callqueue.ledger.ready_calls import Candidate
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.maintenance import breaker
from callqueue.sending.validation import check_cost


@dataclass(frozen=True)
class Choice:
    """What a pass lets go. `unfit`: the calls that no instant will ever admit, by id, and why;
    `misfits`: such permits, by owner. `blocked`: by owner, the permits that only wait for room.
    `binding`: by rule, the budget that keeps its next call back, by id.
    """

    releases: Sequence[Release]
    unfit: Mapping[int, str]
    wait: Wait
    misfits: Mapping[str, str] = field(default_factory=dict)
    blocked: Mapping[str, Blocked] = field(default_factory=dict)
    binding: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    """The candidates of a rule, in the order in which they should go, and what the other calls wait
    for.

    `is_limited`: where all of these go, for room in the rule's own limits; `is_cut`: where all of
    these go, nothing keeps back those behind them. Where not all go, the plan says what the others
    wait for. `most`: how many may go, where no limit says so: one that probes the rule.
    """

    calls: list[Candidate]
    wait: Wait = field(default=Wait())
    is_limited: bool = False
    is_cut: bool = False
    most: int | None = None


def choose(
    account: Account,
    held: Held,
    served: Mapping[str, int],
    batch: int,
    asking: Asking = NOBODY,
) -> Choice:
    """Choose at most about `batch` releases of each rule; `served`: when each rule was served last;
    `asking`: the permits that wait.

    The same number of statements whatever waits.
    """
    keys = KeysInTurn(account, held, batch)
    finder = _Finder(account, held, keys, batch, asking)
    found = {
        rule: finder.find(rule)
        for rule in account.rules
        if rule in account.book.settings.rules
        and not held.blocking(rule)
        and asking.concerns(rule, account.book)
    }
    candidates, unfit = _fit({rule: one.calls for rule, one in found.items()}, account.book)
    held_or_full, is_short = backpressure.with_full_queues(account, candidates, held)
    in_turn, misfits, left_out = _with_permits(account, candidates, found, asking, batch)
    made = planning.plan(account, in_turn, held_or_full, served)
    if asking.alone:
        made = made.of_permits(account)
        return Choice(made.releases, unfit, Wait(), misfits, made.blocked)
    wait = made.wait | left_out | keys.settle(_of_calls(made)) | _wait_for_holds(account, held)
    gone = Counter(one.candidate.rule for one in made.releases if one.candidate.asked is None)
    for rule, one in found.items():
        wait |= one.wait
        if gone[rule] < len(candidates[rule]):
            continue
        if one.is_limited:
            queues = _queues(account, held, rule)
            wait |= Wait.for_room(planning.has_room_at(account, rule, queues))
            if (budget := planning.binding(account, rule, queues)) is not None:
                made.binding.setdefault(rule, budget.id)
        wait |= Wait(is_unfinished=one.is_cut)
    if is_short:
        wait = replace(wait, is_unfinished=False) | Wait(until=account.now + backpressure.AGAIN)
    return Choice(made.releases, unfit, wait, misfits, made.blocked, made.binding)


def _of_calls(made: Plan) -> Plan:
    """The plan as the turns of keys go by it: permits take none."""
    calls = [one for one in made.releases if one.candidate.asked is None]
    return Plan(calls, made.wait, made.kept_back)


def _with_permits(
    account: Account,
    calls: Mapping[str, Sequence[Candidate]],
    found: Mapping[str, _Found],
    asking: Asking,
    batch: int,
) -> tuple[dict[str, Sequence[Candidate]], dict[str, str], Wait]:
    """The candidates with the permits in their turns; why some permits never fit; and what those
    wait for that are left out.
    """
    in_turn: dict[str, Sequence[Candidate]] = dict(calls)
    misfits: dict[str, str] = {}
    is_unfinished = False
    account.read_keys([one.key for one in asking.permits])
    for rule, permits in asking.by_rule.items():
        if rule not in found:
            continue
        fit = []
        for one in permits:
            why = _unfitness(one, rule, account.book)
            if why is None:
                fit.append(one)
            elif one.asked is not None:
                misfits[one.asked.owner] = why
        is_full = len(found[rule].calls) >= batch
        listed, is_short = permit_turns.merged(calls[rule], fit, is_full=is_full)
        in_turn[rule] = listed[: found[rule].most]
        is_unfinished |= is_short
    return in_turn, misfits, Wait(is_unfinished=is_unfinished)


@dataclass(frozen=True)
class _Finder:
    """Fetches candidates: as many of a rule as its own limits let go."""

    account: Account
    held: Held
    keys: KeysInTurn
    batch: int
    asking: Asking

    def find(self, rule: str) -> _Found:
        """The rule's candidates: one that probes it where its circuit breaker wants that."""
        queues = _queues(self.account, self.held, rule)
        count = planning.room(self.account, rule, self.batch, queues)
        probes = self._probes(rule)
        if probes is not None:
            return self._find_probe(rule, min(count, probes))
        if not count:
            return _Found([], is_limited=True)
        wanted = self._no_more_than_fit(rule, count)
        calls, wait = self._first(rule, wanted)
        is_full = len(calls) >= self.batch
        if self._take_turns(rule):
            wait |= Wait(is_unfinished=is_full)
        is_limited = count < self.batch and len(calls) >= count
        return _Found(calls, wait, is_limited, is_cut=is_full or len(calls) >= wanted < count)

    def _no_more_than_fit(self, rule: str, count: int) -> int:
        """How many of so many calls to look at, where the rule has limits in other units: one more
        than those that fit, if they cost as much as the first.
        """
        budgets = self.account.book.budgets[rule]
        if all(one.limit.unit == "calls" for one in budgets if one.limit.is_per_rule):
            return count
        args = self.account.using, rule, self.keys.due_by, 1, self.asking.least(rule)
        first = ready_calls.first(*args, locks=False)
        if not first or _unfitness(first[0], rule, self.account.book):
            return count
        least = FEWEST if self._take_turns(rule) else 1
        return min(count, max(least, 1 + planning.room_for(self.account, first[0], count)))

    def _take_turns(self, rule: str) -> bool:
        """Whether its keys have limits or holds of their own."""
        budgets = self.account.book.budgets[rule]
        return any(one.limit.is_keyed for one in budgets) or self.held.on_keys(rule)

    def _probes(self, rule: str) -> int | None:
        """How many calls may probe the rule; None where its circuit breaker does not want that."""
        if rule not in self.held.probing or self.account.book.rules[rule].breaker is None:
            return None
        open_attempts, now = self.account.open_by_rule[rule], from_us(self.account.now)
        return breaker.room(self.account.using, rule, open_attempts, now)

    def _find_probe(self, rule: str, count: int) -> _Found:
        """At most one call; whatever comes next waits for its answer."""
        if not count:
            is_out = self.account.open_by_rule[rule] > 0
            return _Found([], Wait(on_answer=is_out), is_limited=not is_out, most=0)
        calls, wait = self._first(rule, 1)
        return _Found(calls[:1], wait | Wait(on_answer=bool(calls)), most=1)

    def _first(self, rule: str, count: int) -> tuple[list[Candidate], Wait]:
        """The rule's first calls, by turns where keys have limits or holds of their own."""
        if self._take_turns(rule):
            return self.keys.candidates(rule, count)
        using, asking = self.account.using, self.asking
        if asking.alone and rule not in asking.rules_with_calls:
            return [], Wait()
        args = using, rule, self.keys.due_by, count, asking.least(rule)
        return ready_calls.first(*args, locks=not asking.alone), Wait()


def _fit(
    found: Mapping[str, Sequence[Candidate]], book: Book
) -> tuple[dict[str, list[Candidate]], dict[int, str]]:
    """The candidates that some instant could admit, and why the others never will be: they would
    keep back all behind them.

    What one dispenser's limit would never admit, and another's would, waits until one has gone.
    """
    fit: dict[str, list[Candidate]] = {rule: [] for rule in found}
    unfit: dict[int, str] = {}
    for rule, candidates in found.items():
        for call in candidates:
            why = _unfitness(call, rule, book)
            if why is None:
                fit[rule].append(call)
            else:
                unfit[call.id] = why
    return fit, unfit


def _unfitness(call: Candidate, rule: str, book: Book) -> str | None:
    if call.cost == 1:
        return None
    try:
        check_cost(call.cost)
    except InvalidCall as error:
        return str(error)
    for budget in book.settings.budgets[rule]:
        wanted = cost_of(call.cost, budget.limit.unit)
        if wanted > budget.limit.capacity and not _admits(book, rule, budget, wanted):
            limit = f"{budget.limit.unit} are more than {budget.limit.label} ever admits"
            return f"cost: {wanted} {limit}"
    return None


def _admits(book: Book, rule: str, own: Budget, wanted: int) -> bool:
    """Whether the limit would ever admit this as any dispenser has it, or counts something else."""
    return any(
        wanted <= one.limit.capacity or one.limit.unit != own.limit.unit
        for one in book.budgets[rule]
        if one.known_as == own.known_as
    )


def _queues(account: Account, held: Held, rule: str) -> list[str]:
    """The rule's queues that nothing holds."""
    names = account.book.rules[rule].queue_names
    return [queue for queue in names if not held.blocking(rule, None, queue)]


def _wait_for_holds(account: Account, held: Held) -> Wait:
    """Until the first hold ends; one that has no end may be lifted."""
    end = held.first_end(account.rules)
    return Wait(until=to_us(end) if end else None)
