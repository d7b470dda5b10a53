"""NumPy or CuPy: which of the two an array belongs to, without importing CuPy.

CuPy is never imported just to look at an array: an array of CuPy's can only exist where the module is loaded
already.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from marlin_jit.errors import DeviceError, DTypeError

Array: TypeAlias = Any
"""A NumPy or CuPy array. (CuPy's own types are not there where it is not installed.)"""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)

_HOST_SCRATCH = 1 << 20  # bytes: what stays in the second-level cache of a core


def is_device_array(x: object) -> bool:
    """Whether `x` is a CuPy array."""
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)
    return ndarray is not None and isinstance(x, ndarray)


def namespace(*arrays: Array | None) -> Any:
    """Return the module, ``numpy`` or ``cupy``, whose functions take these arrays.

    Parameters
    ----------
    *arrays : numpy.ndarray or cupy.ndarray or None
        None stands for an absent optional array and is skipped.

    Raises
    ------
    DTypeError
        Something that is no array, a masked array or a matrix, or NumPy and CuPy arrays together.
    DeviceError
        CuPy arrays on different devices.
    """
    present = [a for a in arrays if a is not None]
    on_device = [is_device_array(a) for a in present]
    for array, device in zip(present, on_device, strict=True):
        if not device and not isinstance(array, np.ndarray):
            raise DTypeError(f"expected a NumPy or CuPy array, got {type(array).__name__}")
        if isinstance(array, np.ma.MaskedArray | np.matrix):
            raise DTypeError(
                f"expected a plain NumPy array, got {type(array).__name__}: give array.filled(value) or "
                "numpy.asarray(matrix)"
            )
    if not any(on_device):
        return np
    if not all(on_device):
        raise DTypeError("NumPy and CuPy arrays are mixed; move all to one side (cupy.asarray, cupy.asnumpy)")
    devices = sorted({int(a.device.id) for a in present})
    if len(devices) > 1:
        raise DeviceError(f"the arrays lie on different devices: {devices}; put them on one")
    return sys.modules["cupy"]


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return `dtype` as NumPy's, with our error for what is none."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise DTypeError(f"{dtype!r} is no dtype: {error}") from None
    return found


def as_integer(name: str, value: Any) -> int:
    """Return `value` as an int, with our error, which calls it `name`, for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise DTypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def on_device(array: Array) -> AbstractContextManager[Any]:
    """Context in which the device of `array` is the current one; nothing at all for NumPy arrays."""
    return array.device if is_device_array(array) else nullcontext()


def to_host(array: Array) -> Any:
    """Return `array` as a NumPy array (itself if it is one already)."""
    return array.get() if is_device_array(array) else array


def to_device(array: Array) -> Array:
    """Return `array` as a CuPy array on the current device (itself if it is on a device already).

    Raises
    ------
    DeviceError
        CuPy is not installed, or there is no driver or no device.
    """
    if is_device_array(array):
        return array
    from marlin_jit._cupy import import_cupy
    from marlin_jit.device import current_device

    current_device()  # raises where there is none, and says why
    return import_cupy().asarray(array)


def column_chunks(rows: int, columns: int, device: bool, scratch: int) -> Iterator[tuple[int, int]]:
    """Split the columns of a [rows, columns] weight into ranges, to bound the memory of temporary arrays.

    On the host the temporary arrays of a range fit the cache of a core. On a device they are as large as the
    uint8 codes of the whole weight, for few launches. No range is narrower than 64 columns.

    Parameters
    ----------
    rows, columns : int
    device : bool
    scratch : int
        Bytes of temporary arrays for one weight.

    Yields
    ------
    start, stop : int
        Column range; `start` is a multiple of 64.
    """
    scratch_bytes = rows * columns if device else _HOST_SCRATCH
    width = max(64, scratch_bytes // (scratch * rows) // 64 * 64)
    for start in range(0, columns, width):
        yield start, min(start + width, columns)
