"""To name a secret, to have one sent elsewhere or kept, and to move what is sealed."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from celery import shared_task
from cryptography.fernet import Fernet
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connection

from callqueue import (
    GiveUp,
    QueuedTask,
    Retry,
    RetryLater,
    Rule,
    Secret,
    SecretFor,
    SlidingWindow,
    states,
)
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
    behaviour.run()
    call.refresh_from_db()
    return call


@shared_task(base=QueuedTask)
def remember(*args: Any, **kwargs: Any) -> None:
    seen.append((args, kwargs))


def longest_part(text: str) -> int:
    """The length of the longest part of the secret that is in the text."""
    return next(
        size
        for size in range(len(VALUE), -1, -1)
        if any(VALUE[at : at + size] in text for at in range(len(VALUE) - size + 1))
    )


# --- To name a secret


@pytest.mark.parametrize("place", ["json", "data", "params"])
def test_data_that_looks_like_a_secrets_name_goes_out_as_it_stands(
    remote: Vendor, place: str
) -> None:
    deep = {"note": LOOKS, "deep": [{"a": {"$$secret": ["$secret"]}}]}
    data: Any = deep if place == "json" else json.dumps(LOOKS)
    call = made({"url": URL, place: data})
    assert call.status == Status.DONE
    assert remote.requests[0][2][place] == call.call_data["params"][place] == data


@pytest.mark.parametrize("options", [[], ["--skip-bad"]])
def test_a_file_names_secrets_only_where_it_was_let(
    remote: Vendor, tmp_path: Any, options: list[str]
) -> None:
    file = tmp_path / "calls.jsonl"
    params = {"url": URL, "json": {"a": LOOKS, "b": {"$$secret": "KEY"}}}
    file.write_text(json.dumps({"method": "post", "params": params}) + "\n")
    assert run("send", *options, str(file)).code == 0
    assert run("send", "--secrets", *options, str(file)).code == 0
    behaviour.run()
    sent = [request[2]["json"] for request in remote.requests]
    assert sent == [{"a": LOOKS, "b": {"$$secret": "KEY"}}, {"a": VALUE, "b": LOOKS}]


def test_a_dump_of_the_table_brings_back_secrets_and_data_as_they_were(tmp_path: Any) -> None:
    for data in ({"a": Secret("KEY"), "b": LOOKS}, {"n": 1}):
        CallQueue.objects.send({"method": "post", "params": {"url": URL, "json": data}})
    before = dict(CallQueue.objects.values_list("pk", "call_data"))
    file = tmp_path / "calls.json"
    call_command("dumpdata", "callqueue.CallQueue", output=str(file))
    CallQueue.objects.all().delete()
    call_command("loaddata", str(file), verbosity=0)
    assert dict(CallQueue.objects.values_list("pk", "call_data")) == before


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
    key = Secret("KEY")
    for place in ({"headers": {"X-A": key}}, {"json": [key]}, {"auth": ["u", key]}):
        call = made({"url": URL, **place})
        assert call.status == Status.FAILED
        assert why in call.error_message and "'KEY'" in call.error_message
    assert remote.requests == []


def test_a_secret_goes_to_its_places_and_to_no_task(rules: Rules, remote: Vendor) -> None:
    asked: list[Any] = []

    def of_tenant(context: Any) -> str:
        asked.append((context.rule, context.key, context.host))
        return f"{VALUE}-{context.key}"

    setup(rules, secret=SecretFor(of_tenant, hosts=["*.example:80"], rules=["default", "other"]))
    call = made({"url": URL, "json": [Secret("KEY"), Secret("KEY")]}, key="shop-7")
    assert call.status == Status.DONE
    assert remote.requests[0][2]["json"] == [f"{VALUE}-shop-7"] * 2
    assert asked == [("default", "shop-7", "vendor.example")]
    task = remember.delay(Secret("KEY")).call
    run_callqueue()
    task.refresh_from_db()
    assert (task.status, seen) == (Status.FAILED, [])
    assert "goes to none" in task.error_message


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


@pytest.mark.parametrize("host", ["hooks.vendor.example", "hooks-of-ours.invalid", "127.1.2.3"])
def test_no_error_tells_the_host_of_a_url_that_is_a_secret(rules: Rules, host: str) -> None:
    setup(rules, secret=f"http://{host}:1/T0", ALLOWED_HOSTS=["*.invalid", "127.1.2.3"])
    call = made({"url": Secret("KEY")})
    assert call.status != Status.DONE and call.error_message
    assert host not in f"{call.error_message} {call.attempts.get().error_message}"


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
    links = [{"link": f"http://vendor.example/{n}?key={encode(VALUE)}"} for n in range(200)]
    body = json.dumps(links).encode()
    for cut in range(0, 40, 7):
        remote.answers["/"] = (200, {"X-Echo": encode(VALUE)}, body[: len(body) - cut])
        attempt = made({"url": URL, "json": {"a": Secret("KEY")}}).attempts.get()
        assert longest_part(f"{attempt.response_body}{attempt.response_headers}") < 8
        assert WITHHELD in attempt.response_body


@shared_task(base=QueuedTask)
def leak(token: str, padding: int) -> None:
    raise ConnectionError(f"{'x' * padding} {token}")


def test_of_a_task_that_fails_no_part_is_kept() -> None:
    for padding in range(470, 500, 3):
        call = leak.delay(Secret("KEY"), padding).call
        run_callqueue()
        call.refresh_from_db()
        first = call.attempts.earliest("pk")
        assert longest_part(f"{call.error_message}{first.error_message}") < 8
        call.delete()


def confused(call: CallQueue) -> Any:
    if seen:
        return seen.pop()
    raise ConnectionError(f"no route to vendor with {VALUE}, password=hunter2-hunter2")


def test_of_what_a_reconcile_hook_says_no_part_is_kept(
    rules: Rules, caplog: pytest.LogCaptureFixture
) -> None:
    setup(rules, rule=Rule(limits=[WIDE], reconcile=f"{__name__}.confused"))
    bearer = GiveUp(f"refused {VALUE}; Authorization: Bearer {VALUE}")
    params = {"url": URL, "json": [Secret("KEY")]}
    for said in ([], [RetryLater(f"again with {VALUE}")], [bearer]):
        call = CallQueue.objects.send({"method": "post", "params": params})
        CallQueue.objects.filter(pk=call.pk).update(status=states.UNKNOWN)
        seen[:] = said
        reconcile.ask_hooks("default")
        call.refresh_from_db()
        assert longest_part(call.error_message) < 8
        call.delete()
    assert "reconcile" in caplog.text
    assert longest_part(caplog.text) < 8
    assert "hunter2" not in caplog.text


WRONG: list[dict[str, Any]] = [
    {"SECRETS": [VALUE]}, {"SECRETS": {"KEY": [VALUE]}}, {"ALLOWED_HOSTS": [f"https://{VALUE}/"]}, {"ALLOWED_HOSTS": VALUE},
    {"ALLOWED_NETWORKS": [VALUE]}, {"RETENTION": {"done": VALUE}}, {"HANDLERS": {"a": [VALUE]}}, {"MAX_CALL_BYTES": VALUE},
    {"DISPENSER": {"POLL": VALUE}}, {"LEASE": VALUE}, {"RULES": {"a": VALUE}}, {"ENCRYPTION_KEYS": VALUE},
    {"ENCRYPTION_KEYS": [VALUE]},
]  # fmt: skip


@pytest.mark.parametrize("more", WRONG)
def test_no_check_and_no_error_tells_a_value_of_the_settings(rules: Rules, more: Any) -> None:
    rules(more=more)
    told = " ".join(error.msg for error in run_checks(tags=["callqueue"]))
    assert set(more) <= set(re.findall("[A-Z_]+", told))
    assert longest_part(told) < 8, told


# --- To move what is sealed


def swap(table: str, column: str, one: int, other: int) -> None:
    with connection.cursor() as cursor:
        read = f"SELECT {column} FROM {table} WHERE id = %s"
        stored = []
        for pk in (one, other):
            cursor.execute(read, [pk])
            stored.append(cursor.fetchone()[0])
        for pk, value in zip((other, one), stored, strict=True):
            cursor.execute(f"UPDATE {table} SET {column} = %s WHERE id = %s", [value, pk])


def test_what_is_sealed_opens_in_its_own_row_and_nowhere_else(rules: Rules, remote: Vendor) -> None:
    """A request that was moved to another call is not made, and a moved answer is not read."""
    setup(rules, ENCRYPTION_KEYS=[Fernet.generate_key().decode()])
    for number in "01":
        remote.answers[f"/{number}"] = (200, {"X-N": number}, f"answer {number}".encode())
        made({"url": f"{URL}{number}"})
    requests = [{"method": "post", "params": {"url": f"{URL}{number}"}} for number in "23"]
    waiting = CallQueue.objects.send_many(requests)
    stored = CallQueue.objects.order_by("pk").values_list("call_data", flat=True)
    assert [one["params"]["url"] for one in stored] == [f"{URL}{number}" for number in "0123"]
    one, other = CallAttempt.objects.order_by("pk")
    assert (one.response_body, one.response_headers) == ("answer 0", {"X-N": "0"})
    assert (other.response_body, other.response_headers) == ("answer 1", {"X-N": "1"})
    only = CallQueue.objects.only("call_data").get(pk=waiting[0].pk)
    assert only.call_data == waiting[0].call_data
    assert "answer" not in dump() and "vendor.example/2" not in dump()

    swap("callqueue_callqueue", "call_data", waiting[0].pk, waiting[1].pk)
    behaviour.run()
    for call in waiting:
        call.refresh_from_db()
        assert call.status == Status.FAILED
        assert "cannot be read" in call.error_message
    assert remote.paths() == ["/0", "/1"]

    for column in ("response_body", "response_headers"):
        swap("callqueue_callattempt", column, one.pk, other.pk)
        for attempt in CallAttempt.objects.filter(pk__in=[one.pk, other.pk]):
            read = str(getattr(attempt, column))
            assert "$unreadable" in read or "no key" in read
            assert "answer" not in read


@pytest.mark.parametrize(
    "looks", ["$sealed", "$sealed:", "$plain", "$plain:", "$row:1|", "$sealed:gAAAAA", "$row:"]
)
def test_no_answer_looks_as_if_it_were_sealed(rules: Rules, remote: Vendor, looks: str) -> None:
    """With keys or without."""
    headers = {looks.strip(":"): "hidden"}
    remote.answers["/"] = (200, headers, f"{looks}hidden".encode())
    pk = made({"url": URL}).attempts.get().pk
    for keys in ([], [Fernet.generate_key().decode()]):
        setup(rules, ENCRYPTION_KEYS=keys)
        attempt = CallAttempt.objects.get(pk=pk)
        assert (attempt.response_body, attempt.response_headers) == (f"{looks}hidden", headers)
