"""The judge: knows what calls were sent, what the provider counted, and the rows of two tables. It
imports nothing of the product.

Here is what it is told while a run goes on, and what it says of holds; limits and fates are judged
at the end, in `judged_limits.py` and `judged_fates.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.judged_fates import Ended, Fates
from tests.simulation.judged_limits import Limits
from tests.simulation.provider import Request
from tests.simulation.scheduler import MICRO, Process
from tests.simulation.settings_of_runs import CallOf, LimitOf, Rules, value_of

# microseconds by which a hold may end sooner where the clock was set
BENT = round(0.05 * MICRO)
SLOWEST = round(0.7 * MICRO)  # microseconds that two statements of a quick process may take


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
    """An answer asked for a rest, and it was written down: nothing of its scope goes before its
    end.
    """

    rule: str
    per: str
    value: str
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
    # those whose settings nobody goes by any more, though calls of theirs may be under way
    taken_leave: set[Process] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)
    own: dict[Process, Rules] = field(default_factory=dict)  # what permits are taken by
    holds: list[Hold] = field(default_factory=list)
    # by attempt: when its end was committed, and its tokens then; and of what was settled after it
    ended: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    calendar: int = 0  # microseconds that the database's clock shows at the beginning
    is_belated: bool = False  # an end was committed long after it was written
    counted_twice: list[int] = field(default_factory=list)  # when a pass counted an attempt so
    unseen: list[int] = field(default_factory=list)  # when an end came as a pass had just begun
    hampered: set[Process] = field(default_factory=set)  # slow, frozen or cut off at some time
    killed: set[Process] = field(default_factory=set)
    over_at: int = 0  # when the run ended
    jumps: list[tuple[int, int]] = field(default_factory=list)  # of it: when, and by how much

    def __post_init__(self) -> None:
        self.limits, self.fates = Limits(self), Fates(self)

    @property
    def was_set(self) -> bool:
        """Whether the clock jumped."""
        return bool(self.jumps)

    def shown(self, at: int) -> int:
        """What the database's clock showed at an instant."""
        return at + self.calendar + sum(by for when, by in self.jumps if when <= at)

    def complain(self, text: str) -> None:
        self.complaints.append(text)

    # --- Releases

    def note(self, rows: list[Any], by: Process, began_at: int, now: int) -> None:
        """Attempts that were just committed: (id, call, rule, queue, key)."""
        # Who has not released anything yet may not have joined: nobody goes by its settings then.
        joined = [
            p
            for p in self.settings
            if not p.is_dead
            and p not in self.taken_leave
            and self.released_first.get(p, now) < began_at
        ]
        shown = min(self.shown(began_at), self.shown(now))
        for pk, call, rule, queue, key in rows:
            known = self.by_pk.get(call)
            if known and self._had_expired(known, by, shown):
                self.complain(f"{known.token} was released after it had expired")
            in_force = list(self._limits(by, rule))
            for other in joined:
                if other is not by:
                    in_force += [one for one in self._limits(other, rule) if one not in in_force]
            charged = {name for p in {*joined, by} for name, _ in self._limits(p, rule)}
            self.releases[pk] = Release(pk, call, rule, queue, began_at, now, by, in_force, charged)
            for hold in self.holds:
                is_held = rule == hold.rule and value_of(key, hold.per, queue) == hold.value
                until = hold.until - (BENT if self.was_set else 0)
                if is_held and hold.laid_at < began_at and now < until:
                    self.complain(
                        f"attempt {pk} of {rule} was released at {now / MICRO:.3f}, though "
                        f"{hold.per} {hold.value!r} was held at {hold.laid_at / MICRO:.3f} until "
                        f"{hold.until / MICRO:.3f}"
                    )
        if rows:
            self.released_first.setdefault(by, now)

    def _had_expired(self, call: CallOf, by: Process, shown: int) -> bool:
        """Whether its pass must have seen that: who is slow may take its clock for as much late."""
        if call.expires is None or call.requeued_at or by in self.hampered:
            return False
        return call.expires + SLOWEST < shown

    def note_ends(self, rows: list[Any], now: int) -> None:
        """Ends of attempts were just committed, or what they cost after all: (id, tokens) of all
        that have ended.
        """
        for pk, tokens in rows:
            known = self.ended.setdefault(pk, [])
            if not known or known[-1][1] != tokens:
                known.append((now, tokens))

    def note_holds(self, requests: list[Request], by: Process, now: int, longest: int) -> None:
        """Holds were just committed: those that answers asked for which this process has had. Where
        several were told it may have laid the first only: none lasts for longer than to `longest`.
        """
        told = [r for r in requests if r.process is by and r.told_at is not None and r.wants_rest]
        for request in told:
            until = (request.told_at or 0) + round(request.wants_rest * MICRO)
            if until > longest + 2 * BENT and not self.was_set:
                continue
            scope = self._scope(request)
            request.wants_rest = 0.0
            if scope is not None:
                self.holds.append(Hold(self.calls[request.token].rule, *scope, now, until))

    def note_rests(self, requests: list[Request], ended: set[int]) -> None:
        """These attempts have ended: what their answers asked for was written down before."""
        for request in requests:
            is_heard = request.told_at is not None and request.process not in self.hampered
            if request.wants_rest and is_heard and request.attempt in ended:
                self.complain(f"an answer to {request.token} asked for a rest, and nobody heard")
                request.wants_rest = 0.0

    def _scope(self, request: Request) -> tuple[str, str] | None:
        """What a hold covers: the narrowest that a limit of the rule is per and the call has; None
        where settings differ in that.
        """
        call, release = self.calls[request.token], self.releases.get(request.attempt or 0)
        if release is None:
            return None
        found = set()
        for rules in [*self.settings.values(), *self.own.values()]:
            if call.rule in rules:
                pers = [one.per for one in rules[call.rule].limits]
                keyed = [per for per in pers if per not in ("rule", "queue")]
                value = {per: call.value(per, release.queue) for per in pers}
                narrow = [per for per in keyed if value[per]] + [p for p in pers if p == "queue"]
                found.add((narrow[0], value[narrow[0]]) if narrow else ("rule", ""))
        return found.pop() if len(found) == 1 else None

    def judge(
        self,
        requests: list[Request],
        attempts: dict[int, Ended],
        calls: dict[int, tuple[int, str, bool]],
    ) -> None:
        """All is over. `calls`: by primary key (status, why, whether it is to be made later)."""
        self.limits.judge(requests)
        self.fates.judge(requests, attempts, calls)

    def _limits(self, process: Process, rule: str) -> Iterator[tuple[str, LimitOf]]:
        rules = self.settings.get(process) or self.own.get(process, {})
        if rule in rules:
            yield from rules[rule].ids(rule)
