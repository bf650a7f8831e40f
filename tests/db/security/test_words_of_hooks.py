"""What a hook or a provider says is kept without what the call said, wherever it is kept: errors,
reasons of holds, the log. Those are in clear, whatever ENCRYPTION_KEYS says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.fernet import Fernet

import callqueue
from callqueue import GiveUp, HoldUntil, RetryLater, Rule
from callqueue.maintenance import reconcile
from callqueue.models import CallQueue, Hold
from tests.db.security.test_what_goes_out import dump
from tests.support import behaviour
from tests.support.stub import serving

Rules = Callable[..., None]
MAIL, NAME, WHERE = "zero.patient@clinic.example", "Zero Patient", "ward-7-bed-12"
SAID = f"invalid recipient {MAIL} ({NAME}) at {WHERE}"


def raising(answer: Any) -> Any:
    raise ValueError(answer.text)


VERDICTS: dict[str, Any] = {
    "gives up": lambda answer: GiveUp(answer.text),
    "later": lambda answer: RetryLater(answer.text),
    "holds": lambda answer: HoldUntil(60, answer.text),
    "raises": raising,
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
    rules(
        default=Rule(classify=VERDICTS[verdict]),
        more={"ENCRYPTION_KEYS": [Fernet.generate_key().decode()]},
    )
    remote.answers[f"/beds/{WHERE}?who={MAIL}"] = (status, {}, SAID.encode())
    params = {
        "url": f"http://vendor.example/beds/{WHERE}?who={MAIL}",
        "json": {"to": NAME, "by_patient": {MAIL: {"condition": "positive"}}},
    }
    call = CallQueue.objects.send({"method": "post", "params": params})
    assert call is not None and behaviour.run() == 1
    call.refresh_from_db()
    kept = dump() + caplog.text
    for text in (MAIL, NAME, WHERE, "positive"):
        assert text not in kept
    assert Hold.objects.exists() == (verdict == "holds" or (verdict, status) == ("raises", 429))
    if verdict != "raises":
        assert call.error_message == "invalid recipient [payload] ([payload]) at [payload]"


def test_nor_of_what_a_reconcile_hook_says(rules: Rules, remote: behaviour.Vendor) -> None:
    rules(
        default=Rule(reconcile=lambda call: GiveUp(f"no {NAME}")),
        more={"ENCRYPTION_KEYS": [Fernet.generate_key().decode()]},
    )
    params = {"url": "http://vendor.example/", "json": {"to": NAME}}
    call = CallQueue.objects.send({"method": "post", "params": params})
    assert call is not None
    CallQueue.objects.update(status=CallQueue.Status.UNKNOWN, ready=False)
    reconcile.ask_due("default")
    call.refresh_from_db()
    assert (call.status, call.error_message) == (CallQueue.Status.FAILED, "no [payload]")


def test_nor_of_a_refusal_in_the_worker(rules: Rules, remote: behaviour.Vendor) -> None:
    """It names the place, which may be somebody's name."""
    rules(more={"ENCRYPTION_KEYS": [Fernet.generate_key().decode()]})
    url = "http://vendor.example/"
    call = CallQueue.objects.send({"method": "get", "params": {"url": url, "params": {"a": "b"}}})
    assert call is not None
    call.call_data = {"method": "get", "params": {"url": url, "params": {MAIL: {"a": "b"}}}}
    call.save()
    behaviour.run()
    call.refresh_from_db()
    assert call.status == CallQueue.Status.FAILED and "[payload]" in call.error_message
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
