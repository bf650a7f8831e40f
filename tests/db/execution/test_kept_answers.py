"""What is kept of an answer, and how a program reads it: from the row, on every database."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from datetime import date
from typing import Any
from unittest.mock import Mock

import pytest
from cryptography.fernet import Fernet
from django.db import connection
from django.test.utils import CaptureQueriesContext

from callqueue import Retry, Rule, Secret, clocks, handler
from callqueue.exceptions import AnswerCut
from callqueue.execution import recorder, request, wire
from callqueue.models import CallAttempt, CallQueue
from callqueue.security.withholding import WITHHELD
from callqueue.states import SUCCEEDED, VOIDED
from callqueue.transitions import Job, Result
from tests.support.behaviour import Vendor, make_together, release, response, run, send
from tests.support.locking import fresh
from tests.support.peer import Peer, answer_bytes, answering

Rules = Callable[..., None]
Status = CallQueue.Status
PNG = b"\x89PNG\r\n\x1a\n\x00\xff" * 20
TOKEN = "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc"


def made(rules: Rules, remote: Vendor, body: bytes, headers: Any = None, **keys: Any) -> CallQueue:
    rules(keys, r=Rule())
    remote.answers["/"] = (200, headers or {}, body)
    call = send("r", "/")
    run()
    return fresh(call)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content-Type": "image/png"}, PNG),
        ({"Content-Type": "text/plain; charset=iso-8859-1"}, b"caf\xe9 \xa3"),
        ({"Content-Type": "text/plain"}, b"caf\xe9"),
        ({}, b"\0\0"),
        ({}, b""),
        ({}, "\ud83d\ude00é".encode("utf-16", "surrogatepass")),
        ({}, b"$sealed:x"),
    ],
)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_the_bytes_that_came_are_the_answers(
    rules: Rules, remote: Vendor, headers: Any, body: bytes, is_sealed: bool
) -> None:
    keys = {"ENCRYPTION_KEYS": [Fernet.generate_key().decode()]} if is_sealed else {}
    answer = made(rules, remote, body, headers, **keys).answer
    assert (answer.status, answer.body, answer.size, answer.is_cut) == (200, body, len(body), False)
    assert dict(answer.headers) == headers
    assert not answer.is_scrubbed


@pytest.mark.parametrize(("own", "most"), [(None, 1000), (100, 100)])
def test_what_is_longer_is_cut_and_attempt_and_answer_say_so(
    rules: Rules, remote: Vendor, own: int | None, most: int
) -> None:
    body = json.dumps({"text": "é" * 5000}, ensure_ascii=False).encode()
    rules({"KEEP_RESPONSE_BYTES": 1000}, r=Rule(keep_response_bytes=own))
    remote.answers["/"] = (200, {}, body)
    call = send("r", "/")
    run()
    answer, attempt = call.answer, call.attempts.get()
    assert (answer.size, answer.is_cut, body.startswith(answer.body)) == (len(body), True, True)
    assert most - 1 <= len(answer.body) <= most
    assert attempt.response_size == len(body)
    assert attempt.error_message == f"{most} of {len(body)} bytes of the answer are kept"
    with pytest.raises(AnswerCut, match=f"{len(answer.body)} of {len(body)} bytes") as refused:
        answer.json()
    assert (refused.value.size, refused.value.kept) == (len(body), len(answer.body))
    assert (fresh(call).status, fresh(call).error_message) == (Status.DONE, "")
    whole = made(rules, remote, b"a\xc3", KEEP_RESPONSE_BYTES=2).answer
    assert (whole.body, whole.is_cut) == (b"a\xc3", False)
    nothing = made(rules, remote, b"{}", KEEP_RESPONSE_BYTES=0)
    answer = nothing.answer
    assert (answer.body, answer.size, answer.is_cut) == (b"", 2, True)
    assert nothing.attempts.get().error_message == ""


@pytest.mark.parametrize("keep", [100, 5000])
def test_where_reading_stopped_the_answer_is_cut_whatever_is_kept(rules: Rules, keep: int) -> None:
    more = {"ALLOWED_NETWORKS": ["127.0.0.0/8"], "MAX_RESPONSE_BYTES": 1000}
    rules({**more, "KEEP_RESPONSE_BYTES": keep}, r=Rule())
    with Peer(answering(answer_bytes(b"1" * 2000))) as peer:
        call = CallQueue.objects.send({"method": "get", "params": {"url": peer.url("/")}}, rule="r")
        run()
    assert (call.answer.is_cut, call.answer.size) == (True, 1001)
    assert call.answer.body == b"1" * min(keep, 1000)
    with pytest.raises(AnswerCut):
        call.answer.json()
    assert "the body was cut at 1000 bytes" in call.attempts.get().error_message


@pytest.mark.parametrize("charset", ["utf-16", "utf-16-be", "utf-32", "hz", "shift_jis", "utf-7"])
@pytest.mark.parametrize("before", ["", " ", "a"])
def test_no_charset_that_is_falsely_claimed_hides_a_secret(charset: str, before: str) -> None:
    """Read as wide letters, two or four bytes of it are one: written as such they would come back."""
    for body in (f"{before}{TOKEN}".encode(), f"{before}{TOKEN}".encode("utf-16") + TOKEN.encode()):
        columns = kept((TOKEN,), body, charset=charset)
        assert columns["response_form"] == "scrubbed"
        assert WITHHELD in columns["response_body"]
        for codec in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
            assert TOKEN[:12].encode() not in columns["response_body"].encode(codec, "replace")


@pytest.mark.parametrize("charset", ["utf-8", "utf-16", "latin-1"])
@pytest.mark.parametrize("prefix", [b"", PNG])
def test_an_answer_that_repeats_a_secret_says_that_it_is_not_what_came(
    rules: Rules, remote: Vendor, charset: str, prefix: bytes
) -> None:
    body = prefix + json.dumps({"id": 7, "key": TOKEN}).encode(charset)
    rules({"SECRETS": {"KEY": TOKEN}}, r=Rule())
    remote.answers["/"] = (200, {"Content-Type": f"text/plain; charset={charset}"}, body)
    params = {"url": "http://vendor.example/", "headers": {"Authorization": Secret("KEY")}}
    call = CallQueue.objects.send({"method": "get", "params": params}, rule="r")
    run()
    answer = call.answer
    assert (answer.is_scrubbed, answer.is_cut, answer.size) == (True, False, len(body))
    assert WITHHELD in answer.text
    assert TOKEN not in f"{answer.text}{call.attempts.get().response_body}"
    with pytest.raises(AnswerCut, match="held a secret"):
        answer.json()
    if not prefix:
        assert answer.json(scrubbed=True) == {"id": 7, "key": WITHHELD}


NOT_YET, DONE, NOBODY = (503, {}, b"not yet"), (200, {}, b"done"), (None, {}, b"")


@pytest.mark.parametrize(
    "came",
    [
        (NOT_YET, DONE),
        (NOT_YET, (404, {}, b"then this")),
        (NOT_YET, (500, {}, b"then this")),
        (NOBODY,),
        (NOT_YET, NOBODY),
        (DONE, NOBODY),
    ],
)
def test_the_answer_is_that_of_the_last_attempt_and_none_where_nobody_answered_it(
    rules: Rules, remote: Vendor, came: Any
) -> None:
    """And stays while the next attempt is under way, or never was."""
    rules(r=Rule(retry=Retry(base=0)))
    call, answer = send("r", "/", "get"), None
    assert call.answer is None
    for count, (status, headers, body) in enumerate(came, 1):
        nobody = wire.Answer(None, None, error="refused")
        remote.answers["/"] = (status, headers, body) if status else nobody
        call.refresh_from_db()
        if call.status == Status.DONE:
            call.requeue(again=True)
        assert (call.answer and call.answer.body) == (answer and answer.body)
        run()
        assert call.attempts.count() == count
        answer = call.answer
        assert (answer and (answer.status, answer.body)) == (status and (status, body))
        assert (call.attempts.get(number=count).response_size is None) is (answer is None)
    call.refresh_from_db()
    if call.status == Status.DONE:
        call.requeue(again=True)
        assert release() == [call]
        assert call.answer.body == b"done"
        call.cancel()
        assert call.attempts.latest("number").outcome == VOIDED
        assert call.answer.body == b"done"


ODD = {"a date": date(2026, 1, 2), "a map": {(1, 2): 3}}


@handler("priced")
def priced(params: Any, context: Any) -> Any:
    return ODD.get(str(params["of"]), params["of"])


@pytest.mark.parametrize(
    ("of", "value", "body"),
    [
        ({"price": 4.5}, {"price": 4.5}, b'{"price": 4.5}'),
        ([1, "é"], [1, "é"], b'[1, "\\u00e9"]'),
        ("text", "text", b'"text"'),
        (0, 0, b"0"),
        (None, None, b""),
        # what is no JSON is kept as text
        ("a date", "2026-01-02", b'"2026-01-02"'),
        ("a map", "{(1, 2): 3}", b'"{(1, 2): 3}"'),
    ],
)
def test_a_handlers_answer_is_what_it_returned(
    rules: Rules, of: Any, value: Any, body: bytes
) -> None:
    rules(r=Rule())
    call = CallQueue.objects.send({"method": "priced", "params": {"of": of}}, rule="r")
    run()
    answer = call.answer
    assert (answer.status, answer.json(), dict(answer.headers)) == (None, value, {})
    assert answer.body == body


# --- What it may cost to clean


def job(rule: str = "r", seconds: float = 0.0) -> Job:
    call = CallQueue(rule=rule, method="get", call_data={"method": "get", "params": {}})
    ends = clocks.monotonic() + 2 * seconds
    return Job(CallAttempt(), call, clocks.Reading(0, 0.0, 0.0), Rule(), lease_ends_at=ends)


def kept(
    values: tuple[str, ...],
    body: bytes = b"",
    headers: Any = (),
    of: Any = None,
    charset: Any = None,
) -> dict[str, Any]:
    result = Result(of or job(), SUCCEEDED, Status.DONE, None, 0, 0)
    result.response = response(200, {}, body)
    result.response.headers, result.response.encoding = dict(headers), charset
    request.scrub_result(result, values)
    return dict(result.kept)


PEM = "-----BEGIN KEY-----\n" + secrets.token_urlsafe(2400) + "\n-----END KEY-----"
DEAREST = {
    "a key of one letter": ("A" * 5000, "A" * 70_000),
    "a key of one letter, escaped": ("A" * 5000, "%41" * 70_000),
    "a key in pieces": (PEM, " ".join(PEM[at : at + 9] for at in range(20, 2000, 5)) * 20),
    "a key again and again": (PEM, json.dumps(PEM) * 20),
}


@pytest.mark.parametrize("what", DEAREST)
def test_what_is_dear_to_clean_tells_nothing_and_takes_no_longer_than_its_length(
    rules: Rules, what: str
) -> None:
    rules(r=Rule())
    value, text = DEAREST[what]
    began = time.thread_time()
    columns = kept((value,), text.encode(), {f"X-{n}": text[:6700] for n in range(97)})
    assert time.thread_time() - began < 2.0
    assert value[40:60] not in columns["response_body"]
    assert value[40:60] not in str(columns["response_headers"])


def test_an_answer_that_repeats_nothing_is_kept_whole_whatever_the_secret() -> None:
    body = json.dumps([{"id": n, "name": f"Name of {n}"} for n in range(2000)]).encode()[:65000]
    columns = kept((PEM,), body, {f"X-{n}": "text/html" for n in range(20)}, job(seconds=5))
    assert columns["response_body"].encode() == body
    assert len(columns["response_headers"]) == 20


def test_of_headers_no_more_is_looked_at_than_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    redact = Mock(wraps=request.redact_headers)
    monkeypatch.setattr(request, "redact_headers", redact)
    columns = kept((), b"", {f"X-{n}": "[" + "[1]," * 1700 + "1]" for n in range(97)})
    looked = [sum(map(len, made.args[0].values())) for made in redact.call_args_list]
    assert 0 < sum(looked) <= request.MOST_OF_HEADERS
    assert all(len(value) <= 2000 for value in columns["response_headers"].values())
    assert columns["response_headers"]


@pytest.mark.parametrize("gap", range(0, 60, 7))
def test_no_half_of_a_credential_is_kept_where_a_header_is_cut(gap: int) -> None:
    value = "x" * (1960 + gap) + f" https://user:{TOKEN}@h.example/ " + "y" * 9000
    for text in (value, "token=abcdefgh&" * 100 + value):
        for secrets_of_it, name, shown in [
            ((), "X", text),
            ((TOKEN,), "X", text.replace("https://user:", "")),
            ((TOKEN, "hidden-in-a-name"), "X-hidden-in-a-name", text),
        ]:
            (whole,) = kept(secrets_of_it, b"", {name: shown})["response_headers"].values()
            assert not any(TOKEN[at : at + 4] in whole for at in range(len(TOKEN) - 3))


def test_a_rule_whose_turn_is_taken_keeps_no_other_rule_waiting() -> None:
    text = b"as large as needs a turn, and cheap " * 1000
    turn = request._turns.setdefault("hooks", threading.Lock())
    with turn:
        columns = kept((PEM,), text, {"X": PEM[:900]}, job("hooks", 0.0))
        assert (columns["response_form"], columns["response_headers"]) == ("withheld", {})
        assert (columns["response_status"], columns["response_body"]) == (200, request.NOT_KEPT)
        assert kept((PEM,), b"small", of=job("hooks", 0.0))["response_body"] == "small"
        assert kept((PEM,), text, of=job("bank", 5.0))["response_form"] != "withheld"
    assert not turn.locked()


def test_what_is_kept_is_composed_once_and_not_while_rows_are_locked(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a record has to be written in a second way as well: an attempt is somebody else's."""
    rules(r=Rule())
    calls, composed = [send("r", f"/{number}") for number in range(4)], list[bool]()
    compose = request._columns_of_answer

    def columns(*given: Any) -> Any:
        composed.append(recorder.database.in_transaction("default"))
        return compose(*given)

    def lost() -> Any:
        calls[2].attempts.update(worker="another")
        return 200, {}, b"{}"

    monkeypatch.setattr(request, "_columns_of_answer", columns)
    inside = recorder.database.in_transaction("default")  # a test's own transaction
    remote.answers["/2"] = lost
    release()
    ids = list(CallAttempt.objects.order_by("pk").values_list("pk", flat=True))
    with CaptureQueriesContext(connection) as said:
        make_together(ids)
    assert composed == [inside] * 4
    assert CallAttempt.objects.filter(finished_at=None).count() == 1
    of_attempts = [one["sql"] for one in said.captured_queries if "callattempt" in one["sql"]]
    assert all("WHERE" in sql for sql in of_attempts if sql.startswith("SELECT"))
