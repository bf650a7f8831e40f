"""callqueue_doctor: examines what callqueue needs, and says what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from callqueue.look import doctor
from callqueue.management.base import CallQueueCommand, problem


class Command(CallQueueCommand):
    help = (
        "Examine settings, database, broker, workers, dispenser, "
        "clocks and schedule; exit with 1 and what to do."
    )
    requires_system_checks = ()  # wrong settings are among what it reports

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="one JSON document")

    def run(self, using: str, options: dict[str, Any]) -> None:
        checks = doctor.examine(using)
        wrong = [check.name for check in checks if not check.ok]
        if options["json"]:
            self.say_json({"ok": not wrong, "checks": [asdict(check) for check in checks]})
        else:
            for check in checks:
                self._say_check(check)
        if wrong:
            raise problem(
                f"{len(wrong)} of {len(checks)} checks found something: {', '.join(wrong)}"
            )

    def _say_check(self, check: doctor.Check) -> None:
        mark = self.style.SUCCESS("ok  ") if check.ok else self.style.ERROR("WRONG")
        self.say(f"{mark:<5} {check.name}: {check.detail}")
        if check.todo:
            self.say(f"      do: {check.todo}")
