"""What the kernel does with bytes that were sent: for how long it tries to deliver them, whether
the other side has them, and how they are taken back.

A connected socket enters. Where a system cannot do one of these, its default stands.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from contextlib import suppress

_NOTHING_LATER = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time at all
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
try:  # what asks how many bytes the other side has not confirmed: Linux, tcp(7), SIOCOUTQ
    import fcntl
    import termios

    _UNCONFIRMED = termios.TIOCOUTQ if sys.platform == "linux" else None
except ImportError:  # Windows
    _UNCONFIRMED = None
# what a kernel says that looks like Linux and does not know the question
_UNKNOWN = {errno.ENOTTY, errno.ENOSYS, errno.EOPNOTSUPP}


def bound(sock: socket.socket, seconds: float) -> None:
    """Let the kernel try for no longer than this, even if this process dies: else it may deliver a
    request after its attempt's lease.
    """
    if _USER_TIMEOUT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, max(1, round(seconds * 1000)))


def is_done(sock: socket.socket | None) -> bool:
    """Whether the other side's kernel has confirmed every byte; True where this system cannot tell.

    Any thread may ask, so the socket may be closed by now: then nobody can tell any more, and it
    is False.
    """
    if _UNCONFIRMED is None:
        return True
    try:
        return not int.from_bytes(fcntl.ioctl(sock, _UNCONFIRMED, bytes(4)), sys.byteorder)  # type: ignore[arg-type]
    except OSError as error:
        return error.errno in _UNKNOWN
    except (TypeError, ValueError):
        return False


def take_back(sock: socket.socket) -> None:
    """What is not delivered when the socket is closed never will be: else a request that was
    counted as lost would arrive after its place had gone to another.
    """
    with suppress(OSError):  # closed already, where TLS came to nothing
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOTHING_LATER)
