"""The API that is called: the least HTTP/1.1 server that notes when each request arrived, in a
process of its own.

In: any request; `/_count`, `/_arrivals` and `/_clear` are its own. Out: 200 and a small JSON body.
Instants are of the machine's monotonic clock, and are the kernel's where it tells: on a machine
that is all busy this process may come to read a request a tenth of a second after it came. It
judges nothing and knows no errors, so that it costs as little as it can.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from array import array
from pathlib import Path
from typing import Any

from tests.support.recorder import StampedSocket, listening

ROOT = Path(__file__).resolve().parent.parent.parent
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'


class Api:
    """The server, started and stopped: `with Api() as api: api.url("/ok")`."""

    def __enter__(self) -> Api:
        command = [sys.executable, "-m", "tests.benchmarks.server"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.communicate()

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def count(self) -> int:
        return int(self._ask("/_count"))

    def arrivals(self) -> dict[str, list[float]]:
        """The instants of arrival by path, in order."""
        return dict(self._ask("/_arrivals"))

    def clear(self) -> None:
        self._ask("/_clear")

    def _ask(self, path: str) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url(path), timeout=60) as response:
            return json.loads(response.read())


class _Requests:
    """One connection. Bodies are counted, not read."""

    instants: array[float] = array("d")
    places: array[int] = array("L")
    paths: dict[bytes, int] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        self.loop, self.buffer = loop, b""
        accepted, _ = listener.accept()
        self.socket = StampedSocket(fileno=accepted.detach())
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(10)  # for the answer; what is read is there
        loop.add_reader(self.socket, self.on_data)

    def on_data(self) -> None:
        try:
            data = self.socket.recv(65536)
        except OSError:
            data = b""
        if data:
            self.answer(data, self.socket.arrived_at or time.monotonic())
        else:
            self.loop.remove_reader(self.socket)
            self.socket.close()

    def answer(self, data: bytes, arrived_at: float) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            if (at := head.lower().find(b"content-length:")) >= 0:
                end += int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self.buffer) < end + 4:
                return
            self.buffer = self.buffer[end + 4 :]
            path = head.split(b" ", 2)[1]
            if path.startswith(b"/_"):
                body = json.dumps(self.own(path.decode())).encode()
                self.socket.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                )
                continue
            self.instants.append(arrived_at)
            self.places.append(self.paths.setdefault(path, len(self.paths)))
            self.socket.sendall(ANSWER)

    def own(self, path: str) -> Any:
        if path == "/_count":
            return len(self.instants)
        if path == "/_clear":
            del self.instants[:], self.places[:]
            self.paths.clear()
            return {}
        found: list[list[float]] = [[] for _ in self.paths]
        for place, instant in zip(self.places, self.instants, strict=True):
            found[place].append(instant)
        return {path.decode(): found[place] for path, place in self.paths.items()}


async def serve() -> None:
    """Answer until standard input closes, so that no server outlives the process that started
    it.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with listening() as listener:
        loop.add_reader(listener, lambda: _Requests(loop, listener))
        print(listener.getsockname()[1], flush=True)
        loop.add_reader(sys.stdin.fileno(), ended.set)
        loop.add_signal_handler(signal.SIGTERM, ended.set)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(serve())
