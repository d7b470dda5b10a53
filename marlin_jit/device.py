"""What a device is, and scratch memory on it that a launch never has to wait for.

`current_device` answers from a cache, so it is cheap enough to ask at every call. It needs neither NVML nor
a clock query, only the runtime's device attributes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from marlin_jit._cupy import import_cupy
from marlin_jit.errors import DeviceError, LaunchError

# cudaStreamPerThread: one handle that names another stream in every thread.
_STREAM_PER_THREAD = 2
# Smallest scratch buffer; most shapes fit it, so that they never make it grow.
_MIN_SCRATCH_BYTES = 1 << 16

_NO_DEVICE_AT_ALL = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice")

# cudaDeviceAttr numbers
_ATTR_SM_COUNT = 16
_ATTR_L2_BYTES = 38
_ATTR_MAJOR = 75
_ATTR_MINOR = 76
_ATTR_SMEM_PER_SM = 81
_ATTR_SMEM_PER_BLOCK_OPTIN = 97


@dataclass(frozen=True)
class DeviceInfo:
    """The properties of a GPU that kernel choice depends on.

    Attributes
    ----------
    id : int
        CUDA's device number in this process.
    name : str
        Such as ``"NVIDIA H200"``.
    capability : (int, int)
        Compute capability, e.g. ``(9, 0)``.
    sm_count : int
        Streaming multiprocessors.
    smem_per_block : int
        The most shared memory, in bytes, that one block can have (by opting in).
    smem_per_sm : int
        Shared memory of one SM, in bytes.
    l2_bytes : int
        Size of the L2 cache.
    """

    id: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int


_devices: dict[int, DeviceInfo] = {}


def current_device() -> DeviceInfo:
    """The current device.

    Raises
    ------
    DeviceError
        CuPy is not installed, or there is no driver or no device.
    """
    cupy = import_cupy()
    try:
        device_id: int = cupy.cuda.runtime.getDevice()
    except RuntimeError as error:
        raise unusable(error) from error
    return _devices.get(device_id) or device_info(device_id)


def device_info(device_id: int) -> DeviceInfo:
    """The device with the number ``device_id``.

    Raises
    ------
    DeviceError
        There is no such device, or no driver, or CuPy is not installed.
    """
    known = _devices.get(device_id)
    if known is not None:
        return known
    runtime = import_cupy().cuda.runtime

    def attribute(number: int) -> int:
        return int(runtime.deviceGetAttribute(number, device_id))

    try:
        name = runtime.getDeviceProperties(device_id)["name"]
        info = DeviceInfo(
            id=device_id,
            name=name.decode() if isinstance(name, bytes) else str(name),
            capability=(attribute(_ATTR_MAJOR), attribute(_ATTR_MINOR)),
            sm_count=attribute(_ATTR_SM_COUNT),
            smem_per_block=attribute(_ATTR_SMEM_PER_BLOCK_OPTIN),
            smem_per_sm=attribute(_ATTR_SMEM_PER_SM),
            l2_bytes=attribute(_ATTR_L2_BYTES),
        )
    except RuntimeError as error:
        if any(sign in str(error) for sign in _NO_DEVICE_AT_ALL):
            raise unusable(error) from error
        raise DeviceError(f"CUDA device {device_id} cannot be used: {error}") from error
    _devices[device_id] = info
    return info


def unusable(error: RuntimeError) -> DeviceError:
    """The error to raise where a call of CUDA's runtime failed because there is no device to use.

    Without any driver the runtime says that the driver's version is insufficient; here the message says
    what is missing.
    """
    what = str(error)
    if "cudaErrorInsufficientDriver" in what:
        driver: int = import_cupy().cuda.runtime.driverGetVersion()  # 0 where none is installed
        if driver == 0:
            what = "no NVIDIA driver is installed"
        else:
            version = f"{driver // 1000}.{driver % 1000 // 10}"
            what = f"the NVIDIA driver is too old (it is for CUDA {version}); update it: {what}"
    elif "cudaErrorNoDevice" in what:
        what = "the NVIDIA driver finds none"
    return DeviceError(f"no CUDA device can be used: {what}")


def unavailable_reason() -> str | None:
    """Why no GPU can be used here, in one line; None if one can. Never raises."""
    try:
        current_device()
    except DeviceError as error:
        return str(error)
    return None


class Scratch:
    """Device memory that kernels use between them, kept for the next call.

    There is one buffer for each device, stream and purpose. Work on one stream is in order, so calls on it
    can share a buffer (see `turn` for calls of several launches); calls on different streams must not. A
    buffer grows by doubling and never shrinks, so a program that repeats its shapes soon allocates nothing.
    Buffers that were outgrown stay allocated (together at most as large as the one in use), because a
    captured CUDA graph may still hold their address.

    A graph uses the buffers of the stream it was captured on. Graphs captured on one stream must therefore
    not run at the same time as each other, nor beside other work of that stream.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int, int, str], Any] = {}
        self._outgrown: list[Any] = []
        self._turns: dict[tuple[int, int, int], threading.RLock] = {}
        self._lock = threading.Lock()

    def get(self, purpose: str, nbytes: int, *, zeroed: bool = False) -> Any:
        """A buffer of at least ``nbytes`` bytes for the current device and stream.

        Parameters
        ----------
        purpose : str
            Names the buffer; different purposes never share memory. One purpose is always zeroed or never.
        nbytes : int
            Bytes needed.
        zeroed : bool
            Fill with zeros when it is allocated (and again when it grew). It is not cleared between
            calls: kernels that count in it leave it zero.

        Returns
        -------
        cupy.ndarray
            uint8, one-dimensional, 256-byte aligned. Pass it to a launch as it is.

        Raises
        ------
        LaunchError
            It would have to grow while the stream is being captured into a CUDA graph.
        """
        cupy = import_cupy()
        key = (*current_order(cupy), purpose)
        buffer = self._buffers.get(key)
        if buffer is not None and buffer.size >= nbytes:
            return buffer
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is not None and buffer.size >= nbytes:
                return buffer
            if is_capturing(cupy):
                raise LaunchError(
                    f"the scratch buffer {purpose!r} would have to grow to {nbytes} bytes while the stream "
                    "is being captured into a CUDA graph: make the same call once on this stream before "
                    "the capture"
                )
            size = max(nbytes, _MIN_SCRATCH_BYTES, 0 if buffer is None else 2 * buffer.size)
            grown = (cupy.zeros if zeroed else cupy.empty)(size, dtype=cupy.uint8)
            if buffer is not None:
                self._outgrown.append(buffer)
            self._buffers[key] = grown
            return grown

    def turn(self) -> threading.RLock:
        """A lock for the current device and stream.

        Hold it while enqueuing launches of which one leaves in scratch memory what the next one reads:
        threads may share a stream (by default all of them do), and theirs must not come in between.
        """
        order = current_order(import_cupy())
        lock = self._turns.get(order)
        if lock is None:
            with self._lock:
                lock = self._turns.setdefault(order, threading.RLock())
        return lock

    @property
    def nbytes(self) -> int:
        """Bytes allocated on all devices, outgrown buffers included."""
        with self._lock:
            return sum(buffer.size for buffer in (*self._buffers.values(), *self._outgrown))

    def clear(self) -> None:
        """Give all buffers back to CuPy's pool, but for those that weights keep for repeated products.

        No captured graph that used them may run afterwards.
        """
        with self._lock:
            self._buffers.clear()
            self._outgrown.clear()


def current_order(cupy: Any) -> tuple[int, int, int]:
    """The current device and stream, within which work is in order; the thread, where that is part of it."""
    stream: int = cupy.cuda.get_current_stream().ptr
    thread = threading.get_ident() if stream == _STREAM_PER_THREAD else 0
    return (cupy.cuda.runtime.getDevice(), stream, thread)


def is_capturing(cupy: Any) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    try:
        return bool(cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr))
    except RuntimeError as error:
        # Asking about the legacy stream while another stream captures is itself an error.
        if "cudaErrorStreamCapture" in str(error):
            return True
        raise


scratch = Scratch()
