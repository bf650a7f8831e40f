"""callqueue_cancel: ends calls that no worker has begun, in bulk."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from callqueue import states
from callqueue.control import bulk
from callqueue.management.base import wrong_use
from callqueue.management.bulk import BulkCommand

NARROWING = ("statuses", "rule", "key", "since")  # options that pick some calls, and not all


class Command(BulkCommand):
    help = "End calls that no worker has begun: those that the options pick, or --all."
    verb, past = "cancel", "cancelled"
    help_on_status = "new, error, dispatched: those not begun (default: all three)"
    default = legal = states.Move.CANCEL.sources

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        every = "every call that no worker has begun"
        parser.add_argument("--all", action="store_true", help=every)

    def run(self, using: str, options: dict[str, Any]) -> None:
        narrows = any(options[name] is not None for name in NARROWING)
        if options["all"] and narrows:
            raise wrong_use("--all and options that pick calls cannot go together")
        if not (options["all"] or options["dry_run"] or narrows):
            raise wrong_use(
                "this would cancel every waiting call: say which (--status, --rule, --key, "
                "--since), or --all"
            )
        self.run_bulk(using, options, bulk.cancel)
