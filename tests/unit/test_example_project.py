"""The example project: its servers come from the environment, and a message in its folder is
whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kombu import Connection, Queue

from example_project import servers
from tests.celery_app import app

# Importing the example project made its Celery application the current one.
app.set_current()
app.set_default()

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_database_is_read_from_its_url() -> None:
    read = servers.database("postgresql://shop:p%40ss@db.example:5433/orders")
    assert read["ENGINE"] == "django.db.backends.postgresql"
    assert (read["USER"], read["PASSWORD"]) == ("shop", "p@ss")
    assert (read["HOST"], read["PORT"], read["NAME"]) == ("db.example", 5433, "orders")


def test_sqlite_is_named_by_its_path() -> None:
    read = servers.database("sqlite:////var/lib/shop.sqlite3")
    assert read["NAME"] == "/var/lib/shop.sqlite3"
    assert read["OPTIONS"]["transaction_mode"] == "IMMEDIATE"


def test_an_unknown_database_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="DATABASE_URL begins with 'oracle'"):
        servers.database("oracle://db.example/orders")


def test_redis_is_named_by_its_url_alone() -> None:
    assert servers.broker("redis://mq.example:6379/1") == {
        "CELERY_BROKER_URL": "redis://mq.example:6379/1"
    }


def test_rabbitmq_is_asked_to_confirm_messages() -> None:
    read = servers.broker("amqp://shop:secret@mq.example:5672//")
    assert read["CELERY_BROKER_URL"] == "amqp://shop:secret@mq.example:5672//"
    assert read["CELERY_BROKER_TRANSPORT_OPTIONS"] == {"confirm_publish": True}


def test_a_folder_as_broker_keeps_all_of_its_files_in_it(tmp_path: Path) -> None:
    read = servers.broker(f"filesystem://{tmp_path}/broker")
    folders = [
        value for name, value in read["CELERY_BROKER_TRANSPORT_OPTIONS"].items() if "folder" in name
    ]
    assert len(folders) == 4
    assert all(
        Path(folder).is_relative_to(tmp_path) and Path(folder).is_dir() for folder in folders
    )


def test_a_message_goes_through_the_folder_and_is_never_seen_in_part(tmp_path: Path) -> None:
    read = servers.broker(f"filesystem://{tmp_path}")
    options = read["CELERY_BROKER_TRANSPORT_OPTIONS"]
    with Connection(
        transport=read["CELERY_BROKER_TRANSPORT"], transport_options=options
    ) as connection:
        queue = Queue("one", routing_key="one")(connection.default_channel)
        queue.declare()
        connection.Producer().publish(
            {"ids": [1, 2]}, routing_key="one", exchange="", serializer="json"
        )
        assert [path.name.partition(".")[2] for path in (tmp_path / "messages").iterdir()] == [
            "one.msg"
        ]
        message = queue.get(no_ack=True)
        assert message is not None
        assert message.payload == {"ids": [1, 2]}
    assert not list(tmp_path.rglob("*.part"))


def test_its_commands_start_from_any_folder(tmp_path: Path) -> None:
    own = {
        "DATABASE_URL": f"sqlite:///{tmp_path}/db.sqlite3",
        "CELERY_BROKER_URL": f"filesystem://{tmp_path}/broker",
    }
    environment = {**os.environ, **own, "DJANGO_SETTINGS_MODULE": "example_project.settings"}
    for arguments in (["check"], ["makemigrations", "--check", "--dry-run"]):
        command = [sys.executable, str(ROOT / "example_project" / "manage.py"), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
