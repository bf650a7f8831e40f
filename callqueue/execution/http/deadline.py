"""What one call may do and how long it may take: policy, timeouts, gate, and the deadline that all
hops share.

The words that the rooms of the wire have in common. Nothing here touches a network.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import requests

from callqueue import clocks

clock = clocks.monotonic
MOST_TURNS = 32_768  # reads and chunks that an answer may come in, besides one for each KiB of it
WASTE = (
    512 * 1024
)  # bytes off the network that are no body: heads, chunks' sizes, trailers, what unfolds to nothing
_SPELL = 64  # turns after which other threads get theirs
_REST = 0.001  # seconds that they get


def now() -> float:
    """Seconds, from a clock that never jumps; a test may put another in its place."""
    return clock()


@dataclass(frozen=True)
class Policy:
    """What may be called, whom to trust, and how much of a body to read. `allowed_networks` are
    CIDR ranges.

    At most `redirects` are followed, and none to one of `closed_hosts`. `secrets` are values that
    the request holds and that stay with its origin; where they are bound to places, no redirect
    leaves it.
    """

    allowed_hosts: tuple[str, ...] = ("*",)
    allowed_networks: tuple[str, ...] = ()
    verify: bool | str = True
    redirects: int = 0
    closed_hosts: tuple[str, ...] = ()
    max_response_bytes: int = 1048576
    secrets: tuple[str, ...] = field(default=(), repr=False)
    is_bound: bool = False


@dataclass(frozen=True)
class Timeouts:
    """Seconds: for one connection, between two bytes, and from name resolution to the last byte,
    all hops together.
    """

    connect: float = 3.05
    read: float = 27
    total: float = 60


class Gate:
    """The last door before the socket. This one is always open.

    `sent_at` is the clockwork.monotonic() just after the last byte of the request, of the latest
    hop; None before that. `ends` is when the journey must have ended, whatever its timeouts say.
    """

    sent_at: float | None = None
    ends: float = math.inf

    def wait(self) -> None:
        """Return when the first byte may go, or raise Dropped. Called once per hop, connected and
        composed.

        The time spent here counts against no timeout. Called once more where the server hung up
        meanwhile: then nothing of this hop has been sent, and there is a new connection.
        """


class Dropped(Exception):
    """The gate refuses: nothing of this hop was sent."""


class Failed(Exception):
    """There will be no answer; the text says why, and is safe to show."""

    is_final = False


class Refused(Failed):
    """By policy, or because no request can be made of this: another time will not be better."""

    is_final = True


class Flooded(Failed):
    """The server keeps this process busy with what is no answer; the text says with what."""


_TELLING: dict[type[Exception], str] = {
    requests.exceptions.MissingSchema: "its URL has no scheme",
    requests.exceptions.InvalidURL: "its URL is not valid",
    requests.exceptions.InvalidHeader: "one of its headers is not valid",
    requests.exceptions.InvalidJSONError: "its JSON holds something that JSON has no form for",
}


def refuse_to_compose(error: Exception) -> NoReturn:
    """The error's own text may repeat a secret, so it stays here."""
    why = _TELLING.get(type(error), type(error).__name__)
    raise Refused(f"the request cannot be made: {why}") from None


class Target(NamedTuple):
    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Journey:
    """One call with all its hops: what it may do, when it must have ended, and whether anything was
    sent.
    """

    def __init__(self, policy: Policy, timeouts: Timeouts, gate: Gate) -> None:
        self.policy = policy
        self.timeouts = timeouts
        self.gate = gate
        self.deadline = min(now() + timeouts.total, gate.ends)
        self.in_gate = 0.0
        self.is_sent = False
        self.unfolded = 0  # bytes of bodies, as they are kept
        self._off_network = 0
        self._turns = 0

    def took(self, count: int) -> None:
        """So many bytes came off the network, in one read."""
        self._off_network += count
        waste = self._off_network - self.unfolded
        if waste > WASTE + self._off_network // 4:
            raise Flooded(f"{self._off_network // 1024} KiB came that are hardly any body")
        if waste > WASTE // 4:
            time.sleep(_REST)
        self.turn()

    def turn(self) -> None:
        """A read, or a chunk: it takes this process much the same time whatever it brings."""
        self._turns += 1
        if self._turns > MOST_TURNS + self._off_network // 1024:
            raise Flooded(f"it came in more than {MOST_TURNS} pieces")
        if self._turns % _SPELL == 0:
            time.sleep(_REST)

    def left(self, bound: float) -> float:
        """Seconds that the next wait may take. TimeoutError where the total is used up."""
        left = self.deadline - now()
        if left <= 0:
            raise TimeoutError(f"{self._whole()} is over")
        return left if left < bound else bound

    def pass_gate(self) -> float:
        """Seconds spent in the gate, by which the deadline moves, though not past the gate's
        own.
        """
        before = now()
        self.gate.wait()
        waited = now() - before
        self.in_gate += waited
        self.deadline = min(self.deadline + waited, self.gate.ends)
        return waited

    def why_late(self, bound_name: str, bound: float) -> str:
        """Which timeout it was that struck just now."""
        if self.deadline <= now():
            return self._whole()
        return f"the {bound_name} timeout of {bound:g} s"

    def _whole(self) -> str:
        return (
            "the lease"
            if self.deadline == self.gate.ends
            else f"the total timeout of {self.timeouts.total:g} s"
        )
