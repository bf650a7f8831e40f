"""What the tests of permits' transports share."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

LIBRARIES = ("httpx2", "httpx")


@pytest.fixture(params=LIBRARIES)
def httpx(request: pytest.FixtureRequest) -> Any:
    """Each library whose clients take a transport."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return import_module(request.param)
