"""Secrets are resolved where the call is made, and stored nowhere."""

from __future__ import annotations

from collections.abc import Callable

from callqueue import Rule
from callqueue.models import CallQueue
from callqueue.security.secrets import Secret
from callqueue.security.withholding import WITHHELD
from tests.support.behaviour import Vendor, run

Rules = Callable[..., None]


def fresh(call: CallQueue) -> CallQueue:
    return CallQueue.objects.get(pk=call.pk)


def test_secrets_are_resolved_in_the_worker_and_stored_nowhere(
    rules: Rules, remote: Vendor
) -> None:
    rules({"SECRETS": {"TOKEN": "s3cr3t-value"}}, r=Rule())
    data = {
        "method": "post",
        "params": {"url": "http://vendor.example/", "headers": {"Authorization": Secret("TOKEN")}},
    }
    call = CallQueue.objects.send(data, rule="r")
    remote.answers["/"] = (400, {"X-Echo": "s3cr3t-value"}, b"you sent s3cr3t-value")
    run()
    assert remote.requests[0][2]["headers"]["Authorization"] == "s3cr3t-value"
    (attempt,) = fresh(call).attempts.all()
    kept = f"{fresh(call).call_data} {fresh(call).error_message} {attempt.response_body} {attempt.response_headers}"
    assert "s3cr3t" not in kept
    assert WITHHELD in attempt.response_body
