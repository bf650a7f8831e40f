"""A stand-in for the vendor's API, in a process of its own: it keeps its limits exactly, and
records what arrived.

In: requests on loopback. Out: 200, 429 where a sliding window of arrivals is full, and for names
made for it 404 or 500; and, at /_record, every arrival with its instant. Knows nothing of
callqueue.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WINDOW = 1.0  # seconds; all of the limits are per second
LIMITS = {
    "prices": 5,
    "channel": 1,
    "workspace": 8,
}  # calls in any window; "channel": in each of them
LATENCY = 0.015

PRICE = re.compile(r"/prices/([\w-]+)")
MESSAGE = re.compile(r"/channels/([\w-]+)/messages")


@dataclass
class Arrival:
    """A request as it came: when (time.monotonic), what for, against which limits it counts, how it
    was answered.
    """

    at: float
    api: str
    name: str
    counts: list[str]
    status: int = 0


class Book:
    """What has arrived, and what the limits make of the next one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.arrivals: list[Arrival] = []
        self.admitted: dict[str, list[float]] = defaultdict(list)
        self.failures: Counter[tuple[str, str]] = Counter()

    def take(self, api: str, name: str, counts: list[str]) -> Arrival:
        """Write an arrival down, at this instant, with the status that it gets."""
        with self.lock:
            arrival = Arrival(time.monotonic(), api, name, counts)
            self.arrivals.append(arrival)
            arrival.status = 429 if self._is_over(arrival) else self._status_of(api, name)
            return arrival

    def _is_over(self, arrival: Arrival) -> bool:
        for limit in arrival.counts:
            recent = [at for at in self.admitted[limit] if arrival.at - at < WINDOW]
            self.admitted[limit] = recent
            if len(recent) >= LIMITS[limit.split(":")[0]]:
                return True
        for limit in arrival.counts:
            self.admitted[limit].append(arrival.at)
        return False

    def _status_of(self, api: str, name: str) -> int:
        """Some names fail twice, some always, some are not there at all."""
        if name.startswith("gone-"):
            return 404
        self.failures[api, name] += 1
        if name.startswith("broken-") or (
            name.startswith("flaky-") and self.failures[api, name] <= 2
        ):
            return 500
        return 200

    def record(self) -> dict[str, Any]:
        with self.lock:
            return {
                "window": WINDOW,
                "limits": LIMITS,
                "arrivals": [asdict(arrival) for arrival in self.arrivals],
            }


class Handler(BaseHTTPRequestHandler):
    """One connection. The answer leaves in one piece, or its head and body would wait for each
    other.
    """

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    book: Book

    def do_GET(self) -> None:
        if self.path == "/_record":
            self._answer(200, self.book.record())
        elif match := PRICE.fullmatch(self.path):
            self._count(
                "prices",
                match[1],
                ["prices"],
                {"sku": match[1], "price": f"{len(match[1])}.{ord(match[1][-1])}"},
            )
        else:
            self._answer(404, {"error": "no such thing"})

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        name = str(sent.get("order", ""))
        if match := MESSAGE.fullmatch(self.path):
            self._count("messages", name, [f"channel:{match[1]}", "workspace"], {"posted": name})
        elif self.path == "/uploads":
            self._count("uploads", name, ["workspace"], {"stored": name})
        else:
            self._answer(404, {"error": "no such thing"})

    def _count(self, api: str, name: str, counts: list[str], answer: Mapping[str, Any]) -> None:
        arrival = self.book.take(api, name, counts)
        time.sleep(LATENCY)
        self._answer(
            arrival.status, answer if arrival.status == 200 else {"error": ERRORS[arrival.status]}
        )

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the record says it all."""


ERRORS = {404: "there is no such product", 429: "too many requests", 500: "something broke"}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    """Listen, print the port, and serve until SIGTERM, or until whoever started this has gone."""
    parser = argparse.ArgumentParser(description="A stand-in for the vendor's API.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="end when the process that started it does",
    )
    options = parser.parse_args()
    Handler.book = Book()
    with Server(("127.0.0.1", options.port), Handler) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(
                number, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start()
            )
        if options.until_stdin_closes:
            threading.Thread(
                target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True
            ).start()
        print(server.server_port, flush=True)
        server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
