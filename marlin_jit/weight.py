"""The two kinds of quantized weight: plain codes, and the packed Marlin form.

Both are frozen dataclasses over NumPy or CuPy arrays, checked once when they are made; code that receives one
relies on it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from marlin_jit import layout
from marlin_jit._array import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Array,
    as_dtype,
    as_integer,
    is_device_array,
    namespace,
    on_device,
    to_device,
    to_host,
)
from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError

_Weight = TypeVar("_Weight", "QuantWeight", "MarlinWeight")

SCALE_DTYPES = (FLOAT16, BFLOAT16)
"""What scales may be stored as."""
MAX_ZERO_POINT = 16
"""Largest integer zero point: 4 bits, plus the 16 that decoders of GPTQ v1 files can produce."""
_QUANT_ARRAYS = ("q", "scale", "zero", "g_idx", "frac4", "sign_bit")
"""All arrays that a QuantWeight is made of."""


@dataclass(frozen=True, eq=False)
class QuantWeight:
    """A 4-bit weight as plain codes: ``W[k, n] = q[k, n]*scale[g, n] + zero[g, n]``.

    Parameters
    ----------
    q : uint8 array [K, N]
        Codes 0..15.
    scale : float16 or bfloat16 array [G, N]
        Finite, of any sign; 0 is allowed.
    zero : array [G, N] or None
        The value of code 0, as the scale's dtype or float32. None means symmetric: ``zero = -8*scale``.
    group_size : int
        Rows a group: any divisor of K, or -1 for one group a column (which ``group_size == K`` is turned
        into).
    g_idx : int32 array [K], optional
        Row k belongs to group ``g_idx[k]`` (activation order). Without it the group is ``k // group_size``.
    frac4 : uint8 array [K, N], optional
        0..15: the 4-bit fraction of the real-valued code, a rounding channel. At most one of the two.
    sign_bit : uint8 or bool array [K, N], optional
        1 where the real-valued code is below `q`, else 0: the other kind of rounding channel.

    Attributes
    ----------
    delta : float32 array [G, N] or None
        ``zero + 8*scale``, so that ``W = (q - 8)*scale + delta``; None for a symmetric weight.

    Raises
    ------
    DTypeError, ShapeError, ValueRangeError, DeviceError
        Naming the array, what was given and what is accepted.

    Notes
    -----
    Arrays are kept, not copied, unless they are not contiguous (or, on a GPU, not on 16-byte boundaries).

    `q` are the nearest codes, with a rounding channel or without: it changes products within
    :func:`marlin_jit.iteration` alone. :mod:`marlin_jit.rounding` says how.
    """

    q: Array
    scale: Array
    zero: Array | None
    group_size: int
    g_idx: Array | None = None
    frac4: Array | None = None
    sign_bit: Array | None = None
    delta: Array | None = field(default=None, init=False, repr=False)

    # NumPy and CuPy both leave `x @ w` to w.__rmatmul__ when this is None.
    __array_ufunc__: ClassVar[None] = None

    def __post_init__(self) -> None:
        xp = namespace(*(getattr(self, name) for name in _QUANT_ARRAYS))
        _check_array("q", self.q, (np.dtype(np.uint8),), 2)
        _check_array("scale", self.scale, SCALE_DTYPES, 2)
        K, N = self.q.shape
        if not K or not N:
            raise ShapeError(f"q is empty: its shape is {self.q.shape}")
        groups = self.scale.shape[0]
        size = _check_group_size(self.group_size)
        if self.g_idx is None:
            size = -1 if size == K else size
            if size != -1 and K % size:
                raise ShapeError(f"group size {size} does not divide K = {K} (the rows of q)")
            groups = layout.group_count(K, size)
        elif groups == 1:
            size = -1
        elif size == -1 or not groups:
            raise ShapeError(f"group size {size} with g_idx does not fit scale of shape {self.scale.shape}")
        _check_shape("scale", self.scale, (groups, N), f"[G, N] for q {self.q.shape} and group size {size}")
        if self.zero is not None:
            _check_array("zero", self.zero, (self.scale.dtype, FLOAT32), 2)
            _check_shape("zero", self.zero, (groups, N), "the shape of scale")
        if self.g_idx is not None:
            _check_array("g_idx", self.g_idx, (np.dtype(np.int32),), 1)
            _check_shape("g_idx", self.g_idx, (K,), "[K]")
        if self.frac4 is not None and self.sign_bit is not None:
            raise ValueRangeError("a weight carries one rounding channel, frac4 or sign_bit, not both")
        for name, array, dtypes in (
            ("frac4", self.frac4, (np.dtype(np.uint8),)),
            ("sign_bit", self.sign_bit, (np.dtype(np.uint8), np.dtype(np.bool_))),
        ):
            if array is not None:
                _check_array(name, array, dtypes, 2)
                _check_shape(name, array, (K, N), "the shape of q")
        with on_device(self.q):
            for name in _QUANT_ARRAYS:
                _keep_as_kernels_read(self, name)
            if self.zero is not None:
                # Made here, where the check below waits for the device: every stream finds it ready.
                with np.errstate(over="ignore", invalid="ignore"):
                    delta = self.zero.astype(np.float32) + np.float32(8) * self.scale.astype(np.float32)
                object.__setattr__(self, "delta", delta)
            _check_values(
                xp,
                ("q", self.q, lambda a: a <= 15, "outside 0..15"),
                ("scale", self.scale, xp.isfinite, "NaN or infinite"),
                ("zero", self.zero, xp.isfinite, "NaN or infinite"),
                ("g_idx", self.g_idx, lambda a: (a >= 0) & (a < groups), f"outside the {groups} groups"),
                ("frac4", self.frac4, lambda a: a <= 15, "outside 0..15"),
                ("sign_bit", self.sign_bit, lambda a: a <= 1, "neither 0 nor 1"),
            )
        object.__setattr__(self, "group_size", size)
        if groups == 1:
            object.__setattr__(self, "g_idx", None)  # all rows are in group 0

    @classmethod
    def from_zero_points(
        cls, q: Array, scale: Array, zero_point: Array, group_size: int, g_idx: Array | None = None
    ) -> QuantWeight:
        """Make a weight from integer zero points: ``W = (q - zero_point)*scale``.

        Parameters
        ----------
        q, scale, group_size, g_idx
            As for the class.
        zero_point : integer array [G, N]
            0..16. Where all are 8 the weight becomes symmetric.

        Notes
        -----
        ``zero = -zero_point*scale`` is stored as float32, where the product (11 + 5 bits) is exact.
        """
        xp = namespace(q, scale, zero_point, g_idx)
        weight = cls(q, scale, None, group_size, g_idx)
        if zero_point is None:
            raise DTypeError("zero_point must be an integer array, got None; QuantWeight() takes no zeros")
        if zero_point.dtype.kind not in "iu":
            raise DTypeError(
                f"zero_point must be an integer array, got {zero_point.dtype}; QuantWeight() takes real zeros"
            )
        _check_shape("zero_point", zero_point, scale.shape, "the shape of scale")
        with on_device(scale):
            low, high = 0, MAX_ZERO_POINT
            _check_values(
                xp, ("zero_point", zero_point, lambda a: (a >= low) & (a <= high), f"outside {low}..{high}")
            )
            if bool((zero_point == 8).all()):
                return weight
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is reported below
                zero = -zero_point.astype(np.float32) * scale.astype(np.float32)
        return replace(weight, zero=zero)

    def __repr__(self) -> str:
        carried = "" if self.rounding is None else f", {self.rounding}"
        return _summary(self, self.q, self.g_idx is not None, carried)

    def __rmatmul__(self, x: Array) -> Array:
        """``x @ w``: see :func:`marlin_jit.dispatch.matmul`."""
        from marlin_jit.dispatch import matmul

        return matmul(x, self)

    @property
    def shape(self) -> tuple[int, int]:
        """Logical shape (K, N)."""
        return (int(self.q.shape[0]), int(self.q.shape[1]))

    @property
    def K(self) -> int:
        """Input features (rows)."""
        return self.shape[0]

    @property
    def N(self) -> int:
        """Output features (columns)."""
        return self.shape[1]

    @property
    def groups(self) -> int:
        """Number of scale rows G."""
        return int(self.scale.shape[0])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the scales, which is that of the weight."""
        dtype: np.dtype[Any] = self.scale.dtype
        return dtype

    @property
    def symmetric(self) -> bool:
        """Whether ``zero`` is ``-8*scale`` and not stored."""
        return self.zero is None

    @property
    def rounding(self) -> str | None:
        """Name of the rounding channel, ``"frac4"`` or ``"sign_bit"``; None without one."""
        if self.frac4 is not None:
            return "frac4"
        return None if self.sign_bit is None else "sign_bit"

    def without_rounding(self) -> QuantWeight:
        """Return this weight without its rounding channel (itself if it has none)."""
        return self if self.rounding is None else replace(self, frac4=None, sign_bit=None)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return _nbytes(*(getattr(self, name) for name in _QUANT_ARRAYS))

    def to_device(self) -> QuantWeight:
        """Return this weight with CuPy arrays on the current device (itself if it is on a device already)."""
        return _moved(self, _QUANT_ARRAYS, to_device)

    def to_host(self) -> QuantWeight:
        """Return this weight with NumPy arrays (itself if it has them already)."""
        return _moved(self, _QUANT_ARRAYS, to_host)


@dataclass(frozen=True, eq=False)
class MarlinWeight:
    """A 4-bit weight in the Marlin format: ``W[k, n] = (q - 8)*scale[g, n] + delta[g, n]``.

    Parameters
    ----------
    B : int32 array [Kp/16, 2*Np]
        The codes in the order of :mod:`marlin_jit.layout`.
    scales : float16 or bfloat16 array [G, Np]
        In the permuted order of the format.
    delta : float32 array [G, Np] or None
        ``zero + 8*scale``, permuted like the scales; None for a symmetric weight.
    shape : (int, int)
        Logical shape (K, N). The padded shape (Kp, Np) is :func:`marlin_jit.layout.padded_shape`; the weights
        of the pad are exactly zero (code 8, and scale and delta 0 outside the real groups and columns).
    group_size : int
        32, 64, 128, or -1 for one group a column (which ``group_size == K`` is turned into). G is
        Kp/group_size, or 1.
    perm : int32 array [K], optional
        Packed row i holds source row ``perm[i]`` (activation order): the product is ``x[..., perm] @
        packed``.

    Attributes
    ----------
    delta16 : array [G, Np] or None
        `delta` rounded to the dtype of the scales, as kernels read it.
    points16 : array [G, Np] or None
        Where every zero point z is an integer (``delta = (8 - z)*scale``, z in 0..16): -(1024 + z) in float16
        or -(128 + z) in bfloat16, which kernels add to the bits of a code. None for other weights.
    fp16_cache : array [K, N] or None
        The dequantized weight, rows in source order, after :meth:`cache_fp16`.

    Raises
    ------
    DTypeError, ShapeError, ValueRangeError, DeviceError
        Naming the array, what was given and what is accepted.
    """

    B: Array
    scales: Array
    delta: Array | None
    shape: tuple[int, int]
    group_size: int
    perm: Array | None = None
    delta16: Array | None = field(default=None, init=False, repr=False)
    points16: Array | None = field(default=None, init=False, repr=False)
    fp16_cache: Array | None = field(default=None, init=False, repr=False)
    repeats: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # marlin_jit.repeat's

    # NumPy and CuPy both leave `x @ w` to w.__rmatmul__ when this is None.
    __array_ufunc__: ClassVar[None] = None

    def __post_init__(self) -> None:
        xp = namespace(self.B, self.scales, self.delta, self.perm)
        K, N = _check_logical_shape(self.shape)
        size = _check_group_size(self.group_size)
        size = -1 if size == K else size
        if size not in layout.GROUP_SIZES:
            raise ShapeError(f"the Marlin format holds group sizes {layout.GROUP_SIZES}, not {size}")
        if size != -1 and K % size:
            raise ShapeError(f"group size {size} does not divide K = {K}")
        Kp, Np = layout.padded_shape(K, N, size)
        groups = layout.group_count(Kp, size)
        padded = f"for shape {(K, N)} padded to {(Kp, Np)}"
        _check_array("B", self.B, (np.dtype(np.int32),), 2)
        _check_shape("B", self.B, (Kp // layout.TILE_K, 2 * Np), f"[Kp/16, 2*Np] {padded}")
        _check_array("scales", self.scales, SCALE_DTYPES, 2)
        _check_shape("scales", self.scales, (groups, Np), f"[G, Np] {padded} and group size {size}")
        if self.delta is not None:
            _check_array("delta", self.delta, (FLOAT32,), 2)
            _check_shape("delta", self.delta, (groups, Np), "the shape of scales")
        if self.perm is not None:
            _check_array("perm", self.perm, (np.dtype(np.int32),), 1)
            _check_shape("perm", self.perm, (K,), "[K]")
        with on_device(self.B):
            for name in ("B", "scales", "delta", "perm"):
                _keep_as_kernels_read(self, name)
            if self.delta is not None:
                # Made here, where the check below waits for the device: every stream finds it ready.
                with np.errstate(over="ignore", invalid="ignore"):
                    object.__setattr__(self, "delta16", self.delta.astype(self.scales.dtype))
                object.__setattr__(self, "points16", _points16(self.scales, self.delta))
            in_order = None if self.perm is None else xp.sort(self.perm) == xp.arange(K, dtype=np.int32)
            _check_values(
                xp,
                ("scales", self.scales, xp.isfinite, "NaN or infinite"),
                ("delta", self.delta, xp.isfinite, "NaN or infinite"),
                ("delta (packed order)", self.delta16, xp.isfinite, f"too large for {self.scales.dtype}"),
                ("perm (sorted)", in_order, lambda a: a, f"not those of a permutation of 0..{K - 1}"),
            )
        object.__setattr__(self, "shape", (K, N))
        object.__setattr__(self, "group_size", size)

    def __repr__(self) -> str:
        cached = "" if self.fp16_cache is None else ", FP16 cache"
        return _summary(self, self.B, self.perm is not None, cached)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: all but addresses of this object's arrays."""
        return self.__dict__ | {"repeats": {}}

    def __rmatmul__(self, x: Array) -> Array:
        """``x @ w``: see :func:`marlin_jit.dispatch.matmul`."""
        from marlin_jit.dispatch import matmul

        return matmul(x, self)

    @property
    def K(self) -> int:
        """Input features (rows) of the logical weight."""
        return self.shape[0]

    @property
    def N(self) -> int:
        """Output features (columns) of the logical weight."""
        return self.shape[1]

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape (Kp, Np) that B holds."""
        return layout.padded_shape(self.K, self.N, self.group_size)

    @property
    def groups(self) -> int:
        """Number of scale rows G, those of the pad included."""
        return int(self.scales.shape[0])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the scales, which is that of the weight."""
        dtype: np.dtype[Any] = self.scales.dtype
        return dtype

    @property
    def symmetric(self) -> bool:
        """Whether there is no delta."""
        return self.delta is None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed arrays (without the FP16 cache)."""
        return _nbytes(self.B, self.scales, self.delta, self.perm)

    def astype(self, dtype: Any) -> MarlinWeight:
        """Return this weight with its scales rounded to another dtype.

        Where delta stands for an integer zero point, it is scaled with the scale: the zero point stays what
        it was, and what was exactly zero stays zero. A delta that stands for a real zero is kept.

        Parameters
        ----------
        dtype : float16 or bfloat16
            The same dtype returns the weight itself.

        Raises
        ------
        ValueRangeError
            A scale or delta that overflows the new dtype.
        """
        dtype = as_dtype(dtype)
        if dtype not in SCALE_DTYPES:
            raise DTypeError(f"a Marlin weight is float16 or bfloat16, not {dtype}")
        if dtype == self.dtype:
            return self
        xp = namespace(self.scales)
        with on_device(self.scales), np.errstate(over="ignore", under="ignore"):
            scales = self.scales.astype(np.float32).astype(dtype)
            delta = self.delta
            if delta is not None:
                old = self.scales.astype(np.float64)
                steps = delta.astype(np.float64) / xp.where(old == 0, np.nan, old)
                whole = (xp.abs(steps) <= MAX_ZERO_POINT) & (steps == xp.rint(steps))
                delta = xp.where(whole, (steps * scales.astype(np.float64)).astype(np.float32), delta)
        return replace(self, scales=scales, delta=delta)

    def to_device(self) -> MarlinWeight:
        """Return this weight with CuPy arrays on the current device (itself if it is on a device already)."""
        return _moved(self, ("B", "scales", "delta", "perm"), to_device)

    def to_host(self) -> MarlinWeight:
        """Return this weight with NumPy arrays (itself if it has them already)."""
        return _moved(self, ("B", "scales", "delta", "perm"), to_host)

    def cache_fp16(self) -> MarlinWeight:
        """Dequantize once and keep the result ([K, N], in :attr:`dtype`) in :attr:`fp16_cache`.

        It trades memory for speed. The cache belongs to this object: weights made from it start without.

        Returns
        -------
        MarlinWeight
            This weight, so that calls can be chained.
        """
        if self.fp16_cache is None:
            object.__setattr__(self, "fp16_cache", self._dense())
        return self

    def _dense(self) -> Array:
        """Dequantize; on a device by the kernel for it: one launch, no temporary arrays, the same bits."""
        if not is_device_array(self.B):
            from marlin_jit.pack import dequantize

            return dequantize(self)
        from marlin_jit import launch

        with on_device(self.B):
            dense = namespace(self.B).empty(self.shape, dtype=self.dtype)
            launch.dequantize(self, dense)
        return dense

    def drop_fp16(self) -> None:
        """Free what :meth:`cache_fp16` made."""
        object.__setattr__(self, "fp16_cache", None)


def zero_points_below_8(scales: Array, delta: Array) -> tuple[Array, Array]:
    """Return ``8 - z`` of integer zero points z, and where ``delta = (8 - z)*scale`` holds exactly.

    Scales and float32 deltas have any one shape and may hold what is not finite. Where a scale is 0 that
    holds for a delta of 0, with z = 8. The caller judges the range of z.
    """
    xp = namespace(scales)
    with np.errstate(all="ignore"):
        scale = scales.astype(np.float32)
        from_8 = delta / xp.where(scale == 0, np.float32(1), scale)
        from_8 = xp.rint(from_8, out=from_8)
        return from_8, scale * from_8 == delta  # exact: an 11-bit scale times 5 bits has no rounding


def packed_points_below_8(scales: Array, delta: Array) -> Array | None:
    """`zero_points_below_8` where all are integers that a packed weight may have, z in 0..16; else None."""
    from_8, holds = zero_points_below_8(scales, delta)
    return from_8 if bool((holds & (abs(from_8) <= 8)).all()) else None


def _points16(scales: Array, delta: Array) -> Array | None:
    """`MarlinWeight.points16` of a weight whose arrays may still hold what is not finite."""
    from_8 = packed_points_below_8(scales, delta)
    if from_8 is None:
        return None
    code_0 = 1024 if scales.dtype == FLOAT16 else 128  # the last place of either is 1
    points: Array = (from_8 - (code_0 + 8)).astype(scales.dtype)
    return points


def _check_array(name: str, array: Array, dtypes: tuple[Any, ...], ndim: int) -> None:
    if array.dtype not in dtypes:
        accepted = " or ".join(str(np.dtype(d)) for d in dict.fromkeys(dtypes))
        raise DTypeError(f"{name} must be {accepted}, got {array.dtype}")
    if array.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} dimension{'s'[: ndim > 1]}, got shape {array.shape}")


def _check_shape(name: str, array: Array, expected: tuple[int, ...], what: str) -> None:
    if array.shape != expected:
        raise ShapeError(f"{name} must have shape {expected}, {what}; got {array.shape}")


def _check_group_size(group_size: Any) -> int:
    size = as_integer("group_size", group_size)
    if size < 1 and size != -1:
        raise ShapeError(f"group_size must be positive, or -1 for one group a column; got {size}")
    return size


def _check_logical_shape(shape: Any) -> tuple[int, int]:
    try:
        K, N = (operator.index(n) for n in shape)
    except (TypeError, ValueError):
        raise ShapeError(f"shape must be two integers (K, N), got {shape!r}") from None
    if K < 1 or N < 1:
        raise ShapeError(f"shape must be positive, got {(K, N)}")
    return K, N


def _check_values(xp: Any, *checks: tuple[str, Array | None, Callable[[Array], Array], str]) -> None:
    """Check values of several arrays; on a device the answers come back together, in one synchronisation.

    Each check is (name, array or None, predicate that is true where a value is good, what bad values are).
    """
    present = [(name, array, good, what) for name, array, good, what in checks if array is not None]
    answers = xp.stack([_all_good(array, good) for _, array, good, _ in present]).tolist()
    for (name, array, good, what), fine in zip(present, answers, strict=True):
        if not fine:
            bad = np.argwhere(~to_host(good(array)))
            first = ", ".join(str(i) for i in bad[0])
            raise ValueRangeError(f"{name}: {len(bad)} of {array.size} values {what}, the first at [{first}]")


def _all_good(array: Array, good: Callable[[Array], Array]) -> Array:
    """Whether `good` holds for all of `array`, as an array without dimensions."""
    if array.dtype == np.uint8:
        return good(array.max())  # their only bound is above, and codes are large: no temporary array
    return good(array).all()


def _keep_as_kernels_read(weight: object, name: str) -> None:
    """Replace an array of a frozen weight by a copy where kernels cannot read it as it is.

    They take no strides, and read 16 bytes at a time from addresses that are multiples of 16.
    """
    array = getattr(weight, name)
    if array is None:
        return
    unaligned = is_device_array(array) and array.data.ptr % 16
    if unaligned or not array.flags.c_contiguous:
        object.__setattr__(weight, name, array.copy(order="C"))


def _summary(weight: QuantWeight | MarlinWeight, codes: Array, ordered: bool, carried: str = "") -> str:
    """One line about a weight; its arrays are not read."""
    K, N = weight.shape
    group = "one group a column" if weight.group_size == -1 else f"group size {weight.group_size}"
    kind = "symmetric" if weight.symmetric else "asymmetric"
    order = ", activation order" if ordered else ""
    place = f"device {codes.device.id}" if is_device_array(codes) else "host"
    return (
        f"{type(weight).__name__}({K} x {N}, {group}, {weight.dtype}, {kind}{order}, {place}, "
        f"{weight.nbytes:,} bytes{carried})"
    )


def _moved(weight: _Weight, names: tuple[str, ...], move: Callable[[Array], Array]) -> _Weight:
    """`weight` with all its arrays moved; itself if they are there already."""
    arrays = {name: getattr(weight, name) for name in names}
    moved: dict[str, Any] = {name: None if array is None else move(array) for name, array in arrays.items()}
    return weight if all(moved[n] is arrays[n] for n in names) else replace(weight, **moved)


def _nbytes(*arrays: Array | None) -> int:
    return sum(int(a.nbytes) for a in arrays if a is not None)
