"""Attacks on secrets: to name one, to have one sent elsewhere, to have one kept, and to move what
is sealed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import shared_task
from django.core.checks import run_checks
from django.db import connection

from callqueue import QueuedTask, Retry, RetryLater, Rule, Secret, SecretFor, SlidingWindow, states
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.maintenance import reconcile
from callqueue.models import CallAttempt, CallQueue
from callqueue.security.withholding import WITHHELD
from callqueue.testing import run_callqueue
from tests.db.commands import run
from tests.db.security.test_what_goes_out import dump
from tests.support import behaviour
from tests.support.behaviour import Vendor
from tests.support.peer import Listener

Rules = Callable[..., None]
Status = CallQueue.Status
WIDE = SlidingWindow("100000/s")
VALUE = "sk_live_4eC39HqLyjWDarjtT1zdp7dc"
URL = "http://vendor.example/"
LOOKS = {"$secret": "KEY"}
seen: list[Any] = []


@pytest.fixture(autouse=True)
def _secrets(rules: Rules) -> None:
    seen.clear()
    setup(rules)


def setup(rules: Rules, *, secret: Any = VALUE, **more: Any) -> None:
    """One rule, one secret that is named KEY."""
    rule = more.pop("rule", Rule(limits=[WIDE], total_timeout=5, retry=Retry(max_attempts=1)))
    rules(
        default=rule,
        other=Rule(limits=[WIDE]),
        more={"SECRETS": {"KEY": secret}, "ALLOWED_NETWORKS": ["127.0.0.0/8"], **more},
    )


def made(params: dict[str, Any], method: str = "post", **options: Any) -> CallQueue:
    """Send a call and make it; as it is afterwards."""
    call = CallQueue.objects.send({"method": method, "params": params}, **options)
    assert call is not None
    behaviour.run()
    call.refresh_from_db()
    return call


@shared_task(base=QueuedTask)
def remember(*args: Any, **kwargs: Any) -> None:
    seen.append((args, kwargs))


def longest_part(text: str) -> int:
    """The length of the longest part of the secret that is in the text."""
    return max(
        (
            to - at
            for at in range(len(VALUE))
            for to in range(at + 1, len(VALUE) + 1)
            if VALUE[at:to] in text
        ),
        default=0,
    )


# --- To name a secret


@pytest.mark.parametrize("place", ["json", "data", "params"])
def test_data_that_looks_like_a_secrets_name_goes_out_as_it_stands(
    remote: Vendor, place: str
) -> None:
    data: Any = (
        {"note": LOOKS, "deep": [{"a": {"$$secret": ["$secret"]}}]}
        if place == "json"
        else json.dumps(LOOKS)
    )
    call = made({"url": URL, place: data})
    assert call.status == Status.DONE
    assert remote.requests[0][2][place] == data
    assert call.call_data["params"][place] == data


@pytest.mark.parametrize("options", [[], ["--skip-bad"]])
def test_a_file_names_secrets_only_where_it_was_let(
    remote: Vendor, tmp_path: Any, options: list[str]
) -> None:
    file = tmp_path / "calls.jsonl"
    line = json.dumps(
        {"method": "post", "params": {"url": URL, "json": {"a": LOOKS, "b": {"$$secret": "KEY"}}}}
    )
    file.write_text(f"{line}\n")
    assert run("send", *options, str(file)).code == 0
    assert run("send", "--secrets", *options, str(file)).code == 0
    behaviour.run()
    assert [request[2]["json"] for request in remote.requests] == [
        {"a": LOOKS, "b": {"$$secret": "KEY"}},
        {"a": VALUE, "b": LOOKS},
    ]


def test_an_error_tells_no_name_but_the_one_that_was_asked_for() -> None:
    with pytest.raises(InvalidCall, match="'KEX'") as caught:
        CallQueue.objects.send(
            {"method": "post", "params": {"url": URL, "json": {"a": Secret("KEX")}}}
        )
    assert "KEY" not in str(caught.value)


def test_a_dump_of_the_table_brings_back_secrets_and_data_as_they_were(tmp_path: Any) -> None:
    from django.core.management import call_command

    data = {"a": Secret("KEY"), "b": LOOKS}
    call = CallQueue.objects.send({"method": "post", "params": {"url": URL, "json": data}})
    plain = CallQueue.objects.send({"method": "post", "params": {"url": URL, "json": {"n": 1}}})
    file = tmp_path / "calls.json"
    call_command("dumpdata", "callqueue.CallQueue", output=str(file))
    CallQueue.objects.all().delete()
    call_command("loaddata", str(file), verbosity=0)
    assert CallQueue.objects.get(pk=call.pk).call_data["params"]["json"] == data
    assert CallQueue.objects.get(pk=plain.pk).call_data == plain.call_data


# --- To have a secret sent elsewhere


NOT_HERE = "may not go to the host vendor.example:80"
OF_ANOTHER = "not for calls of the rule 'default'"
ELSEWHERE = {
    "host": (SecretFor(VALUE, hosts=["api.example"]), NOT_HERE),
    "port": (SecretFor(VALUE, hosts=["vendor.example:443"]), NOT_HERE),
    "subdomains": (SecretFor(VALUE, hosts=["*.vendor.example"]), NOT_HERE),
    "rule": (SecretFor(VALUE, rules=["other"]), OF_ANOTHER),
    "not asked": (SecretFor(lambda: pytest.fail("it was asked for"), rules=["other"]), OF_ANOTHER),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_secret_goes_nowhere_but_to_its_places(rules: Rules, remote: Vendor, what: str) -> None:
    bound, why = ELSEWHERE[what]
    setup(rules, secret=bound)
    for place in (
        {"headers": {"X-A": Secret("KEY")}},
        {"json": [Secret("KEY")]},
        {"auth": ["u", Secret("KEY")]},
    ):
        call = made({"url": URL, **place})
        assert call.status == Status.FAILED
        assert why in call.error_message and "'KEY'" in call.error_message
    assert remote.requests == []


def test_a_secret_goes_to_its_places(rules: Rules, remote: Vendor) -> None:
    asked: list[Any] = []

    def of_tenant(context: Any) -> str:
        asked.append((context.rule, context.key, context.host))
        return f"{VALUE}-{context.key}"

    setup(rules, secret=SecretFor(of_tenant, hosts=["*.example:80"], rules=["default", "other"]))
    assert (
        made({"url": URL, "json": [Secret("KEY"), Secret("KEY")]}, key="shop-7").status
        == Status.DONE
    )
    assert remote.requests[0][2]["json"] == [f"{VALUE}-shop-7"] * 2
    assert asked == [("default", "shop-7", "vendor.example")]


def test_a_secret_that_is_for_hosts_goes_to_no_task_and_no_mail(rules: Rules) -> None:
    setup(rules, secret=SecretFor(VALUE, hosts=["vendor.example"]))
    call = remember.delay(Secret("KEY")).call
    run_callqueue()
    call.refresh_from_db()
    assert (call.status, seen) == (Status.FAILED, [])
    assert "goes to none" in call.error_message


def test_a_url_that_is_a_secret_goes_to_its_own_host_only_where_that_is_allowed(
    rules: Rules, remote: Vendor
) -> None:
    url = "http://hooks.vendor.example/services/T0/B0/xyzxyz"
    setup(rules, secret=SecretFor(url, hosts=["other.example"]))
    call = made({"url": Secret("KEY")})
    assert (call.status, remote.requests) == (Status.FAILED, [])
    assert "hooks.vendor" not in call.error_message
    setup(rules, secret=SecretFor(url, hosts=["hooks.vendor.example"]))
    assert made({"url": Secret("KEY")}).status == Status.DONE


def test_no_error_tells_the_host_of_a_url_that_is_a_secret(rules: Rules) -> None:
    for url in (
        "http://hooks.vendor.example/T0",
        "http://hooks-of-ours.invalid/T0",
        "http://127.1.2.3:1/T0",
    ):
        setup(rules, secret=url, ALLOWED_HOSTS=["*.invalid", "127.1.2.3"])
        call = made({"url": Secret("KEY")})
        assert call.status != Status.DONE
        assert call.error_message
        assert (
            url.split("/")[2].split(":")[0]
            not in f"{call.error_message} {call.attempts.get().error_message}"
        )


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("place", ["headers", "json", "data", "auth"])
def test_a_redirect_takes_no_secret_anywhere_and_its_reason_names_none(
    listen: Callable[..., Listener], status: int, place: str
) -> None:
    """Its Location may repeat the secret, cut where the reason ends."""
    other, honest = listen("127.0.0.2"), listen("127.0.0.1")
    value = ["user", Secret("KEY")] if place == "auth" else {"X-Client": Secret("KEY")}
    for count, room in enumerate((0, 150, 190), start=1):
        location = f"http://127.0.0.2:{other.port}/{'x' * room}?back={VALUE}&again={VALUE}"
        head = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
        honest.answer = head.encode()
        call = made({"url": f"http://127.0.0.1:{honest.port}/", place: value})
        attempt = call.attempts.get()
        assert (call.status, attempt.response_status) == (Status.FAILED, status)
        assert f"a redirect to http://127.0.0.2:{other.port}/" in call.error_message
        assert "Location" in attempt.response_headers
        kept = f"{call.error_message} {attempt.error_message} {attempt.response_headers}"
        assert longest_part(kept) < 8
        assert (honest.connections, other.connections) == (count, 0)


# --- To have a secret kept


@pytest.mark.parametrize(
    "encode", [str, lambda v: base64.encodebytes(v.encode()).decode(), lambda v: v.encode().hex()]
)
@pytest.mark.parametrize("keep", [100, 1001, 4096])
def test_of_an_answer_that_is_full_of_echoes_no_part_is_kept(
    rules: Rules, remote: Vendor, encode: Callable[[str], str], keep: int
) -> None:
    setup(rules, KEEP_RESPONSE_BYTES=keep)
    body = json.dumps(
        [{"link": f"http://vendor.example/{n}?key={encode(VALUE)}"} for n in range(200)]
    ).encode()
    for cut in range(0, 40, 7):
        remote.answers["/"] = (200, {"X-Echo": encode(VALUE)}, body[: len(body) - cut])
        attempt = made({"url": URL, "json": {"a": Secret("KEY")}}).attempts.get()
        assert longest_part(f"{attempt.response_body}{attempt.response_headers}") < 8
        assert WITHHELD in attempt.response_body


def failing(token: str, padding: int) -> None:
    raise ConnectionError(f"{'x' * padding} {token}")


@shared_task(base=QueuedTask)
def leak(token: str, padding: int) -> None:
    failing(token, padding)


def test_of_a_task_that_fails_no_part_is_kept() -> None:
    for padding in range(470, 500, 3):
        call = leak.delay(Secret("KEY"), padding).call
        run_callqueue()
        call.refresh_from_db()
        assert (
            longest_part(f"{call.error_message}{call.attempts.order_by('pk')[0].error_message}") < 8
        )
        call.delete()


def confused(call: CallQueue) -> Any:
    if seen:
        return seen.pop()
    raise ConnectionError(f"no route to vendor with {VALUE}, password=hunter2-hunter2")


def test_of_what_a_reconcile_hook_says_no_part_is_kept(
    rules: Rules, caplog: pytest.LogCaptureFixture
) -> None:
    from callqueue import GiveUp

    setup(rules, rule=Rule(limits=[WIDE], reconcile=f"{__name__}.confused"))
    for answer in (
        None,
        RetryLater(f"again with {VALUE}"),
        GiveUp(f"refused {VALUE}; Authorization: Bearer {VALUE}"),
    ):
        call = CallQueue.objects.send(
            {"method": "post", "params": {"url": URL, "json": [Secret("KEY")]}}
        )
        CallQueue.objects.filter(pk=call.pk).update(status=states.UNKNOWN)
        seen[:] = [] if answer is None else [answer]
        reconcile.ask_due("default")
        call.refresh_from_db()
        assert longest_part(call.error_message) < 8
        call.delete()
    assert "reconcile" in caplog.text
    assert longest_part(caplog.text) < 8
    assert "hunter2" not in caplog.text


def test_no_check_and_no_error_tells_a_value_of_the_settings(rules: Rules) -> None:
    wrong: dict[str, Any] = {
        "SECRETS": [VALUE], "ALLOWED_HOSTS": [f"https://{VALUE}/"], "ALLOWED_NETWORKS": [VALUE], "RETENTION": {"done": VALUE},
        "HANDLERS": {"a": [VALUE]}, "MAX_CALL_BYTES": VALUE, "DISPENSER": {"POLL": VALUE}, "LEASE": VALUE, "RULES": {"a": VALUE},
        "ENCRYPTION_KEYS": VALUE,
    }  # fmt: skip
    for key, value in {
        **wrong,
        "SECRETS ": {"KEY": [VALUE]},
        "ALLOWED_HOSTS ": VALUE,
        "ENCRYPTION_KEYS ": [VALUE],
    }.items():
        rules(more={key.strip(): value})
        told = " ".join(error.msg for error in run_checks(tags=["callqueue"]))
        assert key.strip() in told
        assert longest_part(told) < 8, told


# --- To move what is sealed


@pytest.fixture
def sealed(rules: Rules, remote: Vendor) -> list[CallQueue]:
    """Two calls that were made and two that wait, encrypted."""
    from cryptography.fernet import Fernet

    setup(rules, ENCRYPTION_KEYS=[Fernet.generate_key().decode()])
    remote.answers["/0"], remote.answers["/1"] = (
        (200, {"X-N": "0"}, b"answer 0"),
        (200, {"X-N": "1"}, b"answer 1"),
    )
    done = [made({"url": f"{URL}{n}"}) for n in range(2)]
    waiting = CallQueue.objects.send_many(
        [{"method": "post", "params": {"url": f"{URL}{n}"}} for n in (2, 3)]
    )
    return [*done, *waiting]


def swap(table: str, column: str, one: int, other: int) -> None:
    with connection.cursor() as cursor:
        read = f"SELECT {column} FROM {table} WHERE id = %s"
        stored = []
        for pk in (one, other):
            cursor.execute(read, [pk])
            stored.append(cursor.fetchone()[0])
        for pk, value in zip((other, one), stored, strict=True):
            cursor.execute(f"UPDATE {table} SET {column} = %s WHERE id = %s", [value, pk])


def test_what_is_sealed_opens_in_its_own_row(sealed: list[CallQueue]) -> None:
    urls = [
        call["params"]["url"]
        for call in CallQueue.objects.order_by("pk").values_list("call_data", flat=True)
    ]
    assert urls == [f"{URL}{n}" for n in range(4)]
    assert [a.response_body for a in CallAttempt.objects.order_by("pk")] == ["answer 0", "answer 1"]
    assert [a.response_headers for a in CallAttempt.objects.order_by("pk")] == [
        {"X-N": "0"},
        {"X-N": "1"},
    ]
    assert CallQueue.objects.only("call_data").get(pk=sealed[2].pk).call_data == sealed[2].call_data
    for text in ("answer", "vendor.example/2"):
        assert text not in dump()


def test_a_request_that_was_moved_to_another_call_is_not_made(
    sealed: list[CallQueue], remote: Vendor
) -> None:
    swap("callqueue_callqueue", "call_data", sealed[2].pk, sealed[3].pk)
    behaviour.run()
    for call in sealed[2:]:
        call.refresh_from_db()
        assert call.status == Status.FAILED
        assert "cannot be read" in call.error_message
    assert remote.paths() == ["/0", "/1"]


@pytest.mark.parametrize("column", ["response_body", "response_headers"])
def test_an_answer_that_was_moved_to_another_attempt_is_not_read(
    sealed: list[CallQueue], column: str
) -> None:
    one, other = CallAttempt.objects.order_by("pk").values_list("pk", flat=True)
    swap("callqueue_callattempt", column, one, other)
    for attempt in CallAttempt.objects.all():
        assert "$unreadable" in getattr(attempt, column) or "no key" in getattr(attempt, column)
        assert "answer" not in str(getattr(attempt, column))


@pytest.mark.parametrize("keyed", [False, True])
def test_no_answer_looks_as_if_it_were_sealed(rules: Rules, remote: Vendor, keyed: bool) -> None:
    from cryptography.fernet import Fernet

    for looks in ("$sealed", "$sealed:", "$plain", "$plain:", "$row:1|", "$sealed:gAAAAA", "$row:"):
        setup(rules)
        remote.answers["/"] = (200, {looks.strip(":"): "hidden"}, f"{looks}hidden".encode())
        attempt = made({"url": URL}).attempts.get()
        if keyed:
            setup(rules, ENCRYPTION_KEYS=[Fernet.generate_key().decode()])
            attempt = CallAttempt.objects.get(pk=attempt.pk)
        assert attempt.response_body == f"{looks}hidden"
        assert attempt.response_headers == {looks.strip(":"): "hidden"}


def test_a_secret_is_refused_where_it_is_no_string() -> None:
    for params in ({"url": URL, "headers": Secret("KEY")}, {"url": URL, "cookies": Secret("KEY")}):
        with pytest.raises(CallQueueError):
            CallQueue.objects.send({"method": "post", "params": params})
