"""Many processes watch a clock that is set at random: to none is a charge older than it is.

Only what they do to the database is a model here. A run is a seed; one that fails says all that
happened: `told` of its world.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from callqueue import clocks, events
from callqueue.clocks import Mono, Reading, Us
from callqueue.ledger import ledger_time
from callqueue.ledger.ledger_time import Watch
from callqueue.limits.kinds import SECOND

Process = Iterator[float]  # it does something, and says after how many seconds it goes on
ENDS = 140.0


@dataclass
class Charge:
    at: int  # ledger time, microseconds
    truly: float  # seconds


class World:
    def __init__(self, seed: int, apart: float, away: float, jumps: list[float]) -> None:
        """Jumps are `apart` seconds at least; processes but for one are away for up to `away`."""
        self.random, self.apart, self.away = random.Random(seed), apart, away
        self.by = jumps  # seconds
        self.time, self.set_by = 100.0, 10**15
        self.moved = self.agreements = self.agreed_at = 0
        self.charges: list[Charge] = []
        self.told: list[Any] = []
        self.early = 0  # the most that a charge was taken for older than it was, microseconds
        self._waiting: list[tuple[float, int, Process]] = []

    def run(self) -> None:
        self.begin(self.dispenser(ENDS, is_steady=True))
        for process in (self.dispenser(ENDS), self.births(), self.jumps()):
            self.begin(process)
        while self._waiting[0][0] < ENDS:
            self.time, _, process = heapq.heappop(self._waiting)
            self.begin(process)
            self.charges = [one for one in self.charges if self.time - one.truly < 100]

    def begin(self, process: Process) -> None:
        for seconds in process:
            heapq.heappush(self._waiting, (self.time + seconds, len(self.told), process))
            self.told.append((self.time, process.__name__, id(process)))  # type: ignore[attr-defined]
            return

    # --- what is in the database

    @property
    def at(self) -> int:
        return round(self.time * SECOND) + self.set_by - self.moved

    def read(self, using: str) -> Reading:
        seen = self.moved, self.agreements, Us(self.agreed_at)
        return Reading(Us(self.at), Mono(self.time), Mono(self.time + 0.0002), *seen)

    def set_back(self, using: str, reading: Reading, by: int) -> Reading:
        self.moved += by + 1
        self.told.append((self.time, "set back by", by + 1))
        return replace(reading, at=Us(reading.at - by - 1), moved=self.moved)

    def agree(self, using: str, reading: Reading) -> Reading:
        self.agreements, self.agreed_at = self.agreements + 1, reading.at
        self.told.append((self.time, "agreed", reading.at))
        return replace(reading, agreements=self.agreements, agreed_at=reading.at)

    def mend_what_is_ahead(self, using: str, last: Reading) -> None:
        for one in self.charges:
            if one.at > self.at + ledger_time.AHEAD.total_seconds() * SECOND:
                one.at = self.at

    # --- who is about

    def pause(self, *seconds: float) -> float:
        is_away = self.random.random() < 0.05
        return self.random.choice(seconds) + is_away * self.random.uniform(0, self.away)

    def dispenser(self, lives: float, *, is_steady: bool = False) -> Process:
        watch, ends, looks_at = Watch("any"), self.time + lives, 0.0
        yield watch.seconds_to_settle()
        while self.time < ends:
            if watch.wants_look or self.time >= looks_at:
                watch.look()
                looks_at = self.time + 0.5
            watch.agree()
            now = watch.keep_and_credit(self.read(""))
            if now is not None and watch.is_agreed:
                for one in self.charges:
                    early = now - one.at - round((self.time - one.truly) * SECOND)
                    if early > self.early:
                        self.told.append((self.time, "EARLY by", early))
                        self.early = early
                if self.random.random() < 0.3:
                    self.charges.append(Charge(now, self.time))
            rest = self.random.uniform(0.02, 0.4)
            yield rest if is_steady else self.pause(rest)

    def worker(self, lives: float) -> Process:
        """It looks at no clock before it records: see `ledger_time.check_for_jump`."""
        watch, ends = Watch("any"), self.time + lives
        watch.keep_and_narrow(self.read(""))
        yield self.pause(0.001, 0.1, 0.5, 1, 3)
        while self.time < ends:
            reading = self.read("")
            is_known = watch.keep_and_credit(reading) is not None and not watch.seconds_to_settle()
            if is_known and watch.is_agreed:
                self.charges.append(Charge(reading.at, self.time))
                yield self.pause(0.05, 0.3, 2, 10)
            watch.look()
            if not watch.wants_look and not watch.seconds_to_settle():
                watch.agree()
            yield ledger_time.SETTLED / 10

    def births(self) -> Process:
        while True:
            self.begin(self.worker(self.random.choice([1, 3, 20])))
            if self.random.random() < 0.2:
                self.begin(self.dispenser(self.random.choice([1, 5, 30])))
            yield self.random.choice([0.1, 0.2, 0.5, 2])

    def jumps(self) -> Process:
        yield self.random.uniform(2, 5)
        last = 0
        while True:
            for _ in range(self.random.choice([1, 1, 2, 2, 3])):
                by = round(self.random.choice(self.by) * self.random.choice([-1, 1]) * SECOND)
                last = -last if last and self.random.random() < 0.4 else by
                self.set_by += last
                self.told.append((self.time, "THE CLOCK IS SET by", last))
                yield max(self.apart, self.random.choice([0.05, 0.2, 0.4, 0.7, 1.0, 1.4]))
            yield self.random.uniform(1.5, 4)


def lived(world: World) -> World:
    database = SimpleNamespace(
        writing=lambda using: nullcontext(),
        locked=lambda rows, wait: [rows],
        set_idle_timeout=lambda using, seconds: None,
    )
    rows = SimpleNamespace(order_by=lambda name: None, filter=lambda pk: None)
    of_ledger_time = {
        "read": world.read,
        "set_back": world.set_back,
        "_agree": world.agree,
        "mend": lambda using, jump, reading: None,
        "_mend_what_is_ahead": world.mend_what_is_ahead,
        "ensure_rows": lambda using: None,
        "database": database,
        "tables": SimpleNamespace(ledger_state=lambda using: rows),
    }
    with (
        patch.multiple(ledger_time, **of_ledger_time),
        patch.object(clocks, "monotonic", lambda: Mono(world.time)),
        patch.object(events, "emit", lambda *told, **more: None),
    ):
        world.run()
    return world


SMALL, LARGE = [0.03, 0.3, 1.5], [20.0, 50.0, 3600.0]


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, 80, 20)], ids=str)
@pytest.mark.parametrize(
    ("apart", "away", "jumps"),
    [
        pytest.param(1.5, 0.0, SMALL + LARGE, id="all look twice a second"),
        # smaller ones may have been made to and fro while it was away: nobody can know
        pytest.param(1.5, 3.0, LARGE, id="some are away for up to three seconds"),
        pytest.param(0.0, 3.0, LARGE, id="and it is set several times a second"),
    ],
)
def test_no_charge_is_older_to_anybody_than_it_is(
    seeds: range, apart: float, away: float, jumps: list[float]
) -> None:
    """By more than two clocks may drift apart unseen."""
    for seed in seeds:
        world = lived(World(seed, apart, away, jumps))
        told = "\n".join(map(str, world.told[-100:]))
        assert world.early < 30_000, f"seed {seed}\n{told}"
