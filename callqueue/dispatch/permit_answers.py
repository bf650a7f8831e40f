"""What a pass says to the permit for whose sake it was made.

In: what the pass chose, and the holds. Out: an Answer. No statement is made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from callqueue import database
from callqueue.clocks import Reading
from callqueue.dispatch.choosing import Choice
from callqueue.ledger.holds import Held, InForce
from callqueue.ledger.ready_calls import Candidate
from callqueue.limits.budgets import Book


@dataclass(frozen=True)
class Answer:
    """What a pass says to a permit. Granted: `attempt_id`, to begin at `send_at` (None: now).

    Else what it waits for: `reason`, and the instant at which that should end (None: nobody can
    say). `is_behind`: others go before it, of `waiting` permits; `is_held`: an operator or the
    provider keeps it back; `is_misfit`: no instant will ever admit it. Instants are microseconds.
    Without a `reading` of the clock no pass was made: somebody else has the rules; or, where
    `is_outdated`, the book is not what all agree on; or `is_gone`: no pass sees the permit's
    request.
    """

    reading: Reading | None = None
    attempt_id: int | None = None
    queue: str = ""
    send_at: int | None = None
    until: int | None = None
    reason: str = ""
    is_behind: bool = False
    waiting: int = 0
    is_held: bool = False
    is_misfit: bool = False
    is_outdated: bool = False
    is_gone: bool = False


def answer(
    own: Candidate,
    held: Held,
    book: Book,
    choice: Choice,
    granted: Mapping[str, int],
    reading: Reading,
) -> Answer:
    """What the pass has come to for this permit."""
    owner = own.asked.owner if own.asked is not None else ""
    if owner in granted:
        made = next(one for one in choice.releases if one.candidate.asked == own.asked)
        return Answer(reading, granted[owner], made.queue, made.send_at)
    if owner in choice.misfits:
        return Answer(reading, reason=choice.misfits[owner], is_misfit=True)
    if (hold := _hold_on(own, held, book)) is not None:
        until = None if hold.until is None else database.to_us(hold.until)
        reason = f"held: {hold.reason}" if hold.reason else "held"
        return Answer(reading, until=until, reason=reason, is_held=True)
    if (blocked := choice.blocked.get(owner)) is not None:
        label = blocked.budget.limit.label
        return Answer(reading, until=blocked.instant, reason=f"{label} is used up")
    return Answer(reading, reason="others go before it", is_behind=True)


def _hold_on(own: Candidate, held: Held, book: Book) -> InForce | None:
    """The hold that keeps a permit back; where all queues are held, the first to end."""
    on_queues = [held.blocking(own.rule, None, q) for q in book.rules[own.rule].queue_names]
    if (hold := held.blocking(own.rule, own.key)) is None and all(on_queues):
        hold = min((one for one in on_queues if one is not None), key=lambda one: one.end)
    return hold
