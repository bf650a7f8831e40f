"""Hands messages to the broker: each at once or not at all, and never for longer than a few
seconds.

In: a Celery task and its arguments. Raises whatever the broker said, or that it said nothing. Never
retries, and never waits for a connection that blocks to say goodbye.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from callqueue.texts import in_one_line

# seconds that the broker has to take a message and, where it confirms, to confirm it
PATIENCE = 5.0


def send(
    task: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    queue: str = "",
    lasts: float | None = None,
) -> None:
    """Send a task's message, to `queue` or where the task and CELERY_TASK_ROUTES say.

    After `lasts` seconds a broker that knows message TTLs drops it, by its own clock: `expires`
    would be judged by the worker's.
    """
    options: dict[str, Any] = {"queue": queue} if queue else {}
    if lasts is not None:
        options["expiration"] = lasts
    _within_patience(
        task.app,
        lambda **how: task.apply_async(args, kwargs or {}, ignore_result=True, **options, **how),
    )


def is_set_up() -> bool:
    """Whether the project has made its Celery application the current one. Without one, Celery
    makes do with its defaults, and CELERY_... settings mean nothing.
    """
    from celery import current_app

    return bool(current_app.main != "default" or current_app.set_as_current)


def why_away(app: Any, error: BaseException) -> str:
    """What the broker said, or did not say, and its address: no password is in it."""
    said = in_one_line(error)
    with suppress(Exception):
        return f"{said} ({app.connection_for_write().as_uri()})"
    return said


def send_by_name(app: Any, name: str, args: tuple[Any, ...]) -> None:
    """Send the message of the task of this name, whether this process knows the task or not.

    A task with an `apply_async` of its own, and any while tasks run eagerly, is left to it, and may
    take its time.
    """
    task = registered(app, name) if app.conf.task_always_eager else app.tasks.get(name)
    if task is None:
        _within_patience(app, lambda **how: app.send_task(name, args, **how))
    elif is_its_own(app, name):
        task.apply_async(args)
    else:
        _within_patience(app, lambda **how: task.apply_async(args, **how))


def registered(app: Any, name: str) -> Any:
    """The task of this name, to be run in this process; None where the project has none. The
    project's tasks are imported first where no worker has done so.
    """
    if name not in app.tasks:
        _import_tasks(app)
    return app.tasks.get(name)


@cache
def _import_tasks(app: Any) -> None:
    """Import what the application imports and discovers, as its workers do when they start."""
    app.loader.import_default_modules()


def is_its_own(app: Any, name: str) -> bool:
    """Whether what sending this task raises is the task's own, and not the broker's."""
    from celery import Task

    task = app.tasks.get(name)
    return task is not None and (
        app.conf.task_always_eager or type(task).apply_async is not Task.apply_async
    )


def _within_patience(app: Any, send: Callable[..., Any]) -> None:
    with app.amqp.producer_pool.acquire(block=True, timeout=PATIENCE) as producer:
        try:
            send(producer=producer, retry=False, timeout=PATIENCE)
        except Exception:
            # a polite close of a blocked connection would wait for ever
            producer.connection.collect(socket_timeout=0.1)
            raise
