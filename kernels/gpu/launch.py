"""Computes tile sizes and numbers of warps for the launchers in this folder.

Triton compiles a variant of a kernel for certain properties of the arguments: an integer that is 1 or divisible by 16,
a pointer aligned to 16 bytes. A different variant may reduce in a different order, so a property that varies with the
batch must not select a variant. Kernels therefore do not specialize on the number of rows (`do_not_specialize`), nor on
the alignment of columns of a batch (slots, seeds, ids), which may start anywhere in a packed input.
"""

from __future__ import annotations

import triton


def power_of_2(n: int) -> int:
    """Returns n rounded up to a power of two, as tiles require. Returns 1 for 0."""
    return int(triton.next_power_of_2(max(1, n)))


def warps_for(elements: int) -> int:
    """Returns the number of warps for a tile that is read once. With several warps, each thread gets at least 16
    elements.
    """
    return min(16, max(1, elements // 512))
