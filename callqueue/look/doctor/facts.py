"""What several of the doctor's examinations go by: read once, and only where one of them asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from callqueue import conf
from callqueue.look import Look, look, worker_settings

PATIENCE = 2.0  # seconds that the workers have to answer


class Wrong(Exception):
    """What an examination found, and what to do about it."""

    def __init__(self, detail: str, todo: str) -> None:
        super().__init__(detail)
        self.detail, self.todo = detail, todo


@dataclass(frozen=True)
class Workers:
    """The workers that answered: the queues each listens on, the attempts of this project that they
    have at hand, and digests of their settings.
    """

    queues: dict[str, set[str]] = field(default_factory=dict)
    attempt_ids: list[int] = field(default_factory=list)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def served(self) -> set[str]:
        """The queues that any of them listens on."""
        return set().union(*self.queues.values())


class Facts:
    """How callqueue stands in a database, and what the workers say."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.asks_workers = True

    @cached_property
    def look(self) -> Look:
        return look(self.using)

    @cached_property
    def workers(self) -> Workers:
        """Asks all workers, once. Others that share the broker answer too: what they have at hand
        is none of ours.
        """
        if not self.asks_workers or is_eager():
            return Workers()
        try:
            inspect = celery_app().control.inspect(timeout=PATIENCE)
            queues = inspect.active_queues() or {}
            said = [inspect.active(), inspect.reserved()] if queues else []
            settings = inspect._request(worker_settings.COMMAND) if queues else None
        except Exception:
            return Workers()
        listening = {
            worker: {queue["name"] for queue in listed or ()} for worker, listed in queues.items()
        }
        ours = queues_of(conf.current().rules)
        at_hand = [task for one in said for tasks in (one or {}).values() for task in tasks]
        return Workers(
            listening,
            [pk for task in at_hand for pk in _attempts_of(task, self.using, ours)],
            {w: given for w, given in (settings or {}).items() if listening.get(w, set()) & ours},
        )


def celery_app() -> Any:
    """Celery's application. Imported when it is asked for: Django may be set up before Celery."""
    from celery import current_app

    return current_app


def is_eager() -> bool:
    """Whether tasks run in the process that sends them, without broker and workers."""
    return bool(celery_app().conf.task_always_eager)


def queues_of(names: Iterable[str]) -> set[str]:
    """The queues of these rules, by the names that the broker has for them."""
    rules, default = conf.current().rules, str(celery_app().conf.task_default_queue)
    return {queue or default for name in names for queue in rules[name].queue_names}


def _attempts_of(task: Any, using: str, queues: set[str]) -> list[int]:
    """The attempts that a task at a worker is to make, where they are of this database and came by
    one of these queues.
    """
    if task.get("name") != "callqueue.make_api_call" or not task.get("args"):
        return []
    if task["delivery_info"]["routing_key"] not in queues:
        return []
    if (task.get("kwargs") or {}).get("using", "default") != using:
        return []
    ids = task["args"][0]
    return [pk for pk in (ids if isinstance(ids, list) else [ids]) if isinstance(pk, int)]
