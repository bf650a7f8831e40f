"""System checks: everything wrong in CALLQUEUE is reported, with the place and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections, router
from django.utils.module_loading import autodiscover_modules, import_string

from callqueue import conf, database, tables
from callqueue.broker import confirms_messages, is_celery_set_up
from callqueue.limits.rules import Rule
from callqueue.security.addresses import address_refusal
from callqueue.texts import documentation_page

Found = Iterator[CheckMessage]


@register("callqueue")
def check(**_: Any) -> list[CheckMessage]:
    wrong = conf.problems()
    hint = f"See {documentation_page('reference/settings.md')}"
    found: list[CheckMessage] = [Error(why, hint=hint, id="callqueue.E001") for why in wrong]
    for looks in (_check_time_zone, _check_application, _check_isolation, _check_autocommit):
        found += looks()
    of_config = _check_handlers, _check_queues, _check_time_limit, _check_rules, _check_queued_tasks
    for looks_at in () if wrong else of_config:
        found += looks_at(conf.current())
    return found


@register("callqueue", deploy=True)
def check_deployment(**_: Any) -> list[CheckMessage]:
    return [] if conf.problems() else list(_deployment_warnings(conf.current()))


def _check_handlers(config: conf.Config) -> Found:
    """callqueue.E002: a handler, classify, settle or reconcile cannot be imported."""
    named: dict[str, Any] = {f"HANDLERS[{name!r}]": path for name, path in config.handlers.items()}
    for name, rule in config.rules.items():
        for field in ("classify", "settle", "reconcile"):
            named[f"RULES[{name!r}].{field}"] = getattr(rule, field)
    for place, path in named.items():
        why = ""
        try:
            target = import_string(path) if isinstance(path, str) else path
            if target is not None and not callable(target):
                why = f"{path!r} is not callable"
        except ImportError as error:
            why = str(error)
        if why:
            yield Error(f"CALLQUEUE: {place}: {why}", id="callqueue.E002")


def _check_queues(config: conf.Config) -> Found:
    """callqueue.E003: a rule's queue is not in CELERY_TASK_QUEUES, and Celery creates none."""
    from celery import current_app

    listed, creates = current_app.conf.task_queues, current_app.conf.task_create_missing_queues
    if not listed or creates:
        return
    names = {getattr(queue, "name", queue) for queue in listed}
    for name, rule in config.rules.items():
        for queue in rule.queues or ():
            if queue not in names:
                why = f"{queue!r} is not in CELERY_TASK_QUEUES{conf.suggest(queue, names)}"
                yield Error(f"CALLQUEUE: RULES[{name!r}].queues: {why}", id="callqueue.E003")


def _check_time_limit(config: conf.Config) -> Found:
    """callqueue.W002: Celery kills a message's process before its calls have had their time."""
    from celery import current_app

    from callqueue.tasks import make_api_call

    limit = make_api_call.time_limit or current_app.conf.task_time_limit
    name = max(config.rules, key=lambda name: config.begun_lease(config.rules[name]))
    needed = config.begun_lease(config.rules[name])
    if limit and limit < needed:
        yield Warning(
            f"Celery's hard time limit of {limit:g} s kills a worker in the middle of calls; "
            f"those of RULES[{name!r}] may take {needed:g} s, to be made and recorded",
            hint="Give callqueue.make_api_call a time_limit of its own in "
            f"CELERY_TASK_ANNOTATIONS. See {documentation_page('reference/tasks.md')}",
            id="callqueue.W002",
        )


def _check_time_zone() -> Found:
    """callqueue.E004: USE_TZ is off, and limits are kept by instants that every clock agrees on."""
    if not settings.USE_TZ:
        yield Error(
            "callqueue needs USE_TZ = True: without it, Django stores local times, and an hour a "
            "year happens twice",
            hint="Set USE_TZ = True; TIME_ZONE still says in which zone times are shown. "
            f"See {documentation_page('reference/settings.md')}",
            id="callqueue.E004",
        )


def _check_application() -> Found:
    """callqueue.W003: CELERY_... settings are there, and no Celery application that reads them."""
    if not is_celery_set_up() and any(name.startswith("CELERY_") for name in dir(settings)):
        yield Warning(
            "the project's Celery application is not loaded: CELERY_... settings are not read, and "
            "messages go to Celery's default broker",
            hint="Import it in the project's __init__.py: `from .celery import app as celery_app`. "
            f"See {documentation_page('tutorial/first-calls.md')}",
            id="callqueue.W003",
        )


def _check_rules(config: conf.Config) -> Found:
    """callqueue.W004, W005: a host or a timeout of a rule has no effect."""
    first: dict[str, str] = {}
    for name, rule in config.rules.items():
        place = f"CALLQUEUE: RULES[{name!r}]"
        for host in rule.hosts:
            if (earlier := first.setdefault(host.lower(), name)) != name:
                why = f"RULES[{earlier!r}] has it too, and comes first"
                yield Warning(f"{place}.hosts: {host!r}: {why}", id="callqueue.W004")
        for field in ("connect_timeout", "read_timeout"):
            stated, total = getattr(rule, field), rule.total_timeout
            if stated > total and stated != getattr(Rule(), field):
                why = f"{stated:g} s, and total_timeout ends the call after {total:g} s"
                yield Warning(f"{place}.{field}: {why}", id="callqueue.W005")


def _check_queued_tasks(config: conf.Config) -> Found:
    """callqueue.E007: a QueuedTask is under a rule that is not there. Imports every tasks.py."""
    from celery import current_app

    from callqueue.integrations.queued_task import QueuedTask

    if not is_celery_set_up():
        return
    with suppress(ImportError):  # said better by whoever imports it
        autodiscover_modules("tasks")  # not by Celery's loader, which itself runs all checks
    for name, task in sorted(current_app.tasks.items()):
        rule = task.rule if isinstance(task, QueuedTask) else None
        if rule is not None and rule not in config.rules:
            why = f"is under the rule {rule!r}, which is not in CALLQUEUE['RULES']"
            suggested = conf.suggest(rule, config.rules)
            yield Error(f"the task {name} {why}{suggested}", id="callqueue.E007")


def _check_isolation() -> Found:
    """callqueue.E006: MariaDB or MySQL under repeatable read."""
    for alias in filter(database.is_mysql, _databases_with_our_tables()):
        options = connections[alias].settings_dict.get("OPTIONS") or {}
        # None leaves it to the server, which has repeatable read unless it is told otherwise
        level = options.get("isolation_level", "read committed") or "repeatable read"
        if level.lower() == "repeatable read":
            yield Error(
                f"DATABASES[{alias!r}]: under the isolation level `repeatable read`, passes count "
                "by what they saw before they waited for each other, and may exceed a limit",
                hint='Set OPTIONS = {"isolation_level": "read committed"}, Django\'s default. '
                f"See {documentation_page('how-to/deploy.md')}",
                id="callqueue.E006",
            )


def _check_autocommit() -> Found:
    """callqueue.E008: Django commits nothing of its own accord."""
    for alias in _databases_with_our_tables():
        if not connections[alias].settings_dict["AUTOCOMMIT"]:
            why = "with AUTOCOMMIT off, what callqueue writes is not committed"
            hint = "Leave AUTOCOMMIT out, and use transaction.atomic()"
            yield Error(f"DATABASES[{alias!r}]: {why}", hint=hint, id="callqueue.E008")


def _deployment_warnings(config: conf.Config) -> Found:
    """callqueue.W010 to W013: SQLite, open hosts, open networks, unconfirmed messages."""
    see = f"See {documentation_page('reference/checks.md')}"
    for alias in filter(database.is_sqlite, _databases_with_our_tables()):
        why = f"DATABASES[{alias!r}] is SQLite: each pass takes the write lock of all of it"
        yield Warning(why, hint=f"Take PostgreSQL. {see}", id="callqueue.W010")
    if "*" in config.allowed_hosts:
        why = "CALLQUEUE: ALLOWED_HOSTS is open: whoever can send a call may call any public host"
        yield Warning(why, hint=f"List the hosts that you call. {see}", id="callqueue.W011")
    if address_refusal("127.0.0.1", config.allowed_networks) is None:
        why = "CALLQUEUE: ALLOWED_NETWORKS opens loopback: calls reach what runs on the workers"
        yield Warning(why, hint=f"Take it out. {see}", id="callqueue.W012")
    if not confirms_messages():
        why = "RabbitMQ may drop a message unnoticed, and its call waits for its release lease"
        todo = 'Set CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}'
        yield Warning(why, hint=f"{todo}. {see}", id="callqueue.W013")


def _databases_with_our_tables() -> Iterator[str]:
    return (alias for alias in connections if router.allow_migrate_model(alias, tables.CallQueue))
