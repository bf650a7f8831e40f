"""System checks: CALLQUEUE is read and everything wrong in it is reported, with the place and what
to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections, router
from django.utils.module_loading import autodiscover_modules, import_string

from callqueue import conf, tables
from callqueue.broker import confirms_messages, is_set_up
from callqueue.limits.rules import Rule
from callqueue.security.addresses import refusal
from callqueue.texts import page


@register("callqueue")
def check_settings(**_: Any) -> list[CheckMessage]:
    """callqueue.E001: a key or value of CALLQUEUE is wrong."""
    return [
        Error(why, hint=f"See {page('reference/settings.md')}", id="callqueue.E001")
        for why in conf.problems()
    ]


@register("callqueue")
def check_handlers(**_: Any) -> list[CheckMessage]:
    """callqueue.E002: a handler, classify, settle or reconcile cannot be imported."""
    if conf.problems():
        return []
    found: list[CheckMessage] = []
    for place, path in _dotted_paths(conf.current()):
        try:
            target = import_string(path) if isinstance(path, str) else path
        except ImportError as error:
            found.append(Error(f"CALLQUEUE: {place}: {error}", id="callqueue.E002"))
            continue
        if target is not None and not callable(target):
            why = f"{path!r} is not callable"
            found.append(Error(f"CALLQUEUE: {place}: {why}", id="callqueue.E002"))
    return found


def _dotted_paths(config: conf.Config) -> Iterator[tuple[str, Any]]:
    """Where the settings name something to import, and what: a dotted path, or the thing itself."""
    for name, path in config.handlers.items():
        yield f"HANDLERS[{name!r}]", path
    for name, rule in config.rules.items():
        for field in ("classify", "settle", "reconcile"):
            yield f"RULES[{name!r}].{field}", getattr(rule, field)


@register("callqueue")
def check_queues(**_: Any) -> list[CheckMessage]:
    """callqueue.E003: CELERY_TASK_QUEUES lists queues, a rule's is not among them, and Celery
    creates none. Whether a worker listens on one that it creates, the doctor says.
    """
    from celery import current_app

    listed, creates = current_app.conf.task_queues, current_app.conf.task_create_missing_queues
    if conf.problems() or not listed or creates:
        return []
    names = {getattr(queue, "name", queue) for queue in listed}
    return [
        Error(
            f"CALLQUEUE: RULES[{name!r}].queues: {queue!r} is not in CELERY_TASK_QUEUES"
            f"{conf.suggest(queue, names)}",
            id="callqueue.E003",
        )
        for name, rule in conf.current().rules.items()
        for queue in rule.queues or ()
        if queue not in names
    ]


@register("callqueue")
def check_time_limit(**_: Any) -> list[CheckMessage]:
    """callqueue.W002: Celery kills a message's process before its calls have had their time."""
    from celery import current_app

    from callqueue.tasks import make_api_call

    limit = make_api_call.time_limit or current_app.conf.task_time_limit
    if conf.problems() or not limit:
        return []
    config = conf.current()
    name = max(config.rules, key=lambda name: config.lease(config.rules[name]))
    needed = config.lease(config.rules[name])
    if limit >= needed:
        return []
    return [
        Warning(
            f"Celery's hard time limit of {limit:g} s kills a worker in the middle of calls; "
            f"those of RULES[{name!r}] may take {needed:g} s, to be made and recorded",
            hint="Give callqueue.make_api_call a time_limit of its own in "
            f"CELERY_TASK_ANNOTATIONS. See {page('reference/tasks.md')}",
            id="callqueue.W002",
        )
    ]


@register("callqueue")
def check_time_zone(**_: Any) -> list[CheckMessage]:
    """callqueue.E004: USE_TZ is off, and limits are kept by instants that every clock agrees on."""
    if settings.USE_TZ:
        return []
    return [
        Error(
            "callqueue needs USE_TZ = True: without it, Django stores local times, and an hour a "
            "year happens twice",
            hint="Set USE_TZ = True; TIME_ZONE still says in which zone times are shown. "
            f"See {page('reference/settings.md')}",
            id="callqueue.E004",
        )
    ]


@register("callqueue")
def check_application(**_: Any) -> list[CheckMessage]:
    """callqueue.W003: CELERY_... settings are there, and no Celery application that reads them."""
    named = any(name.startswith("CELERY_") for name in dir(settings))
    if is_set_up() or not named:
        return []
    return [
        Warning(
            "the project's Celery application is not loaded: CELERY_... settings are not read, and "
            "messages go to Celery's default broker",
            hint="Import it in the project's __init__.py: `from .celery import app as celery_app`. "
            f"See {page('tutorial/first-calls.md')}",
            id="callqueue.W003",
        )
    ]


@register("callqueue")
def check_rules(**_: Any) -> list[CheckMessage]:
    """callqueue.W004, W005: a rule says what comes to nothing."""
    if conf.problems():
        return []
    found: list[CheckMessage] = []
    first: dict[str, str] = {}
    for name, rule in conf.current().rules.items():
        place = f"CALLQUEUE: RULES[{name!r}]"
        for host in rule.hosts:
            if (earlier := first.setdefault(host.lower(), name)) != name:
                why = f"RULES[{earlier!r}] has it too, and comes first"
                found.append(Warning(f"{place}.hosts: {host!r}: {why}", id="callqueue.W004"))
        for field in ("connect_timeout", "read_timeout"):
            stated = getattr(rule, field)
            if stated > rule.total_timeout and stated != getattr(Rule(), field):
                why = (
                    f"{stated:g} s, and total_timeout ends the call after {rule.total_timeout:g} s"
                )
                found.append(Warning(f"{place}.{field}: {why}", id="callqueue.W005"))
    return found


@register("callqueue")
def check_queued_tasks(**_: Any) -> list[CheckMessage]:
    """callqueue.E007: a QueuedTask is under a rule that is not there: it could not be sent."""
    from celery import current_app

    from callqueue.integrations.queued_task import QueuedTask

    if conf.problems() or not is_set_up():
        return []
    with suppress(ImportError):  # said better by whoever imports it
        autodiscover_modules("tasks")  # not by Celery's loader, which itself runs all checks
    rules = conf.current().rules
    return [
        Error(
            f"the task {name} is under the rule {task.rule!r}, which is not in "
            f"CALLQUEUE['RULES']{conf.suggest(task.rule, rules)}",
            id="callqueue.E007",
        )
        for name, task in sorted(current_app.tasks.items())
        if isinstance(task, QueuedTask) and task.rule is not None and task.rule not in rules
    ]


@register("callqueue")
def check_isolation(**_: Any) -> list[CheckMessage]:
    """callqueue.E006: MariaDB or MySQL under repeatable read."""
    return [
        Error(
            f"DATABASES[{alias!r}]: under the isolation level `repeatable read`, passes count by "
            "what they saw before they waited for each other, and may exceed a limit",
            hint='Set OPTIONS = {"isolation_level": "read committed"}, Django\'s default. '
            f"See {page('how-to/deploy.md')}",
            id="callqueue.E006",
        )
        for alias, options in _with_our_tables("mysql")
        # None leaves it to the server, which has repeatable read unless it is told otherwise
        if (options.get("isolation_level", "read committed") or "repeatable read").lower()
        == "repeatable read"
    ]


@register("callqueue", deploy=True)
def check_deployment(**_: Any) -> list[CheckMessage]:
    """callqueue.W010 to W013: what is for trying it, and not for production."""
    if conf.problems():
        return []
    config, found = conf.current(), list[tuple[str, str, str]]()
    for alias, _options in _with_our_tables("sqlite"):
        why = f"DATABASES[{alias!r}] is SQLite: each pass takes the write lock of all of it"
        found.append(("callqueue.W010", why, "Take PostgreSQL"))
    if "*" in config.allowed_hosts:
        why = "CALLQUEUE: ALLOWED_HOSTS is open: whoever can send a call may call any public host"
        found.append(("callqueue.W011", why, "List the hosts that you call"))
    if refusal("127.0.0.1", config.allowed_networks) is None:
        why = "CALLQUEUE: ALLOWED_NETWORKS opens loopback: calls reach what runs on the workers"
        found.append(("callqueue.W012", why, "Take it out"))
    if not confirms_messages():
        why = "RabbitMQ may drop a message unnoticed, and its call waits for its release lease"
        todo = 'Set CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}'
        found.append(("callqueue.W013", why, todo))
    return [
        Warning(why, hint=f"{hint}. See {page('reference/checks.md')}", id=number)
        for number, why, hint in found
    ]


def _with_our_tables(vendor: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The databases of a vendor that have callqueue's tables, each with its OPTIONS."""
    for alias in connections:
        connection = connections[alias]
        if connection.vendor == vendor and router.allow_migrate_model(alias, tables.CallQueue):
            yield alias, connection.settings_dict.get("OPTIONS") or {}
