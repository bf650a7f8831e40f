"""A process that may have no more descriptors, or threads, for the length of a block."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def no_descriptors() -> Iterator[None]:
    """The lowest number that is free is the first that the system refuses."""
    free = os.dup(1)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def few_threads(name: str, most: int = 0) -> Iterator[None]:
    """The system starts so many threads of this name, and no more."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_few(thread: threading.Thread) -> None:
        if thread.name == name:
            if len(started) == most:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    with patch.object(threading.Thread, "start", start_few):
        yield
