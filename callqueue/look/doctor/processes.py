"""What the doctor examines of dispensers and workers: that they run, where they are wanted, and
with the same settings.
"""

from __future__ import annotations

from collections.abc import Iterable

from callqueue import broker, conf, states, tables
from callqueue.database import from_us
from callqueue.ledger import settings
from callqueue.limits.in_force import opinion_of
from callqueue.look import alive, worker_settings
from callqueue.look.attempts import UNBEGUN_S
from callqueue.look.doctor.facts import Facts, Wrong, celery_app, is_eager, queues_of
from callqueue.maintenance import periodic

NEWEST = 1000  # calls whose callbacks are looked at
_WHY_OTHERS = "callbacks and beat's tasks go by Celery's own routes, not by the rules' queues"


def dispenser(facts: Facts) -> str:
    """A dispenser has given a sign of life, and has not ended since."""
    seen, now = facts.look.signs, from_us(facts.look.now)
    if running := [one.name for one in seen if one.is_alive]:
        return f"running: {', '.join(running)}"
    todo = (
        "run `manage.py callqueue_dispenser`, or a worker and beat with callqueue.beat_schedule()"
    )
    if not seen:
        raise Wrong("no dispenser has ever run, or not for a day", todo)
    last, silent = seen[0], f"{alive.silence_s(seen, now):.0f} s"
    if last.has_ended:
        raise Wrong(f"none runs: the last, {last.name}, ended {silent} ago", todo)
    raise Wrong(f"the last sign of life, of {last.name}, is {silent} old", todo)


def agreement(facts: Facts) -> str:
    """All dispensers have the same limits, and so has this process."""
    here = opinion_of(conf.current().book)
    digests = {one.digest for one in facts.look.dispensers if one.digest}
    if found := settings.disagreements(facts.using, digests, here=here):
        raise Wrong(
            "settings differ: " + "; ".join(map(str, found)),
            "restart those whose settings are old; "
            "until they agree, all that any of them says holds",
        )
    return "all dispensers have these limits"


def workers(facts: Facts) -> str:
    """A worker listens on every queue that a rule names; on the default queue, where calls may come
    to it.
    """
    if is_eager():
        return "none is needed: tasks run eagerly"
    answered, served = facts.workers.queues, facts.workers.served
    missing = sorted(_queues_of_rules(facts.using) - served)
    others = sorted(_queues_of_plain_tasks(facts.using) - served - set(missing))
    if missing or others:
        detail = f"no worker listens on {', '.join(missing or others)}"
        detail += "" if missing else ", and messages go there"
        queues = ",".join([*missing, *others])
        raise Wrong(
            detail if answered or not missing else "no worker answered",
            f"run `celery -A <project> worker --queues {queues}`"
            + (f" ({_WHY_OTHERS})" if others else ""),
        )
    listen = "1 worker listens" if len(answered) == 1 else f"{len(answered)} workers listen"
    return f"{listen} on {', '.join(sorted(served))}"


def one_broker(facts: Facts) -> str:
    """Dispensers publish to this process's broker, where these workers are."""
    here = broker.address(celery_app())
    others = [one for one in facts.look.dispensers if one.broker not in ("", here)]
    if here and others:
        said = ", ".join(f"{one.name} publishes to {one.broker}" for one in others)
        raise Wrong(
            f"{said}; here it is {here}",
            "give all processes one CELERY_BROKER_URL, written alike, and restart them",
        )
    return "every dispenser publishes to the broker of this process"


def begun(facts: Facts) -> str:
    """What was released is begun, where a worker listens."""
    default, served = str(celery_app().conf.task_default_queue), facts.workers.served
    left = [one for one in facts.look.stalls if (one.queue or default) in served]
    if left:
        queues = ", ".join(sorted({one.queue or default for one in left}))
        raise Wrong(
            f"{sum(one.calls for one in left)} calls were released more than {UNBEGUN_S} s ago and "
            f"not begun, though a worker listens on {queues}",
            "give workers more slots (--concurrency), if all are busy; else see that dispensers "
            "and workers have one broker",
        )
    return "no call waits for a worker that is there"


def settings_of_workers(facts: Facts) -> str:
    """Workers have the settings of this process."""
    here, asked = worker_settings.digests(), facts.workers.settings
    differs = {
        name: [key for key in here if said.get(key, here[key]) != here[key]]
        for name, said in asked.items()
    }
    if said := [f"{name} has other {', '.join(keys)}" for name, keys in differs.items() if keys]:
        raise Wrong("; ".join(sorted(said)), "restart the workers whose settings are old")
    return f"asked {len(asked)}: as they are here"


def _queues_of_rules(using: str) -> set[str]:
    """The queues of all rules. The built-in default rule counts only where calls wait for it."""
    rules = conf.current().rules
    names: Iterable[str] = rules
    if rules["default"] is conf.DEFAULTS["RULES"]["default"]:
        used = tables.calls(using).filter(rule="default", status__in=states.UNFINISHED).exists()
        names = [name for name in rules if used or name != "default"]
    return queues_of(names)


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
