"""What the application does: it sends calls in transactions of its own, and rolls some back."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tests.simulation.cast import cuts_allowed
from tests.simulation.scheduler import MICRO
from tests.simulation.settings_of_runs import CallOf
from tests.simulation.simulated import START

if TYPE_CHECKING:
    from tests.simulation.world import World


DOOMED = 0.06  # of calls


class _Undone(Exception):
    """The host rolls its transaction back."""


def arrange(world: World, calls: int | None) -> None:
    """Who sends what, and when: `calls` in all, or as many as the scene has."""
    draw, length = world.scheduler.stream("application"), world.length
    left = calls or draw.randint(*length.calls)
    is_burst = draw.random() < 0.4
    number = 0
    while left > 0:
        count = min(left, draw.choice(length.senders))
        left -= count
        own = world.scheduler.stream(f"send {number}")
        at = 0.0 if is_burst else own.choice([0.0, own.uniform(0, length.troubled)])
        world.cast.act("sender", at, lambda own=own, count=count: _send(world, own, count))
        number += 1


def _send(world: World, own: Any, count: int) -> None:
    with cuts_allowed():
        send(world, own, count)


def send(world: World, draw: Any, count: int = 1, **fixed: Any) -> list[CallOf]:
    """Send calls in one transaction, which may be rolled back. `fixed`: what is not to be drawn."""
    from django.db import transaction

    made = [_drawn(world, draw, fixed) for _ in range(count)]
    is_undone = not fixed and draw.random() < 0.08
    priority = 0 if fixed else draw.choice([0, 0, 0, 5])
    expires = None if fixed else draw.choice([None] * 5 + [0.3, 1.0, 2.0])
    try:
        with transaction.atomic():
            for call in made:
                if expires is not None:  # by the clock of its host
                    call.expires = world.scheduler.now + round(expires * MICRO)
                _insert(call, priority)
            if is_undone:
                raise _Undone
    except _Undone:
        for call in made:
            call.pk = None
        return []
    for call in made:
        call.is_committed = True
        world.judge.by_pk[call.pk or 0] = call
    return made


def _drawn(world: World, draw: Any, fixed: dict[str, Any]) -> CallOf:
    scene = world.scene
    rule = fixed.get("rule") or draw.choice(sorted(scene.rules))
    key = fixed["key"] if "key" in fixed else draw.choice(scene.keys)
    cost = fixed["cost"] if "cost" in fixed else draw.choice(scene.costs)
    method = fixed.get("method") or draw.choice(["get", "post", "post"])
    may_repeat = scene.rules[rule].on_lost == "retry"
    call = CallOf(
        world.token("c"), rule, key, cost, method, world.scheduler.now, may_repeat=may_repeat
    )
    world.judge.calls[call.token] = call
    if not fixed and world.scheduler.stream("doomed").random() < DOOMED:
        world.provider.doomed.add(call.token)
    return call


def _insert(call: CallOf, priority: int) -> None:
    from callqueue.models import CallQueue

    at = None if call.expires is None else START + timedelta(microseconds=call.expires)
    more = {"priority": priority, "expires_at": at}
    data = {"method": call.method, "params": {"url": f"http://127.0.0.1/{call.token}"}}
    row = CallQueue.objects.send(data, rule=call.rule, key=call.key, cost=call.cost, **more)
    assert row is not None
    call.pk = row.pk
