"""The settings in force: one row with their version and the rates that operators changed, and a row
for each opinion that processes hold of the limits.

Whoever charges states its opinion first. Whoever makes one come or lapse, or changes a rate, raises
the version. A pass reads it with its locks, and charges nothing where it is not that of its book.
So no pass begins by what was in force before, and one that has begun has its rules' rows locked.
Here only `set_rate` waits for it, PATIENCE at most: it may be frozen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from callqueue import conf, database, events, tables
from callqueue.clocks import Reading
from callqueue.database import from_us, to_us
from callqueue.ledger import ledger_time, rule_rows, transaction
from callqueue.limits.budgets import Book
from callqueue.limits.in_force import (
    LATE,
    Difference,
    Opinion,
    Stated,
    differences,
    digest_of,
    opinion_of,
)

# seconds without a sign of life, which comes every five, after which an opinion counts no more
SILENCE, SIGN = 20.0, 5.0
# silence by ledger time, by which those judge that have not watched for SILENCE seconds
LONG_SILENCE = timedelta(minutes=5)
# seconds without a look at the others, after which they are watched afresh: the database may have
# been away, and for them as well
GAP = 10.0
PATIENCE = 5.0  # seconds that a changed rate waits for passes that go by the old one
PAUSE = 0.01
LATELY = 1.0
ROW = 1  # the key of the only row


class Party:
    """A process that charges: it joins first, gives signs of life, and leaves at its end."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.book: Book | None = None  # what is in force, as far as this process knows
        self._own: Book | None = None  # of its own settings, as it joined
        self.digest = ""  # of the opinion that it has stated last
        self._signs: dict[str, _Sign] = {}  # the last sign of each opinion, by digest
        self._looked_at = 0.0  # when it last looked at those, monotonic

    def join(self, own: Book) -> Book:
        """State the opinion of these settings; let silent ones lapse; what is in force then."""
        opinion = opinion_of(own)
        digest = digest_of(opinion)

        def state(before: Stated, reading: Reading) -> Stated:
            now = from_us(reading.at)
            gone = self._look_for_silent(now)
            if self.digest != digest and not _has_live_dispenser(self.using, self.digest, now):
                gone.add(self.digest)  # the settings have changed
            comes = {} if digest in before.opinions else {digest: opinion}
            after = _change_opinions(self.using, before, comes, gone - {digest}, reading)
            rule_rows.ensure(self.using, {rule for one in after.opinions.values() for rule in one})
            return after

        after = _restate(self.using, state)
        self._own, self.digest = own, digest
        self.book = after.book(own)
        return self.book

    def heartbeat(self) -> bool:
        """Say the opinion is held. Whether to join anew: settings changed, or others are silent."""
        rule_rows.ensure(self.using, self.book.rules if self.book else ())
        now = ledger_time.now(self.using)
        mine = tables.opinions(self.using).filter(pk=self.digest, lapsed_at=None)
        is_held = bool(mine.update(seen_at=now))
        is_silent = bool(self._look_for_silent(now) - {self.digest})
        return (
            self.book is None
            or not is_held
            or is_silent
            or version(self.using) != self.book.version
        )

    def book_to_charge_by(self, own: Book, *, is_outdated: bool) -> Book:
        """The book to charge by, where nothing else gives signs of life: joins or gives one."""
        # outdated: a pass has found that its book is in force no more
        if self.book is None or self._own is not own or is_outdated:
            return self.join(own)
        if time.monotonic() - self._looked_at >= SIGN and self.heartbeat():
            return self.join(own)
        return self.book

    def leave(self) -> None:
        """Take the opinion back, unless another dispenser has it."""

        def take_back(before: Stated, reading: Reading) -> Stated:
            if _has_live_dispenser(self.using, self.digest, from_us(reading.at)):
                return before
            return _change_opinions(self.using, before, {}, {self.digest}, reading)

        if self.book is not None:
            _restate(self.using, take_back)
            self.book = None

    def _look_for_silent(self, now: datetime) -> set[str]:
        """The opinions, by digest, whose processes give no sign of life. Notes the last of each."""
        held = tables.opinions(self.using).filter(lapsed_at=None)
        moment = time.monotonic()
        known = self._signs if moment - self._looked_at < GAP else {}
        self._looked_at = moment
        self._signs = {
            digest: _Sign(seen, moment).merged_with(known.get(digest))
            for digest, seen in held.values_list("digest", "seen_at")
        }
        return {digest for digest, sign in self._signs.items() if sign.is_silent(moment, now)}


@dataclass(frozen=True)
class _Sign:
    """The last sign of life of an opinion, and since when (monotonic) we watch for the next."""

    at: datetime  # ledger time
    since: float
    is_first: bool = True  # no other was seen before it

    def merged_with(self, last: _Sign | None) -> _Sign:
        if last is None:
            return self
        return last if last.at == self.at else _Sign(self.at, self.since, is_first=False)

    def is_silent(self, moment: float, now: datetime) -> bool:
        # by the clock, which may have jumped, only where it was never heard here
        return moment - self.since > SILENCE or (self.is_first and now - self.at > LONG_SILENCE)


# --- for those who only look


def version(using: str) -> int:
    """The version of the settings in force; 0 where nobody has ever stated any."""
    return tables.settings_state(using).values_list("version", flat=True).first() or 0


def version_sql(using: str) -> str:
    return f"COALESCE((SELECT version FROM {tables.name(using, 'SettingsState')}), 0)"


def book_in_force(using: str, own: Book | None = None, *, known_version: int | None = None) -> Book:
    """What is in force, for those who only look. One statement; two more where it has changed."""
    own = own or conf.current().book
    at = version(using) if known_version is None else known_version
    kept = _books.get(using)
    if kept is None or kept[0] != at or kept[1] is not own:
        book = (read_stated(using) if at else Stated()).book(own)
        kept = _books[using] = (at, own, book)
    return kept[2]


def book_lately(using: str) -> Book:
    """What was in force LATELY seconds ago, or later, for what is asked many times a second."""
    own, now = conf.current().book, time.monotonic()
    looked_at, of, book = _lately.get(using, (-LATELY, own, own))
    if of is not own or now - looked_at >= LATELY:
        book = book_in_force(using, own)
        _lately[using] = now, own, book
    return book


_books: dict[str, tuple[int, Book, Book]] = {}
_lately: dict[str, tuple[float, Book, Book]] = {}


def read_stated(using: str) -> Stated:
    """What all processes say, not locked."""
    # The version first: what is read after it is no older.
    found = tables.settings_state(using).values_list("version", "rates").first()
    return _read_opinions(using, *(found or (0, {})))


def known_rules(using: str) -> set[str]:
    """The rules of all opinions that are held."""
    held = tables.opinions(using).filter(lapsed_at=None)
    return {rule for opinion in held.values_list("limits", flat=True) for rule in opinion}


def disagreements(
    using: str, digests: Collection[str], *, here: Opinion | None = None
) -> list[Difference]:
    """The limits on which dispensers' opinions of these digests differ, and `here`'s if given."""
    stated = tables.opinions(using).filter(pk__in=list(digests))
    opinions: dict[str, Opinion] = dict(stated.values_list("digest", "limits"))
    holders = tables.dispensers(using).filter(digest__in=opinions).order_by("name")
    names = list(holders.values_list("name", "digest"))
    found = {name: opinions[digest] for name, digest in names}
    return differences({"this process": here, **found} if found and here is not None else found)


# --- changes


def set_rate(using: str, settings_id: str, rate: str | None) -> None:
    """Give a limit a rate (None: its own); wait PATIENCE at most for passes by the old one."""
    with database.writing(using):
        before = _lock_stated(using)
        rates = {name: old for name, old in before.rates.items() if name != settings_id}
        rates |= {} if rate is None else {settings_id: rate}
        if rates != before.rates:
            _raise_version(using, before.version, ledger_time.now(using), rates=rates)
    states = tables.rule_states(using)
    busy = set(states.values_list("rule", flat=True))
    end = time.monotonic() + PATIENCE
    while busy and time.monotonic() < end:
        with database.writing(using):
            rows = states.filter(rule__in=busy).order_by("rule")
            busy -= set(database.locked(rows).values_list("rule", flat=True))
        time.sleep(PAUSE)


def forget_lapsed(using: str, now: datetime) -> None:
    """Forget the opinions that lapsed so long ago that no limit counts what was charged by them."""

    def work() -> None:
        stated = _lock_stated(using)
        oldest = from_us(to_us(now) - LATE - stated.longest_window)
        if tables.opinions(using).filter(lapsed_at__lt=oldest).delete()[0]:
            _raise_version(using, stated.version, now)

    transaction.untimed_transaction(using, work)


def _restate(using: str, change: Callable[[Stated, Reading], Stated]) -> Stated:
    """Change what is stated, locked meanwhile; what is stated then. Logs a new disagreement."""

    def once() -> tuple[Stated, Stated]:
        with database.writing(using):
            before = _lock_stated(using)
            return before, change(before, ledger_time.read(using))

    before, after = transaction.again_after_jump(using, once)
    _log_disagreement(using, before, after)
    return after


def _lock_stated(using: str) -> Stated:
    """What all processes say, locked until the transaction ends."""
    database.set_idle_timeout(using, rule_rows.SILENT)
    rows = tables.settings_state(using)
    found = database.locked(rows, wait=True).values_list("version", "rates").first()
    if found is None:
        rows.bulk_create([tables.SettingsState(pk=ROW)], ignore_conflicts=True)
        found = database.locked(rows, wait=True).values_list("version", "rates").get()
    return _read_opinions(using, *found)


def _read_opinions(using: str, version: int, rates: Mapping[str, str]) -> Stated:
    opinions, lapsed = {}, []
    for digest, limits, lapsed_at in tables.opinions(using).values_list(
        "digest", "limits", "lapsed_at"
    ):
        if lapsed_at is None:
            opinions[digest] = limits
        else:
            lapsed.append((limits, to_us(lapsed_at)))
    return Stated(version, opinions, lapsed, rates)


def _change_opinions(
    using: str,
    before: Stated,
    comes: Mapping[str, Opinion],
    gone: Collection[str],
    reading: Reading,
) -> Stated:
    """Have opinions come and lapse; what is stated then, locked as before. May raise Jumped."""
    now = from_us(reading.at)
    if gone := [digest for digest in gone if digest in before.opinions]:
        ledger_time.check_for_jump(using, reading)  # after a jump, the living seem to be silent
    if not comes and not gone and before.version:
        return before
    rows = tables.opinions(using)
    for digest, limits in comes.items():
        held = {"limits": limits, "seen_at": now, "lapsed_at": None}
        if not rows.filter(pk=digest).update(**held):
            rows.create(digest=digest, **held)
    rows.filter(pk__in=gone).update(lapsed_at=now)
    at = _raise_version(using, before.version, now)
    return _read_opinions(using, at, before.rates)


def _raise_version(using: str, before: int, now: datetime, **columns: object) -> int:
    # a number that the settings never had, not even before a backup was restored
    after = max(before + 1, to_us(now))
    tables.settings_state(using).update(version=after, **columns)
    return after


def _has_live_dispenser(using: str, digest: str, now: datetime) -> bool:
    lately = now - timedelta(seconds=SILENCE)
    return bool(tables.dispensers(using).filter(digest=digest, seen_at__gt=lately).exists())


def _log_disagreement(using: str, before: Stated, after: Stated) -> None:
    """If the version has changed, log that opinions differ, or agree again."""
    if before.version == after.version:
        return
    found = disagreements(using, after.opinions)
    if found:
        dispensers = sorted({name for one in found for who in one.said.values() for name in who})
        events.emit(
            "settings_differ", limits="; ".join(map(str, found)), dispensers=", ".join(dispensers)
        )
    elif differences(before.opinions) and not differences(after.opinions):
        alive = tables.dispensers(using).exclude(digest="").order_by("name")
        events.emit("settings_agree", dispensers=", ".join(alive.values_list("name", flat=True)))
