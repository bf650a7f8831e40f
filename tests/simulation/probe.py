"""After a run all is quiet: what the limits have room for, once nothing counts any more, must go at
once, and one call more when its forecast says. Whatever a run has left behind that keeps room taken
shows here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation import application
from tests.simulation.doors import START_US
from tests.simulation.scheduler import MICRO
from tests.simulation.settings_of_runs import CallOf

if TYPE_CHECKING:
    from callqueue.forecast import Forecast
    from tests.simulation.world import World

PROBED = 2.5  # seconds
PERMITTED = 2.0  # seconds: as long as a permit may be waited for, and used
WAITED = 20.0
# Seconds by which a call may go sooner than its forecast says: as the slots of jittery clocks may.
# Where limits wait for answers, the last ones took up to a second longer than those of quiet times.
LATE, ANSWERED = 0.4, 1.2
# Seconds by which it may go later: a dispenser looks every 0.4 s, and has to publish it.
EARLY = 1.5


def probe(world: World) -> None:
    """Wait until nothing counts any more, send what there is room for, and see it arrive."""
    both = [*world.scene.rules.values(), *world.scene.other.values()]
    longest = max(limit.seconds for rule in both for limit in rule.limits)
    scheduler = world.scheduler
    scheduler.tell("probe", "world")
    if any(one.kind == "bucket" and world.scene.tallies(one) for one in world.scene.limits()):
        longest += 1.0  # what ended lately is taken to leave it now
    scheduler.run(scheduler.now / MICRO + 1.1 * longest + 0.2)
    rule = sorted(world.scene.rules)[0]
    count = min(_room(world, rule), 6)
    if count > 1:
        world.cast.act("permit", 0.0, lambda: _admit(world, rule))
        scheduler.run(scheduler.now / MICRO + PERMITTED)
        count -= 1
    if count < 1:
        return
    sent: list[CallOf] = []
    world.cast.act("prober", 0.0, lambda: sent.extend(_send(world, rule, count)))
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
    else:
        _foresee(world, rule)
    scheduler.run(scheduler.now / MICRO + 3.0, world.ending.is_done)
    for call in sent:
        call.is_gone = True  # judged here, and may be on its way


def _send(world: World, rule: str, count: int) -> list[CallOf]:
    """Calls that cost as little as they can, all with one key."""
    cost = _least_cost(world, rule)
    key, draw = world.scene.keys[0], world.scheduler.stream("probe")
    return application.send(world, draw, count, rule=rule, key=key, cost=cost, method="get")


def _admit(world: World, rule: str) -> None:
    """Where nothing counts, a permit is had at once."""
    import callqueue
    from callqueue.exceptions import NotNow

    cost = _least_cost(world, rule)
    try:
        with callqueue.permit(rule, key=world.scene.keys[0], cost=cost, wait=0.5):
            pass
    except NotNow as error:
        world.judge.complain(f"there is room for a permit of {rule}, and none is given: {error}")


def _least_cost(world: World, rule: str) -> Any:
    units = {limit.unit for limit in world.scene.rules[rule].limits} - {"calls"}
    return dict.fromkeys(units, 1) or 1


def _foresee(world: World, rule: str) -> None:
    """Send one call more, ask when it will go, and see when it does."""
    from callqueue.models import CallQueue

    scheduler, doors = world.scheduler, world.stage.doors
    found: list[Any] = []

    def ask() -> None:
        (call,) = _send(world, rule, 1)
        call.is_gone = True
        found.append(call)
        found.append(CallQueue.objects.get(pk=call.pk).forecast())

    def version() -> Any:
        return world.stage.server.ask("SELECT version FROM callqueue_settingsstate")

    before = version()
    # A process that goes by settings which no dispenser has would foresee by these.
    world.cast.act("prober", 0.0, ask, world.cast.releasing()[0].is_other)
    begun = scheduler.now

    def counted() -> int | None:
        token = found[0].token if found else None
        return next((r.counted_at for r in world.provider.requests if r.token == token), None)

    scheduler.run(begun / MICRO + WAITED, lambda: counted() is not None and len(found) == 2)
    at, forecast = counted(), found[1]
    if at is None:
        world.judge.complain(f"{found[0].token} does not go in {WAITED} s: {forecast.reason}")
        return
    if forecast.release_at is None or version() != before:
        return  # nobody foresees when others' settings lapse
    foreseen = round(forecast.release_at.timestamp() * MICRO) - START_US - doors.clock_set
    early, late = _bounds(world, rule, forecast)
    if not -early <= (foreseen - at) / MICRO <= late:
        world.judge.complain(
            f"{found[0].token} went at {at / MICRO:.3f}, and its forecast said "
            f"{foreseen / MICRO:.3f}: {forecast.reason}"
        )


def _bounds(world: World, rule: str, forecast: Forecast) -> tuple[float, float]:
    """By how many seconds a forecast may be too early and too late. By how long an answer takes it
    may hang which calendar window a call counts in, and when one that is in flight makes room. A
    tallied window waits for answers too; and how much it holds is known, not when which part leaves.
    """
    limits = list(world.scene.limits(rule))
    kinds = ("window", "bucket")
    tallied = [one for one in limits if one.kind in kinds and world.scene.tallies(one)]
    hangs = bool(tallied) or any(one.strict or one.kind == "once" for one in limits)
    is_in_flight = "in flight" in forecast.reason
    window = max((one.seconds for one in limits if one.kind == "calendar"), default=0.0)
    late = max(ANSWERED if hangs or is_in_flight else LATE, *(one.seconds for one in tallied), 0.0)
    return EARLY + (window if is_in_flight else 0.0), late + window


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
