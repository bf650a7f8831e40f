"""A progress bar for long work, which rich draws on standard error while the work goes on.

Only where standard error is a terminal and rich is installed, the extra `progress`. Anywhere else
nothing is written, so logs and pipes stay clean.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 0.5  # seconds before a bar is drawn at all: short work needs none


class Update(Protocol):
    """Says how far the work is, as often as one likes: so much is done, of so much (None: nobody
    knows). A `label` other than before begins the next piece of work, and its time.
    """

    def __call__(
        self, done: int, total: int | None = None, *, label: str | None = None
    ) -> None: ...


@contextmanager
def progress(
    label: str, *, stream: TextIO | None = None, wanted: bool = True
) -> Iterator[Update | None]:
    """A bar for as long as the block runs, if it is `wanted`, on `stream` (standard error). The
    block gets what updates the bar; None where none is drawn.
    """
    stream = sys.stderr if stream is None else stream
    bar = _bar(stream) if wanted and _is_terminal(stream) else None
    if bar is None:
        yield None
        return
    begin = threading.Timer(PATIENCE, bar.start)
    begin.start()
    try:
        yield _update_of(bar, label)
    finally:
        begin.cancel()
        begin.join()
        if bar.live.is_started:
            bar.stop()


def _bar(stream: TextIO) -> Progress | None:
    """A bar that leaves no trace when it ends; None where rich is not installed."""
    try:
        from rich import progress as rich
        from rich.console import Console
    except ImportError:
        return None
    return rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _update_of(bar: Progress, label: str) -> Update:
    task = bar.add_task(label, total=None)

    def update(done: int, total: int | None = None, *, label: str | None = None) -> None:
        if label is not None and label != bar.tasks[0].description:
            bar.reset(task, description=label)
        bar.tasks[0].total = total
        bar.update(task, completed=done)

    return update


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False
