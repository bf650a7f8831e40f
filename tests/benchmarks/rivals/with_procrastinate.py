"""Procrastinate: `python with_procrastinate.py schema | enqueue URL COUNT`; its worker takes `--app
with_procrastinate.app`.
"""

from __future__ import annotations

import os
import sys
import threading

import procrastinate
import requests

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["RIVAL_DSN"]))
_local = threading.local()
BODY = b"x" * 200


@app.task(name="call", queue="default")
def call(url: str) -> None:
    if not hasattr(_local, "session"):
        _local.session = requests.Session()
        _local.session.trust_env = False
    _local.session.post(url, data=BODY, timeout=(3, 27)).raise_for_status()


def main(what: str, *arguments: str) -> None:
    sync = procrastinate.SyncPsycopgConnector(conninfo=os.environ["RIVAL_DSN"])
    with app.replace_connector(sync) as opened, opened.open():
        if what == "schema":
            opened.schema_manager.apply_schema()
            return
        url, count = arguments[0], int(arguments[1])
        if what == "apart":
            from apart import send_apart

            send_apart(lambda: call.defer(url=url), count)
            return
        for start in range(0, count, 1000):
            call.batch_defer(*[{"url": url} for _ in range(min(1000, count - start))])


if __name__ == "__main__":
    main(*sys.argv[1:])
