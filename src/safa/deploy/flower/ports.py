"""Sockets of this machine: binding an address, and finding a free port."""

from __future__ import annotations

import atexit
import socket
import sys
from collections import deque

__all__ = ["LOOPBACK", "bound_socket", "free_port"]

LOOPBACK = "127.0.0.1"
_MOST_RESERVED = 64
_reserved: deque[socket.socket] = deque()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address and does not listen yet."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found


def free_port() -> int:
    """A port of the loopback interface that is free, and that no other program on this machine is given.

    A program that is to listen on it takes seconds to start. Until then, a socket of this process is bound to the port:
    the kernel does not give it to a program that asks for any port, and still lets a program bind it that asks for it.
    """
    found = bound_socket(LOOPBACK, 0)
    port = int(found.getsockname()[1])
    _reserved.append(found)
    if sys.platform != "linux":  # there, a port that is bound cannot be bound again
        _release(0)
    _release(_MOST_RESERVED)
    return port


@atexit.register
def _release(left: int = 0) -> None:
    """Close the sockets of reserved ports, the oldest first, until so many are left."""
    while len(_reserved) > left:
        _reserved.popleft().close()
