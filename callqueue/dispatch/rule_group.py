"""What a dispenser remembers of a group of rules between two passes: when it is looked at again.

In: a pass's NextLook, and what others tell: a call is ready, an attempt has ended. No statement is
made here, and no clock is read; instants are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from callqueue.aside import Errand
from callqueue.dispatch.next_look import NextLook
from callqueue.ledger.charges import Glance


@dataclass
class RuleGroup:
    """Rules that one pass serves together, and when the next pass is."""

    rules: tuple[str, ...]
    next_look: NextLook = field(default=NextLook(on_ready=True))
    look_at: float = 0.0
    # when the pass began whose releases may be unpublished; 0: all are
    unpublished_from: float = 0.0
    sending: Errand | None = None  # what publishes them
    _newest_end: int = 0  # when the last attempt ended, as far as is known

    @property
    def rests(self) -> bool:
        """Whether no pass is wanted until a call is ready."""
        return self.next_look.on_ready

    @property
    def waits_for_answer(self) -> bool:
        """Whether an attempt that ends, or is known to be sent, is a reason for a pass."""
        return self.next_look.on_answer

    def is_due(self, now: float) -> bool:
        """Whether a pass is wanted now."""
        return not self.rests and self.look_at <= now and self.sending is None

    def obey(self, look: NextLook, now: float) -> None:
        """A pass has ended: the next one is when it says."""
        self.next_look, self.look_at = look, now + look.after

    def wake(self) -> None:
        """A call is ready: a pass is wanted at once."""
        self.next_look, self.look_at = replace(self.next_look, on_ready=False), 0.0

    def put_off(self, until: float) -> None:
        """Something went wrong: no pass before `until`. A group that rests goes on resting."""
        if not self.rests:
            self.look_at = until

    def notice(self, glances: Mapping[str, Glance]) -> None:
        """By rule, what may have made room: where that is news, a pass is wanted at once."""
        seen = [glances[rule] for rule in self.rules]
        open_attempts, untold = sum(one.open for one in seen), sum(one.untold for one in seen)
        newest_end = max(one.newest_end for one in seen)
        look = self.next_look
        if (
            look.open_attempts not in (None, open_attempts)
            or look.untold_attempts not in (None, untold)
            or (self._newest_end and newest_end != self._newest_end)
        ):
            self.next_look = replace(look, open_attempts=open_attempts, untold_attempts=untold)
            self.look_at = 0.0
        self._newest_end = newest_end
