"""Celery's options of a task as a call takes them: which there are, which cannot be honoured, and
what the rest means for `send`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.app.amqp import AMQP
from django.utils import timezone
from kombu.messaging import Producer

from callqueue import texts
from callqueue.exceptions import InvalidCall

if TYPE_CHECKING:
    from callqueue.integrations.queued_task import QueuedTask

OF_THE_RULE = "belongs to the rule: set Rule(queues=...)"
TIMEOUT = "belongs to the rule: set Rule(total_timeout=...), after which the attempt counts as lost"
REFUSED = {
    "queue": OF_THE_RULE,
    "routing_key": OF_THE_RULE,
    "exchange": OF_THE_RULE,
    "time_limit": TIMEOUT,
    "soft_time_limit": TIMEOUT,
    "rate_limit": "is Celery's own, per worker process: set Rule(limits=[...])",
}
OF_SEND = ("rule", "key", "cost", "unique_key", "callback")
# a message's properties, which the task may read
OF_THE_MESSAGE = ("app_id", "correlation_id", "message_id", "priority", "user_id")


@cache
def known() -> frozenset[str]:
    """What Celery takes for a task or its message, and what `send` does."""
    takes = (Task.apply_async, Task.apply, Celery.send_task, AMQP.as_task_v2, Producer.publish)
    celerys = {name for one in takes for name in inspect.signature(one).parameters}
    # the last: canvas leaves them among a signature's options
    also = {*OF_SEND, "using", *OF_THE_MESSAGE, "stamps", "immutable"}
    return frozenset((celerys | also) - {"self", "name", "body", "options", "properties"})


def refuse(task: QueuedTask, options: Mapping[str, Any]) -> None:
    """InvalidCall for an option that cannot be honoured, at this call or stated by the task, and
    for one that nobody knows: nothing that the caller meant is dropped in silence.
    """
    stamps = set(options.get("stamped_headers") or ())
    for name, value in options.items():
        if value is None or name in stamps:
            continue
        if name == "serializer" and value != "json":
            raise InvalidCall(name, "is 'json' for every call: arguments are stored as JSON")
        if name in REFUSED:
            raise InvalidCall(name, REFUSED[name])
        if name not in known():
            why = f"is no option of a QueuedTask{texts.suggest(name, sorted(known()))}"
            raise InvalidCall(name, why)
    everywhere = task._get_app().conf
    for name, why in REFUSED.items():
        stated = getattr(task, name, None)
        if stated is not None and stated != getattr(everywhere, f"task_{name}", None):
            raise InvalidCall(name, f"{why} (the task {task.name} states it)")


def renamed(error: InvalidCall, task: QueuedTask) -> InvalidCall:
    """The error, with the argument's own name in place of its place in the call's params."""
    field = error.field
    if field.startswith("params.kwargs."):
        field = field.removeprefix("params.kwargs.")
    elif field.startswith("params.args["):
        place, _, inner = field.removeprefix("params.args[").partition("]")
        names = list(inspect.signature(task.run).parameters)
        named = names[int(place)] if int(place) < len(names) else f"args[{place}]"
        field = f"{named}{inner}"
    else:
        return error
    return InvalidCall(field, f"{error.why} (an argument of the task {task.name})")


def computed(
    option: Any, task: QueuedTask, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """An option's value; a callable is asked, with those of the task's arguments that it names, or
    with all as they were given where it names none, or others.
    """
    option = option.__func__ if isinstance(option, staticmethod) else option
    if not callable(option):
        return option
    bound = inspect.signature(task.run).bind(*args, **kwargs)
    bound.apply_defaults()
    named = {**bound.arguments, **bound.kwargs}
    wanted = inspect.signature(option).parameters.values()
    by_place = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in wanted)
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in wanted)
    needed = {p.name for p in wanted if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if by_place or not needed <= named.keys():
        return option(*args, **kwargs)
    names = {p.name for p in wanted}
    return option(**{name: value for name, value in named.items() if takes_rest or name in names})


def not_before(task: QueuedTask, options: Mapping[str, Any]) -> datetime | None:
    """When the call may go; None: at once."""
    if options.get("eta") is not None:
        return _aware(task, options["eta"])
    countdown = options.get("countdown")
    return None if not countdown else timezone.now() + timedelta(seconds=float(countdown))


def expires_at(task: QueuedTask, expires: Any) -> datetime | None:
    """When the call expires; None: never."""
    if expires is None:
        return None
    if isinstance(expires, int | float):
        return timezone.now() + timedelta(seconds=expires)
    return _aware(task, expires)


def _aware(task: QueuedTask, instant: datetime | str) -> datetime:
    """A naive datetime is in the Celery app's time zone, as in Celery."""
    when = datetime.fromisoformat(instant) if isinstance(instant, str) else instant
    return when if when.tzinfo else when.replace(tzinfo=task._get_app().timezone)
