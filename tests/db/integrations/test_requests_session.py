"""Sessions: what requests would have sent is what the call will send, and nothing is dropped in
silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import requests
from requests.auth import HTTPBasicAuth, HTTPDigestAuth

import callqueue
from callqueue import Discard, Rule
from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.execution.http import client
from callqueue.integrations.requests_session import QueueAdapter, Session, queued_session
from callqueue.models import CallQueue
from callqueue.security.secrets import Secret
from callqueue.testing import FakeTransport, Sent, run_callqueue

Rules = Callable[..., None]
URL = "https://api.example.com/pay"


@pytest.fixture(autouse=True)
def example(rules: Rules) -> None:
    rules(default=Rule(), example=Rule())


def params_of(call: CallQueue | None) -> dict[str, Any]:
    assert call is not None
    return dict(call.call_data["params"])


def as_requests_sends_it(
    session: Session, method: str, **arguments: Any
) -> requests.PreparedRequest:
    """What a requests.Session with the same settings would send."""
    real = requests.Session()
    real.trust_env = False
    real.headers.clear()
    real.headers.update(session.headers)
    real.params, real.auth = session.params, session.auth
    real.cookies.update(session.cookies)
    return real.prepare_request(requests.Request(method, URL, **arguments))


def test_post_queues_the_call_and_returns_its_row(callqueue_sent: Sent) -> None:
    call = callqueue.Session(rule="example").post(URL, json={"amount": 5})
    assert isinstance(call, CallQueue)
    assert (
        callqueue_sent.assert_call_sent(
            method="post", url=URL, json={"amount": 5}, rule="example", count=1
        )
        == call
    )
    assert params_of(call) == {"url": URL, "json": {"amount": 5}}


@pytest.mark.parametrize("method", ["get", "options", "head", "post", "put", "patch", "delete"])
def test_every_verb_has_its_method_with_requests_signature(
    method: str, callqueue_sent: Sent
) -> None:
    call = getattr(Session("example"), method)(URL, headers={"X-A": "1"})
    assert (call.method, params_of(call)["headers"]) == (method, {"X-A": "1"})
    theirs = list(inspect.signature(getattr(requests.Session, method)).parameters)
    ours = list(inspect.signature(getattr(Session, method)).parameters)
    assert [name for name in ours if name in theirs] == theirs


def test_request_has_requests_parameters_in_requests_order() -> None:
    ours = list(inspect.signature(Session.request).parameters)[:-1]
    assert ours == list(inspect.signature(requests.Session.request).parameters)


@pytest.mark.parametrize(
    "arguments",
    [
        {"params": {"b": "2"}},
        {"params": {"a": None, "b": ["1", "2"]}},
        {"params": [("x", "1"), ("x", "2")]},
        {"headers": {"x-token": "mine", "X-Other": None}},
        {"auth": ("ann", "secret")},
        {"auth": HTTPBasicAuth("ann", "secret")},
        {"cookies": {"c": "3"}},
        {"data": {"a": "1"}},
        {"data": [("a", "1"), ("a", "2")]},
        {"data": "text"},
        {"data": b"text"},
        {"json": []},
        {"data": {}, "json": {"a": 1}},
    ],
)
def test_the_sessions_settings_are_merged_as_requests_merges_them(
    arguments: Any, callqueue_transport: FakeTransport
) -> None:
    session = Session("example")
    session.headers.update({"X-Token": "of the session", "X-Other": "1"})
    session.params = {"a": "1"}
    session.auth = ("bob", "word")
    session.cookies.set("s", "1")
    session.cookies.set("elsewhere", "1", domain="other.example")
    session.post(URL, **arguments)
    callqueue_transport.default = 200
    run_callqueue()
    (made,) = callqueue_transport.requests
    expected = as_requests_sends_it(session, "POST", **arguments)
    body = expected.body or b""
    assert (made.url, made.body) == (expected.url, body.encode() if isinstance(body, str) else body)
    ours = {
        name: value
        for name, value in made.headers.items()
        if name not in ("Idempotency-Key", "Cookie")
    }
    assert ours | {"Cookie": ""} == dict(expected.headers) | {"Cookie": ""}
    assert sorted(made.headers["Cookie"].split("; ")) == sorted(
        expected.headers["Cookie"].split("; ")
    )


def test_arguments_of_send_are_the_sessions_or_the_requests_own() -> None:
    session = Session("example", key="k", priority=3, cost=2)
    call = session.get(URL, key="other", unique_key="u")
    assert call is not None
    assert (call.rule, call.key, call.priority, call.cost, call.unique_key) == (
        "example",
        "other",
        3,
        2,
        "u",
    )
    assert session.get(URL, unique_key="u") == call


def test_secrets_may_stand_for_values(settings: Any) -> None:
    settings.CALLQUEUE = {"SECRETS": {"TOKEN": "t"}}
    session = Session()
    session.headers["Authorization"] = Secret("TOKEN")
    call = session.get(URL, cookies={"c": Secret("TOKEN"), "d": "1"})
    assert params_of(call)["headers"] == {"Authorization": Secret("TOKEN")}
    assert params_of(call)["cookies"] == {"c": Secret("TOKEN"), "d": "1"}


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("timeout", 5, "total_timeout"),
        ("verify", False, "Rule"),
        ("stream", True, "MAX_RESPONSE_BYTES"),
        ("files", {"f": b""}, "handler"),
        ("hooks", {"response": print}, "classify"),
        ("proxies", {"https": "x"}, "directly"),
        ("cert", "c.pem", "client certificates"),
        ("allow_redirects", True, "follow_redirects"),
        ("data", (n for n in "ab"), "read it first"),
        ("data", b"\xff", "base64"),
        ("auth", HTTPDigestAuth("a", "b"), "Authorization"),
    ],
)
def test_what_cannot_be_queued_is_refused_saying_where_to_set_it(
    name: str, value: Any, where: str
) -> None:
    with pytest.raises(InvalidCall, match=where) as refused:
        Session().post(URL, **{name: value})
    assert refused.value.field == name
    assert not CallQueue.objects.exists()


def test_unknown_arguments_are_type_errors() -> None:
    with pytest.raises(TypeError, match="colour"):
        Session().get(URL, colour="red")
    with pytest.raises(TypeError, match="colour"):
        Session(colour="red")
    with pytest.raises(InvalidCall, match="Rule"):
        Session().verify = False


def test_a_session_is_a_context_manager() -> None:
    with Session("example") as session:
        assert session.delete(URL) is not None


def test_none_where_the_router_discards(settings: Any) -> None:
    settings.CALLQUEUE = {"ROUTER": lambda data: Discard("no")}
    assert Session().get(URL) is None
    response = queued_session().get(URL)
    assert (response.status_code, response.json()) == (202, {"call_id": None})


def pay(session: requests.Session) -> requests.Response:
    """Code of somebody else's, which takes a session."""
    response = session.post(
        URL,
        params={"q": "1"},
        json={"amount": 5},
        headers={"X-A": "1"},
        auth=("ann", "s"),
        timeout=5,
    )
    response.raise_for_status()
    return response


def test_code_that_takes_a_session_is_queued_by_passing_another_one(
    callqueue_transport: FakeTransport,
) -> None:
    session = requests.Session()
    session.mount("https://api.example.com", QueueAdapter("example", key="k"))
    response = pay(session)
    call = CallQueue.objects.get()
    assert (response.status_code, response.headers["X-Callqueue-Id"]) == (202, str(call.pk))
    assert response.json() == {"call_id": call.pk}
    assert (call.rule, call.key, call.method) == ("example", "k", "post")
    callqueue_transport.default = 200
    run_callqueue()
    (made,) = callqueue_transport.requests
    assert (made.method, made.url, made.json) == ("POST", f"{URL}?q=1", {"amount": 5})
    assert made.headers["X-A"] == "1"
    assert made.headers["Content-Type"] == "application/json"
    assert made.headers["Authorization"].startswith("Basic ")
    assert "Host" not in call.call_data["params"]["headers"]
    assert "User-Agent" not in call.call_data["params"]["headers"]


def test_a_queued_session_queues_all_it_is_asked() -> None:
    session = queued_session("example", priority=4)
    assert session.get("http://example.com/a").status_code == 202
    assert session.put("https://example.com/b", data={"a": "1"}).status_code == 202
    assert [c.priority for c in CallQueue.objects.all()] == [4, 4]


def test_the_adapter_refuses_what_it_cannot_keep_and_what_send_refuses() -> None:
    session = queued_session("example")
    with pytest.raises(InvalidCall, match="verify"):
        session.get(URL, verify=False)
    with pytest.raises(InvalidCall, match="data"):
        session.post(URL, files={"f": ("a.bin", b"\xff\xfe")})
    with pytest.raises(NotAllowed):
        session.get("http://127.0.0.1/")


# --- Headers that are taken away, and bodies


@pytest.mark.parametrize("name", ["Accept", "accept", "User-Agent", "Accept-Encoding"])
def test_none_takes_away_a_header_that_requests_adds(name: str) -> None:
    by_session, by_send = callqueue.Session(), {"headers": {name: None}, "url": URL}
    by_session.headers[name] = None
    queued = requests.Session()
    queued.mount("https://", QueueAdapter())
    queued.headers[name] = None  # type: ignore[assignment]
    queued.get(URL)
    calls = [
        by_session.get(URL),
        callqueue.Session().get(URL, headers={name: None}),
        CallQueue.objects.send({"method": "get", "params": by_send}),
        CallQueue.objects.order_by("-pk")[0],
    ]
    for call in calls:
        assert call is not None
        prepared = client._prepared("get", call.call_data["params"])
        assert name not in prepared.headers
        assert len(prepared.headers) == 3


def test_none_takes_away_a_header_of_the_session() -> None:
    api = callqueue.Session()
    api.headers.update({"X-Own": "1", "X-Other": "2"})
    call = api.get(URL, headers={"x-own": None})
    assert call is not None
    assert call.call_data["params"]["headers"] == {"X-Other": "2"}


@pytest.mark.parametrize("empty", [{}, "", []])
def test_json_beside_an_empty_data_is_the_body(empty: Any) -> None:
    call = CallQueue.objects.send(
        {"method": "post", "params": {"url": URL, "data": empty, "json": {"a": 1}}}
    )
    assert call is not None
    assert client._prepared("post", call.call_data["params"]).body == b'{"a": 1}'


def test_a_signature_over_the_body_holds() -> None:
    payload = {"zz": 1e22, "a": {"longer": -0.0, "b": [1.0, 1]}}
    call = callqueue.Session().post(URL, json=payload, params={"z": "1", "a": "2"})
    assert call is not None
    read = CallQueue.objects.get(pk=call.pk).call_data["params"]
    expected = requests.Request("POST", URL, json=payload, params={"z": "1", "a": "2"}).prepare()
    prepared = client._prepared("post", read)
    assert (prepared.body, prepared.url) == (expected.body, expected.url)
