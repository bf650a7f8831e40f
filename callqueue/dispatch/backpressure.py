"""How much may lie in the broker: no more is released by a queue than its workers have shown to
begin.

In: a pass's account, candidates and holds. Out: the holds, and with them the queues that are full.
Looks at nothing as long as little is open and no candidate has come back unbegun, so that a plain
pass makes no statement for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, Q

from callqueue import conf, states, tables
from callqueue.database import from_us
from callqueue.ledger.account import Account
from callqueue.ledger.charges import SAMPLE as KNOWN
from callqueue.ledger.holds import Held, InForce
from callqueue.ledger.ready_calls import Candidate

LATELY = 2.0  # seconds, of which the begun ones show how fast workers are
# attempts that a queue gets on trust: so many for each second that they may wait to be begun
PER_SECOND, LEAST, MOST = 3, 32, 1000
# attempts of each kind that are counted at most: where more have been begun, workers are there
SAMPLE = 5000
AGAIN = 250_000  # microseconds until a group is looked at again whose workers are behind


@dataclass(frozen=True)
class Shown:
    """What a queue's workers have shown: how many attempts wait for them, and how many they have
    begun or answered lately.

    `is_silent`: an attempt was taken back after its lease, and none has been begun since it was
    released.
    """

    unbegun: int = 0
    begun: int = 0
    is_silent: bool = False


def room(shown: Shown, lease: float) -> int:
    """How many attempts more may be released by a queue; `lease`: the seconds that one may wait to
    be begun.

    One at a time where nobody seems to listen: it is begun as soon as somebody does, and then all
    may go again.
    """
    allowed = 1 if shown.is_silent else trust(lease) + shown.begun
    return max(0, allowed - shown.unbegun)


def trust(lease: float) -> int:
    """How many unbegun attempts a queue may have whose workers have shown nothing yet."""
    return max(LEAST, min(MOST, round(PER_SECOND * lease)))


@dataclass(frozen=True)
class HeldOrFull(Held):
    """Holds, and queues that are shut once a pass has released by them what their workers have room
    for.

    `full_at`: by rule and queue, the count of open attempts of the queue at which that is so.
    """

    account: Account | None = None
    full_at: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def without_full_queues(self) -> Held:
        return Held(self.by_rule, self.probing)

    def blocking(
        self, rule: str, key: str | None = None, queue: str | None = None
    ) -> InForce | None:
        """The hold that keeps such a call back, or one that stands for a queue that is full."""
        full_at = None if queue is None else self.full_at.get((rule, queue))
        if (
            self.account
            and full_at is not None
            and queue is not None
            and self.account.open_by_queue[queue] >= full_at
        ):
            return InForce(rule, "queue", queue, None, "its workers are behind")
        return super().blocking(rule, key, queue)


def with_full_queues(
    account: Account, candidates: Mapping[str, Sequence[Candidate]], held: Held
) -> tuple[Held, bool]:
    """The holds, and with them the queues whose workers have no room; and whether some rule may
    have less than it would.
    """
    lease = conf.current().release_lease
    full_at: dict[tuple[str, str], int] = {}
    is_short = False
    for rule, listed in candidates.items():
        if not _is_doubtful(account, rule, listed, lease):
            continue
        queues = account.book.rules[rule].queue_names
        rooms = {queue: room(_shown(account, rule, queue, lease), lease) for queue in queues}
        full_at.update(
            {(rule, queue): account.open_by_queue[queue] + left for queue, left in rooms.items()}
        )
        is_short |= sum(rooms.values()) < len(listed)
    if full_at:
        held = HeldOrFull(held.by_rule, held.probing, account, full_at)
    return held, is_short


def _is_doubtful(
    account: Account, rule: str, candidates: Sequence[Candidate], lease: float
) -> bool:
    """Whether workers may be behind, or away: much is open, or calls have come back while nothing
    is known to be begun.
    """
    if not candidates:
        return False
    is_of_one_queue = len(account.book.rules[rule].queue_names) == 1
    has_begun = is_of_one_queue and account.open_by_rule[rule] and rule not in account.unbegun_since
    came_back = not has_begun and any(call.last_attempt for call in candidates)
    few = min(trust(lease), KNOWN)  # an account may know of no more than a sample
    return (
        came_back
        or account.open_by_rule[rule] >= few
        or account.open_by_rule[rule] + len(candidates) > trust(lease)
    )


def _shown(account: Account, rule: str, queue: str, lease: float) -> Shown:
    """Read what the queue's workers have shown of the rule's attempts."""
    lately = from_us(account.now) - timedelta(seconds=min(LATELY, lease / 4))
    rows = tables.attempts(account.using).filter(rule=rule, queue=queue, call__isnull=False)
    counts: dict[str, int] = (
        rows.open()
        .order_by()
        .values("pk", "started_at")[:SAMPLE]
        .aggregate(
            unbegun=Count("pk", filter=Q(started_at__isnull=True)),
            begun=Count("pk", filter=Q(started_at__gte=lately)),
        )
    )
    begun = (
        counts["begun"]
        + rows.filter(finished_at__gte=lately, started_at__isnull=False).order_by()[:SAMPLE].count()
    )
    return Shown(
        counts["unbegun"], begun, not begun and _is_silent(rows, from_us(account.now), lease)
    )


def _is_silent(rows: Any, now: datetime, lease: float) -> bool:
    """Whether a lease ended unbegun of late, and nothing was begun since that attempt's release."""
    since = now - timedelta(seconds=2 * lease + 10)
    ended = rows.filter(
        finished_at__gte=since, finished_at__gt=F("lease_until"), started_at__isnull=True
    )
    last = (
        ended.filter(outcome=states.VOIDED)
        .order_by("-finished_at")
        .values_list("released_at", flat=True)
        .first()
    )
    if last is None:
        return False
    shown = rows.filter(
        Q(finished_at__isnull=True) | Q(finished_at__gte=last), started_at__gte=last
    )
    return not shown.exists()
