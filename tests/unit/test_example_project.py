"""The example project: its servers come from the environment, and a message is whole."""

from __future__ import annotations

from pathlib import Path

from kombu import Connection, Queue

from example_project import servers
from tests.celery_app import app

# Importing the example project made its Celery application the current one.
app.set_current()
app.set_default()


def test_a_folder_as_broker_keeps_its_files_in_it_and_no_message_is_seen_in_part(
    tmp_path: Path,
) -> None:
    read = servers.broker(f"filesystem://{tmp_path}/broker")
    options = read["CELERY_BROKER_TRANSPORT_OPTIONS"]
    folders = [Path(value) for name, value in options.items() if "folder" in name]
    assert len(folders) == 4
    assert all(folder.is_relative_to(tmp_path) and folder.is_dir() for folder in folders)
    transport = read["CELERY_BROKER_TRANSPORT"]
    with Connection(transport=transport, transport_options=options) as connection:
        queue = Queue("one", routing_key="one")(connection.default_channel)
        queue.declare()
        connection.Producer().publish(
            {"ids": [1, 2]}, routing_key="one", exchange="", serializer="json"
        )
        (written,) = (tmp_path / "broker" / "messages").iterdir()
        assert written.name.partition(".")[2] == "one.msg"
        message = queue.get(no_ack=True)
        assert message is not None
        assert message.payload == {"ids": [1, 2]}
    assert not list(tmp_path.rglob("*.part"))
