"""The calls of one message side by side, and whatever one of them raises."""

from __future__ import annotations

import math
import queue
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from callqueue.execution import flight


def made(jobs: list[Any], work: Any, threads: int = 1) -> tuple[list[Any], BaseException | None]:
    """What was handed over, and what was raised first. A batch that waits for ever fails the test,
    not the whole run.
    """
    ended: list[Any] = []
    bell = queue.SimpleQueue[Any]()
    batch = flight.Batch(jobs, work, bell)

    def gather() -> None:
        batch.begin(threads)
        while not batch.is_over:
            with suppress(queue.Empty):
                bell.get(timeout=flight.STALL)
            some = batch.look()
            batch.taken += len(some)
            ended.extend(some)

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the batch waits for ever"
    return ended, batch.raised[0] if batch.raised else None


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
    assert isinstance(raised, error)


def _allow_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """So many for calls, and no more."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_few(thread: threading.Thread) -> None:
        if thread.name == "callqueue-calls" and len(started) == count:
            raise RuntimeError("can't start new thread")
        started.extend([thread] if thread.name == "callqueue-calls" else [])
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)


def test_jobs_wait_for_the_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have a limit of its own, and every call in flight is a thread."""
    monkeypatch.setattr(flight, "refusal", flight._Refusal())
    _allow_threads(monkeypatch, 2)
    together = threading.Barrier(2)

    def work(job: int) -> int:
        together.wait(5)
        return job

    ended, raised = made(list(range(8)), work, threads=8)
    assert sorted(ended) == list(range(8))
    assert raised is None


def test_jobs_that_no_thread_is_to_be_had_for_are_handed_back_before_their_leases_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that a thread has go on; and the process is known to have no more threads."""
    monkeypatch.setattr(flight, "refusal", flight._Refusal())
    monkeypatch.setattr(flight, "UNSERVED_S", 0.05)
    _allow_threads(monkeypatch, 2)
    goes, bell = threading.Event(), queue.SimpleQueue[Any]()
    jobs: list[Any] = list(range(8))
    batch = flight.Batch(jobs, lambda job: goes.wait(20) and job, bell)
    assert flight.most() == math.inf
    batch.begin(8)
    assert flight.most() == 2
    assert batch.unserved() == []  # one may still be free soon
    while not (left := batch.unserved()):
        threading.Event().wait(0.01)
    assert left == [2, 3, 4, 5, 6, 7]
    goes.set()
    while len(batch.ended) < 2:
        bell.get(timeout=20)
    assert sorted(batch.ended) == [0, 1]
    at = time.monotonic() + flight.MINUTE
    monkeypatch.setattr(flight.time, "monotonic", lambda: at)
    assert flight.most() == math.inf  # it is tried again


def test_a_thread_ends_with_its_jobs_whatever_they_raise() -> None:
    def leaving(job: int) -> int:
        raise SystemExit

    made([1, 2, 3], leaving, threads=3)
    end = time.monotonic() + 20
    while any(one.name == flight.NAME for one in threading.enumerate()):
        assert time.monotonic() < end
        threading.Event().wait(0.001)
