"""What the doctor examines of what callqueue stands on: settings, database, broker, clock, schedule
and room on the disk.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta

from django.apps import apps
from django.core.checks import run_checks
from django.db import connections

from callqueue import broker as the_broker
from callqueue import conf, database, tables
from callqueue.database import from_us
from callqueue.look import alive
from callqueue.look.doctor.facts import Facts, Wrong, celery_app, is_eager
from callqueue.maintenance import cleanup, periodic
from callqueue.texts import in_one_line

BROKER_ANSWERS_S = 3.0
REDIS = ("redis", "rediss", "sentinel")
VISIBILITY_S = 3600.0  # Celery's default for Redis
SKEW_S = 2.0  # that two clocks may differ
MANY_DEAD, DEAD_SHARE = 20_000, 0.4
OVERDUE = timedelta(days=2)  # that calls may be past their retention, where cleanup runs daily


def settings(facts: Facts) -> str:
    """No system check finds an error, and Celery's application is loaded; warnings are told."""
    said = [one for one in run_checks(tags=["callqueue"]) if not one.is_silenced()]
    wrong = [one for one in said if one.is_serious() or one.id == "callqueue.W003"]
    if wrong:
        hints = dict.fromkeys(one.hint for one in wrong if one.hint)
        todo = ["correct the settings; `manage.py check` says the same", *hints]
        raise Wrong("; ".join(str(one.msg) for one in wrong), ". ".join(todo))
    rules = len(conf.current().rules)
    detail = f"{rules} rules; Celery's application is {celery_app().main or celery_app().loader}"
    return "; ".join([detail, *(str(one.msg) for one in said)])


def database_answers(facts: Facts) -> str:
    """The database answers, and can be written to."""
    if refusal := database_refusal(facts.using):
        todo = f"start the database server, or correct DATABASES[{facts.using!r}]"
        raise Wrong(refusal, todo)
    if database.is_standby(facts.using):
        raise Wrong(
            "the server is a standby that follows another",
            f"point DATABASES[{facts.using!r}] at the primary server; "
            "do not dispense from a copy that may lag",
        )
    connection = connections[facts.using]
    version = ".".join(map(str, connection.get_database_version()))
    return f"{connection.display_name} {version} answers"


def database_refusal(using: str) -> str:
    """Why the database cannot be used; empty where it answers."""
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1")
    except Exception as error:
        return in_one_line(error)
    return ""


def migrations(facts: Facts) -> str:
    """Every migration of callqueue is applied."""
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connections[facts.using])
    ours = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "callqueue"]
    missing = [one.name for one, _ in executor.migration_plan(ours) if one.app_label == "callqueue"]
    if missing:
        raise Wrong(f"not applied: {', '.join(missing)}", "run `manage.py migrate callqueue`")
    return "all are applied"


def broker(facts: Facts) -> str:
    """The broker answers."""
    try:
        _connect_to_broker()
    except ImportError as error:
        missing = error.name or ("redis" if "redis" in str(error) else in_one_line(error))
        is_redis = the_broker.transport(celery_app()) in REDIS
        package = '"django-callqueue[redis]"' if is_redis else missing
        raise Wrong(f"the package {missing} is not installed", f"pip install {package}") from error
    except Exception as error:
        todo = "start the broker, or correct CELERY_BROKER_URL"
        raise Wrong(in_one_line(error), todo) from error
    if is_eager():
        return "no broker is used: tasks run eagerly"
    return f"{the_broker.address(celery_app())} answers"


def broker_refusal() -> str:
    """Why the broker cannot be used; empty where it answers, or none is needed."""
    try:
        _connect_to_broker()
    except Exception as error:
        return in_one_line(error)
    return ""


def _connect_to_broker() -> None:
    if is_eager():
        return
    within = {"max_retries": 1, "interval_start": 0.1, "timeout": BROKER_ANSWERS_S}
    with celery_app().connection_for_write(connect_timeout=BROKER_ANSWERS_S) as connection:
        connection.ensure_connection(**within)


def confirmed_messages(facts: Facts) -> str:
    """The broker confirms what it was given: an unconfirmed message may be dropped, and its call
    waits for its lease.
    """
    if the_broker.confirms_messages():
        return "the broker confirms, or needs not to"
    lease = conf.DEFAULTS["LEASE"]["RELEASE"] if conf.problems() else conf.current().release_lease
    raise Wrong(
        "the broker may drop a message unnoticed; "
        f"its call then waits {lease:g} s for its lease to end",
        'set CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}',
    )


def visibility_timeout(facts: Facts) -> str:
    """Redis does not hand a message out again while its attempts may still be at work."""
    app, config = celery_app(), conf.current()
    if is_eager() or the_broker.transport(app) not in REDIS:
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


def clock(facts: Facts) -> str:
    """This host's clock and the database's agree. Limits count by the database's alone;
    `expires_at` is checked by both.
    """
    before = time.time()
    theirs = database.clock(facts.using).timestamp()
    skew = min(0.0, theirs - before) + max(0.0, theirs - time.time())
    side = "ahead of" if skew > 0 else "behind"
    detail = f"the database's clock is {abs(skew):.1f} s {side} this host's"
    if abs(skew) > SKEW_S:
        todo = "let NTP set both clocks; limits stay exact, not_before and expires_at do not"
        raise Wrong(detail, todo)
    return "this host and the database agree" if abs(skew) < 0.1 else detail


def schedule(facts: Facts) -> str:
    """The periodic tasks are scheduled in one place at most, and beat runs."""
    app = celery_app()
    entries = (app.conf.beat_schedule or {}).items()
    in_settings = {entry.get("task"): name for name, entry in entries}.get(periodic.DISPENSER)
    has_rows = apps.is_installed("django_celery_beat")
    in_rows = periodic.enabled(periodic.DISPENSER) if has_rows else []
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
    if not places:
        return _without_schedule(facts.using)
    place = places[0].partition(":")[0]
    if not is_eager() and not alive.has_beat(facts.look.signs, from_us(facts.look.now)):
        raise Wrong(
            f"in {place}, but no task of beat has run lately: nothing deletes old calls",
            "run `celery -A <project> beat`, and a worker on the queue of its tasks; or take the "
            "schedule out, and run `manage.py callqueue_cleanup` daily",
        )
    return f"in {place}, and beat runs"


def _without_schedule(using: str) -> str:
    """Cleanup is somebody else's, a cron job's; whether it runs can be seen by what it leaves."""
    late = cleanup.overdue_for(using)
    if late > OVERDUE:
        raise Wrong(
            f"nothing is scheduled, and calls have been past their retention for {late.days} days",
            "run `manage.py callqueue_cleanup` daily (cron, a systemd timer), or "
            "beat with callqueue.beat_schedule()",
        )
    return "none: dispensers release calls; cleanup is not late"


def bloat(facts: Facts) -> str:
    """Deleted rows do not fill the tables."""
    names = [tables.CallQueue._meta.db_table, tables.CallAttempt._meta.db_table]
    counts = database.dead_rows(facts.using, names)
    if counts is None:
        return "this database keeps no count of dead rows"
    bloated = [
        f"{table} has {dead} dead rows beside {live} live ones"
        for table, (dead, live) in counts.items()
        if dead > MANY_DEAD and dead > DEAD_SHARE * (dead + live)
    ]
    if bloated:
        raise Wrong(
            "; ".join(bloated),
            "run `manage.py callqueue_cleanup --vacuum`, "
            "and look for transactions that stay open: they stop autovacuum",
        )
    return ", ".join(f"{table}: {dead} dead rows" for table, (dead, _) in counts.items())
