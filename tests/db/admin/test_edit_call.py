"""Editing a call: what may be changed, and what is never shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Rule
from callqueue.models import CallQueue
from callqueue.security.secrets import Secret
from tests.db.admin.staff import edit, page_of, text_of

Rules = Callable[..., None]
Status = CallQueue.Status


def stored(method: str, params: Any) -> CallQueue:
    """A call that has failed, as any code may have written it."""
    data = {"method": method, "params": params}
    return CallQueue.objects.create(
        call_data=data, method=method, status=Status.FAILED, finished_at_dt=timezone.now()
    )


def secretive() -> CallQueue:
    headers = {"Authorization": "Bearer abcdefgh", "X-Key": Secret("KEY"), "X-Plain": "1"}
    json = {"items": [{"password": "p4ss"}], "of": {"password": "p4ss", "n": 1}}
    url = "https://vendor.example/v1?token=t0psecret"
    call = CallQueue.objects.send(
        {"method": "post", "params": {"url": url, "headers": headers, "json": json}}, rule="pay"
    )
    CallQueue.objects.filter(pk=call.pk).update(status=Status.FAILED, finished_at_dt=timezone.now())
    return CallQueue.objects.get(pk=call.pk)


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda data: data["params"].__setitem__(name, value)


def header(name: str, value: str) -> Callable[[Any], None]:
    return lambda data: data["params"]["headers"].__setitem__(name, value)


@pytest.fixture
def with_secret(rules: Rules) -> None:
    rules({"SECRETS": {"KEY": "v4lue", "OTHER": "0ther"}}, pay=Rule())


def logged(changed: str) -> bool:
    said = f"Edited and requeued. Status before: failed. Changed: {changed}."
    return LogEntry.objects.get().change_message == said


def refused(call: CallQueue, response: Any, why: str) -> bool:
    """Whether nothing was done, and why is said."""
    fresh = CallQueue.objects.get(pk=call.pk)
    assert (fresh.status, fresh.call_data) == (Status.FAILED, call.call_data)
    assert not LogEntry.objects.exists()
    return response.status_code == 400 and why in text_of(response)


def test_an_edited_call_keeps_what_was_not_shown(with_secret: None, root: Client) -> None:
    """And its idempotency key where nothing was changed. Beside a list in which something is hidden,
    anything else may be edited.
    """
    call = secretive()

    def change(data: Any) -> None:
        data["params"]["headers"]["X-Plain"] = "2"
        data["params"]["json"]["of"]["n"] = 5

    assert "edited and requeued" in text_of(edit(root, call, change))
    fresh = CallQueue.objects.get(pk=call.pk)
    assert fresh.status == Status.NEW
    expected = deepcopy(call.call_data)
    change(expected)
    assert fresh.call_data == expected
    assert fresh.idempotency_key != call.idempotency_key
    assert logged("params.headers, params.json")
    call = secretive()
    edit(root, call, lambda data: None)
    fresh = CallQueue.objects.get(pk=call.pk)
    assert (fresh.status, fresh.call_data) == (Status.NEW, call.call_data)
    assert fresh.idempotency_key == call.idempotency_key


def test_an_edit_names_no_secret_whatever_is_typed(with_secret: None, root: Client) -> None:
    call = secretive()

    def change(data: Any) -> None:
        data["params"]["json"] = {"note": {"$secret": "OTHER"}, "same": {"$secret": "KEY"}}

    edit(root, call, change)
    params = CallQueue.objects.get(pk=call.pk).call_data["params"]
    assert params["json"] == {"note": {"$secret": "OTHER"}, "same": {"$secret": "KEY"}}
    assert params["headers"]["X-Key"] == Secret("KEY")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (header("X-Other", "[secret OTHER]"), "OTHER"),
        (header("X-Copy", "Bearer [redacted]"), "[redacted]"),
        (header("X-Plain", "a\r\nb"), "line break"),
        (lambda data: [1], "call_data"),
    ],
)
def test_an_edit_is_refused_where_it_would_leak_or_send_would_refuse(
    with_secret: None, root: Client, change: Callable[[Any], Any], why: str
) -> None:
    call = secretive()
    assert refused(call, edit(root, call, change), why)


NO_REQUESTS = [
    "", "{", "[" * 5000, '"x"', '{"a":' * 300 + "1" + "}" * 300, '{"method": ["get"], "params": {}}',
]  # fmt: skip


def test_what_is_not_a_request_is_refused_with_the_text_kept(
    with_secret: None, root: Client
) -> None:
    path = reverse("admin:callqueue_callqueue_edit", args=[secretive().pk])
    for text in NO_REQUESTS:
        response = root.post(path, {"call_data": text})
        assert response.status_code == 400
        assert response.context["text"] == text


# What says where a call goes or what it runs stays, whether or not anything in it is hidden.
OPEN_CALLS: dict[str, dict[str, Any]] = {
    "get": {"url": "https://vendor.example/v1", "params": {"page": 1}},
    "send_email": {
        "to": ["a@shop.example"], "subject": "Paid", "message": "Thanks",
        "from_email": "shop@shop.example",
    },
    "celery_task": {
        "name": "shop.tasks.ship", "args": [1], "kwargs": {"fast": True}, "headers": {"id": "t-1"},
    },
    "django_task": {
        "path": "shop.tasks.ship", "args": [1], "kwargs": {}, "queue_name": "default",
        "backend": "default",
    },
}  # fmt: skip


URLS: list[Any] = [
    "https://evil.example/v1", "http://vendor.example/v1", "https://vendor.example:8443/v1",
    "https://vendor.example.evil.example/v1", "https://vendor.example\\@evil.example/v1",
    "https://vendor.example[/v1", "https://[vendor.example/v1", {"$secret": "KEY"},
]  # fmt: skip
ELSEWHERE: dict[str, list[tuple[str, Any]]] = {
    "get": [("url", url) for url in URLS],
    "send_email": [
        ("to", ["x@y.example"]), ("to", "a@shop.example"), ("from_email", "ceo@bank.example"),
        ("bcc", ["x@y.example"]), ("cc", ["x@y.example"]), ("reply_to", ["x@y.example"]),
    ],
    "celery_task": [
        ("name", "accounts.make_superuser"),
        ("embed", {"callbacks": [{"task": "accounts.make_superuser"}]}),
    ],
    "django_task": [("path", "os.system"), ("backend", "other"), ("queue_name", "other")],
}  # fmt: skip
ANOTHER_METHOD: list[tuple[str, str, dict[str, Any]]] = [
    ("get", "celery_task", {"name": "accounts.make_superuser", "args": [1]}),
    ("get", "send_email", {"to": ["x@y.example"], "message": "m"}),
    ("get", "delete", OPEN_CALLS["get"]),
    ("celery_task", "django_task", {**OPEN_CALLS["celery_task"], "path": "os.system"}),
]


@pytest.mark.parametrize("spelt", [str, str.upper])
@pytest.mark.parametrize("method", OPEN_CALLS)
def test_an_edit_never_makes_another_kind_of_call(
    rules: Rules, root: Client, method: str, spelt: Callable[[str], str]
) -> None:
    """Whatever the case in which other code has written its method: it is made all the same."""
    rules({"SECRETS": {"KEY": "v4lue"}}, default=Rule())
    call = stored(spelt(method), OPEN_CALLS[method])
    for name, value in ELSEWHERE[method]:
        assert refused(call, edit(root, call, put(name, value)), "another kind of call")
    for was, other, params in ANOTHER_METHOD:
        if was == method:
            shown = edit(
                root, call, lambda _, new=(other, params): {"method": new[0], "params": new[1]}
            )
            assert refused(call, shown, "another kind of call")


@pytest.mark.parametrize(
    ("method", "name", "value", "path"),
    [
        ("get", "url", "https://vendor.example/v2?page=2", "params.url"),
        ("get", "params", {"page": True}, "params.params"),
        ("get", "json", {"a": 1}, "params.json"),
        ("send_email", "message", "Many thanks", "params.message"),
        ("celery_task", "args", [2], "params.args"),
        ("celery_task", "kwargs", {"fast": 1}, "params.kwargs"),
        ("django_task", "args", [2, 3], "params.args"),
    ],
)
def test_the_rest_of_a_call_may_be_edited_and_the_log_names_it(
    rules: Rules, root: Client, method: str, name: str, value: Any, path: str
) -> None:
    rules(default=Rule())
    call = stored(method, OPEN_CALLS[method])
    edit(root, call, put(name, value))
    fresh = CallQueue.objects.get(pk=call.pk)
    assert fresh.status == Status.NEW
    assert json.dumps(fresh.call_data["params"][name]) == json.dumps(value), "1 is not True"
    assert fresh.idempotency_key != call.idempotency_key
    assert logged(path)


PAIRS = [
    ["user", "bob"], ["password", "hunter2-real"], ["tag", "a"], ["tag", "b"], ["token", "t0k-1"],
    ["token", "t0k-2"],
]  # fmt: skip


CHANGES: list[Callable[[Any], Any]] = [
    lambda pairs: [["comment" if name == "password" else name, value] for name, value in pairs],
    lambda pairs: [[value, name] for name, value in pairs],
    lambda pairs: [["user", "[redacted]"], ["password", "bob"], *pairs[2:]],
    lambda pairs: [pairs[0], *pairs[2:], ["tag", "[redacted]"]],
    lambda pairs: pairs[:5],  # one token fewer: which of the two it is, nobody can say
    lambda pairs: [*pairs, ["token", "[redacted]"]],
    lambda pairs: dict(pairs),
    lambda pairs: {**{name: "x" for name, _ in pairs}, "comment": "[redacted]"},
    lambda pairs: [["user", ["[redacted]"]], *pairs[1:]],
    lambda pairs: [*pairs, ["new", "1"]],
    lambda pairs: [["user", "eve"], *pairs[1:]],
    lambda pairs: [],
    lambda pairs: "replaced",
]


@pytest.mark.parametrize("place", ["data", "params"])
def test_a_list_in_which_something_is_hidden_stays_as_it_is(
    rules: Rules, root: Client, place: str
) -> None:
    rules(default=Rule())
    call = stored("post", {"url": "https://vendor.example/", place: PAIRS})
    said = [text_of(root.get(page_of(call)))]
    for change in CHANGES:
        response = edit(
            root, call, lambda data, to=change: put(place, to(data["params"][place]))(data)
        )
        assert refused(call, response, "[redacted] inside a list")
        said.append(text_of(response))
    for hidden in ("hunter2-real", "t0k-1", "t0k-2"):
        assert not [text for text in said if hidden in text]


def test_only_what_failed_is_edited(with_secret: None, root: Client) -> None:
    call = secretive()
    path = reverse("admin:callqueue_callqueue_edit", args=[call.pk])
    text = root.get(path).context["text"]
    for status in set(Status) - {Status.FAILED}:
        CallQueue.objects.filter(pk=call.pk).update(status=status)
        assert path not in text_of(root.get(page_of(call)))
        assert "cannot be edited" in text_of(root.post(path, {"call_data": text}, follow=True))
        assert CallQueue.objects.get(pk=call.pk).status == status
    assert not LogEntry.objects.exists()


def test_what_only_a_handler_understands_is_not_edited_where_something_is_hidden(
    rules: Rules, root: Client
) -> None:
    rules({"HANDLERS": {"sms": f"{__name__}.page_of"}}, default=Rule())
    call = stored("sms", {"to": "+49", "token": "t0k-1"})
    assert refused(call, edit(root, call, put("to", "+1")), "only its handler knows")
    edit(root, stored("sms", {"to": "+49"}), put("to", "+1"))
    assert CallQueue.objects.new().get().call_data["params"] == {"to": "+1"}


def test_the_log_of_an_edit_is_short_and_holds_no_value(rules: Rules, root: Client) -> None:
    """And no name that tells of somebody."""
    rules({"HANDLERS": {"own": f"{__name__}.page_of"}}, default=Rule())
    params = {f"name{i}": f"v4lue-{i}" for i in range(30)}
    params = {"zero.patient@clinic.example": "v4lue", "n\n\x1b[2J": "v4lue", **params}
    edit(root, stored("own", params), lambda data: {**data, "params": dict.fromkeys(params, "0")})
    said = LogEntry.objects.get().change_message
    assert said.isprintable()
    assert said.endswith(
        "Changed: params.[…], params.[…], "
        + ", ".join(f"params.name{i}" for i in range(18))
        + ", …."
    )
