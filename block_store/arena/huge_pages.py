"""Maps files in shared memory so that they can be in huge pages, and moves them there. Attention reads far more KV than
the memory whose small pages have addresses in the TLB.

Linux does not use huge pages for /dev/shm unless an administrator permits it. MADV_COLLAPSE (Linux 6.1) asks for them
explicitly, and does not depend on these settings.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

PAGE_BYTES = 2 << 20
"""Size of a huge page on x86, and on ARM with pages of 4 KiB."""
_PROT_NONE, _MAP_FIXED, _MAP_FAILED, _MADV_COLLAPSE = 0, 0x10, ctypes.c_void_p(-1).value, 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_file(fd: int, size: int) -> memoryview:
    """Maps the first `size` bytes of a file to read and write, at an address at which huge pages of the file remain
    huge. The memory is unmapped when no view of it exists. Raises OSError.
    """
    reserved = _mmap(None, size + PAGE_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    at = reserved + -reserved % PAGE_BYTES
    memory = (ctypes.c_ubyte * size).from_address(at)
    weakref.finalize(memory, _libc.munmap, reserved, size + PAGE_BYTES).atexit = False  # threads may still use it
    _mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    return memoryview(memory).cast("B")


def collapse(view: memoryview, begin: int, end: int) -> None:
    """Moves a part of a mapped file into huge pages. The content stays, also for other processes that use it meanwhile.
    `view` is a result of `map_file`; the positions are multiples of PAGE_BYTES. Raises OSError, with EAGAIN if some
    pages were in use and stay as they are, and with other numbers if the system has no huge pages, or too few.
    """
    if _libc.madvise(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) + begin, end - begin, _MADV_COLLAPSE):
        raise _error()


def _mmap(at: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _libc.mmap(at, size, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        raise _error()
    return found


def _error() -> OSError:
    return OSError(number := ctypes.get_errno(), os.strerror(number))
