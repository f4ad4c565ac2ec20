"""The device of a runner's model. It is either the cores of a machine, or one GPU with a separate stream.

The two classes differ in how they prepare a thread, transfer a step's arrays, wait for the end of the step, capture
graphs, and measure memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
import torch

from common.cores import usable_cores
from engine.errors import ModelError
from engine.inputs import StepBuffer

logger = logging.getLogger("engine")
Work = Callable[[], torch.Tensor]
Array = npt.NDArray[Any]


class CpuDevice:
    """A device that computes on the cores of this machine with `num_threads` threads. 0 means one thread per usable
    core.
    """

    compute_capability: tuple[int, int] | None = None
    name = "cpu"

    def __init__(self, num_threads: int) -> None:
        self.torch_device = torch.device("cpu")
        self.num_threads = num_threads or usable_cores()
        self._thread = 0

    def enter(self) -> None:
        """Prepares the calling thread for steps, because OpenMP keeps a separate number of threads for each calling
        thread.
        """
        if self._thread != threading.get_ident():
            torch.set_num_threads(self.num_threads)
            self._thread = threading.get_ident()

    def use_threads(self, num_threads: int) -> None:
        """Changes the number of threads (0: one per usable core), and prepares the calling thread for steps."""
        self.num_threads, self._thread = num_threads or usable_cores(), 0
        self.enter()

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Returns the arrays as tensors that share their memory."""
        return [torch.from_numpy(array) for array in arrays]

    def wait(self) -> None:
        """Does nothing, because on a CPU, work is complete when its call returns."""

    def record(self, work: Work) -> Work:
        """Returns `work` unchanged, because there is nothing to capture."""
        return work

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Runs `work`. Returns the number of bytes by which the peak resident memory of the process (VmHWM) exceeds its
        resident memory before `work`. If the kernel does not allow a reset of the peak, the result is an upper bound.
        """
        self.release()
        before = _reset_peak_resident()
        work()
        return max(0, _status_bytes("VmHWM") - before)

    def release(self) -> None:
        """Returns unused memory of the C library to the system."""
        with contextlib.suppress(AttributeError, OSError):  # only glibc has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)

    def used_bytes(self) -> int:
        """Returns 0, because the memory in use is not measured on a CPU."""
        return 0


class CudaDevice:
    """The first GPU that is visible to the process, with a stream and a memory pool for graphs. Two runners of one
    process have separate streams, so that their steps can overlap.
    """

    def __init__(self, num_threads: int, urgent: bool = False) -> None:
        """Opens the GPU, and prepares the calling thread for steps. Raises ModelError if torch finds no GPU. `urgent`
        gives this stream's kernels priority over the kernels of other streams (its effect has not been measured yet).
        """
        if not torch.cuda.is_available():
            raise ModelError("device cuda was requested, but torch finds no GPU")
        self.torch_device = torch.device("cuda", 0)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.compute_capability: tuple[int, int] | None = (properties.major, properties.minor)
        self.name = str(properties.name)
        self.num_threads = num_threads or usable_cores()
        self._stream = torch.cuda.Stream(self.torch_device, priority=-1 if urgent else 0)
        self.enter()  # all memory is then initialized in the stream that will use it
        self._done = torch.cuda.Event()
        self._inputs = StepBuffer(1 << 16, self.torch_device)
        self._newest: Callable[[], torch.cuda.CUDAGraph | None] = lambda: None

    def enter(self) -> None:
        """Directs all later launches of the calling thread, including sampling, to the runner's stream."""
        torch.cuda.set_stream(self._stream)

    def use_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads or usable_cores()

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Copies arrays to the device in one transfer from pinned memory. The copies are valid until the next
        upload.
        """
        shapes = [(array.dtype, array.shape) for array in arrays]
        need = StepBuffer.bytes_of(shapes)
        if need > self._inputs.num_bytes:
            self._inputs = StepBuffer(1 << need.bit_length(), self.torch_device)
        self._inputs.wait()  # an earlier transfer may not have read the host's side yet
        places = self._inputs.place(shapes)
        for place, array in zip(places, arrays, strict=True):
            place.host[...] = array
        self._inputs.send(need)
        return [place.device for place in places]

    def wait(self) -> None:
        """Waits for all work in the stream. This is the completion event of the reader rule."""
        self._done.record(self._stream)
        self._done.synchronize()

    def record(self, work: Work) -> Work:
        """Captures `work` in a CUDA graph and returns a function that replays it. The graphs of this object share a
        memory pool.

        First runs `work` once, which compiles Triton kernels and creates cuBLAS' workspace. If `work` cannot be
        captured, raises the error of `work`, Triton or CUDA.
        """
        work()
        self.wait()
        newest, graph = self._newest(), torch.cuda.CUDAGraph()
        # torch refuses a pool all of whose graphs are gone
        pool = torch.cuda.graph_pool_handle() if newest is None else newest.pool()
        try:
            # thread_local: another runner's thread may be using the device at the same time
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                out = work()
        except Exception:
            self._abandon(pool)
            raise
        self._newest = weakref.ref(graph)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def _abandon(self, pool: Any) -> None:
        """Cleans up after a failed capture. torch's `capture_end` raises before it stops allocating from the pool.
        Without the cleanup, the pool would keep everything that the stream allocates from then on, and every later
        capture would fail.
        """
        self._newest = lambda: None
        with contextlib.suppress(RuntimeError):  # the capture had not begun, or has ended normally
            torch._C._cuda_endAllocateToPool(self.torch_device.index, pool)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Runs `work`. Returns the largest growth, in bytes, of the device memory reserved by torch's allocator."""
        self.release()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        work()
        self.wait()
        return max(0, torch.cuda.max_memory_reserved(self.torch_device) - before)

    def release(self) -> None:
        """Returns unused memory of torch's allocator to the device."""
        torch.cuda.empty_cache()

    def used_bytes(self) -> int:
        """Returns the number of bytes of device memory that this and other processes use."""
        self.release()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free


Device = CpuDevice | CudaDevice


def open_device(asked: Literal["auto", "cpu", "cuda"], num_threads: int, urgent: bool = False) -> Device:
    """Opens the requested device. "auto" means a GPU if torch finds one. `urgent` has the same meaning as
    in `CudaDevice.__init__`. Raises ModelError if there is no such device.
    """
    settle_vector_math()
    if asked == "cuda" or (asked == "auto" and torch.cuda.is_available()):
        return CudaDevice(num_threads, urgent)
    return CpuDevice(num_threads)


def settle_vector_math() -> None:
    """Makes the process's first call of MKL's vector functions (cosine, exponential and others), in this thread alone.

    If two threads make the first call at the same time, one of them may compute in a mode with about 12 right bits.
    Torch divides large tensors among threads, so a worker's table of rotary positions could be wrong by 1e-4, and the
    worker drew other tokens than all others (docs/log/2026-12.md).
    """
    torch.zeros(1).cos()


def _status_bytes(field: str) -> int:
    """Returns the value, in bytes, of a field that /proc/self/status gives in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _reset_peak_resident() -> int:
    """Resets VmHWM to the current resident memory, if the kernel allows it. Returns the resident memory in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        logger.warning("the peak of resident memory cannot be reset (%s): estimates may be too high", error.strerror)
    return _status_bytes("VmRSS")
