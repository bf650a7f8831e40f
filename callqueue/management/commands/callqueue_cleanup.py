"""callqueue_cleanup: takes back lost calls, deletes what is past retention, reclaims space."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from callqueue import database
from callqueue.ledger import ledger_time
from callqueue.maintenance import cleanup, recovery
from callqueue.management.base import CallQueueCommand, duration_of, progress, with_noun, wrong_use

LOCKS = (
    "--vacuum-full rewrites the tables of calls and attempts, "
    "and locks each against all reading and writing meanwhile: "
    "sends, dispensers and workers wait. It needs as much free space again as the tables take."
)


class Command(CallQueueCommand):
    help = "Recover lost calls, delete calls past their retention, reclaim space."
    is_repeatable = False  # its parts are

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add("--older-than", metavar="7d", help="replaces RETENTION for every final status")
        add("--batch-size", type=int, default=cleanup.BATCH, metavar="N", help="rows at a time")
        add("--dry-run", action="store_true", help="say how many, and change nothing")
        add("--vacuum", action="store_true", help="vacuum afterwards; locks nothing")
        add("--vacuum-full", action="store_true", help="rewrite the tables, locked meanwhile")
        add("--no-progress", action="store_true", help="no progress bar, even in a terminal")

    def run(self, using: str, options: dict[str, Any]) -> None:
        older_than, is_dry = duration_of(options["older_than"]), options["dry_run"]
        if options["batch_size"] < 1:
            raise wrong_use("--batch-size: must be at least 1")
        if options["vacuum_full"]:
            self.say(LOCKS)
        with progress("cleaning", wanted=not options["no_progress"]) as update:
            recovered = 0 if is_dry else _recover_all(using)
            cleaned = cleanup.clean(
                using,
                older_than=older_than,
                batch_size=options["batch_size"],
                dry_run=is_dry,
                vacuum=options["vacuum"],
                vacuum_full=options["vacuum_full"],
                progress=update,
            )
        what = (
            f"{with_noun(cleaned.calls)}, {with_noun(cleaned.attempts, 'attempt')} of calls that "
            f"are gone, {with_noun(cleaned.holds, 'ended hold')}"
        )
        if is_dry:
            self.say(f"would delete {what}; nothing was changed")
            return
        vacuumed = ", vacuumed" if options["vacuum"] or options["vacuum_full"] else ""
        in_full = " in full" if options["vacuum_full"] else ""
        self.say(f"recovered {with_noun(recovered)}, deleted {what}{vacuumed}{in_full}")


def _recover_all(using: str) -> int:
    """Recover all lost calls; how many. First waits until a clock that was set has settled."""
    total = 0
    database.persist(using, ledger_time.watch(using).settle, during="recovery")
    while count := database.persist(using, lambda: recovery.recover(using), during="recovery"):
        total += count
    return total
