"""The flight and its crew, as far as they need no database."""

from __future__ import annotations

import errno
import logging
import math
import os
import queue
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from celery import signals

from callqueue import Rule, broker, clocks
from callqueue.execution import flight, request, starvation
from callqueue.execution.connection import Dropped
from callqueue.execution.flight import NAME
from tests.support.starving import few_threads
from tests.support.verdicts import wait_until


@pytest.fixture(autouse=True)
def _of_no_rule_is_known_how_long_answers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "_waits", {})


def _job(attempt_id: int, rule: str) -> Any:
    attempt = SimpleNamespace(id=attempt_id, send_at=None)
    return SimpleNamespace(attempt=attempt, call=SimpleNamespace(rule=rule), unfit=None)


# --- The crew


def crew_of(work: Callable[[Any], Any]) -> tuple[Any, Callable[[int], None]]:
    """A crew, and what waits until so many of its jobs have ended."""
    bell = queue.SimpleQueue[None]()
    # who rings can be given the next job: else another thread would be begun for it
    crew: Any = flight.Crew(work, lambda: crew.resting and bell.put(None))

    def wait_for(count: int) -> None:
        while len(crew.ended) < count:
            bell.get(timeout=20)

    return crew, wait_for


@pytest.mark.parametrize("threads", [1, 3, 9])
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("bad", [{0}, {4}, {8}, {0, 1, 2, 3, 4, 5, 6, 7, 8}])
def test_a_job_that_raises_keeps_no_other_from_being_handed_over(
    bad: set[int], error: type[BaseException], threads: int
) -> None:
    def work(job: int) -> int:
        if job in bad:
            raise error
        return job

    crew, wait_for = crew_of(work)
    crew.add(list(range(9)), threads)
    wait_for(9)
    assert sorted(crew.ended) == [(job, None if job in bad else job) for job in range(9)]


def test_jobs_that_come_while_others_wait_get_no_thread_more() -> None:
    """Hundreds would keep each other from the interpreter."""
    goes = threading.Event()
    crew, wait_for = crew_of(lambda job: goes.wait(20) and job)
    for jobs in ([1, 2], [3, 4], [5, 6]):
        crew.add(jobs, threads=0)
    assert len(crew.threads) == 1
    goes.set()
    wait_for(6)
    crew.add([7], threads=0)  # one at least
    wait_for(7)


def test_as_many_threads_as_are_asked_for_are_woken() -> None:
    """Each job waits for all the others: one thread too few would stop them."""
    together = threading.Barrier(3)
    crew, wait_for = crew_of(lambda job: together.wait(20))
    for count in (3, 6):
        crew.add([1, 2, 3], threads=3)
        wait_for(count)
        wait_until(lambda: len(crew.resting) == 3, 20)
    assert None not in [result for _, result in crew.ended] and len(crew.threads) == 3


@few_threads(NAME, 2)
def test_jobs_that_no_thread_is_to_be_had_for_are_handed_back_before_their_leases_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that a thread has go on; and the process is known to have no more threads."""
    monkeypatch.setattr(flight, "UNSERVED_S", 0.05)
    goes = threading.Event()
    crew, wait_for = crew_of(lambda job: goes.wait(20) and job)
    assert crew.max_jobs() == math.inf
    crew.add(list(range(8)), 8)
    assert crew.max_jobs() == 2
    assert crew.take_unserved() == []  # one may still be free soon
    while not (left := crew.take_unserved()):
        threading.Event().wait(0.01)
    assert left == [2, 3, 4, 5, 6, 7]
    crew.pending.extend(left)
    assert crew.take_unserved() == [], "what comes after others were handed back has not waited"
    crew.pending.clear()
    goes.set()
    wait_for(2)
    assert sorted(job for job, _ in crew.ended) == [0, 1]
    at = time.monotonic() + flight.MINUTE
    monkeypatch.setattr(flight.time, "monotonic", lambda: at)
    assert crew.max_jobs() == math.inf  # it is tried again


def test_a_thread_without_a_job_takes_the_next_and_ends_when_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its jobs raise. To begin a thread costs more than to wake one."""
    monkeypatch.setattr(flight, "LINGER", 0.3)
    by = list[threading.Thread]()

    def leaving(job: int) -> int:
        by.append(threading.current_thread())
        raise SystemExit

    crew, wait_for = crew_of(leaving)
    for job in range(3):
        crew.add([job], 1)
        wait_for(job + 1)
    assert len(set(by)) == 1
    wait_until(lambda: not by[0].is_alive(), 20)
    assert not crew.threads and not crew.resting
    crew.add([4], 1)
    wait_for(4)
    assert len(set(by)) == 2


# --- The flight


def test_calls_that_are_answered_at_once_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {"fast": (0.001, 0.001), "slow": (0.1, 0.2), "crowded": (0.003, 0.2)}
    monkeypatch.setattr(request, "_waits", waits)
    jobs = {rule: _job(2, rule) for rule in (*waits, "new")}
    assert flight._threads_for([jobs["fast"]] * 50) == 0  # one begins anyway
    # it was this process's other threads that its last answer waited for, and not the API
    assert flight._threads_for([jobs["crowded"]] * 50) == 0
    assert flight._threads_for([jobs["slow"]] * 50) > 50
    assert flight._threads_for([jobs["new"]]) > 1  # nobody knows yet


def test_what_waits_for_room_has_not_landed() -> None:
    """Else a process that is told to go would not wait for that message's calls."""
    one, landed = flight.Flight.__new__(flight.Flight), threading.Event()
    one.boarding, one.landings, one.under_way = [flight.Message([1])], [landed], {}
    one.max_in_flight, one.crew = lambda: 1, SimpleNamespace(max_jobs=lambda: math.inf)  # type: ignore[assignment]
    one._let_tasks_go()
    assert not landed.is_set()
    one.boarding[0].waiting = []
    one._let_tasks_go()
    assert landed.is_set() and not one.boarding


def test_a_task_that_goes_away_waits_for_what_is_just_being_begun_of_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it gives back then, the flight does not begin at the same time."""
    wanted, message = queue.SimpleQueue[list[int]](), flight.Message([1, 2])
    one = flight.Flight("default", lambda: 1)

    def begin(using: str, ids: list[int]) -> list[Any]:
        wanted.put(ids)
        if ids == [1]:
            wait_until(lambda: not one.inbox.empty(), 20)
        return []

    monkeypatch.setattr(flight.claim, "begin", begin)
    monkeypatch.setattr(one, "_with_connection", lambda work: work())
    one.inbox.put(message)
    assert wanted.get(timeout=20) == [1]
    one._abandon(message, 20)
    assert message.settled.is_set() and wanted.empty()


def test_all_that_is_begun_already_is_made_while_the_flight_waits_for_the_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However slow it is, and however many: a begin whose answer was lost may take seconds."""
    began, goes, made = threading.Event(), threading.Event(), list[int]()

    def wait(*_: Any) -> list[Any]:
        began.set()
        goes.wait(20)
        return []

    monkeypatch.setattr(flight.claim, "begin", wait)
    make = lambda job: made.append(job.attempt.id) or wait()  # noqa: E731
    monkeypatch.setattr(flight.telemetry, "traced", lambda _: make)
    one = flight.Flight("default", lambda: 100)
    monkeypatch.setattr(one, "_with_connection", lambda work: work())
    threading.Thread(target=one.board, args=([1], 20), daemon=True).start()
    assert began.wait(20)
    one.take_off([_job(number, "slow") for number in range(2, 22)])(True)
    try:
        wait_until(lambda: len(made) == 20, 5)
    finally:
        goes.set()


@pytest.mark.parametrize(("is_begun", "most"), [(True, 50), (False, flight.AHEAD)])
def test_most_threads_of_what_takes_off_are_started_once_it_is_cleared(
    monkeypatch: pytest.MonkeyPatch, is_begun: bool, most: int
) -> None:
    """A pass hands over in its transaction, with the rules' rows locked."""
    goes = threading.Event()
    monkeypatch.setattr(flight.telemetry, "traced", lambda make: lambda job: goes.wait(20))
    one = flight.Flight("default", lambda: 100)
    monkeypatch.setattr(one, "_with_connection", lambda work: work())
    clear = one.take_off([_job(number, "slow") for number in range(50)])
    assert len(one.crew.threads) == flight.AHEAD
    clear(is_begun)
    wait_until(lambda: len(one.crew.threads) == most, 20)
    goes.set()


def test_what_ends_while_the_flight_falls_asleep_wakes_it() -> None:
    class Inbox(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            assert not self.empty(), "it sleeps, and nobody has rung"
            return super().get()

    class Pending(deque[Any]):
        def __bool__(self) -> bool:
            one._ring()  # a job has ended by the time that it is known that none is pending
            return False

    one = flight.Flight.__new__(flight.Flight)
    one.inbox, one.boarding, one.is_watching = Inbox(), [], True
    one.under_way = {1: _job(1, "r"), 2: _job(2, "r")}
    one.crew = SimpleNamespace(pending=Pending(), ended=())  # type: ignore[assignment]
    one._wait_for_news()
    assert one.inbox.empty()


def test_whoever_gives_a_clearance_is_told_that_it_is_heard() -> None:
    clearance = flight.Clearance()
    clearance.give(is_begun=True)
    assert clearance.wait() and clearance._heard.is_set()


def test_a_process_ends_though_its_flight_goes_on() -> None:
    flight.Flight("default", lambda: 100)
    assert all(one.daemon for one in threading.enumerate() if one.name == "callqueue-flight")


@pytest.mark.parametrize("is_away", [True, False])
def test_where_the_database_is_away_it_is_told_less_often_how_far_calls_are(
    monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    one = flight.Flight("default", lambda: 100)
    monkeypatch.setattr(one, "_with_connection", lambda work: None if is_away else ())
    one.under_way, one.told_at = {1: _job(1, "r")}, time.monotonic() - flight.TELL
    one._ring()
    one._do_round()
    since = time.monotonic() - one.told_at
    assert -flight.telling.AWAY <= since < 1 - flight.telling.AWAY if is_away else 0 <= since < 1


@pytest.mark.parametrize(
    ("under_way", "timeout"), [({1: "job"}, flight.TELL), ({}, flight.IDLE_SECONDS)]
)
def test_it_looks_after_what_is_under_way_without_being_rung(
    under_way: Any, timeout: float
) -> None:
    class Inbox(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            asked.append(timeout)

    asked, one = list[Any](), flight.Flight.__new__(flight.Flight)
    one.inbox, one.boarding, one.under_way = Inbox(), [], under_way
    one.crew = SimpleNamespace(pending=(), ended=())  # type: ignore[assignment]
    one._wait_for_news()
    assert asked == [timeout]


def test_what_ends_in_a_row_is_recorded_together_but_not_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, now, ended = flight.Flight.__new__(flight.Flight), [1000.0], deque[Any]()
    monkeypatch.setattr(flight.time, "monotonic", lambda: now[0])
    one.crew = SimpleNamespace(pending=(), ended=ended, take_unserved=list)  # type: ignore[assignment]
    one.seen, one.first_seen_at, one.under_way = (
        0,
        0.0,
        {number: _job(number, "r") for number in range(99)},
    )
    taken = list[Any]()
    while not taken:
        ended.append((_job(1, "r"), "result"))
        taken = one._take_ended()
        now[0] += flight.QUIET / 2
    assert len(taken) in (7, 8)  # within AGE


def test_a_process_with_nothing_in_flight_keeps_no_connection_that_no_call_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand idle ones would be a thousand descriptors, closed by the other side or not."""
    closed = threading.Event()
    monkeypatch.setattr(flight, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(flight.wire, "close_idle_connections", closed.set)
    flight.Flight("default", lambda: 1)
    assert closed.wait(20)


def test_a_process_with_nothing_in_flight_looks_at_nothing_until_there_is_news() -> None:
    class Inbox(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if timeout is not None:
                raise queue.Empty
            return message  # that comes hours later

    one, message = flight.Flight.__new__(flight.Flight), flight.Message([1])
    one.inbox, one.boarding, one.under_way = Inbox(), [], {}
    one.crew = SimpleNamespace(pending=(), ended=())  # type: ignore[assignment]
    one._wait_for_news()
    assert one.boarding == [message]


@pytest.mark.parametrize("signal", [signals.worker_process_shutdown, signals.worker_shutdown])
def test_whoever_is_told_to_go_lands_and_sends_its_last_announcements(
    monkeypatch: pytest.MonkeyPatch, announced_here: Callable[..., None], signal: Any
) -> None:
    """A child of the prefork pool, which runs no atexit, and a worker with calls in its own process."""
    sent: list[Any] = []

    def send_slowly(*message: Any) -> None:
        threading.Event().wait(0.2)
        sent.append(message)

    monkeypatch.setattr(broker, "_send_or_drop", send_slowly)
    announced_here(broker.ANNOUNCE, ([1], "default"))
    signal.send(sender=None)
    assert sent == [(broker.ANNOUNCE, ([1], "default"), "")]


# --- The gate of a call


@pytest.mark.parametrize(
    ("is_begun", "left", "opens_in", "why"),
    [
        (None, 10.0, None, ""),
        (True, 10.0, 0.2, ""),
        (False, 10.0, None, "what has begun it was undone"),
        (None, -1.0, None, "the lease had ended"),
        (None, 0.5, None, "too little was left of the lease"),
        (None, 1.5, 0.7, "too little was left of the lease"),
    ],
)
def test_nothing_is_sent_before_its_slot_or_that_may_outlive_its_lease(
    monkeypatch: pytest.MonkeyPatch,
    is_begun: bool | None,
    left: float,
    opens_in: float | None,
    why: str,
) -> None:
    """Nor before it is known that it is begun. Until its slot it has not passed: it may go back."""
    monkeypatch.setattr(request, "_waits", {"r": (1.0, 1.0)})
    now, passed = clocks.monotonic(), list[bool]()
    opens = None if opens_in is None else now + opens_in
    job: Any = _job(1, "r")
    job.lease_ends_at, job.sound_rule = now + left, Rule(total_timeout=60)
    job.clearance = None if is_begun is None else SimpleNamespace(wait=lambda: is_begun)
    job.slot_opens_at = lambda: passed.append(gate.is_passed) or opens
    gate = request.SlotGate(job)
    with pytest.raises(Dropped, match=why) if why else nullcontext():
        gate.wait()
    assert gate.ends_at == job.lease_ends_at
    assert (passed, gate.is_passed) == ([False] * (is_begun is not False), is_begun is not False)
    assert opens is None or clocks.monotonic() >= opens


# --- A process that may have no more descriptors


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The process's clock, in the test's hands."""
    now = [1000.0]
    monkeypatch.setattr(starvation.time, "monotonic", lambda: now[0])
    return now


def _seconds_of(pause: starvation.Shortage, clock: list[float]) -> float:
    """For how long calls are not taken, from now on."""
    began = clock[0]
    while pause.is_on:
        clock[0] += 0.125
    return clock[0] - began


def test_it_pauses_for_a_second_and_longer_where_that_was_of_no_help(clock: list[float]) -> None:
    pause, seconds = starvation.Shortage(), []
    assert not pause.is_on
    for _ in range(6):
        pause.begin("no more")
        seconds.append(_seconds_of(pause, clock))
    assert seconds == [1, 2, 4, 8, 10, 10]
    clock[0] += 60
    pause.begin("no more")
    assert _seconds_of(pause, clock) == 1
    pause = starvation.Shortage()
    for ahead in (0.5, 0.0):
        pause.begin("no more")
        clock[0] += ahead
    assert _seconds_of(pause, clock) == 0.5, "calls that were taken before make it no longer"


def test_who_rests_does_so_until_the_pause_is_over_or_as_long_as_a_task_may_wait(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept, pause = list[float](), starvation.Shortage()
    monkeypatch.setattr(starvation.time, "sleep", slept.append)
    pause.wait_out(None)
    pause.begin("no more")
    pause.wait_out(None)
    pause.wait_out(0.25)
    assert slept == [0, 1, 0.25]


@pytest.mark.parametrize(
    ("wanting", "what"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (RuntimeError("can't start new thread"), "threads"),
        (OSError(errno.ECONNRESET, "reset"), None),
    ],
)
def test_what_was_wanting_is_known_by_whatever_else_is_said_of_it(
    wanting: Exception, what: str | None
) -> None:
    """By a library that raises an error of its own, from it or while it handles it."""
    behind, named, during = ValueError("odd"), ValueError("odd"), ValueError("odd")
    named.__cause__, during.__context__, behind.__context__ = wanting, wanting, named
    for error in (wanting, named, during, behind):
        text = starvation.why_starved(error)
        assert text == (
            what and f"nothing was sent: this worker's process may have no more ({what})"
        )


def test_it_says_so_once_a_minute(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    pause = starvation.Shortage()
    with caplog.at_level(logging.WARNING, "callqueue"):
        for _ in range(170):
            pause.begin("no more")
            clock[0] += 1.0
    assert caplog.text.count("worker_starved error='no more'") == 3


@pytest.mark.parametrize(
    ("limit", "is_open", "most"),
    [
        (1024, 24, 872),
        (65536, 36, 57308),
        (256, 20, 172),
        (64, 20, 1),
        (resource.RLIM_INFINITY, 20, math.inf),
    ],
)
def test_as_many_calls_as_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch, limit: int, is_open: int, most: float
) -> None:
    """Less what is open before the first call, and what lookups and other tasks may take."""
    starvation._open_at_first.cache_clear()
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * is_open)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert starvation.descriptors_for_calls() == most
    starvation._open_at_first.cache_clear()
