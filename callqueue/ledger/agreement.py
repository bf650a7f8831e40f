"""Keeps the agreement of all dispensers that are alive: which limits are in force, though their
settings may differ.

A dispenser states its opinion before it releases anything, and every rule's row carries the token
of the agreement that its passes go by. Whoever changes the agreement gives it a new token and
writes that into each row that no pass holds, until all have it: a pass that meets another token
than its book's releases nothing, and its dispenser joins anew. So from the instant at which all
rows have the token, no pass goes by what was in force before. Nobody waits for a pass, since that
may be frozen.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from callqueue import conf, database, events, tables
from callqueue.database import to_us
from callqueue.ledger import agreement_rows
from callqueue.ledger.agreement_rows import ALL as ALL
from callqueue.limits.agreements import Agreement, in_force, is_settled, renewed
from callqueue.limits.budgets import Book
from callqueue.limits.opinions import (
    Difference,
    Opinion,
    differences,
    digest_of,
    kinds_of,
    opinion_of,
)

# seconds without a sign of life, which comes every five, after which a dispenser's opinion counts
# no more
SILENCE = 20.0
SILENCE_US = round(SILENCE * 1_000_000)
# silence by the database's clock, by which those judge that have not watched for SILENCE seconds
LONG_SILENCE = timedelta(minutes=5)
PATIENCE = 5.0  # seconds that a changed limit waits for passes that go by the old one
PAUSE = 0.01
LATELY = 1.0


class Seat:
    """A dispenser's place in the agreement: it `join`s before it releases, `look`s every few
    seconds, and `leave`s at its end.
    """

    def __init__(self, using: str, name: str) -> None:
        self.using, self.name = using, name
        self.book: Book | None = None
        # whether all rows have the book's token: nobody goes by what was in force before
        self.is_complete = False
        self._digests: Sequence[str] = ()
        self._is_settled = True
        self._guests_since: int | None = None  # microseconds
        self._signs: dict[str, _Sign] = {}

    def join(self, own: Book) -> Book:
        """State the opinion of these settings, unless it is known, and give the book that is in
        force from now on.

        To be repeated until `is_complete`. Other dispensers' opinions go on counting until they
        leave or fall silent.
        """
        opinion = opinion_of(own)
        digest = digest_of(opinion)
        with database.writing(self.using):
            before = agreement_rows.locked(self.using)
            if before.guests and not agreement_rows.opinions(self.using, [digest]):
                # It was away, and guests that came meanwhile could not read its opinion.
                before = replace(before, digests=tuple(d for d in before.digests if d != digest))
            self._state(digest, opinion)
            now = database.clock(self.using)
            heard = {d for name, d in self._heard(now) if name != self.name and d in before.digests}
            opinions = {digest: opinion, **agreement_rows.opinions(self.using, heard - {digest})}
            agreement_rows.ensure_states(
                self.using, {rule for one in opinions.values() for rule in one}, before.token
            )
            agreed = before.without_guests(to_us(now) - SILENCE_US)
            settled_at = self._settled_at(before, agreed, opinions)
            after = renewed(agreed, opinions, kinds_of(own), settled_at)
            after = agreement_rows.renew(self.using, before, after)
            self.is_complete = agreement_rows.stamp(self.using, after.token)
        self._digests, self._is_settled = after.digests, is_settled(after, opinions)
        self._guests_since = min((at for at, _ in after.guests.values()), default=None)
        _tell(self.using, before, after)
        self.book = in_force(own, after, opinions, to_us(now))
        return self.book

    def look(self) -> bool:
        """Whether to join anew: the agreement is another, or may be, since an opinion has fallen
        silent. Two statements.
        """
        token = agreement_rows.token(self.using)
        now = database.clock(self.using)
        heard = {digest for _, digest in self._heard(now)}
        return (
            self.book is None
            or token != self.book.agreement
            or not heard.issuperset(self._digests)
            or not self._is_settled
            or not self.is_complete
            or (self._guests_since is not None and to_us(now) - self._guests_since >= SILENCE_US)
        )

    def look_afresh(self) -> None:
        """The database was away: others could give no sign of life either."""
        self._signs.clear()

    def leave(self) -> None:
        """Take the opinion back: what only this dispenser held is not in force any more."""
        with database.writing(self.using):
            before = agreement_rows.locked(self.using)
            tables.dispensers(self.using).filter(pk=self.name).update(opinion=None, digest="")
            heard = {
                d for name, d in self._heard(database.clock(self.using)) if d in before.digests
            }
            after = before
            if heard:
                after = agreement_rows.renew(
                    self.using, before, renewed(before, agreement_rows.opinions(self.using, heard))
                )
                agreement_rows.stamp(self.using, after.token)
        self.book = None
        _tell(self.using, before, after)

    def _state(self, digest: str, opinion: Opinion) -> None:
        rows = tables.dispensers(self.using)
        if rows.filter(pk=self.name, digest=digest).exists():
            return
        if not rows.filter(pk=self.name).update(opinion=opinion, digest=digest):
            now = database.clock(self.using)
            rows.create(name=self.name, started_at=now, seen_at=now, opinion=opinion, digest=digest)

    def _settled_at(
        self, before: Agreement, agreed: Agreement, opinions: Mapping[str, Opinion]
    ) -> int | None:
        """Now, where every pass that goes by more than the present opinions has ended."""
        if (
            agreed.holders != before.holders
            or set(opinions) != set(before.digests)
            or is_settled(before, opinions)
            or agreement_rows.behind(self.using, before.token).exists()
        ):
            return None
        return to_us(database.clock(self.using))

    def _heard(self, now: datetime) -> list[tuple[str, str]]:
        """Each dispenser that is not silent: its name, and its opinion's digest. One statement."""
        listed, moment = agreement_rows.signs(self.using), time.monotonic()
        self._signs = {
            name: _Sign(seen, moment).after(self._signs.get(name)) for name, _, seen in listed
        }
        return [
            (name, digest)
            for name, digest, _ in listed
            if name == self.name or not self._signs[name].is_silent(moment, now)
        ]


@dataclass(frozen=True)
class _Sign:
    """A dispenser's last sign of life, and since when (monotonic) we watch for the next."""

    at: datetime
    since: float
    is_first: bool = True

    def after(self, last: _Sign | None) -> _Sign:
        if last is None:
            return self
        return last if last.at == self.at else _Sign(self.at, self.since, is_first=False)

    def is_silent(self, moment: float, now: datetime) -> bool:
        """Whether it was silent for SILENCE seconds of watching; or was never heard here, and for
        LONG_SILENCE by the clock, which may have jumped.
        """
        return moment - self.since > SILENCE or (self.is_first and now - self.at > LONG_SILENCE)


def book_in_force(using: str, own: Book | None = None, *, token: str | None = None) -> Book:
    """What is in force, for those who only look: with what all dispensers hold, and by default this
    process's settings. `token`: the agreement's, by who has read it.

    One statement without it, and three more where it has changed since the last look.
    """
    own = own or conf.current().book
    token = agreement_rows.token(using) if token is None else token
    kept = _books.get(using)
    if kept is None or kept[0] != token or kept[1] is not own:
        found, now = (
            (agreement_rows.read(using), database.clock(using))
            if token
            else (Agreement(), database.EPOCH)
        )
        book = in_force(own, found, agreement_rows.opinions(using, found.digests), to_us(now))
        kept = _books[using] = (found.token, own, book)
    return kept[2]


def book_lately(using: str) -> Book:
    """What was in force LATELY seconds ago, or later, for what is asked many times a second and may
    hear of a change a little late. One statement a second.
    """
    own, now = conf.current().book, time.monotonic()
    looked_at, of, book = _lately.get(using, (-LATELY, own, own))
    if of is not own or now - looked_at >= LATELY:
        book = book_in_force(using, own)
        _lately[using] = now, own, book
    return book


_books: dict[str, tuple[str, Book, Book]] = {}
_lately: dict[str, tuple[float, Book, Book]] = {}


def memos(using: str, rules: Collection[str]) -> dict[str, tuple[int, dict[str, Any]]]:
    """What passes remember of each rule: their count, and their memo. One statement."""
    stored = tables.rule_states(using).filter(rule__in=rules).values_list("rule", "passes", "memo")
    return {rule: (passes, memo or {}) for rule, passes, memo in stored}


def set_rate(using: str, limit: str, rate: str | None) -> None:
    """Give a limit, by its id in the settings, another rate, or None, its own; waits for passes
    that go by the old one.
    """
    with database.writing(using):
        before = agreement_rows.locked(using)
        rates = {name: old for name, old in before.rates.items() if name != limit}
        after = agreement_rows.renew(
            using, before, replace(before, rates=rates if rate is None else {**rates, limit: rate})
        )
        is_complete = agreement_rows.stamp(using, after.token)
    end = time.monotonic() + PATIENCE
    while not is_complete and time.monotonic() < end:
        time.sleep(PAUSE)
        with database.writing(using):
            is_complete = agreement_rows.locked(using).token != after.token or agreement_rows.stamp(
                using, after.token
            )


def known_rules(using: str) -> set[str]:
    """The rules that any dispenser knows whose opinion counts. Two statements."""
    return {
        rule
        for opinion in agreement_rows.opinions(using, agreement_rows.read(using).digests).values()
        for rule in opinion
    }


def disagreements(
    using: str, digests: Collection[str], *, here: Opinion | None = None
) -> list[Difference]:
    """The limits on which dispensers with these opinions differ, and who says what. `here`: what
    this process's settings say, where they are to be judged too.
    """
    stated = tables.dispensers(using).filter(digest__in=list(digests)).order_by("name")
    found: dict[str, Opinion] = {
        name: opinion or {} for name, opinion in stated.values_list("name", "opinion")
    }
    return differences({"this process": here, **found} if found and here is not None else found)


def shift(using: str, by: int) -> None:
    """Move the agreement's instants along with a clock that jumped. Inside a transaction."""
    if not agreement_rows.token(using):
        return
    before = agreement_rows.locked(using)

    def moved(past: Mapping[str, Mapping[str, int | None]]) -> dict[str, dict[str, int | None]]:
        return {
            name: {rule: until and until + by for rule, until in rules.items()}
            for name, rules in past.items()
        }

    guests = {digest: (at + by, opinion) for digest, (at, opinion) in before.guests.items()}
    after = replace(before, charged=moved(before.charged), names=moved(before.names), guests=guests)
    agreement_rows.stamp(using, agreement_rows.renew(using, before, after).token)


def _tell(using: str, before: Agreement, after: Agreement) -> None:
    """Say so where dispensers now differ in their limits, or do not differ any more."""
    if before.digests == after.digests or not (before.differ or after.differ):
        return
    if not after.differ:
        events.emit(
            "settings_agree",
            dispensers=", ".join(name for name, _, _ in agreement_rows.signs(using)),
        )
        return
    found = disagreements(using, after.digests)
    dispensers = sorted({name for one in found for who in one.said.values() for name in who})
    events.emit(
        "settings_differ", limits="; ".join(map(str, found)), dispensers=", ".join(dispensers)
    )
