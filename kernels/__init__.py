"""The kernels: functions over tensors, one file per kernel.

The file of a kernel `<k>` usually defines `<k>_reference` (plain torch, written for readability) and the public `<k>`.
The public function uses the Triton path of `kernels.gpu` for tensors on a GPU, the C++ path of `kernels.cpu` for other
tensors, and the reference if there is no such path. Importing this package loads neither a library nor triton; the
first call of a kernel does.
"""

from __future__ import annotations

__version__ = "0.1.1"
"""Part of the numerics fingerprint. Raise it when the bits of a result change, so that old and new blocks are not
shared.
"""
