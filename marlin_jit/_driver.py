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


@cache
def _fields(layout: str) -> tuple[struct.Struct, tuple[int, ...]]:
    """How arguments of a layout lie in memory: what packs them, and where each begins."""
    fields, offset, offsets = "@", 0, []
    for kind in layout:
        # After those before it, aligned to its own size.
        field = "128s" if kind == "T" else kind
        size = struct.calcsize(field)
        alignment = min(size, _ALIGNMENT)
        at = -(-offset // alignment) * alignment
        fields += f"{at - offset}x{field}"
        offsets.append(at)
        offset = at + size
    return struct.Struct(fields), tuple(offsets)


class _Arguments:
    """Memory for a kernel's arguments and for the addresses of each."""

    def __init__(self, layout: str) -> None:
        self.packing, self.offsets = _fields(layout)
        self.layout = layout
        memory = ctypes.create_string_buffer(self.packing.size + _ALIGNMENT)
        start = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        self.buffer = (ctypes.c_char * self.packing.size).from_buffer(
            memory, start - ctypes.addressof(memory)
        )
        self.places = (ctypes.c_void_p * len(layout))(*(start + at for at in self.offsets))
        self.address = ctypes.addressof(self.places)

    def field(self, index: int) -> Any:
        """One pointer or tensor map, as a ctypes object whose ``value`` can be set."""
        kind = ctypes.c_char * 128 if self.layout[index] == "T" else ctypes.c_uint64
        return kind.from_buffer(self.buffer, self.offsets[index])


class Frozen:
    """A launch in memory. Filled once, it can be made again, with only what `field` gives written in between.

    One thread at a time may use it, for another one could write while it is read.

    Parameters
    ----------
    layout : str
        A character of :mod:`struct` for each parameter: P for a pointer, q and i for integers of 64 and 32
        bits, I for an unsigned one, f for a float; T for the 128 bytes of a tensor map.
    """

    __slots__ = ("_arguments", "_attributes", "_call", "_config", "_passed")

    def __init__(self, layout: str) -> None:
        self._call = _library().cuLaunchKernelEx
        self._arguments = _Arguments(layout)
        # The first, the second or both are passed.
        self._attributes = ctypes.create_string_buffer(2 * _ATTRIBUTE.size)
        _ATTRIBUTE.pack_into(self._attributes, 0, _ATTRIBUTE_OVERLAP, 1, 0, 0)
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._passed: tuple[Any, ...] = ()

    def fill(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int],
        smem: int,
        stream: int,
        values: tuple[Any, ...],
        overlap: bool,
        cluster: int = 1,
    ) -> None:
        """Say what is launched; parameters as for `launch`."""
        self._arguments.packing.pack_into(self._arguments.buffer, 0, *values)
        attributes, count = ctypes.addressof(self._attributes), int(overlap)
        if cluster > 1:
            _ATTRIBUTE.pack_into(self._attributes, _ATTRIBUTE.size, _ATTRIBUTE_CLUSTER, 1, cluster, 1)
            attributes += 0 if overlap else _ATTRIBUTE.size
            count += 1
        _CONFIG.pack_into(self._config, 0, *grid, *block, 1, smem, stream, attributes, count)
        self._passed = ctypes.addressof(self._config), function, self._arguments.address, None

    def field(self, index: int) -> Any:
        """An argument's place, a pointer's or tensor map's: set its ``value`` to an address or 128 bytes."""
        return self._arguments.field(index)

    def launch(self) -> None:
        """Launch what was filled in. The thread is bound to the device: see `bind`.

        Raises
        ------
        RuntimeError
            The driver refused, or reports what went wrong before.
        """
        status = self._call(*self._passed)
        if status:
            raise RuntimeError(_described(_library(), status))


class _State:
    """What is a thread's own."""

    def __init__(self) -> None:
        self.launches: dict[str, Frozen] = {}  # by layout, filled anew each time
        self.bound: set[int] = set()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _State()  # one look at what is a thread's own costs more than all others


_thread = _Thread()


def bind(device: int) -> _State:
    """Give a thread that has made no call of the runtime yet a context of the driver on its current device.

    Returns what is the thread's own.
    """
    mine = _thread.state
    if device not in mine.bound:
        import_cupy().cuda.runtime.setDevice(device)
        mine.bound.add(device)
    return mine


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
        As for `Frozen`.
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
    launches = bind(device).launches
    ready = launches.get(layout)
    if ready is None:
        ready = launches[layout] = Frozen(layout)
    ready.fill(function, grid, block, smem, stream, values, overlap, cluster)
    ready.launch()


def _described(library: ctypes.CDLL, status: int) -> str:
    """An error of the driver as CuPy writes it: its name and what it means."""
    texts = []
    for ask in (library.cuGetErrorName, library.cuGetErrorString):
        text = ctypes.c_char_p()
        ask(status, ctypes.byref(text))
        texts.append((text.value or b"unknown error").decode())
    return ": ".join(texts)
