"""What is freed stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from safa.training.allocation import keep_freed_memory

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(48 * 2**20, dtype=torch.uint8)  # glibc never keeps as much by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_freed_memory()
    keep_freed_memory()
faults(2)
print(faults(5))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no glibc")
def test_a_tensor_takes_the_pages_of_one_that_was_freed() -> None:
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True).stdout)

    assert faults("kept") < 10
    assert faults("not") >= 5 * 48 * 2**20 // 2**21, "pages have 2 MiB at most"


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from safa.training import allocation

    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", None)
    allocation.keep_freed_memory.__wrapped__()
