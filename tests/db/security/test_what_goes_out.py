"""Nothing gets out. Who wants in: tests/attacks/test_network.py."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.db import connection
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import callqueue
from callqueue import GiveUp, HoldUntil, RetryLater, Rule, SlidingWindow
from callqueue.exceptions import CallQueueError
from callqueue.execution import wire
from callqueue.execution.connection import Refused
from callqueue.handlers import HTTP_METHODS
from callqueue.maintenance import reconcile
from callqueue.models import CallQueue, Hold
from callqueue.security import secrets
from callqueue.security.secrets import Secret
from tests.support import behaviour, samples
from tests.support.peer import Listener
from tests.support.stub import serving

Rules = Callable[..., None]
Status = CallQueue.Status
WIDE = SlidingWindow("100000/s")


def make(call: CallQueue) -> CallQueue:
    """Release the call and make it in this process; as it is afterwards."""
    behaviour.run()
    call.refresh_from_db()
    return call


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "inside.example"},
        {"hOST": "inside.example"},
        {"Transfer-Encoding": "chunked"},
        {"Content-Length": "3"},
        {"Connection": "keep-alive, X"},
        {"X-Twice": "1", "x-twice": "2"},
        {"X": "a\r\nHost: inside.example"},
        {"X Y": "a"},
    ],
)
@pytest.mark.parametrize("method", ["post", "get"])
def test_a_row_that_send_never_saw_is_checked_as_send_checks(
    rules: Rules, listen: Callable[..., Listener], headers: dict[str, str], method: str
) -> None:
    """It writes no header that says where a request begins and ends, nor whose it is."""
    listener = listen()
    rules(default=Rule(limits=[WIDE]), more={"ALLOWED_NETWORKS": ["127.0.0.0/8"]})
    url = f"http://127.0.0.1:{listener.port}/"
    wrong = [{"url": url, "proxies": {}}, {"url": url, "verify": False}, [url], url, None]
    for params in ({"url": url, "data": "a=b", "headers": headers}, *wrong):
        call_data = {"method": method, "params": params}
        call = make(CallQueue.objects.create(call_data=call_data, method=method, ready=True))
        assert call.status == Status.FAILED and "inside" not in call.error_message
        assert params in wrong or "headers" in call.error_message
    assert listener.connections == 0


# --- Secrets and payloads

SECRET, PAYLOAD, PASSWORD = "sk-live-5e1f-secret", "patient-zero-payload", "pass-5e1f-word"


def test_no_secret_and_no_payload_is_in_the_database_or_the_log(
    rules: Rules, listen: Callable[..., Listener], caplog: pytest.LogCaptureFixture
) -> None:
    """Of calls full of both, encrypted, to vendors that throw all of it back at us in every way."""
    caplog.set_level(logging.DEBUG)
    echo = f'{{"error": "bad token {SECRET} for {PAYLOAD}, {PASSWORD}"}}'
    echoed = f"X-Echo: {SECRET}\r\nSet-Cookie: session={SECRET}\r\nX-Payload: {PAYLOAD}\r\n"
    answers = [
        f"HTTP/1.1 {line}\r\n{echoed}Content-Length: {len(echo)}\r\n\r\n{echo}"
        for line in ("200 OK", "400 Bad", "500 Broken", "429 Slow", f"418 {SECRET} {PAYLOAD}")
    ]
    answers.append(f"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{echo}")
    answers.append(f"garbage {SECRET} {PAYLOAD}")
    more = {
        "SECRETS": {"KEY": SECRET, "PW": PASSWORD},
        "ALLOWED_NETWORKS": ["127.0.0.0/8"],
        "ENCRYPTION_KEYS": [Fernet.generate_key().decode()],
    }
    rules(default=Rule(limits=[WIDE]), more=more)
    params = {
        "json": {"token": Secret("KEY"), "patient": PAYLOAD},
        "headers": {"Authorization": Secret("KEY"), "X-Patient": PAYLOAD},
        "params": {"api_key": Secret("KEY"), "patient": PAYLOAD},
        "auth": ["user", Secret("PW")],
    }
    ports = [listen(answer=answer.encode()).port for answer in answers]
    urls = [f"http://127.0.0.1:{port}/{PAYLOAD}?patient={PAYLOAD}" for port in ports]
    urls += [f"http://no-such-host.invalid/{PAYLOAD}", "http://127.0.0.1:1/"]
    for url in urls:
        CallQueue.objects.send({"method": "post", "params": {"url": url, **params}})
    behaviour.run()
    stored = dump()
    assert "callqueue_callattempt" in stored
    said = [one for one in caplog.records if not one.name.startswith("django.db")]
    assert said
    for text in (SECRET, PASSWORD, PAYLOAD):
        place = stored.find(text)
        assert place < 0, stored[max(0, place - 300) : place + 100]
        for record in said:
            assert text not in f"{record.getMessage()} {record.__dict__}"
    first = CallQueue.objects.earliest("pk")
    assert first.call_data["params"]["json"]["patient"] == PAYLOAD, "whoever has the keys reads it"
    assert first.attempts.get().response_body.startswith('{"error": ')
    assert SECRET not in first.attempts.get().response_body


def dump() -> str:
    """Everything in every table of the app, as the database has it."""
    lines = []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            if table.startswith("callqueue_"):
                cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
                lines += [f"{table}: {row}" for row in cursor.fetchall()]
    return "\n".join(lines)


def raising(params: Any, context: Any) -> None:
    """A handler whose exception says more than it should."""
    who = params["who"]["name"]
    raise ValueError(f"cannot reach {params['to']} ({who!r}) with {params['token']}")


def test_what_a_handler_raises_is_kept_without_the_payload(
    rules: Rules, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    more = {"HANDLERS": {"say": f"{__name__}.raising"}, "SECRETS": {"KEY": SECRET}}
    rules(default=Rule(limits=[WIDE]), more=more)
    params = {"to": "someone@example.com", "who": {"name": PAYLOAD}, "token": Secret("KEY")}
    call = make(CallQueue.objects.send({"method": "say", "params": params}))
    assert call.status == Status.ERROR
    kept = "cannot reach [payload] ('[payload]') [withheld: it repeats a secret]"
    assert call.error_message == f"ValueError: {kept}"
    said = [one.getMessage() for one in caplog.records if not one.name.startswith("django.db")]
    assert PAYLOAD not in "".join(said)


def test_keys_are_rotated(rules: Rules, remote: behaviour.Vendor, settings: Any) -> None:
    """The new key seals, either opens; a row whose key is gone fails by itself."""

    def keyed(*keys: str) -> None:
        rules(default=Rule(limits=[WIDE]), more={"ENCRYPTION_KEYS": list(keys)})

    old, new = (Fernet.generate_key().decode() for _ in range(2))
    keyed(old)
    first, stale = behaviour.send(path="/first"), behaviour.send(path="/stale")
    stale_row = CallQueue.objects.filter(pk=stale.pk)
    keyed(new, old)
    stale_row.update(due_at_dt=datetime(2100, 1, 1, tzinfo=UTC), ready=False)
    second = behaviour.send(path="/second")
    assert make(second).status == make(first).status == Status.DONE
    keyed(new)
    stale_row.update(due_at_dt=datetime(2020, 1, 1, tzinfo=UTC), ready=True)
    third = behaviour.send(path="/third")
    assert (make(third).status, make(stale).status) == (Status.DONE, Status.FAILED)
    assert "ENCRYPTION_KEYS" in stale.error_message
    assert sorted(remote.paths()) == ["/first", "/second", "/third"]


def test_nothing_of_a_payload_is_a_format_an_import_or_a_keyword(
    rules: Rules, remote: behaviour.Vendor
) -> None:
    """Percent signs, braces, dotted paths, look-ups: all of it is text, and arrives as it was sent."""
    rules(default=Rule(limits=[WIDE]))
    nasty = {
        "%s %(x)s {0} {call.pk}": "{{ 7 * 7 }} {% load x %}",
        "pk__in": [1],
        "__class__": "os.system",
        "a' OR 1=1 --": "\\u0041",
    }
    url, headers = "http://vendor.example/%7Bx%7D", {"X-Format": "%s{0}"}
    params = {"url": url, "json": nasty, "headers": headers}
    names = {"key": "%s{0}'; DROP TABLE x; --", "unique_key": "%(x)s"}
    call = CallQueue.objects.send({"method": "post", "params": params}, **names)
    assert make(call).status == Status.DONE
    assert remote.requests[0][2]["json"] == nasty
    for wrong in (
        {"method": "os.system", "params": {}},
        {"method": "__import__", "params": {"url": "x"}},
        {"method": "post", "pk": 1},
    ):
        with pytest.raises(CallQueueError):
            CallQueue.objects.send(wrong)
    with pytest.raises(CallQueueError):
        CallQueue.objects.send_many(
            [{"call_data": {"method": "get", "params": params}, "status": 3}]
        )


# --- What a fuzzer thinks of

OTHER_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "key": samples.texts | samples.values,
        "cost": samples.values | st.integers(0, 5),
        "priority": samples.values | st.integers(-9, 9),
        "unique_key": samples.texts | samples.values,
        "callback": samples.texts | samples.values,
        "rule": samples.texts | st.just("default"),
        "not_before": st.datetimes(timezones=st.none() | st.just(UTC)) | samples.values,
        "expires_at": st.datetimes(timezones=st.none() | st.just(UTC)) | samples.values,
    },
)


@hypothesis_settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(call_data=samples.call_datas, options=OTHER_ARGUMENTS)
def test_whatever_is_sent_is_stored_as_it_was_or_refused_and_nothing_written(
    rules: Rules, call_data: Any, options: Any
) -> None:
    """And what was stored a worker can compose, or refuse by itself."""
    rules(
        default=Rule(limits=[WIDE]),
        more={"SECRETS": {"STRIPE": "x", "GITHUB": "y"}, "MAX_CALL_BYTES": 2000},
    )
    before = CallQueue.objects.count()
    try:
        call = CallQueue.objects.send(call_data, **options)
    except CallQueueError as error:
        assert str(error)
        assert CallQueue.objects.count() == before
        return
    assert call is not None
    stored = CallQueue.objects.get(pk=call.pk)
    assert stored.call_data == call.call_data
    if stored.method in HTTP_METHODS:
        params = secrets.replace_secrets(
            stored.call_data["params"], {"STRIPE": "x", "GITHUB": "y"}.__getitem__
        )
        with suppress(Refused):
            wire._prepared_request(stored.method, params)


# --- What a hook or a provider says: errors, reasons of holds and the log are in clear


MAIL, NAME, WHERE = "zero.patient@clinic.example", "Zero Patient", "ward-7-bed-12"
SAID = f"invalid recipient {MAIL} ({NAME}) at {WHERE}"


def raises(answer: Any) -> Any:
    raise ValueError(answer.text)


KEYS = {"ENCRYPTION_KEYS": [Fernet.generate_key().decode()]}
VERDICTS: dict[str, Any] = {
    "gives up": lambda answer: GiveUp(answer.text),
    "later": lambda answer: RetryLater(answer.text),
    "holds": lambda answer: HoldUntil(60, answer.text),
    "raises": raises,
}


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("status", [200, 422, 429, 503])
def test_of_what_classify_says_the_payload_is_not_kept(
    rules: Rules,
    remote: behaviour.Vendor,
    caplog: pytest.LogCaptureFixture,
    verdict: str,
    status: int,
) -> None:
    caplog.set_level(logging.INFO)
    rules(default=Rule(classify=VERDICTS[verdict]), more=KEYS)
    remote.answers[f"/beds/{WHERE}?who={MAIL}"] = (status, {}, SAID.encode())
    params = {
        "url": f"http://vendor.example/beds/{WHERE}?who={MAIL}",
        "json": {"to": NAME, "by_patient": {MAIL: {"condition": "positive"}}},
    }
    call = CallQueue.objects.send({"method": "post", "params": params})
    assert behaviour.run() == 1
    call.refresh_from_db()
    kept = dump() + caplog.text
    for text in (MAIL, NAME, WHERE, "positive"):
        assert text not in kept
    assert Hold.objects.exists() == (verdict == "holds" or (verdict, status) == ("raises", 429))
    if verdict != "raises":
        assert call.error_message == "invalid recipient [payload] ([payload]) at [payload]"


def test_nor_of_what_a_reconcile_hook_says_nor_of_a_refusal_in_the_worker(
    rules: Rules, remote: behaviour.Vendor
) -> None:
    """A refusal names the place, which may be somebody's name."""
    rules(default=Rule(reconcile=lambda call: GiveUp(f"no {NAME}")), more=KEYS)
    params = {"url": "http://vendor.example/", "json": {"to": NAME}}
    asked = CallQueue.objects.send({"method": "post", "params": params})
    CallQueue.objects.update(status=CallQueue.Status.UNKNOWN, ready=False)
    reconcile.ask_hooks("default")
    asked.refresh_from_db()
    assert (asked.status, asked.error_message) == (CallQueue.Status.FAILED, "no [payload]")
    refused = CallQueue.objects.send({"method": "get", "params": params})
    refused.call_data["params"] = {"url": params["url"], "params": {MAIL: {"a": "b"}}}
    refused.save()
    behaviour.run()
    refused.refresh_from_db()
    assert refused.status == CallQueue.Status.FAILED and "[payload]" in refused.error_message
    assert MAIL not in dump() and remote.requests == []


def test_what_is_said_of_a_permit_can_be_kept_and_tells_no_credential(rules: Rules) -> None:
    """The payload is the client's own, and not known here."""
    import requests

    rules(r=Rule(hosts=["127.0.0.1"], classify=lambda answer: GiveUp(answer.text)))
    body = b"\x00token=sk-live-abcdef123456 is no good"
    with serving(lambda path, times: (422, {}, body)) as stub, requests.Session() as session:
        session.mount("http://", callqueue.PermitAdapter())
        session.get(stub.url, timeout=30)
    attempt = callqueue.models.CallAttempt.objects.get()
    assert attempt.outcome == "gave up" and "sk-live" not in attempt.error_message
    assert "is no good" in attempt.error_message
