"""Editing a call's request without ever showing what is secret in it: the reader's text is laid over the stored request.

What is shown is redacted; where the text comes back as it was shown, the stored value stays. Pure but for `save`.
"""

from __future__ import annotations

import json
import uuid
from typing import Any
from urllib.parse import urlsplit

from django.db import router
from django.utils.translation import gettext as _

from callqueue import database, intake, states
from callqueue.budgets import key_parts
from callqueue.exceptions import IllegalTransition, InvalidCall
from callqueue.handlers import HTTP_METHODS
from callqueue.models import CallQueue
from callqueue.redaction import REDACTED, SECRET, redact_params

EDITABLE = (*states.REQUEUABLE, states.NEW, states.DONE)


def shown(call_data: Any) -> Any:
    """The request as a person may see it."""
    if not isinstance(call_data, dict):
        return redact_params(call_data)
    return {name: redact_params(value) if name == "params" else value for name, value in call_data.items()}


def as_text(value: Any) -> str:
    """JSON as people read it."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def read(text: str, stored: Any) -> Any:
    """The request that the text describes, with the stored values where it was left as shown. InvalidCall says why not."""
    try:
        edited = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidCall("call_data", _("is not JSON: %s") % error) from None
    laid = _laid_over(edited, shown(stored), stored, "call_data")
    _refuse_to_leak(laid, stored)
    return laid


def save(call: CallQueue, call_data: Any, *, again: bool = False) -> None:
    """Give the call this request and requeue it. Checked as `send` checks; CallQueueError says what is wrong.

    A changed request gets an idempotency key of its own: an API would take the old key for the old request.
    """
    checked = intake.prepare(
        intake.Order(call_data, rule=call.rule, key=key_parts(call.key) or call.key, priority=call.priority, cost=call.cost)
    )
    if checked is None:
        raise InvalidCall("call_data", _("is such that the router discards it"))
    using = router.db_for_write(CallQueue, instance=call)
    with database.writing(using):
        rows = CallQueue.objects.using(using).filter(pk=call.pk, status=call.status, last_attempt=call.last_attempt)
        changes: dict[str, Any] = {"call_data": checked.call_data, "method": checked.method, "host": checked.host}
        if checked.call_data != call.call_data:
            changes |= {"idempotency_key": uuid.uuid4(), "first_sent_dt": None}
        if not rows.update(**changes):
            raise IllegalTransition(_("call %d has changed meanwhile; look at it again") % call.pk)
        if call.status != states.NEW:
            call.requeue(again=again)


def _refuse_to_leak(edited: Any, stored: Any) -> None:
    """What the reader may not see must not be sent where the reader wants."""
    added = _references(edited) - _references(stored)
    if added:
        why = _("refers to the secret %r, which the call did not; send a new call for that")
        raise InvalidCall("call_data", why % min(added))
    is_hidden = shown(stored) != stored or bool(_references(stored))
    if is_hidden and _destination(edited) != _destination(stored):
        raise InvalidCall(
            "call_data", _("goes to another place, and values that are not shown here would go with it; send a new call instead")
        )


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        if SECRET in value:
            return {str(value[SECRET])}
        return set().union(*map(_references, value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()


def _destination(call_data: Any) -> Any:
    """Where the request goes; of a method that only its handler understands, all of it."""
    if not isinstance(call_data, dict) or not isinstance(call_data.get("params"), dict):
        return call_data
    method, params = str(call_data.get("method")).lower(), call_data["params"]
    if method in HTTP_METHODS:
        url = params.get("url")
        return urlsplit(url)[:2] if isinstance(url, str) else url
    if method == "send_email":
        return [params.get(name) for name in ("to", "cc", "bcc", "reply_to", "from_email")]
    return call_data


def _laid_over(edited: Any, seen: Any, stored: Any, path: str) -> Any:
    if edited == seen and type(edited) is type(seen):
        return stored
    if isinstance(edited, dict):
        seen, stored = (value if isinstance(value, dict) else {} for value in (seen, stored))
        return {name: _laid_over(edited[name], seen.get(name), stored.get(name), f"{path}.{name}") for name in edited}
    if isinstance(edited, list):
        before = list(zip(seen, stored, strict=False)) if isinstance(seen, list) and isinstance(stored, list) else []
        before += [(None, None)] * (len(edited) - len(before))
        return [_laid_over(item, before[place][0], before[place][1], f"{path}[{place}]") for place, item in enumerate(edited)]
    if isinstance(edited, str) and REDACTED in edited:
        why = _("has %s where nothing of that name is stored; leave it as shown, or replace all of it")
        raise InvalidCall(path, why % REDACTED)
    return edited
