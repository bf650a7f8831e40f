"""Editing the request of a call that failed, without ever showing what is secret in it: the
reader's text is laid over the stored request, by the names of its dicts.

Where the text comes back as it was shown, the stored value stays. Of a list in which something is
hidden nothing may change. Nobody becomes able to call another host, run another task or write to
somebody else by editing. Pure but for `save_and_requeue`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from django.db import router
from django.utils.translation import gettext as _

from callqueue import database, handlers, states
from callqueue.exceptions import IllegalTransition, InvalidCall
from callqueue.fields import new_idempotency_key
from callqueue.handlers import HTTP_METHODS, method_of
from callqueue.limits.budgets import named_parts
from callqueue.models import CallQueue
from callqueue.security.redaction import REDACTED, hidden_marker_in, redact_call_data
from callqueue.security.secrets import Secret, walk_json
from callqueue.security.withholding import is_plain_word
from callqueue.sending import intake
from callqueue.sending.validation import MAX_DEPTH

NAMED = 20  # changed params that the log names


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def read_edited(text: str, stored: Any) -> Any:
    """The request that the text describes; what is left as shown is as stored. Or InvalidCall."""
    try:
        edited = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidCall("call_data", _("is not JSON: %s") % error) from None
    if _is_deeper_than(edited, MAX_DEPTH):
        raise InvalidCall("call_data", _("is nested deeper than %d") % MAX_DEPTH)
    laid = _with_stored_values(edited, redact_call_data(stored), stored, "call_data")
    _check_nothing_leaks(edited, laid, stored)
    return laid


def save_and_requeue(call: CallQueue, call_data: Any) -> str:
    """Give the call this request; the params that changed. CallQueueError says what is wrong. A
    changed request gets a new idempotency key: an API would take the old one for the old request.
    """
    key = named_parts(call.key) or call.key
    request = intake.CallRequest(call_data, call.rule, key, call.priority, call.cost)
    checked = intake.prepare(request)
    if checked is None:
        raise InvalidCall("call_data", _("is such that the router discards it"))
    changed = _changed_params(call.call_data, checked.call_data)
    own_key = new_idempotency_key() if changed else call.idempotency_key
    sealed: Any = CallQueue._meta.get_field("call_data")
    changes: dict[str, Any] = {
        "idempotency_key": own_key,
        "call_data": sealed.bind_row(checked.call_data, own_key),
        "method": checked.method,
        "host": checked.host,
        "path": checked.path,
        "first_sent_dt": None if changed else call.first_sent_dt,
    }
    using = router.db_for_write(CallQueue, instance=call)
    with database.writing(using):
        rows = CallQueue.objects.using(using).filter(
            pk=call.pk, status=states.FAILED, last_attempt=call.last_attempt
        )
        if not rows.update(**changes):
            raise IllegalTransition(_("call %d has changed meanwhile; look at it again") % call.pk)
        call.requeue()
    return changed


def _is_deeper_than(value: Any, most: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inside) and (most == 0 or any(_is_deeper_than(item, most - 1) for item in inside))


def _with_stored_values(edited: Any, seen: Any, stored: Any, path: str) -> Any:
    """The edit, with what is stored wherever it is as seen. InvalidCall if more of it is hidden."""
    if not _differs_as_json(edited, seen):
        return stored
    if isinstance(seen, list) and (hidden := _first_hidden(seen)):
        why = _("has %s inside a list; leave the list as shown, or send a new call instead")
        raise InvalidCall(path, why % hidden)
    if isinstance(edited, dict):
        seen, stored = (one if isinstance(one, dict) else {} for one in (seen, stored))
        return {
            name: _with_stored_values(value, seen.get(name), stored.get(name), f"{path}.{name}")
            for name, value in edited.items()
        }
    if hidden := _first_hidden(edited):
        why = _(
            "has %s where nothing of that name is stored; leave it as shown, or replace all of it"
        )
        raise InvalidCall(path, why % hidden)
    return edited


def _check_nothing_leaks(edited: Any, laid: Any, stored: Any) -> None:
    """InvalidCall if `laid` is another kind of call, or shows or sends hidden values elsewhere."""
    if _differs_as_json(_fixed_parts(laid), _fixed_parts(stored)):
        raise InvalidCall(
            "call_data",
            _(
                "is another kind of call: the method, the host, a task's name and mail addresses "
                "stay; send a new call instead"
            ),
        )
    if added := _secret_names(laid) - _secret_names(stored):
        why = _("refers to the secret %r, which the call did not; send a new call for that")
        raise InvalidCall("call_data", why % min(added))
    is_opaque = method_of(stored, "") not in (*HTTP_METHODS, "send_email")
    if is_opaque and _first_hidden(redact_call_data(stored)) and _differs_as_json(laid, stored):
        why = _(
            "has values that are not shown here, and only its handler knows where they go; "
            "send a new call instead"
        )
        raise InvalidCall("call_data", why)
    seen = redact_call_data(laid)
    if _differs_as_json(seen, edited) and _differs_as_json(seen, redact_call_data(edited)):
        why = _(
            "has %s where what it stands for would be shown; "
            "replace it there, or leave its name as it was"
        )
        raise InvalidCall("call_data", why % REDACTED)


def _fixed_parts(call_data: Any) -> Any:
    """A call's method, and those of its params that say where it goes or what it runs."""
    if not isinstance(call_data, dict) or not isinstance(call_data.get("params"), dict):
        return call_data
    method, params = method_of(call_data, ""), call_data["params"]
    if method in HTTP_METHODS:
        try:
            return method, urlsplit(params.get("url"))[:2]
        except (ValueError, TypeError, AttributeError):  # what cannot be read stays as it is
            return method, params.get("url")
    built_in = handlers.find_built_in(method)
    free: Collection[str] = tuple(params) if built_in is None else built_in.free
    return method, {name: value for name, value in params.items() if name not in free}


def _secret_names(value: Any) -> set[str]:
    return {one.name for one in walk_json(value) if isinstance(one, Secret)}


def _first_hidden(value: Any) -> str:
    """What in a value stands for something that is not shown; "" where nothing does."""
    texts = (one for one in walk_json(value, with_names=True) if isinstance(one, str))
    return next(filter(None, map(hidden_marker_in, texts)), "")


def _differs_as_json(one: Any, other: Any) -> bool:
    """Whether the two differ as JSON: to Python, 1 equals True and 1.0, and names have no order."""
    return json.dumps(one, default=repr) != json.dumps(other, default=repr)


def _changed_params(before: Any, after: Any) -> str:
    """The names of the params that differ, in one line; empty where none does."""
    old, new = before["params"], after["params"]
    differ = [n for n in dict.fromkeys([*old, *new]) if _differs_as_json(old.get(n), new.get(n))]
    # a name may tell of somebody, and the log is in clear
    named = [f"params.{name}" if is_plain_word(name) else "params.[…]" for name in differ[:NAMED]]
    return ", ".join([*named, "…"] if len(differ) > NAMED else named)
