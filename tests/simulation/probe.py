"""After a run all is quiet: what the limits have room for, once nothing counts any more, must go at
once. Whatever a run has left behind that keeps room taken shows here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation import application
from tests.simulation.scheduler import MICRO

if TYPE_CHECKING:
    from tests.simulation.world import World

PROBED = 2.5  # seconds


def probe(world: World) -> None:
    """Wait until nothing counts any more, send what there is room for, and see it arrive."""
    both = [*world.scene.rules.values(), *world.scene.other.values()]
    longest = max(limit.seconds for rule in both for limit in rule.limits)
    scheduler = world.scheduler
    scheduler.tell("probe", "world")
    scheduler.run(scheduler.now / MICRO + 1.1 * longest + 0.2)
    rule = sorted(world.scene.rules)[0]
    count = min(_room(world, rule), 6)
    key = world.scene.keys[0]
    if count < 1:
        return
    draw = scheduler.stream("probe")
    sent: list[Any] = []

    def send() -> None:
        cost = {limit.unit: 1 for limit in world.scene.rules[rule].limits if limit.unit != "calls"}
        sent.extend(
            application.send(world, draw, count, rule=rule, key=key, cost=cost or 1, method="get")
        )

    world.cast.act("prober", 0.0, send)
    begun = scheduler.now

    def have_arrived() -> bool:
        counted = {r.token for r in world.provider.requests if r.counted_at is not None}
        return bool(sent) and all(call.token in counted for call in sent)

    scheduler.run(begun / MICRO + PROBED, have_arrived)
    if not have_arrived():
        counted = {r.token for r in world.provider.requests if r.counted_at is not None}
        late = [call.token for call in sent if call.token not in counted]
        world.judge.complain(
            f"there is room for {count} of {rule}, and {late} did not arrive in {PROBED} s"
        )
    scheduler.run(scheduler.now / MICRO + 3.0, world.ending.is_done)
    for call in sent:
        call.is_gone = True  # judged here, and may be on its way


def _room(world: World, rule: str) -> int:
    """The least that any of the settings and rates of the run leave free."""
    found = []
    for rules in (world.scene.rules, world.scene.other):
        for name, limit in rules[rule].ids(rule) if rule in rules else ():
            if limit.kind == "once":
                continue
            most = [limit.n] if limit.kind != "bucket" else [limit.burst, limit.n]
            most += [r.n for r in world.judge.rates if r.limit == name and r.n is not None]
            found.append(min(most))
    return min(found, default=3)
