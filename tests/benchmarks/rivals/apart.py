"""Sends calls one at a time at irregular intervals, and prints the instants just before each as
JSON.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable


def send_apart(send: Callable[[], object], count: int) -> None:
    rand, sent = random.Random(1), []
    for _ in range(count):
        time.sleep(rand.uniform(0.1, 0.3))
        sent.append(time.monotonic())
        send()
    print(json.dumps(sent))
