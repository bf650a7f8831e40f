"""Fixtures of the tests of what other packages know: Celery's tasks and results."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import current_app
from celery.backends.cache import CacheBackend


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A result backend in memory."""
    app = current_app._get_current_object()
    backend = CacheBackend(app=app, backend="memory")
    monkeypatch.setattr(type(app), "backend", backend)
    for name, known in app.tasks.items():
        if name.startswith("tests."):
            monkeypatch.setattr(known, "ignore_result", False)
    monkeypatch.setattr("callqueue.broker.send_by_name", lambda *_: None)
    before, app.conf.result_backend = app.conf.result_backend, "cache+memory://"
    yield SimpleNamespace(backend=backend)
    app.conf.result_backend = before
