"""Celery's options of a task as a call takes them: which there are, which cannot be honoured, and
what the rest means for `send`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery.utils.abstract import CallableSignature
from django.utils import timezone

from callqueue import texts
from callqueue.exceptions import InvalidCall
from callqueue.handlers import celery_json

if TYPE_CHECKING:
    from callqueue.integrations.queued_task import QueuedTask

TIMEOUT = "set Rule(total_timeout=...), after which the attempt counts as lost"
ELSEWHERE = {
    "queue": "belongs to the rule: set Rule(queues=...)",
    "routing_key": "belongs to the rule: set Rule(queues=...)",
    "exchange": "belongs to the rule: set Rule(queues=...)",
    "time_limit": f"belongs to the rule: {TIMEOUT}",
    "soft_time_limit": f"belongs to the rule: {TIMEOUT}",
    "rate_limit": "is Celery's own, per worker process: set Rule(limits=[...])",
}
KEPT = (
    "root_id",
    "parent_id",
    "group_id",
    "group_index",
    "shadow",
    "replaced_task_nesting",
    "ignore_result",
    "headers",
    "argsrepr",
    "kwargsrepr",
)
PROPERTIES = ("app_id", "message_id", "user_id")  # a message's, which the task may read
SIGNATURES = ("link", "link_error", "chain", "chord")
OF_THE_BROKER = frozenset(
    {
        "producer",
        "connection",
        "publisher",
        "router",
        "route_name",
        "retry",
        "retry_policy",
        "compression",
        "mandatory",
        "immediate",
        "delivery_mode",
        "correlation_id",
        "reply_to",
        "add_to_parent",
        "result_cls",
        "task_type",
        "origin",
        "expiration",
        "retries",
        "throw",
    }
)  # fmt: skip  they say how a message travels, and there is none, or how a run ends that is eager
OF_SEND = ("rule", "key", "cost", "unique_key", "callback", "using")
# Celery gives the first as an option of an errback that a group's members share.
KNOWN = frozenset(
    {*KEPT, *SIGNATURES, *PROPERTIES, *OF_SEND, *OF_THE_BROKER}
    | {"immutable", "countdown", "eta", "expires", "priority", "stamped_headers", "stamps"}
)


def refuse(task: QueuedTask, options: Mapping[str, Any]) -> None:
    """Options that cannot be honoured, by name; nothing is dropped in silence that would change
    what the caller meant.
    """
    stamps = set(options.get("stamped_headers") or ())
    for name, value in options.items():
        if value is None or name in KNOWN or name in stamps:
            continue
        if name == "serializer":
            if value == "json":
                continue
            why = "is 'json' for every call: arguments are stored as JSON"
            raise InvalidCall("serializer", why)
        nearest = texts.suggest(name, sorted(KNOWN - OF_THE_BROKER))
        raise InvalidCall(name, ELSEWHERE.get(name) or f"is no option of a QueuedTask{nearest}")
    everywhere = task._get_app().conf
    for name in ("queue", "routing_key", "exchange", "time_limit", "soft_time_limit", "rate_limit"):
        stated = getattr(task, name, None)
        if stated is not None and stated != getattr(everywhere, f"task_{name}", None):
            raise InvalidCall(name, f"{ELSEWHERE[name]} (the task {task.name} states it)")


def renamed(error: InvalidCall, task: QueuedTask, args: tuple[Any, ...]) -> InvalidCall:
    """The error, with the argument's own name in place of its place in the call's params."""
    for prefix in ("params.args[", "params.kwargs."):
        if not error.field.startswith(prefix):
            continue
        rest = error.field.removeprefix(prefix)
        if prefix == "params.kwargs.":
            return InvalidCall(rest, f"{error.why} (an argument of the task {task.name})")
        place, _, inner = rest.partition("]")
        names = list(inspect.signature(task.run).parameters)
        named = names[int(place)] if int(place) < len(names) else f"args[{place}]"
        return InvalidCall(f"{named}{inner}", f"{error.why} (an argument of the task {task.name})")
    return error


def computed(
    option: Any, task: QueuedTask, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """An option's value; a callable is asked, with those of the task's arguments that it names."""
    option = option.__func__ if isinstance(option, staticmethod) else option
    if not callable(option):
        return option
    wanted = inspect.signature(option).parameters.values()
    named = _by_name(task.run, args, kwargs)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    missing = [
        p
        for p in wanted
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in (named or {})
    ]
    if named is None or missing or any(p.kind in by_place for p in wanted):
        return option(*args, **kwargs)
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in wanted)
    names = {p.name for p in wanted}
    return option(**{name: value for name, value in named.items() if takes_rest or name in names})


def _by_name(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments under the names the task gives them; None where it takes some without a
    name.
    """
    signature = inspect.signature(run)
    nameless = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    if any(p.kind in nameless for p in signature.parameters.values()):
        return None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    for p in signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            named |= named.pop(p.name)
    return named


def not_before(task: QueuedTask, options: Mapping[str, Any]) -> datetime | None:
    if options.get("eta") is not None:
        return _aware(task, options["eta"])
    countdown = options.get("countdown")
    return None if not countdown else timezone.now() + timedelta(seconds=float(countdown))


def expires_at(task: QueuedTask, expires: Any) -> datetime | None:
    if expires is None:
        return None
    if isinstance(expires, int | float):
        return timezone.now() + timedelta(seconds=expires)
    return _aware(task, expires)


def _aware(task: QueuedTask, instant: datetime | str) -> datetime:
    """A naive datetime is in the Celery app's time zone, as in Celery."""
    when = datetime.fromisoformat(instant) if isinstance(instant, str) else instant
    return when if when.tzinfo else when.replace(tzinfo=task._get_app().timezone)


def plain(name: str, value: Any) -> Any:
    """The option as a message of Celery's would carry it."""
    try:
        return celery_json.as_plain(value)
    except (TypeError, ValueError) as error:
        what = "; a Secret may be an argument of this task, not of those that follow it"
        why = f"has no form in JSON ({error}){what if 'Secret' in repr(value) else ''}"
        raise InvalidCall(name, why) from None


def listed(value: Any) -> list[Any]:
    return (
        list(value)
        if isinstance(value, list | tuple) and not isinstance(value, CallableSignature)
        else [value]
    )
