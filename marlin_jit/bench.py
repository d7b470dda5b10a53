"""A random layer to measure, a check of its results, and our paths through it.

Used by ``marlin-jit bench`` and by the side-by-side harness in ``benchmarks/``. A `Problem` holds one layer
whose codes are known (copy 0, packed like any weight and checked against float64) and further copies of
random codes that only exist to keep the timed weight out of L2.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from marlin_jit import _cublas
from marlin_jit._array import BFLOAT16, to_host
from marlin_jit._cupy import import_cupy
from marlin_jit.device import current_device
from marlin_jit.errors import CompileError, DeviceError, LaunchError, ShapeError
from marlin_jit.launch import Matrix, limits_of, marlin, problem_of
from marlin_jit.layout import group_count
from marlin_jit.pack import pack
from marlin_jit.plan import Limits, Plan, Zeros, plans
from marlin_jit.plan import Problem as Planned
from marlin_jit.timing import CupyTimer, Timer, Timing, plan_copies, time_launches
from marlin_jit.weight import MarlinWeight, QuantWeight

DTYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16}

TOLERANCE = {"float16": 4e-4, "bfloat16": 3e-3}
"""Largest relative Frobenius error against float64 that counts as right."""

_CHECKED_COLUMNS = 512
_RANDOM_ROWS = 1024


@dataclass(frozen=True)
class Variant:
    """One way of ours to compute the product.

    Attributes
    ----------
    name : str
        Key in tables and records.
    symmetric : bool
        Whether the weight has no zero points.
    path : str or None
        Path forced on the dispatcher; None takes what it chooses.
    min_m, max_m : int
        Where it is worth measuring.
    meaning : str
        One line for readers.
    kernel : str or None
        Kernel that is launched by its own best plan, past the dispatcher; None asks the dispatcher.
    """

    name: str
    symmetric: bool
    path: str | None
    min_m: int
    max_m: int
    meaning: str
    kernel: str | None = None

    def covers(self, m: int) -> bool:
        """Whether `m` rows are in the range worth measuring."""
        return self.min_m <= m <= self.max_m


_ANY = 1 << 30

VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant("symmetric", True, None, 1, _ANY, "Marlin GEMM, symmetric weight, as dispatched"),
        Variant(
            *("mma_sync", True, None, 16, _ANY),
            "the same product by marlin_gemm (mma.sync), whatever kernel the planner takes",
            kernel="marlin_gemm",
        ),
        Variant("asymmetric", False, None, 1, _ANY, "Marlin GEMM, zero points fused, as dispatched"),
        Variant("pair", False, "marlin_pair", 1, _ANY, "symmetric Marlin GEMM and the correction kernels"),
        Variant("native", True, "native", 1, 256, "native INT4 GEMM, the fallback for everything"),
        Variant("fp16_cache", True, "fp16_cache", 512, _ANY, "weight kept dense, multiplied by cuBLAS"),
    )
}


class Problem:
    """A random layer of shape (K, N) with activations for several M.

    Parameters
    ----------
    k, n : int
        Logical shape of the weight.
    ms : sequence of int
        Numbers of rows that will be measured.
    group_size : int
        32, 64, 128, or -1 for one group a column.
    dtype : str
        ``"float16"`` or ``"bfloat16"``.
    xp : module
        Array module that holds everything; CuPy unless a test says NumPy.
    copies : int, optional
        Copies of the weight; `plan_copies` of its bytes unless given.
    seed : int
        Of the random numbers.

    Attributes
    ----------
    x : array, [max(ms), K]
        Activations, standard normal. ``x[:m]`` is the input for m rows.
    copies : int
        Copies that exist.
    """

    def __init__(
        self,
        k: int,
        n: int,
        ms: Sequence[int],
        *,
        group_size: int = 128,
        dtype: str = "float16",
        xp: Any = None,
        copies: int | None = None,
        seed: int = 0,
    ) -> None:
        if dtype not in DTYPES:
            raise ShapeError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not ms or min(ms) < 1:
            raise ShapeError(f"rows are {list(ms)}; at least one is needed and each must be 1 or more")
        if xp is None:
            current_device()
            xp = import_cupy()
        group_size = -1 if group_size == k else group_size
        self.k, self.n, self.group_size, self.dtype, self._xp = k, n, group_size, dtype, xp
        rng = np.random.default_rng(seed)
        kind = DTYPES[dtype]
        groups = 1 if group_size == -1 else k // group_size

        codes = rng.integers(0, 16, (k, n), dtype=np.uint8)
        scale = rng.uniform(0.005, 0.015, (groups, n)).astype(np.float32).astype(kind)
        zero_point = rng.integers(0, 16, (groups, n), dtype=np.uint8)
        quantized = QuantWeight.from_zero_points(
            xp.asarray(codes), xp.asarray(scale), xp.asarray(zero_point), group_size
        )
        self._known = pack(quantized)
        del quantized
        self.copies = plan_copies(self._known.nbytes) if copies is None else copies
        self._weights: dict[bool, list[MarlinWeight]] = {}
        self._masks = rng.integers(-(1 << 31), 1 << 31, self.copies, dtype=np.int64).astype(np.int32)

        self.x = _activations(rng, max(ms), k, kind, xp)
        # Rows where tiles begin and end, the last row of every M, and some in between.
        edges = {r for p in range(17) for r in ((1 << p) - 1, 1 << p)} | set(range(17)) | {m - 1 for m in ms}
        some = set(rng.integers(0, max(ms), 24).tolist())
        self._rows = np.array(sorted(r for r in edges | some if r < max(ms)))
        # Evenly spread columns, so that every 64-wide chunk of a common layer is looked at.
        count = min(_CHECKED_COLUMNS, n)
        self._columns = np.arange(count) * n // count + rng.integers(0, max(1, n // count))

        group = np.zeros(k, np.int64) if group_size == -1 else np.arange(k) // group_size
        s = scale[:, self._columns].astype(np.float64)[group]
        z = zero_point[:, self._columns].astype(np.float64)[group]
        q = codes[:, self._columns].astype(np.float64)
        rows = self._pick(self.x, self._rows).astype(np.float64)
        self._reference = {True: rows @ ((q - 8.0) * s), False: rows @ ((q - z) * s)}

    def weights(self, symmetric: bool) -> list[MarlinWeight]:
        """The copies, each in memory of its own; number 0 holds the codes that `error` knows."""
        if symmetric not in self._weights:
            other = self._weights.get(not symmetric)
            made = []
            for i in range(self.copies):
                if other is not None:
                    b, scales = other[i].B, other[i].scales
                else:
                    # XOR with a constant: other random codes, at the cost of one pass over memory.
                    b = self._known.B.copy() if i == 0 else self._known.B ^ self._masks[i]
                    scales = self._known.scales.copy()
                delta = None if symmetric or self._known.delta is None else self._known.delta.copy()
                made.append(dataclasses.replace(self._known, B=b, scales=scales, delta=delta))
            self._weights[symmetric] = made
        return self._weights[symmetric]

    def output(self, m: int) -> Any:
        """Memory for the result of `m` rows, filled with NaN so that an unwritten element is seen."""
        out = self._xp.empty((m, self.n), dtype=DTYPES[self.dtype])
        out.view(np.uint16).fill(0xFFFF)
        return out

    def error(self, out: Any, symmetric: bool) -> float:
        """Relative Frobenius error of `out`, the product of ``x[:m]`` with copy 0, against float64.

        Every element must be finite (else the result is infinity); the error is taken over rows and columns
        spread over the whole result.
        """
        if not bool(self._xp.isfinite(out.astype(np.float32)).all()):
            return float("inf")
        rows = self._rows[self._rows < out.shape[0]]
        got = self._pick(out, rows, self._columns).astype(np.float64)
        want = self._reference[symmetric][: len(rows)]
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    def require_right(self, out: Any, symmetric: bool, what: str) -> None:
        """Raise ValueError, beginning with `what`, if the error of `out` is too large."""
        error = self.error(out, symmetric)
        if not error <= TOLERANCE[self.dtype]:
            raise ValueError(f"{what}: error {error:.2e} against float64")

    def _pick(self, array: Any, rows: Any, columns: Any = None) -> Any:
        """Rows, then columns, of a 16-bit array, on the host."""
        picked = array.view(np.uint16)[self._xp.asarray(rows)]
        if columns is not None:
            picked = picked[:, self._xp.asarray(columns)]
        return to_host(picked).view(DTYPES[self.dtype])


def random_weight(k: int, n: int, group_size: int, kind: np.dtype[Any], zeros: Zeros) -> MarlinWeight:
    """A random layer made on the current device: quicker than a `Problem`, which knows its products."""
    rng = import_cupy().random.default_rng(0)
    groups = group_count(k, group_size)
    codes = rng.integers(0, 16, (k, n), dtype=np.uint8)
    scale = (0.01 + 0.01 * rng.random((groups, n), dtype=np.float32)).astype(kind)
    if zeros == Zeros.POINTS:
        points = rng.integers(0, 16, (groups, n), dtype=np.uint8)
        return pack(QuantWeight.from_zero_points(codes, scale, points, group_size))
    zero = None if zeros == Zeros.NONE else -0.1 * rng.random((groups, n), dtype=np.float32)
    return pack(QuantWeight(codes, scale, zero, group_size))


def _activations(rng: np.random.Generator, m: int, k: int, kind: np.dtype[Any], xp: Any) -> Any:
    """Standard normal [m, k]. Rows past `_RANDOM_ROWS` are the first ones, each block shifted along k."""
    base = xp.asarray(rng.standard_normal((min(m, _RANDOM_ROWS), k), dtype=np.float32)).astype(kind)
    if m <= _RANDOM_ROWS:
        return base
    x = xp.empty((m, k), dtype=kind)
    source, target = base.view(np.uint16), x.view(np.uint16)
    for block, start in enumerate(range(0, m, _RANDOM_ROWS)):
        rows = min(_RANDOM_ROWS, m - start)
        shift = 257 * block % k
        target[start : start + rows, shift:] = source[:rows, : k - shift]
        target[start : start + rows, :shift] = source[:rows, k - shift :]
    return x


def random_dense(m: int, k: int, dtype: str, *, seed: int) -> Any:
    """A CuPy array [m, k] of standard normal values."""
    return _activations(np.random.default_rng(seed), m, k, DTYPES[dtype], import_cupy())


@dataclass(frozen=True)
class Measurement:
    """What one variant did at one M.

    Attributes
    ----------
    timing : Timing or None
        None where nothing was timed: `reason` says why.
    error : float or None
        Relative Frobenius error against float64, where it was checked.
    reason : str or None
        Why there is no timing, or why the result counts as wrong.
    """

    timing: Timing | None
    error: float | None
    reason: str | None


def call(variant: Variant, x: Any, weight: MarlinWeight, out: Any) -> Any:
    """``out = x @ weight`` by the variant's path or kernel."""
    if variant.kernel is not None:
        return _by_kernel(variant.kernel, x, weight, out)
    # Imported here: the function `marlin_jit.dispatch` hides the module of that name as an attribute.
    from marlin_jit.dispatch import matmul

    if variant.path is None:
        return matmul(x, weight, out=out)
    return matmul(x, weight, out=out, path=variant.path)


def _by_kernel(kernel: str, x: Any, weight: MarlinWeight, out: Any) -> Any:
    """``out = x @ weight``, arrays contiguous, by a kernel's best plan."""
    (m, k), n = x.shape, weight.N
    if k % 8:  # the dispatcher would copy x; the kernel cannot read such rows
        raise ShapeError(f"K is {k}; without the dispatcher it must be a multiple of 8")
    problem = problem_of(m, weight, asymmetric=not weight.symmetric)
    plan = best_plan(kernel, problem, limits_of(current_device()))
    marlin(plan, Matrix(x.data.ptr, k, m, k), weight, None, Matrix(out.data.ptr, n, m, n))
    return out


@lru_cache(maxsize=1 << 10)
def best_plan(kernel: str, problem: Planned, limits: Limits) -> Plan:
    """The plan of a kernel with the least predicted time.

    Raises
    ------
    LaunchError
        The planner lists none for this problem and device.
    """
    for plan in plans(problem, limits):
        if plan.build.name == kernel:
            return plan
    raise LaunchError(f"no plan of {kernel} fits {problem} on this device")


def measure(problem: Problem, variant: Variant, m: int, timer: Timer, **options: Any) -> Measurement:
    """Check, then time, one variant at `m` rows.

    Parameters
    ----------
    problem : Problem
        On the device.
    variant : Variant
    m : int
        One of the problem's numbers of rows, or less than their largest.
    timer : Timer
    **options
        Passed to `time_launches`: replays, warmup_ms, point_ms.

    Returns
    -------
    Measurement
        A wrong result is reported, not timed.
    """
    x, out = problem.x[:m], problem.output(m)
    weights = problem.weights(variant.symmetric)
    cached = variant.path == "fp16_cache"
    if cached:
        weights = [w.cache_fp16() for w in weights[: plan_copies(2 * problem.k * problem.n)]]
    try:
        call(variant, x, weights[0], out)
        error = problem.error(out, variant.symmetric)
        if not error <= TOLERANCE[problem.dtype]:
            return Measurement(None, error, f"wrong result: error {error:.2e} against float64")

        def launch(i: int) -> None:
            call(variant, x, weights[i], out)

        try:
            timing = time_launches(launch, len(weights), timer, **options)
        except NotImplementedError:  # CuPy's word for a library call that it does not allow in a capture
            timing = time_launches(launch, len(weights), timer, graph=False, **options)
        return Measurement(timing, error, None)
    finally:
        if cached:  # a weight that keeps its cache would be dispatched to it from now on
            for weight in weights:
                weight.drop_fp16()


class DenseLayer:
    """The same layer as a dense half-precision weight, for cuBLAS.

    Its values are random rather than the quantized ones: they don't matter to the time.

    Raises
    ------
    DeviceError
        cuBLAS is not installed, or doesn't start.
    """

    def __init__(self, problem: Problem) -> None:
        cupy = import_cupy()
        self.version = _cublas.version()
        self._problem = problem
        kind = DTYPES[problem.dtype]
        dense = random_dense(problem.n, problem.k, problem.dtype, seed=1).view(np.uint16)
        self._weights = [cupy.roll(dense, i, axis=1).view(kind) for i in range(plan_copies(dense.nbytes))]

    def measure(self, m: int, timer: Timer, **options: Any) -> Measurement:
        """Check a corner of cuBLAS's result, then time it at `m` rows, in a graph like ours."""
        x, out = self._problem.x[:m], self._problem.output(m)
        k, n = self._problem.k, self._problem.n
        rows, result = Matrix(x.data.ptr, k, m, k), Matrix(out.data.ptr, n, m, n)

        def launch(i: int) -> None:
            _cublas.matmul_dense(rows, self._weights[i], result, transposed=True)

        launch(0)
        some = to_host(out[:16, :64]).astype(np.float64)
        w = to_host(self._weights[0][:64]).astype(np.float64)
        want = to_host(x[:16]).astype(np.float64) @ w.T
        error = float(np.linalg.norm(some - want) / np.linalg.norm(want))
        if not error <= 4 * TOLERANCE[self._problem.dtype]:  # cuBLAS may add split parts in half precision
            return Measurement(None, error, f"wrong result: error {error:.2e} against float64")
        return Measurement(time_launches(launch, len(self._weights), timer, **options), error, None)


def device_facts() -> dict[str, Any]:
    """What the measured device is: name, capability, SMs, L2, versions.

    Raises
    ------
    DeviceError
        There is none.
    """
    device, cupy = current_device(), import_cupy()
    return {
        "gpu": device.name,
        "capability": ".".join(map(str, device.capability)),
        "sms": device.sm_count,
        "l2_bytes": device.l2_bytes,
        "cuda_driver": int(cupy.cuda.runtime.driverGetVersion()),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
    }


_SMI_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit",
    "temperature.gpu", "clocks_event_reasons.active",
)  # fmt: skip

BUSY_FIELDS = ("clocks.sm", "power.draw", "clocks_event_reasons.active")
"""What is worth reading while a GPU works: the clock, the power, and what holds the clock down."""


def read_nvidia_smi(fields: Sequence[str] = _SMI_FIELDS) -> dict[str, str]:
    """Clocks, power and temperature as ``nvidia-smi`` reads them now; empty where it doesn't answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().splitlines()[0].split(",")]
    return dict(zip(fields, values, strict=False))


def measure_layer(
    k: int,
    n: int,
    ms: Sequence[int],
    *,
    group_size: int = 128,
    dtype: str = "float16",
    variants: Sequence[str] = ("symmetric", "asymmetric", "pair", "native"),
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Measure our variants and cuBLAS on one layer, in this process.

    Returns
    -------
    list of dict
        One record an (M, variant), variants outside their range left out: k, n, m, group_size, dtype,
        variant, us, samples, launches, copies, method, error, reason. ``us`` is None where `reason` says
        why.
    """
    problem = Problem(k, n, ms, group_size=group_size, dtype=dtype)
    timer = CupyTimer()
    dense: DenseLayer | Measurement
    try:
        dense = DenseLayer(problem)
    except DeviceError as error:
        dense = Measurement(None, None, str(error))
    records = []
    for m in ms:
        for name in (*variants, "cublas"):
            if name != "cublas" and not VARIANTS[name].covers(m):
                continue
            progress(f"M = {m}: {name}")
            try:
                if name != "cublas":
                    result = measure(problem, VARIANTS[name], m, timer, **options)
                else:
                    result = dense if isinstance(dense, Measurement) else dense.measure(m, timer, **options)
            except (CompileError, LaunchError) as error:
                result = Measurement(None, None, str(error).splitlines()[0])
            layer = {"k": k, "n": n, "m": m, "group_size": problem.group_size, "dtype": dtype}
            records.append(layer | {"variant": name} | as_record(result))
    return records


def as_record(result: Measurement) -> dict[str, Any]:
    """A `Measurement` as JSON types; infinities and NaN, which JSON lacks, become strings."""
    timing: dict[str, Any] = {"us": None, "samples": [], "launches": 0, "copies": 0, "method": None}
    if result.timing is not None:
        timing = result.timing.as_dict()
    error: float | str | None = result.error
    if error is not None and not np.isfinite(error):
        error = str(error)
    return timing | {"error": error, "reason": result.reason}
