"""Judges the other half of the promise: that the whole of a limit is used. From what the provider
counted it computes when each call of a quiet backlog could have gone at the latest, under all
settings of the run at once, and complains of those that went much later.

Instants are microseconds of true time. What counts of a request is taken to begin with its answer:
no kind of limit waits for longer than that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.scheduler import MICRO, Process
from tests.simulation.settings_of_runs import CallOf, LimitOf

if TYPE_CHECKING:
    from tests.simulation.provider import Request
    from tests.simulation.world import World

Charges = Sequence[tuple[int, int, int]]  # when it was answered, what it was charged, what it cost

FEW = 3  # of fewer calls a mean says nothing
USED = 0.94  # of a window, by calls that wait for it
LATE = 0.15  # seconds by which a call may be sent after it could have gone: passes and messages
MOST = 1000  # calls, more than any run has
# And of keys that wait for a tallied window: nobody foresees when these go, so that they wait for
# the next look at what is blocked. (The product's review, as runs have it.)
REVIEW = 0.61
# And where a process makes its first calls: for so long it records no answer, since the clock may
# have jumped just before it began, and begins nothing while it waits for that.
YOUNG = 0.85
# And of buckets, a part of the time that they take to fill: each is assumed to have been empty once
# in four of those.
BUCKETS = 0.25


@dataclass(frozen=True)
class Charge:
    """A request that counts: since when at the latest, and for what its limits ask about it. `used`:
    the tokens that it cost, once that was known; None: what it was charged.
    """

    call: CallOf
    queue: str
    sent_at: int
    answered_at: int
    used: int | None

    def costs(self, unit: str) -> tuple[int, int]:
        """What it was charged until its answer, and what it costs since."""
        charged = self.call.charge(unit)
        return charged, charged if self.used is None or unit != "tokens" else self.used


@dataclass
class Change:
    """From an instant on a limit has this rate, where that lets more go."""

    limit: str
    n: int
    at: int


@dataclass
class Backlog:
    """Calls that were sent together when all was quiet. `free_at`: nothing but limits keeps them
    back after that.
    """

    calls: Sequence[CallOf]
    free_at: int
    changes: list[Change] = field(default_factory=list)
    is_one: bool = True  # all release by the same settings
    is_plain: bool = True  # nobody meddles with it
    keeps_turns: bool = True  # and what keys are in which turn is not forgotten
    has_held_key: bool = False  # an operator holds one: the keys of any rule take turns meanwhile


def complaints(world: World, backlog: Backlog) -> Iterable[str]:
    """Of each call of the backlog that went too late, or not at all.

    Not where an end was committed later than a tally of a second remembers: it stays in that, and
    is much of so few.
    """
    limits = [one for rule in world.scene.rules for one in world.scene.limits(rule)]
    if world.judge.is_belated and any(world.scene.tallies(one) for one in limits):
        return
    counted = {
        request.token: request
        for request in world.provider.requests
        if request.counted_at is not None
    }
    releases = world.judge.releases
    order = sorted(
        (one for one in counted.values() if one.attempt in releases),
        key=lambda one: (releases[one.attempt or 0].at, one.attempt or 0),
    )
    before: list[Charge] = []
    lates: dict[str, list[float]] = defaultdict(list)
    own = {call.token for call in backlog.calls}
    for request in order:
        call, release = world.judge.calls[request.token], releases[request.attempt or 0]
        if request.token in own:
            slot = slot_of(world, backlog, call, before)
            late = (request.sent_at - slot) / MICRO
            excuse = _excuse(world, counted.values(), call.rule, slot)
            if not excuse:
                lates[call.rule].append(max(0.0, late))
            if late > _bound(world, call.rule) + _forgotten(world, backlog, call) + excuse:
                yield (
                    f"{call.token} of {call.rule} (key {call.key!r}, cost {call.cost}) went at "
                    f"{request.sent_at / MICRO:.3f}, and could have gone at {slot / MICRO:.3f}"
                )
            yield from _out_of_turn(world, backlog, call, release.at, before)
        told_at = request.told_at if request.told_at is not None else request.sent_at + MICRO
        before.append(Charge(call, release.queue, request.sent_at, told_at, _used(world, request)))
    for rule, found in lates.items():
        windows = [one.seconds for one in world.scene.limits(rule) if is_plain(one)]
        mean, width = sum(found) / len(found), min(windows, default=0.0)
        is_plain_rule = len(windows) == len(list(world.scene.limits(rule)))
        if is_plain_rule and len(found) >= FEW and mean > (1 - USED) * width > 0:
            yield f"calls of {rule} went {mean:.3f} s late in the mean: that is not {USED} of it"
    waiting, left = set(), {request.token: request.sent_at for request in world.provider.requests}
    for call in backlog.calls:
        count = sum(release.call == call.pk for release in releases.values())
        if count > 1 and backlog.is_plain:
            yield f"{call.token} of {call.rule} was released {count} times"
        line = call.rule, str(call.key) if _is_keyed(world, call.rule) else ""
        if call.token in counted or line in waiting:
            continue  # who is behind another goes after it
        waiting.add(line)
        slot = slot_of(world, backlog, call, before)
        late = (left.get(call.token, world.scheduler.now) - slot) / MICRO
        if late > _bound(world, call.rule) + _forgotten(world, backlog, call):
            yield (
                f"{call.token} of {call.rule} (key {call.key!r}, cost {call.cost}) has not gone by "
                f"{world.scheduler.now / MICRO:.3f}, and could have gone at {slot / MICRO:.3f}"
            )


def _out_of_turn(
    world: World, backlog: Backlog, call: CallOf, at: int, before: Sequence[Charge]
) -> Iterable[str]:
    """Where the rule's keys take turns: of those that have gone less often than the call's, and that
    nothing of their own keeps back.
    """
    if not (backlog.is_plain and backlog.keeps_turns and _takes_turns(world, call.rule)):
        return
    gone = Counter(str(one.call.key) for one in before if one.call in backlog.calls)
    left = {
        str(one.key): one
        for one in reversed(backlog.calls)
        if one.rule == call.rule and all(one is not other.call for other in before)
    }
    for key, other in left.items():
        if gone[key] < gone[str(call.key)]:
            slot = slot_of(world, backlog, other, before, lambda limit: not is_shared(limit))
            if slot + round(_bound(world, call.rule) * MICRO) < at:
                yield f"{call.token} of {call.rule} went in the turn of {other.token}"


def _takes_turns(world: World, rule: str) -> bool:
    """Whether its keys do by all settings."""
    own = [rules[rule] for rules in (world.scene.rules, world.scene.other) if rule in rules]
    return all(any(not is_shared(limit) for limit in one.limits) for one in own)


def _used(world: World, request: Request) -> int | None:
    """What its answer said; a permit is charged what it was to cost, where it was told of less."""
    call = world.judge.calls[request.token]
    if request.used is None or not world.scene.settles(call.rule):
        return None
    is_permit = request.process.kind not in ("worker", "maker")
    return max(request.used, call.charge("tokens")) if is_permit else request.used


def is_plain(limit: LimitOf) -> bool:
    """Whether it is a window of a rule, whose slots hang on no answer."""
    return limit.kind == "window" and limit.per == "rule" and not limit.strict


def overtaken(world: World, backlog: Backlog) -> Iterable[str]:
    """Of calls that others went before that were behind them: of one rule whose keys take no turns;
    or of a rule with a lower priority, as far as their own limits let them go.
    """
    own = {call.pk: call for call in backlog.calls}
    releases = sorted(world.judge.releases.values(), key=lambda one: one.pk)
    # not those that somebody who was asleep had first: they were taken back, or failed
    counts = Counter(one.call for one in releases)
    released = [one for one in releases if one.call in own and counts[one.call] == 1]
    order = [own[one.call] for one in released]
    # The pass of one that was counted twice took its rule to have no room.
    miscounted = {
        own[one.call].pk
        for one in released
        if any(one.began_at <= at <= one.at for at in world.judge.counted_twice)
    }
    for place, call in enumerate(order):
        before = order[:place]
        if not _is_keyed(world, call.rule) and not backlog.has_held_key:
            behind = [x for x in before if x.rule == call.rule and (x.pk or 0) > (call.pk or 0)]
            if behind:
                yield f"{call.token} of {call.rule} was overtaken by {behind[0].token}"
        lower = [
            x
            for x in before
            if x.rule in _lower(world, call.rule)
            and x.pk not in miscounted
            and _stands_in_the_way(world, x, call)
        ]
        same = sum(x.rule == call.rule for x in before)
        if lower and backlog.is_one and backlog.is_plain and same < _own_room(world, call.rule):
            yield f"{call.token} of {call.rule} was overtaken by {lower[0].token} of {lower[0].rule}"


def _is_keyed(world: World, rule: str) -> bool:
    return any(not is_shared(limit) for limit in world.scene.limits(rule))


def _lower(world: World, rule: str) -> set[str]:
    """The rules of lower priority that share a limit with this one."""
    rules = world.scene.rules
    shared = {limit.name for limit in rules[rule].limits if limit.name}
    return {
        name
        for name, one in rules.items()
        if one.priority < rules[rule].priority and shared & {limit.name for limit in one.limits}
    }


def _stands_in_the_way(world: World, one: CallOf, call: CallOf) -> bool:
    """Whether they are of one value of a limit that their rules share."""
    shared = [limit for limit in world.scene.rules[call.rule].limits if limit.name]
    return any(x.per == "queue" or one.value(x.per, "") == call.value(x.per, "") for x in shared)


def _own_room(world: World, rule: str) -> int:
    """How many calls of the rule nothing of its own keeps back; 0 where that hangs on their costs."""
    own = [limit for limit in world.scene.limits(rule) if not limit.name]
    costs = [cost if isinstance(cost, int) else cost.get("calls", 1) for cost in world.scene.costs]
    if own and (any(limit.unit != "calls" for limit in own) or any(cost != 1 for cost in costs)):
        return 0
    return min((limit.capacity for limit in own), default=MOST)


def _bound(world: World, rule: str) -> float:
    limits = list(world.scene.limits(rule))
    keyed = [one for one in limits if not is_shared(one)]
    return (
        LATE
        + max(
            (BUCKETS * b.burst * b.seconds / b.n for b in limits if b.kind == "bucket"), default=0.0
        )
        + (REVIEW if any(world.scene.tallies(one) for one in keyed) else 0.0)
        + (1.0 if any(one.kind == "bucket" and world.scene.tallies(one) for one in keyed) else 0.0)
    )


def _forgotten(world: World, backlog: Backlog, call: CallOf) -> float:
    """Seconds more, where an operator has changed a limit, and so the settings have another version:
    a bucket's level is counted anew, as if it had been empty once. That costs one call's tokens.
    """
    buckets = [one for one in world.scene.limits(call.rule) if one.kind == "bucket"]
    costs = [call.charge(one.unit) * one.seconds / one.n for one in buckets]
    return max(costs, default=0.0) if backlog.changes else 0.0


def _excuse(world: World, requests: Iterable[Request], rule: str, slot: int) -> float:
    """Seconds more, where some process had made its first call just before that slot, or a pass had
    counted an attempt twice, so that it waited for one more to leave, or had not seen what it gave
    back.
    """
    first: dict[Process, int] = {}
    for request in requests:
        first[request.process] = min(request.sent_at, first.get(request.process, request.sent_at))
    is_young = any(slot - MICRO < at < slot for at in first.values())
    unseen = world.judge.unseen if world.scene.settles(rule) else []
    is_wrong = any(slot - REVIEW * MICRO < at < slot for at in unseen)
    # The slot is when it was answered, and the end is committed a little later.
    is_wrong |= any(
        slot - REVIEW * MICRO < at < slot + LATE * MICRO for at in world.judge.counted_twice
    )
    return max(YOUNG * is_young, REVIEW * is_wrong)


def is_shared(limit: LimitOf) -> bool:
    """Whether calls of all keys count in it together."""
    return limit.per in ("rule", "queue")


def slot_of(
    world: World,
    backlog: Backlog,
    call: CallOf,
    before: Sequence[Charge],
    is_minded: Callable[[LimitOf], bool] = lambda limit: True,
) -> int:
    """When all limits that any settings have for its rule have room for the call, after these."""
    found = max(backlog.free_at, call.sent_at)
    keyed = _is_keyed(world, call.rule)
    for one in before:
        if one.call.rule == call.rule and (not keyed or one.call.key == call.key):
            found = max(found, one.sent_at)
    room = world.cast.room()
    if room is not None:  # of those who make what they release
        flying = [(one.answered_at, 1, 1) for one in before]
        found = _in_once(world, None, room, 1, flying, found)
    begun = found
    for rules in (world.scene.rules, world.scene.other):
        for name, limit in rules[call.rule].ids(call.rule) if call.rule in rules else ():
            if not is_minded(limit):
                continue
            queues = rules[call.rule].queues or ("",)
            found = max(
                found,
                min(_slot_of(world, backlog, call, before, name, limit, q, begun) for q in queues),
            )
    return found


def _slot_of(
    world: World,
    backlog: Backlog,
    call: CallOf,
    before: Sequence[Charge],
    name: str,
    limit: LimitOf,
    queue: str,
    begun: int,
) -> int:
    charging = {
        rule
        for rules in (world.scene.rules, world.scene.other)
        for rule, one in rules.items()
        if name in (other for other, _ in one.ids(rule))
    }
    value = call.value(limit.per, queue)
    charges = [
        (one.answered_at, *one.costs(limit.unit))
        for one in before
        if one.call.rule in charging and one.call.value(limit.per, one.queue) == value
    ]
    cost = call.charge(limit.unit)
    if not cost:
        return begun
    rates = [r.n for r in world.judge.rates if r.limit == name and r.n is not None]
    rooms: dict[str, Callable[..., int]] = {
        "window": _in_window, "once": _in_once, "bucket": _in_bucket, "calendar": _in_calendar,
    }  # fmt: skip
    room = rooms[limit.kind]
    slot = room(world, limit, min([limit.n, *rates]), cost, charges, begun)
    for change in backlog.changes:
        if change.limit == name:
            slot = min(slot, room(world, limit, change.n, cost, charges, max(begun, change.at)))
    return slot


def _in_window(world: World, limit: LimitOf, n: int, cost: int, charges: Charges, at: int) -> int:
    width = round(limit.seconds * MICRO)
    goes = [(told + width, spent) for told, _, spent in charges]
    goes += [(told, charged - spent) for told, charged, spent in charges if charged > spent]
    used = sum(amount for when, amount in goes if when > at)
    for when, amount in sorted(goes):
        if used + cost <= n:
            return at
        if when > at:
            used, at = used - amount, when
    return at


def _in_once(
    world: World, limit: LimitOf | None, n: int, cost: int, charges: Charges, at: int
) -> int:
    flying = sum(spent for told, _, spent in charges if told > at)
    for told, _, spent in sorted(charges):
        if flying + cost <= n:
            return at
        if told > at:
            flying, at = flying - spent, told
    return at


def _in_bucket(world: World, limit: LimitOf, n: int, cost: int, charges: Charges, at: int) -> int:
    rate = n / limit.seconds / MICRO
    level, since = float(limit.burst), 0
    for told, _, spent in sorted(charges):
        level = min(limit.burst, level + (told - since) * rate) - spent
        since = told
    level = min(limit.burst, level + (max(at, since) - since) * rate)
    short = cost - level
    return max(at, since) + (round(short / rate) if short > 0 else 0)


def _in_calendar(world: World, limit: LimitOf, n: int, cost: int, charges: Charges, at: int) -> int:
    width, jitter = round(limit.seconds * MICRO), round(limit.jitter * MICRO)
    moved = world.stage.doors.clock_set

    def begins(instant: int) -> int:
        return (instant + moved) // width * width - moved

    first = begins(at - jitter)
    while sum(spent for told, _, spent in charges if told >= first - jitter) + cost > n:
        first += width
        at = first + jitter
    return at
