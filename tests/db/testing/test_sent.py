"""What was sent, and assertions that say what was sent instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from callqueue import Rule
from callqueue.testing import Sent, assert_call_sent
from tests.db.testing.calls import URL, send

Rules = Callable[..., None]


def test_the_fixture_lists_what_the_test_sent(rules: Rules, callqueue_sent: Sent) -> None:
    rules(default=Rule())
    callqueue_sent.assert_nothing_sent()
    first, last = send("/a"), send("/b", json={"n": 1}, key="k")
    assert list(callqueue_sent) == [first, last]
    assert callqueue_sent.last == callqueue_sent[-1] == last
    assert callqueue_sent.assert_call_sent(url=f"{URL}/b", json={"n": 1}, key="k", count=1) == last
    assert callqueue_sent.assert_call_sent(method="POST", status="new", count=2) == last
    assert callqueue_sent.assert_call_sent(url=lambda url: url.endswith("/a")) == first
    assert callqueue_sent[0] == first
    assert len(callqueue_sent) == 2


def test_assertions_say_what_was_sent_instead(rules: Rules) -> None:
    rules(default=Rule(), other=Rule())
    send("/a")
    assert assert_call_sent(url=f"{URL}/*", method="POST", rule="default") is not None
    assert_call_sent(url="*", rule="other", count=0)
    with pytest.raises(
        AssertionError,
        match=r"not sent: rule='other'; sent:\n  post https://api.example.com/a .*rule='default'",
    ):
        assert_call_sent(rule="other")
    with pytest.raises(AssertionError, match="not sent 2 times, but 1 times"):
        assert_call_sent(count=2)
