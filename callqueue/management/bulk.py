"""What callqueue_requeue and callqueue_cancel share: the options that pick calls, the question, and
the report.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandParser

from callqueue.management.base import (
    CallQueueCommand,
    counted,
    duration,
    key_of,
    problem,
    wrong_use,
)
from callqueue.management.progress import progress
from callqueue.operations import bulk
from callqueue.operations.bulk import Pick


class BulkCommand(CallQueueCommand):
    """Acts on the calls that the options pick."""

    verb, past = "", ""
    is_repeatable = False  # its batches are, and it asks but once

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--status",
            dest="statuses",
            nargs="+",
            action="extend",
            metavar="S",
            help=self.statuses_help(),
        )
        parser.add_argument("--rule", metavar="R", help="only calls of this rule")
        parser.add_argument(
            "--key",
            metavar="K",
            help="only calls of this key; several named ones as a JSON mapping",
        )
        parser.add_argument(
            "--since",
            metavar="2h",
            help="only calls that ended (an error: last failed) no longer ago",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="say how many, and change nothing"
        )
        parser.add_argument(
            "--no-input",
            dest="interactive",
            action="store_false",
            help="do not ask, even in a terminal",
        )

    def statuses_help(self) -> str:
        """What --status may be, and is where it is not given."""
        raise NotImplementedError

    def pick(
        self, options: dict[str, Any], default: tuple[int, ...], legal: tuple[int, ...]
    ) -> Pick:
        """The calls that the options pick."""
        try:
            statuses = bulk.statuses_of(options["statuses"], default, legal)
        except ValueError as error:
            raise wrong_use(f"--status: {error}") from None
        return Pick(statuses, options["rule"], key_of(options["key"]), duration(options["since"]))

    def act(
        self,
        using: str,
        options: dict[str, Any],
        pick: Pick,
        do: Callable[..., int],
        warning: str = "",
    ) -> None:
        """Ask where somebody is there to answer, do it with a progress bar, and say how many."""
        if options["dry_run"]:
            self.say(f"would {self.verb} {counted(bulk.count(using, pick))}; nothing was changed")
            return
        if self.may_ask(options):
            self._ask(bulk.count(using, pick), warning)
        with progress(f"{self.verb}ing") as update:
            count = do(using, pick, progress=update)
        self.say(f"{self.past} {counted(count)}")

    def may_ask(self, options: dict[str, Any]) -> bool:
        """Whether somebody is there to answer, and wants to be asked."""
        return bool(options["interactive"]) and sys.stderr.isatty() and sys.stdin.isatty()

    def _ask(self, count: int, warning: str) -> None:
        answer = input(f"{warning}{self.verb} {counted(count)}? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            raise problem("nothing was changed")
