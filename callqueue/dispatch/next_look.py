"""When a group of rules is looked at again. Instants are monotonic seconds. No statements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from callqueue.aside import Errand
from callqueue.clocks import Us
from callqueue.ledger.account import GLANCED, Glance

# seconds until the next try where another pass has the rules: at first, and at most, growing. Who
# fails so many times is not up against passes: an operator has the rules.
LOCKED, BUSY, TRIES = 0.005, 0.04, 40
AGREE = 0.02  # seconds between two tries to agree with the other dispensers, at first
# seconds after which a blocked group is looked at again whatever it waits for: limits and holds may
# change
REVIEW = 0.5
TOGETHER = 0.01  # seconds between two passes that each release what there was room for
FRUITLESS = 2  # rounds that go on at once though they release nothing


@dataclass(frozen=True)
class Room:
    """For how many HTTP calls, and how many others, whoever makes what a pass releases has room."""

    http: float = math.inf
    handled: float = math.inf

    @property
    def most(self) -> float:
        return max(0, self.http) + max(0, self.handled)

    @property
    def only_http(self) -> bool | None:
        """Whether there is room for HTTP calls only, or for others only; None: for both."""
        return None if self.http >= 1 and self.handled >= 1 else self.http >= 1

    def takes_more_than(self, count: int, *, is_http: bool) -> bool:
        """Whether it takes one more HTTP call, or one more other, than `count` of them."""
        return count < (self.http if is_http else self.handled)

    def is_more_than(self, other: Room) -> bool:
        """Whether it has more room than the other, of either kind."""
        return self.http > max(0, other.http) or self.handled > max(0, other.handled)


ROOMY = Room()  # where workers make them
NO_ROOM = Room(0, 0)


@dataclass(frozen=True)
class Wait:
    """What the calls wait for that a pass leaves behind; `a | b` is what those of both wait for."""

    until: Us | None = None  # when the first may go, in ledger time
    on_answer: bool = False
    is_unfinished: bool = False  # for nothing: the pass did not come to look at them
    is_mid_round: bool = False  # it did not come to the last of the keys that take turns
    on_room: bool = False  # for whoever makes them to have made some

    @classmethod
    def for_room(cls, instant: Us | None) -> Wait:
        """For room in a limit: from an instant; None: until an answer comes."""
        return cls(until=instant, on_answer=instant is None)

    def __or__(self, other: Wait) -> Wait:
        instants = [at for at in (self.until, other.until) if at is not None]
        return Wait(
            min(instants, default=None),
            self.on_answer or other.on_answer,
            self.is_unfinished or other.is_unfinished,
            self.is_mid_round or other.is_mid_round,
            self.on_room or other.on_room,
        )


@dataclass(frozen=True)
class Streak:
    """How many passes over a group had no success, one after the other: by it patience grows."""

    locked: int = 0  # another pass had the rules
    fruitless: int = 0  # nothing was released; passes in the middle of a round do not count
    # nothing was released, and there was nothing to wait for: what is ready is locked
    in_vain: int = 0


NO_STREAK = Streak()


@dataclass(frozen=True)
class NextLook:
    """When a group of rules is looked at again: `after` so many seconds, or earlier."""

    after: float = 0.0
    on_ready: bool = False  # only once one of the rules has a call that is ready
    on_answer: bool = False  # earlier, once other numbers than these are open or untold
    open_attempts: int | None = None  # None: too many to count
    untold_attempts: int | None = None
    goes_on: bool = False  # at once: calls are left that this pass did not look at
    joins: bool = False  # after the dispenser has agreed with the others on what is in force
    on_room: bool = False  # earlier, if whoever makes the calls has more room
    streak: Streak = NO_STREAK


def when_not_locked(last: Streak) -> NextLook:
    """After a pass that could not lock: soon again; after TRIES in a row, no sooner than REVIEW."""
    # Permits make many passes, and look this often, too: who waited longer would never have a turn.
    streak = replace(last, locked=last.locked + 1, fruitless=last.fruitless + 1)
    after = min(BUSY, _backoff(LOCKED, last.locked)) if last.locked < TRIES else REVIEW
    return NextLook(after=after, streak=streak)


def when_outdated(last: Streak) -> NextLook:
    """The book is not what all dispensers agree on, or not all of them know yet."""
    streak = replace(last, locked=0, fruitless=last.fruitless + 1)
    return NextLook(after=AGREE, joins=True, streak=streak)


def when_passed(
    wait: Wait,
    opens_in: float | None,
    last: Streak,
    *,
    has_released: bool,
    open_attempts: int,
    untold_attempts: int,
    poll: float,
) -> NextLook:
    """After a pass that counted and chose. `opens_in`: seconds until a blocked call may fit, None
    where nobody knows; `poll`: seconds between two looks for calls that are ready.
    """
    fruitless = 0 if has_released else last.fruitless + (not wait.is_mid_round)
    streak = replace(last, locked=0, fruitless=fruitless)
    is_worth_more = wait.is_mid_round or fruitless < FRUITLESS
    if wait.is_unfinished and is_worth_more and not wait.on_room:
        look = NextLook(goes_on=True)
    elif opens_in is not None or wait.on_answer or wait.on_room:
        look = NextLook(after=REVIEW if opens_in is None else min(REVIEW, opens_in))
    else:
        in_vain = 0 if has_released else last.in_vain + 1
        look = NextLook(after=_backoff(poll, in_vain - 1) if in_vain > 1 else 0.0, on_ready=True)
        streak = replace(streak, in_vain=in_vain)
    return replace(
        look,
        on_answer=wait.on_answer,
        on_room=wait.on_room,
        open_attempts=open_attempts if open_attempts < GLANCED else None,
        untold_attempts=untold_attempts if untold_attempts < GLANCED else None,
        streak=streak,
    )


def _backoff(first: float, times: int) -> float:
    return min(REVIEW, first * 2.0 ** min(times, 10))


@dataclass
class RuleGroup:
    """Rules that one pass serves together, and when the next pass is."""

    rules: tuple[str, ...]
    next_look: NextLook = field(default=NextLook(on_ready=True))
    look_at: float = 0.0
    # when the pass began whose releases may be unpublished; 0: nothing is unpublished
    unpublished_from: float = 0.0
    # the worker's name in what a pass has begun, perhaps committed, and nobody makes; "": nothing
    doubtful_worker: str = ""
    sending: Errand | None = None  # what publishes the last pass's releases, beside the loop
    passed_at: float = 0.0  # when a pass was made last
    room_left: Room = ROOMY  # after that pass, with whoever makes the calls
    _newest_end: int = 0  # when the last attempt ended, as far as is known

    @property
    def rests(self) -> bool:
        return self.next_look.on_ready

    @property
    def waits_for_answer(self) -> bool:
        return self.next_look.on_answer

    @property
    def is_in_doubt(self) -> bool:
        """Whether its last pass may be committed, unpublished: the commit or publishing failed."""
        return bool(self.unpublished_from) and self.sending is None

    def is_due(self, now: float) -> bool:
        # not before it is known what became of the last pass
        return not self.rests and self.look_at <= now and not self.unpublished_from

    def set_next_look(self, look: NextLook, now: float) -> None:
        self.next_look, self.look_at, self.passed_at = look, now + look.after, now

    def wake(self) -> None:
        self.next_look, self.look_at = replace(self.next_look, on_ready=False), 0.0

    def want_pass_soon(self) -> None:
        """Want a pass soon, for several calls together: whoever makes them has made some."""
        self.look_at = min(self.look_at, self.passed_at + TOGETHER)

    def put_off(self, until: float) -> None:
        """Make no pass before `until`: something went wrong. A group that rests goes on resting."""
        if not self.rests:
            self.look_at = until

    def notice_answers(self, glances: Mapping[str, Glance]) -> None:
        """Want a pass at once where glances, by rule, show other numbers, or that one has ended."""
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
