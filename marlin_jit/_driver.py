"""Launching through the driver itself: CuPy's launches neither overlap nor have clusters.

``cuLaunchKernelEx`` takes attributes (CUDA driver API, CUlaunchAttribute). With "programmatic stream
serialization" a grid may start while the one before it in the stream ends, and waits within itself for what
it needs of it. With a "cluster dimension" neighbouring blocks run together and reach each other's shared
memory. It is called through ctypes, with all that does not change made once a thread.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import cache
from typing import Any

from marlin_jit._cupy import import_cupy

_ATTRIBUTE_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_ATTRIBUTE_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

# CUlaunchConfig: grid, block, shared memory, (pad), stream, attributes, their number, (pad).
_CONFIG = struct.Struct("@7I4xQQI4x")
# CUlaunchAttribute: id, (pad), value (a union of 64 bytes).
_ATTRIBUTE = struct.Struct("@I4x3I52x")


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    for name in ("cuGetErrorName", "cuGetErrorString"):
        getattr(library, name).argtypes = [ctypes.c_int, ctypes.c_void_p]
    return library


_ALIGNMENT = 64
"""Of a tensor map among the parameters, and so of all of them."""


class _Arguments:
    """Memory for a kernel's arguments and for the addresses of each."""

    def __init__(self, layout: str) -> None:
        fields, offset, offsets = "@", 0, []
        for kind in layout:
            # Where each begins: after those before it, aligned to its own size.
            field = "128s" if kind == "T" else kind
            size = struct.calcsize(field)
            alignment = min(size, _ALIGNMENT)
            at = -(-offset // alignment) * alignment
            fields += f"{at - offset}x{field}"
            offsets.append(at)
            offset = at + size
        self.packing = struct.Struct(fields)
        self.layout, self.offsets = layout, offsets
        memory = ctypes.create_string_buffer(offset + _ALIGNMENT)
        start = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        self.buffer = (ctypes.c_char * offset).from_buffer(memory, start - ctypes.addressof(memory))
        self.places = (ctypes.c_void_p * len(offsets))(*(start + at for at in offsets))
        self.address = ctypes.addressof(self.places)

    def field(self, index: int) -> Any:
        """One pointer or tensor map, as a ctypes object whose ``value`` can be set."""
        kind = ctypes.c_char * 128 if self.layout[index] == "T" else ctypes.c_uint64
        return kind.from_buffer(self.buffer, self.offsets[index])


class _State:
    """What a thread's launches fill in anew each time."""

    def __init__(self) -> None:
        self.library = _library()
        # The first, the second or both are passed.
        self.attributes = ctypes.create_string_buffer(2 * _ATTRIBUTE.size)
        _ATTRIBUTE.pack_into(self.attributes, 0, _ATTRIBUTE_OVERLAP, 1, 0, 0)
        self.attributes_address = ctypes.addressof(self.attributes)
        self.cluster = 0  # that the second one says
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.config_address = ctypes.addressof(self.config)
        self.arguments: dict[str, _Arguments] = {}
        self._bound: set[int] = set()

    def bind(self, device: int) -> None:
        """Give a thread that has made no call of the runtime yet a context of the driver."""
        if device not in self._bound:
            import_cupy().cuda.runtime.setDevice(device)
            self._bound.add(device)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _State()  # one look at what is a thread's own costs more than all others


_thread: _Thread | None = None


def _state() -> _State:
    """This thread's."""
    global _thread
    if _thread is None:
        _thread = _Thread()
    return _thread.state


def launch(
    function: int,
    device: int,
    grid: tuple[int, int, int],
    block: tuple[int, int],
    smem: int,
    stream: int,
    layout: str,
    values: tuple[Any, ...],
    overlap: bool,
    cluster: int = 1,
) -> None:
    """Launch a kernel.

    Parameters
    ----------
    function : int
        CUfunction.
    device : int
        That of the function, which is current.
    grid : (int, int, int)
    block : (int, int)
        Threads.
    smem : int
        Dynamic shared memory in bytes.
    stream : int
        CUstream.
    layout : str
        A character of :mod:`struct` for each parameter: P for a pointer, q and i for integers of 64 and 32
        bits, I for an unsigned one, f for a float; T for the 128 bytes of a tensor map.
    values : tuple of int, float or bytes
        The arguments.
    overlap : bool
        Whether the kernel may start before the one before it has ended; it must then wait by itself.
    cluster : int
        Blocks along the grid's second dimension, a divisor of it, that form a cluster; 1 for none.

    Raises
    ------
    RuntimeError
        The driver refused, or reports what went wrong before.
    """
    mine = _state()
    mine.bind(device)
    arguments = mine.arguments.get(layout)
    if arguments is None:
        arguments = mine.arguments[layout] = _Arguments(layout)
    arguments.packing.pack_into(arguments.buffer, 0, *values)
    attributes, count = mine.attributes_address, int(overlap)
    if cluster > 1:
        if cluster != mine.cluster:
            _ATTRIBUTE.pack_into(mine.attributes, _ATTRIBUTE.size, _ATTRIBUTE_CLUSTER, 1, cluster, 1)
            mine.cluster = cluster
        attributes += 0 if overlap else _ATTRIBUTE.size
        count += 1
    _CONFIG.pack_into(mine.config, 0, *grid, *block, 1, smem, stream, attributes, count)
    status = mine.library.cuLaunchKernelEx(mine.config_address, function, arguments.address, None)
    if status:
        raise RuntimeError(_described(mine.library, status))


class Frozen:
    """A launch that is ready in memory: between two of it only what `field` gives is written.

    Parameters as for `launch`. It belongs to the thread that makes it, which is bound to the device here, as
    `launch` does it.
    """

    __slots__ = ("_arguments", "_attributes", "_call", "_config", "_library", "_passed")

    def __init__(
        self,
        function: int,
        device: int,
        grid: tuple[int, int, int],
        block: tuple[int, int],
        smem: int,
        stream: int,
        layout: str,
        values: tuple[Any, ...],
        overlap: bool,
        cluster: int = 1,
    ) -> None:
        _state().bind(device)
        self._library = _library()
        self._arguments = _Arguments(layout)
        self._arguments.packing.pack_into(self._arguments.buffer, 0, *values)
        attributes = b""
        if overlap:
            attributes += _ATTRIBUTE.pack(_ATTRIBUTE_OVERLAP, 1, 0, 0)
        if cluster > 1:
            attributes += _ATTRIBUTE.pack(_ATTRIBUTE_CLUSTER, 1, cluster, 1)
        count = len(attributes) // _ATTRIBUTE.size
        self._attributes = ctypes.create_string_buffer(attributes, 2 * _ATTRIBUTE.size)
        config = _CONFIG.pack(*grid, *block, 1, smem, stream, ctypes.addressof(self._attributes), count)
        self._config = ctypes.create_string_buffer(config, _CONFIG.size)
        self._call = self._library.cuLaunchKernelEx
        self._passed = ctypes.addressof(self._config), function, self._arguments.address, None

    def field(self, index: int) -> Any:
        """An argument's place, a pointer's or tensor map's: set its ``value`` to an address or 128 bytes."""
        return self._arguments.field(index)

    def launch(self) -> None:
        """Launch with what stands in memory. Raises RuntimeError as `launch` does."""
        status = self._call(*self._passed)
        if status:
            raise RuntimeError(_described(self._library, status))


def _described(library: ctypes.CDLL, status: int) -> str:
    """An error of the driver as CuPy writes it: its name and what it means."""
    texts = []
    for ask in (library.cuGetErrorName, library.cuGetErrorString):
        text = ctypes.c_char_p()
        ask(status, ctypes.byref(text))
        texts.append((text.value or b"unknown error").decode())
    return ": ".join(texts)
