"""Progress is drawn in a terminal, and nowhere else."""

from __future__ import annotations

import io
import threading

from callqueue.management import progress as module
from callqueue.management.progress import progress


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        if "%" in text:
            self.drawn.set()
        return count


def test_nothing_is_written_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with progress("working", stream=stream) as bar:
        bar.update(5, 10)
    assert stream.getvalue() == ""


def test_nothing_is_written_where_it_is_not_wanted() -> None:
    stream = Terminal()
    with progress("working", stream=stream, wanted=False) as bar:
        bar.update(5, 10)
    assert stream.getvalue() == ""


def test_a_terminal_shows_how_far_the_work_is_and_a_clean_line_at_the_end(monkeypatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.001)
    stream = Terminal()
    with progress("working", stream=stream) as bar:
        bar.update(2500, 10_000)
        assert stream.drawn.wait(10)
    assert "25% 2,500 of 10,000" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_without_a_total_the_count_and_the_time_are_shown() -> None:
    with progress("reading", stream=io.StringIO()) as bar:
        bar.update(1200)
        assert bar.line() == "reading: 1,200, 0 s"
        bar.update(3, 6, label="writing")
        assert bar.line().startswith("writing [############............]  50% 3 of 6")
