"""What callqueue_requeue and callqueue_cancel share: how calls are picked, and the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandParser

from callqueue.control import bulk
from callqueue.control.bulk import Pick
from callqueue.management.base import (
    CallQueueCommand,
    duration_of,
    key_of,
    progress,
    with_noun,
    wrong_use,
)


class BulkCommand(CallQueueCommand):
    """Acts on the calls that the options pick, by default of the `default` statuses."""

    verb, past, help_on_status = "", "", ""
    default: tuple[int, ...] = ()
    legal: tuple[int, ...] = ()
    is_repeatable = False  # its batches are

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        several: Any = {"dest": "statuses", "nargs": "+", "action": "extend"}
        add("--status", metavar="S", help=self.help_on_status, **several)
        add("--rule", metavar="R", help="only calls of this rule")
        key = "only calls of this key; several named ones as a JSON mapping"
        add("--key", metavar="K", help=key)
        since = "only calls that ended (an error: last failed) no longer ago"
        add("--since", metavar="2h", help=since)
        add("--dry-run", action="store_true", help="say how many, and change nothing")

    def parse_pick(self, options: dict[str, Any]) -> Pick:
        try:
            statuses = bulk.parse_statuses(options["statuses"], self.default, self.legal)
        except ValueError as error:
            raise wrong_use(f"--status: {error}") from None
        return Pick(
            statuses, options["rule"], key_of(options["key"]), duration_of(options["since"])
        )

    def run_bulk(self, using: str, options: dict[str, Any], do: Callable[..., int]) -> None:
        pick = self.parse_pick(options)
        if options["dry_run"]:
            self.say(f"would {self.verb} {with_noun(bulk.count(using, pick))}; nothing was changed")
            return
        with progress(f"{self.verb}ing") as update:
            count = do(using, pick, progress=update)
        self.say(f"{self.past} {with_noun(count)}")
