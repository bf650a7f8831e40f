"""Doctor: examines what callqueue needs, from the settings to the workers, and says what to do
about what is wrong.

Out: one Check for each thing, with the reason and the remedy. Changes nothing. What cannot be found
out in a few seconds counts as wrong, and so does an examination that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.db import connections

from callqueue import conf, database, states, tables
from callqueue.database import ClockNow
from callqueue.ledger import agreement
from callqueue.limits import opinions
from callqueue.maintenance import recovery

BROKER_PATIENCE = 3.0  # seconds that the broker, and after that the workers, have to answer
WORKER_PATIENCE = 2.0
SILENCE = 20.0  # seconds without a dispenser's sign of life, which comes every five
SKEW = 2.0
STUCK = timedelta(seconds=60)
MANY_DEAD, DEAD_SHARE = 20_000, 0.4
VISIBILITY = 3600.0  # Celery's default for Redis, in seconds


@dataclass(frozen=True)
class Check:
    """One thing examined. `todo` is empty where it is well."""

    name: str
    ok: bool
    detail: str
    todo: str = ""


def examine(using: str) -> list[Check]:
    """All checks. Without settings, database or tables, those that need them are left out: they
    would say the same.
    """
    settings, broker = check_settings(), _tried(check_broker)
    if not settings.ok:
        return [settings, broker, _tried(check_confirms)]
    checks = [settings, check_database(using)]
    if checks[-1].ok:
        checks.append(_tried(check_migrations, using))
    has_tables = all(check.ok for check in checks)
    checks += [broker, _tried(check_confirms), _tried(check_visibility)]
    if has_tables:
        crew = Crew.asked(using) if broker.ok else Crew({}, [])
        checks += [_tried(check, using) for check in OF_THE_DATABASE]
        checks += [_tried(check, using, crew) for check in OF_THE_CREW]
    return checks


def check_settings() -> Check:
    """CALLQUEUE is sound."""
    wrong = conf.problems()
    if wrong:
        return Check(
            "settings",
            False,
            "; ".join(wrong),
            "correct CALLQUEUE in the settings; `manage.py check` says the same",
        )
    return Check("settings", True, f"{len(conf.current().rules)} rules")


def check_database(using: str) -> Check:
    """The database answers, and can be written to."""
    if refusal := database_refusal(using):
        return Check(
            "database",
            False,
            refusal,
            f"start the database server, or correct DATABASES[{using!r}]",
        )
    connection = connections[using]
    if database.is_standby(using):
        todo = f"point DATABASES[{using!r}] at the primary server; do not dispense from a copy that may lag"
        return Check("database", False, "the server is a standby that follows another", todo)
    version = ".".join(map(str, connection.get_database_version()))
    return Check("database", True, f"{connection.display_name} {version} answers")


def check_migrations(using: str) -> Check:
    """Every migration of callqueue is applied."""
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connections[using])
    plan = executor.migration_plan(
        [node for node in executor.loader.graph.leaf_nodes() if node[0] == "callqueue"]
    )
    missing = [migration.name for migration, _ in plan if migration.app_label == "callqueue"]
    if missing:
        return Check(
            "migrations",
            False,
            f"not applied: {', '.join(missing)}",
            "run `manage.py migrate callqueue`",
        )
    return Check("migrations", True, "all are applied")


def check_broker() -> Check:
    """The broker answers."""
    if refusal := broker_refusal():
        return Check("broker", False, refusal, "start the broker, or correct CELERY_BROKER_URL")
    return Check(
        "broker",
        True,
        "no broker is used: tasks run eagerly" if _is_eager() else f"{_broker_name()} answers",
    )


def check_confirms() -> Check:
    """The broker confirms what it was given: an unconfirmed message may be dropped, and its call
    waits for its lease.
    """
    options = _celery().conf.broker_transport_options or {}
    if _is_eager() or _transport() not in ("amqp", "pyamqp", "amqps"):
        return Check("confirmed messages", True, "this kind of broker confirms, or needs not to")
    if options.get("confirm_publish"):
        return Check("confirmed messages", True, "confirm_publish is set")
    lease = conf.DEFAULTS["LEASE"]["RELEASE"] if conf.problems() else conf.current().release_lease
    return Check(
        "confirmed messages",
        False,
        f"the broker may drop a message unnoticed; its call then waits {lease:g} s for its lease to end",
        'set CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}',
    )


def check_visibility() -> Check:
    """Redis does not hand a message out again while its attempts may still be at work."""
    if _is_eager() or _transport() not in ("redis", "rediss", "sentinel"):
        return Check("visibility timeout", True, "this kind of broker has none")
    options = _celery().conf.broker_transport_options or {}
    timeout = float(options.get("visibility_timeout", VISIBILITY))
    config = conf.current()
    longest = (
        config.release_lease
        + config.grace
        + max(rule.total_timeout for rule in config.rules.values())
    )
    if timeout < longest:
        return Check(
            "visibility timeout",
            False,
            f"Redis hands messages out again after {timeout:g} s, and an attempt may take {longest:g} s",
            f'set CELERY_BROKER_TRANSPORT_OPTIONS = {{"visibility_timeout": {round(longest) + 60}}}',
        )
    return Check(
        "visibility timeout", True, f"{timeout:g} s, and no attempt takes longer than {longest:g} s"
    )


def check_clock(using: str) -> Check:
    """This host's clock and the database's agree. Limits count by the database's alone;
    `expires_at` is checked by both.
    """
    before = time.time()
    theirs = database.clock(using).timestamp()
    after = time.time()
    skew = min(0.0, theirs - before) + max(0.0, theirs - after)
    detail = f"the database's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this host's"
    if abs(skew) > SKEW:
        return Check(
            "clock",
            False,
            detail,
            "let NTP set both clocks; limits stay exact, not_before and expires_at do not",
        )
    return Check("clock", True, "this host and the database agree" if abs(skew) < 0.1 else detail)


def check_dispenser(using: str) -> Check:
    """A dispenser has given a sign of life."""
    now = database.clock(using)
    todo = (
        "run `manage.py callqueue_dispenser`, or a worker and beat with callqueue.beat_schedule()"
    )
    seen = list(tables.dispensers(using).order_by("-seen_at").values_list("name", "seen_at"))
    if not seen:
        return Check("dispenser", False, "no dispenser has ever run, or not for a day", todo)
    silent = (now - seen[0][1]).total_seconds()
    if silent > SILENCE:
        return Check(
            "dispenser",
            False,
            f"the last sign of life, of {seen[0][0]}, is {silent:.0f} s old",
            todo,
        )
    alive = [name for name, at in seen if (now - at).total_seconds() <= SILENCE]
    return Check("dispenser", True, f"running: {', '.join(alive)}")


def check_agreement(using: str) -> Check:
    """All dispensers have the same limits, and so has this process."""
    here = opinions.opinion_of(conf.current().book)
    found = agreement.disagreements(using, here=here)
    if found:
        todo = "restart those whose settings are old; until they agree, all that any of them says holds"
        return Check("agreement", False, "settings differ: " + "; ".join(map(str, found)), todo)
    return Check("agreement", True, "all dispensers have these limits")


def check_schedule(using: str) -> Check:
    """The periodic tasks are scheduled in one place at most."""
    in_settings = {
        entry.get("task"): name for name, entry in (_celery().conf.beat_schedule or {}).items()
    }
    in_rows = _scheduled_rows()
    task = "callqueue.dispenser"
    is_copied = "DatabaseScheduler" in str(_celery().conf.beat_scheduler) and in_rows == [
        in_settings.get(task)
    ]
    if (task in in_settings and in_rows and not is_copied) or len(in_rows) > 1:
        return Check(
            "schedule",
            False,
            f"{task} is scheduled more than once: {_places(in_settings.get(task), in_rows)}",
            "keep one: take it out of CELERY_BEAT_SCHEDULE, or run `manage.py callqueue_schedule --remove`",
        )
    if task in in_settings or in_rows:
        return Check(
            "schedule",
            True,
            "in CELERY_BEAT_SCHEDULE" if task in in_settings else "in django-celery-beat",
        )
    return Check(
        "schedule",
        True,
        "none: dispensers of their own release calls; run `manage.py callqueue_cleanup` daily",
    )


def check_stuck(using: str) -> Check:
    """Nothing that was released is past its lease: recovery would have taken it back."""
    overdue = tables.attempts(using).open().filter(lease_until__lt=ClockNow() - STUCK)
    count = len(overdue.values_list("pk", flat=True)[:1001])
    if count:
        shown = "more than 1000" if count > 1000 else str(count)
        todo = "run a dispenser or the task callqueue.recover_lost_calls; `manage.py callqueue_cleanup` recovers at once"
        return Check(
            "stuck calls", False, f"{shown} attempts are more than a minute past their lease", todo
        )
    return Check("stuck calls", True, "none")


def check_rules(using: str) -> Check:
    """No call waits under a rule that is gone."""
    table, waiting = tables.CallQueue._meta.db_table, "status IN (0, 2) AND ready"
    names = database.distinct_next(
        using, table, "rule", waiting, [], after="", down=False, count=1000
    )
    if gone := [name for name in names if name not in conf.current().rules]:
        todo = "put the rule back into CALLQUEUE['RULES'], or cancel its calls in the admin"
        return Check(
            "rules",
            False,
            f"calls wait under rules that are gone: {', '.join(map(repr, gone))}",
            todo,
        )
    return Check("rules", True, "every waiting call has its rule")


def check_bloat(using: str) -> Check:
    """Deleted rows do not fill the tables."""
    counts = database.dead_rows(
        using, [tables.CallQueue._meta.db_table, tables.CallAttempt._meta.db_table]
    )
    if counts is None:
        return Check("bloat", True, "this database keeps no count of dead rows")
    bloated = [
        f"{table} has {dead} dead rows beside {live} live ones"
        for table, (dead, live) in counts.items()
        if dead > MANY_DEAD and dead > DEAD_SHARE * (dead + live)
    ]
    if bloated:
        todo = "run `manage.py callqueue_cleanup --vacuum`, and look for transactions that stay open: they stop autovacuum"
        return Check("bloat", False, "; ".join(bloated), todo)
    return Check(
        "bloat",
        True,
        ", ".join(f"{table}: {dead} dead rows" for table, (dead, _) in counts.items()),
    )


OF_THE_DATABASE: tuple[Callable[[str], Check], ...] = (
    check_clock,
    check_dispenser,
    check_agreement,
    check_schedule,
    check_stuck,
    check_rules,
    check_bloat,
)


@dataclass(frozen=True)
class Crew:
    """The workers that answered: the queues each listens on, and the attempts of this project that
    they have at hand.
    """

    queues: dict[str, set[str]]
    attempt_ids: list[int]

    @classmethod
    def asked(cls, using: str) -> Crew:
        """Ask all workers, once. Others that share the broker answer too: what they have at hand is
        none of ours.
        """
        if _is_eager():
            return cls({}, [])
        try:
            inspect = _celery().control.inspect(timeout=WORKER_PATIENCE)
            queues = inspect.active_queues() or {}
            at_hand = (
                [*(inspect.active() or {}).values(), *(inspect.reserved() or {}).values()]
                if queues
                else []
            )
        except Exception:
            return cls({}, [])
        listening = {
            worker: {queue["name"] for queue in listed or ()} for worker, listed in queues.items()
        }
        ours = _queues_of(conf.current().rules)
        return cls(
            listening,
            [pk for tasks in at_hand for task in tasks for pk in _attempts_of(task, using, ours)],
        )


def check_workers(using: str, crew: Crew) -> Check:
    """A worker listens on every queue that a rule names; on the default queue, where calls may come
    to it.
    """
    if _is_eager():
        return Check("workers", True, "none is needed: tasks run eagerly")
    served = set().union(*crew.queues.values())
    missing = sorted(_queues_wanted(using) - served)
    if missing:
        detail = (
            f"no worker listens on {', '.join(missing)}" if crew.queues else "no worker answered"
        )
        return Check(
            "workers",
            False,
            detail,
            f"run `celery -A <project> worker --queues {','.join(missing)}`",
        )
    return Check(
        "workers", True, f"{len(crew.queues)} workers listen on {', '.join(sorted(served))}"
    )


def check_ledger(using: str, crew: Crew) -> Check:
    """The ledger is not older than the world: nothing in it lies ahead, and it knows what workers
    have at hand.

    A database that was put back to an earlier state (a backup, a lagging copy) does not know the
    latest calls, and would make their slots, and some of the calls, a second time.
    """
    ahead = database.clock(using) + timedelta(seconds=SKEW)
    attempts = tables.attempts(using)
    signs = []
    newest = attempts.order_by("-pk").values_list("released_at", flat=True)[:100]
    if any(released_at > ahead for released_at in newest):
        signs.append("attempts were released in the future: the database's clock has been set back")
    if tables.dispensers(using).filter(seen_at__gt=ahead).exists():
        signs.append("dispensers were seen in the future: the database's clock has been set back")
    wanted = set(crew.attempt_ids[:1000])
    if unknown := wanted - set(attempts.filter(pk__in=wanted).values_list("pk", flat=True)):
        signs.append(
            f"workers have {len(unknown)} attempts at hand that the ledger does not know: it was put back in time"
        )
    lately = ClockNow() - timedelta(hours=1)
    if held := tables.holds(using).filter(reason=recovery.WENT_BACK, until__gt=lately).count():
        signs.append(
            f"a dispenser found its last sign of life gone and held {held} rules: the ledger was put back in time"
        )
    if signs:
        todo = (
            "run `manage.py callqueue_pause RULE --for` one full window for every rule before anything goes out; "
            "see docs/how-to/restore-a-backup.md"
        )
        return Check("ledger", False, "; ".join(signs), todo)
    return Check("ledger", True, "nothing in it lies ahead, and it knows what workers have at hand")


OF_THE_CREW: tuple[Callable[[str, Crew], Check], ...] = (check_workers, check_ledger)


def database_refusal(using: str) -> str:
    """Why the database cannot be used; empty where it answers."""
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1")
    except Exception as error:
        return _said(error)
    return ""


def broker_refusal() -> str:
    """Why the broker cannot be used; empty where it answers, or none is needed."""
    if _is_eager():
        return ""
    try:
        with _celery().connection_for_write(connect_timeout=BROKER_PATIENCE) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=BROKER_PATIENCE)
    except Exception as error:
        return _said(error)
    return ""


def _tried(check: Callable[..., Check], *arguments: Any) -> Check:
    """The check, or that it failed: a doctor who faints helps nobody."""
    try:
        return (
            database.persist(arguments[0], lambda: check(*arguments), during="doctor", seconds=1)
            if arguments
            else check()
        )
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return Check(
            name, False, f"could not be examined: {_said(error)}", "see the other checks first"
        )


def _queues_wanted(using: str) -> set[str]:
    """The queues of all rules. The built-in default rule counts only where calls wait for it."""
    rules = conf.current().rules
    names: Iterable[str] = rules
    if rules["default"] is conf.DEFAULTS["RULES"]["default"]:
        used = tables.calls(using).filter(rule="default", status__in=states.UNFINISHED).exists()
        names = [name for name in rules if used or name != "default"]
    return _queues_of(names)


def _queues_of(names: Iterable[str]) -> set[str]:
    """The queues of these rules, by the names that the broker has for them."""
    rules, default = conf.current().rules, str(_celery().conf.task_default_queue)
    return {queue or default for name in names for queue in rules[name].queue_names}


def _scheduled_rows() -> list[str]:
    if not apps.is_installed("django_celery_beat"):
        return []
    from callqueue.operations import periodic

    return periodic.enabled("callqueue.dispenser")


def _places(in_settings: str | None, in_rows: Iterable[str]) -> str:
    places = [f"CELERY_BEAT_SCHEDULE: {in_settings}"] if in_settings else []
    return ", ".join([*places, *(f"django-celery-beat: {name}" for name in in_rows)])


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


def _celery() -> Any:
    from celery import current_app

    return current_app


def _is_eager() -> bool:
    return bool(_celery().conf.task_always_eager)


def _transport() -> str:
    """The scheme of the broker's URL, without what comes after "+"."""
    return str(_celery().connection_for_write().transport_cls).partition("+")[0]


def _broker_name() -> str:
    return str(_celery().connection_for_write().as_uri())


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__
