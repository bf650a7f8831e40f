"""Whether any dispenser runs, by its signs of life, one every five seconds: one answer for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from callqueue import conf, tables
from callqueue.ledger import ledger_time
from callqueue.ledger.settings import SILENCE  # seconds; opinions, too, count no longer than that
from callqueue.limits.in_force import digest_of, opinion_of

# the kinds of dispensers, as DispenserState has them; who goes first stands first
RUN, STEADY, WORKER, BUSY, BEAT = "run", "steady", "worker", "busy", "beat"
RANKS = (STEADY, WORKER, BUSY, BEAT)
BEAT_SILENT_S = 120  # so long after the last run of beat's task no beat is taken to run


@dataclass(frozen=True)
class Sign:
    name: str
    at: datetime  # when it was given: in wall time in a `Look`, in ledger time from `read_signs`
    kind: str = ""  # RUN, STEADY, ...; empty: any other
    digest: str = ""  # of its opinion; empty once it has ended (of beat's task: its run)
    broker: str = ""  # its address; empty where it makes calls itself
    is_alive: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether it took its leave: it was stopped, or ran only once."""
        return not self.digest and self.kind != BEAT


def read_signs(using: str, now: datetime) -> list[Sign]:
    """Every dispenser remembered, the newest sign first; alive or not at `now`, ledger time."""
    rows = tables.dispensers(using).order_by("-seen_at")
    columns = rows.values_list("name", "seen_at", "kind", "digest", "broker")
    return with_is_alive((Sign(*row) for row in columns), now)


def with_is_alive(signs: Iterable[Sign], now: datetime) -> list[Sign]:
    """The signs judged as of now. While a process other than RUN is alive, beat's task is not."""
    judged = [replace(one, is_alive=_is_alive(one.at, one.kind, one.digest, now)) for one in signs]
    if not any(one.is_alive and one.kind not in (BEAT, RUN) for one in judged):
        return judged
    return [replace(one, is_alive=one.is_alive and one.kind != BEAT) for one in judged]


def running_dispensers(using: str) -> list[Sign]:
    """The dispensers that run. Beat's task releases in its runs, and may be between two of them."""
    return [one for one in read_signs(using, ledger_time.now(using)) if one.is_alive]


def is_outranked(using: str, kind: str, name: str = "", *, releases: bool = True) -> bool:
    """Whether a dispenser of this kind and name leaves the work to another that is alive and has
    the limits of these settings: to any of a kind before it in RANKS, and to any of its own kind;
    but if it `releases` already, to one of its own kind only if that one's name comes first.
    """
    digest, rank = digest_of(opinion_of(conf.current().book)), RANKS.index(kind)
    last = (rank, name) if releases else (rank + 1, "")
    return any(
        one.digest == digest and one.name != name and (RANKS.index(one.kind), one.name) < last
        for one in running_dispensers(using)
        if one.kind in RANKS
    )


def has_fallen_silent(signs: Sequence[Sign]) -> bool:
    """Whether no dispenser is alive, and the last one seen did not end: it may be back, or not."""
    return bool(signs) and not any(one.is_alive for one in signs) and not signs[0].has_ended


def silence_s(signs: Sequence[Sign], now: datetime) -> float | None:
    """For how many seconds no dispenser gave a sign of life; None where there has been none."""
    return max(0.0, (now - signs[0].at).total_seconds()) if signs else None


def has_beat_run(signs: Sequence[Sign], now: datetime) -> bool:
    """Whether beat's dispenser task has run lately, though it may have stood by."""
    return any(one.kind == BEAT and _is_alive(one.at, one.kind, "", now) for one in signs)


def _is_alive(at: datetime, kind: str, digest: str, now: datetime) -> bool:
    if kind == BEAT:
        return at > now - timedelta(seconds=max(BEAT_SILENT_S, 3 * conf.current().interval))
    # who has no opinion has taken his leave
    return bool(digest) and at > now - timedelta(seconds=SILENCE)
