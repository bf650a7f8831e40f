"""Checks of URLs: how they are written, and whether they lead where calls may go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address

import idna

from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.security import addresses
from callqueue.sending.validation.refusals import kind_of

FIELD = "params.url"
LONGEST_AUTHORITY = 300  # characters of a URL's host and port; a host's name has at most 253
_UNSAFE_IN_URL = re.compile(
    r"[\x00-\x20\x7f-\xa0\\\u1680\u2000-\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]"
)
_URL = re.compile(r"(https?)://([^/?#]*)(?:[/?#].*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::(.*))?")
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
_NO_HOST_NAME = "has a host with characters or lengths that no host name has"


@dataclass(frozen=True)
class Reach:
    """Where calls may go: ALLOWED_HOSTS and ALLOWED_NETWORKS."""

    hosts: tuple[str, ...]
    networks: tuple[str, ...]


def check_url(url: object, reach: Reach) -> tuple[str, int]:
    """The host and port of an http(s) URL that may be called; the host is lower-case ASCII, and is
    not resolved.

    Only plain shapes pass, so that no other parser of URLs can see another host in them.
    """
    if not isinstance(url, str) or not url:
        raise InvalidCall(FIELD, f"must be an http or https URL, not {kind_of(url)}")
    if _UNSAFE_IN_URL.search(url):
        raise InvalidCall(
            FIELD, "contains white space, a control character or a backslash; percent-encode it"
        )
    match = _URL.fullmatch(url)
    if match is None:
        raise InvalidCall(FIELD, "must begin with http:// or https://")
    host, port = _place(match.group(2))
    port = port or (443 if match.group(1).lower() == "https" else 80)
    if forbidden := addresses.place_refusal(host, port, reach.hosts, reach.networks):
        raise NotAllowed(f"{FIELD}: {forbidden}")
    return host, port


def _place(authority: str) -> tuple[str, int]:
    """The host and port between "//" and the path; the port is 0 where none is named."""
    if "@" in authority:
        raise InvalidCall(
            FIELD, "contains user:password@; give params.auth = [user, password] instead"
        )
    if len(authority) > LONGEST_AUTHORITY:  # before any cache sees it
        raise InvalidCall(FIELD, _NO_HOST_NAME)
    host, why = _read_authority(authority)
    if why:
        raise InvalidCall(FIELD, why)
    return host, _port_of(authority)


def _port_of(authority: str) -> int:
    """The port of an authority that was read; 0 where it names none."""
    port = authority.rpartition(":")[2] if not authority.endswith("]") and ":" in authority else ""
    return int(port or 0)


@lru_cache(maxsize=1024)
def _read_authority(authority: str) -> tuple[str, str]:
    """(host, "") or ("", what is wrong). The host is what requests connects to, no brackets."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return "", "has a host that cannot be read"
    host, port = match.groups()
    if port is not None and not _is_port(port):
        return "", "has a port that is not a number from 1 to 65535"
    if not host:
        return "", "has no host"
    if host.startswith("["):
        return _read_ipv6(host[1:-1])
    if not host.isascii():
        host = _ascii_host(host)
    host = host.lower().removesuffix(".")
    if not _HOST.fullmatch(host):
        return "", _NO_HOST_NAME
    return host, ""


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535


def _read_ipv6(host: str) -> tuple[str, str]:
    try:
        return str(IPv6Address(host)), ""
    except ValueError:
        return "", "has brackets around something that is not an IPv6 address"


def _ascii_host(host: str) -> str:
    """As requests encodes it: full-width digits and the like become ASCII, other letters become
    xn--...; "" where it cannot be.
    """
    try:
        return idna.encode(host, uts46=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        return ""
