"""`matmul`, and the table that decides how it is done.

The table is `TABLE` below: paths in order, each with its gates. The first path whose gates all hold is taken;
`explain` shows every gate's answer. A path whose kernel is refused (by the compiler or by the driver, before
anything ran) is left for the next one, once and with a warning. Nothing else ever changes the path.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from marlin_jit import launch, layout, repeat, rounding, tuned
from marlin_jit._array import BFLOAT16, FLOAT32, Array, is_device_array, on_device
from marlin_jit._cupy import import_cupy
from marlin_jit._environment import value_of, zero_or_one
from marlin_jit.device import DeviceInfo, device_info, is_capturing, scratch
from marlin_jit.errors import CompileError, DeviceError, DTypeError, LaunchError, ShapeError, ValueRangeError
from marlin_jit.fused import GateUpWeight
from marlin_jit.launch import Matrix
from marlin_jit.pack import dequantize
from marlin_jit.plan import Limits, Plan, Problem, choose, choose_invariant, decode_max_rows
from marlin_jit.weight import SCALE_DTYPES, MarlinWeight, QuantWeight

logger = logging.getLogger(__name__)

Weight = MarlinWeight | QuantWeight

SWITCH = "MARLIN_JIT_USE_MARLIN"
"""Environment variable: 0 turns the Marlin paths off, 1 (the default) on."""


# ---- switches -------------------------------------------------------------------------------------------

_enabled: bool | None = None  # None: as the environment says
_enabled_here: ContextVar[bool | None] = ContextVar("marlin_jit_dispatch", default=None)


def set_dispatch(enabled: bool) -> None:
    """Turn the Marlin paths on or off for the whole process, over what `MARLIN_JIT_USE_MARLIN` says."""
    global _enabled
    _enabled = _switch(enabled)


@contextlib.contextmanager
def dispatch(enabled: bool) -> Iterator[None]:
    """Turn the Marlin paths on or off within a ``with`` block, in this thread (or task) alone."""
    token = _enabled_here.set(_switch(enabled))
    try:
        yield
    finally:
        _enabled_here.reset(token)


def _switch(enabled: bool, what: str = "dispatch") -> bool:
    if not isinstance(enabled, bool | np.bool_):
        raise DTypeError(f"{what} is switched by True or False, got {enabled!r}")
    return bool(enabled)


_batch_invariant_always = False


def set_batch_invariant(enabled: bool) -> None:
    """Let every product on a GPU take the path ``batch_invariant``, in the whole process, or no longer.

    A row of the result then has the same bits whatever the other rows are and however many. The weight is
    read and unpacked anew for every few rows, so products of many take longer: docs/dispatch.md says for how
    many, and what else to know. Where that path cannot be taken it is `native`, which is batch-invariant too.
    """
    global _batch_invariant_always
    _batch_invariant_always = _switch(enabled, "batch invariance")


def dispatch_enabled() -> bool:
    """Whether the Marlin paths may be taken here.

    Raises
    ------
    ValueRangeError
        The environment variable is neither 0 nor 1.
    """
    here = _enabled_here.get()
    if here is not None:
        return here
    if _enabled is not None:
        return _enabled
    return zero_or_one(SWITCH, value_of(SWITCH, "1"))


# ---- what was done --------------------------------------------------------------------------------------

_taken: dict[Taken, list[int]] = {}  # how often, in a list of one, which repeated calls hold on to
_refused: dict[tuple[Any, ...], str] = {}
_lock = threading.Lock()


class Taken(NamedTuple):
    """A path, and the product it was taken for."""

    path: str
    M: int
    N: int
    K: int
    group_size: int


def stats() -> dict[str, int]:
    """How often each path has been taken in this process since the last `reset_stats`."""
    counts: Counter[str] = Counter()
    for taken, count in stats_by_shape().items():
        counts[taken.path] += count
    return dict(counts)


def stats_by_shape() -> dict[Taken, int]:
    """How often each path has been taken for which product: keys are (path, M, N, K, group size).

    N is that of the weight: of gate and up together where `matmul_swiglu` was called.
    """
    with _lock:
        return {taken: count for taken, (count,) in _taken.items() if count}


def reset_stats() -> None:
    """Start counting anew. What was refused stays refused."""
    with _lock:
        for count in _taken.values():
            count[0] = 0


def _count_of(path: str, call: Call) -> list[int]:
    w = call.weight
    with _lock:
        return _taken.setdefault(Taken(path, call.rows, w.N, w.K, w.group_size), [0])


def _record(path: str, call: Call) -> None:
    w, count = call.weight, _count_of(path, call)
    with _lock:
        first = path not in _logged
        _logged.add(path)
        count[0] += 1
    if first:
        logger.info("first dispatch: %s, M=%d N=%d K=%d group=%d", path, call.rows, w.N, w.K, w.group_size)


_logged: set[str] = set()


# ---- a call ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One product, its arguments checked: what gates ask about and paths work on."""

    x: Array  # [..., K]
    weight: Weight
    bias: Array | None
    out: Array | None  # None: to be allocated by the path's caller
    rows: int
    device: DeviceInfo | None  # None: NumPy
    path: str | None = None  # the one path that the caller insists on
    gated: int = 0  # output columns of silu(gate) * up, whose columns the weight holds in turn; 0: of no such

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return self.gated or self.weight.N

    @cached_property
    def plan(self) -> Plan:
        """The fused kernel's plan."""
        return self._plan(asymmetric=not self.weight.symmetric)

    @property
    def plan_is_tuned(self) -> bool:
        """Whether that plan is one that `tune` kept, not the planner's own."""
        problem, limits = self._planned_for(asymmetric=not self.weight.symmetric)
        return self.plan != choose(problem, limits)

    @cached_property
    def symmetric_plan(self) -> Plan:
        """The symmetric kernel's plan, which the correction pair completes."""
        return self._plan(asymmetric=False)

    def _plan(self, *, asymmetric: bool) -> Plan:
        assert self.device is not None
        return tuned.plan_for(*self._planned_for(asymmetric=asymmetric), self.device.name)

    def _planned_for(self, *, asymmetric: bool) -> tuple[Problem, Limits]:
        assert isinstance(self.weight, MarlinWeight) and self.device is not None
        problem = launch.problem_of(self.rows, self.weight, asymmetric=asymmetric)
        return problem, launch.limits_of(self.device)

    @cached_property
    def iteration(self) -> rounding.Iteration | None:
        """Which iteration a weight with a rounding channel is rounded for; None where the mode is off."""
        return rounding.current()

    @property
    def rounds(self) -> bool:
        """Whether the weight carries a rounding channel."""
        return isinstance(self.weight, QuantWeight) and self.weight.rounding is not None

    @cached_property
    def x_aligned(self) -> Matrix:
        """Activations in packed row order, as the tiled kernels want them; copied to scratch only if need be.

        Rows start on 16-byte boundaries, one after another, and where K is no multiple of 8 zeros follow up
        to the next one.
        """
        columns, perm = self.weight.K, _perm(self.weight)
        rows = _as_rows(self.x, columns)
        if perm is not None:
            rows = rows or _copied("activations", self.x, columns)
            memory = _scratch_array("gathered activations", (self.rows, columns), self.x.dtype)
            gathered = _columns_of(memory, columns)
            launch.gather(rows, perm, gathered)
            return gathered
        if rows is None or rows.pointer % 16 or columns % 8 or (rows.stride % 8 and self.rows > 1):
            return _copied("activations", self.x, columns)
        return rows if _ascending(rows) else _copied("activations", self.x, columns)

    @cached_property
    def x_rows(self) -> Matrix:
        """Activations in packed row order, each row contiguous."""
        if _perm(self.weight) is not None:
            return self.x_aligned
        return _as_rows(self.x, self.weight.K) or _copied("activations", self.x, self.weight.K)


def _perm(weight: Weight) -> Array | None:
    return weight.perm if isinstance(weight, MarlinWeight) else None


def _as_rows(array: Array, columns: int) -> Matrix | None:
    """The array as contiguous rows at one stride, without a copy; None if its strides forbid it."""
    size = array.dtype.itemsize
    shape, strides = array.shape, array.strides
    if columns > 1 and strides[-1] != size:
        return None
    rows, stride = 1, 0
    for extent, step in zip(shape[-2::-1], strides[-2::-1], strict=True):
        if extent == 1:
            continue
        if rows == 1:
            stride = step
        elif step != rows * stride:
            return None
        rows *= extent
    if stride % size:
        return None
    return Matrix(array.data.ptr, stride // size, math.prod(shape[:-1]), columns)


def _ascending(matrix: Matrix) -> bool:
    """Whether each row begins after the one before it ends: not reversed or repeated, which cuBLAS and tensor
    maps do not take."""
    return matrix.rows <= 1 or matrix.stride >= matrix.columns


def _scratch_array(purpose: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Scratch memory as an array of 16-bit elements, each row filled up to whole 16-byte vectors."""
    shape = (*shape[:-1], launch.whole_vectors(shape[-1]))
    memory = scratch.get(purpose, 2 * math.prod(shape))
    return import_cupy().ndarray(shape, dtype=dtype, memptr=memory.data)


def _columns_of(array: Array, columns: int) -> Matrix:
    """The first columns of a contiguous array's rows."""
    return Matrix(array.data.ptr, array.shape[-1], math.prod(array.shape[:-1]), columns)


def _copied(purpose: str, array: Array, columns: int) -> Matrix:
    copy = _scratch_array(purpose, array.shape, array.dtype)
    copy[..., :columns] = array  # one elementwise copy, whatever the strides
    if columns < copy.shape[-1]:
        copy[..., columns:] = 0
    return _columns_of(copy, columns)


# ---- paths ----------------------------------------------------------------------------------------------

Gates = Iterator[tuple[str, bool]]


def _reference_gates(call: Call) -> Gates:
    yield "x is a NumPy array", call.device is None


def _reference(call: Call, out: Array) -> None:
    """Dequantize (the weight as this iteration has it), multiply and add in float32, round once."""
    w = call.weight
    if isinstance(w, QuantWeight) and call.rounds and call.iteration is not None:
        w = rounding.rounded(w, call.iteration.index, call.iteration.seed)
    x = call.x.astype(np.float32).reshape(call.rows, w.K)
    y = x @ dequantize(w, FLOAT32)
    if call.bias is not None:
        y += call.bias.astype(np.float32)
    if call.gated:
        gate, up = layout.split_gate_up(y)
        with np.errstate(over="ignore"):  # exp of what silu turns to zero
            y = (gate / (1 + np.exp(-gate)) * up)[:, : call.gated]
    with np.errstate(over="ignore"):
        out[...] = y.reshape(out.shape).astype(out.dtype)


def _batch_invariant_gates(call: Call) -> Gates:
    yield "batch invariance is asked for", call.path == "batch_invariant" or _batch_invariant_always
    yield from _common_gates(call)


def _batch_invariant(call: Call, out: Array) -> None:
    """A few rows at a time, all in the same way."""
    w = call.weight
    assert isinstance(w, MarlinWeight) and call.device is not None
    x, y, limits = call.x_aligned, _matrix(out), launch.limits_of(call.device)
    problem = launch.problem_of(call.rows, w, asymmetric=not w.symmetric)
    most = decode_max_rows(problem, limits)
    for first in range(0, call.rows, most):
        rows = min(most, call.rows - first)
        plan = choose_invariant(replace(problem, m=rows), limits)
        launch.marlin(plan, x.part(first, rows), w, call.bias, y.part(first, rows), gated=bool(call.gated))


def _fp16_cache_gates(call: Call) -> Gates:
    yield "x is a GPU array", call.device is not None
    yield "the weight carries an FP16 cache", getattr(call.weight, "fp16_cache", None) is not None
    yield "batch invariance is not asked for", not _batch_invariant_always
    yield "cuBLAS is installed", _cublas_there()


def _fp16_cache(call: Call, out: Array) -> None:
    from marlin_jit._cublas import matmul_dense

    assert isinstance(call.weight, MarlinWeight) and call.weight.fp16_cache is not None
    x = _as_rows(call.x, call.weight.K)
    if x is None or not _ascending(x):
        x = _copied("activations", call.x, call.weight.K)
    matmul_dense(x, call.weight.fp16_cache, _matrix(out))
    if call.bias is not None:
        out += call.bias


def _cublas_there() -> bool:
    from marlin_jit._cublas import available

    return available()


def _common_gates(call: Call) -> Gates:
    yield "x is a GPU array", call.device is not None
    yield "dispatch is enabled", dispatch_enabled()
    yield "the weight is packed", isinstance(call.weight, MarlinWeight)
    yield (
        "the device has compute capability 8.0 or more",
        call.device is not None and call.device.capability >= (8, 0),
    )


DENSE_MIN_M = 1024
"""Rows from which the path ``dense`` is taken by itself, on devices of compute capability 10."""


def _dense_gates(call: Call) -> Gates:
    named = call.path == "dense"
    major = call.device.capability[0] if call.device is not None else 0
    yield (
        "x has many rows, on a device of compute capability 10",
        named or (major == 10 and call.rows >= DENSE_MIN_M),
    )
    yield from _common_gates(call)
    yield "batch invariance is not asked for", not _batch_invariant_always
    yield "cuBLAS is installed", _cublas_there()


def _dense(call: Call, out: Array) -> None:
    """A number of columns at a time: as dense weights in scratch memory, then by cuBLAS."""
    from marlin_jit._cublas import matmul_dense

    w = call.weight
    assert isinstance(w, MarlinWeight)
    x, to, columns = call.x_aligned, _matrix(out), launch.dense_columns(w)
    for first in range(0, w.N, columns):
        there = min(columns, w.padded_shape[1] - first)
        dense = _scratch_array("dense weights", (there, w.padded_shape[0]), w.dtype)
        launch.dense_weights(w, first, dense)
        matmul_dense(x, dense, to.columns_from(first, columns), transposed=True)
    if call.bias is not None:
        out += call.bias


def _marlin_gates(call: Call) -> Gates:
    yield from _common_gates(call)
    yield "its kernel was not refused before", not _was_refused(call)


def _marlin(call: Call, out: Array) -> None:
    w = call.weight
    assert isinstance(w, MarlinWeight)
    prepared = launch.marlin(call.plan, call.x_aligned, w, call.bias, _matrix(out), gated=bool(call.gated))
    if call.path is None:
        repeat.remember(call.x, w, call.bias, call.gated, prepared, _count_of("marlin", call))


def _marlin_pair_gates(call: Call) -> Gates:
    # Never by itself: the symmetric product alone can overflow float16 where the corrected one does not.
    yield "it is asked for by name", call.path == "marlin_pair"
    yield from _common_gates(call)
    yield "the weight is asymmetric", not call.weight.symmetric


def _marlin_pair(call: Call, out: Array) -> None:
    w = call.weight
    assert isinstance(w, MarlinWeight)
    launch.marlin(call.symmetric_plan, call.x_aligned, w, call.bias, _matrix(out))
    # After the product, which would push the deltas out of L2 that this asks for.
    sums = launch.group_sums(call.x_aligned, w)
    launch.correct(sums, w, _matrix(out))


def _cross_iteration_gates(call: Call) -> Gates:
    yield "x is a GPU array", call.device is not None
    yield "the weight carries a rounding channel", call.rounds
    yield "cross-iteration rounding is on", call.iteration is not None


def _cross_iteration(call: Call, out: Array) -> None:
    launch.native(call.x_rows, call.weight, call.bias, _matrix(out), call.iteration)


def _native_gates(call: Call) -> Gates:
    yield "x is a GPU array", call.device is not None


def _native(call: Call, out: Array) -> None:
    launch.native(call.x_rows, call.weight, call.bias, _matrix(out))


def _matrix(out: Array) -> Matrix:
    rows = _as_rows(out, out.shape[-1])
    assert rows is not None, "matmul gives paths an output of contiguous rows"
    return rows


def _refusal_key(call: Call) -> tuple[Any, ...]:
    return (call.device and call.device.id, call.plan.build)


def _was_refused(call: Call) -> bool:
    """Whether the fused kernel's build was refused before on this device."""
    if not _refused or not isinstance(call.weight, MarlinWeight) or call.device is None or not call.rows:
        return False
    return _refusal_key(call) in _refused


# Errors of a kernel that ran before, which every later call of the driver reports again.
_BROKEN_CONTEXT = re.compile(
    "ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|LAUNCH_FAILED|LAUNCH_TIMEOUT|ASSERT|HARDWARE_STACK|ECC"
    "|INVALID_CONTEXT|CONTEXT_IS_DESTROYED"
)


@dataclass(frozen=True)
class Path:
    """A row of the table."""

    name: str
    gates: Callable[[Call], Gates]
    run: Callable[[Call, Array], None]
    activates: bool = False
    """Whether `run` does SwiGLU's second half itself."""

    def take(self, call: Call, out: Array) -> None:
        """Run, and do what `run` leaves to do."""
        if not call.gated or self.activates:
            self.run(call, out)
            return
        columns = call.weight.N
        product = _scratch_array("gate and up", (call.rows, columns), out.dtype)[:, :columns]
        self.run(call, product)
        launch.swiglu(_matrix(product), _matrix(out), bfloat16=call.weight.dtype == BFLOAT16)


TABLE = (
    Path("reference", _reference_gates, _reference, activates=True),
    Path("batch_invariant", _batch_invariant_gates, _batch_invariant, activates=True),
    Path("fp16_cache", _fp16_cache_gates, _fp16_cache),
    Path("dense", _dense_gates, _dense),
    Path("marlin", _marlin_gates, _marlin, activates=True),
    Path("marlin_pair", _marlin_pair_gates, _marlin_pair),
    Path("cross_iteration", _cross_iteration_gates, _cross_iteration),
    Path("native", _native_gates, _native),
)


# ---- the public functions -------------------------------------------------------------------------------


def matmul(
    x: Any, w: Weight, bias: Any = None, out: Array | None = None, *, path: str | None = None
) -> Array:
    """``x @ W (+ bias)`` with a 4-bit weight.

    Parameters
    ----------
    x : array [..., K]
        float16 or bfloat16, of the weight's dtype. A NumPy array takes the reference path; a CuPy array, or
        anything on a GPU with DLPack or ``__cuda_array_interface__``, the first path of the table whose gates
        hold. Any leading dimensions, any strides.
    w : MarlinWeight or QuantWeight
        On the same side, and the same device, as `x`.
    bias : array [N], optional
        Of the same dtype; added in float32 before the product is rounded (``fp16_cache``, ``dense``: to the
        rounded product; ``marlin_pair``: before the correction, which rounds again).
    out : array [..., N], optional
        Where to write the result; must not overlap `x` or `bias`. With it, a call allocates nothing once its
        shape has been seen.
    path : str, optional
        Insist on one path: ``"batch_invariant"``, ``"fp16_cache"``, ``"dense"``, ``"marlin"``,
        ``"marlin_pair"``, ``"cross_iteration"`` or ``"native"``.

    Returns
    -------
    array [..., N]
        `out`, or a new array of `x`'s dtype.

    Raises
    ------
    DTypeError, ShapeError, DeviceError
        Arguments that do not fit together.
    CompileError, LaunchError
        No path could run, or `path` could not.

    Notes
    -----
    GPU work goes to CuPy's current stream of `x`'s device. Within a CUDA graph capture, scratch memory cannot
    grow and kernels cannot be loaded: make the same call once before.
    """
    return _product(x, w, bias, out, path)


def _product(x: Any, w: Weight, bias: Any, out: Array | None, path: str | None, *, gated: int = 0) -> Array:
    """As one before, if there was one like it, or by the table."""
    if path is None and isinstance(w, MarlinWeight):
        y = _again(x, w, bias, out, gated)
        if y is not None:
            return y
    return _on_its_device(_checked(x, w, bias, out, path, gated=gated))


def _again(x: Any, w: MarlinWeight, bias: Any, out: Any, gated: int) -> Array | None:
    """The product, launched as one like it was before; None if there was none, or the path may be another."""
    if not w.repeats or w.fp16_cache is not None or _batch_invariant_always or not dispatch_enabled():
        return None
    try:
        done = repeat.again(x, w, bias, out, gated)
    except LaunchError:
        return None  # the long way says what to do
    if done is None:
        return None
    y, count = done
    with _lock:
        count[0] += 1
    return y


def matmul_swiglu(x: Any, w: GateUpWeight, out: Array | None = None, *, path: str | None = None) -> Array:
    """``silu(x @ gate) * (x @ up)``, where ``silu(v) = v / (1 + exp(-v))``.

    Parameters
    ----------
    x : array [..., K]
        As for `matmul`.
    w : GateUpWeight
        What `pack_gate_up` made of gate and up.
    out : array [..., N], optional
        As for `matmul`.
    path : str, optional
        As for `matmul`.

    Returns
    -------
    array [..., N]
        `out`, or a new array of `x`'s dtype. The paths ``marlin`` and ``reference`` round once, from float32
        sums; the others round both products first.

    Raises
    ------
    DTypeError, ShapeError, DeviceError
        Arguments that do not fit together.
    CompileError, LaunchError
        No path could run, or `path` could not.
    """
    if not isinstance(w, GateUpWeight):
        raise DTypeError(f"w must be a GateUpWeight (see pack_gate_up), got {type(w).__name__}")
    return _product(x, w.packed, None, out, path, gated=w.N)


def _on_its_device(call: Call) -> Array:
    """Take the call's path with its device current."""
    if call.device is None:
        return _take(call)
    cupy = import_cupy()
    if cupy.cuda.runtime.getDevice() == call.device.id:
        return _take(call)
    with cupy.cuda.Device(call.device.id):
        return _take(call)


def _take(call: Call) -> Array:
    out = call.out
    target = out
    if out is None:
        xp = np if call.device is None else import_cupy()
        out = target = xp.empty((*call.x.shape[:-1], call.columns), dtype=call.x.dtype)
    elif call.device is not None and not ((rows := _as_rows(out, call.columns)) and _ascending(rows)):
        target = import_cupy().empty(out.shape, dtype=out.dtype)
    if call.rows:
        with scratch.turn() if call.device is not None else contextlib.nullcontext():
            _run(call, target)
    if target is not out:
        out[...] = target
    return out


def _run(call: Call, target: Array) -> None:
    if call.path is not None:
        row = _row(call.path)
        closed = [gate for gate, holds in row.gates(call) if not holds]
        if closed:
            raise LaunchError(f"path {call.path!r} cannot be taken here: it is not so that {closed[0]}")
        row.take(call, target)
        _record(call.path, call)
        return
    failure: Exception | None = None
    for row in TABLE:
        if not all(holds for _, holds in row.gates(call)):
            continue
        try:
            row.take(call, target)
        except (CompileError, LaunchError) as error:
            failure = error
            broken = _BROKEN_CONTEXT.search(str(error))
            if row.name != "marlin" or broken or is_capturing(import_cupy()):
                raise
            key = _refusal_key(call)
            with _lock:
                new = key not in _refused
                _refused[key] = str(error)
            if new:
                logger.warning("path %s is refused, the next one is taken from now on: %s", row.name, error)
            continue
        _record(row.name, call)
        return
    raise failure or AssertionError("the table ends with a path that is always open")


def _row(path: str) -> Path:
    for row in TABLE:
        if row.name == path:
            return row
    raise ValueRangeError(f"no path {path!r}; there are: {', '.join(row.name for row in TABLE)}")


def _checked(
    x: Any, w: Weight, bias: Any, out: Array | None, path: str | None = None, *, gated: int = 0
) -> Call:
    if path is not None:
        _row(path)
    if not isinstance(w, MarlinWeight | QuantWeight):
        raise DTypeError(f"w must be a MarlinWeight or a QuantWeight, got {type(w).__name__}")
    x = _as_array("x", x)
    if x.dtype not in SCALE_DTYPES:
        raise DTypeError(f"x must be float16 or bfloat16, got {x.dtype}: convert it with x.astype")
    if x.dtype != w.dtype:
        raise DTypeError(f"x is {x.dtype} and the weight {w.dtype}: convert x, or the weight (w.astype)")
    if x.ndim == 0 or x.shape[-1] != w.K:
        raise ShapeError(f"x has shape {x.shape}; its last dimension must be K = {w.K}")
    if bias is not None:
        bias = _as_array("bias", bias)
        _check_like("bias", bias, x, (w.N,))
        if not bias.flags.c_contiguous:
            with on_device(bias):
                bias = bias.copy()
    if out is not None:
        if not isinstance(out, np.ndarray) and not is_device_array(out):
            raise DTypeError(f"out must be a NumPy or CuPy array, got {type(out).__name__}")
        _check_like("out", out, x, (*x.shape[:-1], gated or w.N))
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ValueRangeError("out is read-only")
        for name, other in (("x", x), ("bias", bias)):
            if other is not None and _overlap(out, other):
                raise ValueRangeError(f"out overlaps {name}: the result would depend on the order of writes")
    codes = w.B if isinstance(w, MarlinWeight) else w.q
    if is_device_array(x) != is_device_array(codes):
        side, fix = ("NumPy", "w.to_host()") if is_device_array(codes) else ("CuPy", "w.to_device()")
        other = "CuPy" if side == "NumPy" else "NumPy"
        raise DeviceError(f"x is a {side} array and the weight holds {other} arrays: move one, e.g. {fix}")
    device = None
    if is_device_array(x):
        if x.device.id != codes.device.id:
            raise DeviceError(f"x lies on device {x.device.id}, the weight on device {codes.device.id}")
        device = device_info(x.device.id)
    return Call(x, w, bias, out, math.prod(x.shape[:-1]), device, path, gated)


def _check_like(name: str, array: Array, x: Array, shape: tuple[int, ...]) -> None:
    if is_device_array(array) != is_device_array(x):
        raise DeviceError(f"x and {name} must both be NumPy or both GPU arrays")
    if array.dtype != x.dtype:
        raise DTypeError(f"{name} must be {x.dtype} like x, got {array.dtype}")
    if array.shape != shape:
        raise ShapeError(f"{name} must have shape {shape}, got {array.shape}")
    if is_device_array(x) and array.device.id != x.device.id:
        raise DeviceError(f"x lies on device {x.device.id}, {name} on device {array.device.id}")


def _as_array(name: str, array: Any) -> Array:
    """NumPy and CuPy arrays as they are; what else lives on a GPU as a CuPy array over the same memory."""
    if isinstance(array, np.ma.MaskedArray):
        raise DTypeError(
            f"{name} is a masked array, whose mask a product would ignore: give {name}.filled(value)"
        )
    if isinstance(array, np.ndarray) or is_device_array(array):
        return array
    try:
        if hasattr(array, "__dlpack__"):
            return import_cupy().from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return import_cupy().asarray(array)
    except (TypeError, ValueError, BufferError) as error:
        raise DTypeError(
            f"{name} ({type(array).__name__}) is no array on a GPU that CuPy can read: {error}"
        ) from error
    raise DTypeError(f"{name} must be a NumPy, CuPy or DLPack array, got {type(array).__name__}")


def _overlap(a: Array, b: Array) -> bool:
    if isinstance(a, np.ndarray):
        return bool(np.may_share_memory(a, b))
    (a_low, a_high), (b_low, b_high) = _span(a), _span(b)
    return a_low < b_high and b_low < a_high


def _span(array: Array) -> tuple[int, int]:
    """First and past-the-last address that the array touches."""
    if array.size == 0:
        return 0, 0
    reach = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    pointer = array.data.ptr
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return pointer + low, pointer + high + array.dtype.itemsize


@dataclass(frozen=True)
class Answer:
    """One path of the table with its gates' answers; `chosen` marks the one that would be taken."""

    path: str
    gates: tuple[tuple[str, bool], ...]
    chosen: bool


@dataclass(frozen=True)
class Explanation:
    """Why a call takes the path it takes. ``str`` of it is the dispatcher's table, answered."""

    answers: tuple[Answer, ...]
    plan: Plan | None
    tuned: bool = False  # the plan is one that `tune` kept, not the planner's own

    @property
    def path(self) -> str:
        """The path that would be taken."""
        return next(answer.path for answer in self.answers if answer.chosen)

    def __str__(self) -> str:
        lines = []
        for answer in self.answers:
            lines.append(f"{'->' if answer.chosen else '  '} {answer.path}")
            lines += [f"     [{'x' if holds else ' '}] {gate}" for gate, holds in answer.gates]
        if self.plan is not None:
            macros = ", ".join(f"{name}={value}" for name, value in self.plan.build.macros)
            shape = f"grid {self.plan.grid}, {self.plan.threads} threads"
            lines.append(f"   {self.plan.build.name} ({macros}), {shape}{', tuned' if self.tuned else ''}")
        return "\n".join(lines)


def explain(x: Any, w: Weight | GateUpWeight, bias: Any = None, out: Array | None = None) -> Explanation:
    """What `matmul` (or `matmul_swiglu`) with these arguments would do, and why, without doing it.

    Returns
    -------
    Explanation
        Print it. ``.path`` is the path's name.

    Raises
    ------
    DTypeError, ShapeError, DeviceError
        As `matmul`.
    """
    if isinstance(w, GateUpWeight):
        if bias is not None:
            raise DTypeError("gate and up are multiplied without a bias")
        call = _checked(x, w.packed, None, out, gated=w.N)
    else:
        call = _checked(x, w, bias, out)
    answers: list[Answer] = []
    chosen = False
    for row in TABLE:
        gates = tuple(row.gates(call))
        takes = not chosen and all(holds for _, holds in gates)
        chosen = chosen or takes
        answers.append(Answer(row.name, gates, takes))
    plan = None
    path = next(answer.path for answer in answers if answer.chosen)
    if path == "marlin" and call.rows:
        plan = call.plan
    return Explanation(tuple(answers), plan, plan is not None and call.plan_is_tuned)
