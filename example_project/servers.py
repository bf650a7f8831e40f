"""Where the servers are, read from the environment: a database, a broker, a cache.

In: URLs. Out: what Django's and Celery's settings want. Connects to nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ENGINES = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "sqlite": "sqlite3",
}


def database(url: str) -> dict[str, Any]:
    """`postgresql://user:password@host:5432/name`, `mysql://...`, or
    `sqlite:////the/path.sqlite3`.
    """
    parts = urlsplit(url)
    if parts.scheme not in ENGINES:
        raise ValueError(
            f"DATABASE_URL begins with {parts.scheme!r}; it may be {', '.join(ENGINES)}."
        )
    engine = f"django.db.backends.{ENGINES[parts.scheme]}"
    if parts.scheme == "sqlite":
        return {"ENGINE": engine, "NAME": unquote(parts.path.removeprefix("/")), "OPTIONS": SQLITE}
    return {
        "ENGINE": engine,
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": parts.port or "",
        "CONN_MAX_AGE": 60,
    }


# Several processes write to the one file: readers go on meanwhile, and writers wait for each other.
SQLITE = {
    "timeout": 20,
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=wal; PRAGMA synchronous=normal",
}


def broker(url: str) -> dict[str, Any]:
    """Celery's settings for `amqp://...`, `redis://...`, or `filesystem:///the/folder`."""
    if url.startswith("amqp"):  # RabbitMQ then says that it has each message
        return {
            "CELERY_BROKER_URL": url,
            "CELERY_BROKER_TRANSPORT_OPTIONS": {"confirm_publish": True},
        }
    if not url.startswith("filesystem:"):
        return {"CELERY_BROKER_URL": url}
    folder = Path(
        unquote(urlsplit(url).path).rstrip("/")
        or Path(tempfile.gettempdir()) / "callqueue-example-broker"
    )
    for name in ("messages", "control", "taken"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    options = {
        "data_folder_in": str(folder / "messages"),
        "data_folder_out": str(folder / "messages"),
        "control_folder": str(folder / "control"),
        "processed_folder": str(folder / "taken"),
        "store_processed": True,  # else messages pass through the machine's temporary folder
        "polling_interval": 0.02,
    }
    return {
        "CELERY_BROKER_URL": "filesystem://",
        "CELERY_BROKER_TRANSPORT": "example_project.folder:Transport",
        "CELERY_BROKER_TRANSPORT_OPTIONS": options,
        # every worker would answer by files of its own
        "CELERY_WORKER_ENABLE_REMOTE_CONTROL": False,
    }


def cache(url: str) -> dict[str, Any]:
    """`redis://...`, or nothing for a cache in each process's memory."""
    if not url:
        return {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    return {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": url}
