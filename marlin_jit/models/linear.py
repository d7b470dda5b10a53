"""One product of a model, ``x @ W + bias``, whatever its weight is: packed in 4 or 8 bits, or dense."""

from __future__ import annotations

from typing import Any

import numpy as np

import marlin_jit as mj

from .eight_bit import doubled
from .ops import is_numpy

__all__ = ["Linear"]


class Linear:
    """A linear layer.

    Parameters
    ----------
    name : str
        As in the model's files.
    weight : MarlinWeight, or array [K, N]
    bias : array [N], optional
    eight_bit : bool
        The weight is one of `quantize_8bit`: it has 2K rows.

    Attributes
    ----------
    cached : float32 array [K, N] or None
        On NumPy, the dequantized weight after `cache_dense`.
    """

    def __init__(
        self, name: str, weight: mj.MarlinWeight | Any, bias: Any = None, *, eight_bit: bool = False
    ) -> None:
        self.name = name
        self.weight = weight
        self.bias = bias
        self.eight_bit = eight_bit
        self.cached: Any = None

    @property
    def packed(self) -> bool:
        """Whether the weight is a packed one."""
        return isinstance(self.weight, mj.MarlinWeight)

    @property
    def K(self) -> int:
        """Input features."""
        return int(self.weight.shape[0]) // (2 if self.eight_bit else 1)

    @property
    def N(self) -> int:
        """Output features."""
        return int(self.weight.shape[1])

    def __call__(self, x: Any) -> Any:
        """Return the product: [..., K] to [..., N], of `x`'s dtype."""
        if self.cached is not None:
            return self._dense(x, self.cached)
        if not self.packed:
            return self._dense(x, self.weight)
        return mj.matmul(doubled(x) if self.eight_bit else x, self.weight, bias=self.bias)

    def cache_dense(self) -> None:
        """Keep the weight as float32, on NumPy: the reference path would dequantize it at every product.

        The products stay the same to the order of float32 sums.
        """
        if self.cached is not None:
            return
        if self.packed:
            dense = mj.dequantize(self.weight, np.float32)
            self.cached = dense[: self.K] + dense[self.K :] if self.eight_bit else dense
        else:
            self.cached = np.ascontiguousarray(self.weight, dtype=np.float32)

    def drop_dense(self) -> None:
        """Free what `cache_dense` made."""
        self.cached = None

    def _dense(self, x: Any, weight: Any) -> Any:
        """Multiply by a dense weight in float32 and round once."""
        try:
            y = x.reshape(-1, x.shape[-1]).astype(np.float32) @ weight.astype(np.float32, copy=False)
        except ImportError as error:  # CuPy's way to say that there is no cuBLAS
            raise mj.DeviceError(
                f"{self.name} is not packed, and multiplying by a dense weight on a GPU needs cuBLAS: pack "
                "it with marlin_jit.models.pack_model(model), or install cuBLAS with "
                '`pip install "cuda-toolkit[cublas]==12.*"` (13.* for CUDA 13)'
            ) from error
        if self.bias is not None:
            y += self.bias.astype(np.float32)
        with np.errstate(over="ignore"):
            return y.astype(x.dtype).reshape(*x.shape[:-1], self.N)

    def __repr__(self) -> str:
        kind = "dense" if not self.packed else "8-bit as 4-bit" if self.eight_bit else "4-bit"
        cached = "" if self.cached is None else ", cached"
        return f"<Linear {self.name}: {self.K} x {self.N}, {kind}{cached}>"


def module_of(array: Any) -> Any:
    """Return numpy or cupy, whichever `array` belongs to."""
    if is_numpy(array):
        return np
    import cupy

    return cupy
