"""What is freed stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

KEPT_MIB = """
import sys
from pathlib import Path
import torch
from safa.training.allocation import keep_freed_memory

def resident_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

if sys.argv[1] == "kept":
    keep_freed_memory()
    keep_freed_memory()
torch.ones(1)
before = resident_mib()
tensor = torch.ones(48 * 2**20, dtype=torch.uint8)  # glibc never keeps as much by itself
assert resident_mib() - before > 40
del tensor
print(resident_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no glibc")
@pytest.mark.parametrize(("how", "is_kept"), [("kept", True), ("not", False)])
def test_the_memory_of_a_tensor_that_is_freed_is_kept(how: str, is_kept: bool) -> None:
    found = subprocess.run([sys.executable, "-c", KEPT_MIB, how], capture_output=True, check=True)
    assert (float(found.stdout) > 40) == is_kept


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from safa.training import allocation

    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", None)
    allocation.keep_freed_memory.__wrapped__()
