"""The calls of one message side by side, and whatever one of them raises."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import Any

import pytest

from callqueue.execution import flight
from callqueue.execution.flight import NAME
from tests.support.starving import few_threads


def made(jobs: list[Any], work: Any, threads: int = 1) -> tuple[list[Any], list[Any]]:
    """What came of the jobs, and those that raised. A crew that stands still fails the test, not
    the whole run.
    """
    bell = queue.SimpleQueue[None]()
    crew = flight.Crew(work, lambda: bell.put(None))
    crew.add(jobs, threads)
    while len(crew.ended) < len(jobs):
        bell.get(timeout=20)
    ended = list(crew.ended)
    return (
        [result for _, result in ended if result is not None],
        [job for job, result in ended if result is None],
    )


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

    ended, raised = made(list(range(9)), work, threads=threads)
    assert sorted(ended) == sorted(set(range(9)) - bad)
    assert sorted(raised) == sorted(bad)


def test_jobs_that_come_while_others_wait_get_no_thread_more() -> None:
    """Whoever takes those takes these. Each pass of a busy process would start one otherwise, and
    hundreds would keep each other from the interpreter.
    """
    bell, goes = queue.SimpleQueue[None](), threading.Event()
    crew = flight.Crew(lambda job: goes.wait(20) and job, lambda: bell.put(None))
    for jobs in ([1, 2], [3, 4], [5, 6]):
        crew.add(jobs, threads=0)  # type: ignore[arg-type]
    assert len(crew.threads) == 1
    goes.set()
    bell.get(timeout=20)
    assert len(crew.ended) == 6
    crew.add([7], threads=0)  # type: ignore[list-item]  # one at least
    bell.get(timeout=20)
    assert len(crew.ended) == 7


def test_as_many_threads_as_are_asked_for_are_woken() -> None:
    """Each job waits for all the others: one thread too few would stop them."""
    bell, together = queue.SimpleQueue[None](), threading.Barrier(3)

    def work(job: int) -> int:
        together.wait(20)
        return job

    crew = flight.Crew(work, lambda: bell.put(None))
    for count in (3, 6):
        crew.add([1, 2, 3], threads=3)
        while len(crew.ended) < count or len(crew.resting) < 3:
            bell.get(timeout=20)
    assert [result for _, result in crew.ended].count(None) == 0 and len(crew.threads) == 3


@few_threads(NAME, 2)
def test_jobs_that_no_thread_is_to_be_had_for_are_handed_back_before_their_leases_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that a thread has go on; and the process is known to have no more threads."""
    monkeypatch.setattr(flight, "UNSERVED_S", 0.05)
    goes, bell = threading.Event(), queue.SimpleQueue[Any]()
    jobs: list[Any] = list(range(8))
    crew = flight.Crew(lambda job: goes.wait(20) and job, lambda: bell.put(None))
    assert crew.most() == math.inf
    crew.add(jobs, 8)
    assert crew.most() == 2
    assert crew.unserved() == []  # one may still be free soon
    while not (left := crew.unserved()):
        threading.Event().wait(0.01)
    assert left == [2, 3, 4, 5, 6, 7]
    goes.set()
    while len(crew.ended) < 2:
        bell.get(timeout=20)
    assert sorted(job for job, _ in crew.ended) == [0, 1]
    at = time.monotonic() + flight.MINUTE
    monkeypatch.setattr(flight.time, "monotonic", lambda: at)
    assert crew.most() == math.inf  # it is tried again


@few_threads(NAME, 1)
def test_jobs_that_come_after_others_were_handed_back_have_not_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flight, "UNSERVED_S", 0.05)
    goes = threading.Event()
    crew = flight.Crew(lambda job: goes.wait(20) and job, lambda: None)
    jobs: list[Any] = [0, 1, 2]
    crew.add(jobs, 3)
    while not (left := crew.unserved()):
        threading.Event().wait(0.01)
    assert left == [1, 2]
    crew.pending.extend(jobs)
    assert crew.unserved() == []
    goes.set()


def test_a_thread_without_a_job_takes_the_next_and_ends_when_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its jobs raise. To begin a thread costs more than to wake one."""
    monkeypatch.setattr(flight, "LINGER", 0.3)
    by, bell = list[threading.Thread](), queue.SimpleQueue[None]()

    def leaving(job: int) -> int:
        by.append(threading.current_thread())
        raise SystemExit

    crew = flight.Crew(leaving, lambda: bell.put(None))
    for job in range(3):
        crew.add([job], 1)  # type: ignore[list-item]
        bell.get(timeout=20)
    assert len(set(by)) == 1
    end = time.monotonic() + 20
    while by[0].is_alive():
        assert time.monotonic() < end
        threading.Event().wait(0.001)
    assert not crew.threads
    assert not crew.resting
    crew.add([4], 1)  # type: ignore[list-item]
    bell.get(timeout=20)
    assert len(set(by)) == 2
