"""How this process gets memory for messages: it keeps what it freed, rather than ask the kernel for each one again.

glibc gives every block above 128 KB back at once, and a new one costs a page fault for each 4 KB: with arrays of a few
hundred KB, as much as copying them ten times over.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
KEEP_BYTES = 128 << 20  # freed memory that stays; more goes back to the kernel
MAX_BLOCK_BYTES = 32 << 20  # the most that glibc takes; larger blocks come from the kernel and go back to it


def keep_freed_memory() -> None:
    """From here on, for the whole process; does nothing where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAX_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
