"""One run: processes with the product in them, what befalls them, and what is asked at the end.

In: a seed, and which of the misfortunes that it draws to leave out. Out: a `Run`: the judge's
complaints, the story, and its digest.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tests.simulation import settings_of_runs
from tests.simulation.broker import Broker
from tests.simulation.doors import START, Doors, OnDatabase
from tests.simulation.oracle import FINAL, Judge, Rate
from tests.simulation.provider import CALM, Mood, Provider, Request, Wire
from tests.simulation.scheduler import MICRO, Killed, Process, Scheduler, Step, Stuck, Task
from tests.simulation.settings_of_runs import CallOf, Rules, callqueue_settings

TROUBLED = 3.5  # seconds in which misfortunes happen
PATIENCE = 45.0  # seconds after them within which every call must have ended
LONGEST = 2.0  # seconds that a statement takes at most
KINDS = (
    "kill", "freeze", "cut", "jump", "refuse", "broker", "hold", "cancel", "delete", "pause",
    "rate", "deploy", "requeue", "clean", "stall",
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


@dataclass
class Run:
    """What came of a seed."""

    seed: int
    scene: str = ""
    complaints: list[str] = field(default_factory=list)
    misfortunes: list[Misfortune] = field(default_factory=list)
    story: list[Step] = field(default_factory=list)
    digest: int = 0
    statements: int = 0
    requests: int = 0
    seconds: float = 0.0


class Stage:
    """What all runs of this Python process share: the doors, and the database."""

    def __init__(self, server: Any) -> None:
        self.server, self.doors = server, Doors()
        self.database = OnDatabase(self.doors, server)
        self.wire = Wire(self.doors)
        self.doors.install()
        self.wire.install()
        self.database.install()
        self._configs: dict[int, Any] = {}
        self.broker: Broker = None  # type: ignore[assignment]
        self._install_broker()

    def _install_broker(self) -> None:
        from callqueue import broker, database

        broker.send = lambda *given, **how: self.broker.send(*given, **how)
        broker.send_by_name = lambda *given, **how: self.broker.callbacks.append(given)
        # as behind a pooler, where nobody can listen: a dispenser looks by itself then
        database.start_listening = lambda using: False

    def config(self, rules: Rules) -> Any:
        """The settings as a process has them that was started with these rules."""
        from django.conf import settings

        from callqueue import conf

        settings.CALLQUEUE = callqueue_settings(rules)
        config, wrong = conf._read()
        assert not wrong, wrong
        return config


class World:
    """One run."""

    def __init__(
        self, stage: Stage, seed: int, leave_out: Collection[int] = (), calls: int | None = None
    ) -> None:
        self.stage, self.seed, self.leave_out = stage, seed, frozenset(leave_out)
        self.scheduler = scheduler = Scheduler(seed)
        stage.doors.begin(scheduler)
        draw = scheduler.stream("scene")
        self.scene = settings_of_runs.drawn(draw)
        self.most_calls = calls
        self.judge = Judge()
        self.tokens = 0
        self.is_calm = False
        self.statements = 0
        self.trouble = draw.choice([0.0, 0.1, 0.3])
        self.slow = draw.choice([0.02, 0.05, 0.15])  # how often a statement takes its time
        self.broker = stage.broker = Broker(stage.doors, self.trouble)
        self.provider = stage.wire.provider = Provider(stage.doors, self._mood(draw))
        self.provider.transit_of = self._transit_of
        self.provider.on_count = self._find_attempt
        self.configs = {False: stage.config(self.scene.rules), True: stage.config(self.scene.other)}
        self.misfortunes = self._drawn_misfortunes(scheduler.stream("misfortunes"))
        if self.scene.name == "day":
            stage.doors.clock_set = 55 * MICRO + round(draw.uniform(0, 3) * MICRO)
            self.judge.calendar = stage.doors.clock_set
        self._connect_hooks()
        self.count = 0

    def _waited(self, task: Task, seconds: float, ahead: list[Process]) -> None:
        """Nobody but hosts and operators waits for hosts. (Operators hold no row for long.)"""
        hosts = [process.name for process in ahead if process.name.startswith("host")]
        if task.process.kind != "host" and hosts and seconds > 0.25:
            self.judge.complain(f"{task.name} waited {seconds:.2f} s for a row that {hosts} held")

    def _mood(self, draw: Any) -> Mood:
        return draw.choice(
            [
                Mood([("ok", 0.9), ("error", 0.1)]),
                Mood([("ok", 0.9), ("slow", 0.1)], latency=(0.003, 0.05)),
                Mood(
                    [("ok", 0.6), ("error", 0.1), ("busy", 0.1), ("away", 0.04), ("missing", 0.04),
                     ("silence", 0.06), ("reset", 0.03), ("odd", 0.03)]
                ),
                Mood([("ok", 0.6), ("busy", 0.2), ("busy2", 0.2)], latency=(0.1, 0.4)),
            ]
        )  # fmt: skip

    def _drawn_misfortunes(self, draw: Any) -> list[Misfortune]:
        count = draw.choice([0, 1, 2, 3, 4, 6, 9])
        kinds = draw.sample(KINDS, draw.randint(1, 5))  # few kinds, but several of each
        found = []
        for number in range(count):
            kind, at = draw.choice(kinds), draw.uniform(0.1, TROUBLED)
            own = self.scheduler.stream(f"misfortune {number}")
            found.append(Misfortune(number, kind, at, own))
        return [one for one in found if one.number not in self.leave_out]

    # --- What is told at the doors

    def _connect_hooks(self) -> None:
        scheduler, database = self.scheduler, self.stage.database
        database.wrappers.clear()
        database.before, database.after = self._before, self._after
        scheduler.before_death = self.stage.server.abandon
        scheduler.on_death = lambda task: database.part(task)
        scheduler.on_error = self._fell
        self.stage.server.on_waited = self._waited
        scheduler.after_step = self.stage.server.wake_freed

    def _before(self, task: Task, what: str, wrapper: Any) -> None:
        scheduler = self.scheduler
        self.statements += 1
        self._befall(task, wrapper)
        draw = scheduler.stream("pace")
        scheduler.sleep(min(LONGEST, self._lag(draw) * task.process.slowness))
        scheduler.tell(_short(what))
        if wrapper.in_atomic_block and wrapper not in self._began:
            self._began[wrapper] = scheduler.now
        if what.startswith("INSERT INTO") and "callattempt" in what[:60]:
            self._inserted.add(wrapper)
        if "callqueue_hold" in what and what.startswith(("INSERT", "UPDATE")):
            self._holding.add(wrapper)

    _began: dict[Any, int]
    _inserted: set[Any]  # connections whose transactions have released something
    _holding: set[Any]  # and those that have laid a hold

    def _after(self, task: Task, what: str, wrapper: Any) -> None:
        if what in ("COMMIT", "ROLLBACK") or not wrapper.in_atomic_block:
            began = self._began.pop(wrapper, self.scheduler.now)
            if wrapper in self._inserted:
                self._inserted.discard(wrapper)
                if what != "ROLLBACK":
                    self._note_releases(task.process, began)
            if wrapper in self._holding:
                self._holding.discard(wrapper)
                if what != "ROLLBACK":
                    self.judge.note_holds(self.provider.requests, task.process, self.scheduler.now)
        draw = self.scheduler.stream("pace")
        if what != "ROLLBACK":
            self._befall(task, wrapper)
        if draw.random() < 0.2:
            self.scheduler.sleep(self._lag(draw))

    def _lag(self, draw: Any) -> float:
        """Seconds that pass before or after a statement."""
        if self.is_calm or draw.random() > self.slow:
            return float(draw.uniform(0.0002, 0.0015))
        return float(draw.choice([0.004, 0.01, 0.03, 0.1, 0.3]))

    def _befall(self, task: Task, wrapper: Any) -> None:
        """What was to happen to the process at one of its next steps."""
        process = task.process
        for doom in list(process.doom):
            doom[0] -= 1
            if doom[0] > 0:
                continue
            process.doom.remove(doom)
            _, kind, given = doom
            self.scheduler.tell(f"{kind} {given or ''}", process.name)
            if kind == "kill":
                self._die(process)
            elif kind == "freeze":
                process.thawed_at = self.scheduler.now + round(given * MICRO)
                self.scheduler.sleep(0)
            else:
                self.stage.database.cut(wrapper)

    def _die(self, process: Process) -> None:
        for request in self.provider.requests:
            if request.process is process and request.told_at is None:
                request.died_at = self.scheduler.now
        for message in process.messages:
            self.broker.give_back(message)
        process.messages = []
        after = self.scheduler.stream("restarts").uniform(0.05, 1.0)
        self.scheduler.later(after, lambda: self._restart(process))
        try:
            self.scheduler.kill(process)
        finally:
            self.stage.database.bury(process)

    def _restart(self, process: Process) -> None:
        if process.kind != "asker":
            self.start(process.kind, process.is_other)

    def _note_releases(self, process: Process, began: int) -> None:
        found = self.stage.server.ask(
            "SELECT id, call_id, rule, queue FROM callqueue_callattempt ORDER BY id"
        )
        # Not all that are newer than the newest: of two transactions the second may commit first.
        rows = [row for row in found if row[0] not in self.judge.releases]
        self.judge.note(rows, process, began, self.scheduler.now)

    def _transit_of(self, token: str) -> float | None:
        rules = (self.scene.rules, self.scene.other)
        call = self.judge.calls[token]
        limits = [one for some in rules if call.rule in some for one in some[call.rule].limits]
        if limits and all(one.strict or one.kind == "once" for one in limits):
            return 0.4
        return 0.9 * settings_of_runs.JITTER

    def _find_attempt(self, request: Request) -> None:
        """Which attempt it is: one that its worker has a message of."""
        if request.attempt is not None:
            return  # a permit's
        call = self.judge.calls[request.token]
        ids = {pk for message in request.process.all_messages for pk in message.ids}
        own = [
            one.pk for one in self.judge.releases.values() if one.call == call.pk and one.pk in ids
        ]
        if not own:
            self.judge.complain(f"{request.token} was sent without an attempt")
            return
        request.attempt = max(own)

    def _fell(self, task: Task, error: BaseException) -> None:
        text = f"{task.name} failed: {type(error).__name__}: {str(error)[:300]}"
        self.scheduler.tell(text)
        if not self._is_expected(task, error):
            self.judge.complain(text + _where(error))

    def _is_expected(self, task: Task, error: BaseException) -> bool:
        """A database that was cut under it."""
        return self.was_cut and "closed the connection" in str(error)

    was_cut = False

    # --- Processes

    def start(self, kind: str, is_other: bool = False, slowness: float = 1.0) -> Process:
        """One more process of this kind."""
        self.count += 1
        process = Process(f"{kind}{self.count}", kind, ahead=1000.0 * self.count)
        process.config, process.is_other = self.configs[is_other], is_other
        process.slowness, process.messages, process.all_messages = slowness, [], []
        rules = self.scene.other if is_other else self.scene.rules
        if kind == "dispenser":
            self.judge.settings[process] = rules
            self._start(process, self._dispense)
        elif kind == "worker":
            for _ in range(self.scheduler.stream("scene").choice([1, 2])):
                self._start(process, self._work)
        elif kind == "beat":
            self._start(process, self._beat)
        elif kind == "asker":
            self.judge.own[process] = rules
        return process

    def _start(self, process: Process, work: Callable[[Process], None]) -> None:
        name = f"{process.name}" + (f".{len(process.tasks)}" if process.tasks else "")
        self.scheduler.start(process, name, lambda: work(process))

    def alive(self, kind: str) -> list[Process]:
        return [p for p in self.scheduler.processes if p.kind == kind and not p.is_dead]

    def serving(self, kind: str) -> list[Process]:
        """Those that are alive, and were not told to go."""
        return [p for p in self.alive(kind) if not (hasattr(p, "stop") and p.stop.is_set())]

    def _dispense(self, process: Process) -> None:
        from callqueue.dispatch import dispenser

        process.stop = dispenser.threading.Event()
        one = dispenser.Dispenser("default", name=process.name)
        one.run(stop=process.stop)
        one.leave()
        self.judge.left[process] = self.scheduler.now
        process.is_dead = True

    def _work(self, process: Process) -> None:
        from callqueue import tasks

        task = tasks.make_api_call
        while True:
            message = self.broker.take()
            process.messages.append(message)
            process.all_messages.append(message)
            self.scheduler.tell(f"takes message {list(message.ids)}")
            task.push_request(id="m", called_directly=False, is_eager=False, timelimit=(None, None))
            try:
                task.run(list(message.ids))
            except Exception as error:
                self._fell(self.scheduler.alive(), error)
            finally:
                task.pop_request()
            process.messages.remove(message)

    def _beat(self, process: Process) -> None:
        from callqueue.maintenance import recovery

        while True:
            self.scheduler.sleep(1.3)
            with self._cuts_allowed():
                recovery.recover("default")

    @contextlib.contextmanager
    def _cuts_allowed(self) -> Any:
        from django.db import DatabaseError, InterfaceError, connections

        try:
            yield
        except (DatabaseError, InterfaceError) as error:
            if "closed" not in str(error):
                raise
            connections["default"].close()

    # --- The application

    def some_process(self) -> Process:
        """A web process for one thing that somebody does."""
        self.count += 1
        process = Process(f"host{self.count}", "host", ahead=77.0)
        process.config, process.is_other, process.messages = self.configs[False], False, []
        process.all_messages = []
        return process

    def act(self, name: str, after: float, work: Callable[[], None]) -> None:
        process = self.some_process()

        def do() -> None:
            work()
            process.is_dead = True

        process.name = f"{name}{self.count}"
        self.scheduler.start(process, process.name, do, after)

    def send(self, draw: Any, count: int = 1, **fixed: Any) -> list[CallOf]:
        """Send calls in one transaction, which may be rolled back."""
        from django.db import transaction

        from callqueue.models import CallQueue

        made = []
        for _ in range(count):
            self.tokens += 1
            rule = fixed.get("rule") or draw.choice(sorted(self.scene.rules))
            key = fixed["key"] if "key" in fixed else draw.choice(self.scene.keys)
            cost = fixed["cost"] if "cost" in fixed else draw.choice(self.scene.costs)
            method = fixed.get("method") or draw.choice(["get", "post", "post"])
            may_repeat = self.scene.rules[rule].on_lost == "retry"
            call = CallOf(
                f"c{self.tokens}", rule, key, cost, method, self.scheduler.now,
                may_repeat=may_repeat,
            )  # fmt: skip
            self.judge.calls[call.token] = call
            made.append(call)
        is_undone = not fixed and draw.random() < 0.08
        priority = 0 if fixed else draw.choice([0, 0, 0, 5])
        expires = None if fixed else draw.choice([None] * 7 + [0.3, 1.0, 2.0])
        try:
            with transaction.atomic():
                for call in made:
                    data = {
                        "method": call.method,
                        "params": {"url": f"http://127.0.0.1/{call.token}"},
                    }
                    row = CallQueue.objects.send(
                        data, rule=call.rule, key=call.key, cost=call.cost, priority=priority,
                        expires_at=None if expires is None else self.later(expires),
                    )  # fmt: skip
                    assert row is not None
                    call.pk = row.pk
                if is_undone:
                    raise _Undone
        except _Undone:
            for call in made:
                call.pk = None
            return []
        for call in made:
            call.is_committed = True
            self.judge.by_pk[call.pk or 0] = call
        return made

    def later(self, seconds: float) -> Any:
        """What hosts' clocks show after so many seconds."""
        return START + timedelta(microseconds=self.scheduler.now, seconds=seconds)

    # --- The run

    def run(self) -> Run:
        run = Run(self.seed, self.scene.name, misfortunes=self.misfortunes)
        self._began, self._inserted, self._holding = {}, set(), set()
        self.stage.server.begin()
        rings = self.stage.server.rings
        try:
            with self._tallied():
                self._play()
        except Stuck as stuck:
            self.judge.complain(str(stuck))
        finally:
            self.is_calm = True
            self.scheduler.end()
            for process in list(self.stage.database.wrappers):
                self.stage.database.bury(process)
        if self.stage.server.rings > rings:
            self.judge.complain("a deadlock")
        self._judge()
        run.complaints = self.judge.complaints
        run.story, run.digest = self.scheduler.story, self.scheduler.digest
        run.statements, run.requests = self.statements, len(self.provider.requests)
        run.seconds = self.scheduler.now / MICRO
        return run

    @contextlib.contextmanager
    def _tallied(self) -> Any:
        """Small windows are tallied too, where the scene says so: what is large is the same."""
        from unittest.mock import patch

        from callqueue.ledger import window_tallies

        if not self.scene.is_tallied:
            yield
            return
        with patch.object(window_tallies, "COARSE", 1), patch.object(window_tallies, "ROOMY", 0):
            yield

    def _play(self) -> None:
        draw = self.scheduler.stream("cast")
        for _ in range(draw.choice([1, 2, 2, 3])):
            self.start("dispenser", slowness=draw.choice([1, 1, 5]))
        for _ in range(draw.choice([1, 2, 2])):
            self.start("worker", slowness=draw.choice([1, 1, 5]))
        if draw.random() < 0.4:
            self.start("beat")
        left = self.most_calls or draw.randint(*self.scene.calls)
        number = 0
        while left > 0:
            count = min(left, draw.choice([1, 1, 2, 4]))
            left -= count
            own = self.scheduler.stream(f"send {number}")
            at = own.choice([0.0, own.uniform(0, TROUBLED)])
            self.act("sender", at, lambda own=own, count=count: self._send(own, count))
            number += 1
        for number in range(draw.choice([0, 0, 1, 2, 4])):
            self._ask(self.scheduler.stream(f"permit {number}"))
        from tests.simulation.misfortunes import arrange

        for one in self.misfortunes:
            arrange(self, one)
        self.scheduler.run(TROUBLED)
        self._calm_down()
        end = TROUBLED + PATIENCE
        self.scheduler.run(end, self._is_done)
        if not self.judge.complaints and self._is_done():
            self._probe()

    def _ask(self, draw: Any) -> None:
        """A process that takes a permit, or several, one after the other."""
        from tests.simulation import permits

        process = self.start("asker")
        after, count = draw.uniform(0, TROUBLED), draw.choice([1, 1, 2, 3])

        def work() -> None:
            for _ in range(count):
                permits.take(self, process, draw)
            process.is_dead = True

        self.scheduler.start(process, process.name, work, after)

    def _send(self, own: Any, count: int) -> None:
        with self._cuts_allowed():
            self.send(own, count)

    def _calm_down(self) -> None:
        """From now on nothing goes wrong any more."""
        from callqueue.operations import control

        self.scheduler.tell("calm", "world")
        self.is_calm = True
        self.broker.trouble, self.broker.away_until = 0.0, 0
        self.provider.mood, self.provider.is_refusing = CALM, False
        for process in self.scheduler.processes:
            process.doom.clear()
            process.slowness = 1.0
            process.thawed_at = min(process.thawed_at, self.scheduler.now)
        for kind in ("dispenser", "worker"):
            if not self.serving(kind):
                self.start(kind)

        def resume() -> None:
            self.judge.holds.clear()
            for rule in self.scene.rules:
                control.resume("default", rule)

        for after in (0.5, 2.0, 5.0):  # a pause may have waited for a pass that was frozen
            self.act("operator", after, resume)
        self._calm_from = self.scheduler.now

    _calm_from = 0

    def _is_done(self) -> bool:
        """Whether every call has ended. Asked now and then."""
        if self.judge.complaints:
            return True
        if self.scheduler.now < self._look_at:
            return self._is_quiet
        self._look_at = self.scheduler.now + MICRO // 4
        if self.scheduler.now < self._calm_from + MICRO:
            return False
        left = self.stage.server.ask(
            "SELECT COUNT(*) FROM callqueue_callqueue WHERE status IN (0, 1, 2)"
        )
        askers = [p for p in self.alive("asker") if any(not task.is_over for task in p.tasks)]
        # What was granted to somebody who died before he knew is charged for a while.
        loose = self.stage.server.ask(
            "SELECT COUNT(*) FROM callqueue_callattempt "
            "WHERE finished_at IS NULL AND call_id IS NULL"
        )
        self._is_quiet = not left[0][0] and not askers and not loose[0][0]
        return self._is_quiet

    _look_at = 0
    _is_quiet = False

    def _probe(self) -> None:
        """After the longest window, everything is free: as many calls as the limits have room for
        must arrive at once.
        """
        from tests.simulation.probe import probe

        probe(self)

    def _judge(self) -> None:
        server, judge = self.stage.server, self.judge
        requests = self.provider.requests
        attempts = server.ask(
            "SELECT id, call_id, number, outcome FROM callqueue_callattempt ORDER BY id"
        )
        rows = server.ask("SELECT id, status, error_message, due_at_dt FROM callqueue_callqueue")
        shown = self.stage.doors.shown()
        calls = {pk: (status, why, server.instant(due) > shown) for pk, status, why, due in rows}
        judge.judge_limits(requests)
        judge.judge_fates(requests, attempts, calls)
        for process in self.alive("asker"):
            if any(not task.is_over for task in process.tasks):
                judge.complain(f"{process.name} waits for its permit for ever")
        loose = [one[0] for one in attempts if one[3] in ("", None)]
        if self._is_quiet and loose and not judge.complaints:
            judge.complain(f"all calls have ended, but attempts {loose} are open")


class _Undone(Exception):
    """The host rolls its transaction back."""


def _short(what: str) -> str:
    """A statement as a story tells it: who made it, and its first words."""
    frame = sys._getframe(2)
    who = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("callqueue.") and not name.startswith("callqueue.database"):
            who = f"{name.removeprefix('callqueue.')}.{frame.f_code.co_name}: "
            break
        frame = frame.f_back  # type: ignore[assignment]
    return f"{who}{' '.join(what.split())[:90]} #{zlib.crc32(what.encode()) & 0xFFFF:04x}"


def _where(error: BaseException) -> str:
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{f.name}:{f.lineno}" for f in frames if "/callqueue/" in f.filename]
    return f" ({' > '.join(own[-4:])})"


__all__ = ["FINAL", "Killed", "Rate", "Run", "Stage", "World", "timedelta"]
