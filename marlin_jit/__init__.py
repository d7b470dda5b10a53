"""INT4 Marlin GEMM for NumPy and CuPy, compiled at first use.

>>> import cupy as cp, marlin_jit as mj
>>> qw = mj.QuantWeight(q, scale, zero, group_size=128)   # W = q*scale + zero
>>> w = mj.pack(qw)
>>> y = mj.matmul(x, w, bias=b)                           # or x @ w
"""

from __future__ import annotations

from marlin_jit.ahead import warmup
from marlin_jit.dispatch import (
    Explanation,
    dispatch,
    dispatch_enabled,
    explain,
    matmul,
    reset_stats,
    set_dispatch,
    stats,
)
from marlin_jit.errors import (
    CheckpointError,
    CompileError,
    DeviceError,
    DTypeError,
    LaunchError,
    MarlinJitError,
    ShapeError,
    ValueRangeError,
)
from marlin_jit.formats.packed import load, save
from marlin_jit.pack import dequantize, pack, unpack
from marlin_jit.quantize import quantize
from marlin_jit.weight import MarlinWeight, QuantWeight

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CompileError",
    "DTypeError",
    "DeviceError",
    "Explanation",
    "LaunchError",
    "MarlinJitError",
    "MarlinWeight",
    "QuantWeight",
    "ShapeError",
    "ValueRangeError",
    "dequantize",
    "dispatch",
    "dispatch_enabled",
    "explain",
    "load",
    "matmul",
    "pack",
    "quantize",
    "reset_stats",
    "save",
    "set_dispatch",
    "stats",
    "unpack",
    "warmup",
]
