"""The calls of one message side by side, and whatever one of them raises."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Any

import pytest

from callqueue.execution import thread_pool


def made(jobs: list[Any], work: Any, threads: int = 1) -> tuple[list[Any], BaseException | None]:
    """What was handed over, and what was raised first. A batch that waits for ever fails the test,
    not the whole run.
    """
    ended: list[Any] = []
    bell = queue.SimpleQueue[Any]()
    batch = thread_pool.Batch(jobs, work, bell)

    def gather() -> None:
        batch.begin(threads)
        while not batch.is_over:
            with suppress(queue.Empty):
                bell.get(timeout=thread_pool.STALL)
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


def test_jobs_wait_for_the_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have a limit of its own, and every call in flight is a thread."""
    monkeypatch.setattr(thread_pool, "_the_pool", None)
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_few(thread: threading.Thread) -> None:
        if thread.name == "callqueue-calls" and len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.extend([thread] if thread.name == "callqueue-calls" else [])
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    together = threading.Barrier(2)

    def work(job: int) -> int:
        together.wait(5)
        return job

    ended, raised = made(list(range(8)), work, threads=8)
    assert sorted(ended) == list(range(8))
    assert raised is None


def test_a_thread_that_met_one_serves_the_next_message() -> None:
    def leaving(job: int) -> int:
        raise SystemExit

    made([1, 2, 3], leaving, threads=3)
    threads = threading.active_count()
    assert sorted(made([1, 2, 3], lambda job: job, threads=3)[0]) == [1, 2, 3]
    assert threading.active_count() <= threads
