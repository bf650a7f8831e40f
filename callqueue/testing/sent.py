"""What the code under test sent, and which permits it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

from callqueue.testing.transport import url_matches

if TYPE_CHECKING:
    from callqueue.managers import CallQueueQuerySet
    from callqueue.models import CallQueue

COLUMNS = ("rule", "key", "priority", "unique_key", "cost", "callback")
PERMIT = "permit"


class Sent(Sequence["CallQueue"]):
    """The calls sent since this was made, as the table has them now; the newest is last."""

    def __init__(self, using: str | None = None) -> None:
        self._using = using
        self._after: int = _calls(using).order_by("-pk").values_list("pk", flat=True).first() or 0

    @property
    def calls(self) -> list[CallQueue]:
        return list(_calls(self._using).exclude(method=PERMIT).filter(pk__gt=self._after))

    @property
    def last(self) -> CallQueue:
        return self.calls[-1]

    def assert_call_sent(self, *, count: int | None = None, **what: Any) -> CallQueue | None:
        """See the function `assert_call_sent`; looks at these calls only."""
        __tracebackhide__ = True
        return _newest_or_fail(_calls(self._using).filter(pk__gt=self._after), count, what)

    def assert_nothing_sent(self) -> None:
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
        return f"<Sent: {', '.join(map(_call_in_words, self.calls))}>"


@contextmanager
def calls_sent(using: str | None = None) -> Iterator[Sent]:
    """`with calls_sent() as sent:` the calls sent from here on, without a pytest fixture."""
    yield Sent(using)


def assert_call_sent(
    *, count: int | None = None, using: str | None = None, **what: Any
) -> CallQueue | None:
    """A call that looks like this is in the table (exactly `count` of them, where given); returns
    the newest, None of 0.

    `method`, `rule`, `key`, `priority`, `status` ("new", "done", ...), `unique_key`, `cost`,
    `callback`; everything else names one of the call's params: `url` (with `*` for any text, or a
    function of it), `json`, `data`, `headers` (those named), `to`, `name`, `args`... Of permits
    (`method="permit"`) the param is the `label`.
    """
    __tracebackhide__ = True
    return _newest_or_fail(_calls(using), count, what)


def _newest_or_fail(
    rows: CallQueueQuerySet, count: int | None, wanted: Mapping[str, Any]
) -> CallQueue | None:
    __tracebackhide__ = True
    is_of_permits = str(wanted.get("method")).lower() == PERMIT
    calls = rows.filter(method=PERMIT) if is_of_permits else rows.exclude(method=PERMIT)
    looked_at = [(call, _differing_values(call, wanted)) for call in calls]
    found = [call for call, wrong in looked_at if not wrong]
    if len(found) == count or (count is None and found):
        return found[-1] if found else None
    lines = [
        f"\n  {_call_in_words(call)}" + (f"  [{_as_keywords(wrong)}]" if wrong else "")
        for call, wrong in looked_at
    ]
    times = "" if count is None else f" {count} times, but {len(found)} times"
    looked_for, there = _as_keywords(wanted) or "any", "".join(lines) or " nothing"
    raise AssertionError(f"not sent{times}: {looked_for}; sent:{there}")


def _differing_values(call: CallQueue, wanted: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: _value_of(call, name) for name in wanted}
    return {n: value for n, value in values.items() if not _is_as_wanted(n, wanted[n], value)}


def _is_as_wanted(name: str, wanted: Any, value: Any) -> bool:
    if name == "url":  # a secret, where the call's URL is one
        url = value if isinstance(value, str) else ""
        if callable(wanted):
            return bool(wanted(url))
        return wanted == value or (isinstance(wanted, str) and url_matches(wanted, url))
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
    from callqueue.models import CallQueue

    return CallQueue.objects.using(using or CallQueue.objects.db_for_write).order_by("pk")


def _value_of(call: CallQueue, name: str) -> Any:
    if name in COLUMNS:
        return getattr(call, name)
    if name == "status":
        return _status_name(call.status)
    data = call.call_data
    return data.get("method") if name == "method" else data.get("params", {}).get(name)


def _status_name(status: int) -> str:
    from callqueue import conf

    return conf.NAMES_OF_STATUS[int(status)]


def _call_in_words(call: CallQueue) -> str:
    params = call.call_data.get("params", {})
    target = next((params[name] for name in ("url", "name", "to", "label") if params.get(name)), "")
    status = _status_name(call.status)
    return f"{call.call_data.get('method')} {target} (rule {call.rule}, {status})"


def _as_keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
