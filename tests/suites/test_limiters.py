"""Independent judges: limiters that others wrote must refuse a flood, and refuse none of
callqueue's calls at full use.
"""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from django.db.models import F

from callqueue.models import CallAttempt, CallQueue
from tests.support.processes import Processes
from tests.support.servers import free_port
from tests.support.verdicts import Late, on_a_quiet_machine, until_none_is_left, verdict

JITTER = timedelta(seconds=0.05)
MOVING_WINDOW = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from limits import RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

limiter, item = MovingWindowRateLimiter(MemoryStorage()), RateLimitItemPerSecond(20)

class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200 if limiter.hit(item, self.path) else 429)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
"""
NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    limit_req_zone $server_port zone=all:1m rate=20r/s; limit_req_status 429;
    server {{ listen 127.0.0.1:{port}; root {folder}; limit_req zone=all burst={burst} nodelay; }}
}}
"""


@contextmanager
def served(command: list[str], port: int) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "the judge ended"
                assert time.monotonic() < deadline, "the judge does not answer"
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def moving_window(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("limits")
    (tmp_path / "judge.py").write_text(MOVING_WINDOW)
    port = free_port()
    with served([sys.executable, str(tmp_path / "judge.py"), str(port)], port) as address:
        yield address


@pytest.fixture
def nginx(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    binary = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if binary is None:
        pytest.skip("nginx is not installed")
    (tmp_path / "page").write_text("ok")
    tmp_path.chmod(0o755)
    port = free_port()
    (tmp_path / "conf").write_text(
        NGINX.format(folder=tmp_path, port=port, burst=request.param) + ""
    )
    command = [binary, "-c", str(tmp_path / "conf"), "-p", str(tmp_path), "-g", "user root;"]
    with served(command, port) as address:
        yield address


def test_the_limits_librarys_moving_window_refuses_none(
    moving_window: str, configure: Callable[[str], None], processes: Processes
) -> None:
    assert flood(moving_window) > 0
    judge(moving_window, 'SlidingWindow("20/s")', configure, processes)


@pytest.mark.parametrize("nginx", [1, 19], indirect=True, ids=["burst=1", "burst=19"])
def test_nginx_refuses_none(
    nginx: str,
    request: pytest.FixtureRequest,
    configure: Callable[[str], None],
    processes: Processes,
) -> None:
    assert flood(nginx) > 0
    burst = request.node.callspec.params["nginx"]
    judge(nginx, f'TokenBucket("20/s", burst={burst + 1})', configure, processes)


def flood(address: str) -> int:
    """How many of 60 requests at once are refused."""
    connection = http.client.HTTPConnection(address, timeout=10)
    refused = 0
    for _ in range(60):
        connection.request("GET", "/page")
        answer = connection.getresponse()
        answer.read()
        refused += answer.status == 429
    connection.close()
    return refused


def judge(address: str, limit: str, configure: Callable[[str], None], processes: Processes) -> None:
    """Ten seconds of backlog: nothing refused, 19 a second accepted."""
    queue = processes.broker.queue("one")
    configure(
        f'CALLQUEUE = {{"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {{"r": Rule(queues={queue!r}, limits=[{limit}])}}}}'
    )
    for _ in range(2):
        processes.worker("one", concurrency=2)
    time.sleep(1.5)  # the flood ages
    data = {"method": "get", "params": {"url": f"http://{address}/page"}}
    CallQueue.objects.send_many([data] * 215, rule="r")
    processes.dispenser()
    unfinished = CallQueue.objects.filter(status__in=(0, 1, 2))
    until_none_is_left(lambda: Counter(unfinished.values_list("status", flat=True)), 40)
    statuses = Counter(CallAttempt.objects.values_list("response_status", flat=True))
    slow = CallAttempt.objects.filter(finished_at__gt=F("sent_at") + JITTER).count()
    if statuses != {200: 215} and slow:
        raise Late(
            f"{statuses}, and {slow} answers took longer than the jitter: the judge itself may have counted too late"
        )
    with verdict():
        assert statuses == {200: 215}
    sent = sorted(CallAttempt.objects.values_list("sent_at", flat=True))
    after_burst = [instant for instant in sent if (instant - sent[0]).total_seconds() >= 1.0]
    rate = len(after_burst) / ((after_burst[-1] - sent[0]).total_seconds() - 1.0)
    print(f"accepted {rate:.2f} a second after the first second")
    with on_a_quiet_machine():
        assert rate >= 17  # 19 on a quiet machine
