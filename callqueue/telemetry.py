"""OpenTelemetry, where it is installed: the span that sent a call is remembered, and each attempt
is a span linked to it. Attributes carry no URL, header or body.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from callqueue import events, states
from callqueue.handlers import HTTP_METHODS

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    trace = None  # type: ignore[assignment]
else:
    _w3c = TraceContextTextMapPropagator()

if TYPE_CHECKING:
    from callqueue.transitions import Job, Result

Make = Callable[["Job"], "Result"]


def traceparent() -> str | None:
    """The span that is recording now, as a W3C traceparent; None where there is none."""
    if trace is None or not trace.get_current_span().is_recording():
        return None
    carrier: dict[str, str] = {}
    _w3c.inject(carrier)
    return carrier.get("traceparent")


def traced(make: Make) -> Make:
    """`make`, with a span around each attempt; as it is where nothing traces."""
    provider = None if trace is None else _none_if_it_fails(trace.get_tracer_provider)
    if provider is None or isinstance(provider, trace.ProxyTracerProvider):
        return make

    def make_traced(job: Job) -> Result:
        spans = ExitStack()
        span = _none_if_it_fails(lambda: spans.enter_context(_start_span(job)))
        try:
            result = make(job)
            if span is not None:
                _none_if_it_fails(lambda: _describe_result(span, result))
            return result
        finally:
            _none_if_it_fails(spans.close)

    return make_traced


def _start_span(job: Job) -> Any:
    call, attempt, url = job.call, job.attempt, job.params.get("url")
    is_http = call.method in HTTP_METHODS
    sender = trace.get_current_span(_w3c.extract({"traceparent": call.trace_context or ""}))
    context = sender.get_span_context()
    attributes: dict[str, Any] = {
        "callqueue.rule": call.rule,
        "callqueue.call_id": call.id,
        "callqueue.attempt": attempt.number,
        "callqueue.queue": attempt.queue,
        "http.request.method": call.method.upper() if is_http else "",
        "http.request.resend_count": attempt.number - 1 if is_http else 0,
        "server.address": urlsplit(url).hostname if is_http and isinstance(url, str) else "",
    }
    return trace.get_tracer("callqueue").start_as_current_span(
        call.method.upper() if is_http else f"callqueue {call.method}",
        kind=trace.SpanKind.CLIENT,
        links=[trace.Link(context)] if context.is_valid else [],
        attributes={name: value for name, value in attributes.items() if value},
    )


def _describe_result(span: Any, result: Result) -> None:
    span.set_attribute("callqueue.outcome", result.outcome)
    status = getattr(result.response, "status_code", None)
    if status is not None:
        span.set_attribute("http.response.status_code", status)
    if result.outcome != states.SUCCEEDED:
        is_http_error = status is not None and status >= 400
        span.set_attribute("error.type", str(status) if is_http_error else result.outcome)
        is_redirect = status is not None and 300 <= status < 400  # whose words are a URL
        why = "" if is_redirect else result.error[:200]
        span.set_status(trace.Status(trace.StatusCode.ERROR, why))


def _none_if_it_fails(tell: Callable[[], Any]) -> Any:
    """What `tell` returns; None if it raises: an event tells of that, and the call goes on."""
    try:
        return tell()
    except BaseException as error:
        events.emit("listener_failed", receiver="opentelemetry", error=type(error).__name__)
        return None
