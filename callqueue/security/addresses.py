"""Where a URL leads, and whether calls may go there: the policy of ALLOWED_HOSTS and
ALLOWED_NETWORKS. Pure: whoever connects asks again with each address that the name has.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import unquote

import idna

from callqueue.limits.rules import is_host_pattern

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

PLACES_WANTED = (
    "host names, such as 'api.example.com', '*.example.com' or 'api.example.com:8443', "
    "without scheme or path"
)
LONGEST_AUTHORITY = 300  # characters of a URL's host and port; a host's name has at most 253
_URL = re.compile(r"(https?)://([^/?#]*)", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::(.*))?")
_NAME = re.compile(r"(?=.{1,253}\.?\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_NO_HOST_NAME = "has a host with characters or lengths that no host name has"
_NUMBERS = re.compile(r"[0-9a-fxA-FX.]{1,64}")
_DOTS = re.compile("[。．｡]")  # what IDNA takes for a dot, RFC 3490 section 3.1

# In the order in which they are asked: the first that holds an address names the reason.
_REFUSED = """
loopback: 127.0.0.0/8 ::1/128
unspecified: 0.0.0.0/32 ::/128
a cloud provider's metadata service: 169.254.169.254/32 169.254.170.2/32 fd00:ec2::254/128
a cloud provider's metadata service: 100.100.100.200/32 192.0.0.192/32 168.63.129.16/32
of this network: 0.0.0.0/8
private: 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7
shared between a carrier's customers: 100.64.0.0/10
link-local: 169.254.0.0/16 fe80::/10
multicast: 224.0.0.0/4 ff00::/8
broadcast: 255.255.255.255/32
reserved: 240.0.0.0/4
for documentation: 192.0.2.0/24 198.51.100.0/24 203.0.113.0/24 2001:db8::/32 3fff::/20
for benchmarks: 198.18.0.0/15 2001:2::/48
for protocols: 192.0.0.0/24 192.31.196.0/24 192.52.193.0/24 192.175.48.0/24 2620:4f:8000::/48
an obsolete relay (6to4): 192.88.99.0/24 2002::/16
a tunnel (Teredo): 2001::/32
for protocols: 2001::/23 5f00::/16
for discarding: 100::/64 100:0:0:1::/64
site-local: fec0::/10
a local translation (NAT64): 64:ff9b:1::/48
an obsolete form of an IPv4 address: ::/96
"""
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


class Unreadable(ValueError):
    """A URL that leads nowhere. The text goes on after "the URL", and repeats nothing of it."""


class Place(NamedTuple):
    """Where a URL leads: a host in lower-case ASCII, an address in its canonical form."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def place_of(url: str) -> Place:
    """Where an http or https URL leads, no name resolved; Unreadable where nowhere. Only plain
    shapes pass, so that no other parser of URLs can see another host in them.
    """
    match = _URL.match(url)
    if match is None:
        raise Unreadable("must begin with http:// or https://")
    scheme, authority = match.groups()
    if "@" in authority:
        raise Unreadable("contains user:password@; give params.auth = [user, password] instead")
    if len(authority) > LONGEST_AUTHORITY:  # before any cache sees it
        raise Unreadable(_NO_HOST_NAME)
    found = _parsed_authority(scheme.lower(), authority)
    if isinstance(found, str):
        raise Unreadable(found)
    return found


@lru_cache(maxsize=1024)
def place_refusal(
    place: Place, allowed_hosts: tuple[str, ...], allowed_networks: tuple[str, ...]
) -> str | None:
    """Why calls may not go there, as far as its host tells; None where they may."""
    why, address = host_refusal(place.host, allowed_hosts, place.port), literal_address(place.host)
    return (
        address_refusal(address, allowed_networks) if why is None and address is not None else why
    )


def address_refusal(address: Address | str, allowed_networks: Sequence[str] = ()) -> str | None:
    """Why this address may not be called; None where it may. `allowed_networks` (CIDR) opens any.

    Refused is what the IANA registries of special-purpose addresses list
    (https://www.iana.org/assignments/iana-ipv4-special-registry and
    .../iana-ipv6-special-registry), multicast, every IPv6 address outside of global unicast
    (https://www.iana.org/assignments/ipv6-address-space), and the addresses at which cloud
    providers keep machines' credentials. An IPv4 address inside an IPv6 one is judged in its place
    where the network makes it that (mapped, NAT64), and beside it where some host may (ISATAP).
    """
    if isinstance(address, str):
        address = ip_address(address)
    networks = [_parsed_network(text) for text in allowed_networks]
    if any(address in network for network in networks):
        return None
    for judged in _destinations(address):
        why = _special_use(judged)
        if why is not None and not any(judged in network for network in networks):
            shown = str(address) if judged is address else f"{address} (that is, {judged})"
            return f"the address {shown} is {why}, and ALLOWED_NETWORKS does not open it"
    return None


def host_refusal(host: str, allowed_hosts: Sequence[str], port: int | None = None) -> str | None:
    """Why this host may not be called; None where it may.

    A pattern is a host, "*.example.com" (every name below example.com, not that name itself) or
    "*", each perhaps with a port: "api.example.com:8443". Letter case, a trailing dot and the
    spelling of an address make no difference. Without a `port`, patterns with one match none.
    """
    if "*" in allowed_hosts:
        return None
    name, is_name = _canonical_host(host), literal_address(host) is None
    places = [split_host_port(pattern) for pattern in allowed_hosts]
    if any(_matches(pattern, name, is_name) for pattern, only in places if only in (None, port)):
        return None
    has_ports = port is not None and any(only for _, only in places)
    shown = f"{name}, port {port}," if has_ports else name
    return f"the host {shown} is not in ALLOWED_HOSTS"


def is_place_pattern(text: str) -> bool:
    """Whether it is a host pattern, perhaps with a port: "api.example.com:8443", "[::1]:8080"."""
    host, port = split_host_port(text)
    return is_host_pattern(host) and (port is None or 1 <= port <= 65535)


@lru_cache(maxsize=256)
def split_host_port(text: str) -> tuple[str, int | None]:
    named = re.fullmatch(r"([^:]+|\[[^\]]*\]):([0-9]{1,5})", text, re.ASCII)
    return (named[1], int(named[2])) if named else (text, None)


def literal_address(host: str) -> Address | None:
    """The address that this host is a spelling of; None where it is a name.

    Understands whatever inet_aton(3), requests or a resolver would: 2130706433, 0x7f.1, 0177.0.0.1,
    127.1, brackets, zones, trailing dots, percent-encoding, other scripts that IDNA maps to ASCII.
    """
    for text in dict.fromkeys((host, unquote(host))):
        text = _uts46_mapped(text.strip()).rstrip(".")
        address = _parsed_ipv6(text) if ":" in text else _parsed_ipv4(text)
        if address is not None:
            return address
    return None


@lru_cache(maxsize=1024)
def _parsed_authority(scheme: str, authority: str) -> Place | str:
    """The place that a URL's host and port name; a string says why they name none."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return "has a host that cannot be read"
    host, port = match.groups()
    if port is not None and not _is_port(port):
        return "has a port that is not a number from 1 to 65535"
    if not host:
        return "has no host"
    number = int(port or (443 if scheme == "https" else 80))
    if host.startswith("["):
        address = _parsed_ipv6(host)
        what = "has brackets around something that is not an IPv6 address"
        return what if address is None else Place(scheme, str(address), number)
    host = _idna_encoded(host).lower()
    if not _NAME.fullmatch(host):
        return _NO_HOST_NAME
    return Place(scheme, str(literal_address(host) or host), number)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535


def _matches(pattern: str, name: str, is_name: bool) -> bool:
    if pattern == "*":
        return True
    if pattern.startswith("*."):
        return is_name and name.endswith("." + _canonical_host(pattern[2:]))
    return name == _canonical_host(pattern)


@lru_cache(maxsize=256)
def _parsed_network(text: str) -> Network:
    return ip_network(text, strict=False)


def _destinations(address: Address) -> Sequence[Address]:
    """Where a packet to this address may end up: all of these have to be allowed."""
    if isinstance(address, IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    last = IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64:
        return (last,)
    is_isatap = (int(address) >> 32) & 0xFDFFFFFF == 0x5EFE  # RFC 5214 section 6.1
    return (last, address) if is_isatap else (address,)


@lru_cache(maxsize=4096)
def _special_use(address: Address) -> str | None:
    for network, why in _refused_networks():
        if address in network:
            return why
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return "reserved"
    return None


@lru_cache(maxsize=1)
def _refused_networks() -> list[tuple[Network, str]]:
    lines = [line.partition(": ") for line in _REFUSED.strip().splitlines()]
    return [(ip_network(network), why) for why, _, listed in lines for network in listed.split()]


def _canonical_host(host: str) -> str:
    return str(literal_address(host) or _idna_encoded(host.strip().rstrip(".")).lower())


def _idna_encoded(host: str) -> str:
    with suppress(idna.IDNAError, UnicodeError):
        return host if host.isascii() else idna.encode(host, uts46=True).decode("ascii")
    return host


def _uts46_mapped(host: str) -> str:
    """Digits and dots of other scripts mapped to ASCII as UTS 46 says, not yet encoded."""
    with suppress(idna.IDNAError, UnicodeError):
        return host if host.isascii() else _DOTS.sub(".", idna.uts46_remap(host, std3_rules=False))
    return host


def _parsed_ipv6(text: str) -> IPv6Address | None:
    text, _, zone = text.removeprefix("[").removesuffix("]").partition("%")
    zone = zone.removeprefix("25")  # RFC 6874: the zone's % is itself encoded in a URL
    try:
        return IPv6Address(f"{text}%{zone}" if zone else text)
    except ValueError:
        return None


def _parsed_ipv4(text: str) -> IPv4Address | None:
    if not _NUMBERS.fullmatch(text):  # inet_aton passes over what follows white space
        return None
    try:
        return IPv4Address(socket.inet_aton(text))
    except OSError:
        return None
