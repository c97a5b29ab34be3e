"""Memory of messages: what was freed is used again, without a page fault."""

from __future__ import annotations

import subprocess
import sys

ROUNDS = """
import resource, sys
from opd.serving.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def a_batch():
    return [b"x" * (4 << 20) for _ in range(4)]
a_batch()
before = faults()
for _ in range(10):
    a_batch()
print(faults() - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", ROUNDS, how], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def test_big_blocks_are_used_again():
    """10 times 16 MiB are 40,960 pages, which glibc asks the kernel for again and again."""
    assert page_faults("keep") < 100 < 10_000 < page_faults("as it is")
