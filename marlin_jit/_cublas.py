"""cuBLAS's dense half-precision GEMM through ctypes, in a form that a CUDA graph can capture.

CuPy refuses its cuBLAS calls while a stream is captured, although cuBLAS allows them once it has a workspace
of its own. Both the FP16 body cache and the comparison with cuBLAS have to work inside a graph, hence these
lines.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from marlin_jit._array import BFLOAT16, Array
from marlin_jit._cupy import import_cupy
from marlin_jit.device import scratch
from marlin_jit.errors import DeviceError, LaunchError

if TYPE_CHECKING:
    from marlin_jit.launch import Matrix

__all__ = ["available", "matmul_dense", "version"]

# Values of cublasOperation_t, cudaDataType, cublasComputeType_t and cublasGemmAlgo_t
_OP_N, _OP_T = 0, 1
_TYPE = {np.dtype(np.float16): 2, BFLOAT16: 14}
_COMPUTE_32F = 68
_ALGORITHM_DEFAULT = -1

_WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends on Hopper; more than it asks for elsewhere
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)

_lock = threading.Lock()
_handles: dict[tuple[int, int], ctypes.c_void_p] = {}


@cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = ctypes.CDLL(str(load_nvidia_dynamic_lib("cublas").abs_path))
    except (ImportError, OSError, RuntimeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cublasSetStream_v2.argtypes = [pointer, pointer]
    library.cublasSetWorkspace_v2.argtypes = [pointer, pointer, ctypes.c_size_t]
    library.cublasGemmEx.argtypes = [
        pointer, number, number,  # handle, operations
        number, number, number,  # sizes
        pointer, pointer, number, number, pointer, number, number,  # alpha; address, type, stride of A and B
        pointer, pointer, number, number,  # beta and C
        number, number,  # compute type, algorithm
    ]  # fmt: skip
    return library


def available() -> bool:
    """Whether cuBLAS's library can be loaded. (CuPy's wheels don't bring it.)"""
    return not isinstance(_library(), str)


def version() -> str:
    """The library's version, such as ``13.1.0``. Needs a device.

    Raises
    ------
    DeviceError
        It is not installed, or doesn't start.
    """
    number = ctypes.c_int()
    library, handle = _loaded(), _handle()
    _check("cublasGetVersion", library.cublasGetVersion_v2(handle, ctypes.byref(number)))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def matmul_dense(x: Matrix, w: Array, out: Matrix, *, transposed: bool = False) -> None:
    """``out = x @ w`` on CuPy's current stream, accumulated in float32.

    Parameters
    ----------
    x : Matrix
        [M, K], of the dtype of `w`.
    w : cupy.ndarray, float16 or bfloat16, contiguous
        [K, N]; or [N, K] if `transposed`, the layout in which frameworks keep a linear layer. Its rows may
        be longer.
    out : Matrix
        [M, N], of the dtype of `w`.

    Raises
    ------
    DeviceError
        cuBLAS is not installed, or doesn't start.
    LaunchError
        cuBLAS refuses the call, or the stream is being captured and has not seen such a call before.
    """
    library, handle = _loaded(), _handle()
    stream = import_cupy().cuda.get_current_stream().ptr
    workspace = scratch.get("cublas workspace", _WORKSPACE_BYTES)
    _check("cublasSetStream", library.cublasSetStream_v2(handle, stream))
    # Setting the stream puts cuBLAS's own workspace back, so this comes second.
    _check(
        "cublasSetWorkspace",
        library.cublasSetWorkspace_v2(handle, workspace.data.ptr, _WORKSPACE_BYTES),
    )
    kind = _TYPE[np.dtype(w.dtype)]
    m, k, n = x.rows, x.columns, out.columns
    # cuBLAS counts by columns: a row-major [M, N] is a column-major [N, M], so this asks for out^T = w^T x^T.
    # A single row has no stride of its own, but cuBLAS still wants one that could be.
    status = library.cublasGemmEx(
        handle, _OP_T if transposed else _OP_N, _OP_N, n, m, k,
        ctypes.byref(_ONE),
        w.data.ptr, kind, w.shape[1],
        x.pointer, kind, max(x.stride, k),
        ctypes.byref(_ZERO),
        out.pointer, kind, max(out.stride, n),
        _COMPUTE_32F, _ALGORITHM_DEFAULT,
    )  # fmt: skip
    _check("cublasGemmEx", status)


def _loaded() -> ctypes.CDLL:
    library = _library()
    if isinstance(library, str):
        raise DeviceError(f"cuBLAS is not installed ({library})")
    return library


def _handle() -> ctypes.c_void_p:
    """This thread's handle on the current device: a handle carries a stream, which threads don't share."""
    key = (import_cupy().cuda.runtime.getDevice(), threading.get_ident())
    handle = _handles.get(key)
    if handle is None:
        handle = ctypes.c_void_p()
        with _lock:
            status = _loaded().cublasCreate_v2(ctypes.byref(handle))
            if status:
                raise DeviceError(f"cuBLAS does not start on this device (cublasCreate returned {status})")
            _handles[key] = handle
    return handle


def _check(what: str, status: int) -> None:
    if status:
        raise LaunchError(f"{what} returned status {status}")
