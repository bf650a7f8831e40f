"""callqueue_cancel: ends calls that no worker has begun, in bulk."""

from __future__ import annotations

from typing import Any

from callqueue import states
from callqueue.management.bulk import BulkCommand
from callqueue.operations import bulk


class Command(BulkCommand):
    help = "End calls that no worker has begun: all that wait, unless the options say which."
    verb, past = "cancel", "cancelled"

    def statuses_help(self) -> str:
        return "new, error, dispatched: those not begun (default: all three)"

    def run(self, using: str, options: dict[str, Any]) -> None:
        legal = states.Move.CANCEL.sources
        self.act(using, options, self.pick(options, legal, legal), bulk.cancel)
