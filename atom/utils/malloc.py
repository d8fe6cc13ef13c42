"""How the C library's allocator treats large temporary tensors."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks of up to 1 GiB for the next forward instead of returning them to the kernel.

    A prefill allocates and frees hundreds of megabytes; handed back, each of their pages costs a fault in the next one.
    False where the C library has no ``mallopt``, which then keeps its own ways.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
