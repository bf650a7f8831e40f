"""What one call may do and how long it may take: policy, timeouts, gate, and the deadline that all hops share.

The words that the rooms of the wire have in common. Nothing here touches a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import requests

from callqueue import clockwork

clock = clockwork.monotonic


def now() -> float:
    """Seconds, from a clock that never jumps; a test may put another in its place."""
    return clock()


@dataclass(frozen=True)
class Policy:
    """What may be called, whom to trust, and how much of a body to read. `allowed_networks` are CIDR ranges.

    At most `redirects` are followed, and none to one of `closed_hosts`.
    """

    allowed_hosts: tuple[str, ...] = ("*",)
    allowed_networks: tuple[str, ...] = ()
    verify: bool | str = True
    redirects: int = 0
    closed_hosts: tuple[str, ...] = ()
    max_response_bytes: int = 1048576


@dataclass(frozen=True)
class Timeouts:
    """Seconds: for one connection, between two bytes, and from name resolution to the last byte, all hops together."""

    connect: float = 3.05
    read: float = 27
    total: float = 60


class Gate:
    """The last door before the socket. This one is always open.

    `sent_at` is the clockwork.monotonic() just after the last byte of the request, of the latest hop; None before that.
    """

    sent_at: float | None = None

    def wait(self) -> None:
        """Return when the first byte may go, or raise Dropped. Called once per hop, connected and composed.

        The time spent here counts against no timeout. Called once more where the server hung up meanwhile: then
        nothing of this hop has been sent, and there is a new connection.
        """


class Dropped(Exception):
    """The gate refuses: nothing of this hop was sent."""


class Failed(Exception):
    """There will be no answer; the text says why, and is safe to show."""

    is_final = False


class Refused(Failed):
    """By policy, or because no request can be made of this: another time will not be better."""

    is_final = True


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
    """One call with all its hops: what it may do, when it must have ended, and whether anything was sent."""

    def __init__(self, policy: Policy, timeouts: Timeouts, gate: Gate) -> None:
        self.policy = policy
        self.timeouts = timeouts
        self.gate = gate
        self.deadline = now() + timeouts.total
        self.is_sent = False

    def left(self, bound: float) -> float:
        """Seconds that the next wait may take. TimeoutError where the total is used up."""
        left = self.deadline - now()
        if left <= 0:
            raise TimeoutError(f"the total timeout of {self.timeouts.total:g} s is over")
        return left if left < bound else bound

    def pass_gate(self) -> float:
        """Seconds spent in the gate, by which the deadline moves."""
        before = now()
        self.gate.wait()
        waited = now() - before
        self.deadline += waited
        return waited

    def why_late(self, bound_name: str, bound: float) -> str:
        """Which timeout it was that struck just now."""
        if self.deadline <= now():
            return f"the total timeout of {self.timeouts.total:g} s"
        return f"the {bound_name} timeout of {bound:g} s"
