"""Celery without us: a task that makes the call with a session of its process. No table, no limit,
no record.

As a program: `python -m tests.benchmarks.raw enqueue URL COUNT` sends so many, `apart` one by one.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import requests
from celery import Celery

app = Celery("raw", broker=os.environ.get("RAW_BROKER_URL", "memory://"))
app.conf.update(
    task_default_queue=os.environ.get("RAW_QUEUE", "raw"),
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)
_session: requests.Session | None = None


@app.task(name="raw.call")
def call(url: str) -> None:
    global _session
    if _session is None:
        _session = requests.Session()
        _session.trust_env = False
    _session.post(url, data=b"x" * 200, timeout=(3, 27)).raise_for_status()


def main(what: str, url: str, count: int) -> None:
    if what == "enqueue":
        with app.producer_pool.acquire(block=True) as producer:
            for _ in range(count):
                call.apply_async((url,), producer=producer)
        return
    rand, sent = random.Random(1), []
    for _ in range(count):
        time.sleep(rand.uniform(0.1, 0.3))
        sent.append(time.monotonic())
        call.delay(url)
    print(json.dumps(sent))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
