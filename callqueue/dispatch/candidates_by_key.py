"""Candidates of rules whose keys have limits or holds of their own: within a priority the keys take
turns, and a key that may not go is not looked at until it may.

In: an account, and how many calls a rule may let go. Out: candidates, and what keys wait for.
Writes the turns of keys; callers hold the lock of the rules' rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from callqueue.database import from_us, to_us
from callqueue.dispatch import planning
from callqueue.dispatch.next_look import Wait
from callqueue.dispatch.planning import Plan
from callqueue.ledger import holds, ready_calls
from callqueue.ledger.account import Account
from callqueue.ledger.ready_calls import Candidate, Turn
from callqueue.limits.budgets import Budget

KEYS = 256  # keys of a rule that one pass looks at at most
FEWEST = 16  # and at least, where there are as many

Place = tuple[str, int, str]  # a rule, a priority and a key


class KeysInTurn:
    """The keys that one pass looks at: `candidates` of each rule, then `settle` after the plan."""

    def __init__(self, account: Account, held: holds.Held, batch: int) -> None:
        self.account, self.held, self.batch = account, held, batch
        self.using, self.now = account.using, account.now
        self.due_by = from_us(max(account.now, account.memo.was))
        self.rules: list[str] = []  # those whose keys take turns
        self._turns: dict[Place, Turn] = {}  # those looked at
        self._blocked: dict[int, tuple[str, int]] = {}  # turns: what they wait for, until when
        self._last: dict[Place, int] = {}  # keys all of whose calls were found: how many those are
        self._cut: dict[Place, int] = {}  # keys of which no more calls were looked for than these
        self._on_answer = False

    def candidates(self, rule: str, count: int) -> tuple[list[Candidate], Wait]:
        """Candidates of the next keys of a rule that lets `count` calls go, and whether keys are
        left that were not looked at.
        """
        if not self.rules:
            self._wake()
        self.rules.append(rule)
        places = self.account.memo.places
        sees_all = ready_calls.discover(self.using, rule, self.now, places)
        most = min(KEYS, max(FEWEST, 2 * count))
        listed = self._look_at(rule, most)
        # Where keys are left that this pass does not see, no key has a second turn before them.
        counts = self._counts(rule, listed, count if len(listed) < most else min(count, 1))
        found, without = self._fetch(rule, counts)
        if len(listed) == most and (without or self._blocked):
            return found, Wait(is_unfinished=True, is_mid_round=True)
        if not sees_all:
            has_wrapped = ready_calls.has_wrapped(rule, places)
            return found, Wait(is_unfinished=True, is_mid_round=not has_wrapped)
        return found, Wait()

    def settle(self, made: Plan) -> Wait:
        """After the plan: a key that was served goes behind the others, and one that is blocked is
        not looked at until it no longer is. What the keys wait for.
        """
        for candidate, budget in made.kept_back:
            turn = self._turns.get((candidate.rule, candidate.priority, candidate.key))
            if turn is not None:
                cost = budget.charge_of(candidate.cost)
                self._block(turn, budget, budget.value_of(candidate.key, ""), cost)
        released = Counter(
            (one.candidate.rule, one.candidate.priority, one.candidate.key) for one in made.releases
        )
        self._save(released)
        is_unfinished = any(released[place] >= n for place, n in self._cut.items())
        return Wait(self._wakes_at() if self.rules else None, self._on_answer, is_unfinished)

    def _wake(self) -> None:
        """Let the keys be looked at again that need not wait any more, for all that is known."""
        memo, version = self.account.memo, self.account.book.version
        if memo.keys_of != version or any(one.is_anew for one in self.account.tallies.values()):
            memo.keys_of = version
            ready_calls.wake_all(self.using, self.account.rules)
        else:
            ready_calls.wake(
                self.using, self.account.rules, self.account.until, _freed(self.account)
            )

    def _look_at(self, rule: str, most: int) -> list[Turn]:
        """The next keys of the rule, and what they are charged with."""
        listed = ready_calls.free(self.using, rule, most)
        self._turns.update({(rule, *turn.pair): turn for turn in listed})
        self.account.read_keys([turn.key for turn in listed])
        return listed

    def _counts(self, rule: str, listed: Sequence[Turn], count: int) -> dict[Turn, int]:
        """How many calls of each key may go; a key that may send none is blocked."""
        counts = {}
        for turn in listed:
            hold = self.held.blocking(rule, turn.key)
            if hold is not None:
                self._block_by_hold(turn, hold)
            elif n := self._room_of(rule, turn, count):
                counts[turn] = n
        share = max(1, -(-self.batch // max(1, len(counts))))
        return {turn: min(n, share) for turn, n in counts.items()}

    def _room_of(self, rule: str, turn: Turn, count: int) -> int:
        """How many calls of cost 1 the key's own limits let go; where none, it is blocked. Of other
        units, one more than may go if each costs some: so it is seen what that one waits for.
        """
        least = count
        for budget in self.account.book.budgets[rule]:
            if budget.limit.is_keyed:
                value = budget.value_of(turn.key, "")
                meter = self.account.meter(budget, value)
                n = planning.most_that_fits(meter, self.account.until, least)
                if budget.limit.unit != "calls":
                    n += 1
                    if n < least:
                        self._cut[rule, *turn.pair] = n
                elif not n:
                    self._block(turn, budget, value, 1)
                least = min(least, n)
        return least

    def _fetch(self, rule: str, counts: dict[Turn, int]) -> tuple[list[Candidate], list[Turn]]:
        """Calls of each key, and the keys without any: they have none, or it is locked."""
        wanted = {turn.pair: n for turn, n in counts.items()}
        found, last = ready_calls.first_of_pairs(self.using, rule, self.due_by, wanted)
        found_of = Counter((call.priority, call.key) for call in found)
        self._last.update({(rule, *pair): found_of[pair] for pair in last})
        without = [turn for turn in counts if not found_of[turn.pair]]
        locked = ready_calls.end(self.using, rule, without)
        until = self.now + ready_calls.UNLOCKED
        self._blocked.update({pk: (what, until) for pk, (what, _) in locked.items()})
        return found, without

    def _block(self, turn: Turn, budget: Budget, value: str, cost: int) -> None:
        """Note what a key waits for: room in a budget, at a known instant or not, or an answer."""
        scope, instant = (budget.id, value), self.account.meter(budget, value).known_at(cost)
        if budget.id in self.account.tallies:
            self._blocked[turn.pk] = (
                ready_calls.of_room(scope),
                instant or self.now + ready_calls.AT_LEAST,
            )
        elif instant is None:
            self._on_answer = True
            self._blocked[turn.pk] = (ready_calls.of_answer(scope), self.now + ready_calls.ANSWERED)
        else:
            self._blocked[turn.pk] = (ready_calls.of_room(scope), instant)

    def _block_by_hold(self, turn: Turn, hold: holds.InForce) -> None:
        """Note that a key waits for the end of a hold, which may be lifted before."""
        until = self.now + ready_calls.LIFTED
        if hold.until is not None:
            until = min(until, to_us(hold.until))
        self._blocked[turn.pk] = (ready_calls.HOLD, until)

    def _save(self, released: Mapping[Place, int]) -> None:
        """Write the turns of keys that were served, are blocked, or have no call left."""
        in_turn = {place: n for place, n in released.items() if place in self._turns}
        # behind those that are new
        served = {self._turns[place].pk: self.now + 1 for place in in_turn}
        spent = [
            self._turns[place].pk for place, n in in_turn.items() if self._last.get(place) == n
        ]
        ready_calls.save(self.using, served, self._blocked, spent)

    def _wakes_at(self) -> int | None:
        """The first instant at which a key that waits is to be looked at, or charges leave a budget
        that keys wait for.
        """
        instants = [ready_calls.next_wake(self.using, self.rules)]
        for tallies in self.account.tallies.values():
            if tallies.limit.is_keyed and not set(tallies.budget.rules).isdisjoint(self.rules):
                instants.append(tallies.next_leave())
        return min((at for at in instants if at is not None), default=None)


def _freed(account: Account) -> set[str]:
    """What keys may have waited for that is there now: room that attempts left, and answers."""
    freed = {
        ready_calls.of_room((one.budget.id, value))
        for one in account.tallies.values()
        for value in one.freed
    }
    return freed | {ready_calls.of_answer(scope) for scope in account.answered()}
