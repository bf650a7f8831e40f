"""Schemes, hosts and addresses that are refused before a name is resolved."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from callqueue.execution.wire import Policy
from tests.support.peer import LOOPBACK, SECRET, Names, call, nothing_was_sent


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://2130706433/", "http://0x7f.1/", "http://127.1/", "http://0177.0.0.1/",
     "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[::1%25lo]/", "http://127.0.0.1./", "http://127。0。0。1/",
     "http://①②⑦.0.0.1/", "HTTP://127.0.0.1/", "http://169.254.169.254/latest", "http://[fd00:ec2::254]/",
     "http://100.64.0.1/", "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "https://10.0.0.1/"],
)  # fmt: skip
def test_literal_addresses_that_are_not_public_are_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    answer = call(url, policy=Policy())
    assert nothing_was_sent(answer)
    assert answer.refused
    # what is not ASCII requests may refuse by itself, and no URL may have a zone
    assert "ALLOWED_NETWORKS" in answer.error or not url.isascii() or "%" in url


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/",
        "file:///etc/passwd",
        "httpx://127.0.0.1/",
        "javascript:alert(1)",
        "data:text/plain,a",
    ],
)
def test_other_schemes_are_refused(url: str) -> None:
    answer = call(url)
    assert nothing_was_sent(answer)
    assert answer.refused


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    answer = call(f"http://me:{SECRET}@127.0.0.1/")
    assert answer.refused
    assert SECRET not in answer.error


def test_hosts_outside_of_the_allowed_ones_are_refused_without_a_lookup(
    name_is: Callable[..., Names],
) -> None:
    names = name_is(["127.0.0.1"])
    answer = call("http://evil.test/", policy=replace(LOOPBACK, allowed_hosts=("*.good.test",)))
    assert nothing_was_sent(answer)
    assert answer.refused
    assert answer.error == "the host evil.test is not in ALLOWED_HOSTS (in this worker's settings)"
    assert names.lookups == []
