"""What a process does that may have no more descriptors: for how long it takes no calls, and how many
it takes at most.
"""

from __future__ import annotations

import logging
import math
import os
import resource

import pytest

from callqueue.execution import starvation


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The process's clock, in the test's hands."""
    now = [1000.0]
    monkeypatch.setattr(starvation.time, "monotonic", lambda: now[0])
    return now


def _seconds_of(pause: starvation.Pause, clock: list[float]) -> float:
    """For how long calls are not taken, from now on."""
    began = clock[0]
    while pause.is_on:
        clock[0] += 0.125
    return clock[0] - began


def test_it_pauses_for_a_second_and_longer_where_that_was_of_no_help(clock: list[float]) -> None:
    pause, seconds = starvation.Pause(), []
    assert not pause.is_on
    for _ in range(6):
        pause.begin("no more")
        seconds.append(_seconds_of(pause, clock))
    assert seconds == [1, 2, 4, 8, 10, 10]
    clock[0] += 60
    pause.begin("no more")
    assert _seconds_of(pause, clock) == 1
    pause = starvation.Pause()
    for ahead in (0.5, 0.0):
        pause.begin("no more")
        clock[0] += ahead
    assert _seconds_of(pause, clock) == 0.5, "calls that were taken before make it no longer"


def test_it_says_so_once_a_minute(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    pause = starvation.Pause()
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
    starvation._open.cache_clear()
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * is_open)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert starvation.most() == most
    starvation._open.cache_clear()
