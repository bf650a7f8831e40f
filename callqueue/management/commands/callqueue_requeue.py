"""callqueue_requeue: sends ended or failing calls once more, in bulk."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandParser

from callqueue import states
from callqueue.limits.durations import WrongDuration
from callqueue.management.base import wrong_use
from callqueue.management.bulk import BulkCommand
from callqueue.operations import bulk

TWICE = "Some of these may have reached their API already, and would be made twice. "


class Command(BulkCommand):
    help = "Send calls once more: failed ones, unless --status says which."
    verb, past = "requeue", "requeued"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--again",
            action="store_true",
            help="with --status done: make calls once more that succeeded",
        )
        parser.add_argument(
            "--pace", default="", help="let so many come due in such a time, as in 10/s, 2000/h"
        )
        parser.add_argument("--delay", default="", help="let none come due before, as in 90s, 10m")

    def statuses_help(self) -> str:
        return "error, failed, unknown, cancelled, expired, and done with --again (default: failed)"

    def run(self, using: str, options: dict[str, Any]) -> None:
        if "done" in (options["statuses"] or ()) and not options["again"]:
            raise wrong_use(
                "--status done: these calls succeeded; "
                "to make them once more on purpose, add --again"
            )
        pick = self.pick(options, (states.FAILED,), states.Move.REQUEUE_AGAIN.sources)
        warning = TWICE if {states.UNKNOWN, states.DONE} & set(pick.statuses) else ""
        try:
            bulk.spread_of(options["pace"], options["delay"], bulk.picked(using, pick))
        except (ImproperlyConfigured, WrongDuration) as error:
            raise wrong_use(str(error)) from None
        how = {name: options[name] for name in ("again", "pace", "delay")}
        self.act(using, options, pick, partial(bulk.requeue, **how), warning)
