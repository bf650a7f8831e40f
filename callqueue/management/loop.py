"""The loop of a dispenser as a command runs it: its options, and how it is told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import CommandParser
from django.db import DatabaseError, InterfaceError

from callqueue import conf, tables
from callqueue.look import doctor
from callqueue.management.base import wrong_use


def add_options(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--for", dest="seconds", type=float, metavar="SECONDS", help="end after this time")
    add("--rule", dest="rules", nargs="+", action="extend", metavar="R", help="only these")


def parse_options(using: str, options: dict[str, Any]) -> tuple[list[str], float | None]:
    """The rules (none: all), and for how many seconds (None: without end); else wrong use. A
    database that is away is left to the loop; one that answers without our tables is an error.
    """
    try:
        tables.ledger_state(using).exists()
    except (DatabaseError, InterfaceError):
        if not doctor.database_refusal(using):
            raise
    rules, seconds = options["rules"] or [], options["seconds"]
    if seconds is not None and not seconds >= 0:
        raise wrong_use(f"--for: {seconds:g} is not a number of seconds")
    for rule in rules:
        conf.current().rule(rule)  # else UnknownRule
    return rules, seconds


@contextmanager
def stop_at_signal() -> Iterator[threading.Event]:
    """An event, set once SIGTERM or SIGINT has come; more of them change nothing in the block."""
    stop = threading.Event()

    def end(*_: Any) -> None:
        # in a thread: the signal may come while this one holds the event's lock
        threading.Thread(target=stop.set, daemon=True).start()

    before = [(one, signal.signal(one, end)) for one in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield stop
    finally:
        for number, handler in before:
            signal.signal(number, handler)
