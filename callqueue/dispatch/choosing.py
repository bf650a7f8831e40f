"""Which calls a pass lets go: candidates of every rule, no more than its limits can let go, and of
those the ones that fit, by a queue whose workers have room.

In: an account and the holds. Out: releases, calls that never fit, and what the others wait for.
Locks the candidates, and writes the turns of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from callqueue.database import to_us
from callqueue.dispatch import backpressure, permit_turns, planning
from callqueue.dispatch.candidates_by_key import KeysInTurn
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
    """

    releases: Sequence[Release]
    unfit: Mapping[int, str]
    wait: Wait
    misfits: Mapping[str, str] = field(default_factory=dict)
    blocked: Mapping[str, Blocked] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    """The candidates of a rule, in the order in which they should go, and what the other calls wait
    for.

    `is_limited`: perhaps for room in the rule's own limits, which is known after the plan. `most`:
    how many may go, where no limit says so: one that probes the rule.
    """

    calls: list[Candidate]
    wait: Wait = field(default=Wait())
    is_limited: bool = False
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
    for rule, one in found.items():
        wait |= one.wait
        if one.is_limited:
            wait |= _wait_for_room(account, rule)
    if is_short:
        wait = replace(wait, is_unfinished=False) | Wait(until=account.now + backpressure.AGAIN)
    return Choice(made.releases, unfit, wait, misfits, made.blocked)


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
            why = _unfitness(one, account.book.settings.budgets[rule])
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
        count = planning.room(self.account, rule, self.batch)
        probes = self._probes(rule)
        if probes is not None:
            return self._find_probe(rule, min(count, probes))
        if not count:
            return _Found([], is_limited=True)
        calls, wait = self._first(rule, count)
        is_full = len(calls) >= self.batch
        is_limited = count < self.batch and len(calls) >= count
        return _Found(calls, wait | Wait(is_unfinished=is_full), is_limited)

    def _probes(self, rule: str) -> int | None:
        """How many calls may probe the rule; None where its circuit breaker does not want that."""
        if rule not in self.held.probing or self.account.book.rules[rule].breaker is None:
            return None
        return breaker.room(self.account.using, rule, self.account.open_by_rule[rule])

    def _find_probe(self, rule: str, count: int) -> _Found:
        """At most one call; whatever comes next waits for its answer."""
        if not count:
            is_out = self.account.open_by_rule[rule] > 0
            return _Found([], Wait(on_answer=is_out), is_limited=not is_out, most=0)
        calls, wait = self._first(rule, 1)
        return _Found(calls[:1], wait | Wait(on_answer=bool(calls)), most=1)

    def _first(self, rule: str, count: int) -> tuple[list[Candidate], Wait]:
        """The rule's first calls, by turns where keys have limits or holds of their own."""
        budgets = self.account.book.budgets[rule]
        if any(budget.limit.is_keyed for budget in budgets) or self.held.on_keys(rule):
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

    The first cost what they are to be charged now, under limits that operators may have changed.
    What only another dispenser's limit would never admit waits until that has gone.
    """
    fit: dict[str, list[Candidate]] = {rule: [] for rule in found}
    unfit: dict[int, str] = {}
    for rule, candidates in found.items():
        for call in candidates:
            why = _unfitness(call, book.settings.budgets[rule])
            if why is None:
                charge = book.charge_of(rule, call.cost)
                fit[rule].append(call if charge == call.cost else replace(call, cost=charge))
            else:
                unfit[call.id] = why
    return fit, unfit


def _unfitness(call: Candidate, budgets: Sequence[Budget]) -> str | None:
    if call.cost == 1:
        return None
    try:
        check_cost(call.cost)
    except InvalidCall as error:
        return str(error)
    for budget in budgets:
        wanted = cost_of(call.cost, budget.limit.unit)
        if wanted > budget.limit.capacity:
            limit = f"{budget.limit.unit} are more than {budget.limit.label} ever admits"
            return f"cost: {wanted} {limit}"
    return None


def _wait_for_room(account: Account, rule: str) -> Wait:
    """The rule's own limits are used up: until all of them let a call go."""
    instants = [meter.free_at(1) for meter in planning.own_meters(account, rule)]
    if None in instants:
        return Wait(on_answer=True)
    return Wait(until=max((at for at in instants if at is not None), default=account.now))


def _wait_for_holds(account: Account, held: Held) -> Wait:
    """Until the first hold ends; one that has no end may be lifted."""
    end = held.first_end(account.rules)
    return Wait(until=to_us(end) if end else None)
