"""callqueue_audit: the highest use of every limit in any window, from the ledger."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from callqueue.history.audit import Audit, audit
from callqueue.management.base import (
    CallQueueCommand,
    duration_of,
    problem,
    progress,
    table,
    with_noun,
)


class Command(CallQueueCommand):
    help = (
        "Say how far every limit was used, "
        "and exit with 1 if one was exceeded. Judges by the rules of today."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--since",
            default="24h",
            metavar="24h",
            help="attempts that ended no longer ago (default: 24h)",
        )
        parser.add_argument("--json", action="store_true", help="one JSON document")

    def run(self, using: str, options: dict[str, Any]) -> None:
        since = duration_of(options["since"])
        assert since is not None
        with progress("reading the ledger"):
            result = audit(using, since=since)
        if options["json"]:
            limits = [asdict(finding) for finding in result.findings]
            self.say_json(
                {"since": result.since.isoformat(), "attempts": result.attempts, "limits": limits}
            )
        else:
            self._say_table(result)
        if result.over_limit:
            raise problem(
                "exceeded: "
                + ", ".join(
                    f"{f.name} of {f.rule} ({f.highest}/{f.allowed})" for f in result.over_limit
                )
            )

    def _say_table(self, result: Audit) -> None:
        made = with_noun(result.attempts, "attempt")
        self.say(f"{made} since {result.since:%Y-%m-%d %H:%M:%S %Z}")
        rows = [
            [
                f.rule,
                f.name,
                f.value,
                f"{f.highest}",
                f"{f.allowed}",
                f"{f.used_share:.0%}",
                "EXCEEDED" if f.exceeded else "",
            ]
            for f in result.findings
        ]
        for line in table(
            ["rule", "limit", "worst of", "highest", "allowed", "used", ""], rows, right={3, 4, 5}
        ):
            self.say(line)
