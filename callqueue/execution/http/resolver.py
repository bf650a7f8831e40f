"""The addresses of a host, found within the deadline, every one of which may be called.

A host, a port, the allowed networks and a deadline enter; addresses leave, or Failed or Refused
with the reason.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from callqueue.execution.http.deadline import Deadline
from callqueue.execution.http.errors import HERE, Failed, Refused, reason_of, starved
from callqueue.security.addresses import literal_address, refusal

# names being resolved at once, in this process: a resolver that hangs must not eat all threads
LOOKUPS = 64
_lookups = threading.BoundedSemaphore(LOOKUPS)


class Place(NamedTuple):
    """An address to connect to. `is_literal`: the host was that address, and no name."""

    family: int
    where: Any  # a socket address
    is_literal: bool


def allowed_places(
    host: str, port: int, networks: Sequence[str], deadline: Deadline
) -> list[Place]:
    """Every address of a host. Refused where one of them may not be called, Failed where the name
    does not resolve in time.
    """
    places = _resolved(host, port, deadline)
    for place in places:
        why = refusal(str(place.where[0]), networks)
        if why is not None:
            why = f"{why} {HERE}"
            raise Refused(why if place.is_literal else f"the host {host} resolves: {why}")
    return places


def _resolved(host: str, port: int, deadline: Deadline) -> list[Place]:
    address = literal_address(host)
    if address is None:
        found = _looked_up(host, port, deadline)
    else:
        found = socket.getaddrinfo(
            str(address), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    places = (Place(family, where, address is not None) for family, _, _, _, where in found)
    return list(dict.fromkeys(places))


def _looked_up(host: str, port: int, deadline: Deadline) -> list[Any]:
    """getaddrinfo knows no timeout: it runs in a thread, which is left behind where it hangs."""
    outcome: SimpleQueue[Any] = SimpleQueue()
    bound = deadline.timeouts.total
    try:
        if not _lookups.acquire(timeout=deadline.left(bound)):
            raise Empty
        _start_lookup(host, port, outcome)
        found = outcome.get(timeout=deadline.left(bound))
    except (Empty, TimeoutError):
        late = deadline.why_late("total", bound)
        raise Failed(f"resolving the name {host} took longer than {late}") from None
    if isinstance(found, Exception):
        if want := starved(found):
            raise want
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
