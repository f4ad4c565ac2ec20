"""An arena in the memory of a real GPU, accessed through the driver and through torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from block_store.arena.arena import Arena
from block_store.arena.cuda import Cuda, CudaError
from block_store.arena.placement import open_blocks
from common.types import KvLayout, KvSpec
from testing.ledger.store import line, python

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYOUT = KvLayout(16, (KvSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),))
"""The layout of Llama-3-8B, with blocks of 2 MiB."""
NUM_BLOCKS = 64
STORE = """if True:
    import pathlib, sys
    from block_store.arena.cuda import Cuda
    from block_store.arena.placement import create_on_device
    from common.types import KvLayout, KvSpec
    layout = KvLayout(16, (KvSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),))
    cuda = Cuda()
    device = cuda.device_of(bytes.fromhex(sys.argv[2]))
    arena = create_on_device(pathlib.Path(sys.argv[1]), layout, 64, device, "store")
    arena.data.write(5, bytes(range(256)) * (layout.block_bytes // 256))
    print("ready", flush=True)
    for line in sys.stdin:
        print(arena.digest(int(line)), flush=True)
"""
WORKER = """if True:
    import sys
    import torch
    from block_store.arena.arena import Arena
    from block_store.arena.cuda import Cuda
    from block_store.arena.placement import open_blocks
    torch.zeros(1, device="cuda")
    arena = Arena.open(sys.argv[1])
    open_blocks(arena, Cuda())
    blocks = torch.as_tensor(arena.data, device="cuda")
"""


def ask(process: object, text: str) -> str:
    process.stdin.write(text + "\n")  # type: ignore[attr-defined]
    return line(process)  # type: ignore[arg-type]


def test_torch_works_in_memory_of_the_store_and_a_killed_worker_loses_none(shm: Path) -> None:
    torch.zeros(1, device="cuda")  # torch's context first, as in a worker
    cuda = Cuda()
    store = python(STORE, str(shm), cuda.uuid(0).hex())
    assert line(store) == "ready"
    arena = Arena.open(shm, LAYOUT.fingerprint)
    open_blocks(arena, cuda)
    blocks = torch.as_tensor(arena.data, device="cuda")
    assert blocks.data_ptr() == arena.data.pointer and blocks.data_ptr() % 256 == 0
    assert blocks.shape == (NUM_BLOCKS, LAYOUT.block_bytes) and blocks.dtype == torch.uint8
    ramp = torch.arange(256, dtype=torch.uint8).repeat(LAYOUT.block_bytes // 256)
    assert torch.equal(blocks[5].cpu(), ramp) and not blocks[6].any()

    blocks[3] = blocks[5].flip(0)  # a kernel of this process
    torch.cuda.synchronize()
    assert ask(store, "3") == str(arena.digest(3)), "the store reads what the worker's kernel wrote"

    worker = python(WORKER + "    blocks[4] = 4; torch.cuda.synchronize(); print('written', flush=True)\n"
                             "    sys.stdin.readline()", str(shm))  # fmt: skip
    assert line(worker) == "written"
    worker.kill()
    worker.communicate(timeout=30)
    assert bool((blocks[4] == 4).all()), "promise 4"

    del blocks
    arena.data.close()
    store.kill()
    store.communicate(timeout=30)
    with pytest.raises(CudaError) as refusal:
        cuda.device(0).open(arena.placement.ipc_handle)
    print(f"a handle whose owner was killed: {refusal.value}")


def test_the_driver_and_torch_agree_on_the_device() -> None:
    torch.zeros(1, device="cuda")
    device = Cuda().device(0)
    assert str(torch.cuda.get_device_properties(0).uuid).replace("-", "") == device.uuid.hex()
    assert device.memory_info().total == torch.cuda.mem_get_info(0)[1]
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        device.alloc(1 << 42)


def test_what_becomes_of_a_mapping_whose_owner_was_killed(shm: Path) -> None:
    """NVIDIA leaves the behavior undefined. In any case, the worker ends itself, and a new process can use the GPU."""
    torch.zeros(1, device="cuda")
    store = python(STORE, str(shm), Cuda().uuid(0).hex())
    assert line(store) == "ready"
    code = (
        "    print('open', flush=True); sys.stdin.readline()\n"
        "    before = torch.cuda.mem_get_info()[0]\n"
        "    try:\n"
        "        print(f'block 5 sums to {int(blocks[5].sum(dtype=torch.int64))}, {before} bytes free', flush=True)\n"
        "    except Exception as error:\n"
        "        print(f'{type(error).__name__}: {error}'.splitlines()[0], flush=True)"
    )
    worker = python(WORKER + code, str(shm))
    assert line(worker) == "open"
    store.kill()
    store.communicate(timeout=30)
    print(f"after the owner was killed: {ask(worker, '')}")
    worker.communicate(timeout=60)
    assert int(torch.ones(8, device="cuda").sum()) == 8
