"""Editing a call's request without ever showing what is secret in it: the reader's text is laid
over the stored request.

What is shown is redacted; where the text comes back as it was shown, the stored value stays. It
stays only where it would be redacted again, and the call stays the kind of thing that it was:
nobody becomes able to call another host, run another task or write to somebody else by editing.
Pure but for `save`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from django.db import router
from django.utils.translation import gettext as _

from callqueue import database, states
from callqueue.exceptions import IllegalTransition, InvalidCall
from callqueue.fields import new_idempotency_key
from callqueue.handlers import HTTP_METHODS
from callqueue.limits.budgets import key_parts
from callqueue.models import CallQueue
from callqueue.security.redaction import REDACTED, hidden_in, redact_params
from callqueue.security.secrets import Secret
from callqueue.sending import intake
from callqueue.sending.validation import MAX_DEPTH

EDITABLE = (*states.REQUEUABLE, states.NEW, states.DONE)
FREE = {
    "send_email": ("subject", "message", "html_message"),
    "celery_task": ("args", "kwargs"),
    "django_task": ("args", "kwargs"),
}
NAMED = 20  # changed paths that the log names
PATH = 100  # characters of each


def shown(call_data: Any) -> Any:
    """The request as a person may see it."""
    if not isinstance(call_data, dict):
        return redact_params(call_data)
    return {
        name: redact_params(value) if name == "params" else value
        for name, value in call_data.items()
    }


def as_text(value: Any) -> str:
    """JSON as people read it."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def read(text: str, stored: Any) -> Any:
    """The request that the text describes, with the stored values where it was left as shown.
    InvalidCall says why not.
    """
    try:
        edited = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidCall("call_data", _("is not JSON: %s") % error) from None
    if _is_deep(edited, MAX_DEPTH):
        raise InvalidCall("call_data", _("is nested deeper than %d") % MAX_DEPTH)
    laid = _laid_over(edited, shown(stored), stored, "call_data")
    _refuse_to_leak(edited, laid, stored)
    return laid


def save(call: CallQueue, call_data: Any, *, again: bool = False) -> str:
    """Give the call this request and requeue it; the paths that changed. CallQueueError says what
    is wrong, as `send` does.

    A changed request gets an idempotency key of its own: an API would take the old key for the old
    request.
    """
    checked = intake.prepare(
        intake.CallRequest(
            call_data,
            rule=call.rule,
            key=key_parts(call.key) or call.key,
            priority=call.priority,
            cost=call.cost,
        )
    )
    if checked is None:
        raise InvalidCall("call_data", _("is such that the router discards it"))
    using, changed = (
        router.db_for_write(CallQueue, instance=call),
        _changed(call.call_data, checked.call_data),
    )
    with database.writing(using):
        rows = CallQueue.objects.using(using).filter(
            pk=call.pk, status=call.status, last_attempt=call.last_attempt
        )
        changes: dict[str, Any] = {
            "idempotency_key": call.idempotency_key,
            "method": checked.method,
            "host": checked.host,
            "path": checked.path,
        }
        if changed:
            changes |= {"idempotency_key": new_idempotency_key(), "first_sent_dt": None}
        sealed: Any = CallQueue._meta.get_field("call_data")
        changes["call_data"] = sealed.bound(checked.call_data, changes["idempotency_key"])
        if not rows.update(**changes):
            raise IllegalTransition(_("call %d has changed meanwhile; look at it again") % call.pk)
        if call.status != states.NEW:
            call.requeue(again=again)
    return changed


def _is_deep(value: Any, most: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inside) and (most == 0 or any(_is_deep(item, most - 1) for item in inside))


def _refuse_to_leak(edited: Any, laid: Any, stored: Any) -> None:
    """A call stays what it is, and what the reader may not see is neither shown nor sent where the
    reader wants.
    """
    if _kind(laid) != _kind(stored):
        raise InvalidCall(
            "call_data",
            _(
                "is another kind of call: the method, the host, a task's name and mail addresses "
                "stay; send a new call instead"
            ),
        )
    added = _references(laid) - _references(stored)
    if added:
        why = _("refers to the secret %r, which the call did not; send a new call for that")
        raise InvalidCall("call_data", why % min(added))
    is_hidden = _differs(shown(stored), stored) or bool(_references(stored))
    if is_hidden and _is_opaque(stored) and _differs(laid, stored):
        why = _(
            "has values that are not shown here, and only its handler knows where they go; "
            "send a new call instead"
        )
        raise InvalidCall("call_data", why)
    if _differs(shown(laid), edited) and _differs(shown(laid), shown(edited)):
        why = _(
            "has %s where what it stands for would be shown; "
            "replace it there, or leave its name as it was"
        )
        raise InvalidCall("call_data", why % REDACTED)


def _kind(call_data: Any) -> Any:
    """What kind of thing a call is: its method, and of its params what says where it goes or what
    it runs.
    """
    if not isinstance(call_data, dict) or not isinstance(call_data.get("params"), dict):
        return call_data
    method, params = call_data.get("method"), call_data["params"]
    if str(method) in HTTP_METHODS:
        return method, _origin(params.get("url"))
    free: Collection[str] = FREE.get(str(method), tuple(params))
    return method, {name: value for name, value in params.items() if name not in free}


def _origin(url: Any) -> Any:
    """A URL's scheme, host and port; of what cannot be read, all of it."""
    try:
        return urlsplit(url)[:2] if isinstance(url, str) else url
    except ValueError:
        return url


def _is_opaque(call_data: Any) -> bool:
    """Whether only its handler knows what the call does with its params."""
    method = call_data.get("method") if isinstance(call_data, dict) else None
    return str(method) not in HTTP_METHODS and method != "send_email"


def _references(value: Any) -> set[str]:
    if isinstance(value, Secret):
        return {value.name}
    if isinstance(value, dict):
        return set().union(*map(_references, value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()


def _laid_over(edited: Any, seen: Any, stored: Any, path: str) -> Any:
    """The edited value, with the stored one wherever it came back as it was seen."""
    if type(edited) is type(seen) and edited == seen and not isinstance(edited, dict | list):
        return stored
    if isinstance(edited, dict):
        seen, stored = (value if isinstance(value, dict) else {} for value in (seen, stored))
        return {
            name: _laid_over(edited[name], seen.get(name), stored.get(name), f"{path}.{name}")
            for name in edited
        }
    if isinstance(edited, list):
        under = _under(edited, seen, stored)
        return [
            _laid_over(item, *under[place], f"{path}[{place}]") for place, item in enumerate(edited)
        ]
    if isinstance(edited, str) and (hidden := hidden_in(edited)):
        why = _(
            "has %s where nothing of that name is stored; leave it as shown, or replace all of it"
        )
        raise InvalidCall(path, why % hidden)
    return edited


def _under(edited: list[Any], seen: Any, stored: Any) -> list[tuple[Any, Any]]:
    """What each item of a list lies over, as seen and as stored: whatever has its name, wherever
    that stood.

    A pair's name is its first; another item's is all of it. Of several of one name the first lies
    over the first, unless there are more or fewer of them than there were. What was changed in a
    list of the same length lies over what stood there.
    """
    if not isinstance(seen, list) or not isinstance(stored, list):
        return [(None, None)] * len(edited)
    by_name = _is_pairs(edited) and _is_pairs(seen)
    places, wanted = (
        _places([item[0] if by_name else item for item in items]) for items in (seen, edited)
    )
    under: list[tuple[Any, Any]] = [(None, None)] * len(edited)
    left = set(range(len(seen)))
    for name, there in wanted.items():
        if len(there) == len(places[name]):
            for place, former in zip(there, places[name], strict=True):
                under[place] = seen[former], stored[former]
                left.discard(former)
    if not by_name and len(edited) == len(seen):
        found = {
            place for there in wanted.values() for place in there if under[place] != (None, None)
        }
        under = [
            (seen[p], stored[p]) if p in left and p not in found else under[p]
            for p in range(len(edited))
        ]
    return under


def _is_pairs(items: list[Any]) -> bool:
    return all(
        isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in items
    )


def _places(names: Sequence[Any]) -> defaultdict[str, list[int]]:
    """Where each name stands."""
    places = defaultdict(list)
    for place, name in enumerate(names):
        places[json.dumps(name, default=str)].append(place)
    return places


def _differs(one: Any, other: Any) -> bool:
    """As JSON: to Python, 1 is True and 1.0, and the order of names says nothing."""
    return json.dumps(one, default=str) != json.dumps(other, default=str)


def _changed(before: Any, after: Any) -> str:
    """The paths that differ, never a value; empty where none does."""
    paths = sorted(_differing(before, after, ""))
    named = [path if len(path) <= PATH else f"{path[:PATH]}…" for path in paths[:NAMED]]
    return ", ".join([*named, "…"] if len(paths) > NAMED else named)


def _differing(before: Any, after: Any, path: str) -> Iterator[str]:
    if not _differs(before, after):
        return
    if isinstance(before, dict) and isinstance(after, dict):
        names, none = list(dict.fromkeys([*before, *after])), object()
        inside = [
            _differing(before.get(name, none), after.get(name, none), _joined(path, name))
            for name in names
        ]
        yield from list(chain.from_iterable(inside)) or [
            path or "call_data"
        ]  # where none of them differs, their order does
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differing(one, other, f"{path}[{place}]")
    else:
        yield path or "call_data"


def _joined(path: str, name: str) -> str:
    shown_name = name if name.isprintable() else ascii(name)
    return f"{path}.{shown_name}" if path else shown_name
