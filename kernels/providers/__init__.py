"""Attention providers: our own kernels, FlashAttention 2 and 3, FlashInfer. One is chosen for each runner."""

from __future__ import annotations
