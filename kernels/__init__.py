"""The kernels: functions over tensors, one file per kernel. Does not depend on block ownership, sequences or requests.

The file of a kernel `<k>` defines `<k>_reference` (plain torch, written for readability) and the public `<k>`. The
public function uses the Triton path of `kernels.gpu` for tensors on a GPU, and the C++ path of `kernels.cpu` for other
tensors if it supports them. Importing this package loads neither a library nor triton; the first call loads what it
needs.
"""

from __future__ import annotations

__version__ = "0.1.1"
"""Part of the numerics fingerprint. Raise it with every change of a result's bits, so that old and new blocks are not
shared.
"""
