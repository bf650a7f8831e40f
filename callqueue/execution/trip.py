"""One request on its way: what it may do, when it must have ended, and what its answer may cost.

And the addresses of its host, found within that time, every one of which may be called. Nothing
else here touches a network. Texts of errors are safe to show: they repeat no header, body or query.
"""

from __future__ import annotations

import math
import os
import socket
import ssl
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from callqueue import clocks
from callqueue.execution.starvation import starved
from callqueue.security.addresses import literal_address, refusal

clock = clocks.monotonic
MOST_TURNS = 32_768  # reads and chunks that an answer may come in, besides one for each KiB of it
# bytes off the network that are no body: heads, chunks' sizes, trailers, what unfolds to nothing
WASTE = 512 * 1024
_SPELL = 64  # turns after which other threads get theirs
_REST = 0.001  # seconds that they get


class Dropped(Exception):
    """The gate refuses, or this process lacks what a request takes: nothing was sent."""


class Starved(Dropped):
    """The latter: no fault of the call's, and none of the other side's."""


class Failed(Exception):
    """There will be no answer; the text says why."""


class Refused(Failed):
    """By policy, or because no request can be made of this: another time will not be better."""


class Flooded(Failed):
    """The server keeps this process busy with what is no answer; the text says with what."""


class Policy(NamedTuple):
    """What may be called, whom to trust, and how much of a body to read. `allowed_networks` are
    CIDR ranges.
    """

    allowed_hosts: tuple[str, ...] = ("*",)
    allowed_networks: tuple[str, ...] = ()
    verify: bool | str = True
    max_response_bytes: int = 1048576


class Timeouts(NamedTuple):
    """Seconds: for one connection, between two bytes, and from the name to the last byte."""

    connect: float = 3.05
    read: float = 27
    total: float = 60


class Gate:
    """What a request passes just before its first byte. This gate is always open.

    `sent_at` is clocks.monotonic() just after the last byte of the request; None where no byte of
    it may have reached the network. `ends` is when the request must have ended, on that clock,
    whatever its timeouts say.
    """

    sent_at: float | None = None
    ends: float = math.inf
    is_passed = False  # something was sent, or is about to be
    is_whole = False  # the last byte has left
    arrived: float | None = None  # when the other side had all of it, as far as that is known
    is_late = False  # it had not at the last look
    is_told = False  # the ledger knows when it was sent

    def arrived_by(self, sent: float, answered: float) -> float:
        """The latest instant at which the other side can have had all of what was sent then, as far
        as this process saw.
        """
        if self.arrived is not None:
            return max(sent, self.arrived)
        return answered if self.is_late else sent

    def has_arrived(self) -> bool:
        """Whether the other side has all that was sent. A connection puts in what can tell."""
        return True

    def wait(self) -> None:
        """Return when the first byte may go, or raise Dropped. Called connected and composed.

        The time spent here counts against no timeout. Called once more where the server hung up
        meanwhile: then nothing has been sent, and there is a new connection.
        """


def reason_of(error: Exception) -> str:
    """A network error in a few words, without the objects that urllib3 puts into its texts."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted, {error.verify_message}"
    said = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
    return str(said) or type(error).__name__


def now() -> float:
    """Seconds, from a clock that never jumps; a test may put another in its place."""
    return clock()


class Trip:
    """The end of one request, its gate, and what its answer has cost so far."""

    def __init__(self, timeouts: Timeouts, gate: Gate, policy: Policy) -> None:
        self.timeouts, self.gate, self.policy = timeouts, gate, policy
        self.ends = min(clock() + timeouts.total, gate.ends)
        self.in_gate = 0.0
        self.kept = 0  # bytes of its body, decoded
        self._off_network = self._turns = 0

    def left(self, bound: float = math.inf) -> float:
        """Seconds that the next wait may take. TimeoutError where the total is used up."""
        left = self.ends - clock()
        if left <= 0:
            raise TimeoutError(f"{self._whole()} is over")
        return left if left < bound else bound

    def pass_gate(self) -> float:
        """Seconds spent in the gate. The end moves by them, but not past the gate's own."""
        before = clock()
        self.gate.wait()
        waited = clock() - before
        self.in_gate += waited
        self.ends = min(self.ends + waited, self.gate.ends)
        return waited

    def why_late(self, name: str, bound: float) -> str:
        """Which timeout it was that struck just now."""
        return self._whole() if self.ends <= clock() else f"the {name} timeout of {bound:g} s"

    def _whole(self) -> str:
        if self.ends == self.gate.ends:
            return "the lease"
        return f"the total timeout of {self.timeouts.total:g} s"

    def took(self, count: int) -> None:
        """Count a read or a chunk of the answer, each of which costs much the same whatever it
        brings, and its bytes. Flooded where there are too many, or hardly any of it is body.
        """
        self._off_network += count
        self._turns += 1
        if self._off_network - self.kept > WASTE + self._off_network // 4:
            raise Flooded(f"{self._off_network // 1024} KiB came that are hardly any body")
        if self._turns > MOST_TURNS + self._off_network // 1024:
            raise Flooded(f"it came in more than {MOST_TURNS} pieces")
        if self._turns % _SPELL == 0:
            time.sleep(_REST)


# What is judged in a worker is judged by the settings that it was started with.
HERE = "(in this worker's settings)"
# names being resolved at once, in this process: a resolver that hangs must not eat all threads
LOOKUPS = 64
_lookups = threading.BoundedSemaphore(LOOKUPS)


def allowed_addresses(host: str, port: int, trip: Trip) -> list[tuple[int, Any]]:
    """Families and socket addresses of a host. Refused where one of them may not be called."""
    address = literal_address(host)
    if address is None:
        found = _looked_up(host, port, trip)
    else:
        found = socket.getaddrinfo(
            str(address), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    places = list(dict.fromkeys((family, where) for family, _, _, _, where in found))
    for _, where in places:
        if why := refusal(str(where[0]), trip.policy.allowed_networks):
            name = f"the host {host} resolves: " if address is None else ""
            raise Refused(f"{name}{why} {HERE}")
    return places


def _looked_up(host: str, port: int, trip: Trip) -> list[Any]:
    """getaddrinfo knows no timeout: it runs in a thread, which is left behind where it hangs."""
    outcome: SimpleQueue[Any] = SimpleQueue()
    try:
        if not _lookups.acquire(timeout=trip.left()):
            raise Empty
        _start_lookup(host, port, outcome)
        found = outcome.get(timeout=trip.left())
    except (Empty, TimeoutError):
        late = trip.why_late("total", trip.timeouts.total)
        raise Failed(f"resolving the name {host} took longer than {late}") from None
    if isinstance(found, Exception):
        if want := starved(found):
            raise Starved(want)
        raise Failed(f"the name {host} does not resolve: {reason_of(found)}")
    return list(found)


def _start_lookup(host: str, port: int, outcome: SimpleQueue[Any]) -> None:
    arguments = (host, port, outcome, _lookups)
    try:
        threading.Thread(target=_look_up, args=arguments, daemon=True, name="lookup").start()
    except RuntimeError as error:  # no more threads
        _lookups.release()
        outcome.put(error)


def _look_up(
    host: str, port: int, outcome: SimpleQueue[Any], lookups: threading.BoundedSemaphore
) -> None:
    try:
        outcome.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except Exception as error:
        outcome.put(error)
    finally:
        lookups.release()


def _start_afresh() -> None:
    """In a forked child: the parent's lookups are the parent's."""
    global _lookups
    _lookups = threading.BoundedSemaphore(LOOKUPS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
