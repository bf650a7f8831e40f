"""fake_transport: patterns, and what a test may answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import requests

from callqueue import Rule
from callqueue.models import CallAttempt, CallQueue
from callqueue.testing import UnexpectedRequest, answer, fake_transport, run_callqueue
from tests.db.testing.calls import URL, send, status_of

Rules = Callable[..., None]
Status = CallQueue.Status


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        (f"{URL}/pay", "/pay", True),
        (f"{URL}/pay", "/pay?a=1", True),
        (f"{URL}/*", "/pay/7?a=1", True),
        (f"POST {URL}/pay", "/pay", True),
        (f"{URL}/pay/*/refund", "/pay/12/refund", True),
        (lambda request: request.method == "POST", "/anything", True),
        (URL, "", True),
        (f"{URL}/pay?a=1", "/pay", False),
        (f"GET {URL}/pay", "/pay", False),
        ("https://other.example/*", "/pay", False),
        (f"{URL}/pa", "/pay", False),
    ],
)
def test_patterns_and_a_request_without_an_answer_that_fails_the_test(
    rules: Rules, pattern: Any, path: str, fits: bool
) -> None:
    rules(default=Rule())
    call = send(path)
    why = "no answer for POST https://api.example.com/pay"
    fails = nullcontext() if fits else pytest.raises(UnexpectedRequest, match=why)
    with fake_transport({pattern: 204}), fails:
        run_callqueue()
    assert (status_of(call) == Status.DONE) is fits


@pytest.mark.parametrize(
    ("given", "status", "body"),
    [
        (204, 204, ""),
        ({"ok": True}, 200, '{"ok": true}'),
        ([201, 202], 201, ""),
        (answer(json=[1, 2]), 200, "[1, 2]"),
        (answer(202, body="later"), 202, "later"),
        (lambda request: {"saw": request.json["amount"]}, 200, '{"saw": 3}'),
        (lambda request: answer(203, body=request.url[-4:]), 203, "/pay"),
    ],
)
def test_answers(rules: Rules, given: Any, status: int, body: str) -> None:
    rules(default=Rule())
    call = send(json={"amount": 3})
    with fake_transport(default=given):
        run_callqueue()
    (attempt,) = CallAttempt.objects.filter(call=call)
    assert (attempt.response_status, attempt.response_body) == (status, body)


def test_answers_of_a_list_are_given_in_turn_and_the_last_one_for_ever(rules: Rules) -> None:
    rules(default=Rule())
    answers = [201, {"ok": True}]
    with fake_transport({f"{URL}/a": answers}, default=answers) as transport:
        for path in "/a", "/a", "/b", "/a":
            send(path)
            run_callqueue()
        transport.default = [202, 203]
        send("/b")
        run_callqueue()
    given = CallAttempt.objects.order_by("pk").values_list("response_status", flat=True)
    assert list(given) == [201, 200, 200, 200, 202]
    assert answers == [201, {"ok": True}]


def look(request: Any) -> int:
    assert request.json == {"amount": 4}
    return 200


@pytest.mark.parametrize("given", [True, [], "text", (200, {}, ""), look])
def test_what_is_no_answer_fails_the_test_and_so_does_an_assertion_in_one(
    rules: Rules, given: Any
) -> None:
    rules(default=Rule())
    send(json={"amount": 3})
    error, why = (
        (AssertionError, "amount") if given is look else (UnexpectedRequest, "is no answer")
    )
    with fake_transport(default=given), pytest.raises(error, match=why):
        run_callqueue()


@pytest.mark.parametrize(
    ("error", "method", "expected"),
    [
        (requests.ConnectTimeout, "post", Status.ERROR),
        (requests.ConnectionError("refused"), "post", Status.ERROR),
        (requests.ReadTimeout("no answer"), "post", Status.UNKNOWN),
        (requests.ReadTimeout("no answer"), "get", Status.ERROR),
    ],
)
def test_networks_fail(rules: Rules, error: Any, method: str, expected: int) -> None:
    rules(default=Rule())
    call = send(method=method)
    with fake_transport(default=error):
        run_callqueue(until_idle=False)
    assert status_of(call) == expected
    (attempt,) = CallAttempt.objects.filter(call=call)
    assert (attempt.sent_at is None) == (expected == Status.ERROR and method == "post")


def test_without_a_transport_only_a_server_of_the_test_answers(rules: Rules, listen: Any) -> None:
    """No request leaves this machine."""
    rules({"ALLOWED_NETWORKS": ["127.0.0.0/8"]}, default=Rule())
    call = send("/pay?token=hidden")
    with pytest.raises(UnexpectedRequest, match=r"api\.example\.com: .* callqueue_transport") as e:
        run_callqueue()
    assert "hidden" not in str(e.value)
    assert call.attempts.filter(sent_at=None).count() == 1
    call.delete()
    url = f"http://127.0.0.1:{listen().port}/"
    call = CallQueue.objects.send({"method": "get", "params": {"url": url}})
    run_callqueue()
    assert status_of(call) == Status.DONE
