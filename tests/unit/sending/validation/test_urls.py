"""URLs that may be called, and those that no parser reads otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.security import addresses
from callqueue.sending.call_data import Reach, check_url
from tests.support import samples
from tests.support.samples import ANYWHERE, URL, checked, http, refused


class TestAUrl:
    @pytest.mark.parametrize(
        "url",
        [
            URL,
            "http://example.com",
            "HTTPS://EXAMPLE.com:8443?q=1#f",
            "https://example.com./",
            "https://bücher.example/ü?q=ü",
            "https://8.8.8.8/",
            "https://[2606:4700::1111]:443/",
            "https://example.com/a@b:c?x=http://other@host",
            "https://under_score.example.com/%0d%0a",
        ],
    )
    def test_is_http_to_a_public_host(self, url: str) -> None:
        checked(http(url=url))

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            (None, "must be an http or https URL"),
            ("", "must be an http or https URL"),
            (5, "must be an http or https URL"),
            ({"a": 1}, "must be an http or https URL"),
            ("ftp://example.com", "http://"),
            ("file:///etc/passwd", "http://"),
            ("javascript:alert(1)", "http://"),
            ("//example.com", "http://"),
            ("example.com", "http://"),
            ("http:/example.com", "http://"),
            ("http:example.com", "http://"),
            ("http://", "no host"),
            ("http:///path", "no host"),
            ("http://?q", "no host"),
            ("http://:80/", "no host"),
            ("http://user:hunter2@example.com/", "auth"),
            ("http://user@example.com/", "auth"),
            ("http://@example.com/", "auth"),
            ("http://example.com\\@evil.com/", "backslash"),
            ("http://example.com/a b", "white space"),
            (" http://example.com/", "white space"),
            ("http://example.com/\r\nX: y", "control"),
            ("http://example.com/\x7f", "control"),
            ("http://example.com/\u2028", "white space"),
            ("http://example.com:0/", "port"),
            ("http://example.com:65536/", "port"),
            ("http://example.com:99999999999/", "port"),
            ("http://example.com:/", "port"),
            ("http://example.com:http/", "port"),
            ("http://example.com:-1/", "port"),
            ("http://example.com:٣/", "port"),
            ("http://example.com:80:80/", "port"),
            ("http://[::1/", "cannot be read"),
            ("http://[::1]x/", "cannot be read"),
            ("http://[fe80::1%25eth0]/", "cannot be read"),
            ("http://[1.2.3.4]/", "not an IPv6 address"),
            ("http://127.0.0.%31/", "no host name has"),
            ("http://a..b/", "no host name has"),
            ("http://.example.com/", "no host name has"),
            ("http://exa$mple.com/", "no host name has"),
            ("http://*/", "no host name has"),
            (f"http://{'a' * 64}.com/", "no host name has"),
            (f"http://{'a.' * 127}com/", "no host name has"),
            ("http://\u200b.com/", "white space"),
            ("http://☃\ufe0f\u0301.-/", "no host name has"),
        ],
    )
    def test_is_refused_with_the_reason(self, url: Any, why: str) -> None:
        text = refused(http(url=url), "params.url", why)
        assert "hunter2" not in text

    def test_is_required(self) -> None:
        refused({"method": "get", "params": {}}, "params.url", "is missing")

    def test_may_lead_to_networks_that_are_allowed(self) -> None:
        checked(http(url="http://127.0.0.1:8000/"), allowed_networks=["127.0.0.0/8"])

    def test_leads_only_to_allowed_hosts(self) -> None:
        allowed = ("api.example.com", "*.example.org")
        checked(http(url="https://API.example.com./"), allowed_hosts=allowed)
        checked(http(url="https://a.example.org/"), allowed_hosts=allowed)
        for host in ("example.com", "evil.com", "api.example.com.evil.com", "evilexample.org"):
            with pytest.raises(NotAllowed, match=r"params\.url"):
                checked(http(url=f"https://{host}/"), allowed_hosts=allowed)

    def test_gives_its_host(self) -> None:
        assert check_url("https://API.Example.com.:443/x", ANYWHERE)[0] == "api.example.com"
        assert check_url("http://[2606:4700:0::1111]", ANYWHERE)[0] == "2606:4700::1111"


def test_no_cache_keeps_hosts_that_no_host_name_is_as_long_as() -> None:
    addresses._place.cache_clear()
    for number in range(20):
        for char in ("a", "é", "😀"):
            with pytest.raises(InvalidCall, match="lengths"):
                check_url(f"https://{char * 20_000}{number}/", ANYWHERE)
    assert addresses._place.cache_info().currsize == 0


@settings(max_examples=300, deadline=None)
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
