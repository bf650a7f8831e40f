"""What the code under test sent, and which permits it took: assertions that say what there was
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from callqueue.testing.transport import is_url

if TYPE_CHECKING:
    from callqueue.managers import CallQueueQuerySet
    from callqueue.models import CallAttempt, CallQueue

T = TypeVar("T")
OF_CALLS = ("rule", "key", "priority", "unique_key", "cost", "callback")
OF_PERMITS = ("rule", "key", "label", "cost", "outcome", "response_status")


class Sent(Sequence["CallQueue"]):
    """The calls sent since the test began, as the table has them now; the newest is last. A permit
    is not sent.
    """

    def __init__(self, using: str | None = None) -> None:
        self._using = using
        self._after: int = _calls(using).order_by("-pk").values_list("pk", flat=True).first() or 0

    @property
    def calls(self) -> list[CallQueue]:
        """They, read just now, oldest first."""
        return list(_calls(self._using).filter(pk__gt=self._after).order_by("pk"))

    @property
    def last(self) -> CallQueue:
        """The newest."""
        return self.calls[-1]

    def assert_call_sent(self, *, count: int | None = None, **what: Any) -> CallQueue | None:
        """See the function `assert_call_sent`; looks at these calls only."""
        __tracebackhide__ = True
        return _Look("sent", self.calls, _of_call, _call_told).newest(count, what)

    def assert_nothing_sent(self) -> None:
        """No call was sent."""
        __tracebackhide__ = True
        self.assert_call_sent(count=0)

    @overload
    def __getitem__(self, place: int) -> CallQueue: ...
    @overload
    def __getitem__(self, place: slice) -> list[CallQueue]: ...
    def __getitem__(self, place: int | slice) -> CallQueue | list[CallQueue]:
        return self.calls[place]

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        return f"<Sent: {', '.join(map(_call_told, self.calls))}>"


@contextmanager
def calls_sent(using: str | None = None) -> Iterator[Sent]:
    """`with calls_sent() as sent:` the calls sent from here on, without a pytest fixture."""
    yield Sent(using)


def assert_call_sent(
    *, count: int | None = None, using: str | None = None, **what: Any
) -> CallQueue | None:
    """A call that looks like this is in the table (exactly `count` of them, where given); returns
    the newest.

    `method`, `rule`, `key`, `priority`, `status` ("new", "done", ...), `unique_key`, `cost`,
    `callback`; everything else names one of the call's params: `url` (with `*` for any text, or a
    function of it), `json`, `data`, `headers` (those named), `to`, `name`, `args`...
    """
    __tracebackhide__ = True
    calls = list(_calls(using).order_by("pk"))
    return _Look("sent", calls, _of_call, _call_told).newest(count, what)


def assert_permit(
    *, count: int | None = None, using: str | None = None, **what: Any
) -> CallAttempt | None:
    """A permit that looks like this was taken (exactly `count` of them, where given); returns the
    newest attempt.

    `rule`, `key`, `label`, `cost` (what it was charged after all), `outcome` ("succeeded",
    "failed", "throttled", "" while it is open), `response_status`.
    """
    __tracebackhide__ = True
    from callqueue import states
    from callqueue.models import CallAttempt, CallQueue

    rows = CallAttempt.objects.using(using or CallQueue.objects.db_for_write).charged()
    of_permits = rows.filter(call__method=states.PERMIT).select_related("call")
    permits = list(of_permits.order_by("pk"))
    return _Look("taken", permits, _of_permit, _permit_told).newest(count, what)


@dataclass(frozen=True)
class _Look(Generic[T]):
    """Rows that a test looks at: what was done with them, oldest first, what each has under the
    name of an argument, and a row in words.
    """

    done: str
    rows: Sequence[T]
    value: Callable[[T, str], Any]
    told: Callable[[T], str]

    def newest(self, count: int | None, what: Mapping[str, Any]) -> T | None:
        """The newest row that is as wanted; AssertionError where it is not `count` of them."""
        __tracebackhide__ = True
        differences = [self._differences(row, what) for row in self.rows]
        found = [row for row, wrong in zip(self.rows, differences, strict=True) if not wrong]
        if len(found) == count or (count is None and found):
            return found[-1] if found else None
        lines = [
            f"\n  {self.told(row)}" + (f"  [{_listed(wrong)}]" if wrong else "")
            for row, wrong in zip(self.rows, differences, strict=True)
        ]
        times = "" if count is None else f" {count} times, but {len(found)} times"
        wanted, there = _listed(what) or "any", "".join(lines) or " nothing"
        raise AssertionError(f"not {self.done}{times}: {wanted}; {self.done}:{there}")

    def _differences(self, row: T, what: Mapping[str, Any]) -> dict[str, Any]:
        """What is otherwise in the row, by the argument's name."""
        values = {name: self.value(row, name) for name in what}
        return {n: value for n, value in values.items() if not _is_wanted(n, what[n], value)}


def _is_wanted(name: str, wanted: Any, value: Any) -> bool:
    if name == "url":  # a secret, where the call's URL is one
        url = value if isinstance(value, str) else ""
        if callable(wanted):
            return bool(wanted(url))
        return wanted == value or (isinstance(wanted, str) and is_url(wanted, url))
    if name == "method":
        return str(wanted).lower() == str(value).lower()
    if name == "headers" and isinstance(wanted, Mapping):
        have = {k.lower(): v for k, v in (value or {}).items()}
        return all(have.get(k.lower()) == v for k, v in wanted.items())
    if name == "key":
        from callqueue.sending.validation import check_key

        wanted = check_key(wanted)
    if name == "status" and not isinstance(wanted, str):
        wanted = _status_name(wanted)
    return bool((list(wanted) if isinstance(wanted, tuple) else wanted) == value)


def _calls(using: str | None) -> CallQueueQuerySet:
    from callqueue import states
    from callqueue.models import CallQueue

    calls = CallQueue.objects.using(using or CallQueue.objects.db_for_write)
    return calls.exclude(method=states.PERMIT)


def _of_call(call: CallQueue, name: str) -> Any:
    if name in OF_CALLS:
        return getattr(call, name)
    if name == "status":
        return _status_name(call.status)
    data = call.call_data
    return data.get("method") if name == "method" else data.get("params", {}).get(name)


def _of_permit(permit: CallAttempt, name: str) -> Any:
    if name not in OF_PERMITS:
        raise TypeError(f"assert_permit knows {', '.join(OF_PERMITS)}; not {name}")
    return _label(permit) if name == "label" else getattr(permit, name)


def _label(permit: CallAttempt) -> str:
    return str(permit.call.call_data["params"]["label"])


def _status_name(status: int) -> str:
    from callqueue import conf

    return conf.NAMES_OF_STATUS[int(status)]


def _call_told(call: CallQueue) -> str:
    params = call.call_data.get("params", {})
    target = params.get("url") or params.get("name") or params.get("to") or ""
    status = _status_name(call.status)
    return f"{call.call_data.get('method')} {target} (rule {call.rule}, {status})"


def _permit_told(permit: CallAttempt) -> str:
    outcome = permit.outcome or "open"
    return f"permit (rule {permit.rule}, label {_label(permit)!r}, {outcome})"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
