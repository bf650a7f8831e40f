"""What may be called, and every spelling in which somebody may try to say what may not."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue.exceptions import NotAllowed
from callqueue.security import addresses
from callqueue.security.addresses import (
    address_refusal,
    host_refusal,
    is_place_pattern,
    literal_address,
)
from callqueue.sending.call_data import Reach, check_url

SPELLINGS = {
    "127.0.0.1": """127.0.0.1 2130706433 0x7f000001 0X7F.1 0x7f.0.1 127.1 127.0.1 0177.0.0.1 0177.0x0.0.01
        017700000001 127.0.0.1. 127.0.0.1.. 127。0。0。1 127．0．0．1 127｡0｡0｡1 ①②⑦.0.0.1 １２７.0.0.1 𝟏𝟐𝟕.0.0.1
        12\u00ad7.0.0.1 0ⓧ7f.1 127.0.0.%31 %31%32%37.0.0.1 %EF%BC%91%EF%BC%92%EF%BC%97.0.0.1""",
    "::1": "[::1] ::1 [0:0:0:0:0:0:0:1] %5B::1%5D [::1].",
    "::1%lo": "[::1%lo] [::1%25lo]",
    "::ffff:127.0.0.1": "[::FFFF:127.0.0.1] [::ffff:7f00:1]",
    "fe80::1%eth0": "[fe80::1%25eth0]",
}


# --- Spellings


@pytest.mark.parametrize("address", SPELLINGS)
def test_every_spelling_of_an_address_is_read_as_it(address: str) -> None:
    for host in (*SPELLINGS[address].split(), f" {address} "):
        assert literal_address(host) == ip_address(address), host


@pytest.mark.parametrize(
    "host",
    ["example.com", "localhost", "127.0.0.1.example.com", "1.2.3.4.5", "256.0.0.1", "127.0.0.256", "4294967296", "",
     ".", "127..1", "0xzz", "a.1", "08", "1_0.0.0.1", "0x1_0", "-1", "+1", "[v1.fe80::a]", "١٢٧.0.0.1",
     "xn--127-0.com", "9" * 70],
)  # fmt: skip
def test_names_are_not_addresses(host: str) -> None:
    assert literal_address(host) is None


INSIDE = "127.0.0.0/8 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16 100.64.0.0/10".split()  # noqa: SIM905
REFUSED_V4 = st.sampled_from(INSIDE).flatmap(
    lambda text: st.integers(int(ip_network(text)[0]), int(ip_network(text)[-1])).map(IPv4Address)
)


@st.composite
def spellings(draw: st.DrawFn) -> tuple[str, IPv4Address]:
    """A refused address, in one of the ways that inet_aton and IDNA know."""
    address = draw(REFUSED_V4)
    count = draw(st.integers(1, 4))
    octets = address.packed
    numbers = [*octets[: count - 1], int.from_bytes(octets[count - 1 :], "big")]
    write = st.sampled_from(["{:d}", "0x{:x}", "0X{:X}", "0{:o}", "0x000{:x}", "00{:o}"])
    text = ".".join(draw(write).format(number) for number in numbers)
    wide = str.maketrans(
        "0123456789", draw(st.sampled_from(["0123456789", "０１２３４５６７８９", "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗"]))
    )
    text = text.translate(wide).replace(".", draw(st.sampled_from([".", "。", "．", "｡"])))
    if draw(st.booleans()):
        text = text.upper()
    if draw(st.booleans()):
        text = re.sub("[0-9]", lambda digit: f"%{ord(digit[0]):02X}", text)
    return text + draw(st.sampled_from(["", "."])), address


@given(spellings())
def test_no_spelling_of_a_refused_address_gets_through(spelling: tuple[str, IPv4Address]) -> None:
    host, address = spelling
    found = literal_address(host)
    assert found == address
    assert address_refusal(found) is not None


@given(REFUSED_V4)
def test_no_wrapping_into_ipv6_gets_a_refused_address_through(address: IPv4Address) -> None:
    number = int(address)
    for text in (
        f"::ffff:{address}",
        f"::{address}",
        f"::ffff:0:{address}",
        f"64:ff9b::{address}",
        f"64:ff9b:1::{address}",
        str(IPv6Address(0x2002 << 112 | number << 80)),
        str(IPv6Address(0x20010000 << 96 | (number ^ 0xFFFFFFFF))),
        str(IPv6Address(0x2A00 << 112 | 0x5EFE << 32 | number)),
        str(IPv6Address(0x2A00 << 112 | 0x02005EFE << 32 | number)),
    ):
        assert address_refusal(text) is not None, text


# --- Addresses


WHY = {
    "loopback": "127.8.9.1 ::1 64:ff9b::7f00:1 ::ffff:127.0.0.1",
    "unspecified": "0.0.0.0 ::",
    "this network": "0.1.2.3",
    "private": "10.1.2.3 172.31.255.255 192.168.1.1 fc00::1 fdff::1",
    "carrier": "100.64.0.1",
    "link-local": "169.254.1.1 fe80::1 fe80::1%eth0",
    "metadata": "169.254.169.254 169.254.170.2 100.100.100.200 168.63.129.16 192.0.0.192 fd00:ec2::254 ::ffff:169.254.169.254",
    "protocols": "192.0.0.8 2001:10::1 5f00::1",
    "documentation": "192.0.2.1 198.51.100.1 203.0.113.1 2001:db8::1 3fff::1",
    "benchmarks": "198.19.0.1 2001:2::1",
    "6to4": "192.88.99.1 2002:7f00:1:: 2002:808:808::",
    "Teredo": "2001::1",
    "multicast": "224.0.0.1 ff02::1",
    "reserved": "240.0.0.1 ::ffff:0:8.8.8.8 4000::1",
    "broadcast": "255.255.255.255",
    "discarding": "100::1",
    "site-local": "fec0::1",
    "NAT64": "64:ff9b:1::808:808",
    "obsolete form": "::8.8.8.8",
}


@pytest.mark.parametrize("why", WHY)
def test_special_addresses_are_refused_with_the_reason(why: str) -> None:
    for address in WHY[why].split():
        reason = address_refusal(address)
        assert reason is not None and why in reason, address
        assert "ALLOWED_NETWORKS" in reason


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.63.255.255", "100.128.0.0", "169.253.0.1", "192.0.1.1", "223.255.255.255",
     "2606:4700::1111", "2a00:1450::1", "64:ff9b::808:808", "::ffff:8.8.8.8", "2a00::5efe:808:808", "2003::1"],
)  # fmt: skip
def test_public_addresses_may_be_called(address: str) -> None:
    assert address_refusal(address) is address_refusal(ip_address(address)) is None


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
def test_whatever_python_knows_to_be_private_is_refused_too(address: IPv4Address) -> None:
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert address_refusal(address) is not None


@pytest.mark.parametrize(
    ("address", "network", "is_open"),
    [
        ("10.1.2.3", "10.1.0.0/16", True),
        ("10.2.2.3", "10.1.0.0/16", False),
        ("::1", "127.0.0.0/8", False),
        ("fd00:ec2::254", "fd00::/8", True),
        # what is inside an IPv6 address is opened as what it is
        ("::ffff:10.1.2.3", "10.0.0.0/8", True),
        ("64:ff9b::a01:203", "10.0.0.0/8", True),
        ("::ffff:10.1.2.3", "::ffff:0:0/96", True),
        # a network with host bits is the network around it
        ("127.0.0.1", "127.0.0.5/8", True),
    ],
)
def test_an_allowed_network_reopens_its_addresses_and_no_others(
    address: str, network: str, is_open: bool
) -> None:
    assert (address_refusal(address, (network,)) is None) is is_open


# --- Hosts


@pytest.mark.parametrize(
    ("patterns", "allowed", "refused"),
    [
        ("*", "api.example.com", ""),
        ("api.example.com", "api.example.com API.Example.COM api.example.com.", ""),
        ("API.example.com.", "api.example.com", ""),
        ("*.example.com", "api.example.com a.b.example.com", "example.com"),
        ("xn--bcher-kva.example", "bücher.example", ""),
        ("bücher.example", "xn--bcher-kva.example", ""),
        ("127.0.0.1", "0x7f.1", ""),
        ("::1", "[::1]", ""),
        ("other.example [::1]", "::1", ""),
        ("", "", "example.com"),
        ("example.com *.example.com", "", "evilexample.com example.com.evil.test"),
        ("*.0.0.1", "", "10.0.0.1"),
        ("localhost", "", "127.0.0.1"),
    ],
)
def test_hosts_that_a_pattern_names_may_be_called_and_others_are_refused_by_name(
    patterns: str, allowed: str, refused: str
) -> None:
    for host in allowed.split():
        assert host_refusal(host, tuple(patterns.split())) is None
    for host in refused.split():
        reason = host_refusal(host, tuple(patterns.split()))
        assert reason is not None and host in reason


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("api.example", "https://api.example/ https://api.example:8443/", ""),
        ("api.example:8443", "https://api.example:8443/ https://API.example.:8443/", "https://api.example/"),
        ("api.example:443", "https://api.example/", "http://api.example/"),
        ("api.example:80", "http://api.example/", "https://api.example/"),
        ("*.example:8443", "https://a.b.example:8443/", "https://a.b.example:8444/"),
        ("*:443", "https://anything.test/", "http://anything.test/"),
        ("[2606:4700::1]:8443", "https://[2606:4700::1]:8443/", "https://[2606:4700::1]/"),
        ("2606:4700::1", "https://[2606:4700::1]:99/", ""),
        ("1.1.1.1:8443", "https://16843009:8443/", "https://1.1.1.1:9443/"),
    ],
)  # fmt: skip
def test_an_allowed_host_may_name_its_port_and_without_one_every_port_is_meant(
    pattern: str, allowed: str, refused: str
) -> None:
    """By `send` and by the HTTP client alike."""
    assert is_place_pattern(pattern)
    reach = Reach(hosts=(pattern,), networks=())
    for url in allowed.split():
        assert addresses.place_refusal(addresses.place_of(url), (pattern,), ()) is None
        assert check_url(url, reach)
    for url in refused.split():
        assert addresses.place_refusal(addresses.place_of(url), (pattern,), ()) is not None
        with pytest.raises(NotAllowed, match="port"):
            check_url(url, reach)
    for port in ("0", "99999", "x"):
        assert not is_place_pattern(f"api.example:{port}")
    assert not any(map(is_place_pattern, ("https://api.example", "a b:80", ":80")))


PREFIXES = "fd00:: fe80:: ff02:: :: 2001:db8:: 2002:a00:1:: fec0:: 64:ff9b:1::".split()  # noqa: SIM905


@given(
    prefix=st.sampled_from(PREFIXES),
    interface=st.sampled_from([0x5EFE, 0x02005EFE]),
    inside=st.integers(1, 0xFFFFFF),
)
def test_an_ipv4_range_opens_no_ipv6_address_that_only_looks_like_one_of_it(
    prefix: str, interface: int, inside: int
) -> None:
    """Of ISATAP's shape, for one; both are asked, and either may refuse."""
    ipv4 = IPv4Address(0x0A000000 | inside)
    address = IPv6Address(int(IPv6Address(prefix)) | interface << 32 | int(ipv4))
    assert address_refusal(address, ["10.0.0.0/8"]) is not None
    assert address_refusal(address, ["::/0"]) is None
    public = IPv6Address(0x2A00 << 112 | interface << 32 | int(ipv4))
    assert address_refusal(public) is not None and address_refusal(public, ["10.0.0.0/8"]) is None


@given(st.integers(0, 2**128 - 1), st.integers(0, 32), REFUSED_V4)
def test_an_ipv4_range_opens_mapped_and_nat64_addresses_and_no_other_that_is_refused(
    number: int, bits: int, opened: IPv4Address
) -> None:
    network = str(ip_network(f"{opened}/{bits}", strict=False))
    may_open = [ip_network(text) for text in ("::ffff:0:0/96", "64:ff9b::/96", "2000::/3")]
    for looks in (number, number >> 64 << 64 | 0x5EFE << 32 | int(opened)):
        if address_refusal(IPv6Address(looks), [network]) is None:
            assert any(IPv6Address(looks) in one for one in may_open)
    assert address_refusal(f"::ffff:{opened}", [network]) is None
    assert address_refusal(f"64:ff9b::{opened}", [network]) is None
