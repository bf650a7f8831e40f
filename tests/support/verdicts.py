"""Two kinds of failure: what was promised was not kept, and it took longer than a busy machine may
take.

A `Verdict` is about what the vendor recorded or the table says: over the limit, arrived twice,
lost, stuck. No test that found one is ever tried again. `Late` is about time, a share of it, or a
latency: tests with processes of their own are tried again.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from tests.support.recorder import highest_in_window


class Verdict(AssertionError):
    """What was promised was not kept."""


class Late(AssertionError):
    """It did not happen in the time that it was given."""


FORGIVEN = (Late, TimeoutError, subprocess.TimeoutExpired)


@contextmanager
def verdict() -> Iterator[None]:
    """What is asserted in here is a verdict."""
    with _asserted_as(Verdict):
        yield


@contextmanager
def on_a_quiet_machine() -> Iterator[None]:
    """What is asserted in here is a matter of time."""
    with _asserted_as(Late):
        yield


@contextmanager
def _asserted_as(kind: type[AssertionError]) -> Iterator[None]:
    """An assertion that fails in here is of this kind, unless it says itself which it is."""
    try:
        yield
    except (Verdict, Late):
        raise
    except AssertionError as error:
        raise kind(str(error)) from None


def wait_until(
    is_so: Callable[[], Any],
    seconds: float = 60.0,
    story: Callable[[], str] = lambda: "it never came",
) -> None:
    """Look every fiftieth of a second; Late, with the story, when the time is up."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise Late(story())
        time.sleep(0.02)


def until_none_is_left(left: Callable[[], Any], seconds: float, *, stuck: float = 30.0) -> None:
    """A Verdict if what is left does not change for `stuck` seconds, Late if it goes on."""
    deadline = time.monotonic() + max(seconds, stuck)
    seen, changed = None, time.monotonic()
    while now_left := left():
        now = time.monotonic()
        if now_left != seen:
            seen, changed = now_left, now
        if now - changed > stuck:
            raise Verdict(f"stuck for {stuck:g} s, or lost: {now_left}")
        if now > deadline and now - changed < stuck / 2:
            raise Late(f"not ended within {seconds:g} s: {now_left}")
        time.sleep(0.05)


def never_over(instants: Iterable[float], limit: int, window: float, of: str = "the limit") -> None:
    """Verdict, with the arrivals of the fullest window, if one holds more than the limit."""
    ordered = sorted(instants)
    highest = highest_in_window(ordered, window)
    if highest > limit:
        fullest = (
            one for one in ordered if sum(one <= at < one + window for at in ordered) == highest
        )
        first = next(fullest)
        within = [at - first for at in ordered if first <= at < first + window]
        gaps = [f"{later - earlier:.4f}" for earlier, later in pairwise(within)]
        raise Verdict(
            f"{of}: {highest} in a window of {window:g} s that allows {limit}; between them {', '.join(gaps)} s"
        )
