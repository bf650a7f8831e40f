"""OpenTelemetry, where it is installed: the span that sent a call is remembered, and each attempt
is a span linked to it.

In: the current span at `send`; a begun attempt and its result. Out: spans by the API's global
tracer. Without the package `opentelemetry` nothing is done, at the cost of one comparison.
Attributes carry no URL, header or body.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from callqueue import events, states
from callqueue.handlers import HTTP_METHODS

if TYPE_CHECKING:
    from callqueue.transitions import Job, Result

Make = Callable[["Job"], "Result"]


def current() -> str | None:
    """The span that is recording now, as a W3C traceparent; None where there is none."""
    trace = _opentelemetry()
    if trace is None:
        return None
    span = trace.get_current_span()
    context = span.get_span_context()
    if not span.is_recording() or not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def traced(make: Make) -> Make:
    """`make`, with a span around each attempt; as it is where nothing traces: no package, or no
    provider of tracers set up.
    """
    trace = _opentelemetry()
    provider = None if trace is None else _unharmed(trace.get_tracer_provider)
    if provider is None or isinstance(provider, trace.ProxyTracerProvider):
        return make

    def make_traced(job: Job) -> Result:
        spans = ExitStack()
        span = _unharmed(lambda: spans.enter_context(_opened(trace, job)))
        try:
            result = make(job)
            _unharmed(lambda: _describe(trace, span, result))
            return result
        finally:
            _unharmed(spans.close)

    return make_traced


def _opened(trace: Any, job: Job) -> Any:
    """The span of an attempt, to be entered."""
    return trace.get_tracer("callqueue").start_as_current_span(
        _name(job),
        kind=trace.SpanKind.CLIENT,
        links=_links(trace, job),
        attributes=_attributes_of(job),
    )


def _unharmed(tell: Callable[[], Any]) -> Any:
    """What a tracer gives; None where it, or what it reports to, fails: no call is the worse for
    it.
    """
    try:
        return tell()
    except BaseException as error:
        events.emit("listener_failed", receiver="opentelemetry", error=type(error).__name__)
        return None


@cache
def _opentelemetry() -> Any:
    """The API's `trace` module; None where it is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


def _name(job: Job) -> str:
    return job.method.upper() if job.method in HTTP_METHODS else f"callqueue {job.method}"


def _links(trace: Any, job: Job) -> list[Any]:
    """A link to the span that sent the call. A text that is no traceparent makes none."""
    try:
        version, trace_id, span_id, flags = (
            int(part, 16) for part in (job.trace_context or "").split("-")
        )
    except ValueError:
        return []
    context = trace.SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags)
    )
    return [trace.Link(context)] if version == 0 and context.is_valid else []


def _attributes_of(job: Job) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "callqueue.rule": job.rule_name,
        "callqueue.call_id": job.pk,
        "callqueue.attempt": job.number,
    }
    if job.queue:
        attributes["callqueue.queue"] = job.queue
    if job.method in HTTP_METHODS:
        attributes["http.request.method"] = job.method.upper()
        if job.number > 1:
            attributes["http.request.resend_count"] = job.number - 1
        if host := _host(job):
            attributes["server.address"] = host
    return attributes


def _host(job: Job) -> str:
    """The host, unless the URL is a secret."""
    url = job.params.get("url")
    try:
        return (urlsplit(url).hostname or "") if isinstance(url, str) else ""
    except ValueError:
        return ""


def _describe(trace: Any, span: Any, result: Result) -> None:
    if span is None or not span.is_recording():
        return
    span.set_attribute("callqueue.outcome", result.outcome)
    status = getattr(result.response, "status_code", None)
    if status is not None:
        span.set_attribute("http.response.status_code", status)
    if result.outcome != states.SUCCEEDED:
        span.set_attribute(
            "error.type", str(status) if status is not None and status >= 400 else result.outcome
        )
        span.set_status(trace.Status(trace.StatusCode.ERROR, result.error[:200]))
