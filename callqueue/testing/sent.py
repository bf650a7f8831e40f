"""What the code under test sent: the calls in the table, and assertions that say what was sent
instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

from callqueue.testing.transport import is_url

if TYPE_CHECKING:
    from callqueue.managers import CallQueueQuerySet
    from callqueue.models import CallQueue

_COLUMNS = ("rule", "key", "priority", "unique_key", "cost", "callback")


class Sent(Sequence["CallQueue"]):
    """The calls sent since the test began, as the table has them now; the newest is last."""

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
    """`with calls_sent() as sent:` the calls sent from here on, without a pytest fixture."""
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
    return _assert_sent(list(_calls(using).order_by("pk")), count, what)


def _calls(using: str | None) -> CallQueueQuerySet:
    from callqueue.models import CallQueue

    return CallQueue.objects.using(using or CallQueue.objects.db_for_write)


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
    if name in _COLUMNS:
        return getattr(call, name)
    if name == "method":
        return call.call_data.get("method")
    if name == "status":
        return _name_of(call.status)
    return call.call_data.get("params", {}).get(name)


def _is_wanted(name: str, wanted: Any, value: Any) -> bool:
    if name == "url":
        return _is_wanted_url(wanted, value)
    if name == "method":
        return bool(str(wanted).lower() == str(value).lower())
    if name == "key":
        from callqueue.sending.validation import check_key

        return bool(check_key(wanted) == value)
    if name == "status":
        return bool(value == (wanted if isinstance(wanted, str) else _name_of(int(wanted))))
    if name == "headers" and isinstance(wanted, Mapping):
        have = {k.lower(): v for k, v in (value or {}).items()}
        return all(have.get(k.lower()) == v for k, v in wanted.items())
    if isinstance(wanted, tuple):
        wanted = list(wanted)
    return bool(wanted == value)


def _is_wanted_url(wanted: Any, value: Any) -> bool:
    """The value is a secret where the call's URL is one."""
    if wanted == value:
        return True
    url = value if isinstance(value, str) else ""
    if isinstance(wanted, re.Pattern):
        return wanted.search(url) is not None
    return isinstance(wanted, str) and is_url(wanted, url)


def _name_of(status: int) -> str:
    from callqueue import conf

    return conf.NAMES_OF_STATUS[status]


def _why(call: CallQueue, what: Mapping[str, Any]) -> str:
    wrong = _differences(call, what)
    values = ", ".join(f"{name}={_value(call, name)!r}" for name in wrong)
    return f"  [{values}]" if wrong else ""


def _listed(calls: Sequence[CallQueue]) -> str:
    return ", ".join(_told(call) for call in calls)


def _told(call: CallQueue) -> str:
    params = call.call_data.get("params", {})
    target = params.get("url") or params.get("name") or params.get("to") or ""
    return f"{call.call_data.get('method')} {target} (rule {call.rule}, {_value(call, 'status')})"
