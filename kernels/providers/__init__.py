"""Attention providers: our own kernels, FlashAttention 2 and 3, FlashInfer. One is chosen for a runner,
or for each kind of attention layer if the layers of its model differ.
"""

from __future__ import annotations
