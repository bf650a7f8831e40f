"""The simulated broker: loses, repeats, delays, reorders and refuses messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.simulation.doors import Doors
from tests.simulation.scheduler import MICRO
from tests.simulation.simulated import Waiters


@dataclass
class Message:
    """Attempts to make. `ends`: when the broker drops it (microseconds of true time)."""

    ids: tuple[int, ...]
    ends: float


class Broker:
    """One queue for all workers."""

    def __init__(self, doors: Doors, trouble: float) -> None:
        self.doors, self.trouble = doors, trouble
        self.messages: list[Message] = []
        self.away_until = self.forgets_until = 0
        self._waiters = Waiters(doors)

    def send(self, task: Any, args: Any, kwargs: Any = None, **how: Any) -> None:
        """What `callqueue.broker.send` does."""
        scheduler = self.doors.scheduler
        draw = scheduler.stream("broker")
        scheduler.sleep(draw.uniform(0.0005, 0.003))
        odds = draw.random(), draw.random(), draw.random()
        delay = draw.expovariate(1 / 0.004) if odds[1] > self.trouble else draw.uniform(0.1, 3.0)
        if scheduler.now < self.away_until:
            scheduler.tell("the broker refuses a message")
            raise ConnectionError("the broker is away")
        ids = tuple(args[0])
        if odds[0] < self.trouble / 2 or scheduler.now < self.forgets_until:
            scheduler.tell(f"message {ids} is lost")
            return
        lasts = how.get("lasts")
        ends = float("inf") if lasts is None else scheduler.now + lasts * MICRO
        self._deliver(Message(ids, ends), delay)
        if odds[2] < self.trouble / 2:
            scheduler.tell(f"message {ids} comes twice")
            later = draw.choice([0.0, 0.02, 0.1, draw.uniform(0, 2.5)])
            self._deliver(Message(ids, ends), delay + later)
        if odds[0] > 1 - self.trouble / 4:
            scheduler.tell(f"message {ids} is sent, and said not to be")
            raise ConnectionError("no confirmation came")

    def _deliver(self, message: Message, delay: float) -> None:
        def arrive() -> None:
            self.messages.append(message)
            self._waiters.wake()

        self.doors.scheduler.later(delay, arrive)

    def give_back(self, message: Message) -> None:
        """Its worker died: another gets it."""
        self._deliver(message, 0.05)

    def take(self) -> Message:
        """The next message, whenever there is one; not always the oldest."""
        scheduler = self.doors.scheduler
        while True:
            self._waiters.wait_until(lambda: bool(self.messages), None)
            draw = scheduler.stream("broker")
            is_jumped = len(self.messages) > 1 and draw.random() < self.trouble
            message = self.messages.pop(draw.randrange(len(self.messages)) if is_jumped else 0)
            if message.ends > scheduler.now:
                return message
