"""Tile sizes and warps, shared by the launchers of this folder. Does not depend on kernels.

Triton compiles a variant of a kernel for certain properties of the arguments: an integer that is 1 or divisible by 16,
a pointer aligned to 16 bytes. A different variant may reduce in a different order, so nothing that varies with the
batch may select a variant: kernels do not specialise on the number of rows (`do_not_specialize`), or do not have it as
an argument. Slicing rows does not change their stride. Columns of a batch (slots, seeds, ids) may start anywhere in a
packed input, so kernels do not specialise on their alignment either: a second variant would be compiled in the middle
of a request.
"""

from __future__ import annotations

import triton


def power_of_2(n: int) -> int:
    """Returns n rounded up to a power of two, because the side of a tile must be one; 1 for 0."""
    return int(triton.next_power_of_2(max(1, n)))


def warps_for(elements: int) -> int:
    """Returns the warps for a tile that is read once: 16 elements per thread keep several 16-byte loads in flight."""
    return min(16, max(1, elements // 512))
