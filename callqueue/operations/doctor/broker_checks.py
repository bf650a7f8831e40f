"""What the doctor examines of the broker: that it answers, and that it neither loses a message nor
hands it out twice.
"""

from __future__ import annotations

import json
from typing import Any

from callqueue import conf
from callqueue.operations.doctor.check import Check, well, wrong
from callqueue.texts import in_one_line

PATIENCE = 3.0  # seconds that the broker has to answer
AMQP = ("amqp", "pyamqp", "amqps")
NO_TRANSIENT_QUEUES = (4, 3)  # the version of RabbitMQ from which on it refuses them
REDIS = ("redis", "rediss", "sentinel")
VISIBILITY = 3600.0  # Celery's default for Redis, in seconds


def check_broker() -> Check:
    """The broker answers."""
    if missing := _missing_package():
        extra = "redis" if _transport() in REDIS else missing
        name = f'"django-callqueue[{extra}]"' if extra == "redis" else extra
        return wrong("broker", f"the package {missing} is not installed", f"pip install {name}")
    if refusal := broker_refusal():
        return wrong("broker", refusal, "start the broker, or correct CELERY_BROKER_URL")
    return well(
        "broker",
        "no broker is used: tasks run eagerly" if is_eager() else f"{_broker_name()} answers",
    )


def check_confirms() -> Check:
    """The broker confirms what it was given: an unconfirmed message may be dropped, and its call
    waits for its lease.
    """
    options = celery_app().conf.broker_transport_options or {}
    if is_eager() or _transport() not in AMQP:
        return well("confirmed messages", "this kind of broker confirms, or needs not to")
    if options.get("confirm_publish"):
        return well("confirmed messages", "confirm_publish is set")
    lease = conf.DEFAULTS["LEASE"]["RELEASE"] if conf.problems() else conf.current().release_lease
    return wrong(
        "confirmed messages",
        "the broker may drop a message unnoticed; "
        f"its call then waits {lease:g} s for its lease to end",
        'set CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}',
    )


def check_visibility() -> Check:
    """Redis does not hand a message out again while its attempts may still be at work."""
    if is_eager() or _transport() not in REDIS:
        return well("visibility timeout", "this kind of broker has none")
    options = celery_app().conf.broker_transport_options or {}
    timeout = float(options.get("visibility_timeout", VISIBILITY))
    config = conf.current()
    slowest = max(rule.total_timeout for rule in config.rules.values())
    longest = config.release_lease + config.grace + slowest
    if timeout < longest:
        enough = {"visibility_timeout": round(longest) + 60}
        return wrong(
            "visibility timeout",
            f"Redis hands messages out again after {timeout:g} s, "
            f"and an attempt may take {longest:g} s",
            f"set CELERY_BROKER_TRANSPORT_OPTIONS = {json.dumps(enough)}",
        )
    return well(
        "visibility timeout", f"{timeout:g} s, and no attempt takes longer than {longest:g} s"
    )


def check_queues_of_control() -> Check:
    """RabbitMQ 4.3 refuses queues that are neither durable nor exclusive, as older Celery makes
    them for its remote control: workers end at their start.
    """
    name = "remote control"
    if is_eager() or _transport() not in AMQP:
        return well(name, "this kind of broker takes every queue")
    version = _server_version()
    if version < NO_TRANSIENT_QUEUES:
        return well(name, f"RabbitMQ {'.'.join(map(str, version))} takes every queue")
    settings = celery_app().conf
    refused = [
        kind
        for kind in ("control_queue", "event_queue")
        if not (settings.get(f"{kind}_exclusive") or settings.get(f"{kind}_durable"))
    ]
    if refused:
        return wrong(
            name,
            "RabbitMQ 4.3 refuses the queues of Celery's remote control: neither durable nor "
            "exclusive",
            'pip install --upgrade "celery>=5.7" "kombu>=5.7", or set '
            "CELERY_CONTROL_QUEUE_DURABLE and CELERY_EVENT_QUEUE_DURABLE to True",
        )
    return well(name, "Celery's queues for it are exclusive or durable, as RabbitMQ 4.3 wants them")


def _server_version() -> tuple[int, ...]:
    """RabbitMQ's version; empty where it does not say."""
    with celery_app().connection_for_write(connect_timeout=PATIENCE) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=PATIENCE)
        said = str((connection.connection.server_properties or {}).get("version", ""))
    return tuple(int(part) for part in said.split(".")[:2] if part.isdigit())


def broker_refusal() -> str:
    """Why the broker cannot be used; empty where it answers, or none is needed."""
    if is_eager():
        return ""
    try:
        with celery_app().connection_for_write(connect_timeout=PATIENCE) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=PATIENCE)
    except Exception as error:
        return in_one_line(error)
    return ""


def _missing_package() -> str:
    """The package that the broker's transport needs and does not find."""
    try:
        celery_app().connection_for_write().transport  # noqa: B018
    except ModuleNotFoundError as error:
        return str(error.name or error)
    except ImportError as error:
        return "redis" if "redis" in str(error) else in_one_line(error)
    except Exception:
        return ""
    return ""


def celery_app() -> Any:
    """Celery's application. Imported when it is asked for: Django may be set up before Celery."""
    from celery import current_app

    return current_app


def is_eager() -> bool:
    """Whether tasks run in the process that sends them, without broker and workers."""
    return bool(celery_app().conf.task_always_eager)


def _transport() -> str:
    """The scheme of the broker's URL, without what comes after "+"."""
    try:
        named = str(celery_app().connection_for_write().transport_cls)
    except ImportError:  # of its package: see _missing_package
        named = str(celery_app().conf.broker_write_url).partition(":")[0]
    return named.partition("+")[0].lower()


def _broker_name() -> str:
    return str(celery_app().connection_for_write().as_uri())
