"""Intake: turns what the application sends into rows, or refuses it with the field's name. The only
way in.

Asks the router, finds the rule, checks everything, and inserts in the caller's transaction. Does no
network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django.db import IntegrityError, transaction
from django.utils import timezone

from callqueue import conf, database, events, states, tables, telemetry
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.handlers import HTTP_METHODS, methods
from callqueue.limits.budgets import cost_of
from callqueue.limits.rules import Discard, Route, Rule
from callqueue.security import addresses
from callqueue.sending import validation

if TYPE_CHECKING:
    from callqueue.models import CallQueue

ARGUMENTS = (
    "rule",
    "key",
    "priority",
    "cost",
    "not_before",
    "expires_at",
    "unique_key",
    "callback",
)


@dataclass(frozen=True)
class Order:
    """What the caller of `send` asked for, not yet checked."""

    call_data: Any
    rule: str | None = None
    key: Any = ""
    priority: int | None = None
    cost: Any = None
    not_before: datetime | None = None
    expires_at: datetime | None = None
    unique_key: str | None = None
    callback: str | None = None


def accept(order: Order, *, using: str) -> CallQueue | None:
    """Check an order and insert its row; None where the router discards it, the call there is where
    a unique key says so.
    """
    call = prepare(order)
    if call is None:
        return None
    if call.unique_key is None:
        call.save(using=using, force_insert=True)
        return _complete(call)
    return database.again_after_deadlock(using, lambda: _insert_unique(call, using))


def accept_many(
    iterable: Iterable[Any], *, batch_size: int, same: Mapping[str, Any], using: str
) -> list[CallQueue]:
    """Check all orders, then insert their rows, `batch_size` a statement, in one transaction."""
    if type(batch_size) is not int or batch_size < 1:
        raise InvalidCall("batch_size", f"{batch_size!r} is not a whole number of at least 1")
    calls = [
        call
        for call in (_numbered(i, item, same) for i, item in enumerate(iterable))
        if call is not None
    ]

    def insert() -> list[CallQueue]:
        anew = (
            [copy(call) for call in calls] if database.is_mysql(using) else calls
        )  # what an undone insert wrote into them
        with transaction.atomic(using=using):
            return insert_many(anew, batch_size=batch_size, using=using)

    return database.again_after_deadlock(using, insert)


def insert_many(
    calls: Sequence[tables.CallQueue], *, batch_size: int, using: str
) -> list[tables.CallQueue]:
    """Insert rows that were prepared; in their order, each one's row, or the one there is where a
    unique key says so.
    """
    plain = [call for call in calls if call.unique_key is None]
    database.insert_objects(tables.CallQueue, using, plain, batch_size=batch_size)
    by_place = {id(call): _complete(call) for call in plain}
    unique = _by_key([call for call in calls if call.unique_key is not None], using)
    for at in range(0, len(unique), batch_size):
        batch = unique[at : at + batch_size]
        by_key = _insert_uniques(batch, using)
        by_place.update((id(call), by_key[str(call.unique_key)]) for call in batch)
    return [by_place[id(call)] for call in calls]


def prepare(order: Order) -> tables.CallQueue | None:
    """The unsaved row of an order, checked in every respect; None where the router discards it."""
    config = conf.current()
    data = validation.check_call_data(
        order.call_data,
        methods=methods(),
        allowed_hosts=config.allowed_hosts,
        allowed_networks=config.allowed_networks,
        secret_names=config.secrets.keys(),
        max_bytes=config.max_call_bytes,
    )
    routed = _routed(order, data)
    if routed is None:
        return None
    host = _host(data)
    name = _rule_name(routed, host, config)
    rule = config.rule(name)
    key = validation.check_key(routed.key)
    _check_key_parts(key, rule, name)
    cost = validation.check_cost(1 if routed.cost is None else routed.cost)
    _check_admissible(cost, name, config)
    validation.check_times(timezone.now(), routed.not_before, routed.expires_at)
    call = tables.CallQueue(
        status=states.NEW,
        rule=name,
        key=key,
        priority=rule.priority
        if routed.priority is None
        else validation.check_priority(routed.priority),
        cost=cost,
        call_data=data,
        method=data["method"],
        host=host[:255],
        expires_at_dt=routed.expires_at,
        unique_key=validation.check_unique_key(routed.unique_key),
        callback=validation.check_callback(routed.callback),
        ready=routed.not_before is None,
        trace_context=telemetry.current(),
    )
    call.active_key = call.unique_key
    if routed.not_before is not None:
        call.due_at_dt = routed.not_before
    return call


def _numbered(place: int, item: Any, same: Mapping[str, Any]) -> CallQueue | None:
    try:
        return prepare(order_of(item, same))
    except CallQueueError as error:
        if isinstance(error, InvalidCall):
            raise InvalidCall(f"[{place}].{error.field}", error.why) from None
        raise type(error)(f"[{place}]: {error}") from None


def order_of(item: Any, same: Mapping[str, Any] | None = None) -> Order:
    """An order from `call_data` itself, or from an envelope {"call_data": ..., "rule": ...,
    ...}.
    """
    given = dict(same or {})
    if isinstance(item, Mapping) and "call_data" in item:
        given.update(item)
    else:
        given["call_data"] = item
    for name in given:
        if name != "call_data" and name not in ARGUMENTS:
            raise InvalidCall(
                str(name)[:100], f"is no argument of send{conf.suggest(str(name), ARGUMENTS)}"
            )
    return Order(**given)


def _routed(order: Order, data: Mapping[str, Any]) -> Order | None:
    """The order with what the router adds; None where it discards the call."""
    router = conf.current().router
    if router is None:
        return order
    answer = router(data)
    if isinstance(answer, Discard):
        events.tell("call_discarded", method=data["method"], reason=answer.why)
        return None
    if answer is None:
        return order
    route = Route(rule=answer) if isinstance(answer, str) else answer
    if not isinstance(route, Route):
        raise InvalidCall(
            "ROUTER",
            f"answered {type(answer).__name__}; it may answer None, a rule's name, Route or Discard",
        )
    return replace(
        order,
        rule=route.rule if order.rule is None else order.rule,
        key=route.key if order.key in ("", None) and route.key is not None else order.key,
        priority=route.priority if order.priority is None else order.priority,
        cost=route.cost if order.cost is None else order.cost,
    )


def _rule_name(order: Order, host: str, config: conf.Config) -> str:
    """The rule that was stated, else the one whose hosts name the call's host, else "default"."""
    if order.rule is not None:
        return order.rule
    for exact in (True, False):
        for name, rule in config.rules.items():
            for pattern in rule.hosts if host else ():
                if ("*" not in pattern) == exact and addresses.host_refusal(
                    host, (pattern,)
                ) is None:
                    return name
    return "default"


def _host(data: Mapping[str, Any]) -> str:
    url = data["params"].get("url") if data["method"] in HTTP_METHODS else None
    return (urlsplit(url).hostname or "") if isinstance(url, str) else ""


def _check_key_parts(key: str, rule: Rule, name: str) -> None:
    """A plain key under limits that are all per named keys would count nowhere: say so."""
    pers = {limit.per for limit in rule.keyed_limits}
    if key and not key.startswith("{") and pers and "key" not in pers:
        wanted = ", ".join(f"{per!r}: ..." for per in sorted(pers))
        raise InvalidCall(
            "key",
            f"the limits of rule {name!r} are per {', '.join(sorted(pers))}; give key={{{wanted}}}",
        )


def _check_admissible(cost: Any, name: str, config: conf.Config) -> None:
    for budget in config.book.budgets[name]:
        wanted = cost_of(cost, budget.limit.unit)
        if wanted > budget.limit.capacity:
            raise InvalidCall(
                "cost",
                f"{wanted} {budget.limit.unit} could never be admitted: {budget.limit.label} allows {budget.limit.capacity}",
            )


def _by_key(calls: Sequence[CallQueue], using: str) -> list[CallQueue]:
    """Calls in the order of their unique keys: whoever inserts several waits for others' keys in
    that order, and in no ring.

    They still go in the order in which they were given: where that is another, each is due a
    microsecond after the one before.
    """
    ordered = sorted(calls, key=lambda call: str(call.unique_key))
    by_default = [call for call in calls if hasattr(call.due_at_dt, "resolve_expression")]
    if by_default and (ordered != list(calls) or len(by_default) < len(calls)):
        now = database.clock(using)
        for before, call in enumerate(reversed(by_default)):
            call.due_at_dt = now - timedelta(microseconds=before)
    return ordered


def _insert_uniques(calls: Sequence[tables.CallQueue], using: str) -> dict[str, tables.CallQueue]:
    """Insert those whose key no unfinished call carries, in one statement; by key, the call that
    carries it then.

    Where another sender is faster with one of them, one after the other in the order of their keys,
    none of them inserted before.
    """
    first: dict[str, tables.CallQueue] = {}
    for call in calls:
        first.setdefault(str(call.unique_key), call)
    if database.returns_inserted(using):
        rows = tables.calls(using).filter(active_key__in=list(first), status__in=states.UNFINISHED)
        found = {str(call.active_key): call for call in rows}
        free = [call for key, call in first.items() if key not in found]
        if _is_inserted(free, using):
            return {**first, **found}
    return {key: _insert_unique(call, using) for key, call in first.items()}


def _insert_unique(call: tables.CallQueue, using: str) -> tables.CallQueue:
    """Insert, or find the unfinished call that carries the key. Another sender's uncommitted row is
    waited for.

    Where the transaction's snapshot hides that call, the database's own serialization error says
    so, or a locking read finds it.
    """
    rows = tables.calls(using).filter(active_key=call.unique_key)
    for tries in range(100):
        found = (
            database.locked(rows, wait=True)
            if tries > 1 and database.in_transaction(using)
            else rows
        ).first()
        if found is not None and found.status in states.UNFINISHED:
            return found
        if found is not None:  # other code ended it without freeing its key
            rows.filter(pk=found.pk, status__in=states.FINAL).update(active_key=None)
        if _is_inserted([call], using):
            return call
    call.save(using=using, force_insert=True)  # whatever is in the way: the database says what
    return _complete(call)


def _is_inserted(calls: Sequence[tables.CallQueue], using: str) -> bool:
    """Insert these calls, all or none: False where an unfinished call carries one's key."""
    if len(calls) == 1 and database.passes_over_conflicts(using):
        return bool(
            database.insert_objects(tables.CallQueue, using, calls, batch_size=1, unless_there=True)
        )
    try:
        with transaction.atomic(using=using):
            database.insert_objects(tables.CallQueue, using, calls, batch_size=len(calls) or 1)
    except IntegrityError:
        for call in calls:
            call.pk, call._state.adding = None, True
        return False
    for call in calls:
        _complete(call)
    return True


def _complete(call: CallQueue) -> CallQueue:
    """On a database that does not return what it inserted, forget the defaults, so that they are
    read when asked for.
    """
    for name in ("created_dt", "due_at_dt"):
        if hasattr(call.__dict__.get(name), "as_sql") or hasattr(
            call.__dict__.get(name), "resolve_expression"
        ):
            del call.__dict__[name]
    return call
