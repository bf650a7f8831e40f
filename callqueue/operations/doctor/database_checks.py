"""What the doctor examines of the database, and of what callqueue keeps in it."""

from __future__ import annotations

import time
from datetime import timedelta

from django.db import connections

from callqueue import conf, database, tables
from callqueue.database import ClockNow
from callqueue.ledger import agreement, ready_calls
from callqueue.limits import opinions
from callqueue.operations import dispensers
from callqueue.operations.doctor.check import Check, well, wrong
from callqueue.texts import in_one_line

SILENCE = 20.0  # seconds without a dispenser's sign of life, which comes every five
SKEW = 2.0  # seconds that two clocks may differ
STUCK = timedelta(seconds=60)
MANY_DEAD, DEAD_SHARE = 20_000, 0.4


def check_database(using: str) -> Check:
    """The database answers, and can be written to."""
    if refusal := database_refusal(using):
        return wrong(
            "database",
            refusal,
            f"start the database server, or correct DATABASES[{using!r}]",
        )
    connection = connections[using]
    if database.is_standby(using):
        todo = (
            f"point DATABASES[{using!r}] at the primary server; "
            "do not dispense from a copy that may lag"
        )
        return wrong("database", "the server is a standby that follows another", todo)
    version = ".".join(map(str, connection.get_database_version()))
    return well("database", f"{connection.display_name} {version} answers")


def check_migrations(using: str) -> Check:
    """Every migration of callqueue is applied."""
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connections[using])
    plan = executor.migration_plan(
        [node for node in executor.loader.graph.leaf_nodes() if node[0] == "callqueue"]
    )
    missing = [migration.name for migration, _ in plan if migration.app_label == "callqueue"]
    if missing:
        return wrong(
            "migrations",
            f"not applied: {', '.join(missing)}",
            "run `manage.py migrate callqueue`",
        )
    return well("migrations", "all are applied")


def check_clock(using: str) -> Check:
    """This host's clock and the database's agree. Limits count by the database's alone;
    `expires_at` is checked by both.
    """
    before = time.time()
    theirs = database.clock(using).timestamp()
    after = time.time()
    skew = min(0.0, theirs - before) + max(0.0, theirs - after)
    side = "ahead of" if skew > 0 else "behind"
    detail = f"the database's clock is {abs(skew):.1f} s {side} this host's"
    if abs(skew) > SKEW:
        return wrong(
            "clock",
            detail,
            "let NTP set both clocks; limits stay exact, not_before and expires_at do not",
        )
    return well("clock", "this host and the database agree" if abs(skew) < 0.1 else detail)


def check_dispenser(using: str) -> Check:
    """A dispenser has given a sign of life, and has not ended since."""
    now = database.clock(using)
    todo = (
        "run `manage.py callqueue_dispenser`, or a worker and beat with callqueue.beat_schedule()"
    )
    seen = dispensers.signs_of_life(using)
    if not seen:
        return wrong("dispenser", "no dispenser has ever run, or not for a day", todo)
    alive = [
        one.name for one in seen if not one.has_ended and (now - one.at).total_seconds() <= SILENCE
    ]
    if alive:
        return well("dispenser", f"running: {', '.join(alive)}")
    last, silent = seen[0], f"{(now - seen[0].at).total_seconds():.0f} s"
    if last.has_ended:
        return wrong("dispenser", f"none runs: the last, {last.name}, ended {silent} ago", todo)
    return wrong("dispenser", f"the last sign of life, of {last.name}, is {silent} old", todo)


def check_agreement(using: str) -> Check:
    """All dispensers have the same limits, and so has this process."""
    here = opinions.opinion_of(conf.current().book)
    found = agreement.disagreements(using, here=here)
    if found:
        todo = (
            "restart those whose settings are old; "
            "until they agree, all that any of them says holds"
        )
        return wrong("agreement", "settings differ: " + "; ".join(map(str, found)), todo)
    return well("agreement", "all dispensers have these limits")


def check_stuck(using: str) -> Check:
    """Nothing that was released is past its lease: recovery would have taken it back."""
    overdue = tables.attempts(using).open().filter(lease_until__lt=ClockNow() - STUCK)
    count = len(overdue.values_list("pk", flat=True)[:1001])
    if count:
        shown = "more than 1000" if count > 1000 else str(count)
        todo = (
            "run a dispenser or the task callqueue.recover_lost_calls; "
            "`manage.py callqueue_cleanup` recovers at once"
        )
        return wrong(
            "stuck calls", f"{shown} attempts are more than a minute past their lease", todo
        )
    return well("stuck calls", "none")


def check_rules(using: str) -> Check:
    """No call waits under a rule that is gone."""
    named, known = ready_calls.rules_of_ready(using), conf.current().rules
    if gone := [name for name in named if name not in known]:
        todo = "put the rule back into CALLQUEUE['RULES'], or cancel its calls in the admin"
        return wrong(
            "rules",
            f"calls wait under rules that are gone: {', '.join(map(repr, gone))}",
            todo,
        )
    return well("rules", "every waiting call has its rule")


def check_bloat(using: str) -> Check:
    """Deleted rows do not fill the tables."""
    counts = database.dead_rows(
        using, [tables.CallQueue._meta.db_table, tables.CallAttempt._meta.db_table]
    )
    if counts is None:
        return well("bloat", "this database keeps no count of dead rows")
    bloated = [
        f"{table} has {dead} dead rows beside {live} live ones"
        for table, (dead, live) in counts.items()
        if dead > MANY_DEAD and dead > DEAD_SHARE * (dead + live)
    ]
    if bloated:
        todo = (
            "run `manage.py callqueue_cleanup --vacuum`, "
            "and look for transactions that stay open: they stop autovacuum"
        )
        return wrong("bloat", "; ".join(bloated), todo)
    return well(
        "bloat",
        ", ".join(f"{table}: {dead} dead rows" for table, (dead, _) in counts.items()),
    )


def database_refusal(using: str) -> str:
    """Why the database cannot be used; empty where it answers."""
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1")
    except Exception as error:
        return in_one_line(error)
    return ""
