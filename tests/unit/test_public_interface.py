"""Names, arguments and numbers that users rely on: a change of any is a breaking one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.core.management import get_commands
from django.urls import reverse

import callqueue
from callqueue import (
    Breaker,
    Concurrency,
    FixedWindow,
    Retry,
    Rule,
    SlidingWindow,
    TokenBucket,
    conf,
    states,
)
from callqueue.conf import STATUS_NAMES
from callqueue.exceptions import (
    CallQueueError,
    IllegalTransition,
    InvalidCall,
    NotAllowed,
    UnknownRule,
)
from callqueue.models import CallAttempt, CallQueue
from callqueue.permits import granted
from callqueue.states import Move

NAMES = """AsyncPermitTransport NotNow PermitAdapter PermitTransport apermit permit permitted Concurrency Discard FixedWindow Forecast GiveUp HoldUntil QueuedTask Retry RetryLater Route Rule
SlidingWindow Succeeded TokenBucket beat_schedule call_failed call_finished call_unknown handler rule_held"""
COMMANDS = """run dispenser cleanup status send requeue cancel pause resume schedule audit simulate
uninstall doctor"""
TASKS = "dispenser make_api_call recover_lost_calls cleanup_call_queue"
QUERYSETS = "new due dispatched error failed unknown done cancelled expired"
CALL = """status created_dt due_at_dt expires_at_dt dispatched_at_dt finished_at_dt rule queue key priority cost
call_data failed_count error_message unique_key callback"""
ATTEMPT = """call number rule key queue cost released_at started_at sent_at finished_at outcome response_status
response_headers response_body response_size error_message worker"""


def test_whatever_has_a_name_is_found_by_it() -> None:
    from celery import current_app

    import callqueue.tasks

    assert all(getattr(callqueue, name) is not None for name in NAMES.split())
    assert all(callable(getattr(CallQueue.objects, name)) for name in QUERYSETS.split())
    assert {f"callqueue_{name}" for name in COMMANDS.split()} <= set(get_commands())
    assert {f"callqueue.{name}" for name in TASKS.split()} <= set(current_app.tasks)
    assert set(CALL.split()) <= {field.name for field in CallQueue._meta.get_fields()}
    assert set(ATTEMPT.split()) <= {field.name for field in CallAttempt._meta.get_fields()}
    assert {name for name, _ in CallQueue._meta.permissions} == {
        "requeue_call",
        "edit_call",
        "cancel_call",
        "control_rule",
    }
    assert apps.get_app_config("callqueue").name == "callqueue"
    assert reverse("admin:callqueue_callqueue_changelist") and reverse("admin:callqueue_dashboard")
    for error in (InvalidCall, UnknownRule, NotAllowed, IllegalTransition, callqueue.NotNow):
        assert issubclass(error, CallQueueError)


def test_the_package_is_importable_before_django_is_set_up() -> None:
    code = "import callqueue; callqueue.beat_schedule(); callqueue.Rule(limits=[callqueue.SlidingWindow('1/s')])"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_states_are_numbered() -> None:
    assert {s.name: s.value for s in CallQueue.Status} == {
        "NEW": 0, "DISPATCHED": 1, "ERROR": 2, "DONE": 3, "FAILED": 4, "CANCELLED": 5, "EXPIRED": 6, "UNKNOWN": 7,
    }  # fmt: skip


def test_send_and_a_permit_take_their_arguments() -> None:
    parameters = inspect.signature(CallQueue.objects.send).parameters
    assert list(parameters) == [
        "call_data", "rule", "key", "priority", "cost", "not_before", "expires_at", "unique_key", "callback",
    ]  # fmt: skip
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "call_data")
    arguments = ["rule", "url", "key", "cost", "priority", "wait", "lease", "label"]
    for taker in (callqueue.permit, callqueue.apermit, callqueue.permitted):
        assert list(inspect.signature(taker).parameters) == arguments
    for name in ("sent", "settle", "hold", "attempt_id"):
        assert hasattr(granted.Permit, name)


def test_defaults_of_a_rule_and_its_retry() -> None:
    rule, retry = Rule(), Retry()
    assert (rule.connect_timeout, rule.read_timeout, rule.total_timeout) == (3.05, 27, 60)
    assert (rule.priority, rule.idempotency_header, rule.on_lost) == (0, "Idempotency-Key", "auto")
    assert rule.idempotency_ttl == timedelta(hours=24)
    backoff = (retry.max_attempts, retry.base, retry.factor, retry.cap, retry.jitter)
    assert backoff == (3, 1.0, 2.0, 600.0, True)
    assert retry.statuses == (408, 425, 429, 500, 502, 503, 504)
    assert (retry.max_hold, retry.max_rate_limited) == (21600.0, 20)


def test_defaults_of_the_settings(settings: Any) -> None:
    settings.CALLQUEUE = {}
    config = conf.current()
    assert list(config.rules) == ["default"]
    assert config.rules["default"].limits[0].rate == "100/h"
    assert (config.interval, config.poll, config.release_lease, config.grace) == (
        1.0,
        0.05,
        300,
        30,
    )
    kept = (config.max_call_bytes, config.max_response_bytes, config.keep_response_bytes)
    assert kept == (262144, 1048576, 65536)


@pytest.mark.parametrize(
    "rate", ["ten/s", "5/0s", "0/s", "5", "5/", "/s", "5/y", "-5/s", "5/s ", "5.5/s", None, 5]
)
def test_a_rate_that_is_none_is_refused_with_its_place(rate: object) -> None:
    for make in (SlidingWindow, FixedWindow, lambda r: TokenBucket(r, burst=1)):
        with pytest.raises(ImproperlyConfigured, match=r"rate: "):
            make(rate)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hosts", 5), ("hosts", ["https://api.example.com"]), ("hosts", ["api.example.com:443"]), ("hosts", ["api.*.com"]),
        ("queues", [1]), ("queues", ["a\0"]), ("queues", []), ("queues", ()), ("limits", SlidingWindow("1/s")), ("limits", ["1/s"]), ("retry", 3),
        ("connect_timeout", 0), ("read_timeout", -1), ("total_timeout", "60"), ("priority", 1.5), ("priority", 10**6),
        ("idempotency_header", "a b"), ("idempotency_ttl", 3600), ("on_lost", "maybe"),
        ("verify", 1), ("verify", ""), ("classify", "nodots"), ("settle", 7), ("priority", 32768), ("priority", -32769),
        ("hosts", "x" * 101), ("hosts", ["a", "a"]), ("queues", [" "]), ("idempotency_header", ""), ("idempotency_header", 5),
        ("idempotency_ttl", timedelta(-1)), ("total_timeout", True), ("total_timeout", 86401), ("keep_response_bytes", -1),
        ("keep_response_bytes", 2**30 + 1), ("limits", [SlidingWindow("1/s", name="x"), Concurrency(1, name="x")]),
    ],
)  # fmt: skip
def test_a_rule_says_which_field_is_wrong(field: str, value: object) -> None:
    with pytest.raises(ImproperlyConfigured, match=rf"Rule\.{field}: "):
        Rule(**{field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_attempts", [0, 1001, 1.0, True]), ("max_rate_limited", [-1, 100_001]), ("base", [-1, 86401, "1", True]),
        ("factor", [0.9, 101]), ("cap", [-1, 30 * 86400 + 1]), ("max_hold", [-1, 366 * 86400 + 1]), ("jitter", [1]),
        ("statuses", [429, [99], [600], [True], ["429"]]),
    ],
)  # fmt: skip
def test_a_retry_says_which_field_is_wrong(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ImproperlyConfigured, match=rf"Retry\.{field}: "):
            Retry(**{field: value})


def test_bounds_are_within() -> None:
    least = Retry(max_attempts=1, max_rate_limited=0, base=0, factor=1, cap=0, max_hold=0)
    most = Retry(
        max_attempts=1000, max_rate_limited=100_000, base=86400, factor=100, cap=30 * 86400,
        max_hold=366 * 86400, statuses={100, 599},
    )  # fmt: skip
    assert most.statuses in ((100, 599), (599, 100)), "whatever it was given as"
    quick = Breaker(failures=1, within=0.1, hold=0.1, factor=1, longest=0.1)
    slow = Breaker(failures=10_000, within=86400, hold=86400, factor=100, longest=86400)
    Rule(retry=least, priority=-32768, keep_response_bytes=0, idempotency_ttl=timedelta(0),
         connect_timeout=0.001, breaker=quick, hosts={"x" * 100}, verify="ca.pem", queues="q")  # fmt: skip
    Rule(retry=most, priority=32767, keep_response_bytes=2**30, total_timeout=86400,
         idempotency_header=None, classify="a.b", settle=len, breaker=slow, limits=(Concurrency(1),))  # fmt: skip
    for hosts in (
        "api.example.com",
        ["*.example.com", "*"],
        ["::1", "[::1]", "127.0.0.1", "bücher.example"],
    ):
        assert Rule(hosts=hosts).hosts
    assert SlidingWindow("1/366d", jitter=60).jitter_us == 60_000_000
    assert TokenBucket("1/s", burst=1, jitter=0).jitter_us == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rule(limts=[]), "Rule: there is no field 'limts'; did you mean 'limits'?"),
        (lambda: Retry(max_attemps=3), "Retry: there is no field 'max_attemps'; did you mean 'max_attempts'?"),
        (lambda: SlidingWindow("1/s", pr="key"), "SlidingWindow: there is no field 'pr'; did you mean 'per'?"),
        (lambda: Concurrency(1, zzz=1), "Concurrency: there is no field 'zzz'; there are per, name, unit"),
    ],
)  # fmt: skip
def test_a_field_that_is_none_is_refused_with_the_nearest(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises(ImproperlyConfigured) as refusal:
        make()
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("per", ["", 5, "a\0", "\ud800"]), ("unit", ["", 5, "a\0", "\ud800"]), ("name", ["", 5, "a\0", "\ud800"]),
        ("jitter", [-1, 61, True, "1"]), ("strict", [1]),
    ],
)  # fmt: skip
def test_a_limit_says_which_field_is_wrong(field: str, values: list[object]) -> None:
    """What a database cannot store is refused here, not by each dispenser's pass."""
    for value in values:
        with pytest.raises(ImproperlyConfigured, match=rf"SlidingWindow\.{field}: "):
            SlidingWindow("1/s", **{field: value})


@pytest.mark.parametrize(
    "limit",
    [
        lambda: FixedWindow("1/d", timezone="Mars/Olympus"), lambda: TokenBucket("1/s", burst=0), lambda: Concurrency(0),
        lambda: Concurrency(True), lambda: SlidingWindow("1/367d"),
    ],
)  # fmt: skip
def test_a_limit_that_is_none_is_refused(limit: Callable[[], object]) -> None:
    with pytest.raises(ImproperlyConfigured):
        limit()


# --- The table of legal moves


PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "states.md"


def test_moves_lead_from_every_state_and_from_a_final_one_by_requeue_or_a_hook_alone() -> None:
    assert not [move for move in Move if set(move.sources) & set(move.targets)]
    assert {source for move in Move for source in move.sources} == set(range(8))
    leaving = {move for move in Move if set(move.sources) & set(states.FINAL)}
    assert leaving == {Move.REQUEUE, Move.REQUEUE_AGAIN, Move.RECONCILE}


def test_the_page_about_states_has_the_same_moves() -> None:
    """Its table may name several states in a cell; `send` is in no row of ours."""
    told = set()
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [re.findall(r"`([A-Z]+)`", cell) for cell in line.split("|")[1:3]]
        if len(cells) == 2 and all(cells):
            told |= {(one, other) for one in cells[0] for other in cells[1]}
    number = {name.upper(): status for name, status in STATUS_NAMES.items()}
    assert {(number[one], number[other]) for one, other in told} == {
        (source, target) for move in Move for source in move.sources for target in move.targets
    }
