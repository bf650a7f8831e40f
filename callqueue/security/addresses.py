"""Which hosts and addresses may be called: the policy of ALLOWED_HOSTS and ALLOWED_NETWORKS, as
pure functions.

A host or an address enters; a reason not to call it leaves, or None. Never resolves a name and
never opens a socket: whoever connects asks again with each address that the name turned out to
have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import unquote

from callqueue.limits.rules import split_place

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# In the order in which they are asked: the first that holds an address names the reason.
_REFUSED = (
    ("loopback", ("127.0.0.0/8", "::1/128")),
    ("unspecified", ("0.0.0.0/32", "::/128")),
    (
        "a cloud provider's metadata service",
        ("169.254.169.254/32", "169.254.170.2/32", "fd00:ec2::254/128"),
    ),
    (
        "a cloud provider's metadata service",
        ("100.100.100.200/32", "192.0.0.192/32", "168.63.129.16/32"),
    ),
    ("of this network", ("0.0.0.0/8",)),
    ("private", ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")),
    ("shared between a carrier's customers", ("100.64.0.0/10",)),
    ("link-local", ("169.254.0.0/16", "fe80::/10")),
    ("multicast", ("224.0.0.0/4", "ff00::/8")),
    ("broadcast", ("255.255.255.255/32",)),
    ("reserved", ("240.0.0.0/4",)),
    (
        "for documentation",
        ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),
    ),
    ("for benchmarks", ("198.18.0.0/15", "2001:2::/48")),
    (
        "for protocols",
        (
            "192.0.0.0/24",
            "192.31.196.0/24",
            "192.52.193.0/24",
            "192.175.48.0/24",
            "2620:4f:8000::/48",
        ),
    ),
    ("an obsolete relay (6to4)", ("192.88.99.0/24", "2002::/16")),
    ("a tunnel (Teredo)", ("2001::/32",)),
    ("for protocols", ("2001::/23", "5f00::/16")),
    ("for discarding", ("100::/64", "100:0:0:1::/64")),
    ("site-local", ("fec0::/10",)),
    ("a local translation (NAT64)", ("64:ff9b:1::/48",)),
    ("an obsolete form of an IPv4 address", ("::/96",)),
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_DOTS = re.compile("[。．｡]")  # what IDNA takes for a dot, RFC 3490 section 3.1


def refusal(address: Address | str, allowed_networks: Sequence[str] = ()) -> str | None:
    """Why this address may not be called; None where it may.

    Refused is what the IANA registries of special-purpose addresses list
    (https://www.iana.org/assignments/iana-ipv4-special-registry and
    .../iana-ipv6-special-registry), multicast, every IPv6 address outside of global unicast
    (https://www.iana.org/assignments/ipv6-address-space), and the addresses at which cloud
    providers keep machines' credentials. An IPv4 address inside an IPv6 one is judged as what it is
    where the network makes it that (mapped, NAT64), and beside the IPv6 one where some host may
    (ISATAP): both have to be allowed then. `allowed_networks` (CIDR) opens any of them. ValueError
    where one of them is not a network.
    """
    if isinstance(address, str):
        address = ip_address(address)
    networks = [_network(text) for text in allowed_networks]
    if any(address in network for network in networks):
        return None
    for judged in _meanings(address):
        why = _special(judged)
        if why is not None and not any(judged in network for network in networks):
            shown = str(address) if judged is address else f"{address} (that is, {judged})"
            return f"the address {shown} is {why}, and ALLOWED_NETWORKS does not open it"
    return None


def host_refusal(host: str, allowed_hosts: Sequence[str], port: int | None = None) -> str | None:
    """Why this host may not be called; None where it may.

    A pattern is a host, "*.example.com" (every name below example.com, not that name itself) or
    "*", each of which may be followed by a port, as in "api.example.com:8443"; without one every
    port is allowed. Letter case, a trailing dot and the spelling of an address make no difference.
    """
    if "*" in allowed_hosts:
        return None
    name, is_name = _canonical(host), literal_address(host) is None
    places = [_place(pattern) for pattern in allowed_hosts]
    if any(_is_for(pattern, name, is_name) for pattern, only in places if only in (None, port)):
        return None
    has_ports = port is not None and any(only for _, only in places)
    shown = f"{name}, port {port}," if has_ports else name
    return f"the host {shown} is not in ALLOWED_HOSTS"


@lru_cache(maxsize=1024)
def place_refusal(
    host: str, port: int, allowed_hosts: tuple[str, ...], allowed_networks: tuple[str, ...]
) -> str | None:
    """Why this host may not be called, as far as its name tells; None where it may."""
    why, address = host_refusal(host, allowed_hosts, port), literal_address(host)
    return refusal(address, allowed_networks) if why is None and address is not None else why


def literal_address(host: str) -> Address | None:
    """The address that this host is a spelling of; None where it is a name.

    Understands whatever inet_aton(3), requests or a resolver would: 2130706433, 0x7f.1, 0177.0.0.1,
    127.1, brackets, zones, trailing dots, percent-encoding, and digits and dots of other scripts
    that IDNA maps to ASCII.
    """
    for text in dict.fromkeys((host, unquote(host))):
        text = _ascii(text.strip()).rstrip(".")
        address = _ipv6(text) if ":" in text else _ipv4(text)
        if address is not None:
            return address
    return None


_place = lru_cache(maxsize=256)(split_place)


def _is_for(pattern: str, name: str, is_name: bool) -> bool:
    if pattern == "*":
        return True
    if pattern.startswith("*."):
        return is_name and name.endswith("." + _canonical(pattern[2:]))
    return name == _canonical(pattern)


@lru_cache(maxsize=256)
def _network(text: str) -> Network:
    return ip_network(text, strict=False)


def _meanings(address: Address) -> Sequence[Address]:
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
def _special(address: Address) -> str | None:
    for why, networks in _refused_networks():
        if any(address in network for network in networks):
            return why
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return "reserved"
    return None


@lru_cache(maxsize=1)
def _refused_networks() -> list[tuple[str, list[Network]]]:
    return [(why, [ip_network(network) for network in networks]) for why, networks in _REFUSED]


def _canonical(host: str) -> str:
    address = literal_address(host)
    return str(address) if address is not None else _idna(host.strip().rstrip(".")).lower()


def _idna(host: str) -> str:
    """The xn-- form of a name of other letters, so that both ways to write it are equal."""
    if host.isascii():
        return host
    import idna

    try:
        return idna.encode(host, uts46=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        return host


def _ascii(host: str) -> str:
    """Digits and dots of other scripts mapped to ASCII as UTS 46 says, not yet encoded."""
    if host.isascii():
        return host
    import idna

    try:
        host = idna.uts46_remap(host, std3_rules=False)
    except (idna.IDNAError, UnicodeError):
        return host
    return _DOTS.sub(".", host)


def _ipv6(text: str) -> IPv6Address | None:
    text, _, zone = text.removeprefix("[").removesuffix("]").partition("%")
    zone = zone.removeprefix("25")  # RFC 6874: the zone's % is itself encoded in a URL
    try:
        return IPv6Address(f"{text}%{zone}" if zone else text)
    except ValueError:
        return None


def _ipv4(text: str) -> IPv4Address | None:
    """As inet_aton(3) reads it: up to four numbers in base 8, 10 or 16; the last fills up."""
    parts = text.split(".")
    if len(parts) > 4 or len(text) > 64:
        return None
    numbers = [_number(part) for part in parts]
    value = 0
    for position, number in enumerate(numbers):
        width = 8 * (5 - len(numbers)) if position == len(numbers) - 1 else 8
        if number is None or number >= 1 << width:
            return None
        value = value << width | number
    return IPv4Address(value)


def _number(part: str) -> int | None:
    try:
        if part[:2].lower() == "0x":
            return int(part[2:], 16) if part[2:].isalnum() else None if part[2:] else 0
        if not (part.isascii() and part.isdigit()):
            return None
        return int(part, 8) if len(part) > 1 and part[0] == "0" else int(part)
    except ValueError:
        return None
