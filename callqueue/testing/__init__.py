"""The testing kit: run the queue in this process, answer for the APIs, say what time it is, and see
what was sent.

`run_callqueue` releases and makes calls without a broker, inside a test's transaction too.
`fake_transport` answers in place of the network, `travel` shifts the clock, `assert_call_sent` and
`calls_sent` look at what the code under test sent. Registered as a pytest plugin (fixtures
callqueue_sent, callqueue_transport, callqueue_clock). Imports no model until used.
"""

from __future__ import annotations

import json as jsonlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, overload
from unittest import mock

from callqueue import clocks

if TYPE_CHECKING:
    import requests

    from callqueue.execution.http import client
    from callqueue.models import CallQueue

__all__ = [
    "Clock",
    "FakeTransport",
    "Request",
    "Sent",
    "UnexpectedRequest",
    "answer",
    "assert_call_sent",
    "calls_sent",
    "fake_transport",
    "in_turn",
    "run_callqueue",
    "travel",
]

HTTP_REASONS = {status.value: status.phrase for status in HTTPStatus}
# seconds that a run waits, really, for the next call: a limit per second, the first retries
PATIENCE = 5.0
NEVER = 86400.0  # what waiting.next_due_in says where nothing is due
# the same under a clock that the test moves itself: a retry at once is due some milliseconds later
SOON = 0.1


# --- Running the queue


def run_callqueue(
    until_idle: bool = True,
    using: str = "default",
    *,
    max_passes: int = 1000,
    skip_waits: bool = False,
) -> int:
    """Release what may go and make those calls, in this process; the count of attempts made.

    Goes on until nothing may go within PATIENCE (5 seconds, really waited for); with
    `until_idle=False` makes one pass. What a limit, a hold or a retry keeps back for longer stays:
    `travel` to when it may go, or let `skip_waits` do so. Inside `travel` nothing is waited for.
    Celery tasks that are sent meanwhile run at once. AssertionError after `max_passes`, or for a
    request that `fake_transport` had no answer for.
    """
    if skip_waits and not _clocks:
        raise RuntimeError(
            "skip_waits moves the clock: use it inside callqueue.testing.travel(), which puts it right again"
        )
    run = _Run(using)
    with _in_this_process(using):
        for _ in range(max_passes):
            went = run.make_pass()
            if not until_idle:
                return run.attempts
            if went or run.waits_a_moment() or (skip_waits and run.skips_a_wait()):
                continue
            return run.attempts
    raise AssertionError(
        f"the queue was not idle after {max_passes} passes: does a call send another without end?"
    )


class _Run:
    """One run: counts attempts, and knows when more may go."""

    def __init__(self, using: str) -> None:
        from callqueue.dispatch.dispenser import Dispenser, Lane
        from callqueue.dispatch.release_pass import Pass

        self.using, self.attempts = using, 0
        wakes = self.wakes = dict[
            tuple[str, ...], float | None
        ]()  # when a blocked call of these rules may go, by its last pass

        class Watched(Dispenser):
            def _release(self, lane: Lane) -> Pass:
                done = super()._release(lane)
                wakes[lane.rules] = done.wake_in
                return done

        self.dispenser = Watched(using, publish=self._execute)

    def make_pass(self) -> int:
        """Release once and make what was released."""
        before = self.attempts
        self.dispenser.run_once()
        return self.attempts - before

    def _execute(self, using: str, messages: Sequence[tuple[str, list[int]]]) -> bool:
        from callqueue.execution import executor

        for _, ids in messages:
            self.attempts += len(ids)
            executor.execute(using, ids, inline=True)
            for transport in _transports:
                transport.check()
        return True

    def waits_a_moment(self) -> bool:
        """Wait for what may go soon; False where nothing may."""
        left = self._next_in()
        if left is None or left > (SOON if _clocks else PATIENCE):
            return False
        time.sleep(max(0.001, left))
        return True

    def skips_a_wait(self) -> bool:
        """Travel to when the next call may go; False where none ever will."""
        left = self._next_in()
        if left is None:
            return False
        _clocks[-1].forward(max(0.001, left + 0.001))
        return True

    def _next_in(self) -> float | None:
        """Seconds until the next call is due, or a limit or hold lets one go; None where none waits
        for either.
        """
        from callqueue.ledger import ready_calls

        due = ready_calls.next_due_in(self.using)
        waits = [] if due >= NEVER else [due]
        waits += [
            wake
            for rules, wake in self.wakes.items()
            if wake is not None and ready_calls.rules_with_ready(self.using, rules)
        ]
        return min(waits, default=None)


@contextmanager
def _in_this_process(using: str) -> Iterator[None]:
    """No call is released ahead of its slot, for nobody waits for it here; Celery tasks run at
    once; time began just now.
    """
    from celery import current_app

    from callqueue.dispatch import release_pass

    _forget_readings()
    with (
        mock.patch.object(release_pass, "LEAD", 0.0),
        mock.patch.object(current_app._get_current_object(), "send_task", _run_instead_of_sending),
    ):
        yield


def _run_instead_of_sending(name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
    """What stands in for the broker: the task runs here and now; one that is not registered is not
    missed.
    """
    from celery import current_app

    task = current_app.tasks.get(name)
    if task is None:
        return current_app.AsyncResult(options.get("task_id") or "unknown")
    kept = ("task_id", "link", "link_error", "headers", "priority")
    return task.apply(
        args,
        kwargs,
        throw=False,
        **{key: options[key] for key in kept if options.get(key) is not None},
    )


# --- The clock


class Clock:
    """The clock that the queue reads, in the hands of a test."""

    def forward(self, by: float | timedelta = 0.0, /, **parts: float) -> None:
        """Move it by so much: seconds, a timedelta, or timedelta's own arguments (`hours=1`).
        Negative moves it back.
        """
        from callqueue.database import server_clock

        step = by if isinstance(by, timedelta) else timedelta(seconds=by)
        _set_ahead(server_clock.ahead + step + timedelta(**parts))

    def to(self, instant: datetime) -> None:
        """Move it to an aware datetime."""
        self.forward(instant - self.now())

    def now(self, using: str = "default") -> datetime:
        """What it shows: the database's clock, and what it was moved by."""
        from callqueue import database

        return database.clock(using)


_clocks: list[Clock] = []


@contextmanager
def travel(
    by: float | timedelta = 0.0, /, *, to: datetime | None = None, **parts: float
) -> Iterator[Clock]:
    """Let the queue see a later time: `travel(hours=1)`, `travel(30.0)`, `travel(to=...)`. Time
    goes on from there.

    Shifts the database's clock as this process reads it, and `django.utils.timezone.now`. Nests,
    adding up.
    """
    from callqueue.database import server_clock

    clock = Clock()
    before = server_clock.ahead
    _clocks.append(clock)
    with _shifted_now():
        try:
            clock.forward(by, **parts)
            if to is not None:
                clock.to(to)
            yield clock
        finally:
            _clocks.remove(clock)
            _set_ahead(before)


def _set_ahead(ahead: timedelta) -> None:
    from callqueue.database import server_clock

    server_clock.ahead = ahead
    _forget_readings()


def _forget_readings() -> None:
    """The clock did not jump: a test moved it."""
    from callqueue.ledger import clock_jumps

    clock_jumps._watches.clear()


@contextmanager
def _shifted_now() -> Iterator[None]:
    """timezone.now, and what the database fills in for new rows, follow the clock."""
    from django.utils import timezone

    from callqueue import database
    from callqueue.database import server_clock
    from callqueue.models import CallQueue, Hold

    if len(_clocks) > 1:
        yield
        return
    real = timezone.now

    def now() -> datetime:
        return real() + server_clock.ahead

    columns = [
        CallQueue._meta.get_field("created_dt"),
        CallQueue._meta.get_field("due_at_dt"),
        Hold._meta.get_field("began_at"),
    ]
    with mock.patch.object(timezone, "now", now):
        for column in columns:
            column.__dict__["_get_default"] = database.ClockNow
        try:
            yield
        finally:
            for column in columns:
                column.__dict__.pop("_get_default", None)


# --- The network


class UnexpectedRequest(AssertionError):
    """A call was made that the test has no answer for."""


@dataclass(frozen=True)
class Request:
    """A request as it would have gone out. `url` has the query; `json` is the body where it is
    JSON; `headers` know no case.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    params: Mapping[str, Any] = field(repr=False)

    @property
    def json(self) -> Any:
        """The body, read as JSON; None where it is none."""
        try:
            return jsonlib.loads(self.body)
        except ValueError:
            return None

    @property
    def idempotency_key(self) -> str | None:
        """The Idempotency-Key header."""
        return self.headers.get("Idempotency-Key")


@dataclass(frozen=True)
class _Given:
    status: int
    headers: Mapping[str, str]
    body: bytes


def answer(
    status: int = 200,
    *,
    json: Any = None,
    body: str | bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> _Given:
    """An answer for `fake_transport`: a status, and JSON or a body."""
    if json is None:
        return _Given(status, dict(headers or {}), body.encode() if isinstance(body, str) else body)
    return _Given(
        status,
        {"Content-Type": "application/json", **(headers or {})},
        jsonlib.dumps(json).encode(),
    )


def in_turn(*answers: Any) -> Callable[[Request], Any]:
    """One answer after the other, the last one for ever."""
    left = list(answers)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


class FakeTransport:
    """Answers in place of the network. `requests` are those made so far, oldest first.

    `answers` maps what a request must match to its answer; the first that matches answers. A
    pattern is a URL, with `*` for any text, in front of it a method where only that is meant ("POST
    https://..."), a compiled regular expression, or a callable that takes the Request. A pattern
    without "?" is matched without the query. An answer is a status, a dict or list (200 and that
    JSON), text, (status, headers, body), `answer(...)`, an exception of requests or any other to be
    raised, or a callable that takes the Request and returns one of these.
    """

    def __init__(self, answers: Mapping[Any, Any] | None = None, *, default: Any = None) -> None:
        self.answers: dict[Any, Any] = dict(answers or {})
        self.default = default
        self.requests: list[Request] = []
        self._unexpected: list[UnexpectedRequest] = []

    def add(self, pattern: Any, answer: Any = 200) -> None:
        """Answer requests that match with this from now on, before what was there."""
        self.answers = {pattern: answer, **{k: v for k, v in self.answers.items() if k != pattern}}

    def check(self) -> None:
        """Raise the UnexpectedRequest of a call that had no answer, if there was one."""
        if self._unexpected:
            raise self._unexpected.pop(0)

    def request(
        self, method: str, params: Any, *, policy: Any, timeouts: Any, gate: Any = None
    ) -> client.Answer:
        """What stands in for callqueue.execution.http.client.request."""
        from callqueue.execution.http import client

        made = _as_request(method, params)
        given = self._answer_for(made)
        try:
            (gate or client.Gate()).wait()
        except client.Dropped as dropped:
            return client.Answer(None, None, error=str(dropped), dropped=True)
        sent_at = clocks.monotonic()
        if gate is not None and not _is_unsent(given):
            gate.sent_at = sent_at
        self.requests.append(made)
        if callable(given) and not isinstance(given, type):
            given = given(made)
        return _as_answer(made, given, sent_at)

    def _answer_for(self, made: Request) -> Any:
        for pattern, given in self.answers.items():
            if _matches(pattern, made):
                return given
        if self.default is not None:
            return self.default
        known = "".join(f"\n  {pattern}" for pattern in self.answers) or " none"
        error = UnexpectedRequest(
            f"no answer for {made.method} {made.url}; fake_transport has:{known}"
        )
        self._unexpected.append(error)
        raise error


_transports: list[FakeTransport] = []


@contextmanager
def fake_transport(
    answers: Mapping[Any, Any] | None = None, *, default: Any = None
) -> Iterator[FakeTransport]:
    """No call reaches the network meanwhile: these answer. `default` answers what no pattern
    matches; else that is an error.

    See FakeTransport for patterns and answers.
    """
    from callqueue.execution.http import client

    transport = FakeTransport(answers, default=default)
    _transports.append(transport)
    try:
        with mock.patch.object(client, "request", transport.request):
            yield transport
        transport.check()
    finally:
        _transports.remove(transport)


def _as_request(method: str, params: Mapping[str, Any]) -> Request:
    import requests

    auth = params.get("auth")
    prepared = requests.Request(
        method.upper(),
        params["url"],
        params=params.get("params"),
        data=params.get("data"),
        json=params.get("json"),
        headers=params.get("headers"),
        cookies=params.get("cookies"),
        auth=tuple(auth) if auth else None,
    ).prepare()
    body = prepared.body or b""
    sent = body.encode() if isinstance(body, str) else bytes(body)
    return Request(prepared.method or "", prepared.url or "", prepared.headers, sent, dict(params))


def _matches(pattern: Any, made: Request) -> bool:
    if callable(pattern):
        return bool(pattern(made))
    if isinstance(pattern, re.Pattern):
        return pattern.search(made.url) is not None
    method, _, url = str(pattern).rpartition(" ")
    return (not method or method.upper() == made.method) and _is_url(url, made.url)


def _is_url(pattern: str, url: str) -> bool:
    """Whether a URL is the pattern's; without its query where the pattern has none."""
    if "?" not in pattern:
        url = url.partition("?")[0]
        if url.endswith("/") and url.count("/") == 3 and pattern.count("/") == 2:
            pattern += "/"
    if "*" not in pattern:
        return pattern == url
    return (
        re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), url, re.DOTALL)
        is not None
    )


def _is_unsent(given: Any) -> bool:
    """Whether the answer is an exception that says that nothing was sent."""
    import requests

    kind = given if isinstance(given, type) else type(given)
    lost = (requests.exceptions.ReadTimeout, requests.exceptions.ChunkedEncodingError)
    return issubclass(kind, requests.exceptions.RequestException) and not issubclass(kind, lost)


def _as_answer(made: Request, given: Any, sent_at: float) -> client.Answer:
    from callqueue.execution.http import client

    if isinstance(given, client.Answer):
        return given
    if isinstance(given, BaseException) or (
        isinstance(given, type) and issubclass(given, BaseException)
    ):
        return _as_failure(given, sent_at)
    return client.Answer(response=_response(made, _as_given(given)), sent_at=sent_at, sent=True)


def _as_failure(given: Any, sent_at: float) -> client.Answer:
    """A failure of the network, as the wire tells it; any other exception is raised."""
    import requests

    from callqueue.execution.http import client

    error = given() if isinstance(given, type) else given
    if not isinstance(error, requests.exceptions.RequestException):
        raise error
    why = f"{type(error).__name__}: {error}".rstrip(": ")
    if _is_unsent(error):
        return client.Answer(None, None, error=why)
    return client.Answer(None, sent_at, error=why, sent=True)


def _as_given(given: Any) -> _Given:
    if isinstance(given, _Given):
        return given
    if isinstance(given, bool) or given is None:
        raise TypeError(
            f"{given!r} is no answer for fake_transport; see callqueue.testing.FakeTransport"
        )
    if isinstance(given, int):
        return _Given(given, {}, b"")
    if isinstance(given, str | bytes):
        return _Given(200, {}, given.encode() if isinstance(given, str) else given)
    if isinstance(given, tuple):
        status, headers, *rest = given
        body = rest[0] if rest else b""
        return answer(
            status,
            headers=headers,
            **({"body": body} if isinstance(body, str | bytes) else {"json": body}),
        )
    return answer(json=given)


def _response(made: Request, given: _Given) -> requests.Response:
    import requests
    from requests.utils import get_encoding_from_headers

    response = requests.Response()
    response.status_code = given.status
    response.headers.update(given.headers)
    response._content = given.body
    response.url = made.url
    response.reason = HTTP_REASONS.get(given.status, "")
    response.encoding = get_encoding_from_headers(response.headers)
    return response


# --- What was sent


class Sent(Sequence["CallQueue"]):
    """The calls sent since the test began, as the table has them now; the newest is last."""

    def __init__(self, using: str | None = None) -> None:
        from callqueue.models import CallQueue

        self._using = using or CallQueue.objects.db_for_write
        self._after = (
            CallQueue.objects.using(self._using)
            .order_by("-pk")
            .values_list("pk", flat=True)
            .first()
            or 0
        )

    @property
    def calls(self) -> list[CallQueue]:
        """They, read just now, oldest first."""
        from callqueue.models import CallQueue

        return list(CallQueue.objects.using(self._using).filter(pk__gt=self._after).order_by("pk"))

    @property
    def last(self) -> CallQueue:
        """The newest."""
        return self.calls[-1]

    def matching(self, **what: Any) -> list[CallQueue]:
        """Those that `assert_call_sent` with the same arguments would count."""
        return [call for call in self.calls if not _differences(call, what)]

    def assert_call_sent(self, *, count: int | None = None, **what: Any) -> CallQueue | None:
        """See the function `assert_call_sent`; looks at these calls only."""
        __tracebackhide__ = True
        return _assert_sent(self.calls, count, what)

    def assert_nothing_sent(self) -> None:
        """No call was sent."""
        __tracebackhide__ = True
        _assert_sent(self.calls, 0, {})

    @overload
    def __getitem__(self, place: int) -> CallQueue: ...
    @overload
    def __getitem__(self, place: slice) -> list[CallQueue]: ...
    def __getitem__(self, place: int | slice) -> CallQueue | list[CallQueue]:
        return self.calls[place]

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        return f"<Sent: {_listed(self.calls)}>"


@contextmanager
def calls_sent(using: str | None = None) -> Iterator[Sent]:
    """`with calls_sent() as sent:` the calls sent from here on, for tests that use no pytest
    fixture.
    """
    yield Sent(using)


def assert_call_sent(
    *, count: int | None = None, using: str | None = None, **what: Any
) -> CallQueue | None:
    """A call that looks like this is in the table (exactly `count` of them, where given); returns
    the newest.

    `method`, `rule`, `key`, `priority`, `status` ("new", "done", ...), `unique_key`, `cost`,
    `callback`; everything else names one of the call's params: `url` (with `*` for any text, or a
    compiled regular expression), `json`, `data`, `headers` (those named), `to`, `name`, `args`...
    """
    __tracebackhide__ = True
    from callqueue.models import CallQueue

    calls = CallQueue.objects.using(using or CallQueue.objects.db_for_write).order_by("pk")
    return _assert_sent(list(calls), count, what)


def _assert_sent(
    calls: list[CallQueue], count: int | None, what: Mapping[str, Any]
) -> CallQueue | None:
    __tracebackhide__ = True
    found = [call for call in calls if not _differences(call, what)]
    if len(found) == count or (count is None and found):
        return found[-1] if found else None
    wanted = ", ".join(f"{name}={value!r}" for name, value in what.items()) or "a call"
    times = "" if count is None else f" {count} times, but {len(found)} times"
    lines = [f"\n  {_told(call)}" + _why(call, what) for call in calls]
    raise AssertionError(f"not sent{times}: {wanted}; sent:{''.join(lines) or ' nothing'}")


def _differences(call: CallQueue, what: Mapping[str, Any]) -> list[str]:
    """The names of what is otherwise in the call."""
    return [
        name for name, wanted in what.items() if not _is_wanted(name, wanted, _value(call, name))
    ]


def _value(call: CallQueue, name: str) -> Any:
    if name in ("rule", "key", "priority", "unique_key", "cost", "callback"):
        return getattr(call, name)
    data = call.call_data
    if name == "method":
        return data.get("method")
    if name == "status":
        from callqueue import conf

        return conf.NAMES_OF_STATUS[call.status]
    return data.get("params", {}).get(name)


def _is_wanted(name: str, wanted: Any, value: Any) -> bool:
    from callqueue import conf
    from callqueue.sending import validation

    url = value if isinstance(value, str) else ""  # it may be a secret
    if name == "url" and isinstance(wanted, re.Pattern):
        return wanted.search(url) is not None
    if name == "url" and isinstance(wanted, str):
        return wanted == value or _is_url(wanted, url)
    if name == "method":
        return bool(str(wanted).lower() == str(value).lower())
    if name == "key":
        return bool(validation.check_key(wanted) == value)
    if name == "status":
        return bool(
            value == (wanted if isinstance(wanted, str) else conf.NAMES_OF_STATUS[int(wanted)])
        )
    if name == "headers" and isinstance(wanted, Mapping):
        have = {k.lower(): v for k, v in (value or {}).items()}
        return all(have.get(k.lower()) == v for k, v in wanted.items())
    if isinstance(wanted, tuple):
        wanted = list(wanted)
    return bool(wanted == value)


def _why(call: CallQueue, what: Mapping[str, Any]) -> str:
    wrong = _differences(call, what)
    return f"  [{', '.join(f'{name}={_value(call, name)!r}' for name in wrong)}]" if wrong else ""


def _listed(calls: Sequence[CallQueue]) -> str:
    return ", ".join(_told(call) for call in calls)


def _told(call: CallQueue) -> str:
    params = call.call_data.get("params", {})
    target = params.get("url") or params.get("name") or params.get("to") or ""
    return f"{call.call_data.get('method')} {target} (rule {call.rule}, {_value(call, 'status')})"


# --- Fixtures, where there is pytest

try:
    import pytest
except ImportError:  # pragma: no cover
    pass
else:

    @pytest.fixture
    def callqueue_sent(db: None) -> Sent:
        """The calls that the test has sent so far, newest last: a sequence, with `assert_call_sent`
        and `last`.
        """
        return Sent()

    @pytest.fixture
    def callqueue_transport() -> Iterator[FakeTransport]:
        """No call reaches the network; `callqueue_transport.add("https://api.example.com/*", {"ok":
        True})` answers.
        """
        with fake_transport() as transport:
            yield transport

    @pytest.fixture
    def callqueue_clock() -> Iterator[Clock]:
        """The queue's clock: `callqueue_clock.forward(hours=1)`. Put right after the test."""
        with travel() as clock:
            yield clock
