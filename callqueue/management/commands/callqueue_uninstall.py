"""callqueue_uninstall: drops what callqueue has in the database, and nothing else."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from callqueue.management import left_by_hand, uninstalling
from callqueue.management.base import CallQueueCommand, counted, problem

QUOTES = dict.fromkeys(map(ord, '`"'))


class Command(CallQueueCommand):
    help = (
        "Show what removing callqueue would drop from the database, and what is left to do by "
        "hand; with --yes, drop it. No row and no column of another app is touched."
    )
    is_repeatable = False

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--yes", action="store_true", help="drop it")
        parser.add_argument(
            "--force", action="store_true", help="although calls are unfinished: they are lost"
        )

    def run(self, using: str, options: dict[str, Any]) -> None:
        plan = uninstalling.plan(using)
        by_hand = left_by_hand.lines()
        if options["yes"]:
            try:
                uninstalling.uninstall(using, force=options["force"])
            except uninstalling.Unfinished:
                raise problem(
                    f"{_unfinished(plan)}: nothing was dropped. Let them drain, or cancel them "
                    "(callqueue_cancel --all); --force drops them"
                ) from None
        self.say(f"{'dropped from' if options['yes'] else 'would drop from'} {using}:")
        for line in _what(plan):
            self.say(f"  {line}")
        for line in plan.kept:
            self.say(f"stays: {line}")
        if by_hand:
            self.say("left to do by hand, before the next migrate (the columns stay as they are):")
        for line in by_hand:
            self.say(f"  {line}")
        self.say('then take "callqueue" out of INSTALLED_APPS: docs/how-to/upgrade.md')
        if not options["yes"]:
            if plan.unfinished and not options["force"]:
                self.say(f"{_unfinished(plan)}: --yes refuses, unless with --force")
            self.say("nothing was changed: --yes drops it")


def _unfinished(plan: uninstalling.Plan) -> str:
    return f"{counted(plan.unfinished)} {'is' if plan.unfinished == 1 else 'are'} unfinished"


def _what(plan: uninstalling.Plan) -> list[str]:
    """One line for each kind of thing."""
    lines = [
        f"the foreign key {key.table.translate(QUOTES)}.{key.columns} to {key.target}"
        " (the column stays)"
        for key in plan.foreign_keys
    ]
    for names, noun in (
        (plan.tables, "table"),
        (plan.migrations, "row"),
        (plan.permissions, "permission"),
        (plan.content_types, "content type"),
        (plan.periodic_tasks, "periodic task"),
    ):
        if names:
            where = " of django_migrations" if noun == "row" else ""
            lines.append(f"{counted(len(names), noun)}{where}: {', '.join(names)}")
    return lines or ["nothing"]
