"""The kernels, which are functions over tensors.

The file `<k>.py` usually defines `<k>_reference`, in plain torch for readability, and the public function `<k>`.
For tensors on a GPU, most public functions call a Triton kernel (`kernels.gpu`); for other tensors, a C++ kernel
(`kernels.cpu`). If there is no kernel, they call the reference. Importing this package loads neither a C++ library nor
triton.
"""

from __future__ import annotations

__version__ = "0.1.4"
"""Part of the numerics fingerprint. Raise it when the bits of a result change, so that workers with old and with new
kernels do not share blocks.
"""
