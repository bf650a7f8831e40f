"""Progress is shown in a terminal, and nowhere else."""

from __future__ import annotations

import io
from contextlib import suppress

import pytest

from callqueue.management.base import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "wanted"), [(io.StringIO(), True), (Terminal(), False)])
def test_nothing_is_written_where_nobody_wants_it(stream: io.StringIO, wanted: bool) -> None:
    with progress("working", stream=stream, wanted=wanted) as update:
        assert update is None
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("done", "shown"),
    [((2500, 10_000), "2,500 of 10,000 (25 %)"), ((1200,), "1,200"), ((3, 0), "3")],
)
def test_a_terminal_shows_how_far_the_work_is_and_a_clean_line_at_the_end(
    done: tuple[int, ...], shown: str
) -> None:
    """Where the work fails as well."""
    stream = Terminal()
    with suppress(ValueError), progress("working", stream=stream) as update:
        assert update is not None
        update(*done)
        update(9999)  # too soon to be read
        assert stream.getvalue().endswith(f"\rworking {shown}\x1b[K")
        raise ValueError
    assert stream.getvalue().endswith("\r\x1b[K")
