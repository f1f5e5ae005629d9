"""The program of a device's SuperNode: Flower's own, which executes the app of `safa deploy` and no other.

python -m safa.deploy.flower.supernode [arguments of flower-supernode]
"""

from __future__ import annotations

import logging

from safa.deploy.flower.app import APP_ID, APP_VERSION, app_fault
from safa.deploy.flower.internals import check_flower, run_supernode

__all__ = ["is_accepted", "supernode"]


def supernode() -> None:
    """Run the SuperNode with the arguments of this process until it is stopped."""
    check_flower()
    run_supernode(is_accepted, app_id=APP_ID, app_version=APP_VERSION)


def is_accepted(fab: bytes) -> bool:
    """Whether an app is that of `safa deploy`; if it is not, the log says so."""
    fault = app_fault(fab)
    if fault:
        logging.getLogger("flwr").error("Rejected the app of a run: %s. Only that of safa deploy is accepted.", fault)
    return not fault


if __name__ == "__main__":
    supernode()
