"""The program of the server's SuperLink: Flower's own, with two listeners and a clock that cannot be set.

    python -m safa.deploy.flower.superlink HOST PORT PARTS [arguments of flower-superlink]

HOST and PORT are those of the public listener, PARTS is how many parts a reply may have; the arguments of
`flower-superlink` name the inner listener.
"""

from __future__ import annotations

import sys
from typing import Any

from safa.deploy.flower.clock import steady_flower
from safa.deploy.flower.internals import check_flower, run_superlink
from safa.deploy.flower.ports import bound_socket
from safa.deploy.flower.request_filter import REQUEST_S, Listeners, RequestFilter

__all__ = ["superlink"]


def superlink(*, request_s: float = REQUEST_S) -> None:
    """Run the SuperLink with the arguments of this process until it is stopped."""
    check_flower()
    steady_flower(link=True)
    public, parts = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])

    def serve(*, app: Any, host: str, port: int, **options: Any) -> None:
        sockets = [bound_socket(host, port), bound_socket(*public)]
        filtered = RequestFilter(app, inner_port=port, parts=parts, request_s=request_s)
        Listeners(filtered, inner_port=port, request_s=request_s, **options).run(sockets=sockets)

    run_superlink(sys.argv[4:], serve)


if __name__ == "__main__":
    superlink()
