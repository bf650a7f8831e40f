"""The task of with_django_tasks.py, in a module of its own since tasks are named by their
module.
"""

from __future__ import annotations

import requests
from django_tasks import task

BODY = b"x" * 200
_session: requests.Session | None = None


@task()
def call(url: str) -> None:
    global _session
    if _session is None:
        _session = requests.Session()
        _session.trust_env = False
    _session.post(url, data=BODY, timeout=(3, 27)).raise_for_status()
