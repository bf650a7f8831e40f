"""Where every rule stands, for `callqueue_status` and the metrics: what the dashboard shows, with
how far each limit is used now. Reads, and changes nothing; every count is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from callqueue import conf, database
from callqueue.limits.kinds import SECOND
from callqueue.operations import board as boards
from callqueue.operations import limit_usage, not_queued
from callqueue.operations.board import Board
from callqueue.operations.limit_usage import LimitUse
from callqueue.operations.not_queued import NotQueued
from callqueue.operations.standing import HoldNow, Standing


@dataclass(frozen=True)
class RuleStatus:
    """One rule. Times in seconds; None: nothing is due, nobody can say.

    `standing`: as the dashboard shows it; of what is in flight, `not_queued` are permits.
    `drain_s`: until everything that is due is answered, if limits and holds are all that keeps it
    back.
    """

    standing: Standing
    limits: Sequence[LimitUse]
    not_queued: NotQueued
    oldest_due_s: float | None

    @property
    def name(self) -> str:
        return self.standing.name

    @property
    def drain_s(self) -> float | None:
        return 0.0 if self.standing.drain is None else self.standing.drain.seconds()

    def as_json(self) -> dict[str, Any]:
        """What `callqueue_status --json` prints of a rule."""
        rule = self.standing
        on_rule = [one for one in rule.holds if one.per == "rule"]
        hold = rule.hold if on_rule else None
        return {
            "waiting": rule.backlog.waiting,
            "in_flight": rule.in_flight.count,
            "not_queued": {
                "in_flight": self.not_queued.in_flight,
                "waiting": self.not_queued.waiting,
                "labels": dict(self.not_queued.labels),
            },
            "oldest_due_s": _rounded(self.oldest_due_s),
            "drain_s": _rounded(self.drain_s),
            "rate_per_s": round(rule.rate, 3),
            "hold": hold and _hold(hold),
            "holds": [
                {"per": one.per, "value": one.value, **_hold(one)}
                for one in rule.holds
                if one.per != "rule"
            ],
            "limits": [
                {
                    "name": one.name,
                    "per": one.per,
                    "rate": one.rate,
                    "used": one.used,
                    "free": one.free,
                    "note": one.note(rule.latency),
                }
                for one in self.limits
            ],
        }


def overview(using: str) -> dict[str, Any]:
    """`{"rules": {NAME: {...}}, "dispensers": ..., "disagreements": [...]}` as `callqueue_status
    --json` prints it.
    """
    with database.one_view(using):
        board = boards.read(using)
        rules = _rules(using, board)
    return {
        "rules": {rule.name: rule.as_json() for rule in rules},
        "dispensers": len(board.dispensers),
        "last_dispenser_seen": None if board.last_seen is None else board.last_seen.isoformat(),
        "disagreements": [
            {
                "limit": one.limit,
                "rules": list(one.rules),
                "said": {what: list(who) for what, who in one.said.items()},
            }
            for one in board.disagreements
        ],
    }


def look(using: str) -> list[RuleStatus]:
    """Every rule of the settings, in their order."""
    with database.one_view(using):
        return _rules(using, boards.read(using))


def _rules(using: str, board: Board) -> list[RuleStatus]:
    names = list(conf.current().rules)
    uses = limit_usage.of_rules(using, board.book, names, board.now)
    permits = not_queued.by_rule(using)
    standing = {one.name: one for one in board.rules}
    return [
        RuleStatus(
            standing[name],
            uses[name],
            permits.get(name, NotQueued()),
            _age(standing[name].backlog.oldest_due, board.now),
        )
        for name in names
    ]


def _age(due: int | None, now: int) -> float | None:
    """For how long a call has been due; None where it is due later."""
    return None if due is None or due > now else (now - due) / SECOND


def _hold(hold: HoldNow) -> dict[str, str | None]:
    return {"until": _iso(hold.until), "reason": hold.reason}


def _iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
