"""The settings as the app uses them."""

from __future__ import annotations

from typing import Any

from callqueue import conf


def test_defaults_of_the_settings(settings: Any) -> None:
    settings.CALLQUEUE = {}
    config = conf.current()
    assert list(config.rules) == ["default"]
    assert config.rules["default"].limits[0].rate == "100/h"
    assert (config.interval, config.poll, config.release_lease, config.grace) == (
        1.0,
        0.05,
        300,
        30,
    )
    assert (config.max_call_bytes, config.max_response_bytes, config.keep_response_bytes) == (
        262144,
        1048576,
        65536,
    )
