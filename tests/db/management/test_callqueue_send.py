"""callqueue_send: files of calls, with everything that can be wrong with them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import OperationalError

from callqueue import Discard, Rule, SlidingWindow
from callqueue.models import CallQueue
from callqueue.sending import importer, intake
from tests.db.commands import Ran, run

Rules = Callable[..., None]
GOOD: dict[str, Any] = {"method": "get", "params": {"url": "https://api.example.com/"}}
LINE = json.dumps(GOOD)


def in_envelope(**arguments: Any) -> str:
    """A line of the good call with arguments of send's."""
    return json.dumps({"call_data": GOOD, **arguments})


@pytest.fixture
def send_file(rules: Rules, tmp_path: Path) -> Callable[..., Ran]:
    """`send_file(content, *options)`: the command on a file of this content, with two rules."""
    rules(r=Rule(limits=[SlidingWindow("10/s")]), other=Rule())

    def apply(content: str | bytes, *options: str) -> Ran:
        path = tmp_path / "calls.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return run("send", str(path), *options)

    return apply


Send = Callable[..., Ran]


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


def test_how_many_lines_are_done_is_told_after_each_batch(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "BATCH", 10)
    rules(default=Rule())
    told: list[int] = []
    lines = BytesIO(f"{LINE}\n".encode() * 25)
    importer.send_file(lines, using="default", refused=Mock(), progress=told.append)
    assert told == [10, 20, 25]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('{"method": "get"', "is not JSON"),
        (LINE + " " + LINE, "is not JSON: Extra data"),
        ("hello", "is not JSON"),
        (LINE.replace("example", "ex\xe4mple").encode("latin-1"), r"is not UTF-8 \(byte"),
        (
            '{"method": "get", "method": "post", "params": {"url": "https://a.b/"}}',
            "'method' twice",
        ),
        (LINE.replace('"url"', '"json": NaN, "url"'), "NaN"),
        (LINE.replace('"url"', '"json": -Infinity, "url"'), "not a finite number"),
        (LINE.replace('"url"', '"json": 1e400, "url"'), "not a finite number"),
        ("[" * 100_000, "nested too deep"),
        ("9" * 5000, "is not JSON|digits"),
        ('"text"', "call_data"),
        ("null", "call_data"),
        (f"[{LINE}]", "is a list; write one call per line"),
        (LINE.replace("get", "gett"), "'get'"),
        (LINE.replace("https", "ftp"), "params.url"),
        (LINE.replace("com/", "com/\\ud800"), "params.url"),
        (in_envelope(rule="othr"), "did you mean 'other'"),
        (in_envelope(rule=5), "rule"),
        (in_envelope(rul="r"), "did you mean 'rule'"),
        (in_envelope(not_before="tomorrow"), "not_before"),
        (in_envelope(not_before=5), "not_before"),
        (in_envelope(not_before="2999-01-01T00:00:00"), "naive"),
        (in_envelope(expires_at="2001-01-01T00:00:00Z"), "past"),
        (in_envelope(rule="r", cost=11), "cost"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_reason_and_nothing_is_sent(
    send_file: Send, bad: str | bytes, why: str
) -> None:
    bad = bad if isinstance(bad, bytes) else bad.encode()
    line = LINE.encode()
    ran = send_file(line + b"\n\n" + bad + b"\n" + line + b"\n")
    assert ran.code == 1
    assert re.search(f"line 3: .*({why})", ran.error), ran.error
    assert "1 of 3 lines are bad; nothing was sent" in ran.error
    assert ran.out == ""
    assert not CallQueue.objects.exists()


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
    CallQueue.objects.get(unique_key="u0").cancel()
    assert send_file(lines).code == 0
    calls = CallQueue.objects.order_by("unique_key", "pk").values_list("unique_key", "status")
    assert list(calls) == [("u0", CallQueue.Status.CANCELLED), ("u0", 0), ("u1", 0), ("u2", 0)]


def test_what_the_router_discards_is_counted(send_file: Send, rules: Rules) -> None:
    rules({"ROUTER": lambda data: Discard("not today")}, r=Rule())
    assert send_file(f"{LINE}\n{LINE}\n").out == "sent 0 calls, 2 discarded by the router\n"


def test_standard_input_is_read_even_if_it_is_a_pipe_and_is_the_default(
    send_file: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (("--rule", "other", "-"), ()):
        reading, writing = os.pipe()
        os.write(writing, f"{LINE}\n{LINE}\n".encode())
        os.close(writing)
        with os.fdopen(reading, "r") as pipe:
            monkeypatch.setattr("sys.stdin", pipe)
            assert run("send", *arguments).out == "sent 2 calls\n"
    rules = CallQueue.objects.order_by("pk").values_list("rule", flat=True)
    assert list(rules) == ["other", "other", "default", "default"]


def test_a_file_that_is_not_there_is_wrong_use(send_file: Send, tmp_path: Path) -> None:
    assert run("send", str(tmp_path / "none")).code == run("send", str(tmp_path)).code == 2
    ran = send_file(LINE, "--rule", "othr")
    assert (ran.code, "did you mean 'other'" in ran.error) == (2, True)


def test_all_of_a_file_is_sent_or_nothing(send_file: Send, monkeypatch: pytest.MonkeyPatch) -> None:
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
