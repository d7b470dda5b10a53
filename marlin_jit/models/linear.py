"""The products of a model: ``x @ W + bias``, whatever the weight is, and several of one x made one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

import marlin_jit as mj

from . import ops
from .eight_bit import doubled
from .ops import module_of

__all__ = ["GateUp", "Linear", "SideBySide"]


class Linear:
    """A linear layer.

    Parameters
    ----------
    name : str
        As in the model's files.
    weight : MarlinWeight or QuantWeight, or array [K, N]
    bias : array [N], optional
    eight_bit : bool
        The weight is one of `quantize_8bit`: it has 2K rows.

    Attributes
    ----------
    cached : float32 array [K, N] or None
        On NumPy, the dequantized weight after `cache_dense`.
    """

    def __init__(self, name: str, weight: Any, bias: Any = None, *, eight_bit: bool = False) -> None:
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
    def quantized(self) -> bool:
        """Whether the weight is in 4 bits, packed or plain."""
        return self.packed or isinstance(self.weight, mj.QuantWeight)

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
        if self.cached is not None or not self.quantized:
            y = self._sums(x)
            return self._rounded(y if self.bias is None else y + self.bias.astype(np.float32), x)
        return mj.matmul(doubled(x) if self.eight_bit else x, self.weight, bias=self.bias)

    def cache_dense(self) -> None:
        """Keep the weight as float32, on NumPy: the reference path would dequantize it at every product.

        The products stay the same to the order of float32 sums.
        """
        if self.cached is not None:
            return
        self.cached = self._dequantized()

    def _dequantized(self) -> Any:
        dense = self._float32()
        return dense[: self.K] + dense[self.K :] if self.eight_bit else dense

    def _float32(self) -> Any:
        """The weight as it is stored."""
        if not self.quantized:
            return np.ascontiguousarray(self.weight, dtype=np.float32)
        return mj.dequantize(self.weight, np.float32)

    def drop_dense(self) -> None:
        """Free what `cache_dense` made."""
        self.cached = None

    def _sums(self, x: Any) -> Any:
        """Multiply by the dense weight, float32 [rows of x, columns]."""
        weight = self.weight if self.cached is None else self.cached
        try:
            return x.reshape(-1, x.shape[-1]).astype(np.float32) @ weight.astype(np.float32, copy=False)
        except ImportError as error:  # CuPy's way to say that there is no cuBLAS
            raise mj.DeviceError(
                f"{self.name} is not packed, and multiplying by a dense weight on a GPU needs cuBLAS: pack "
                "it with marlin_jit.models.pack_model(model), or install cuBLAS with "
                '`pip install "cuda-toolkit[cublas]==12.*"` (13.* for CUDA 13)'
            ) from error

    def _rounded(self, y: Any, x: Any) -> Any:
        """Float32 [rows of x, N] as the product that `x` gets."""
        with np.errstate(over="ignore"):
            return y.astype(x.dtype).reshape(*x.shape[:-1], self.N)

    def __repr__(self) -> str:
        kind = "dense" if not self.quantized else "8-bit as 4-bit" if self.eight_bit else "4-bit"
        cached = "" if self.cached is None else ", cached"
        return f"<Linear {self.name}: {self.K} x {self.N}, {kind}{cached}>"


class _Joint(ABC):
    """Products of one x: a linear layer each, or one for all after `fuse`."""

    def __init__(self, *linears: Linear) -> None:
        self.linears = list(linears)

    def fuse(self) -> bool:
        """Join the weights if they can be; return whether they are joined now."""
        if len(self.linears) > 1 and self._joinable():
            cached = all(linear.cached is not None for linear in self.linears)
            self.linears = [self._joined("+".join(linear.name for linear in self.linears))]
            if cached:
                self.linears[0].cache_dense()
        return len(self.linears) == 1

    def _joinable(self) -> bool:
        """Whether weights are packed, and the same in all but their columns."""
        if not all(linear.packed for linear in self.linears):
            return False
        weights = [linear.weight for linear in self.linears]
        kinds = {(w.K, w.group_size, w.dtype, w.perm is None) for w in weights}  # 8-bit ones have twice the K
        if len(kinds) > 1:
            return False
        order = weights[0].perm
        return order is None or all(bool((w.perm == order).all()) for w in weights[1:])

    @abstractmethod
    def _joined(self, name: str) -> Linear:
        """One layer that gives what all of them give."""


class SideBySide(_Joint):
    """Products of one x, such as q, k and v: a linear layer each, or one for all after `fuse`.

    Attributes
    ----------
    linears : list of Linear
        Those that are multiplied by.
    sizes : tuple of int
        N of each product.
    """

    def __init__(self, *linears: Linear) -> None:
        super().__init__(*linears)
        self.sizes = tuple(linear.N for linear in linears)

    def __call__(self, x: Any) -> tuple[Any, ...]:
        """Return the products; after `fuse` they are columns of one array."""
        if len(self.linears) == len(self.sizes):
            return tuple(linear(x) for linear in self.linears)
        y = self.linears[0](x)
        ends = np.cumsum(self.sizes).tolist()
        return tuple(y[..., end - size : end] for size, end in zip(self.sizes, ends, strict=True))

    def _joined(self, name: str) -> Linear:
        weight = mj.concatenate([linear.weight for linear in self.linears])
        bias = None
        if any(linear.bias is not None for linear in self.linears):
            xp = module_of(weight.B)
            parts = [xp.zeros(p.N, weight.dtype) if p.bias is None else p.bias for p in self.linears]
            bias = xp.concatenate(parts)
        return Linear(name, weight, bias, eight_bit=self.linears[0].eight_bit)


class GateUp(_Joint):
    """``silu(gate(x)) * up(x)``: two linear layers, or one after `fuse`.

    Attributes
    ----------
    linears : list of Linear
        Those that are multiplied by.
    """

    def __init__(self, gate: Linear, up: Linear) -> None:
        super().__init__(gate, up)

    def __call__(self, x: Any) -> Any:
        """Return the activations [..., N]."""
        if len(self.linears) == 1:
            return self.linears[0](x)
        return ops.swiglu(*(linear(x) for linear in self.linears))

    def _joinable(self) -> bool:
        return super()._joinable() and all(linear.bias is None for linear in self.linears)

    def _joined(self, name: str) -> Linear:
        gate, up = self.linears
        return _Gated(name, mj.pack_gate_up(gate.weight, up.weight), eight_bit=gate.eight_bit)


class _Gated(Linear):
    """Gate and up in one weight, activated in the product itself."""

    @property
    def packed(self) -> bool:
        return True

    @property
    def K(self) -> int:
        return int(self.weight.K) // (2 if self.eight_bit else 1)

    @property
    def N(self) -> int:
        return int(self.weight.N)

    def __call__(self, x: Any) -> Any:
        if self.cached is None:
            return mj.matmul_swiglu(doubled(x) if self.eight_bit else x, self.weight)
        y = self._sums(x)
        return self._rounded(ops.swiglu(y[:, : self.N], y[:, self.N :]), x)

    def _float32(self) -> Any:
        return np.concatenate(self.weight.dequantize(np.float32), axis=1)
