"""Another library's INT4 GEMM on a layer of ours, by the method of `marlin_jit.timing`.

For ``marlin-jit bench --roofline`` and for ``benchmarks/``. Nothing here is needed to multiply: PyTorch and
humming-kernels are imported when they are asked for, and `Missing` says that they are not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from marlin_jit.bench import TOLERANCE, Measurement
from marlin_jit.timing import plan_copies, time_launches

__all__ = ["Humming", "Layer", "Missing", "TorchTimer", "first_line", "import_torch"]

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


class TorchTimer:
    """`marlin_jit.timing.Timer` for PyTorch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.synchronize()
        self.stream = torch.cuda.Stream()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self.stream):
            body()

        def replay() -> None:
            with self._torch.cuda.stream(self.stream):
                graph.replay()

        return replay

    def run(self, body: Callable[[], None]) -> None:
        with self._torch.cuda.stream(self.stream):
            body()

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def elapsed_us(self, start: Any, stop: Any) -> float:
        return 1000.0 * float(start.elapsed_time(stop))

    def synchronize(self) -> None:
        self.stream.synchronize()


class Humming:
    """humming-kernels: 4-bit weights with half-precision activations, its own choice of kernels.

    The layer is made like one loaded from a checkpoint: random offset-binary codes and group scales, through
    the library's own `transform`. The further copies are random words of the transformed layout, every one of
    which is a valid weight there. Each copy has stream-K locks of its own, as each layer of a model has.
    """

    def __init__(self) -> None:
        torch = import_torch()
        try:
            import humming
            from humming.forward import humming_forward
            from humming.layer import HummingLayer
            from humming.tune import get_heuristics_config
        except (ImportError, OSError, RuntimeError) as error:
            raise Missing(f"humming-kernels does not import: {first_line(error)}") from None
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


def import_torch() -> Any:
    """PyTorch, with a device. Raises `Missing`."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise Missing(f"PyTorch does not import: {first_line(error)}") from None
    if not torch.cuda.is_available():
        raise Missing("PyTorch sees no CUDA device")
    return torch


def first_line(error: BaseException) -> str:
    """What an error says, for a line of a table."""
    return (str(error).splitlines() or [type(error).__name__])[0]
