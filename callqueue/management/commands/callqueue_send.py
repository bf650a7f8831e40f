"""callqueue_send: queues the calls of a file or of standard input."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any

from django.core.management.base import CommandParser

from callqueue.management.base import (
    CallQueueCommand,
    printable,
    problem,
    progress,
    with_noun,
    wrong_use,
)
from callqueue.sending import importer
from callqueue.texts import in_one_line


class Command(CallQueueCommand):
    help = (
        "Queue calls: one JSON call, or one a line, "
        "from a file or standard input. A line is call_data itself, or "
        '{"call_data": {...}, "rule": ..., "key": ..., ...}. '
        "With a bad line nothing is sent, unless --skip-bad."
    )
    is_repeatable = False  # the calls may have been sent

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add("file", nargs="?", default="-", metavar="FILE", help="- is standard input")
        add("--rule", metavar="R", help="the rule of calls that name none")
        add(
            "--secrets",
            action="store_true",
            help='let the file name secrets: {"$secret": NAME} in params is one, not data',
        )
        add("--skip-bad", action="store_true", help="send the good lines; exits 1 if any is bad")

    def run(self, using: str, options: dict[str, Any]) -> None:
        with _open_source(options["file"]) as source, progress("sending") as update:
            fed = importer.send_file(
                source,
                using=using,
                rule=options["rule"],
                skip_bad=options["skip_bad"],
                names_secrets=bool(options["secrets"]),
                refused=lambda number, why: self.stderr.write(printable(f"line {number}: {why}")),
                progress=update,
            )
        if fed.refused and not options["skip_bad"]:
            raise problem(
                f"{fed.refused} of {fed.lines} lines are bad; "
                "nothing was sent (--skip-bad sends the others)"
            )
        discarded = f", {fed.discarded} discarded by the router" if fed.discarded else ""
        self.say(f"sent {with_noun(fed.sent)}{discarded}")
        if fed.refused:
            raise problem(f"{fed.refused} of {fed.lines} lines were skipped")


def _open_source(name: str) -> AbstractContextManager[IO[bytes]]:
    if name == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return open(name, "rb")
    except OSError as error:
        raise wrong_use(f"{name}: {error.strerror or in_one_line(error)}") from None
