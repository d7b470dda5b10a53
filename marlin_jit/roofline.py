"""How far a layer's product is from what the device could do: times over M beside the floor and the rivals.

The floor of a product is the larger of two times: its bytes at the rate at which this device copies memory,
and its operations at the rate at which cuBLAS multiplies large dense matrices here. Both rates are measured
in the same run as the product, so that clocks and power limits are the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from marlin_jit import _cublas
from marlin_jit._cupy import import_cupy
from marlin_jit.bench import Measurement, as_record, measure_layer, random_dense
from marlin_jit.errors import DeviceError, LaunchError
from marlin_jit.launch import Matrix
from marlin_jit.plan import min_bytes
from marlin_jit.rivals import Humming, Layer, Missing, first_line
from marlin_jit.timing import CupyTimer, Timer, time_launches

__all__ = ["MS", "Point", "Rates", "Roofline", "flops", "measure_rates", "measure_roofline"]

MS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192),
)
"""Numbers of rows: powers of two, and some between where kernels change."""

_OURS, _NATIVE = "symmetric", "native"
_COPIED_BYTES, _COPIED_COLUMNS = 1 << 30, 8192
_GEMM_SIZES = (8192, 4096, 2048)


def flops(m: int, k: int, n: int) -> int:
    """Operations of a GEMM, two for a multiplication and its addition."""
    return 2 * m * k * n


@dataclass(frozen=True)
class Rates:
    """What this device reaches where nothing else is in the way.

    Attributes
    ----------
    bytes_us : float
        Bytes a microsecond of a large copy in device memory, those read and those written.
    flops_us : float or None
        Operations a microsecond of cuBLAS's float16 GEMM; None where cuBLAS is not installed.
    gemm_size : int
        M, N and K of that GEMM; 0 for none.
    reason : str or None
        Why `flops_us` is None.
    """

    bytes_us: float
    flops_us: float | None
    gemm_size: int
    reason: str | None

    def floor_us(self, nbytes: int, operations: int) -> float:
        """Microseconds that no kernel beats here."""
        compute = 0.0 if self.flops_us is None else operations / self.flops_us
        return max(nbytes / self.bytes_us, compute)


@dataclass(frozen=True)
class Point:
    """One number of rows.

    Attributes
    ----------
    m, nbytes, flops : int
        Rows, the bytes that must be moved, the operations.
    floor_us : float
    moves : bool
        Whether the bytes take longer than the operations.
    us : dict of str to float
        Microseconds a launch by variant: ``symmetric`` is ours; those without a time are left out.
    """

    m: int
    nbytes: int
    flops: int
    floor_us: float
    moves: bool
    us: dict[str, float]

    def fraction(self, variant: str) -> float | None:
        """How much of the floor's speed a variant reaches: 1 is the floor; None where it has no time."""
        us = self.us.get(variant)
        return None if us is None else self.floor_us / us


@dataclass(frozen=True)
class Roofline:
    """What was measured on one layer.

    Attributes
    ----------
    k, n, group_size : int
    dtype : str
    rates : Rates
    records : list of dict
        As `marlin_jit.bench.measure_layer` makes them, with variant ``humming`` beside ours.
    versions : dict of str to str
        Of the other libraries.
    """

    k: int
    n: int
    group_size: int
    dtype: str
    rates: Rates
    records: list[dict[str, Any]]
    versions: dict[str, str]

    @property
    def points(self) -> list[Point]:
        """A point for every number of rows, in the order measured."""
        points = []
        for m in dict.fromkeys(record["m"] for record in self.records):
            nbytes = min_bytes(m, self.k, self.n, self.group_size)
            operations = flops(m, self.k, self.n)
            floor = self.rates.floor_us(nbytes, operations)
            times = {r["variant"]: r["us"] for r in self.records if r["m"] == m and r["us"] is not None}
            points.append(Point(m, nbytes, operations, floor, nbytes / self.rates.bytes_us >= floor, times))
        return points

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        layer = {"k": self.k, "n": self.n, "group_size": self.group_size, "dtype": self.dtype}
        return {
            "layer": layer,
            "rates": asdict(self.rates),
            "versions": self.versions,
            "points": [asdict(point) for point in self.points],
            "records": self.records,
        }


def measure_roofline(
    k: int,
    n: int,
    ms: Sequence[int] = MS,
    *,
    group_size: int = 128,
    dtype: str = "float16",
    progress: Callable[[str], None] = lambda _: None,
) -> Roofline:
    """Measure the rates, then our symmetric kernel, the native one, cuBLAS and humming-kernels on one layer.

    What is not installed or fails is a record with its reason. Of the others humming-kernels comes last: a
    fault of theirs on the device then takes nothing of ours with it.

    Raises
    ------
    DeviceError
        There is no device.
    """
    progress("the device's rates")
    rates = measure_rates(CupyTimer())
    records = measure_layer(
        k, n, ms, group_size=group_size, dtype=dtype, variants=(_OURS, _NATIVE), progress=progress
    )
    import_cupy().get_default_memory_pool().free_all_blocks()
    versions = {} if rates.reason is not None else {"cublas": _cublas.version()}
    # What another library prints must not get between what we print.
    with contextlib.redirect_stdout(sys.stderr):
        more, version = _humming(Layer(k, n, ms, group_size, dtype, (_OURS,)), progress)
    return Roofline(k, n, group_size, dtype, rates, records + more, versions | version)


def measure_rates(timer: Timer, **options: Any) -> Rates:
    """Measure how fast the current device copies memory and how fast cuBLAS multiplies on it.

    Parameters
    ----------
    timer : Timer
    **options
        Passed to `time_launches`.
    """
    bytes_us = _copy_rate(timer, options)
    if not _cublas.available():
        return Rates(bytes_us, None, 0, "cuBLAS is not installed")
    try:
        return Rates(bytes_us, *_gemm_rate(timer, options), None)
    except (DeviceError, LaunchError) as error:
        return Rates(bytes_us, None, 0, first_line(error))


def _copy_rate(timer: Timer, options: dict[str, Any]) -> float:
    rows = min(_COPIED_BYTES, _free_bytes() // 4) // (2 * _COPIED_COLUMNS)
    source = random_dense(rows, _COPIED_COLUMNS, "float16", seed=0)
    nbytes = int(source.nbytes)
    target = import_cupy().empty_like(source)

    def copy(_: int) -> None:
        target.data.copy_from_device_async(source.data, nbytes)

    return 2 * nbytes / time_launches(copy, 1, timer, graph=False, **options).us


def _gemm_rate(timer: Timer, options: dict[str, Any]) -> tuple[float, int]:
    """The rate, and the size it was taken at: the largest whose three matrices fit."""
    cupy, free = import_cupy(), _free_bytes()
    size = next((s for s in _GEMM_SIZES if 8 * s * s < free), _GEMM_SIZES[-1])
    x, w = random_dense(size, size, "float16", seed=0), random_dense(size, size, "float16", seed=1)
    out = cupy.empty((size, size), cupy.float16)
    rows, result = Matrix(x.data.ptr, size, size, size), Matrix(out.data.ptr, size, size, size)

    def multiply(_: int) -> None:
        _cublas.matmul_dense(rows, w, result, transposed=True)

    return flops(size, size, size) / time_launches(multiply, 1, timer, **options).us, size


def _free_bytes() -> int:
    """Bytes of device memory that nothing uses, what CuPy keeps in reserve included."""
    cupy = import_cupy()
    cupy.get_default_memory_pool().free_all_blocks()
    return int(cupy.cuda.runtime.memGetInfo()[0])


def _humming(layer: Layer, progress: Callable[[str], None]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Records of humming-kernels at every M, and its versions."""
    place = {"k": layer.k, "n": layer.n, "group_size": layer.group_size, "dtype": layer.dtype}

    def record(m: int, result: Measurement) -> dict[str, Any]:
        return place | {"m": m, "variant": "humming"} | as_record(result)

    progress("humming: preparing")
    records: list[dict[str, Any]] = []
    library = None
    try:
        library = Humming()
        library.open(layer)
        for m in layer.ms:
            progress(f"M = {m}: humming")
            records.append(record(m, library.measure(_OURS, m, {})[0]))
        library.close()
    except Exception as error:  # another library's compiler, driver calls and kernels: anything may be wrong
        name = "" if isinstance(error, Missing) else f"{type(error).__name__}: "
        result = Measurement(None, None, f"{name}{first_line(error)}")
        records += [record(m, result) for m in layer.ms[len(records) :]]
    return records, {} if library is None else library.version
