"""One pass of releases over a group of rules: lock, count, choose, charge, commit. The only place
that releases calls.

In: the names of the group's rules. Out: the attempts to publish, and when to look again. A pass
makes the same number of statements whatever it releases; it never publishes, and never makes a
call.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from callqueue import callbacks, clocks, conf, database, states, tables, transitions
from callqueue.database import from_us, to_us
from callqueue.dispatch import backpressure, planning
from callqueue.dispatch.planning import Plan, Release
from callqueue.exceptions import InvalidCall
from callqueue.ledger import account as ledger
from callqueue.ledger import agreement, clock_jumps, holds, ready_calls, turns
from callqueue.ledger.account import Account, Memo
from callqueue.ledger.ready_calls import Candidate
from callqueue.ledger.turns import Turn
from callqueue.limits.budgets import Book, Budget, charged_on, cost_of
from callqueue.maintenance import breaker
from callqueue.sending.validation import check_cost

LEAD = 0.15  # seconds ahead of its slot that a call may be released: hides the broker's latency
BATCH = 500  # calls that one pass releases at most
KEYS = 256  # keys that one pass looks at at most
# seconds without a statement after which the server ends a pass: its process is frozen, or gone
SILENT = 5
# seconds after which a blocked group is looked at again whatever it waits for: limits and holds may
# change
REVIEW = 0.5


@dataclass(frozen=True)
class Released:
    """An attempt that is charged and may be published.

    `waits`: whatever worker takes it, it is not made at once: its slot is still to open, or workers
    are behind.
    """

    attempt_id: int
    queue: str
    method: str
    rule: str
    waits: bool = False


@dataclass(frozen=True)
class State:
    """A rule's locked row: how many passes released, when it was served last, what passes remember,
    by which agreement.

    `is_corrected`: whether some of the rule's attempts cost something else than the tallies know.
    """

    passes: int
    served: int
    memo: dict[str, Any]
    agreement: str
    is_corrected: bool


@dataclass(frozen=True)
class Pass:
    """What a pass did. `wake_in`: seconds until a blocked call may fit (None: unknown); `more`:
    look again at once.

    `is_outdated`: nothing, since its book is not what all dispensers agree on, or not all of them
    know yet. `open_after`: how many attempts of the group are open now, as far as the pass knows;
    None where it counted nothing.
    """

    released: list[Released] = field(default_factory=list)
    wake_in: float | None = None
    on_answer: bool = False
    more: bool = False
    busy: bool = False
    is_outdated: bool = False
    wrapped: bool = True
    open_after: int | None = None


def release(
    using: str, group: Sequence[str], book: Book | None = None, *, batch: int = BATCH
) -> Pass:
    """One pass over a group of rules: lock, count, choose, charge, commit. Publishes nothing.

    `book`: what is in force (by default it is read), and the settings whose calls may be released.
    Makes the same number of statements whatever it releases. Another dispenser that holds the group
    makes it `busy`.
    """
    watch = clock_jumps.watch(using)
    if watch.wants_look and not database.in_transaction(using):
        watch.look()
    book = book or agreement.book_in_force(using)
    with database.writing(using):
        rows, reading = _lock(using, group)
        now = (
            watch.credited(reading)
            if reading is not None and len(rows) == len(group) and watch.is_settled
            else None
        )
        if now is None:
            return Pass(busy=True)
        if any(row.agreement != book.agreement for row in rows.values()):
            return Pass(busy=True, is_outdated=True)
        memo = Memo.load(group, {rule: (row.passes, row.memo) for rule, row in rows.items()})
        until = now + round(LEAD * 1_000_000)
        has_corrections = any(row.is_corrected for row in rows.values())
        account = ledger.read(
            using, book, group, now, memo, until=until, has_corrections=has_corrections
        )
        held = holds.in_force(using, group, from_us(now))
        chooser = _Chooser(account, held, batch)
        candidates, unfit = _fit(chooser.candidates(), book)
        within, is_short = backpressure.within(account, candidates, held)
        made = planning.plan(
            account, candidates, within, {r: row.served for r, row in rows.items()}, until
        )
        if is_short:
            made.wake_at = min(made.wake_at or now + backpressure.AGAIN, now + backpressure.AGAIN)
        chooser.wait_for_more()
        chooser.pass_turns(made)
        released = _charge(using, account, made.releases)
        _remember(using, rows, made, account)
        transitions.fail(using, unfit)
    if unfit:
        callbacks.announce(using, list(unfit), states.FAILED)
    chooser.unfinished &= not is_short
    return _conclude(account, made, chooser, held, released)


def ensure_states(using: str, rules: Sequence[str]) -> None:
    """Make the row of every rule that has none yet, and the one of the clock's jumps."""
    clock_jumps.make_frame(using)
    rows = tables.rule_states(using)
    missing = set(rules) - set(rows.filter(rule__in=rules).values_list("rule", flat=True))
    rows.bulk_create(
        [tables.RuleState(rule=rule) for rule in sorted(missing)], ignore_conflicts=True
    )


class _Chooser:
    """Fetches candidates: no more than the limits can let go, and for limits per key only of keys
    that have room.
    """

    def __init__(self, account: Account, held: holds.Held, batch: int) -> None:
        self.account, self.held, self.batch = account, held, batch
        self.using, self.now, self.until = account.using, account.now, account.until
        self.blocked_until: int | None = None
        self.on_answer = self.unfinished = False
        self.wrapped = True
        self.limited: list[
            str
        ] = []  # rules that probably have more calls than their limits let go now
        self.in_turn: list[str] = []  # rules whose keys take turns
        self.turns: dict[
            tuple[str, int, str], Turn
        ] = {}  # those looked at, by rule, priority and key
        self.blocked: dict[int, tuple[str, int]] = {}  # turns: what they wait for, until when
        self.last: dict[
            tuple[str, int, str], int
        ] = {}  # keys with no more calls than were found, and how many those were
        self.due_by = from_us(max(account.now, account.memo.was))
        self._is_awake = False

    def candidates(self) -> dict[str, list[Candidate]]:
        """Candidates by rule, in the order in which they should go."""
        found = {}
        for rule in self.account.rules:
            if rule not in self.account.book.settings.rules or self.held.blocking(rule):
                continue
            count = planning.room(self.account, rule, self.until, self.batch)
            probes = self._probes(rule)
            if probes is not None:
                found[rule] = self._probe(rule, probes and count)
                continue
            if not count:
                self._wait(rule)
            else:
                found[rule] = self._first(rule, count)
                self.unfinished |= len(found[rule]) >= self.batch
            if count < self.batch and len(found.get(rule, ())) >= count > 0:
                self.limited.append(rule)
        return found

    def _first(self, rule: str, count: int) -> list[Candidate]:
        if any(b.limit.is_keyed for b in self.account.book.budgets[rule]) or self.held.on_keys(
            rule
        ):
            return self._of_keys(rule, count)
        return ready_calls.first(self.using, rule, self.due_by, count)

    def _probes(self, rule: str) -> int | None:
        """How many calls may probe the rule, where its circuit breaker wants it probed; None where
        it does not.
        """
        if rule not in self.held.probing or self.account.book.rules[rule].breaker is None:
            return None
        return breaker.room(self.using, rule, self.account.open_by_rule[rule])

    def _probe(self, rule: str, count: int) -> list[Candidate]:
        """At most one call; whatever comes next waits for its answer."""
        if not count:
            if self.account.open_by_rule[rule]:
                self.on_answer = True
            else:
                self._wait(rule)
            return []
        found = self._first(rule, 1)[:1]
        self.on_answer |= bool(found)
        return found

    def wait_for_more(self) -> None:
        """After the plan: find out when the rules whose limits it used up have room again."""
        for rule in self.limited:
            self._wait(rule)

    def pass_turns(self, made: Plan) -> None:
        """After the plan: who was served goes behind the others, and who is blocked is not looked
        at until it no longer is.
        """
        for candidate, budget in made.kept_back:
            turn = self.turns.get((candidate.rule, candidate.priority, candidate.key))
            if turn is not None:
                cost = charged_on(budget.limit, candidate.cost)
                self._block(turn, budget, budget.value_of(candidate.key, ""), cost)
        released = Counter(
            (r.candidate.rule, r.candidate.priority, r.candidate.key) for r in made.releases
        )
        served = {
            self.turns[one].pk: self.now + 1 for one in released if one in self.turns
        }  # behind those that are new
        spent = [
            self.turns[one].pk
            for one, count in released.items()
            if one in self.turns and self.last.get(one) == count
        ]
        turns.save(self.using, served, self.blocked, spent)
        if self.in_turn:
            if (instant := turns.next_wake(self.using, self.in_turn)) is not None:
                self._until(instant)
            for tallies in self.account.tallies.values():
                if tallies.limit.is_keyed and self.has_waited_for(tallies.budget):
                    self._until(tallies.next_leave())

    def has_waited_for(self, budget: Budget) -> bool:
        """Whether keys of one of the budget's rules take turns, so that some of them may wait for
        room in it.
        """
        return not set(budget.rules).isdisjoint(self.in_turn)

    def _wait(self, rule: str) -> None:
        """The rule's own limits are used up: find out until when."""
        own = [
            b
            for b in self.account.book.budgets[rule]
            if b.limit.per == "rule" and b.limit.unit == "calls"
        ]
        instants = [self.account.meter(b).free_at(1) for b in own]
        if None in instants:
            self.on_answer = True
        else:
            self._until(max((i for i in instants if i is not None), default=self.now))

    def _until(self, instant: int) -> None:
        self.blocked_until = (
            instant if self.blocked_until is None else min(self.blocked_until, instant)
        )

    def _of_keys(self, rule: str, count: int) -> list[Candidate]:
        """Candidates of a rule whose keys have limits or holds of their own; within a priority the
        keys take turns.
        """
        self._wake_keys()
        self.in_turn.append(rule)
        places = self.account.memo.places
        sees_all = turns.discover(self.using, rule, self.now, places)
        most = min(KEYS, max(16, 2 * count))
        listed = turns.free(self.using, rule, most)
        self.turns.update({(rule, *turn.pair): turn for turn in listed})
        self.account.read_keys([turn.key for turn in listed])
        # Where keys are left that this pass does not see, no key has a second turn before them.
        counts = self._counts(rule, listed, count if len(listed) < most else min(count, 1))
        wanted = {turn.pair: n for turn, n in counts.items()}
        found, last = ready_calls.first_of_pairs(self.using, rule, self.due_by, wanted)
        self.last |= {
            (rule, *pair): sum((one.priority, one.key) == pair for one in found) for pair in last
        }
        having = {(one.priority, one.key) for one in found}
        without = [turn for turn in counts if turn.pair not in having]
        locked = turns.end(self.using, rule, without)
        self.blocked.update(
            {pk: (what, self.now + turns.UNLOCKED) for pk, (what, _) in locked.items()}
        )
        if len(listed) == most and (
            without or self.blocked
        ):  # those behind them have not been looked at
            self.unfinished, self.wrapped = True, False
        elif not sees_all:
            self.unfinished = True
            self.wrapped &= turns.has_wrapped(rule, places)
        return found

    def _wake_keys(self) -> None:
        """Once in a pass: let those keys be looked at again that no longer wait for anything, or
        nobody knows for what.
        """
        if self._is_awake:
            return
        self._is_awake = True
        memo, agreed = self.account.memo, self.account.book.agreement
        if memo.agreement != agreed or any(one.is_anew for one in self.account.tallies.values()):
            memo.agreement = agreed
            turns.wake_all(self.using, self.account.rules)
        else:
            turns.wake(self.using, self.account.rules, self.until, _freed(self.account))

    def _counts(self, rule: str, listed: Sequence[Turn], count: int) -> dict[Turn, int]:
        """How many calls of each key may go; a key that may send none is blocked."""
        counts = {}
        for turn in listed:
            hold = self.held.blocking(rule, turn.key)
            if hold is not None:
                end = self.now + turns.LIFTED
                self.blocked[turn.pk] = (
                    turns.HOLD,
                    end if hold.until is None else min(end, to_us(hold.until)),
                )
            elif n := self._room_of(rule, turn, count):
                counts[turn] = n
        share = max(1, -(-self.batch // max(1, len(counts))))
        return {turn: min(n, share) for turn, n in counts.items()}

    def _room_of(self, rule: str, turn: Turn, count: int) -> int:
        """How many calls of cost 1 the key's own limits let go; where none, it is blocked."""
        least = count
        for budget in self.account.book.budgets[rule]:
            if budget.limit.is_keyed and budget.limit.unit == "calls":
                value = budget.value_of(turn.key, "")
                n = planning.most_that_fits(self.account.meter(budget, value), self.until, least)
                if not n:
                    self._block(turn, budget, value, 1)
                least = min(least, n)
        return least

    def _block(self, turn: Turn, budget: Budget, value: str, cost: int) -> None:
        """Note what a key waits for: room in a budget, from an instant that is known or not, or an
        answer.
        """
        scope, instant = (budget.id, value), self.account.meter(budget, value).known_at(cost)
        if budget.id in self.account.tallies:
            self.blocked[turn.pk] = (turns.of_room(scope), instant or self.now + turns.AT_LEAST)
        elif instant is None:
            self.on_answer = True
            self.blocked[turn.pk] = (turns.of_answer(scope), self.now + turns.ANSWERED)
        else:
            self.blocked[turn.pk] = (turns.of_room(scope), instant)


def _freed(account: Account) -> set[str]:
    """What keys may have waited for that is there now: room that attempts left, and answers."""
    freed = {
        turns.of_room((one.budget.id, value))
        for one in account.tallies.values()
        for value in one.freed
    }
    return freed | {turns.of_answer(scope) for scope in account.answered()}


def _fit(
    found: Mapping[str, Sequence[Candidate]], book: Book
) -> tuple[dict[str, list[Candidate]], dict[int, str]]:
    """The candidates that some instant could admit, and why the others never will be: they would
    keep back all behind them.

    The first cost what they are to be charged now, under limits that operators may have changed.
    What only another dispenser's limit would never admit waits until that has gone.
    """
    fit: dict[str, list[Candidate]] = {}
    unfit: dict[int, str] = {}
    for rule, candidates in found.items():
        fit[rule] = []
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
            return (
                f"cost: {wanted} {budget.limit.unit} are more than {budget.limit.label} ever admits"
            )
    return None


def _lock(using: str, group: Sequence[str]) -> tuple[dict[str, State], clocks.Reading | None]:
    """Lock the rules' rows, those that nobody else has locked, and read them; and the clock, as it
    was just before.
    """
    before = clocks.monotonic()
    table, attempts = (
        database.quoted(using, model._meta.db_table)
        for model in (tables.RuleState, tables.CallAttempt)
    )
    found = database.rows(
        using,
        f"SELECT {database.clock_sql(using)}, {clock_jumps.moved_sql(using)}, rule, passes, served, memo, agreement, "
        f"EXISTS (SELECT 1 FROM {attempts} a WHERE a.correction_pending AND a.rule = {table}.rule)"
        f"{database.within_idle_seconds(using, SILENT)} "
        f"FROM {table} WHERE rule IN ({database.places(group)}) ORDER BY rule{database.skip_locked(using)}",
        group,
    )
    reading = clock_jumps.brought(using, before, *found[0][:2]) if found else None
    states_of = {
        rule: State(passes, served, database.loaded(memo), agreed, bool(is_corrected))
        for _, _, rule, passes, served, memo, agreed, is_corrected, *_ in found
    }
    return states_of, reading


def _charge(using: str, account: Account, releases: Sequence[Release]) -> list[Released]:
    """Write the releases: the calls are DISPATCHED, and an open attempt of each stands in the
    ledger.
    """
    if not releases:
        return []
    # A release may be lost in a crash of the database: its call then waits as before, and its
    # message finds nothing to begin. What was begun is not lost with it, since begin waits for the
    # disk, and for all that was committed before.
    lazily = database.without_waiting_for_disk(using)
    now = from_us(account.now)
    by_queue: dict[str, list[int]] = {}
    for made in releases:
        by_queue.setdefault(made.queue, []).append(made.candidate.id)
    for queue, ids in by_queue.items():
        database.run(
            using,
            f"UPDATE {database.quoted(using, tables.CallQueue._meta.db_table)} SET status = {states.DISPATCHED}, queue = %s, "
            f"dispatched_at_dt = %s, last_attempt = last_attempt + 1, ready = FALSE WHERE id IN ({database.listed(ids)}){lazily}",
            [queue, database.as_parameter(using, now)],
        )
    lease = timedelta(seconds=conf.current().release_lease)
    made_ids = database.insert_each(
        tables.CallAttempt, using, [_attempt(made, account.now, lease) for made in releases]
    )
    if made_ids[0] is None:
        listed = (
            tables.attempts(using).open().filter(call_id__in=[m.candidate.id for m in releases])
        )
        ids_of = dict(listed.values_list("call_id", "pk"))
        made_ids = [ids_of[made.candidate.id] for made in releases]
    behind = {
        rule
        for rule, since in account.unbegun_since.items()
        if account.now - since > LEAD * 1_000_000
    }
    return [
        Released(
            pk or 0,
            made.queue,
            call.method,
            call.rule,
            waits=made.send_at is not None or call.rule in behind,
        )
        for pk, made in zip(made_ids, releases, strict=True)
        for call in [made.candidate]
    ]


def _attempt(made: Release, now: int, lease: timedelta) -> dict[str, Any]:
    call = made.candidate
    return {
        "call_id": call.id,
        "number": call.last_attempt + 1,
        "rule": call.rule,
        "key": call.key,
        "queue": made.queue,
        "cost": call.cost,
        "calls": cost_of(call.cost, "calls"),
        "released_at": from_us(now),
        "send_at": None if made.send_at is None else from_us(made.send_at),
        "lease_until": from_us(made.send_at or now) + lease,
        "outcome": states.OPEN,
        "response_body": "",
        "error_message": "",
        "worker": "",
    }


def _remember(using: str, rows: Mapping[str, State], made: Plan, account: Account) -> None:
    """Keep what the next pass wants to know in the rules' rows: turns, and what was free. Nothing
    new, nothing written.

    After releases a row is written always: under an isolation stricter than `read committed`, that
    is what makes a pass fail which saw less than was released. It counts the passes of every rule
    that released, and each row names the group that had the last pass, so that what another group
    of rules remembers of one of them is not believed any more.
    """
    ledger.save(account)
    served = {name: row.served for name, row in rows.items()}
    clock = max(served.values(), default=0)
    for number, release_made in enumerate(made.releases, start=1):
        served[release_made.candidate.rule] = clock + number
    first = min(rows)
    group = sorted(rows)
    changed = {
        name
        for name, row in rows.items()
        if served[name] != row.served or row.memo.get("group") != group
    }
    if changed or not _remembers(rows, first, account):
        changed.add(first)
    version = {name: row.passes + (name in changed) for name, row in rows.items()}
    memos = {
        name: account.memo.dump(version) if name == first else {**rows[name].memo, "group": group}
        for name in changed
    }
    listed = [
        {"pk": name, "served": served[name], "memo": memos[name], "passes": version[name]}
        for name in sorted(changed)
    ]
    database.update_each(tables.RuleState, using, listed)


def _remembers(rows: Mapping[str, State], first: str, account: Account) -> bool:
    """Whether the first row holds already all that is to be remembered."""
    version = {name: row.passes for name, row in rows.items()}
    return json.dumps(account.memo.dump(version), sort_keys=True) == json.dumps(
        rows[first].memo, sort_keys=True
    )


def _conclude(
    account: Account, made: Plan, chooser: _Chooser, held: holds.Held, released: list[Released]
) -> Pass:
    instants = [i for i in (made.wake_at, chooser.blocked_until) if i is not None]
    if end := held.first_end(account.rules):
        instants.append(to_us(end))
    wake_in = None
    if instants:
        wake_in = max(0.0, (min(instants) - account.now) / 1_000_000 - LEAD / 2)
    elif held.by_rule:
        wake_in = REVIEW
    on_answer = made.on_answer or chooser.on_answer
    full = bool(released) and len(released) >= chooser.batch
    open_after = account.open_count + len(released)
    return Pass(
        released,
        wake_in,
        on_answer,
        chooser.unfinished or full,
        wrapped=chooser.wrapped,
        open_after=open_after,
    )
