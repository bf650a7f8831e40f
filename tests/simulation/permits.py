"""What processes do that take permits: they wait for one for as long as they like, call the provider
by themselves, tell of it or not, settle, hold, and die inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.cast import cuts_allowed
from tests.simulation.provider import Request, Socket
from tests.simulation.scheduler import MICRO, Process
from tests.simulation.settings_of_runs import CallOf

if TYPE_CHECKING:
    from tests.simulation.world import World

SAFE = 0.5  # seconds of its lease that whoever sends has left, for the request to arrive in


class _Gone(Exception):
    """The block ends by an error of its own."""


def drawn(world: World, draw: Any) -> CallOf:
    """A call that somebody wants a permit for."""
    rule, key = draw.choice(sorted(world.scene.rules)), draw.choice(world.scene.keys)
    cost = draw.choice(world.scene.costs)
    call = CallOf(world.token("p"), rule, key, cost, "get", world.scheduler.now)
    world.judge.calls[call.token] = call
    return call


def sent(world: World, call: CallOf, attempt: int) -> tuple[Socket, Request]:
    """Its request, which has just left, and the socket that waits for its answer."""
    sock = Socket(world.provider)
    world.provider.accept(sock, call.token)
    request = sock.request
    assert request is not None
    request.attempt = attempt
    return sock, request


def take(world: World, process: Process, draw: Any) -> None:
    """Take one permit, and make one request within it."""
    import callqueue
    from callqueue.exceptions import NotNow

    call = drawn(world, draw)
    how = {
        "wait": draw.choice([0, 0, 0.5, 2.0, None]),
        "lease": draw.choice([None, 1.2]),
        "priority": draw.choice([None, 5]),
    }
    try:
        with (
            cuts_allowed(),
            callqueue.permit(call.rule, key=call.key, cost=call.cost, **how) as permit,
        ):
            request = _use(world, process, draw, call, permit)
        _settle_again(world, draw, request, permit)
    except NotNow:
        world.scheduler.tell(f"{call.token} has no permit")
    except _Gone:
        world.scheduler.tell(f"{call.token} fails")


def _settle_again(world: World, draw: Any, request: Request, permit: Any) -> None:
    """What it cost after all is known only when it has ended, and then better still."""
    if request.used is None or draw.random() < 0.5:
        return
    for _ in range(draw.choice([1, 2])):
        world.scheduler.sleep(draw.choice([0.0, draw.uniform(0, 0.3)]))
        request.used += draw.randint(1, 4)
        permit.settle({"tokens": request.used})


def _use(world: World, process: Process, draw: Any, call: CallOf, permit: Any) -> Request:
    scheduler = world.scheduler
    scheduler.tell(f"{call.token} has attempt {permit.attempt_id}")
    scheduler.sleep(draw.choice([0.0, 0.0, draw.uniform(0, 0.4)]))
    fate = draw.random()
    if fate < 0.1:
        world.cast.die(process)
    left = permit.job.lease_ends_at - scheduler.now / MICRO - process.ahead
    if left < SAFE or (fate < 0.2 and not world.is_calm):
        raise _Gone
    if isinstance(call.cost, dict) and draw.random() < 0.5:
        call.cost = {unit: max(1, n - 1) for unit, n in call.cost.items()}  # as it is counted
        permit.settle(call.cost)
    used = None
    if world.scene.overspends and draw.random() < 0.5:
        used = call.charge("tokens") + draw.randint(1, 9)
        permit.settle({"tokens": used})
    sock, request = sent(world, call, permit.attempt_id)
    request.used = used
    if fate < 0.4:
        permit.sent()
    if 0.4 < fate < 0.5:
        scheduler.sleep(draw.uniform(0, 0.2))
        world.cast.die(process)
    sock.wait_readable(min(1.0, left - SAFE + 0.1))
    sock.close()
    if request.told_at is not None and request.wants_rest:
        permit.hold(request.wants_rest, "busy")
    return request
