"""Guests of the agreement: processes that are no dispensers and charge all the same, under settings
that no dispenser may have. They take permits.
"""

from __future__ import annotations

from dataclasses import replace

from callqueue import database
from callqueue.database import to_us
from callqueue.ledger import agreement, agreement_rows
from callqueue.limits.agreements import in_force, renewed
from callqueue.limits.budgets import Book
from callqueue.limits.opinions import digest_of, kinds_of, named, opinion_of


def book_of_guest(using: str, own: Book) -> Book:
    """What is in force for a process that is no dispenser and charges all the same: its own limits,
    and those of all dispensers, though none of these may have its settings: in a deploy it is older
    than they, or newer. It states its opinion for SILENCE seconds, so that what it charges counts
    for them; when a dispenser has taken that away, its passes are in vain until it has come again.
    Guests go by each other's limits, too.

    It locks what they lock, and perhaps more; of what it counts else they believe nothing.
    """
    while True:
        token = _let_guest_in(using, own)
        found, now = agreement_rows.read(using), to_us(database.clock(using))
        if found.token == token:
            opinions = agreement_rows.opinions(using, found.digests)
            if digest_of(opinion_of(own)) not in found.digests:
                opinions |= {digest: opinion for digest, (_, opinion) in found.guests.items()}
            return replace(in_force(own, found, opinions, now), agreement=token)


def _let_guest_in(using: str, own: Book) -> str:
    """The token of the agreement, once that says what a process with these settings charges. Nobody
    has to know of settings without named limits before there is any agreement.
    """
    found, opinion = agreement_rows.read(using), opinion_of(own)
    digest = digest_of(opinion)
    if digest in found.holders or not (found.token or any(named(opinion))):
        return found.token
    with database.writing(using):
        before = agreement_rows.locked(using)
        now = to_us(database.clock(using))
        agreed = before.without_guests(now - agreement.SILENCE_US).with_guest(digest, opinion, now)
        opinions = agreement_rows.opinions(using, before.digests)
        agreement_rows.ensure_states(using, set(opinion), before.token)
        after = renewed(agreed, opinions, kinds_of(own))
        # A dispenser's opinion counts until another dispenser has found that it is gone.
        after = replace(after, digests=before.digests, differ=before.differ)
        after = agreement_rows.renew(using, before, after)
        agreement_rows.stamp(using, after.token)
    return after.token
