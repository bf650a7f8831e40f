"""Names that probably stand before a secret."""

from __future__ import annotations

from typing import Any

import pytest

from callqueue.security.redaction import (
    REDACTED,
    is_telling,
    redact_headers,
    redact_params,
    redact_text,
    redact_url,
)

PASSWORD = "hunter2-hunter2"
URL = "https://api.example.com/v1"


@pytest.mark.parametrize(
    "name",
    ["Authorization", "proxy-authorization", "COOKIE", "Set-Cookie", "X-Api-Key", "Api-Key", "X-Auth-Token",
     "X-Amz-Security-Token", "X-Amz-Signature", "access_token", "client_secret", "userPassword", "passwd", "apikey",
     "api_key", "credentials", "sessionid", "auth", "pwd", "private_key", "aws_access_key_id"],
)  # fmt: skip
def test_names_that_tell(name: str) -> None:
    assert is_telling(name)
    assert redact_headers({name: PASSWORD}) == {name: REDACTED}
    assert redact_params({"json": {"a": [{name: PASSWORD}]}}) == {"json": {"a": [{name: REDACTED}]}}
    assert redact_params({"data": [[name, PASSWORD]]}) == {"data": [[name, REDACTED]]}
    assert PASSWORD not in redact_url(f"{URL}?{name}={PASSWORD}&page=2")
    assert PASSWORD not in redact_text(f'bad answer: {{"x": 1, "{name}": "{PASSWORD}", "y"')


@pytest.mark.parametrize(
    "name", ["Accept", "Content-Type", "X-Request-Id", "amount", "author", "keyboard", 5]
)
def test_names_that_do_not(name: Any) -> None:
    assert not is_telling(name)
    assert redact_headers({name: "text/html"}) == {str(name): "text/html"}
