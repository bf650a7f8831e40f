"""Dispenser, workers and recovery against an adversary, who loses and repeats messages, kills
workers and stops the clock.

Every step runs the real code on the real database; hypothesis chooses the steps. The provider is a
list of instants: what it counts is counted here, by a loop over that list. CALLQUEUE_EXAMPLES=200
looks longer.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from callqueue import Concurrency, Retry, Rule, SlidingWindow, clocks, control, database
from callqueue.database import server_clock
from callqueue.dispatch import publisher
from callqueue.dispatch.release_pass import ensure_states, release
from callqueue.exceptions import IllegalTransition
from callqueue.execution import claim, recorder, request, wire
from callqueue.ledger import clock_jumps, ready_calls
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue, Hold, RuleState
from callqueue.transitions import Job, Result
from tests.support.behaviour import response
from tests.support.length import examples

Status = CallQueue.Status
EXAMPLES = examples(20, 200)
STEPS = 40
IN_ALL, OF_A_KEY, AT_ONCE = (4, 10.0), (2, 4.0), 3  # the limits: how many, in how many seconds
LEASE, GRACE, TOTAL = 20.0, 3.0, 6.0

# What each step may do to a call, and nothing else may.
MOVES = {
    "release": {(Status.NEW, Status.DISPATCHED), (Status.ERROR, Status.DISPATCHED)},
    "record": {
        (Status.DISPATCHED, to)
        for to in (Status.DONE, Status.ERROR, Status.FAILED, Status.UNKNOWN, Status.NEW)
    },
    "recover": {
        (Status.DISPATCHED, to) for to in (Status.NEW, Status.ERROR, Status.FAILED, Status.UNKNOWN)
    },
    "cancel": {(was, Status.CANCELLED) for was in (Status.NEW, Status.ERROR, Status.DISPATCHED)},
    "requeue": {
        (was, Status.NEW)
        for was in (
            Status.ERROR,
            Status.FAILED,
            Status.CANCELLED,
            Status.UNKNOWN,
            Status.EXPIRED,
            Status.DONE,
        )
    },
}
ANSWERS = st.sampled_from([200, 200, 200, 404, 429, 500, None])
PLACES = st.integers(0, 10**6)


class Queue(RuleBasedStateMachine):
    """Calls under three limits, one dispenser's passes, any number of workers, and what the
    provider saw.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.messages: list[list[int]] = []
        self.begun: list[Job] = []
        self.reports: list[Result] = []
        self.seen: list[
            tuple[float, int, int, str]
        ] = []  # the provider's: instant, call, attempt, key
        self.may_send: defaultdict[int, bool] = defaultdict(
            lambda: True
        )  # of calls that must not be made twice
        self.known: dict[int, int] = {}
        self.complaints: list[str] = []
        self.paused = False

    @initialize()
    def start(self) -> None:
        for model in (CallAttempt, CallQueue, Hold, RuleState):
            model.objects.all().delete()
        ensure_states("default", ["r"])
        self.later = 0.0
        real = clocks.monotonic
        enter = self.patches.enter_context
        enter(patch.object(clock_jumps, "_watches", {}))
        enter(patch.object(server_clock, "ahead", timedelta(0)))
        enter(patch.object(clocks, "monotonic", lambda: real() + self.later))
        enter(patch.object(time, "sleep", self.pass_time))
        enter(patch.object(wire, "request", self.serve))
        for key in ("", "a", "b"):
            self.send("get", key, 3)

    def teardown(self) -> None:
        self.patches.close()

    # Time, and the provider.

    def pass_time(self, seconds: float) -> None:
        self.later += seconds
        server_clock.ahead = timedelta(seconds=self.later)

    def serve(
        self, method: str, params: Any, *, policy: Any, timeouts: Any, gate: Any
    ) -> wire.Answer:
        """The wire: waits as the real one does, tells the provider, and brings its answer after a
        while.
        """
        try:
            gate.wait()
        except wire.Dropped as error:
            return wire.Answer(
                response=None, sent_at=None, sent=False, dropped=True, error=str(error)
            )
        job, sent_at = self.current, clocks.monotonic()
        self.arrive(job, method)
        self.pass_time(self.latency)
        if self.answer is None:
            return wire.Answer(response=None, sent_at=sent_at, sent=True, error="no answer")
        headers = {"Retry-After": "3"} if self.answer == 429 else {}
        return wire.Answer(
            response=response(self.answer, headers, b"{}"), sent_at=sent_at, sent=True
        )

    def arrive(self, job: Job, method: str) -> None:
        """What the provider sees. Judged by an invariant: the executor would take an assertion for
        a call that failed.
        """
        if method == "post" and not self.may_send[job.pk]:
            self.complaints.append(f"call {job.pk} is not idempotent, and goes twice")
        if job.attempt_id in {attempt for _, _, attempt, _ in self.seen}:
            self.complaints.append(f"attempt {job.attempt_id} is made twice")
        self.may_send[job.pk] = False
        self.seen.append((seconds_of(database.clock("default")), job.pk, job.attempt_id, job.key))

    # What the application and its operators do.

    @rule(
        method=st.sampled_from(["get", "post"]),
        key=st.sampled_from(["", "a", "b"]),
        count=st.integers(1, 4),
    )
    def send(self, method: str, key: str, count: int) -> None:
        data = {"method": method, "params": {"url": "http://vendor.example/"}}
        for call in CallQueue.objects.send_many([data] * count, rule="r", key=key):
            self.known[call.pk] = Status.NEW

    @precondition(lambda self: self.known)
    @rule(place=PLACES)
    def cancel(self, place: int) -> None:
        call = self.some_call(place)
        had_begun = call.attempts.filter(
            started_at__isnull=False, finished_at__isnull=True
        ).exists()
        may = call.status in (Status.NEW, Status.ERROR) or (
            call.status == Status.DISPATCHED and not had_begun
        )
        assert_transition(call.cancel, may)
        self.settle("cancel")

    @precondition(lambda self: self.known)
    @rule(place=PLACES)
    def requeue(self, place: int) -> None:
        call = self.some_call(place)
        may = call.status not in (Status.NEW, Status.DISPATCHED)
        assert_transition(lambda: call.requeue(again=True), may)
        if may:
            self.may_send[call.pk] = True
        self.settle("requeue")

    @precondition(lambda self: self.known)
    @rule(place=PLACES)
    def delete(self, place: int) -> None:
        call = self.some_call(place)
        del self.known[call.pk]
        call.delete()

    @rule()
    def pause(self) -> None:
        control.pause("default", "r", reason="by the test")
        self.paused = True

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        control.resume("default", "r")
        self.paused = False

    # What the dispenser, the broker and the workers do. How much there is to be done depends on how
    # fast this machine is, so no precondition asks for it: hypothesis wants the same choices again.

    @rule()
    def release(self) -> None:
        ready_calls.promote("default")
        made = release("default", ["r"])
        assert not made.next_look.streak.locked
        assert not (self.paused and made.released), "released although the rule is paused"
        self.messages += [ids for _, ids in publisher.pack(made.released)]
        self.settle("release")

    @rule(place=PLACES)
    def lose_a_message(self, place: int) -> None:
        if not self.messages:
            return
        self.messages.pop(place % len(self.messages))

    @rule(place=PLACES, is_repeated=st.booleans())
    def deliver(self, place: int, is_repeated: bool) -> None:
        if not self.messages:
            return
        ids = self.messages[place % len(self.messages)]
        if not is_repeated:
            self.messages.remove(ids)
        for job in claim.begin("default", ids):
            assert job.pk in self.known, "a worker began a call that was deleted"
            assert self.known[job.pk] == Status.DISPATCHED
            self.begun.append(job)
        self.settle("deliver")

    @rule(place=PLACES, answer=ANSWERS, latency=st.sampled_from([0.0, 0.1, 2.0]))
    def make(self, place: int, answer: int | None, latency: float) -> None:
        """A worker makes its call and has the answer in hand."""
        if not self.begun:
            return
        self.current, self.answer, self.latency = (
            self.begun.pop(place % len(self.begun)),
            answer,
            latency,
        )
        self.reports.append(request.make(self.current))
        self.settle("make")

    @rule(place=PLACES)
    def record(self, place: int) -> None:
        if not self.reports:
            return
        report = self.reports.pop(place % len(self.reports))
        recorder.record("default", [report])
        attempt = CallAttempt.objects.get(pk=report.job.attempt_id)
        if attempt.outcome in ("failed", "throttled") and attempt.response_status in (429, 500):
            self.may_send[attempt.call_id] = True  # the provider refused it: nothing was done there
        self.settle("record")

    @rule(place=PLACES)
    def kill_a_worker(self, place: int) -> None:
        """Before its call, or with the answer in hand."""
        if not (self.begun or self.reports):
            return
        hands: list[Any] = (
            self.begun if self.begun and (place % 2 or not self.reports) else self.reports
        )
        hands.pop(place // 2 % len(hands))

    @rule()
    def recover(self) -> None:
        recovery.recover("default")
        self.settle("recover")

    @rule(seconds=st.sampled_from([0.05, 0.5, 1.0, 4.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule()
    def leases_end(self) -> None:
        self.pass_time(LEASE + 0.1)
        recovery.recover("default")
        self.settle("recover")
        assert not CallAttempt.objects.unbegun().exists()

    @rule(latency=st.sampled_from([0.0, 0.2]))
    def everything_goes_well(self, latency: float) -> None:
        """What a dispenser and a worker do when nobody is in their way."""
        if self.paused:
            self.resume()
        self.release()
        while self.messages:
            self.deliver(0, is_repeated=False)
        while self.begun:
            self.make(0, 200, latency)
        while self.reports:
            self.record(0)

    # What always holds.

    @invariant()
    def attempts_are_numbered_one_by_one_and_at_most_one_is_open(self) -> None:
        numbers: dict[int, list[int]] = defaultdict(list)
        for call, number in CallAttempt.objects.order_by("pk").values_list("call_id", "number"):
            numbers[call].append(number)
        assert all(listed == list(range(1, len(listed) + 1)) for listed in numbers.values())
        of_calls = Counter(CallAttempt.objects.open().values_list("call_id", flat=True))
        assert max(of_calls.values(), default=0) <= 1
        assert {pk for pk in of_calls if pk in self.known} == {
            pk for pk, s in self.known.items() if s == Status.DISPATCHED
        }

    @invariant()
    def the_provider_has_nothing_to_complain_about(self) -> None:
        assert not self.complaints
        within(self.seen, *IN_ALL)
        for key in ("", "a", "b"):
            within([one for one in self.seen if one[3] == key], *OF_A_KEY)

    @invariant()
    def no_more_attempts_are_open_than_may_be_at_once(self) -> None:
        assert CallAttempt.objects.open().count() <= AT_ONCE

    @invariant()
    def voided_attempts_never_reached_the_wire(self) -> None:
        voided = set(CallAttempt.objects.filter(outcome="voided").values_list("pk", flat=True))
        assert not voided & {attempt for _, _, attempt, _ in self.seen}

    def settle(self, step: str) -> None:
        """Compare the calls' states with those before the step: only this step's moves may have
        happened.
        """
        now = dict(CallQueue.objects.values_list("pk", "status"))
        moves = {(self.known[pk], status) for pk, status in now.items() if status != self.known[pk]}
        assert moves <= MOVES.get(step, set()), f"{step} made {moves}"
        self.known = now

    def some_call(self, place: int) -> CallQueue:
        pks = sorted(self.known)
        return CallQueue.objects.get(pk=pks[place % len(pks)])


def within(seen: list[tuple[float, int, int, str]], most: int, window: float) -> None:
    """The provider's own count: no window that ends with an arrival holds more than it allows."""
    for end, *_ in seen:
        count = sum(end - window < instant <= end for instant, *_ in seen)
        assert count <= most, f"{count} calls within {window:g} s, and {most} are allowed"


def seconds_of(instant: datetime) -> float:
    return instant.timestamp()


def assert_transition(change: Callable[[], None], is_legal: bool) -> None:
    if is_legal:
        change()
        return
    with pytest.raises(IllegalTransition):
        change()


@pytest.mark.fault
def test_whatever_happens_the_limits_hold_and_no_call_is_made_twice(
    settings: Any, transactional_db: None
) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("the same code, on the database that it is meant for first")
    settings.CALLQUEUE = {
        "RULES": {
            "r": Rule(
                limits=[
                    SlidingWindow("4/10s"),
                    SlidingWindow("2/4s", per="key"),
                    Concurrency(AT_ONCE),
                ],
                retry=Retry(max_attempts=3, base=0.5, jitter=False),
                total_timeout=TOTAL,
            )
        },
        "LEASE": {"RELEASE": LEASE, "GRACE": GRACE},
    }
    run_state_machine_as_test(Queue, settings=chosen(EXAMPLES))


def chosen(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
