"""Whether any dispenser runs: the dispensers' signs of life, of which each gives one every five
seconds.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from callqueue import conf, database, tables
from callqueue.texts import host

BEAT = timedelta(seconds=120)  # without a run of beat's task after which no beat is taken to run


class Seen(NamedTuple):
    """A dispenser, and when it was last seen."""

    name: str
    at: datetime
    has_ended: bool  # it took its leave: it was stopped, or ran only once


def signs_of_life(using: str) -> list[Seen]:
    """Each dispenser that ran within a day or so; the newest sign first."""
    rows = tables.dispensers(using).order_by("-seen_at")
    return [
        Seen(name, at, has_ended=not digest and kind != "beat")
        for name, at, digest, kind in rows.values_list("name", "seen_at", "digest", "kind")
    ]


def silence(using: str, now: datetime | None = None) -> timedelta | None:
    """For how long no dispenser has given a sign of life; None where there has been none."""
    seen_at = (
        tables.dispensers(using).order_by("-seen_at").values_list("seen_at", flat=True).first()
    )
    if seen_at is None:
        return None
    return max(timedelta(0), (now or database.clock(using)) - seen_at)


def silence_of_host(using: str) -> timedelta | None:
    """For how long no dispenser of this host (in a container: of this container) has given a sign
    of life; None where it never has.
    """
    rows = tables.dispensers(using).filter(name__startswith=f"{host()}:").exclude(kind="beat")
    seen_at = rows.order_by("-seen_at").values_list("seen_at", flat=True).first()
    return None if seen_at is None else max(timedelta(0), database.clock(using) - seen_at)


def has_beat(using: str) -> bool:
    """Whether beat's dispenser task has run lately: within BEAT, or three of its intervals."""
    beats = tables.dispensers(using).filter(kind="beat")
    return bool(beats.filter(seen_at__gt=database.clock(using) - beat_patience()).exists())


def beat_patience() -> timedelta:
    """Without a run of beat's task for so long, no beat is taken to run."""
    return max(BEAT, 3 * timedelta(seconds=conf.current().interval))
