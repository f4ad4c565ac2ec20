"""The choice of a provider, and the error if none is available."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.providers.base import AttentionSpec, Unavailable
from kernels.providers.choice import ProviderName, available, choose, open_provider
from kernels.providers.own import CpuAttention, TritonAttention


@pytest.fixture
def on_cpu(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, compute_capability=None)


@pytest.fixture
def on_gpu(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> AttentionSpec:
    """A spec for Hopper, without flash-attn and FlashInfer. The choice does not access a device."""
    for module in ("flash_attn", "flash_attn_interface", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)
    return replace(spec, device=torch.device("cuda"))


def test_on_a_cpu_the_own_kernels_are_taken(on_cpu: AttentionSpec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "looseleaf.kernels")
    provider = choose("auto", on_cpu)
    assert isinstance(provider, CpuAttention) and provider.deterministic
    assert caplog.messages[-1] == f"attention: cpu {provider.version} (on a CPU)"


def test_on_hopper_without_fa3_triton_is_taken_and_the_log_says_why(
    on_gpu: AttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    caplog.set_level(logging.INFO, "looseleaf.kernels")
    provider = choose("auto", on_gpu)
    assert isinstance(provider, TritonAttention) and not provider.deterministic
    assert "flash_attn_interface" in caplog.messages[-1]
    assert choose("auto", replace(on_gpu, deterministic=True)).deterministic


def test_a_library_that_was_named_is_not_passed_over(on_gpu: AttentionSpec) -> None:
    with pytest.raises(Unavailable, match=r"cannot load /nowhere/fa3\.so"):
        choose("auto", on_gpu, "/nowhere/fa3.so")


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        ("cpu", {"device": torch.device("cuda")}, "cpu does not run on cuda"),
        ("cpu", {"dtype": torch.float32}, "cpu has no bfloat16 cache for queries in float32"),
        ("triton", {"kv_dtype": torch.int8}, "triton has no int8 cache; --kv-cache-dtype takes auto and fp8 on a GPU"),
        ("flashinfer", {"kv_dtype": torch.int8}, "flashinfer needs keys and values in the queries' bfloat16, not int8"),
        ("triton", {"compute_capability": (7, 5)}, "triton needs compute capability 8.0; this GPU has 7.5"),
        ("triton", {"compute_capability": (8, 0), "kv_dtype": torch.float8_e4m3fn}, "needs compute capability 8.9"),
        ("triton", {"head_dim": 512}, "triton takes head dimensions up to 256, not 512"),
        ("fa3", {"compute_capability": (8, 0)}, "fa3 needs a GPU of compute capability 9.0; this is 8.0"),
        ("fa3", {"compute_capability": None}, "fa3 needs a GPU of compute capability 9.0; this is none"),
        ("fa3", {"kv_dtype": torch.float8_e4m3fn}, "fa3 needs keys and values in the queries' bfloat16, not float8"),
        ("fa3", {"dtype": torch.float32, "kv_dtype": torch.float32}, "fa3 takes bfloat16 and float16, not float32"),
        ("fa2", {"block_size": 16}, "fa2 takes blocks of multiples of 256 slots, not 16"),
        ("fa2", {"block_size": 256, "compute_capability": None}, "fa2 needs a GPU"),
        ("flashinfer", {"head_dim": 12}, "flashinfer takes head dimensions that are multiples of 8"),
    ],
)
def test_a_forced_provider_says_why_it_cannot(
    backend: str, changes: dict[str, object], reason: str, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(Unavailable, match=f"attention provider {backend} ") as caught:
        choose(backend, replace(spec, **changes))  # type: ignore[arg-type]
    assert reason in str(caught.value)


def test_triton_does_not_run_on_a_cpu_unless_interpreted(
    on_cpu: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unavailable, match="only as a rehearsal under TRITON_INTERPRET=1"):
        choose("triton", on_cpu)


def test_what_is_available_names_a_version_or_a_reason(on_gpu: AttentionSpec) -> None:
    found = available(on_gpu)
    assert set(found) == {"triton", "fa3", "fa2", "flashinfer", "cpu"}
    assert "does not run on cuda" in found["cpu"] and "256" in found["fa2"]
    assert " " not in available(replace(on_gpu, device=torch.device("cpu"), compute_capability=None))["cpu"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12: cannot open"),
        ("RuntimeError('built for torch 2.9\\nand a stack trace')", "built for torch 2.9$"),
        ("ImportError('undefined symbol: _ZN3c10')", "undefined symbol"),
        ("ModuleNotFoundError('No module named einops', name='einops')", "No module named einops"),
    ],
)
@pytest.mark.parametrize(
    ("name", "module"), [("fa2", "flash_attn"), ("fa3", "flash_attn_interface"), ("flashinfer",) * 2]
)
def test_a_package_that_does_not_load_is_not_available(
    name: ProviderName,
    module: str,
    error: str,
    reason: str,
    spec: AttentionSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / f"{module}.py").write_text(f"raise {error}")
    with pytest.raises(Unavailable, match=f"attention provider {name} cannot load {module}: {reason}"):
        open_provider(name, replace(spec, block_size=256))
