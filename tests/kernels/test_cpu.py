"""The loader of the kernels: a build for every instruction set, forced choices, counted fallbacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels import cpu
from kernels.cpu import loader
from kernels.rms_norm import rms_norm

ROOT = Path(__file__).resolve().parents[2]
AVX512 = "avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni fma f16c"


def test_the_package_is_ours() -> None:
    assert Path(kernels.__file__).resolve() == ROOT / "kernels" / "__init__.py"
    assert kernels.__version__


def test_portable_is_always_built() -> None:
    assert "portable" in cpu.supported_isas()


def test_make_serve_compiles_the_builds_that_this_cpu_uses() -> None:
    """`make test` has compiled all builds."""
    assert loader.native_builds()[0] == cpu.best_isa()
    assert ("amx" in loader.native_builds()) == (loader.amx_library() is not None)


@pytest.mark.parametrize(
    ("machine", "flags", "builds"),
    [
        ("x86_64", "sse4_2", ("portable",)),
        ("x86_64", "avx2 fma f16c", ("avx2",)),
        ("x86_64", f"{AVX512} avx2", ("avx512",)),
        ("AMD64", f"{AVX512} avx2 amx_tile amx_bf16", ("avx512", "amx")),
        ("aarch64", "asimd", ("portable",)),
    ],
)
def test_the_builds_of_other_cpus(
    monkeypatch: pytest.MonkeyPatch, machine: str, flags: str, builds: tuple[str, ...]
) -> None:
    monkeypatch.setattr(loader, "_cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(loader.platform, "machine", lambda: machine)
    assert loader.native_builds() == builds


def test_operators_are_registered(native_isa: str) -> None:
    x, out = torch.randn(4, 32), torch.empty(4, 16)
    torch.ops.looseleaf.silu_mul(out, x)
    assert torch.allclose(out, torch.nn.functional.silu(x[:, :16]) * x[:, 16:], atol=1e-6)


def test_forcing_is_obeyed_and_undone() -> None:
    before = cpu.current()
    with cpu.using("portable") as library:
        assert cpu.current() is library and library.isa == "portable"
    assert cpu.current() is before


def test_an_unknown_build_is_refused() -> None:
    with pytest.raises(ValueError, match="not built or cannot run on this CPU"):
        cpu.load("sse9")  # type: ignore[arg-type]


def test_an_unsupported_dtype_is_counted(native_isa: str) -> None:
    before = cpu.fallbacks().get("rms_norm", 0)
    rms_norm(torch.randn(2, 8).half(), torch.ones(8).half(), 1e-5)
    assert cpu.fallbacks()["rms_norm"] == before + 1


def test_importing_loads_nothing() -> None:
    code = "import kernels.cpu, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=200)
