"""The addresses of a host, found within a request's time, every one of which may be called.

A host, a port and a trip enter; addresses leave, or Failed or Refused with the reason.
"""

from __future__ import annotations

import os
import socket
import threading
from queue import Empty, SimpleQueue
from typing import Any

from callqueue.execution.starvation import starved
from callqueue.execution.trip import Failed, Refused, Starved, Trip, reason_of
from callqueue.security.addresses import literal_address, refusal

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
