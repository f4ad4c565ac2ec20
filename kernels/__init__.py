"""Tensors in, tensors out: one file per kernel. Independent of blocks' owners, sequences and requests.

Every file holds `<k>_reference` (plain torch, written to be read) and the public `<k>`, which takes the Triton path of
`kernels.gpu` for tensors on a GPU and the C++ path of `kernels.cpu` for others where it applies. Importing loads no
library and no triton; the first call does.
"""

from __future__ import annotations

__version__ = "0.1.0"
