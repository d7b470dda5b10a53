"""The products of a model: ``x @ W + bias``, whatever the weight is, and several of one x made one."""

from __future__ import annotations

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
        if self.cached is not None:
            return self._dense(x, self.cached)
        if not self.quantized:
            return self._dense(x, self.weight)
        return mj.matmul(doubled(x) if self.eight_bit else x, self.weight, bias=self.bias)

    def cache_dense(self) -> None:
        """Keep the weight as float32, on NumPy: the reference path would dequantize it at every product.

        The products stay the same to the order of float32 sums.
        """
        if self.cached is not None:
            return
        self.cached = self._dequantized()

    def _dequantized(self) -> Any:
        if not self.quantized:
            return np.ascontiguousarray(self.weight, dtype=np.float32)
        dense = mj.dequantize(self.weight, np.float32)
        return dense[: self.K] + dense[self.K :] if self.eight_bit else dense

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
        kind = "dense" if not self.quantized else "8-bit as 4-bit" if self.eight_bit else "4-bit"
        cached = "" if self.cached is None else ", cached"
        return f"<Linear {self.name}: {self.K} x {self.N}, {kind}{cached}>"


class SideBySide:
    """Products of one x, such as q, k and v: a linear layer each, or one for all after `fuse`.

    Attributes
    ----------
    linears : list of Linear
        Those that are multiplied by.
    sizes : tuple of int
        N of each product.
    """

    def __init__(self, *linears: Linear) -> None:
        self.linears = list(linears)
        self.sizes = tuple(linear.N for linear in linears)

    def __call__(self, x: Any) -> tuple[Any, ...]:
        """Return the products; after `fuse` they are columns of one array."""
        if len(self.linears) == len(self.sizes):
            return tuple(linear(x) for linear in self.linears)
        y = self.linears[0](x)
        ends = np.cumsum(self.sizes).tolist()
        return tuple(y[..., end - size : end] for size, end in zip(self.sizes, ends, strict=True))

    def fuse(self) -> bool:
        """Join the weights if they are packed alike; return whether they are joined now."""
        if len(self.linears) == 1 or not _alike(self.linears):
            return len(self.linears) == 1
        cached = all(linear.cached is not None for linear in self.linears)
        weight = mj.concatenate([linear.weight for linear in self.linears])
        bias = None
        if any(linear.bias is not None for linear in self.linears):
            xp = module_of(weight.B)
            parts = [xp.zeros(p.N, weight.dtype) if p.bias is None else p.bias for p in self.linears]
            bias = xp.concatenate(parts)
        names = "+".join(linear.name for linear in self.linears)
        self.linears = [Linear(names, weight, bias, eight_bit=self.linears[0].eight_bit)]
        if cached:
            self.linears[0].cache_dense()
        return True


class GateUp:
    """``silu(gate(x)) * up(x)``: two linear layers, or one after `fuse`.

    Attributes
    ----------
    linears : list of Linear
        Those that are multiplied by.
    """

    def __init__(self, gate: Linear, up: Linear) -> None:
        self.linears = [gate, up]

    def __call__(self, x: Any) -> Any:
        """Return the activations [..., N]."""
        if len(self.linears) == 1:
            return self.linears[0](x)
        return ops.swiglu(*(linear(x) for linear in self.linears))

    def fuse(self) -> bool:
        """Join the weights if they are packed alike and have no bias; return whether they are joined now."""
        if len(self.linears) == 1:
            return True
        if not _alike(self.linears) or any(linear.bias is not None for linear in self.linears):
            return False
        gate, up = self.linears
        cached = gate.cached is not None and up.cached is not None
        weight = mj.pack_gate_up(gate.weight, up.weight)
        self.linears = [_Gated(f"{gate.name}+{up.name}", weight, eight_bit=gate.eight_bit)]
        if cached:
            self.linears[0].cache_dense()
        return True


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
        y = x.reshape(-1, self.K).astype(np.float32) @ self.cached
        activated = ops.swiglu(y[:, : self.N], y[:, self.N :])
        with np.errstate(over="ignore"):
            return activated.astype(x.dtype).reshape(*x.shape[:-1], self.N)

    def _dequantized(self) -> Any:
        dense = np.concatenate(self.weight.dequantize(np.float32), axis=1)
        return dense[: self.K] + dense[self.K :] if self.eight_bit else dense


def _alike(linears: list[Linear]) -> bool:
    """Whether weights can be joined: packed, and the same in all but their columns."""
    if not all(linear.packed for linear in linears):
        return False
    kinds = {(p.eight_bit, p.weight.group_size, p.weight.dtype, p.weight.perm is None) for p in linears}
    if len(kinds) > 1:
        return False
    orders = [linear.weight.perm for linear in linears]
    return orders[0] is None or all(bool((order == orders[0]).all()) for order in orders[1:])
