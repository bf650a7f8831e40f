"""What goes wrong in a run, and what people do meanwhile: each kind is one function of the world and
of the numbers drawn for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tests.simulation.cast import cuts_allowed
from tests.simulation.oracle import Rate
from tests.simulation.scheduler import MICRO
from tests.simulation.settings_of_runs import LimitOf
from tests.simulation.statements import PLACES, Doom

if TYPE_CHECKING:
    from tests.simulation.world import World

KINDS = (
    "kill", "freeze", "cut", "jump", "refuse", "broker", "hold", "cancel", "delete", "pause",
    "rate", "deploy", "requeue", "clean", "stall", "forget", "grip", "wipe", "term",
)  # fmt: skip
# What does harm together: a call's row is held while its attempt is lost, ...
PLOTS = (
    ("forget", "hold"), ("freeze", "hold"), ("freeze", "broker"), ("kill", "requeue"),
    ("freeze", "cancel"), ("deploy", "rate"), ("jump", "freeze"), ("deploy", "kill"),
    ("hold", "hold"), ("cancel", "requeue"), ("jump", "jump"), ("wipe", "rate"), ("grip", "kill"),
    ("term", "cut"), ("deploy", "freeze"), ("grip", "stall"), ("jump", "refuse"),
)  # fmt: skip


@dataclass
class Misfortune:
    """Something that happens in a run. `number` names it, so that it can be left out."""

    number: int
    kind: str
    at: float
    draw: Any

    def __str__(self) -> str:
        return f"{self.number}:{self.kind}@{self.at:.2f}"


def drawn(world: World, leave_out: Collection[int]) -> list[Misfortune]:
    """What is to happen in a run, but for those."""
    draw, length = world.scheduler.stream("misfortunes"), world.length
    count = draw.choice(length.misfortunes)
    kinds = draw.sample(KINDS, draw.randint(*length.kinds))  # few kinds, but several of each
    if count > 1 and draw.random() < 0.5:
        kinds = draw.choice(world.scene.plots or PLOTS)
    found = []
    for number in range(count):
        kind = kinds[number] if number < len(kinds) else draw.choice(kinds)
        at = draw.uniform(0.05, length.troubled)
        own = world.scheduler.stream(f"misfortune {number}")
        found.append(Misfortune(number, kind, at, own))
    return [one for one in found if one.number not in leave_out]


def arrange(world: World, one: Misfortune) -> None:
    """Let it happen when its time comes."""
    do = globals()[f"_{one.kind}"]

    def happen() -> None:
        world.scheduler.tell(f"misfortune {one}", "world")
        do(world, one.draw)

    world.scheduler.later(one.at, happen)


def _doom(world: World, draw: Any, what: str, given: Any = None) -> None:
    victims = world.cast.victims()
    if victims:
        place = draw.choice(PLACES)
        steps = draw.randint(1, 4 if place else 40)
        victim, commits = draw.choice(victims), draw.random() < 0.5
        victim.doom.append(Doom(steps, what, given, place, commits=commits))


def _kill(world: World, draw: Any) -> None:
    _doom(world, draw, "kill")


def _freeze(world: World, draw: Any) -> None:
    _doom(world, draw, "freeze", draw.choice([0.3, 1.0, 2.2, 4.0]))


def _stall(world: World, draw: Any) -> None:
    """One process's statements take long."""
    victims = world.cast.victims()
    if victims:
        victim = draw.choice(victims)
        victim.slowness = 40.0
        world.judge.hampered.add(victim)
        world.scheduler.later(draw.uniform(0.3, 1.5), lambda: setattr(victim, "slowness", 1.0))


def _cut(world: World, draw: Any) -> None:
    world.was_cut = True
    _doom(world, draw, "cut")


def _jump(world: World, draw: Any) -> None:
    """The database's clock is set."""
    by = draw.choice([0.05, 0.4, 1.0, 5.0, 3600.0, 86400.0])
    by = draw.choice([by, -by])
    world.judge.jumps.append((world.scheduler.now, round(by * MICRO)))
    world.stage.doors.clock_set += round(by * MICRO)
    world.scheduler.tell(f"the clock is set by {by:g} s", "world")


def _refuse(world: World, draw: Any) -> None:
    world.provider.is_refusing = True
    after = draw.uniform(0.2, 1.5)
    world.scheduler.later(after, lambda: setattr(world.provider, "is_refusing", False))


def _broker(world: World, draw: Any) -> None:
    seconds = draw.uniform(0.2, 2.0)
    world.broker.away_until = world.scheduler.now + round(seconds * MICRO)


def _forget(world: World, draw: Any) -> None:
    """For a while the broker loses whatever it is given."""
    seconds = draw.uniform(0.1, 0.6)
    world.broker.forgets_until = world.scheduler.now + round(seconds * MICRO)


def _some(world: World, draw: Any) -> int | None:
    """A call: rather one that is out, or one that expires."""
    judge = world.judge
    over = {r.attempt for r in world.provider.requests if r.told_at or r.given_up_at}
    out = [r.call for r in judge.releases.values() if r.pk not in over and r.call in judge.by_pk]
    expiring = [pk for pk, call in judge.by_pk.items() if call.expires is not None]
    found: list[int] = draw.choice([sorted(judge.by_pk), sorted(out), sorted(out), expiring])
    return draw.choice(found or sorted(judge.by_pk) or [None])  # type: ignore[no-any-return]


def _with_call(world: World, draw: Any, name: str, do: Callable[[int], None]) -> None:
    pk = _some(world, draw)

    def act() -> None:
        if pk is not None:
            with cuts_allowed():
                do(pk)

    world.cast.act(name, 0.0, act)


def _hold(world: World, draw: Any) -> None:
    """A host holds a call's row, and does this or that to it."""
    seconds, verb = draw.choice([0.3, 1.0, 3.0]), draw.choice(["look", "cancel", "undo"])

    def do(pk: int) -> None:
        from django.db import transaction

        from callqueue.exceptions import IllegalTransition
        from callqueue.models import CallQueue

        with transaction.atomic():
            call = CallQueue.objects.select_for_update().filter(pk=pk).first()
            if call is None:
                return
            try:
                if verb != "look":
                    call.cancel()
            except IllegalTransition:
                pass
            world.scheduler.sleep(seconds)
            if verb == "undo":
                transaction.set_rollback(True)

    _with_call(world, draw, "host", do)


def _cancel(world: World, draw: Any) -> None:
    def do(pk: int) -> None:
        from callqueue.models import CallQueue

        CallQueue.objects.filter(pk__in=range(pk, pk + 4)).cancel()

    _with_call(world, draw, "operator", do)


def _requeue(world: World, draw: Any) -> None:
    is_again = draw.random() < 0.3

    def do(pk: int) -> None:
        from callqueue.models import CallQueue

        pks = [one for one in range(pk, pk + 4) if one in world.judge.by_pk]
        for one in pks:
            world.judge.by_pk[one].requeued_at.append(world.scheduler.now)
        CallQueue.objects.filter(pk__in=pks).requeue(again=is_again)
        for one in pks:
            world.judge.by_pk[one].requeued_at.append(world.scheduler.now)

    _with_call(world, draw, "operator", do)


def _delete(world: World, draw: Any) -> None:
    def do(pk: int) -> None:
        from callqueue.models import CallQueue

        world.judge.by_pk[pk].is_gone = True
        CallQueue.objects.filter(pk=pk).delete()

    _with_call(world, draw, "host", do)


def _pause(world: World, draw: Any) -> None:
    seconds = draw.choice([0.5, 2.0, None])
    rule = draw.choice(sorted(world.scene.rules))

    def do() -> None:
        from callqueue import control

        with cuts_allowed():
            control.pause("default", rule, seconds=seconds)

    world.cast.act("operator", 0.0, do)


def _rate(world: World, draw: Any) -> None:
    """An operator gives some limits of a rule other rates."""
    rule = draw.choice(sorted(world.scene.rules))
    limits = [
        one for one in world.scene.rules[rule].ids(rule) if one[1].kind in ("window", "bucket")
    ]
    given = [
        (name, limit, _another_rate(world, draw, limit))
        for name, limit in draw.sample(limits, draw.randint(1, len(limits)) if limits else 0)
    ]

    def do() -> None:
        from callqueue import control

        for name, limit, n in given:
            rate = Rate(name, n, world.scheduler.now)
            world.judge.rates.append(rate)
            text = None if n is None else f"{n}/{limit.seconds:g}s"
            with cuts_allowed():
                control.change_limit("default", rule, name, text)
                rate.must = world.scheduler.now

    world.cast.act("operator", 0.0, do)


def _another_rate(world: World, draw: Any, limit: LimitOf) -> int | None:
    """None: its own."""
    if limit.unit == "tokens":  # no less than a call may cost
        return draw.choice([limit.capacity, limit.n + 2, 2 * limit.n, None])  # type: ignore[no-any-return]
    n = draw.choice([1, 2, limit.n + 2, None])
    return n and max(n, *(cost for cost in world.scene.costs if isinstance(cost, int)), 1)


def _deploy(world: World, draw: Any) -> None:
    """A dispenser or a maker with other settings begins, and one of the others ends; perhaps all is
    rolled back later.
    """
    is_other = draw.random() < 0.7
    seconds = draw.uniform(0.0, 1.5)

    def end() -> None:
        old = [p for p in world.cast.releasing() if p.is_other != is_other]
        for process in old[: draw.choice([1, 3])]:
            # Not the last: another deploy may have ended the one that this one began.
            if hasattr(process, "stop") and len(world.cast.releasing()) > 1:
                process.stop.set()

    kinds = ["maker"] if not world.cast.alive("worker") else ["dispenser", "dispenser", "maker"]
    world.cast.start(draw.choice(kinds), is_other)
    world.scheduler.later(seconds, end)


def _term(world: World, draw: Any) -> None:
    """A maker is told to go, and another one begins."""
    begun = [one for one in world.cast.serving("maker") if hasattr(one, "stop")]
    if begun:
        old, after = draw.choice(begun), draw.uniform(0, 1)
        old.stop.set()

        def follow() -> None:
            world.cast.start("maker", old.is_other)

        world.scheduler.later(after, follow)


def _grip(world: World, draw: Any) -> None:
    """Somebody has some of the rows for a while that are locked together: of rules, or of attempts
    and of calls.
    """
    seconds, share = draw.choice([0.2, 0.6, 1.5]), draw.choice([0.3, 0.5, 1.0])
    name = draw.choice(["rule_states", "attempts", "calls"])

    def do() -> None:
        from django.db import transaction

        from callqueue import tables

        rows = getattr(tables, name)("default").order_by("pk")
        some = [pk for pk in rows.values_list("pk", flat=True) if draw.random() < share]
        with cuts_allowed(), transaction.atomic():
            list(rows.filter(pk__in=some).select_for_update(of=("self",)).values_list("pk"))
            world.scheduler.sleep(seconds)

    world.cast.act("operator", 0.0, do)


def _wipe(world: World, draw: Any) -> None:
    """Whatever earlier passes remember is gone."""

    def do() -> None:
        from tests.simulation.drain import wipe

        with cuts_allowed():
            wipe()

    world.cast.act("operator", 0.0, do)


def _clean(world: World, draw: Any) -> None:
    """Cleanup deletes what ended."""

    def do() -> None:
        from callqueue.maintenance import cleanup

        with cuts_allowed():
            cleanup.clean("default", older_than=timedelta(seconds=0.5), batch_size=3)

    world.judge.fates.is_pruned = True
    world.cast.act("cleanup", 0.0, do)
