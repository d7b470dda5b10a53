"""Launching through the driver itself: CuPy's launches cannot overlap with the kernel before them.

``cuLaunchKernelEx`` takes the attribute "programmatic stream serialization" (CUDA driver API,
CUlaunchAttribute): a grid may then start while the one before it in the stream ends, and waits within itself
for what it needs of it. It is called through ctypes, with all that does not change made once a thread.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import cache
from typing import Any

from marlin_jit._cupy import import_cupy

_ATTRIBUTE_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

# CUlaunchConfig: grid, block, shared memory, (pad), stream, attributes, their number, (pad).
_CONFIG = struct.Struct("@7I4xQQI4x")
# CUlaunchAttribute: id, (pad), value (a union of 64 bytes).
_ATTRIBUTE = struct.Struct("@I4xi60x")


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
        memory = ctypes.create_string_buffer(offset + _ALIGNMENT)
        start = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        self.buffer = (ctypes.c_char * offset).from_buffer(memory, start - ctypes.addressof(memory))
        self.places = (ctypes.c_void_p * len(offsets))(*(start + at for at in offsets))
        self.address = ctypes.addressof(self.places)


class _Thread(threading.local):
    """What a thread's launches fill in anew each time."""

    def __init__(self) -> None:
        self.library = _library()
        self.attribute = ctypes.create_string_buffer(_ATTRIBUTE.size)
        _ATTRIBUTE.pack_into(self.attribute, 0, _ATTRIBUTE_OVERLAP, 1)
        self.attribute_address = ctypes.addressof(self.attribute)
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.config_address = ctypes.addressof(self.config)
        self.arguments: dict[str, _Arguments] = {}
        self.bound: set[int] = set()


_thread: _Thread | None = None


def launch(
    function: int,
    device: int,
    grid: tuple[int, int, int],
    threads: int,
    smem: int,
    stream: int,
    layout: str,
    values: tuple[Any, ...],
    *,
    overlap: bool,
) -> None:
    """Launch a kernel.

    Parameters
    ----------
    function : int
        CUfunction.
    device : int
        That of the function, which is current.
    grid : (int, int, int)
    threads : int
        Of a block.
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

    Raises
    ------
    RuntimeError
        The driver refused, or reports what went wrong before.
    """
    global _thread
    if _thread is None:
        _thread = _Thread()
    mine = _thread
    if device not in mine.bound:
        # A thread that has made no call of the runtime yet has a current device but no context of the driver.
        import_cupy().cuda.runtime.setDevice(device)
        mine.bound.add(device)
    arguments = mine.arguments.get(layout)
    if arguments is None:
        arguments = mine.arguments[layout] = _Arguments(layout)
    arguments.packing.pack_into(arguments.buffer, 0, *values)
    attribute = mine.attribute_address
    _CONFIG.pack_into(mine.config, 0, *grid, threads, 1, 1, smem, stream, attribute, overlap)
    status = mine.library.cuLaunchKernelEx(mine.config_address, function, arguments.address, None)
    if status:
        raise RuntimeError(_described(mine.library, status))


def _described(library: ctypes.CDLL, status: int) -> str:
    """An error of the driver as CuPy writes it: its name and what it means."""
    texts = []
    for ask in (library.cuGetErrorName, library.cuGetErrorString):
        text = ctypes.c_char_p()
        ask(status, ctypes.byref(text))
        texts.append((text.value or b"unknown error").decode())
    return ": ".join(texts)
