"""Compiles Triton kernels for NVIDIA chips ahead of time, even on a machine without a GPU, and reports their resources.

The module uses only tools from triton's package (ptxas, cuobjdump). The reports come from the compiler; only a GPU can
show that a kernel launches and is correct.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Maximum size of the shared memory of a thread block, by compute capability (CUDA programming guide, technical
specifications).
"""

TMEM_COLUMNS = 512
"""Number of columns of tensor memory of an sm_100 multiprocessor."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a thread block of a compiled kernel needs, and the kernel's code."""

    registers: int
    """Registers per thread."""
    spill_bytes: int
    """Bytes of local memory and stack per thread. If it is above 0, registers have spilled, or an array is indexed at
    run time.
    """
    shared_bytes: int
    tmem_columns: int
    """Number of columns of tensor memory; sm_100 has TMEM_COLUMNS, other chips have none."""
    ptx: str
    ttgir: str
    """The kernel in Triton's GPU dialect, which shows the layout of each operation."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel to compile for one chip.

    kernel: "package.module:function" of a `triton.jit` function.
    signature: type of each parameter that is not in `constexprs`, in triton's notation ("*bf16", "i32", "fp32"). The
        suffix ":16" means that the launch will pass a pointer aligned to 16 bytes or an integer divisible by 16.
    constexprs: values of the `tl.constexpr` parameters, and of integers that are 1 (a launch makes these constant too).
    cc: compute capability as a single number (80, 90, 100).
    """

    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, int | float | bool | str | None]
    cc: int
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    """Whether the compiler may contract a * b + c (`enable_fp_fusion` of a launch)."""


def compile_for(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    cc: int,
    num_warps: int = 4,
    num_stages: int = 3,
    fp_fusion: bool = True,
) -> Resources:
    """Compiles a `triton.jit` function, with arguments as in `Case`. Returns its resources and its code. Does not work
    with TRITON_INTERPRET=1.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: "constexpr" if name in constexprs else signature[name] for name in fn.arg_names}
    aligned = [i for i, kind in enumerate(types.values()) if kind.endswith(":16")]
    source = ASTSource(
        fn,
        {name: kind.removesuffix(":16") for name, kind in types.items()},
        dict(constexprs),
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fp_fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    registers, spill_bytes = _usage(compiled.asm["cubin"])
    tmem_columns = getattr(compiled.metadata, "tmem_size", None) or 0
    memory = (compiled.metadata.shared, tmem_columns)
    return Resources(registers, spill_bytes, *memory, compiled.asm["ptx"], compiled.asm["ttgir"])


def compile_cases(cases: Sequence[Case], timeout_s: float = 280.0) -> list[Resources]:
    """Compiles all cases in up to four new processes, which do not use Triton's interpreter. Raises RuntimeError with
    the compiler's output if a case does not compile, and subprocess.TimeoutExpired if a process takes longer than
    `timeout_s`.
    """
    workers = max(1, min(os.cpu_count() or 1, 4, len(cases) // 4))
    shares = [cases[i::workers] for i in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(lambda share: _compile_elsewhere(share, timeout_s), shares))
    return [done[i % workers][i // workers] for i in range(len(cases))]


def _compile_elsewhere(cases: Sequence[Case], timeout_s: float) -> list[Resources]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.gpu.compile"],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [Resources(**found) for found in json.loads(done.stdout)]


@cache
def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _usage(cubin: bytes) -> tuple[int, int]:
    """Returns the registers, and the bytes of stack and local memory, per thread of the only kernel in `cubin`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = [re.search(rf"\b{name}:(\d+)", text) for name in ("REG", "STACK", "LOCAL")]
    if not all(found):
        raise RuntimeError(f"cuobjdump does not report registers: {text!r}")
    registers, stack, local = (int(match[1]) for match in found if match)
    return registers, stack + local


def _compile_case(case: Case) -> Resources:
    module, _, name = case.kernel.partition(":")
    fn = getattr(import_module(module), name)
    try:
        options = (case.cc, case.num_warps, case.num_stages, case.fp_fusion)
        return compile_for(fn, case.signature, case.constexprs, *options)
    except Exception as error:
        error.add_note(f"while compiling {case}")
        raise


def main() -> None:
    """Reads cases as JSON from standard input and writes resources as JSON to standard output."""
    cases = [Case(**fields) for fields in json.load(sys.stdin)]
    json.dump([asdict(_compile_case(case)) for case in cases], sys.stdout)


if __name__ == "__main__":
    main()
