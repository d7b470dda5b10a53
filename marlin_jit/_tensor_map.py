"""Tensor maps: how a Hopper kernel's copies find boxes of a matrix, and what they do at its edges.

``cuTensorMapEncodeTiled`` of the driver makes them, called through ctypes. A map is 128 bytes that depend on
nothing but its arguments, and goes to a kernel by value (``const __grid_constant__ TensorMap``).
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

from marlin_jit.errors import LaunchError

NBYTES = ALIGNMENT = 128
"""Of a map. The driver asks for 64 bytes of alignment, 128 from CUDA 13 on."""

NO_MAP = bytes(NBYTES)
"""What is passed where a kernel uses none."""

# CUtensorMapDataType, and how a box lies in shared memory: CUtensorMapSwizzle.
UINT16, UINT64, FLOAT16, BFLOAT16 = 1, 4, 6, 9
PLAIN, SWIZZLE_128 = 0, 3
_ITEM_BYTES = {UINT16: 2, UINT64: 8, FLOAT16: 2, BFLOAT16: 2}

_NO_INTERLEAVE = 0
_L2_256_BYTES = 3  # CUtensorMapL2promotion
_OUTSIDE_IS_ZERO = 0  # CUtensorMapFloatOOBfill


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuTensorMapEncodeTiled.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
        *([ctypes.c_void_p] * 4),
        *([ctypes.c_int] * 4),
    ]
    return library


@cache
def available() -> bool:
    """Whether the driver makes tensor maps (from CUDA 12.0 on)."""
    try:
        return bool(_library().cuTensorMapEncodeTiled)
    except (OSError, AttributeError):
        return False


@lru_cache(maxsize=1 << 12)
def tensor_map(
    address: int, kind: int, rows: int, columns: int, stride: int, box: tuple[int, int], swizzle: int = PLAIN
) -> bytes:
    """The map of a matrix in device memory.

    Parameters
    ----------
    address : int
        Of its first element, a multiple of 16.
    kind : int
        Type of an element, `UINT16` and so on.
    rows, columns : int
        Its shape; a copy takes zeros for what lies outside.
    stride : int
        Bytes from one row to the next, a multiple of 16.
    box : (int, int)
        Rows and columns that a copy takes, at most 256 each.
    swizzle : int
        `PLAIN`: a box lies in shared memory row by row. `SWIZZLE_128`: rows of 128 bytes, whose 16-byte
        columns are exchanged by the row's number modulo 8.

    Raises
    ------
    LaunchError
        The driver takes no such map.
    """
    # A single row has no next one, but its stride must be one that a matrix could have.
    stride = max(stride, -(-columns * _ITEM_BYTES[kind] // 16) * 16) if rows == 1 else stride
    memory = ctypes.create_string_buffer(NBYTES + ALIGNMENT)
    start = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    status = _library().cuTensorMapEncodeTiled(
        *(start, kind, 2, address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(stride),
        (ctypes.c_uint32 * 2)(box[1], box[0]),
        (ctypes.c_uint32 * 2)(1, 1),
        *(_NO_INTERLEAVE, swizzle, _L2_256_BYTES, _OUTSIDE_IS_ZERO),
    )
    if status:
        raise LaunchError(
            f"no tensor map of {rows} x {columns} elements of type {kind} at {address:#x}, rows {stride} "
            f"bytes apart, boxes of {box[0]} x {box[1]}: cuTensorMapEncodeTiled returned {status}"
        )
    return ctypes.string_at(start, NBYTES)
