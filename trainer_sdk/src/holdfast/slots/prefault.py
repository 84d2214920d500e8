"""Prefaults the pages of shared memory.

The first copy into the memory is then as fast as later copies. A full volume raises an error here, where
a first write later would cause SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MADV_POPULATE_WRITE = 23
_PAGE_BYTES = 4096
_TWO_THREADS_FROM_BYTES = 16 << 20


def prefault(memory: mmap.mmap, path: Path, size_bytes: int) -> None:
    """Prefault the first `size_bytes` of the mapped file. Their contents do not change.

    Other processes may write to the file at the same time. Two threads do the work for large files,
    because the kernel needs most of a second to zero one GiB in one thread. Raises OSError (ENOSPC,
    ENOMEM).
    """
    try:
        _populate(memory, size_bytes)
    except OSError as error:
        if error.errno == errno.EFAULT:  # a write to this page would cause SIGBUS
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        if error.errno != errno.EINVAL:
            raise
        # A kernel before 5.14 does not support MADV_POPULATE_WRITE. This only allocates the pages, and
        # the first save fills the page tables.
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)


def _populate(memory: mmap.mmap, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    anchor = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(anchor)

    def populate(start: int, stop: int) -> None:
        if libc.madvise(address + start, stop - start, _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    try:
        if size < _TWO_THREADS_FROM_BYTES:
            populate(0, size)
            return
        half = size // 2 // _PAGE_BYTES * _PAGE_BYTES
        with ThreadPoolExecutor(1, "holdfast-touch") as helper:
            other = helper.submit(populate, half, size)
            populate(0, half)
            other.result()
    finally:
        del anchor
