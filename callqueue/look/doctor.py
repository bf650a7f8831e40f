"""Doctor: examines what callqueue needs, from settings to workers, and says what to do. It changes
nothing. What cannot be found out in a few seconds, or fails to be examined, counts as wrong.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from django.apps import apps
from django.core.checks import run_checks
from django.db import DatabaseError, InterfaceError, connections

from callqueue import broker as the_broker
from callqueue import conf, database, states, tables
from callqueue.database import from_us
from callqueue.ledger import ledger_time, ready_calls
from callqueue.ledger import settings as shared_settings
from callqueue.ledger.ledger_time import LedgerNow
from callqueue.limits.in_force import opinion_of
from callqueue.look import Look, alive, look, notes
from callqueue.look.notes import BAD
from callqueue.maintenance import cleanup, periodic
from callqueue.texts import documentation_page, in_one_line

ASKED_S = 2.0  # for which answers of workers are waited for
BROKER_ANSWERS_S = 3.0
REDIS = ("redis", "rediss", "sentinel")
VISIBILITY_S = 3600.0  # Celery's default for Redis
SKEW_S = 2.0  # that two clocks may differ; what lies further ahead lies in the future
OVERDUE = timedelta(days=2)  # that calls may be past their retention, where cleanup runs daily
NEWEST = 1000  # calls whose callbacks are looked at
WRONG = ("callqueue.W003", "callqueue.W013")  # system checks that warn, and stop or lose calls
DISPENSE = (
    "run `manage.py callqueue_run`; or `celery worker` on a rule's queues; or "
    "`manage.py callqueue_dispenser` beside workers"
)
# what a dispenser runs in
HOSTS = {alive.RUN: "callqueue_run", alive.WORKER: "a worker", alive.BUSY: "a busy worker"}
NONE_NEEDED = "none is needed: callqueue_run makes all calls itself"
OTHERS = "callbacks and beat's tasks go by Celery's own routes, not by the rules' queues"


@dataclass(frozen=True)
class Check:
    """One thing examined. `todo` is empty where it is well."""

    name: str
    ok: bool
    detail: str
    todo: str = ""


class Wrong(Exception):
    """What an examination found, and what to do about it."""

    def __init__(self, detail: str, todo: str) -> None:
        super().__init__(detail)
        self.detail, self.todo = detail, todo


class Facts:
    """How callqueue stands in a database, and what workers say: each read at first use, once."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.asks_workers = True  # until the broker is found to be away

    @cached_property
    def look(self) -> Look:
        return look(self.using)

    @cached_property
    def needs_no_broker(self) -> bool:
        """Whether all dispensers alive are callqueue_run's; False if there is none to be seen."""
        try:
            running = alive.running_dispensers(self.using)
        except (DatabaseError, InterfaceError):  # another check says so
            return False
        return bool(running) and all(one.kind == alive.RUN for one in running)

    @property
    def cleans_up(self) -> bool:
        """Whether a dispenser is alive that makes calls itself: it cleans up, as beat would do."""
        makers = (alive.RUN, alive.WORKER, alive.BUSY)
        return any(one.kind in makers for one in self.look.dispensers)

    @cached_property
    def queues_of_workers(self) -> Mapping[str, set[str]]:
        """By worker, the queues it listens on; {} where none answers, is needed or can be asked."""
        if not self.asks_workers or _is_eager() or self.needs_no_broker:
            return {}
        try:
            listed = _celery_app().control.inspect(timeout=ASKED_S).active_queues() or {}
        except Exception:
            return {}
        return {name: {queue["name"] for queue in own or ()} for name, own in listed.items()}


def examine(using: str) -> list[Check]:
    """All checks; without settings, database or tables, not those that need them."""
    facts, checks = Facts(using), list[Check]()
    for name in ALL:
        if name == "database" and conf.problems():
            break
        checks.append(run_check(name, facts))
        if not checks[-1].ok:
            facts.asks_workers &= name != "broker"
            if name in ("database", "migrations"):
                break
    return checks


def run_check(name: str, facts: Facts) -> Check:
    """One examination, retried where its connection is cut; what it raises becomes the result."""
    try:
        detail = database.persist(facts.using, lambda: ALL[name](facts), during="doctor", seconds=1)
        return Check(name, True, detail)
    except Wrong as wrong:
        return Check(name, False, wrong.detail, wrong.todo)
    except Exception as error:
        why = f"could not be examined: {in_one_line(error)}"
        return Check(name, False, why, "see the other checks first")


def database_refusal(using: str) -> str:
    """Why the database cannot be used; empty where it answers."""
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1")
    except Exception as error:
        return in_one_line(error)
    return ""


def broker_refusal() -> str:
    """Why the broker cannot be used; empty where it answers, or none is needed."""
    try:
        _connect_to_broker()
    except Exception as error:
        return in_one_line(error)
    return ""


# --- what it stands on


def _check_settings(facts: Facts) -> str:
    found = run_checks(tags=["callqueue"], include_deployment_checks=True)
    said = [one for one in found if not one.is_silenced()]
    if facts.needs_no_broker:  # none drops anything
        said = [one for one in said if one.id != "callqueue.W013"]
    if wrong := [one for one in said if one.is_serious() or one.id in WRONG]:
        hints = dict.fromkeys(one.hint for one in wrong if one.hint)
        todo = ["correct the settings; `manage.py check --deploy` says the same", *hints]
        raise Wrong("; ".join(str(one.msg) for one in wrong), ". ".join(todo))
    rules, app = len(conf.current().rules), _celery_app()
    detail = f"{rules} rules; Celery's application is {app.main or app.loader}"
    return "; ".join([detail, *(str(one.msg) for one in said)])


def _check_broker(facts: Facts) -> str:
    if facts.needs_no_broker:
        return NONE_NEEDED
    try:
        _connect_to_broker()
    except ImportError as error:
        missing = error.name or ("redis" if "redis" in str(error) else in_one_line(error))
        is_redis = the_broker.transport_name(_celery_app()) in REDIS
        package = '"django-callqueue[redis]"' if is_redis else missing
        raise Wrong(f"the package {missing} is not installed", f"pip install {package}") from error
    except Exception as error:
        todo = "start the broker, or correct CELERY_BROKER_URL"
        raise Wrong(in_one_line(error), todo) from error
    if _is_eager():
        return "no broker is used: tasks run eagerly"
    return f"{the_broker.address(_celery_app())} answers"


def _check_visibility_timeout(facts: Facts) -> str:
    """That Redis hands no message out again while its attempts may still be at work."""
    app, config = _celery_app(), conf.current()
    if facts.needs_no_broker or _is_eager() or the_broker.transport_name(app) not in REDIS:
        return "this kind of broker has none"
    options = app.conf.broker_transport_options or {}
    timeout = float(options.get("visibility_timeout", VISIBILITY_S))
    slowest = max(rule.total_timeout for rule in config.rules.values())
    longest = config.release_lease + config.grace + slowest
    if timeout < longest:
        enough = json.dumps({"visibility_timeout": round(longest) + 60})
        raise Wrong(
            f"Redis hands messages out again after {timeout:g} s, "
            f"and an attempt may take {longest:g} s",
            f"set CELERY_BROKER_TRANSPORT_OPTIONS = {enough}",
        )
    return f"{timeout:g} s, and no attempt takes longer than {longest:g} s"


def _check_database(facts: Facts) -> str:
    if refusal := database_refusal(facts.using):
        raise Wrong(refusal, f"start the database server, or correct DATABASES[{facts.using!r}]")
    if database.is_standby(facts.using):
        raise Wrong(
            "the server is a standby that follows another",
            f"point DATABASES[{facts.using!r}] at the primary server; "
            "do not dispense from a copy that may lag",
        )
    connection = connections[facts.using]
    version = ".".join(map(str, connection.get_database_version()))
    return f"{connection.display_name} {version} answers"


def _check_migrations(facts: Facts) -> str:
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connections[facts.using])
    ours = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "callqueue"]
    missing = [one.name for one, _ in executor.migration_plan(ours) if one.app_label == "callqueue"]
    if missing:
        raise Wrong(f"not applied: {', '.join(missing)}", "run `manage.py migrate callqueue`")
    return "all are applied"


def _check_clock(facts: Facts) -> str:
    """That both clocks agree: limits count by the database's, `expires_at` by this host's too."""
    before = time.time()
    theirs = database.clock(facts.using).timestamp()
    skew = min(0.0, theirs - before) + max(0.0, theirs - time.time())
    side = "ahead of" if skew > 0 else "behind"
    detail = f"the database's clock is {abs(skew):.1f} s {side} this host's"
    if abs(skew) > SKEW_S:
        todo = "let NTP set both clocks; limits stay exact, not_before and expires_at do not"
        raise Wrong(detail, todo)
    return "this host and the database agree" if abs(skew) < 0.1 else detail


def _check_schedule(facts: Facts) -> str:
    app = _celery_app()
    entries = (app.conf.beat_schedule or {}).items()
    in_settings = {entry.get("task"): name for name, entry in entries}.get(periodic.DISPENSER)
    has_rows = apps.is_installed("django_celery_beat")
    in_rows = periodic.names_of_enabled_rows(periodic.DISPENSER) if has_rows else []
    if "DatabaseScheduler" in str(app.conf.beat_scheduler) and in_rows == [in_settings]:
        in_rows = []  # its copy of what the settings say
    places = [f"CELERY_BEAT_SCHEDULE: {in_settings}"] if in_settings else []
    places += [f"django-celery-beat: {name}" for name in in_rows]
    if len(places) > 1:
        raise Wrong(
            f"{periodic.DISPENSER} is scheduled more than once: {', '.join(places)}",
            "keep one: take it out of CELERY_BEAT_SCHEDULE, "
            "or run `manage.py callqueue_schedule --remove`",
        )
    if facts.cleans_up:
        said = "whoever releases cleans up, too"
        return f"in {places[0]}; {said}" if places else said
    if not places:  # cleanup is a cron job's; whether it runs can be seen by what it leaves
        if (late := cleanup.longest_overdue(facts.using)) > OVERDUE:
            raise Wrong(
                f"nothing is scheduled, and calls have been past their retention for "
                f"{late.days} days",
                "run `manage.py callqueue_cleanup` daily (cron, a systemd timer), or "
                "beat with callqueue.beat_schedule()",
            )
        return "none: dispensers release calls; cleanup is not late"
    place = places[0].partition(":")[0]
    if not _is_eager() and not alive.has_beat_run(facts.look.signs, facts.look.wall_time):
        raise Wrong(
            f"in {place}, but no task of beat has run lately: nothing deletes old calls",
            "run `celery -A <project> beat`, and a worker on the queue of its tasks; or take the "
            "schedule out, and run `manage.py callqueue_cleanup` daily",
        )
    return f"in {place}, and beat runs"


# --- dispensers, workers, and what they do


def _check_dispenser(facts: Facts) -> str:
    seen, now = facts.look.signs, facts.look.wall_time
    if running := [one for one in seen if one.is_alive]:
        named = [
            f"{one.name} ({HOSTS[one.kind]})" if one.kind in HOSTS else one.name for one in running
        ]
        return f"running: {', '.join(named)}"
    if not seen:
        raise Wrong("no dispenser has ever run, or not for a day", DISPENSE)
    last, silent = seen[0], f"{alive.silence_s(seen, now):.0f} s"
    if last.has_ended:
        raise Wrong(f"none runs: the last, {last.name}, ended {silent} ago", DISPENSE)
    raise Wrong(f"the last sign of life, of {last.name}, is {silent} old", DISPENSE)


def _check_agreement(facts: Facts) -> str:
    here = opinion_of(conf.current().book)
    digests = {one.digest for one in facts.look.dispensers if one.digest}
    if found := shared_settings.disagreements(facts.using, digests, here=here):
        raise Wrong(
            "settings differ: " + "; ".join(map(str, found)),
            "restart those whose settings are old; "
            "until they agree, all that any of them says holds",
        )
    return "all dispensers have these limits"


def _check_one_broker(facts: Facts) -> str:
    here = the_broker.address(_celery_app())
    others = [one for one in facts.look.dispensers if one.broker not in ("", here)]
    if here and others:
        said = ", ".join(f"{one.name} publishes to {one.broker}" for one in others)
        raise Wrong(
            f"{said}; here it is {here}",
            "give all processes one CELERY_BROKER_URL, written alike, and restart them",
        )
    return "every dispenser publishes to the broker of this process"


def _check_workers(facts: Facts) -> str:
    if facts.needs_no_broker:
        return NONE_NEEDED
    if _is_eager():
        return "none is needed: tasks run eagerly"
    served = set().union(*facts.queues_of_workers.values())
    missing = sorted(_queues_of_rules(facts.using) - served)
    others = sorted(_queues_of_callbacks_and_beat(facts.using) - served - set(missing))
    if missing or others:
        detail = f"no worker listens on {', '.join(missing or others)}"
        detail += "" if missing else ", and messages go there"
        queues = ",".join([*missing, *others])
        raise Wrong(
            detail if facts.queues_of_workers or not missing else "no worker answered",
            f"run `celery -A <project> worker --queues {queues}`"
            + (f" ({OTHERS})" if others else ""),
        )
    count = len(facts.queues_of_workers)
    listen = "1 worker listens" if count == 1 else f"{count} workers listen"
    return f"{listen} on {', '.join(sorted(served))}"


def _check_calls(facts: Facts) -> str:
    known = conf.current().rules
    if gone := [
        name for name in ready_calls.rules_named_by_ready(facts.using) if name not in known
    ]:
        raise Wrong(
            f"calls wait under rules that are gone: {', '.join(map(repr, gone))}",
            "put the rule back into CALLQUEUE['RULES'], or cancel its calls in the admin",
        )
    told = [one for one in notes(facts.look) if one.kind == BAD]
    if said := [one.text for one in told if one.what in ("workers", "stuck")]:
        raise Wrong(
            " ".join(said),
            "give workers more slots (--concurrency), if all are busy; else see that dispensers "
            "and workers have one broker, and that a dispenser serves every rule",
        )
    return "every waiting call has its rule, and none waits for nothing"


def _check_ledger(facts: Facts) -> str:
    """That nobody put the ledger back in time: calls that it forgot would be made again."""
    signs, using = [], facts.using
    reading, skew = ledger_time.read(using), timedelta(seconds=SKEW_S)
    newest = tables.attempts(using).order_by("-pk").values_list("released_at", flat=True)[:100]
    is_ahead = any(at > from_us(reading.at) + skew for at in newest)
    if is_ahead or any(one.at > from_us(reading.wall) + skew for one in facts.look.signs):
        signs.append("it has rows from the future: the database's clock has been set back")
    lately = LedgerNow() - timedelta(hours=1)
    if held := tables.holds(using).filter(source="restored", until__gt=lately).count():
        signs.append(
            f"a dispenser found its last sign of life gone and held {held} rules: "
            "the ledger was put back in time"
        )
    if signs:
        raise Wrong(
            "; ".join(signs),
            "run `manage.py callqueue_pause RULE --for` one full window for every rule "
            f"before anything goes out; see {documentation_page('how-to/upgrade.md')}",
        )
    return "nothing in it is in the future, and it was not put back"


Examination = Callable[[Facts], str]  # the detail where all is well; Wrong where it is not
ALL: dict[str, Examination] = {
    "settings": _check_settings,
    "broker": _check_broker,
    "database": _check_database,
    "visibility timeout": _check_visibility_timeout,
    "migrations": _check_migrations,
    "clock": _check_clock,
    "dispenser": _check_dispenser,
    "agreement": _check_agreement,
    "schedule": _check_schedule,
    "calls": _check_calls,
    "workers": _check_workers,
    "one broker": _check_one_broker,
    "ledger": _check_ledger,
}


# --- Celery, which Django may be set up before


def _celery_app() -> Any:
    from celery import current_app

    return current_app


def _is_eager() -> bool:
    return bool(_celery_app().conf.task_always_eager)


def _connect_to_broker() -> None:
    if _is_eager():
        return
    within = {"max_retries": 1, "interval_start": 0.1, "timeout": BROKER_ANSWERS_S}
    with _celery_app().connection_for_write(connect_timeout=BROKER_ANSWERS_S) as connection:
        connection.ensure_connection(**within)


def _queues_of_rules(using: str) -> set[str]:
    """The queues as the broker names them; an unused built-in default rule has none."""
    rules, default = conf.current().rules, str(_celery_app().conf.task_default_queue)
    names: Iterable[str] = rules
    if rules["default"] is conf.DEFAULTS["RULES"]["default"]:
        used = tables.calls(using).filter(rule="default", status__in=states.UNFINISHED).exists()
        names = [name for name in rules if used or name != "default"]
    return {queue or default for name in names for queue in rules[name].queue_names}


def _queues_of_callbacks_and_beat(using: str) -> set[str]:
    newest = tables.calls(using).order_by("-pk").values_list("callback", flat=True)[:NEWEST]
    wanted = {(str(name), "") for name in newest if name} | set(
        periodic.scheduled_tasks(_celery_app())
    )
    return {the_broker.queue_of(_celery_app(), name, queue) for name, queue in wanted}
