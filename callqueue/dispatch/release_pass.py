"""One pass of releases over a group of rules: lock, count, choose, charge, conclude. The only place
that releases calls.

In: the names of the group's rules. Out: the attempts to publish, and when to look again. A pass
makes the same number of statements whatever it releases; it never publishes, and never makes a
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from callqueue import callbacks, clocks, conf, database, states, tables, transitions
from callqueue.database import from_us
from callqueue.dispatch import next_look
from callqueue.dispatch.charging import LockedRule, Released, charge, remember
from callqueue.dispatch.choosing import Choice, choose
from callqueue.dispatch.next_look import NO_STREAK, NextLook, Streak, Wait
from callqueue.ledger import account as ledger
from callqueue.ledger import agreement, clock_jumps, holds
from callqueue.ledger.account import Account, Memo
from callqueue.ledger.holds import Held
from callqueue.limits.budgets import Book

LEAD = 0.15  # seconds ahead of its slot that a call may be released: hides the broker's latency
BATCH = 500  # calls that one pass releases at most
# seconds without a statement after which the server ends a pass: its process is frozen, or gone
SILENT = 5


@dataclass(frozen=True)
class Pass:
    """What a pass released, and when to look again.

    `opens_in`: seconds until a limit or a hold may let the next call go; None where that is not
    known.
    """

    released: list[Released] = field(default_factory=list)
    next_look: NextLook = field(default=NextLook())
    opens_in: float | None = None


def release(
    using: str,
    group: Sequence[str],
    book: Book | None = None,
    *,
    batch: int = BATCH,
    last: Streak = NO_STREAK,
) -> Pass:
    """One pass over a group of rules: lock, count, choose, charge, conclude. Publishes nothing.

    `book`: what is in force (by default it is read), and the settings whose calls may be released;
    `last`: how many passes before this one had no success. Makes the same number of statements
    whatever it releases. Where another dispenser holds the group, or the book is not what all agree
    on, nothing is released.
    """
    watch = clock_jumps.watch(using)
    if watch.wants_look and not database.in_transaction(using):
        watch.look()
    book = book or agreement.book_in_force(using)
    with database.writing(using):
        rows, now = _lock(using, group, watch)
        if now is None:
            return Pass(next_look=next_look.when_locked(last))
        if any(row.agreement != book.agreement for row in rows.values()):
            return Pass(next_look=next_look.when_outdated(last))
        account = _count(using, book, group, rows, now)
        held = holds.in_force(using, group, from_us(now))
        served = {rule: row.served for rule, row in rows.items()}
        choice = choose(account, held, served, batch)
        released = charge(account, choice.releases)
        remember(account, rows, choice.releases)
        transitions.fail(using, choice.unfit)
    if choice.unfit:
        callbacks.announce(using, list(choice.unfit), states.FAILED)
    return _conclude(account, held, choice, released, batch, last)


def ensure_states(using: str, rules: Sequence[str]) -> None:
    """Make the row of every rule that has none yet, and the one of the clock's jumps."""
    clock_jumps.make_frame(using)
    rows = tables.rule_states(using)
    missing = set(rules) - set(rows.filter(rule__in=rules).values_list("rule", flat=True))
    rows.bulk_create(
        [tables.RuleState(rule=rule) for rule in sorted(missing)], ignore_conflicts=True
    )


def _lock(
    using: str, group: Sequence[str], watch: clock_jumps.Watch
) -> tuple[dict[str, LockedRule], int | None]:
    """Lock the rules' rows, and read them; and what the clock may be taken to show: None where
    somebody else has locked one, or the clock has jumped, or may have.
    """
    before = clocks.monotonic()
    found = database.rows(using, _lock_sql(using, group), group)
    if len(found) < len(group) or not watch.is_settled:
        return {}, None
    reading = clock_jumps.brought(using, before, *found[0][:2])
    rows = {
        rule: LockedRule(passes, served, database.loaded(memo), agreed, bool(is_corrected))
        for _, _, rule, passes, served, memo, agreed, is_corrected, *_ in found
    }
    return rows, watch.credited(reading)


def _lock_sql(using: str, group: Sequence[str]) -> str:
    """Locks the rules' rows that nobody else has locked, and reads them; and the clock, as it was
    just before.
    """
    rules, attempts = (
        database.quoted(using, model._meta.db_table)
        for model in (tables.RuleState, tables.CallAttempt)
    )
    is_corrected = (
        f"EXISTS (SELECT 1 FROM {attempts} a WHERE a.correction_pending AND a.rule = {rules}.rule)"
    )
    return (
        f"SELECT {database.clock_sql(using)}, {clock_jumps.moved_sql(using)}, "
        f"rule, passes, served, memo, agreement, {is_corrected}"
        f"{database.within_idle_seconds(using, SILENT)} "
        f"FROM {rules} WHERE rule IN ({database.places(group)}) "
        f"ORDER BY rule{database.skip_locked(using)}"
    )


def _count(
    using: str, book: Book, group: Sequence[str], rows: Mapping[str, LockedRule], now: int
) -> Account:
    """What the limits are charged with now, and may be charged with up to LEAD ahead."""
    memo = Memo.load(group, {rule: (row.passes, row.memo) for rule, row in rows.items()})
    return ledger.read(
        using,
        book,
        group,
        now,
        memo,
        until=now + round(LEAD * 1_000_000),
        has_corrections=any(row.is_corrected for row in rows.values()),
    )


def _conclude(
    account: Account,
    held: Held,
    choice: Choice,
    released: list[Released],
    batch: int,
    last: Streak,
) -> Pass:
    """When the group is looked at again: half of LEAD before the first blocked call may go, and
    where an operator alone knows when, every REVIEW.
    """
    wait, opens_in = choice.wait, None
    if wait.until is not None:
        opens_in = max(0.0, (wait.until - account.now) / 1_000_000 - LEAD / 2)
    look = next_look.when_passed(
        wait | Wait(is_unfinished=len(released) >= batch),
        next_look.REVIEW if opens_in is None and held.by_rule else opens_in,
        last,
        has_released=bool(released),
        open_attempts=account.open_count + len(released),
        poll=conf.current().poll,
    )
    return Pass(released, look, opens_in)
