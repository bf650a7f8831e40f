"""One pass of releases over a group of rules: lock, count, choose, charge, conclude. The only place
that releases calls. It never publishes, and never makes a call.
A pass makes the same number of statements whatever it releases, but for those that count. One that
a process makes for the sake of its own call (`OwnCall`) charges that one, born begun, and others
of permits; what a worker is to be sent is left to a dispenser, and keeps its room.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Any

from callqueue import callbacks, clocks, conf, database, states, tables, transitions
from callqueue.clocks import Reading, Us
from callqueue.database import from_us
from callqueue.dispatch import next_look
from callqueue.dispatch.choosing import choose, workers_may_be_behind
from callqueue.dispatch.next_look import NO_STREAK, ROOMY, NextLook, Room, Streak, Wait
from callqueue.dispatch.planning import Plan
from callqueue.handlers import HTTP_METHODS
from callqueue.ledger import account as ledger
from callqueue.ledger import holds, ledger_time, ready_calls, rule_rows, settings
from callqueue.ledger.account import Account
from callqueue.ledger.holds import Held
from callqueue.ledger.memo import Memo, group_identity, promises_more
from callqueue.ledger.ready_calls import Candidate
from callqueue.limits.budgets import Book, cost_of
from callqueue.limits.kinds import SECOND

# seconds after its slot in which a permit is to be begun: it looks more often than
# that, unless it has died
CLAIMED = 5.0
LEAD = 0.15  # seconds ahead of its slot that a call may be released: hides the broker's latency
BATCH = 500  # calls that one pass releases at most
NOT_HELD = Held({})
# messages that a pass makes for a queue before any of them carries more than one attempt
SPREAD = 4


@dataclass(frozen=True)
class Begun:
    """Begun attempts with their calls, columns by "a.name" and "c.name"; the pass's own reading."""

    rows: Sequence[Mapping[str, Any]]
    reading: Reading


Take = Callable[[Begun], Callable[[bool], None]]  # see Taker


@dataclass(frozen=True)
class Taker:
    """Who makes what a pass releases. The pass begins it, by this `worker`'s name, and hands it to
    `take` before the commit. The function that `take` returns is told whether the commit came.
    """

    worker: str  # a name that no other pass has
    reads: tuple[str, ...]  # the columns that it wants to know of the calls
    take: Take | None = None  # so early that all is ready for the first byte at the commit
    # it makes only HTTP calls, by queues of which this is true; others are published. None: all
    suits: Callable[[str], bool] | None = None
    most: int | None = None  # calls; None: any number

    def share(self, releases: Iterable[Candidate]) -> set[int]:
        """Which of these calls it makes, by id: the first `most` that suit."""
        fit = (
            call.id
            for call in releases
            if not call.is_permit
            if self.suits is None or (call.method in HTTP_METHODS and self.suits(call.queue))
        )
        return set(islice(fit, self.most))


@dataclass(frozen=True)
class OwnCall:
    """The call for which a process makes a pass: one that it makes itself."""

    rule: str
    priority: int
    lease: float  # seconds
    lead: float  # seconds ahead of its slot
    # has the call's row wait as of an instant of the database's clock; its primary key, None where
    # it waits no more
    get_in_line: Callable[[datetime], int | None]
    is_new: bool  # `get_in_line` inserts the row


class Outdated(Exception):
    """The settings in force changed before the pass had its rules: it is to be rolled back."""


@dataclass(frozen=True)
class LockedRule:
    passes: int  # how many wrote its row
    served: int  # the running number of the last release that it had
    memo: dict[str, Any]
    is_corrected: bool  # some attempts cost something else than the tallies know


@dataclass(frozen=True)
class _Own:
    """An `OwnCall` whose row waits."""

    id: int
    call: OwnCall


def charge(
    account: Account,
    releases: Sequence[Candidate],
    wall: datetime,
    taker: Taker | None = None,
    own: _Own | None = None,
) -> list[dict[str, Any]]:
    """Write the releases: the calls are DISPATCHED at this instant of wall time, and an open
    attempt of each stands in the ledger. Returns the columns of those that are begun with it, and
    of their calls. A statement for each queue, and one or two for the attempts.
    """
    if not releases:
        return []
    begun = set[int]()
    if taker is not None:
        begun = taker.share(releases) if own is None else {own.id}
    rest: dict[str, list[int]] = {}
    mine: dict[str, list[int]] = {}
    for call in releases:
        call.is_begun = call.id in begun
        (mine if call.is_begun else rest).setdefault(call.queue, []).append(call.id)
        account.charge(call.rule, call.key, call.queue, call.cost)
    transitions.release(account.using, rest, wall, is_lazy=not mine)
    reads = None if taker is None else _columns_of_calls(account.using, taker.reads)
    found = transitions.release(account.using, mine, wall, reads)
    attempts = _attempts_to_insert(account, releases, taker, own)
    for call, pk in zip(releases, _insert_attempts(account.using, attempts), strict=True):
        call.attempt_id = pk
    return _begun_rows(found, releases, attempts)


@lru_cache
def _columns_of_calls(using: str, names: tuple[str, ...]) -> database.Columns:
    return database.Columns(using, {"c": (tables.CallQueue, names)})


def _begun_rows(
    call_rows: Sequence[Mapping[str, Any]],
    releases: Sequence[Candidate],
    attempts: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    calls = {row["c.id"]: row for row in call_rows}
    return [
        {f"a.{name}": value for name, value in {**one, "id": call.attempt_id}.items()}
        | {"a.call": call.id, **calls[call.id]}
        for call, one in zip(releases, attempts, strict=True)
        if call.is_begun
    ]


def _published_or_made(account: Account, releases: Sequence[Candidate]) -> list[Candidate]:
    """Those that this process publishes or makes; notes which wait, for a slot or a worker."""
    lead = account.until - account.now
    behind = {rule for rule, at in account.unbegun_since.items() if account.now - at > lead}
    for call in releases:
        call.waits = call.send_at is not None or call.rule in behind
    return [call for call in releases if not call.is_permit]


def _attempts_to_insert(
    account: Account,
    releases: Sequence[Candidate],
    taker: Taker | None,
    own: _Own | None,
) -> list[dict[str, Any]]:
    """The attempts' columns. Begun ones have the taker's name, and the lease of `own` or a rule."""
    config, at = conf.current(), from_us(account.now)

    def attempt(call: Candidate) -> dict[str, Any]:
        worker = ""
        if taker is not None and call.is_begun:
            rule = config.rules.get(call.rule)
            worker = taker.worker
            lease = config.begun_lease(rule) if own is None else own.call.lease
        else:
            lease = CLAIMED if call.is_permit else config.release_lease
        return _attempt_row(call, at, timedelta(seconds=lease), worker)

    return [attempt(call) for call in releases]


def _insert_attempts(using: str, attempts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Insert attempts; their ids in the same order, read where the database returns none."""
    ids = database.insert_each(tables.CallAttempt, using, attempts)
    if ids[0] is not None:
        return [pk or 0 for pk in ids]
    calls = [one["call_id"] for one in attempts]
    inserted = tables.attempts(using).open().filter(call_id__in=calls)
    id_of = dict(inserted.values_list("call_id", "pk"))
    return [id_of[call] for call in calls]


def _attempt_row(call: Candidate, now: datetime, lease: timedelta, worker: str) -> dict[str, Any]:
    send_at = None if call.send_at is None else from_us(call.send_at)
    return {
        "call_id": call.id,
        "number": call.last_attempt + 1,
        "rule": call.rule,
        "key": call.key,
        "queue": call.queue,
        "cost": call.cost,
        "calls": cost_of(call.cost, "calls"),
        "released_at": now,
        "send_at": send_at,
        "lease_until": (send_at or now) + lease,
        "started_at": now if worker else None,
        "outcome": states.OPEN,
        "response_body": "",
        "error_message": "",
        "worker": worker,
    }


def remember(
    account: Account, rows: Mapping[str, LockedRule], releases: Sequence[Candidate]
) -> None:
    """Write tallies, and in rules' rows what is new for the next pass. Outdated: settings changed.
    After releases a row is written always: under an isolation stricter than `read committed`, that
    makes a pass fail which saw less than was released. Passes are counted of every rule whose row
    is written, and each names the group and version of the last, so that what another group
    remembers of one of them is not believed any more.
    """
    ledger.save(account)
    served = _served_after(rows, releases)
    version = account.book.version
    first, group = min(rows), group_identity(rows, version)
    changed = {
        name
        for name, row in rows.items()
        if served[name] != row.served or row.memo.get("group") != group
    }
    if changed or not _is_remembered(rows, first, account):
        changed.add(first)
    passes = {name: row.passes + (name in changed) for name, row in rows.items()}
    memos = {name: {**rows[name].memo, "group": group} for name in changed}
    if first in changed:
        memos[first] = {**rows[first].memo, **account.memo.dump(passes, version)}
    fresh = [
        {"pk": name, "served": served[name], "memo": memos[name], "passes": passes[name]}
        for name in sorted(changed)
    ]
    # Who locked the rows between this pass's reading of the version and its locks went by a newer
    # one: what he charged may count in limits that this pass does not know.
    using, params = account.using, [version]
    still = f"{settings.version_sql(using)} = %s"
    if fresh and database.is_mysql(using):
        # Its UPDATE would lock the row of the version, and keep back who changes the settings.
        if settings.version(using) != version:
            raise Outdated
        still, params = "", []
    changed_rows = database.update_each(tables.RuleState, using, fresh, still, params)
    if fresh and not changed_rows:
        raise Outdated


def _served_after(rows: Mapping[str, LockedRule], releases: Sequence[Candidate]) -> dict[str, int]:
    served = {name: row.served for name, row in rows.items()}
    clock = max(served.values(), default=0)
    for number, call in enumerate(releases, start=clock + 1):
        served[call.rule] = number
    return served


def _is_remembered(rows: Mapping[str, LockedRule], first: str, account: Account) -> bool:
    """Whether the first rule's row has this memo already, and no more known room than is left."""
    passes, kept = {name: row.passes for name, row in rows.items()}, dict(rows[first].memo)
    fresh, known = account.memo.dump(passes, account.book.version), kept.get("room", {})
    if promises_more(known, fresh["room"]):
        return False
    same = {**kept, **fresh, "room": known}
    return json.dumps(same, sort_keys=True) == json.dumps({**kept, "room": known}, sort_keys=True)


@dataclass(frozen=True)
class Pass:
    released: list[Candidate] = field(default_factory=list)
    next_look: NextLook = field(default=NextLook())
    opens_in: float | None = None  # seconds until the next call may go; None: nobody knows
    begun: Begun | None = None  # what nobody else makes
    # calls that it failed, since no instant will ever admit them, which are to be told of
    unfit: Sequence[int] = ()


def release(
    using: str,
    group: Sequence[str],
    book: Book | None = None,
    *,
    batch: int = BATCH,
    last: Streak = NO_STREAK,
    room: Room = ROOMY,
    taker: Taker | None = None,
    own_call: OwnCall | None = None,
) -> Pass:
    """One pass over a group of rules: lock, count, choose, charge, conclude. What can never go is
    FAILED, for `tell_of_unfit` to announce. Publishes nothing; after its commit nothing can fail.
    `book`: what is in force (None: it is read here), and the settings whose calls may be released.
    `last`: how many passes before had no success. `room`: of whoever makes the calls; `taker`: who
    does, where that is this process. `own_call`: one of its own, for whose sake the pass is.
    Nothing is released where another has the group, clock or book is off, or `own_call` is gone.
    """
    book = book or settings.book_in_force(using)
    watch, batch = _agreed_watch(using), int(min(batch, room.most))
    clear, is_committed = None, False
    try:
        with database.writing(using):
            locked = _lock(using, book, group, watch)
            if locked is None:
                return Pass(next_look=next_look.when_not_locked(last))
            own = None
            if own_call is not None:
                if (pk := own_call.get_in_line(locked.wall)) is None:
                    return Pass()
                own = _Own(pk, own_call)
            done, unfit = _make_pass(locked, batch, last, room, taker, own)
            if unfit:
                transitions.fail(using, unfit)
                done = replace(done, unfit=list(unfit))
            if taker is not None and taker.take is not None and done.begun is not None:
                clear = taker.take(done.begun)
        is_committed = not database.in_transaction(using)
    except Outdated:
        return Pass(next_look=next_look.when_outdated(last))
    finally:
        if clear is not None:
            clear(is_committed)
    return done


def tell_of_unfit(using: str, done: Pass) -> None:
    """Announce the ends of the calls that a pass has failed."""
    if done.unfit:
        callbacks.log_and_announce(using, done.unfit, states.FAILED)


def ensure_state_rows(using: str, rules: Sequence[str]) -> None:
    ledger_time.ensure_rows(using)
    rule_rows.ensure(using, rules)


@dataclass(frozen=True)
class _Locked:
    """The rows of a group's rules, locked at `now`, the instant that `reading` may be taken for."""

    using: str
    book: Book
    group: Sequence[str]
    rows: Mapping[str, LockedRule]
    now: Us
    reading: Reading

    @property
    def holds_laid(self) -> dict[str, int]:
        """By rule, how many holds were ever laid."""
        return {rule: row.memo.get("laid", 0) for rule, row in self.rows.items()}

    @property
    def wall(self) -> datetime:
        return from_us(self.now + self.reading.moved)


def _agreed_watch(using: str) -> ledger_time.Watch:
    """The clock's watch, with a look and an agreement where no transaction is around this."""
    watch = ledger_time.watch(using)
    if not database.in_transaction(using):
        if watch.wants_look:
            watch.look()
        watch.agree()
    return watch


def _lock(
    using: str,
    book: Book,
    group: Sequence[str],
    watch: ledger_time.Watch,
) -> _Locked | None:
    """Lock the rules' rows, and read them and the clock; None where somebody has locked one, the
    clock has jumped, or may have, or nobody here knows one of their limits. Outdated where the book
    is not what is in force.
    """
    if not book.unreadable.isdisjoint(group):
        return None
    before = clocks.monotonic()
    found = database.rows(using, _lock_sql(using, group), group)
    if len(found) < len(group):
        return None
    read = len(ledger_time.READING_COLUMNS)
    reading = ledger_time.reading_of(using, before, *found[0][:read])
    rows = {
        rule: LockedRule(passes, served, database.json_value(memo), bool(corrected))
        for rule, passes, served, memo, corrected, *_ in (row[read + 1 :] for row in found)
    }
    now = watch.keep_and_credit(reading)
    if now is None or not (watch.is_agreed or database.is_nested(using)):
        return None
    if found[0][read] != book.version:
        raise Outdated
    book = book.moved_by(reading.moved)
    # What such a pass has charged is not to be seen before it is committed, and perhaps it has no
    # other row in common with this one.
    former = book.former_rules_under_way(group, now).difference(group)
    if former and not rule_rows.try_lock(using, former):
        return None
    return _Locked(using, book, group, rows, now, reading)


def _lock_sql(using: str, group: Sequence[str]) -> str:
    """SQL that locks and reads the rules' rows that nobody else has, and the clock just before."""
    rules, attempts = (tables.name(using, model) for model in ("RuleState", "CallAttempt"))
    is_corrected = (
        f"EXISTS (SELECT 1 FROM {attempts} a WHERE a.correction_pending AND a.rule = {rules}.rule)"
    )
    return (
        f"SELECT {ledger_time.reading_sql(using)}, {settings.version_sql(using)}, "
        f"rule, passes, served, memo, {is_corrected}"
        f"{database.idle_timeout_sql(using, rule_rows.SILENT)} "
        f"FROM {rules} WHERE rule IN ({database.placeholders(group)}) "
        f"ORDER BY rule{database.skip_locked_sql(using)}"
    )


def _make_pass(
    locked: _Locked,
    batch: int,
    last: Streak,
    room: Room,
    taker: Taker | None,
    own: _Own | None,
) -> tuple[Pass, Mapping[int, str]]:
    """Count unless known room will do; choose, charge, conclude. The pass; by id, why unfit."""
    using, book = locked.using, locked.book
    served = {rule: row.served for rule, row in locked.rows.items()}
    sake = None if own is None else (own.call.rule, own.call.priority)
    lead = LEAD if own is None else own.call.lead
    # Many are packed for workers that are behind, and whether these are, only a count says.
    most = SPREAD if taker is None or taker.suits is not None else batch
    account, held, plan = _account(locked, lead), NOT_HELD, None
    if _knows_enough(account, locked):
        found = choose(account, held, served, min(batch, most + 1), sake, room)
        is_few = len(found.releases) <= most
        plan = found if is_few and not found.wait.on_answer else None
    if plan is None:
        account, held = _read_account_and_holds(locked, lead)
        if own is not None and own.call.is_new and held.rules_taking_turns(book, [own.call.rule]):
            ready_calls.tell_of_keys(using, [own.id])
        plan = choose(account, held, served, batch, sake, room)
    rows = charge(account, plan.releases, locked.wall, taker, own)
    begun = Begun(rows, locked.reading) if rows else None
    if own is None:
        account.memo.binding = plan.binding
    remember(account, locked.rows, plan.releases)
    return _conclude(account, held, plan, begun, batch, last), plan.unfit


def _account(locked: _Locked, lead: float) -> Account:
    """An account of the limits up to `lead` seconds ahead, with nothing read."""
    kept = {rule: (row.passes, row.memo) for rule, row in locked.rows.items()}
    until, moved = locked.now + round(lead * SECOND), locked.reading.moved
    memo = Memo.load(locked.group, kept, locked.book.version, moved)
    group = tuple(locked.group)
    return Account(locked.using, locked.book, group, locked.now, until, memo, moved=moved)


def _knows_enough(account: Account, locked: _Locked) -> bool:
    """Load known room if it is valid; whether it is, and too few are open for workers to lag."""
    is_corrected = any(row.is_corrected for row in locked.rows.values())
    return (
        not is_corrected
        and not account.memo.in_turn
        and account.try_known_room(locked.holds_laid)
        and not any(workers_may_be_behind(count) for count in account.open_by_rule.values())
    )


def _read_account_and_holds(locked: _Locked, lead: float) -> tuple[Account, Held]:
    account = _account(locked, lead)
    account.read(has_corrections=any(row.is_corrected for row in locked.rows.values()))
    held = holds.in_force(locked.using, locked.group, from_us(locked.now))
    if not held.by_rule:
        account.note_room(locked.holds_laid)
    return account, held


def _conclude(
    account: Account, held: Held, plan: Plan, begun: Begun | None, batch: int, last: Streak
) -> Pass:
    """The pass as it went. Next look: LEAD / 2 before a blocked call may go, REVIEW where held."""
    gone, released = len(plan.releases), _published_or_made(account, plan.releases)
    wait, opens_in = plan.wait, None
    if len(released) >= batch:
        wait |= Wait(is_unfinished=True, on_room=batch < BATCH)
    if wait.until is not None:
        opens_in = max(0.0, (wait.until - account.now) / SECOND - LEAD / 2)
    look = next_look.when_passed(
        wait,
        next_look.REVIEW if opens_in is None and held.by_rule else opens_in,
        last,
        has_released=bool(gone),
        open_attempts=account.open_count + gone,
        untold_attempts=account.untold_count + gone,
        poll=conf.current().poll,
    )
    return Pass(released, look, opens_in, begun)
