"""callqueue_cleanup: takes back lost calls, deletes what is past retention, reclaims space."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from callqueue import database
from callqueue.maintenance import cleanup, recovery
from callqueue.management.base import CallQueueCommand, counted, duration, wrong_use
from callqueue.management.progress import progress

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
        parser.add_argument(
            "--older-than", metavar="7d", help="replaces RETENTION for every final status"
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=cleanup.BATCH,
            metavar="N",
            help="rows a transaction deletes",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="say what would be deleted, and change nothing"
        )
        parser.add_argument(
            "--vacuum", action="store_true", help="vacuum afterwards; locks nothing"
        )
        parser.add_argument(
            "--vacuum-full",
            action="store_true",
            help="rewrite the tables; locks them against all use",
        )
        parser.add_argument(
            "--no-progress", action="store_true", help="no progress bar, even in a terminal"
        )

    def run(self, using: str, options: dict[str, Any]) -> None:
        older_than = duration(options["older_than"])
        if options["batch_size"] < 1:
            raise wrong_use("--batch-size: must be at least 1")
        wanted = not options["no_progress"]
        recovered = 0 if options["dry_run"] else self._recover(using, wanted)
        if options["vacuum_full"]:
            self.say(LOCKS)
        with progress(_label(options), wanted=wanted) as update:
            cleaned = cleanup.clean(
                using,
                older_than=older_than,
                batch_size=options["batch_size"],
                dry_run=options["dry_run"],
                vacuum=options["vacuum"],
                vacuum_full=options["vacuum_full"],
                progress=update,
            )
        if options["dry_run"]:
            self.say(f"would delete {_counts(cleaned)}; nothing was changed")
        else:
            self.say(
                f"recovered {counted(recovered)}, deleted {_counts(cleaned)}{_reclaimed(options)}"
            )

    def _recover(self, using: str, wanted: bool) -> int:
        with progress("recovering", wanted=wanted) as update:
            total = 0
            while count := database.persist(
                using, lambda: recovery.recover(using), during="recovery"
            ):
                total += count
                if update:
                    update(total)
        return total


def _label(options: dict[str, Any]) -> str:
    if options["dry_run"]:
        return "counting"
    return "deleting, then vacuuming" if options["vacuum"] or options["vacuum_full"] else "deleting"


def _counts(cleaned: cleanup.Cleaned) -> str:
    return (
        f"{counted(cleaned.calls)}, {counted(cleaned.attempts, 'attempt')} of calls that are gone, "
        f"{counted(cleaned.holds, 'ended hold')}"
    )


def _reclaimed(options: dict[str, Any]) -> str:
    if options["vacuum_full"]:
        return ", vacuumed in full"
    return ", vacuumed" if options["vacuum"] else ""
