"""How far long work is: one line on standard error while it goes on. Only in a terminal: logs and
pipes stay clean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

EVERY_S = 0.1
Update = Callable[..., None]  # (done, total=None), as often as one likes


@contextmanager
def progress(
    label: str, *, stream: TextIO | None = None, wanted: bool = True
) -> Iterator[Update | None]:
    """A line for as long as the block runs, which leaves no trace. The block gets what updates it;
    None where none is shown.
    """
    stream = sys.stderr if stream is None else stream
    if not wanted or not stream.isatty():
        yield None
        return
    shown_at = 0.0

    def update(done: int, total: int | None = None) -> None:
        nonlocal shown_at
        if (now := time.monotonic()) - shown_at < EVERY_S:
            return
        shown_at = now
        of = f" of {total:,} ({100 * done // total} %)" if total else ""
        stream.write(f"\r{label} {done:,}{of}\x1b[K")
        stream.flush()

    stream.write(f"\r{label} ...")
    stream.flush()
    try:
        yield update
    finally:
        stream.write("\r\x1b[K")
        stream.flush()
