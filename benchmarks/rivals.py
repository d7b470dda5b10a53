"""What marlin-jit is compared with, each behind the same four calls.

A library is a `Library`: it opens a layer, measures one of its variants at one M, closes the layer. A library
that is not installed raises `Missing` with the reason, which becomes a row in the results.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from marlin_jit._cupy import import_cupy
from marlin_jit.ahead import warmup
from marlin_jit.bench import VARIANTS, DenseLayer, Measurement, Problem, measure
from marlin_jit.device import current_device
from marlin_jit.errors import CompileError, DeviceError
from marlin_jit.jit import OVERLAP
from marlin_jit.rivals import Humming, Layer, Missing, TorchTimer, first_line, import_torch
from marlin_jit.timing import CupyTimer, plan_copies, time_launches


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
        for symmetric in {VARIANTS[variant].symmetric for variant in layer.variants}:
            problem.weights(symmetric)
        self._compile(layer.dtype, problem.group_size)
        _import_cupy().cuda.Device().synchronize()

    def _compile(self, dtype: str, group_size: int) -> None:
        try:
            warmup(dtypes=[dtype], group_sizes=[group_size])
        except CompileError as error:
            # The measurements that need that kernel meet the same error and report it.
            print(error)

    def measure(self, variant: str, m: int, options: dict[str, Any]) -> tuple[Measurement, str | None]:
        assert self._problem is not None
        chosen = VARIANTS[variant]
        result = measure(self._problem, chosen, m, self._timer, **options)
        asked = chosen.kernel or chosen.path
        if asked is not None:
            return result, asked
        from marlin_jit.dispatch import explain

        why = explain(self._problem.x[:m], self._problem.weights(chosen.symmetric)[0])
        return result, str(getattr(why, "path", why)).splitlines()[0]

    def close(self) -> None:
        self._problem = None
        _free_cupy()


class OursSingle(Ours):
    """The same without launches that overlap: what a product takes that stands alone between others' work.

    Kernels read the switch as they are loaded, so it takes a process of its own.
    """

    def __init__(self) -> None:
        os.environ[OVERLAP] = "0"
        super().__init__()
        self.version[OVERLAP] = "0"

    def _compile(self, dtype: str, group_size: int) -> None:
        """Nothing: the process of `Ours` compiles the same kernels, and the disk cache is shared."""


class CublasTorch:
    """cuBLAS's dense half-precision GEMM through PyTorch.

    Two variants, since cuBLAS's speed depends on the layout: ``linear`` has the weight as [N, K], which is
    how frameworks keep a linear layer; ``matmul`` has it as [K, N].
    """

    def __init__(self) -> None:
        torch = import_torch()
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


def make(name: str) -> Library:
    """The library called `name`: ``ours``, ``ours_single``, ``cublas`` or ``humming``. Raises `Missing`."""
    libraries: dict[str, Callable[[], Library]] = {
        "ours": Ours,
        "ours_single": OursSingle,
        "humming": Humming,
    }
    if name in libraries:
        return libraries[name]()
    if name != "cublas":
        raise ValueError(f"library is {name!r}; it must be {', '.join(libraries)} or cublas")
    try:
        return CublasTorch()
    except Missing:
        return CublasDirect()


def _import_cupy() -> Any:
    try:
        current_device()
    except DeviceError as error:
        raise Missing(first_line(error)) from None
    return import_cupy()


def _free_cupy() -> None:
    import_cupy().get_default_memory_pool().free_all_blocks()
