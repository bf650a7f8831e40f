"""Intake, the only way in: turns what is sent into rows, or refuses it with the field's name.

It asks the router, finds the rule, checks everything, and inserts in the caller's transaction; a
unique key that an unfinished call carries gives that call instead. It does no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django.db import transaction
from django.utils import timezone

from callqueue import conf, database, events, states, tables, telemetry
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.handlers import known_methods
from callqueue.limits.budgets import cost_of
from callqueue.limits.rules import Discard, Route, Rule
from callqueue.security import addresses
from callqueue.security.redaction import redact_url
from callqueue.sending import validation
from callqueue.sending.call_data import Reach, check_call_data
from callqueue.texts import suggest

if TYPE_CHECKING:
    from celery import Task

    from callqueue.models import CallQueue


@dataclass(slots=True)
class CallRequest:
    """What a caller of `send` asks for, not yet checked."""

    call_data: Any = field(repr=False)
    rule: str | None = None
    key: Any = ""
    priority: int | None = None
    cost: Any = None
    not_before: datetime | None = None
    expires_at: datetime | None = None
    unique_key: str | None = None
    callback: str | Task | None = None


# what `send` takes besides call_data
ARGUMENTS = tuple(one.name for one in fields(CallRequest) if one.name != "call_data")


def accept(request: CallRequest, *, using: str) -> CallQueue | None:
    """Insert a call, or find the one with its unique key; None where the router discards it."""
    call = prepare(request)
    return None if call is None else insert(call, using=using)


def accept_many(
    iterable: Iterable[Any], *, batch_size: int, same: Mapping[str, Any], using: str
) -> list[CallQueue]:
    """Check all, then insert or find those not discarded: `batch_size` a statement, all or none."""
    if type(batch_size) is not int or batch_size < 1:
        raise InvalidCall("batch_size", f"{batch_size!r} is not a whole number of at least 1")
    prepared = (_prepare_item(i, item, same) for i, item in enumerate(iterable))
    calls = [call for call in prepared if call is not None]

    def insert_all() -> list[CallQueue]:
        # An insert that is undone after a deadlock has written into the objects.
        anew = [copy(call) for call in calls] if database.is_mysql(using) else calls
        with transaction.atomic(using=using):
            return insert_many(anew, batch_size=batch_size, using=using)

    return database.again_after_deadlock(using, insert_all)


def prepare(request: CallRequest) -> tables.CallQueue | None:
    """The unsaved row of a request, checked in every respect; None where the router discards it."""
    config = conf.current()
    data, host = check_call_data(
        request.call_data,
        methods=known_methods,
        reach=Reach(config.allowed_hosts, config.allowed_networks),
        secret_names=config.secrets.keys(),
        max_bytes=config.max_call_bytes,
    )
    routed = _apply_router(request, data)
    if routed is None:
        return None
    name = rule_of_host(host, config) or "default" if routed.rule is None else routed.rule
    given = checked_columns(routed, name, config)
    return database.new_object(
        tables.CallQueue,
        {
            "call_data": data,
            "method": data["method"],
            "host": host,
            "path": _stored_path(data) if host and not config.encryption_keys else "",
            "trace_context": telemetry.traceparent(),
            **given,
        },
    )


def checked_columns(request: CallRequest, rule_name: str, config: conf.Config) -> dict[str, Any]:
    """The row's columns that come from send's arguments beside call_data, checked in turn."""
    rule = config.rule(rule_name)
    key = validation.check_key(request.key)
    _check_key_parts(key, rule, rule_name)
    cost = validation.check_cost(1 if request.cost is None else request.cost)
    _check_cost_fits(cost, rule_name, config)
    if request.not_before is not None or request.expires_at is not None:
        validation.check_times(timezone.now(), request.not_before, request.expires_at)
    priority = request.priority
    priority = rule.priority if priority is None else validation.check_priority(priority)
    due = {} if request.not_before is None else {"due_at_dt": request.not_before}
    return {
        "rule": rule_name,
        "key": key,
        "cost": cost,
        "priority": priority,
        "expires_at_dt": request.expires_at,
        "unique_key": validation.check_unique_key(request.unique_key),
        "callback": validation.check_callback(request.callback),
        "ready": not due,
        **due,
    }


def _prepare_item(place: int, item: Any, same: Mapping[str, Any]) -> CallQueue | None:
    try:
        return prepare(request_of(item, same))
    except CallQueueError as error:
        if isinstance(error, InvalidCall):
            raise InvalidCall(f"[{place}].{error.field}", error.why) from None
        raise type(error)(f"[{place}]: {error}") from None


def request_of(item: Any, same: Mapping[str, Any] | None = None) -> CallRequest:
    """A request from `call_data` itself, or from an envelope with it, which wins over `same`."""
    given = dict(same or {})
    if isinstance(item, Mapping) and "call_data" in item:
        given.update(item)
    else:
        given["call_data"] = item
    for name in given:
        if name != "call_data" and name not in ARGUMENTS:
            why = f"is no argument of send{suggest(str(name), ARGUMENTS)}"
            raise InvalidCall(str(name)[:100], why)
    return CallRequest(**given)


def _apply_router(request: CallRequest, data: Mapping[str, Any]) -> CallRequest | None:
    """The request, completed by the ROUTER; None where that discards it, which an event tells."""
    router = conf.current().router
    answer = None if router is None else router(deepcopy(data))  # what it changes is not checked
    if answer is None:
        return request
    if isinstance(answer, Discard):
        events.emit("call_discarded", method=data["method"], reason=answer.why)
        return None
    route = Route(rule=answer) if isinstance(answer, str) else answer
    if not isinstance(route, Route):
        kind = type(answer).__name__
        raise InvalidCall(
            "ROUTER", f"answered {kind}; it may answer None, a rule's name, Route or Discard"
        )
    has_key = request.key not in ("", None) or route.key is None
    return replace(
        request,
        rule=route.rule if request.rule is None else request.rule,
        key=request.key if has_key else route.key,
        priority=route.priority if request.priority is None else request.priority,
        cost=route.cost if request.cost is None else request.cost,
    )


def rule_of_host(host: str, config: conf.Config) -> str | None:
    """The name of the rule whose hosts have this one, or None. Whole names win over patterns."""
    places = [(place, name) for name, rule in config.rules.items() for place in rule.hosts]
    return _first_rule_for(host, tuple(places)) if 0 < len(host) <= 255 else None


@lru_cache(maxsize=1024)
def _first_rule_for(host: str, places: tuple[tuple[str, str], ...]) -> str | None:
    for place, name in sorted(places, key=lambda one: "*" in one[0]):
        if addresses.host_refusal(host, (place,)) is None:
            return name
    return None


def _stored_path(data: Mapping[str, Any]) -> str:
    path = urlsplit(data["params"]["url"]).path
    return str(redact_url(path) if "=" in path or "@" in path else path)[:255]


def _check_key_parts(key: str, rule: Rule, name: str) -> None:
    """InvalidCall for a plain key under limits all per named keys: it would count nowhere."""
    pers = {limit.per for limit in rule.limits if limit.is_keyed}
    if key and not key.startswith("{") and pers and "key" not in pers:
        wanted = ", ".join(f"{per!r}: ..." for per in sorted(pers))
        raise InvalidCall(
            "key",
            f"the limits of rule {name!r} are per {', '.join(sorted(pers))}; give key={{{wanted}}}",
        )


def _check_cost_fits(cost: Any, rule_name: str, config: conf.Config) -> None:
    for budget in config.book.budgets[rule_name]:
        wanted = cost_of(cost, budget.limit.unit)
        if wanted > budget.limit.capacity:
            limit = budget.limit
            raise InvalidCall(
                "cost",
                f"{wanted} {limit.unit} could never be admitted:"
                f" {limit.label} allows {limit.capacity}",
            )


TRIES = 100  # to insert calls, or to find those that carry their unique keys
_FOUND = ("pk", "unique_key", "idempotency_key", "created_dt", "due_at_dt")
# In the statement's own text: SQLite knows by it that an index has no others.
_IS_UNFINISHED = f"status IN {states.UNFINISHED}"


def insert(call: tables.CallQueue, *, using: str) -> tables.CallQueue:
    """Insert a prepared row and its key's news; it, or the one that carries its unique key."""
    if call.unique_key is None and not _needs_key_turn(call):
        return _insert_one(call, using)
    if call.unique_key is None:
        with transaction.atomic(using=using, savepoint=False):
            _insert_one(call, using)
            _insert_key_news([call], using)
        return call

    def insert_alone() -> tables.CallQueue:
        with transaction.atomic(using=using):
            return insert_many([call], batch_size=1, using=using)[0]

    return database.again_after_deadlock(using, insert_alone)


def _insert_one(call: tables.CallQueue, using: str) -> tables.CallQueue:
    with transaction.mark_for_rollback_on_error(using=using):
        database.insert_objects(tables.CallQueue, using, [call], batch_size=1)
    return _defer_default_times(call)


def insert_many(
    calls: Sequence[tables.CallQueue], *, batch_size: int, using: str
) -> list[tables.CallQueue]:
    """As `insert`, of many, in an open transaction; in order each, or who has its unique key."""
    plain = [call for call in calls if call.unique_key is None]
    for call in database.insert_objects(tables.CallQueue, using, plain, batch_size=batch_size):
        _defer_default_times(call)
    first: dict[str, tables.CallQueue] = {}
    for call in calls:
        if call.unique_key is not None:
            first.setdefault(call.unique_key, call)
    keys = sorted(first)  # whoever waits for others' keys does so in this order, and in no ring
    carriers: dict[str, tables.CallQueue] = {}
    for at in range(0, len(keys), batch_size):
        carriers |= _insert_or_find([first[key] for key in keys[at : at + batch_size]], using)
    _insert_key_news(calls, using, batch_size)
    return [call if call.unique_key is None else carriers[call.unique_key] for call in calls]


def _needs_key_turn(call: tables.CallQueue) -> bool:
    limits = conf.current().rules[call.rule].limits
    return call.ready and (call.key != "" or any(limit.is_keyed for limit in limits))


def _insert_key_news(calls: Iterable[tables.CallQueue], using: str, batch_size: int = 1) -> None:
    """Give passes news of these calls' keys, in the transaction that inserts them."""
    keys = dict.fromkeys((c.rule, c.priority, c.key) for c in calls if _needs_key_turn(c))
    news = [{"rule": rule, "priority": priority, "key": key} for rule, priority, key in keys]
    for at in range(0, len(news), batch_size):
        database.insert_each(tables.KeyNews, using, news[at : at + batch_size])


def _insert_or_find(calls: Sequence[tables.CallQueue], using: str) -> dict[str, tables.CallQueue]:
    """By unique key, the unfinished call that carries it: one of these, or the one that was there.
    Another sender's uncommitted row is waited for. Where the transaction's snapshot hides it, the
    database's own serialization error says so, or a locking read finds it. All of it is one
    transaction: a call that was inserted here cannot end before it is found.
    """
    carriers: dict[str, tables.CallQueue] = {}
    for tries in range(TRIES):
        left = [call for call in calls if call.unique_key not in carriers]
        if not left:
            return carriers
        database.insert_objects(
            tables.CallQueue, using, left, batch_size=len(left), unless_there=True
        )
        own = {call.idempotency_key: call for call in left}
        keys = [call.unique_key for call in left]
        rows = tables.calls(using).filter(unique_key__in=keys).extra(where=[_IS_UNFINISHED])
        found = rows if tries == 0 else database.locked(rows, wait=True)
        others = dict[int, str]()
        for pk, key, identity, *times in found.values_list(*_FOUND):
            if identity in own:
                call = carriers[key] = own[identity]
                call.pk, (call.created_dt, call.due_at_dt) = pk, times
                call._state.adding, call._state.db = False, using
            else:
                others[pk] = key
        if others:
            # Read in the way they were found: a snapshot would hide them once more. One may have
            # ended since: a call of these that has its key goes before it.
            carriers = {others[row.pk]: row for row in found.filter(pk__in=others)} | carriers
    for call in left:
        # after TRIES something else is in the way: the database says what
        carriers[str(call.unique_key)] = _insert_one(call, using)
    return carriers


def _defer_default_times(call: tables.CallQueue) -> tables.CallQueue:
    """The call; times that the database filled in are deferred: read when they are asked for."""
    for name in ("created_dt", "due_at_dt"):
        if hasattr(call.__dict__.get(name), "resolve_expression"):
            del call.__dict__[name]
    call._read_due = call.__dict__.get("due_at_dt")
    return call
