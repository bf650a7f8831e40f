"""Progress of long work: a line on standard error that is redrawn while the work goes on.

Only where standard error is a terminal; anywhere else nothing is written, so logs and pipes stay
clean.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PATIENCE = 0.5  # seconds before a line is drawn at all: short work needs none
EVERY = 0.2


class Bar:
    """How far the work is. `update(done, total)` as often as one likes; a total of None shows a
    count and the time.
    """

    def __init__(self, label: str, stream: TextIO | None) -> None:
        self.label, self.done = label, 0
        self.total: int | None = None
        self._stream, self._began = stream, time.monotonic()
        self._ended = threading.Event()
        self._drawn = False
        self._thread = threading.Thread(target=self._redraw, daemon=True)

    def update(self, done: int, total: int | None = None, *, label: str | None = None) -> None:
        """So much is done, of so much. A `label` other than before begins the next piece of work,
        and its time.
        """
        if label is not None and label != self.label:
            self.label, self._began = label, time.monotonic()
        self.done, self.total = done, total

    def _redraw(self) -> None:
        pause = PATIENCE
        while not self._ended.wait(pause):
            self._write(self.line())
            pause = EVERY

    def line(self) -> str:
        """The line as it would be drawn now."""
        elapsed = time.monotonic() - self._began
        if not self.total:
            return (
                f"{self.label}: {self.done:,}, {elapsed:.0f} s"
                if self.done
                else f"{self.label}: {elapsed:.0f} s"
            )
        share = min(1.0, self.done / self.total)
        left = f", {elapsed / share - elapsed:.0f} s left" if share > 0 else ""
        filled = round(24 * share)
        return f"{self.label} [{'#' * filled}{'.' * (24 - filled)}] {share:4.0%} {self.done:,} of {self.total:,}{left}"

    def _write(self, text: str) -> None:
        if self._stream is not None:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[K" + text[:width])
            self._stream.flush()
            self._drawn = True

    def _begin(self) -> None:
        if self._stream is not None:
            self._thread.start()

    def _end(self) -> None:
        self._ended.set()
        if self._stream is not None:
            self._thread.join()
            if self._drawn:
                self._write("")


@contextmanager
def progress(label: str, *, stream: TextIO | None = None, wanted: bool = True) -> Iterator[Bar]:
    """A bar for as long as the block runs, on `stream` (standard error) if that is a terminal and
    it is `wanted`.
    """
    stream = sys.stderr if stream is None else stream
    bar = Bar(label, stream if wanted and _is_terminal(stream) else None)
    bar._begin()
    try:
        yield bar
    finally:
        bar._end()


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False
