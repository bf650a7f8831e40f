"""What other libraries log while a call is made holds none of its secrets."""

from __future__ import annotations

import logging

import pytest

from callqueue.security.withholding import at_work


class TestLogs:
    VALUE = "sk_live_0123456789abcdef"

    @pytest.fixture(params=["celery.app.trace", "urllib3.connection", "urllib3.connectionpool"])
    def logger(self, request: pytest.FixtureRequest) -> logging.Logger:
        return logging.getLogger(request.param)

    def test_others_say_nothing_secret_while_a_call_is_made(
        self, logger: logging.Logger, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, logger=logger.name)
        with at_work((self.VALUE,)):
            logger.warning(
                "sent %(token)s",
                {"token": self.VALUE},
                extra={"data": {"args": [f"({self.VALUE!r},)"]}},
            )
            logger.warning("%d is not a number", self.VALUE)
            try:
                raise ConnectionError(f"no route with {self.VALUE}")
            except ConnectionError:
                logger.exception("it failed")
            logger.warning("%d is not a number", "text")
            logger.warning("x" * 100_000)
            logger.warning("all is well after %d", 3)
        assert caplog.messages == ["all is well after 3"]

    def test_and_what_they_like_before_and_after(
        self, logger: logging.Logger, caplog: pytest.LogCaptureFixture
    ) -> None:
        with at_work((self.VALUE,)):
            pass
        logger.warning("sent %s", self.VALUE)
        assert caplog.messages == [f"sent {self.VALUE}"]
