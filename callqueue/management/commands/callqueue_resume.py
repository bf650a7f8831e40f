"""callqueue_resume: ends all holds on a rule, or on one key of it."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from callqueue import control
from callqueue.management.base import CallQueueCommand, key_of, problem, with_noun


class Command(CallQueueCommand):
    help = (
        "End all holds on a rule and its keys, or on one key: of providers, the breaker and people."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("rule", metavar="RULE")
        parser.add_argument(
            "--key", metavar="K", help="only this key; several named ones as a JSON mapping"
        )
        parser.add_argument(
            "--restored",
            action="store_true",
            help="end the hold that a dispenser laid after a restored backup, too",
        )

    def run(self, using: str, options: dict[str, Any]) -> None:
        rule, key = options["rule"], key_of(options["key"])
        count = control.resume(using, rule, key=key, restored=options["restored"])
        scope = f"{rule}, key {options['key']}" if key else rule
        kept = control.restore_hold_ends_at(using, rule)
        if count or not kept:
            ended = f"resumed {scope}: {with_noun(count, 'hold')} ended"
            self.say(ended if count else f"{scope} was not held")
        if kept:
            raise problem(
                f"{rule} is still held until {kept:%Y-%m-%d %H:%M:%S %Z}: the database went back "
                "in time, and what it forgot may still count at the provider. Where it does not, "
                f"callqueue_resume {rule} --restored ends this hold too"
            )
