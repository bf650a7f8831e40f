"""callqueue_run: releases calls and makes them, in one process without a broker."""

from __future__ import annotations

from typing import Any

from celery import current_app
from django.core.management.base import CommandParser

from callqueue import broker, database
from callqueue.dispatch.dispenser import Dispenser
from callqueue.maker import Maker
from callqueue.management import loop
from callqueue.management.base import CallQueueCommand, wrong_use


class Command(CallQueueCommand):
    help = (
        "Release calls as fast as their rules allow, and make them: no broker, no worker and no "
        "beat is needed. SIGTERM and SIGINT end it cleanly; any number may run, beside dispensers "
        "and workers too."
    )
    is_repeatable = False  # it looks after itself

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        loop.add_options(parser)

    def run(self, using: str, options: dict[str, Any]) -> None:
        rules, seconds = loop.parse_options(using, options)
        if database.in_transaction(using):
            raise wrong_use("not inside a transaction: what it charges has to be committed")
        app = current_app._get_current_object()
        app.set_default()  # in every thread
        broker.import_tasks(app)
        with broker.in_this_process(), loop.stop_at_signal() as stop:
            maker = Maker(using)
            dispenser = Dispenser(using, rules=rules, maker=maker)
            self.say(f"running {', '.join(rules) or 'all rules'} as {dispenser.name}")
            try:
                dispenser.run(stop=stop, seconds=seconds)
            finally:
                dispenser.leave()
                maker.leave()
        self.say("ended")
