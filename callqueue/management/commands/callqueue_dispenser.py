"""callqueue_dispenser: releases calls for as long as it runs, or once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandParser
from django.db import DatabaseError, InterfaceError

from callqueue import conf
from callqueue.dispatch import publisher
from callqueue.dispatch.dispenser import Dispenser
from callqueue.management.base import CallQueueCommand, counted, problem, wrong_use
from callqueue.operations import dispensers, doctor
from callqueue.texts import in_one_line

SILENT = 60.0  # seconds without a sign of life, of which there is one every five


class Command(CallQueueCommand):
    help = (
        "Release calls as fast as their rules allow. "
        "SIGTERM and SIGINT end it cleanly; any number may run."
    )
    is_repeatable = False  # it looks after itself

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--once", action="store_true", help="release what may go now, and end")
        parser.add_argument(
            "--for", dest="seconds", type=float, metavar="SECONDS", help="end after so many seconds"
        )
        parser.add_argument(
            "--rule", dest="rules", nargs="+", action="extend", metavar="R", help="only these rules"
        )

        parser.add_argument(
            "--alive",
            action="store_true",
            help="for a health check: exit with 1 where a dispenser of this host has gone silent",
        )

    def run(self, using: str, options: dict[str, Any]) -> None:
        if options["alive"]:
            self._check(using)
            return
        rules = options["rules"] or []
        if options["seconds"] is not None and not options["seconds"] >= 0:
            raise wrong_use(f"--for: {options['seconds']:g} is not a number of seconds")
        for rule in rules:
            conf.current().rule(rule)
        if options["once"]:
            self._once(using, rules)
        else:
            self._until_told(using, rules, options["seconds"])

    def _check(self, using: str) -> None:
        """A database that is away says nothing about the dispenser, which waits for it."""
        try:
            silent = dispensers.silence_of_host(using)
        except (DatabaseError, InterfaceError) as error:
            self.say(f"nobody can know: the database is away: {in_one_line(error)}")
            return
        if silent is None or silent.total_seconds() > SILENT:
            ago = "ever" if silent is None else f"for {silent.total_seconds():.0f} s"
            raise problem(f"no dispenser of this host has given a sign of life {ago}")
        self.say(f"a dispenser of this host was seen {silent.total_seconds():.0f} s ago")

    def _once(self, using: str, rules: Sequence[str]) -> None:
        if refusal := doctor.database_refusal(using):
            raise problem(f"the database is away: {refusal}")
        if refusal := doctor.broker_refusal():
            raise problem(f"the broker is away: {refusal}")
        refused: list[publisher.BrokerAway] = []

        def publish(using: str, messages: Sequence[publisher.Message]) -> None:
            try:
                publisher.publish(using, messages)
            except publisher.BrokerAway as error:
                refused.append(error)
                raise

        dispenser = Dispenser(using, rules=rules, publish=publish)
        try:
            count = dispenser.run_once()
        finally:
            dispenser.leave()
        if refused:
            raise problem(f"the broker is away: {refused[0]}; what was released waits again")
        self.say(f"released {counted(count)}")

    def _until_told(self, using: str, rules: Sequence[str], seconds: float | None) -> None:
        stop = threading.Event()
        dispenser = Dispenser(using, rules=rules)
        before = {
            number: signal.signal(number, lambda *_: _set(stop))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        self.say(f"dispensing {', '.join(rules) or 'all rules'} as {dispenser.name}")
        try:
            dispenser.run(stop=stop, seconds=seconds)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            dispenser.leave()
        self.say("ended")


def _set(stop: threading.Event) -> None:
    """From a thread: the signal may come while this one holds the event's lock."""
    threading.Thread(target=stop.set, daemon=True).start()
