"""What a mail may say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.samples import checked, email, refused


class TestEmail:
    def test_goes_to_one_or_several(self) -> None:
        checked(email(to=["a@example.com", "B <b@example.com>"], cc="c@example.com", bcc=[], reply_to=None,
                      from_email="me@example.com", html_message="<p>\n</p>", message="a\nb"))  # fmt: skip

    @pytest.mark.parametrize(
        ("params", "field", "why"),
        [
            ({"to": None}, "params.to", "is missing"),
            ({"to": ""}, "params.to", "is missing"),
            ({"to": []}, "params.to", "is missing"),
            ({"to": [""]}, "params.to[0]", "must be an address"),
            ({"to": ["a@example.com", 5]}, "params.to[1]", "must be an address"),
            ({"to": {"a": 1}}, "params.to", "must be a list"),
            ({"to": "a@example.com\nBcc: x"}, "params.to", "line break"),
            ({"cc": ["a\r"]}, "params.cc[0]", "line break"),
            ({"reply_to": "a\u2028b"}, "params.reply_to", "line break"),
            ({"subject": "a\nBcc: b"}, "params.subject", "line break"),
            ({"from_email": "a\r\nb"}, "params.from_email", "line break"),
            ({"subject": 5}, "params.subject", "must be a string"),
            ({"message": ["x"]}, "params.message", "must be a string"),
            ({"html": "x"}, "params.html", "html_message"),
        ],
    )
    def test_is_refused_with_the_reason(self, params: dict[str, Any], field: str, why: str) -> None:
        refused(email(**params), field, why)
