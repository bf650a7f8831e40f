"""Whose turn it is in a pass, where keys have limits or holds of their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from callqueue.clocks import Us
from callqueue.database import from_us, to_us
from callqueue.dispatch import planning
from callqueue.dispatch.next_look import Wait
from callqueue.dispatch.planning import Plan
from callqueue.ledger import holds, ready_calls
from callqueue.ledger.account import Account
from callqueue.ledger.ready_calls import TOP, Candidate, Turn
from callqueue.ledger.tallies import Scope
from callqueue.limits.budgets import Budget

KEYS = 256  # keys of a rule that one pass looks at at most
FEWEST = 16  # and at least, where there are as many

Place = tuple[str, int, str]  # a rule, a priority and a key


class KeysInTurn:
    """The keys that one pass looks at: `lock_candidates` of each rule, `finish` after the plan."""

    def __init__(self, account: Account, held: holds.Held, batch: int) -> None:
        self.account, self.held, self.batch = account, held, batch
        self.using, self.now = account.using, account.now
        self.wall = from_us(account.now + account.moved)
        # rules whose keys take turns
        self.in_turn = held.rules_taking_turns(account.book, account.rules)
        self.rules: list[str] = []  # those of them that were looked at
        self._turns: dict[Place, Turn] = {}  # those looked at
        self._blocked: dict[int, tuple[str, int]] = {}  # by turn: `blocked_on`, and until when (Us)
        self._all_found: dict[Place, int] = {}  # how many, of keys all of whose calls were found
        self._spent: list[int] = []  # turns of keys without ready calls
        self._cut: dict[Place, int] = {}  # keys of which no more calls were looked for than these
        self._on_answer = False
        self._is_full = False  # of some rule there may be more keys than were looked at
        self._is_mid_round = False  # a round over all keys goes on: fewer are left than before
        if self.in_turn or account.memo.in_turn:
            self._give_and_wake_turns()

    def lock_candidates(
        self, rule: str, count: int, least_priority: int = -TOP
    ) -> tuple[list[Candidate], Wait]:
        """Lock calls of the next keys of a rule that lets `count` go; whether it left keys out."""
        self.rules.append(rule)
        most = min(KEYS, max(FEWEST, 2 * count))
        listed = self._read_turns(rule, most, least_priority)
        is_full = len(listed) == most
        # Where keys are left that this pass does not see, no key has a second turn before them.
        counts = self._calls_per_turn(rule, listed, min(count, 1) if is_full else count)
        found, without = self._lock_calls(rule, counts)
        self._is_full |= is_full
        self._is_mid_round |= is_full and bool(without)
        if is_full and self._spent:  # others' calls were cancelled together, perhaps: see how many
            self._spent += ready_calls.spent_turns(self.using, rule, self.wall)
        return found, Wait(is_unfinished=is_full and count > most)

    def finish(self, made: Plan) -> Wait:
        """Save turns after a plan: served keys go last. Returns what the blocked ones wait for."""
        if not self.rules:  # nothing is to be written
            return Wait(is_unfinished=self._is_mid_round, is_mid_round=self._is_mid_round)
        self._block_kept_back(made)
        places = [(call.rule, call.priority, call.key) for call in made.releases]
        released = Counter(places)
        self._save_turns(places, released)
        is_mid_round = self._is_mid_round or (self._is_full and bool(self._blocked))
        return Wait(
            self._wakes_at(),
            self._on_answer,
            is_mid_round or any(released[place] >= n for place, n in self._cut.items()),
            is_mid_round,
        )

    def _give_and_wake_turns(self) -> None:
        # A turn for each key of which there is news; and for all with calls ready, of a rule whose
        # keys took no turns so far. Then those are woken that may go by now.
        memo, tallies = self.account.memo, self.account.tallies.values()
        begun = {rule: ready_calls.FIRST for rule in self.in_turn if rule not in memo.in_turn}
        last = {
            rule: ready_calls.give_missing_news(self.using, rule, tuple(after))
            for rule, after in sorted({**memo.gathering, **begun}.items())
            if rule in self.in_turn
        }
        memo.gathering = {rule: after for rule, after in last.items() if after is not None}
        self._is_mid_round |= bool(memo.gathering)
        self._is_mid_round |= ready_calls.take_news(self.using, self.in_turn, self.now)
        if memo.in_turn != self.in_turn or any(one.is_anew for one in tallies):
            memo.in_turn = self.in_turn
            ready_calls.wake_all_keys(self.using, self.account.rules)
        else:
            keyed = [one.limit.window_us for one in self.account.budgets if one.limit.is_keyed]
            latest = self.account.until + max(keyed, default=0) + 2 * ready_calls.LIFTED
            ready_calls.wake_keys(
                self.using,
                self.account.rules,
                self.account.until,
                latest,
                _blocked_on_of_freed(self.account),
            )

    def _read_turns(self, rule: str, most: int, least_priority: int) -> list[Turn]:
        free = ready_calls.next_turns(self.using, rule, most)
        listed = [turn for turn in free if turn.priority >= least_priority]
        self._turns.update({(rule, *turn.pair): turn for turn in listed})
        self.account.read_keys([turn.key for turn in listed])
        return listed

    def _calls_per_turn(self, rule: str, listed: Sequence[Turn], count: int) -> dict[Turn, int]:
        """How many calls of each key may go; a key that may send none is blocked."""
        counts = {}
        for turn in listed:
            hold = self.held.blocking_hold(rule, turn.key)
            if hold is not None:
                self._block_by_hold(turn, hold)
            elif n := self._room_of_key(rule, turn, count):
                counts[turn] = n
        share = max(1, -(-self.batch // max(1, len(counts))))
        return {turn: min(n, share) for turn, n in counts.items()}

    def _room_of_key(self, rule: str, turn: Turn, count: int) -> int:
        """Calls of cost 1 that its limits let go, one more in other units; at 0 it is blocked."""
        least = count
        for budget in self.account.book.budgets[rule]:
            if budget.limit.is_keyed:
                value = budget.value_of(turn.key, "")
                meter = self.account.meter(budget, value)
                n = planning.most_that_fits(meter, self.account.until, least)
                if budget.limit.unit != "calls":  # one more, to see what that one waits for
                    n += 1
                    if n < least:
                        self._cut[rule, *turn.pair] = n
                elif not n:
                    self._block(turn, budget, value)
                    return 0  # another budget may have room, and would let it wait until now
                least = min(least, n)
        return least

    def _lock_calls(self, rule: str, counts: dict[Turn, int]) -> tuple[list[Candidate], list[Turn]]:
        """Calls of each key, locked; and the turns without any: spent, or locked by others."""
        wanted = {turn.pair: n for turn, n in counts.items()}
        found, ready = ready_calls.lock_next_of_pairs(self.using, rule, self.wall, wanted)
        found_of = Counter((call.priority, call.key) for call in found)
        whole = {(rule, *pair): n for pair, n in ready.items() if n == found_of[pair]}
        self._all_found.update(whole)
        without = [turn for turn in counts if not found_of[turn.pair]]
        self._spent += [turn.pk for turn in without if not ready[turn.pair]]
        locked = (ready_calls.LOCK, self.now + ready_calls.UNLOCKED)
        self._blocked.update({turn.pk: locked for turn in without if ready[turn.pair]})
        return found, without

    def _block(self, turn: Turn, budget: Budget, value: str, cost: int = 1) -> None:
        """Let the key wait for so much room in the budget, or for an answer; note until when."""
        scope, meter = (budget.id, value), self.account.meter(budget, value)
        instant = meter.known_free_at(cost)
        if budget.id in self.account.tallies:
            # not past `latest` in `_give_and_wake_turns`, or each pass would wake it
            again_at = min(
                instant or self.now + ready_calls.AT_LEAST,
                self.now + budget.limit.window_us + ready_calls.LIFTED,
            )
            self._blocked[turn.pk] = (ready_calls.blocked_on_room(scope), again_at)
        elif instant is None:
            self._on_answer = True
            self._blocked[turn.pk] = (
                ready_calls.blocked_on_answer(scope),
                self.now + ready_calls.ANSWERED,
            )
        else:
            again_at = meter.when_to_review(instant)
            self._blocked[turn.pk] = (ready_calls.blocked_on_room(scope), again_at)

    def _block_kept_back(self, made: Plan) -> None:
        """Block the keys that the plan kept back, for what the first of each scope waits for."""
        first: dict[Scope, int] = {}  # the cost of the first: those behind it wait for as much
        waiting, hasty = defaultdict[Scope, list[int]](list), set[Scope]()
        for candidate, budget in made.kept_back:
            value, own = budget.value_of(candidate.key, ""), budget.charge_of(candidate.cost)
            cost = first.setdefault(scope := (budget.id, value), own)
            place = (candidate.rule, candidate.priority, candidate.key)
            turn = self._turns.get(place)
            if turn is not None:
                self._block(turn, budget, value, cost)
                waiting[scope].append(turn.pk)
                # what costs less than the first may go once that is gone: it, or one not looked for
                if own < cost or (cost > 1 and place not in self._all_found):
                    hasty.add(scope)
        self._look_sooner({pk for scope in hasty for pk in waiting[scope]})

    def _look_sooner(self, turns: Collection[int]) -> None:
        """Look sooner at turns behind a costly call, which may be cancelled, expire or be changed:
        they might go then. All of one scope at once, or one would overtake it; the more, the later.
        """
        soon = self.now + ready_calls.GONE + len(turns) * ready_calls.GONE // FEWEST
        for pk in turns:
            blocked_on, until = self._blocked[pk]
            self._blocked[pk] = (blocked_on, min(until, soon))

    def _block_by_hold(self, turn: Turn, hold: holds.InForce) -> None:
        until = self.now + ready_calls.LIFTED
        if hold.until is not None:
            until = min(until, to_us(hold.until))
        self._blocked[turn.pk] = (ready_calls.HOLD, until)

    def _save_turns(self, places: Sequence[Place], released: Mapping[Place, int]) -> None:
        # served keys go behind new ones, in the order in which they were served
        ordered = enumerate((place for place in places if place in self._turns), start=1)
        served = {self._turns[place].pk: self.now + n for n, place in ordered}
        self._spent += [
            self._turns[place].pk
            for place, n in released.items()
            if place in self._turns and self._all_found.get(place) == n
        ]
        ready_calls.save_turns(self.using, served, self._blocked, self._spent)

    def _wakes_at(self) -> Us | None:
        """When the first key of the rules that were looked at may go again; None: nobody knows."""
        instants = [ready_calls.next_wake_of_keys(self.using, self.rules)]
        for tallies in self.account.tallies.values():
            if tallies.limit.is_keyed and not set(tallies.budget.rules).isdisjoint(self.rules):
                instants.append(tallies.next_leave())
        return min((at for at in instants if at is not None), default=None)


def _blocked_on_of_freed(account: Account) -> set[str]:
    """What `blocked_on` says in turns of keys that have more room now, or an answer, read here."""
    freed = {
        ready_calls.blocked_on_room((one.budget.id, value))
        for one in account.tallies.values()
        for value in (*one.freed, *one.near)
    }
    return freed | {ready_calls.blocked_on_answer(scope) for scope in account.answered_scopes()}
