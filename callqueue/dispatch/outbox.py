"""What a dispenser has released and has published: in a thread beside its loop, which waits for it
a moment and then goes on with other groups. A group has no pass before what it released last is
published, or undone.

In: groups, and attempts of theirs that a pass has released. Out: messages; undone releases, where
nobody was told of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta

from callqueue import aside, clocks, database, transitions
from callqueue.dispatch import publisher
from callqueue.dispatch.charging import Released
from callqueue.dispatch.rule_group import RuleGroup

PROMPT = 0.1  # seconds that the loop waits until what was released is published
SLOW = 8  # groups that have something published for longer, at most, before others are let be

Refused = Callable[[RuleGroup, publisher.BrokerAway], None]


class Outbox:
    """The messages of one dispenser; `refused` is told where the broker was away."""

    def __init__(self, using: str, publish: publisher.Publish, refused: Refused) -> None:
        self.using, self.publish, self.refused = using, publish, refused

    def send(self, group: RuleGroup, released: Sequence[Released], *, beside: bool) -> None:
        """Have these published, `beside` the loop or here. Raises what is not the broker's: then
        they are to be undone.
        """
        messages = publisher.pack(released)
        if beside:
            group.sending = aside.Errand("publisher", lambda: self._send_beside(messages))
            self.look(group, PROMPT)
            return
        try:
            self.publish(self.using, messages)
        except publisher.BrokerAway as error:
            self.refused(group, error)
        group.unpublished_from = 0.0

    def look(self, group: RuleGroup, within: float = 0.0) -> None:
        """Notice that what the group had published is, or is undone, if it is within so many
        seconds. Raises as `send` does.
        """
        sending = group.sending
        if sending is None or not sending.done.wait(within):
            return
        group.sending = None
        if isinstance(sending.error, publisher.BrokerAway):
            self.refused(group, sending.error)
        elif sending.error is not None:
            raise sending.error
        group.unpublished_from = 0.0

    def undo(self, groups: Iterable[RuleGroup]) -> None:
        """Let calls wait again whose release, as far as this dispenser knows, nobody was told of:
        the database went away at the commit or soon after, or something else was raised. What
        another dispenser has released of these rules meanwhile, and no worker has begun, goes again
        too.
        """
        for group in groups:
            if group.unpublished_from and group.sending is None:
                now = database.clock(self.using)
                since = now - timedelta(seconds=clocks.monotonic() - group.unpublished_from)
                transitions.undo_released(self.using, group.rules, since)
                group.unpublished_from = 0.0

    def end(self, groups: Collection[RuleGroup], within: float) -> None:
        """Wait until all is published, so many seconds, and undo the rest."""
        end = time.monotonic() + within
        for group in groups:
            if group.sending is not None:
                group.sending.done.wait(max(0.0, end - time.monotonic()))
                if group.sending.done.is_set() and group.sending.error is None:
                    group.unpublished_from = 0.0
                group.sending = None
        self.undo(groups)

    def _send_beside(self, messages: list[publisher.Message]) -> None:
        with database.kept_connection(self.using):
            self.publish(self.using, messages)


def is_full(groups: Iterable[RuleGroup]) -> bool:
    """Whether no other group may release anything before some of this is published."""
    return sum(group.sending is not None for group in groups) >= SLOW
