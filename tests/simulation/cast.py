"""The processes of a run: dispensers, workers, makers (`callqueue_run`), beats, those who take
permits, and whoever does one thing for the application. They begin, die, and begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.scheduler import Process
from tests.simulation.statements import Doom

if TYPE_CHECKING:
    from tests.simulation.world import World

RELEASING = ("dispenser", "maker")
ROOMS = (1, 1, 2, 3, 32)  # calls that a maker has in flight at most
RECOVERS = 1.3  # seconds between two rounds of a beat's recovery


class Cast:
    """Who takes part in a run."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler = world, world.scheduler
        self._count = 0

    def enter(self) -> None:
        """Those with whom a run begins."""
        draw, length = self.scheduler.stream("cast"), self.world.length
        own = self.scheduler.stream("makers")
        makers = own.choice(length.makers)
        for number in range(makers):
            self.start("maker", number > 0 and own.random() < 0.5, own.choice([1, 1, 5]))
        if makers and own.random() < 0.5:
            return  # alone
        for number in range(draw.choice(length.dispensers)):
            # what a deploy has half done
            is_other = number > 0 and draw.random() < 0.5
            self.start("dispenser", is_other, slowness=draw.choice([1, 1, 5]))
        for _ in range(draw.choice(length.workers)):
            self.start("worker", slowness=draw.choice([1, 1, 5, 30]))
        if draw.random() < 0.4:
            self.start("beat")

    def start(self, kind: str, is_other: bool = False, slowness: float = 1.0) -> Process:
        """One more process of this kind."""
        judge, scene = self.world.judge, self.world.scene
        process = self._made(kind, kind, is_other)
        process.slowness = slowness
        if slowness > 1:
            judge.hampered.add(process)
        rules = scene.other if is_other else scene.rules
        if kind in RELEASING:
            judge.settings[process] = rules
            if kind == "maker":
                room = self.scheduler.stream("rooms").choice(ROOMS)
                process.config = replace(process.config, calls_per_slot=room)
            self._start(process, self._release)
        elif kind == "worker":
            for _ in range(self.scheduler.stream("scene").choice([1, 2])):
                self._start(process, self._work)
        elif kind == "beat":
            self._start(process, self._beat)
        elif kind == "asker":
            judge.own[process] = rules
        return process

    def act(
        self, name: str, after: float, work: Callable[[], None], is_other: bool = False
    ) -> None:
        """A process for one thing that somebody does."""
        process = self._made(name, "host", is_other)
        process.ahead = 77.0

        def do() -> None:
            work()
            process.is_dead = True

        self.scheduler.start(process, process.name, do, after)

    def _made(self, name: str, kind: str, is_other: bool) -> Process:
        self._count += 1
        process = Process(f"{name}{self._count}", kind, ahead=1000.0 * self._count)
        process.config, process.is_other = self.world.configs[is_other], is_other
        process.messages, process.all_messages = [], []
        return process

    def _start(self, process: Process, work: Callable[[Process], None]) -> None:
        name = f"{process.name}" + (f".{len(process.tasks)}" if process.tasks else "")
        self.scheduler.start(process, name, lambda: work(process))

    def alive(self, kind: str) -> list[Process]:
        return [p for p in self.scheduler.processes if p.kind == kind and not p.is_dead]

    def serving(self, kind: str) -> list[Process]:
        """Those that are alive, and were not told to go."""
        return [p for p in self.alive(kind) if not _is_told_to_go(p)]

    def releasing(self) -> list[Process]:
        """Those that release, and were not told to go."""
        return [process for kind in RELEASING for process in self.serving(kind)]

    def lingering(self) -> list[Process]:
        """Those that were told to go, and are there still."""
        return [p for kind in RELEASING for p in self.alive(kind) if _is_told_to_go(p)]

    def room(self) -> int | None:
        """For how many calls there is room at once, where makers are alone; None: for all."""
        makers = self.serving("maker")
        if self.serving("dispenser") or not makers:
            return None
        return sum(process.config.calls_per_slot for process in makers)

    def asking(self) -> list[Process]:
        """Those that still want a permit, or have one."""
        return [p for p in self.alive("asker") if any(not task.is_over for task in p.tasks)]

    def victims(self) -> list[Process]:
        """Those that something may befall."""
        return [p for p in self.scheduler.processes if not p.is_dead and p.kind != "host"]

    # --- What they do

    def _release(self, process: Process) -> None:
        """What `callqueue_dispenser` does, and `callqueue_run`."""
        from callqueue import maker
        from callqueue.dispatch import dispenser

        process.stop = dispenser.threading.Event()
        own = maker.Maker("default") if process.kind == "maker" else None
        if own is not None:
            own.concurrency = 1  # its room is CALLS_PER_SLOT then
        one = dispenser.Dispenser("default", name=process.name, maker=own)
        one.run(stop=process.stop)
        one.leave()
        self.world.judge.taken_leave.add(process)
        if own is not None:
            own.leave()
        self.world.judge.left[process] = self.scheduler.now
        process.is_dead = True

    def _work(self, process: Process) -> None:
        from callqueue import tasks

        task = tasks.make_api_call
        while True:
            message = self.world.broker.take()
            process.messages.append(message)
            process.all_messages.append(message)
            self.scheduler.tell(f"takes message {list(message.ids)}")
            task.push_request(id="m", called_directly=False, is_eager=False, timelimit=(None, None))
            try:
                task.run(list(message.ids))
            except Exception as error:
                self.world.fell(self.scheduler.alive(), error)
            finally:
                task.pop_request()
            process.messages.remove(message)

    def _beat(self, process: Process) -> None:
        from callqueue.maintenance import recovery

        while True:
            self.scheduler.sleep(RECOVERS)
            with cuts_allowed():
                recovery.recover("default")

    def ask(self, draw: Any) -> None:
        """A process that takes a permit, or several, one after the other."""
        from tests.simulation import permits

        process = self.start("asker", draw.random() < 0.3)
        if draw.random() < 0.3:  # at any of its statements
            what, place = draw.choice(["kill", "kill", "freeze"]), draw.choice(["", "permits."])
            steps = draw.randint(1, 40 if place else 60)
            process.doom.append(Doom(steps, what, draw.choice([0.3, 1.0, 2.2]), place))
        after, count = draw.uniform(0, self.world.length.troubled), draw.choice([1, 1, 2, 3])

        def work() -> None:
            for _ in range(count):
                permits.take(self.world, process, draw)
            process.is_dead = True

        self.scheduler.start(process, process.name, work, after)

    # --- Death

    def die(self, process: Process) -> None:
        """It is gone, and what it had in hand goes to others; another one begins soon."""
        world = self.world
        world.judge.killed.add(process)
        for request in world.provider.requests:
            if request.process is process and request.told_at is None:
                request.died_at = self.scheduler.now
        for message in process.messages:
            world.broker.give_back(message)
        process.messages = []
        after = self.scheduler.stream("restarts").uniform(0.05, 1.0)
        self.scheduler.later(after, lambda: self._restart(process))
        try:
            self.scheduler.kill(process)
        finally:
            world.stage.database.bury(process)

    def _restart(self, process: Process) -> None:
        if process.kind != "asker":
            self.start(process.kind, process.is_other)


def _is_told_to_go(process: Process) -> bool:
    return hasattr(process, "stop") and process.stop.is_set()


@contextmanager
def cuts_allowed() -> Iterator[None]:
    """A lost connection is what a host, an operator or a chore expects."""
    from django.db import DatabaseError, InterfaceError, connections

    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        if "closed" not in str(error):
            raise
        connections["default"].close()
