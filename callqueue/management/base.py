"""What every command shares: its database, options, exit codes, and what it prints, and how.

0 done, 1 found a problem (the database or the broker away is one), 2 wrong use, 141 where whoever
read the output has left. A command parses, calls one function, and reports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TextIO

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, InterfaceError, connections
from kombu.exceptions import OperationalError as BrokerError

from callqueue import database
from callqueue.exceptions import CallQueueError
from callqueue.limits.durations import WrongDuration, parse_duration
from callqueue.models import CallQueue
from callqueue.texts import in_one_line

PROBLEM, WRONG_USE, INTERRUPTED = 1, 2, 130
UNREAD = 141  # as a shell says of a program whose reader left: 128 and SIGPIPE
PATIENCE = 5  # seconds that connecting to the database may take; and that it is tried again
SHOWN_EVERY = 0.1  # seconds between two updates of a line of progress
Update = Callable[..., None]  # (done, total=None), as often as one likes


class CallQueueCommand(BaseCommand):
    """A command of callqueue: `run` is its body, and errors become one line and an exit code."""

    is_repeatable = True  # run again, whole, where its connection is cut

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        if not parser.called_from_command_line:  # a wrong option ends with 2 from call_command, too
            parser.error = _raise_wrong_use  # type: ignore[method-assign]
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            help="the database with callqueue's tables (default: as routed)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        using = str(CallQueue.objects.db_for_write) if alias is None else alias
        if using not in connections:
            raise wrong_use(f"--database: there is no {using!r} in DATABASES")
        database.set_connect_timeout(using, PATIENCE)
        try:
            if self.is_repeatable:
                database.persist(
                    using, lambda: self.run(using, options), during="command", seconds=PATIENCE
                )
            else:
                self.run(using, options)
        except (WrongDuration, CallQueueError) as error:
            raise wrong_use(str(error)) from None
        except (DatabaseError, InterfaceError) as error:
            raise problem(_diagnose_database(using, error)) from None
        except (BrokerError, ConnectionError) as error:
            raise problem(f"the broker is away: {in_one_line(error)}") from None
        except KeyboardInterrupt:
            raise CommandError("stopped", returncode=INTERRUPTED) from None

    def run(self, using: str, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Print a line for the operator; what a terminal would act on is escaped."""
        self.write(printable(text))

    def say_json(self, document: Any) -> None:
        self.write(json.dumps(document, indent=2, default=str))

    def write(self, text: str) -> None:
        """Print text and a line's end, at once. SystemExit where nobody reads any more."""
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except BrokenPipeError:  # not the broker's
            if self.stdout._out is sys.stdout:
                _let_go_of_stdout()
            raise SystemExit(UNREAD) from None


def printable(text: str) -> str:
    """The text in one line, with escapes for what is not seen or would move a cursor."""
    return (
        text
        if text.isprintable()
        else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    )


def with_noun(number: int, noun: str = "call") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def problem(why: str) -> CommandError:
    return CommandError(printable(why), returncode=PROBLEM)


def wrong_use(why: str) -> CommandError:
    return CommandError(printable(why), returncode=WRONG_USE)


def duration_of(value: str | timedelta | None) -> timedelta | None:
    """An option as a duration; None: not given. WrongDuration says how one is written."""
    return parse_duration(value) if isinstance(value, str) else value


def key_of(text: str | None) -> Any:
    """What `--key` says, JSON as what it stands for; "" where not given. Empty is wrong use."""
    if text == "":  # a script's empty variable, which would pause or cancel all keys
        raise wrong_use("--key: is empty; leave it out for all keys")
    if not text or not text.startswith("{"):
        return text or ""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong_use(f"--key: not JSON: {error}") from None


def table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()
) -> Iterator[str]:
    """The lines of a table; columns in `right` are set to the right. What is unseen is escaped."""
    heading, rows = list(map(printable, heading)), [list(map(printable, row)) for row in rows]
    widths = [max(len(row[i]) for row in [heading, *rows]) for i in range(len(heading))]
    for row in [heading, *rows]:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


@contextmanager
def progress(
    label: str, *, stream: TextIO | None = None, wanted: bool = True
) -> Iterator[Update | None]:
    """A line on standard error, gone after the block, which gets what updates it; None: no line."""
    stream = sys.stderr if stream is None else stream
    if not wanted or not stream.isatty():
        yield None
        return
    shown_at = 0.0

    def update(done: int, total: int | None = None) -> None:
        nonlocal shown_at
        if (now := time.monotonic()) - shown_at < SHOWN_EVERY:
            return
        shown_at = now
        of = f" of {total:,} ({100 * done // total} %)" if total else ""
        stream.write(f"\r{label} {done:,}{of}\x1b[K")
        stream.flush()

    stream.write(f"\r{label} ...")
    stream.flush()
    try:
        yield update
    finally:
        stream.write("\r\x1b[K")
        stream.flush()


def _raise_wrong_use(message: str) -> NoReturn:
    raise wrong_use(f"Error: {message}")


def _let_go_of_stdout() -> None:
    """Send stdout nowhere, so that Python at its end does not write again what nobody reads."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _diagnose_database(using: str, error: Exception) -> str:
    """What is wrong with it, in words. Connects anew to know that, unless in a transaction."""
    connection, hint = connections[using], ""
    if not connection.in_atomic_block:
        hint = " (are all migrations applied? see callqueue_doctor)"
        try:
            connection.close()
            connection.ensure_connection()
        except Exception as reason:
            return f"the database is away: {in_one_line(reason)}"
    return f"the database refused: {in_one_line(error)}{hint}"
