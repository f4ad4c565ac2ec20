"""Makes the CUDA driver calls that an arena in device memory needs, through ctypes and `libcuda.so.1`, without torch or
the CUDA toolkit.

The calls need driver 470 or later (`cuDeviceGetUuid_v2`). Their signatures are those of CUDA 13.0's `cuda.h`. Without
a GPU, the tests use a stand-in library (`tests/block_store/stand_in_cuda.c`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from block_store.errors import BlockStoreError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed to the driver by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_POINTER, _SIZE, _HANDLE = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_OUT = ctypes.c_void_p  # address of the value that the call fills in
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, _OUT),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_OUT, _OUT),
    "cuMemAlloc_v2": (_OUT, _SIZE),
    "cuMemFree_v2": (_POINTER,),
    "cuMemsetD8_v2": (_POINTER, ctypes.c_ubyte, _SIZE),
    "cuMemcpyDtoH_v2": (_OUT, _POINTER, _SIZE),
    "cuMemcpyHtoD_v2": (_POINTER, ctypes.c_char_p, _SIZE),
    "cuIpcGetMemHandle": (_OUT, _POINTER),
    "cuIpcOpenMemHandle_v2": (_OUT, _IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
}


class CudaError(BlockStoreError):
    """Raised when a driver call fails. `name` is the driver's name for the error, e.g. CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} failed: {name}")
        self.call = call
        self.name = name


class CudaUnavailable(BlockStoreError):
    """Raised if this process has no usable CUDA driver, or if the requested device is not visible to it."""


class MemoryInfo(NamedTuple):
    """The free and the total memory of a device, in bytes. Memory in use by any process, not only by this one, does not
    count as free.
    """

    free: int
    total: int


class Cuda:
    """A client of the CUDA driver library. The constructor raises CudaUnavailable if the library is missing or too old,
    or if it finds no GPU.

    Methods raise CudaError if a driver call fails.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            loaded = ctypes.CDLL(library)
            self._functions = {name: _function(loaded, name) for name in _ARGUMENTS}
        except (OSError, AttributeError) as error:
            raise CudaUnavailable(f"the CUDA driver {library} cannot be used: {error}") from None
        try:
            self.call("cuInit", 0)
        except CudaError as error:
            raise CudaUnavailable(f"the CUDA driver finds no usable GPU: {error}") from None

    def call(self, name: str, *args: Any) -> None:
        """Makes one driver call. Raises CudaError if the call fails."""
        code = self._functions[name](*args)
        if code != 0:
            raise CudaError(name, self._error_name(code))

    @property
    def num_devices(self) -> int:
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device(self, ordinal: int) -> CudaDevice:
        """Returns the device with this ordinal among the devices that are visible to the process, as in torch. Raises
        CudaUnavailable if there is no such device.
        """
        if not 0 <= ordinal < self.num_devices:
            raise CudaUnavailable(f"there is no GPU {ordinal}: this process sees {self.num_devices}")
        return CudaDevice(self, ordinal)

    def device_of(self, uuid: bytes) -> CudaDevice:
        """Returns the device with this UUID. A UUID identifies the same device in every process, whereas
        CUDA_VISIBLE_DEVICES changes ordinals. Raises CudaUnavailable if the device is not visible to this process.
        """
        for ordinal in range(self.num_devices):
            if self.uuid(ordinal) == uuid:
                return CudaDevice(self, ordinal)
        raise CudaUnavailable(f"GPU {uuid.hex()} is not among the {self.num_devices} that this process sees")

    def uuid(self, ordinal: int) -> bytes:
        """Returns the device's UUID, 16 bytes. A MIG instance has its own UUID."""
        handle, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
        self.call("cuDeviceGet", ctypes.byref(handle), ordinal)
        self.call("cuDeviceGetUuid_v2", uuid, handle)
        return uuid.raw

    def _error_name(self, code: int) -> str:
        name = ctypes.c_char_p()
        unknown = self._functions["cuGetErrorName"](code, ctypes.byref(name)) != 0 or name.value is None
        return f"error {code}" if unknown else (name.value or b"").decode()


class CudaDevice:
    """A GPU, used through its primary context. torch uses the same context, which is retained until the process ends.
    Any thread may call the methods. All methods raise CudaError if a driver call fails.
    """

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self._cuda = cuda
        self.ordinal = ordinal
        self.uuid = cuda.uuid(ordinal)
        self._device, self._context = ctypes.c_int(), _HANDLE()
        cuda.call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def memory_info(self) -> MemoryInfo:
        free, total = _SIZE(), _SIZE()
        with self._current() as call:
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return MemoryInfo(free.value, total.value)

    def alloc(self, num_bytes: int) -> int:
        """Allocates `num_bytes` bytes, filled with zeros, and returns their address."""
        pointer = _POINTER()
        with self._current() as call:
            call("cuMemAlloc_v2", ctypes.byref(pointer), num_bytes)
            try:
                call("cuMemsetD8_v2", pointer, 0, num_bytes)
                call("cuCtxSynchronize")  # the memset is asynchronous, and another process may write next
            except CudaError:
                with suppress(CudaError):  # the first error says why; after it, the context may be unusable
                    call("cuMemFree_v2", pointer)
                raise
        return pointer.value

    def free(self, pointer: int) -> None:
        """Frees memory that `alloc` returned. Do not free exported memory while another process has it open; CUDA
        leaves the result undefined.
        """
        with self._current() as call:
            call("cuMemFree_v2", pointer)

    def export(self, pointer: int) -> bytes:
        """Returns the 64-byte handle with which another process can open memory that `alloc` returned. The handle
        becomes invalid when the memory is freed or this process ends.
        """
        handle = _IpcHandle()
        with self._current() as call:
            call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Opens memory that another process has exported, and returns its address in this process."""
        pointer = _POINTER()
        with self._current() as call:
            call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return pointer.value

    def close_opened(self, pointer: int) -> None:
        with self._current() as call:
            call("cuIpcCloseMemHandle", pointer)

    def read(self, pointer: int, num_bytes: int) -> bytes:
        """Returns a copy of `num_bytes` bytes of device memory."""
        host = ctypes.create_string_buffer(num_bytes)
        with self._current() as call:
            call("cuMemcpyDtoH_v2", host, pointer, num_bytes)
        return host.raw

    def write(self, pointer: int, data: bytes) -> None:
        """Copies `data` to device memory, and waits until every process can read it there."""
        with self._current() as call:
            call("cuMemcpyHtoD_v2", pointer, data, len(data))
            call("cuCtxSynchronize")  # the copy from pageable memory may still be on its way

    @contextmanager
    def _current(self) -> Iterator[Any]:
        """Makes the device's context current in this thread while the body of the `with` statement runs, and then
        restores the previous context.
        """
        self._cuda.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield self._cuda.call
        finally:
            self._cuda.call("cuCtxPopCurrent_v2", ctypes.byref(_HANDLE()))


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_int, _ARGUMENTS[name]
    return function
