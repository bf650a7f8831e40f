"""Hands messages to the broker: each at once or not at all, never for longer than a few seconds.
Never retries. Only some transports know of a time within which to answer, so each message is sent
in a thread that can be left behind. A process that makes its calls itself asks no broker:
`in_this_process`, what would be sent is run.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from django.utils.module_loading import autodiscover_modules

from callqueue import aside, database, events
from callqueue.texts import in_one_line

# the tasks that are sent beside: they run the project's receivers, callbacks and hooks
ANNOUNCE, RECOVER = "callqueue.announce", "callqueue.recover_lost_calls"
# seconds that the broker has to take a message and, where it confirms, to confirm it
PATIENCE = 5.0
# and that an `apply_async` of the project's own may take: it has work of its own to do
PATIENCE_WITH_OWN = 20.0
# messages that wait for a broker at most: the first of them is dropped then
MOST_UNSENT = 1000
# seconds until the broker drops a message that was sent beside, by its own clock; and until a
# worker does, whose clock may be ten minutes off, for brokers that drop nothing
BESIDE_LASTS, BESIDE_EXPIRES = 60.0, 3600.0
LEAVING = 1.0  # seconds for which a process that ends waits for its messages
# threads that send beside at once; and that run it where no broker is asked
SENDERS, RUNNERS = 1, 4


def send(
    task: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    queue: str = "",
    lasts: float | None = None,
    expires: float | None = None,
) -> None:
    """Send a task's message, to `queue` or where the task and CELERY_TASK_ROUTES say. After `lasts`
    seconds a broker that knows message TTLs drops it, by its own clock; after `expires` a worker
    does, by its own. Raises what the broker said, or LeftBehind where it said nothing.
    """
    given = {"queue": queue or None, "expiration": lasts, "expires": expires}
    options = {name: value for name, value in given.items() if value is not None}
    _within_patience(
        task.app,
        lambda **how: task.apply_async(args, kwargs or {}, ignore_result=True, **options, **how),
    )


def database_kwargs(using: str) -> dict[str, Any]:
    """The keyword with which a task's message names its database, where that is not the default."""
    return {} if using == "default" else {"using": using}


def send_beside(name: str, args: tuple[Any, ...], *, queue: str = "") -> None:
    """Send a task in a thread, or run it `in_this_process`; if eager, here. Refused: dropped."""
    from celery import current_app

    if current_app.conf.task_always_eager and not is_bypassed():
        current_app.tasks[name].apply_async(args)
        return
    with _sending:
        _unsent.append((name, args, queue))
        most = RUNNERS if is_bypassed() else SENDERS
        idle = [i for i in range(most) if i not in _senders or not _senders[i].is_under_way]
        if idle:
            number = idle[0]
            with suppress(RuntimeError, MemoryError):  # no more threads: the next one tries again
                _senders[number] = aside.Errand("messages", lambda: _send_unsent(number))


def finish_sending(seconds: float = LEAVING) -> None:
    """Wait a moment for what is sent beside: a process that ends takes its threads along."""
    end = time.monotonic() + seconds
    for sender in list(_senders.values()):
        if sender.is_under_way:
            sender.done.wait(max(0.0, end - time.monotonic()))


def _send_unsent(number: int) -> None:
    """Send what is to be sent beside, until nothing is; `number`: which sender this one is."""
    while True:
        with _sending:
            if not _unsent:
                _senders.pop(number, None)
                return
            message = _unsent.popleft()
        _send_or_drop(*message)


def _send_or_drop(name: str, args: tuple[Any, ...], queue: str) -> None:
    from celery import current_app

    try:
        task = current_app.tasks[name]
        if is_bypassed():
            task(*args)
        else:
            send(task, args, queue=queue, lasts=BESIDE_LASTS, expires=BESIDE_EXPIRES)
    except Exception as error:
        if is_bypassed():  # what it was to announce is still owed
            events.emit("listener_failed", receiver=name, error=type(error).__name__)
            return
        why = why_away(current_app, error)
        events.emit("broker_away", during=name.rpartition(".")[2], error=why)


@contextmanager
def in_this_process() -> Iterator[None]:
    """Within, no broker is asked: what would be sent runs here, in threads."""
    _here.append(True)
    try:
        yield
    finally:
        _here.pop()


def is_bypassed() -> bool:
    return bool(_here)


def is_celery_set_up() -> bool:
    """Whether the project's Celery application is the current one; else nothing reads CELERY_..."""
    from celery import current_app

    return bool(current_app.main != "default" or current_app.set_as_current)


def why_away(app: Any, error: BaseException) -> str:
    """What the broker said, or did not say, and its address: no password is in it."""
    said = in_one_line(error)
    with suppress(Exception):
        return f"{said} ({address(app)})"
    return said


def confirms_messages() -> bool:
    """Whether the broker says of each message that it has it; only RabbitMQ has to be asked to."""
    from celery import current_app

    options = current_app.conf.broker_transport_options or {}
    is_amqp = transport_name(current_app) in ("amqp", "pyamqp", "amqps")
    return bool(current_app.conf.task_always_eager or not is_amqp or options.get("confirm_publish"))


def transport_name(app: Any) -> str:
    try:
        named = str(app.connection_for_write().transport_cls)
    except ImportError:  # its package is not installed
        named = str(app.conf.broker_write_url).partition(":")[0]
    return named.partition("+")[0].lower()


def address(app: Any) -> str:
    """Where the broker is, without password. Empty where none is used or installed."""
    if app.conf.task_always_eager:
        return ""
    try:
        connection = app.connection_for_write()
        return ";".join(map(_without_credentials, connection.alt or [connection.as_uri()]))
    except (ImportError, ValueError):
        return ""


def _without_credentials(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if rest else scheme


def send_by_name(app: Any, name: str, args: tuple[Any, ...]) -> None:
    """Send the message of the task of this name, whether this process knows the task or not.
    A task with an `apply_async` of its own is left to it, and may take somewhat longer. Such a task
    in a transaction, of which no other thread sees anything, and an eager one have no time limit.
    """
    task = registered_task(app, name) if app.conf.task_always_eager else app.tasks.get(name)
    if task is None:
        _within_patience(app, lambda **how: app.send_task(name, args, **how))
    elif app.conf.task_always_eager or (sends_itself(app, name) and database.in_any_transaction()):
        task.apply_async(args)
    elif sends_itself(app, name):
        aside.within(PATIENCE_WITH_OWN, name, lambda: task.apply_async(args))
    else:
        _within_patience(app, lambda **how: task.apply_async(args, **how))


def queue_of(app: Any, name: str, queue: str = "") -> str:
    """The queue to which Celery's routes send the task of this name, if it is sent to `queue`."""
    queue = queue or getattr(app.tasks.get(name), "queue", "") or ""
    found = app.amqp.router.route({"queue": queue} if queue else {}, name)["queue"]
    return str(getattr(found, "name", found))


def registered_task(app: Any, name: str) -> Any:
    """The task of this name in this process, whose tasks are imported first; None where none is."""
    if name not in app.tasks:
        import_tasks(app)
    return app.tasks.get(name)


@cache
def import_tasks(app: Any) -> None:
    """Import what the application's workers do; without one, the apps' `tasks` modules."""
    app.loader.import_default_modules()
    if not is_celery_set_up():
        autodiscover_modules("tasks")


def run_by_name(app: Any, name: str, args: tuple[Any, ...], *, seconds: float) -> None:
    """Run the task of this name here, by Celery's tracer; a QueuedTask is queued. LookupError where
    the project has none; TooMany while many hang. What takes longer is left to itself. That, and
    what exits, count as done: a message of a broker's is taken, too, before its task has run.
    """
    task = registered_task(app, name)
    if task is None:
        raise LookupError(f"there is no task {name!r} in this process")
    try:
        if hasattr(task, "is_queued"):
            aside.within(PATIENCE_WITH_OWN, name, lambda: task.apply_async(args))
        else:
            aside.within(seconds, name, lambda: task.apply(args, throw=False))
    except aside.TooMany:
        raise
    except (aside.LeftBehind, SystemExit) as error:
        events.emit("listener_failed", receiver=name, error=in_one_line(error))


def sends_itself(app: Any, name: str) -> bool:
    """Whether what sending this task raises is the task's own, and not the broker's."""
    from celery import Task

    task = app.tasks.get(name)
    return task is not None and (
        app.conf.task_always_eager or type(task).apply_async is not Task.apply_async
    )


def _within_patience(app: Any, send: Callable[..., Any]) -> None:
    """Have `send` send by a producer of the pool, in a thread that is left behind if it hangs."""
    used: list[Any] = []
    try:
        aside.within(PATIENCE, "broker", lambda: _send_by_pool(app, send, used))
    except aside.LeftBehind:
        if used:  # so that its thread hears of it, and ends
            aside.Errand("goodbye", lambda: _drop_connection(used[0]))
        raise


def _send_by_pool(app: Any, send: Callable[..., Any], used: list[Any]) -> None:
    """`send` by a producer of the pool, which is put into `used`; a failed one is disconnected."""
    with app.amqp.producer_pool.acquire(block=True, timeout=PATIENCE) as producer:
        used.append(producer)
        try:
            send(producer=producer, retry=False, timeout=PATIENCE)
        except Exception:
            _drop_connection(producer)
            raise


def _drop_connection(producer: Any) -> None:
    """Close a producer's connection; a polite close of a blocked one would wait for ever."""
    producer.connection.collect(socket_timeout=0.1)


_sending = threading.Lock()
_unsent: deque[tuple[str, tuple[Any, ...], str]] = deque(maxlen=MOST_UNSENT)
_senders: dict[int, aside.Errand] = {}  # those that are at it
_here: list[bool] = []  # not empty where no broker is asked
atexit.register(finish_sending)
