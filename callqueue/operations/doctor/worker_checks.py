"""What the doctor examines of the workers: that they listen on every queue, and that the ledger
knows what they have at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from callqueue import conf, database, states, tables
from callqueue.database import ClockNow
from callqueue.maintenance import recovery
from callqueue.operations import periodic
from callqueue.operations.doctor.broker_checks import celery_app, is_eager
from callqueue.operations.doctor.check import Check, well, wrong
from callqueue.texts import page

PATIENCE = 2.0  # seconds that the workers have to answer
NEWEST = 1000  # calls whose callbacks are looked at
_WHY_OTHERS = "callbacks and beat's tasks go by Celery's own routes, not by the rules' queues"
AHEAD = timedelta(seconds=2)  # what lies further ahead than clocks differ lies in the future


@dataclass(frozen=True)
class Workers:
    """The workers that answered: the queues each listens on, and the attempts of this project that
    they have at hand.
    """

    queues: dict[str, set[str]]
    attempt_ids: list[int]

    @classmethod
    def asked(cls, using: str) -> Workers:
        """Ask all workers, once. Others that share the broker answer too: what they have at hand is
        none of ours.
        """
        if is_eager():
            return cls({}, [])
        try:
            inspect = celery_app().control.inspect(timeout=PATIENCE)
            queues = inspect.active_queues() or {}
            said = [inspect.active(), inspect.reserved()] if queues else []
        except Exception:
            return cls({}, [])
        listening = {
            worker: {queue["name"] for queue in listed or ()} for worker, listed in queues.items()
        }
        ours = _queues_of(conf.current().rules)
        at_hand = [
            task for by_worker in said for tasks in (by_worker or {}).values() for task in tasks
        ]
        return cls(listening, [pk for task in at_hand for pk in _attempts_of(task, using, ours)])


def check_workers(using: str, workers: Workers) -> Check:
    """A worker listens on every queue that a rule names; on the default queue, where calls may come
    to it.
    """
    if is_eager():
        return well("workers", "none is needed: tasks run eagerly")
    served = set().union(*workers.queues.values())
    missing = sorted(_queues_wanted(using) - served)
    others = sorted(_queues_of_plain_tasks(using) - served - set(missing))
    if missing:
        detail = (
            f"no worker listens on {', '.join(missing)}" if workers.queues else "no worker answered"
        )
        return wrong(
            "workers",
            detail,
            f"run `celery -A <project> worker --queues {','.join([*missing, *others])}`"
            + (f" ({_WHY_OTHERS})" if others else ""),
        )
    if others:
        return wrong(
            "workers",
            f"no worker listens on {', '.join(others)}, and messages go there",
            f"run `celery -A <project> worker --queues {','.join(others)}` ({_WHY_OTHERS})",
        )
    return well("workers", f"{len(workers.queues)} workers listen on {', '.join(sorted(served))}")


def check_ledger(using: str, workers: Workers) -> Check:
    """The ledger is not older than the world: nothing in it lies ahead, and it knows what workers
    have at hand.

    A database that was put back to an earlier state (a backup, a lagging copy) does not know the
    latest calls, and would make their slots, and some of the calls, a second time.
    """
    signs = [*_signs_of_the_future(using), *_signs_of_the_past(using, workers)]
    if signs:
        todo = (
            "run `manage.py callqueue_pause RULE --for` one full window for every rule "
            f"before anything goes out; see {page('how-to/restore-a-backup.md')}"
        )
        return wrong("ledger", "; ".join(signs), todo)
    return well(
        "ledger", "nothing in it is in the future, and it knows every attempt of the workers"
    )


def _signs_of_the_future(using: str) -> Iterator[str]:
    """What the ledger says has happened later than now."""
    ahead = database.clock(using) + AHEAD
    newest = tables.attempts(using).order_by("-pk").values_list("released_at", flat=True)[:100]
    if any(released_at > ahead for released_at in newest):
        yield "attempts were released in the future: the database's clock has been set back"
    if tables.dispensers(using).filter(seen_at__gt=ahead).exists():
        yield "dispensers were seen in the future: the database's clock has been set back"


def _signs_of_the_past(using: str, workers: Workers) -> Iterator[str]:
    """What has happened, and the ledger knows no more."""
    wanted = set(workers.attempt_ids[:1000])
    known = tables.attempts(using).filter(pk__in=wanted).values_list("pk", flat=True)
    if unknown := wanted - set(known):
        yield (
            f"workers are making {len(unknown)} attempts that the ledger does not know: "
            "it was put back in time"
        )
    lately = ClockNow() - timedelta(hours=1)
    if held := tables.holds(using).filter(reason=recovery.WENT_BACK, until__gt=lately).count():
        yield (
            f"a dispenser found its last sign of life gone and held {held} rules: "
            "the ledger was put back in time"
        )


def _queues_wanted(using: str) -> set[str]:
    """The queues of all rules. The built-in default rule counts only where calls wait for it."""
    rules = conf.current().rules
    names: Iterable[str] = rules
    if rules["default"] is conf.DEFAULTS["RULES"]["default"]:
        used = tables.calls(using).filter(rule="default", status__in=states.UNFINISHED).exists()
        names = [name for name in rules if used or name != "default"]
    return _queues_of(names)


def _queues_of_plain_tasks(using: str) -> set[str]:
    """The queues of what is sent beside calls: callbacks of the newest calls, and beat's chores."""
    newest = tables.calls(using).order_by("-pk").values_list("callback", flat=True)[:NEWEST]
    wanted = {(str(name), "") for name in newest if name} | set(periodic.scheduled(celery_app()))
    return {_queue_of_task(name, queue) for name, queue in wanted}


def _queue_of_task(name: str, queue: str) -> str:
    """Where a message of the task goes: to this queue, or where the task or CELERY_TASK_ROUTES
    say.
    """
    app = celery_app()
    queue = queue or getattr(app.tasks.get(name), "queue", "") or ""
    found = app.amqp.router.route({"queue": queue} if queue else {}, name)["queue"]
    return str(getattr(found, "name", found))


def _queues_of(names: Iterable[str]) -> set[str]:
    """The queues of these rules, by the names that the broker has for them."""
    rules, default = conf.current().rules, str(celery_app().conf.task_default_queue)
    return {queue or default for name in names for queue in rules[name].queue_names}


def _attempts_of(task: Any, using: str, queues: set[str]) -> list[int]:
    """The attempts that a task at a worker is to make, where they are of this database and came by
    one of these queues.
    """
    if task.get("name") != "callqueue.make_api_call" or not task.get("args"):
        return []
    if (
        task["delivery_info"]["routing_key"] not in queues
        or (task.get("kwargs") or {}).get("using", "default") != using
    ):
        return []
    ids = task["args"][0]
    return [pk for pk in (ids if isinstance(ids, list) else [ids]) if isinstance(pk, int)]
