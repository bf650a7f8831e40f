"""Hosts of a test's own on this one machine: network namespaces with an address each, on a bridge,
to be cut off and mended.

In: how many. Out: a Network, whose own address every host reaches, and which forwards ports there
to servers of loopback. Needs root and `ip`; NotPermitted says why it cannot be. Leaves no
namespace, link or thread behind.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass


class NotPermitted(Exception):
    """This machine does not let us make networks."""


@dataclass(frozen=True)
class Host:
    """A namespace, its address, and the end of its cable that is outside of it."""

    space: str
    address: str
    cable: str

    def command(self, **environment: str) -> list[str]:
        """What runs the rest of a command line on this host."""
        return [
            "ip",
            "netns",
            "exec",
            self.space,
            "env",
            *(f"{name}={value}" for name, value in environment.items()),
        ]

    def cut(self) -> None:
        """Nothing comes or goes from now on; nobody is told."""
        _ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        _ip("link", "set", self.cable, "up")


class Network:
    """A bridge with an address of its own (198.18.0.0/15 is for measurements), and hosts on it, for
    as long as it is open.
    """

    def __init__(self, hosts: int) -> None:
        self._name = f"cq{secrets.token_hex(3)}"
        self._net = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
        self.address = f"{self._net}.1"
        self.range = f"{self._net}.0/24"
        self.hosts = [
            Host(f"{self._name}h{n}", f"{self._net}.{10 + n}", f"{self._name}h{n}")
            for n in range(hosts)
        ]
        self._forwards: list[Forward] = []

    def __enter__(self) -> Network:
        if shutil.which("ip") is None:
            raise NotPermitted("there is no `ip` here")
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        for forward in self._forwards:
            forward.close()
        for host in self.hosts:
            with suppress(NotPermitted):
                _ip("netns", "delete", host.space)
        with suppress(NotPermitted):
            _ip("link", "delete", self._name)

    def forward(self, host: str, port: int) -> None:
        """Whoever connects to that port of our address is connected to the server."""
        self._forwards.append(Forward(self.address, host, port))

    def _make(self) -> None:
        _ip("link", "add", self._name, "type", "bridge")
        _ip("address", "add", f"{self.address}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        for host in self.hosts:
            _ip("netns", "add", host.space)
            _ip(
                "link",
                "add",
                host.cable,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.space,
            )
            _ip("link", "set", host.cable, "master", self._name, "up")
            _ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.space, "link", "set", "lo", "up")
            _ip("-n", host.space, "link", "set", "eth0", "up")
            # What is sent while the host is cut off is gone: it does not wait for an ARP answer
            # until it is back.
            _ip(
                "netns",
                "exec",
                host.space,
                "sh",
                "-c",
                "echo 0 > /proc/sys/net/ipv4/neigh/eth0/unres_qlen_bytes",
            )


class Forward:
    """A port of ours that leads to a server, in a thread of its own."""

    def __init__(self, address: str, host: str, port: int) -> None:
        self._address, self._host, self._port = address, host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._join, self._address, self._port)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """One direction, until it ends."""
    try:
        with suppress(ConnectionError, TimeoutError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
    finally:
        target.close()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
