"""Progress is drawn in a terminal, and nowhere else."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from callqueue.management.progress import progress

MARKS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # what a terminal acts on, and does not show


class Terminal(io.StringIO):
    def __init__(self, wanted: str = "%") -> None:
        super().__init__()
        self.wanted, self.drawn = wanted, threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.wanted in self.shown():
            self.drawn.set()
        return count

    def shown(self) -> str:
        return MARKS.sub("", self.getvalue())


@pytest.fixture(autouse=True)
def _a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")


def test_nothing_is_written_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with progress("working", stream=stream) as update:
        assert update is None
    assert stream.getvalue() == ""


def test_nothing_is_written_where_it_is_not_wanted() -> None:
    stream = Terminal()
    with progress("working", stream=stream, wanted=False) as update:
        assert update is None
    assert stream.getvalue() == ""


def test_nothing_is_written_where_rich_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    stream = Terminal()
    with progress("working", stream=stream) as update:
        assert update is None
    assert stream.getvalue() == ""


def test_a_terminal_shows_how_far_the_work_is_and_a_clean_line_at_the_end() -> None:
    stream = Terminal("25%  2500/10000")
    with progress("working", stream=stream) as update:
        assert update is not None
        update(2500, 10_000)
        assert stream.drawn.wait(10)
    assert stream.getvalue().endswith("\x1b[2K")


def test_without_a_total_the_count_and_the_time_are_shown() -> None:
    stream = Terminal("1200/? 0:00:0")
    with progress("reading [ab", stream=stream) as update:
        assert update is not None
        update(1200)
        assert stream.drawn.wait(10)
        stream.wanted, stream.drawn = "50% 3/6", threading.Event()
        update(3, 6)
        assert stream.drawn.wait(10)
    assert "reading [ab" in stream.shown()
