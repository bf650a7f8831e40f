"""callqueue_cancel: ends calls that no worker has begun, in bulk."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from callqueue import states
from callqueue.management.base import wrong_use
from callqueue.management.bulk import BulkCommand
from callqueue.operations import bulk


class Command(BulkCommand):
    help = "End calls that no worker has begun: those that the options pick, or --all."
    verb, past = "cancel", "cancelled"

    def statuses_help(self) -> str:
        return "new, error, dispatched: those not begun (default: all three)"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--all", action="store_true", help="every call that no worker has begun"
        )

    def run(self, using: str, options: dict[str, Any]) -> None:
        legal = states.Move.CANCEL.sources
        if options["all"] and _narrows(options):
            raise wrong_use("--all and options that pick calls cannot go together")
        if not (options["all"] or options["dry_run"] or _narrows(options) or self.may_ask(options)):
            raise wrong_use(
                "this would cancel every waiting call: say which (--status, --rule, --key, "
                "--since), or --all"
            )
        self.act(using, options, self.pick(options, legal, legal), bulk.cancel)


def _narrows(options: dict[str, Any]) -> bool:
    """Whether the options pick some calls, and not all."""
    return any(options[name] is not None for name in ("statuses", "rule", "key", "since"))
