"""Judges limits by the provider's own instants.

Of the requests in a window the one that was released last is looked at, under the limits in force
at its release; those released before it must leave room for it (docs/explanation/ledger.md has the
claim).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.provider import Request
from tests.simulation.scheduler import MICRO
from tests.simulation.settings_of_runs import CallOf, LimitOf

if TYPE_CHECKING:
    from tests.simulation.oracle import Judge, Release

# seconds by which a clock that was set may bend a window, and the share of the time between looks
BENT, DRIFT = 0.012, 0.0004
SETTLES = 5 * MICRO  # after which all go by a clock that was set


class Limits:
    """What is wrong with what the provider counted."""

    def __init__(self, facts: Judge) -> None:
        self.facts = facts

    def judge(self, requests: list[Request]) -> None:
        counted = [
            r for r in requests if r.counted_at is not None and r.attempt in self.facts.releases
        ]
        for x in counted:
            own = self.facts.releases[x.attempt or 0]
            for name, limit in own.limits:
                self._judge_one(x, own, name, limit, counted)

    def _judge_one(
        self, x: Request, own: Release, name: str, limit: LimitOf, counted: list[Request]
    ) -> None:
        call = self.facts.calls[x.token]
        value = call.value(limit.per, own.queue)
        others = []
        for y in counted:
            release = self.facts.releases[y.attempt or 0]
            is_before = (release.at, release.pk) <= (own.at, own.pk)
            if is_before and name in release.charged:
                other = self.facts.calls[y.token]
                if other.value(limit.per, release.queue) == value:
                    others.append((y, self._charged(y, other, limit.unit, own.began_at)))
        most = self._most(name, limit, own)
        used = getattr(self, f"_in_{limit.kind}")(x, limit, others, most)
        if used > most:
            instants = sorted(y.counted_at / MICRO for y, _ in others if y.counted_at is not None)
            self.facts.complain(
                f"over the limit {name} ({limit.kind} {most}/{limit.seconds:g}s of {value!r}): "
                f"{used} with attempt {own.pk} of {x.token} at {(x.counted_at or 0) / MICRO:.4f}; "
                f"counted at {[round(one, 4) for one in instants]}"
            )

    def _most(self, name: str, limit: LimitOf, own: Release) -> int:
        """The most that any rate allows which may be in force at the release. Of two operators who
        change a limit at the same time, either may be the last.
        """
        found = [limit.n]
        rates = [one for one in self.facts.rates if one.limit == name]
        for rate in sorted(rates, key=lambda one: one.must):
            if rate.must <= own.began_at:
                together = [x for x in rates if x.may <= rate.must and rate.may <= x.must]
                found = [limit.n if x.n is None else x.n for x in together]
            elif rate.may <= own.at:
                found.append(limit.n if rate.n is None else rate.n)
        return max(found)

    def _charged(self, request: Request, call: CallOf, unit: str, by: int) -> int:
        """What the provider counted. What is more than was charged cannot keep others back before
        it is recorded: of that, what was known at an instant.
        """
        charged = call.charge(unit)
        if unit != "tokens" or not request.used or request.used <= charged:
            return request.used if unit == "tokens" and request.used else charged
        ended = self.facts.ended.get(request.attempt or 0, [])
        return max([charged, *([tokens for at, tokens in ended if at <= by][-1:])])

    @property
    def _bend(self) -> int:
        """By how much a window may be shorter at the provider, in microseconds."""
        return round((BENT + DRIFT * 30) * MICRO) if self.facts.was_set else 2

    def _in_window(self, x: Request, limit: LimitOf, others: Any, most: int) -> int:
        width = round(limit.seconds * MICRO) - self._bend
        at = x.counted_at or 0
        near = sorted((y.counted_at, n) for y, n in others if abs(y.counted_at - at) < width)
        ends = [end for end, _ in near if end >= at]
        return max(sum(n for c, n in near if end - width < c <= end) for end in ends)

    def _in_bucket(self, x: Request, limit: LimitOf, others: Any, most: int) -> int:
        """Tokens taken in the worst interval that ends after x, less those that came in."""
        at, rate = x.counted_at or 0, most / limit.seconds / MICRO
        taken = sorted((y.counted_at, n) for y, n in others)
        worst = 0.0
        slack = self._bend * rate + 1e-6
        for begin, _ in taken:
            for end, _ in taken:
                if begin <= at <= end:
                    used = sum(n for c, n in taken if begin <= c <= end)
                    worst = max(worst, used - (end - begin) * rate - slack)
        return most + 1 if worst > limit.burst else 0

    def _in_once(self, x: Request, limit: LimitOf, others: Any, most: int) -> int:
        at = x.counted_at or 0
        # Who takes a permit and is frozen does not hang up when its lease ends.
        frozen = {one for one in self.facts.hampered if one.kind == "asker"}
        known = [(y, n) for y, n in others if y.process not in frozen]
        return sum(n for y, n in known if y.counted_at <= at < y.over_at)

    def _in_calendar(self, x: Request, limit: LimitOf, others: Any, most: int) -> int:
        """By the provider's own calendar, which may be off a little, and is set with the database's
        clock; not judged near that.
        """
        counted = x.counted_at or 0
        last = max((at for at, _ in self.facts.jumps if at <= counted), default=-SETTLES)
        if counted - round(limit.seconds * MICRO) < last + SETTLES:
            return 0
        others = [(y, n) for y, n in others if y.counted_at > last]
        width, off = round(limit.seconds * MICRO), round(0.9 * limit.jitter * MICRO)

        def number(y: Request, late: int) -> int:
            return (self.facts.shown(y.counted_at or 0) + late) // width

        return max(
            sum(n for y, n in others if number(y, late) == number(x, late))
            for late in (0, off, -off)
        )
