"""callqueue_requeue: sends ended or failing calls once more, in bulk."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandParser

from callqueue import states
from callqueue.control import bulk
from callqueue.management.base import wrong_use
from callqueue.management.bulk import BulkCommand


class Command(BulkCommand):
    help = "Send calls once more: failed ones, unless --status says which."
    verb, past = "requeue", "requeued"
    help_on_status = (
        "error, failed, unknown, cancelled, expired, and done with --again (default: failed)"
    )
    default, legal = (states.FAILED,), states.Move.REQUEUE_AGAIN.sources

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        again = "with --status done: make calls once more that succeeded"
        parser.add_argument("--again", action="store_true", help=again)

    def run(self, using: str, options: dict[str, Any]) -> None:
        again = options["again"]
        if "done" in (options["statuses"] or ()) and not again:
            raise wrong_use(
                "--status done: these calls succeeded; "
                "to make them once more on purpose, add --again"
            )
        self.run_bulk(using, options, partial(bulk.requeue, again=again))
