"""Several weights that multiply the same activations, as one: side by side, or gate and up for SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from marlin_jit import layout
from marlin_jit._array import Array, as_integer, namespace, on_device
from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError
from marlin_jit.pack import dequantize, pack, pad_groups, unpack
from marlin_jit.weight import MarlinWeight, QuantWeight

_Weight = TypeVar("_Weight", MarlinWeight, QuantWeight)


def concatenate(weights: Sequence[_Weight]) -> _Weight:
    """Put weights side by side: ``x @ concatenate([a, b])`` is ``x @ a`` followed by ``x @ b``.

    Parameters
    ----------
    weights : sequence of MarlinWeight or of QuantWeight
        All of one kind, with the same K, group size, dtype, activation order and device. If any has zero
        points, the result has.

    Returns
    -------
    MarlinWeight or QuantWeight
        [K, sum of the N], like `weights`; codes and scales are moved, never recomputed.

    Raises
    ------
    DTypeError, ShapeError, DeviceError
        No weights, or weights that differ in more than N.
    ValueRangeError
        A weight with a rounding channel.
    """
    weights = _listed(weights)
    _check_alike(weights)
    if isinstance(weights[0], MarlinWeight):
        return _packed(weights, _side_by_side)
    with on_device(weights[0].q):
        zero = None
        if not all(w.symmetric for w in weights):
            zero = _side_by_side([_zero(w) for w in weights])
    return _plain(weights, _side_by_side, zero)


@dataclass(frozen=True, eq=False)
class GateUpWeight:
    """The two weights [K, N] of a SwiGLU layer in one, for `matmul_swiglu`; made by `pack_gate_up`.

    Parameters
    ----------
    packed : MarlinWeight
        [K, 2*N'] where N' is N rounded up to 8: eight columns of gate and eight of up in turn, as
        :func:`marlin_jit.layout.interleave_gate_up` puts them; columns from N on are zero.
    N : int
        Output features.

    Raises
    ------
    DTypeError, ShapeError
        No such weight, or an N that does not fit its columns.
    """

    packed: MarlinWeight
    N: int

    # NumPy and CuPy both leave `x @ w` to w.__rmatmul__ when this is None.
    __array_ufunc__: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not isinstance(self.packed, MarlinWeight):
            raise DTypeError(f"packed must be a MarlinWeight, got {type(self.packed).__name__}")
        object.__setattr__(self, "N", as_integer("N", self.N))
        columns, wanted = self.packed.N, 2 * _whole_blocks(self.N)
        if columns != wanted:
            raise ShapeError(f"gate and up of N = {self.N} have {wanted} columns in all, not {columns}")

    @property
    def K(self) -> int:
        """Input features."""
        return self.packed.K

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the weight and its activations."""
        return self.packed.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (K, N) of gate, and of up."""
        return self.K, self.N

    @property
    def nbytes(self) -> int:
        """Bytes of the packed arrays."""
        return self.packed.nbytes

    def __rmatmul__(self, x: Array) -> Array:
        raise DTypeError("x @ w is no product of gate and up: call marlin_jit.matmul_swiglu(x, w)")

    def cache_fp16(self) -> GateUpWeight:
        """Keep both weights dense, for the path ``fp16_cache``: see :meth:`MarlinWeight.cache_fp16`."""
        self.packed.cache_fp16()
        return self

    def drop_fp16(self) -> None:
        """Free what :meth:`cache_fp16` made."""
        self.packed.drop_fp16()

    def dequantize(self, dtype: Any = None) -> tuple[Array, Array]:
        """Return gate and up as dense arrays [K, N]: see :func:`marlin_jit.dequantize`."""
        gate, up = layout.split_gate_up(dequantize(self.packed, dtype))
        return gate[:, : self.N], up[:, : self.N]

    def to_device(self) -> GateUpWeight:
        """Return this weight with CuPy arrays on the current device."""
        return replace(self, packed=self.packed.to_device())

    def to_host(self) -> GateUpWeight:
        """Return this weight with NumPy arrays."""
        return replace(self, packed=self.packed.to_host())


def pack_gate_up(gate: _Weight, up: _Weight) -> GateUpWeight:
    """Pack the gate and up projections of a SwiGLU layer for `matmul_swiglu`.

    Parameters
    ----------
    gate, up : MarlinWeight or QuantWeight [K, N]
        Of one kind, with the same shape, group size (32, 64, 128 or -1), dtype, activation order and device.

    Raises
    ------
    DTypeError, ShapeError, DeviceError
        Weights that differ in these, or a group size that the format cannot hold.
    ValueRangeError
        A weight with a rounding channel.
    """
    pair = [gate, up]
    _check_alike(pair)
    if gate.N != up.N:
        raise ShapeError(f"gate has N = {gate.N} and up N = {up.N}; they must be equal")
    return GateUpWeight(_packed(pair, _interleaved), gate.N)


def _whole_blocks(N: int) -> int:
    return -(-N // layout.GATE_UP) * layout.GATE_UP


def _side_by_side(arrays: list[Array]) -> Array:
    return namespace(arrays[0]).concatenate(arrays, axis=1)


def _interleaved(arrays: list[Array]) -> Array:
    xp = namespace(arrays[0])
    N = arrays[0].shape[1]
    # Columns of the pad have scale and zero 0, so their codes mean nothing.
    pad = ((0, 0), (0, _whole_blocks(N) - N))
    gate, up = (xp.pad(a, pad) for a in arrays)
    return layout.interleave_gate_up(gate, up)


_Join = Callable[[list[Array]], Array]


def _plain(weights: Sequence[QuantWeight], join: _Join, zero: Array | None) -> QuantWeight:
    """Join codes and scales."""
    with on_device(weights[0].q):
        codes, scales = join([w.q for w in weights]), join([w.scale for w in weights])
    return QuantWeight(codes, scales, zero, weights[0].group_size, weights[0].g_idx)


def _packed(weights: Sequence[MarlinWeight | QuantWeight], join: _Join) -> MarlinWeight:
    """Join and pack. Deltas are joined as they are: made anew from zeros they could move by a last place."""
    packed = pack(_plain([unpack(w) if isinstance(w, MarlinWeight) else w for w in weights], join, None))
    if all(w.symmetric for w in weights):
        return packed
    with on_device(packed.B):
        delta = join([_delta(w) for w in weights])
        delta = layout.permute_scales(pad_groups(namespace(delta), delta, *packed.scales.shape))
    return replace(packed, delta=delta)


def _delta(weight: MarlinWeight | QuantWeight) -> Array:
    """Deltas [G, N] in plain order."""
    if isinstance(weight, MarlinWeight):
        groups = layout.group_count(weight.K, weight.group_size)
        kept = weight.scales if weight.delta is None else weight.delta
        delta = layout.permute_scales(kept)[:groups, : weight.N]
    else:
        delta = weight.scale if weight.delta is None else weight.delta
    return namespace(delta).zeros(delta.shape, np.float32) if weight.delta is None else delta


def _zero(weight: QuantWeight) -> Array:
    """The zeros in float32, which holds -8*scale exactly."""
    if weight.zero is None:
        return np.float32(-8) * weight.scale.astype(np.float32)
    return weight.zero.astype(np.float32)


def _listed(weights: Sequence[_Weight]) -> list[_Weight]:
    try:
        return list(weights)
    except TypeError:
        name = type(weights).__name__
        raise DTypeError(f"expected a sequence of weights, got {name}: concatenate([a, b])") from None


def _check_alike(weights: Sequence[Any]) -> None:
    if not weights:
        raise ShapeError("no weights were given")
    for w in weights:
        if not isinstance(w, (MarlinWeight, QuantWeight)) or type(w) is not type(weights[0]):
            names = ", ".join(type(w).__name__ for w in weights)
            raise DTypeError(f"expected all MarlinWeight or all QuantWeight, got {names}")
    namespace(*(_codes(w) for w in weights))  # raises where they are not all on one side and device
    first = weights[0]
    for i, w in enumerate(weights[1:], 1):
        for name in ("K", "group_size"):
            if getattr(w, name) != getattr(first, name):
                raise ShapeError(f"weight 0 has {name} {getattr(first, name)}, weight {i} {getattr(w, name)}")
        if w.dtype != first.dtype:
            raise DTypeError(f"weight 0 is {first.dtype}, weight {i} {w.dtype}; they must be of one dtype")
        if not _same_order(first, w):
            raise ShapeError(f"weights 0 and {i} have their rows in different activation orders")
    for i, w in enumerate(weights):
        if isinstance(w, QuantWeight) and w.rounding is not None:
            raise ValueRangeError(
                f"weight {i} carries {w.rounding}, which would be lost: join w.without_rounding() or "
                "marlin_jit.rounded(w, iteration)"
            )


def _codes(weight: MarlinWeight | QuantWeight) -> Array:
    return weight.B if isinstance(weight, MarlinWeight) else weight.q


def _same_order(a: MarlinWeight | QuantWeight, b: MarlinWeight | QuantWeight) -> bool:
    orders = [w.perm if isinstance(w, MarlinWeight) else w.g_idx for w in (a, b)]
    if orders[0] is None or orders[1] is None:
        return orders[0] is orders[1]
    with on_device(_codes(a)):
        return bool((orders[0] == orders[1]).all())
