"""The ctypes code's calls to the CUDA driver, with `stand_in_cuda.c` in its place."""

from __future__ import annotations

import ctypes
import threading

import pytest

from block_store.arena.cuda import Cuda, CudaError, CudaUnavailable
from testing.ledger.store import line, python

MIB = 1 << 20


def test_memory_is_zeros_counted_and_copied_both_ways(gpus: Cuda) -> None:
    device = gpus.device(0)
    assert device.memory_info() == (64 * MIB, 64 * MIB)
    pointer = device.alloc(4 * MIB)
    assert device.memory_info() == (60 * MIB, 64 * MIB)
    assert ctypes.string_at(pointer, 4 * MIB) == bytes(4 * MIB), "as others see it before any call waits"
    assert device.read(pointer, 4 * MIB) == bytes(4 * MIB)
    device.write(pointer + 5, b"leaf")
    assert device.read(pointer + 4, 6) == b"\0leaf\0"
    device.free(pointer)
    assert device.memory_info().free == 64 * MIB


def test_errors_have_the_drivers_names(gpus: Cuda) -> None:
    device = gpus.device(0)
    with pytest.raises(CudaError, match=r"^cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY$") as refusal:
        device.alloc(65 * MIB)
    assert (refusal.value.call, refusal.value.name) == ("cuMemAlloc_v2", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match="cuMemcpyDtoH_v2 failed: CUDA_ERROR_INVALID_VALUE"):
        device.read(4096, 1)
    with pytest.raises(CudaError, match="cuInit failed: CUDA_ERROR_INVALID_VALUE"):
        gpus.call("cuInit", 3)


@pytest.mark.parametrize("call", ["cuMemsetD8_v2", "cuCtxSynchronize"])
def test_memory_that_cannot_be_zeroed_is_freed(gpus: Cuda, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    device = gpus.device(0)
    monkeypatch.setenv("STAND_IN_CUDA_FAILS", call)
    with pytest.raises(CudaError, match=f"^{call} failed: CUDA_ERROR_INVALID_VALUE$"):
        device.alloc(4 * MIB)
    assert device.memory_info().free == 64 * MIB


def test_what_is_not_there_is_said_in_a_sentence(
    gpus: Cuda, cuda_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CudaUnavailable, match="there is no GPU 1: this process sees 1"):
        gpus.device(1)
    with pytest.raises(CudaUnavailable, match=r"GPU 6161.* is not among the 1"):
        gpus.device_of(b"a" * 16)
    with pytest.raises(CudaUnavailable, match=r"the CUDA driver libnowhere.so cannot be used: .*cannot open"):
        Cuda("libnowhere.so")
    with pytest.raises(CudaUnavailable, match=r"the CUDA driver libm.so.6 cannot be used: .*undefined symbol: cuInit"):
        Cuda("libm.so.6")
    monkeypatch.setenv("STAND_IN_CUDA_DEVICES", "0")
    with pytest.raises(CudaUnavailable, match="finds no usable GPU: cuInit failed: CUDA_ERROR_NO_DEVICE"):
        Cuda(cuda_library)


def test_threads_may_call_and_keep_their_own_context(gpus: Cuda) -> None:
    device = gpus.device(0)
    pointer, seen = device.alloc(16), list[bytes | str]()

    def other() -> None:
        seen.append(device.read(pointer, 2))
        try:
            gpus.call("cuMemFree_v2", pointer)
        except CudaError as error:
            seen.append(error.name)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [b"\0\0", "CUDA_ERROR_INVALID_CONTEXT"], "no context is left behind in a thread that had none"


def test_a_device_is_known_by_its_uuid(gpus: Cuda, cuda_library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may number the same devices differently."""
    monkeypatch.setenv("STAND_IN_CUDA_DEVICES", "2")
    code = "import sys; from block_store.arena.cuda import Cuda; print(Cuda(sys.argv[1]).uuid(0).hex())"
    with monkeypatch.context() as other:
        other.setenv("STAND_IN_CUDA_FIRST", "1")
        process = python(code, cuda_library)
    uuid = bytes.fromhex(line(process))
    process.communicate(timeout=60)
    device = gpus.device_of(uuid)
    assert device.ordinal == 1 and device.uuid == uuid != gpus.uuid(0)


def test_a_handle_opens_memory_in_another_process_only(
    gpus: Cuda, cuda_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from block_store.arena.cuda import Cuda\n"
        "device = Cuda(sys.argv[1]).device(0); pointer = device.alloc(64); device.write(pointer, b'here')\n"
        "print(device.export(pointer).hex(), flush=True); sys.stdin.readline()\n"
        "print(device.read(pointer, 5).decode(), flush=True); sys.stdin.readline()"
    )
    owner = python(code, cuda_library)
    handle, device = bytes.fromhex(line(owner)), gpus.device(0)
    pointer = device.open(handle)
    assert device.open(handle) == pointer, "opened twice it is counted"
    assert device.read(pointer, 4) == b"here"
    device.write(pointer, b"there")
    assert owner.stdin is not None
    owner.stdin.write("\n")
    assert line(owner) == "there"
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        device.free(pointer)
    owner.kill()
    owner.communicate(timeout=60)
    device.close_opened(pointer)
    device.close_opened(pointer)
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_VALUE"):
        device.open(handle)
    own = device.alloc(64)
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_CONTEXT"):
        device.open(device.export(own))
    monkeypatch.setenv("STAND_IN_CUDA_NO_IPC", "1")
    with pytest.raises(CudaError, match="cuIpcGetMemHandle failed: CUDA_ERROR_NOT_SUPPORTED"):
        device.export(own)
    device.free(own)
