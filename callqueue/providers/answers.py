"""What verdicts read of an answer. A body or header that is not what a provider promises is as if
it were not there: a verdict that fails would only cost the answer its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def told(response: Any) -> Any:
    """The JSON in the body; None where there is none."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def body(response: Any) -> dict[str, Any]:
    """The JSON object in the body; an empty one where there is none."""
    return as_object(told(response))


def error(response: Any) -> dict[str, Any]:
    """The object `error` in the body; an empty one where there is none."""
    return as_object(body(response).get("error"))


def as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a JSON array; none where it is no array."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number of zero or more; None where it is none."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if 0 <= found < float("inf") else None


def retry_after(response: Any, default: float | None) -> float | None:
    """What Retry-After says, where it says seconds."""
    found = number(response.headers.get("Retry-After"))
    return default if found is None else found


def epoch(headers: Mapping[str, str], name: str) -> datetime | None:
    """A header with seconds since 1970, as an instant."""
    found = number(headers.get(name))
    try:
        return None if found is None else datetime.fromtimestamp(found, UTC)
    except (OverflowError, OSError, ValueError):
        return None
