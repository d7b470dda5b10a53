"""INT4 Marlin GEMM for NumPy and CuPy, compiled at first use.

>>> import cupy as cp, marlin_jit as mj
>>> qw = mj.QuantWeight(q, scale, zero, group_size=128)   # W = q*scale + zero
>>> w = mj.pack(qw)
>>> y = mj.matmul(x, w, bias=b)                           # or x @ w
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# These come at once: `pack`, `quantize` and `dispatch` are also names of modules, and the function must win.
from marlin_jit.dispatch import (
    Explanation,
    dispatch,
    dispatch_enabled,
    explain,
    matmul,
    matmul_swiglu,
    reset_stats,
    set_batch_invariant,
    set_dispatch,
    stats,
    stats_by_shape,
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
from marlin_jit.fused import GateUpWeight, concatenate, pack_gate_up
from marlin_jit.gptq_quantize import gptq, hessian
from marlin_jit.pack import dequantize, pack, unpack
from marlin_jit.quantize import quantize
from marlin_jit.rounding import iteration, rounded
from marlin_jit.weight import MarlinWeight, QuantWeight

if TYPE_CHECKING:
    from marlin_jit.ahead import warmup
    from marlin_jit.formats.packed import load, save

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CompileError",
    "DTypeError",
    "DeviceError",
    "Explanation",
    "GateUpWeight",
    "LaunchError",
    "MarlinJitError",
    "MarlinWeight",
    "QuantWeight",
    "ShapeError",
    "ValueRangeError",
    "concatenate",
    "dequantize",
    "dispatch",
    "dispatch_enabled",
    "explain",
    "gptq",
    "hessian",
    "iteration",
    "load",
    "matmul",
    "matmul_swiglu",
    "pack",
    "pack_gate_up",
    "quantize",
    "reset_stats",
    "rounded",
    "save",
    "set_batch_invariant",
    "set_dispatch",
    "stats",
    "stats_by_shape",
    "tune",
    "unpack",
    "warmup",
]

# These come when they are asked for, so that computing needs nothing that reads files.
_LATER = {
    "load": "marlin_jit.formats.packed",
    "save": "marlin_jit.formats.packed",
    "tune": "marlin_jit.autotune",
    "warmup": "marlin_jit.ahead",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
