"""Whether any dispenser runs: the dispensers' signs of life, of which each gives one every five
seconds.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from callqueue import database, tables


def signs_of_life(using: str) -> list[tuple[str, datetime]]:
    """The name of each dispenser that ran within a day or so, and when it was last seen; the newest
    sign first.
    """
    return list(tables.dispensers(using).order_by("-seen_at").values_list("name", "seen_at"))


def silence(using: str, now: datetime | None = None) -> timedelta | None:
    """For how long no dispenser has given a sign of life; None where there has been none."""
    seen_at = (
        tables.dispensers(using).order_by("-seen_at").values_list("seen_at", flat=True).first()
    )
    if seen_at is None:
        return None
    return max(timedelta(0), (now or database.clock(using)) - seen_at)
