"""OpenTelemetry: each attempt is a span, linked to the one that sent the call."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from opentelemetry import trace

from callqueue import Retry, Rule, telemetry
from callqueue.execution import wire
from callqueue.models import CallQueue
from tests.support.behaviour import Vendor, run, send

Rules = Callable[..., None]
SENDER = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))


class RecordedSpan(trace.NonRecordingSpan):
    """A span that keeps what it is told, as a tracer of the SDK would."""

    def __init__(self, context: trace.SpanContext, name: str = "", **given: Any) -> None:
        super().__init__(context)
        self.name, self.kind, self.links = name, given.get("kind"), list(given.get("links", ()))
        self.attributes: dict[str, Any] = dict(given.get("attributes", {}))
        self.status: Any = None
        self.ended = False

    def is_recording(self) -> bool:
        return True

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status


class Recorder(trace.TracerProvider):
    """Stands in for the global provider of tracers, and is its only tracer."""

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def get_tracer(self, *names: Any, **options: Any) -> Any:
        return self

    @contextmanager
    def start_as_current_span(self, name: str, **options: Any) -> Iterator[RecordedSpan]:
        span = RecordedSpan(
            trace.SpanContext(1, len(self.spans) + 1, is_remote=False), name, **options
        )
        self.spans.append(span)
        with trace.use_span(span):
            yield span
        span.ended = True


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: recorder)
    return recorder


def sent_inside_a_span(*arguments: Any, **options: Any) -> CallQueue:
    with trace.use_span(RecordedSpan(SENDER)):
        return send(*arguments, **options)


def test_the_span_that_sends_is_remembered_and_no_other(rules: Rules) -> None:
    rules(r=Rule())
    assert send("r").trace_context is None
    with trace.use_span(trace.NonRecordingSpan(SENDER)):
        assert send("r").trace_context is None
    sent_inside_a_span("r")
    with trace.use_span(RecordedSpan(SENDER)):
        data = {"method": "get", "params": {"url": "http://vendor.example/"}}
        CallQueue.objects.send_many([data] * 2, rule="r")
    found = CallQueue.objects.order_by("pk").values_list("trace_context", flat=True)
    assert list(found) == [None] * 2 + [f"00-{0xABC:032x}-{0xDEF:016x}-01"] * 3


def test_each_attempt_is_a_span_linked_to_the_sender(
    rules: Rules, remote: Vendor, recorder: Recorder
) -> None:
    rules(r=Rule(queues="q"))
    path, inside = "/charges?token=secret", list[Any]()
    remote.answers[path] = lambda: (inside.append(trace.get_current_span()), 200)[1]
    call = sent_inside_a_span("r", path)
    run()
    (span,) = inside
    assert recorder.spans == [span]
    said = (span.name, span.kind, span.ended, span.status)
    assert said == ("POST", trace.SpanKind.CLIENT, True, None)
    (link,) = span.links
    assert (link.context.trace_id, link.context.span_id) == (0xABC, 0xDEF)
    assert span.attributes == {
        "callqueue.rule": "r",
        "callqueue.call_id": call.pk,
        "callqueue.attempt": 1,
        "callqueue.queue": "q",
        "callqueue.outcome": "succeeded",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "server.address": "vendor.example",
    }


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Recorder, "start_as_current_span", SystemExit),
        (Recorder, "get_tracer", SystemExit),
        (RecordedSpan, "set_attribute", ValueError),  # after the request
        (trace, "get_tracer_provider", RuntimeError),
    ],
)
def test_what_traces_and_fails_harms_no_call(
    rules: Rules,
    remote: Vendor,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: type[BaseException],
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(owner, name, failing)
    rules(r=Rule())
    call = send("r")
    run()
    assert CallQueue.objects.get(pk=call.pk).status == CallQueue.Status.DONE
    assert len(remote.requests) == 1


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, MemoryError, SystemExit])
def test_what_strikes_while_a_call_is_made_is_raised_and_makes_it_no_second_time(
    recorder: Recorder, error: type[BaseException]
) -> None:
    made: list[Any] = []

    def struck(job: Any) -> Any:
        made.append(job)
        raise error

    call = SimpleNamespace(method="celery_task", rule="r", id=1, trace_context=None)
    job = SimpleNamespace(call=call, attempt=SimpleNamespace(number=1, queue=""), params={})
    with pytest.raises(error):
        telemetry.traced(struck)(job)  # type: ignore[arg-type]
    assert made == [job]
    assert len(recorder.spans) == 1


def test_a_failed_attempt_is_a_failed_span_and_the_next_one_another(
    rules: Rules, remote: Vendor, recorder: Recorder
) -> None:
    """No answer is an error without a status."""
    rules(r=Rule(retry=Retry(base=0)))
    lost = wire.Answer(None, None, error="read timeout", sent=True)
    remote.answers |= {"/": 503, "/lost": lambda: lost}
    send("r")
    run(), run()
    send("r", "/lost")
    run()
    first, second, *_, third = recorder.spans
    assert third.attributes["error.type"] == "lost"
    assert "http.response.status_code" not in third.attributes
    assert first.status.status_code is trace.StatusCode.ERROR
    seen = (first.attributes["error.type"], first.attributes["http.response.status_code"])
    assert seen == ("503", 503)
    assert second.attributes["callqueue.attempt"] == 2
    assert second.attributes["http.request.resend_count"] == 1
    assert first.links == []


def test_a_span_does_not_say_where_a_redirect_leads(
    rules: Rules, remote: Vendor, recorder: Recorder
) -> None:
    rules(r=Rule())
    remote.answers["/"] = (302, {"Location": "https://elsewhere.example/who?token=1"}, b"")
    send("r")
    run()
    (span,) = recorder.spans
    assert span.status.status_code is trace.StatusCode.ERROR
    assert "elsewhere" not in f"{span.status.description} {span.attributes}"


def test_a_trace_context_that_is_none_makes_no_link(
    rules: Rules, remote: Vendor, recorder: Recorder
) -> None:
    rules(r=Rule())
    texts = ["", "00-zz-1-01", "00-00-00-00", "garbage", f"00-{0:032x}-{1:016x}-01"]
    for text in texts:
        CallQueue.objects.filter(pk=send("r").pk).update(trace_context=text)
    run()
    assert [span.links for span in recorder.spans] == [[]] * len(texts)


def test_where_it_is_not_installed_nothing_is_wrapped(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    bare = runpy.run_path(str(telemetry.__file__))
    assert bare["traceparent"]() is None
    assert bare["traced"](run) is run
