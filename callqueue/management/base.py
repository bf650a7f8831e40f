"""What every command shares: the database it works on, durations, JSON, and exit codes.

0 done, 1 found a problem (the database or the broker away is one), 2 wrong use, 141 where whoever
read the output has left. A command parses, calls one function, and reports.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, InterfaceError, connections
from kombu.exceptions import OperationalError as BrokerError

from callqueue import database
from callqueue.exceptions import CallQueueError
from callqueue.limits.durations import WrongDuration, parse_duration
from callqueue.models import CallQueue
from callqueue.security.redaction import printable
from callqueue.texts import in_one_line

PROBLEM, WRONG_USE, INTERRUPTED = 1, 2, 130
UNREAD = 141  # as a shell says of a program whose reader left: 128 and SIGPIPE
PATIENCE = 5  # seconds that connecting to the database may take


class CallQueueCommand(BaseCommand):
    """A command of callqueue: `run` is its body, and errors become one line and an exit code.

    What `is_repeatable` is run again, whole, where its connection is cut.
    """

    is_repeatable = True

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """A wrong option ends with 2 from call_command, too."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        if not parser.called_from_command_line:
            parser.error = _refuse  # type: ignore[method-assign]
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
        database.connect_within(using, PATIENCE)
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
            raise problem(_what_ails(using, error)) from None
        except (BrokerError, ConnectionError) as error:
            raise problem(f"the broker is away: {in_one_line(error)}") from None
        except KeyboardInterrupt:
            raise CommandError("stopped", returncode=INTERRUPTED) from None

    def run(self, using: str, options: dict[str, Any]) -> None:
        """What the command does."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """One line for the operator, who may have a terminal: what it would act on is escaped."""
        self.write(printable(text))

    def say_json(self, document: Any) -> None:
        """The one JSON document of a command that was asked for it."""
        self.write(json.dumps(document, indent=2, default=str))

    def write(self, text: str) -> None:
        """Text as it is, and a line's end, at once. SystemExit where nobody reads any more, as
        behind `| head`.
        """
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except BrokenPipeError:  # not the broker's
            if self.stdout._out is sys.stdout:
                _let_go_of_stdout()
            raise SystemExit(UNREAD) from None


def counted(number: int, noun: str = "call") -> str:
    """The number with its noun, which ends in "s" where there is not one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def problem(why: str) -> CommandError:
    """The command found a problem."""
    return CommandError(printable(why), returncode=PROBLEM)


def wrong_use(why: str) -> CommandError:
    """The command was used wrongly."""
    return CommandError(printable(why), returncode=WRONG_USE)


def duration(value: str | timedelta | None) -> timedelta | None:
    """An option that is a duration; WrongDuration says how one is written."""
    return parse_duration(value) if isinstance(value, str) else value


def key_of(text: str | None) -> Any:
    """A --key option: a string, or a mapping written as JSON."""
    if not text or not text.startswith("{"):
        return text or ""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong_use(f"--key: not JSON: {error}") from None


def _refuse(message: str) -> NoReturn:
    raise wrong_use(f"Error: {message}")


def _let_go_of_stdout() -> None:
    """So that Python, at its end, does not try once more to write what nobody reads."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _what_ails(using: str, error: Exception) -> str:
    connection, hint = connections[using], ""
    if not connection.in_atomic_block:
        hint = " (are all migrations applied? see callqueue_doctor)"
        try:
            connection.close()
            connection.ensure_connection()
        except Exception as reason:
            return f"the database is away: {in_one_line(reason)}"
    return f"the database refused: {in_one_line(error)}{hint}"
