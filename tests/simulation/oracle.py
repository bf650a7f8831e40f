"""The judge: knows what calls were sent, what the provider counted, and the rows of two tables. It
imports nothing of the product.

Limits are judged by the provider's own instants. Of the requests in a window the one that was
released last is looked at, under the limits in force at its release; those released before it must
leave room for it (docs/explanation/ledger.md has the claim).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.simulation.provider import Request
from tests.simulation.scheduler import MICRO, Process
from tests.simulation.settings_of_runs import CallOf, LimitOf, Rules

NEW, DONE = 0, 3
FINAL = (3, 4, 5, 6, 7)
RETRYABLE = (408, 425, 429, 500, 502, 503, 504)
# seconds by which a clock that was set may bend a window, and the share of the time between looks
BENT, DRIFT = 0.012, 0.0004


@dataclass
class Release:
    """An attempt, as its row said at its commit."""

    pk: int
    call: int
    rule: str
    queue: str
    began_at: int  # when the transaction that released it began
    at: int  # when it was committed
    by: Process
    limits: list[tuple[str, LimitOf]]  # in force when it was decided
    charged: set[str]  # the limits that count it


@dataclass
class Rate:
    """An operator gave a limit another rate: from when on it may, and from when on it must hold."""

    limit: str
    n: int | None
    may: int
    must: float = float("inf")


@dataclass
class Hold:
    """An answer asked for a rest, and it was written down: nothing of the rule goes before its
    end.
    """

    rule: str
    laid_at: int
    until: int


@dataclass
class Judge:
    """Everything that is known of one run, and what is wrong with it."""

    calls: dict[str, CallOf] = field(default_factory=dict)
    by_pk: dict[int, CallOf] = field(default_factory=dict)
    releases: dict[int, Release] = field(default_factory=dict)
    rates: list[Rate] = field(default_factory=list)
    settings: dict[Process, Rules] = field(default_factory=dict)
    released_first: dict[Process, int] = field(default_factory=dict)
    left: dict[Process, int] = field(default_factory=dict)  # dispensers that ended, and when
    complaints: list[str] = field(default_factory=list)
    own: dict[Process, Rules] = field(default_factory=dict)  # what permits are taken by
    holds: list[Hold] = field(default_factory=list)
    was_set: bool = False  # the clock

    def complain(self, text: str) -> None:
        self.complaints.append(text)

    # --- Releases

    def note(self, rows: list[Any], by: Process, began_at: int, now: int) -> None:
        """Attempts that were just committed: (id, call, rule, queue)."""
        alive = [p for p in self.settings if not p.is_dead and p not in self.left]
        for pk, call, rule, queue in rows:
            in_force = list(self._limits(by, rule))
            for other in alive:
                if other is not by and self.released_first.get(other, now) < began_at:
                    in_force += [one for one in self._limits(other, rule) if one not in in_force]
            charged = {name for p in {*alive, by} for name, _ in self._limits(p, rule)}
            self.releases[pk] = Release(pk, call, rule, queue, began_at, now, by, in_force, charged)
            for hold in self.holds:
                if rule == hold.rule and hold.laid_at < began_at and now < hold.until:
                    self.complain(
                        f"attempt {pk} of {rule} was released at {now / MICRO:.3f}, though it was "
                        f"held at {hold.laid_at / MICRO:.3f} until {hold.until / MICRO:.3f}"
                    )
        if rows:
            self.released_first.setdefault(by, now)

    def note_holds(self, requests: list[Request], by: Process, now: int) -> None:
        """Holds were just committed: those that answers asked for which this process has had. Where
        several were told it may have laid the first only, so the last is not judged by.
        """
        if self.was_set:
            return
        rules = [*self.settings.values(), *self.own.values()]
        for request in requests:
            if request.process is by and request.told_at is not None and request.wants_rest:
                rule = self.calls[request.token].rule
                until = request.told_at + round(request.wants_rest * MICRO)
                limits = [one for some in rules if rule in some for one in some[rule].limits]
                if all(one.per == "rule" for one in limits):  # else a key, or a queue, is held
                    self.holds.append(Hold(rule, now, until))
                request.wants_rest = 0.0

    def _limits(self, process: Process, rule: str) -> Iterator[tuple[str, LimitOf]]:
        rules = self.settings.get(process) or self.own.get(process, {})
        if rule in rules:
            yield from rules[rule].ids(rule)

    # --- Limits

    def judge_limits(self, requests: list[Request]) -> None:
        counted = [r for r in requests if r.counted_at is not None and r.attempt in self.releases]
        for x in counted:
            own = self.releases[x.attempt or 0]
            for name, limit in own.limits:
                self._judge(x, own, name, limit, counted)

    def _judge(
        self, x: Request, own: Release, name: str, limit: LimitOf, counted: list[Request]
    ) -> None:
        call = self.calls[x.token]
        value = call.value(limit.per, own.queue)
        others = []
        for y in counted:
            release = self.releases[y.attempt or 0]
            is_before = (release.at, release.pk) <= (own.at, own.pk)
            if is_before and name in release.charged:
                other = self.calls[y.token]
                if other.value(limit.per, release.queue) == value:
                    others.append((y, other.charge(limit.unit)))
        most = self._most(name, limit, own)
        used = getattr(self, f"_in_{limit.kind}")(x, limit, others, most)
        if used > most:
            instants = sorted(y.counted_at / MICRO for y, _ in others if y.counted_at is not None)
            self.complain(
                f"over the limit {name} ({limit.kind} {most}/{limit.seconds:g}s of {value!r}): "
                f"{used} with attempt {own.pk} of {x.token} at {(x.counted_at or 0) / MICRO:.4f}; "
                f"counted at {[round(one, 4) for one in instants]}"
            )

    def _most(self, name: str, limit: LimitOf, own: Release) -> int:
        """The most that any rate allows which may be in force at the release."""
        found, is_sure = [limit.n], True
        for rate in (one for one in self.rates if one.limit == name):
            n = limit.n if rate.n is None else rate.n
            if rate.must <= own.began_at:
                found = [n]
            elif rate.may <= own.at:
                found.append(n)
        return max(found) if is_sure else limit.n

    def _bend(self, seconds: float) -> int:
        """By how much a window may be shorter at the provider, in microseconds."""
        return round((BENT + DRIFT * 30) * MICRO) if self.was_set else 2

    def _in_window(self, x: Request, limit: LimitOf, others: Any, most: int) -> int:
        width = round(limit.seconds * MICRO) - self._bend(limit.seconds)
        at = x.counted_at or 0
        near = sorted((y.counted_at, n) for y, n in others if abs(y.counted_at - at) < width)
        ends = [end for end, _ in near if end >= at]
        return max(sum(n for c, n in near if end - width < c <= end) for end in ends)

    def _in_bucket(self, x: Request, limit: LimitOf, others: Any, most: int) -> int:
        """Tokens taken in the worst interval that ends after x, less those that came in."""
        at, rate = x.counted_at or 0, most / limit.seconds / MICRO
        taken = sorted((y.counted_at, n) for y, n in others)
        worst = 0.0
        slack = self._bend(1) * rate + 1e-6
        for begin, _ in taken:
            for end, _ in taken:
                if begin <= at <= end:
                    used = sum(n for c, n in taken if begin <= c <= end)
                    worst = max(worst, used - (end - begin) * rate - slack)
        return most + 1 if worst > limit.burst else 0

    def _in_once(self, x: Request, limit: LimitOf, others: Any, most: int) -> int:
        at = x.counted_at or 0
        # Who takes a permit and is frozen does not hang up when its lease ends.
        known = [y for y, _ in others if not (self.lenient and y.process.kind == "asker")]
        return sum(1 for y in known if y.counted_at <= at < y.over_at)

    def _in_day(self, x: Request, limit: LimitOf, others: Any, most: int) -> int:
        """By the provider's own calendar; not judged where the database's clock was set."""
        if self.was_set:
            return 0
        width = 60 * MICRO
        return max(
            sum(n for y, n in others if (y.counted_at + self.calendar + off) // width == number)
            for off in (0, round(0.9 * limit.jitter * MICRO), -round(0.9 * limit.jitter * MICRO))
            for number in [((x.counted_at or 0) + self.calendar + off) // width]
        )

    calendar: int = 0  # microseconds of the minute at the beginning

    # --- Fates

    def judge_fates(
        self, requests: list[Request], attempts: list[Any], calls: dict[int, tuple[int, str, bool]]
    ) -> None:
        """`attempts`: (id, call, number, outcome); `calls`: by primary key (status, why, whether it
        is to be made later).
        """
        outcome = {pk: said for pk, _, _, said in attempts}
        of_call: dict[str, list[Request]] = defaultdict(list)
        made: dict[int, int] = defaultdict(int)
        for request in requests:
            if request.counted_at is not None:
                of_call[request.token].append(request)
                made[request.attempt or 0] += 1
                if outcome.get(request.attempt or 0) == "voided":
                    self.complain(f"attempt {request.attempt} was voided, and made")
        for pk, count in made.items():
            if pk and count > 1:
                self.complain(f"attempt {pk} was made {count} times")
        for token, sent in of_call.items():
            self._judge_repeats(self.calls[token], sent)
        for call in self.calls.values():
            if call.is_committed and not call.is_gone and call.pk is not None:
                self._judge_end(call, calls.get(call.pk), of_call.get(call.token, []))

    def _judge_repeats(self, call: CallOf, sent: list[Request]) -> None:
        for before, after in pairwise(sent):
            again = after.counted_at or 0
            if again < before.over_at:
                self.complain(f"{call.token} is on the wire twice at {again / MICRO:.3f}")
            if any((before.counted_at or 0) <= at <= again for at in call.requeued_at):
                continue
            if before.told_at is not None and before.status in RETRYABLE:
                continue
            is_safe = call.method in ("get", "put", "delete") or call.may_repeat
            is_over = before.told_at is not None and before.status is not None
            if not is_safe:
                self.complain(f"{call.method} {call.token} is made twice")
            elif is_over and not before.process.is_dead and not self.lenient:
                self.complain(f"{call.token} was answered {before.status}, and is made again")

    is_pruned: bool = False
    lenient: bool = False  # databases were cut or workers frozen: an answer may have been lost

    def _judge_end(
        self, call: CallOf, row: tuple[int, str, bool] | None, sent: list[Request]
    ) -> None:
        if row is None and self.is_pruned:
            return  # cleanup deletes what has ended
        if row is None:
            self.complain(f"{call.token} (call {call.pk}) is lost: it has no row")
            return
        status, why, is_later = row
        if status == NEW and is_later and self.was_set:
            return  # it was sent while the clock was ahead for a moment, and nobody saw that
        if status not in FINAL:
            self.complain(f"{call.token} (call {call.pk}) never ends: status {status}, {why!r}")
        if status == DONE and not any(r.status and 200 <= r.status < 300 for r in sent):
            self.complain(f"{call.token} is done, and was never answered so")
        good = [r for r in sent if r.told_at and r.status and r.status < 300]
        is_heard = good and not any(r.process.is_dead for r in good) and not self.lenient
        if status in FINAL and status != DONE and is_heard and not call.requeued_at:
            self.complain(f"{call.token} was answered {good[0].status}, and is {status}: {why!r}")
