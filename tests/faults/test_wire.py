"""A network that breaks at every point of a call: the total timeout holds, and not sent is told
from sent and unanswered.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from callqueue.models import CallAttempt, CallQueue
from tests.faults.stage import Stage, Status
from tests.support.servers import free_port
from tests.support.verdicts import on_a_quiet_machine

TOTAL = 2.0
LOST = "lost"


@pytest.fixture
def ended(stage: Stage) -> dict[str, CallQueue]:
    """Every kind of trouble, for a call that may be repeated and for one that may not, all at
    once.
    """
    stage.rule(200, total=TOTAL, more="connect_timeout=1.0")
    source = (stage.processes.folder / "settings_with_sabotage.py").read_text("utf-8")
    stage.processes.configure(
        source.replace("max_attempts=60", "max_attempts=2"), name="settings_with_sabotage"
    )
    calls: dict[str, CallQueue] = {}
    for trouble, path in {
        "reset": "/reset",
        "close": "/close",
        "half": "/truncate",
        "half a 500": "/truncate?status=500",
        "drip": "/drip?n=1000&s=0.1",
        "hang": "/hang?s=60",
    }.items():
        for method in ("get", "post"):
            calls[f"{method} {trouble}"] = stage.send(path=path, method=method)[0]
    for trouble, url in {
        "nxdomain": "http://no-such-host.invalid/ok",
        "nobody": f"http://127.0.0.1:{free_port()}/ok",
        "no tls": f"https://127.0.0.1:{stage.vendor.port}/ok",
    }.items():
        for method in ("get", "post"):
            made = CallQueue.objects.send({"method": method, "params": {"url": url}}, rule="r")
            assert made is not None
            calls[f"{method} {trouble}"] = made
    stage.worker(concurrency=4)
    stage.dispenser()
    stage.wait_for_all(60)
    for call in calls.values():
        call.refresh_from_db()
    return calls


def test_trouble_of_every_kind_ends_as_it_should(stage: Stage, ended: dict[str, CallQueue]) -> None:
    found = {
        name: (Status(call.status).name, call.attempts.count()) for name, call in ended.items()
    }
    repeated, once = ("FAILED", 2), ("UNKNOWN", 1)
    expected: dict[str, Any] = {}
    for trouble in (
        "reset",
        "close",
        "half",
        "half a 500",
        "drip",
        "hang",
        "nxdomain",
        "nobody",
        "no tls",
    ):
        expected[f"get {trouble}"] = repeated
    for trouble in ("reset", "close", "hang"):  # sent, and no answer
        expected[f"post {trouble}"] = once
    for trouble in ("nxdomain", "nobody", "no tls"):  # never sent
        expected[f"post {trouble}"] = repeated
    expected |= {
        "post half": ("DONE", 1),
        "post drip": ("DONE", 1),
        "post half a 500": repeated,
    }  # the status decides
    assert found == expected
    for name, call in ended.items():
        if call.pk in stage.numbers:
            assert len(stage.arrivals_of(call)) == call.attempts.count(), name
    for name in ("post half", "post drip"):
        assert ended[name].attempts.get().error_message, (
            f"{name}: the attempt does not say that the body is not whole"
        )
    for name in ("post nxdomain", "post nobody", "post no tls"):
        assert set(ended[name].attempts.values_list("sent_at", flat=True)) == {None}, name
    late = timedelta(seconds=TOTAL + 1.0)
    with on_a_quiet_machine():
        for attempt in CallAttempt.objects.all():
            assert attempt.finished_at - attempt.started_at < late, (
                attempt.call_id,
                attempt.error_message,
            )
