"""Decides which task makes its next step, and when: a clock that nobody waits for, and greenlets.

In: a seed. A task runs until it comes to a door (a statement, a sleep, a lock, a socket), says
there until when it waits, and gives the turn back. Out: the same order of steps for the same seed.
It knows nothing of databases, and nothing of the product. Instants are whole microseconds of true
time, which begin at 0; seconds are floats.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import greenlet

MICRO = 1_000_000


class Killed(BaseException):
    """The task's process is dead: nothing that it still does may touch the world."""


class Stuck(Exception):
    """A run that made more steps than it may."""


class Step(NamedTuple):
    """One line of a story: when, who, and what it did."""

    at: int
    who: str
    what: str


class Process:
    """A simulated process: its tasks, its own monotonic clock, and what befalls it."""

    def __init__(self, name: str, kind: str, ahead: float = 0.0) -> None:
        self.name, self.kind, self.ahead = name, kind, ahead
        self.tasks: list[Task] = []
        self.is_dead = False
        self.thawed_at = 0  # until then none of its tasks has a turn
        self.doom: list[Any] = []  # what befalls it at one of its next steps
        self.memory: dict[Any, Any] = {}  # its modules' globals, see doors.py
        self.slowness = 1.0
        self.config: Any = None


class Task:
    """One thread of a process."""

    def __init__(self, process: Process, name: str, work: Callable[[], Any]) -> None:
        self.process, self.name, self.work = process, name, work
        self.greenlet: Any = None
        self.turn = 0  # which entry of the agenda is its own
        self.has_timed_out = False
        self.is_over = False
        self.locals: dict[int, dict[str, Any]] = {}
        self.on_end: list[Callable[[], None]] = []
        self.state: Any = None  # what the database's door keeps of it


def stream_of(seed: int, name: str) -> random.Random:
    """The numbers that a seed has for one purpose."""
    return random.Random(f"{seed}:{name}")


class Scheduler:
    """The agenda of one run."""

    def __init__(self, seed: int, most_steps: int = 30_000) -> None:
        self.seed, self.most_steps = seed, most_steps
        self.now = 0
        self.steps = 0
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.story: list[Step] = []
        self.digest = 0
        self.enter_process: Callable[[Process], None] = lambda process: None
        self.before_death: Callable[[Task], None] = lambda task: None
        self.on_death: Callable[[Task], None] = lambda task: None
        self.on_error: Callable[[Task, BaseException], None] = lambda task, error: None
        self.after_step: Callable[[], None] = lambda: None
        # (when, drawn to order what is at once, number, what, its turn, whether it timed out)
        self._agenda: list[tuple[int, float, int, Any, int, bool]] = []
        self._numbers = count()
        self._streams: dict[str, random.Random] = {}
        self._ties = self.stream("ties")
        self._hub = greenlet.getcurrent()
        self._entered: Process | None = None

    def stream(self, name: str) -> random.Random:
        """The numbers drawn for one purpose: what is drawn for another does not change them."""
        if name not in self._streams:
            self._streams[name] = stream_of(self.seed, name)
        return self._streams[name]

    def tell(self, what: str, who: str = "") -> None:
        """Write a line of the story."""
        who = who or (self.current.name if self.current else "world")
        step = Step(self.now, who, what)
        self.digest = zlib.crc32(repr(step).encode(), self.digest)
        self.story.append(step)

    # --- What happens when

    def start(
        self, process: Process, name: str, work: Callable[[], Any], after: float = 0.0
    ) -> Task:
        """A task more, which begins after so many seconds."""
        task = Task(process, name, work)
        task.greenlet = greenlet.greenlet(lambda: self._live(task), parent=self._hub)
        process.tasks.append(task)
        if process not in self.processes:
            self.processes.append(process)
        self._wake_at(task, self.now + round(after * MICRO))
        return task

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Something that the world does by itself, in the hub: it may not wait."""
        self._put(self.now + round(seconds * MICRO), do)

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let things happen until an instant (seconds), or until `is_over` says so."""
        end = round(until * MICRO)
        while self._agenda and self._agenda[0][0] <= end:
            if is_over():
                return
            at, _, _, item, turn, is_late = heapq.heappop(self._agenda)
            self.now = max(self.now, at)
            if not isinstance(item, Task):
                item()
                self.after_step()
            elif item.turn == turn and not item.is_over:
                if item.process.thawed_at > self.now:
                    self._put(item.process.thawed_at, item, turn, is_late)
                    continue
                item.has_timed_out = is_late
                self._give_turn(item)
        self.now = max(self.now, end)

    def _give_turn(self, task: Task) -> None:
        self.steps += 1
        if self.steps > self.most_steps:
            raise Stuck(f"more than {self.most_steps} steps; {task.name} has the turn")
        if self._entered is not task.process:
            self._entered = task.process
            self.enter_process(task.process)
        self.current = task
        try:
            task.greenlet.switch()
        finally:
            self.current = None
        self.after_step()

    def _live(self, task: Task) -> None:
        try:
            task.work()
        except (Killed, greenlet.GreenletExit):
            pass
        except BaseException as error:
            if not task.process.is_dead:
                self.on_error(task, error)
        finally:
            task.is_over = True
            self.on_death(task)
            for tell in task.on_end:
                tell()

    def _wake_at(self, task: Task, instant: int, *, is_late: bool = True) -> None:
        task.turn += 1
        self._put(instant, task, task.turn, is_late)

    def _put(self, instant: int, what: Any, turn: int = 0, is_late: bool = False) -> None:
        entry = (instant, self._ties.random(), next(self._numbers), what, turn, is_late)
        heapq.heappush(self._agenda, entry)

    # --- Doors, through which tasks wait

    def sleep(self, seconds: float) -> None:
        """The current task has its next turn after so many seconds."""
        task = self.alive()
        # Rounded up: who sleeps for what is left, however little, finds that nothing is left.
        self._wake_at(task, self.now + (math.ceil(seconds * MICRO) + 1 if seconds > 0 else 0))
        self._hub.switch()
        self.alive()

    def wait(self, seconds: float | None) -> bool:
        """The current task waits until it is woken; False where nobody did within so long."""
        task = self.alive()
        task.turn += 1
        task.has_timed_out = False
        if seconds is not None and seconds < 1e9:
            self._wake_at(task, self.now + max(0, round(seconds * MICRO)))
        self._hub.switch()
        self.alive()
        return not task.has_timed_out

    def wake(self, task: Task) -> None:
        """End another task's wait."""
        if not task.is_over:
            self._wake_at(task, self.now, is_late=False)

    def alive(self) -> Task:
        """The current task; Killed where its process is dead."""
        task = self.current
        assert task is not None, "a door was used outside a task"
        if task.process.is_dead:
            raise Killed
        return task

    # --- Ends

    def kill(self, process: Process) -> None:
        """The process is gone between two steps: nothing of it runs, not even what cleans up."""
        if process.is_dead:
            return
        process.is_dead = True
        own = self.current
        for task in process.tasks:
            self.before_death(task)
        for task in process.tasks:
            if not task.is_over and task is not own:
                self._unwind(task)
        for task in process.tasks:
            self.on_death(task)
        if own is not None and own.process is process:
            raise Killed

    def _unwind(self, task: Task) -> None:
        if not task.greenlet:  # it never began
            task.is_over = True
            return
        before, self.current = self.current, task
        # The unwinding greenlet comes back here when it ends.
        task.greenlet.parent = greenlet.getcurrent()
        try:
            task.greenlet.throw(Killed)
        finally:
            self.current = before
        assert task.is_over or task.greenlet.dead, f"{task.name} outlives its process"

    def end(self) -> None:
        """Kill whoever still lives."""
        for process in self.processes:
            self.kill(process)
