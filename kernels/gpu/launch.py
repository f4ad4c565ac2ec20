"""What the launchers of this folder share: tile sizes and warps. Independent of kernels.

Triton compiles a variant of a kernel for what it sees of a launch: an integer that is 1 or divisible by 16, a pointer
aligned to 16 bytes. Another variant may reduce in another order, so nothing that varies with the batch may be seen: the
number of rows is not specialised on (`do_not_specialize`) or not passed. Slicing rows leaves their stride as it is.
Columns of a batch (slots, seeds, ids) may start anywhere in a packed input, so their alignment is not looked at either:
a second variant would be compiled in the middle of a request.
"""

from __future__ import annotations

import triton


def power_of_2(n: int) -> int:
    """The next power of two: what the side of a tile must be. 1 for 0."""
    return int(triton.next_power_of_2(max(1, n)))


def warps_for(elements: int) -> int:
    """Warps for a tile that is read once: 16 elements a thread, so that several 16-byte loads are in flight."""
    return min(16, max(1, elements // 512))
