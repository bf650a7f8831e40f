"""Shows how far the calls of each rule are: bars where there is a terminal, else a line every few
seconds.

In: the database, read twice a second. Out: the screen. Returns when every call has ended, or when
the time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from example_project.demo.calls import COUNTS, RULES

LOOK = 0.5  # seconds between two looks
LINE = 5.0  # seconds between two plain lines


class Counts(dict[str, tuple[int, int]]):
    """rule -> calls that have ended, calls that wait for a retry."""

    def are_complete(self) -> bool:
        return all(self.get(rule, (0, 0))[0] == COUNTS[rule] for rule in RULES)


class Display(Protocol):
    """Shows counts. `flush` says that these are the last."""

    def show(self, counts: Counts, *, flush: bool = False) -> None: ...


def follow(console: Console, *, seconds: float, check: Callable[[], None]) -> bool:
    """Show progress until every call has ended (True) or the time is up (False); `check` may raise
    in between.
    """
    if not console.is_terminal:
        return _follow(Lines(console), seconds, check)
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        return _follow(Bars(progress), seconds, check)


def _follow(display: Display, seconds: float, check: Callable[[], None]) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        counts = read_counts()
        complete = counts.are_complete()
        display.show(counts, flush=complete)
        if complete or time.monotonic() > deadline:
            return complete
        check()
        time.sleep(LOOK)


def read_counts() -> Counts:
    """What the database says of each rule's calls, in one statement."""
    from django.db.models import Count, Q

    from callqueue.models import CallQueue

    status = CallQueue.Status
    final = Q(
        status__in=[status.DONE, status.FAILED, status.CANCELLED, status.EXPIRED, status.UNKNOWN]
    )
    rows = CallQueue.objects.order_by("rule").values_list("rule")
    counted = rows.annotate(
        ended=Count("pk", filter=final), retrying=Count("pk", filter=Q(status=status.ERROR))
    )
    return Counts({rule: (ended, retrying) for rule, ended, retrying in counted})


class Bars:
    """A bar per rule."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.bars: dict[str, TaskID] = {
            rule: progress.add_task(rule, total=COUNTS[rule], note="") for rule in RULES
        }

    def show(self, counts: Counts, *, flush: bool = False) -> None:
        for rule, bar in self.bars.items():
            ended, retrying = counts.get(rule, (0, 0))
            note = f"{retrying} to be retried" if retrying else ""
            self.progress.update(bar, completed=ended, note=f"{note:16}")


class Lines:
    """A line every few seconds."""

    def __init__(self, console: Console) -> None:
        self.console, self.started, self.next = console, time.monotonic(), 0.0

    def show(self, counts: Counts, *, flush: bool = False) -> None:
        now = time.monotonic()
        if now < self.next and not flush:
            return
        self.next = now + LINE
        parts = [f"{rule} {counts.get(rule, (0, 0))[0]}/{COUNTS[rule]}" for rule in RULES]
        self.console.print(f"{now - self.started:5.1f} s  " + "   ".join(parts))
