"""One pass of releases over a group of rules: lock, count, choose, charge, commit. The only place that releases calls.

In: the names of the group's rules. Out: the attempts to publish, and when to look again. A pass makes the same number of
statements whatever it releases; it never publishes, and never makes a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from callqueue import breaker, callbacks, clockwork, conf, database, holds, ledger, planning, states, waiting
from callqueue.budgets import Book, Budget, cost_of
from callqueue.callcheck import check_cost
from callqueue.database import from_us, to_us
from callqueue.exceptions import InvalidCall
from callqueue.ledger import Account
from callqueue.managers import ended
from callqueue.planning import Plan, Release
from callqueue.waiting import Candidate

LEAD = 0.15  # seconds ahead of its slot that a call may be released: hides the broker's latency
BATCH = 500  # calls that one pass releases at most
KEYS = 256  # keys that one pass looks at at most
REVIEW = 0.5  # seconds after which a blocked group is looked at again whatever it waits for: limits and holds may change


@dataclass(frozen=True)
class Released:
    """An attempt that is charged and may be published.

    `waits`: whatever worker takes it, it is not made at once: its slot is still to open, or workers are behind.
    """

    attempt_id: int
    queue: str
    method: str
    waits: bool = False


@dataclass(frozen=True)
class State:
    """A rule's locked row: how many passes released, when it was served last, changed limits, what passes remember."""

    passes: int
    served: int
    rates: dict[str, str]
    memo: dict[str, Any]


@dataclass(frozen=True)
class Pass:
    """What a pass did. `wake_in`: seconds until a blocked call may fit (None: unknown); `more`: look again at once.

    `open_after`: how many attempts of the group are open now, as far as the pass knows; None where it counted nothing.
    """

    released: list[Released] = field(default_factory=list)
    wake_in: float | None = None
    on_answer: bool = False
    more: bool = False
    busy: bool = False
    wrapped: bool = True
    open_after: int | None = None


def release(using: str, group: Sequence[str], *, batch: int = BATCH) -> Pass:
    """One pass over a group of rules: lock, count, choose, charge, commit. Publishes nothing.

    Makes the same number of statements whatever it releases. Another dispenser that holds the group makes it `busy`.
    """
    watch = clockwork.watch(using)
    if watch.wants_look and not database.in_transaction(using):
        watch.look()
    with database.writing(using):
        rows, reading = _lock(using, group)
        if reading is None or len(rows) < len(group) or not watch.is_steady(reading):
            return Pass(busy=True)
        now = reading.at
        rates = {budget: rate for row in rows.values() for budget, rate in (row.rates or {}).items()}
        memo = rows[min(group)].memo
        before = json.dumps(memo, sort_keys=True)
        account = ledger.read(using, conf.current().book.with_rates(rates), group, now, memo)
        held = holds.in_force(using, group, from_us(now))
        until = now + round(LEAD * 1_000_000)
        chooser = _Chooser(account, held, until, batch)
        candidates, unfit = _fit(chooser.candidates(), conf.current().book, account.book)
        made = planning.plan(account, candidates, held, {r: row.served for r, row in rows.items()}, until)
        chooser.wait_for_more()
        chooser.pass_turns(made.releases)
        released = _charge(using, account, made.releases)
        _remember(using, rows, made, chooser, before)
        _fail(using, unfit)
    if unfit:
        callbacks.announce(using, list(unfit), states.FAILED)
    return _conclude(account, made, chooser, held, released)


def ensure_states(using: str, rules: Sequence[str]) -> None:
    """Make the row of every rule that has none yet."""
    from callqueue.models import RuleState

    rows = RuleState.objects.using(using)
    missing = set(rules) - set(rows.filter(rule__in=rules).values_list("rule", flat=True))
    rows.bulk_create([RuleState(rule=rule) for rule in sorted(missing)], ignore_conflicts=True)


class _Chooser:
    """Fetches candidates: no more than the limits can let go, and for limits per key only of keys that have room."""

    def __init__(self, account: Account, held: holds.Held, until: int, batch: int) -> None:
        self.account, self.held, self.until, self.batch = account, held, until, batch
        self.blocked_until: int | None = None
        self.on_answer = self.unfinished = False
        self.wrapped = True
        self.limited: list[str] = []  # rules that probably have more calls than their limits let go now
        self.turns: dict[str, str | None] = dict(account.memo.get("turns", {}))
        self.due_by = from_us(max(account.now, account.memo.get(clockwork.WAS, 0)))

    def candidates(self) -> dict[str, list[Candidate]]:
        """Candidates by rule, in the order in which they should go."""
        found = {}
        for rule in self.account.rules:
            if self.held.blocking(rule):
                continue
            count = planning.room(self.account, rule, self.until, self.batch)
            probes = self._probes(rule)
            if probes is not None:
                found[rule] = self._probe(rule, probes and count)
                continue
            if not count:
                self._wait(rule)
            elif self.account.book.rules[rule].keyed_limits or self.held.on_keys(rule):
                found[rule] = self._of_keys(rule, count)
            else:
                found[rule] = waiting.first(self.account.using, rule, self.due_by, count)
                self.unfinished |= len(found[rule]) == self.batch
            if count < self.batch and len(found.get(rule, ())) >= count > 0:
                self.limited.append(rule)
        return found

    def _probes(self, rule: str) -> int | None:
        """How many calls may probe the rule, where its circuit breaker wants it probed; None where it does not."""
        if rule not in self.held.probing or self.account.book.rules[rule].breaker is None:
            return None
        return breaker.room(self.account.using, rule, self.account.open_by_rule[rule])

    def _probe(self, rule: str, count: int) -> list[Candidate]:
        """At most one call; whatever comes next waits for its answer."""
        if not count:
            if self.account.open_by_rule[rule]:
                self.on_answer = True
            else:
                self._wait(rule)
            return []
        if self.account.book.rules[rule].keyed_limits or self.held.on_keys(rule):
            found = self._of_keys(rule, 1)[:1]
        else:
            found = waiting.first(self.account.using, rule, self.due_by, 1)
        self.on_answer |= bool(found)
        return found

    def wait_for_more(self) -> None:
        """After the plan: find out when the rules whose limits it used up have room again."""
        for rule in self.limited:
            self._wait(rule)

    def pass_turns(self, releases: Sequence[Release]) -> None:
        """After the plan: the next pass begins past the key that was served last, or the first keys would have it all."""
        for made in releases:
            turn = _turn(made.candidate.rule, made.candidate.priority)
            if turn in self.turns:
                self.turns[turn] = made.candidate.key

    def _wait(self, rule: str) -> None:
        """The rule's own limits are used up: find out until when."""
        own = [b for b in self.account.book.budgets[rule] if b.limit.per == "rule" and b.limit.unit == "calls"]
        instants = [self.account.meter(b).free_at(1) for b in own]
        if None in instants:
            self.on_answer = True
        else:
            self._until(max((i for i in instants if i is not None), default=self.account.now))

    def _until(self, instant: int) -> None:
        self.blocked_until = instant if self.blocked_until is None else min(self.blocked_until, instant)

    def _of_keys(self, rule: str, count: int) -> list[Candidate]:
        """Candidates of a rule whose keys have limits or holds of their own; within a priority the keys take turns."""
        using, found, looked = self.account.using, [], 0
        most = min(KEYS, max(16, 2 * count))
        for priority in waiting.priorities(using, rule):
            turn = _turn(rule, priority)
            after = self.turns.setdefault(turn, None)
            keys = waiting.keys(using, rule, priority, after, most - looked)
            if len(keys) < most - looked:
                if after is not None:
                    again = waiting.keys(using, rule, priority, None, most - looked - len(keys))
                    keys += [key for key in again if key not in set(keys)]
            elif keys:
                self.wrapped, self.unfinished = False, True
                self.turns[turn] = keys[-1]
            looked += len(keys)
            # Where keys are left that this pass does not see, no key has a second turn before them.
            found += self._first_of(rule, priority, keys, count if looked < most else min(count, 1))
            if looked >= most:
                break
        return found

    def _first_of(self, rule: str, priority: int, keys: list[str], count: int) -> list[Candidate]:
        free = [key for key in keys if not self.held.blocking(rule, key)]
        self.account.read_keys(free)
        counts: dict[str, int] = {}
        for key in free:
            if n := self._room_of(rule, key, count):
                counts[key] = n
        share = max(1, -(-self.batch // max(1, len(counts))))
        counts = {key: min(n, share) for key, n in counts.items()}
        found = waiting.first_of_keys(self.account.using, rule, priority, self.due_by, counts)
        self.unfinished |= len(found) >= self.batch
        return found

    def _room_of(self, rule: str, key: str, count: int) -> int:
        """How many calls of cost 1 the key's own limits let go; 0 notes until when."""
        least = count
        for budget in self.account.book.budgets[rule]:
            if budget.limit.per in ("rule", "queue") or budget.limit.unit != "calls":
                continue
            meter = self.account.meter(budget, ledger.scope_value(budget.limit, key, ""))
            n = planning.most_that_fits(meter, self.until, least)
            if not n:
                instant = meter.free_at(1)
                if instant is None:
                    self.on_answer = True
                else:
                    self._until(instant)
            least = min(least, n)
        return least


def _fit(
    found: Mapping[str, Sequence[Candidate]], book: Book, changed: Book
) -> tuple[dict[str, list[Candidate]], dict[int, str]]:
    """The candidates that some instant could admit, and why the others never will be: they would keep back all behind them.

    The first cost what they are to be charged now, under limits that operators may have changed.
    """
    fit: dict[str, list[Candidate]] = {}
    unfit: dict[int, str] = {}
    for rule, candidates in found.items():
        fit[rule] = []
        for call in candidates:
            why = _unfitness(call, book.budgets[rule])
            if why is None:
                charge = changed.charge_of(rule, call.cost)
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
            return f"cost: {wanted} {budget.limit.unit} are more than {budget.limit.label} ever admits"
    return None


def _fail(using: str, unfit: Mapping[int, str]) -> None:
    from callqueue.models import CallQueue

    for pk, why in unfit.items():
        CallQueue.objects.using(using).waiting().filter(pk=pk).update(**ended(states.FAILED), error_message=why)


def _turn(rule: str, priority: int) -> str:
    return f"{rule}\x1f{priority}"


def _lock(using: str, group: Sequence[str]) -> tuple[dict[str, State], clockwork.Reading | None]:
    """Lock the rules' rows, those that nobody else has locked, and read them; and the clock, as it was just before."""
    from callqueue.models import RuleState

    before = clockwork.monotonic()
    found = database.rows(
        using,
        f"SELECT {database.clock_sql(using)}, rule, passes, served, rates, memo "
        f"FROM {database.quoted(using, RuleState._meta.db_table)} "
        f"WHERE rule IN ({database.places(group)}) ORDER BY rule{database.skip_locked(using)}",
        group,
    )
    reading = clockwork.brought(using, found[0][0], before) if found else None
    states_of = {rule: State(passes, served, _loaded(rates), _loaded(memo)) for _, rule, passes, served, rates, memo in found}
    return states_of, reading


def _loaded(value: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(value) if isinstance(value, str | bytes) else value
    return loaded


def _charge(using: str, account: Account, releases: Sequence[Release]) -> list[Released]:
    """Write the releases: the calls are DISPATCHED, and an open attempt of each stands in the ledger."""
    from callqueue.models import CallAttempt, CallQueue

    if not releases:
        return []
    # A release may be lost in a crash of the database: its call then waits as before, and its message finds nothing to begin.
    # What was begun is not lost with it, since begin waits for the disk, and for all that was committed before.
    lazily = database.without_waiting_for_disk(using)
    now = from_us(account.now)
    by_queue: dict[str, list[int]] = {}
    for made in releases:
        by_queue.setdefault(made.queue, []).append(made.candidate.id)
    for queue, ids in by_queue.items():
        database.run(
            using,
            f"UPDATE {database.quoted(using, CallQueue._meta.db_table)} SET status = {states.DISPATCHED}, queue = %s, "
            f"dispatched_at_dt = %s, last_attempt = last_attempt + 1, ready = FALSE WHERE id IN ({database.listed(ids)}){lazily}",
            [queue, database.as_parameter(using, now)],
        )
    lease = timedelta(seconds=conf.current().release_lease)
    made_ids = database.insert_each(CallAttempt, using, [_attempt(made, account.now, lease) for made in releases])
    if made_ids[0] is None:
        listed = CallAttempt.objects.using(using).open().filter(call_id__in=[m.candidate.id for m in releases])
        ids_of = dict(listed.values_list("call_id", "pk"))
        made_ids = [ids_of[made.candidate.id] for made in releases]
    behind = {rule for rule, since in account.unbegun_since.items() if account.now - since > LEAD * 1_000_000}
    return [
        Released(pk or 0, made.queue, made.candidate.method, made.send_at is not None or made.candidate.rule in behind)
        for pk, made in zip(made_ids, releases, strict=True)
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


def _remember(using: str, rows: Mapping[str, State], made: Plan, chooser: _Chooser, before: str) -> None:
    """Keep what the next pass wants to know in the rules' rows: turns, and what was free. Nothing new, nothing written.

    After releases a row is written always: under an isolation stricter than `read committed`, that is what makes a pass fail
    which saw less than was released.
    """
    from callqueue.models import RuleState

    served = {name: row.served for name, row in rows.items()}
    clock = max(served.values(), default=0)
    for number, release_made in enumerate(made.releases, start=1):
        served[release_made.candidate.rule] = clock + number
    first = min(rows)
    memo = rows[first].memo
    memo["turns"] = {turn: key for turn, key in chooser.turns.items() if key is not None}
    remembers = json.dumps(memo, sort_keys=True) != before
    changed = [
        {"pk": name, "served": served[name], "memo": row.memo, "passes": row.passes + 1}
        for name, row in rows.items()
        if served[name] != row.served or (name == first and remembers)
    ]
    database.update_each(RuleState, using, changed)


def _conclude(account: Account, made: Plan, chooser: _Chooser, held: holds.Held, released: list[Released]) -> Pass:
    instants = [i for i in (made.wake_at, chooser.blocked_until, account.recount_at) if i is not None]
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
    return Pass(released, wake_in, on_answer, chooser.unfinished or full, wrapped=chooser.wrapped, open_after=open_after)
