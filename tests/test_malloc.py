"""Freed memory stays with the process: the next forward pays no page faults for it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from atom.utils.malloc import keep_freed_memory
assert sys.argv[1] == "off" or keep_freed_memory()
def use():
    block = torch.empty(40 << 20, dtype=torch.uint8).fill_(1)
    del block
for _ in range(12):
    use()
def faults_of_a_use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# The least of several: the kernel may take pages away from an idle process at any time.
print(min(faults_of_a_use() for _ in range(4)))
"""


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_kept() -> None:
    assert faults("on") < 100 < faults("off")
