"""Which permits the code under test took: an assertion that says what was taken instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callqueue.models import CallAttempt


def assert_permit(
    *, count: int | None = None, using: str | None = None, **what: Any
) -> CallAttempt | None:
    """A permit that looks like this was taken (exactly `count` of them, where given); returns the
    newest attempt.

    `rule`, `key`, `label`, `cost` (what it was charged after all), `outcome` ("succeeded",
    "failed", "throttled", "" while it is open), `response_status`.
    """
    __tracebackhide__ = True
    from callqueue.models import CallAttempt, CallQueue

    alias = using or CallQueue.objects.db_for_write
    taken = list(CallAttempt.objects.using(alias).filter(call__isnull=True).order_by("pk"))
    found = [one for one in taken if not _differences(one, what)]
    if len(found) == count or (count is None and found):
        return found[-1] if found else None
    wanted = ", ".join(f"{name}={value!r}" for name, value in what.items()) or "a permit"
    times = "" if count is None else f" {count} times, but {len(found)} times"
    lines = "".join(f"\n  {_told(one)}{_why(one, what)}" for one in taken)
    raise AssertionError(f"not taken{times}: {wanted}; taken:{lines or ' none'}")


_COLUMNS = ("rule", "key", "label", "cost", "outcome", "response_status")


def _differences(permit: CallAttempt, what: dict[str, Any]) -> list[str]:
    unknown = what.keys() - set(_COLUMNS)
    if unknown:
        raise TypeError(f"assert_permit knows {', '.join(_COLUMNS)}; not {', '.join(unknown)}")
    return [name for name, wanted in what.items() if not _is_wanted(name, wanted, permit)]


def _is_wanted(name: str, wanted: Any, permit: CallAttempt) -> bool:
    if name == "key":
        from callqueue.sending.validation import check_key

        wanted = check_key(wanted)
    return bool(getattr(permit, name) == wanted)


def _why(permit: CallAttempt, what: dict[str, Any]) -> str:
    wrong = _differences(permit, what)
    values = ", ".join(f"{name}={getattr(permit, name)!r}" for name in wrong)
    return f"  [{values}]" if wrong else ""


def _told(permit: CallAttempt) -> str:
    outcome = permit.outcome or "open"
    return f"permit (rule {permit.rule}, label {permit.label!r}, {outcome})"
