"""Where a request goes, judged before any name is resolved.

A URL and a policy enter; a target leaves, or Refused with the reason. The addresses that a name
turns out to have are judged later, by whoever connects.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from callqueue.execution.http.errors import HERE, Refused
from callqueue.execution.http.policy import Policy
from callqueue.security.addresses import literal_address, place_refusal

LONGEST_AUTHORITY = 300  # characters of a host and its port: a name has at most 253
_UNREADABLE = "the URL has no host that can be read"


class Target(NamedTuple):
    """Where to connect: a host that may be called; where it is an address, in canonical form."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def target_of(url: str | None, policy: Policy) -> Target:
    """The target of a URL. Refused where the policy closes it."""
    parts = urlsplit(url or "")
    found: Target | str = _UNREADABLE
    # no cache keeps what a stranger makes as long as he likes
    if len(parts.scheme) + len(parts.netloc) <= LONGEST_AUTHORITY:
        found = judged(parts.scheme, parts.netloc, policy.allowed_hosts, policy.allowed_networks)
    if isinstance(found, str):
        raise Refused(found)
    return found


@lru_cache(maxsize=1024)
def judged(
    scheme: str, netloc: str, hosts: tuple[str, ...], networks: tuple[str, ...]
) -> Target | str:
    """Where to connect, or why not."""
    if not scheme:
        return "the URL has no scheme"
    if scheme not in ("http", "https"):
        return f"the scheme {scheme[:20]!r} is neither http nor https"
    if "@" in netloc:
        return "the URL holds a user or a password; use auth"
    try:
        parts = urlsplit(f"//{netloc}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return _UNREADABLE
    if not host:
        return _UNREADABLE
    address = literal_address(host)
    port = port if port is not None else 443 if scheme == "https" else 80
    if why := place_refusal(host, port, hosts, networks):
        return f"{why} {HERE}"
    return Target(scheme, host if address is None else str(address), port)
