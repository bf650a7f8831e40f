from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from django.dispatch import Signal


@pytest.fixture
def told() -> Iterator[Callable[[Signal], list[dict[str, Any]]]]:
    """`told(signal)`: a list of what it was sent with from now on."""
    listening = []

    def listen_to(signal: Signal) -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []

        def listen(sender: Any, signal: Signal, **facts: Any) -> None:
            heard.append(facts)

        signal.connect(listen)
        listening.append((signal, listen))
        return heard

    yield listen_to
    for signal, listen in listening:
        signal.disconnect(listen)
