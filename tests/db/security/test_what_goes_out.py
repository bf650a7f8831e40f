"""Nobody gets in, and nothing gets out: addresses, secrets, payloads, answers without end, and what
a fuzzer thinks of.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from callqueue import Rule, SlidingWindow
from callqueue.exceptions import CallQueueError
from callqueue.execution import wire
from callqueue.execution.connection import Refused
from callqueue.handlers import HTTP_METHODS
from callqueue.models import CallQueue
from callqueue.security import secrets
from callqueue.security.secrets import Secret
from tests.support import behaviour, samples
from tests.support.peer import Listener

Rules = Callable[..., None]
Status = CallQueue.Status
WIDE = SlidingWindow("100000/s")


def make(call: CallQueue) -> CallQueue:
    """Release the call and make it in this process; as it is afterwards."""
    behaviour.run()
    call.refresh_from_db()
    return call


def smuggled(url: Any, method: str = "post", **params: Any) -> CallQueue:
    """A row that never went through `send`: as other code, or an older release, might have written
    it.
    """
    call = CallQueue(
        rule="default",
        call_data={"method": method, "params": {"url": url, **params}},
        method=method,
        ready=True,
    )
    call.save()
    return call


# --- Server-side request forgery

LOOPBACK = """
    127.0.0.1 127.1 127.0.1 2130706433 0x7f000001 0x7f.1 0177.0.0.1 017700000001 127.0.0.1. 0 0.0.0.0 127.255.255.254
    [::1] [::ffff:127.0.0.1] [::ffff:7f00:1] [0:0:0:0:0:0:0:1] [::] [::127.0.0.1] [64:ff9b::7f00:1] [2002:7f00:1::] [::1%25lo]
    ①②⑦.0.0.1 127。0。0。1 127%2e0.0.1
""".split()  # noqa: SIM905
ELSEWHERE = """
    10.0.0.1 10.1 172.16.0.1 172.31.255.255 192.168.1.1 192.168.257 100.64.0.1 100.127.255.254 169.254.1.1
    169.254.169.254 2852039166 0xa9fea9fe [fd00:ec2::254] 169.254.170.2 100.100.100.200 168.63.129.16
    224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 198.18.0.1 192.0.2.1 192.0.0.1
    [fe80::1] [fc00::1] [ff02::1] [64:ff9b::a00:1] [64:ff9b:1::a00:1] [2002:a00:1::] [::ffff:10.0.0.1] [2001:db8::1] [2001::1]
    [fec0::1]
""".split()  # noqa: SIM905


def test_a_worker_refuses_them_as_well_and_nothing_arrives(
    rules: Rules, listen: Callable[..., Listener]
) -> None:
    """Rows that never saw `send`, and URLs that are a secret: the worker is the one who must not be
    fooled.
    """
    listeners = [
        listen("127.0.0.1"),
        *([listen("::1")] if socket.has_ipv6 and has_loopback_6() else []),
    ]
    secrets = {
        f"S{i}": f"http://{host}:{listener.port}/"
        for i, (host, listener) in enumerate(pairs(listeners))
    }
    rules(
        default=Rule(limits=[WIDE], connect_timeout=1, total_timeout=2), more={"SECRETS": secrets}
    )
    calls = [smuggled(f"http://{host}:{listener.port}/") for host, listener in pairs(listeners)]
    calls += [smuggled(Secret(name)) for name in secrets]
    calls += [smuggled(f"http://{host}/") for host in ELSEWHERE]
    while behaviour.run():
        pass
    for call in calls:
        call.refresh_from_db()
        assert call.status == Status.FAILED, (call.call_data, call.error_message)
        assert call.attempts.count() == 1, "what is refused for good is not tried again"
        assert set(call.attempts.values_list("sent_at", flat=True)) == {None}
    assert [listener.connections for listener in listeners] == [0] * len(listeners)


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
    call = make(smuggled(url, method, data="a=b", headers=headers))
    assert call.status == Status.FAILED and "headers" in call.error_message
    assert "inside" not in call.error_message
    for wrong in ({"url": url, "proxies": {}}, {"url": url, "verify": False}, [url], url, None):
        call = CallQueue(rule="default", method=method, ready=True)
        call.call_data = {"method": method, "params": wrong}
        call.save()
        assert make(call).status == Status.FAILED
    assert listener.connections == 0


def pairs(listeners: list[Listener]) -> list[tuple[str, Listener]]:
    return [(host, listener) for listener in listeners for host in LOOPBACK]


def has_loopback_6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def behaviour_send(url: str, method: str = "get", **params: Any) -> CallQueue:
    call = CallQueue.objects.send({"method": method, "params": {"url": url, **params}})
    assert call is not None
    return call


# --- Secrets and payloads

SECRET, PAYLOAD, PASSWORD = "sk-live-5e1f-secret", "patient-zero-payload", "pass-5e1f-word"


@pytest.fixture
def leaky(
    rules: Rules, listen: Callable[..., Listener], caplog: pytest.LogCaptureFixture
) -> list[CallQueue]:
    """Calls full of secrets and payloads, to a vendor that throws all of it back at us in every
    way.
    """
    caplog.set_level(logging.DEBUG)
    echo = f'{{"error": "bad token {SECRET} for {PAYLOAD}, {PASSWORD}"}}'.encode()
    echoed = f"X-Echo: {SECRET}\r\nSet-Cookie: session={SECRET}\r\nX-Payload: {PAYLOAD}\r\n"
    listeners = []
    for line in ("200 OK", "400 Bad", "500 Broken", "429 Slow", f"418 {SECRET} {PAYLOAD}"):
        head = f"HTTP/1.1 {line}\r\n{echoed}Content-Length: {len(echo)}\r\n\r\n".encode()
        listeners.append(listen(answer=head + echo))
    listeners.append(listen(answer=b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + echo))
    listeners.append(listen(answer=f"garbage {SECRET} {PAYLOAD}".encode()))
    from cryptography.fernet import Fernet

    keys = [Fernet.generate_key().decode()]
    rules(
        default=Rule(limits=[WIDE]),
        more={
            "SECRETS": {"KEY": SECRET, "PW": PASSWORD},
            "ALLOWED_NETWORKS": ["127.0.0.0/8"],
            "ENCRYPTION_KEYS": keys,
        },
    )
    params = {
        "json": {"token": Secret("KEY"), "patient": PAYLOAD},
        "headers": {"Authorization": Secret("KEY"), "X-Patient": PAYLOAD},
        "params": {"api_key": Secret("KEY"), "patient": PAYLOAD},
        "auth": ["user", Secret("PW")],
    }
    calls = []
    for listener in listeners:
        calls.append(
            behaviour_send(
                f"http://127.0.0.1:{listener.port}/{PAYLOAD}?patient={PAYLOAD}",
                method="post",
                **params,
            )
        )
    calls.append(behaviour_send(f"http://no-such-host.invalid/{PAYLOAD}", method="post", **params))
    calls.append(behaviour_send("http://127.0.0.1:1/", method="post", **params))
    behaviour.run()
    for call in calls:
        call.refresh_from_db()
    return calls


def test_no_secret_and_no_payload_in_the_database_when_it_is_encrypted(
    leaky: list[CallQueue],
) -> None:
    stored = dump()
    assert "callqueue_callattempt" in stored
    for text in (SECRET, PASSWORD, PAYLOAD):
        place = stored.find(text)
        assert place < 0, stored[max(0, place - 300) : place + 100]
    assert leaky[0].call_data["params"]["json"]["patient"] == PAYLOAD, (
        "whoever has the keys reads it"
    )
    assert leaky[0].attempts.get().response_body.startswith('{"error": ')
    assert SECRET not in leaky[0].attempts.get().response_body


def test_no_secret_and_no_payload_in_logs(
    leaky: list[CallQueue], caplog: pytest.LogCaptureFixture
) -> None:
    said = [
        record for record in caplog.get_records("setup") if not record.name.startswith("django.db")
    ]
    assert said
    for record in said:
        text = f"{record.getMessage()} {record.__dict__}"
        for secret in (SECRET, PASSWORD, PAYLOAD):
            assert secret not in text, text


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
    raise ValueError(
        f"cannot reach {params['to']} ({params['who']['name']!r}) with {params['token']}"
    )


def test_what_a_handler_raises_is_kept_without_the_payload(
    rules: Rules, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    rules(
        default=Rule(limits=[WIDE]),
        more={"HANDLERS": {"say": f"{__name__}.raising"}, "SECRETS": {"KEY": SECRET}},
    )
    params = {"to": "someone@example.com", "who": {"name": PAYLOAD}, "token": Secret("KEY")}
    call = CallQueue.objects.send({"method": "say", "params": params})
    assert call is not None
    make(call)
    assert call.status == Status.ERROR
    assert (
        call.error_message
        == "ValueError: cannot reach [payload] ('[payload]') [withheld: it repeats a secret]"
    )
    assert PAYLOAD not in "".join(
        record.getMessage() for record in caplog.records if not record.name.startswith("django.db")
    )


def test_keys_are_rotated(rules: Rules, remote: behaviour.Vendor, settings: Any) -> None:
    """The new key seals, either opens; a row whose key is gone fails by itself, and the others go
    on.
    """
    from cryptography.fernet import Fernet

    old, new = (Fernet.generate_key().decode() for _ in range(2))
    rules(default=Rule(limits=[WIDE]), more={"ENCRYPTION_KEYS": [old]})
    first, stale = behaviour.send(path="/first"), behaviour.send(path="/stale")
    rules(default=Rule(limits=[WIDE]), more={"ENCRYPTION_KEYS": [new, old]})
    CallQueue.objects.filter(pk=stale.pk).update(
        due_at_dt=datetime(2100, 1, 1, tzinfo=UTC), ready=False
    )
    second = behaviour.send(path="/second")
    behaviour.run()
    assert [Status(c.status) for c in CallQueue.objects.filter(pk__in=[first.pk, second.pk])] == [
        Status.DONE
    ] * 2
    rules(default=Rule(limits=[WIDE]), more={"ENCRYPTION_KEYS": [new]})
    CallQueue.objects.filter(pk=stale.pk).update(
        due_at_dt=datetime(2020, 1, 1, tzinfo=UTC), ready=True
    )
    third = behaviour.send(path="/third")
    behaviour.run()
    stale.refresh_from_db()
    third.refresh_from_db()
    assert stale.status == Status.FAILED
    assert "ENCRYPTION_KEYS" in stale.error_message
    assert third.status == Status.DONE
    assert sorted(remote.paths()) == ["/first", "/second", "/third"]


def test_nothing_of_a_payload_is_a_format_an_import_or_a_keyword(
    rules: Rules, remote: behaviour.Vendor
) -> None:
    """Percent signs, braces, dotted paths, ORM look-ups: all of it is text, and arrives as it was
    sent.
    """
    rules(default=Rule(limits=[WIDE]))
    nasty = {
        "%s %(x)s {0} {call.pk}": "{{ 7 * 7 }} {% load x %}",
        "pk__in": [1],
        "__class__": "os.system",
        "a' OR 1=1 --": "\\u0041",
    }
    call = CallQueue.objects.send(
        {
            "method": "post",
            "params": {
                "url": "http://vendor.example/%7Bx%7D",
                "json": nasty,
                "headers": {"X-Format": "%s{0}"},
            },
        },
        key="%s{0}'; DROP TABLE x; --",
        unique_key="%(x)s",
    )
    assert call is not None
    make(call)
    assert call.status == Status.DONE
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
            [
                {
                    "call_data": {"method": "get", "params": {"url": "http://vendor.example"}},
                    "status": 3,
                }
            ]
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
        params = secrets.resolve(
            stored.call_data["params"], {"STRIPE": "x", "GITHUB": "y"}.__getitem__
        )
        with suppress(Refused):
            wire._prepared(stored.method, params)
