"""One bad answer, one bad hook: they harm their own call only, and all others end as answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.apps import apps
from django.db import DataError, IntegrityError, models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callqueue import (
    GiveUp,
    HoldUntil,
    Retry,
    RetryLater,
    Rule,
    SlidingWindow,
    Succeeded,
    clocks,
    events,
    states,
)
from callqueue.dispatch import publisher
from callqueue.dispatch.dispenser import Dispenser
from callqueue.execution import executor, recorder, request, wire
from callqueue.fields import SealedTextField, ToldJSONField, ToldTextField
from callqueue.models import CallAttempt, CallQueue, Hold
from callqueue.security.secrets import Secret
from callqueue.texts import storable
from tests.support.behaviour import Vendor, make_together, release, response, send
from tests.support.length import examples
from tests.support.locking import fresh

Rules = Callable[..., None]
Status = CallQueue.Status
NAME = "tests.db.execution.test_hostile_answers"
HALF = "\ud83d"
AT_ONCE = [
    SystemExit("bye"),
    KeyboardInterrupt(),
    GeneratorExit(),
    RecursionError("deep"),
    ValueError(HALF),
]
FUZZED = settings(
    max_examples=examples(60, 1000), deadline=None, suppress_health_check=list(HealthCheck)
)

verdicts: dict[str, Any] = {}


def classify(answer: Any) -> Any:
    said = _said(answer.url)
    return said(answer) if callable(said) else said


def handle(params: Any, context: Any) -> Any:
    return _said(params["path"])


def _said(path: str) -> Any:
    said = verdicts.get(path)
    if isinstance(said, BaseException):
        raise said
    return said


@pytest.fixture(autouse=True)
def _nothing_said() -> Iterator[None]:
    yield
    verdicts.clear()


def answered(
    path: str, status: int = 200, headers: Any = None, body: bytes = b"", charset: str | None = None
) -> wire.Answer:
    made = response(status, {}, body)
    made.headers, made.encoding, made.url = headers or {}, charset, path
    return wire.Answer(response=made, sent_at=clocks.monotonic(), sent=True)


def as_one_message() -> list[int]:
    """Begin and end all that is released, and record it together; the ids of the attempts."""
    release()
    ids = list(CallAttempt.objects.open().order_by("pk").values_list("pk", flat=True))
    make_together(ids)
    return ids


# --- What an answer and an error's text may hold

letters = (
    st.characters() | st.characters(categories=["Cs"]) | st.sampled_from("\0\ud83d\ude00é{}\"':=;")
)
hostile = st.text(letters, max_size=60) | st.sampled_from(
    ["\0" * 3000, HALF * 3000, "Bearer " + "x" * (1 << 20), "a=" * 40_000]
)
charsets = st.none() | st.text(letters, max_size=50) | st.sampled_from(
    ["undefined", "idna", "unicode_escape", "utf-7", "utf-16", "punycode", "hex", "x" * 60_000, "iso-8859-1", "utf-8", "mbcs"]
)  # fmt: skip
bodies = st.binary(max_size=200) | st.sampled_from(
    [b"\\ud800", b"+2AA-", b"\0" * 9000, b"\xf0\x9f\x98" * 3000, b"x" * (1 << 20)]
)
statuses = st.integers(100, 999) | st.sampled_from([200, 204, 301, 400, 403, 429, 500, 503, 529])
said = st.one_of(
    st.none(),
    st.builds(Succeeded),
    st.builds(GiveUp, hostile),
    st.builds(RetryLater, hostile, st.none() | st.floats() | st.integers()),
    st.builds(HoldUntil, st.none() | st.floats(0, 100), st.none() | hostile),
    st.builds(GiveUp, st.none() | st.integers()),
    st.builds(ValueError, hostile),
    st.builds(OSError, hostile),
    st.builds(
        UnicodeDecodeError, st.just("utf-8"), st.just(b"\xff"), st.just(0), st.just(1), hostile
    ),
    st.builds(SystemExit, hostile),
    st.builds(KeyboardInterrupt),
    hostile,
)
headers = st.dictionaries(hostile, hostile, max_size=4)
answers = st.tuples(statuses, headers, bodies, charsets, said)


def outcomes_of(status: int, said: Any) -> set[str]:
    """What an answer of this status may end an attempt as, where the rule's hook says that."""
    by_hook = {Succeeded: states.SUCCEEDED, GiveUp: states.GAVE_UP, HoldUntil: states.THROTTLED}
    if type(said) in by_hook:
        return {by_hook[type(said)]}
    if 200 <= status < 300:
        by_status = {states.SUCCEEDED}
    else:
        by_status = {states.ERRORED, states.GAVE_UP, states.THROTTLED}
    return by_status | {states.ERRORED} if isinstance(said, RetryLater) else by_status


@pytest.mark.fault
@FUZZED
@given(st.lists(answers, min_size=1, max_size=6))
def test_every_attempt_of_a_message_ends_as_its_own_answer_says(
    rules: Rules, remote: Vendor, listed: list[Any]
) -> None:
    """Such a connection is never taken for one that is away: nothing waits, nothing is tried again."""
    rules(r=Rule(classify=f"{NAME}.classify", idempotency_ttl=timedelta.max))
    Hold.objects.all().delete()
    CallQueue.objects.all().delete()
    CallAttempt.objects.all().delete()
    calls = []
    for number, (status, head, body, charset, verdict) in enumerate(listed):
        path = f"/{number}"
        remote.answers[path] = answered(path, status, head, body, charset)
        verdicts[path] = verdict
        calls.append(send("r", path))
    began = clocks.monotonic()
    assert len(as_one_message()) == len(listed)
    for call, (status, _, _, _, verdict) in zip(calls, listed, strict=True):
        attempt = call.attempts.get()
        assert attempt.finished_at is not None
        assert attempt.outcome in outcomes_of(status, verdict), (attempt.outcome, status, verdict)
        assert attempt.response_status == status
        assert "could not be stored" not in attempt.error_message
        if isinstance(verdict, BaseException):
            assert f"classify failed: {type(verdict).__name__}" in attempt.error_message
        ended = {states.SUCCEEDED: {Status.DONE}, states.GAVE_UP: {Status.FAILED}}.get(
            attempt.outcome, {Status.ERROR}
        )
        assert fresh(call).status in ended
    assert not CallQueue.objects.filter(status__in=(Status.UNKNOWN, Status.DISPATCHED)).exists()
    assert clocks.monotonic() - began < 30


def test_half_an_emoji_is_kept_in_the_nearest_form(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(classify=f"{NAME}.classify"), more={"HANDLERS": {"own": f"{NAME}.handle"}})
    verdicts["/"] = GiveUp(f"no such pet: {HALF}\0")
    verdicts["/held"] = HoldUntil(60, f"slowly {HALF}")
    verdicts["/own"] = OSError(f"/tmp/\udcff{HALF}")
    said = f"\0é{HALF}".encode("utf-8", "surrogatepass")
    remote.answers["/"] = answered("/", 400, {HALF: f"a{HALF}\0"}, said)
    remote.answers["/held"] = answered("/held")
    call = send("r", "/")
    own = CallQueue.objects.send({"method": "own", "params": {"path": "/own"}}, rule="r")
    as_one_message()
    assert fresh(call).error_message == "no such pet: \ufffd"
    assert call.attempts.get().response_headers == {"\ufffd": "a\ufffd"}
    assert call.answer.body == b"\0\xc3\xa9\xed\xa0\xbd"
    assert call.answer.text == "é\ufffd\ufffd\ufffd"
    assert fresh(own).error_message == "OSError: /tmp/\ufffd\ufffd"
    send("r", "/held")
    as_one_message()
    assert Hold.objects.get().reason == "slowly \ufffd"


def test_what_others_say_is_stored_by_fields_that_make_it_storable() -> None:
    """Columns of a width hold names, which `send` checks, and those of JSON numbers by name."""
    models_of_ours = apps.get_app_config("callqueue").get_models()
    columns = [column for model in models_of_ours for column in model._meta.concrete_fields]
    free = [column for column in columns if isinstance(column, models.TextField)]
    said = {"error_message", "reason", "response_body", "response_headers"}
    assert {column.name for column in free} == {*said, "call_data"}
    for column in columns:
        if column.name in said:
            assert type(column) in (ToldTextField, ToldJSONField, SealedTextField), column


# --- What a database refuses


@pytest.mark.parametrize("error", [DataError, IntegrityError, ValueError, TypeError, UnicodeError])
def test_a_report_that_cannot_be_stored_is_stored_without_its_texts_or_keeps_no_other_from_it(
    rules: Rules,
    remote: Vendor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Any,
) -> None:
    """The others are recorded at once, whole; and nobody waits as for a database that is away."""
    rules(r=Rule(classify=f"{NAME}.classify"))
    calls = [send("r", f"/{number}") for number in range(4)]
    for number in range(4):
        remote.answers[f"/{number}"] = answered(f"/{number}", 400, {"X": "y"}, b"said %d" % number)
    verdicts["/1"] = HoldUntil(60, "poison")
    write = recorder._columns_of_attempt

    def refusing(report: Any, now: Any) -> dict[str, Any]:
        columns = write(report, now)
        if "poison" in columns["error_message"] or report.job.call.pk == calls[3].pk:
            raise error
        return columns

    lay = recorder.holds.lay

    def picky(*given: Any, reason: str, **more: Any) -> None:
        if reason == "poison":
            raise error
        lay(*given, reason=reason, **more)

    monkeypatch.setattr(recorder, "_columns_of_attempt", refusing)
    monkeypatch.setattr(recorder.holds, "lay", picky)
    monkeypatch.setattr(recorder.time, "sleep", lambda seconds: pytest.fail("waited"))
    with caplog.at_level("ERROR", "callqueue"):
        as_one_message()
    ends = [Status.FAILED, Status.ERROR, Status.FAILED, Status.DISPATCHED]
    assert [fresh(call).status for call in calls] == ends
    assert [call.attempts.get().response_body for call in calls] == ["said 0", "", "said 2", ""]
    bare = calls[1].attempts.get()
    assert (bare.outcome, bare.response_status) == (states.THROTTLED, 400)
    assert bare.response_headers == {} and "could not be stored" in bare.error_message
    assert "could not be stored" in Hold.objects.get(rule="r").reason
    failed = [one.facts["call_id"] for one in caplog.records if one.event == "record_failed"]
    assert failed == [calls[3].pk], "no form of it is taken"


# --- What a hook may raise


def raising(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any) -> Any:
        raise error

    return hook


@pytest.mark.parametrize("error", AT_ONCE, ids=lambda error: type(error).__name__)
def test_whatever_a_hook_raises_fails_its_own_call_at_once(
    rules: Rules, remote: Vendor, error: BaseException
) -> None:
    bad = {"classify": raising(error), "settle": raising(error)}
    rules(
        good=Rule(), **{name: Rule(**{name: hook}) for name, hook in bad.items()},
        secret=Rule(), own=Rule(retry=Retry(max_attempts=1)),
        more={"SECRETS": {"S": raising(error)}, "HANDLERS": {"own": f"{NAME}.handle"}},
    )  # fmt: skip
    verdicts["/own"] = error
    calls = {name: [send(name, f"/{name}") for _ in range(3)] for name in ("good", *bad)}
    params = {"url": "http://vendor.example/", "headers": {"X": Secret("S")}}
    secret = CallQueue.objects.send({"method": "post", "params": params}, rule="secret")
    own = CallQueue.objects.send({"method": "own", "params": {"path": "/own"}}, rule="own")
    watch = threading.Timer(30, pytest.exit, ["the worker waits for ever", 1])
    watch.start()
    as_one_message()
    watch.cancel()
    assert {fresh(call).status for name in calls for call in calls[name]} == {Status.DONE}
    said = {call.attempts.get().error_message for call in calls["classify"]}
    words = f": {storable(str(error))}" if str(error) else ""
    assert said == {f"classify failed: {type(error).__name__}{words}"}
    assert (fresh(secret).status, fresh(own).status) == (Status.ERROR, Status.FAILED)
    assert type(error).__name__ in fresh(secret).error_message
    assert fresh(own).error_message.startswith(type(error).__name__)


class Breaking(Exception):
    """Whose words cannot be had."""

    def __str__(self) -> str:
        raise SystemExit


def breaks(**changed: Any) -> Callable[[Any], None]:
    """A hook that sets these attributes of the answer that it is shown."""
    return lambda answer: vars(answer).update(changed)


BROKEN = [
    {"headers": 5},
    {"_content": "text"},
    {"status_code": "many"},
    {"encoding": 8, "headers": {5: HALF}},
]
NONSENSE = [Breaking(), RetryLater("later", float("inf")), HoldUntil(float("nan"), "x"), "done"]


def test_hooks_that_break_an_answer_or_say_what_is_no_outcome_harm_their_own_calls(
    rules: Rules, remote: Vendor
) -> None:
    said = [None, *NONSENSE, *(breaks(**changed) for changed in BROKEN), None]
    rules(r=Rule(classify=f"{NAME}.classify"))
    for number, verdict in enumerate(said):
        verdicts[f"/{number}"] = verdict
        remote.answers[f"/{number}"] = answered(f"/{number}", body=b"ok")
    calls = [send("r", f"/{number}") for number in range(len(said))]
    as_one_message()
    assert all(call.attempts.get().finished_at for call in calls)
    assert [fresh(calls[place]).status for place in (0, 1, 2, 3, 4, -1)] == [Status.DONE] * 6
    assert CallAttempt.objects.filter(error_message__contains="classify").count() == len(NONSENSE)
    assert not CallQueue.objects.filter(status=Status.DISPATCHED).exists()


@pytest.mark.parametrize("hook", ["classify", "settle"])
def test_a_module_that_breaks_when_it_is_read_harms_its_own_rule(
    rules: Rules, remote: Vendor, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    (tmp_path / "breaks_when_read.py").write_text("raise SystemExit('not here')")
    monkeypatch.syspath_prepend(tmp_path)
    rules(r=Rule(**{hook: "breaks_when_read.hook"}), good=Rule())
    bad, good = send("r"), send("good")
    as_one_message()
    assert (fresh(bad).status, fresh(good).status) == (Status.FAILED, Status.DONE)
    assert "SystemExit: not here" in fresh(bad).error_message
    assert len(remote.requests) == 1, "nothing was sent by a rule that cannot judge it"


def test_a_time_limit_that_strikes_as_a_module_is_read_gives_the_call_back(
    rules: Rules, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was sent, and the next time it may be read sooner."""
    struck = "from celery.exceptions import SoftTimeLimitExceeded\nraise SoftTimeLimitExceeded()"
    (tmp_path / "takes_long_to_read.py").write_text(struck)
    monkeypatch.syspath_prepend(tmp_path)
    rules(r=Rule(classify="takes_long_to_read.classify"))
    call = send("r")
    release()
    with pytest.raises(SoftTimeLimitExceeded):
        executor.execute("default", [CallAttempt.objects.get().pk])
    assert (fresh(call).status, CallAttempt.objects.get().outcome) == (Status.NEW, "voided")


def test_a_time_limit_that_strikes_after_a_handler_gives_nothing_back(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did would be done twice: its lease decides."""
    rules(r=Rule(), more={"HANDLERS": {"own": f"{NAME}.handle"}})
    monkeypatch.setattr(request, "_columns_of_answer", Mock(side_effect=SoftTimeLimitExceeded))
    call = CallQueue.objects.send({"method": "own", "params": {"path": "/"}}, rule="r")
    release()
    with pytest.raises(SoftTimeLimitExceeded):
        executor.execute("default", [CallAttempt.objects.get().pk])
    assert (fresh(call).status, CallAttempt.objects.get().outcome) == (Status.DISPATCHED, "")


@pytest.mark.parametrize(
    "error",
    [SystemExit(1), KeyboardInterrupt(), ValueError()],
    ids=lambda error: type(error).__name__,
)
def test_a_listener_that_raises_keeps_nobody_else_from_hearing(
    rules: Rules, remote: Vendor, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    rules(r=Rule())
    heard: list[int] = []

    def first(**_: Any) -> None:
        raise error

    def second(call_id: int, **_: Any) -> None:
        heard.append(call_id)

    events.call_finished.connect(first)
    events.call_finished.connect(second)
    try:
        calls = [send("r") for _ in range(3)]
        as_one_message()
    finally:
        events.call_finished.disconnect(first)
        events.call_finished.disconnect(second)
    assert sorted(heard) == [call.pk for call in calls]
    failed = [r.facts for r in caplog.records if getattr(r, "event", "") == "listener_failed"]  # type: ignore[attr-defined]
    assert len(failed) == 3
    assert "first" in failed[0]["receiver"]
    assert failed[0]["error"] == type(error).__name__


# --- Rules apart


def test_a_message_carries_calls_of_one_rule_only(rules: Rules) -> None:
    """Rules that share a budget are released together, and share no fate."""
    shared = SlidingWindow("1000/s", name="shared")
    rules(a=Rule(limits=[shared]), b=Rule(limits=[shared], priority=5))
    for _ in range(20):
        send("a"), send("b")
    messages: list[publisher.Message] = []
    Dispenser(publish=lambda using, packed: bool(messages.extend(packed)) or True).run_once()
    of = dict(CallAttempt.objects.values_list("pk", "rule"))
    assert [len({of[pk] for pk in ids}) for _, ids in messages] == [1] * 8
    assert sorted(pk for _, ids in messages for pk in ids) == sorted(of)
    assert of[messages[0][1][0]] == "b", "the more urgent goes first"
