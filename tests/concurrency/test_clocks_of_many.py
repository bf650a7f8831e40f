"""Several processes share a ledger while somebody sets the database's clock: never over the limit,
no stall past a window.

Each process passes, begins, sends, records, looks and sleeps when hypothesis says so, with the real
code on the real database; only the clocks are a test's. The provider counts by true time.
CALLQUEUE_EXAMPLES=200 looks longer.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from callqueue import Rule, SlidingWindow, TokenBucket, clocks, conf, database
from callqueue.dispatch.release_pass import ensure_states, release
from callqueue.execution import claim, judging, recorder, wire
from callqueue.ledger import clock_jumps, rule_rows
from callqueue.ledger.clock_jumps import Watch
from callqueue.models import CallAttempt, CallQueue, Hold, RuleState
from callqueue.transitions import Job, Result
from tests.support.behaviour import response
from tests.support.length import examples

EXAMPLES = examples(25, 200)
STEPS = 50
AT_MOST, WINDOW = 4, 10.0
PER_SECOND, BURST = 1, 6
JITTER = 0.05
READING = 0.0004  # seconds that pass between any two looks at this process's own clock

PLACES = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5])
MEETINGS = st.lists(
    st.tuples(PLACES, st.sampled_from(["looks", "reads", "works", "works", "records"])), max_size=4
)
JUMPS = st.builds(
    lambda size, sign, more: sign * size * (1 + more),
    st.sampled_from([0.02, 0.03, 0.2, 0.6, 2.0, 9.0, 11.0, 60.0, 3600.0, 86400.0, 604800.0]),
    st.sampled_from([1, -1]),
    st.floats(0.0, 0.5),
)


@dataclass
class Process:
    """What a process knows by itself, and the calls it has at hand."""

    watch: Watch = field(default_factory=lambda: Watch("default"))
    begun: list[Job] = field(default_factory=list)
    answered: list[Result] = field(default_factory=list)


class Cluster(RuleBasedStateMachine):
    """Processes, a database whose clock is set, and a provider who counts."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.mono, self.offset = 1000.0, 0.0
        self.epoch = timezone.now()
        self.counted: list[float] = []
        self.messages: list[list[int]] = []
        self.processes: list[Process] = []

    @initialize(count=st.sampled_from([2, 4]))
    def start(self, count: int) -> None:
        for model in (CallAttempt, CallQueue, Hold, RuleState):
            model.objects.all().delete()
        enter = self.patches.enter_context
        enter(patch.object(clock_jumps, "watch", lambda using: self.current.watch))
        enter(patch.object(clocks, "monotonic", self.own_clock))
        enter(patch.object(clock_jumps, "time", SimpleNamespace(sleep=self.time_passes_by)))
        enter(patch.object(database, "clock", lambda using: self.wall()))
        enter(patch.object(database, "clock_sql", self.wall_sql))
        ensure_states("default", list(conf.current().rules))
        call = {"method": "get", "params": {"url": "http://vendor.example/"}}
        CallQueue.objects.send_many([call] * 150, rule="r")
        CallQueue.objects.update(due_at_dt=self.wall())
        for _ in range(count):
            self.begin_process()

    def teardown(self) -> None:
        try:
            if self.processes:
                self.come_to_rest()
        finally:
            self.patches.close()

    # Time.

    def own_clock(self) -> float:
        self.mono += READING
        return self.mono

    def time_passes_by(self, seconds: float) -> None:
        self.mono += seconds

    def wall(self) -> datetime:
        return self.epoch + timedelta(seconds=self.mono + self.offset)

    def wall_sql(self, using: str) -> str:
        shown = self.wall().astimezone(tz=None).strftime("%Y-%m-%d %H:%M:%S.%f%z")
        if connection.vendor == "postgresql":
            return f"CAST('{shown}' AS timestamptz)"
        naive = database.as_parameter(using, self.wall())
        return f"CAST('{naive}' AS DATETIME(6))" if connection.vendor == "mysql" else "NULL"

    @rule(seconds=st.one_of(st.floats(0.001, 0.6), st.floats(0.6, 15.0)))
    def time_passes(self, seconds: float) -> None:
        self.mono += seconds

    @rule(seconds=JUMPS)
    def the_clock_is_set(self, seconds: float) -> None:
        """By no less than can be seen by who has slept longest: the longer, the less is known of
        the clocks' speeds.
        """
        slept = max(self.mono - p.watch.last.before for p in self.processes if p.watch.last)
        least = 0.02 + 3 * clocks.DRIFT * slept
        self.offset += seconds if abs(seconds) > least else least if seconds > 0 else -least

    # Processes.

    def chosen(self, place: int) -> Process:
        self.current = self.processes[place % len(self.processes)]
        return self.current

    def begin_process(self) -> None:
        """As a dispenser begins: it reads the clock, and waits until all others have looked before
        it does anything.
        """
        newcomer = Process()
        self.processes.append(newcomer)
        for process in [newcomer, *self.processes]:
            self.current = process
            process.watch.look()
            self.mono += 1.1 * clock_jumps.SETTLED / len(self.processes)

    @precondition(lambda self: len(self.processes) < 6)
    @rule()
    def a_process_starts(self) -> None:
        self.begin_process()

    @rule(places=st.tuples(PLACES, PLACES, PLACES))
    def all_that_may_go_is_made(self, places: tuple[int, int, int]) -> None:
        """Released by one process, made by another, so that from now on nothing is to go for a
        while.
        """
        for _ in range(2):
            self.one_releases(places[0], AT_MOST)
        while self.messages:
            self.one_begins(places[1], 0)
        while any(p.begun for p in self.processes):
            self.one_sends(places[1], 0.01, 0.02)
        while any(p.answered for p in self.processes):
            self.one_records(places[2])

    @rule(
        places=st.one_of(st.none(), st.tuples(PLACES, PLACES, PLACES)),
        seconds=JUMPS,
        first=MEETINGS,
        goes_back=st.booleans(),
        then=MEETINGS,
    )
    def the_clock_is_set_and_some_meet_it(
        self,
        places: tuple[int, int, int] | None,
        seconds: float,
        first: list[tuple[int, str]],
        goes_back: bool,
        then: list[tuple[int, str]],
    ) -> None:
        """Often when nothing may go, and perhaps for a moment only."""
        if places is not None:
            self.all_that_may_go_is_made(places)
        before = self.offset
        self.the_clock_is_set(seconds)
        self.some_meet_it(first)
        if goes_back:
            self.offset = before
        self.some_meet_it(then)

    def some_meet_it(self, meetings: list[tuple[int, str]]) -> None:
        for place, what in meetings:
            if what == "looks":
                self.one_looks(place)
            elif what == "reads":
                self.one_begins_nothing(place)
            elif what == "records" and any(p.answered for p in self.processes):
                self.one_records(place)
            elif what == "works":
                self.all_that_may_go_is_made((place, place, place))
            self.mono += 0.01

    @rule(place=PLACES)
    def one_begins_nothing(self, place: int) -> None:
        """A message whose attempts are gone: all that it does is to read the clock."""
        self.chosen(place)
        claim.begin("default", [0])

    @rule(place=PLACES)
    def one_looks(self, place: int) -> None:
        self.chosen(place).watch.look()

    @rule(place=PLACES, batch=st.integers(1, 5))
    def one_releases(self, place: int, batch: int) -> None:
        self.chosen(place)
        released = [one.attempt_id for one in release("default", ["r"], batch=batch).released]
        if released:
            self.messages.append(released)

    @precondition(lambda self: self.messages)
    @rule(place=PLACES, message=PLACES)
    def one_begins(self, place: int, message: int) -> None:
        process = self.chosen(place)
        process.begun += claim.begin("default", self.messages.pop(message % len(self.messages)))

    @precondition(lambda self: any(p.begun for p in self.processes))
    @rule(place=PLACES, transit=st.floats(0.0, JITTER), takes=st.sampled_from([0.003, 0.06, 2.0]))
    def one_sends(self, place: int, transit: float, takes: float) -> None:
        """At the first instant that the worker may; the provider counts it as early or as late as
        the jitter lets it.
        """
        process = self.some([p for p in self.processes if p.begun], place)
        job = process.begun.pop(place % len(process.begun))
        if job.send_at is not None:
            self.mono = max(self.mono, job.slot_opens())
        if self.mono >= job.lease_ends:
            answer = wire.Answer(
                response=None, sent_at=None, sent=False, dropped=True, error="too late"
            )
        else:
            sent_at, counted = self.mono, self.mono + min(transit, takes)
            self.count(counted)
            self.mono += takes
            answer = wire.Answer(response=response(200, {}, b"{}"), sent_at=sent_at, sent=True)
        process.answered.append(judging.of_answer(job, answer))

    @precondition(lambda self: any(p.answered for p in self.processes))
    @rule(place=PLACES)
    def one_records(self, place: int) -> None:
        process = self.some([p for p in self.processes if p.answered], place)
        report = process.answered.pop(0)
        recorder.record("default", [report])

    def some(self, processes: list[Process], place: int) -> Process:
        self.current = processes[place % len(processes)]
        return self.current

    # The provider.

    def count(self, instant: float) -> None:
        self.counted = sorted([*self.counted, instant])
        for first, last in zip(self.counted, self.counted[AT_MOST:], strict=False):
            assert last - first > WINDOW - 1e-4, f"{AT_MOST + 1} in {last - first:.3f} s"
        for i in range(len(self.counted)):
            for j in range(i + BURST, len(self.counted)):
                allowed = BURST + (self.counted[j] - self.counted[i]) * PER_SECOND
                assert j - i + 1 <= allowed + 1e-3, (
                    f"{j - i + 1} where the bucket had {allowed:.3f}"
                )

    def all_agree(self) -> bool:
        """Whether nobody moves the ledger any more, where all look as often as dispensers do."""
        before = RuleState.objects.get(rule=rule_rows.FRAME).passes
        for place in range(len(self.processes)):
            self.one_looks(place)
        self.mono += 0.5
        return before == RuleState.objects.get(rule=rule_rows.FRAME).passes

    def come_to_rest(self) -> None:
        """Whatever was done to the clock: a window after all was answered, and all have looked,
        there is all the room.
        """
        for place in range(len(self.processes)):
            self.one_looks(place)
        while self.messages:
            self.one_begins(0, 0)
        while any(p.begun for p in self.processes):
            self.one_sends(0, 0.0, 0.003)
        while any(p.answered for p in self.processes):
            self.one_records(0)
        assert any(self.all_agree() for _ in range(4)), "the processes go on moving the ledger"
        self.chosen(0)
        self.mono += WINDOW + JITTER + 0.01
        count = sum(
            len(release("default", ["r"]).released) for _ in range(2)
        )  # the first may learn that others saw more
        assert count == AT_MOST, f"{count} of {AT_MOST} a window after the last one"


@pytest.mark.django_db(transaction=True)
@pytest.mark.fault
def test_no_window_is_over_and_none_stalls_whoever_meets_a_jump_first(settings: Any) -> None:
    limits = [
        SlidingWindow(f"{AT_MOST}/{WINDOW:.0f}s", jitter=JITTER),
        TokenBucket(f"{PER_SECOND}/s", burst=BURST, jitter=JITTER),
    ]
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=limits)}}
    run_state_machine_as_test(Cluster, settings=chosen(EXAMPLES))


def chosen(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
