"""What marlin-jit is compared with, each behind the same four calls.

A library is a `Library`: it opens a layer, measures one of its variants at one M, closes the layer. A library
that is not installed raises `Missing` with the reason, which becomes a row in the results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.method import TorchTimer, plan_copies, time_launches
from marlin_jit._cupy import import_cupy
from marlin_jit.ahead import warmup
from marlin_jit.bench import TOLERANCE, VARIANTS, DenseLayer, Measurement, Problem, measure
from marlin_jit.device import current_device
from marlin_jit.errors import CompileError, DeviceError
from marlin_jit.timing import CupyTimer

_CHECKED_ROWS, _CHECKED_COLUMNS = 16, 256


@dataclass(frozen=True)
class Layer:
    """What is to be measured: a weight [K, N], numbers of rows, and the variants of the library asked."""

    k: int
    n: int
    ms: Sequence[int]
    group_size: int
    dtype: str
    variants: Sequence[str]


class Missing(Exception):
    """The library cannot run here; the message says why."""


class Library(Protocol):
    """One library, living in a process of its own."""

    version: dict[str, str]

    def open(self, layer: Layer) -> None:
        """Make a random layer and compile whatever its measurements need."""
        ...

    def measure(self, variant: str, m: int, options: dict[str, Any]) -> tuple[Measurement, str | None]:
        """Measure one variant; the string names the kernel path taken, where the library says it."""
        ...

    def close(self) -> None:
        """Free the layer."""
        ...


class Ours:
    """marlin-jit from this source tree."""

    def __init__(self) -> None:
        import marlin_jit

        cupy = _import_cupy()
        self._timer = CupyTimer()
        self._problem: Problem | None = None
        self.version = {
            "marlin_jit": getattr(marlin_jit, "__version__", "source tree"),
            "cupy": cupy.__version__,
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        }

    def open(self, layer: Layer) -> None:
        problem = self._problem = Problem(
            layer.k, layer.n, layer.ms, group_size=layer.group_size, dtype=layer.dtype
        )
        for symmetric in (True, False):
            problem.weights(symmetric)
        try:
            warmup(dtypes=[layer.dtype], group_sizes=[problem.group_size])
        except CompileError as error:
            # The measurements that need that kernel meet the same error and report it.
            print(error)
        _import_cupy().cuda.Device().synchronize()

    def measure(self, variant: str, m: int, options: dict[str, Any]) -> tuple[Measurement, str | None]:
        assert self._problem is not None
        chosen = VARIANTS[variant]
        result = measure(self._problem, chosen, m, self._timer, **options)
        if chosen.path is not None:
            return result, chosen.path
        from marlin_jit.dispatch import explain

        why = explain(self._problem.x[:m], self._problem.weights(chosen.symmetric)[0])
        return result, str(getattr(why, "path", why)).splitlines()[0]

    def close(self) -> None:
        self._problem = None
        _free_cupy()


class CublasTorch:
    """cuBLAS's dense half-precision GEMM through PyTorch.

    Two variants, since cuBLAS's speed depends on the layout: ``linear`` has the weight as [N, K], which is
    how frameworks keep a linear layer; ``matmul`` has it as [K, N].
    """

    def __init__(self) -> None:
        torch = _import_torch()
        self._torch, self._timer = torch, TorchTimer()
        self._linear: list[Any] = []
        self._matmul: list[Any] = []
        self.version = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}

    def open(self, layer: Layer) -> None:
        torch, k, n = self._torch, layer.k, layer.n
        kind = getattr(torch, layer.dtype)
        torch.manual_seed(0)
        self._x = torch.randn(max(layer.ms), k, device="cuda", dtype=kind)
        copies = plan_copies(2 * k * n)
        self._linear = [torch.randn(n, k, device="cuda", dtype=kind) for _ in range(copies)]
        if "matmul" in layer.variants:
            self._matmul = [w.t().contiguous() for w in self._linear]
        torch.cuda.synchronize()

    def measure(self, variant: str, m: int, options: dict[str, Any]) -> tuple[Measurement, str | None]:
        torch = self._torch
        x = self._x[:m]
        weights = [w.t() for w in self._linear] if variant == "linear" else self._matmul
        out = torch.empty(m, weights[0].shape[1], device="cuda", dtype=x.dtype)

        def launch(i: int) -> None:
            torch.mm(x, weights[i], out=out)

        return Measurement(time_launches(launch, len(weights), self._timer, **options), None, None), None

    def close(self) -> None:
        self._linear, self._matmul, self._x = [], [], None
        self._torch.cuda.empty_cache()


class CublasDirect:
    """cuBLAS called through ctypes, where PyTorch is not installed. Only the [N, K] layout."""

    def __init__(self) -> None:
        cupy = _import_cupy()
        self._timer = CupyTimer()
        self._layer: DenseLayer | None = None
        self.version = {"cupy": cupy.__version__}

    def open(self, layer: Layer) -> None:
        problem = Problem(
            layer.k, layer.n, layer.ms, group_size=layer.group_size, dtype=layer.dtype, copies=1
        )
        try:
            self._layer = DenseLayer(problem)
        except DeviceError as error:
            raise Missing(str(error)) from None
        self.version["cublas"] = self._layer.version

    def measure(self, variant: str, m: int, options: dict[str, Any]) -> tuple[Measurement, str | None]:
        if variant != "linear" or self._layer is None:
            return Measurement(None, None, "only the [N, K] layout is called without PyTorch"), None
        return self._layer.measure(m, self._timer, **options), None

    def close(self) -> None:
        self._layer = None
        _free_cupy()


class Humming:
    """humming-kernels: 4-bit weights with half-precision activations, its own choice of kernels.

    The layer is made like one loaded from a checkpoint: random offset-binary codes and group scales, through
    the library's own `transform`. The further copies are random words of the transformed layout, every one of
    which is a valid weight there. Each copy has stream-K locks of its own, as each layer of a model has.
    """

    def __init__(self) -> None:
        torch = _import_torch()
        try:
            import humming
            from humming.forward import humming_forward
            from humming.layer import HummingLayer
            from humming.tune import get_heuristics_config
        except (ImportError, OSError, RuntimeError) as error:
            raise Missing(f"humming-kernels does not import: {_first_line(error)}") from None
        self._torch, self._timer = torch, TorchTimer()
        self._make_layer, self._choose, self._run = HummingLayer, get_heuristics_config, humming_forward
        self._config: Any = None
        self._tuning = ""
        self._copies: list[dict[str, Any]] = []
        self.version = {"humming": humming.__version__, "torch": torch.__version__}

    def open(self, layer: Layer) -> None:
        torch, k, n = self._torch, layer.k, layer.n
        kind = getattr(torch, layer.dtype)
        group = 0 if layer.group_size == -1 else layer.group_size
        torch.manual_seed(0)
        self._x = torch.randn(max(layer.ms), k, device="cuda", dtype=kind)
        with torch.device("cuda"):
            module = self._make_layer(
                shape_n=n, shape_k=k, weight_config={"dtype": "int4", "group_size": group}, torch_dtype=kind
            )
        groups = k // group if group else 1
        scale = (torch.rand(n, groups, device="cuda") * 0.01 + 0.005).to(kind)
        tensors = {"weight": self._random_words((n, k // 8)), "weight_scale": scale}
        module.load_from_tensors(tensors)
        self._columns = slice(None, None, max(1, n // _CHECKED_COLUMNS))
        dense = module.weight_schema.dequant_tensors(tensors)
        rows = self._x[:_CHECKED_ROWS].double()
        self._reference = rows @ dense[self._columns].double().t()
        del dense
        module.transform()
        self._config = module.humming_config
        # The library's own choice is a list of M ranges with a kernel each, and its first call compiles all
        # of them. Only the ranges that are measured are kept: the same kernels, some 8 instead of 33.
        ranges = [r for r in self._choose(self._config) if any(r[0] < m <= r[1] for m in layer.ms)]
        self._tuning = json.dumps(ranges)
        weight, scales = module.weight.data, module.weight_scale.data
        self._copies = [{"weight": weight, "weight_scale": scales, "locks": module.locks}]
        bytes_each = weight.nbytes + scales.nbytes
        for _ in range(plan_copies(bytes_each) - 1):
            random = self._random_words((weight.nbytes // 4,)).view(weight.dtype).view(weight.shape)
            self._copies.append(
                {"weight": random, "weight_scale": scales.clone(), "locks": torch.zeros_like(module.locks)}
            )
        self._compile(min(layer.ms))
        torch.cuda.synchronize()

    def _random_words(self, shape: tuple[int, ...]) -> Any:
        torch = self._torch
        words = torch.empty(shape, device="cuda", dtype=torch.int32)
        return words.random_(-(2**31), 2**31 - 1)

    def _compile(self, m: int) -> None:
        """The first call compiles every kernel. Without a usable NVRTC, try nvcc once."""
        out = self._torch.empty(m, self._config.shape_n, device="cuda", dtype=self._x.dtype)
        try:
            self._forward(0, self._x[:m], out)
        except Exception:
            if os.environ.get("HUMMING_COMPILER"):
                raise
            os.environ["HUMMING_COMPILER"] = "nvcc"
            self._forward(0, self._x[:m], out)
        self.version["compiler"] = os.environ.get("HUMMING_COMPILER", "nvrtc")

    def _forward(self, i: int, x: Any, out: Any) -> None:
        self._run(self._config, inputs=x, outputs=out, tuning_config=self._tuning, **self._copies[i])

    def measure(self, variant: str, m: int, options: dict[str, Any]) -> tuple[Measurement, str | None]:
        torch = self._torch
        x = self._x[:m]
        out = torch.full((m, self._config.shape_n), float("nan"), device="cuda", dtype=x.dtype)
        self._forward(0, x, out)
        want = self._reference[:m]
        got = out[:_CHECKED_ROWS, self._columns].double()
        error = float((got - want).norm() / want.norm())
        limit = TOLERANCE[str(x.dtype).removeprefix("torch.")]
        if not error <= 2 * limit:
            return Measurement(None, error, f"wrong result: error {error:.2e} against float64"), None

        def launch(i: int) -> None:
            self._forward(i, x, out)

        timing = time_launches(launch, len(self._copies), self._timer, **options)
        return Measurement(timing, error, None), None

    def close(self) -> None:
        self._copies, self._x, self._reference = [], None, None
        self._torch.cuda.empty_cache()


def make(name: str) -> Library:
    """The library called `name`: ``ours``, ``cublas`` or ``humming``. Raises `Missing`."""
    if name == "ours":
        return Ours()
    if name == "humming":
        return Humming()
    if name != "cublas":
        raise ValueError(f"library is {name!r}; it must be ours, cublas or humming")
    try:
        return CublasTorch()
    except Missing:
        return CublasDirect()


def _import_torch() -> Any:
    try:
        import torch
    except (ImportError, OSError) as error:
        raise Missing(f"PyTorch does not import: {_first_line(error)}") from None
    if not torch.cuda.is_available():
        raise Missing("PyTorch sees no CUDA device")
    return torch


def _import_cupy() -> Any:
    try:
        current_device()
    except DeviceError as error:
        raise Missing(_first_line(error)) from None
    return import_cupy()


def _free_cupy() -> None:
    import_cupy().get_default_memory_pool().free_all_blocks()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
