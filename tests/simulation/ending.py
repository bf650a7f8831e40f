"""The end of a run: nothing goes wrong any more, every call has to end, and then all is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.judged_fates import Ended
from tests.simulation.provider import CALM
from tests.simulation.scheduler import MICRO

if TYPE_CHECKING:
    from tests.simulation.world import World

# Errors that no provider, network or database brings about, as attempts are told to have ended by.
SLIPS = ("AttributeError", "TypeError", "NameError", "KeyError", "IndexError", "AssertionError")
RESUMED = (0.5, 2.0, 5.0)  # seconds: a pause may have waited for a pass that was frozen


class Ending:
    """How a run ends."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler = world, world.scheduler
        self._from = self._look_at = 0
        self._is_quiet = False

    def calm_down(self) -> None:
        """From now on nothing goes wrong any more."""
        world, scheduler = self.world, self.scheduler
        scheduler.tell("calm", "world")
        world.is_calm = True
        world.broker.trouble, world.broker.away_until = 0.0, 0
        world.provider.mood, world.provider.is_refusing = CALM, False
        for process in scheduler.processes:
            process.doom.clear()
            process.slowness = 1.0
            process.thawed_at = min(process.thawed_at, scheduler.now)
        if not world.cast.releasing():
            world.cast.start("dispenser")
        if world.cast.serving("dispenser") and not world.cast.serving("worker"):
            world.cast.start("worker")
        if any(one.kind == "pause" for one in world.misfortunes):
            for after in RESUMED:
                world.cast.act("operator", after, self._resume)
        self._from = scheduler.now

    def _resume(self) -> None:
        from callqueue import control

        self.world.judge.holds.clear()
        for rule in self.world.scene.rules:
            control.resume("default", rule)

    def look_again(self) -> None:
        """More was sent: what was seen of the calls before says nothing."""
        self._look_at = 0

    def is_done(self) -> bool:
        """Whether every call has ended. Asked now and then."""
        if self.world.judge.complaints:
            return True
        if self.scheduler.now < self._look_at:
            return self._is_quiet
        self._look_at = self.scheduler.now + MICRO // 8
        if self.scheduler.now < self._from + round(self.world.length.quiet * MICRO):
            return False
        ask = self.world.stage.server.ask
        left = ask("SELECT COUNT(*) FROM callqueue_callqueue WHERE status IN (0, 1, 2)")
        # What was granted to somebody who died before he knew is charged for a while, and so is an
        # attempt whose call was deleted.
        loose = ask("SELECT COUNT(*) FROM callqueue_callattempt WHERE finished_at IS NULL")
        cast = self.world.cast
        self._is_quiet = not (left[0][0] or loose[0][0] or cast.asking() or cast.lingering())
        return self._is_quiet

    def judge(self) -> None:
        """Let the judge see everything."""
        world, server, judge = self.world, self.world.stage.server, self.world.judge
        columns = "id, call_id, error_message, outcome, started_at, send_at, sent_at, finished_at"
        found = server.ask(f"SELECT {columns} FROM callqueue_callattempt ORDER BY id")
        ahead = world.stage.doors.shown() - self.scheduler.now
        attempts = {
            pk: Ended(call, why, outcome, *(at and server.instant(at) - ahead for at in instants))
            for pk, call, why, outcome, *instants in found
        }
        rows = server.ask("SELECT id, status, error_message, due_at_dt FROM callqueue_callqueue")
        shown = world.stage.doors.shown()
        calls = {pk: (status, why, server.instant(due) > shown) for pk, status, why, due in rows}
        judge.judge(world.provider.requests, attempts, calls)
        for pk, one in attempts.items():
            if one.why.startswith(SLIPS):
                judge.complain(f"attempt {pk} ended by a slip of the code: {one.why}")
        for process in world.cast.asking():
            judge.complain(f"{process.name} waits for its permit for ever")
        for process in world.cast.lingering():
            judge.complain(f"{process.name} was told to go, and does not")
        loose = [pk for pk, one in attempts.items() if not one.outcome]
        if loose and not judge.complaints:
            judge.complain(f"attempts {loose} stay open")
