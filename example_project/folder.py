"""Celery's file-system broker, for several workers that look often: a message is there in full or
not at all.

Kombu's own writes into the file that workers can see already, and one that looks just then reads
half a message.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    """Writes aside, then gives the file the name that workers look for."""

    def _put(self, queue: str, payload: dict[str, Any], **_: Any) -> None:
        name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
        aside = Path(self.control_folder) / f"{name}.part"
        aside.write_text(dumps(payload), encoding="utf-8")
        os.replace(aside, Path(self.data_folder_out) / name)


class Transport(filesystem.Transport):
    """What CELERY_BROKER_TRANSPORT names."""

    Channel = Channel
