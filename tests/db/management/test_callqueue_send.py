"""callqueue_send: files of calls, with everything that can be wrong with them."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from callqueue import Discard, Rule, SlidingWindow
from callqueue.models import CallQueue
from callqueue.sending import importer
from tests.db.commands import Ran, run

Rules = Callable[..., None]
GOOD: dict[str, Any] = {"method": "get", "params": {"url": "https://api.example.com/"}}
LINE = json.dumps(GOOD)


def in_envelope(**arguments: Any) -> str:
    """A line of the good call with arguments of send's."""
    return json.dumps({"call_data": GOOD, **arguments})


@pytest.fixture
def two_rules(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/s")]), other=Rule())


@pytest.fixture
def send_file(two_rules: None, tmp_path: Path) -> Callable[..., Ran]:
    """`send_file(content, *options)`: the command on a file of this content."""

    def apply(content: str | bytes, *options: str) -> Ran:
        path = tmp_path / "calls.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return run("send", str(path), *options)

    return apply


Send = Callable[..., Ran]


def test_every_line_becomes_a_call(send_file: Send) -> None:
    ran = send_file(f"{LINE}\n{LINE}\n{LINE}\n", "--rule", "r")
    assert (ran.code, ran.out) == (0, "sent 3 calls\n")
    assert list(CallQueue.objects.values_list("rule", flat=True)) == ["r"] * 3


def test_an_envelope_has_the_arguments_of_send(send_file: Send) -> None:
    line = in_envelope(
        rule="other", key={"workspace": "T1"}, priority=3, cost={"tokens": 5}, unique_key="u",
        not_before="2999-01-31T12:00:00Z", expires_at="2999-02-01T12:00:00+02:00", callback=None,
    )  # fmt: skip
    assert send_file(line, "--rule", "r").code == 0
    call = CallQueue.objects.get()
    told = (call.rule, call.key, call.priority, call.cost, call.unique_key)
    assert told == ("other", '{"workspace":"T1"}', 3, {"tokens": 5}, "u")
    assert call.due_at_dt.isoformat() == "2999-01-31T12:00:00+00:00"


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ("\n\n", 0),
        (json.dumps(GOOD, indent=2), 1),
        ("\n\n" + json.dumps({"call_data": GOOD}, indent="\t") + "\n\n", 1),
        (MARK + f"\r\n\r\n{LINE}\r\n   \r\n{LINE}".encode(), 2),
        (MARK + json.dumps(GOOD, indent=1).encode(), 1),
        (f"{LINE}\n" * 25, 25),
    ],
    ids=["empty", "document", "envelope", "windows", "document, marked", "batches"],
)
def test_lines_documents_marks_and_ends_of_any_kind_are_read(
    send_file: Send, monkeypatch: pytest.MonkeyPatch, content: str | bytes, count: int
) -> None:
    monkeypatch.setattr(importer, "BATCH", 10)
    assert send_file(content).out == f"sent {count} call{'' if count == 1 else 's'}\n"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('{"method": "get"', "is not JSON"),
        (LINE + " " + LINE, "is not JSON: Extra data"),
        ("hello", "is not JSON"),
        (
            '{"method": "get", "method": "post", "params": {"url": "https://a.b/"}}',
            "'method' twice",
        ),
        ('{"method": "get", "params": {"url": "https://a.b/", "params": {"x": NaN}}}', "NaN"),
        (
            '{"method": "get", "params": {"url": "https://a.b/", "params": {"x": -Infinity}}}',
            "not a finite number",
        ),
        (
            '{"method": "get", "params": {"url": "https://a.b/", "params": {"x": 1e400}}}',
            "not a finite number",
        ),
        ("[" * 100_000, "nested too deep"),
        ("9" * 5000, "is not JSON|digits"),
        ('"text"', "call_data"),
        ("null", "call_data"),
        (f"[{LINE}]", "is a list; write one call per line"),
        ('{"method": "gett", "params": {"url": "https://a.b/"}}', "'get'"),
        ('{"method": "get", "params": {"url": "ftp://a.b/"}}', "params.url"),
        (
            '{"method": "get", "params": {"url": "http://127.0.0.1/"}}',
            "127.0.0.1|not allowed|loopback",
        ),
        ('{"method": "get", "params": {"url": "https://a.b/\\ud800"}}', "params.url"),
        (in_envelope(rule="othr"), "did you mean 'other'"),
        (in_envelope(rul="r"), "did you mean 'rule'"),
        (in_envelope(not_before="tomorrow"), "not_before"),
        (in_envelope(not_before=5), "not_before"),
        (in_envelope(not_before="2999-01-01T00:00:00"), "naive"),
        (in_envelope(expires_at="2001-01-01T00:00:00Z"), "past"),
        (in_envelope(rule="r", cost=11), "cost"),
        ('{"call_data": {"method": "get", "params": {"url": "https://a.b/"}}, "rule": 5}', "rule"),
        (in_envelope(priority="high"), "priority"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_reason_and_nothing_is_sent(
    send_file: Send, bad: str, why: str
) -> None:
    ran = send_file(f"{LINE}\n\n{bad}\n{LINE}\n")
    assert ran.code == 1
    assert re.search(f"line 3: .*({why})", ran.error), ran.error
    assert "1 of 3 lines are bad; nothing was sent" in ran.error
    assert ran.out == ""
    assert not CallQueue.objects.exists()


def test_bytes_that_are_not_text_are_a_bad_line(send_file: Send) -> None:
    latin = LINE.replace("example", "ex\xe4mple").encode("latin-1")
    ran = send_file(LINE.encode() + b"\n" + latin + b"\n")
    assert ran.code == 1
    assert "line 2: is not UTF-8 (byte" in ran.error


def test_a_document_over_several_lines_that_is_wrong_is_told_once(send_file: Send) -> None:
    ran = send_file('{\n  "method": "get",\n  "params": {"url": "https://a.b/",}\n}\n')
    assert ran.error.count("line ") == 2
    assert "line 1: is not JSON" in ran.error
    assert "line 3 of it" in ran.error


@pytest.mark.parametrize("bad", ["nonsense", "{"])
def test_skip_bad_sends_the_others_and_still_ends_with_1(send_file: Send, bad: str) -> None:
    """Every bad line is told, the first one too, though a document might begin so."""
    ran = send_file(f"{bad}\n{LINE}\n{{}}\n{LINE}\n", "--skip-bad")
    assert (ran.code, ran.out) == (1, "sent 2 calls\n")
    assert re.findall(r"(?m)^line \d(?=:)", ran.error) == ["line 1", "line 3"]
    assert "2 of 4 lines were skipped" in ran.error


def test_what_was_written_before_a_bad_line_is_taken_back(
    send_file: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "BATCH", 2)
    ran = send_file(f"{LINE}\n" * 5 + "{}\n" + f"{LINE}\n" * 5 + "nonsense\n")
    assert ran.code == 1
    assert [line.partition(":")[0] for line in ran.error.splitlines()[:2]] == ["line 6", "line 12"]
    assert CallQueue.objects.count() == 0


def test_a_unique_key_is_kept_within_a_file_and_across_files(send_file: Send) -> None:
    lines = "\n".join(in_envelope(rule="r", unique_key=f"u{i % 3}") for i in range(6))
    assert send_file(lines).out == "sent 6 calls\n"
    ended = CallQueue.objects.get(unique_key="u0")
    ended.cancel()
    assert send_file(lines).code == 0
    keys = CallQueue.objects.order_by("unique_key").values_list("unique_key", flat=True)
    assert list(keys) == ["u0", "u0", "u1", "u2"]
    assert (
        CallQueue.objects.filter(unique_key="u0", status=CallQueue.Status.NEW)
        .exclude(pk=ended.pk)
        .count()
        == 1
    )


def test_what_the_router_discards_is_counted(send_file: Send, rules: Rules) -> None:
    rules({"ROUTER": lambda data: Discard("not today")}, r=Rule())
    assert send_file(f"{LINE}\n{LINE}\n").out == "sent 0 calls, 2 discarded by the router\n"


def test_all_of_a_file_is_sent_or_nothing(send_file: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import OperationalError

    from callqueue.sending import intake

    monkeypatch.setattr(importer, "BATCH", 2)
    whole = intake.insert_many
    batches: list[int] = []

    def breaks(items: Any, **options: Any) -> Any:
        batches.append(1)
        if len(batches) == 3:
            raise OperationalError("the connection is gone")
        return whole(items, **options)

    monkeypatch.setattr(intake, "insert_many", breaks)
    ran = send_file(f"{LINE}\n" * 6)
    assert ran.code == 1
    assert "the connection is gone" in ran.error
    assert CallQueue.objects.count() == 0


def test_standard_input_is_read_even_if_it_is_a_pipe(
    two_rules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.write(writing, f"{LINE}\n{LINE}\n".encode())
    os.close(writing)
    with os.fdopen(reading, "r") as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        assert run("send", "--rule", "r", "-").out == "sent 2 calls\n"


def test_standard_input_is_the_default(two_rules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(LINE.encode())))
    assert run("send").out == "sent 1 call\n"


def test_wrong_use_is_2(send_file: Send, tmp_path: Path) -> None:
    assert run("send", str(tmp_path / "none")).code == 2
    assert run("send", str(tmp_path)).code == 2
    ran = send_file(LINE, "--rule", "othr")
    assert ran.code == 2
    assert "did you mean 'other'" in ran.error
