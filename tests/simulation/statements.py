"""What happens at each statement of a run: how long it takes, what befalls its process there, and
what the judge is told of it.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simulation.doors import START_US
from tests.simulation.scheduler import MICRO, Process, Task

if TYPE_CHECKING:
    from tests.simulation.world import World

LONGEST = 2.0  # seconds that a statement takes at most
WAITED = round(0.25 * MICRO)  # for which a row may be waited for
BUSY = 40  # passes that a process makes within a second at most
LAGS = (0.004, 0.01, 0.03, 0.1, 0.3)
ASTRAY = (
    "SELECT a.id, c.id, c.status FROM callqueue_callattempt a JOIN callqueue_callqueue c "
    "ON c.id = a.call_id WHERE a.finished_at IS NULL "
    "AND NOT (c.status = 1 AND c.last_attempt = a.number) ORDER BY a.id"
)
ANSWERED = (
    "SELECT id FROM callqueue_callattempt WHERE finished_at IS NOT NULL "
    "AND outcome NOT IN ('', 'lost', 'voided')"
)
# where in the product a process may be hit: the beginning of a module and function
PLACES = (
    "", "", "dispatch.", "dispatch.release_pass", "execution.claim", "execution.recorder",
    "transitions.verbs", "execution.telling", "permits.", "maintenance.recovery", "ledger.",
)  # fmt: skip


class Doom:
    """What befalls a process at one of its next steps."""

    def __init__(
        self, steps: int, kind: str, given: Any, place: str, *, commits: bool = False
    ) -> None:
        self.steps, self.kind, self.given, self.place = steps, kind, given, place
        self.commits = commits  # just before or just after the commit of what is judged

    def strikes(self, one: Statement) -> bool:
        """Whether it counts this statement, and has come to its last."""
        if one.commits if self.commits else one.place.startswith(self.place):
            self.steps -= 1
            return self.steps <= 0
        return False


class Statement(NamedTuple):
    """Where it comes from in the product, and its text. `commits`: releases, ends or holds."""

    place: str
    text: str
    commits: bool = False

    def __str__(self) -> str:
        who = f"{self.place}: " if self.place else ""
        number = zlib.crc32(self.text.encode()) & 0xFFFF
        return f"{who}{' '.join(self.text.split())[:90]} #{number:04x}"


class Statements:
    """The door of a run through which every statement goes."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler = world, world.scheduler
        self.count = 0
        draw = self.scheduler.stream("scene")
        self._slow = draw.choice([0.02, 0.05, 0.15])  # how often a statement takes its time
        self._began: dict[Any, int] = {}  # by connection, when its transaction began
        self._inserted: set[Any] = set()  # connections whose transactions have released something
        self._holding: set[Any] = set()  # and those that have laid a hold
        self._asked: dict[Task, int] = {}  # when its last statement began
        self._passes = Counter[tuple[Process, int]]()
        self._locked: dict[Process, int] = {}  # when it last began a pass
        self._read_open: dict[Process, int] = {}  # when it last asked what is open
        self._ended_at = -1  # when an end was committed last
        self._ending: set[Any] = set()  # and those that have ended attempts

    def connect(self) -> None:
        """From now on statements are told here."""
        world, scheduler = self.world, self.scheduler
        database, server = world.stage.database, world.stage.server
        database.wrappers.clear()
        database.before, database.after = self._before, self._after
        scheduler.before_death = server.abandon
        scheduler.on_death = database.part
        scheduler.on_error = world.fell
        server.on_waited = self._waited
        scheduler.after_step = server.wake_freed

    def _before(self, task: Task, text: str, wrapper: Any) -> None:
        scheduler = self.scheduler
        self.count += 1
        one = self._statement(text, wrapper)
        self._befall(task, wrapper, one)
        draw = scheduler.stream("pace")
        scheduler.sleep(min(LONGEST, self._lag(draw) * task.process.slowness))
        scheduler.tell(str(one))
        self._note_count(task.process, one)
        if wrapper.in_atomic_block and wrapper not in self._began:
            self._began[wrapper] = scheduler.now
        if text.startswith("INSERT INTO") and "callattempt" in text[:60]:
            self._inserted.add(wrapper)
        is_settled = text.startswith("UPDATE") and "callattempt" in text and '"cost" =' in text
        if is_settled or ("finished_at" in text and text.startswith(("UPDATE", "WITH"))):
            self._ending.add(wrapper)
        is_of_time = one.place.startswith("ledger.ledger_time.")  # it lays none
        if "callqueue_hold" in text and text.startswith(("INSERT", "UPDATE")) and not is_of_time:
            self._holding.add(wrapper)
        self._asked[task] = scheduler.now

    def _after(self, task: Task, text: str, wrapper: Any) -> None:
        if self.scheduler.now - self._asked.get(task, self.scheduler.now) > WAITED:
            self.world.judge.hampered.add(task.process)  # by whoever had its row
        one = self._statement(text, wrapper)
        if text in ("COMMIT", "ROLLBACK") or not wrapper.in_atomic_block:
            self._note_end(task.process, wrapper, is_undone=text == "ROLLBACK")
        draw = self.scheduler.stream("pace")
        if text != "ROLLBACK":
            self._befall(task, wrapper, one)
        # To some processes answers take long: by then what they read of the clock is old.
        if draw.random() < 0.2 or task.process.slowness > 1:
            self.scheduler.sleep(min(LONGEST, self._lag(draw) * task.process.slowness))

    def _note_count(self, process: Process, one: Statement) -> None:
        """A pass that counts: who makes one after the other finds no more room; what ends between its
        two readings is in both; and of what ends before them, but after its first statement, it does
        not know that it gave something back.
        """
        judge, now = self.world.judge, self.scheduler.now
        if one.place == "dispatch.release_pass._lock":
            self._locked[process] = now
        elif one.place.startswith("ledger.account.") and "MIN(released_at)" in one.text:
            self._read_open[process] = now
            if self._ended_at >= self._locked.get(process, now):
                judge.unseen.append(now)
        elif one.place == "ledger.account.aged_since":
            if self._ended_at >= self._read_open.get(process, now):
                judge.counted_twice.append(now)
        elif one.place == "ledger.holds.in_force":
            self._passes[process, now // MICRO] += 1
            if self._passes[process, now // MICRO] == BUSY:
                judge.complain(f"{process.name} makes {BUSY} passes in a second")

    def _statement(self, text: str, wrapper: Any) -> Statement:
        judged = (self._inserted, self._ending, self._holding)
        commits = text == "COMMIT" and any(wrapper in noted for noted in judged)
        return Statement(_place(), text, commits)

    def _longest_hold(self) -> int:
        """Until when any lasts, in microseconds of the run."""
        server, begin = self.world.stage.server, START_US + self.world.judge.calendar
        found = server.ask("SELECT until FROM callqueue_hold WHERE until IS NOT NULL")
        return max((server.instant(until) - begin for (until,) in found), default=0)

    def _note_end(self, process: Process, wrapper: Any, is_undone: bool) -> None:
        world, now = self.world, self.scheduler.now
        began = self._began.pop(wrapper, now)
        has_inserted, has_held = wrapper in self._inserted, wrapper in self._holding
        has_ended = wrapper in self._ending
        for noted in (self._inserted, self._holding, self._ending):
            noted.discard(wrapper)
        if has_inserted and not is_undone:
            found = world.stage.server.ask(
                'SELECT id, call_id, rule, queue, "key" FROM callqueue_callattempt ORDER BY id'
            )
            # Not all that are newer than the newest: of two transactions the second may commit
            # first.
            rows = [row for row in found if row[0] not in world.judge.releases]
            world.judge.note(rows, process, began, now)
        if (has_inserted or has_ended) and not is_undone:
            self._judge_open()
        if has_ended and not is_undone:
            self._ended_at = now
            world.judge.is_belated |= now - began > MICRO // 2
        if has_ended and not is_undone and world.scene.overspends:
            ended = "SELECT id, cost FROM callqueue_callattempt WHERE finished_at IS NOT NULL"
            found = world.stage.server.ask(ended)
            world.judge.note_ends([(pk, _tokens(cost)) for pk, cost in found], now)
        if has_held and not is_undone:
            world.judge.note_holds(world.provider.requests, process, now, self._longest_hold())
        if has_ended and any(one.wants_rest for one in world.provider.requests):
            found = world.stage.server.ask(ANSWERED)
            world.judge.note_rests(world.provider.requests, {pk for (pk,) in found})

    def _judge_open(self) -> None:
        """Whose attempt is open is out, with this attempt: so it has one of them."""
        if not self.world.judge.complaints:
            for pk, call, status in self.world.stage.server.ask(ASTRAY):
                text = f"attempt {pk} is open, and its call {call} has gone on (status {status})"
                self.world.judge.complain(text)

    def _lag(self, draw: Any) -> float:
        """Seconds that pass before or after a statement."""
        if self.world.is_calm or draw.random() > self._slow:
            return float(draw.uniform(0.0002, 0.0015))
        return float(draw.choice(LAGS))

    def _befall(self, task: Task, wrapper: Any, one: Statement) -> None:
        """What was to happen to the process at one of its next steps."""
        process = task.process
        for doom in list(process.doom):
            if doom not in process.doom or not doom.strikes(one):
                continue
            process.doom.remove(doom)
            self.world.judge.hampered.add(process)
            self.scheduler.tell(f"{doom.kind} {doom.given or ''}", process.name)
            if doom.kind == "kill":
                self.world.cast.die(process)
            elif doom.kind == "freeze":
                process.thawed_at = self.scheduler.now + round(doom.given * MICRO)
                self.scheduler.sleep(0)
            else:
                self.world.stage.database.cut(wrapper)

    def _waited(self, task: Task, seconds: float, ahead: list[Process]) -> None:
        """Nobody but hosts and operators waits for hosts. (Operators hold no row for long.)"""
        hosts = [process.name for process in ahead if process.name.startswith("host")]
        if task.process.kind != "host" and hosts and seconds > WAITED / MICRO:
            text = f"{task.name} waited {seconds:.2f} s for a row that {hosts} held"
            self.world.judge.complain(text)


def _tokens(cost: Any) -> int:
    cost = json.loads(cost) if isinstance(cost, str | bytes) else cost
    return int(cost.get("tokens", 0)) if isinstance(cost, dict) else 0


def _place() -> str:
    """The module and function of the product that makes the statement."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("callqueue.") and not name.startswith("callqueue.database"):
            return f"{name.removeprefix('callqueue.')}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""
