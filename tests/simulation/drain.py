"""The end of a long run: a backlog is sent when all is quiet, and somebody does one thing meanwhile
that is no misfortune. Nothing but its limits may keep it back (`judged_use.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation import application, judged_use, permits
from tests.simulation.judged_use import Backlog, Change
from tests.simulation.oracle import Rate
from tests.simulation.scheduler import MICRO
from tests.simulation.settings_of_runs import CallOf

if TYPE_CHECKING:
    from tests.simulation.world import World

MOST = 6  # calls of a backlog
LASTS = 4.0  # seconds for which it is watched
LOOK = 0.6  # seconds by which a dispenser has seen that calls are there: it polls
RIVALS = 0.95  # where several do: it is patient where others had the last calls locked
# seconds that processes sleep: less than their opinions are remembered for, and more
SLEPT = (60.0, 7200.0)
SETTLES = 2.0  # seconds after which processes that have slept know what has become of the others
MEANWHILE = ("nothing", "sleep", "raise", "pause", "hold", "wipe", "ask", "stop")


def drain(world: World) -> None:
    """Send a backlog, and judge when each of its calls goes."""
    draw, scheduler = world.scheduler.stream("drain"), world.scheduler
    act = draw.choice(MEANWHILE)
    scheduler.tell(f"drain: {act}", "world")
    sent: list[CallOf] = []
    is_plain = act in ("nothing", "sleep", "wipe", "stop")
    look = RIVALS if len(world.cast.releasing()) > 1 else LOOK
    is_one = not any(process.is_other for process in world.cast.releasing())
    backlog = Backlog(sent, 0, is_one=is_one, is_plain=is_plain, keeps_turns=act != "wipe")
    if act == "sleep":
        _sleep(world, draw, backlog)
    drawn = _drawn(world, draw)
    world.cast.act("drainer", 0.0, lambda: _send(world, draw, drawn, sent))
    if act == "ask":
        for number in range(2):
            own = scheduler.stream(f"asked {number}")
            world.cast.act("permit", own.uniform(0, 1.5), lambda own=own: _ask(world, own))
    elif act not in ("nothing", "sleep"):
        do = globals()[f"_{act}"]
        world.cast.act("operator", draw.uniform(0.3, 1.0), lambda: do(world, draw, backlog))
    begun = max(scheduler.now, backlog.free_at) / MICRO
    scheduler.run(begun + LASTS, lambda: _is_over(world, sent, len(drawn)))
    if sent:
        backlog.free_at = max(backlog.free_at, sent[-1].sent_at + round(look * MICRO))
        for judged in (judged_use.complaints, judged_use.overtaken):
            for complaint in judged(world, backlog):
                world.judge.complain(complaint)
    for call in sent:
        call.is_gone = True  # judged here, and may be on its way


def _is_over(world: World, sent: list[CallOf], count: int) -> bool:
    counted = {r.token for r in world.provider.requests if r.counted_at is not None}
    return len(sent) == count and all(call.token in counted for call in sent)


def _drawn(world: World, draw: Any) -> list[dict[str, Any]]:
    """What is to be sent. Where keys take turns, or rules share a limit, a call that costs much
    keeps those of others behind it back for no one knows how long: there all cost the same.
    """
    scene = world.scene
    found = []
    for rule in sorted(scene.rules):
        limits = list(scene.limits(rule))
        is_apart = any(limit.per not in ("rule", "queue") or limit.name for limit in limits)
        costs = scene.costs[:1] if is_apart else scene.costs
        for _ in range(MOST // len(scene.rules)):
            found.append({"rule": rule, "key": draw.choice(scene.keys), "cost": draw.choice(costs)})
    return found


def _send(world: World, draw: Any, drawn: list[dict[str, Any]], sent: list[CallOf]) -> None:
    from django.db import transaction

    found = []
    with transaction.atomic():
        for one in drawn:
            found += application.send(world, draw, 1, method="get", **one)
    for call in found:
        call.sent_at = world.scheduler.now
    sent += found


def _sleep(world: World, draw: Any, backlog: Backlog) -> None:
    """All processes are suspended, and go on much later, one after the other. The backlog finds some
    of them asleep where they remember each other.
    """
    scheduler, slept = world.scheduler, draw.choice(SLEPT)
    ends = scheduler.now + round(slept * MICRO)
    for process in scheduler.processes:
        process.thawed_at = max(process.thawed_at, ends + round(draw.uniform(0, SETTLES) * MICRO))
    is_early = slept == SLEPT[0]
    backlog.is_plain = not is_early
    backlog.free_at = ends + round(2 * SETTLES * MICRO)
    scheduler.run(ends / MICRO + (0 if is_early else 2 * SETTLES))


def _raise(world: World, draw: Any, backlog: Backlog) -> None:
    """An operator gives a limit room for all."""
    from callqueue import control

    rule = draw.choice(sorted(world.scene.rules))
    limits = [
        (name, one) for name, one in world.scene.rules[rule].ids(rule) if one.kind == "window"
    ]
    if limits:
        name, limit = draw.choice(limits)
        n = 4 * limit.n
        rate = Rate(name, n, world.scheduler.now)
        world.judge.rates.append(rate)
        control.change_limit("default", rule, name, f"{n}/{limit.seconds:g}s")
        rate.must = world.scheduler.now
        backlog.changes.append(Change(name, n, world.scheduler.now + round(LOOK * MICRO)))


def _pause(world: World, draw: Any, backlog: Backlog) -> None:
    """An operator pauses all rules, and resumes them."""
    from callqueue import control

    for rule in sorted(world.scene.rules):
        control.pause("default", rule)
    world.scheduler.sleep(0.3)
    _resume(world, backlog)


def _hold(world: World, draw: Any, backlog: Backlog) -> None:
    """An operator pauses a key, and resumes its rule."""
    from callqueue import control

    backlog.has_held_key = True
    for rule in sorted(world.scene.rules):
        control.pause("default", rule, key=draw.choice(world.scene.keys))
    world.scheduler.sleep(0.6)
    _resume(world, backlog)


def _resume(world: World, backlog: Backlog) -> None:
    from callqueue import control

    for rule in sorted(world.scene.rules):
        control.resume("default", rule)
    backlog.free_at = world.scheduler.now + round(LOOK * MICRO)


def _ask(world: World, draw: Any) -> None:
    """Somebody wants a permit, and does not wait for it for long."""
    import callqueue
    from callqueue.exceptions import NotNow

    call, wait = permits.drawn(world, draw), draw.choice([0, 0.2, 0.5, 0.9])
    try:
        with callqueue.permit(call.rule, key=call.key, cost=call.cost, wait=wait) as permit:
            sock, _ = permits.sent(world, call, permit.attempt_id)
            sock.wait_readable(1.0)
            sock.close()
    except NotNow:
        world.scheduler.tell(f"{call.token} has no permit")


def _stop(world: World, draw: Any, backlog: Backlog) -> None:
    """One of several that release is told to go."""
    releasing = world.cast.releasing()
    if len(releasing) > 1:
        draw.choice(releasing).stop.set()


def _wipe(world: World, draw: Any, backlog: Backlog) -> None:
    """Whatever passes remember is gone: it is counted anew."""
    wipe()


def wipe() -> None:
    """Delete every cached row, and what rules' rows remember of earlier passes."""
    from django.db import transaction

    from callqueue import tables

    with transaction.atomic():
        rules = tables.rule_states("default").order_by("rule")
        for row in rules.select_for_update():
            rules.filter(pk=row.pk).update(memo={})
        tables.Tally.objects.using("default").all().delete()
        tables.KeyTurn.objects.using("default").all().delete()
        tables.KeyNews.objects.using("default").all().delete()
