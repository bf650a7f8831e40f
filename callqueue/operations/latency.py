"""Latency: what the way from a release to the wire takes here, as the latest attempts show. Reads,
and changes nothing.
"""

from __future__ import annotations

from statistics import quantiles

from callqueue import tables
from callqueue.limits.simulation import DELIVERY, NOTICE

NEWEST = 500  # attempts looked at
ENOUGH = 20  # of them that say something


def observed(using: str) -> tuple[float, float]:
    """Seconds from a release to the wire, and from an answer to the release that waited for it.

    From attempts that were sent as soon as they could be: the quicker quarter of them, since the
    others waited for a worker too, which a simulation takes not to happen. Where too few attempts
    say, what a simulation assumes.
    """
    newest = (
        tables.attempts(using)
        .order_by("-pk")
        .values_list("released_at", "send_at", "sent_at")[:NEWEST]
    )
    taken = [
        (sent - released).total_seconds()
        for released, send, sent in newest
        if sent is not None and send is None
    ]
    if len(taken) < ENOUGH:
        return DELIVERY, NOTICE
    delivery = min(1.0, max(0.001, quantiles(taken, n=4)[0]))
    return delivery, delivery * NOTICE / DELIVERY
