"""What other libraries log while a call is made holds none of its secrets."""

from __future__ import annotations

import logging

import pytest

from callqueue.security.withholding import at_work

VALUE = "sk_live_0123456789abcdef"


@pytest.mark.parametrize(
    "name", ["celery.app.trace", "urllib3.connection", "urllib3.connectionpool"]
)
def test_others_say_nothing_secret_while_a_call_is_made_and_what_they_like_after(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(name)
    caplog.set_level(logging.DEBUG, logger=name)
    with at_work((VALUE,)):
        extra = {"data": {"args": [f"({VALUE!r},)"]}}
        logger.warning("sent %(token)s", {"token": VALUE}, extra=extra)
        logger.warning("%d is not a number", VALUE)
        try:
            raise ConnectionError(f"no route with {VALUE}")
        except ConnectionError:
            logger.exception("it failed")
        logger.warning("%d is not a number", "text")
        logger.warning("x" * 100_000)
        logger.warning("all is well after %d", 3)
    logger.warning("sent %s", VALUE)
    assert caplog.messages == ["all is well after 3", f"sent {VALUE}"]
