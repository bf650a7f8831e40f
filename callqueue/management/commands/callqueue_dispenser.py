"""callqueue_dispenser: releases calls for as long as it runs, or once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandParser
from django.db import DatabaseError, InterfaceError

from callqueue.dispatch import publisher
from callqueue.dispatch.dispenser import Dispenser
from callqueue.ledger import ledger_time
from callqueue.look import alive, doctor
from callqueue.management import loop
from callqueue.management.base import CallQueueCommand, problem, with_noun
from callqueue.texts import host_name, in_one_line


class Command(CallQueueCommand):
    help = (
        "Release calls as fast as their rules allow. "
        "SIGTERM and SIGINT end it cleanly; any number may run."
    )
    is_repeatable = False  # it looks after itself

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add("--once", action="store_true", help="release what may go now, and end")
        loop.add_options(parser)
        add(
            "--alive",
            action="store_true",
            help="for a health check: exit with 1 where no dispenser of this host is alive",
        )

    def run(self, using: str, options: dict[str, Any]) -> None:
        if options["alive"]:
            self._check_alive(using)
            return
        rules, seconds = loop.parse_options(using, options)
        if options["once"]:
            self._release_once(using, rules)
        else:
            self._run_until_told(using, rules, seconds)

    def _check_alive(self, using: str) -> None:
        try:
            now = ledger_time.now(using)
            signs = alive.read_signs(using, now)
        except (DatabaseError, InterfaceError) as error:  # it says nothing of the dispenser
            self.say(f"nobody can know: the database is away: {in_one_line(error)}")
            return
        others = (alive.WORKER, alive.BUSY, alive.BEAT)
        here = [one for one in signs if one.name.startswith(f"{host_name()}:")]
        here = [one for one in here if one.kind not in others]
        if not any(one.is_alive for one in here):
            silent = alive.silence_s(here, now)
            ago = "ever" if silent is None else f"for {silent:.0f} s"
            raise problem(f"no dispenser of this host has given a sign of life {ago}")
        self.say(f"a dispenser of this host was seen {alive.silence_s(here, now):.0f} s ago")

    def _release_once(self, using: str, rules: Sequence[str]) -> None:
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
            dispenser.wait_until_clock_settles(threading.Event())
            count = dispenser.run_once()
        finally:
            dispenser.leave()
        if refused:
            raise problem(f"the broker is away: {refused[0]}; what was released waits again")
        self.say(f"released {with_noun(count)}")

    def _run_until_told(self, using: str, rules: Sequence[str], seconds: float | None) -> None:
        dispenser = Dispenser(using, rules=rules)
        with loop.stop_at_signal() as stop:
            self.say(f"dispensing {', '.join(rules) or 'all rules'} as {dispenser.name}")
            try:
                dispenser.run(stop=stop, seconds=seconds)
            finally:
                dispenser.leave()
        self.say("ended")
