"""URLs that may be called, and those that no parser reads otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.security import addresses
from callqueue.sending.call_data import Reach, check_url
from tests.support import samples
from tests.support.length import examples
from tests.support.samples import ANYWHERE, URL, checked, http, refused

WRONG: dict[str, list[Any]] = {
    "must be an http or https URL": [None, "", 5, {"a": 1}],
    "http://": [
        "ftp://example.com", "file:///etc/passwd", "javascript:alert(1)", "//example.com", "example.com",
        "http:/example.com", "http:example.com",
    ],
    "no host": ["http://", "http:///path", "http://?q", "http://:80/"],
    "auth": ["http://user:hunter2@example.com/", "http://user@example.com/", "http://@example.com/"],
    "backslash": ["http://example.com\\@evil.com/"],
    "white space": [
        "http://example.com/a b", " http://example.com/", "http://example.com/\u2028", "http://\u200b.com/",
    ],
    "control": ["http://example.com/\r\nX: y", "http://example.com/\x7f"],
    "port": [
        "http://example.com:0/", "http://example.com:65536/", "http://example.com:99999999999/",
        "http://example.com:/", "http://example.com:http/", "http://example.com:-1/", "http://example.com:٣/",
        "http://example.com:80:80/",
    ],
    "cannot be read": ["http://[::1/", "http://[::1]x/", "http://[fe80::1%25eth0]/"],
    "not an IPv6 address": ["http://[1.2.3.4]/"],
    "no host name has": [
        "http://127.0.0.%31/", "http://a..b/", "http://.example.com/", "http://exa$mple.com/", "http://*/",
        f"http://{'a' * 64}.com/", f"http://{'a.' * 127}com/", "http://☃\ufe0f\u0301.-/",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("url", "host"),
    [
        (URL, "api.example.com"),
        ("http://example.com", "example.com"),
        ("HTTPS://EXAMPLE.com:8443?q=1#f", "example.com"),
        ("https://API.Example.com.:443/x", "api.example.com"),
        ("https://bücher.example/ü?q=ü", "xn--bcher-kva.example"),
        ("https://8.8.8.8/", "8.8.8.8"),
        ("https://[2606:4700:0::1111]:443/", "2606:4700::1111"),
        ("https://example.com/a@b:c?x=http://other@host", "example.com"),
        ("https://under_score.example.com/%0d%0a", "under_score.example.com"),
    ],
)
def test_a_url_is_http_to_a_public_host(url: str, host: str) -> None:
    checked(http(url=url))
    assert check_url(url, ANYWHERE)[0] == host


@pytest.mark.parametrize("why", WRONG)
def test_a_url_is_refused_with_the_reason(why: str) -> None:
    for url in WRONG[why]:
        assert "hunter2" not in refused(http(url=url), "params.url", why), url
    refused({"method": "get", "params": {}}, "params.url", "is missing")


def test_a_url_leads_only_to_hosts_and_networks_that_are_allowed() -> None:
    checked(http(url="http://127.0.0.1:8000/"), allowed_networks=["127.0.0.0/8"])
    allowed = ("api.example.com", "*.example.org")
    checked(http(url="https://API.example.com./"), allowed_hosts=allowed)
    checked(http(url="https://a.example.org/"), allowed_hosts=allowed)
    for host in ("example.com", "evil.com", "api.example.com.evil.com", "evilexample.org"):
        with pytest.raises(NotAllowed, match=r"params\.url"):
            checked(http(url=f"https://{host}/"), allowed_hosts=allowed)


def test_no_cache_keeps_hosts_that_no_host_name_is_as_long_as() -> None:
    addresses._place.cache_clear()
    for number in range(20):
        for char in ("a", "é", "😀"):
            with pytest.raises(InvalidCall, match="lengths"):
                check_url(f"https://{char * 20_000}{number}/", ANYWHERE)
    assert addresses._place.cache_info().currsize == 0


@settings(max_examples=examples(100, 300), deadline=None)
@given(samples.urls)
def test_an_accepted_url_means_the_same_host_to_requests(url: str) -> None:
    from requests import Request
    from requests.exceptions import RequestException
    from urllib3.util import parse_url

    try:
        host, _ = check_url(url, Reach(hosts=("*",), networks=("0.0.0.0/0", "::/0")))
    except (InvalidCall, NotAllowed):
        return
    try:
        prepared = Request("GET", url).prepare().url
    except (RequestException, UnicodeError):
        return
    sent_to = (parse_url(str(prepared)).host or "").strip("[]").removesuffix(".")
    if ":" in host:
        from ipaddress import ip_address

        assert ip_address(sent_to) == ip_address(host)
    else:
        assert str(addresses.literal_address(sent_to) or sent_to) == host
