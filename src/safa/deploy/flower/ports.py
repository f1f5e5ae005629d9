"""Sockets of this machine: binding an address, and finding a free port."""

from __future__ import annotations

import socket
import sys
from collections import deque

__all__ = ["LOOPBACK", "bound_socket", "free_port"]

LOOPBACK = "127.0.0.1"
_RESERVED: deque[socket.socket] = deque(maxlen=64)


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
    if sys.platform == "linux":
        _RESERVED.append(found)
    else:  # a port that is bound cannot be bound again
        found.close()
    return port
