"""The variants that attention launches compile. A different batch, length or block table compiles no others. No kernel
runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
import torch
from kernels.gpu import attention
from kernels.gpu.attention_tiles import Chip
from kernels.gpu.dry import DryDriver

driver = DryDriver(90)
driver.install()
attention.chip_of = lambda device: Chip(90, 132)
caches = torch.empty(8, 2, 2, 8, 16, 128, dtype=torch.bfloat16)[:, 1].unbind(1)
for num_seqs, context in ((1, 4096), (2, 4096), (16, 4112), (17, 8192), (64, 4096), (65, 4096), (256, 8176)):
    table, lens = torch.zeros(num_seqs, context // 16, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
    q = torch.empty(num_seqs + 100, 48, 128, dtype=torch.bfloat16)[:, :32]  # of a fused qkv
    cu = torch.zeros(num_seqs + 1, dtype=torch.int32)
    for deterministic in (False, True):
        options = {"softmax_scale": 0.1, "deterministic": deterministic}
        attention.paged_attention(q[:num_seqs], *caches, table, lens, **options)
        attention.paged_prefill(q, *caches, table, lens, cu, **options)
json.dump([(launch.kernel, launch.variant, launch.grid) for launch in driver.launches], sys.stdout)
"""


@pytest.fixture(scope="module")
def launches() -> list[tuple[str, str, list[int]]]:
    environment: dict[str, Any] = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=root, env=environment, timeout=280
    )
    assert run.returncode == 0, run.stderr
    return [(kernel, variant, grid) for kernel, variant, grid in json.loads(run.stdout)]


def test_batches_do_not_compile_anew(launches: list[tuple[str, str, list[int]]]) -> None:
    """The variants are decode without splits, decode with splits, prefill, decode and prefill in deterministic mode
    (decode always splits), one merge for each power of two of splits (here 32 and 4), and a deterministic merge.
    """
    variants = {kernel: {v for k, v, _ in launches if k == kernel} for kernel, _, _ in launches}
    assert {kernel: len(found) for kernel, found in variants.items()} == {"attention_kernel": 5, "merge_kernel": 3}


def test_grids_follow_from_shapes(launches: list[tuple[str, str, list[int]]]) -> None:
    grids = Counter(tuple(grid) for kernel, _, grid in launches if kernel == "attention_kernel")
    assert grids[1, 8, 32] == grids[16, 8, 4] == grids[64, 8, 1] == 1  # as many splits as fit into 528 places
    assert grids[1, 8, 8] == grids[256, 8, 16] == 1  # pieces of 512 keys
    assert grids[101 // 32 + 1, 8, 1] == grids[101 // 16 + 1, 8, 1] == 1  # 128 and 64 rows of 4 heads each
