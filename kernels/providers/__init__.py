"""Attention providers, which run our own kernels, FlashAttention 2 or 3, or FlashInfer. One is chosen for a runner, or
for each kind of attention layer if the layers of its model differ.
"""

from __future__ import annotations
