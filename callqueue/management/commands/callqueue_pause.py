"""callqueue_pause: holds a rule, or one key of it."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from callqueue import control
from callqueue.management.base import CallQueueCommand, duration_of, key_of


class Command(CallQueueCommand):
    help = (
        "Release nothing under a rule, or under one of its keys, "
        "for a while or until it is resumed."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("rule", metavar="RULE")
        parser.add_argument(
            "--key", metavar="K", help="only this key; several named ones as a JSON mapping"
        )
        parser.add_argument(
            "--for", dest="length", metavar="10m", help="for so long (default: until it is resumed)"
        )
        parser.add_argument("--reason", default="", help="shown wherever the hold is")

    def run(self, using: str, options: dict[str, Any]) -> None:
        length = duration_of(options["length"])
        seconds = None if length is None else length.total_seconds()
        rule, key = options["rule"], key_of(options["key"])
        control.pause(using, rule, key=key, seconds=seconds, reason=options["reason"])
        scope = f"{rule}, key {options['key']}" if key else rule
        self.say(
            f"paused {scope} "
            + (f"for {options['length']}" if length is not None else "until it is resumed")
        )
