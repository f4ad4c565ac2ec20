"""Chooses the attention provider of a runner or of some of its layers."""

from __future__ import annotations

import logging
from typing import Literal, get_args

from kernels.providers.base import AttentionProvider, AttentionSpec, Unavailable
from kernels.providers.fa2 import Fa2Attention
from kernels.providers.fa3 import Fa3Attention
from kernels.providers.flashinfer import FlashInferAttention
from kernels.providers.own import CpuAttention, TritonAttention

ProviderName = Literal["triton", "fa3", "fa2", "flashinfer", "cpu"]
Backend = Literal["auto", "triton", "fa3", "fa2", "flashinfer", "cpu"]
_LOG = logging.getLogger("looseleaf.kernels")


def open_provider(name: ProviderName, spec: AttentionSpec, library: str | None = None) -> AttentionProvider:
    """Returns the provider `name` for this model. Raises Unavailable if it cannot serve the model."""
    if name == "fa3":
        return Fa3Attention(spec, library)
    if name == "fa2":
        return Fa2Attention(spec)
    if name == "flashinfer":
        return FlashInferAttention(spec)
    return TritonAttention(spec) if name == "triton" else CpuAttention(spec)


def choose(backend: Backend, spec: AttentionSpec, library: str | None = None) -> AttentionProvider:
    """Returns the provider that will compute attention, and logs it with the reason.

    "auto" chooses the provider "cpu" on a CPU. On a GPU, it chooses Triton if results must be deterministic or
    FlashAttention-3 is not available, and FlashAttention-3 otherwise. Raises Unavailable if the provider does not
    support the model, or if FlashAttention-3 is needed for `library` but is not available.
    """
    if backend != "auto":
        provider, why = open_provider(backend, spec, library), "requested"
    else:
        provider, why = _best(spec, library)
    _LOG.info("attention: %s %s (%s)", provider.name, provider.version, why)
    return provider


def _best(spec: AttentionSpec, library: str | None) -> tuple[AttentionProvider, str]:
    if spec.device.type == "cpu":
        return CpuAttention(spec), "on a CPU"
    if spec.deterministic:
        return TritonAttention(spec), "deterministic"
    try:
        return Fa3Attention(spec, library), "best available"
    except Unavailable as error:
        if library is not None:  # requested explicitly, so it must not be skipped
            raise
        return TritonAttention(spec), str(error)


def available(spec: AttentionSpec, library: str | None = None) -> dict[ProviderName, str]:
    """Returns every provider's version, or the reason why it is not available, for `looseleaf doctor`."""
    found: dict[ProviderName, str] = {}
    for name in get_args(ProviderName):
        try:
            found[name] = open_provider(name, spec, library).version
        except Unavailable as error:
            found[name] = str(error)
    return found
