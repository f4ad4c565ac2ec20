"""The store's process with an arena on a GPU, and attached workers: sizes, kills, restarts, missing IPC."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from block_store.arena.cuda import Cuda
from block_store.errors import ArenaLost, Fenced
from block_store.holder.attach import Attached, Needs, attach
from block_store.ledger.codec import SealItem
from block_store.redis.redis_server import RedisHandle
from common.errors import StartupError
from common.ticket import TicketId
from common.types import BlockRef, Epoch, WorkerLoad, WorkerRecord
from protos.v1 import block_store_pb2 as pb
from testing.ledger.store import LAYOUT, StoreProcess, chain, content, line, python, view, wait_until
from worker.adapters import AdapterPool
from worker.role import WorkerRole

MIB = 1 << 20
WORKER = """if True:
    import sys
    from block_store.holder.attach import Needs, attach
    from block_store.ledger.codec import SealItem
    from testing.ledger.store import LAYOUT, chain, content, view
    address, library, name = sys.argv[1:]
    needs = Needs(name, "decode", LAYOUT, 0, 0, 64, 4, device="cuda", cuda_library=library)
    [attached] = attach(address, [needs])
    print(attached.arena.arena_id, flush=True)
"""


def needs(library: str, name: str = "p", device: str = "cuda:0", weights_bytes: int = 0) -> Needs:
    return Needs(name, "prefill", LAYOUT, weights_bytes, MIB, 64, 4, device=device, cuda_library=library)


@contextmanager
def store_of(directory: Path, library: str, *flags: str) -> Iterator[StoreProcess]:
    store = StoreProcess(directory, "--cuda-library", library, "--expect-workers", "1", "--reserve-bytes", "0", *flags)
    try:
        yield store
    finally:
        store.stop()


def fill(attached: Attached, name: str, num_blocks: int) -> list[BlockRef]:
    """Writes and seals full blocks."""
    hashes = chain(name, num_blocks)
    refs = attached.held.alloc(num_blocks)
    for ref, prefix_hash in zip(refs, hashes, strict=True):
        view(attached.arena.data)[ref.block] = content(prefix_hash)
    return attached.held.seal([SealItem(*pair) for pair in zip(refs, hashes, strict=True)])


def test_workers_share_an_arena_sized_by_what_the_gpu_has_left(shm: Path, gpus: Cuda, cuda_library: str) -> None:
    weights, other = gpus.device(0).alloc(8 * MIB), gpus.device(0).alloc(4 * MIB)
    flags = ("--expect-workers", "2", "--device", "cuda", "--gpu-memory-utilization", "0.75")
    with store_of(shm / "s", cuda_library, *flags) as store:
        roles = [needs(cuda_library, "p", weights_bytes=8 * MIB), needs(cuda_library, "d", "cuda")]
        prefill, decode = attach(store.address, roles)
        assert prefill.arena is decode.arena and prefill.held.epoch != decode.held.epoch
        # 0.75 x 64 MiB - weights 8 - activations 2 - others 4 = 34, minus 4 for alignment and 53 bytes per block
        assert 27 * MIB < prefill.arena.num_blocks * LAYOUT.block_bytes <= 30 * MIB
        refs = fill(prefill, "a", 2)
        prefill.held.share(refs)
        ticket = prefill.held.hand_over([[refs]])
        [frame] = store.read(prefill.arena.arena_id, ticket, refs)
        assert frame.data == b"".join(content(prefix_hash).tobytes() for prefix_hash in chain("a", 2))
        assert list(frame.digests) == [prefill.arena.digest(ref.block) for ref in refs]
        seen = store.inspect()
        assert seen.memory == pb.ARENA_MEMORY_STORE_DEVICE and seen.device_uuid == gpus.uuid(0) and seen.sealed == 2
        prefill.close()
        decode.close()
        prefill.arena.data.close()
        log = store.stop()
    assert "device memory budget 48.0 MiB: weights 8.0 MiB, activations 2.0 MiB, others 4.0 MiB, reserve 0.0 MiB" in log
    for pointer in (weights, other):
        gpus.device(0).free(pointer)
    assert gpus.device(0).memory_info().free == 64 * MIB and not (shm / "s").exists()


def test_blocks_in_device_memory_are_copied_to_a_directory_and_restored(
    shm: Path, gpus: Cuda, cuda_library: str
) -> None:
    """The directory is in shared memory, as of a user who wants a tier in host memory."""
    flags = ("--num-blocks", "16", "--kv-disk", "1MiB", "--kv-disk-dir", str(shm / "kv"))
    hashes = chain("a", 6)
    with store_of(shm / "s", cuda_library, *flags) as store:
        [attached] = attach(store.address, [needs(cuda_library)])
        refs = fill(attached, "a", 6)
        wait_until(lambda: store.inspect().disk_tier.num_stored == 6)
        attached.held.release(refs)
        attached.held.release(attached.held.alloc(16))  # evicts them
        [found] = attached.held.acquire([hashes])
        assert found == [] and attached.has_disk_tier
        assert store.stub.Restore(pb.RestoreRequest(prefix_hashes=hashes), timeout=60).num_blocks == 6
        check_content(attached, hashes)
        attached.close()
        attached.arena.data.close()
    [file] = (shm / "kv").glob("*/blocks")
    damaged = bytearray(file.read_bytes())
    at = damaged.index(content(hashes[4]).tobytes())
    damaged[at] ^= 1
    file.write_bytes(damaged)
    with store_of(shm / "s", cuda_library, *flags) as store:  # which has an arena of zeros
        [attached] = attach(store.address, [needs(cuda_library)])
        assert store.stub.Restore(pb.RestoreRequest(prefix_hashes=hashes), timeout=60).num_blocks == 4
        check_content(attached, hashes[:4])
        attached.close()
        attached.arena.data.close()


def check_content(attached: Attached, hashes: list[bytes]) -> None:
    """Checks that the blocks are cached with the bytes that `fill` wrote, and with their digests."""
    arena = attached.arena
    [refs] = attached.held.acquire([hashes])
    assert [arena.read(ref.block) for ref in refs] == [content(one).tobytes() for one in hashes]
    assert [int(arena.digests[ref.block]) for ref in refs] == [arena.digest(ref.block) for ref in refs]
    attached.held.release(refs)


def test_blocks_that_the_store_cannot_read_are_not_kept_on_disk(
    shm: Path, gpus: Cuda, cuda_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_CUDA_NO_IPC", "1")
    flags = ("--num-blocks", "16", "--kv-disk", "1MiB", "--kv-disk-dir", str(shm / "kv"))
    with store_of(shm / "s", cuda_library, *flags) as store, pytest.raises(StartupError, match="no CUDA IPC"):
        attach(store.address, [needs(cuda_library)])


def test_an_arena_that_cannot_be_used_gives_the_memory_of_the_gpu_back(
    shm: Path, gpus: Cuda, cuda_library: str
) -> None:
    (shm / "kv").touch()
    with store_of(shm / "s", cuda_library, "--kv-disk", "1MiB", "--kv-disk-dir", str(shm / "kv")) as store:
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refusal:
                store.attach("w", device_uuid=gpus.uuid(0))
            assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "Not a directory" in refusal.value.details()
            assert gpus.device(0).memory_info().free == 64 * MIB and not list((shm / "s").glob("writers/*"))
        (shm / "kv").unlink()
        assert store.attach("w", device_uuid=gpus.uuid(0)).num_blocks * LAYOUT.block_bytes > 32 * MIB


def test_kv_outlives_a_killed_worker(shm: Path, gpus: Cuda, cuda_library: str) -> None:
    with store_of(shm / "s", cuda_library, "--num-blocks", "16") as store:
        code = (
            WORKER
            + """
    hashes = chain("a", 3)
    refs = attached.held.alloc(3)
    for ref, prefix_hash in zip(refs, hashes):
        view(attached.arena.data)[ref.block] = content(prefix_hash)
    attached.held.seal([SealItem(*pair) for pair in zip(refs, hashes)])
    print("sealed", flush=True); sys.stdin.readline()
"""
        )
        worker = python(code, store.address, cuda_library, "w")
        arena_id = line(worker)
        assert line(worker) == "sealed"
        worker.kill()
        worker.communicate(timeout=60)
        [successor] = attach(store.address, [needs(cuda_library, "w")])
        assert successor.arena.arena_id == arena_id
        [refs] = successor.held.acquire([chain("a", 3)])
        assert [successor.arena.read(ref.block) for ref in refs] == [content(h).tobytes() for h in chain("a", 3)]
        successor.close()
        successor.arena.data.close()


def test_a_restarted_store_makes_a_new_arena_and_workers_end_themselves(
    shm: Path, gpus: Cuda, cuda_library: str, redis_handle: RedisHandle
) -> None:
    flags = ("--num-blocks", "16", "--redis-url", redis_handle.url, "--keep-arena")
    with store_of(shm / "s", cuda_library, *flags) as store:
        [attached] = attach(store.address, [needs(cuda_library)])
        refs, lost = fill(attached, "a", 2), threading.Event()
        record = WorkerRecord("p", "prefill", "x:1", "m", attached.arena.arena_id, 16, "", "", 64, 1)
        member = WorkerRole(attached, record, lambda: None, WorkerLoad, None, AdapterPool(None, 1))
        member.start(lost.set)
        member.announce("x:1")
        store.kill()
        assert attached.arena.check_refs(refs) and not lost.is_set(), "nobody knows yet"
        with store_of(shm / "s", cuda_library, *flags) as again:
            assert lost.wait(60.0), "an idle worker learns it"
            assert not attached.arena.check_refs(refs)
            wait_until(attached.held.holder.fenced.is_set)
            with pytest.raises(Fenced):
                attached.held.alloc(1)
            with pytest.raises(ArenaLost):
                attached.renew()
            assert again.inspect().arena_id == ""
            member.withdraw()
            attached.arena.data.close()  # like the end of the process
            [successor] = attach(again.address, [needs(cuda_library)])
            assert successor.arena.arena_id != attached.arena.arena_id
            assert successor.held.acquire([chain("a", 2)]) == [[]]
            fill(successor, "a", 2)
            successor.close()
            successor.arena.data.close()
            log = again.stop()
        assert f"arena {attached.arena.arena_id} has ended" in log
    assert gpus.device(0).memory_info().free == 64 * MIB, "--keep-arena keeps no device memory"
    assert not list((shm / "s").glob("arena*"))


def test_without_ipc_one_process_owns_the_arena_and_takes_it_along(
    shm: Path, gpus: Cuda, cuda_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_CUDA_NO_IPC", "1")
    with store_of(shm / "s", cuda_library, "--num-blocks", "16") as store:
        worker = python(WORKER + "    sys.stdin.readline()", store.address, cuda_library, "w")
        arena_id = line(worker)
        assert store.inspect().memory == pb.ARENA_MEMORY_WORKER_DEVICE
        with pytest.raises(grpc.RpcError) as refusal:
            store.read(arena_id, TicketId(Epoch(0), b""), [BlockRef(0, 1)])
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(StartupError, match="without CUDA IPC, one process must run both roles"):
            attach(store.address, [needs(cuda_library)])
        worker.kill()
        worker.communicate(timeout=60)
        prefill, decode = attach(store.address, [needs(cuda_library, "p"), needs(cuda_library, "d")])
        assert prefill.arena is decode.arena and prefill.arena.arena_id != arena_id
        refs = fill(prefill, "a", 2)
        [again] = decode.held.acquire([chain("a", 2)])
        assert again == refs
        prefill.close()
        decode.close()
        prefill.arena.data.close()
        log = store.stop()
    assert log.count("no CUDA IPC (cuIpcGetMemHandle failed: CUDA_ERROR_NOT_SUPPORTED)") == 2, "once an arena"


def test_workers_elsewhere_are_refused(
    shm: Path, gpus: Cuda, cuda_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(shm / "s", cuda_library, "--num-blocks", "16", "--device", "cpu") as store:
        with pytest.raises(StartupError, match="has --device cpu, but its workers run on GPU 5a5a"):
            attach(store.address, [needs(cuda_library)])
        assert store.attach("w").num_blocks == 16, "after a refusal the next may try"
        with pytest.raises(StartupError, match=r"computes on GPU 5a5a.* but the arena is on the CPU"):
            attach(store.address, [needs(cuda_library)])
        assert store.inspect().memory == pb.ARENA_MEMORY_HOST
    monkeypatch.setenv("STAND_IN_CUDA_DEVICES", "2")
    with (
        store_of(shm / "t", cuda_library, "--num-blocks", "16", "--expect-workers", "2") as store,
        pytest.raises(StartupError, match="runs on a different device from the workers before it"),
    ):
        attach(store.address, [needs(cuda_library), needs(cuda_library, "d", "cuda:1")])
    with pytest.raises(StartupError, match="--device cuda:2: there is no GPU 2"):
        attach("127.0.0.1:1", [needs(cuda_library, device="cuda:2")])


def test_a_store_without_a_gpu_says_so(shm: Path) -> None:
    command = [sys.executable, "-m", "block_store", "--directory", str(shm / "s"), "--port", "0", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and "the CUDA driver libcuda.so.1 cannot be used" in done.stderr
    assert "Traceback" not in done.stderr and not (shm / "s").exists()
